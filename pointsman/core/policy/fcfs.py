"""First come, first served: the default order, and the heap that other orders use.

`push`, `pop` and `remove` cost O(log n), `peek` costs O(1). A removed request leaves an empty entry, which is dropped
when it reaches the top of the heap. The first requests are in a sorted list, so that they can be read without being
removed. All later requests are in a heap.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from pointsman.core.policy.policy import Policy
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

MAX_SORTED = 256
"""Maximum length of the sorted list of first requests; it bounds the cost of an insertion."""


class FirstComeFirstServed(Policy):
    """By arrival time, ties by order of adding. One class: all requests are equally urgent.

    A policy of your own is easiest as a subclass: give it a `name`, and override `key`.
    """

    kind = "order"
    name = "fcfs"
    is_preemptive = False
    keeps_keys = True
    """Whether a request has the same key after `pop` and `put_back`."""

    def __init__(self) -> None:
        self._sorted: list[list[Any]] = []  # entries not greater than any in the heap
        self._heap: list[list[Any]] = []
        self._length = 0
        self._num_pushes = 0

    def guaranteed_steps(self, num_steps: int) -> int:
        """All `num_steps`, as the key of a request does not change while it waits."""
        return num_steps

    def reason(self, request: Request) -> str:
        """Why the request is not the head of the queue, in words; "": the only reason is that it arrived later."""
        return ""

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Request) -> bool:
        return request._state.queue_entry is not None

    def __iter__(self) -> Iterator[Request]:
        """The queued requests, in unspecified order."""
        return (entry[-1] for entry in chain(self._sorted, self._heap) if entry[-1] is not None)

    def urgency(self, request: Request) -> int:
        """The urgency class of a request; a smaller number is more urgent."""
        return 0

    def key(self, request: Request) -> tuple[Any, ...]:
        """The sort key of a request: a tuple. The request with the smallest key is the head.

        A key must not change while the request waits, and two requests must not have the same key. Preempted requests
        are first in their class: their clients already have a part of the output.
        """
        state = request._state
        resumed = state.status is RequestStatus.PREEMPTED
        place = state.serial if resumed else request.arrival_time
        return (self.urgency(request), 0 if resumed else 1, place, state.sequence_number)

    def push(self, request: Request) -> None:
        self._num_pushes += 1  # so that no entry equals a removed one in the heap
        entry: list[Any] = [*self.key(request), self._num_pushes, request]
        request._state.queue_entry = entry
        first = self._sorted
        if first and entry < first[-1]:
            insort(first, entry)
            if len(first) > MAX_SORTED:
                self._move_to_heap(MAX_SORTED // 2)
        elif not self._heap and len(first) < MAX_SORTED:
            first.append(entry)
        else:
            heapq.heappush(self._heap, entry)
        self._length += 1

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):  # among equal keys, the last push comes first
            self.push(request)

    @property
    def top(self) -> list[Any]:
        """The entry of the head: its key, the number of its push, and the request. The queue must not be empty."""
        first = self._sorted
        while not first or first[0][-1] is None:
            if first:
                del first[0]
            else:
                first.append(heapq.heappop(self._heap))
        return first[0]

    def first(self, count: int) -> list[Request]:
        """The first requests of the queue, at most `count`, in order."""
        first, heap = self._sorted, self._heap
        found: list[Request | None] = [entry[-1] for entry in first[:count]]
        if len(found) < count or None in found:
            first[:] = [entry for entry in first if entry[-1] is not None]
            while len(first) < 2 * count and heap:  # more than asked for, so that the next calls need no heap
                entry = heapq.heappop(heap)
                if entry[-1] is not None:
                    first.append(entry)
            found = [entry[-1] for entry in first[:count]]
        return found  # type: ignore[return-value]

    def _move_to_heap(self, count: int) -> None:
        """Move all but the first `count` requests from the sorted list to the heap."""
        for entry in self._sorted[count:]:
            heapq.heappush(self._heap, entry)
        del self._sorted[count:]

    def peek(self) -> Request:
        first = self._sorted
        head: Request | None = first[0][-1] if first else None
        if head is None:
            head = self.top[-1]
            assert head is not None
        return head

    def pop(self) -> Request:
        request = self.peek()
        del self._sorted[0]
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
        return sum(1 for entry in chain(self._sorted, self._heap) if entry[-1] is not None and entry < own)
