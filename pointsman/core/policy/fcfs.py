"""First come, first served: the order of the default, and the heap that other orders are made of.

Adding, taking and removing a request cost O(log n), the head is known in O(1): removal is lazy.
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

    @property
    def top(self) -> list[Any]:
        """The key of the head, the number of its push, and the head. The queue is not empty."""
        self.peek()
        return self._heap[0]

    def peek(self) -> Request:
        heap = self._heap
        while (request := heap[0][-1]) is None:
            heapq.heappop(heap)
        head: Request = request
        return head

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
