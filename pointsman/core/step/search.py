"""Search: finds requests to admit behind a head that lacks blocks, if a reserve allows bypasses (`policy/bypass.py`).

A step looks at up to 64 requests behind the head, in one of three ways, which lead to the same admissions:

    repeat   no change could admit a skipped request, or change the reason why it waits: O(1)
    scan     if the order can list the next requests: remembered needs (`needs.py`) are compared with the free blocks,
             and requests without a remembered need are checked at their places. If one of the requests may be
             admitted, the loop follows
    loop     the requests are removed from the queue one after the other, checked, and put back (`admission.py`)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pointsman.core.kv.cache import Pool
from pointsman.core.policy.reserve import LetsPass, Shortage
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request
from pointsman.core.step.needs import OPEN, OPEN_UNOWED, Levels, Need, Needs, Shortfall
from pointsman.core.step.request_table import RequestTable

MAX_SKIPPED = 64
"""Maximum number of requests skipped in a step, to bound the cost. The next request that is not admitted blocks the
queue."""


@dataclass(slots=True)
class KeptVerdict:
    """The verdict on a request that blocked the queue, with the state (`key`) that must change before the request is
    checked again."""

    request: Request
    key: tuple[Any, ...]
    shortage: Shortage | None
    """Missing blocks of the request; None: it did not lack blocks."""
    required_budget: int
    num_publications: int | None = None
    """Number of publications of blocks at the verdict, if `prefill_interval` held the request back; otherwise None."""


class Search:
    """The search behind the head of the queue in one step, and its result for later steps.

    Args:
        needs: remembered needs of requests; None: no needs are remembered.
        first: function that returns the first n requests of the queue, in order; None: the order returns only one
            request at a time.
    """

    def __init__(
        self,
        bypass: LetsPass,
        pool: Pool,
        table: RequestTable,
        needs: Needs | None,
        first: Callable[[int], list[Request]] | None,
    ) -> None:
        self._bypass = bypass
        self.bound = bypass.bound
        self._pool = pool
        self._table = table
        self.needs = needs
        self._first = first
        self.head: KeptVerdict | None = None
        """Verdict on the head, if the head and all skipped requests lack blocks; otherwise None."""
        self._min_blocks = 0  # minimum number of open blocks with which a skipped request would be admitted
        self._num_arrivals = -1  # `table.num_arrivals` after a search without admissions; -1: no such search
        self._skipped: list[Request] = []
        self._blocker: Request | None = None
        self._passed: list[tuple[Request, int]] = []  # skipped, lack blocks; number of admissions before
        self._checked: Sequence[Request] = ()  # skipped requests that were checked before the scan
        self._shortfalls: list[Shortfall] = []  # shortfalls that the newest search compared, if it was a scan
        self._same: tuple[int, int, int, int] | None = None  # ranges of free and open blocks that keep all reasons

    def open(self) -> None:
        """Reset the search to the head of the queue, before and after a step checks the queue."""
        self._bypass.open_queue()
        self._passed = []
        if self.needs is not None:
            self.needs.open()

    def is_done(self, kept: KeptVerdict) -> bool:
        """Whether a search behind the head, which lacks blocks by the verdict `kept`, would again admit no request."""
        if self.head is not kept or self._num_arrivals != self._table.num_arrivals:
            return False
        free = self._pool.num_free
        num_open = self._bypass.num_open(free)
        if num_open >= self._min_blocks:
            return False
        if self.needs is not None and self._shortfalls:
            self._same = self._same or _same_reasons(self._shortfalls, self.needs.levels)
            low, high, low_open, high_open = self._same
            if not (low <= free < high and low_open <= num_open < high_open):
                return False
            self.needs.set_free_blocks(free, num_open)
        return True

    def scan(
        self,
        kept: KeptVerdict,
        popped: Sequence[Request],
        check: Callable[[Request, int], Need | None],
        defer: Callable[[Request, Deferral], None],
    ) -> bool:
        """Compare remembered needs with the free blocks. Returns True if the search is done, because no request behind
        the head and the `popped` requests is admitted. `kept`: the verdict by which the head lacks blocks.

        `check` checks a request at its place in the queue. It returns None if the request would be admitted, or lacks
        something other than blocks. `defer` records why a request waits.
        """
        needs, first = self.needs, self._first
        if needs is None or first is None:
            return False
        known, max_num_tokens, levels = needs.known, needs.max_num_tokens, needs.levels
        num_waiting, bound = len(self._table.queue), self.bound
        window = first(MAX_SKIPPED + 1 - len(popped))
        start, end = 0 if popped else 1, len(window)
        shortfalls: list[Shortfall] = []
        for place in range(start, end):
            request = window[place]
            state = request._state
            need = known.get(request)
            if need is not None:
                shortfall = need[0]
                if shortfall.levels is not levels:
                    shortfall.move_to(levels)
                    shortfalls.append(shortfall)
                reason = shortfall.reason
            if (
                need is None
                or reason is None
                or need.serial != state.serial
                or need.num_waiting > num_waiting - place
                or need.num_tokens > max_num_tokens
            ):
                need = check(request, place)
                if need is None:
                    return False
                shortfalls.append(need.shortfall)
            else:
                before = state.deferral
                if before is None or before.reason is not reason:
                    defer(request, shortfall.deferral(reason, levels, state.num_bypassed >= bound))
            if state.num_bypassed >= bound:
                end = place
                break
        end = min(end, MAX_SKIPPED - len(popped))
        self._blocker = window[end] if end < len(window) else None
        self._skipped = [*popped, *window[:end]]
        self._checked = popped or window[:1]
        self._shortfalls, self._same = shortfalls, None
        least = min([each.min_blocks for each in shortfalls], default=MAX_INT)
        self.head, self._min_blocks = kept, least + levels[OPEN] - levels[OPEN_UNOWED]
        self._num_arrivals = self._table.num_arrivals
        needs.trim(self._skipped)
        self.repeat()
        return True

    def begin(self, head: Request, kept: KeptVerdict | None, num_admitted: int) -> None:
        """Record that the head is skipped, after `num_admitted` admissions. `kept`: the verdict by which the head lacks
        blocks; None: the head lacks something else."""
        if kept is not None:
            self._passed.append((head, num_admitted))
        self._num_arrivals = -1  # until this search has ended
        self.head, self._min_blocks = kept, MAX_INT
        self._shortfalls = []

    def is_bypass_limit_reached(self, num_admitted: int) -> bool:
        """Whether a skipped request that lacks blocks has been bypassed `bound` times, so that no further request may
        bypass it."""
        return any(
            request._state.num_bypassed + num_admitted - num_before >= self._bypass.bound
            for request, num_before in self._passed
        )

    def repeat(self) -> None:
        """Skip the same requests in this step as in the step before."""
        self._table.note_blocked(self._skipped, self._blocker)

    def record_skipped(self, request: Request, own: int | None, num_admitted: int) -> None:
        """Record that a request behind the head is skipped, after `num_admitted` admissions. `own`: number of blocks
        that the request would take; None: the request lacks something other than blocks."""
        if own is None:
            self.head = None
        else:
            self._passed.append((request, num_admitted))
            self._min_blocks = min(self._min_blocks, own)

    def close(self, *, found: bool) -> KeptVerdict | None:
        """End the loop. `found`: whether a request was admitted, or the loop ended for another reason. Returns the
        verdict on the head, to be kept."""
        self._num_arrivals = -1 if found else self._table.num_arrivals
        self._skipped, self._blocker = self._table.skipped, self._table.blocker
        if self.needs is not None:
            self.needs.trim(self._skipped)
        return self.head

    def deferral(self, request: Request) -> Deferral | None:
        """The deferral of a request that the newest step skipped without a check; otherwise None."""
        table, needs = self._table, self.needs
        if needs is None or not self._shortfalls or table.skipped is not self._skipped:
            return None
        if request is not table.blocker and (request in self._checked or request not in table.skipped):
            return None
        found = needs.deferral(request, MAX_INT, request is table.blocker)
        return None if found is None else found[0]

    def forget(self) -> None:
        """Forget all needs of requests behind the head, after recording why these requests waited in the newest
        step."""
        table = self._table
        for request in table.skipped if table.blocker is None else (*table.skipped, table.blocker):
            deferral = self.deferral(request)
            if deferral is not None:
                request._state.set_deferral(deferral, request._state.deferred_since)
        self._shortfalls = []
        if self.needs is not None:
            self.needs.forget()


def _same_reasons(shortfalls: Sequence[Shortfall], levels: Levels) -> tuple[int, int, int, int]:
    """The ranges of free and open blocks (minimum, maximum + 1 of each) in which all shortfalls keep their reasons at
    `levels`."""
    low, high = [-MAX_INT, -MAX_INT], [MAX_INT, MAX_INT]
    for level, blocks, _ in {rung for each in shortfalls for rung in each.rungs}:
        which = level % 2
        at = blocks + levels[which] - levels[level]
        if at <= levels[which]:
            low[which] = max(low[which], at)
        else:
            high[which] = min(high[which], at)
    return low[0], high[0], low[1], high[1]
