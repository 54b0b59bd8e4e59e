"""Table reports: find the blocks that no output has reported to the host yet, if rows have several block tables.

If a row has one table, the modules of a step pass the row's new blocks to the output when they allocate them. With
groups, a block belongs to a group and a place, and a row may advance by a token without a new block. So an output
reports the blocks of each table beyond `_reported` [rows]: the number of blocks of each table that the host knows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.kv.cache import NewBlocks
from pointsman.core.kv.tables import BlockTables, lengthen_column
from pointsman.core.state.batch import INITIAL_ROWS
from pointsman.core.state.numbers import INT32

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]


class TableReports:
    """Tracks the blocks of the tables that the host knows, and lists the new blocks for outputs."""

    def __init__(self, tables: BlockTables) -> None:
        self._tables = tables
        self._reported: Int64Array = np.zeros(0, dtype=np.int64)
        self._has_grown = False
        self._one: tuple[IntArray, Int64Array] | None = None
        """([rows, groups] blocks, [rows] places) of rows that grew by one block per table in this step; None: no rows
        did, or `note_one_block_each` was not called."""
        self.add_rows(INITIAL_ROWS)

    def add_rows(self, count: int) -> None:
        """Lengthen the arrays with one element per row to `count` rows."""
        self._reported = lengthen_column(self._reported, count)
        self._group_at = _repeated_range(self._tables.num_groups, count)

    def open_step(self) -> None:
        """Begin to schedule a step."""
        self._one = None

    def note_placed(self, row: int) -> None:
        """Record that a row was given its tables, which the host does not know."""
        self._reported[row] = 0
        self._has_grown = True

    def note_growth(self) -> None:
        """Record that rows have got new blocks."""
        self._has_grown = True

    def note_reported(self, rows: Int64Array, ends: Int64Array) -> None:
        """Record that the host knows all blocks of these rows at places before `ends` [rows]."""
        self._reported[rows] = ends

    def note_one_block_each(self, rows: Int64Array, ids: IntArray, places: Int64Array, ends: Int64Array) -> None:
        """Record that these rows have got one block in each table: `ids` [rows, groups] at `places` [rows], so that the
        tables now end at `ends` [rows]."""
        self._reported[rows] = ends
        self._one = (ids, places)

    def take_new_blocks(self, rows: Int64Array, grown: IntArray, *, whole: bool) -> NewBlocks | None:
        """The blocks that an output with these rows reports; the arguments are those of `KVCache.new_blocks`."""
        one, self._one = self._one, None
        if whole:
            return self._whole_tables(rows, np.arange(len(rows)))
        if one is None:
            return self._unreported_blocks(rows)
        ids, places = one
        count, more = self._tables.num_groups, self._unreported_blocks(rows) if self._has_grown else None
        new = NewBlocks(ids.ravel(), grown.repeat(count), self._group_at[: ids.size], places.repeat(count))
        return new if more is None else _merge_new_blocks(new, more)

    def _unreported_blocks(self, rows: Int64Array) -> NewBlocks | None:
        """The blocks of `rows` that are not reported yet; None: there are no such blocks."""
        if not self._has_grown:
            return None
        self._has_grown = False
        reported, end = self._reported[rows], self._tables.ends[rows]
        grown = (end > reported).nonzero()[0]
        if not len(grown):
            return None
        is_new = reported[grown] == 0  # a new row may have begun with cached blocks, so its places may not start at 0
        parts = []
        if not is_new.all():
            parts.append(self._appended_blocks(rows, grown[~is_new], reported[grown[~is_new]]))
        if is_new.any():
            parts.append(self._whole_tables(rows, grown[is_new]))
        return parts[0] if len(parts) == 1 else _merge_new_blocks(*parts)

    def _appended_blocks(self, rows: Int64Array, indices: Int64Array, starts: Int64Array) -> NewBlocks:
        """The blocks from places `starts` on, in every group, of the rows at these indices."""
        tables, count = self._tables, self._tables.num_groups
        those = rows[indices]
        ends = tables.ends[those]
        self._reported[those] = ends
        counts = ends - starts
        ids = tables.blocks_between(those, np.arange(count), starts, ends)
        total = int(counts.sum())
        places = (starts - counts.cumsum() + counts).repeat(counts) + np.arange(total)
        if total * count > len(self._group_at):
            self._group_at = _repeated_range(count, 2 * total)
        groups = self._group_at[: total * count]
        return NewBlocks(ids.astype(INT32), indices.repeat(counts * count), groups, places.repeat(count))

    def _whole_tables(self, rows: Int64Array, indices: Int64Array) -> NewBlocks:
        """All blocks of the rows at these indices."""
        parts = [self._tables.blocks_with_places(row) for row in rows[indices].tolist()]
        self._reported[rows[indices]] = self._tables.ends[rows[indices]]
        counts = np.array([len(blocks) for blocks, _, _ in parts], dtype=np.int64)
        ids, places, groups = (
            (np.concatenate([NO_BLOCKS, *column]) for column in zip(*parts, strict=True)) if parts else (NO_BLOCKS,) * 3
        )
        return NewBlocks(ids.astype(INT32), indices.repeat(counts), groups, places)


def _repeated_range(num_groups: int, times: int) -> Int64Array:
    """The numbers 0 to `num_groups` - 1, repeated `times` times; read-only."""
    counting = np.resize(np.arange(num_groups), num_groups * times)
    counting.flags.writeable = False
    return counting


def _merge_new_blocks(*parts: NewBlocks) -> NewBlocks:
    """The blocks of all `parts`, in the order of their rows."""
    order = np.concatenate([each.rows for each in parts]).argsort(kind="stable")
    return NewBlocks(*[np.concatenate(columns)[order] for columns in zip(*parts, strict=True)])
