"""Part 2 of the step: decides how many tokens each running request advances, with array operations over all rows.

A row asks for `num_tokens + num_pending - num_computed_tokens` tokens (known tokens and samples in flight, less
computed ones) and for its waiting drafts (`drafts.py`). A step distributes tokens and blocks, then commits the result.
A step does this in one of two ways:

    steady    every row decodes one token and verifies its drafts, if any: no flags, enough budget and blocks
    general   limits, the budget by one cumulative sum, and blocks for all rows that lack some

When blocks run out, one request is preempted, and tokens and blocks are distributed again among the other requests. The
victim policy chooses the request (`policy/victim.py`); `RequestTable.preempt` takes it off its row.

If `shortage` is "in-order" or "look-ahead", `InOrder` handles the shortage: rows get their tokens and blocks one after
the other, as in the systems that the presets are named after. Rows keep the tokens and blocks that they got. Blocks
that a victim releases are available only to the asking row and to the rows behind it. If the asking row is itself
preempted, no row behind it runs in this step (`own_preemption_ends_step`). While blocks suffice, both ways give the
same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.cache import KVCache
from pointsman.core.policy.budget import StepBudget
from pointsman.core.policy.gate import Limit
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.batch import PREFILLING, Batch, Members
from pointsman.core.state.events import Need
from pointsman.core.state.interfaces import Victim
from pointsman.core.state.output import IntArray
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.status import PreemptionCause
from pointsman.core.state.tokens import NO_TOKENS
from pointsman.core.step.drafts import Drafts

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Preempt(Protocol):
    """A function that preempts a running request at the time `now`."""

    def __call__(self, request: Request, cause: PreemptionCause, need: Need, now: float, /) -> None: ...


class Advance(NamedTuple):
    """The work of the running rows in a step, from which the first fields of the step's `SchedulerOutput` are made."""

    requests: tuple[Request, ...]
    rows: Int64Array
    serials: Int64Array
    num_computed_tokens: Int64Array
    num_scheduled_tokens: Int64Array
    samples: BoolArray
    num_draft_tokens: Int64Array
    draft_token_ids: Int32Array
    block_ids: IntArray
    block_rows: IntArray
    total: int
    """Number of scheduled tokens of all rows together."""
    preempted: bool = False
    """Whether a request was preempted for memory."""
    unpublished: Sequence[Request] = ()
    """Requests that compute prompt tokens in this step, so that their blocks must be published."""

    def num_pending(self) -> Int64Array:
        """[rows] number of samples that the step adds to each row, as `SchedulerOutput.num_pending`."""
        return self.samples.astype(np.int64)


class Running:
    """Advances the running rows in a step."""

    _replans = True
    """Whether a preemption for blocks recomputes the step for all other rows, without the victim."""

    def __init__(
        self,
        config: SchedulerConfig,
        budget: StepBudget,
        batch: Batch,
        kv: KVCache,
        limits: list[Limit],
        victim: Victim,
        view: SchedulerView,
        drafts: Drafts,
    ) -> None:
        self._budget = budget
        self._batch = batch
        self._kv = kv
        self._limits = limits
        self._victim = victim
        self._view = view
        self._drafts = drafts
        self.steady_allowed = not any(limit.limits_decode for limit in limits)
        """Whether no limit restricts decodes, so that no limit is called when every row decodes one token."""
        self.steady_rows = budget.full
        """Maximum number of rows that can all decode in one step."""
        self._speculates = config.num_draft_tokens > 0
        self._max_in_flight = (
            config.max_steps_in_flight - 1
        )  # maximum samples of a row in flight while a step is scheduled
        limited = any(limit.limits_drafts for limit in limits)
        self._steady_drafts_allowed = not limited and config.num_draft_tokens < config.block_size

    def advance(self, in_flight: bool, preempt: Preempt) -> Advance:
        """Decide and commit the tokens of every running row; `preempt` is called for each victim."""
        preempted = False
        while self._is_steady(in_flight):
            advance = self._advance_steadily(in_flight, preempted)
            if advance is not None:
                return advance
            if in_flight or self._drafts.waiting or not self._replans:
                break
            self._free_blocks(preempt)
            preempted = True
        return self._distribute_and_commit(*self.wants(with_drafts=True), preempt)

    def empty_advance(self) -> Advance:
        """An `Advance` without rows."""
        members = self._batch.members
        nothing = members.rows[:0]
        none, no_drafts = members.trues[:0], members.zeros[:0]
        return Advance(
            (), nothing, members.serials[:0], nothing, nothing, none, no_drafts, NO_TOKENS, NO_BLOCKS, NO_BLOCKS, 0
        )

    def wants(
        self, *, with_drafts: bool, alone: bool = False, only_prefills: bool = False
    ) -> tuple[Int64Array, Int64Array]:
        """Returns two arrays [rows]: the number of tokens that each row has yet to compute ("lacks"), and the number of
        tokens that the limits allow each row, before the budget cuts it ("want").

        `with_drafts`: whether the second array includes waiting drafts. `alone`: whether to ignore shared limits, which
        gives an upper bound. `only_prefills`: whether decoding rows get 0, so that no limit reserves tokens for
        decodes.
        """
        batch, members = self._batch, self._batch.members
        rows = members.rows
        expected = batch.num_tokens[rows] + batch.num_pending[rows]
        lacks = expected - batch.num_computed_tokens[rows]
        lacks[expected >= members.token_limit] = 0  # the row's last token is in flight
        if self._speculates:
            np.maximum(lacks, 0, out=lacks)  # with drafts in flight, the row's next position is unknown
        want = lacks.copy()
        if with_drafts and self._drafts.waiting:
            want += self._drafts.num_allowed(rows)
        if only_prefills:
            want[(batch.flags[rows] & PREFILLING) == 0] = 0
        for limit in self._limits:
            if not (alone and limit.is_shared):
                limit.clip(batch, rows, want)
        return lacks, want

    def blocks_needed(self, want: Int64Array, rows: Int64Array) -> Int64Array:
        """[rows] number of new blocks that each row needs to advance by `want` [rows] tokens."""
        return self._kv.num_blocks_to_grow(self._batch, rows, want)

    def num_owed_blocks_of_row(self, row: int) -> int:
        """Number of blocks that the row `row` still needs for its known tokens."""
        return self._kv.num_owed_of(self._batch, row)

    def num_owed_blocks(self) -> int:
        """Number of blocks that rows with a partial prefill still need for their known tokens."""
        batch = self._batch
        if batch.num_prefilling == 0:
            return 0
        rows = batch.members.rows
        rows = rows[(batch.flags[rows] & PREFILLING) != 0]
        return int(self._kv.num_blocks_owed(batch, rows).sum())

    # ------------------------------------------------------------------ steady

    def _is_steady(self, in_flight: bool) -> bool:
        """Whether every row may decode one token and verify its waiting drafts, apart from the blocks that this
        needs."""
        batch, drafts = self._batch, self._drafts
        num_rows = len(batch.members.requests)
        if not self.steady_allowed or batch.num_prefilling or num_rows > self.steady_rows:
            return False
        if drafts.waiting:
            fits = self._steady_drafts_allowed and num_rows + drafts.waiting <= self._budget.tokens
            return fits and drafts.are_all_allowed_for(batch.members.rows)
        return not in_flight or (not self._speculates and self._may_run_ahead())

    def _advance_steadily(self, in_flight: bool, preempted: bool) -> Advance | None:
        """Let every row decode one token and verify its waiting drafts. None: too few blocks are free, and nothing has
        changed."""
        batch, drafts = self._batch, self._drafts
        members = batch.members
        rows = members.rows
        computed = batch.num_computed_tokens[rows]
        total, granted, num_drafts, token_ids = len(rows), members.ones, members.zeros, NO_TOKENS
        more: int | Int64Array = 1
        if drafts.waiting:
            total, granted, num_drafts = total + drafts.waiting, drafts.num_verified_tokens(), drafts.counts
            lacking = (computed + granted > batch.num_slots[rows]).nonzero()[0]
            more = granted[lacking]
        else:
            lacking = (computed >= batch.num_slots[rows]).nonzero()[0]
        block_ids: IntArray = NO_BLOCKS
        if len(lacking):
            grown = self._kv.grow_by_one(batch, rows[lacking], more)
            if grown is None:
                return None
            block_ids = grown
        if drafts.waiting:
            token_ids = drafts.pop_all()
        batch.schedule(rows, computed, granted, members.trues, not in_flight)
        fields = (
            members.requests,
            rows,
            members.serials,
            computed,
            granted,
            members.trues,
            num_drafts,
            token_ids,
            block_ids,
            lacking,
            total,
            preempted,
            (),
        )
        advance: Advance = new_tuple(Advance, fields)
        return advance

    def advance_steps(self, num_steps: int) -> tuple[Advance, Int64Array]:
        """Let every row decode one token in each of `num_steps` steps, for which enough blocks are free. Returns the
        work of the rows in all steps together, and, for each new block, the index of the step that takes it."""
        batch, members = self._batch, self._batch.members
        computed = batch.num_computed_tokens[members.rows]
        block_ids, block_rows, block_steps = self._kv.grow_for_steps(batch, members.rows, computed, num_steps)
        granted = np.full(len(computed), num_steps)
        batch.schedule(members.rows, computed, granted, members.trues, True)
        of_rows = (members.requests, members.rows, members.serials, computed, granted, members.trues, members.zeros)
        return Advance(*of_rows, NO_TOKENS, block_ids, block_rows, num_steps * len(computed)), block_steps

    def _may_run_ahead(self) -> bool:
        """Whether every row may decode while its sample is in flight, because no sample in flight reaches the row's
        token limit."""
        batch, members = self._batch, self._batch.members
        if batch.num_not_ahead:
            return False
        if batch.min_tokens_left > self._max_in_flight:
            return True
        expected = batch.num_tokens[members.rows] + batch.num_pending[members.rows]
        return not (expected >= members.token_limit).any()

    def _free_blocks(self, preempt: Preempt) -> None:
        """Preempt one request, in a step in which every row decodes one token and some rows lack a block."""
        batch, rows = self._batch, self._batch.members.rows
        end = np.add.accumulate(self.blocks_needed(batch.ones[: len(rows)], rows))
        free = self._kv.pool.num_free
        self._preempt_for(int(rows[end.searchsorted(free, side="right")]), int(end[-1]) - free, preempt)

    def _preempt_for(self, asking: int, num_missing: int, preempt: Preempt) -> int:
        """Preempt a request for the row `asking`, the first in admission order that lacks blocks; `num_missing` blocks
        are missing for all rows. Returns the victim's row."""
        self._view.num_missing_blocks = num_missing
        members = self._batch.members  # earlier victims of this step are no longer members
        index = int((members.rows == asking).argmax())
        victim = self._victim.choose(self._view, index)
        need = Need(members.requests[index], num_missing, self._victim.name)
        preempt(members.requests[victim], PreemptionCause.MEMORY, need, self._view.now)
        return int(members.rows[victim])

    # ------------------------------------------------------------------ general

    def _distribute_and_commit(self, lacks: Int64Array, want: Int64Array, preempt: Preempt) -> Advance:
        """Cut `want` to the budget and the free blocks, and commit the result. Victims are preempted before the commit.
        `lacks`, `want`: the arrays that `wants` returns."""
        batch, members = self._batch, self._batch.members
        granted, needed, block_ids, preempted = self._distribute(lacks, want, preempt)
        requests, rows, serials = members.requests, members.rows, members.serials
        runs = granted > 0
        if np.count_nonzero(runs) < len(runs):
            picked = runs.nonzero()[0]
            rows, serials, lacks, granted, needed = (a[picked] for a in (rows, serials, lacks, granted, needed))
            requests = tuple([requests[index] for index in picked.tolist()])
        computed, samples = batch.num_computed_tokens[rows], granted >= lacks
        num_drafts, drafts = batch.zeros[: len(rows)], NO_TOKENS
        if self._drafts.waiting:
            num_drafts = np.maximum(granted - lacks, 0)
            drafts = self._drafts.pop_drafts(rows, num_drafts)
        block_rows = batch.count_up[: len(rows)].repeat(needed)
        unpublished = self._commit_prefills(requests, rows, computed, granted, samples) if batch.num_prefilling else ()
        batch.schedule(rows, computed, granted, samples, False)
        of_rows = (requests, rows, serials, computed, granted, samples, num_drafts, drafts)
        return Advance(*of_rows, block_ids, block_rows, int(granted.sum()), preempted, unpublished)

    def _commit_prefills(
        self,
        requests: tuple[Request, ...],
        rows: Int64Array,
        computed: Int64Array,
        granted: Int64Array,
        samples: BoolArray,
    ) -> list[Request]:
        """Commit the tokens of rows with a partial prefill, which may end in this step; returns the requests of these
        rows."""
        batch, prefilling = self._batch, []
        for index in (batch.flags[rows] & PREFILLING).nonzero()[0].tolist():
            prefilling.append(requests[index])
            for limit in self._limits:
                limit.commit(requests[index], int(computed[index]), int(granted[index]))
            if samples[index]:
                batch.clear_flags(int(rows[index]), PREFILLING)
        return prefilling

    def _distribute(
        self, lacks: Int64Array, want: Int64Array, preempt: Preempt
    ) -> tuple[Int64Array, Int64Array, IntArray, bool]:
        """Distribute tokens and blocks to all rows. Returns [rows] number of granted tokens, [rows] number of new
        blocks, the ids of the new blocks row after row, and whether a request was preempted."""
        members = self._batch.members
        preempted = False
        while True:
            granted = self._within_budget(self._with_fewer_drafts(lacks, want))
            needed = self.blocks_needed(granted, members.rows)
            end = np.add.accumulate(needed)
            free = self._kv.pool.num_free
            if not len(end) or end[-1] <= free:
                return granted, needed, self._allocate_blocks(members, needed, granted), preempted
            if not preempted and self._give_up_drafts(members.rows, lacks, want):
                continue
            asking = int(members.rows[end.searchsorted(free, side="right")])
            victim = self._preempt_for(asking, int(end[-1]) - free, preempt)
            want[members.rows == victim] = 0  # the victim's tokens of this step are released
            preempted = True

    def _give_up_drafts(self, rows: Int64Array, lacks: Int64Array, want: Int64Array) -> bool:
        """Lower `want` so that drafts take no additional blocks, because blocks are short. Returns whether `want`
        changed."""
        batch = self._batch
        if not self._drafts.waiting:
            return False
        computed = batch.num_computed_tokens[rows]
        slots = self._kv.num_slots_after_growth(batch, rows, lacks)
        lower = want > slots - computed
        want[lower] = (slots - computed)[lower]
        return bool(lower.any())

    def _allocate_blocks(self, members: Members, needed: Int64Array, granted: Int64Array) -> IntArray:
        """Allocate `needed` [rows] new blocks for the granted tokens of each row; returns their ids, row after row. The
        pool has enough free blocks."""
        short = needed.nonzero()[0]
        if not len(short):
            return NO_BLOCKS
        rows = members.rows[short]
        ends = self._batch.num_computed_tokens[rows] + granted[short]
        return self._kv.grow(self._batch, rows, needed[short], ends)

    def _with_fewer_drafts(self, lacks: Int64Array, want: Int64Array) -> Int64Array:
        """[rows] `want` with a cap on the number of drafts per row, so that the budget suffices for one token of every
        row."""
        if not self._drafts.waiting:
            return want
        known = np.minimum(lacks, want)
        drafts = want - known
        left = self._budget.tokens - np.count_nonzero(want)
        if drafts.sum() <= left:
            return want
        ends = np.minimum(drafts, np.arange(int(drafts.max()))[:, None]).sum(
            axis=1
        )  # [maximum per row] number of drafts of all rows
        known += np.minimum(drafts, ends.searchsorted(left, side="right") - 1)
        return known

    def _within_budget(self, want: Int64Array) -> Int64Array:
        """[rows] `want`, cut to the token budget in admission order."""
        end = np.add.accumulate(want)
        if not len(end) or end[-1] <= self._budget.tokens:
            return want
        return np.clip(self._budget.tokens - (end - want), 0, want)


class InOrder(Running):
    """Advances the running rows, and distributes blocks row by row, see `SchedulerConfig.shortage`.

    It also limits the number of rows of a step to `max_num_seqs`, as more requests may be running.
    """

    _replans = False

    def __init__(
        self,
        config: SchedulerConfig,
        budget: StepBudget,
        batch: Batch,
        kv: KVCache,
        limits: list[Limit],
        victim: Victim,
        view: SchedulerView,
        drafts: Drafts,
    ) -> None:
        super().__init__(config, budget, batch, kv, limits, victim, view, drafts)
        self._max_rows = config.max_num_seqs
        self._looks_ahead = config.shortage == "look-ahead"
        self._own_preemption_ends = config.own_preemption_ends_step
        self.steady_rows = min(self.steady_rows, self._max_rows)

    def advance_prefills(self, preempt: Preempt) -> Advance:
        """As `advance`, but only rows with a partial prefill advance."""
        return self._distribute_and_commit(*self.wants(with_drafts=False, only_prefills=True), preempt)

    def advance_decodes(self, in_flight: bool, preempt: Preempt, *, was_preempted: bool) -> Advance:
        """As `advance`, but only rows without a partial prefill advance. No drafts are verified if a request was
        preempted in this step."""
        batch = self._batch
        if batch.num_prefilling == 0 and not was_preempted:
            return self.advance(in_flight, preempt)
        lacks, want = self.wants(with_drafts=not was_preempted)
        want[(batch.flags[batch.members.rows] & PREFILLING) != 0] = 0
        return self._distribute_and_commit(lacks, want, preempt)

    def _distribute(
        self, lacks: Int64Array, want: Int64Array, preempt: Preempt
    ) -> tuple[Int64Array, Int64Array, IntArray, bool]:
        members = self._batch.members
        granted = self._within_budget(want)
        runs = granted > 0
        if np.count_nonzero(runs) > self._max_rows:
            granted = np.where(runs.cumsum() <= self._max_rows, granted, 0)
        needed = self.blocks_needed(granted, members.rows)
        total = int(needed.sum())
        if self._looks_ahead:
            beyond = ((want > 0) & (granted == 0)).nonzero()[0][:1]
            total += int(self.blocks_needed(want[beyond], members.rows[beyond]).sum())
        if total <= self._kv.pool.num_free:
            return granted, needed, self._allocate_blocks(members, needed, granted), False
        if self._give_up_drafts(members.rows, lacks, want):
            return self._distribute(lacks, want, preempt)
        return self._distribute_row_by_row(want, preempt)

    def _distribute_row_by_row(
        self, want: Int64Array, preempt: Preempt
    ) -> tuple[Int64Array, Int64Array, IntArray, bool]:
        """As `_distribute`, but row by row, in admission order, while budget remains. Each row takes its blocks before
        the next row is considered."""
        batch, kv, members = self._batch, self._kv, self._batch.members
        position = {row: index for index, row in enumerate(members.rows.tolist())}
        granted = np.zeros_like(want)
        blocks: list[IntArray] = [NO_BLOCKS] * len(want)
        preempted: set[int] = set()
        budget, slots = self._budget.tokens, self._max_rows
        for index in want.nonzero()[0].tolist():
            if index in preempted:
                continue
            is_beyond = budget <= 0 or slots <= 0
            if is_beyond and not self._looks_ahead:
                break
            row = members.rows[index : index + 1]
            tokens = want[index : index + 1] if is_beyond else np.minimum(want[index : index + 1], budget)
            needed = self.blocks_needed(tokens, row)
            while index not in preempted and needed[0] > kv.pool.num_free:
                num_missing = int(needed[0]) - kv.pool.num_free
                victim = position[self._preempt_for(int(row[0]), num_missing, preempt)]
                preempted.add(victim)
                budget, slots = budget + int(granted[victim]), slots + int(granted[victim] > 0)
                granted[victim], blocks[victim] = 0, NO_BLOCKS
            if is_beyond or (index in preempted and self._own_preemption_ends):
                break
            if index in preempted:
                continue
            granted[index] = tokens[0]
            if needed[0]:
                blocks[index] = kv.grow(batch, row, needed, batch.num_computed_tokens[row] + tokens)
            budget, slots = budget - int(tokens[0]), slots - 1
        counts = np.array([len(new) for new in blocks], dtype=np.int64)
        return granted, counts, np.concatenate([NO_BLOCKS, *blocks]), bool(preempted)
