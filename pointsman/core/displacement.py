"""Does a more urgent waiting request take the room of less urgent running ones?

Only if a dry run says that it would then be admitted: a seat, a token of budget beside what the other running rows
take, and its blocks beside what those rows need in this step, counting only blocks that nobody else holds. The fewest
give way, the least urgent first. One request displaces per step, and only it is admitted into the room that it made.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.admission import Admission
from pointsman.core.batch import Batch
from pointsman.core.block_pool import NO_BLOCKS
from pointsman.core.config import SchedulerConfig
from pointsman.core.kv_cache import KVCacheManager, Match
from pointsman.core.request import Request
from pointsman.core.reserve import Demand
from pointsman.core.running import Running

Int64Array = npt.NDArray[np.int64]


class Displacement:
    """The dry run at the start of a step."""

    def __init__(
        self, config: SchedulerConfig, batch: Batch, kv: KVCacheManager, running: Running, admission: Admission
    ) -> None:
        self._config = config
        self._batch = batch
        self._kv = kv
        self._running = running
        self._admission = admission

    def choose(self, head: Request) -> list[Request]:
        """The running requests that give way to `head`, least urgent first; empty if none need, or none would do."""
        batch, members = self._batch, self._batch.members
        priority = batch.priority[members.rows]
        less_urgent = (priority > head.priority).nonzero()[0]
        if len(less_urgent) == 0 or head.num_pending:
            return []
        # Least urgent first, and among equals the one admitted last.
        candidates = less_urgent[np.lexsort((less_urgent, priority[less_urgent]))][::-1]
        trial = _Trial(self, head)
        if trial.succeeds(candidates[:0]) or not trial.succeeds(candidates):
            return []
        low, high = 0, len(candidates)  # fails at low, succeeds at high: whoever gives way only adds room
        while high - low > 1:
            middle = (low + high) // 2
            if trial.succeeds(candidates[:middle]):
                high = middle
            else:
                low = middle
        return [members.requests[index] for index in candidates[:high].tolist()]


class _Trial:
    """Would the head be admitted if some running rows were gone? What does not depend on which is computed once."""

    def __init__(self, parts: Displacement, head: Request) -> None:
        self._parts = parts
        self._head = head
        _, self._want = parts._running.wants()
        self._needed = parts._running.blocks_needed(self._want, parts._batch.members.rows)
        self._match: Match = parts._kv.look_up(head)

    def succeeds(self, gone: Int64Array) -> bool:
        """Whether the head is admitted without the rows at these positions in admission order."""
        parts, head = self._parts, self._head
        config, kv, batch = parts._config, parts._kv, parts._batch
        stays = np.ones(len(batch.members), dtype=np.bool_)
        stays[gone] = False
        num_running = int(np.count_nonzero(stays))
        budget = config.max_num_batched_tokens - int(self._want[stays].sum())
        # With chunking off, as if nothing were cached: what the others take may evict what it would have found.
        least_budget = head.num_tokens if parts._admission.must_start_whole(head) else 1
        if num_running >= config.max_num_seqs or budget < least_budget:
            return False
        blocks, dropped = self._references_of(batch.members.rows[gone])
        freed = int(np.count_nonzero(kv.pool.num_references[blocks] == dropped))
        free = kv.num_free + freed - int(self._needed[stays].sum())
        held = self._still_held(blocks, dropped)
        cached = len(self._match.blocks) * config.block_size
        first = kv.blocks_for(min(head.num_tokens, cached + budget)) - held
        demand = Demand(first, kv.blocks_for(head.num_tokens) - held, self._owed(stays))
        return free >= parts._admission.required_blocks(head, demand, num_running > 0)

    def _references_of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The blocks of some rows, sorted, and how many of those rows hold each."""
        kv, batch = self._parts._kv, self._parts._batch
        tables = [kv.table(batch, row) for row in rows.tolist()]
        return np.unique(np.concatenate([NO_BLOCKS, *tables]), return_counts=True)

    def _still_held(self, blocks: Int64Array, dropped: Int64Array) -> int:
        """How many of the head's matched blocks somebody else still holds when those references are dropped."""
        matched = np.array(self._match.blocks, dtype=np.int64)
        left = self._parts._kv.pool.num_references[matched].astype(np.int64)
        at = np.searchsorted(blocks, matched)
        known = at < len(blocks)
        known[known] = blocks[at[known]] == matched[known]
        left[known] -= dropped[at[known]]
        return int(np.count_nonzero(left))

    def _owed(self, stays: npt.NDArray[np.bool_]) -> int:
        """Blocks that the remaining rows are owed once this step's share has been allocated."""
        batch = self._parts._batch
        rows = batch.members.rows
        size = self._parts._config.block_size
        short = batch.num_tokens[rows] - (batch.num_slots[rows] + self._needed * size)
        return int(np.maximum(-(-short // size), 0)[stays].sum())
