"""`help` on the public classes: fields with their docstrings, and a readable scheduler."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

from pointsman import (
    ClockError,
    ConfigError,
    Explanation,
    FirstComeFirstServed,
    Request,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    SchedulerStats,
    StepDecision,
    StepResult,
    StepResultError,
    StepUpdate,
)

SMALL = {"num_blocks": 8, "max_model_len": 64}


def request() -> Request:
    return Request("a", [1, 2], arrival_time=0.0, max_tokens=2, eos_token_ids=())


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (SchedulerConfig, "max_num_seqs"),
        (SchedulerOutput, "block_ids"),
        (SchedulerStats, "num_waiting_by_reason"),
        (Explanation, "holders"),
        (StepDecision, "blocked_by"),
        (StepResult, "counts"),
        (StepUpdate, "finished"),
    ],
)
def test_help_lists_fields_with_their_docstrings(kind: type, field: str) -> None:
    text = kind.__doc__ or ""
    start = text.index(f"\n{field}\n    ")
    assert "Fields:" in text[:start]
    assert len(text[start:].splitlines()[2]) > 10


def test_the_repr_of_a_scheduler_shows_its_load() -> None:
    scheduler = Scheduler(SchedulerConfig(**SMALL))
    scheduler.add(request(), 0.0)
    assert repr(scheduler) == "<Scheduler: 0 running, 1 queued, 8 of 8 blocks free>"
    scheduler.schedule(0.0)
    assert repr(scheduler) == "<Scheduler: 1 running, 0 queued, 7 of 8 blocks free>"


def test_a_list_as_result_is_refused_with_the_remedy() -> None:
    scheduler = Scheduler(SchedulerConfig(**SMALL))
    scheduler.add(request(), 0.0)
    output = scheduler.schedule(0.0)
    with pytest.raises(StepResultError, match=r"passed to update\(\) is \[7\]; pass StepResult\(token_ids\)"):
        scheduler.update(output, [7], 0.0)  # type: ignore[arg-type]
    update = scheduler.update(output, StepResult([7]), 0.0)
    assert [(each.request_id, tokens) for each, tokens in update.new_tokens()] == [("a", [7])]


def test_a_clock_that_goes_back_is_refused_and_changes_nothing() -> None:
    scheduler = Scheduler(SchedulerConfig(**SMALL))
    scheduler.add(request(), 5.0)
    with pytest.raises(ClockError, match=r"now is 4.0, and it was 5.0 in an earlier call or step; .*time.monotonic"):
        scheduler.schedule(4.0)
    output = scheduler.schedule(5.0)
    with pytest.raises(ClockError, match=r"now is 1.0, and it was 5.0"):
        scheduler.update(output, StepResult([7]), 1.0)
    with pytest.raises(ClockError, match=r"now is nan, and it was 5.0"):
        scheduler.update(output, StepResult([7]), float("nan"))
    with pytest.raises(ClockError, match=r"now is 2.0, and it was 5.0"):
        scheduler.fail(output, 2.0)
    assert scheduler.update(output, StepResult([7]), 6.0).counts.tolist() == [1]
    for times, message in (
        ([3.0, 7.0], "now is 3.0, and it was 6.0"),
        ([8.0, 7.0], "now is 7.0, and it was 8.0"),
        ([float("nan"), 7.0], "now is nan, and it was"),
    ):
        with pytest.raises(ClockError, match=message):
            scheduler.advance(times, np.array([7], np.int32))
    assert scheduler.advance([6.0, 7.0], np.array([7], np.int32)).counts.tolist() == [1]


def test_a_configuration_with_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no order policy is called 'fifo'; did you mean fcfs\? choose one of fcfs"):
        SchedulerConfig(**SMALL, order="fifo")
    with pytest.raises(ConfigError, match="no reserve policy is called 'grow'"):
        SchedulerConfig(**SMALL, reserves=("grow",))


def test_a_class_in_the_place_of_a_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"order is the class FirstComeFirstServed; pass an object"):
        SchedulerConfig(**SMALL, order=FirstComeFirstServed)


def test_import_parses_no_sources() -> None:
    code = "import ast; ast.parse = None; import pointsman; print(len(pointsman.__all__))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(found.stdout) > 50


def test_without_sources_a_class_keeps_its_own_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(module: object) -> str:
        raise OSError("could not get source code")

    monkeypatch.setattr(inspect, "getsource", unavailable)
    assert (StepUpdate.__doc__ or "").startswith("The part of a step result")
    assert "Fields:" not in (StepUpdate.__doc__ or "")
