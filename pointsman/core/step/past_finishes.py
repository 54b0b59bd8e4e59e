"""Which plain decodes are sure although requests finish among them, and what is the state after them?

    k = scheduler.horizon_past_finishes(limit, lengths)      lengths[i]: steps until request i stops, as the host knows
    scheduler.advance_past_finishes(times, token_ids, last_token_ids, lengths)

A run of decodes (`fast_forward.py`) goes up to the first request that finishes. Where no request waits, a finish
changes nothing that a later decode depends on: it only frees blocks and a row. A host that knows when its requests
stop, as a simulator does, need not make a run of each of the stretches between finishes.

What depends on the order is done in it: before a request releases its blocks, the steps up to its last one have
allocated theirs. So block ids, the order of free blocks and the prefix tree are those of single steps. All else
(columns, tokens, proof) is done once for the whole run. Where a listener or a policy follows the decisions, or a
request waits, the horizon ends with the first finish, and `advance` is the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepOrderError, StepResultError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.state.batch import Batch, Members
from pointsman.core.state.events import Events
from pointsman.core.state.numbers import flat_integers
from pointsman.core.state.output import Integers
from pointsman.core.state.request import Request
from pointsman.core.step.admission import Admission
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.fast_forward import FastForward, checked_tokens
from pointsman.core.step.request_table import End, RequestTable
from pointsman.core.step.update import stop_condition

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


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
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        drafts: Drafts,
        admission: Admission,
        emission: Emission,
        events: Events,
    ) -> None:
        self._fast_forward = fast_forward
        self._batch, self._kv, self._table = batch, kv, table
        self._drafts, self._admission, self._emission, self._events = drafts, admission, emission, events
        self._own = kv if isinstance(kv, KVCacheManager) else None
        follows_load = bool(admission.gates.load_followers)
        opens = self._own is None or hasattr(self._own.eviction, "open_step")
        self._is_possible = self._own is not None and not follows_load and not opens

    # ------------------------------------------------------------------ how many

    def horizon(self, limit: int, lengths: Integers) -> int:
        """See `Scheduler.horizon_past_finishes`."""
        return self._within(limit, self._checked_lengths(lengths))

    def _within(self, limit: int, lengths: Int64Array) -> int:
        batch, members = self._batch, self._batch.members
        limit, free, _ = self._fast_forward.bound(limit)
        if not limit:
            return 0
        first = lengths.item(lengths.argmin())
        if limit <= first or not self._may_pass():
            return self._fast_forward.horizon(min(limit, first))
        limit = min(limit, lengths.item(lengths.argmax()), max(first, batch.num_steps_kept))
        if batch.may_end(limit):  # without its stop token
            left = members.token_limit - batch.num_tokens[members.rows]
            sooner = left[left < lengths]
            limit = min(limit, sooner.item(sooner.argmin())) if len(sooner) else limit
        for index in (lengths < limit).nonzero()[0].tolist():
            request = members.requests[index]
            if request._state.more_input or request._state.parts:  # it does not finish
                limit = min(limit, lengths.item(index))
        return self._fast_forward.within_blocks(limit, free, lengths)

    def _may_pass(self) -> bool:
        """Whether a finish changes nothing that is decided or reported."""
        return self._is_possible and not len(self._table.queue) and self._events.is_unwatched

    def _checked_lengths(self, lengths: Integers) -> Int64Array:
        """Raises StepResultError: they are no numbers of steps, one for each running request."""
        counts = flat_integers("lengths", lengths, StepResultError)
        num_rows = len(self._batch.members)
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
    ) -> tuple[list[Finishes], int]:
        """See `Scheduler.advance_past_finishes`. Returns the finishes, and the number of tokens."""
        num_steps = len(times) - 1
        members = self._batch.members
        counts = self._checked_lengths(lengths)
        if num_steps < 1 or not len(counts) or counts.item(counts.argmax()) != num_steps:
            raise StepOrderError(
                f"times has the ends of {num_steps} step(s), and the longest of the lengths is "
                f"{counts.max(initial=0)}; give as many"
            )
        if not self._may_pass():
            raise StepOrderError("a request waits, or a listener or policy follows each decision; use advance()")
        certain = self._within(num_steps, counts)
        if certain < num_steps:
            raise StepOrderError(
                f"{num_steps} step(s) at once, and {certain} are sure to be plain decodes; ask "
                "horizon_past_finishes() first, and schedule the others one by one"
            )
        tokens, last = checked_tokens(members, 1, token_ids, last_token_ids)
        if tokens.ndim > 1:
            tokens = tokens[0]
        self._fast_forward.check_middle(members, num_steps, tokens, counts)
        ends = self._ends(members, last, counts, num_steps)
        return self._commit(first_step_id + num_steps - 1, times, members, tokens, last, counts, ends)

    def _ends(
        self, members: Members, last: Int32Array, lengths: Int64Array, num_steps: int
    ) -> list[tuple[int, list[End]]]:
        """How requests finish with their last tokens: the number of steps until then, and who does, in this order.

        Raises:
            StepResultError: a request does not finish, and the run goes on.
        """
        batch = self._batch
        num_tokens = batch.num_tokens[members.rows] + lengths
        may_stop = last == members.eos_token_id
        may_stop |= num_tokens >= members.token_limit
        if batch.stop_filter.num_rows:
            may_stop |= batch.stop_filter.may_stop(last)
        is_short = lengths < num_steps
        found: dict[int, list[End]] = {}
        for index in (may_stop | is_short).nonzero()[0].tolist():
            request, length = members.requests[index], lengths.item(index)
            end = stop_condition(request, num_tokens.item(index), last.item(index))
            if end is not None:
                found.setdefault(length, []).append(end)
            elif length < num_steps:
                raise StepResultError(
                    f"token {last.item(index)} does not stop request {request.request_id!r} after {length} of "
                    f"{num_steps} steps; lengths must be that of the run for a request that goes on"
                )
        return sorted(found.items())

    def _commit(
        self,
        last_step_id: int,
        times: Sequence[float] | FloatArray,
        members: Members,
        tokens: Int32Array,
        last: Int32Array,
        lengths: Int64Array,
        ends: list[tuple[int, list[End]]],
    ) -> tuple[list[Finishes], int]:
        batch, kv, table, rows = self._batch, self._own, self._table, members.rows
        assert kv is not None
        num_steps = len(times) - 1
        computed = batch.num_computed_tokens[rows]
        kv.open_step(last_step_id, [], last_step_id)
        kv.journal = None
        grow = kv.grow_in_turn(batch, rows, computed, lengths)
        computed += lengths
        batch.num_computed_tokens[rows] = computed
        if lengths.item(lengths.argmin()) < num_steps:
            batch.append_in_turn(rows, tokens, last, lengths, num_steps)
        else:
            batch.append_steps(members.requests, rows, tokens, last, num_steps)
        self._drafts.last_updated_step = last_step_id
        finishes = []
        for step, over in ends:
            table.take_reports()  # what the next step's output would report
            grow(step)
            table.now = float(times[step])
            table.finish(over)
            finishes.append(Finishes(step, tuple([end.request for end in over]), kv.pool.usage))
        if not ends or ends[-1][0] < num_steps:
            table.take_reports()
            grow(num_steps)
        table.now = float(times[-1])
        self._admission.stand_still(None, float(times[-2]), 0)
        self._emission.last_output = None
        return finishes, int(np.add.reduce(lengths))
