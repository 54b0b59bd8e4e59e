"""What became of the drafts of the running requests: how many were verified, and how many accepted.

A step only notes its arrays. They are added up when the running requests change, when somebody asks, and when there are
many, all at once: it costs a fraction of adding them to the rows in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
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
        self._steps: list[tuple[Counts, Counts]] = []  # (drafts, sampled) of these rows
        self._most_steps = _MOST_STEPS
        self._room: Int32Array = np.zeros(0, dtype=np.int32)  # where they are joined: new memory costs more than sums

    def add(self, rows: Counts, drafts: Counts, sampled: Counts) -> None:
        """A step verified `drafts` [n] of distinct `rows` [n], none for some, and `sampled` [n] tokens of each: what it
        accepted, and one more."""
        if rows is not self._rows or len(self._steps) >= self._most_steps:
            self._settle()
            self._rows = rows
            self._most_steps = min(_MOST_STEPS, _MOST_NUMBERS // len(rows))
        self._steps.append((drafts, sampled))

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

    def _settle(self) -> None:
        if not self._steps:
            return
        all_drafts, all_sampled = zip(*self._steps, strict=True)
        self._steps.clear()
        most = int(self._rows.max(initial=-1))
        if most >= len(self._verified):
            more = np.zeros(2 * most + 1 - len(self._verified), dtype=np.int64)
            self._verified = np.concatenate([self._verified, more])
            self._accepted = np.concatenate([self._accepted, more])
        drafts = self._joined(all_drafts)
        self._verified[self._rows] += drafts.sum(axis=0, dtype=np.int32)
        at_least = int(np.count_nonzero(drafts))  # where there were drafts, at least none were accepted
        sampled = self._joined(all_sampled)
        self._accepted[self._rows] += sampled.sum(axis=0, dtype=np.int32) - len(sampled)
        most_drafts = len(self._accepted_drafts) - 1
        for count in range(most_drafts):
            more_than = int(np.count_nonzero(sampled > count + 1)) if at_least else 0
            self._accepted_drafts[count] += at_least - more_than
            at_least = more_than
        self._accepted_drafts[most_drafts] += at_least

    def _joined(self, arrays: Sequence[Counts]) -> Int32Array:
        """[steps, rows], until this is called again."""
        size = len(arrays) * len(self._rows)
        if size > len(self._room):
            self._room = np.zeros(2 * size, dtype=np.int32)
        joined = np.concatenate(arrays, out=self._room[:size], casting="unsafe")  # they are small
        return joined.reshape(len(arrays), -1)
