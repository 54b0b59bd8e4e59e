"""The order "earliest-ttft": late requests come last, within a bound."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Request, Scheduler
from pointsman.core.policy.earliest_ttft import EarliestTTFT
from pointsman.core.policy.policy import StepLoad
from pointsman.core.state.events import Admitted
from tests.core.helpers import Host, names, small_config
from tests.forms import short_or_long

ORDER = "earliest-ttft:default=100"


def admission_order(host: Host) -> list[str]:
    return [name for output in host.run_to_end() for name in names(output.admitted)]


def test_the_request_with_the_earliest_ttft_deadline_is_admitted_next() -> None:
    host = Host(order=ORDER, max_num_seqs=1)
    for request_id, arrival, target in [("c", 0.0, 200.0), ("b", 50.0, None), ("a", 40.0, 90.0)]:
        host.add(request_id, 2, max_tokens=1, arrival_time=arrival, ttft_target=target)
    assert [host.explain(name).position for name in "abc"] == [0, 1, 2]
    assert admission_order(host) == ["a", "b", "c"]


def test_a_preempted_request_is_the_head_of_the_queue() -> None:
    host = Host(order=ORDER, max_num_seqs=1)
    host.add("a", 4, max_tokens=4)
    host.step()
    host.add("urgent", 2, max_tokens=1, ttft_target=20.0)
    host.park("a")
    host.ready("a")
    assert admission_order(host) == ["a", "urgent"]


def test_requests_past_their_deadline_wait_behind_requests_on_time() -> None:
    host = Host(order=ORDER, max_num_seqs=1)
    host.add("late", 2, max_tokens=1, arrival_time=-10.0, ttft_target=5.0)
    host.add("later", 2, max_tokens=1, arrival_time=-5.0, ttft_target=5.0)
    host.add("on-time", 2, max_tokens=1)
    host.step()
    assert [host.explain(name).position for name in ("late", "later")] == [0, 1]
    assert admission_order(host) == ["late", "later"], "the most overdue one first"


def test_every_kth_admission_is_the_most_overdue_request() -> None:
    host = Host(order="earliest-ttft:default=100,every=3", max_num_seqs=1)
    for request_id, arrival in [("late-1", -9.0), ("late-2", -8.0)]:
        host.add(request_id, 2, max_tokens=1, arrival_time=arrival, ttft_target=1.0)
    for request_id in "abcdef":
        host.add(request_id, 2, max_tokens=1)
    assert admission_order(host) == ["a", "b", "late-1", "c", "d", "late-2", "e", "f"]


def test_lateness_includes_the_learned_prefill_time() -> None:
    order = EarliestTTFT(default=10.0)
    view = Scheduler(small_config())._parts.view
    order.attach(view)
    long, short = (
        Request(name, [1] * length, arrival_time=0.0, max_tokens=1) for name, length in [("l", 50), ("s", 9)]
    )
    order.push(long)
    order.push(short)
    view.now = 1.0
    assert order.peek() is long, "step times are unknown, and nine seconds remain"
    order.on_step_time(StepLoad(100, 1, 100, 0, 0), 100.0)
    view.now = 2.0
    assert order.peek() is long, "a step without prompts teaches nothing"
    order.on_step_time(StepLoad(100, 1, 100, 99, 5050), 20.0)
    view.now = 3.0
    assert order.peek() is short, "50 tokens take 10 seconds, 9 take 2"
    assert [order.position(request) for request in (short, long)] == [0, 1]
    assert order.reason(long) == ("it can no longer meet its TTFT target of 10 s, and requests that can come first")
    assert order.reason(short) == ""
    order.remove(short)
    assert order.peek() is long
    assert (len(order), list(order)) == (1, [long])


def test_peek_does_not_move_late_requests_between_steps() -> None:
    order = EarliestTTFT(default=10.0)
    view = Scheduler(small_config())._parts.view
    order.attach(view)
    view.now = 20.0
    first, second = (
        Request(name, [1], arrival_time=arrival, max_tokens=1) for name, arrival in [("a", 0.0), ("b", 20)]
    )
    order.push(first)
    order.push(second)
    assert order.peek() is first, "it is late, but only a step finds that"
    view.now = 21.0
    assert order.peek() is second


def test_a_head_that_can_meet_its_deadline_prevents_fast_forward() -> None:
    host = Host(order="earliest-ttft:default=30", max_num_seqs=1)
    host.add("a", 4, max_tokens=50)
    host.step()
    assert host.scheduler.guaranteed_steps(40) > 1
    host.add("b", 4, max_tokens=1)
    host.step()
    assert host.scheduler.guaranteed_steps(40) == 0, "it may be late in any of them"
    for _ in range(15):
        host.step()
    assert host.scheduler.guaranteed_steps(40) > 1, "it is late"


@pytest.mark.parametrize("spec", ["earliest-ttft:default=0", "earliest-ttft:every=0", "earliest-ttft:ageing=1"])
def test_parameters_out_of_range_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="earliest-ttft"):
        Scheduler(small_config(order=spec))


@example(every=1, arrivals=[(0, 1.0), (0, 1.0), (0, 1.0), (0, 1.0), (3, 1.0), (0, 4.0)])  # equal deadlines
@settings(max_examples=short_or_long(40, 300), deadline=None)
@given(
    every=st.integers(1, 5),
    arrivals=st.lists(st.tuples(st.integers(0, 30), st.sampled_from([1.0, 4.0, 20.0])), min_size=1, max_size=40),
)
def test_a_late_request_is_admitted_within_the_bound(every: int, arrivals: list[tuple[int, float]]) -> None:
    """A request with n more overdue ones before it is among the next (n + 1) * every admissions."""
    order = EarliestTTFT(every=every)
    view = Scheduler(small_config())._parts.view
    order.attach(view)
    waiting: list[Request] = []
    limit: dict[Request, int] = {}
    num_admitted = 0
    todo = sorted(enumerate(arrivals), key=lambda each: each[1][0])
    now = 0.0
    while todo or waiting:
        now += 1.0
        while todo and todo[0][1][0] < now:
            number, (arrival, target) = todo.pop(0)
            request = Request(f"r{number}", [1], arrival_time=float(arrival), max_tokens=1, ttft_target=target)
            request._state.sequence_number = number + 1
            order.push(request)
            waiting.append(request)
        view.now = now
        if not waiting:
            continue
        order.peek()
        overdue = [request for request in waiting if order.reason(request)]
        late = sorted(overdue, key=lambda each: (order.deadline(each), each.sequence_number))
        for index, request in enumerate(late):
            limit.setdefault(request, num_admitted + (index + 1) * every)
        taken = order.pop()
        num_admitted += 1
        assert num_admitted <= limit.get(taken, num_admitted)
        waiting.remove(taken)
        if len(order):
            order.peek()
        order.on_admitted(Admitted(taken, False, 0, 0, False, now))
    assert not len(order)
