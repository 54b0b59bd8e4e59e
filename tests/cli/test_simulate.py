"""`pointsman simulate`: from options to a report, and errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.errors import CommandError
from pointsman.cli.simulation import seconds, service_of_options, workload_of_options
from pointsman.sim.devices import DEVICES
from pointsman.sim.fleet import ROUTINGS
from pointsman.sim.shapes import SHAPES
from pointsman.sim.step_time import StepLoad
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.cli.test_capacity import profile

Run = Callable[..., Finished]
ROOT = Path(__file__).parents[2]
SHORT_RUN = ("--requests", "40")
RETAINING = ("--eviction", "retention")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twenty requests, one a second."""
    path = tmp_path / "trace.csv"
    rows = (f"2023-11-16 18:00:{second:02}.0,{100 + 40 * second},{10 + second}\n" for second in range(20))
    path.write_text(HEADER + "".join(rows))
    return path


def report(finished: Finished) -> dict[str, Any]:
    assert finished.code == 0, finished.err
    assert finished.err == ""
    (line,) = finished.json_lines
    return line


# ---------------------------------------------------------------------- what is printed


def test_a_report_begins_with_kv_blocks_and_warns_if_uncalibrated(pointsman: Run) -> None:
    finished = pointsman("simulate", *SHORT_RUN, "--ttft-target", "500ms", "--itl-target", "1s", "--price-per-hour", 2)
    assert finished.code == 0, finished.err
    lines = finished.out.splitlines()
    assert "KV blocks of 16 tokens" in lines[0]
    assert "weights 14.96 GiB" in finished.out
    assert "calibrate with a log" in " ".join(finished.out.split())
    assert "40 arrived, 40 finished" in finished.out
    for word in ("TTFT", "ITL", "goodput", "500 ms", "price"):
        assert word in finished.out
    assert max(map(len, lines)) <= 100


def test_the_json_report_is_one_line(pointsman: Run, trace: Path) -> None:
    found = report(pointsman("simulate", "--trace", trace, "--json", "--num-blocks", 500, "--ttft-target", "2s"))
    assert next(iter(found)) == "kv_blocks"
    assert found["kv_blocks"]["number"] == found["config"]["num_blocks"] == 500
    assert "as given" in found["kv_blocks"]["text"]
    assert found["counts"]["arrived"] == found["counts"]["finished"] == 20
    assert found["counts"]["generated_tokens"] == sum(10 + second for second in range(20))
    assert found["goodput"]["share"]["value"] == 1.0
    assert 0 < found["ttft"]["p50"]["value"] < 0.2
    assert 19 < found["seconds"]["value"] < 20


def test_simulate_warns_about_loads_beyond_the_profile(pointsman: Run, trace: Path, tmp_path: Path) -> None:
    profile(max_rows=1).save(tmp_path / "profile.json")
    given = ("simulate", "--trace", trace, "--profile", tmp_path / "profile.json", "--rate", 50, "--json")
    notes = report(pointsman(*given))["notes"]
    (note,) = [note for note in notes if note.startswith("Step times are extrapolated beyond those of log.jsonl: ")]
    assert "% of the simulated time has more requests in a step than its 1, " in note
    assert "% of the simulated time has more positions read in a step than its 1,000" in note
    profile(max_rows=1000).save(tmp_path / "profile.json")
    assert not any("extrapolated" in note for note in report(pointsman(*given))["notes"])


def test_html_and_perfetto_files_are_written(pointsman: Run, tmp_path: Path) -> None:
    page, perfetto = tmp_path / "page.html", tmp_path / "trace.json"
    finished = pointsman("simulate", *SHORT_RUN, "--html", page, "--perfetto", perfetto)
    assert finished.code == 0, finished.err
    text = page.read_text()
    HTMLParser().feed(text)
    assert "KV blocks of 16 tokens" in text
    assert "calibrate with a log" in text
    assert json.loads(perfetto.read_text())["traceEvents"]


def test_simulate_lists_all_models_devices_and_presets(pointsman: Run) -> None:
    finished = pointsman("simulate", "--list")
    assert finished.code == 0
    for name in (*SHAPES, *DEVICES, *ROUTINGS, "low-latency", "nano-vllm", "datasheet"):
        assert name in finished.out
    helped = " ".join(pointsman("simulate", "--help").out.split())
    assert f"{', '.join(list(ROUTINGS)[:-1])} or {list(ROUTINGS)[-1]}" in helped


def test_simulate_help_begins_with_the_main_options(pointsman: Run) -> None:
    out = pointsman("simulate", "--help").out
    assert "Main options:" in out
    assert out.index("--trace") < out.index("--ttft-target") < out.index("What arrives:") < out.index("--order")
    assert "Other:" in out  # --help itself
    assert out.split("Other:")[1].count("--") == 1


# ---------------------------------------------------------------------- what arrives, and what serves it


def test_simulate_speeds_up_and_limits_a_trace(pointsman: Run, trace: Path) -> None:
    found = report(pointsman("simulate", "--trace", trace, "--rate", 4, "--limit", 13, "--json"))
    assert found["counts"]["arrived"] == 13
    assert 3 < found["seconds"]["value"] < 3.5
    assert found["speed"] == 4


def test_the_simulated_scheduler_has_the_given_knobs(pointsman: Run, trace: Path) -> None:
    given = ("--preset", "vllm", "--max-num-seqs", 3, "--decode-reserve", "mean", "--no-enable-prefix-caching")
    config = report(pointsman("simulate", "--trace", trace, "--json", *given))["config"]
    assert config["order"] == "fcfs-front"
    assert (config["max_num_seqs"], config["decode_reserve"], config["enable_prefix_caching"]) == (3, "mean", False)


def test_each_simulated_user_has_at_most_one_running_request(pointsman: Run) -> None:
    found = report(pointsman("simulate", *SHORT_RUN, "--users", 3, "--think", "exponential:0.1", "--json"))
    assert found["counts"]["finished"] == 40
    assert found["running"]["max"]["value"] <= 3


def test_sessions_with_retention_keep_their_prefixes(pointsman: Run) -> None:
    """While a user thinks, the last turns of other sessions fill the pool."""
    lengths = ("--prompt-tokens", 64, "--new-tokens", 64, "--output-tokens", 16, "--max-model-len", 512)
    arrives = ("--sessions", 100, "--turns", 2, "--think", 10, "--arrivals", "poisson:2", "--num-blocks", 130)
    hits = []
    for options in ((), ("--retention", 60)):
        policy = ("--eviction", "retention:share=0.9", *options)
        found = report(pointsman("simulate", *lengths, *arrives, *policy, "--json"))
        hits.append(found["prefix_hit_rate"]["value"])
    assert hits[0] < 0.1 and hits[1] > 0.3, hits


def test_later_turns_of_sessions_hit_the_prefix_cache(pointsman: Run) -> None:
    found = report(pointsman("simulate", "--sessions", 5, "--turns", 4, "--json"))
    assert found["counts"]["finished"] == 20
    assert found["prefix_hit_rate"]["value"] > 0.5


def test_several_replicas_with_a_routing_rule_are_simulated(pointsman: Run, trace: Path) -> None:
    found = report(pointsman("simulate", "--trace", trace, "--replicas", 3, "--routing", "least-loaded", "--json"))
    assert found["num_replicas"] == 3
    assert found["counts"]["finished"] == 20


def test_layers_with_windows_are_kept_in_groups_unless_disabled(tmp_path: Path) -> None:
    window, full = ("window", 1024), ("full", 0)
    grouped = service_of_options({"model": "gemma-3-27b-it"}, None)
    assert grouped.config.kv_groups == (window,) * 6 + (full,)
    assert "6 groups of a window of 1024" in grouped.kv_text and "of requests of 131,072 tokens" in grouped.kv_text
    plain = service_of_options({"model": "gemma-3-27b-it", "disable_hybrid_kv_cache_manager": True}, None)
    assert not plain.config.kv_groups
    assert grouped.config.num_blocks == pytest.approx(6.2 * plain.config.num_blocks, rel=1e-3)
    assert grouped.sized(grouped.config.replace(num_blocks=1)) == grouped.config
    given = service_of_options({"model": "gpt-oss-20b", "num_blocks": 5000}, None)
    assert given.config.kv_groups == (("window", 128), full) and "1 group of a window of 128" in given.kv_text
    profile(max_rows=1).save(tmp_path / "profile.json")
    with pytest.raises(CommandError, match="no effect without a model's layers"):
        service_of_options({"profile": str(tmp_path / "profile.json"), "disable_hybrid_kv_cache_manager": True}, None)


def test_host_memory_holds_blocks_of_the_groups_of_layers() -> None:
    offload = {"model": "gemma-3-27b-it", "kv_offload_bytes": "64GiB"}
    grouped = service_of_options(offload, None)
    plain = service_of_options({**offload, "disable_hybrid_kv_cache_manager": True}, None)
    assert grouped.host_memory is not None and plain.host_memory is not None
    assert plain.host_memory.bytes_per_token == pytest.approx(6.2 * grouped.host_memory.bytes_per_token)


MIXTURE = ("--model", "Qwen3-30B-A3B", *SHORT_RUN)


def test_data_parallel_ranks_of_experts_share_them_and_step_together(pointsman: Run) -> None:
    given = {"model": "Qwen3-30B-A3B", "data_parallel_size": 4}
    one, four = (service_of_options({**given, "data_parallel_size": count}, None) for count in (1, 4))
    assert one.kv is not None and four.kv is not None
    assert four.kv.weights < 0.4 * one.kv.weights and four.topology.is_lockstep
    found = report(pointsman("simulate", *MIXTURE, "--data-parallel-size", 4, "--json"))
    assert "4 data parallel ranks that step together" in found["service"]
    assert [each["name"] for each in found["engines"]] == [f"rank {rank}" for rank in range(4)]
    assert sum(each["num_requests"] for each in found["engines"]) == 40
    assert all(0 < each["busy"] <= 1 and each["max_kv_cache_usage"] > 0 for each in found["engines"])
    whole = service_of_options({**given, "enable_expert_parallel": True}, None)
    load = StepLoad.of_rows([(500, 1)] * 8)
    assert whole.step_time.of_step(load) > four.step_time.of_step(load), "the device with the most work is waited for"


def test_data_parallel_ranks_of_a_dense_model_are_independent(pointsman: Run) -> None:
    dense = service_of_options({"data_parallel_size": 2}, None)
    assert not dense.topology.is_lockstep and "2 data parallel ranks" in dense.title
    assert dense.config.num_blocks == service_of_options({}, None).config.num_blocks
    text = pointsman("simulate", *SHORT_RUN, "--data-parallel-size", 2).out
    assert "rank 0" in text and "rank 1" in text


def test_prefill_and_decode_engines_are_simulated_with_transfers(pointsman: Run) -> None:
    roles = ("--prefill-replicas", 1, "--decode-replicas", 2)
    found = report(pointsman("simulate", *SHORT_RUN, *roles, "--json"))
    assert "1 prefill and 2 decode engines" in found["service"]
    assert [each["name"] for each in found["engines"]] == ["prefill 0", "decode 0", "decode 1"]
    assert [each["num_requests"] for each in found["engines"]] == [40, 20, 20]
    assert found["kv_transfers"]["num_transfers"] == found["counts"]["finished"] == 40
    slow = (*roles, "--kv-transfer-bandwidth", "1GB", "--kv-transfer-latency", "5ms")
    slower = report(pointsman("simulate", *SHORT_RUN, *slow, "--json"))
    assert slower["ttft"]["mean"]["value"] > found["ttft"]["mean"]["value"] + 0.01
    assert slower["counts"]["generated_tokens"] == found["counts"]["generated_tokens"]
    text = pointsman("simulate", *SHORT_RUN, *roles, "--routing", "least-loaded").out
    assert "40 KV transfers took" in text


def test_capacity_and_tune_accept_engines_of_every_kind(pointsman: Run) -> None:
    sizes = ("--prompt-tokens", 200, "--output-tokens", 20, "--requests", 30, "--ttft-target", "300ms")
    for kind in (("--prefill-replicas", 1, "--decode-replicas", 1), ("--data-parallel-size", 2)):
        finished = pointsman("capacity", *sizes, *kind, "--samples", 2)
        assert finished.code == 0 and "requests/s" in finished.out, finished.err


def test_tensor_parallelism_increases_the_number_of_blocks() -> None:
    one, two = (service_of_options({"tensor_parallel": count}, None) for count in (1, 2))
    assert one.kv is not None and two.kv is not None
    assert one.config.num_blocks == one.kv.num_blocks < two.config.num_blocks
    assert "2 x" in two.title
    assert (
        service_of_options({}, "textbook").config.num_blocks == one.config.num_blocks
    )  # a preset without limits of a step


def test_a_workload_can_be_limited_to_a_number_of_requests() -> None:
    assert workload_of_options({}, 7).at_speed(1).num_requests == 7
    sessions = workload_of_options({"sessions": 1000, "turns": "4"}, 80)
    assert sessions.at_speed(1).num_requests == 80
    assert sessions.rate == pytest.approx(16)
    times = [time for time, _ in sessions.at_speed(2).first_arrivals()]
    assert times == pytest.approx([time / 2 for time, _ in sessions.at_speed(1).first_arrivals()])


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("2s", 2), ("1.5 s", 1.5), ("250us", 25e-5), (" 2 M", 120), ("1h", 3600)]
)
def test_durations_are_parsed_with_their_units(text: str, value: float) -> None:
    assert seconds("ttft_target", text) == pytest.approx(value)


# ---------------------------------------------------------------------- bad input

APART = ("--prefill-replicas", "1", "--decode-replicas", "1")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--routing", "any", "--replicas", "2"], ["'any'", "round-robin"]),
        (["--routing", "round-robin"], ["--routing", "--replicas 2"]),
        (["--prefill-replicas", "1"], ["prefill_replicas is 1 and decode_replicas is 0", "give both"]),
        (["--data-parallel-size", "0"], ["data_parallel_size is 0", "at least 1"]),
        (["--enable-expert-parallel"], ["Llama-3.1-8B has no experts to divide"]),
        (["--kv-transfer-bandwidth", "1GB"], ["--kv-transfer-bandwidth has no effect", "--prefill-replicas"]),
        ([*APART, "--kv-transfer-bandwidth", "fast"], ["kv_transfer_bandwidth 'fast' is not a size"]),
        ([*APART, "--no-enable-prefix-caching"], ["enable_prefix_caching is off", "turn enable_prefix_caching on"]),
        ([*APART, "--kv-offload-bytes", "1GiB"], ["engines that transfer KV are simulated without host memory"]),
        ([*APART, "--film", "film"], ["--film records one scheduler", "2 engines"]),
        (["--model", "Mixtral-8x7B", "--device", "cpu", "--data-parallel-size", "2"], ["cpu has no link to peers"]),
        (["--replicas", "0"], ["--replicas is 0", "at least 1"]),
        (["--preset", "best"], ["'best'", "low-latency"]),
        (["--gpu-memory-utilization", "2"], ["gpu_memory_utilization is 2", "at most 1"]),
        (["--gpu-memory-utilization", "0.5", "--num-blocks", "9"], ["--gpu-memory-utilization", "one of them"]),
        (["--max-model-len", "200000"], ["--max-model-len is 200000", "131072"]),
        (["--arrivals", "poison:4"], ["'poison'", "poisson"]),
        (["--ttft-target", "5 parsec"], ["--ttft-target is '5 parsec'", "500ms"]),
        (["--itl-target", "0"], ["--itl-target is '0'", "above 0"]),
        (["--rate", "0"], ["--rate is 0", "above 0"]),
        (["--requests", "0"], ["--requests is 0", "at least 1"]),
        (["--users", "0"], ["--users is 0"]),
        (["--seed", "-1"], ["--seed is -1", "at least 0"]),
        (["--limit", "5"], ["--limit", "--trace"]),
        (["--think", "5"], ["--think", "--users or --sessions"]),
        (["--retention", "5", *RETAINING], ["--retention", "--sessions"]),
        (["--sessions", "5", "--retention", "-1", *RETAINING], ["--retention is -1", "at least 0"]),
        (["--sessions", "5", "--retention", "nan", *RETAINING], ["--retention is nan", "at least 0"]),
        (["--sessions", "5", "--retention", "inf", *RETAINING], ["--retention is inf", "at least 0"]),
        (["--sessions", "5", "--retention", "5"], ["--retention is 5", "lru does not read it", "--eviction retention"]),
        (["--users", "5", "--arrivals", "poisson:1"], ["--arrivals", "--users", "one of them"]),
        (["--trace", "t", "--requests", "5"], ["--requests", "--trace", "--limit"]),
        (["--trace", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--html", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
        (["--price-per-hour", "nan"], ["--price-per-hour is nan"]),
    ],
)
def test_bad_simulate_options_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("simulate", *args), *words)


def test_the_error_names_the_broken_line_of_a_trace(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "broken.csv"
    path.write_text(HEADER + "2023-11-16 18:00:00.0,100,10\n2023-11-16 18:00:01.0,many,10\n")
    check_refused(pointsman("simulate", "--trace", path), str(path), "line 3", "'many'", "whole number")


def test_a_trace_without_output_is_refused(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "failed.csv"
    path.write_text(HEADER + "2023-11-16 18:00:00.0,100,0\n")
    check_refused(
        pointsman("simulate", "--trace", path),
        str(path),
        "no request has output tokens. Of 1 rows read, 1 is left out: 1 without output tokens",
    )


def test_the_report_counts_and_names_prompts_that_are_too_long(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    rows = [(0, 200_000, 10), (1, 100, 10), (2, 100, 0), (3, 300_000, 1)]
    path.write_text(HEADER + "".join(f"2023-11-16 18:00:0{at}.0,{prompt},{out}\n" for at, prompt, out in rows))
    finished = pointsman("simulate", "--trace", path)
    assert finished.code == 0
    printed = " ".join(finished.out.split())
    assert "Of 4 rows read, 1 is left out: 1 without output tokens." in printed
    assert "can never run: 2 of 3" in printed
    assert "'request-0' refused: the prompt has 200000 tokens" in printed
    assert "shorten the prompt to 131071 tokens" in printed
    refused = report(pointsman("simulate", "--trace", path, "--json"))["refused"]
    assert [each["request_id"] for each in refused] == ["request-0", "request-2"]


def test_simulate_fails_if_all_requests_are_refused(pointsman: Run) -> None:
    finished = pointsman("simulate", *SHORT_RUN, "--prompt-tokens", 300_000)
    assert finished.code == 2
    (error,) = finished.errors
    for words in ("all 40 requests are refused", "300000 tokens", "131072", "shorten the prompt"):
        assert words in error


# ---------------------------------------------------------------------- a process of its own


@pytest.mark.e2e
def test_the_built_in_example_needs_no_pytorch() -> None:
    program = (
        "import sys\nfrom pointsman.cli import main\n"
        "try:\n    main(['simulate'])\nfinally:\n"
        "    print('loaded:', [m for m in ('torch', 'transformers', 'numba', 'fastapi', 'scipy') if m in sys.modules])"
    )
    started = time.monotonic()
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert "1,000 arrived, 1,000 finished" in run.stdout
    assert run.stdout.rstrip().endswith("loaded: []")
    assert time.monotonic() - started < 30  # 2 s on a quiet machine


@pytest.mark.e2e
def test_ctrl_c_prints_the_report_so_far() -> None:
    command = [sys.executable, "-m", "pointsman", "simulate", "--requests", "20000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("load"):
            assert process.poll() is None
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err == ""
    assert "The simulation was interrupted" in out
    assert "TTFT" in out


SHORT_OF_BLOCKS = ("--device", "4090", "--num-blocks", "300", "--output-tokens", "lognormal:600,0.6", *SHORT_RUN)


def test_kv_of_preempted_requests_is_swapped_to_host_memory(pointsman: Run) -> None:
    swap = ("--kv-offload-bytes", "16GiB", "--preemption-mode", "swap")
    plain = json.loads(pointsman("simulate", *SHORT_OF_BLOCKS, "--json").out)["counts"]
    counts = json.loads(pointsman("simulate", *SHORT_OF_BLOCKS, *swap, "--json").out)["counts"]
    assert (plain["copied_blocks"], plain["preemption_decisions"]) == ({}, {})
    assert counts["recomputed_tokens"] < 0.1 * plain["recomputed_tokens"]
    assert counts["copied_blocks"]["restored"] > 20 < counts["copied_blocks"]["offloaded"]
    assert counts["preemption_decisions"]["swap"] > 5
    text = pointsman("simulate", *SHORT_OF_BLOCKS, *swap).out
    assert f"{counts['copied_blocks']['offloaded']:,} blocks to host memory" in text


def test_impossible_host_memory_is_refused(pointsman: Run) -> None:
    words = "there is no host memory to swap to; give kv_offload_bytes"
    check_refused(pointsman("simulate", *SHORT_RUN, "--preemption-mode", "swap"), words)
