"""Deadlines: the order of overdue requests, and how an engine ends them."""

from __future__ import annotations

import pytest

from pointsman.core import Request
from pointsman.core.state.status import FinishReason, RequestStatus
from pointsman.engine import Engine, SamplingParams
from pointsman.engine.deadlines import MIN_ENTRIES, Deadlines


def request(name: str) -> Request:
    return Request(name, [1, 2, 3], arrival_time=0.0, max_tokens=4)


def test_overdue_requests_are_returned_once_longest_overdue_first() -> None:
    deadlines = Deadlines()
    for name, deadline in (("b", 2.0), ("a", 1.0), ("c", 3.0), ("same", 2.0)):
        deadlines.add(request(name), deadline)
    assert deadlines.take_overdue(0.5) == [] and deadlines.earliest() == 1.0
    assert [one.request_id for one in deadlines.take_overdue(2.0)] == ["a", "b", "same"]
    assert deadlines.take_overdue(2.0) == [] and deadlines.earliest() == 3.0


def test_finished_requests_are_neither_overdue_nor_kept() -> None:
    deadlines = Deadlines()
    ended = [request(str(number)) for number in range(10 * MIN_ENTRIES)]
    for one in ended:
        deadlines.add(one, 1000.0)
        one._state.change_status(RequestStatus.FINISHED_REFUSED)
    assert len(deadlines._heap) <= MIN_ENTRIES  # bounded, not proportional to the number of all requests so far
    assert deadlines.earliest() is None and deadlines.take_overdue(2000.0) == []


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.e2e
def test_an_engine_ends_overdue_requests_waiting_or_running() -> None:
    clock = Clock()
    engine = Engine("demo", num_blocks=16, max_num_seqs=1, clock=clock)
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    engine.add_request("runs", [1, 2, 3], params, deadline=110.0)
    engine.add_request("waits", [1, 2, 3], params, deadline=105.0)
    engine.add_request("has time", [1, 2, 3], params, deadline=1000.0)
    for _ in range(3):
        engine.step()
    clock.now = 106.0
    (waited,) = [one for one in engine.step() if one.finished]
    assert (waited.request_id, waited.finish_reason, waited.num_output_tokens) == ("waits", "deadline", 0)
    assert waited.metrics.first_scheduled_time is None and "6.000 s after its arrival" in waited.finish_detail
    clock.now = 111.0
    (ran,) = [one for one in engine.step() if one.finished]
    assert (ran.request_id, ran.finish_reason) == ("runs", "deadline") and ran.num_output_tokens == 4
    assert ran.metrics.first_scheduled_time == 100.0
    last = {}
    while engine.has_unfinished_requests():
        last.update({one.request_id: one for one in engine.step() if one.finished})
    assert last["has time"].finish_reason == "length" and last["has time"].metrics.first_scheduled_time == 111.0
    stats = engine.scheduler.stats()
    assert stats.finished[FinishReason.DEADLINE.value] == 2 and stats.num_free_blocks == 16


def test_an_invalid_deadline_is_refused() -> None:
    engine = Engine("demo", num_blocks=16)
    with pytest.raises(ValueError, match="request 'a': the deadline is nan; give seconds on the engine's clock"):
        engine.add_request("a", [1], deadline=float("nan"))
    assert not engine.has_unfinished_requests()
