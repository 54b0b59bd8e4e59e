"""`pointsman vllm compare`: a recording with known step times, and recordings that cannot be compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.compare import _parse_setting
from pointsman.core import RecordingError, replay
from pointsman.traces import TraceError, read_measurements, read_observed, read_trace
from tests.cli.conftest import Finished
from tests.sim.observed_logs import STEP_TIME, WAY, observed_lines, write_observed

pytest.importorskip("scipy")

Run = Callable[..., Finished]
Change = Callable[[list[dict[str, Any]]], object]


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    """The lines of an observed recording. The server has a small pool, so that requests are preempted."""
    return observed_lines(60, num_blocks=90, rate=30.0)


@pytest.fixture
def recording(tmp_path: Path, lines: list[dict[str, Any]]) -> Path:
    return write_observed(tmp_path / "recording.jsonl", lines)


def test_a_simulation_with_vllms_settings_matches_the_recording(pointsman: Run, recording: Path) -> None:
    finished = pointsman("vllm", "compare", recording, "--json", "--ttft-target", "300ms", "--itl-target", "60ms")
    assert finished.code == 0, finished.err
    (found,) = finished.json_lines
    measured, simulated = found["rows"]["vLLM, measured"], found["rows"]["vLLM, simulated"]
    assert found["check"]["num_requests"] == found["num_requests"] == 60
    assert found["check"]["e2e_mape"] < 1e-3
    assert measured["preemptions"] == simulated["preemptions"] > 0
    assert 0 < measured["goodput"] < 1
    for name, value in measured.items():
        assert simulated[name] == pytest.approx(value, rel=2e-3), name
    others = set(found["rows"]) - {"vLLM, measured", "vLLM, simulated"}
    assert {"default", "decode_reserve=mean", "low-latency"} <= others
    assert any(found["rows"][name]["preemptions"] < measured["preemptions"] for name in others)


def test_compare_adds_rows_for_given_settings_and_explains_the_table(pointsman: Run, recording: Path) -> None:
    given = ("--setting", "max_num_seqs=2", "--setting", "preset=textbook", "--limit", 30)
    finished = pointsman("vllm", "compare", recording, *given)
    assert finished.code == 0, finished.err
    words = " ".join(finished.out.split())
    for expected in ("vLLM, measured", "max_num_seqs=2", "preset=textbook", "Check of the model", "30 requests"):
        assert expected in words, words
    assert max(map(len, finished.out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("reserves=growth", {"reserves": "growth"}),
        (
            "token_limits=target-itl:seconds=0.05,max_num_seqs=2",
            {"token_limits": "target-itl:seconds=0.05", "max_num_seqs": 2},
        ),
        ("order=shortest-prefill:ageing=200,b=1", {"order": "shortest-prefill:ageing=200,b=1"}),
        (
            'reserves=["growth", "watermark:share=0.1"],order=fcfs',
            {"reserves": ["growth", "watermark:share=0.1"], "order": "fcfs"},
        ),
        ("draft_table=[[8, 2], [32, 1]]", {"draft_table": [[8, 2], [32, 1]]}),
        ("max_num_seqs=2, watermark= 0.1", {"max_num_seqs": 2, "watermark": 0.1}),
    ],
)
def test_a_setting_is_parsed_as_names_or_json(text: str, values: dict[str, Any]) -> None:
    assert _parse_setting(text) == values


def test_compare_simulates_a_policy_given_by_its_bare_name(pointsman: Run, recording: Path) -> None:
    finished = pointsman("vllm", "compare", recording, "--setting", "reserves=growth", "--limit", 10, "--json")
    assert finished.code == 0, finished.err
    assert "reserves=growth" in finished.json_lines[0]["rows"]


def test_calibrate_fits_step_times_to_an_observed_recording(pointsman: Run, recording: Path) -> None:
    (found,) = pointsman("calibrate", recording, "--json").json_lines
    assert found["kind"] == "steps" and found["step_mape"] < 1e-3
    assert found["step_time"]["per_token"] == pytest.approx(STEP_TIME.per_token, rel=0.01)


def test_an_observed_recording_is_read_as_trace_and_as_measurements(
    recording: Path, lines: list[dict[str, Any]]
) -> None:
    observed, trace = read_observed(recording), read_trace(recording)
    added = [line for line in lines if line.get("call") == "add"]
    assert len(trace) == len(read_measurements(recording)) == len(added) == 60
    for request, line in zip(observed.requests, added, strict=True):
        assert request.queued == pytest.approx(min(line["now"], line["request"]["arrival_time"] + WAY), abs=1e-5)
    odd = [request.block_hash_ids for request in observed.requests[1::2]]
    assert len({ids[:4] for ids in odd if ids}) == 1, "a prefix of four blocks"
    assert len({ids[4] for ids in odd if ids and len(ids) > 4}) > 10, "and then their own"
    assert not {ids[0] for ids in odd if ids} & {
        r.block_hash_ids[0] for r in observed.requests[::2] if r.block_hash_ids
    }


def test_a_truncated_observed_recording_is_read_up_to_its_last_line(
    tmp_path: Path, lines: list[dict[str, Any]]
) -> None:
    cut = write_observed(tmp_path / "cut.jsonl", lines[:-1])  # the newest steps are missing
    whole = read_observed(write_observed(tmp_path / "whole.jsonl", lines))
    observed = read_observed(cut)
    finished = [request for request in observed.requests if request.reason is not None]
    assert 0 < len(finished) < 60 == len(whole.requests)
    assert all(request.runs[-1][1] < len(observed.ended) for request in finished)


@pytest.mark.parametrize("command", [("vllm", "compare"), ("calibrate",)])
def test_a_server_with_features_that_the_simulator_lacks_is_refused(
    pointsman: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    lacking = ("2 KV groups (FullAttentionSpec, SlidingWindowSpec)", "speculative decoding (ngram)")
    finished = pointsman(*command, write_observed(tmp_path / "r.jsonl", observed_lines(3, lacking=lacking)))
    assert finished.code == 2
    assert (
        "2 KV groups (FullAttentionSpec, SlidingWindowSpec), speculative decoding (ngram), which the simulator"
        in (finished.errors[0])
    )


def test_the_error_names_the_recording(pointsman: Run, tmp_path: Path, lines: list[dict[str, Any]]) -> None:
    cut = write_observed(tmp_path / "cut.jsonl", observed_lines(1)[:-1])  # half of the steps
    assert "cut.jsonl: the log has 30 steps with a time" in pointsman("calibrate", cut).errors[0]
    header, *others = lines
    refused = {**header, "config": {**header["config"], "kv_load_timeout": 5}}
    finished = pointsman("vllm", "compare", write_observed(tmp_path / "refused.jsonl", [refused, *others]))
    assert finished.code == 2
    assert "refused.jsonl: the recorded settings cannot be used: kv_load_timeout is 5" in finished.errors[0]


def test_replay_refuses_an_observed_recording(recording: Path) -> None:
    with pytest.raises(RecordingError, match=r"the recording was observed: vLLM 0\.32\.0 made"):
        replay(recording.read_text().splitlines())


BROKEN: dict[str, tuple[Change, str]] = {
    "no recording": (lambda lines: lines[0].pop("observed"), r"line 1: not the header of a recording that"),
    "version": (lambda lines: lines[0].update(format_version=9), r"line 1: format_version is 9; this library reads"),
    "call": (
        lambda lines: lines[1].update(call="propose"),
        r"line 2: call is 'propose'; it must be add, result or steps",
    ),
    "block": (lambda lines: lines[1]["request"].update(blocks=[99, 0, 1]), r"line 2: no earlier line has block 99"),
    "length": (lambda lines: lines[1]["request"].update(num_prompt_tokens=0), r"line 2: num_prompt_tokens is 0"),
    "steps": (lambda lines: lines[-2].update(step=7), r"the line begins with step 7, but the next step is 0"),
    "column": (lambda lines: lines[-1]["num_rows"].pop(), r"the columns have different lengths"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_names_the_broken_line_of_an_observed_recording(tmp_path: Path, name: str) -> None:
    change, message = BROKEN[name]
    lines = observed_lines(3)
    change(lines)
    with pytest.raises(TraceError, match=message):
        read_observed(write_observed(tmp_path / "r.jsonl", lines))


def test_wrong_compare_options_are_refused(pointsman: Run, recording: Path, tmp_path: Path) -> None:
    for given, message in {
        ("--setting", "no_such=1"): "'no_such', which is not a knob",
        (
            "--setting",
            "max_num_seqs=2,reserve=growth",
        ): "'reserve', which is not a knob of the scheduler; did you mean reserves?",
        ("--setting", ""): "--setting is ''",
        ("--setting", "preset=other"): "no preset is called 'other'",
        ("--setting", "reserves=grwth"): "no reserve policy is called 'grwth'; did you mean growth?",
        ("--setting", "max_num_seqs=0"): "--setting max_num_seqs=0 cannot be simulated: max_num_seqs is 0; it must",
        ("--limit", "0"): "--limit is 0",
        ("--ttft-target", "soon"): "--ttft-target is 'soon'",
    }.items():
        finished = pointsman("vllm", "compare", recording, *given)
        assert finished.code == 2 and message in finished.errors[0]
    assert "cannot read the recording" in pointsman("vllm", "compare", tmp_path / "absent").errors[0]
