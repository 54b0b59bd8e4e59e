"""The search behind a request that lacks blocks, where a reserve lets others pass it (`policy/bypass.py`).

A step checks up to 64 requests behind the head, one after the other (`admission.py`). What a search has found is kept:
while nothing changes that could admit one of those it skipped, the next steps repeat its result in O(1).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import Any

from pointsman.core.kv.cache import Pool
from pointsman.core.policy.reserve import LetsPass, Shortage
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request
from pointsman.core.step.request_table import RequestTable

MAX_SKIPPED = 64
"""Maximum number of requests skipped in a step, which bounds the cost. The next one blocks the queue."""


@dataclass(slots=True)
class KeptVerdict:
    """Why a request was blocked, and what must change before it is checked again."""

    request: Request
    key: tuple[Any, ...]
    shortage: Shortage | None
    """None: it did not lack blocks."""
    required_budget: int


class Search:
    """The search behind the head of the queue, in one step; and its result, for the steps after it.

    Args:
        asks_connector: whether a check may ask a connector. Then a result is repeated also where the reasons may have
            changed, as each question may be slow.
    """

    def __init__(self, bypass: LetsPass, pool: Pool, table: RequestTable, *, asks_connector: bool) -> None:
        self._bypass = bypass
        self._asks_connector = asks_connector
        self._pool = pool
        self._table = table
        self._head: KeptVerdict | None = None  # why the head is skipped, if it and all that were checked lack blocks
        self._lacking: dict[Request, Shortage] = {}  # of those behind it that were checked
        self._levels: tuple[float, float, float, float] | None = None  # see `_levels_of`; None: not known yet
        self._num_open = 0  # blocks that those behind the head may take, in the newest step
        self._num_arrivals = -1  # when the search ended without an admission
        self._skipped: list[Request] = []
        self._blocker: Request | None = None
        self._passed: list[tuple[Request, int]] = []  # lacking blocks, with how many were admitted before it was asked

    def open(self) -> None:
        """A step begins to check the queue, or has: what is asked next is asked of its head."""
        self._bypass.open_queue()
        self._passed = []

    def is_done(self, kept: KeptVerdict) -> bool:
        """Whether a search behind the head, which lacks blocks as `kept` says, would again admit no request, and find
        the same reasons."""
        if self._head is not kept or self._num_arrivals != self._table.num_arrivals:
            return False
        free = self._pool.num_free
        num_open = self._bypass.num_open(free)
        if self._levels is None:
            return False
        low, high, low_open, high_open = self._levels
        if not (low <= free < high and low_open <= num_open < high_open):
            return False
        self._num_open = num_open
        return True

    def begin(self, head: Request, kept: KeptVerdict | None, num_admitted: int) -> None:
        """The head is skipped; `kept` is why, if it lacks blocks. `num_admitted` were admitted before it."""
        if kept is not None:
            self._passed.append((head, num_admitted))
        self._num_arrivals = -1  # until this search has ended
        self._head, self._lacking = kept, {}

    def note(self, request: Request, lacking: Shortage | None, num_admitted: int) -> None:
        """A request behind the head is skipped, or blocks the queue; None: it lacks something else than blocks.
        `num_admitted` were admitted before it."""
        if lacking is None:
            self._head = None
        else:
            self._passed.append((request, num_admitted))
            self._lacking[request] = lacking

    def is_spent(self, num_admitted: int) -> bool:
        """Whether one of those that lack blocks was passed as often as it may be."""
        return any(
            request._state.num_overtaken + num_admitted - num_before >= self._bypass.bound
            for request, num_before in self._passed
        )

    def close(self, *, found: bool) -> KeptVerdict | None:
        """The search ends; `found`: a request was admitted. Returns the head's verdict, to be kept."""
        free = self._pool.num_free
        self._num_open = self._bypass.num_open(free)
        self._num_arrivals = -1 if found else self._table.num_arrivals
        self._levels = None
        if not found and self._head is not None:
            lacking = self._lacking.values()
            if self._asks_connector:
                self._levels = -inf, inf, -inf, min([each.own for each in lacking], default=inf)
            else:
                self._levels = _levels_of(lacking, free, self._num_open)
        self._skipped, self._blocker = self._table.skipped, self._table.blocker
        return self._head

    def repeat(self) -> None:
        """The search is done: those that it skipped are skipped in this step too."""
        self._table.note_blocked(self._skipped, self._blocker)

    def deferral(self, request: Request) -> Deferral | None:
        """Why a request waits that was checked behind the head, with what it lacks in the newest step; None: the newest
        step has not repeated a search that checked it."""
        table, lacking = self._table, self._lacking.get(request)
        if lacking is None or table.skipped is not self._skipped or request._state.deferral is None:
            return None
        if request is not table.blocker and request not in table.skipped:
            return None
        return request._state.deferral._replace(missing=lacking.own - self._num_open)

    def forget(self) -> None:
        """Nothing is known of requests behind the head, but why they waited in the newest step."""
        table = self._table
        for request in table.skipped if table.blocker is None else (*table.skipped, table.blocker):
            deferral = self.deferral(request)
            if deferral is not None:
                request._state.defer(deferral, request._state.deferred_since)
        self._head, self._lacking = None, {}


def _levels_of(lacking: Iterable[Shortage], free: int, num_open: int) -> tuple[float, float, float, float]:
    """Free and open blocks (least, and one more than most, of each) with which all these requests lack blocks for the
    reasons that they have now."""
    low, high, low_open, high_open = -inf, inf, -inf, inf
    for shortage in set(lacking):
        kept = shortage.required - shortage.own
        for enough, _ in (*shortage.rungs, (shortage.required, None)):
            low, high = (max(low, enough), high) if enough <= free else (low, min(high, enough))
            enough -= kept  # the blocks that are kept change with the free ones
            low_open, high_open = (
                (max(low_open, enough), high_open) if enough <= num_open else (low_open, min(high_open, enough))
            )
    return low, high, low_open, high_open
