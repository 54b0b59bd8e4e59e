"""What became of the drafts of the running requests: how many were verified, and how many accepted.

A step only notes it. It is added up when the running requests change, when somebody asks, and when there is much of it,
all at once: that costs a fraction of adding it to the rows in every step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Counts = npt.NDArray[np.integer]

_MOST_STEPS = 128  # that are noted
_MOST_NUMBERS = 2**15  # in them, which fit a processor's cache and are added up in a moment


class Acceptance:
    """Counts by row, and over all rows there ever were.

    Args:
        accepted_drafts: how often 0, 1, 2, ... of the drafts of a row and step became tokens; counted on here.
    """

    def __init__(self, accepted_drafts: list[int]) -> None:
        self._accepted_drafts = accepted_drafts
        self._verified: Int64Array = np.zeros(0, dtype=np.int64)  # by row, as the next
        self._accepted: Int64Array = np.zeros(0, dtype=np.int64)
        self._rows: Counts = self._verified  # those of the steps that are noted
        self._num_steps = 0  # that are noted
        # Small numbers in one place: to hold the arrays of the steps instead would take a tenth of a step with drafts
        # where other processes use the processor's caches, too.
        kind = np.min_scalar_type(-1 - len(accepted_drafts))
        self._room: Counts = np.zeros((2, _MOST_NUMBERS), dtype=kind)
        self._drafts: Counts = self._room[:0]  # [steps, rows], as the next
        self._sampled: Counts = self._drafts

    def add(self, rows: Counts, drafts: Counts, sampled: Counts) -> None:
        """A step verified `drafts` [n] of distinct `rows` [n], none for some, and `sampled` [n] tokens of each: what it
        accepted, and one more."""
        step = self._num_steps
        if rows is not self._rows or step == len(self._drafts):
            self._settle()
            step = 0
            if rows is not self._rows:
                self._rows = rows
                self._make_room(len(rows))
        self._drafts[step] = drafts
        self._sampled[step] = sampled
        self._num_steps = step + 1

    def add_one(self, num_accepted: int) -> None:
        """Drafts of a request that has no row any more came back."""
        self._accepted_drafts[num_accepted] += 1

    @property
    def accepted_drafts(self) -> list[int]:
        """How often 0, 1, 2, ... of the drafts of a row and step became tokens."""
        self._settle()
        return self._accepted_drafts

    def of(self, row: int) -> tuple[int, int]:
        """Drafts of a row that came back since it was given out, and how many of them were accepted."""
        self._settle()
        return (int(self._verified[row]), int(self._accepted[row])) if row < len(self._verified) else (0, 0)

    def leave(self, row: int) -> tuple[int, int]:
        """The same for the last time: the row will be another request's."""
        counts = self.of(row)
        if any(counts):
            self._verified[row] = self._accepted[row] = 0
        return counts

    def _make_room(self, num_rows: int) -> None:
        num_steps = max(1, min(_MOST_STEPS, _MOST_NUMBERS // num_rows))
        if num_rows > self._room.shape[1]:
            self._room = np.zeros((2, num_rows), dtype=self._room.dtype)
        self._drafts, self._sampled = self._room[:, : num_steps * num_rows].reshape(2, num_steps, num_rows)

    def _settle(self) -> None:
        num_steps, self._num_steps = self._num_steps, 0
        if not num_steps:
            return
        most = int(self._rows.max(initial=-1))
        if most >= len(self._verified):
            more = np.zeros(2 * most + 1 - len(self._verified), dtype=np.int64)
            self._verified = np.concatenate([self._verified, more])
            self._accepted = np.concatenate([self._accepted, more])
        drafts, sampled = self._drafts[:num_steps], self._sampled[:num_steps]
        self._verified[self._rows] += drafts.sum(axis=0, dtype=np.int32)
        at_least = int(np.count_nonzero(drafts))  # where there were drafts, at least none were accepted
        self._accepted[self._rows] += sampled.sum(axis=0, dtype=np.int32) - num_steps
        most_drafts = len(self._accepted_drafts) - 1
        for count in range(most_drafts):
            more_than = int(np.count_nonzero(sampled > count + 1)) if at_least else 0
            self._accepted_drafts[count] += at_least - more_than
            at_least = more_than
        self._accepted_drafts[most_drafts] += at_least
