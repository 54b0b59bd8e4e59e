"""Speculation: tokens that the host guesses for running requests, verified by the model beside the next one.

    propose    a host's drafts wait at the rows that decode: `num_drafts`, `draft_tokens` of the batch
    schedule   a row computes its newest token and its drafts; what it does not get of them is forgotten
    update     the model accepts the drafts up to the first that it would not have chosen, and adds one token of its
               own: a run of 1 to 1 + drafts tokens from one step (Leviathan et al. 2023, "Fast Inference from
               Transformers via Speculative Decoding"; Chen et al. 2023, "Accelerating Large Language Model Decoding
               with Speculative Sampling")

While drafts are in flight nobody knows how many of them will count, so the row is not scheduled again before its run is
in; `num_computed_tokens` is lowered then by what was rejected. The slots of rejected drafts stay with the row, and are
written again by its next tokens.

A draft is a wish. It is cut to the token limit, the table of the configuration, the limits and the budget; it never
makes a request give way, and whoever loses its row forgets its drafts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.batch import PREFILLING, VERIFYING, Batch
from pointsman.core.config import MAX_INT, SchedulerConfig
from pointsman.core.errors import ProposalError, StepOrderError
from pointsman.core.output import Integers, SchedulerOutput
from pointsman.core.stats import Counters

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NO_TOKENS: Int32Array = np.zeros(0, dtype=np.int32)
NO_TOKENS.flags.writeable = False


class Drafts:
    """The drafts of the running requests of one batch."""

    def __init__(self, config: SchedulerConfig, batch: Batch, counters: Counters) -> None:
        self._config = config
        self._batch = batch
        self._counters = counters
        self._columns = np.arange(config.num_draft_tokens)
        self.last_updated_step = -1

    def propose(self, output: SchedulerOutput, token_ids: Integers, counts: Integers) -> int:
        """Let drafts wait at the rows of an updated output; see `Scheduler.propose`."""
        if output.step_id > self.last_updated_step:
            raise StepOrderError(f"drafts for step {output.step_id} cannot be proposed before its update")
        if output.step_id < self.last_updated_step:
            return 0
        batch = self._batch
        proposed, tokens = self._checked(output, token_ids, counts)
        rows = output.rows
        decodes = (batch.serial[rows] == output.serials) & (batch.num_pending[rows] == 0)
        decodes &= (batch.flags[rows] & PREFILLING) == 0
        at = decodes.nonzero()[0]
        if len(at) < len(rows):
            tokens = tokens[np.repeat(decodes, proposed)]
            rows, proposed = rows[at], proposed[at]
        drafts = np.minimum(proposed, batch.token_limit[rows] - batch.num_tokens[rows] - 1)
        if batch.num_drafting:
            batch.num_drafting -= int(np.count_nonzero(batch.num_drafts[rows]))
        batch.num_drafting += int(np.count_nonzero(drafts))
        batch.num_drafts[rows] = drafts
        if len(tokens) == len(rows) * batch.max_drafts:
            batch.draft_tokens[rows] = tokens.reshape(-1, batch.max_drafts)
        else:
            row, column = (self._columns < proposed[:, None]).nonzero()
            batch.draft_tokens[rows[row], column] = tokens
        waiting = int(drafts.sum())
        self._counters.num_proposed_tokens += waiting
        return waiting

    def wanted(self, rows: Int64Array) -> Int64Array:
        """[rows] drafts that each may have verified in a step, by what waits and by the table."""
        drafts = self._batch.num_drafts[rows]
        if self._config.draft_table:
            np.minimum(drafts, self._config.max_drafts(len(rows)), out=drafts)
        return drafts

    def take(self, rows: Int64Array, drafts: Int64Array) -> Int32Array:
        """The first `drafts` [rows] of what waits, ragged, are in flight from now on; the rest of it is forgotten."""
        batch = self._batch
        total = int(drafts.sum())
        batch.num_drafting -= int(np.count_nonzero(batch.num_drafts[rows]))
        batch.num_drafts[rows] = 0
        if not total:
            return NO_TOKENS
        batch.num_pending[rows] += drafts
        verifying = rows if drafts.all() else rows[drafts > 0]
        batch.flags[verifying] |= VERIFYING
        batch.num_verifying += len(verifying)
        self._counters.num_draft_tokens += total
        tokens = batch.draft_tokens[rows]
        if total < tokens.size:
            return tokens[self._columns < drafts[:, None]]
        return tokens.reshape(-1)

    def forget(self) -> None:
        """Nothing waits any more."""
        if self._batch.num_drafting:
            self._batch.num_drafts[self._batch.members.rows] = 0
            self._batch.num_drafting = 0

    def _checked(self, output: SchedulerOutput, token_ids: Integers, counts: Integers) -> tuple[Int64Array, Int32Array]:
        most = self._config.num_draft_tokens
        proposed, tokens = _integers("counts", counts), _integers("token_ids", token_ids)
        if proposed.shape != (output.num_rows,):
            raise ProposalError(f"counts has shape {proposed.shape} and step {output.step_id} {output.num_rows} row(s)")
        if len(proposed) and not 0 <= proposed.min() <= proposed.max() <= most:
            bad = proposed[(proposed < 0) | (proposed > most)][0]
            raise ProposalError(f"{bad} drafts for a row, and num_draft_tokens is {most}; propose 0 to {most}")
        total = int(proposed.sum())
        if tokens.shape != (total,):
            raise ProposalError(f"token_ids has shape {tokens.shape} and counts asks for {total} token(s)")
        # A negative id is huge when read as unsigned, so one reduction finds both kinds of bad id.
        if total and np.maximum.reduce(tokens.view(np.uint64)) > MAX_INT:
            bad = tokens[(tokens < 0) | (tokens > MAX_INT)][0]
            raise ProposalError(f"token id {bad} is proposed; ids must be between 0 and {MAX_INT}")
        return proposed, tokens.astype(np.int32)


def _integers(name: str, values: Integers) -> Int64Array:
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise ProposalError(f"{name} must be a flat sequence of integers: {error}") from None
    if given.dtype.kind not in "iu" and given.size:
        raise ProposalError(f"{name} must be a flat sequence of integers, and they are of type {given.dtype}")
    return given.astype(np.int64)
