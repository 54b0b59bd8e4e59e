"""Which request comes next? The orders of the waiting queue.

To add one: a `Policy` with the methods of `Order` (`state/interfaces.py`), its name in `ORDERS` at the end of this
file; or in a package of its own (`registry.py`); or pass an object as `SchedulerConfig(order=...)`.

An order is a queue of its own. The built-in ones are a heap with lazy removal, so adding, taking and removing a
request cost O(log n) and the head is known in O(1). The key of a request is

    (class, 0 if it ran before else 1, its last admission or else its arrival, order of adding, number of the push)

so a preempted request returns to the front of its class, and requests preempted together resume in the order in which
they were admitted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

from pointsman.core.policy.policy import Policy
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class FirstComeFirstServed(Policy):
    """By arrival time, ties by order of adding. One class: all requests are equally urgent."""

    kind = "order"
    name = "fcfs"
    displaces = False

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []
        self._length = 0
        self._num_pushes = 0

    def horizon(self, num_steps: int) -> int:
        """Keys do not change while a request waits."""
        return num_steps

    def reason(self, request: Request) -> str:
        """Why it is not first, in the policy's words; "": it came later."""
        return ""

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Request) -> bool:
        return request._state.queue_entry is not None

    def __iter__(self) -> Iterator[Request]:
        """The queued requests, in unspecified order."""
        return (entry[-1] for entry in self._heap if entry[-1] is not None)

    def urgency(self, request: Request) -> int:
        """The class of a request; smaller is more urgent."""
        return 0

    def key(self, request: Request) -> tuple[Any, ...]:
        """The sort key of a request; the smallest is the head."""
        resumed = request.status is RequestStatus.PREEMPTED
        place = request.serial if resumed else request.arrival_time
        return (self.urgency(request), 0 if resumed else 1, place, request.sequence_number)

    def push(self, request: Request) -> None:
        self._num_pushes += 1  # otherwise a removed entry that is still in the heap might be equal
        entry: list[Any] = [*self.key(request), self._num_pushes, request]
        request._state.queue_entry = entry
        heapq.heappush(self._heap, entry)
        self._length += 1

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):  # where that decides, the last one pushed comes first
            self.push(request)

    def peek(self) -> Request:
        heap = self._heap
        while heap[0][-1] is None:
            heapq.heappop(heap)
        request: Request = heap[0][-1]
        return request

    def pop(self) -> Request:
        request = self.peek()
        heapq.heappop(self._heap)
        request._state.queue_entry = None
        self._length -= 1
        return request

    def remove(self, request: Request) -> None:
        assert request._state.queue_entry is not None
        request._state.queue_entry[-1] = None  # the heap drops it when it reaches the top
        request._state.queue_entry = None
        self._length -= 1
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if entry[-1] is not None]
            heapq.heapify(self._heap)

    def position(self, request: Request) -> int:
        assert request._state.queue_entry is not None
        own = request._state.queue_entry
        return sum(1 for entry in self._heap if entry[-1] is not None and entry < own)


class PriorityOrder(FirstComeFirstServed):
    """By priority, smaller first; within a priority as first come, first served."""

    name = "priority"
    displaces = True
    reads = frozenset({"priority"})

    def urgency(self, request: Request) -> int:
        return request.priority


class FrontFirst(FirstComeFirstServed):
    """As "fcfs", but the request that was preempted last is the head (the field's schedulers push a victim to the
    front).

    It differs where a victim resumes, and is preempted again before an earlier victim behind it resumed.
    """

    name = "fcfs-front"

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, -request.loss_number, 0)
        return (1, request.arrival_time, request.sequence_number)


class ArrivalPriority(PriorityOrder):
    """By priority, then by arrival, whether preempted or new, without priority preemption (vLLM's "priority")."""

    name = "priority-by-arrival"
    displaces = False

    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.priority, request.arrival_time, request.sequence_number)


ORDERS: dict[str, type[FirstComeFirstServed]] = {
    order.name: order for order in (FirstComeFirstServed, PriorityOrder, FrontFirst, ArrivalPriority)
}
