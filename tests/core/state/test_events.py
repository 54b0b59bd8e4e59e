"""Events: a listener gets every decision once, in order, and the blocks that a step takes and gives back."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pointsman.core import (
    Listener,
    ParkReason,
    PreemptionCause,
    Reason,
    Request,
    RequestRefused,
    SchedulerOutput,
    StepDecision,
    StepUpdate,
)
from pointsman.core.state.events import Admitted, Call, Deferred, Preempted

from ..helpers import Host


class Notes(Listener):
    """Keeps the events that it gets as (kind, request, detail)."""

    wants_blocks = True

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.calls: list[str] = []
        self.steps: list[StepDecision] = []
        self.num_updates = 0

    def on_call(self, event: Call) -> None:
        self.calls.append(event.name)

    def on_added(self, request: Request, now: float) -> None:
        self.seen.append(("added", request.request_id))

    def on_refused(self, request: Request, why: str, now: float) -> None:
        self.seen.append(("refused", request.request_id, why))

    def on_queued(self, request: Request, now: float) -> None:
        self.seen.append(("queued", request.request_id))

    def on_parked(self, request: Request, now: float) -> None:
        self.seen.append(("parked", request.request_id, request.status.value))

    def on_deferred(self, event: Deferred) -> None:
        self.seen.append(("deferred", event.request.request_id, event.reason, event.missing, event.holder))

    def on_admitted(self, event: Admitted) -> None:
        self.seen.append(("admitted", event.request.request_id, event.resumed, event.num_cached_tokens))

    def on_preempted(self, event: Preempted) -> None:
        seen = ("preempted", event.request.request_id, event.cause, event.num_lost_tokens, event.num_cached_tokens)
        self.seen.append(seen)

    def on_rolled_back(self, request: Request, now: float) -> None:
        self.seen.append(("rolled back", request.request_id))

    def on_finished(self, request: Request, now: float) -> None:
        self.seen.append(("finished", request.request_id, request.finish_reason))

    def on_step(self, step: StepDecision) -> None:
        self.steps.append(step)

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        self.num_updates += 1


def host_with_listener(**config: Any) -> tuple[Host, Notes]:
    host, notes = Host(**config), Notes()
    host.scheduler.add_listener(notes)
    return host, notes


def test_a_listener_gets_the_events_of_a_request_from_arrival_to_end() -> None:
    host, notes = host_with_listener(max_num_seqs=1)
    host.add("a", 4, max_tokens=2)
    host.add("b", 4, max_tokens=1, park=ParkReason.GRAMMAR)
    with pytest.raises(RequestRefused):
        host.add("c", 100)
    host.ready("b")
    host.run_to_end()
    assert [entry[:2] for entry in notes.seen] == [
        ("added", "a"),
        ("queued", "a"),
        ("added", "b"),
        ("parked", "b"),
        ("refused", "c"),
        ("queued", "b"),
        ("admitted", "a"),
        ("deferred", "b"),
        ("finished", "a"),
        ("admitted", "b"),
        ("finished", "b"),
    ]
    assert ("deferred", "b", Reason.SEQUENCE_LIMIT, 1, "a") in notes.seen, "once, though it waited for two steps"
    assert notes.calls[:4] == ["add", "add", "ready", "schedule"] and notes.num_updates == notes.calls.count("update")


def test_a_preemption_reports_its_cause_and_lost_and_cached_tokens() -> None:
    host, notes = host_with_listener(num_blocks=6, full_sequence_must_fit=False, max_model_len=24)
    host.add("a", 8, max_tokens=9)
    host.add("b", 8, max_tokens=9)
    host.run_to_end()
    lost = [entry for entry in notes.seen if entry[0] == "preempted"]
    assert len(lost) == host.stats().num_preemptions > 0
    for _, name, cause, num_lost, num_cached in lost:
        assert (name, cause) == ("b", PreemptionCause.MEMORY)
        assert 0 < num_cached <= num_lost and num_cached % 4 == 0, "its full blocks are found until they are evicted"
    assert ("admitted", "b", True) in [entry[:3] for entry in notes.seen]


def test_each_cause_of_preemption_is_reported() -> None:
    host, notes = host_with_listener(max_num_seqs=1, order="priority")
    host.add("a", 4, priority=5)
    host.step()
    host.add("urgent", 4, priority=1, max_tokens=9)
    host.step()
    host.park("urgent")
    host.step()
    host.reset_prefix_cache(preempt_running=True)
    causes = [(entry[1], entry[2]) for entry in notes.seen if entry[0] == "preempted"]
    expected = [("a", PreemptionCause.DISPLACED), ("urgent", PreemptionCause.PARKED), ("a", PreemptionCause.RESET)]
    assert causes == expected


def test_a_failed_step_reports_rolled_back_admissions() -> None:
    host, notes = host_with_listener()
    host.add("a")
    host.fail(host.schedule())
    assert [entry[0] for entry in notes.seen] == ["added", "queued", "admitted", "rolled back"]


@pytest.mark.parametrize("seed", range(6))
def test_reported_allocations_minus_returns_equal_the_held_blocks(seed: int) -> None:
    """Counts references to blocks over a random run with preemptions, aborts and shared prefixes."""
    random = Random(seed)
    host, notes = host_with_listener(num_blocks=12, max_model_len=32, full_sequence_must_fit=False)
    beginning = host.prompt(8)
    held = 0
    for index in range(120):
        if random.random() < 0.5:
            prompt = beginning[: random.randint(1, 8)] + host.prompt(random.randint(1, 8))
            host.add(f"r{index}", prompt, max_tokens=random.randint(1, 12))
        running = list(host.scheduler._batch.members.requests)
        if running and random.random() < 0.1:
            host.abort(random.choice(running).request_id)
        output = host.schedule()
        held += len(output.block_ids) - sum(map(len, notes.steps[-1].returned_blocks))
        batch = host.scheduler._batch
        assert held == batch.num_slots[batch.members.rows].sum() // 4
        host.update(output)
    assert host.stats().num_preemptions > 0


def test_a_removed_listener_gets_no_events() -> None:
    host, notes = host_with_listener()
    host.scheduler.remove_listener(notes)
    host.add("a", max_tokens=1)
    host.run_to_end()
    assert not notes.seen and not notes.calls and not notes.steps
    assert host.scheduler._kv.returned is None


def test_a_listener_that_overrides_nothing_is_not_called() -> None:
    host = Host()
    before = host.scheduler._events.finished
    host.scheduler.add_listener(Listener())
    assert host.scheduler._events.finished == before


def test_a_listener_that_is_added_twice_gets_each_event_once() -> None:
    host, notes = host_with_listener()
    host.scheduler.add_listener(notes)
    host.add("a", max_tokens=1)
    host.run_to_end()
    assert [entry[0] for entry in notes.seen] == ["added", "queued", "admitted", "finished"]
