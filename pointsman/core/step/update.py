"""The update: checks the model's result, appends the tokens, tests stop conditions, finishes requests.

A result has a run of tokens for each row that samples: one token, and more if drafts were accepted. A run is cut at the
token that finishes its request. In the common case (every row sampled, and all requests still run) the update is one
scatter and one vectorised stop test. Python loops run only over rows that finish, rows that may have sampled one of
several stop tokens, rows that repetitions may finish, and rows whose request lost its row while the step was in flight.
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
from pointsman.core.state.numbers import INT64, ONE, flat_tokens, set_writeable
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
Ends = list[tuple[int, End]]  # (row index in the output, end of the row's request)
_row_index = itemgetter(0)


def stop_condition(request: Request, num_tokens: int, token_id: int) -> End | None:
    """The end of a request after `token_id`, its `num_tokens`th token. The first condition that applies decides: a stop
    token, the length, a repetition. None: the request continues."""
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
    """Applies the results of steps to the requests."""

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

    def append(
        self, step: StepRecord, output: SchedulerOutput, result: StepResult, now: float
    ) -> tuple[UpdateFields, Ends]:
        """Parts 1 and 2 of `Scheduler.update`: check the result of the oldest step in flight, append the sampled
        tokens, and find requests that stop.

        Raises:
            StepResultError: the result does not fit the output; nothing was applied.
        """
        members, drafts = step.members, output.num_draft_tokens if len(output.draft_token_ids) else None
        if members is None or members is not self._batch.members or result.errors or result.unsampled:
            return self._append_to_some(step, output, result, drafts, now)
        if drafts is None and result.counts is None:
            num_rows = len(members.requests)
            token_ids = flat_tokens(result.token_ids, num_rows, ROW_TOKENS, SAMPLED, StepResultError)
            runs: Runs = new_tuple(Runs, (members.ones, members.ends, token_ids))
        else:
            runs = _checked_run_per_row(members, output, result, drafts)
        step.set_over()
        decodes = output.samples is members.trues  # every row computed only its newest token and drafts
        newest: Any = output.num_computed_tokens if decodes else None
        runs, ends = self._append_runs(members, drafts, runs, newest)
        if runs.counts is not members.ones:
            runs.counts.setflags(False)  # type: ignore[call-arg]
        return UpdateFields(runs.token_ids, runs.counts, output.requests), ends

    def append_steps(self, tokens: Int32Array, last: Int32Array, num_steps: int) -> tuple[UpdateFields, Ends]:
        """As `append`, for every running row after `num_steps` steps that were done in one call.

        Args:
            tokens: sampled tokens: [rows], the same in each step, or [steps, rows]; no token before the last step stops
                its request.
            last: [rows] sampled tokens of the last step.
        """
        batch, members = self._batch, self._batch.members
        newest, done = batch.num_tokens[members.rows] - ONE, 0
        sampled = last.copy()
        newest_runs: Runs = new_tuple(Runs, (members.ones, members.ends, sampled))
        ends = self._runs_cut_at_stops(members, newest_runs, newest + (num_steps - 1), num_steps)[1]
        while done < num_steps:
            piece = min(num_steps - done, batch.num_appends)
            by_row = tokens.repeat(piece) if tokens.ndim == 1 else tokens[done : done + piece].T.ravel()
            counts = members.ones if piece == 1 else members.ones * piece
            runs: Runs = new_tuple(Runs, (counts, members.ends * piece, by_row))
            if done + piece == num_steps:
                by_row[runs.ends - ONE] = last
            batch.append(members, runs, newest, piece, True)
            newest, done = newest + piece, done + piece
        sampled.setflags(False)  # type: ignore[call-arg]
        return UpdateFields(sampled, members.ones, members.requests), ends

    def finish(self, update: UpdateFields, ends: Ends, now: float) -> None:
        """Part 3 of `Scheduler.update`: finish requests that stop, and free their blocks. Requests whose prompt has
        further parts continue."""
        ends.sort(key=_row_index)
        over: list[End] = []
        parts: list[Request] = []
        for _, end in ends:
            if self._parts.ends_only_part(end):
                parts.append(end.request)
            else:
                over.append(end)
        self._table.finish(over, now)
        for request in parts:
            self._parts.complete_part(request, now)
        update.finished = (*[end.request for end in over], *[request for request in parts if request.is_finished])
        update.completed_parts = tuple([request for request in parts if not request.is_finished])

    def _append_to_some(
        self, step: StepRecord, output: SchedulerOutput, result: StepResult, drafts: IntArray | None, now: float
    ) -> tuple[UpdateFields, Ends]:
        """As `append`, for a step in which a row does not sample, has failed, lacks a token, or has lost its request
        since."""
        at, runs = checked_runs(output, result, drafts)
        step.set_over()
        ends = self._ends_by_error(output, result) + self._ends_by_completion(output, result)
        kept = np.zeros(output.num_rows, dtype=np.int64)
        live = self._batch.serial[output.rows[at]] == output.serials[at]
        which, of_live = at, runs
        if np.count_nonzero(live) < len(live):
            which, of_live = at[live], runs.select(live)
        if len(which):
            requests = tuple([output.requests[index] for index in which.tolist()])
            rows = Members(self._batch, cast(Int64Array, output.rows[which]), requests)
            appended, found = self._append_runs(rows, None if drafts is None else drafts[which], of_live)
            kept[which] = appended.counts
            ends += [(int(which[index]), end) for index, end in found]
        for index in (~live).nonzero()[0].tolist():
            row_index = int(at[index])
            request = output.requests[row_index]
            if not request.is_finished and request.serial == output.serials[row_index]:
                num_drafts = 0 if drafts is None else int(drafts[row_index])
                kept[row_index], end = self._append_without_row(request, num_drafts, runs.tokens_of(index))
                ends += [(row_index, end)] if end is not None else []
        if result.unsampled:
            self._sample_again(output, result, now)
        lengths = kept[at]
        token_ids = runs.token_ids if lengths.tobytes() == runs.counts.tobytes() else runs.truncate(lengths).token_ids
        set_writeable(kept, False)
        return UpdateFields(token_ids, kept, output.requests), ends

    def _append_runs(
        self,
        live: Members,
        drafts: IntArray | None,
        runs: Runs,
        newest: Int64Array | None = None,
    ) -> tuple[Runs, Ends]:
        """Append the run of each row in `live`, up to the token that stops the row's request. Returns the appended
        runs, and the ends of the requests that stop.

        Args:
            drafts: [live rows] number of drafts that each row verified; None: no row of the step verified drafts.
            newest: [live rows] position of the newest known token of each row; None: read from the batch.
        """
        batch, rows, sampled = self._batch, live.rows, runs.counts
        if newest is None:
            newest = batch.num_tokens[rows] - ONE
        longest = 1 if drafts is None else 1 + batch.max_drafts
        runs, ends = self._runs_cut_at_stops(live, runs, newest, longest)
        is_last = len(self._steps.records) <= 1
        if drafts is not None:
            if is_last:  # no later step has these rows in flight
                batch.num_computed_tokens[rows] = newest + runs.counts
            else:
                batch.num_computed_tokens[rows] -= drafts + 1 - runs.counts
            if runs.counts is not sampled:
                sampled = np.minimum(sampled, runs.counts + 1)  # a draft that finishes its request was accepted
            batch.acceptance.add_step(rows, drafts, sampled)
        batch.append(live, runs, newest, longest, is_last)
        return runs, ends

    def _runs_cut_at_stops(self, live: Members, runs: Runs, newest: Int64Array, most: int) -> tuple[Runs, Ends]:
        """Cut each row's run of sampled tokens after the token that stops the row's request. Returns the cut runs, and
        the ends of the requests that stop. `newest`: [live rows] position of the last token before each run.

        `most`: maximum distance, in tokens, from the newest known token to the end of a run.
        """
        batch = self._batch
        done: npt.NDArray[np.bool_] | None = None  # [live rows] mask of rows that may finish; None: no row
        is_single = len(runs.token_ids) == len(live.requests)
        if not is_single:
            done = live.may_stop(runs)
        elif batch.num_with_one_stop:
            done = runs.token_ids == live.eos_token_id
        if batch.stop_filter.num_rows:
            several = batch.stop_filter.may_stop(runs.token_ids)
            done = several if done is None else done | several
        if not is_single and done is not None:
            done = np.logical_or.reduceat(done, runs.starts) if np.count_nonzero(done) else None
        if batch.min_tokens_left <= most and batch.may_reach_limit(most):
            at_limit = newest + runs.counts >= live.token_limit - ONE
            done = at_limit if done is None else done | at_limit
        if batch.num_watched:
            watched = (batch.flags[live.rows] & WATCHED) != 0
            done = watched if done is None else done | watched
        if done is not None and len(done) and done.item(done.argmax()):  # twice as fast as counting
            return _cut_at_stops(live.requests, newest, runs, done)
        return runs, []

    def _append_without_row(self, request: Request, num_drafts: int, run: list[int]) -> tuple[int, End | None]:
        """Append the run of a request that was preempted or parked while the step was in flight; returns the number of
        kept tokens, and the end of the request, if any."""
        length, end = _cut_at_stop(request, request.num_tokens, run)
        request._state.append_output(run[:length])
        request._state.subtract_pending(1)
        if num_drafts:
            accepted = min(length, len(run) - 1)
            request._state.add_drafts(num_drafts, accepted)
            self._batch.acceptance.add_accepted(accepted)
        return length, end

    # ------------------------------------------------------------------ parts

    def _sample_again(self, output: SchedulerOutput, result: StepResult, now: float) -> None:
        """Restart the requests of rows that lack a token, see `RequestTable.sample_again`."""
        requests = [(output.requests[index], output.serials[index]) for index in sorted(result.unsampled)]
        self._table.sample_again([r for r, serial in requests if not r.is_finished and r.serial == serial], now)

    def _ends_by_completion(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """End records of the requests that sample nothing and whose prompts this step completes."""
        ends: Ends = []
        for index in output.completes.tolist():
            request = output.requests[index]
            if index in result.errors or request.is_finished or request.serial != output.serials[index]:
                continue
            if request.row is None:  # the request lost its row while the step was in flight
                request._state.subtract_pending(1)
            else:
                self._batch.num_pending[request.row] -= 1
            ends.append((index, End(request, FinishReason.STOP)))
        return ends

    def _ends_by_error(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """End records of the requests whose rows failed. Removes the KV of these rows from the caches: of this step,
        and of later steps that are already scheduled."""
        ends: Ends = []
        holders = [] if self._transfers is None else self._transfers.requests_with_holdings()
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
    requests: Sequence[Request], newest: Int64Array, runs: Runs, done: npt.NDArray[np.bool_]
) -> tuple[Runs, Ends]:
    """Cut the run of sampled tokens of each request in `done` after the token that stops the request. Returns all runs,
    and the ends of the requests that stop.

    `newest`: [requests] position of the last token before each run. `done`: [requests] mask of the requests that may
    stop.
    """
    ends: Ends = []
    shorter: dict[int, int] = {}
    is_single = len(runs.token_ids) == len(requests)
    for index in done.nonzero()[0].tolist():
        run = [runs.token_ids.item(index)] if is_single else runs.tokens_of(index)
        length, end = _cut_at_stop(requests[index], newest.item(index) + 1, run)
        if end is not None:
            ends.append((index, end))
        if length < len(run):
            shorter[index] = length
    if shorter:
        lengths = runs.counts.copy()
        lengths[list(shorter)] = list(shorter.values())
        runs = runs.truncate(lengths)
    return runs, ends


def _cut_at_stop(request: Request, num_tokens: int, run: list[int]) -> tuple[int, End | None]:
    """Returns the number of tokens of a run up to the token that stops the request, and the end of the request (None:
    the request continues). `num_tokens`: number of tokens of the request before the run."""
    for length, token_id in enumerate(run, start=1):
        end = stop_condition(request, num_tokens + length, token_id)
        if end is not None:
            return length, end
    return len(run), None


# ------------------------------------------------------------------ checking a result

ROW_TOKENS = "{} row(s) sample in this step; give one token for each"
RUN_TOKENS = "counts adds up to {} token(s)"
SAMPLED = "was sampled"


def checked_tokens(result: StepResult, expected: int, wanted: str = ROW_TOKENS) -> Int32Array:
    """The tokens of a result as a new array, after a check that there are `expected` tokens. `wanted`: template that
    explains this number in the error message."""
    return flat_tokens(result.token_ids, expected, wanted, SAMPLED, StepResultError)


def checked_runs(output: SchedulerOutput, result: StepResult, drafts: IntArray | None) -> tuple[Int64Array, Runs]:
    """The indices of rows that have tokens in the result, and the runs of these rows. `drafts`: [rows] number of drafts
    of each row; None: no drafts."""
    expected = _rows_with_tokens(output, result)
    sampled = expected.nonzero()[0]
    counts = np.ones(len(sampled), dtype=np.int64)
    if drafts is None:
        if result.counts is not None:
            given = np.asarray(result.counts)
            if given.shape != expected.shape or not np.array_equal(given, expected.astype(given.dtype)):
                raise StepResultError(
                    f"counts is {given.tolist()}, but must be {expected.astype(int).tolist()} in this step: 1 for each "
                    "row that samples and has no error, 0 for every other row"
                )
        return sampled, Runs.of(counts, checked_tokens(result, len(sampled)))
    if result.counts is not None:
        given = np.asarray(result.counts)
        most = np.where(expected, 1 + drafts, 0)
        if given.shape != most.shape or given.dtype.kind not in "iu" or ((given < expected) | (given > most)).any():
            raise StepResultError(
                f"counts is {given.tolist()}, but must be between {expected.astype(int).tolist()} and {most.tolist()} "
                "in this step: 1 to 1 + drafts for each row that samples and has no error, 0 for every other row"
            )
        counts = given[sampled].astype(np.int64)
    return sampled, Runs.of(counts, checked_tokens(result, int(counts.sum()), RUN_TOKENS))


def _checked_run_per_row(
    members: Members, output: SchedulerOutput, result: StepResult, drafts: IntArray | None
) -> Runs:
    """The runs that `checked_runs` returns, for a step in which every row samples and no row has an error."""
    given = np.asarray(result.counts)
    if drafts is not None and given.shape == drafts.shape and given.dtype.kind in "iu":
        counts: Int64Array = given.astype(INT64)
        rejected = drafts - counts  # number of rejected drafts, minus 1
        # `argmin` takes a fraction of the time of `any`.
        if rejected.item(rejected.argmin()) >= -1 and counts.item(counts.argmin()) >= 1:
            ends = np.add.accumulate(counts)
            return Runs(counts, ends, checked_tokens(result, ends.item(-1), RUN_TOKENS))
    runs = checked_runs(output, result, drafts)[1]  # raises the error, if the counts are wrong
    return runs if drafts is not None else runs._replace(counts=members.ones)


def _rows_with_tokens(output: SchedulerOutput, result: StepResult) -> npt.NDArray[np.bool_]:
    """[rows] whether each row must have tokens in the result."""
    if not (result.errors or result.unsampled):
        return np.asarray(output.samples)
    expected = output.samples.copy()
    for index in result.errors:
        _check_row("errors", index, output)
        expected[index] = False
    for index in result.unsampled:
        _check_row("unsampled", index, output)
        if not expected[index]:
            why = "has an error" if index in result.errors else "is listed twice or samples nothing in this step"
            raise StepResultError(
                f"unsampled has row {index}, which {why}; list each row whose expected token is missing once"
            )
        expected[index] = False
    return expected


def _check_row(name: str, index: object, output: SchedulerOutput) -> None:
    if not isinstance(index, (int, np.integer)) or not 0 <= index < output.num_rows:
        raise StepResultError(f"{name} has row {index}, but the output has only rows 0 to {output.num_rows - 1}")
