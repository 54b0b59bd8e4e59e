"""Which plain decodes are sure although requests finish among them, and what is the state after them?

    k = scheduler.horizon_past_finishes(limit, lengths)      lengths[i]: steps until request i stops, as the host knows
    scheduler.advance_past_finishes(times, token_ids, last_token_ids, lengths)

A run of decodes (`fast_forward.py`) goes up to the first request that finishes. Where no request waits, a finish
changes nothing that a later decode depends on: it only frees blocks and a row. A host that knows when its requests
stop, as a simulator does, need not make a run of each of the stretches between finishes. Nor need it schedule the step
before them that admits requests: that is the first step of the run, its opening (`opening.py`).

What depends on the order is done in it: before a request releases its blocks, the steps up to its last one have
allocated theirs. So block ids, the order of free blocks and the prefix tree are those of single steps. All else
(columns, tokens, proof, the membership of the batch) is done once for the whole run. Where a listener or a policy
follows the decisions, or a request waits, the horizon ends with the first finish, and `advance` is the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepOrderError, StepResultError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import Batch
from pointsman.core.state.events import Events
from pointsman.core.state.numbers import flat_integers
from pointsman.core.state.output import Integers
from pointsman.core.state.request import Request
from pointsman.core.step.admission import Admission
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.fast_forward import FastForward, checked_tokens, stops_too_early
from pointsman.core.step.opening import Opening, Openings
from pointsman.core.step.request_table import End, RequestTable
from pointsman.core.step.update import stop_condition

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
Ends = list[tuple[int, list[End]]]  # (number of steps until then, who finishes in row order), in the order of steps


class Finishes(NamedTuple):
    """The requests that finished in one step of a run."""

    num_steps: int
    """Of the run, up to and with that step."""
    requests: tuple[Request, ...]
    """In row order."""
    kv_cache_usage: float
    """Share of the blocks that requests hold after it, 0 to 1."""


class PastFinishes:
    """Proves that steps are plain decodes, whatever finishes among them, and does them at once."""

    def __init__(
        self,
        fast_forward: FastForward,
        openings: Openings,
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        drafts: Drafts,
        admission: Admission,
        emission: Emission,
        events: Events,
    ) -> None:
        self._fast_forward, self._openings = fast_forward, openings
        self._batch, self._kv, self._table = batch, kv, table
        self._drafts, self._admission, self._emission, self._events = drafts, admission, emission, events
        self._own = kv if isinstance(kv, KVCacheManager) else None
        follows_load = bool(admission.gates.load_followers)
        opens = self._own is None or hasattr(self._own.eviction, "open_step")
        self._is_possible = self._own is not None and not follows_load and not opens

    # ------------------------------------------------------------------ how many

    def horizon(self, first_step_id: int, limit: int, lengths: Integers, opening: Opening | None) -> int:
        """See `Scheduler.horizon_past_finishes`."""
        counts = self._checked_lengths(lengths, opening)
        if opening is None:
            return self._within(limit, counts)
        return self._within_opened(limit, counts, opening) if self._openings.is_still_so(opening, first_step_id) else 0

    def _within(self, limit: int, lengths: Int64Array) -> int:
        limit, free, _ = self._fast_forward.bound(limit)
        if not limit:
            return 0
        first = lengths.item(lengths.argmin())
        if limit <= first or not self._may_pass():
            return self._fast_forward.horizon(min(limit, first))
        limit = min(limit, lengths.item(lengths.argmax()), max(first, self._batch.num_steps_kept))
        return self._fast_forward.within_blocks(self._within_limits(limit, lengths), free, lengths)

    def _within_opened(self, limit: int, lengths: Int64Array, opening: Opening) -> int:
        """As `_within`, where the first of the steps is an opening."""
        if limit <= 1 or not opening.may_go_on:
            return min(limit, 1)
        first = lengths.item(lengths.argmin())
        limit = min(limit, lengths.item(lengths.argmax()), max(first, self._batch.num_steps_kept))
        num_old = opening.num_continued
        if num_old:
            limit = self._within_limits(limit, lengths[:num_old])
        for request, length in zip(opening.admitted, lengths[num_old:].tolist(), strict=True):
            left = request._state.token_limit - request._state.num_tokens
            limit = min(limit, left) if left < length else limit
        free = self._kv.pool.num_free - opening.num_blocks
        if opening.num_rows * (limit // self._kv.block_size + 1) <= free:
            return limit
        return self._fast_forward.within_room(limit, free, self._openings.room(opening), lengths)

    def _within_limits(self, limit: int, lengths: Int64Array) -> int:
        """How many of `limit` steps come before a running request reaches its token limit without its stop token, or
        the end of a part of its prompt."""
        batch, members = self._batch, self._batch.members
        if batch.may_end(limit):  # without its stop token
            left = members.token_limit - batch.num_tokens[members.rows]
            sooner = left[left < lengths]
            limit = min(limit, sooner.item(sooner.argmin())) if len(sooner) else limit
        for index in (lengths < limit).nonzero()[0].tolist():
            request = members.requests[index]
            if request._state.more_input or request._state.parts:  # it does not finish
                limit = min(limit, lengths.item(index))
        return limit

    def _may_pass(self) -> bool:
        """Whether a finish changes nothing that is decided or reported."""
        return self._is_possible and not len(self._table.queue) and self._events.is_unwatched

    def _checked_lengths(self, lengths: Integers, opening: Opening | None) -> Int64Array:
        """Raises StepResultError: they are no numbers of steps, one for each request that samples."""
        counts = flat_integers("lengths", lengths, StepResultError)
        num_rows = len(self._batch.members) if opening is None else opening.num_samples
        if len(counts) != num_rows:
            raise StepResultError(f"lengths has {len(counts)} value(s); give one for each of {num_rows} request(s)")
        if num_rows and counts.item(counts.argmin()) < 1:
            raise StepResultError(f"lengths has {counts.min()}; every running request decodes in at least 1 step")
        return counts

    # ------------------------------------------------------------------ at once

    def advance(
        self,
        first_step_id: int,
        times: Sequence[float] | FloatArray,
        token_ids: Integers,
        last_token_ids: Integers,
        lengths: Integers,
        opening: Opening | None,
    ) -> tuple[list[Finishes], int]:
        """See `Scheduler.advance_past_finishes`. Returns the finishes, and the number of sampled tokens."""
        num_steps = len(times) - 1
        counts = self._checked_lengths(lengths, opening)
        longest = counts.item(counts.argmax()) if len(counts) else int(opening is not None)
        if num_steps < 1 or longest != num_steps:
            raise StepOrderError(
                f"times has the ends of {num_steps} step(s), and the longest of the lengths is {longest}; give as many"
            )
        if opening is not None:
            self._openings.require(opening, first_step_id)
            certain = self._within_opened(num_steps, counts, opening)
        elif self._may_pass():
            certain = self._within(num_steps, counts)
        else:
            raise StepOrderError("a request waits, or a listener or policy follows each decision; use advance()")
        if certain < num_steps:
            raise StepOrderError(
                f"{num_steps} step(s) at once, and {certain} are sure to be plain decodes; ask "
                "horizon_past_finishes() first, and schedule the others one by one"
            )
        tokens, last = checked_tokens(len(counts), 1, token_ids, last_token_ids)
        if tokens.ndim > 1:
            tokens = tokens[0]
        new = () if opening is None else opening.sampling
        num_old = len(counts) - len(new)
        self._fast_forward.check_middle(self._batch.members, num_steps, tokens[:num_old], counts[:num_old])
        ends = self._ends(last[:num_old], counts[:num_old], num_steps)
        if new:
            each = zip(new, tokens[num_old:].tolist(), last[num_old:].tolist(), counts[num_old:].tolist(), strict=True)
            for request, token, last_token, length in each:
                end = _end_of_new(request, token, last_token, length, num_steps)
                if end is not None:
                    ends.setdefault(length, []).append(end)
        step_id = first_step_id + num_steps - 1
        return self._commit(step_id, times, tokens, last, counts, sorted(ends.items()), opening)

    def _ends(self, last: Int32Array, lengths: Int64Array, num_steps: int) -> dict[int, list[End]]:
        """How the first of the running requests finish with their last tokens: by the number of steps until then, in
        row order.

        Raises:
            StepResultError: a request does not finish, and the run goes on.
        """
        batch, members, count = self._batch, self._batch.members, len(last)
        num_tokens = batch.num_tokens[members.rows[:count]] + lengths
        may_stop = last == members.eos_token_id[:count]
        may_stop |= num_tokens >= members.token_limit[:count]
        if batch.stop_filter.num_rows:
            may_stop |= batch.stop_filter.may_stop(last)
        may_stop |= lengths < num_steps
        found: dict[int, list[End]] = {}
        for index in may_stop.nonzero()[0].tolist():
            request, length = members.requests[index], lengths.item(index)
            end = stop_condition(request, num_tokens.item(index), last.item(index))
            if end is not None:
                found.setdefault(length, []).append(end)
            elif length < num_steps:
                raise _goes_on(request, last.item(index), length, num_steps)
        return found

    def _commit(
        self,
        last_step_id: int,
        times: Sequence[float] | FloatArray,
        tokens: Int32Array,
        last: Int32Array,
        lengths: Int64Array,
        ends: Ends,
        opening: Opening | None,
    ) -> tuple[list[Finishes], int]:
        batch, kv, table = self._batch, self._own, self._table
        assert kv is not None
        num_steps = len(times) - 1
        finishes = []
        kv.open_step(last_step_id, [], last_step_id)
        kv.journal = None
        self._emission.last_output = None
        if opening is not None:
            self._openings.begin(opening, last_step_id - num_steps + 1, float(times[0]))
            if not ends or ends[0][0] > 1:
                finishes.append(Finishes(1, (), kv.pool.usage))
        members = batch.members
        requests, rows = members.requests, members.rows
        if len(lengths) < len(rows):  # the last one has a partial prefill
            requests, rows = requests[:-1], rows[:-1]
        # Without what is computed of a known token, which a row of an opening has not decoded.
        computed = batch.num_tokens[rows] - 1
        grow = kv.grow_in_turn(batch, rows, computed, lengths) if num_steps > 1 or opening is None else None
        computed += lengths
        batch.num_computed_tokens[rows] = computed
        if not len(rows):
            pass
        elif num_steps > 1 and lengths.item(lengths.argmin()) < num_steps:
            batch.append_in_turn(rows, tokens, last, lengths, num_steps)
        else:
            batch.append_steps(requests, rows, tokens, last, num_steps)
        self._drafts.last_updated_step = last_step_id
        table.take_reports()  # what the output of the first step would report
        over: list[End] = []
        for step, group in ends:
            if grow is not None:
                grow(step)
            if over and step == num_steps:  # only these are yet to be reported
                table.close(over)
                table.take_reports()
                over = []
            table.now = float(times[step])
            table.release_in_turn(group)
            over += group
            finishes.append(Finishes(step, tuple([end.request for end in group]), kv.pool.usage))
        if over:
            table.close(over)
        if not ends or ends[-1][0] < num_steps:
            table.take_reports()
            if grow is not None:
                grow(num_steps)
        table.now = float(times[-1])
        if opening is not None and opening.is_budget_spent:
            self._admission.stand_still_for_budget(float(times[0]))
        else:
            self._admission.stand_still(None, float(times[-2]), 0)
        return finishes, int(np.add.reduce(lengths))


def _end_of_new(request: Request, token: int, last_token: int, length: int, num_steps: int) -> End | None:
    """How a request that the opening admits finishes with its last token; None: it goes on.

    Raises:
        StepResultError: it should not, or finishes before.
    """
    known = request._state.num_tokens
    if (
        length > 1
        and token in request.stop_set
        and known + length - 1 - request.num_prompt_tokens >= request.min_tokens
    ):
        raise stops_too_early(request, token, length)
    end = stop_condition(request, known + length, last_token)
    if end is None and length < num_steps:
        raise _goes_on(request, last_token, length, num_steps)
    return end


def _goes_on(request: Request, token: int, length: int, num_steps: int) -> StepResultError:
    return StepResultError(
        f"token {token} does not stop request {request.request_id!r} after {length} of {num_steps} steps; lengths must "
        "be that of the run for a request that goes on"
    )
