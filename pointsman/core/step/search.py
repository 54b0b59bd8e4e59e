"""Past a request that lacks blocks: were those behind it looked at, and need they be looked at again?

A step that finds nobody who may pass the head looks up to 64 requests. Until something changes that could admit one of
them (a request comes or goes, enough blocks are open to them, a lookup may find more), the next step need not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pointsman.core.kv.block_pool import BlockPool
from pointsman.core.policy.reserve import LetsPass, Shortage
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.request import Request
from pointsman.core.step.request_table import RequestTable


@dataclass(slots=True)
class KeptVerdict:
    """Why a request was blocked, and what must change before it is checked again."""

    request: Request
    key: tuple[Any, ...]
    shortage: Shortage | None
    """None: it did not lack blocks."""
    required_budget: int


class Search:
    """The search behind the head of the queue, in one step; and its result, for the steps after it."""

    def __init__(self, bypass: LetsPass, pool: BlockPool, table: RequestTable) -> None:
        self._bypass = bypass
        self._pool = pool
        self._table = table
        self._head: KeptVerdict | None = None
        self._least = 0  # blocks with which one of those that were skipped would be admitted
        self._num_arrivals = -1  # when the search ended without an admission
        self._skipped: list[Request] = []
        self._blocker: Request | None = None
        self._passed: list[tuple[Request, int]] = []  # lacking blocks, with how many were admitted before it was asked

    def open(self) -> None:
        """A step begins to check the queue, or has: what is asked next is asked of its head."""
        self._bypass.open_queue()
        self._passed = []

    def is_done(self, head: Request, kept: KeptVerdict | None) -> bool:
        """Whether a search behind `head`, which still lacks blocks, would again find nobody."""
        if self._head is None or self._head is not kept or head is not kept.request:
            return False
        if self._num_arrivals != self._table.num_arrivals:
            return False
        return self._bypass.num_open(self._pool.num_free) < self._least

    def is_spent(self, num_admitted: int) -> bool:
        """Whether one of those that lack blocks was passed as often as it may be."""
        return any(
            request._state.num_overtaken + num_admitted - num_before >= self._bypass.bound
            for request, num_before in self._passed
        )

    def skip(self, request: Request, kept: KeptVerdict | None, num_admitted: int, *, is_first: bool) -> None:
        """The request is skipped; `kept` is why, if it lacks blocks. `num_admitted` were admitted before it."""
        lacks_blocks = kept is not None and kept.request is request and kept.shortage is not None
        if lacks_blocks:
            self._passed.append((request, num_admitted))
        if is_first:
            self._num_arrivals = -1  # until this search has ended
            self._head, self._least = (kept if lacks_blocks else None), MAX_INT
        elif kept is not None and kept.shortage is not None and lacks_blocks:
            self._least = min(self._least, kept.shortage.own)
        else:
            self._head = None

    def repeat(self) -> None:
        """The search is done: those that it skipped are skipped in this step too."""
        self._table.skipped, self._table.blocker = self._skipped, self._blocker

    def close(self, *, found: bool) -> KeptVerdict | None:
        """The search ends; `found`: somebody was admitted, or another reason ended it. Returns the head's verdict, to
        be kept."""
        self._num_arrivals = -1 if found else self._table.num_arrivals
        self._skipped, self._blocker = self._table.skipped, self._table.blocker
        return self._head
