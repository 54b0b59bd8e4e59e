"""Acceptance: counts the drafts of running requests that were verified, and that were accepted.

A step only stores its counts. They are added up when the running requests change, when they are read, and when the
buffer is full. That costs a fraction of adding them to the rows in every step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Counts = npt.NDArray[np.integer]

_MAX_STEPS = 128  # in the buffer
_MAX_NUMBERS = 2**15  # counts in the buffer: they fit a processor's cache


class Acceptance:
    """Counts by row, and over all rows since the beginning.

    Args:
        accepted_drafts: how often 0, 1, 2, ... of the drafts of a row and step became tokens; incremented here.
    """

    def __init__(self, accepted_drafts: list[int]) -> None:
        self._accepted_drafts = accepted_drafts
        self._verified: Int64Array = np.zeros(0, dtype=np.int64)  # by row, like the next
        self._accepted: Int64Array = np.zeros(0, dtype=np.int64)
        self._rows: Counts = self._verified  # of the steps in the buffer
        self._num_steps = 0  # in the buffer
        # A copy in small integers: keeping the arrays of the steps instead takes a tenth of a step with drafts if other
        # processes use the processor's caches, too.
        kind = np.min_scalar_type(-1 - len(accepted_drafts))
        self._buffer: Counts = np.zeros((2, _MAX_NUMBERS), dtype=kind)
        self._drafts: Counts = self._buffer[:0]  # [steps, rows], like the next
        self._sampled: Counts = self._drafts
        self._same: Counts | None = None  # the drafts of all steps in the buffer, if they are one array; not copied

    def add(self, rows: Counts, drafts: Counts, sampled: Counts) -> None:
        """Count a step that verified `drafts` [n] of distinct `rows` [n], some of them 0, and returned `sampled` [n]
        tokens: the accepted drafts of each row, and one more. The caller changes `drafts` no more."""
        step = self._num_steps
        if rows is not self._rows or step == len(self._drafts):
            self._settle()
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

    def add_one(self, num_accepted: int) -> None:
        """Count the result of drafts whose request no longer has a row."""
        self._accepted_drafts[num_accepted] += 1

    @property
    def accepted_drafts(self) -> list[int]:
        """How often 0, 1, 2, ... of the drafts of a row and step became tokens."""
        self._settle()
        return self._accepted_drafts

    def of(self, row: int) -> tuple[int, int]:
        """Drafts of a row that were verified since it was assigned, and how many of them were accepted."""
        self._settle()
        return (int(self._verified[row]), int(self._accepted[row])) if row < len(self._verified) else (0, 0)

    def leave(self, row: int) -> tuple[int, int]:
        """As `of`, and reset the counts: the row is released."""
        counts = self.of(row)
        if any(counts):
            self._verified[row] = self._accepted[row] = 0
        return counts

    def _resize_buffer(self, num_rows: int) -> None:
        num_steps = max(1, min(_MAX_STEPS, _MAX_NUMBERS // num_rows))
        if num_rows > self._buffer.shape[1]:
            self._buffer = np.zeros((2, num_rows), dtype=self._buffer.dtype)
        self._drafts, self._sampled = self._buffer[:, : num_steps * num_rows].reshape(2, num_steps, num_rows)

    def _settle(self) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        last_row = int(self._rows.max(initial=-1))
        if last_row >= len(self._verified):
            more = np.zeros(2 * last_row + 1 - len(self._verified), dtype=np.int64)
            self._verified = np.concatenate([self._verified, more])
            self._accepted = np.concatenate([self._accepted, more])
        drafts, sampled = self._drafts[:num_steps], self._sampled[:num_steps]
        # Of each row with drafts, at least 0 were accepted.
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
