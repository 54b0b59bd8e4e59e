"""Which steps are sure although requests finish among them, and what is the state after them?

    num_steps, finishes = scheduler.advance_past_finishes(times, token_ids, last_token_ids, lengths, opening)

A run of decodes (`fast_forward.py`) goes up to the first request that finishes. Where no request waits, a finish
changes nothing that a later decode depends on: it only frees blocks and a row. A host that knows when its requests
stop, as a simulator does, need not make a run of each of the stretches between finishes. Nor need it schedule the step
before them that admits requests: that is the first step of the run, its opening (`opening.py`).

What depends on the order is done in it: before a request releases its blocks, the steps up to its last one have
allocated theirs. So block ids, the order of free blocks and the prefix tree are those of single steps. All else
(columns, tokens, proof, the membership of the batch) is done once for the whole run. Where a listener or a policy
follows the decisions, or a request waits, nothing is sure here: `horizon` and `advance` are the way.
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
from pointsman.core.state.numbers import ONE, flat_integers
from pointsman.core.state.output import Integers
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.step.admission import Admission
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.fast_forward import FastForward, check_token, int32_array, token_array
from pointsman.core.step.opening import Opening, Openings
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


_Ends = list[tuple[int, list[End]]]
"""Who finishes in a run: (number of steps until then, who finishes in row order), in the order of steps."""
_LastTokens = list[tuple[int, int]]
"""(index, token): what stops them, where it is not what they sample in every step."""


class PastFinishes:
    """Does steps at once of which it proves that they are plain decodes, whatever finishes among them."""

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
        self._batch, self._table = batch, table
        self._drafts, self._admission, self._emission, self._events = drafts, admission, emission, events
        own = kv if isinstance(kv, KVCacheManager) else None
        opens = own is None or hasattr(own.eviction, "open_step")
        self._kv = None if opens or admission.gates.load_followers else own
        """None: nothing is ever sure."""

    def advance(
        self,
        first_step_id: int,
        times: Sequence[float] | FloatArray,
        token_ids: Integers,
        last_token_ids: Integers,
        lengths: Integers,
        opening: Opening | None,
    ) -> tuple[int, int, list[Finishes]]:
        """See `Scheduler.advance_past_finishes`. Returns the number of steps, that of sampled tokens, and finishes."""
        num_steps = len(times) - 1
        if num_steps < 1:
            raise StepOrderError(f"times has {len(times)} value(s); give one for the start and one for each step's end")
        members = self._batch.members
        requests, rows, num_old = members.requests, members.rows, len(members.requests)
        if opening is not None:
            self._openings.require(opening, first_step_id)
            rows, new = opening.rows[: opening.num_samples], opening.sampling
            num_old = len(rows) - len(new)
            requests = requests[:num_old] + new
        counts, tokens, last, first = _checked(len(rows), lengths, token_ids, last_token_ids)
        new_tokens = self._check_tokens(requests, rows, tokens, num_old)
        limit = self._limit(num_steps, rows, counts, opening)
        if limit:
            limit, ends, last_tokens = self._ends(requests, rows, tokens, last, counts, limit, first, num_old)
        if not limit:
            return 0, 0, []
        num_sampled, finishes = self._commit(
            first_step_id, times, requests, rows, tokens, new_tokens, counts, limit, first, ends, last_tokens, opening
        )
        return limit, num_sampled, finishes

    # ------------------------------------------------------------------ how many

    def _limit(self, num_steps: int, rows: Int64Array, counts: Int64Array, opening: Opening | None) -> int:
        """How many of the steps are sure as far as blocks and the queue are concerned."""
        batch, kv, free = self._batch, self._kv, 0
        if opening is not None:
            if num_steps == 1 or not opening.may_go_on:
                return 1
            assert kv is not None
            free = kv.pool.num_free - opening.num_blocks
        elif kv is None or len(self._table.queue) or not self._events.is_unwatched:
            return 0
        else:
            num_steps, free, _ = self._fast_forward.bound(num_steps)
        if len(rows) * (num_steps // kv.block_size + 1) <= free:
            return num_steps
        room = batch.num_slots[rows] - batch.num_tokens[rows] + 1 if opening is None else self._openings.room(opening)
        return self._fast_forward.within_room(num_steps, free, room, counts)

    def _ends(
        self,
        requests: tuple[Request, ...],
        rows: Int64Array,
        tokens: Int32Array,
        last: Int32Array,
        counts: Int64Array,
        limit: int,
        first: int,
        num_old: int,
    ) -> tuple[int, _Ends, _LastTokens]:
        """How many of `limit` steps go by until a request ends sooner than after its length, by its token limit or as
        it ends a part of its prompt; who finishes in them, and with which tokens.

        Raises:
            StepResultError: a last token does not stop its request.
        """
        limited = self._limited(requests, rows, counts, limit, num_old)
        if limited:
            limit = min(limited)[0]
        if first > limit and not limited:
            return limit, [], []
        finishing = [(counts.item(index), index) for index in (counts <= limit).nonzero()[0].tolist()]
        if len(finishing) == len(counts):
            limit = max(finishing)[0] if finishing else 1
        finishing += [each for each in limited if each[0] == limit]
        finishing.sort()
        for step, index in finishing:
            state = requests[index]._state
            if state.more_input or state.parts:  # it does not finish
                limit = min(limit, step - 1)
        ends, last_tokens = _Ends(), _LastTokens()
        for step, index in finishing:
            if step > limit:
                break
            request, is_last = requests[index], step == counts.item(index)
            token = last.item(index) if is_last else tokens.item(index)
            if is_last:
                check_token("last_token_ids", token)
                last_tokens.append((index, token))
            end = stop_condition(request, request._state.num_tokens + step, token)
            if end is None:
                raise StepResultError(
                    f"token {token} does not stop request {request.request_id!r} after {step} step(s); lengths must be "
                    "greater than the number of steps for a request that goes on"
                )
            if ends and ends[-1][0] == step:
                ends[-1][1].append(end)
            else:
                ends.append((step, [end]))
        return limit, ends, last_tokens

    def _limited(
        self, requests: tuple[Request, ...], rows: Int64Array, counts: Int64Array, limit: int, num_old: int
    ) -> list[tuple[int, int]]:
        """(step, index) of those that reach their token limit within `limit` steps, and before the end of theirs."""
        batch, found = self._batch, []
        if num_old and batch.may_end(limit):
            left = batch.members.token_limit[:num_old] - batch.num_tokens[rows[:num_old]]
            is_sooner = (left <= limit) & (left < counts[:num_old])
            found = [(left.item(index), index) for index in is_sooner.nonzero()[0].tolist()]
        for index in range(num_old, len(requests)):
            state = requests[index]._state
            sooner = state.token_limit - state.num_prompt_tokens - state.num_own_output_tokens
            if sooner <= limit and sooner < counts.item(index):
                found.append((sooner, index))
        return found

    def _check_tokens(
        self, requests: tuple[Request, ...], rows: Int64Array, tokens: Int32Array, num_old: int
    ) -> list[int]:
        """Returns the indices of those whose token is not the one that they got in the run before. Raises
        StepResultError: a token is none, or would stop its request in every step."""
        is_new = self._batch.recent_fill[rows[:num_old]] != tokens[:num_old]
        new: list[int] = is_new.nonzero()[0].tolist()
        new.extend(range(num_old, len(requests)))
        for index in new:
            if tokens.item(index) in requests[index].stop_set:
                raise StepResultError(
                    f"token {tokens[index]} of token_ids stops request {requests[index].request_id!r}; what stops it "
                    "belongs into last_token_ids"
                )
        return new

    # ------------------------------------------------------------------ at once

    def _commit(
        self,
        first_step_id: int,
        times: Sequence[float] | FloatArray,
        requests: tuple[Request, ...],
        rows: Int64Array,
        tokens: Int32Array,
        new_tokens: list[int],
        counts: Int64Array,
        num_steps: int,
        first: int,
        ends: _Ends,
        last_tokens: _LastTokens,
        opening: Opening | None,
    ) -> tuple[int, list[Finishes]]:
        """Returns the number of sampled tokens, and the finishes."""
        batch, kv, table = self._batch, self._kv, self._table
        assert kv is not None
        finishes = []
        last_step_id = first_step_id + num_steps - 1
        kv.open_step(last_step_id, [], last_step_id)
        kv.journal = None
        self._emission.last_output = None
        if opening is not None:
            self._openings.place(opening, float(times[0]))
        # A row of an opening has computed its last known token as one that decodes has.
        before = batch.num_tokens[rows] if opening is None else opening.num_known_tokens
        lengths = np.minimum(counts, num_steps) if first < num_steps else np.array(num_steps)
        grow = kv.grow_in_turn(batch, rows, before, lengths, num_steps)
        if opening is not None:
            at_once = self._openings.takes_at_once(opening)
            until = (ends[0][0] if ends else num_steps) if at_once else 1
            blocks = grow(until, opening.num_blocks if at_once else 0)
            self._openings.fill(opening, float(times[0]), blocks if at_once else None)
            if opening.is_budget_spent:
                self._openings.keep_output(opening, first_step_id)
        after = before + lengths
        batch.num_computed_tokens[rows] = after - ONE
        batch.repeat(requests, rows, tokens, new_tokens, before, after, num_steps, last_tokens)
        self._drafts.last_updated_step = last_step_id
        table.take_reports()  # what the output of the first step would report
        over: list[End] = []
        requests_over: list[Request] = []
        for step, group in ends:
            grow(step)
            if over and step == num_steps:  # only those of the last step are yet to be reported
                table.close(over, requests_over)
                table.take_reports()
                over, requests_over = [], []
            table.now = float(times[step])
            finished = [end.request for end in group]
            table.release_in_turn(finished)
            over += group
            requests_over += finished
            finishes.append(new_tuple(Finishes, (step, tuple(finished), kv.pool.usage)))
        if over:
            table.close(over, requests_over)
        if not ends or ends[-1][0] < num_steps:
            table.take_reports()
            grow(num_steps)
        table.now = float(times[num_steps])
        if opening is not None and opening.is_budget_spent:
            self._admission.stand_still_for_budget(float(times[0]))
        else:
            self._admission.stand_still(None, float(times[num_steps - 1]), 0)
        return int(np.add.reduce(lengths)) if first < num_steps else len(rows) * num_steps, finishes


def _checked(
    num_rows: int, lengths: Integers, token_ids: Integers, last_token_ids: Integers
) -> tuple[Int64Array, Int32Array, Int32Array, int]:
    """[rows] the lengths, tokens and last tokens; and the least length, 1 if there is no row.

    Raises:
        StepResultError: they are not that.
    """
    counts = flat_integers("lengths", lengths, StepResultError)
    tokens, last = token_array("token_ids", token_ids), int32_array("last_token_ids", last_token_ids)
    if not counts.shape == tokens.shape == last.shape == (num_rows,):
        for name, values in (("lengths", counts), ("token_ids", tokens), ("last_token_ids", last)):
            if values.shape != (num_rows,):
                raise StepResultError(f"{name} has shape {values.shape}; give one for each of {num_rows} request(s)")
    first = counts.item(counts.argmin()) if num_rows else 1
    if first < 1:
        raise StepResultError(f"lengths has {first}; every request gets a token in at least 1 step")
    return counts, tokens, last, first
