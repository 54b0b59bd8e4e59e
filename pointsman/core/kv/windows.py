"""Windows: releases blocks that lie behind the windows and chunks of the rows ("gives them back").

Layout beside the tables (`tables.py`), with R rows:

    _public     int64 [R]      number of blocks of each table that other requests may hold or find: the prompt's blocks
    _tails      int64 [R, 3]   places before which a window is likely to be looked up: the ends of the prompt, of its
                               part that other requests have computed, and of its cache hit
    _due_at     int64 [R]      the first place at which a row that lacks a block has blocks to give back
    _moves_at   int64 [R]      as `_due_at`, if the block to give back may move to this place; -1: it is perhaps public

A row is examined only when it reaches its `num_slots`. It then lacks a block, or a chunk of its prompt has left blocks
behind the window. The row gives these blocks back, and gets the blocks that it lacks. It keeps blocks that steps in
flight read. It also keeps blocks that a lookup of its own full blocks needs: without them, a preempted request could
not reuse its generated tokens. So a row keeps a block behind the window for one step if the window is a multiple of the
block size, and otherwise until the row lacks a block. If free blocks are short, or requests wait, every row gives back
all blocks behind its window (`give_back`).

In steady decode, a row with a full window needs one new block for each block that it gives back. So the row's table
gets the old block at the new place. Then only blocks of full attention are taken from the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import BlockPool
from pointsman.core.kv.reports import TableReports
from pointsman.core.kv.tables import BlockTables, Kind, lengthen_column
from pointsman.core.state.batch import INITIAL_ROWS, Batch
from pointsman.core.state.numbers import INT32, INT64, MAX_INT, ONE

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


class Windows:
    """Gives back the blocks behind the windows of all rows: when a row lacks a block, when free blocks are short, or
    when requests wait.

    Args:
        take: function that allocates a given number of blocks, and returns their ids.
        count_return: function to call when blocks are given back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        tables: BlockTables,
        pool: BlockPool,
        reports: TableReports,
        take: Callable[[int], Int64Array],
        count_return: Callable[[], None],
    ) -> None:
        self.block_size = size = config.block_size
        self._size = np.array(size)  # an array, see `state/numbers.py`
        self._caches = config.enable_prefix_caching
        self._tables, self._pool, self._reports, self._take = tables, pool, reports, take
        self._count_return = count_return
        self.kinds = [kind for kind in tables.kinds if not kind.group.is_full]
        """The kinds of groups with windows or chunks."""
        self._moving = self.kinds[0] if len(self.kinds) == 1 and self.kinds[0].group.kind == "window" else None
        """The kind whose blocks may move within a table: the only element of `kinds`, if it has windows; otherwise
        None."""
        self._lag = 0
        """Number of earlier blocks that a row needs: with its next block at place p, it needs the blocks of the kind
        `_moving` from place p - `_lag` on."""
        max_ahead = 0  # maximum number of tokens of a row in flight for which `_lag` holds
        if self._moving is not None:
            self._lag = -(-self._moving.group.reach // size)
            max_ahead = self._lag * size - self._moving.group.reach
        self._moves_ahead = config.max_steps_in_flight - 1 <= max_ahead
        self._lag_array = np.array(self._lag)
        self._back = np.array(self._lag + 1)
        """Distance in flat indices from a new place back to the block that moves to it. For rows with fewer blocks the
        resulting index is of an arbitrary entry."""
        moving = [] if self._moving is None else self._moving.groups.tolist()
        staying = [group for group in range(tables.num_groups) if group not in moving]
        self._num_staying = len(staying)
        self._staying: Any = _as_index(staying)
        self._shape_of_staying = (-1,) if len(staying) == 1 else (-1, len(staying))
        self._num_in_flight = config.max_tokens_in_flight
        self._max_model_len = config.max_model_len
        self._is_ahead = False
        self._count_in_flight: Callable[[int], Int64Array] | None = None
        self._in_flight: Int64Array | None = None  # [rows] number of each row's tokens in flight; None: not counted yet
        self.lagging: set[int] = set()
        """Rows that are examined before they lack a block, to give back blocks behind a window."""
        self._public: Int64Array = np.zeros(0, dtype=np.int64)
        self._tails: Int64Array = np.zeros((0, 3), dtype=np.int64)
        self._due_at: Int64Array = np.zeros(0, dtype=np.int64)
        self._moves_at: Int64Array = np.zeros(0, dtype=np.int64)
        self.add_rows(INITIAL_ROWS)

    def add_rows(self, count: int) -> None:
        """Lengthen the arrays with one element per row to `count` rows."""
        for name in ("_public", "_tails", "_due_at", "_moves_at"):
            setattr(self, name, lengthen_column(getattr(self, name), count))

    def open_step(self, is_ahead: bool, count_in_flight: Callable[[int], Int64Array]) -> None:
        """Begin to schedule a step. `is_ahead`: other steps are in flight; `count_in_flight` counts their tokens when
        they are needed."""
        self._is_ahead, self._count_in_flight, self._in_flight = is_ahead, count_in_flight, None

    # ------------------------------------------------------------------ rows

    def num_slots(self, num_blocks: int, num_tokens: int, first: Int64Array) -> int:
        """Number of tokens that a new row may hold before it is examined for blocks to give back. This is less than its
        blocks can hold if some blocks lie behind a window after the step, when the row has `num_tokens` tokens.

        Args:
            num_blocks: number of blocks in each of the row's tables, missing blocks included.
            first: [groups] the place of the row's first block in each table.
        """
        full = num_tokens // self.block_size * self.block_size
        for kind in self.kinds:
            if kind.group.num_skipped(full) // self.block_size > first.item(kind.groups.item(0)):
                return num_tokens
        return num_blocks * self.block_size

    def place_row(self, batch: Batch, row: int, tails: tuple[int, int, int]) -> None:
        """Initialize the columns of a row that was given its tables. `tails`: the places in the tables at which a later
        lookup is likely to end."""
        end = self._tables.ends.item(row)
        self._public[row], self._moves_at[row] = end, -1
        self._tails[row] = tails
        self._update_due_places(np.array([row]))
        if batch.num_slots.item(row) < end * self.block_size:
            self.lagging.add(row)

    def mark_public(self, row: int) -> None:
        """Mark all blocks of a row as public: other requests may hold or find them."""
        self._public[row], self._moves_at[row] = self._tables.ends.item(row), -1

    def is_evicted_last(self, row: int, places: Int64Array, groups: Int64Array) -> BoolArray:
        """[blocks] whether each block of a finished request is evicted last, because a lookup is likely to need it.
        These are the blocks of full attention, and the blocks in the windows before the places at which a lookup is
        likely to end."""
        starts, ends = np.zeros((2, self._tables.num_groups, 3), dtype=np.int64)
        ends[:] = self._tails[row]
        for kind in self._tables.kinds:
            starts[kind.groups] = kind.group.num_skipped(ends[kind.groups] * self.block_size) // self.block_size
            if kind.group.is_full:
                ends[kind.groups] = self._tables.width
        at = places[:, None]
        is_last = (starts[groups] <= at) & (at < ends[groups])
        return np.asarray(is_last.any(axis=1))

    # ------------------------------------------------------------------ counting

    def num_blocks_of_whole(self, first: Int64Array, num_tokens: int) -> int:
        """Maximum number of blocks that a request holds at a time until it has computed `num_tokens` tokens. `first`:
        [groups] number of leading blocks that the request does not need."""
        end, count = -(-num_tokens // self.block_size), 0
        for kind in self._tables.kinds:
            limit = kind.group.max_blocks(num_tokens, self._num_in_flight, self.block_size)
            count += min(end - first.item(kind.groups.item(0)), limit) * kind.num_groups
        return count

    def num_owed_blocks(self, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] number of free blocks that each row still needs until its first `num_tokens` tokens are computed."""
        has = self._tables.ends[rows]
        end = np.maximum(-(-num_tokens // self.block_size), has)
        owed = np.zeros(len(rows), dtype=np.int64)
        for kind in self._tables.kinds:
            first = kind.first[rows]
            num_held = end - first
            if not kind.group.is_full:
                cap = kind.group.max_blocks(self._max_model_len, self._num_in_flight, self.block_size)
                num_held = np.minimum(num_held, cap)
            owed += np.maximum(num_held - (has - first), 0) * kind.num_groups
        return owed

    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, ends: Int64Array) -> Int64Array:
        """[rows] number of new blocks that each row needs to hold `ends` tokens, after it has given back the blocks
        behind its windows. If a row needs no block, its `num_slots` is raised."""
        short = (ends > batch.num_slots[rows]).nonzero()[0]
        needed = np.zeros(len(rows), dtype=np.int64)
        if not len(short):
            return needed
        asking, wanted = (rows, ends) if len(short) == len(rows) else (rows[short], ends[short])
        self._give_back_rows(asking, self._num_final_tokens(batch, asking))
        missing = -(-wanted // self.block_size) - self._tables.ends[asking]
        enough = (missing <= 0).nonzero()[0]
        if len(enough):
            self.set_slots(batch, asking[enough], wanted[enough])
            missing[enough] = 0
        needed[short] = missing * self._tables.num_groups
        if int(needed.sum()) > self._pool.num_free:
            self.give_back(batch)
        return needed

    # ------------------------------------------------------------------ giving back

    def give_back(self, batch: Batch) -> None:
        """For each running row, release the blocks that none of its later tokens will read."""
        rows = batch.members.rows
        if len(rows):
            computed = np.minimum(batch.num_computed_tokens[rows], batch.num_tokens[rows])
            self._give_back_rows(rows, computed - self._tokens_in_flight(batch, rows))

    def _num_final_tokens(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] number of leading tokens, in full blocks, that no step in flight computes or may have to recompute."""
        computed = batch.num_computed_tokens[rows]
        full: Int64Array = np.minimum(computed, batch.num_tokens[rows]) // self.block_size * self.block_size
        if not self._is_ahead:
            return full
        final: Int64Array = np.minimum(full, computed - self._tokens_in_flight(batch, rows))
        return final

    def _tokens_in_flight(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] number of each row's tokens that steps in flight compute."""
        if not self._is_ahead or self._count_in_flight is None:
            return batch.zeros[: len(rows)]
        if self._in_flight is None:
            self._in_flight = self._count_in_flight(len(batch.num_tokens))
        return self._in_flight[rows]

    def _give_back_rows(self, rows: Int64Array, final: Int64Array) -> None:
        """For each row, release the blocks to which no token after the row's first `final` tokens attends."""
        has_released = False
        for kind in self.kinds:
            first = kind.first[rows]
            kept = kind.group.num_skipped(final) // self.block_size
            behind = (kept > first).nonzero()[0]
            if len(behind):
                those, first, kept = rows[behind], first[behind], kept[behind]
                counts = kept - first
                blocks = self._tables.blocks_between(those, kind.groups, first, kept)
                places = np.arange(len(blocks) // kind.num_groups) - (counts.cumsum() - counts - first).repeat(counts)
                self._release_blocks(kind, those.repeat(counts), places, blocks)
                kind.first[those] = kept
                has_released = True
        if has_released:
            self._update_due_places(rows)
            self._count_return()

    def _release_blocks(self, kind: Kind, rows: Int64Array, places: Int64Array, blocks: Int64Array) -> None:
        """Release blocks of a kind: for each row and place, one block in each group of the kind. Cached blocks that are
        unlikely to be looked up are evicted first, because they are many."""
        if not self._caches or not np.count_nonzero(self._pool.is_cached[blocks]):
            self._pool.release_any(blocks)
            return
        ends = self._tails[rows]
        starts = kind.group.num_skipped(ends * self.block_size) // self.block_size
        is_tail = ((starts <= places[:, None]) & (places[:, None] < ends)).any(axis=1).repeat(kind.num_groups)
        self._pool.release_any(blocks[~is_tail][::-1], evict_first=True)
        self._pool.release_any(blocks[is_tail][::-1])

    def _update_due_places(self, rows: Int64Array) -> None:
        """Recompute the places at which rows next have a block to give back or to move, because the first blocks of the
        rows have changed."""
        due = np.full(len(rows), MAX_INT, dtype=np.int64)
        for kind in self.kinds:
            next_return = kind.group.min_tokens_with((kind.first[rows] + 1) * self.block_size)
            due = np.minimum(due, -(-next_return // self.block_size))
        self._due_at[rows] = due
        if self._moving is not None:
            is_private = self._moving.first[rows] >= self._public[rows]
            self._moves_at[rows] = np.where(is_private, due, -1)

    def set_slots(self, batch: Batch, rows: Int64Array, ends: Int64Array) -> None:
        """Set `num_slots` of rows that have blocks for `ends` tokens: the number of tokens that a row may have before
        it is examined."""
        capacity = self._tables.ends[rows] * self.block_size
        slots, full = capacity, ends // self.block_size * self.block_size
        for kind in self.kinds:
            is_behind = kind.group.num_skipped(full) // self.block_size > kind.first[rows]
            slots = np.where(is_behind, ends, slots)
        batch.num_slots[rows] = slots
        is_lagging = slots < capacity
        self.lagging.difference_update(rows.tolist())
        if np.count_nonzero(is_lagging):
            self.lagging.update(rows[is_lagging].tolist())

    # ------------------------------------------------------------------ growing by one token, or a few

    def grow_steadily(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> bool:
        """The common case of `KVCache.grow_by_one`: each row lacks one block in each table for its next token, and has
        at most one block in each table to give back. Returns whether the rows have grown. False: the common case does
        not apply to all rows, and nothing has changed."""
        tables, kind, count = self._tables, self._moving, len(rows)
        if not isinstance(num_tokens, int) or self.lagging or count * tables.num_groups > self._pool.num_free:
            return False
        places = tables.ends[rows]
        ends, at = places + ONE, tables.flat_indices(rows, places)
        ids: npt.NDArray[np.integer]
        if kind is not None and self._moves_at[rows].tobytes() == places.tobytes():
            if self._is_ahead and not self._moves_ahead:
                return False
            ids = tables.flat[at - self._back]
            if self._num_staying:
                ids[:, self._staying] = self._take(count * self._num_staying).reshape(self._shape_of_staying)
            kind.first[rows] = places - self._lag_array
            self._due_at[rows] = self._moves_at[rows] = ends
        else:
            due_at = self._due_at[rows]
            due = due_at <= places
            if due.item(due.argmax()):
                if kind is None or not self._can_exchange_blocks(batch, kind, rows[due], places[due], due_at[due]):
                    return False
                ids = self._exchange_blocks(kind, rows, places, due, at).astype(INT32)
            else:
                ids = self._take(count * tables.num_groups).astype(INT32).reshape(at.shape)
        tables.flat[at] = ids
        tables.ends[rows] = ends
        batch.num_slots[rows] = ends * self._size
        self._reports.note_one_block_each(rows, ids, places, ends)
        return True

    def _can_exchange_blocks(
        self, batch: Batch, kind: Kind, rows: Int64Array, places: Int64Array, due_at: Int64Array
    ) -> bool:
        """Whether each of these rows has exactly one block in each table to give back, and no step that may have to be
        recomputed reads this block."""
        if due_at.tobytes() != places.tobytes():
            return False
        if not self._is_ahead:
            return True
        kept = kind.group.num_skipped(self._num_final_tokens(batch, rows)) // self.block_size
        return bool((kept > kind.first[rows]).all())

    def _exchange_blocks(
        self, kind: Kind, rows: Int64Array, places: Int64Array, due: BoolArray, indices: Int64Array
    ) -> Int64Array:
        """[rows, groups] the next block of each row and group; rows that are `due` give back one block in each table of
        the kind."""
        moves = self._moves_at[rows] == places
        returns = due & ~moves
        ids: Int64Array = self._tables.flat[indices - self._back].astype(INT64)
        old, takes = ids[:, kind.groups], ~moves
        if np.count_nonzero(returns):
            first = places[returns] - self._back
            self._release_blocks(kind, rows[returns], first, old[returns].ravel())
        if self._num_staying:
            ids[:, self._staying] = self._take(len(rows) * self._num_staying).reshape(self._shape_of_staying)
        taken = int(np.count_nonzero(takes)) * kind.num_groups
        if taken:
            old[takes] = self._take(taken).reshape(-1, kind.num_groups)
            ids[:, kind.groups] = old
        kind.first[rows[due]] = places[due] - self._lag_array
        self._update_due_places(rows[due])
        return ids


def _as_index(indices: list[int]) -> int | slice | Int64Array:
    """`indices` in the form that NumPy indexes with fastest: an integer, a slice or an array."""
    if len(indices) == 1:
        return indices[0]
    if indices and indices == list(range(indices[0], indices[-1] + 1)):
        return slice(indices[0], indices[-1] + 1)
    return np.array(indices, dtype=np.int64)
