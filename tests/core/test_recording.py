"""Recordings hold every call and every decision; replays repeat the calls and compare the decisions."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    FinishReason,
    InvalidTransition,
    ParkReason,
    PauseMode,
    Recorder,
    RecordingError,
    ReplayDifference,
    StepResult,
    replay,
)
from pointsman.core.policy.order import FirstComeFirstServed
from tests.core.helpers import EOS, Host, next_token


def recorded() -> list[str]:
    """The lines of a recording in which every call occurs, under memory pressure."""
    file = io.StringIO()
    host = Host(
        recorder=Recorder(file), num_blocks=8, max_model_len=32, order="priority", max_num_seqs=3, max_steps_in_flight=2
    )
    host.add("a", 6, max_tokens=10, priority=2, eos_token_ids=(EOS,), metadata=object())
    host.add("b", 6, max_tokens=10, priority=1, stop_token_ids=(42,), cache_salt="x")
    host.add("c", 5, max_tokens=10, park=ParkReason.GRAMMAR)
    host.add("d", 5, max_tokens=10, priority=5)
    host.step()
    host.ready("c")
    host.set_priority("d", -3)
    host.set_max_num_active_seqs(3)
    host.step()
    first, second = host.schedule(), host.schedule()
    host.update(first)
    host.fail(second)
    host.park("b", ParkReason.REMOTE_KVS)
    host.step()
    host.reset_prefix_cache()
    host.pause()
    host.step()
    host.pause(PauseMode.ADMISSIONS)
    host.reset_prefix_cache(preempt_running=True)
    host.step()
    host.resume()
    host.ready("b")
    host.abort("c")
    for _ in range(6):
        host.step()
    host.add("part", 3, max_tokens=0, more_input=True)
    host.step()
    host.extend("part", 2, more=True, max_tokens=2)
    host.extend("part", [], max_tokens=0)
    host.finish("d", FinishReason.STOP, keep_tokens=2, stop_reason="END")
    output = host.schedule()
    errors = {0: "nan"}
    tokens = [next_token(r.all_token_ids) for r, s in zip(output.requests, output.samples, strict=True) if s][1:]
    host.scheduler.update(output, StepResult(tokens, errors=errors, step_time=0.01), host.now)
    host.add("e", 7, max_tokens=4)
    output = host.schedule()
    last = int(output.samples.nonzero()[0][-1])
    result = host.result(output)
    host.scheduler.update(output, StepResult(list(result.token_ids)[:-1], unsampled={last}), host.now)
    host.run_to_end()
    assert host.stats().num_preemptions > 1
    return file.getvalue().splitlines(keepends=True)


def changed(lines: list[str], call: str, change: Callable[[dict[str, Any]], None], *, which: int = 2) -> list[str]:
    """The recording after `change` altered one line: the line with index `which` among the lines of `call`."""
    numbers = [number for number, line in enumerate(lines) if json.loads(line).get("call") == call]
    number = numbers[which]
    value = json.loads(lines[number])
    change(value)
    return [*lines[:number], json.dumps(value) + "\n", *lines[number + 1 :]]


def test_a_recording_replays_without_a_difference_and_reports_counts() -> None:
    lines = recorded()
    report = replay(lines)
    calls = [json.loads(line)["call"] for line in lines[1:]]
    assert set(calls) == {
        "add",
        "extend",
        "finish",
        "park",
        "ready",
        "set_priority",
        "set_max_num_active_seqs",
        "pause",
        "resume",
        "reset_prefix_cache",
        "schedule",
        "update",
        "fail",
    }
    assert report.num_calls == len(calls)
    assert report.num_steps == calls.count("schedule")
    assert report.num_requests == 6
    assert report.num_preemptions > 1


def test_a_recording_is_json_lines_with_a_header() -> None:
    header, *rest = (json.loads(line) for line in recorded())
    assert (header["format"], header["format_version"]) == ("pointsman-recording", 1)
    assert header["config"]["num_blocks"] == 8
    assert header["config"]["order"] == "priority"
    assert all("now" in line for line in rest)


def test_replay_accepts_an_open_file() -> None:
    assert replay(io.StringIO("".join(recorded()))).num_requests == 6


@pytest.mark.parametrize(
    ("field", "alter"),
    [
        ("rows", lambda value: [*value[:-1], value[-1] + 1]),
        ("num_scheduled_tokens", lambda value: [value[0] + 1, *value[1:]]),
        ("block_offsets", lambda value: [*value[:-1], value[-1] + 1]),
        ("requests", lambda value: [*value[::-1], "x"]),
        ("samples", lambda value: [not value[0], *value[1:]]),
        ("resync", lambda value: not value),
        ("preempted", lambda value: [*value, "a"]),
        ("finished", lambda value: [*value, ["a", "stop"]]),
    ],
)
def test_replay_reports_an_altered_decision_with_step_and_both_values(field: str, alter: Callable[[Any], Any]) -> None:
    lines = recorded()
    kept: dict[str, Any] = {}

    def change(line: dict[str, Any]) -> None:
        kept["step"], kept["true"] = line["step"], line["decision"][field]
        kept["altered"] = line["decision"][field] = alter(line["decision"][field])

    with pytest.raises(ReplayDifference) as caught:
        replay(changed(lines, "schedule", change))
    difference = caught.value
    assert (difference.step_id, difference.field) == (kept["step"], field)
    assert (difference.recorded, difference.replayed) == (kept["altered"], kept["true"])
    assert str(difference).startswith(f"line {difference.line}, step {kept['step']}: {field} was ")


def test_replay_detects_an_altered_block_id() -> None:
    def change(line: dict[str, Any]) -> None:
        line["decision"]["block_ids"][0] += 1

    with pytest.raises(ReplayDifference, match="step 0: block_ids was"):
        replay(changed(recorded(), "schedule", change, which=0))


def test_replay_detects_an_altered_finish_reason() -> None:
    def change(line: dict[str, Any]) -> None:
        line["decision"]["finished"].append(["a", "stop", "", None])

    with pytest.raises(ReplayDifference, match="finished was"):
        replay(changed(recorded(), "update", change, which=0))


def test_replay_detects_an_altered_input_that_changes_a_decision() -> None:
    def change(line: dict[str, Any]) -> None:
        line["token_ids"][0] += 1

    with pytest.raises(ReplayDifference, match="kept_token_ids was"):
        replay(changed(recorded(), "update", change, which=0))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "the file is empty; a recording starts with a header line"),
        (['{"format": "other"}\n'], "line 1 is not the header of a recording: its format is 'other', not 'pointsman-"),
        (
            ['{"format": "pointsman-recording", "format_version": 99}\n'],
            "the recording has format version 99, but this library reads version 1",
        ),
        (["hello\n"], "line 1 is not JSON .*; the recording is cut off or broken"),
        (["[1, 2]\n"], "line 1 cannot be replayed"),
        (['{"format": "pointsman-recording", "format_version": 1}\n'], "line 1 cannot be replayed: KeyError: 'config'"),
    ],
    ids=["empty", "another format", "another version", "no JSON", "no object", "no config"],
)
def test_a_file_that_is_no_recording_is_refused(lines: list[str], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        replay(lines)


def test_a_recording_cut_off_within_a_line_replays_up_to_that_line() -> None:
    lines = recorded()
    report = replay([*lines[:4], lines[4][:20]])
    assert report.is_cut and report.num_calls == 3
    assert not replay(lines[:4]).is_cut


def test_replay_reports_a_broken_line_with_its_number() -> None:
    lines = recorded()
    for broken in ([*lines[:4], lines[4][:20], *lines[5:]], [*lines[:4], lines[4][:20] + "\n"]):
        with pytest.raises(RecordingError, match=r"line 5 is not JSON .*; the recording is cut off or broken"):
            replay(broken)


def test_a_recording_cut_off_between_lines_replays_to_its_end() -> None:
    assert replay(recorded()[:7]).num_calls == 6


def test_replay_reports_an_unknown_call_with_its_line() -> None:
    lines = recorded()
    with pytest.raises(RecordingError, match="line 2 has the unknown call 'explode'"):
        replay([lines[0], '{"call": "explode", "now": 0}\n'])


def test_a_call_that_fails_in_the_replay_is_reported_with_its_line() -> None:
    lines = recorded()
    with pytest.raises(RecordingError, match="line 3 cannot be replayed: no request 'ghost'"):
        replay([*lines[:2], '{"call": "ready", "now": 0, "id": "ghost"}\n'])
    with pytest.raises(RecordingError, match="line 3 cannot be replayed: request id 'a' is in use"):
        replay([*lines[:2], lines[1]])


def test_a_user_policy_is_recorded_by_name_and_cannot_be_replayed() -> None:
    class Mine(FirstComeFirstServed):
        name = "mine"

    file = io.StringIO()
    host = Host(recorder=Recorder(file), order=Mine())
    host.add("a", 4, max_tokens=1)
    host.run_to_end()
    with pytest.raises(RecordingError, match="cannot be used: no order policy is called 'mine'"):
        replay(file.getvalue().splitlines())


def test_refused_calls_are_not_recorded() -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file))
    host.add("a", 4)
    for call in (lambda: host.add("a", 4), lambda: host.ready("a"), lambda: host.add("b", 64)):
        with pytest.raises((ValueError, RuntimeError)):
            call()
    assert host.abort("ghost") is None
    assert len(file.getvalue().splitlines()) == 2, "the header and one add"


# ------------------------------------------------------------------ recordings that begin in the middle


def used_host(**overrides: Any) -> Host:
    """A host whose pool, prefix cache and numbers show earlier requests; none of them is present."""
    host = Host(num_blocks=9, max_model_len=28, max_steps_in_flight=2, decode_reserve="mean", **overrides)
    for name, length in (("a", 9), ("b", 5), ("c", 13)):
        host.add(name, length, max_tokens=6)
    for _ in range(3):
        host.step()
    host.abort("b")
    host.run_to_end()
    host.step()
    assert host.scheduler.is_idle
    return host


def test_a_recording_that_begins_during_a_run_replays() -> None:
    host, file = used_host(), io.StringIO()
    before = host.stats()
    host.scheduler.start_recording(Recorder(file))
    assert host.stats() == dataclasses.replace(before, num_cached_free_blocks=0)
    for name in "abcd":
        host.add(name, 9, max_tokens=9)
    host.run_to_end()
    host.step()
    report = replay(file.getvalue().splitlines())
    assert (report.num_requests, report.num_steps) == (4, host.stats().num_steps - before.num_steps)
    assert report.num_preemptions == host.stats().num_preemptions - before.num_preemptions > 0


def test_step_and_admission_numbers_continue_in_a_recording() -> None:
    host = used_host()
    host.add("x", 5, max_tokens=1)
    last = host.step()
    host.run_to_end()
    host.step()
    host.scheduler.start_recording(Recorder(io.StringIO()))
    host.add("y", 5, max_tokens=1)
    output = host.schedule()
    assert output.step_id > last.step_id
    assert output.serials[0] > last.serials[0]


def test_a_recording_drops_the_cache_and_reports_it_to_listeners() -> None:
    host = used_host(enable_kv_cache_events=True)
    assert host.stats().num_cached_free_blocks
    host.scheduler.take_kv_events()
    host.scheduler.start_recording(Recorder(io.StringIO()))
    assert [type(event).__name__ for event in host.scheduler.take_kv_events()] == ["AllBlocksCleared"]
    host.add("a", 9, max_tokens=1)
    assert host.schedule().num_cached_tokens.tolist() == [0]
    assert host.scheduler.take_kv_events()


def test_a_pause_continues_in_a_recording_and_is_recorded() -> None:
    host, file = used_host(), io.StringIO()
    host.pause(PauseMode.ADMISSIONS)
    host.scheduler.start_recording(Recorder(file))
    host.add("a", 4, max_tokens=1)
    assert not host.schedule().num_rows
    assert [json.loads(line).get("call") for line in file.getvalue().splitlines()[1:]] == ["pause", "add", "schedule"]
    replay(file.getvalue().splitlines())


def test_drafts_for_a_step_before_the_recording_are_stale() -> None:
    host = Host(num_draft_tokens=2, num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64)
    for name in "abcdefgh":
        host.add(name, 3, max_tokens=1)
    output = host.step()
    host.step()
    host.scheduler.start_recording(Recorder(io.StringIO()))
    assert host.scheduler.propose(output, [1] * 8, [1] * 8, host.now) == 0


def test_a_recording_can_begin_only_while_the_scheduler_is_idle() -> None:
    host = Host()
    recorder = Recorder(file := io.StringIO())

    def refused(words: str) -> None:
        with pytest.raises(InvalidTransition, match=words):
            host.scheduler.start_recording(recorder)

    host.add("a", 4, max_tokens=1)
    refused("1 queued")
    output = host.schedule()
    refused("1 running")
    host.update(output)
    refused("finished requests that no output has reported")
    output = host.schedule()
    refused(r"1 step\(s\) in flight")
    host.update(output)
    host.scheduler.start_recording(recorder)
    refused("stop_recording")
    host.scheduler.stop_recording()
    host.add("b", 4, max_tokens=1)
    assert len(file.getvalue().splitlines()) == 1


def test_with_an_encoder_cache_no_recording_can_begin_during_a_run() -> None:
    host = Host(encoder_budget=8, encoder_cache_size=8)
    with pytest.raises(InvalidTransition, match="encoder_budget"):
        host.scheduler.start_recording(Recorder(io.StringIO()))


def test_numpy_integers_are_recorded_as_integers() -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), order="priority")
    host.add("a", 4, max_tokens=np.int32(2), priority=np.int64(3), eos_token_ids=(np.int64(5),))
    host.run_to_end()
    assert replay(file.getvalue().splitlines()).num_requests == 1


@pytest.mark.parametrize("name", ["plain", "drafts", "connector"])
def test_recordings_of_earlier_versions_replay(name: str) -> None:
    """Made before the core was divided into packages; `plain` and `drafts` also preempt, park, fail and reset."""
    path = Path(__file__).parent / "recordings" / f"{name}.jsonl"
    with path.open() as file:
        report = replay(file)
    assert report.num_steps >= 40 and report.num_requests >= 15
