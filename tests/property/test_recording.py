"""Recordings of random runs replay to the same decisions, and an altered decision is found at its step."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from pointsman.core import RecordingError, ReplayDifference, replay

from .operations import drive
from .workload import SeededChooser
from .world import World

SEEDS = range(5_000, 5_012)


def record(seed: int) -> tuple[World, list[str]]:
    """A random run and the lines of its recording."""
    file = io.StringIO()
    world = drive(seed, 60, recording=file)
    return world, file.getvalue().splitlines()


def other_value(value: Any) -> Any:
    """A value of the same type that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, list):
        return [other_value(value[0]), *value[1:]] if value else [7]
    return f"not {value}"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_recording_replays_without_a_difference(seed: int) -> None:
    world, lines = record(seed)
    report = replay(iter(lines))
    assert report.num_steps == world.tally.num_steps
    assert report.num_requests == world.tally.num_added
    assert report.num_preemptions == world.tally.num_preemptions
    assert report.num_calls == len(lines) - 1  # all but the header


@pytest.mark.parametrize("seed", SEEDS)
def test_recordings_of_equal_runs_are_byte_identical(seed: int) -> None:
    assert record(seed)[1] == record(seed)[1]


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_finds_an_altered_decision_at_its_step(seed: int) -> None:
    """One field of one line is altered, and the replay names the line, step and field."""
    _, lines = record(seed)
    choose = SeededChooser(seed)
    deciding = [number for number, line in enumerate(lines) if "decision" in json.loads(line)]
    for _ in range(15):
        number = choose.choice(deciding)
        call = json.loads(lines[number])
        field = choose.choice(sorted(call["decision"]))
        call["decision"][field] = other_value(call["decision"][field])
        with pytest.raises(ReplayDifference) as caught:
            replay([*lines[:number], json.dumps(call), *lines[number + 1 :]])
        difference = caught.value
        assert (difference.line, difference.step_id, difference.field) == (number + 1, call["step"], field)
        assert str(call["step"]) in str(difference)
        assert difference.recorded == call["decision"][field] != difference.replayed


@pytest.mark.parametrize("seed", SEEDS)
def test_replay_finds_a_lost_call(seed: int) -> None:
    """A recording without one of its calls fails to replay: with a difference, or with an impossible call."""
    lost = None
    while lost is None:  # in a few runs no request that was added ever ran
        _, lines = record(seed)
        calls = [json.loads(line) for line in lines]
        ran = {name for call in calls if call.get("call") == "schedule" for name in call["decision"]["requests"]}
        adds = [n for n, call in enumerate(calls) if call.get("call") == "add" and call["request"]["request_id"] in ran]
        lost, seed = (adds[0] if adds else None), seed + 1000
    with pytest.raises((ReplayDifference, RecordingError)):
        replay([*lines[:lost], *lines[lost + 1 :]])


def test_replay_reports_a_truncated_recording() -> None:
    _, lines = record(SEEDS[0])
    report = replay([*lines[:-1], lines[-1][: len(lines[-1]) // 2]])
    assert report.is_cut and report.num_calls == len(lines) - 2
    with pytest.raises(RecordingError, match="header"):
        replay(iter(lines[1:]))
    with pytest.raises(RecordingError, match="empty"):
        replay(iter([]))
