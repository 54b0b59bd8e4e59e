"""Why did a running request get nothing in the last step, and since when does it get nothing?

It wants its next token and no limit of its own holds it back, so others took what a step has: its tokens, its rows, its
blocks, or the step as a whole, where prompts go before decoding. Why is worked out only when somebody asks; since when
is noted by the steps that leave somebody out, and by no other.
"""

from __future__ import annotations

import numpy as np

from pointsman.core.config import SchedulerConfig
from pointsman.core.state.batch import Batch
from pointsman.core.state.output import IntArray, SchedulerOutput
from pointsman.core.state.reason import Blocked, Reason
from pointsman.core.state.request import Request


class LeftOut:
    """Since when the rows of a batch get nothing, step after step."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._since = np.zeros(0)  # by row
        self._serials = np.zeros(0, dtype=np.int64)  # by row: whom that is about, 0 for nobody
        self._step_id = 0

    def note(self, step_id: int, rows: IntArray, now: float, *, goes_on: bool) -> None:
        """Of all that run, a step takes only these rows. `goes_on`: who was left out before may be so still."""
        members, num_rows = self._batch.members, len(self._batch.serial)
        if not goes_on or step_id != self._step_id + 1:
            self._serials[:] = 0
        more = np.zeros(num_rows - len(self._serials), dtype=np.int64)
        if len(more):
            self._since, self._serials = np.concatenate([self._since, more]), np.concatenate([self._serials, more])
        self._step_id = step_id
        self._serials[rows] = 0
        is_in = np.zeros(num_rows, dtype=np.bool_)
        is_in[rows] = True
        out = ~is_in[members.rows]
        left, serials = members.rows[out], members.serials[out]
        self._since[left[self._serials[left] != serials]] = now
        self._serials[left] = serials

    def since(self, request: Request) -> float | None:
        """When the first of the steps was that have left out a request; None: the newest did not."""
        row = request.row
        if row is None or row >= len(self._since) or self._serials[row] != request.serial:
            return None
        return float(self._since[row])


def why_left_out(
    request: Request, batch: Batch, output: SchedulerOutput | None, config: SchedulerConfig
) -> Blocked | None:
    """Why a request that runs is not in the newest output, and how much it needs at least.

    None: it is, or has no row, or it waited for samples that have come back since.
    """
    if request.row is None or output is None or request in output.requests:
        return None
    pending = int(batch.num_pending[request.row])
    if pending:
        return Blocked(Reason.IN_FLIGHT, pending)
    decodes_alone = config.batching == "prefill-first" and request.phase != "prefill" and output.num_rows > 0
    if decodes_alone and _is_for_prompts(output):
        return Blocked(Reason.PREFILL_FIRST, 0)
    if output.total_num_scheduled_tokens >= config.max_num_batched_tokens:
        return Blocked(Reason.BUDGET, 1)
    if output.num_rows >= config.max_num_seqs:
        return Blocked(Reason.SEQUENCE_LIMIT, 1)
    if output.preempted:
        return Blocked(Reason.BLOCKS, int(batch.num_computed_tokens[request.row] >= batch.num_slots[request.row]))
    return Blocked(Reason.PREFILL_FIRST, 0) if decodes_alone else None  # for prompts that lacked one token each


def _is_for_prompts(output: SchedulerOutput) -> bool:
    """Whether a step is for prompts, of those that are for prompts or for decoding, as far as its rows tell."""
    is_long = np.any(output.num_scheduled_tokens - output.num_draft_tokens > 1)
    return bool(output.admitted) or bool(is_long) or not bool(output.samples.all())
