"""Acceptance: counts the verified and the accepted drafts of running requests.

A step only stores its counts in a buffer. The counts are added up when the running requests change, when a sum is read,
and when the buffer is full. That costs a fraction of adding them to the rows in every step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Counts = npt.NDArray[np.integer]

_MAX_STEPS = 128  # maximum number of steps in the buffer
_MAX_NUMBERS = 2**15  # maximum number of counts in the buffer, so that it fits a processor's cache


class Acceptance:
    """Numbers of verified and accepted drafts, by row and over all rows since the beginning.

    Args:
        accepted_drafts: element k is how often k drafts of a row were accepted in a step; this object increments the
            elements.
    """

    def __init__(self, accepted_drafts: list[int]) -> None:
        self._accepted_drafts = accepted_drafts
        self._verified: Int64Array = np.zeros(0, dtype=np.int64)  # [rows] verified drafts; `_accepted` likewise
        self._accepted: Int64Array = np.zeros(0, dtype=np.int64)
        self._rows: Counts = self._verified  # rows of the steps in the buffer
        self._num_steps = 0  # number of steps in the buffer
        # A copy in small integers: keeping the arrays of the steps instead takes a tenth of a step with drafts if other
        # processes use the processor's caches, too.
        kind = np.min_scalar_type(-1 - len(accepted_drafts))
        self._buffer: Counts = np.zeros((2, _MAX_NUMBERS), dtype=kind)
        self._drafts: Counts = self._buffer[:0]  # [steps, rows] in the buffer; `_sampled` likewise
        self._sampled: Counts = self._drafts
        self._same: Counts | None = None  # the drafts of all steps in the buffer, if they are one array; not copied

    def add_step(self, rows: Counts, drafts: Counts, sampled: Counts) -> None:
        """Count the drafts of one step, for distinct `rows` [n]. `drafts` [n]: number of drafts verified for each row,
        may be 0. `sampled` [n]: number of tokens returned for each row, its accepted drafts plus 1. The caller must not
        modify `drafts` afterwards."""
        step = self._num_steps
        if rows is not self._rows or step == len(self._drafts):
            self._add_up_buffer()
            step = 0
            if rows is not self._rows:
                self._rows = rows
                self._resize_buffer(len(rows))
        if not step:
            self._same = drafts
        elif drafts is not self._same:
            if self._same is not None:
                self._drafts[:step] = self._same
                self._same = None
            self._drafts[step] = drafts
        self._sampled[step] = sampled
        self._num_steps = step + 1

    def add_accepted(self, num_accepted: int) -> None:
        """Count `num_accepted` accepted drafts of a request that no longer has a row."""
        self._accepted_drafts[num_accepted] += 1

    @property
    def accepted_drafts(self) -> list[int]:
        """Element k is how often k drafts of a row were accepted in a step."""
        self._add_up_buffer()
        return self._accepted_drafts

    def counts_of(self, row: int) -> tuple[int, int]:
        """Number of drafts of a row that were verified since the row was assigned, and number of drafts accepted."""
        self._add_up_buffer()
        return (int(self._verified[row]), int(self._accepted[row])) if row < len(self._verified) else (0, 0)

    def release_row(self, row: int) -> tuple[int, int]:
        """Return the numbers of verified and accepted drafts of a row, and reset them, because the row is released."""
        counts = self.counts_of(row)
        if any(counts):
            self._verified[row] = self._accepted[row] = 0
        return counts

    def _resize_buffer(self, num_rows: int) -> None:
        num_steps = max(1, min(_MAX_STEPS, _MAX_NUMBERS // num_rows))
        if num_rows > self._buffer.shape[1]:
            self._buffer = np.zeros((2, num_rows), dtype=self._buffer.dtype)
        self._drafts, self._sampled = self._buffer[:, : num_steps * num_rows].reshape(2, num_steps, num_rows)

    def _add_up_buffer(self) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        last_row = int(self._rows.max(initial=-1))
        if last_row >= len(self._verified):
            more = np.zeros(2 * last_row + 1 - len(self._verified), dtype=np.int64)
            self._verified = np.concatenate([self._verified, more])
            self._accepted = np.concatenate([self._accepted, more])
        drafts, sampled = self._drafts[:num_steps], self._sampled[:num_steps]
        # Each row with drafts had at least 0 drafts accepted.
        if self._same is not None:
            self._verified[self._rows] += self._same * num_steps
            at_least = int(np.count_nonzero(self._same)) * num_steps
        else:
            self._verified[self._rows] += drafts.sum(axis=0, dtype=np.int32)
            at_least = int(np.count_nonzero(drafts))
        self._accepted[self._rows] += sampled.sum(axis=0, dtype=np.int32) - num_steps
        max_drafts = len(self._accepted_drafts) - 1
        for count in range(max_drafts):
            more_than = int(np.count_nonzero(sampled > count + 1)) if at_least else 0
            self._accepted_drafts[count] += at_least - more_than
            at_least = more_than
        self._accepted_drafts[max_drafts] += at_least
