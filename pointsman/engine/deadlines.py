"""Deadlines of requests: overdue ones are found without looking at the others."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pointsman.core import Request

FEWEST = 64
"""The number of entries from which those of finished requests are removed."""


class Deadlines:
    """The deadlines of one engine's requests, in seconds on its clock: a heap.

    Requests that finish in time are not removed from it. Their entries go when they are due, or when they may be more
    than half of all, so that a deadline in an hour does not keep a request's prompt for an hour.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._tie_breaks = count()  # requests have no order
        self._look_at = FEWEST

    def add(self, request: Request, deadline: float) -> None:
        """The request has to end by then. The deadline is a finite number, see `check`."""
        if len(self._heap) >= self._look_at:
            self._heap = [entry for entry in self._heap if not entry[2].is_finished]
            heapify(self._heap)
            self._look_at = max(FEWEST, 2 * len(self._heap))
        heappush(self._heap, (deadline, next(self._tie_breaks), request))

    def take_overdue(self, now: float) -> list[Request]:
        """The overdue requests that have not finished, the longest overdue first; each is returned once."""
        overdue = []
        while self._heap and self._heap[0][0] <= now:
            request = heappop(self._heap)[2]
            if not request.is_finished:
                overdue.append(request)
        return overdue

    def next(self) -> float | None:
        """The earliest deadline; None: there is none."""
        while self._heap and self._heap[0][2].is_finished:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
