"""What came back from the model: tokens are appended, stop conditions tested, and what is done is ended.

In the common case (every row sampled, nobody left since) this is one scatter and one vectorised stop test; Python
loops run only over rows that end, rows with unusual stop conditions, and rows whose request lost its place while the
step was in flight. A step that verified drafts answers with a run of tokens per row, and is as vectorised.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.batch import CUSTOM_STOP, RING, VERIFYING, Batch
from pointsman.core.config import MAX_INT
from pointsman.core.errors import StepResultError
from pointsman.core.in_flight import StepRecord
from pointsman.core.kv_cache import KVCacheManager
from pointsman.core.lifecycle import End, Lifecycle
from pointsman.core.output import SchedulerOutput, StepResult, StepUpdate
from pointsman.core.parts import Parts
from pointsman.core.repetition import REPETITION_DETECTED
from pointsman.core.request import Request
from pointsman.core.runs import Runs
from pointsman.core.stats import Counters
from pointsman.core.status import FinishReason

Int64Array = npt.NDArray[np.int64]
ROW_TOKENS = "row(s) sample in this step; give one token for each"
RUN_TOKENS = "token(s) are what counts says"
Ends = list[tuple[int, End]]  # (row index in the output, how it ended)


def stop_condition(request: Request, num_tokens: int, token_id: int) -> End | None:
    """Whether a request ends with `token_id`, its `num_tokens`th token: first by a stop token, then by length, then by
    a repetition."""
    watch = request.repetition_watch
    pattern_size = watch.observe(token_id) if watch is not None else None
    if token_id in request.stop_set and num_tokens - request.num_prompt_tokens >= request.min_tokens:
        is_eos = not request.ignore_eos and token_id in request.eos_token_ids
        return End(request, FinishReason.STOP, "", None if is_eos else token_id)
    if num_tokens >= request.token_limit:
        return End(request, FinishReason.LENGTH, request.limit_detail)
    if pattern_size is not None and num_tokens - request.num_prompt_tokens >= request.min_tokens:
        detail = f"a pattern of {pattern_size} token(s) is repeated"
        return End(request, FinishReason.REPETITION, detail, REPETITION_DETECTED)
    return None


class Update:
    """Applies step results."""

    def __init__(self, batch: Batch, kv: KVCacheManager, life: Lifecycle, parts: Parts, counters: Counters) -> None:
        self._batch = batch
        self._kv = kv
        self._life = life
        self._parts = parts
        self._counters = counters

    def apply(self, record: StepRecord, output: SchedulerOutput, result: StepResult, now: float) -> StepUpdate:
        """Apply the result of the oldest step in flight.

        Raises:
            StepResultError: the result does not fit the output; nothing was applied.
        """
        update, ends = self._apply(record, output, result)
        if ends:
            self._end(update, ends, now)
        if self._life.log is not None:
            self._life.log.updated()
        return update

    def _apply(self, record: StepRecord, output: SchedulerOutput, result: StepResult) -> tuple[StepUpdate, Ends]:
        if len(output.draft_token_ids):
            return self._apply_runs(record, output, result)
        members = record.members
        if members is None or members is not self._batch.members or result.counts is not None or result.errors:
            return self._apply_general(record, output, result)
        token_ids = _tokens(result, len(members))
        record.is_over = True
        num_tokens = self._batch.append(members.requests, members.rows, members.ring_base, token_ids)
        done = token_ids == members.eos_token_id
        done |= num_tokens >= members.token_limit
        ends = self._find_ends(members.requests, members.rows, token_ids, num_tokens, done)
        self._counters.num_generated_tokens += len(token_ids)
        return StepUpdate(token_ids, members.ones, ()), ends

    def _find_ends(
        self,
        requests: list[Request],
        rows: Int64Array,
        token_ids: Int64Array,
        num_tokens: Int64Array,
        done: npt.NDArray[np.bool_],
    ) -> Ends:
        """Who ends after an append to live rows: some of those that are `done` or have stop conditions of their own."""
        batch = self._batch
        if batch.num_custom_stops:
            done |= (batch.flags[rows] & CUSTOM_STOP) != 0
        ends: Ends = []
        for index in done.nonzero()[0].tolist():
            end = stop_condition(requests[index], int(num_tokens[index]), int(token_ids[index]))
            if end is not None:
                ends.append((index, end))
        return ends

    def _apply_general(
        self, record: StepRecord, output: SchedulerOutput, result: StepResult
    ) -> tuple[StepUpdate, Ends]:
        sampled, token_ids = _sampled(output, result)
        record.is_over = True
        batch = self._batch
        live = batch.serial[output.rows] == output.serials
        ends = self._errors(output, result) + self._completions(output, result)
        is_live = live[sampled]
        counts = np.zeros(output.num_rows, dtype=np.int64)
        at = sampled[is_live]
        if len(at):
            rows, tokens = output.rows[at], token_ids[is_live]
            requests = [output.requests[index] for index in at.tolist()]
            num_tokens = batch.append(requests, rows, rows * RING, tokens)
            done = tokens == batch.eos_token_id[rows]
            done |= num_tokens >= batch.token_limit[rows]
            found = self._find_ends(requests, rows, tokens, num_tokens, done)
            ends += [(int(at[index]), end) for index, end in found]
            counts[at] = 1
        for index in (~is_live).nonzero()[0].tolist():
            row_index = int(sampled[index])
            request = output.requests[row_index]
            if not request.is_finished and request.serial == output.serials[row_index]:
                counts[row_index] = 1
                end = self._deliver(request, int(token_ids[index]))
                if end is not None:
                    ends.append((row_index, end))
        kept = token_ids[counts[sampled] > 0]
        self._counters.num_generated_tokens += len(kept)
        return StepUpdate(kept, counts, []), ends

    # ------------------------------------------------------------------ runs

    def _apply_runs(self, record: StepRecord, output: SchedulerOutput, result: StepResult) -> tuple[StepUpdate, Ends]:
        """The step verified drafts: each row that samples has a run of tokens, of which those up to a stop count."""
        at, runs = _runs(output, result)
        record.is_over = True
        batch = self._batch
        ends = self._errors(output, result) + self._completions(output, result)
        rows: Int64Array = output.rows[at].astype(np.int64, copy=False)
        drafts: Int64Array = output.num_draft_tokens[at].astype(np.int64, copy=False)
        live = batch.serial[rows] == output.serials[at]
        if live.all():
            kept, found = self._append_runs([output.requests[index] for index in at.tolist()], rows, drafts, runs)
        else:
            kept, found = np.zeros(len(at), dtype=np.int64), []
            which = live.nonzero()[0]
            requests = [output.requests[index] for index in at[which].tolist()]
            kept[which], among = self._append_runs(requests, rows[which], drafts[which], runs.only(live))
            found += [(int(which[index]), end) for index, end in among]
            for index in (~live).nonzero()[0].tolist():
                request = output.requests[at[index]]
                if not request.is_finished and request.serial == output.serials[at[index]]:
                    kept[index], end = self._deliver_run(request, int(drafts[index]), runs.run(index))
                    found += [(index, end)] if end is not None else []
        ends += [(int(at[index]), end) for index, end in found]
        counts = np.zeros(output.num_rows, dtype=np.int64)
        counts[at] = kept
        token_ids = runs.cut(kept).token_ids
        self._counters.num_generated_tokens += len(token_ids)
        return StepUpdate(token_ids, counts, []), ends

    def _append_runs(
        self, requests: list[Request], rows: Int64Array, drafts: Int64Array, runs: Runs
    ) -> tuple[Int64Array, Ends]:
        """Append the runs of live rows up to their stops. Returns how many tokens count of each, and who ends."""
        if not len(rows):
            return rows, []
        batch = self._batch
        kept = runs.counts
        num_tokens = batch.num_tokens[rows]
        done = num_tokens + kept >= batch.token_limit[rows]
        hits = runs.token_ids == np.repeat(batch.eos_token_id[rows], kept)
        if hits.any():
            done |= np.logical_or.reduceat(hits, runs.starts)
        if batch.num_custom_stops:
            done |= (batch.flags[rows] & CUSTOM_STOP) != 0
        ends: Ends = []
        lengths = kept.copy()
        for index in done.nonzero()[0].tolist():
            lengths[index], end = _cut_at_stop(requests[index], int(num_tokens[index]), runs.run(index))
            ends += [(index, end)] if end is not None else []
        scheduled = 1 + drafts
        batch.num_computed_tokens[rows] -= scheduled - lengths
        batch.num_pending[rows] -= scheduled
        self._count_accepted(rows, drafts, np.minimum(lengths, kept - 1))
        if ends:
            runs = runs.cut(lengths)
        batch.append_runs(requests, rows, runs, int(scheduled.max()))
        return lengths, ends

    def _count_accepted(self, rows: Int64Array, drafts: Int64Array, accepted: Int64Array) -> None:
        """Drafts of live rows are not in flight any more."""
        batch = self._batch
        if not drafts.all():
            which = drafts.nonzero()[0]
            rows, drafts, accepted = rows[which], drafts[which], accepted[which]
        batch.flags[rows] &= ~np.uint8(VERIFYING)
        batch.num_verifying -= len(rows)
        batch.num_verified[rows] += drafts
        batch.num_accepted[rows] += accepted
        for place, count in enumerate(np.bincount(accepted).tolist()):
            self._counters.accepted_drafts[place] += count

    def _deliver_run(self, request: Request, num_drafts: int, run: list[int]) -> tuple[int, End | None]:
        """As `_deliver`, for a row that had drafts in flight."""
        length, end = _cut_at_stop(request, request.num_tokens, run)
        request.append_output(run[:length])
        request.settle_pending(1 + num_drafts)
        if num_drafts:
            accepted = min(length, len(run) - 1)
            request.add_drafts(num_drafts, accepted)
            self._counters.accepted_drafts[accepted] += 1
        return length, end

    # ------------------------------------------------------------------ parts

    def _deliver(self, request: Request, token_id: int) -> End | None:
        """A sample of a request that was preempted, or parked, while it was in flight."""
        request.append_output([token_id])
        request.settle_pending(1)
        return stop_condition(request, request.num_tokens, token_id)

    def _completions(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """Requests that sample nothing, and whose prompts are computed now."""
        ends: Ends = []
        for index in output.completes.tolist():
            request = output.requests[index]
            if index in result.errors or request.is_finished or request.serial != output.serials[index]:
                continue
            if request.row is None:  # it lost its row meanwhile
                request.settle_pending(1)
            else:
                self._batch.num_pending[request.row] -= 1
            ends.append((index, End(request, FinishReason.STOP)))
        return ends

    def _errors(self, output: SchedulerOutput, result: StepResult) -> Ends:
        """Rows that failed on their own: what they wrote in this step and since is not to be found again."""
        ends: Ends = []
        readers = [*self._batch.members.requests, *self._life.holders()] if result.errors else []
        for index, message in result.errors.items():
            request = output.requests[index]
            if self._life.encoder is not None:
                self._life.encoder.retract(request, output.step_id)
            self._kv.retract([record.journal for record in self._life.in_flight], request, readers)
            if not request.is_finished:
                ends.append((index, End(request, FinishReason.ERROR, message)))
        return ends

    def _end(self, update: StepUpdate, ends: Ends, now: float) -> None:
        """End requests, or the present parts of such as go on."""
        ends.sort(key=lambda entry: entry[0])
        parts = [end.request for _, end in ends if self._parts.is_part(end)]
        over = [end for _, end in ends if end.request not in parts]
        self._life.end(over)
        if parts and self._life.log is not None:
            self._life.log.updated()  # a first token comes before the end of its part
        for request in parts:
            self._parts.complete(request, now)
        update.finished = [end.request for end in over] + [request for request in parts if request.is_finished]
        update.completed_parts = [request for request in parts if not request.is_finished]


def _cut_at_stop(request: Request, num_tokens: int, run: list[int]) -> tuple[int, End | None]:
    """How many tokens of a run behind the first `num_tokens` of its request count: those up to the one that ends it."""
    for length, token_id in enumerate(run, start=1):
        end = stop_condition(request, num_tokens + length, token_id)
        if end is not None:
            return length, end
    return len(run), None


def _tokens(result: StepResult, expected: int, wanted: str = ROW_TOKENS) -> Int64Array:
    """The result's tokens as an array of its own, `expected` of them; `wanted` says why so many."""
    try:
        given = np.asarray(result.token_ids)
    except ValueError as error:
        raise StepResultError(f"token_ids must be a flat sequence of integers: {error}") from None
    if given.dtype.kind not in "iu" and given.size:
        raise StepResultError(f"token_ids must be a flat sequence of integers, and they are of type {given.dtype}")
    token_ids: Int64Array = given.astype(np.int64)
    if token_ids.shape != (expected,):
        raise StepResultError(f"token_ids has shape {token_ids.shape} and {expected} {wanted}")
    # A negative id is huge when read as unsigned, so one reduction finds both kinds of bad id.
    if expected and np.maximum.reduce(token_ids.view(np.uint64)) > MAX_INT:
        bad = token_ids[(token_ids < 0) | (token_ids > MAX_INT)][0]
        raise StepResultError(f"token id {bad} was sampled; ids must be between 0 and {MAX_INT}")
    return token_ids


def _sampled(output: SchedulerOutput, result: StepResult) -> tuple[Int64Array, Int64Array]:
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
    return sampled, _tokens(result, len(sampled))


def _runs(output: SchedulerOutput, result: StepResult) -> tuple[Int64Array, Runs]:
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
    return sampled, Runs.of(counts, _tokens(result, int(counts.sum()), RUN_TOKENS))


def _expected(output: SchedulerOutput, result: StepResult) -> npt.NDArray[np.bool_]:
    """[n] whether a row must have tokens in the result."""
    if not result.errors:
        return np.asarray(output.samples)
    expected = output.samples.copy()
    for index in result.errors:
        if not isinstance(index, (int, np.integer)) or not 0 <= index < output.num_rows:
            raise StepResultError(f"errors names row {index} and the output has rows 0 to {output.num_rows - 1}")
        expected[index] = False
    return expected
