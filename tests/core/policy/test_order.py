"""Orders: the next request, the place of a preempted request, and the cost of leaving a long queue."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Request, Scheduler
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.order import LongestPrefix, ShortestPrefill
from pointsman.core.state.events import Admitted
from tests.core.helpers import Host, names, small_config
from tests.forms import short_or_long


def admission_order(host: Host) -> list[str]:
    """The ids in admission order, with one sequence slot."""
    return [name for output in host.run_to_end() for name in names(output.admitted)]


def test_fcfs_admits_by_arrival_time_not_by_order_of_adding() -> None:
    host = Host(max_num_seqs=1)
    for request_id, arrival in [("late", 9.0), ("early", 1.0), ("middle", 5.0)]:
        host.add(request_id, 2, max_tokens=1, arrival_time=arrival)
    assert admission_order(host) == ["early", "middle", "late"]


def test_equal_arrival_times_are_served_in_order_of_adding() -> None:
    host = Host(max_num_seqs=1)
    for request_id in ("z", "a", "m"):
        host.add(request_id, 2, max_tokens=1, arrival_time=0.0)
    assert admission_order(host) == ["z", "a", "m"]


def test_fcfs_ignores_priority() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 2, max_tokens=1, priority=5)
    host.add("b", 2, max_tokens=1, priority=-5)
    assert admission_order(host) == ["a", "b"]


def test_priority_admits_smaller_numbers_first_then_by_arrival() -> None:
    host = Host(order="priority", max_num_seqs=1)
    for request_id, priority, arrival in [("c", 1, 2.0), ("d", 1, 3.0), ("e", 7, 0.0), ("b", 1, 1.0), ("a", -2, 9.0)]:
        host.add(request_id, 2, max_tokens=1, priority=priority, arrival_time=arrival)
    assert admission_order(host) == ["a", "b", "c", "d", "e"]


def test_a_preempted_request_is_queued_before_requests_that_never_ran() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 4, max_tokens=4)
    host.step()
    host.add("earlier", 2, max_tokens=1, arrival_time=-100.0)
    host.park("a")
    host.ready("a")
    assert admission_order(host) == ["a", "earlier"]


def test_a_preempted_request_is_the_first_of_its_priority() -> None:
    host = Host(order="priority", max_num_seqs=1, displace=False)
    host.add("a", 4, max_tokens=4, priority=1)
    host.step()
    host.add("urgent", 2, max_tokens=1, priority=0)
    host.add("equal", 2, max_tokens=1, priority=1, arrival_time=-100.0)
    host.park("a")
    host.ready("a")
    assert admission_order(host) == ["urgent", "a", "equal"]


def test_requests_preempted_together_resume_in_admission_order() -> None:
    host = Host(max_num_seqs=3)
    for request_id, arrival in [("a", 9.0), ("b", 5.0), ("c", 1.0)]:
        host.add(request_id, 4, max_tokens=8, arrival_time=arrival)
        host.step()
    for request_id in ("b", "c", "a"):
        host.park(request_id)
    for request_id in ("c", "a", "b"):
        host.ready(request_id)
    assert names(host.step().resumed) == ["a", "b", "c"], "not by arrival, and not by time of queueing"


def test_a_parked_request_returns_to_its_place_in_the_queue() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 2, max_tokens=1)
    host.add("b", 2, max_tokens=1)
    for _ in range(3):
        host.park("a")
        host.ready("a")
    assert host.explain("a").position == 0
    assert admission_order(host) == ["a", "b"]


def test_shortest_prefill_orders_by_prefill_length_minus_ageing() -> None:
    host = Host(order="shortest-prefill:ageing=2", max_num_seqs=1, max_num_batched_tokens=64)
    host.add("long", 30, max_tokens=1, arrival_time=0.0)
    for request_id, length, arrival in [("d", 4, 13.5), ("a", 4, 5.0), ("c", 4, 12.5), ("b", 20, 4.5)]:
        host.add(request_id, length, max_tokens=1, arrival_time=arrival)
    assert [host.explain(name).position for name in ("a", "c", "b", "long", "d")] == [0, 1, 2, 3, 4]
    host.step()
    told = host.explain("long").sentence
    assert told == (
        "long waits behind c, which waits: all sequence slots are taken. shortest-prefill: it has 30 tokens to "
        "prefill, the head of the queue 4."
    )
    assert admission_order(host) == ["c", "b", "long", "d"]


def test_under_shortest_prefill_a_preempted_request_is_first() -> None:
    host = Host(order="shortest-prefill", max_num_seqs=1)
    host.add("a", 16, max_tokens=4)
    host.step()
    host.add("short", 2, max_tokens=1)
    host.park("a")
    host.ready("a")
    assert admission_order(host) == ["a", "short"]


@settings(max_examples=short_or_long(30, 300), deadline=None)
@given(
    bound=st.sampled_from([1.0, 5.0, 40.0]),
    waits=st.sampled_from([0.5, 2.0, 1e9]),
    ageing=st.sampled_from([0.0, 0.5, 3.0]),
    arrivals=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60)), min_size=2, max_size=30),
    capacity=st.integers(1, 20),
)
def test_shortest_prefill_bounds_how_much_later_a_bypassing_request_is(
    bound: float, waits: float, ageing: float, arrivals: list[tuple[int, int]], capacity: int
) -> None:
    order = ShortestPrefill(bound, waits, ageing)
    todo = sorted(arrivals)
    waiting: list[Request] = []
    for now in range(0, 4000, capacity):
        while todo and todo[0][0] <= now:
            arrival, length = todo.pop(0)
            request = Request(f"r{len(todo)}", [1] * length, arrival_time=float(arrival), max_tokens=1)
            request._state.sequence_number = 100 - len(todo)
            order.push(request)
            waiting.append(request)
        if waiting:
            taken = order.pop()
            waiting.remove(taken)
            order.on_admitted(Admitted(taken, False, 0, 0, False, float(now)))
            for other in waiting:
                most = min(bound, other.num_prompt_tokens / ageing) if ageing else bound
                assert taken.arrival_time < other.arrival_time + most or taken is min((taken, other), key=arrived)
    assert not waiting


def arrived(request: Request) -> tuple[float, int]:
    return request.arrival_time, request._state.sequence_number


def test_shortest_prefill_delays_long_prompts_by_multiples_of_waits() -> None:
    order = ShortestPrefill(bound=100.0, waits=2.0)
    for number in range(200):  # the mean wait is 5 s, the mean length 100 tokens
        request = Request(f"past{number}", [1] * 100, arrival_time=0.0, max_tokens=1)
        request._state.sequence_number = number
        order.push(request)
        order.on_admitted(Admitted(order.pop(), False, 0, 0, False, 5.0))
    for number, (name, length, arrival) in enumerate([("long", 800, 0.0), ("short", 10, 9.0), ("later", 10, 11.0)]):
        request = Request(name, [1] * length, arrival_time=arrival, max_tokens=1)
        request._state.sequence_number = 300 + number
        order.push(request)
    assert [order.pop().request_id for _ in range(3)] == ["short", "long", "later"]


@pytest.mark.parametrize(
    "order, expected",
    [("shortest-prefill", ["new", "short", "long"]), ("longest-prefix", ["long", "short", "new"])],
)
def test_prefill_orders_use_tokens_cached_when_a_request_is_queued(order: str, expected: list[str]) -> None:
    host = Host(order=f"{order}:ageing=0.1", max_num_seqs=1, max_num_batched_tokens=64)
    prompt = host.prompt(40)
    host.add("first", prompt, max_tokens=1)
    host.run_to_end()
    host.add("new", 8, max_tokens=1)
    host.add("short", [*prompt[:20], *host.prompt(10)], max_tokens=1)
    host.add("long", [*prompt, *host.prompt(14)], max_tokens=1)
    host.schedule()
    if order == "longest-prefix":
        assert host.explain("new").sentence.endswith(
            "longest-prefix: it had 0 cached tokens when queued, the head of the queue 20."
        )
    assert [host.explain(name).position for name in expected[1:]] == [0, 1]


@settings(max_examples=short_or_long(20, 150), deadline=None)
@given(cached=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 15)), min_size=2, max_size=20))
def test_longest_prefix_bounds_how_much_later_a_bypassing_request_is(cached: list[tuple[int, int]]) -> None:
    class Told(LongestPrefix):
        def _num_cached(self, request: Request) -> int:
            num: int = request.metadata
            return num

    order, longest = Told(ageing=2.0), 64
    todo, waiting = sorted(cached), list[Request]()
    for now in range(200):
        while todo and todo[0][0] <= now:
            arrival, num = todo.pop(0)
            request = Request(
                f"r{len(todo)}", [1] * longest, arrival_time=float(arrival), max_tokens=1, metadata=4 * num
            )
            request._state.sequence_number = 100 - len(todo)
            order.push(request)
            waiting.append(request)
        if waiting:
            taken = order.pop()
            waiting.remove(taken)
            for other in waiting:
                assert taken.arrival_time < other.arrival_time + (longest - other.metadata) / 2.0
    assert not waiting


@pytest.mark.parametrize("value", ["-1", "x", "1e10"])
def test_an_invalid_ageing_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="ageing of order 'shortest-prefill'"):
        Scheduler(small_config(order=f"shortest-prefill:ageing={value}"))


class CountingTime(float):
    """An arrival time that counts its comparisons, which measure the work of a queue without a clock."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        CountingTime.comparisons += 1
        return float.__eq__(self, other)

    def __lt__(self, other: float) -> bool:
        CountingTime.comparisons += 1
        return float.__lt__(self, other)

    __hash__ = float.__hash__


class CountingOrder(FirstComeFirstServed):
    """First come, first served; counts iterations over the whole queue."""

    name = "counting"
    walks = 0

    def __iter__(self) -> Iterator[Request]:
        CountingOrder.walks += 1
        return super().__iter__()


def test_an_abort_of_a_waiting_request_does_not_scan_the_queue() -> None:
    num_waiting = short_or_long(10_000, 100_000)
    scheduler = Scheduler(small_config(order=CountingOrder()))
    prompt = np.array([1, 2, 3], dtype=np.int32)
    for index in range(num_waiting):
        request = Request(f"r{index}", prompt, arrival_time=CountingTime(index), max_tokens=4)
        prompt = request.prompt_token_ids  # one copy for all
        scheduler.add(request, 0.0)
    CountingTime.comparisons = CountingOrder.walks = 0
    for index in (num_waiting // 2, num_waiting - 1, 0, 7):
        ended = scheduler.abort(f"r{index}", 1.0)
        assert ended is not None
    assert CountingTime.comparisons <= 4 * 40, "a few times log2 of the queue's length, at most"
    assert CountingOrder.walks == 0
    CountingTime.comparisons = 0
    output = scheduler.schedule(2.0)
    assert names(output.requests) == ["r1", "r2", "r3", "r4"]
    assert CountingTime.comparisons <= 6 * 80
    assert CountingOrder.walks == 0
    assert scheduler.stats().num_waiting == num_waiting - 8


def test_removed_requests_do_not_stay_in_memory() -> None:
    order = FirstComeFirstServed()
    requests = [Request(f"r{i}", [1], arrival_time=float(i), max_tokens=1) for i in range(2000)]
    for request in requests:
        order.push(request)
    for request in requests[1:]:
        order.remove(request)
    assert len(order) == 1
    assert len(order._heap) < 200
    assert order.peek() is requests[0]


def test_an_order_may_be_an_object() -> None:
    class LastComeFirstServed(FirstComeFirstServed):
        name = "lcfs"

        def key(self, request: Request) -> tuple[float]:
            return (-request.arrival_time,)

    host = Host(order=LastComeFirstServed(), max_num_seqs=1)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 2, max_tokens=1)
    assert admission_order(host) == ["c", "b", "a"]


def test_an_incomplete_order_is_refused_with_its_missing_methods() -> None:
    class WithoutPosition:
        name, is_preemptive = "partial", False
        push = pop = put_back = peek = remove = __len__ = __contains__ = __iter__ = FirstComeFirstServed.push

    with pytest.raises(ConfigError, match=r"the object has no position$"):
        Scheduler(small_config(order=WithoutPosition()))
    with pytest.raises(ConfigError, match="the object has no name, is_preemptive, push"):
        Scheduler(small_config(order=object()))


@pytest.mark.parametrize("seed", range(4))
def test_the_fcfs_queue_equals_a_sorted_list_after_random_operations(seed: int) -> None:
    """With few requests, and with more than the sorted list can have."""
    chance = random.Random(seed)
    queue = FirstComeFirstServed()
    expected: list[Request] = []
    for serial in range(1, 1_501):
        what = chance.random()
        if what < 0.6 or not expected:
            arrival = chance.choice((float(serial), chance.random() * serial, -float(serial)))
            request = Request(f"r{serial}", [1], arrival_time=arrival, max_tokens=1)
            request._state.sequence_number = serial
            queue.push(request)
            expected.append(request)
            expected.sort(key=lambda request: request.arrival_time)
        elif what < 0.7:
            queue.remove(expected.pop(chance.randrange(len(expected))))
        elif what < 0.8:
            assert queue.pop() is expected.pop(0)
        elif what < 0.9:
            popped = [queue.pop() for _ in expected[: chance.randrange(100)]]
            queue.put_back(popped)
        else:
            count = chance.randrange(1, 150)
            assert queue.first(count) == expected[:count]
        assert len(queue) == len(expected)
        if expected and serial % 20 == 0:
            place = chance.randrange(len(expected))
            assert queue.position(expected[place]) == place
            assert set(queue) == set(expected)
    assert [queue.pop() for _ in range(len(queue))] == expected
