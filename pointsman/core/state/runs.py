"""Runs: several tokens per row in one ragged array, as the model returns them after verifying drafts."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def join_runs(
    first_counts: npt.NDArray[np.integer],
    first: npt.NDArray[np.int32],
    second_counts: npt.NDArray[np.integer],
    second: npt.NDArray[np.integer],
) -> npt.NDArray[np.int32]:
    """Interleave two ragged arrays: for each row i the next `first_counts[i]` numbers of `first`, then the next
    `second_counts[i]` numbers of `second`."""
    is_first = np.tile([True, False], len(first_counts))
    is_first = np.repeat(is_first, np.stack([first_counts, second_counts], axis=1).reshape(-1))
    joined = np.empty(len(is_first), dtype=np.int32)
    joined[is_first] = first
    joined[~is_first] = second
    return joined


class Runs(NamedTuple):
    """Runs of tokens, one after the other in one array. There are s runs, each of at least one token."""

    counts: Int64Array
    """[s] number of tokens of each run."""
    ends: Int64Array
    """[s] index in `token_ids` after the last token of each run."""
    token_ids: Int32Array
    """The tokens of all runs, one run after the other."""

    @classmethod
    def of(cls, counts: Int64Array, token_ids: Int32Array) -> Runs:
        return cls(counts, np.add.accumulate(counts), token_ids)  # half the time of cumsum

    @property
    def starts(self) -> Int64Array:
        """[s] index in `token_ids` of the first token of each run."""
        return self.ends - self.counts

    def tokens_of(self, index: int) -> list[int]:
        """The tokens of the run at `index`."""
        end = int(self.ends[index])
        tokens: list[int] = self.token_ids[end - int(self.counts[index]) : end].tolist()
        return tokens

    def select(self, is_selected: npt.NDArray[np.bool_]) -> Runs:
        """The runs selected by the mask `is_selected` [s]."""
        return Runs.of(self.counts[is_selected], self.token_ids[is_selected.repeat(self.counts)])

    def truncate(self, lengths: Int64Array) -> Runs:
        """A copy in which run i has only its first `lengths[i]` tokens; 0 is allowed."""
        within = np.arange(len(self.token_ids)) - self.starts.repeat(self.counts)
        return Runs.of(lengths, self.token_ids[within < lengths.repeat(self.counts)])
