"""Runs: several tokens for each of some rows, ragged. What the model answers where it has verified drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def join_runs(
    first_counts: npt.NDArray[np.integer],
    first: npt.NDArray[np.int32],
    second_counts: npt.NDArray[np.integer],
    second: npt.NDArray[np.integer],
) -> npt.NDArray[np.int32]:
    """For each row i the next `first_counts[i]` numbers of `first`, and behind them `second_counts[i]` of `second`."""
    is_first = np.tile([True, False], len(first_counts))
    is_first = np.repeat(is_first, np.stack([first_counts, second_counts], axis=1).reshape(-1))
    joined = np.empty(len(is_first), dtype=np.int32)
    joined[is_first] = first
    joined[~is_first] = second
    return joined


class Runs(NamedTuple):
    """s runs of at least one token each."""

    counts: Int64Array
    """[s] tokens of each."""
    starts: Int64Array
    """[s] where each begins in `token_ids`."""
    token_ids: Int64Array
    """The tokens, run after run."""

    @classmethod
    def of(cls, counts: Int64Array, token_ids: Int64Array) -> Runs:
        return cls(counts, counts.cumsum() - counts, token_ids)

    def run(self, index: int) -> list[int]:
        """The tokens of one run."""
        start = int(self.starts[index])
        return [int(token) for token in self.token_ids[start : start + int(self.counts[index])]]

    def only(self, which: npt.NDArray[np.bool_]) -> Runs:
        """The runs that are marked."""
        return Runs.of(self.counts[which], self.token_ids[np.repeat(which, self.counts)])

    def cut(self, lengths: Int64Array) -> Runs:
        """The first `lengths` [s] tokens of each (0 to its count)."""
        within = np.arange(len(self.token_ids)) - np.repeat(self.starts, self.counts)
        return Runs.of(lengths, self.token_ids[within < np.repeat(lengths, self.counts)])
