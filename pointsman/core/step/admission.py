"""The attempt to admit one request: its verdict, and the reason if it must wait.

The tests run from the cheapest to the dearest: a free seat, a token of budget, its own samples in flight, a slot for
its adapter, and only then a look-up in the prefix tree, the limits, and the blocks with every reserve. A head that was
found blocked for want of blocks stays so, at O(1) a step, until something changed that could let it in: what a look-up
could find, what others are owed, whether anything runs, or enough free blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager, Match
from pointsman.core.kv.transfers import NOTHING, External, Transfers
from pointsman.core.policy.adapters import AdapterSlots
from pointsman.core.policy.limits import Limit
from pointsman.core.policy.partial_prefills import PartialPrefills
from pointsman.core.policy.reserve import Demand, Learns, Reserve
from pointsman.core.state.reason import Blocked, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class Grant(NamedTuple):
    """The request may be admitted."""

    match: Match
    num_tokens: int
    """Tokens it computes in this step, at least 1 unless `is_async`."""
    num_cached_tokens: int
    """Tokens it need not compute."""
    num_new_blocks: int
    """Blocks beyond the matched ones."""
    charge: int
    """Tokens that it takes from the step's budget, at least `num_tokens`."""
    num_external_tokens: int = 0
    """Of the cached ones, tokens that a connector loads, or has loaded."""
    is_async: bool = False
    """Whether it must be loaded before it can be admitted: then it computes nothing in this step."""


class Shortage(NamedTuple):
    """A request lacks blocks."""

    required: int
    """Free blocks that admitting it takes, with every reserve."""
    rungs: Sequence[tuple[int, Reason]]
    """The reason is that of the first for whose number the free blocks suffice."""

    def verdict(self, free: int) -> Blocked:
        """Why the request waits while so many blocks, fewer than required, are free."""
        for enough, reason in self.rungs:
            if enough <= free:
                return Blocked(reason, self.required - free)
        raise AssertionError("the last one needs nothing")


@dataclass(slots=True)
class _Remembered:
    """Why a request was blocked, and what must have changed before it is worth another look."""

    request: Request
    key: tuple[Any, ...]
    shortage: Shortage | None
    """None: it was not for want of blocks."""
    required_budget: int


class Admission:
    """Tries requests against the configuration's limits and reserves."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv: KVCacheManager,
        limits: list[Limit],
        reserves: list[Reserve],
        adapters: AdapterSlots,
        partial_prefills: PartialPrefills | None,
        transfers: Transfers | None = None,
    ) -> None:
        self.max_num_active_seqs = config.num_seats
        self._full_budget = config.max_num_batched_tokens
        self._first_chunk_only = config.first_chunk_only
        self.asks_whole = config.admission_charge != "uncached"
        self._charges_whole = config.admission_charge == "whole"
        self._chunked = config.enable_chunked_prefill
        # With the full sequence reserved, what is required does not depend on the size of the first chunk.
        self._depends_on_chunk = not config.full_sequence_must_fit
        # Nor does it depend on what is found that nobody holds, which is taken from the free blocks too.
        self._depends_on_found = (
            self._depends_on_chunk or not self._chunked or self._first_chunk_only or transfers is not None
        )
        self._kv = kv
        self._limits = limits
        self._reserves = reserves
        self._adapters = adapters
        self.partial_prefills = partial_prefills
        self._learning = [reserve for reserve in reserves if isinstance(reserve, Learns)]
        self.num_lessons = 0
        """Changes whenever a reserve may ask for other blocks than before."""
        self._transfers = transfers
        self._remembered: _Remembered | None = None

    def open(self) -> None:
        """A step begins to ask the queue, from its head on and in order."""
        self._adapters.open()

    def attempt(self, request: Request, budget: int, num_running: int, owed: int) -> Grant | Blocked:
        """Try to admit `request` beside `num_running` others, with `budget` tokens left in the step.

        `owed` is how many blocks running requests still need for tokens that they already have.
        """
        if num_running >= self.max_num_active_seqs:
            return Blocked(Reason.SEQUENCE_LIMIT, num_running - self.max_num_active_seqs + 1)
        if budget <= 0:
            return Blocked(Reason.BUDGET, 1)
        if request._state.num_pending:
            return Blocked(Reason.IN_FLIGHT, request._state.num_pending)
        if request.adapter is not None:
            without_slot = self._adapters.ask(request)
            if without_slot is not None:
                return without_slot
        key = self._key(budget, num_running, owed)
        seen = self._remembered
        if seen is not None and seen.request is request and seen.key == key:
            if budget < seen.required_budget:
                return Blocked(Reason.BUDGET, seen.required_budget - budget)
            shortage, free = seen.shortage, self._kv.pool.num_free
            if shortage is not None and free < shortage.required:
                return shortage.verdict(free)
        return self._judge(request, budget, num_running, owed, key)

    def take(self, request: Request, grant: Grant) -> None:
        """The request is admitted."""
        for limit in self._limits:
            limit.take(request, grant.num_cached_tokens, grant.num_tokens)

    def required_blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        """Free blocks that admitting the request takes, with every reserve."""
        required = demand.first
        for reserve in self._reserves:
            required += reserve.blocks(request, demand, something_runs)
        return required

    def would_be_partial(self, request: Request, budget: int) -> bool:
        """Whether its prefill may outlast a step that has `budget` left, as if nothing were cached."""
        want = request._state.num_tokens
        for limit in self._limits:
            allowed = limit.admit(request, 0, want)
            want = 0 if isinstance(allowed, Blocked) else allowed
        return min(want, budget) < request._state.num_tokens

    def must_start_whole(self, request: Request) -> bool:
        """Whether all its uncached tokens must fit one step. A resumed request may always be chunked."""
        return not self._chunked and request._state.status is not RequestStatus.PREEMPTED

    def may_have_to_fit(self, request: Request) -> bool:
        """Whether it may have to fit what a step has left, as if nothing were cached."""
        return self.must_start_whole(request) or self._first_chunk_only or self.asks_whole

    def _must_fit(self, request: Request, budget: int) -> bool:
        """Whether it may not be cut to `budget`, what the step has left."""
        taken = budget < self._full_budget
        return self.must_start_whole(request) or (taken and self._first_chunk_only)

    def note_end(self, request: Request) -> None:
        """A request has ended, wherever it was."""
        for reserve in self._learning:
            if reserve.on_finished(request):
                self.num_lessons += 1

    def forget(self) -> None:
        """A request left the queue. If it was admitted, it may hold blocks that the head then need not pay for."""
        self._remembered = None

    def _key(self, budget: int, num_running: int, owed: int) -> tuple[Any, ...]:
        kv = self._kv
        found = kv.num_publications if self._depends_on_found else kv.num_held_publications
        if not self._depends_on_chunk:
            return (found, num_running > 0, owed, self.num_lessons)
        chunk = (budget, kv.num_evictions, *[limit.revision for limit in self._limits])
        return (found, num_running > 0, owed, self.num_lessons, chunk)

    def _judge(
        self, request: Request, budget: int, num_running: int, owed: int, key: tuple[Any, ...]
    ) -> Grant | Blocked:
        kv = self._kv
        match = kv.look_up(request)
        known, cached = request._state.num_tokens, len(match.blocks) * kv.block_size
        external = NOTHING if self._transfers is None else self._transfers.ask(request, cached)
        if isinstance(external, Blocked):
            return external
        cached += external.num_tokens
        if external.is_async:
            return self._judge_load(request, num_running, owed, match, external, key)
        want = known - cached
        whole = known if self.asks_whole else want
        if whole > budget and self._must_fit(request, budget):
            self._remembered = _Remembered(request, key, None, min(whole, self._full_budget))
            return Blocked(Reason.BUDGET, whole - budget)
        for limit in self._limits:
            allowed = limit.admit(request, cached, want)
            if isinstance(allowed, Blocked):
                return allowed
            want = allowed
        num_tokens = min(want, budget)
        if self.partial_prefills is not None and num_tokens < known - cached:
            too_many = self.partial_prefills.ask(request)
            if too_many is not None:
                return too_many
        held = 0 if self.asks_whole else kv.pool.num_in_use(match.blocks)
        table_blocks = kv.blocks_for(cached + num_tokens)
        demand = Demand(table_blocks - held, kv.blocks_for(known) - held, owed)
        blocked = self._lacks_blocks(request, demand, num_running > 0, key)
        if blocked is not None:
            return blocked
        charge = min(known, budget) if self._charges_whole else num_tokens
        loaded = external.num_tokens
        if request._state.holding is not None:
            loaded = request._state.holding.num_external_blocks * kv.block_size
        return Grant(match, num_tokens, cached, table_blocks - len(match.blocks), charge, loaded)

    def _judge_load(
        self, request: Request, num_running: int, owed: int, match: Match, external: External, key: tuple[Any, ...]
    ) -> Grant | Blocked:
        """Whether the blocks that are to be loaded fit, with every reserve. It takes neither a seat nor tokens yet."""
        kv = self._kv
        cached = len(match.blocks) * kv.block_size + external.num_tokens
        held = 0 if self.asks_whole else kv.pool.num_in_use(match.blocks)
        demand = Demand(kv.blocks_for(cached) - held, kv.blocks_for(request._state.num_tokens) - held, owed)
        blocked = self._lacks_blocks(request, demand, num_running > 0, key)
        if blocked is not None:
            return blocked
        return Grant(match, 0, cached, kv.blocks_for(cached) - len(match.blocks), 0, external.num_tokens, True)

    def _lacks_blocks(
        self, request: Request, demand: Demand, something_runs: bool, key: tuple[Any, ...]
    ) -> Blocked | None:
        """Blocked for want of blocks, by the first reserve whose removal alone would let the request in.

        If none would: by the blocks of its first chunk, or else by the last reserve.
        """
        free = self._kv.pool.num_free
        required = self.required_blocks(request, demand, something_runs)
        if required <= free:
            return None
        rungs = [(required - each.blocks(request, demand, something_runs), each.reason) for each in self._reserves]
        if self._reserves:
            rungs.append((demand.first, self._reserves[-1].reason))
        shortage = Shortage(required, [*rungs, (0, Reason.BLOCKS)])
        self._remembered = _Remembered(request, key, shortage, 0)
        return shortage.verdict(free)
