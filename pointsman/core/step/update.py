"""What came back from the model? The result is checked, tokens are appended, stop conditions tested, requests finished.

In the common case (every row sampled, and all still run) this is one scatter and one vectorised stop test; Python
loops run only over rows that finish or may have sampled one of several stop tokens, rows that repetitions may finish,
and rows whose request lost its row while the step was in flight. A step that verified drafts yields a run of tokens per
row, and is as vectorised.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepResultError
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.transfers import Transfers
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.state.batch import WATCHED, Batch, Members
from pointsman.core.state.numbers import INT64, ONE, ZERO, flat_tokens, set_writeable
from pointsman.core.state.output import IntArray, SchedulerOutput, StepResult, UpdateFields
from pointsman.core.state.repetition import REPETITION_DETECTED
from pointsman.core.state.request import Request
from pointsman.core.state.runs import Runs
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.status import FinishReason
from pointsman.core.step.in_flight import StepRecord, StepsInFlight
from pointsman.core.step.prompt_parts import PromptParts
from pointsman.core.step.request_table import End, RequestTable

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Ends = list[tuple[int, End]]  # (row index in the output, how it finishes)
_row_index = itemgetter(0)


def stop_condition(request: Request, num_tokens: int, token_id: int) -> End | None:
    """Whether a request finishes with `token_id`, its `num_tokens`th token: by a stop token, else by length, else by a
    repetition."""
    state = request._state
    watch = state.repetition_watch
    pattern_size = watch.observe(token_id) if watch is not None else None
    if token_id in request.stop_set and num_tokens - state.num_prompt_tokens >= request.min_tokens:
        is_eos = not request.ignore_eos and token_id in request.eos_token_ids
        return new_tuple(End, (request, FinishReason.STOP, "", None if is_eos else token_id))
    if num_tokens >= state.token_limit:
        return End(request, FinishReason.LENGTH, state.limit_detail)
    if pattern_size is not None and num_tokens - state.num_prompt_tokens >= request.min_tokens:
        detail = f"a pattern of {pattern_size} token(s) is repeated"
        return End(request, FinishReason.REPETITION, detail, REPETITION_DETECTED)
    return None


class Update:
    """Applies step results."""

    def __init__(
        self,
        batch: Batch,
        kv: KVCache,
        table: RequestTable,
        steps: StepsInFlight,
        parts: PromptParts,
        encoder: EncoderCache | None,
        transfers: Transfers | None,
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._table = table
        self._steps = steps
        self._parts = parts
        self._encoder = encoder
        self._transfers = transfers

    def append(self, step: StepRecord, output: SchedulerOutput, result: StepResult) -> tuple[UpdateFields, Ends]:
        """Parts 1 and 2: check the result of the oldest step in flight, append its tokens, and find requests that stop.

        Raises:
            StepResultError: the result does not fit the output; nothing was applied.
        """
        if len(output.draft_token_ids):
            return self._append_drafted(step, output, result)
        members = step.members
        if (
            members is None
            or members is not self._batch.members
            or result.counts is not None
            or result.errors
            or result.unsampled
        ):
            return self._append_some(step, output, result)
        token_ids = flat_tokens(result.token_ids, len(members.requests), ROW_TOKENS, SAMPLED, StepResultError)
        step.is_over = True
        decodes = output.samples is members.trues  # a plain decode, which computed the newest token of each row
        newest: Any = output.num_computed_tokens if decodes else None
        self._batch.append_to_all(token_ids, newest, is_last=len(self._steps.records) == 1)
        return self.plain_ends(members, token_ids)

    def plain_ends(self, members: Members, token_ids: Int32Array) -> tuple[UpdateFields, Ends]:
        """Which running requests stop with their newest tokens, after an append to all of them."""
        batch = self._batch
        done = batch.ending(0) if batch.least_left <= 0 else None
        if batch.num_with_one_stop:
            stops = token_ids == members.eos_token_id
            done = stops if done is None else done | stops
        any_done = done is not None and len(done) and done.item(done.argmax())  # in half the time of counting
        if not (any_done or batch.stop_filter.num_rows or batch.num_watched):
            return UpdateFields(token_ids, members.ones), []  # as in most steps
        if done is None:
            done = np.zeros(len(token_ids), dtype=np.bool_)
        ends = self._find_ends(members.requests, members.rows, token_ids, done)
        return UpdateFields(token_ids, members.ones), ends

    def finish(self, update: UpdateFields, ends: Ends) -> None:
        """Part 3: finish requests that stop, and free their blocks; those with further prompt parts continue."""
        ends.sort(key=_row_index)
        over: list[End] = []
        parts: list[Request] = []
        for _, end in ends:
            if self._parts.is_part(end):
                parts.append(end.request)
            else:
                over.append(end)
        self._table.finish(over)
        for request in parts:
            self._parts.complete(request)
        update.finished = (*[end.request for end in over], *[request for request in parts if request.is_finished])
        update.completed_parts = tuple([request for request in parts if not request.is_finished])

    def _find_ends(
        self,
        requests: Sequence[Request],
        rows: Int64Array,
        token_ids: Int32Array,
        done: npt.NDArray[np.bool_],
    ) -> Ends:
        """Which requests stop after an append to live rows: candidates are `done` or have unusual stop conditions."""
        batch = self._batch
        if batch.stop_filter.num_rows:
            done |= batch.stop_filter.may_stop(token_ids)
        if batch.num_watched:
            done |= (batch.flags[rows] & WATCHED) != 0
        ends: Ends = []
        for index in done.nonzero()[0].tolist():
            num_tokens = batch.num_tokens.item(rows.item(index))
            end = stop_condition(requests[index], num_tokens, token_ids.item(index))
            if end is not None:
                ends.append((index, end))
        return ends

    def _append_some(self, step: StepRecord, output: SchedulerOutput, result: StepResult) -> tuple[UpdateFields, Ends]:
        """As `append`, if not every row samples, a request has lost its row since, or rows failed or have no token."""
        sampled, token_ids = checked_samples(output, result)
        step.is_over = True
        batch = self._batch
        live = batch.serial[output.rows] == output.serials
        ends = self._errors(output, result) if result.errors else []
        if len(output.completes):
            ends += self._completions(output, result)
        counts = np.zeros(output.num_rows, dtype=np.int64)
        at, tokens, lost = sampled, token_ids, sampled[:0]
        if np.count_nonzero(live) < len(live):
            is_live = live[sampled]
            at, tokens, lost = sampled[is_live], token_ids[is_live], (~is_live).nonzero()[0]
        if len(at):
            rows = cast(Int64Array, output.rows[at])
            requests = [output.requests[index] for index in at.tolist()]
            num_tokens = batch.append(requests, rows, tokens, is_last=self._is_last())
            done = tokens == batch.eos_token_id[rows]
            done |= num_tokens >= batch.token_limit[rows]
            found = self._find_ends(requests, rows, tokens, done)
            ends += [(int(at[index]), end) for index, end in found]
            counts[at] = 1
        for index in lost.tolist():
            row_index = int(sampled[index])
            request = output.requests[row_index]
            if not request.is_finished and request.serial == output.serials[row_index]:
                counts[row_index] = 1
                end = self._deliver(request, int(token_ids[index]))
                if end is not None:
                    ends.append((row_index, end))
        if result.unsampled:
            self._sample_again(output, result)
        kept = token_ids[counts[sampled] > 0] if len(lost) else token_ids
        set_writeable(counts, False)
        return UpdateFields(kept, counts), ends

    # ------------------------------------------------------------------ runs

    def _append_drafted(
        self, step: StepRecord, output: SchedulerOutput, result: StepResult
    ) -> tuple[UpdateFields, Ends]:
        """The step verified drafts: each row that samples has a run of tokens, which is cut at a stop."""
        members = step.members
        if members is None or members is not self._batch.members or result.errors or result.unsampled:
            return self._append_some_drafted(step, output, result)
        runs = checked_run_per_row(output, result)
        step.is_over = True
        decodes = output.samples is members.trues  # a plain decode with drafts, see `Running.advance`
        computed = output.num_computed_tokens if decodes else None
        runs, ends = self._append_runs(members, output.num_draft_tokens, runs, computed)
        runs.counts.setflags(False)  # type: ignore[call-arg]
        return UpdateFields(runs.token_ids, runs.counts), ends

    def _append_some_drafted(
        self, step: StepRecord, output: SchedulerOutput, result: StepResult
    ) -> tuple[UpdateFields, Ends]:
        """As `_append_some`, where drafts were verified."""
        at, runs = checked_runs(output, result)
        step.is_over = True
        ends = self._errors(output, result) + self._completions(output, result)
        kept = np.zeros(output.num_rows, dtype=np.int64)
        live = self._batch.serial[output.rows[at]] == output.serials[at]
        which = at[live]
        if len(which):
            rows = Members(self._batch, output.rows[which], tuple([output.requests[index] for index in which.tolist()]))
            appended, found = self._append_runs(rows, output.num_draft_tokens[which], runs.only(live))
            kept[which] = appended.counts
            ends += [(int(which[index]), end) for index, end in found]
        for index in (~live).nonzero()[0].tolist():
            row_index = int(at[index])
            request = output.requests[row_index]
            if not request.is_finished and request.serial == output.serials[row_index]:
                run, num_drafts = runs.run(index), int(output.num_draft_tokens[row_index])
                kept[row_index], end = self._deliver_run(request, num_drafts, run)
                ends += [(row_index, end)] if end is not None else []
        if result.unsampled:
            self._sample_again(output, result)
        token_ids = runs.cut(kept[at]).token_ids
        set_writeable(kept, False)
        return UpdateFields(token_ids, kept), ends

    def _append_runs(
        self, live: Members, drafts: IntArray, runs: Runs, computed: IntArray | None = None
    ) -> tuple[Runs, Ends]:
        """Append the runs of live rows up to their stops. Returns the appended runs, and which requests stop.

        `computed`: computed tokens before the step, if it computed the newest token of each row, and drafts.
        """
        batch, rows = self._batch, live.rows
        if computed is None:
            num_tokens = batch.num_tokens[rows]
            num_tokens += runs.counts
        else:  # less than a gather
            num_tokens = computed + runs.counts
            num_tokens += ONE
        sampled = runs.counts
        ends: Ends = []
        done = self._may_be_done(live, runs, num_tokens)
        if done is not None and np.count_nonzero(done):
            runs, ends = _cut_at_stops(live.requests, num_tokens, runs, done)
            num_tokens -= sampled - runs.counts
            sampled = np.minimum(sampled, runs.counts + 1)  # a draft that finishes its request was accepted
        if self._is_last():  # then nothing of these rows is in flight
            batch.num_computed_tokens[rows] = num_tokens - ONE
            batch.num_pending[rows] = ZERO
        else:
            batch.num_computed_tokens[rows] -= drafts + 1 - runs.counts
            batch.num_pending[rows] -= 1
        batch.acceptance.add(rows, drafts, sampled)
        batch.append_runs(live.requests, rows, runs, num_tokens)
        return runs, ends

    def _may_be_done(self, live: Members, runs: Runs, num_tokens: Int64Array) -> npt.NDArray[np.bool_] | None:
        """[s] which rows may finish with their runs, which bring them to `num_tokens`; None: none of them."""
        batch = self._batch
        found = []
        if batch.may_end(1 + batch.max_drafts):
            found.append(num_tokens >= live.token_limit)
        stops = live.may_stop(runs)
        if batch.stop_filter.num_rows:
            several = batch.stop_filter.may_stop(runs.token_ids)
            stops = several if stops is None else stops | several
        if stops is not None and np.count_nonzero(stops):
            found.append(np.logical_or.reduceat(stops, runs.starts))
        if batch.num_watched:
            found.append((batch.flags[live.rows] & WATCHED) != 0)
        return np.logical_or.reduce(found) if found else None

    def _deliver_run(self, request: Request, num_drafts: int, run: list[int]) -> tuple[int, End | None]:
        """As `_deliver`, for a row that had drafts in flight."""
        length, end = _cut_at_stop(request, request.num_tokens, run)
        request._state.append_output(run[:length])
        request._state.settle_pending(1)
        if num_drafts:
            accepted = min(length, len(run) - 1)
            request._state.add_drafts(num_drafts, accepted)
            self._batch.acceptance.add_one(accepted)
        return length, end

    # ------------------------------------------------------------------ parts

    def _is_last(self) -> bool:
        """Whether no step after the updated one is in flight."""
        return len(self._steps.records) == 1

    def _deliver(self, request: Request, token_id: int) -> End | None:
        """A sample of a request that was preempted, or parked, while it was in flight."""
        request._state.append_output([token_id])
        request._state.settle_pending(1)
        return stop_condition(request, request.num_tokens, token_id)

    def _sample_again(self, output: SchedulerOutput, result: StepResult) -> None:
        """Rows without a token, see `RequestTable.sample_again`."""
        requests = [(output.requests[index], output.serials[index]) for index in sorted(result.unsampled)]
        self._table.sample_again([r for r, serial in requests if not r.is_finished and r.serial == serial])

    def _completions(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """Requests that sample nothing, and whose prompts are now computed."""
        ends: Ends = []
        for index in output.completes.tolist():
            request = output.requests[index]
            if index in result.errors or request.is_finished or request.serial != output.serials[index]:
                continue
            if request.row is None:  # it lost its row meanwhile
                request._state.settle_pending(1)
            else:
                self._batch.num_pending[request.row] -= 1
            ends.append((index, End(request, FinishReason.STOP)))
        return ends

    def _errors(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """Rows that failed on their own: what they wrote in this step and since is removed from the caches."""
        ends: Ends = []
        holders = [] if self._transfers is None else self._transfers.holders()
        readers = [*self._batch.members.requests, *holders] if result.errors else []
        for index, message in result.errors.items():
            request = output.requests[index]
            if self._encoder is not None:
                self._encoder.retract(request, output.step_id)
            self._kv.retract([record.journal for record in self._steps.records], request, readers)
            if not request.is_finished:
                ends.append((index, End(request, FinishReason.ERROR, message)))
        return ends


def _cut_at_stops(
    requests: Sequence[Request], num_tokens: Int64Array, runs: Runs, done: npt.NDArray[np.bool_]
) -> tuple[Runs, Ends]:
    """The runs up to their stops, and which requests stop with them; only those that are `done` may have one.

    `num_tokens` are the requests' tokens with their whole runs.
    """
    ends: Ends = []
    lengths = runs.counts.copy()
    for index in done.nonzero()[0].tolist():
        run = runs.run(index)
        lengths[index], end = _cut_at_stop(requests[index], int(num_tokens[index]) - len(run), run)
        ends += [(index, end)] if end is not None else []
    return (runs.cut(lengths) if ends else runs), ends


def _cut_at_stop(request: Request, num_tokens: int, run: list[int]) -> tuple[int, End | None]:
    """How many tokens of a run after the first `num_tokens` of its request are kept: up to the one that finishes it."""
    for length, token_id in enumerate(run, start=1):
        end = stop_condition(request, num_tokens + length, token_id)
        if end is not None:
            return length, end
    return len(run), None


# ------------------------------------------------------------------ checking what came back

ROW_TOKENS = "{} row(s) sample in this step; give one token for each"
RUN_TOKENS = "{} token(s) are what counts says"
SAMPLED = "was sampled"


def checked_tokens(result: StepResult, expected: int, wanted: str = ROW_TOKENS) -> Int32Array:
    """The result's `expected` tokens as a new array; `wanted` gives the reason for their number."""
    return flat_tokens(result.token_ids, expected, wanted, SAMPLED, StepResultError)


def checked_samples(output: SchedulerOutput, result: StepResult) -> tuple[Int64Array, Int32Array]:
    """Which rows have a token in the result, and the tokens, in row order."""
    expected = _expected(output, result)
    if result.counts is not None:
        counts = np.asarray(result.counts)
        if counts.shape != expected.shape or not np.array_equal(counts, expected.astype(counts.dtype)):
            raise StepResultError(
                f"counts is {counts.tolist()}; this step yields {expected.astype(int).tolist()}: one token for a row "
                "that samples and has no error, none for the others"
            )
    sampled = expected.nonzero()[0]
    return sampled, checked_tokens(result, len(sampled))


def checked_runs(output: SchedulerOutput, result: StepResult) -> tuple[Int64Array, Runs]:
    """Which rows have tokens in the result, and the runs of these rows."""
    expected = _expected(output, result)
    sampled = expected.nonzero()[0]
    counts = np.ones(len(sampled), dtype=np.int64)
    if result.counts is not None:
        given = np.asarray(result.counts)
        most = np.where(expected, 1 + output.num_draft_tokens, 0)
        if given.shape != most.shape or given.dtype.kind not in "iu" or ((given < expected) | (given > most)).any():
            raise StepResultError(
                f"counts is {given.tolist()}; this step yields 1 to {most.tolist()}: for a row that samples and has no "
                "error one token and at most one more for each draft, none for the others"
            )
        counts = given[sampled].astype(np.int64)
    token_ids = checked_tokens(result, int(counts.sum()), RUN_TOKENS)
    return sampled, Runs.of(counts, token_ids)


def checked_run_per_row(output: SchedulerOutput, result: StepResult) -> Runs:
    """As `checked_runs`, where every row samples and none has an error."""
    given, drafts = np.asarray(result.counts), output.num_draft_tokens
    if given.shape == drafts.shape and given.dtype.kind in "iu":
        counts: Int64Array = given.astype(INT64)
        rejected = drafts - counts  # and one less
        # `argmin` takes a fraction of the time of `any`.
        if rejected.item(rejected.argmin()) >= -1 and counts.item(counts.argmin()) >= 1:
            ends = np.add.accumulate(counts)
            return Runs(counts, ends, checked_tokens(result, ends.item(-1), RUN_TOKENS))
    return checked_runs(output, result)[1]  # reports what is wrong, if anything is


def _expected(output: SchedulerOutput, result: StepResult) -> npt.NDArray[np.bool_]:
    """[n] whether a row must have tokens in the result."""
    if not (result.errors or result.unsampled):
        return np.asarray(output.samples)
    expected = output.samples.copy()
    for index in result.errors:
        _check_row("errors", index, output)
        expected[index] = False
    for index in result.unsampled:
        _check_row("unsampled", index, output)
        if not expected[index]:
            why = "has an error" if index in result.errors else "is named twice or samples nothing in this step"
            raise StepResultError(f"unsampled names row {index}, which {why}; name rows that miss a token once")
        expected[index] = False
    return expected


def _check_row(name: str, index: object, output: SchedulerOutput) -> None:
    if not isinstance(index, (int, np.integer)) or not 0 <= index < output.num_rows:
        raise StepResultError(f"{name} names row {index} and the output has rows 0 to {output.num_rows - 1}")
