"""Whether what came back from the model fits the output that asked for it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepResultError
from pointsman.core.state.numbers import INT64, flat_tokens
from pointsman.core.state.output import SchedulerOutput, StepResult
from pointsman.core.state.runs import Runs

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
ROW_TOKENS = "{} row(s) sample in this step; give one token for each"
RUN_TOKENS = "{} token(s) are what counts says"


def checked_tokens(result: StepResult, expected: int, wanted: str = ROW_TOKENS) -> Int32Array:
    """The result's tokens, `expected` of them, as an array of its own; `wanted` says why so many."""
    return flat_tokens(result.token_ids, expected, wanted, "was sampled", StepResultError)


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
        # Where the least stands is found in a fraction of the time of `any`.
        if rejected.item(rejected.argmin()) >= -1 and counts.item(counts.argmin()) >= 1:
            ends = np.add.accumulate(counts)
            return Runs(counts, ends, checked_tokens(result, ends.item(-1), RUN_TOKENS))
    return checked_runs(output, result)[1]  # says what is wrong, if something is


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
