"""What a host may ask a scheduler: nothing here changes anything, and a recording tells nothing of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.observe.explain import explain, snapshot
from pointsman.core.observe.invariants import check
from pointsman.core.observe.stats import Counters, Explanation, SchedulerStats
from pointsman.core.state.batch import Batch
from pointsman.core.state.output import SchedulerOutput
from pointsman.core.state.request import Request
from pointsman.core.state.status import PauseMode
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.input_tokens import input_token_ids
from pointsman.core.step.request_table import Lifecycle
from pointsman.core.step.running import Running

Int32Array = npt.NDArray[np.int32]


class Questions:
    """The part of `Scheduler` that only reads."""

    config: SchedulerConfig
    _batch: Batch
    _kv: KVCacheManager
    _life: Lifecycle
    _running: Running
    _drafts: Drafts
    _counters: Counters
    _most_active_seqs: int

    def has_unfinished_requests(self) -> bool:
        """Whether any request is queued, parked or running."""
        return bool(len(self._batch) or len(self._life.queue) or self._life.parked)

    def has_runnable_requests(self) -> bool:
        """Whether a step may run anything now: whether anybody is running or queued, and not held up by a pause.

        If not, a host may wait for a call instead of scheduling empty steps. (The ends since the last output are told
        by the next one, which a host that needs them schedules all the same.)
        """
        mode = self.pause_mode
        if mode is PauseMode.ALL:
            return False
        return bool(len(self._batch) or (mode is None and len(self._life.queue)))

    def get_request(self, request_id: str) -> Request | None:
        """The request called so that has not ended, or None."""
        return self._life.get(request_id)

    def is_id_in_use(self, request_id: str) -> bool:
        """Whether a request that is called so would be refused as a duplicate: one has not ended, or its end has not
        been told by an output."""
        return request_id in self._life.requests

    @property
    def pause_mode(self) -> PauseMode | None:
        """How it is paused; None: it is not."""
        return None if self._life.pause is None else self._life.pause.mode

    @property
    def num_running(self) -> int:
        """Requests that hold blocks and take part in steps."""
        return len(self._batch.members.requests)

    @property
    def num_queued(self) -> int:
        """Requests that wait for capacity."""
        return len(self._life.queue)

    @property
    def num_parked(self) -> int:
        """Requests that wait for something other than capacity."""
        return len(self._life.parked)

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return self._kv.pool.usage

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._life.in_flight)

    @property
    def outputs_in_flight(self) -> list[SchedulerOutput]:
        """Those that wait for their update, in the order in which `update` takes them."""
        return [record.output for record in self._life.in_flight if record.output is not None]

    @property
    def has_unreported_ends(self) -> bool:
        """Whether the next output tells of a request's end; until then its id is in use."""
        return bool(self._life.finished)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is there: no request, no step in flight, and nothing that the next output would tell of."""
        return not (self._life.requests or self._life.in_flight or self._life.preempted or self._life.finished)

    def can_advance(self) -> bool:
        """Whether a step that is scheduled now may have anything to run: a request is queued, or a running one lacks a
        token that no step in flight computes, and no pause holds it up. For hosts that run ahead and would rather not
        run empty steps.
        """
        if self.pause_mode is PauseMode.ALL:
            return False
        wants = self._running.wants
        waits = self.pause_mode is None and len(self._life.queue)
        return bool(waits or wants(with_drafts=False, alone=True)[1].any())

    @property
    def max_drafts(self) -> int:
        """Most drafts that a step would verify for a request now, by `num_draft_tokens` and `draft_table`."""
        return self.config.max_drafts(len(self._batch))

    @property
    def block_table(self) -> Int32Array:
        """int32 [rows, blocks]: row `output.rows[i]` is request i's table. Read it only until the next call."""
        return self._batch.block_table

    def input_token_ids(self, output: SchedulerOutput, *, allow_unsampled: bool = False) -> Int32Array:
        """[total_num_scheduled_tokens] int32: the tokens that a step computes, row after row, drafts included.

        Args:
            allow_unsampled: put `UNSAMPLED` for tokens that an earlier step in flight has yet to sample; the host has
                them itself when it executes the step.

        Raises:
            StepOrderError: there are such tokens, and they are not allowed.
        """
        return input_token_ids(self._batch, output, allow_unsampled)

    def explain(self, request_id: str) -> Explanation:
        """Where a request stands, why it waits, for whom and since when.

        Raises:
            UnknownRequest: no such request, or its end has been reported.
        """
        request = self._life.requests.get(request_id) or self._life.require(request_id)
        return explain(request, self._batch, self._kv, self._life, self.config)

    def stats(self) -> SchedulerStats:
        """A snapshot of counters and gauges."""
        return snapshot(self._counters, self._batch, self._kv, self._life)

    def check_invariants(self) -> None:
        """Verify blocks, places and bookkeeping, whatever the state. O(everything): for tests and sampling.

        Raises:
            InvariantError: naming the promise that is broken.
        """
        check(self.config, self._batch, self._kv, self._life, self._drafts, self._most_active_seqs)
