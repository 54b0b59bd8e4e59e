"""How many blocks do all rows of a step begin with? For attention kernels that read a common prefix once (cascade).

The tables of running rows only grow, and at their ends, by blocks that no other row has. So what is common to all rows
that run changes with the membership alone, and is found once for it: in steady decode the answer costs nothing. For a
step that takes only some of the running rows it is found anew.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.state.batch import Batch, Members

Int64Array = npt.NDArray[np.int64]
_FIRST_LOOK = 16
"""Blocks that are compared at first; then twice as many, and so on, so that short prefixes are cheap."""


class CommonPrefix:
    """Counts the leading blocks that the tables of some rows have in common."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._members: Members | None = None
        self._count = 0

    def count(self, rows: npt.NDArray[np.integer]) -> int:
        """For these rows, some or all of those that run; 0 for none, and for one the length of its table."""
        members = self._batch.members
        if len(rows) != len(members) or len(rows) == 1:
            return self._compare(rows)
        if self._members is not members:
            self._members, self._count = members, self._compare(rows)
        return self._count

    def _compare(self, rows: npt.NDArray[np.integer]) -> int:
        batch = self._batch
        if len(rows) == 0:
            return 0
        width = int(batch.num_slots[rows].min()) // batch.block_size
        start, look = 0, _FIRST_LOOK
        while start < width and len(rows) > 1:
            end = min(start + look, width)
            tables = batch.block_table[rows, start:end]
            differs = (tables != tables[0]).any(axis=0).nonzero()[0]
            if len(differs):
                return start + int(differs[0])
            start, look = end, 2 * look
        return width
