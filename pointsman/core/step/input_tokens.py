"""The tokens that a step computes, for hosts that keep none themselves."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepOrderError
from pointsman.core.state.batch import Batch
from pointsman.core.state.output import IntArray, SchedulerOutput
from pointsman.core.state.runs import join_runs

Int32Array = npt.NDArray[np.int32]

UNSAMPLED = -1
"""In the input of a step: a token that an earlier step in flight has yet to sample."""


def input_token_ids(batch: Batch, output: SchedulerOutput, allow_unsampled: bool) -> Int32Array:
    """See `Scheduler.input_token_ids`."""
    if output.num_rows == 0:
        return np.zeros(0, dtype=np.int32)
    if not len(output.draft_token_ids):
        return _known_token_ids(batch, output, output.num_scheduled_tokens, allow_unsampled)
    num_known = output.num_scheduled_tokens - output.num_draft_tokens
    known = _known_token_ids(batch, output, num_known, allow_unsampled)
    return join_runs(num_known, known, output.num_draft_tokens, output.draft_token_ids)


def _known_token_ids(batch: Batch, output: SchedulerOutput, counts: IntArray, allow_unsampled: bool) -> Int32Array:
    """The first `counts` tokens that each row computes, which are no drafts."""
    last = batch.last_tokens(output.rows)
    unsampled = output.num_computed_tokens + counts > batch.num_tokens[output.rows]
    if np.count_nonzero(unsampled):
        if not allow_unsampled:
            raise StepOrderError(
                f"step {output.step_id} computes tokens that an earlier step in flight has yet to sample"
            )
        last[unsampled] = UNSAMPLED
    chunks = ((counts > 1) | (output.num_computed_tokens + 1 < batch.num_tokens[output.rows])).nonzero()[0]
    if len(chunks) == 0:
        return last
    parts = np.split(last, chunks)
    pieces = [parts[0]]
    for index, part in zip(chunks.tolist(), parts[1:], strict=True):
        start = int(output.num_computed_tokens[index])
        pieces += [output.requests[index].tokens(start, start + int(counts[index])), part[1:]]
    return np.concatenate(pieces)
