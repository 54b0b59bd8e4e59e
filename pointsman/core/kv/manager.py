"""`KVCacheManager`: looks up, allocates, publishes and frees KV blocks.

The manager alone owns the block pool and the prefix tree, for any number of groups of layers. Each group has block
tables of its own (`tables.py`). All groups take their blocks from one pool, and one tree finds cached blocks by their
content (`prefix_tree.py`). Blocks behind the windows of some groups are given back while their requests run
(`windows.py`).

Prompt blocks are published when their computation is scheduled, so that requests of the same step can share them.
Generated blocks are published when their request loses its row, so that decoding never touches the tree. Publications
while a step is in flight are logged in the journal of the newest such step, and undone if that step fails.

A cache hit is the longest prefix after which every group has all blocks that the next token attends to: with full
attention all blocks of the prefix, with a window its last blocks. Only these blocks are acquired.

Content leaves the prefix cache in four cases, by these methods:

    why                             manager    prefix tree     pool
    its block is allocated again    allocate   evict           allocate
    the step that computes it fails undo       remove_block    uncache
    the request fails in a step     retract    remove_subtree  uncache
    the cache is reset              reset      clear           uncache_all

Releasing a row removes no content: its cached blocks become free, and lookups find them until they are evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS, BlockPool
from pointsman.core.kv.cache import Journal, KVCache, Match, NewBlocks
from pointsman.core.kv.content_marks import ContentMarks
from pointsman.core.kv.digests import block_keys, block_name
from pointsman.core.kv.events import KVEvents
from pointsman.core.kv.prefix_tree import Found, Node, PrefixCache, Root, Run, RunNode, Span
from pointsman.core.kv.reports import TableReports
from pointsman.core.kv.retained import RetainingPool
from pointsman.core.kv.tables import MAX_LOOP_ROWS, BlockTables
from pointsman.core.kv.windows import Windows
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Eviction
from pointsman.core.state.layout import FULL, AttendedBlocks
from pointsman.core.state.numbers import INT32
from pointsman.core.state.output import Save
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.tokens import NO_TOKENS

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

FINAL = -1  # in `_key_of`, the step of a block that no step in flight computes
NO_ROOT = Root()  # root of all requests without prefix caching
NO_EPOCH = -1  # epoch of a request whose prefix left the tree while it ran


class Publication(NamedTuple):
    """An entry of a journal: blocks that one request published together."""

    request: Request
    first: int
    """Number of leading blocks in each of the request's tables that the request had published before."""
    before: Node
    """The node after which the blocks were published."""
    blocks: Int64Array
    """[groups, nodes] the published blocks."""
    spans: list[Span]
    """The nodes of the prefix tree to which the blocks belong."""


class Entering(NamedTuple):
    """The newest admission, until the request has a row."""

    table: Int64Array
    """[groups, blocks] the request's block tables."""
    is_local: BoolArray
    """[groups, blocks] whether each block of `table` was found in the prefix cache."""
    first: Int64Array
    """[groups] the place of the request's first block in each table."""
    num_tokens: int
    """Number of the request's computed tokens after the step."""
    tails: tuple[int, int, int]
    """Places in the request's tables at which a later lookup is likely to end: the end of the prompt, of the prompt's
    part that other requests have computed, and of the cache hit. The blocks in the windows before these places are
    evicted last."""


class KVCacheManager(KVCache):
    """The KV blocks of all rows, in one or several tables per row; a block holds `block_size` tokens in the layers of
    its group. `eviction` chooses which cached blocks are retained; None: no block is retained."""

    pool: BlockPool

    def __init__(self, config: SchedulerConfig, eviction: Eviction | None = None) -> None:
        groups = config.kv_groups or (FULL,)
        has_windows = any(not group.is_full for group in groups)
        self.block_size = size = config.block_size
        self._size = np.array(size)  # an array, see `state/numbers.py`
        self.num_groups = len(groups)
        self.has_tables = not config.has_kv_groups
        self.grows_for_steps = True
        self.gives_back = has_windows
        self._num_usable_tokens = config.num_usable_tokens
        self.retaining: RetainingPool | None = None
        """The same object as `pool`, if the pool retains blocks; otherwise None."""
        self.pool = BlockPool(config.num_blocks, config.num_reserved_blocks)
        if eviction is not None and eviction.share > 0 and config.enable_prefix_caching:
            self.pool = self.retaining = RetainingPool(config.num_blocks, config.num_reserved_blocks, eviction.share)
        self.eviction = eviction
        width = -(-config.max_model_len // size)
        if not has_windows:
            width = min(width, config.num_usable_blocks // self.num_groups)
        self._tables = BlockTables(groups, width)
        self._reports = TableReports(self._tables)
        self._windows: Windows | None = None
        """Gives back blocks behind windows; None: every group attends to the whole context."""
        if has_windows:
            self._windows = Windows(config, self._tables, self.pool, self._reports, self.allocate, self._count_return)
        self._attended = AttendedBlocks(groups, size, width)
        self.anchor = next((index for index, group in enumerate(groups) if group.is_full), None)
        nothing = np.zeros((self.num_groups, 0), dtype=np.int64)
        self._entering = Entering(nothing, nothing == 0, NO_BLOCKS, 0, (0, 0, 0))
        self.caches = config.enable_prefix_caching
        self.prefix = None
        if config.enable_prefix_caching:
            self.prefix = PrefixCache(config.num_blocks, size, self.num_groups, self.anchor)
        if config.enable_kv_cache_events and self.prefix is not None:
            order = sorted(range(self.num_groups), key=lambda group: group != self.anchor)
            self.events = self.prefix.listener = KVEvents(size, order)
        self._marks = ContentMarks()
        self.saves: list[Save] | None = None
        """Evicted blocks that no output has reported yet; None: evictions are not reported."""
        self.wanted: Counter[bytes] | None = None
        """Keys of the contents whose evictions are reported, each with the number of preempted requests that need it;
        None: all evictions are reported."""
        self._shares_within_step = config.share_within_step
        self.unpublished = []
        self.shared: list[tuple[Request, int]] | None = None
        """Pairs (request, number of blocks): the request has acquired or published this number of leading blocks, so
        that lookups find these blocks referenced. None: not tracked."""
        self._num_released_at_once = 0  # publications after which the row released its blocks directly
        self._newest_step = 0
        self._oldest_step = 0
        # By published block: its name, and the newest step that computes it; only if `saves` is used.
        self._key_of: dict[int, tuple[bytes, int]] = {}

    @property
    def num_usable_tokens(self) -> int:
        return self._num_usable_tokens

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        if self.has_tables:
            return num_tokens
        slots = np.zeros_like(num_tokens)
        for kind in self._tables.kinds:
            held = num_tokens if kind.group.is_full else np.minimum(num_tokens, kind.group.size)
            slots += held * kind.num_groups
        return slots

    def num_blocks_for(self, num_tokens: int) -> int:
        kinds = self._tables.kinds
        return sum([kind.group.max_blocks(num_tokens, 1, self.block_size) * kind.num_groups for kind in kinds])

    @property
    def num_publications(self) -> int:
        """Counter that changes whenever a prefix cache lookup may find more blocks than before."""
        return self.prefix.num_publications if self.prefix is not None else 0

    @property
    def num_held_publications(self) -> int:
        """Counter that changes whenever a lookup may find more referenced blocks than before, or a request may need
        fewer blocks. If transfers send blocks, use `num_publications` instead."""
        if self.prefix is None:
            return 0
        return self.prefix.num_publications - (self._num_released_at_once if self._windows is None else 0)

    def _count_return(self) -> None:
        self.num_returns += 1

    @property
    def has_duplicates(self) -> bool:
        """Whether several blocks have the same cached content: once a block is evicted, a lookup may find another block
        with the content, and `num_publications` changes."""
        return self.prefix is not None and self.prefix.num_duplicates > 0

    @property
    def reports_evictions(self) -> bool:
        """Whether an eviction may have to be reported in an output (`saves`)."""
        return self.saves is not None and (self.wanted is None or len(self.wanted) > 0)

    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        """Begin to schedule step `step_id`. `oldest`: the oldest step whose result is not applied yet; publications of
        earlier steps are final."""
        self.journal = journal
        self._newest_step, self._oldest_step = step_id, oldest
        if not self.has_tables:
            self._reports.open_step()
        if self._windows is not None:
            self._windows.open_step(oldest < step_id, self.num_tokens_in_flight)

    def blocks_for(self, num_tokens: int) -> int:
        """Number of blocks of one group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ admission

    def look_up(self, request: Request) -> Match:
        """The longest cached prefix of the request's known tokens. It never includes the last token: the model must
        compute that token to sample the next one.

        If the request holds loaded blocks, the match consists of these blocks, without a lookup.
        """
        state, size = request._state, self.block_size
        if state.holding is not None:
            table = state.holding.table
            count = table.shape[1]
            return Match(state.holding.blocks, state.prefix_node, count * size, table, count)
        if self.prefix is None:
            return self._no_match(NO_ROOT)
        root = Root.of(request)
        if state.encoder_inputs and request.use_prefix_cache and self._marks.rekey_starts_generation(request):
            self.reset()  # a new generation makes earlier marks invalid
        if not request.reads_prefix_cache:  # the request may still publish, with the marks of its contents
            return self._no_match(root)
        max_blocks = (state.num_tokens - 1) // size
        if max_blocks == 0:
            return self._no_match(root)
        token_bytes = state.known_bytes() if max_blocks * size > state.num_prompt_tokens else state.prompt_bytes
        found = self.prefix.look_up(root, token_bytes, max_blocks)
        if not found.spans:
            return self._no_match(root)
        if self.has_tables:
            blocks = found.blocks[0]
            return new_tuple(Match, (blocks, found.last, len(blocks) * size, None, len(blocks), 0))
        return self._longest_match_in_groups(found, root)

    def _no_match(self, root: Root) -> Match:
        table = None if self.has_tables else np.zeros((self.num_groups, 0), dtype=np.int64)
        return new_tuple(Match, (NO_BLOCKS, root, 0, table, 0, 0))

    def _longest_match_in_groups(self, found: Found, root: Root) -> Match:
        """The match of the nodes in `found`: their longest prefix that every group can reuse."""
        num_known: int = found.blocks.shape[1]
        count, table = num_known, found.blocks
        if found.has is not None and not found.has.all():
            count, table = self._attended.num_reusable(found.has), np.where(found.has, table, self.pool.num_blocks)
        match = Match(NO_BLOCKS, found.node_after(count, root), count * self.block_size, table, num_known)
        return match._replace(blocks=table[self._is_acquired(match)])

    def _is_acquired(self, match: Match) -> BoolArray:
        """[groups, known blocks] whether the request acquires each block of a match's table."""
        assert match.table is not None
        start = (match.num_tokens + match.num_external) // self.block_size
        places = np.arange(match.table.shape[1])
        is_needed: BoolArray = (places >= self._num_unread_blocks(match)[:, None]) & (places < start)
        is_needed &= match.table != self.pool.num_blocks
        return is_needed

    def with_external(self, match: Match, num_tokens: int) -> Match:
        match = match._replace(num_external=num_tokens)
        return match if match.table is None else match._replace(blocks=match.table[self._is_acquired(match)])

    def is_in_pool(self, match: Match, max_blocks: int) -> BoolArray:
        """[groups, max_blocks] whether the pool has each of the first `max_blocks` blocks of a request with this
        match."""
        has = np.zeros((self.num_groups, max_blocks), dtype=np.bool_)
        if match.table is not None:
            has[:, : match.table.shape[1]] = (match.table != self.pool.num_blocks)[:, :max_blocks]
        return has

    def num_reusable(self, has_block: BoolArray) -> int:
        """Maximum number of leading blocks after which every group has all blocks that the next token attends to.
        `has_block`: [groups, blocks] whether each group has the block."""
        return self._attended.num_reusable(has_block)

    def num_blocks_to_hold(self, num_blocks: int) -> int:
        """Number of blocks that a request holds, in all groups together, once each of its tables has `num_blocks`
        places; the blocks behind its windows are not held."""
        return num_blocks * self.num_groups - int(self._attended.first_blocks(num_blocks).sum())

    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        count = -(-num_tokens // self.block_size) * self.num_groups
        return count if self._windows is None else count - int(self._num_unread_blocks(match).sum())

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        if self._windows is None:
            return -(-request._state.num_tokens // self.block_size) * self.num_groups
        return self._windows.num_blocks_of_whole(self._num_unread_blocks(match), request._state.num_tokens)

    def _num_unread_blocks(self, match: Match) -> Int64Array:
        """[groups] number of leading blocks of the matched and loaded prefix to which no later token attends."""
        return self._attended.first_blocks((match.num_tokens + match.num_external) // self.block_size)

    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        state, cached = request._state, match.blocks
        if self.retaining is not None:
            self.retaining.expire(now)
            if len(cached) and self.eviction is not None and state.holding is None:
                self.eviction.started(request, self.retaining.labels[self._labelled_blocks(match)])
        start = match.num_tokens // self.block_size
        if state.holding is None:
            if len(cached):
                self.pool.acquire(cached)
                if self.shared is not None:
                    self.shared.append((request, len(cached)))
            state.num_published_blocks = start
            state.prefix_node = match.node
            state.prefix_epoch = self.prefix.epoch if self.prefix is not None else 0
        if not self.has_tables:
            self._build_tables(request, match, num_tokens)
            return NO_BLOCKS
        new = self.allocate(-(-num_tokens // self.block_size) - start)
        return np.concatenate([cached, new]) if len(cached) else new

    def _build_tables(self, request: Request, match: Match, num_tokens: int) -> None:
        """Make the block tables of an admitted request from its acquired blocks and newly allocated blocks."""
        assert match.table is not None
        first, none = self._num_unread_blocks(match), self.pool.num_blocks
        end, num_known = -(-num_tokens // self.block_size), match.table.shape[1]
        table = np.full((self.num_groups, end), none)
        is_local = np.zeros(table.shape, dtype=np.bool_)
        is_local[:, :num_known] = self._is_acquired(match)[:, :end]
        table[is_local] = match.table[:, :end][is_local[:, :num_known]]
        missing = (~is_local & (np.arange(end) >= first[:, None])).T  # place by place
        table.T[missing] = self.allocate(int(np.count_nonzero(missing)))
        last = (request._state.num_prompt_tokens - 1) // self.block_size
        tails = (last, min(match.num_known, last), match.num_tokens // self.block_size)
        self._entering = Entering(table, is_local, first, num_tokens, tails)

    def admitted_tables(self, blocks: Int64Array, num_cached: int) -> tuple[Int64Array, BoolArray]:
        """The block tables [groups, blocks] of the newest admission, and whether each of their blocks was found in the
        prefix cache. `blocks`: the result of `admit`. At a place without a block, the entry is the number of blocks in
        the pool. With one table, the first `num_cached` blocks of the table were found."""
        if self.has_tables:
            return blocks[None], (np.arange(len(blocks)) < num_cached)[None]
        return self._entering.table, self._entering.is_local

    def _labelled_blocks(self, match: Match) -> Int64Array:
        """The blocks of a match that may carry a label of the eviction policy: those of one group, which got a label
        when they were released."""
        if match.table is None:
            return match.blocks
        group = self.anchor or 0
        start = match.num_tokens // self.block_size
        return match.table[group, self._num_unread_blocks(match).item(group) : start]

    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        if self.has_tables:
            return len(blocks) * self.block_size
        table, _, first, num_tokens, _ = self._entering
        count: int = table.shape[1]
        return count * self.block_size if self._windows is None else self._windows.num_slots(count, num_tokens, first)

    def place(self, batch: Batch, row: int, blocks: Int64Array) -> None:
        if row >= len(self._tables.ends):
            self._add_rows(len(batch.num_tokens))
        if self.has_tables:
            self._tables.set_tables(row, blocks[None])
            return
        table, _, first, _, tails = self._entering
        self._tables.set_tables(
            row, np.where(table < self.pool.num_blocks, table, 0), first
        )  # a kernel may read any entry
        self._reports.note_placed(row)
        if self._windows is not None:
            self._windows.place_row(batch, row, tails)

    def _add_rows(self, count: int) -> None:
        self._tables.add_rows(count)
        self._reports.add_rows(count)
        if self._windows is not None:
            self._windows.add_rows(count)

    # ------------------------------------------------------------------ running rows

    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """As `KVCache.num_blocks_to_grow`. Before counting, gives back the blocks behind the windows of the rows."""
        ends = batch.num_computed_tokens[rows] + num_tokens
        if self._windows is not None:
            return self._windows.num_blocks_to_grow(batch, rows, ends)
        needed: Int64Array = np.maximum(-(-(ends - batch.num_slots[rows]) // self.block_size), 0)
        return needed if self.num_groups == 1 else needed * self.num_groups

    def give_back(self, batch: Batch) -> None:
        if self._windows is not None:
            self._windows.give_back(batch)

    def num_slots_after_growth(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        ends = -(-(batch.num_computed_tokens[rows] + num_tokens) // self.block_size)
        slots: Int64Array = np.maximum(self._tables.ends[rows], ends) * self.block_size
        return slots

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        if self._windows is None:
            return super().num_blocks_owed(batch, rows)
        return self._windows.num_owed_blocks(rows, batch.num_tokens[rows])

    def num_owed_of(self, batch: Batch, row: int) -> int:
        """Number of free blocks that the row `row` still needs until all its known tokens are computed."""
        if self._windows is not None:
            return super().num_owed_of(batch, row)
        missing = -(-(batch.num_tokens.item(row) - batch.num_slots.item(row)) // self.block_size)
        return max(missing, 0) * self.num_groups

    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array | None:
        """Append one new block to each table of each row; with windows, the blocks that the row lacks. Returns the
        blocks in row order, empty without `has_tables`. None: the pool has too few blocks, and nothing has changed."""
        if self._windows is not None:
            return self._grow_by_one_in_windows(self._windows, batch, rows, num_tokens)
        count = len(rows)
        num_blocks = count * self.num_groups
        if num_blocks > self.pool.num_free:
            return None
        blocks = self.allocate(num_blocks).astype(INT32)  # converting while writing at indices takes longer
        if self.has_tables and count <= MAX_LOOP_ROWS:
            self._tables.append_in_loop(rows, blocks, batch.num_slots, self.block_size)
            return blocks
        if not self.has_tables:
            blocks = blocks.reshape(-1, self.num_groups)
        ends = self._tables.append_one(rows, blocks)
        batch.num_slots[rows] = ends * self._size
        if self.has_tables:
            return blocks
        self._reports.note_one_block_each(rows, blocks, ends - 1, ends)
        return NO_TOKENS

    def _grow_by_one_in_windows(
        self, windows: Windows, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array
    ) -> Int32Array | None:
        if windows.grow_steadily(batch, rows, num_tokens):
            return NO_TOKENS
        ends = batch.num_computed_tokens[rows] + num_tokens
        needed = windows.num_blocks_to_grow(batch, rows, ends)
        if int(needed.sum()) > self.pool.num_free:
            return None
        lacking = needed.nonzero()[0]
        if len(lacking):
            self.grow(batch, rows[lacking], needed[lacking], ends[lacking])
        return NO_TOKENS

    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Append `counts[i]` new blocks to the tables of `rows[i]`: the same number to each table, at least 1. Returns
        all blocks in row order, empty without `has_tables`."""
        total = int(counts.dot(batch.ones[: len(counts)]))  # takes half the time of `sum`
        if self.has_tables and total == len(rows):
            grown = self.grow_by_one(batch, rows, 1)
            assert grown is not None, "the pool has these blocks"
            return grown
        blocks = self.allocate(total).astype(INT32)
        in_each = self._tables.append(rows, counts if self.num_groups == 1 else counts // self.num_groups, blocks)
        if self._windows is None:
            batch.num_slots[rows] = in_each * self._size
        else:
            self._windows.set_slots(batch, rows, ends)
        if self.has_tables:
            return blocks
        self._reports.note_growth()
        return NO_TOKENS

    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Append the blocks that each row needs to decode one token in each of `num_steps` steps. The blocks are
        allocated step by step, within a step row by row, and within a row group by group. Call it only if
        `grows_for_steps`.

        Returns the blocks in that order, and for each block the index of its row in `rows` and its step, from 0. With
        windows the blocks are not returned.
        """
        if self._windows is not None:
            self._grow_for_steps_in_windows(batch, rows, num_computed, num_steps)
            return NO_TOKENS, NO_BLOCKS, NO_BLOCKS
        tables, num_groups = self._tables, self.num_groups
        free = batch.num_slots[rows] - num_computed
        lacking = (free < num_steps).nonzero()[0]
        if not len(lacking):
            return NO_TOKENS, NO_BLOCKS, NO_BLOCKS
        steps, short = free[lacking], rows[lacking]
        if num_steps <= self.block_size and self.has_tables:  # each row lacks at most one block
            order = steps.argsort(kind="stable")
            grown = self.grow_by_one(batch, short[order], 1)
            assert grown is not None, "the number of guaranteed steps counts the free blocks"
            return grown, lacking[order].repeat(num_groups), steps[order].repeat(num_groups)
        counts = (num_steps - steps + (self.block_size - 1)) // self._size
        total = int(counts.dot(batch.ones[: len(counts)]))  # takes half the time of `sum`
        ends = tables.ends[short]
        at = tables.starts[short] + ends
        ends += counts
        tables.ends[short] = ends
        batch.num_slots[short] = ends * self._size
        if total > len(short):
            within = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
            at = at.repeat(counts) + within
            steps = steps.repeat(counts) + within * self._size
            lacking = lacking.repeat(counts)
        order = steps.argsort(kind="stable")
        blocks = self.allocate(total * num_groups).astype(INT32)
        tables.write_blocks(at[order], blocks)
        if not self.has_tables:
            self._reports.note_reported(short, ends)
        return blocks, lacking[order].repeat(num_groups), steps[order].repeat(num_groups)

    def _grow_for_steps_in_windows(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> None:
        """`grow_for_steps` with windows: the rows grow as in single steps, step by step. A row also gives back blocks
        then. Steps in which no row reaches its `num_slots` are skipped."""
        num_tokens = batch.num_tokens[rows]
        while (step := int((left := batch.num_slots[rows] - num_computed).min())) < num_steps:
            batch.num_computed_tokens[rows] = num_computed + step
            batch.num_tokens[rows] = num_tokens + step
            grown = self.grow_by_one(batch, rows[left == step], 1)
            assert grown is not None, "the number of guaranteed steps counts the free blocks"
        batch.num_tokens[rows] = num_tokens
        self._reports.note_reported(rows, self._tables.ends[rows])
        self._reports.open_step()

    # ------------------------------------------------------------------ tables

    def group_tables(self, batch: Batch) -> Int32Array:
        return self._tables.view

    def group_table(self, batch: Batch, row: int) -> Int32Array:
        return self._tables.blocks_at_all_places(row, 0, self._tables.ends.item(row), 0).astype(INT32)

    def first_blocks(self, batch: Batch, row: int, count: int) -> Int64Array:
        table = self._tables.blocks_at_all_places(row, 0, min(count, self._tables.ends.item(row)), -1)
        return table[0] if self.has_tables else table

    def block_names(self, request: Request, group: int, num_blocks: int) -> list[bytes]:
        """The names, for stores outside the pool, of the first `num_blocks` blocks of a request in a group."""
        keys = block_keys(request, self.block_size)[:num_blocks]
        return [block_name(key, group, self.num_groups) for key in keys]

    def block_names_to_resume(self, request: Request, num_blocks: int) -> tuple[bytes, ...]:
        """The names of the blocks, in all groups, that a request needs to continue after its first `num_blocks`
        blocks."""
        first = self._attended.first_blocks(num_blocks).tolist()
        names = [self.block_names(request, group, num_blocks)[at:] for group, at in enumerate(first)]
        return tuple([name for of_group in names for name in of_group])

    def num_common_blocks(self, rows: npt.NDArray[np.integer]) -> int:
        return 0 if self.anchor is None else self._tables.num_common_blocks(rows, self.anchor)

    def table(self, batch: Batch, row: int) -> Int64Array:
        """A copy of the blocks that a row holds in all its tables, place by place."""
        return self._tables.blocks_of(row)

    def blocks_with_places(self, row: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(blocks, places, groups): each block that a row holds, with its place and its group."""
        return self._tables.blocks_with_places(row)

    def broken_table_invariant(self, row: int, num_slots: int, num_computed: int) -> str | None:
        """For checks: describe the broken invariant of the block tables of a row with `num_computed` computed tokens;
        None: all invariants hold."""
        held = self._tables.ends.item(row) * self.block_size
        if num_slots > held or (self._windows is None and num_slots < held):
            return f"has blocks for {held} tokens and {num_slots} slots"
        for kind in self._tables.kinds:
            if kind.first.item(row) > kind.group.num_skipped(num_computed) // self.block_size:
                return f"has given back a block of {kind.group} that it reads"
        return None

    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        return self._tables.num_blocks(rows)

    def new_blocks(
        self, batch: Batch, rows: Int64Array, grown: npt.NDArray[np.integer], *, whole: bool
    ) -> NewBlocks | None:
        return self._reports.take_new_blocks(rows, grown, whole=whole)

    def num_blocks_shared(self, batch: Batch) -> Int64Array:
        if self.has_tables:
            return super().num_blocks_shared(batch)
        shared = [
            self._num_shared_blocks(request, row)
            for request, row in zip(batch.members.requests, batch.members.rows.tolist(), strict=True)
        ]
        return np.array(shared, dtype=np.int64)

    def _num_shared_blocks(self, request: Request, row: int) -> int:
        """Number of leading blocks of a running request that a lookup would still find if the request's row were
        released. The row may have given back some of these blocks, which other requests hold."""
        state, prefix, count = request._state, self.prefix, request._state.num_published_blocks
        if prefix is None or not request.use_prefix_cache or state.prefix_epoch != prefix.epoch:
            return 0
        is_prompt = count * self.block_size <= state.num_prompt_tokens
        found = prefix.look_up(Root.of(request), state.prompt_bytes if is_prompt else state.known_bytes(), count)
        own = self._tables.blocks_at_all_places(row, 0, count, prefix.no_block)
        references = np.append(self.pool.num_references, 0)
        is_held: BoolArray = references[found.blocks] > (found.blocks == own[:, : found.blocks.shape[1]])
        if found.has is not None:
            is_held &= found.has
        start = 0
        for run, first, length in found.spans:  # another block with the same content may be referenced
            for cell, others in run.duplicates.items():
                index, group = divmod(cell, self.num_groups)
                if first <= index < first + length:
                    at = start + index - first
                    is_held[group, at] |= any(references[block] > (block == own[group, at]) for block in others)
            start += length
        lasting = prefix.num_remaining_nodes(found, is_held, references > 0)
        return self._attended.num_reusable(is_held[:, :lasting])

    # ------------------------------------------------------------------ publishing and freeing

    def publish_prompt(self, batch: Batch, request: Request) -> None:
        """Publish the blocks of a request's prompt that are full once the steps scheduled so far have run. They are
        published immediately, so that the requests admitted next can share them, or in `publish_deferred` if the host
        cannot share blocks within a step."""
        if self._shares_within_step:
            self._publish_prompt(batch, request)
        else:
            self.unpublished.append(request)

    def publish_deferred(self, batch: Batch) -> None:
        """Publish the prompt blocks of `unpublished` requests, after all admissions of the step."""
        for request in self.unpublished:
            self._publish_prompt(batch, request)
        self.unpublished.clear()

    def num_findable_tokens(self, request: Request) -> int:
        """Number of tokens that a request has computed and published, and that a lookup still finds unless they were
        evicted meanwhile."""
        state = request._state
        if self.prefix is None or state.prefix_epoch != self.prefix.epoch:
            return 0
        if self._windows is not None:  # the request may have given back blocks that the next token attends to
            return self.look_up(request).num_tokens
        count: int = state.num_published_blocks * self.block_size
        return count

    def _publish_prompt(self, batch: Batch, request: Request) -> None:
        state = request._state
        row = state.row
        assert row is not None
        if self._windows is not None:
            self._windows.mark_public(row)
        computed = batch.num_computed_tokens.item(row)
        end = (computed if computed < state.num_prompt_tokens else state.num_prompt_tokens) // self.block_size
        if end <= state.num_published_blocks:
            return
        is_new = self._publish_row(request, row, end, state.prompt_bytes)
        if is_new and self.shared is not None:
            self.shared.append((request, state.num_published_blocks))

    def publish_loaded(self, request: Request, table: Int64Array) -> None:
        """Publish the loaded blocks of a request. `table`: [groups, blocks] the beginning of the request's block
        tables."""
        first = request._state.num_published_blocks
        self._publish_blocks(request, table[:, first:].copy(), request._state.known_bytes())

    def release_held_blocks(self, blocks: Int64Array) -> None:
        """Release blocks that were held without a row; `blocks` are in the order of their table."""
        if self.has_tables:
            self.pool.release(blocks)
        else:
            if self.retaining is not None and self.prefix is not None:
                of_anchor = [self.pool.is_cached[b] and self.prefix.group_of(b) == self.anchor for b in blocks.tolist()]
                self.retaining.order_marks(blocks[np.array(of_anchor, dtype=np.bool_)])
            self.pool.release_any(blocks[::-1])
        self._count_return()
        if self.returned is not None:
            self.returned.append(blocks)

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
        """Release the blocks of a request's row, after publishing the blocks that the first `num_valid_tokens` tokens
        fill. No step in flight computes any of the first `num_final_tokens` tokens. `is_finished`: the request has
        finished, so its blocks may be retained."""
        state = request._state
        row = state.row
        assert row is not None
        table = self._tables.blocks_of(row)
        if self.returned is not None:
            self.returned.append(table)
        if self.prefix is None and not self.has_connector:
            self.pool.release_unshared(table)
        else:
            full = num_valid_tokens // self.block_size
            if publish and full > state.num_published_blocks and self.prefix is not None:
                num_final = num_final_tokens // self.block_size
                self._num_released_at_once += self._publish_row(request, row, full, state.known_bytes(), num_final)
            if self.retaining is not None:
                self.retaining.expire(now)
                if is_finished:
                    self._retain_blocks(self.retaining, request, row, now)
            if self.has_tables:
                self.pool.release(table)
            else:
                self._release_groups(row, is_finished=is_finished)
        self._tables.ends[row] = 0
        if self._windows is not None:
            self._windows.lagging.discard(row)

    def _release_groups(self, row: int, *, is_finished: bool) -> None:
        """Release all blocks of a row; the row's last blocks are evicted first. A preempted request continues with its
        present window. After a finished request, later requests mostly reuse the window at the end of the finished
        request's prompt."""
        blocks, places, groups = self._tables.blocks_with_places(row)
        if self.retaining is not None and self.anchor is not None:
            self.retaining.order_marks(blocks[groups == self.anchor])
        if is_finished and self._windows is not None and self.caches:
            is_last = self._windows.is_evicted_last(row, places, groups)
            self.pool.release_any(blocks[~is_last][::-1], evict_first=True)
            blocks = blocks[is_last]
        self.pool.release_any(blocks[::-1])

    def _retain_blocks(self, pool: RetainingPool, request: Request, row: int, now: float) -> None:
        """Mark the blocks of a finished request that the eviction policy retains."""
        state = request._state
        if self.prefix is None or state.prefix_epoch != self.prefix.epoch or self.eviction is None:
            return
        num_cached = state.num_published_blocks
        if not num_cached:
            return
        count, until, label = self.eviction.retained(request, num_cached, now)
        tenant = request.tenant if self.eviction.per_tenant else None
        table, first = (
            self._tables.blocks_at_all_places(row, 0, num_cached, self.prefix.no_block),
            self._tables.first_places(row),
        )
        group = self.anchor or 0
        pool.set_label(table[group, first.item(group) :], label)
        if self.anchor is not None:
            count = pool.retain(table[self.anchor, :count], until, tenant)
        needed = np.maximum(self._attended.first_blocks(count), first)
        for group in range(self.num_groups):
            if group != self.anchor:
                pool.retain(table[group, needed.item(group) : count], until, tenant)

    def undo(self, journal: Journal) -> None:
        """Undo the publications of a failed step, newest first. The publications of later steps are undone already.

        A block that has left the node of its publication was evicted, or removed by a reset.
        """
        prefix = self.prefix
        if prefix is None:
            return
        entry: Publication
        for entry in reversed(journal):
            gone = []
            for block, run, cell in reversed(self._locate_published_blocks(entry)):
                if prefix.is_in_cell(block, run, cell):
                    prefix.remove_block(block)
                    gone.append(block)
            if not gone:
                continue
            self.pool.uncache(gone)
            state = entry.request._state
            if state.row is not None or state.holding is not None:  # the blocks are published again when recomputed
                state.num_published_blocks, state.prefix_node = entry.first, entry.before

    def _locate_published_blocks(self, publication: Publication) -> list[tuple[int, Run, int]]:
        """(block, run, cell) for each block of a publication, node after node. A cell of a run is one node in one group
        of layers."""
        found: list[tuple[int, Run, int]] = []
        at = 0
        for run, first, count in publication.spans:
            for index in range(first, first + count):
                found += [
                    (block, run, index * self.num_groups + group)
                    for group, block in enumerate(publication.blocks[:, at].tolist())
                    if block < self.pool.num_blocks
                ]
                at += 1
        return found

    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Remove the nodes that `publisher` published in the steps of `journals`, and every node after these nodes.

        `journals` are the journals of the steps in flight. Running requests that read removed blocks publish no further
        blocks: their next block would follow a removed node.
        """
        prefix = self.prefix
        if prefix is None:
            return
        entry: Publication
        for entry in [entry for journal in journals for entry in journal]:
            if entry.request is not publisher:
                continue
            for run, first, _ in entry.spans:
                if first < run.length:
                    self.pool.uncache(prefix.remove_subtree(RunNode(run, first)))
        for request in running:
            state = request._state
            if isinstance(state.prefix_node, RunNode) and not prefix.is_alive(state.prefix_node):
                state.prefix_epoch = NO_EPOCH

    def continue_reports(self, before: KVCache) -> None:
        super().continue_reports(before)
        if self.prefix is not None and before.events is not None:
            before.reset()
            self.events = self.prefix.listener = before.events

    def reset(self) -> None:
        """Remove every cached prefix. Running rows keep their blocks, and publish no further blocks."""
        if self.prefix is not None:
            self.prefix.clear()
            self.pool.uncache_all()

    def _publish_row(self, request: Request, row: int, end: int, token_bytes: bytes, num_final: int = 0) -> bool:
        """Publish the blocks of a request's row before place `end`. Returns whether any blocks were published."""
        first = request._state.num_published_blocks
        if self.prefix is None or end <= first:
            return False
        return self._publish_blocks(
            request, self._tables.blocks_at_all_places(row, first, end, self.prefix.no_block), token_bytes, num_final
        )

    def _publish_blocks(self, request: Request, blocks: Int64Array, token_bytes: bytes, num_final: int = 0) -> bool:
        """Publish `blocks` [groups, blocks] of a request, which follow its published blocks. No step in flight computes
        the first `num_final` blocks of the request. Returns whether any blocks were published."""
        state, prefix = request._state, self.prefix
        first, count = state.num_published_blocks, blocks.shape[1]
        if prefix is None or not count or not request.use_prefix_cache or state.prefix_epoch != prefix.epoch:
            return False
        before: Node = state.prefix_node
        start, given = first, blocks
        if self.anchor is None and not prefix.is_alive(before):  # all nodes that the request has published were removed
            start, before = 0, Root.of(request)
            given = np.concatenate([np.full((self.num_groups, first), prefix.no_block), blocks], axis=1)
        spans = prefix.publish(before, token_bytes, start, given, request)
        run, at, length = spans[-1]
        state.prefix_node = new_tuple(RunNode, (run, at + length - 1))
        state.num_published_blocks = first + count
        self.pool.set_cached(given[0] if self.has_tables else given[given != prefix.no_block])
        if self.saves is not None:
            keys = block_keys(request, self.block_size)[start : first + count]
            step = self._newest_step
            for group in range(self.num_groups):
                for index, (block, key) in enumerate(zip(given[group].tolist(), keys, strict=True), start=start):
                    if block != prefix.no_block:
                        name = block_name(key, group, self.num_groups)
                        self._key_of[block] = name, step if index >= num_final else FINAL
        if self.journal is not None:
            self.journal.append(new_tuple(Publication, (request, start, before, given, spans)))
        return True

    def allocate(self, count: int) -> Int64Array:
        """Allocate `count` blocks, and evict their cached content. Returns the block ids."""
        blocks, evicted = self.pool.allocate(count)
        if len(evicted) and self.prefix is not None:
            self.prefix.evict(evicted)
            self.num_evictions += len(evicted)
            if self.saves is not None:
                self._add_saves(self.saves, evicted)
        return blocks

    def _add_saves(self, saves: list[Save], evicted: Int64Array) -> None:
        """Add evicted blocks to the list `saves` that the next output reports, except blocks that a step in flight
        computes: the step may still fail."""
        wanted = self.wanted
        for block in evicted.tolist():
            key, step = self._key_of.pop(block)
            if wanted is not None and wanted.pop(key, 0) == 0:  # a content is saved only once
                continue
            if step < self._oldest_step:
                group = 0 if self.prefix is None else self.prefix.group_of(block)
                saves.append(Save(block, key, group))
                self.num_saves += 1

    def take_pending_saves(self) -> Sequence[Save]:
        """The blocks evicted since the last call that an output must report."""
        if not self.saves:
            return ()
        saves, self.saves = self.saves, []
        return tuple(saves)
