"""Block tables: the blocks of each row, in each group of layers. The index of a block in its table is called its place.

Layout, with R rows, G groups and W blocks in the longest table:

    ids     int32 [R, G, W]   block ids; place p has the tokens from p times the block size on
    ends    int64 [R]         number of places in each table of a row, including blocks that the row gave back
    first   int64 [R]         for each kind of group: number of leading blocks that the row gave back, or never had

    kind 0, full             [ b0 b1 b2 b3 b4 b5 ]      group 0
    kind 1, window       first = 3   [ c3 c4 c5 ]       group 1      blocks before `first` are in the pool again
                                     [ d3 d4 d5 ]       group 2
                                             end = 6    of all groups

Groups whose layers attend alike are of one kind: their tables are filled and given back alike. Entries before `first`
and from `ends` on are meaningless.

Block ids are int32 in the tables, as hosts and kernels read them, and int64 elsewhere (`block_pool.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.state.batch import INITIAL_ROWS
from pointsman.core.state.layout import KVGroup
from pointsman.core.state.numbers import INT64, ONE

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]

MAX_LOOP_ROWS = 3  # up to this number of rows a loop takes less time than NumPy
FIRST_LOOK = 16  # number of blocks compared first; the number then doubles, so that short prefixes are cheap


class Kind:
    """Groups whose layers attend alike: full attention, or windows or chunks of one size."""

    __slots__ = ("first", "group", "groups", "num_groups")

    def __init__(self, group: KVGroup, groups: list[int]) -> None:
        self.group = group
        self.groups: Int64Array = np.array(groups, dtype=np.int64)
        self.num_groups = len(groups)
        self.first: Int64Array = np.zeros(0, dtype=np.int64)


class BlockTables:
    """The block tables of all rows in all groups of layers; `width` is the maximum number of blocks in a table."""

    def __init__(self, groups: Sequence[KVGroup], width: int) -> None:
        members: dict[KVGroup, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        self.kinds = [Kind(group, those) for group, those in members.items()]
        self.num_groups = len(groups)
        self.width = width
        self.row_size = self.num_groups * width
        self.offsets: Int64Array = np.arange(self.num_groups) * width
        """[groups] offset of each group's table within the tables of one row."""
        self._kind_of = [next(kind for kind in self.kinds if index in kind.groups) for index in range(self.num_groups)]
        self._has_holes = any(not group.is_full for group in groups)
        self.ids: Int32Array = np.zeros((0, self.num_groups, width), dtype=np.int32)
        self.ends: Int64Array = np.zeros(0, dtype=np.int64)
        self.add_rows(INITIAL_ROWS)

    def add_rows(self, count: int) -> None:
        """Lengthen the arrays with one element per row to `count` rows."""
        before, used = self.ids, int(self.ends.max(initial=0))
        self.ends = lengthen_column(self.ends, count)
        for kind in self.kinds:
            kind.first = lengthen_column(kind.first, count)
        self.ids = np.zeros((count, self.num_groups, self.width), dtype=np.int32)
        self.ids[: len(before), :, :used] = before[:, :, :used]
        self.flat: Int32Array = self.ids.reshape(-1)
        # A view of a read-only buffer, so that a caller cannot make it writeable.
        self.view: Int32Array = np.asarray(self.ids.data.toreadonly())
        self.starts: Int64Array = np.arange(count) * self.row_size

    # ------------------------------------------------------------------ writing

    def set_tables(self, row: int, table: IntArray, first: Int64Array | None = None) -> None:
        """Set the tables of a row to `table` [groups, blocks]. `first` [groups]: the place of the first block in each
        table; None: each table has all blocks."""
        end = table.shape[1]
        if self.num_groups == 1:
            self.ids[row, 0, :end] = table[0]
        else:
            self.ids[row, :, :end] = table
        self.ends[row] = end
        if first is not None:
            for kind in self.kinds:
                kind.first[row] = first.item(kind.groups.item(0))

    def flat_indices(self, rows: Int64Array, places: Int64Array) -> Int64Array:
        """[rows, groups] flat indices into `ids` of place `places[i]` of `rows[i]`, in the table of each group."""
        at = self.starts[rows]
        at += places
        flat: Int64Array = at[:, None] + self.offsets
        return flat

    def append_one(self, rows: Int64Array, blocks: IntArray) -> Int64Array:
        """Append a block to each table of these rows. `blocks`: [rows, groups], or [rows] if there is one group.
        Returns the rows' new `ends`."""
        ends = self.ends[rows]
        self.flat[self.starts[rows] + ends if self.num_groups == 1 else self.flat_indices(rows, ends)] = blocks
        ends += ONE
        self.ends[rows] = ends
        return ends

    def append_in_loop(self, rows: Int64Array, blocks: IntArray, num_slots: Int64Array, block_size: int) -> None:
        """Append `blocks[i]` to the only table of `rows[i]`, in a loop over at most `MAX_LOOP_ROWS` rows; only with one
        group. Also updates the rows' elements of the column `num_slots` [R]."""
        flat, ends, width = self.flat, self.ends, self.width
        for index, row in enumerate(rows.tolist()):
            end = ends.item(row)
            flat[row * width + end] = blocks[index]
            ends[row] = end = end + 1
            num_slots[row] = end * block_size

    def append(self, rows: Int64Array, counts: Int64Array, blocks: Int32Array) -> Int64Array:
        """Append `counts[i]` blocks to each table of `rows[i]`; `blocks` are sorted by row, place and group. Returns
        the rows' new `ends`."""
        ends = self.ends[rows]
        if len(rows) == 1:  # mostly the next chunk of a prefill
            row, end = rows.item(0), ends.item(0)
            count = len(blocks) // self.num_groups
            self.ids[row, :, end : end + count] = blocks.reshape(count, self.num_groups).T
        else:
            # Flat index of the first new block of each row, minus the number of new blocks of the rows before it.
            at = (self.starts[rows] + ends + counts - counts.cumsum()).repeat(counts)
            self.write_blocks(at + np.arange(len(at)), blocks)
        ends += counts
        self.ends[rows] = ends
        return ends

    def write_blocks(self, indices: Int64Array, blocks: Int32Array) -> None:
        """Write `blocks`, one per index and group, at the flat `indices` of the first group's tables and at the
        corresponding indices of the other groups' tables."""
        self.flat[indices if self.num_groups == 1 else (indices[:, None] + self.offsets).ravel()] = blocks

    # ------------------------------------------------------------------ reading

    def num_blocks(self, rows: Int64Array) -> Int64Array:
        """[rows] number of blocks that each row holds, in all its tables."""
        ends = self.ends[rows]
        if not self._has_holes:
            return ends * self.num_groups
        count = np.zeros(len(rows), dtype=np.int64)
        for kind in self.kinds:
            count += (ends - kind.first[rows]) * kind.num_groups
        return count

    def first_places(self, row: int) -> Int64Array:
        """[groups] the place of the first block that a row holds in each table."""
        return np.array([kind.first.item(row) for kind in self._kind_of], dtype=np.int64)

    def blocks_at_all_places(self, row: int, start: int, end: int, no_block: int) -> Int64Array:
        """int64 [groups, end - start]: the blocks of a row at places `start` to `end` - 1; `no_block` at places where
        the row has no block."""
        table: Int64Array = self.ids[row, :, start:end].astype(INT64)
        if self._has_holes:
            table[np.arange(start, end) < self.first_places(row)[:, None]] = no_block
        return table

    def blocks_of(self, row: int) -> Int64Array:
        """int64: ids of the blocks that a row holds, place by place, and within a place group by group."""
        if self.num_groups == 1 and not self._has_holes:
            return self.ids[row, 0, : self.ends.item(row)].astype(INT64)
        return self.blocks_with_places(row)[0]

    def blocks_with_places(self, row: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(blocks, places, groups): each block that a row holds, with its place and its group, in the order of
        `blocks`."""
        held = np.arange(self.ends.item(row))[:, None] >= self.first_places(row)
        places, groups = held.nonzero()
        return self.ids[row, groups, places].astype(INT64), places, groups

    def num_common_blocks(self, rows: IntArray, group: int) -> int:
        """Number of leading blocks that the tables of these rows share in a group of full attention; 0 if `rows` is
        empty."""
        if len(rows) == 0:
            return 0
        width = int(self.ends[rows].min())
        start, look = 0, FIRST_LOOK
        while start < width and len(rows) > 1:
            end = min(start + look, width)
            tables = self.ids[rows, group, start:end]
            differs = (tables != tables[0]).any(axis=0).nonzero()[0]
            if len(differs):
                return start + int(differs[0])
            start, look = end, 2 * look
        return width

    def blocks_between(self, rows: Int64Array, groups: Int64Array, starts: Int64Array, ends: Int64Array) -> Int64Array:
        """int64: the blocks of `groups` at places `starts[i]` to `ends[i]` - 1 of `rows[i]`, sorted by row, place and
        group."""
        counts = ends - starts
        at = self.starts[rows] + starts
        total = int(counts.sum())
        if total > len(rows):
            at = (at - counts.cumsum() + counts).repeat(counts) + np.arange(total)
        blocks: Int64Array = self.flat[(at[:, None] + self.offsets[groups]).ravel()].astype(INT64)
        return blocks


def lengthen_column(column: npt.NDArray[Any], num_rows: int) -> npt.NDArray[Any]:
    """A copy of an array with one element per row, lengthened to `num_rows` rows; new elements are 0."""
    grown = np.zeros((num_rows, *column.shape[1:]), dtype=column.dtype)
    grown[: len(column)] = column
    return grown
