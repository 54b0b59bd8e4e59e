"""Part 1 of the step, priority preemption: preempts running requests for a more urgent waiting request.

Preemptions free a sequence slot, a slot for the waiting request's adapter, or blocks, and happen only if a dry run
shows that the waiting request would then be admitted. For its admission the request needs:

    slots         a sequence slot, and an adapter slot
    embeddings    those of its next token
    budget        one token beside the tokens of the remaining running rows
    step time     beside the rows that are at least as urgent
    blocks        beside the blocks that the remaining rows need in this step; blocks of victims that other requests
                  hold too do not count

As few requests as possible are preempted, the least urgent first; for an adapter slot, all requests of the adapter with
the fewest requests. A step preempts only for the head of the queue, even if the head would be skipped. After a
preemption only the head is admitted in the step, and drafts take none of the blocks that were freed for the head.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.cache import KVCache, Match
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.policy.reserve import Demand
from pointsman.core.state.batch import Batch, Members
from pointsman.core.state.interfaces import Order
from pointsman.core.state.request import Request
from pointsman.core.step.admission import Admission
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.running import Running

Int64Array = npt.NDArray[np.int64]


class PriorityPreemption:
    """Chooses victims by a dry run at the start of a step."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCache,
        running: Running,
        admission: Admission,
        encoder: EncoderCache | None,
        drafts: Drafts,
    ) -> None:
        self._config = config
        self._encoder = encoder
        self._batch = batch
        self._kv = kv
        self._running = running
        self._admission = admission
        self._drafts = drafts
        self._failed_attempt: tuple[Request, Members, int, int, tuple[int, ...]] | None = None

    def choose(self, head: Request) -> list[Request]:
        """The running requests to preempt for `head`, least urgent first; empty if no preemption is needed, or no
        preemption helps."""
        batch, members = self._batch, self._batch.members
        priority = batch.priority[members.rows]
        less_urgent = (priority > head.priority).nonzero()[0]
        if self._is_futile(head, less_urgent):
            return []
        if self._admission.lacks_step_time(head, members.rows[priority <= head.priority]):
            return []
        # Least urgent first; among equally urgent requests, the last admitted first.
        candidates = less_urgent[np.lexsort((less_urgent, priority[less_urgent]))][::-1]
        vacate = self._admission.gates.adapters.requests_to_preempt(head, members.requests, candidates.tolist())
        if vacate is None:
            return self._note_failed_attempt(head)
        if vacate:  # preempt all requests of this adapter before any other
            others = candidates[~np.isin(candidates, vacate)]
            candidates = np.concatenate([np.array(vacate, dtype=np.int64), others])
        trial = Trial(self._config, batch, self._kv, self._running, self._admission, head)
        if not vacate and trial.has_slot_and_blocks(candidates[:0]):
            self._drafts.forget()  # drafts would take blocks that the head needs
            return []
        if not trial.has_slot_and_blocks(candidates):
            return self._note_failed_attempt(head)
        if not trial.has_budget(candidates):
            return []
        # Bisect: `low` victims are too few, `high` are enough; each further preemption only frees more.
        low, high = max(len(vacate) - 1, 0), len(candidates)
        while high - low > 1:
            middle = (low + high) // 2
            if trial.has_slot_and_blocks(candidates[:middle]) and trial.has_budget(candidates[:middle]):
                high = middle
            else:
                low = middle
        if self._encoder is not None and not trial.has_embeddings(candidates[:high], self._encoder):
            return []
        self._drafts.forget()
        return [members.requests[index] for index in candidates[:high].tolist()]

    def is_idle(self, head: Request) -> bool:
        """Whether no preemption is tried for `head` in this and later steps, while running requests only decode."""
        return self._is_futile(head, (self._batch.priority[self._batch.members.rows] > head.priority).nonzero()[0])

    def _is_futile(self, head: Request, less_urgent: Int64Array) -> bool:
        # After the cap was lowered, more requests may run than it allows: no request starts until fewer run.
        is_crowded = len(self._batch.members) > self._admission.max_num_active_seqs
        if len(less_urgent) == 0 or bool(head.num_pending) or is_crowded or self._failed_before(head):
            return True
        return self._admission.is_held_back(head)

    def forget(self) -> None:
        """Forget the failed attempt: a priority changed, so a new attempt may succeed."""
        self._failed_attempt = None

    def _note_failed_attempt(self, head: Request) -> list[Request]:
        """Record that no preemption helps `head`: no further attempt until the state changes; returns no victims."""
        self._failed_attempt = (
            head,
            self._batch.members,
            self._kv.num_publications,
            self._kv.num_returns,
            self._admission.gates.reserves.num_changes,
        )
        return []

    def _failed_before(self, head: Request) -> bool:
        """Whether an attempt for `head` failed, and since then the running requests, the published blocks and the
        reserves are unchanged."""
        if self._failed_attempt is None:
            return False
        request, members, *counts = self._failed_attempt
        unchanged = request is head and members is self._batch.members
        return unchanged and counts == [
            self._kv.num_publications,
            self._kv.num_returns,
            self._admission.gates.reserves.num_changes,
        ]


class Trial:
    """Checks whether the head would be admitted without some of the running rows."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCache,
        running: Running,
        admission: Admission,
        head: Request,
    ) -> None:
        self._config = config
        self._batch = batch
        self._kv = kv
        self._admission = admission
        self._head = head
        self._num_waiting = admission.num_waiting
        # An upper bound: rows that stay may advance further when preempted rows free embeddings.
        _, self._want = running.wants(with_drafts=False, alone=True)
        self._needed = running.blocks_needed(self._want, batch.members.rows)
        self._match: Match = kv.look_up(head)

    def has_budget(self, victims: Int64Array) -> bool:
        """Whether the step has tokens for the head beside the remaining rows, and the cap on partial prefills allows
        its prefill.

        `victims`: positions of victims in admission order. With chunking off, the head counts as uncached: new blocks
        of the remaining rows may evict the head's cached prefix.
        """
        admission, head = self._admission, self._head
        budget = admission.budget.tokens - int(self._want[self._mask_remaining(victims)].sum())
        partial = admission.gates.partial_prefills
        if partial is not None and admission.would_be_partial(head, budget):
            rows = self._batch.members.rows[victims]
            if not partial.may_begin_prefill(head, rows):
                return False
        if budget < (head.num_tokens if admission.gates.budget.may_have_to_fit(head) else 1):
            return False
        start = self._match.num_tokens  # the first chunk of the head must reach a position where a chunk may end
        return self._kv.cut(head, start, min(budget, head.num_tokens - start), admission.budget.tokens) > 0

    def has_slot_and_blocks(self, victims: Int64Array) -> bool:
        """Whether there are a sequence slot and blocks for the head, with every reserve, without the rows at
        `victims`."""
        kv, batch, head = self._kv, self._batch, self._head
        is_remaining = self._mask_remaining(victims)
        num_running = int(np.count_nonzero(is_remaining))
        if num_running >= self._admission.max_num_active_seqs:
            return False
        blocks, dropped = self._references_of(batch.members.rows[victims])
        freed = int(np.count_nonzero(kv.pool.num_references[blocks] == dropped))
        free = kv.pool.num_free + freed - int(self._needed[is_remaining].sum())
        full = kv.num_blocks_of_whole(head, self._match)
        if not kv.has_tables:  # blocks return to the pool during a prefill; its first chunk may hold more
            most = min(head.num_tokens, self._match.num_tokens + self._config.max_num_batched_tokens)
            full = max(full, kv.num_blocks_to_start(head, self._match, most))
        full -= 0 if self._admission.gates.budget.asks_whole else self._num_still_held(blocks, dropped)
        # The first chunk is assumed to be the whole prompt, as blocks that victims publish may make the chunk larger.
        demand = Demand(
            full, full, self._num_owed_blocks(is_remaining), num_running > 0, self._num_waiting + len(victims)
        )
        return free >= self._admission.gates.reserves.required_blocks(head, demand)

    def has_embeddings(self, victims: Int64Array, encoder: EncoderCache) -> bool:
        """Whether the embeddings for the head's first token are cached or can be computed in this step."""
        is_remaining = self._mask_remaining(victims)
        rows = self._batch.members.rows[is_remaining]
        return encoder.can_start_beside(self._head, self._batch, rows, self._want[is_remaining])

    def _mask_remaining(self, victims: Int64Array) -> npt.NDArray[np.bool_]:
        is_remaining = np.ones(len(self._batch.members), dtype=np.bool_)
        is_remaining[victims] = False
        return is_remaining

    def _references_of(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The blocks of some rows, sorted, and, for each block, the number of these rows that hold it."""
        kv, batch = self._kv, self._batch
        tables = [kv.table(batch, row) for row in rows.tolist()]
        blocks = np.sort(np.concatenate([NO_BLOCKS, *tables]))  # not by `unique`, see `Members.may_stop`
        starts = np.concatenate([blocks[:1] >= 0, blocks[1:] != blocks[:-1]]).nonzero()[0]
        return blocks[starts], np.diff(starts, append=len(blocks))

    def _num_still_held(self, blocks: Int64Array, dropped: Int64Array) -> int:
        """Number of the head's matched blocks that other requests still hold after the victims release `blocks`, each
        `dropped` times."""
        matched = self._match.blocks
        left = self._kv.pool.num_references[matched].astype(np.int64)
        at = np.searchsorted(blocks, matched)
        known = at < len(blocks)
        known[known] = blocks[at[known]] == matched[known]
        left[known] -= dropped[at[known]]
        return int(np.count_nonzero(left))

    def _num_owed_blocks(self, is_remaining: npt.NDArray[np.bool_]) -> int:
        """Number of blocks that the remaining rows still need after this step's allocation."""
        batch = self._batch
        rows = batch.members.rows
        whole = self._kv.num_blocks_owed(batch, rows)
        return int(np.maximum(whole - self._needed, 0)[is_remaining].sum())


def has_priority_preemption(config: SchedulerConfig, queue: Order) -> bool:
    """Whether priority preemption is enabled, and the order defines urgency."""
    return queue.is_preemptive and config.displace is not False and config.batching == "mixed"
