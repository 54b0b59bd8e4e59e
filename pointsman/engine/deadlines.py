"""Deadlines: a heap that finds overdue requests without looking at all requests."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.core import Request

MIN_ENTRIES = 64
"""Number of heap entries below which entries of finished requests are not removed."""


class Deadlines:
    """A heap of the deadlines of one engine's requests, in seconds on the engine's clock.

    The entry of a request that finishes in time stays in the heap until its deadline, or until the entries of finished
    requests may be more than half of the heap. So a deadline in an hour does not keep a request's prompt in memory for
    an hour.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._tie_breaks = count()  # requests cannot be compared
        self._prune_at = MIN_ENTRIES

    def add(self, request: Request, deadline: float) -> None:
        """Add a request that has to finish by `deadline`, a finite number (`params/requests.py` checks it)."""
        if len(self._heap) >= self._prune_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
            self._prune_at = max(MIN_ENTRIES, 2 * len(self._heap))
        heappush(self._heap, (deadline, next(self._tie_breaks), request))

    def take_overdue(self, now: float) -> list[Request]:
        """Remove and return the overdue requests that have not finished, the longest overdue first."""
        overdue = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if not request.is_finished:
                overdue.append(request)
        return overdue

    def earliest(self) -> float | None:
        """The earliest deadline of an unfinished request; None: no unfinished request has a deadline."""
        while self._heap and self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
