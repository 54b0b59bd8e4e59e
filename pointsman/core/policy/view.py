"""The `View` that policies read (see `state/interfaces.py`), built on the columns of one scheduler's batch."""

from __future__ import annotations

from collections.abc import Sized

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.cache import KVCache, Match
from pointsman.core.state.batch import Batch
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class SchedulerView:
    """The implementation of `View`; the scheduler keeps it up to date."""

    __slots__ = (
        "_batch",
        "_kv",
        "_queue",
        "budget",
        "match",
        "now",
        "num_missing_blocks",
        "num_owed_blocks",
        "num_running",
        "num_shared_blocks",
        "num_skipped",
    )

    def __init__(self, batch: Batch, kv: KVCache, queue: Sized) -> None:
        self._batch = batch
        self._kv = kv
        self._queue = queue
        self.now = 0.0
        self.budget = 0
        self.num_skipped = 0
        """Number of waiting requests that are not in the queue, because the step has skipped them."""
        self.num_running = 0
        self.num_owed_blocks = 0
        self.num_missing_blocks = 0
        self.num_shared_blocks = 0
        self.match = Match(NO_BLOCKS, None, 0)
        """The cached prefix of the checked request."""

    # ------------------------------------------------------------------ kept up to date

    def open_step(self, now: float) -> None:
        """Set the time and the number of running requests when a step begins."""
        self.now, self.num_running = now, len(self._batch.members.requests)

    def pass_time(self, now: float) -> None:
        """Set the time to the start of the last step of a fast-forward."""
        self.now = now

    def open_check(self, budget: int, num_running: int, num_owed_blocks: int) -> None:
        """Set `budget`, `num_running` and `num_owed_blocks` before a waiting request is checked."""
        self.budget, self.num_running, self.num_owed_blocks = budget, num_running, num_owed_blocks

    def set_num_skipped(self, count: int) -> None:
        """Set the number of skipped requests, which the step returns to the queue at its end."""
        self.num_skipped = count

    def set_match(self, match: Match, num_shared_blocks: int) -> None:
        """Set the cached prefix of the checked request, and how many blocks of this prefix other requests hold."""
        self.match, self.num_shared_blocks = match, num_shared_blocks

    # ------------------------------------------------------------------ read by policies

    @property
    def num_waiting(self) -> int:
        return len(self._queue) + self.num_skipped

    @property
    def num_prefilling(self) -> int:
        return self._batch.num_prefilling

    @property
    def block_size(self) -> int:
        return self._batch.block_size

    @property
    def num_usable_blocks(self) -> int:
        return self._kv.pool.num_usable

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return self._kv.num_slots_for(num_tokens)

    def num_blocks_for(self, num_tokens: int) -> int:
        return self._kv.num_blocks_for(num_tokens)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.pool.num_free

    @property
    def has_prefix_cache(self) -> bool:
        return self._kv.caches

    def num_cached_tokens(self, request: Request) -> int:
        if request._state.encoder_inputs:
            return 0  # a lookup with encoder inputs may reset the prefix cache
        return self._kv.look_up(request).num_tokens

    @property
    def requests(self) -> tuple[Request, ...]:
        return self._batch.members.requests

    @property
    def rows(self) -> Int64Array:
        return self._batch.members.rows

    @property
    def num_tokens(self) -> Int64Array:
        return self._batch.num_tokens[self._batch.members.rows]

    @property
    def num_computed_tokens(self) -> Int64Array:
        return self._batch.num_computed_tokens[self._batch.members.rows]

    @property
    def num_blocks(self) -> Int64Array:
        return self._kv.num_blocks_of(self._batch, self._batch.members.rows)

    @property
    def num_own_blocks(self) -> Int64Array:
        if not self.has_prefix_cache:
            return self.num_blocks  # no blocks are shared
        blocks, owners = self._kv.tables(self._batch, self._batch.members.rows)
        own = owners[self._kv.pool.num_references[blocks] == 1]
        return np.bincount(own, minlength=len(self._batch))

    def own_blocks(self, index: int) -> int:
        batch, pool = self._batch, self._kv.pool
        table = self._kv.table(batch, batch.members.rows.item(index))
        if not self.has_prefix_cache:
            return len(table)
        return int(np.count_nonzero(pool.num_references[table] == 1))

    @property
    def num_kept_tokens(self) -> Int64Array:
        batch = self._batch
        if not self.has_prefix_cache or not len(batch):
            return np.zeros(len(batch), dtype=np.int64)
        kept: Int64Array = self._kv.num_blocks_shared(batch) * batch.block_size
        return np.minimum(kept, self.num_computed_tokens, out=kept)

    @property
    def num_left_tokens(self) -> Int64Array:
        members = self._batch.members
        return members.token_limit - self._batch.num_tokens[members.rows]

    @property
    def num_preemptions(self) -> Int64Array:
        return self._batch.num_preemptions[self._batch.members.rows]

    @property
    def priority(self) -> Int64Array:
        return self._batch.priority[self._batch.members.rows]
