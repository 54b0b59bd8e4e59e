"""KV in groups of layers: which blocks does a request hold in each, and what lies behind its window?

`GroupedKVCache` keeps a block table for each group, all from one pool; a block belongs to one group at a time. Groups
with the same attention are allocated, published and given back alike: they are of one kind.

    kind 0, full             [ b0 b1 b2 b3 b4 b5 ]      group 0
    kind 1, window       first = 3   [ c3 c4 c5 ]       group 1      what lies before `first` is in the pool again
                                     [ d3 d4 d5 ]       group 2
                                             end = 6    of all groups

Layout, with R rows, G groups, K kinds and W blocks in the longest table:

    _tables     int32 [R, G, W]   block ids; valid from `_first` of the group's kind up to `_end`
    _end        int64 [R]         blocks that each table has, those before `_first` included
    _first      K x int64 [R]     blocks that were given back, or never taken, since no later token attends to them
    _at         int64 [R, G]      where in all tables, laid out flat, the next block of each goes
    _reported   int64 [R]         blocks of each table that the host knows of
    _public     int64 [R]         blocks of each table that others may hold too, or find: those of the prompt
    _tails      int64 [R, 3]      places before which a window is likely to be looked up: the last one of the prompt,
                                  and those up to which it is like others, and was found
    _due_at     int64 [R]         the place at which a row that lacks a block there has one to give back, or several
    _moves_at   int64 [R]         the same where that one may move to the place; -1: it may be public

A row is asked only when it reaches its `num_slots`: it lacks a block then, or a chunk of its prompt has left some
behind the window. It gives these back, and gets what it lacks. What steps in flight read stays, and so does what a
lookup of its own full blocks needs, or a preempted request could not continue with what it has generated. So a block
stays behind the window for a step if the window is a multiple of the block size, and otherwise until the row lacks
one. Where blocks are short, or requests wait, every row is asked (`give_back`) and keeps nothing behind its window.

In steady decode a row whose window is full needs, in each group with a window, one block for the one that it gives
back: it keeps it, in another place of its table. Then only blocks of full attention are taken from the pool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS, BlockPool
from pointsman.core.kv.cache import Journal, KVCache, Match, NewBlocks
from pointsman.core.kv.content_marks import ContentMarks
from pointsman.core.kv.group_prefixes import Descendants, Entry, GroupNode, GroupPrefixes
from pointsman.core.kv.prefix_tree import Root
from pointsman.core.state.batch import Batch
from pointsman.core.state.layout import KVGroup
from pointsman.core.state.numbers import INT32, INT64, MAX_INT, ONE
from pointsman.core.state.request import Request
from pointsman.core.state.tokens import NO_TOKENS

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NO_EPOCH = -1  # of a request whose prefix left the cache while it ran


class _Kind:
    """Groups whose layers attend alike."""

    __slots__ = ("group", "groups", "index", "num_groups", "offsets")

    def __init__(self, index: int, group: KVGroup, groups: list[int], width: int) -> None:
        self.index = index
        self.group = group
        self.groups: Int64Array = np.array(groups, dtype=np.int64)
        self.num_groups = len(groups)
        self.offsets = self.groups * width
        """Where the tables of its groups begin, from where those of a row do."""


class _Found(NamedTuple):
    """What a lookup found: `Match.node`."""

    node: GroupNode
    """Of the last block that can be reused; a root if there is none."""
    num_shared: int
    """Blocks at the beginning that others have computed too, as far as is known; maybe more than can be reused."""
    num_blocks: int
    """Of each table."""
    first: list[int]
    """By kind, of those the ones that no later token attends to."""
    blocks: list[Int64Array]
    """By kind [num_blocks - first, groups of the kind] the others."""


class _Publication(NamedTuple):
    """An entry of a journal."""

    request: Request
    first: int
    """Blocks that it had published before."""
    before: GroupNode
    """The node of the last of these."""
    nodes: list[GroupNode]
    entries: list[Entry]


class GroupedKVCache(KVCache):
    """The KV blocks of a model with `SchedulerConfig.kv_groups`."""

    pool: BlockPool

    def __init__(self, config: SchedulerConfig) -> None:
        self.block_size = size = config.block_size
        self._size = np.array(size)  # an array, see `state/numbers.py`
        self.caches = config.enable_prefix_caching
        self.pool = BlockPool(config.num_blocks, config.num_reserved_blocks)
        self.unpublished = []
        self.num_groups = len(config.kv_groups)
        self._width = -(-config.max_model_len // size)
        members: dict[KVGroup, list[int]] = {}
        for index, group in enumerate(config.kv_groups):
            members.setdefault(group, []).append(index)
        self._kinds = [_Kind(i, group, those, self._width) for i, (group, those) in enumerate(members.items())]
        self._local = [kind for kind in self._kinds if not kind.group.is_full]
        self.gives_back = len(self._local) > 0
        self._full = next((kind.index for kind in self._kinds if kind.group.is_full), None)
        self._kind_of: Int64Array = np.zeros(self.num_groups, dtype=np.int64)
        for kind in self._kinds:
            self._kind_of[kind.groups] = kind.index
        self._offsets: Int64Array = np.arange(self.num_groups) * self._width
        self._row_size = self.num_groups * self._width
        is_one_window = len(self._local) == 1 and self._local[0].group.kind == "window"
        self._moving = self._local[0] if is_one_window else None
        """The kind whose blocks may move within a table: the only one of windows; None: there is none, or several."""
        self._lag = 0
        """A row that lacks its block at place p needs those of this kind from p - `_lag` on."""
        most_ahead = 0  # tokens of a row in flight with which that is so
        if self._moving is not None:
            self._lag = -(-self._moving.group.reach // size)
            most_ahead = self._lag * size - self._moving.group.reach
        self._moves_ahead = config.max_steps_in_flight - 1 <= most_ahead
        self._lag_array = np.array(self._lag)
        self._back = np.array(self._lag + 1)
        """How far before a new place the block is that moves to it."""
        moving = [] if self._moving is None else self._moving.groups.tolist()
        staying = [group for group in range(self.num_groups) if group not in moving]
        self._num_staying = len(staying)
        self._staying: Any = _as_index(staying)
        self._shape_of_staying = (-1,) if len(staying) == 1 else (-1, len(staying))
        self._num_in_flight = config.max_tokens_in_flight
        self._max_model_len = config.max_model_len
        self._num_usable_tokens = config.num_usable_tokens
        self._prefixes = GroupPrefixes(size, len(self._kinds), self.pool.is_cached)
        self._marks = ContentMarks()
        self._shares_within_step = config.share_within_step
        self._num_publications = 0
        self._is_ahead = False
        self._in_flight: Int64Array | None = None  # [rows] tokens of each in this moment; None: not counted yet
        self._has_grown = False
        # Of the newest admission: its tables, the first blocks of each kind in them, and its tokens after the step.
        self._entering: tuple[Int32Array, list[int], int] = (np.zeros((0, 0), dtype=np.int32), [], 0)
        self._ends_of_tails = (0, 0, 0)
        self._asked: Int64Array | None = None
        """What `can_grow_by_one` counted; None: a block of each table for each row."""
        self._lagging: set[int] = set()
        """Rows that are asked before they lack a block."""
        self._fresh: tuple[npt.NDArray[np.integer], Int64Array] | None = None
        """[rows, groups] what `grow_by_one` gave in this step, and [rows] the place; None: nothing."""
        self._end: Int64Array = np.zeros(0, dtype=np.int64)
        self._first: list[Int64Array] = [np.zeros(0, dtype=np.int64) for _ in self._kinds]
        self._at: Int64Array = np.zeros((0, self.num_groups), dtype=np.int64)
        self._reported: Int64Array = np.zeros(0, dtype=np.int64)
        self._public: Int64Array = np.zeros(0, dtype=np.int64)
        self._tails: Int64Array = np.zeros((0, 3), dtype=np.int64)
        self._due_at: Int64Array = np.zeros(0, dtype=np.int64)
        self._moves_at: Int64Array = np.zeros(0, dtype=np.int64)
        self._tables: Int32Array = np.zeros((0, self.num_groups, self._width), dtype=np.int32)
        self._tables_view = self._tables

    @property
    def num_usable_tokens(self) -> int:
        return self._num_usable_tokens

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        slots = np.zeros_like(num_tokens)
        for kind in self._kinds:
            held = num_tokens if kind.group.is_full else np.minimum(num_tokens, kind.group.size)
            slots += held * kind.num_groups
        return slots

    def num_blocks_for(self, num_tokens: int) -> int:
        most = (each.group.most_blocks(num_tokens, 1, self.block_size) * each.num_groups for each in self._kinds)
        return sum(most)

    @property
    def num_publications(self) -> int:
        return self._num_publications

    @property
    def has_duplicates(self) -> bool:
        return self._prefixes.has_duplicates

    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        self.journal = journal
        self._is_ahead = oldest < step_id
        self._in_flight = None
        self._fresh = None

    # ------------------------------------------------------------------ admission

    def look_up(self, request: Request) -> Match:
        """The longest prefix of which the groups have all that its next token attends to."""
        state, size = request._state, self.block_size
        if not self.caches:
            return Match(NO_BLOCKS, None, 0)
        if state.encoder_inputs and request.use_prefix_cache and self._marks.key(request):
            self.reset()  # earlier marks are invalid
        if not request.reads_prefix_cache:  # it may publish, under its contents
            return Match(NO_BLOCKS, None, 0)
        max_blocks = (state.num_tokens - 1) // size
        needs_output = max_blocks * size > state.num_prompt_tokens
        token_bytes = state.known_bytes() if needs_output else state.prompt_bytes
        root = Root.of(request)
        nodes = self._prefixes.find(root, token_bytes, max_blocks, self._full)
        if not nodes:
            return Match(NO_BLOCKS, None, 0)
        found = self._longest_hit(self._prefixes.root(root), nodes)
        return Match(np.concatenate([NO_BLOCKS, *map(np.ravel, found.blocks)]), found, found.num_blocks * size)

    def _longest_hit(self, root: GroupNode, nodes: list[GroupNode]) -> _Found:
        """What can be reused of the blocks at these nodes, the first ones of a sequence after a root."""
        places = np.arange(len(nodes))
        fits = np.ones(len(nodes), dtype=np.bool_)  # whether a hit may end after the block
        blocks: list[Int64Array] = []
        firsts: list[Int64Array] = []
        for kind in self._kinds:
            ids, has = self._prefixes.blocks(nodes, kind.index, kind.num_groups)
            first, is_whole = self._attended(kind, places, has)
            fits &= is_whole
            blocks.append(ids)
            firsts.append(first)
        ends = fits.nonzero()[0]
        if not len(ends):
            return _Found(root, len(nodes), 0, [0] * len(self._kinds), [])
        last = ends.item(-1)
        start = [first.item(last) for first in firsts]
        held = [ids[at : last + 1] for ids, at in zip(blocks, start, strict=True)]
        return _Found(nodes[last], len(nodes), last + 1, start, held)

    def _attended(
        self, kind: _Kind, places: Int64Array, has: npt.NDArray[np.bool_]
    ) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """For the token after each of these blocks, of which a kind `has` some: the first block that it attends to, and
        whether the kind has all from there on."""
        first: Int64Array = kind.group.num_skipped((places + 1) * self.block_size) // self.block_size
        newest_gap = np.maximum.accumulate(np.where(has, -1, places))
        return first, newest_gap < first

    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        end = -(-num_tokens // self.block_size)
        return sum((end - first) * kind.num_groups for kind, first in self._firsts(match))

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        num_tokens = request._state.num_tokens
        end = -(-num_tokens // self.block_size)
        count = 0
        for kind, first in self._firsts(match):
            most = kind.group.most_blocks(num_tokens, self._num_in_flight, self.block_size)
            count += min(end - first, most) * kind.num_groups
        return count

    def _firsts(self, match: Match) -> Iterable[tuple[_Kind, int]]:
        """Each kind, with the blocks at the beginning that a request with this prefix does not take."""
        found: _Found | None = match.node
        return zip(self._kinds, [0] * len(self._kinds) if found is None else found.first, strict=True)

    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        """The blocks of all groups; they are in the tables once the request has a row, see `place`."""
        state, found = request._state, match.node
        first, start = ([0] * len(self._kinds), 0) if found is None else (found.first, found.num_blocks)
        end = -(-num_tokens // self.block_size)
        if len(match.blocks):
            self.pool.acquire(match.blocks)
        columns = np.zeros((self.num_groups, end), dtype=np.int32)
        if start:
            for kind, at, blocks in zip(self._kinds, first, found.blocks, strict=True):
                columns[kind.groups, at:start] = blocks.T
        columns[:, start:] = self._take((end - start) * self.num_groups).reshape(-1, self.num_groups).T
        state.num_published_blocks = start
        state.prefix_epoch = self._prefixes.epoch
        state.prefix_node = self._prefixes.root(Root.of(request)) if found is None else found.node
        self._entering = (columns, first, num_tokens)
        last = (state.num_prompt_tokens - 1) // self.block_size
        self._ends_of_tails = (last, 0 if found is None else min(found.num_shared, last), start)
        return NO_BLOCKS

    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        """Fewer than the blocks hold, where some lie behind a window after the step: then the row is asked."""
        columns, first, num_tokens = self._entering
        full = num_tokens // self.block_size * self.block_size
        if any(kind.group.num_skipped(full) // self.block_size > first[kind.index] for kind in self._local):
            return num_tokens
        slots: int = columns.shape[1] * self.block_size
        return slots

    def place(self, batch: Batch, row: int, blocks: Int64Array) -> None:
        if row >= len(self._end):
            self._add_rows(len(batch.num_tokens))
        columns, first, _ = self._entering
        end = columns.shape[1]
        self._tables[row, :, :end] = columns
        self._end[row], self._reported[row], self._public[row], self._moves_at[row] = end, 0, end, -1
        self._tails[row] = self._ends_of_tails
        self._at[row] = row * self._row_size + self._offsets + end
        for column, at in zip(self._first, first, strict=True):
            column[row] = at
        self._note_first(np.array([row]))
        if batch.num_slots.item(row) < end * self.block_size:
            self._lagging.add(row)
        self._has_grown = True

    def _add_rows(self, count: int) -> None:
        for name in ("_end", "_at", "_reported", "_public", "_tails", "_due_at", "_moves_at"):
            setattr(self, name, _lengthened(getattr(self, name), count))
        self._first = [_lengthened(column, count) for column in self._first]
        before, back = self._tables, self._lag + 1
        whole = np.zeros(back + count * self._row_size, dtype=np.int32)
        self._flat, self._moving_to = whole[back:], whole[: count * self._row_size]
        """The tables, laid out flat; and for each of its places, what is at the one from which a block moves there."""
        self._tables = self._flat.reshape(count, self.num_groups, self._width)
        self._tables_view = np.asarray(self._tables.data.toreadonly())
        used = int(self._end.max(initial=0))
        self._tables[: len(before), :, :used] = before[:, :, :used]
        self._group_at = _counting(self.num_groups, count)

    # ------------------------------------------------------------------ running rows

    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """What the rows hold behind their windows is given back first."""
        return self._ask(batch, rows, batch.num_computed_tokens[rows] + num_tokens)

    def _ask(self, batch: Batch, rows: Int64Array, ends: Int64Array) -> Int64Array:
        """[rows] blocks that each row needs to hold `ends` tokens. A row that needs none has slots for them then."""
        short = (ends > batch.num_slots[rows]).nonzero()[0]
        needed = np.zeros(len(rows), dtype=np.int64)
        if not len(short):
            return needed
        asking, wanted = (rows, ends) if len(short) == len(rows) else (rows[short], ends[short])
        if self._local:
            self._give_back(asking, self._final(batch, asking))
        missing = -(-wanted // self.block_size) - self._end[asking]
        enough = (missing <= 0).nonzero()[0]
        if len(enough):
            self._set_slots(batch, asking[enough], wanted[enough])
            missing[enough] = 0
        needed[short] = missing * self.num_groups
        if self._local and int(needed.sum()) > self.pool.num_free:
            self.give_back(batch)
        return needed

    def give_back(self, batch: Batch) -> None:
        rows = batch.members.rows
        if len(rows):
            computed = np.minimum(batch.num_computed_tokens[rows], batch.num_tokens[rows])
            self._give_back(rows, computed - self._tokens_in_flight(batch, rows))

    def _final(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] tokens of full blocks that no step in flight computes, or may have to compute again."""
        computed = batch.num_computed_tokens[rows]
        full: Int64Array = np.minimum(computed, batch.num_tokens[rows]) // self.block_size * self.block_size
        if not self._is_ahead:
            return full
        final: Int64Array = np.minimum(full, computed - self._tokens_in_flight(batch, rows))
        return final

    def _tokens_in_flight(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] tokens that steps in flight compute."""
        if not self._is_ahead:
            return batch.zeros[: len(rows)]
        if self._in_flight is None:
            self._in_flight = self.num_tokens_in_flight(len(batch.num_tokens))
        return self._in_flight[rows]

    def _give_back(self, rows: Int64Array, final: Int64Array) -> None:
        """Release the blocks to which no token after these attends."""
        has_released = False
        for kind in self._local:
            first = self._first[kind.index][rows]
            kept = kind.group.num_skipped(final) // self.block_size
            behind = (kept > first).nonzero()[0]
            if len(behind):
                those, first, kept = rows[behind], first[behind], kept[behind]
                counts = kept - first
                blocks = self._blocks_between(those, kind.offsets, first, kept)
                places = np.arange(len(blocks) // kind.num_groups) - (counts.cumsum() - counts - first).repeat(counts)
                self._release(kind, those.repeat(counts), places, blocks)
                self._first[kind.index][those] = kept
                has_released = True
        if has_released:
            self._note_first(rows)
            self.num_returns += 1

    def _release(self, kind: _Kind, rows: Int64Array, places: Int64Array, blocks: Int64Array) -> None:
        """Release blocks of a kind, for each row and place one of each of its groups. Those that are cached and not
        likely to be looked up are evicted first, as they are many."""
        if not self.caches or not np.count_nonzero(self.pool.is_cached[blocks]):
            self.pool.release_any(blocks)
            return
        ends = self._tails[rows]
        starts = kind.group.num_skipped(ends * self.block_size) // self.block_size
        is_tail = ((starts <= places[:, None]) & (places[:, None] < ends)).any(axis=1).repeat(kind.num_groups)
        self.pool.release_any(blocks[~is_tail][::-1], evict_first=True)
        self.pool.release_any(blocks[is_tail][::-1])

    def _note_first(self, rows: Int64Array) -> None:
        """`_first` of these rows has changed."""
        due = np.full(len(rows), MAX_INT, dtype=np.int64)
        for kind in self._local:
            next_return = kind.group.least_with((self._first[kind.index][rows] + 1) * self.block_size)
            due = np.minimum(due, -(-next_return // self.block_size))
        self._due_at[rows] = due
        if self._moving is not None:
            is_private = self._first[self._moving.index][rows] >= self._public[rows]
            self._moves_at[rows] = np.where(is_private, due, -1)

    def _blocks_between(
        self, rows: Int64Array, offsets: Int64Array, starts: Int64Array, ends: Int64Array
    ) -> Int64Array:
        """The blocks of some groups in some places of the tables of each row: place by place."""
        at = rows * self._row_size + starts
        counts = ends - starts
        total = int(counts.sum())
        if total > len(rows):
            at = (at - counts.cumsum() + counts).repeat(counts) + np.arange(total)
        blocks: Int64Array = self._flat[(at[:, None] + offsets).ravel()].astype(INT64)
        return blocks

    def _set_slots(self, batch: Batch, rows: Int64Array, ends: Int64Array) -> None:
        """Up to how many tokens the rows need not be asked, which have blocks for `ends` of them."""
        most = self._end[rows] * self.block_size
        slots, full = most, ends // self.block_size * self.block_size
        for kind in self._local:
            is_behind = kind.group.num_skipped(full) // self.block_size > self._first[kind.index][rows]
            slots = np.where(is_behind, ends, slots)
        batch.num_slots[rows] = slots
        is_lagging = slots < most
        self._lagging.difference_update(rows.tolist())
        if np.count_nonzero(is_lagging):
            self._lagging.update(rows[is_lagging].tolist())

    def num_slots_with(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        ends = -(-(batch.num_computed_tokens[rows] + num_tokens) // self.block_size)
        slots: Int64Array = np.maximum(self._end[rows], ends) * self.block_size
        return slots

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        known = batch.num_tokens[rows]
        end = np.maximum(-(-known // self.block_size), self._end[rows])
        owed = np.zeros(len(rows), dtype=np.int64)
        for kind in self._kinds:
            first = self._first[kind.index][rows]
            most = end - first
            if not kind.group.is_full:
                cap = kind.group.most_blocks(self._max_model_len, self._num_in_flight, self.block_size)
                most = np.minimum(most, cap)
            owed += np.maximum(most - (self._end[rows] - first), 0) * kind.num_groups
        return owed

    def can_grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> bool:
        if isinstance(num_tokens, int) and not self._lagging and len(rows) * self.num_groups <= self.pool.num_free:
            self._asked = None
            return True
        self._asked = self._ask(batch, rows, batch.num_computed_tokens[rows] + num_tokens)
        return int(self._asked.sum()) <= self.pool.num_free

    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array:
        """As `can_grow_by_one` has just counted."""
        if self._asked is None:
            if self._grow_steadily(batch, rows):
                return NO_TOKENS
            self._asked = self._ask(batch, rows, batch.num_computed_tokens[rows] + num_tokens)
        lacking = self._asked.nonzero()[0]
        if len(lacking):
            ends = batch.num_computed_tokens[rows] + num_tokens
            self.grow(batch, rows[lacking], self._asked[lacking], ends[lacking])
        return NO_TOKENS

    def _grow_steadily(self, batch: Batch, rows: Int64Array) -> bool:
        """Each row lacks a block of each table for its next token, and has at most one in each to give back. False: it
        is otherwise, and nothing has changed."""
        kind, count, places = self._moving, len(rows), self._end[rows]
        at, ends = self._at[rows], places + ONE
        ids: npt.NDArray[np.integer]
        if kind is not None and self._moves_at[rows].tobytes() == places.tobytes():
            if self._is_ahead and not self._moves_ahead:
                return False
            ids = self._moving_to[at]
            if self._num_staying:
                ids[:, self._staying] = self._take(count * self._num_staying).reshape(self._shape_of_staying)
            self._first[kind.index][rows] = places - self._lag_array
            self._due_at[rows] = self._moves_at[rows] = ends
        else:
            due_at = self._due_at[rows]
            due = due_at <= places
            if due.item(due.argmax()):
                if kind is None or not self._can_exchange(batch, kind, rows[due], places[due], due_at[due]):
                    return False
                ids = self._exchange(kind, rows, places, due, at)
            else:
                ids = self._take(count * self.num_groups).reshape(at.shape)
        self._flat[at] = ids
        self._at[rows] = at + ONE
        self._end[rows] = ends
        self._reported[rows] = ends
        batch.num_slots[rows] = ends * self._size
        self._fresh = (ids, places)
        return True

    def _can_exchange(
        self, batch: Batch, kind: _Kind, rows: Int64Array, places: Int64Array, due_at: Int64Array
    ) -> bool:
        """Whether each of these rows has exactly one block in each table to give back, and no step in flight reads it
        that may have to be computed again."""
        if due_at.tobytes() != places.tobytes():
            return False
        if not self._is_ahead:
            return True
        kept = kind.group.num_skipped(self._final(batch, rows)) // self.block_size
        return bool((kept > self._first[kind.index][rows]).all())

    def _exchange(
        self, kind: _Kind, rows: Int64Array, places: Int64Array, due: BoolArray, at: Int64Array
    ) -> Int64Array:
        """[rows, groups] the next blocks of rows; those that are `due` give one back in each table of a kind."""
        moves = self._moves_at[rows] == places
        returns = due & ~moves
        ids: Int64Array = self._moving_to[at].astype(INT64)
        old, takes = ids[:, kind.groups], ~moves
        if np.count_nonzero(returns):
            first = places[returns] - self._back
            self._release(kind, rows[returns], first, old[returns].ravel())
        if self._num_staying:
            ids[:, self._staying] = self._take(len(rows) * self._num_staying).reshape(self._shape_of_staying)
        taken = int(np.count_nonzero(takes)) * kind.num_groups
        if taken:
            old[takes] = self._take(taken).reshape(-1, kind.num_groups)
            ids[:, kind.groups] = old
        self._first[kind.index][rows[due]] = places[due] - self._lag_array
        self._note_first(rows[due])
        return ids

    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Append `counts[i]` blocks, as many to the table of each group, to the tables of `rows[i]`."""
        total = int(counts.sum())
        at = rows * self._row_size + self._end[rows]
        places = counts // self.num_groups
        if total > len(rows) * self.num_groups:
            at = (at - places.cumsum() + places).repeat(places) + np.arange(total // self.num_groups)
        self._flat[(at[:, None] + self._offsets).ravel()] = self._take(total).astype(INT32)
        self._end[rows] += places
        self._at[rows] += places[:, None]
        self._set_slots(batch, rows, ends)
        self._has_grown = True
        return NO_TOKENS

    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        raise NotImplementedError("steps are not done at once in groups of KV; see `Scheduler.horizon`")

    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        count = np.zeros(len(rows), dtype=np.int64)
        for kind in self._kinds:
            count += (self._end[rows] - self._first[kind.index][rows]) * kind.num_groups
        return count

    def table(self, batch: Batch, row: int) -> Int64Array:
        """The blocks that a row holds, place by place of all tables."""
        blocks, _, _ = self._row_blocks(row)
        return blocks

    def num_blocks_shared(self, batch: Batch) -> Int64Array:
        """What a lookup would find of the blocks that others hold: they may hold what a row has given back."""
        members = batch.members
        paths = [self._path(request) for request in members.requests]
        num_behind = Counter(node for path in paths for node in path)  # requests that continue after a node keep it
        shared = [
            self._num_shared([node for node in path if num_behind[node] > 1], row)
            for path, row in zip(paths, members.rows.tolist(), strict=True)
        ]
        return np.array(shared, dtype=np.int64)

    def _path(self, request: Request) -> list[GroupNode]:
        """The nodes of what a running request has published or found, from the first."""
        state = request._state
        path: list[GroupNode] = []
        if self.caches and request.use_prefix_cache and state.prefix_epoch == self._prefixes.epoch:
            node: GroupNode = state.prefix_node
            while node.parent is not None:
                path.append(node)
                node = node.parent
        path.reverse()
        return path

    def _num_shared(self, nodes: list[GroupNode], row: int) -> int:
        """How many of these nodes, the first ones of a row, a lookup finds without the row's own blocks."""
        if not nodes:
            return 0
        mine = {*self._row_blocks(row)[0].tolist()}
        places = np.arange(len(nodes))
        fits = np.ones(len(nodes), dtype=np.bool_)
        for kind in self._kinds:
            has = np.array([self._is_held(node, kind.index, mine) for node in nodes], dtype=np.bool_)
            fits &= self._attended(kind, places, has)[1]
        ends = fits.nonzero()[0]
        return ends.item(-1) + 1 if len(ends) else 0

    def _is_held(self, node: GroupNode, kind: int, mine: set[int]) -> bool:
        """Whether others than the request that holds the blocks `mine` hold those of a node."""
        references = self.pool.num_references
        return any(
            all(references.item(block) > (block in mine) for block in entry.blocks)
            for entry in node.entries[kind]
            if self._prefixes.is_valid(entry)
        )

    def _row_blocks(self, row: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """The blocks of a row, with the place and the group of each: by place, and then by group."""
        end = self._end.item(row)
        held = np.arange(end)[:, None] >= self._firsts_of(row)
        places, groups = held.nonzero()
        return self._tables[row, groups, places].astype(INT64), places, groups

    def group_table(self, batch: Batch, row: int) -> Int32Array:
        end = self._end.item(row)
        tables: Int32Array = self._tables[row, :, :end].copy()
        tables[np.arange(end) < self._firsts_of(row)[:, None]] = 0
        return tables

    def group_tables(self, batch: Batch) -> Int32Array:
        return self._tables_view

    def _firsts_of(self, row: int) -> Int64Array:
        """[groups] the first block that the row holds in each table."""
        return np.array([self._first[kind].item(row) for kind in self._kind_of.tolist()], dtype=np.int64)

    # ------------------------------------------------------------------ for the host

    def new_blocks(
        self, batch: Batch, rows: Int64Array, grown: npt.NDArray[np.integer], *, whole: bool
    ) -> NewBlocks | None:
        fresh, self._fresh = self._fresh, None
        if whole:
            return self._whole_tables(rows, np.arange(len(rows)))
        if fresh is not None:
            ids, places = fresh
            if ids.dtype is not INT32:
                ids = ids.astype(INT32)
            count, more = self.num_groups, self._more_blocks(rows) if self._has_grown else None
            new = NewBlocks(
                ids.ravel(),
                grown.repeat(count),
                self._group_at[: ids.size],
                places.repeat(count),
            )
            return new if more is None else _merged(new, more)
        return self._more_blocks(rows)

    def _more_blocks(self, rows: Int64Array) -> NewBlocks | None:
        """What the rows got that is not reported."""
        if not self._has_grown:
            return None
        self._has_grown = False
        reported, end = self._reported[rows], self._end[rows]
        grown = (end > reported).nonzero()[0]
        if not len(grown):
            return None
        reported, end, those = reported[grown], end[grown], rows[grown]
        if not reported.all():  # some are new, and may have begun with what is cached
            return self._whole_tables_of_new(rows, grown, reported)
        self._reported[those] = end
        return self._appended(grown, those, reported, end - reported)

    def _appended(self, grown: Int64Array, rows: Int64Array, starts: Int64Array, places: Int64Array) -> NewBlocks:
        """The blocks in the last `places` of the tables of some rows, which have all of them in every group."""
        at, total = starts, int(places.sum())
        if total > len(rows):
            rows, grown = rows.repeat(places), grown.repeat(places)
            at = (at - places.cumsum() + places).repeat(places) + np.arange(total)
        count = self.num_groups
        ids = self._flat[((rows * self._row_size + at)[:, None] + self._offsets).ravel()]
        return NewBlocks(ids, grown.repeat(count), self._group_of(total), at.repeat(count))

    def _group_of(self, num_places: int) -> Int64Array:
        """0 to the number of groups, so many times over."""
        count = num_places * self.num_groups
        if count > len(self._group_at):
            self._group_at = _counting(self.num_groups, 2 * num_places)
        return self._group_at[:count]

    def _whole_tables_of_new(self, rows: Int64Array, grown: Int64Array, reported: Int64Array) -> NewBlocks:
        """Whole tables for those among `grown` of which nothing is reported, and what is new for the others."""
        is_new = reported == 0
        whole = self._whole_tables(rows, grown[is_new])
        others = grown[~is_new]
        if not len(others):
            return whole
        those, starts = rows[others], reported[~is_new]
        places = self._end[those] - starts
        self._reported[those] = self._end[those]
        return _merged(self._appended(others, those, starts, places), whole)

    def _whole_tables(self, rows: Int64Array, indices: Int64Array) -> NewBlocks:
        """All blocks of the rows at these indices."""
        parts = [self._row_blocks(row) for row in rows[indices].tolist()]
        self._reported[rows[indices]] = self._end[rows[indices]]
        counts = np.array([len(blocks) for blocks, _, _ in parts], dtype=np.int64)
        ids, places, groups = (
            (np.concatenate([NO_BLOCKS, *column]) for column in zip(*parts, strict=True)) if parts else (NO_BLOCKS,) * 3
        )
        return NewBlocks(ids.astype(INT32), indices.repeat(counts), groups, places)

    # ------------------------------------------------------------------ publishing and freeing

    def publish_prompt(self, batch: Batch, request: Request) -> None:
        if self._shares_within_step:
            self._publish_prompt(batch, request)
        else:
            self.unpublished.append(request)

    def publish_deferred(self, batch: Batch) -> None:
        for request in self.unpublished:
            self._publish_prompt(batch, request)
        self.unpublished.clear()

    def _publish_prompt(self, batch: Batch, request: Request) -> None:
        state = request._state
        assert state.row is not None
        self._public[state.row], self._moves_at[state.row] = self._end[state.row], -1
        computed = min(batch.num_computed_tokens.item(state.row), state.num_prompt_tokens)
        self._publish(request, computed // self.block_size, state.prompt_bytes)

    def _publish(self, request: Request, end: int, token_bytes: bytes) -> None:
        """Publish the first `end` blocks of each table that the row still holds, without those published before."""
        state, prefixes = request._state, self._prefixes
        first = state.num_published_blocks
        if not self.caches or end <= first or not request.use_prefix_cache or state.prefix_epoch != prefixes.epoch:
            return
        before: GroupNode = state.prefix_node
        assert state.row is not None
        nodes = prefixes.extend(before, token_bytes, first, end)
        entries: list[Entry] = []
        for kind in self._kinds:
            start = max(first, self._first[kind.index].item(state.row))
            blocks = self._tables[state.row, kind.groups, start:end].T
            for node, ids in zip(nodes[start - first :], blocks.tolist(), strict=True):
                entries.append(prefixes.enter(node, kind.index, ids))
            self.pool.set_cached(blocks.ravel().astype(INT64))
        state.prefix_node, state.num_published_blocks = nodes[-1], end
        self._num_publications += 1
        if self.journal is not None:
            self.journal.append(_Publication(request, first, before, nodes, entries))

    def num_findable_tokens(self, request: Request) -> int:
        return self.look_up(request).num_tokens

    def release(
        self,
        batch: Batch,
        request: Request,
        now: float,
        *,
        num_valid_tokens: int,
        publish: bool = True,
        num_final_tokens: int = 0,
        is_finished: bool = False,
    ) -> None:
        state = request._state
        row = state.row
        assert row is not None
        full = num_valid_tokens // self.block_size
        if publish and full > state.num_published_blocks:
            self._publish(request, full, state.known_bytes())
        self._release_row(row, is_finished=is_finished)
        self._end[row] = 0
        self._lagging.discard(row)
        state.prefix_node = None  # it refers to the nodes before it

    def _release_row(self, row: int, *, is_finished: bool) -> None:
        """Release all blocks of a row, the last ones to be evicted first. A request that is not finished continues with
        the window that it has; one that is, and what comes after it, mostly with that of its prompt."""
        blocks, places, groups = self._row_blocks(row)
        if is_finished and self._local and self.caches:
            starts, ends = np.zeros((2, self.num_groups, 3), dtype=np.int64)
            ends[:] = self._tails[row]
            for kind in self._kinds:
                starts[kind.groups] = kind.group.num_skipped(ends[kind.groups] * self.block_size) // self.block_size
                if kind.group.is_full:
                    ends[kind.groups] = self._width
            at = places[:, None]
            is_kept = ((starts[groups] <= at) & (at < ends[groups])).any(axis=1)
            self.pool.release_any(blocks[~is_kept][::-1], evict_first=True)
            blocks = blocks[is_kept]
        self.pool.release_any(blocks[::-1])

    def undo(self, journal: Journal) -> None:
        for entry in reversed(journal):
            request, first, before, _, entries = entry
            self._remove(entries)
            state = request._state
            is_behind = state.prefix_epoch == self._prefixes.epoch and state.num_published_blocks > first
            if state.row is not None and is_behind:
                state.num_published_blocks, state.prefix_node = first, before  # published again when recomputed

    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        wrong = [
            node for journal in journals for entry in journal if entry.request is publisher for node in entry.nodes
        ]
        if not wrong:
            return
        behind = Descendants(wrong)
        self._remove([entry for entry in dict.fromkeys(self._prefixes.entries()) if entry.node in behind])
        for request in running:
            state = request._state
            if state.prefix_node is not None and state.prefix_node in behind:
                state.prefix_epoch = NO_EPOCH

    def _remove(self, entries: Iterable[Entry]) -> None:
        gone = [block for entry in entries for block in self._prefixes.remove(entry)]
        if gone:
            self.pool.uncache(gone)
        self._num_publications += 1  # others with the same content may be found now

    def reset(self) -> None:
        self._prefixes.clear()
        self.pool.uncache_all()
        self._num_publications += 1

    def _take(self, count: int) -> Int64Array:
        blocks, evicted = self.pool.take(count)
        if len(evicted):
            self.num_evictions += len(evicted)
            self._num_publications += self._prefixes.has_duplicates
        return blocks

    # ------------------------------------------------------------------ checks

    def broken(self, batch: Batch) -> str | None:
        return self._broken_pool(batch) or self._broken_rows(batch) or self._broken_contents(batch)

    def _broken_pool(self, batch: Batch) -> str | None:
        pool = self.pool
        blank, cached_free = pool.blank_blocks(), pool.cached_free_blocks()
        referenced = pool.num_references.nonzero()[0].tolist()
        everything = sorted([*range(pool.num_reserved_blocks), *blank, *cached_free, *referenced])
        if everything != list(range(pool.num_blocks)):
            return "blank, cached free and referenced blocks are not the pool"
        if pool.is_cached[blank].any() or not pool.is_cached[cached_free].all():
            return "a free block is in the wrong half of the free blocks"
        entries, group_of = np.zeros(pool.num_blocks, dtype=np.int64), np.full(pool.num_blocks, -1)
        for row in batch.members.rows.tolist():
            blocks, _, groups = self._row_blocks(row)
            np.add.at(entries, blocks, 1)
            if ((group_of[blocks] != -1) & (group_of[blocks] != groups)).any():
                return "a block is in the tables of two groups"
            group_of[blocks] = groups
        if not np.array_equal(entries, pool.num_references):
            return "reference counts differ from block-table entries"
        return None

    def _broken_rows(self, batch: Batch) -> str | None:
        for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
            end, computed = self._end.item(row), batch.num_computed_tokens.item(row)
            if batch.num_slots.item(row) > end * self.block_size:
                return f"{request} has fewer blocks than slots"
            for kind in self._kinds:
                first = self._first[kind.index].item(row)
                if first > kind.group.num_skipped(min(computed, batch.num_tokens.item(row))) // self.block_size:
                    return f"{request} has given back a block of {kind.group} that it reads"
        return None

    def _broken_contents(self, batch: Batch) -> str | None:
        """A block that is cached is known by the tokens that it holds, as a block of its group."""
        prefixes = self._prefixes
        for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
            state = request._state
            blocks, places, groups = self._row_blocks(row)
            is_cached = self.pool.is_cached[blocks]
            if state.prefix_epoch != prefixes.epoch or not is_cached.any():
                continue
            nodes = prefixes.extend(
                prefixes.root(Root.of(request)), state.known_bytes(), 0, int(places[is_cached].max()) + 1
            )
            for block, place, group in zip(
                blocks[is_cached].tolist(), places[is_cached].tolist(), groups[is_cached].tolist(), strict=True
            ):
                entry, kind = prefixes.entry_of(block), self._kinds[self._kind_of[group]]
                if entry is None or entry.node is not nodes[place]:
                    return f"block {block} of {request} is keyed by other tokens than it holds"
                if entry.kind != kind.index or entry.blocks[kind.groups.tolist().index(group)] != block:
                    return f"block {block} of {request} is keyed as one of another group"
                if entry not in entry.node.entries[entry.kind]:
                    return f"block {block} of {request} is cached, and no lookup finds it"
        return None


def _as_index(indices: list[int]) -> int | slice | Int64Array:
    """The same indices, in the form that NumPy takes fastest."""
    if len(indices) == 1:
        return indices[0]
    if indices and indices == list(range(indices[0], indices[-1] + 1)):
        return slice(indices[0], indices[-1] + 1)
    return np.array(indices, dtype=np.int64)


def _lengthened(column: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """With so many rows."""
    grown = np.zeros((count, *column.shape[1:]), dtype=column.dtype)
    grown[: len(column)] = column
    return grown


def _counting(num_groups: int, times: int) -> Int64Array:
    """0 to the number of groups, so many times over; read-only."""
    counting = np.resize(np.arange(num_groups), num_groups * times)
    counting.flags.writeable = False
    return counting


def _merged(*parts: NewBlocks) -> NewBlocks:
    """In the order of the rows."""
    order = np.concatenate([each.rows for each in parts]).argsort(kind="stable")
    return NewBlocks(*[np.concatenate(columns)[order] for columns in zip(*parts, strict=True)])
