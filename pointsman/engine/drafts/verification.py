"""Verification: accepts or rejects the drafts of a step.

At every position the sampler draws the token that it would draw without drafts, from the same logits and with the same
randomness (a function of the request's seed and the position). A draft is accepted if it equals the token drawn at its
position. The first draft that differs voids all later ones, and the drawn token takes its place.

For drafts that are proposed without randomness this is rejection sampling (Leviathan et al. 2023): a draft is accepted
with its probability under the model, and otherwise the drawn token is distributed as if the draft were excluded. The
result is even stronger: the tokens equal those that the request would get without drafts, except for rounding in the
logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.core.state.output import SchedulerOutput, StepResult
from pointsman.engine.arrays import Int64Array

BoolArray = npt.NDArray[np.bool_]


@dataclass(slots=True)
class Verification:
    """The sampling positions of one step: r rows sample at s positions, one per row and one per draft."""

    rows: Int64Array
    """[r] index of each sampling row in the scheduler's output."""
    counts: Int64Array
    """[r] number of positions of each row: its number of drafts plus 1."""
    starts: Int64Array
    """[r] index of each row's first position among the s positions."""
    sampling: Int64Array
    """[s] row index, in the scheduler's output, of each position."""
    behind: Int64Array
    """[s] number of later positions of the same row."""
    drafts: Int64Array
    """[s - r] the drafts: the proposed token after each position, except after each row's last position."""

    @classmethod
    def of(cls, output: SchedulerOutput, sampling: Int64Array) -> Verification:
        """Make the sampling positions of a step. `sampling` [r]: indices of the output's rows that sample."""
        counts = 1 + output.num_draft_tokens[sampling].astype(np.int64)
        ends = counts.cumsum()
        return cls(
            rows=sampling,
            counts=counts,
            starts=ends - counts,
            sampling=np.repeat(sampling, counts),
            behind=np.repeat(ends, counts) - 1 - np.arange(int(ends[-1])),
            drafts=output.draft_token_ids.astype(np.int64),
        )

    def verify(self, token_ids: Int64Array, is_valid: BoolArray, num_rows: int) -> tuple[StepResult, BoolArray]:
        """Accept or reject the drafts, and compute the result of the step.

        Args:
            token_ids: [s] the token drawn at each position.
            is_valid: [s] whether the drawn token is valid.
            num_rows: number of rows of the output.

        Returns:
            The result of the step, without error messages; and an array [s]: False where the position makes its row
            fail. A row fails if the token at its first position is not valid. If the token at a later position is not
            valid, the drafts before this position remain accepted, and the row fails in its next step.
        """
        goes_on = np.zeros(len(token_ids), dtype=np.bool_)
        inner = (self.behind > 0).nonzero()[0]
        goes_on[inner] = (token_ids[inner] == self.drafts) & is_valid[inner] & is_valid[inner + 1]
        stops = (~goes_on).nonzero()[0]
        lengths = stops[stops.searchsorted(self.starts)] - self.starts + 1
        sound = is_valid[self.starts]
        lengths[~sound] = 0
        kept = np.arange(len(token_ids)) - np.repeat(self.starts, self.counts) < np.repeat(lengths, self.counts)
        counts = np.zeros(num_rows, dtype=np.int64)
        counts[self.rows] = lengths
        no_fault = np.ones(len(token_ids), dtype=np.bool_)
        no_fault[self.starts] = sound
        return StepResult(token_ids=token_ids[kept], counts=counts), no_fault
