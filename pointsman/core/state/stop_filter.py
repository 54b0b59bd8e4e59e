"""Which sampled tokens may be a stop token of the row that sampled them, for all rows at once.

A row with one stop token is compared with it (`Batch.eos_token_id`). Many models have two or three, and a request may
bring hundreds of its own. Those are counted here, over all rows together, by the low bits of their ids: a token whose
place is empty ends nobody, and the few others are tested one by one, exactly.

    counts  int32 [65536]   stop tokens, of rows with several of them, whose low bits are the index
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

SIZE = 1 << 16  # vocabularies have two to four times as many: a stop token shares its place with few others
_MASK = np.array(SIZE - 1)  # of int64: what is masked is a place, whatever its type


class StopFilter:
    """The stop tokens of the rows that have several."""

    def __init__(self) -> None:
        self.num_rows = 0
        """0: no row has several, and nothing need be asked."""
        self.counts: npt.NDArray[np.int32] = np.zeros(SIZE, dtype=np.int32)

    def add(self, stop_tokens: Collection[int]) -> None:
        """A row has these stop tokens; if they are several, they count."""
        self._count(stop_tokens, 1)

    def remove(self, stop_tokens: Collection[int]) -> None:
        """A row that had these stop tokens is gone."""
        self._count(stop_tokens, -1)

    def may_stop(self, token_ids: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """[len(token_ids)] False: the token is none of them."""
        may: npt.NDArray[np.bool_] = self.counts[token_ids & _MASK] != 0
        return may

    def _count(self, stop_tokens: Collection[int], change: int) -> None:
        if len(stop_tokens) > 1:
            self.num_rows += change
            places = np.fromiter(stop_tokens, dtype=np.int64, count=len(stop_tokens)) & _MASK
            np.add.at(self.counts, places, change)
