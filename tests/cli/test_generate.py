"""`pointsman generate` and `pointsman replay` on a tiny model: their output, and the files that they leave."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile

import pytest
from _server_process import wait_until

import pointsman as package
from pointsman.cli.options import GENERATE_HELP, SERVE_HELP, Panels
from tests.cli.conftest import Finished
from tests.forked_engines import start_command

Run = Callable[..., Finished]
ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "pointsman" / "engine" / "demo" / "model.safetensors"
# Six requests of 40 + 60 tokens need 42 blocks of 16; with 18 they cannot all stay.
PRESSURE = ["--num-blocks", 18, "--max-tokens", 60, "--ignore-eos"]


def prompts_file(tmp_path: Path, count: int = 6) -> Path:
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(f"prompt number {index} ".ljust(40, "abcdefgh"[index]) for index in range(count)))
    return path


def test_version_and_help_are_printed(pointsman: Run) -> None:
    assert pointsman("--version").out == f"pointsman {package.__version__}\n"
    assert "generate" in pointsman().out
    help_text = pointsman("generate", "--help").out
    for knob in ("--max-num-batched-tokens", "--no-enable-prefix-caching", "--full-sequence-must-fit", "--watermark"):
        assert knob in help_text


@pytest.mark.parametrize(("command", "panels"), [("generate", GENERATE_HELP), ("serve", SERVE_HELP)])
@pytest.mark.parametrize("columns", [80, 120])
def test_help_pages_begin_with_the_ten_main_options_and_group_the_others(
    pointsman: Run, monkeypatch: pytest.MonkeyPatch, command: str, panels: Panels, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    out = pointsman(command, "--help").out
    page = re.split(r"^(\S.*):$", out, flags=re.MULTILINE)[1:]
    shown = {
        title: re.findall(r"^  (-.*)", text, re.MULTILINE) for title, text in zip(page[::2], page[1::2], strict=True)
    }
    assert list(shown) == [*panels, "Other"]
    assert len(shown["Main options"]) == 10
    assert [line.split()[0] for line in shown["Other"]] == ["--help"], "an option without a panel"
    assert len(re.findall(r"^  (?:-\w, )?--", out, re.MULTILINE)) == sum(map(len, shown.values())) > 40
    # One option's name with its negation is longer than a narrow terminal; it has a line of its own, uncut.
    too_long = [line for line in out.splitlines() if len(line) > columns]
    assert all(line.startswith("  --long-prefill-token-threshold-adaptive / --no-") for line in too_long)
    assert "…" not in out and "..." not in out.replace("RUNNING:DRAFTS,...", "")


def test_the_same_seed_gives_the_same_text_despite_preemptions(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = prompts_file(tmp_path)
    roomy, tight, other = (
        pointsman("generate", "--model", model, "--prompts", path, "--json", *PRESSURE, *more)
        for more in (["--num-blocks", 100], [], ["--seed", 1])
    )
    assert roomy.summary["preemptions"] == 0
    assert tight.summary["preemptions"] > 0
    assert tight.summary["recomputed_tokens"] > 0
    assert tight.summary["peak_kv_usage"] > 0.9
    assert tight.summary["deferrals"]
    texts = [
        {name: line["token_ids"] for name, line in finished.requests.items()} for finished in (roomy, tight, other)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_generate_prints_only_json_lines_with_the_json_option(pointsman: Run, model: str, tmp_path: Path) -> None:
    finished = pointsman("generate", "--model", model, "--prompts", prompts_file(tmp_path), "--json", *PRESSURE)
    assert finished.code == 0 and not finished.errors
    assert [line["type"] for line in finished.json_lines] == ["request"] * 6 + ["summary"]
    request = finished.requests["prompt-3"]
    assert request["prompt"].startswith("prompt number 3")
    assert (request["finish_reason"], request["finish_detail"]) == ("length", "max_tokens")
    assert (request["num_prompt_tokens"], request["num_output_tokens"]) == (40, 60) == (40, len(request["token_ids"]))
    assert 0 < request["time_to_first_token"] <= request["latency"] <= finished.summary["seconds"]
    assert finished.summary["generated_tokens"] == 6 * 60
    assert finished.summary["prompt_tokens"] == 6 * 40


def test_a_shared_prefix_is_found_in_the_prefix_cache(pointsman: Run, model: str) -> None:
    shared = "the same beginning of both prompts, long enough for three blocks"
    prompts = ["--prompt", shared + " one", "--prompt", shared + " two"]
    args = ["generate", "--model", model, "--max-tokens", 4, "--json", *prompts]
    assert pointsman(*args).summary["prefix_hits"] == len(shared) // 16 * 16
    assert pointsman(*args, "--no-enable-prefix-caching").summary["prefix_hits"] == 0


def test_plain_lines_are_printed_if_stdout_is_not_a_terminal(pointsman: Run, model: str, tmp_path: Path) -> None:
    finished = pointsman("generate", "--model", model, "--prompts", prompts_file(tmp_path), *PRESSURE)
    assert finished.code == 0
    lines = finished.out.splitlines()
    assert sum(line.startswith("prompt-") and "length (max_tokens), 60 tokens" in line for line in lines) == 6
    assert any(re.match(r"prompt-\d length \(max_tokens\), 60 tokens, preempted \d times?: ", line) for line in lines)
    status = next(line for line in lines if " running " in line)
    for word in ("waiting", "KV", "tokens/s", "preemptions", "prefix hits"):
        assert word in status
    assert any(line.startswith("KV cache     18 blocks") for line in lines)
    assert "\x1b" not in finished.out


def test_prompts_are_read_from_standard_input(pointsman_process: Callable[..., Finished], model: str) -> None:
    args = ["generate", "--model", model, "--prompts", "-", "--max-tokens", 3, "--ignore-eos", "--json"]
    finished = pointsman_process(*args, stdin="one\r\n\ntwo\n")
    assert finished.code == 0, finished.err
    assert {line["prompt"] for line in finished.requests.values()} == {"one", "two"}


def test_settings_of_a_prompt_override_the_options(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "a", "request_id": "own", "max_tokens": 7, "temperature": 0, "ignore_eos": True, "tenant": "bob"},
        {"prompt": "a", "request_id": "option", "ignore_eos": True},
        {"prompt": "a", "request_id": "stops", "ignore_eos": True, "max_tokens": 300, "stop_token_ids": [*range(257)]},
        {"prompt": "a", "request_id": "later", "ignore_eos": True, "max_tokens": 9, "min_tokens": 8, "priority": 1},
    ]
    lines[1] |= {"ttft_target": 2.5, "retention": 30}
    recording = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    args = ["generate", "--model", model, "--prompts", path, "--max-tokens", 4, "--json", "--record", recording]
    finished = pointsman(*args)
    lengths = {name: line["num_output_tokens"] for name, line in finished.requests.items()}
    assert lengths == {"own": 7, "option": 4, "stops": 1, "later": 9}
    assert finished.requests["stops"]["finish_reason"] == "stop"
    assert "priorities are read only under --order priority" in finished.err
    calls = [json.loads(line) for line in recording.read_text().splitlines()]
    added = {call["request"]["request_id"]: call["request"] for call in calls if call.get("call") == "add"}
    assert [added[name].get("tenant") for name in ("own", "later")] == ["bob", ""]
    assert [added[name].get("ttft_target") for name in ("option", "later")] == [2.5, None]
    assert [added[name].get("retention") for name in ("option", "later")] == [30.0, None]


def test_a_stop_string_ends_the_text_before_it(pointsman: Run, model: str) -> None:
    command = ("generate", "--model", model, "--prompt", "abc", "--temperature", 0, "--max-tokens", 30, "--json")
    whole = pointsman(*command, "--ignore-eos").requests["prompt-0"]["text"]
    stop = whole[6:8]
    cut = pointsman(*command, "--ignore-eos", "--stop", stop, "--stop", "never seen").requests["prompt-0"]
    assert cut["finish_reason"] == "stop" and cut["text"] == whole[: whole.index(stop)]


def test_priority_decides_which_request_starts(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "abc", "request_id": f"p{priority}", "priority": priority} for priority in (2, 0, 1)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    args = ["generate", "--model", model, "--prompts", path, "--json", "--max-tokens", 5, "--max-num-seqs", 1]
    ended = {
        order: [line["request_id"] for line in pointsman(*args, "--ignore-eos", "--order", order).json_lines[:-1]]
        for order in ("fcfs", "priority")
    }
    assert ended == {"fcfs": ["p2", "p0", "p1"], "priority": ["p0", "p1", "p2"]}


# ---------------------------------------------------------------------- traces


def mooncake_file(tmp_path: Path) -> Path:
    """A Mooncake trace of three requests, 100 ms apart; the second prompt exceeds the model's maximum length."""
    path = tmp_path / "trace.jsonl"
    lengths = [(300, 20), (5000, 20), (310, 30)]
    path.write_text(
        "\n".join(
            json.dumps(
                {"timestamp": 100 * i, "input_length": n, "output_length": m, "hash_ids": list(range(-(-n // 512)))}
            )
            for i, (n, m) in enumerate(lengths)
        )
    )
    return path


def test_requests_of_a_trace_keep_their_lengths_and_shared_prefixes(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = mooncake_file(tmp_path)
    finished = pointsman("generate", "--model", model, "--trace", path, "--speed", 0, "--json")
    assert finished.code == 0 and not finished.errors
    assert finished.summary["finished"] == {"stop": 0, "length": 2, "abort": 0, "refused": 1, "error": 0}
    assert "5000 tokens" in finished.requests["trace-1"]["error"]
    first, last = finished.requests["trace-0"], finished.requests["trace-2"]
    assert (first["num_prompt_tokens"], first["num_output_tokens"]) == (300, 20)
    assert (last["num_prompt_tokens"], last["num_output_tokens"]) == (310, 30)
    assert last["num_cached_tokens"] == 288  # the full blocks of what both begin with
    limited = pointsman("generate", "--model", model, "--trace", path, "--limit", 1, "--max-tokens", 5, "--json")
    assert [line["num_output_tokens"] for line in limited.requests.values()] == [5]


def test_requests_of_a_trace_arrive_at_the_given_speed(pointsman: Run, model: str, tmp_path: Path) -> None:
    path = mooncake_file(tmp_path)
    slow = pointsman("generate", "--model", model, "--trace", path, "--speed", 0.25, "--json")
    assert slow.summary["seconds"] > 0.8  # the last one arrives after 0.2 / 0.25 seconds
    assert slow.requests["trace-2"]["time_to_first_token"] < 0.5


# ---------------------------------------------------------------------- recordings


@pytest.fixture
def recording(pointsman: Run, model: str, tmp_path: Path) -> Path:
    """The recording of a run with preemptions."""
    path = tmp_path / "run.recording.jsonl"
    args = ["generate", "--model", model, "--prompts", prompts_file(tmp_path), "--json", "--record", path, *PRESSURE]
    finished = pointsman(*args)
    assert finished.code == 0
    assert finished.summary["preemptions"] > 0
    return path


def test_a_recording_replays_without_a_difference(pointsman: Run, recording: Path) -> None:
    finished = pointsman("replay", recording)
    assert finished.code == 0
    assert "no difference" in finished.out
    steps = sum(json.loads(line).get("call") == "schedule" for line in recording.read_text().splitlines())
    assert finished.out.startswith(f"{steps} steps replayed")


def test_replay_reports_an_altered_decision_at_its_step(pointsman: Run, recording: Path) -> None:
    lines = [json.loads(line) for line in recording.read_text().splitlines()]
    schedules = [index for index, line in enumerate(lines) if line.get("call") == "schedule"]
    at = schedules[len(schedules) // 2]
    decision = lines[at]["decision"]
    decision["num_scheduled_tokens"][0] += 1
    recording.write_text("\n".join(json.dumps(line) for line in lines))
    finished = pointsman("replay", recording)
    assert finished.code == 1
    where, recorded, replayed = finished.out.splitlines()
    assert f"line {at + 1}: " in where
    assert f"step {lines[at]['step']}, in num_scheduled_tokens" in where
    assert recorded.startswith("recorded: ") and replayed.startswith("replayed: ")
    assert recorded.removeprefix("recorded: ") != replayed.removeprefix("replayed: ")
    assert finished.err == ""


def test_a_truncated_recording_is_replayed_up_to_its_last_line(pointsman: Run, recording: Path) -> None:
    recording.write_text(recording.read_text()[:-20])
    finished = pointsman("replay", recording)
    assert finished.code == 0
    assert "no difference up to the last line, which was cut off" in finished.out
    recording.write_text(recording.read_text() + "\n")
    finished = pointsman("replay", recording)
    assert finished.code == 2
    assert len(finished.errors) == 1 and str(recording) in finished.errors[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here is always full")
def test_a_recording_on_a_full_disk_fails_after_the_output(pointsman: Run, model: str) -> None:
    finished = pointsman("generate", "--model", model, "--prompt", "a", "--record", "/dev/full")
    assert finished.code == 1
    assert "No space left" in finished.errors[-1] and finished.out


# ---------------------------------------------------------------------- processes


@pytest.mark.e2e
def test_a_closed_stdout_prints_no_error(model: str) -> None:
    command = ["generate", "--model", model, "--prompt", "a", "--prompt", "b"]
    command += ["--json", "--ignore-eos", "--batching", "static"]
    unread, out = os.pipe()
    with TemporaryFile("w+") as err:
        process = start_command(*command, descriptors=[0, out, err.fileno()])
        os.close(out)
        os.close(unread)
        assert process.wait(timeout=60) == 1
        err.seek(0)
        said = err.read()
    assert "Traceback" not in said and "Exception ignored" not in said


@pytest.mark.e2e
def test_ctrl_c_ends_the_wait_for_an_arrival_and_prints_the_summary(model: str, tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    trace = tmp_path / "trace.jsonl"
    # The second request arrives after an hour, so the run would last that long.
    arrivals = [0, 3_600_000]
    trace.write_text("\n".join(json.dumps({"timestamp": t, "input_length": 9, "output_length": 9}) for t in arrivals))
    command = ["generate", "--model", model, "--trace", str(trace), "--json", "--record", str(recording)]
    output, theirs = os.pipe()
    with open(output) as lines, TemporaryFile("w+") as err:
        process = start_command(*command, descriptors=[0, theirs, err.fileno()])
        os.close(theirs)
        first = json.loads(lines.readline())  # the first request has ended, so the loop runs
        process.send_signal(signal.SIGINT)
        summary = json.loads(lines.read().splitlines()[-1])
        assert process.wait(timeout=60) == 130
        err.seek(0)
        assert "Traceback" not in err.read()
    assert first["request_id"] == "trace-0" and first["finish_reason"] == "length"
    assert summary["interrupted"] is True
    assert summary["finished"]["length"] == 1
    assert json.loads(recording.read_text().splitlines()[-1])  # closed whole


@pytest.mark.e2e
def test_ctrl_c_aborts_running_requests(pointsman: Run, model: str, tmp_path: Path) -> None:
    recording = tmp_path / "run.jsonl"
    prompts = tmp_path / "prompts.jsonl"
    # A request that ends at once shows that the others run; these continue for 500 steps each.
    short = {"prompt": "a", "max_tokens": 1, "ignore_eos": True}
    prompts.write_text("\n".join(json.dumps(short | {"max_tokens": length}) for length in (1, 500, 500, 500)))
    command = ["generate", "--model", model, "--prompts", str(prompts), "--json", "--record", str(recording)]
    command += ["--batching", "static", "--threads", "1"]
    out = tmp_path / "out"
    with out.open("w") as stdout:
        process = start_command(*command, descriptors=[0, stdout.fileno(), 2])
    try:
        wait_until(lambda: "\n" in out.read_text(), 60, "the first request has ended")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
    finally:
        process.kill()
    _, *aborted, summary = map(json.loads, out.read_text().splitlines())
    assert summary["finished"] == {"stop": 0, "length": 1, "abort": 3, "refused": 0, "error": 0}
    assert [line["finish_reason"] for line in aborted] == ["abort"] * 3
    assert summary["generated_tokens"] == 1 + sum(line["num_output_tokens"] for line in aborted)
    assert pointsman("replay", recording).code == 0


@pytest.mark.e2e
def test_generate_shows_the_run_live_on_a_terminal(model: str, tmp_path: Path) -> None:
    master, slave = pty.openpty()
    command = ["generate", "--model", model, "--prompts", str(prompts_file(tmp_path)), *map(str, PRESSURE)]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "30"}
    process = start_command(*command, descriptors=[slave] * 3, environment=environment)
    os.close(slave)
    shown = read_until_closed(master, seconds=120)
    assert process.wait(timeout=60) == 0
    for word in ("running", "waiting", "KV", "preemptions", "decoding", "blocks", "first token"):
        assert word in shown
    assert "\x1b[?25l" in shown and shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back


def read_until_closed(master: int, seconds: float) -> str:
    parts = []
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not select.select([master], [], [], 1.0)[0]:
            continue
        try:
            part = os.read(master, 65536)
        except OSError:  # the other side has closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    return b"".join(parts).decode(errors="replace")


@pytest.mark.e2e
@pytest.mark.skipif(not DEMO_MODEL.exists(), reason="the demo model is not in this checkout")
def test_generate_without_options_runs_the_demo(pointsman_process: Callable[..., Finished]) -> None:
    finished = pointsman_process("generate", "--json")
    assert finished.code == 0, finished.err
    requests = finished.requests.values()
    assert len(requests) >= 12
    assert all(line["finish_reason"] in ("stop", "length") and line["text"].strip() for line in requests)
    lengths = [line["num_prompt_tokens"] for line in requests]
    assert max(lengths) > 20 * min(lengths)
    assert finished.summary["prefix_hits"] > 0
    assert finished.summary["preemptions"] > 0


@pytest.mark.e2e
@pytest.mark.skipif(not DEMO_MODEL.exists(), reason="the demo model is not in this checkout")
def test_the_documented_command_preempts_requests_and_finishes_all(
    pointsman_process: Callable[..., Finished],
) -> None:
    page = ROOT / "docs" / "how_it_works" / "step.md"
    line = next(line for line in page.read_text().splitlines() if line.startswith("pointsman generate "))
    finished = pointsman_process(*shlex.split(line, comments=True)[1:])
    assert finished.code == 0, finished.err

    summary = re.search(r"^KV cache .*; (\d+) preemptions, (\d+) tokens computed again$", finished.out, re.MULTILINE)
    assert summary is not None, finished.out
    num_preemptions, num_recomputed = map(int, summary.groups())
    assert num_preemptions >= 3
    assert num_recomputed > 0
    ends = re.findall(
        r"^prompt-(\d+) (?:stop|length)[^,]*, (\d+) tokens(?:, preempted (\d+) times?)?:", finished.out, re.M
    )
    assert sorted(int(index) for index, _, _ in ends) == list(range(16))
    assert sum(int(times or 0) for _, _, times in ends) == num_preemptions
    assert all(int(tokens) > 0 for _, tokens, _ in ends)
