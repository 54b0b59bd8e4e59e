"""Rows that get their tokens and blocks one after the other: what the systems that the presets are named after do.

`Running` works a step out anew when somebody gave way, so that what was given back goes to the rows in admission
order. The schedulers in the field walk a list instead: a row keeps what it got, what a victim gives back helps only the
row that asks and those behind it, and when the row that asks must itself give way, nobody behind it runs in this step.
The walk is taken only if blocks run out; while they suffice, both come to the same.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.policy.limits import Limit
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.interfaces import Victim
from pointsman.core.state.output import IntArray
from pointsman.core.state.request import Request
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.running import Advance, Running

Int64Array = npt.NDArray[np.int64]


class InOrder(Running):
    """The running part of a step where `shortage` is "in-order" or "look-ahead", see `SchedulerConfig`.

    It also bounds the rows of a step by `max_num_seqs`, where more may be running.
    """

    _replans = False

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCacheManager,
        limits: list[Limit],
        victim: Victim,
        drafts: Drafts,
    ) -> None:
        super().__init__(config, batch, kv, limits, victim, drafts)
        self._max_rows = config.max_num_seqs
        self._looks_ahead = config.shortage == "look-ahead"
        self._steady_rows = min(self._steady_rows, self._max_rows)

    def advance_prefills(self, preempt: Callable[[Request], None]) -> Advance:
        """As `advance`, only for rows whose known tokens are not all computed yet."""
        batch = self._batch
        lacks, want = self.wants(with_drafts=False)
        want[(batch.flags[batch.members.rows] & PREFILLING) == 0] = 0
        return self._settle(lacks, want, preempt)

    def advance_decodes(self, in_flight: bool, preempt: Callable[[Request], None], *, gave_way: bool) -> Advance:
        """As `advance`, only for the other rows; without drafts if somebody gave way in this step."""
        batch = self._batch
        if batch.num_prefilling == 0 and not gave_way:
            return self.advance(in_flight, preempt)
        lacks, want = self.wants(with_drafts=not gave_way)
        want[(batch.flags[batch.members.rows] & PREFILLING) != 0] = 0
        return self._settle(lacks, want, preempt)

    def _share_out(
        self, lacks: Int64Array, want: Int64Array, preempt: Callable[[Request], None]
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
            return granted, needed, self._grow(members, needed), False
        if self._give_up_drafts(members.rows, lacks, want):
            return self._share_out(lacks, want, preempt)
        return self._walk(want, preempt)

    def _walk(
        self, want: Int64Array, preempt: Callable[[Request], None]
    ) -> tuple[Int64Array, Int64Array, IntArray, bool]:
        """Row by row, in admission order, as long as there is budget. Each takes its blocks at once."""
        batch, kv, members = self._batch, self._kv, self._batch.members
        position = {row: index for index, row in enumerate(members.rows.tolist())}
        granted = np.zeros_like(want)
        blocks: list[IntArray] = [NO_BLOCKS] * len(want)
        gone: set[int] = set()
        budget, seats = self._budget, self._max_rows
        for index in want.nonzero()[0].tolist():
            if index in gone:
                continue
            is_beyond = budget <= 0 or seats <= 0
            if is_beyond and not self._looks_ahead:
                break
            row = members.rows[index : index + 1]
            tokens = want[index : index + 1] if is_beyond else np.minimum(want[index : index + 1], budget)
            needed = self.blocks_needed(tokens, row)
            while index not in gone and needed[0] > kv.pool.num_free:
                victim = position[self._victim.choose(batch, int(row[0]))]
                preempt(members.requests[victim])
                gone.add(victim)
                budget, seats = budget + int(granted[victim]), seats + int(granted[victim] > 0)
                granted[victim], blocks[victim] = 0, NO_BLOCKS
            if index in gone or is_beyond:
                break
            granted[index] = tokens[0]
            if needed[0]:
                blocks[index] = kv.grow(batch, row, needed)
            budget, seats = budget - int(tokens[0]), seats - 1
        counts = np.array([len(new) for new in blocks], dtype=np.int64)
        return granted, counts, np.concatenate([NO_BLOCKS, *blocks]), bool(gone)


def make_running(
    config: SchedulerConfig, batch: Batch, kv: KVCacheManager, limits: list[Limit], victim: Victim, drafts: Drafts
) -> Running:
    """The running part that the configuration asks for."""
    kind = Running if config.shortage == "replan" else InOrder
    return kind(config, batch, kv, limits, victim, drafts)
