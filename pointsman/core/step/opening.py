"""What does the next step do, if it admits requests or computes a prompt, and is that sure? The opening of a run.

    opening = scheduler.opening()                                    looked at, not done
    scheduler.advance_past_finishes(times, ..., lengths, opening)    done, with the decodes behind it that are sure

In a simulation most steps that decide anything decide the same: the waiting requests fit and are admitted, or a long
prompt gets what the budget leaves beside the rows that decode. Such a step needs no output and no result, only its
load, from which follows how long it takes. `Openings.find` says what `schedule` would do, without doing it; where a
part of the scheduler would have to be asked that may answer otherwise, it finds nothing, and the step is scheduled.

It is sure if

    - nothing follows the decisions, and no step is in flight, no pause, no connector, encoder, group of KV, draft,
      limit, policy that observes, no order but first come, first served: see `Openings.__init__` and `find`;
    - all running requests decode, but for the last one, which may have a partial prefill;
    - their blocks, those of the waiting requests and every reserve fit into the free blocks together;
    - every waiting request is admitted, or those that are take the whole budget;
    - what they found in the prefix cache is still there when they are admitted, and no more of it: nothing that the
      step evicts before, and nothing that it publishes.

The step is then done with the operations of a step in their order: `place` gives the admitted requests rows, the rows
that decode get their blocks (`KVCacheManager.grow_in_turn`), and `fill` gives blocks to the partial prefill and to the
admitted requests, and publishes their prompts. The tokens that the step samples are the first of the run: a row that
has computed its prompt is like one that decoded its last known token. What follows is in `past_finishes.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import StepOrderError
from pointsman.core.kv.block_pool import BlockPool
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.reserve import Demand
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.batch import PREFILLING, Batch, Members
from pointsman.core.state.events import Events
from pointsman.core.state.numbers import INT64, ONE, set_writeable
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.step.admission import Admission
from pointsman.core.step.emit import Emission
from pointsman.core.step.in_flight import Grant, StepsInFlight
from pointsman.core.step.request_table import RequestTable
from pointsman.core.step.running import Running

Int64Array = npt.NDArray[np.int64]

MOST_ADMITTED = 8
"""With more waiting requests that fit one step, the step is scheduled."""


class Chunk(NamedTuple):
    """What the partial prefill of the last running row computes."""

    start: int
    """Its computed tokens before."""
    end: int
    """And after."""
    num_blocks: int
    """New blocks that it takes."""
    is_last: bool
    """Whether all its known tokens are computed then, so that it samples."""


class Opening(NamedTuple):
    """What the next step does, if nothing happens before it. The first five are its load, summed over its rows."""

    num_tokens: int
    """Tokens that it computes."""
    num_rows: int
    num_context_tokens: int
    """Positions whose KV is read: of each row those computed before and in the step."""
    num_attended_tokens: int
    """Over the computed tokens: positions that each attends to, its own included."""
    num_samples: int
    """Rows that sample a token: all, or all but the last."""
    num_continued: int
    """Rows that run already."""
    admitted: tuple[Request, ...]
    """Requests that it admits, in order."""
    grants: tuple[Grant, ...]
    """What each of them gets."""
    may_go_on: bool
    """Whether plain decodes may follow: every row samples, and no request waits then."""
    is_budget_spent: bool
    """Whether requests remain in the queue, for lack of budget."""
    chunk: Chunk | None
    """None: all running requests decode."""
    rows: Int64Array
    """[num_rows] rows of the running requests, and those that the admitted ones get."""
    num_known_tokens: Int64Array
    """[num_samples] known tokens of the rows that sample."""
    num_blocks: int
    """Free blocks that admitted requests and the chunk take."""
    kv_cache_usage: float
    """Share of the blocks that requests hold after it, 0 to 1, if none finishes in it."""
    seen: tuple[Any, ...]
    """The state in which this is so."""

    @property
    def sampling(self) -> tuple[Request, ...]:
        """Of the admitted requests, those that sample: all, or all but the last."""
        rows = self.num_rows - self.num_samples
        return self.admitted[: len(self.admitted) - rows] if rows and self.admitted else self.admitted


class Openings:
    """Looks at the next step, and does it as the first one of a run."""

    def __init__(
        self,
        config: SchedulerConfig,
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        steps: StepsInFlight,
        running: Running,
        admission: Admission,
        emission: Emission,
        view: SchedulerView,
        events: Events,
        *,
        has_others: bool,
    ) -> None:
        """`has_others`: whether there are parts that a step would ask: a displacement, an encoder cache, a connector,
        or swaps."""
        gates, queue = admission.gates, table.queue
        self._batch, self._table, self._steps, self._running = batch, table, steps, running
        self._admission, self._emission, self._view, self._events = admission, emission, view, events
        self._reserves = gates.reserves.policies
        self._queue = queue if type(queue) is FirstComeFirstServed else None
        is_plain = (
            self._queue is not None
            and config.batching == "mixed"
            and config.admission_charge == "uncached"
            and config.enable_chunked_prefill
            and not config.first_chunk_only
            and not config.num_draft_tokens
            and not gates.limits
            and gates.partial_prefills is None
            and not gates.load_followers
            and not gates.openers
            and gates.reserves.are_plain
        )
        self._kv: KVCacheManager | None = None
        """None: no opening is ever sure."""
        if is_plain and not has_others and type(kv) is KVCacheManager and kv.retaining is None:
            self._kv = None if hasattr(kv.eviction, "open_step") else kv

    # ------------------------------------------------------------------ looked at

    def find(self, step_id: int) -> Opening | None:
        """See `Scheduler.opening`; `step_id` is that of the next step."""
        batch, kv, queue, admission = self._batch, self._kv, self._queue, self._admission
        if kv is None or queue is None:
            return None
        members = batch.members
        num_rows, num_queued, num_prefilling = len(members.requests), len(queue), batch.num_prefilling
        if (
            not (num_queued or num_prefilling)
            or num_prefilling > 1
            or num_rows > self._running.steady_rows
            or self._steps.records
            or batch.num_watched
            or batch.num_no_sample
            or admission.pause is not None
            or self._emission.is_resync_due
            or not self._events.is_unwatched
            or self._events.deferred
            or len(self._events.admitted) > 1  # than the statistics
        ):
            return None
        pool, budget, size = kv.pool, admission.budget.full, kv.block_size
        num_free, rows = pool.num_free, members.rows
        num_lacking = num_blocks = context = attended = num_tokens = num_samples = 0
        chunk = None
        if num_prefilling:
            chunk = self._chunk(kv, rows.item(num_rows - 1), budget - num_rows + 1)
            if chunk is None:
                return None
            rows = rows[: num_rows - 1]
        known_tokens = []  # of those that sample beside the rows that decode
        num_known_tokens = batch.zeros[:0]
        if len(rows):
            computed = batch.num_computed_tokens[rows]
            num_lacking = (computed >= batch.num_slots[rows]).tobytes().count(1)
            num_tokens = num_samples = len(rows)
            context = attended = int(computed.dot(batch.ones[:num_tokens])) + num_tokens
            budget -= num_tokens
            num_known_tokens = computed
            num_known_tokens += ONE
        if chunk is not None:
            start, end, num_blocks, is_last = chunk
            count = end - start
            num_tokens, context, budget = num_tokens + count, context + end, budget - count
            attended += count * start + count * (count + 1) // 2
            if is_last:
                known_tokens.append(end)
        grants: list[Grant] = []
        admitted: list[Request] = []
        is_budget_spent = False
        if num_queued:
            publishers = [] if chunk is None else [members.requests[-1]]
            seats, reserves = admission.max_num_active_seqs - num_rows, self._reserves
            for request in [queue.peek()] if num_queued == 1 else queue.first(MOST_ADMITTED + 1):
                if seats <= 0:
                    return None
                if not budget:
                    is_budget_spent = True
                    break
                state = request._state
                if (
                    state.num_pending
                    or not state.max_tokens
                    or request.adapter is not None
                    or request.repetition_detection is not None
                    or state.encoder_inputs
                    or state.more_input
                    or state.parts
                ):
                    return None
                match = kv.look_up(request)
                start, known, taken = match.num_tokens, state.num_tokens, num_lacking + num_blocks
                shared = 0  # of the blocks that it found, those that others hold too
                if start:
                    shared = pool.num_in_use(match.blocks)
                    if grants and shared < len(match.blocks):
                        shared += _num_found_again(pool, match.blocks, grants)
                    if shared < len(match.blocks) and taken > pool.num_blank:
                        return None  # what it found may be evicted
                if publishers and kv.prefix is not None and self._may_find_more(kv, request, start, publishers):
                    return None
                end = known if known - start <= budget else start + budget
                count = end - start
                required = first = -(-end // size) - shared
                if reserves:
                    full, num_others = -(-known // size) - shared, len(admitted)
                    others_run = num_rows + num_others > 0
                    demand = new_tuple(Demand, (first, full, 0, others_run, num_queued - num_others))
                    for reserve in reserves:
                        required += reserve.blocks(request, demand, self._view)
                if taken + required > num_free:
                    return None
                num_blocks += first
                num_tokens, context, budget, seats = num_tokens + count, context + end, budget - count, seats - 1
                attended += count * start + count * (count + 1) // 2
                if end == known:
                    known_tokens.append(end)
                grants.append(new_tuple(Grant, (match, count, start, count, 0, 0, False)))
                admitted.append(request)
                publishers.append(request)
            if not is_budget_spent and len(admitted) < num_queued:
                return None
        if num_lacking + num_blocks > num_free:
            return None
        rows = members.rows
        if admitted:
            free_rows = batch.next_rows(len(admitted))
            if free_rows is None:
                return None
            rows = _joined(rows, free_rows)
            set_writeable(rows, False)
            num_rows += len(admitted)
        if known_tokens:
            num_known_tokens = _joined(num_known_tokens, known_tokens)
            num_samples += len(known_tokens)
        set_writeable(num_known_tokens, False)
        values = (
            num_tokens,
            num_rows,
            context,
            attended,
            num_samples,
            len(members.requests),
            tuple(admitted),
            tuple(grants),
            num_samples == num_rows and not is_budget_spent,
            is_budget_spent,
            chunk,
            rows,
            num_known_tokens,
            num_blocks,
            1.0 - (num_free - num_lacking - num_blocks) / pool.num_usable,
            self._seen(kv, step_id),
        )
        return new_tuple(Opening, values)

    def _chunk(self, kv: KVCacheManager, row: int, budget: int) -> Chunk | None:
        """What a row computes of its prompt; None: it is no partial prefill, or there is no budget for it."""
        batch = self._batch
        if budget <= 0 or not batch.flags.item(row) & PREFILLING:
            return None
        start, known = batch.num_computed_tokens.item(row), batch.num_tokens.item(row)
        end = min(known, start + budget)
        return Chunk(start, end, max(kv.blocks_for(end - batch.num_slots.item(row)), 0), end == known)

    def _may_find_more(self, kv: KVCacheManager, request: Request, start: int, publishers: list[Request]) -> bool:
        """Whether a request that found `start` tokens may find more once the prompts of `publishers` are published: one
        of them begins with the same tokens, and those of a further block."""
        end = 4 * (start + kv.block_size)
        prefix = request._state.known_bytes()[:end]
        return any(other._state.prompt_bytes.startswith(prefix) for other in publishers)

    def _seen(self, kv: KVCacheManager, step_id: int) -> tuple[Any, ...]:
        """What an opening depends on, beside what `find` tests first."""
        table, admission = self._table, self._admission
        changes = (table.num_arrivals, table.num_departures, kv.num_publications, kv.pool.num_free)
        return (step_id, self._batch.members, admission.max_num_active_seqs, *changes)

    def require(self, opening: Opening, step_id: int) -> None:
        """Raises StepOrderError: something has happened since it was found."""
        kv, events = self._kv, self._events
        is_open = events.is_unwatched and not events.deferred and len(events.admitted) == 1
        is_open = is_open and self._admission.pause is None and not self._steps.records
        if kv is None or not is_open or opening.seen != self._seen(kv, step_id):
            raise StepOrderError("the scheduler has changed since opening() was called; call it again")

    def room(self, opening: Opening) -> Int64Array:
        """[num_samples] in how many steps, the opening among them, each row needs no other blocks than those that
        admitted requests and the chunk take. All rows sample."""
        batch, kv, rows = self._batch, self._kv, self._batch.members.rows
        assert kv is not None
        room = batch.num_slots[rows] - batch.num_tokens[rows]
        if opening.chunk is not None:
            room[-1] += opening.chunk.num_blocks * kv.block_size
        new = [-grant.end % kv.block_size for grant in opening.grants]
        return np.concatenate([room, np.array(new, dtype=np.int64)]) + 1

    # ------------------------------------------------------------------ done

    def place(self, opening: Opening, now: float) -> None:
        """Give the admitted requests their rows, which have slots for the blocks that they get in `fill`, as has the
        row of the chunk."""
        batch, kv, table = self._batch, self._kv, self._table
        assert kv is not None
        table.now = now
        size, members = kv.block_size, batch.members
        chunk, admitted = opening.chunk, opening.admitted
        if chunk is not None:
            row = members.rows.item(-1)
            batch.num_slots[row] += chunk.num_blocks * size
            batch.num_computed_tokens[row] = chunk.end
            if chunk.is_last:
                batch.clear_flags(row, PREFILLING)
        for index, grant in enumerate(opening.grants):
            end = grant.end
            table.queue.pop()
            row = table.admit(admitted[index], grant, -(-end // size) * size)
            if end < admitted[index]._state.num_admitted_tokens:
                batch.set_prefilling(row)
        if admitted:
            batch.members = Members(batch, opening.rows, members.requests + admitted)

    def takes_at_once(self, opening: Opening) -> bool:
        """Whether its blocks may be taken together with those of later steps: nothing is published between, or what is
        has nothing to do with what these evict."""
        kv, grants = self._kv, opening.grants
        if kv is None or kv.prefix is None:
            return True
        if kv.prefix.listener is not None or opening.chunk is not None or len(grants) > 1:
            return False
        # If its first block was looked up and not found, the whole prompt becomes a run of its own.
        return not grants[0].num_cached_tokens and opening.admitted[0]._state.num_admitted_tokens > kv.block_size

    def fill(self, opening: Opening, now: float, blocks: Int64Array | None) -> None:
        """Give the chunk and the admitted requests their blocks, and publish their prompts, in turn. `blocks` are
        taken already, for all of them; None: each takes its own."""
        batch, kv, rows = self._batch, self._kv, opening.rows
        assert kv is not None
        chunk, num_old, publishes = opening.chunk, opening.num_continued, kv.prefix is not None
        at = 0
        if chunk is not None:
            end, at = kv.blocks_for(chunk.end), chunk.num_blocks
            taken = kv.take(at) if blocks is None else blocks[:at]
            batch.block_table[rows.item(num_old - 1), end - at : end] = taken
            if publishes:
                kv.publish_prompt(batch, batch.members.requests[num_old - 1])
        for index, request in enumerate(opening.admitted):
            grant, row = opening.grants[index], rows.item(num_old + index)
            if blocks is None:
                kv.place(batch, row, kv.admit(request, grant.match, grant.end, now))
            else:
                end = kv.blocks_for(grant.end)
                batch.block_table[row, :end] = blocks[at : at + end]
                at += end
                if publishes:
                    kv.begin(request, grant.match)
            if publishes:
                kv.publish_prompt(batch, request)
        if kv.unpublished:
            kv.publish_deferred(batch)

    def keep_output(self, opening: Opening, step_id: int) -> None:
        """For explanations of the requests that still wait."""
        computed, num_old = self._batch.num_computed_tokens[self._batch.members.rows], opening.num_continued
        num_tokens = np.ones_like(computed)
        if opening.chunk is not None:
            computed[num_old - 1] = opening.chunk.start
            num_tokens[num_old - 1] = opening.chunk.end - opening.chunk.start
        computed[num_old:] = [grant.num_cached_tokens for grant in opening.grants]
        num_tokens[num_old:] = [grant.num_tokens for grant in opening.grants]
        self._emission.keep_opening(step_id, num_old, computed, num_tokens)


def _num_found_again(pool: BlockPool, blocks: Int64Array, grants: list[Grant]) -> int:
    """How many of these blocks nobody holds, but the requests that get `grants` before will."""
    before = np.concatenate([grant.match.blocks for grant in grants])
    return int(np.count_nonzero(np.isin(blocks, before) & (pool.num_references[blocks] == 0)))


def _joined(array: Int64Array, more: list[int]) -> Int64Array:
    """In less time than `concatenate`, which makes an array of the list first."""
    size = len(array)
    joined = np.empty(size + len(more), INT64)
    joined[:size] = array
    if len(more) == 1:  # most often
        joined[size] = more[0]
    else:
        joined[size:] = more
    return joined
