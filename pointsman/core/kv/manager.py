"""Which KV blocks does a request reuse, get and release? Look up, allocate, publish, free.

`KVCacheManager` alone owns the block pool and the prefix tree. Prompt blocks are published when they are scheduled, so
that requests of the same step can share them; generated blocks when their request loses its row, so that decoding
never touches the tree. Publications while a step is in flight are logged in the journal of the newest such step, and
undone if that step fails.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import NO_BLOCKS, BlockPool
from pointsman.core.kv.cache import Journal, KVCache, Match
from pointsman.core.kv.content import block_keys
from pointsman.core.kv.content_marks import ContentMarks
from pointsman.core.kv.events import KVEvents
from pointsman.core.kv.prefix_tree import Place, PrefixCache, Root, Span
from pointsman.core.kv.retained import RetainingPool
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Eviction
from pointsman.core.state.numbers import INT32, INT64
from pointsman.core.state.output import Save
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.tokens import NO_TOKENS

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]
# The entries of a journal: (publisher, its blocks, their nodes).
Publication = tuple[Request, Int64Array, list[Span]]

FINAL = -1  # of a block that no step in flight computes: a step before all others
FEW_ROWS = 3  # for which a loop takes less time than NumPy
NO_EPOCH = -1  # of a request whose prefix left the tree while it ran


class KVCacheManager(KVCache):
    """KV blocks whose tables are columns, each for `block_size` tokens in all layers. `eviction` chooses which cached
    blocks are retained; None: none is."""

    pool: BlockPool
    has_tables = True

    def __init__(self, config: SchedulerConfig, eviction: Eviction | None = None) -> None:
        self.block_size = config.block_size
        self._size = np.array(config.block_size)  # an array, see `state/numbers.py`
        self.retaining: RetainingPool | None = None
        """The pool, if it retains blocks."""
        self.pool = BlockPool(config.num_blocks, config.num_reserved_blocks)
        if eviction is not None and eviction.share > 0 and config.enable_prefix_caching:
            self.pool = self.retaining = RetainingPool(config.num_blocks, config.num_reserved_blocks, eviction.share)
        self.eviction = eviction
        self.caches = config.enable_prefix_caching
        self.prefix = PrefixCache(config.num_blocks, config.block_size) if config.enable_prefix_caching else None
        if config.enable_kv_cache_events and self.prefix is not None:
            self.events = self.prefix.listener = KVEvents(config.block_size)
        self._marks = ContentMarks()
        self.saves: list[Save] | None = None
        """Evictions that no output has reported yet; None: they are not reported."""
        self.wanted: Counter[bytes] | None = None
        """Of which content evictions are reported: the keys, each with the number of preempted requests that want it;
        None: of all."""
        self._shares_within_step = config.share_within_step
        self.unpublished = []
        self.shared: list[tuple[Request, int]] | None = None
        """Requests of which others may find the first blocks referenced since they did so, with the number of these;
        None: they are not tracked."""
        self._num_left = 0  # publications of blocks whose row released them at once
        self._newest_step = 0
        self._oldest_step = 0
        # Of each published block, if `saves` is used: its key, and the newest step that computes it.
        self._key_of: dict[int, tuple[bytes, int]] = {}

    @property
    def num_usable_tokens(self) -> int:
        return self.pool.num_usable * self.block_size

    @property
    def num_publications(self) -> int:
        """Changes whenever a prefix cache lookup may find more than before."""
        return self.prefix.num_publications if self.prefix is not None else 0

    @property
    def num_held_publications(self) -> int:
        """Changes whenever a lookup may find more referenced blocks than before; where blocks are sent,
        `num_publications` does."""
        return self.prefix.num_publications - self._num_left if self.prefix is not None else 0

    @property
    def has_duplicates(self) -> bool:
        """Whether several blocks have the same cached content: once one of them is evicted, a lookup may find another,
        and `num_publications` changes."""
        return self.prefix is not None and self.prefix.num_duplicates > 0

    @property
    def reports_evictions(self) -> bool:
        """Whether an eviction may have to be reported."""
        return self.saves is not None and (self.wanted is None or len(self.wanted) > 0)

    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        """Step `step_id` is being scheduled; `oldest` is the first one that is not over: what was published before it
        is final."""
        self.journal = journal
        self._newest_step, self._oldest_step = step_id, oldest

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------ admission

    def look_up(self, request: Request) -> Match:
        """Cached blocks of the request's known tokens; at least one token is left to compute, so there is a logit.

        A request that holds loaded blocks continues after them, without a lookup.
        """
        state, size = request._state, self.block_size
        if state.holding is not None:
            return Match(state.holding.blocks, state.prefix_node, len(state.holding.blocks) * size)
        if self.prefix is None:
            return _NO_MATCH
        root = Root.of(request)
        if state.encoder_inputs and request.use_prefix_cache and self._marks.key(request):
            self.reset()  # earlier marks are invalid
        if not request.reads_prefix_cache:  # it may publish, under its contents
            return Match(NO_BLOCKS, root, 0)
        max_blocks = (state.num_tokens - 1) // size
        if max_blocks == 0:
            return Match(NO_BLOCKS, root, 0)
        token_bytes = state.known_bytes() if max_blocks * size > state.num_prompt_tokens else state.prompt_bytes
        blocks, node = self.prefix.look_up(root, token_bytes, max_blocks)
        return new_tuple(Match, (blocks, node, len(blocks) * size))

    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        return -(-request._state.num_tokens // self.block_size)

    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        state, cached = request._state, match.blocks
        num_new_blocks = -(-num_tokens // self.block_size) - len(cached)
        if self.retaining is not None:
            self.retaining.expire(now)
            if len(cached) and self.eviction is not None and state.holding is None:
                self.eviction.started(request, self.retaining.labels[cached])
        if state.holding is not None:
            new = self.take(num_new_blocks)
            return np.concatenate([state.holding.blocks, new])
        if len(cached):
            self.pool.acquire(cached)
            if self.shared is not None:
                self.shared.append((request, len(cached)))
        new = self.take(num_new_blocks)
        state.num_published_blocks = len(cached)
        state.prefix_node = match.node
        state.prefix_epoch = self.prefix.epoch if self.prefix is not None else 0
        return np.concatenate([cached, new]) if len(cached) else new

    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        return len(blocks) * self.block_size

    # ------------------------------------------------------------------ running rows

    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        short = batch.num_computed_tokens[rows] + num_tokens - batch.num_slots[rows]
        needed: Int64Array = np.maximum(-(-short // self.block_size), 0)
        return needed

    def num_owed_of(self, batch: Batch, row: int) -> int:
        return max(-(-(batch.num_tokens.item(row) - batch.num_slots.item(row)) // self.block_size), 0)

    def can_grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> bool:
        return len(rows) <= self.pool.num_free

    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array:
        """Append one new block to the table of each row. Returns them, in row order."""
        blocks = self.take(len(rows)).astype(INT32)  # a scatter that converts takes longer
        if len(rows) <= FEW_ROWS:
            table, num_slots, size = batch.flat_table, batch.num_slots, self.block_size
            for row, block in zip(rows.tolist(), blocks.tolist(), strict=True):
                held = num_slots.item(row)
                table[row * batch.max_blocks + held // size] = block
                num_slots[row] = held + size
            return blocks
        slots = batch.num_slots[rows]
        batch.flat_table[batch.table_starts[rows] + slots // self._size] = blocks
        slots += self._size
        batch.num_slots[rows] = slots
        return blocks

    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Append `counts[i]` (at least 1) new blocks to the table of `rows[i]`. Returns them all, in row order."""
        total = int(counts.dot(batch.ones[: len(counts)]))  # in half the time of a sum
        if total == len(rows):
            return self.grow_by_one(batch, rows, 1)
        blocks = self.take(total).astype(INT32)
        slots = batch.num_slots[rows]
        if len(rows) == 1:  # a prefill's next chunk, most often
            row, first = rows.item(0), slots.item(0) // self.block_size
            batch.block_table[row, first : first + total] = blocks
        else:
            # Where the first block of each row goes, less the blocks of the rows before it.
            places = batch.table_starts[rows] + slots // self._size + counts - counts.cumsum()
            batch.flat_table[places.repeat(counts) + np.arange(total)] = blocks
        batch.num_slots[rows] = slots + counts * self._size
        return blocks

    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Append the blocks that each row needs to decode one token in each of `num_steps` steps, allocated in the
        order of these steps, and of the rows within one.

        Returns the blocks in that order, and for each the index of its row in `rows` and its step, from 0.
        """
        slots = batch.num_slots[rows]
        room = slots - num_computed
        lacking = (room < num_steps).nonzero()[0]
        if not len(lacking):
            return NO_TOKENS, NO_BLOCKS, NO_BLOCKS
        if len(lacking) == 1:
            return self._grow_one_row(batch, rows, lacking, num_steps - room.item(lacking.item(0)))
        steps = room[lacking]
        short = num_steps - steps
        counts, order, places, steps = self._places_in_order(batch, rows[lacking], slots[lacking], steps, short)
        blocks = self.take(len(order)).astype(INT32)
        batch.flat_table[places] = blocks
        return blocks, lacking.repeat(counts)[order], steps

    def _places_in_order(
        self, batch: Batch, rows: Int64Array, slots: Int64Array, steps: Int64Array, short: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
        """Give rows slots for the blocks that they lack.

        Args:
            rows: [m] which lack blocks.
            slots: [m] tokens that their blocks hold.
            steps: [m] in which each lacks its first block.
            short: [m] for how many steps it lacks blocks from then on.

        Returns:
            How many blocks each row lacks; and of these blocks, row after row, the order by step, and in that order
            the place in the flat block table, and the step.
        """
        counts = (short + (self.block_size - 1)) // self._size
        total = int(counts.dot(batch.ones[: len(counts)]))  # in half the time of a sum
        places = batch.table_starts[rows] + slots // self._size
        batch.num_slots[rows] = slots + counts * self._size
        if total > len(rows):
            within = np.arange(total) - (counts.cumsum() - counts).repeat(counts)
            places = places.repeat(counts) + within
            steps = steps.repeat(counts) + within * self._size
        order = steps.argsort(kind="stable")
        return counts, order, places[order], steps[order]

    def _grow_one_row(
        self, batch: Batch, rows: Int64Array, lacking: Int64Array, num_short: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """As `grow_for_steps`, where only one row lacks blocks, for `num_short` of the steps."""
        row, size = rows.item(lacking.item(0)), self.block_size
        slots, count = batch.num_slots.item(row), -(-num_short // size)
        blocks = self.take(count).astype(INT32)
        batch.block_table[row, slots // size : slots // size + count] = blocks
        batch.num_slots[row] = slots + count * size
        room = slots - batch.num_computed_tokens.item(row)
        return blocks, lacking.repeat(count), np.arange(count) * size + room

    def group_tables(self, batch: Batch) -> Int32Array:
        return batch.table_view[:, None]

    def table(self, batch: Batch, row: int) -> Int64Array:
        """A copy of a row's block table."""
        return batch.block_table[row, : batch.num_slots.item(row) // self.block_size].astype(INT64)

    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        return batch.num_slots[rows] // self.block_size

    # ------------------------------------------------------------------ publishing and freeing

    def publish_prompt(self, batch: Batch, request: Request) -> None:
        """Publish the prompt blocks that the steps scheduled so far complete: at once, so that the requests admitted
        next can share them, or in `publish_deferred` if the host cannot share within a step."""
        if self._shares_within_step:
            self._publish_prompt(batch, request)
        else:
            self.unpublished.append(request)

    def publish_deferred(self, batch: Batch) -> None:
        """All admissions of the step are made."""
        for request in self.unpublished:
            self._publish_prompt(batch, request)
        self.unpublished.clear()

    def num_findable_tokens(self, request: Request) -> int:
        """Tokens of a request that it has computed and published, and that are still in the prefix tree unless evicted
        since."""
        state = request._state
        if self.prefix is None or state.prefix_epoch != self.prefix.epoch:
            return 0
        count: int = state.num_published_blocks * self.block_size
        return count

    def _publish_prompt(self, batch: Batch, request: Request) -> None:
        state = request._state
        row = state.row
        assert row is not None
        computed = batch.num_computed_tokens.item(row)
        end = (computed if computed < state.num_prompt_tokens else state.num_prompt_tokens) // self.block_size
        if end <= state.num_published_blocks:
            return
        is_new = self._publish(request, batch.block_table[row], end, state.prompt_bytes)
        if is_new and self.shared is not None:
            self.shared.append((request, state.num_published_blocks))

    def publish_loaded(self, request: Request, blocks: Int64Array) -> None:
        """Publish the loaded blocks of a request, the first ones of its table."""
        self._publish(request, blocks, len(blocks), request._state.known_bytes())

    def take_back(self, blocks: Int64Array) -> None:
        """Release blocks that were held without a row, in table order."""
        self.pool.release(blocks)
        self.num_returns += 1
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
        """Release a row's blocks, after publishing those that its first `num_valid_tokens` tokens fill. No step in
        flight computes any of its first `num_final_tokens`. Those of a request that `is_finished` may be retained."""
        state = request._state
        row = state.row
        assert row is not None
        table = self.table(batch, row)
        if self.prefix is None and not self.has_connector:
            self.pool.release_unshared(table)
            if self.returned is not None:
                self.returned.append(table)
            return
        full = num_valid_tokens // self.block_size
        if publish and full > state.num_published_blocks and self.prefix is not None:
            num_final = num_final_tokens // self.block_size
            self._num_left += self._publish(request, table, full, state.known_bytes(), num_final)
        if self.retaining is not None:
            self.retaining.expire(now)
            if is_finished:
                self._retain(self.retaining, request, table, now)
        self.pool.release(table)
        if self.returned is not None:
            self.returned.append(table)

    def _retain(self, pool: RetainingPool, request: Request, table: Int64Array, now: float) -> None:
        """Mark the blocks of a finished request that the policy retains."""
        num_cached = self.num_findable_tokens(request) // self.block_size
        if not num_cached or self.eviction is None:
            return
        count, until, label = self.eviction.retained(request, num_cached, now)
        pool.label(table[:num_cached], label)
        pool.retain(table[:count], until, request.tenant if self.eviction.per_tenant else None)

    def undo(self, journal: Journal) -> None:
        """Undo the publications of a void step, newest first; those of later steps are undone already.

        A block that is no longer the node it was published as has been evicted, or removed by a reset.
        """
        prefix = self.prefix
        if prefix is None:
            return
        for request, blocks, spans in reversed(journal):
            for block, (run, index) in reversed(_nodes(blocks, spans)):
                if not prefix.holds(block, run, index):
                    continue
                prefix.forget(block)
                self.pool.uncache([block])
                state = request._state
                if state.row is not None or state.holding is not None:
                    # They are published again when they are recomputed.
                    state.num_published_blocks -= 1
                    state.prefix_node = Place(run, index - 1) if index else run.parent

    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Remove what `publisher` published since the oldest of these steps, and every node after it.

        `journals` are those of the steps in flight. Running requests that read removed blocks publish no more: their
        next block would follow a node that is gone.
        """
        prefix = self.prefix
        if prefix is None:
            return
        for request, blocks, spans in (entry for journal in journals for entry in journal):
            if request is not publisher:
                continue
            for block, (run, index) in _nodes(blocks, spans):
                if prefix.holds(block, run, index):
                    self.pool.uncache(prefix.prune(block))
        for request in running:
            state = request._state
            if isinstance(state.prefix_node, Place) and not state.prefix_node.is_alive:
                state.prefix_epoch = NO_EPOCH

    def continue_reports(self, before: KVCache) -> None:
        super().continue_reports(before)
        if self.prefix is not None and before.events is not None:
            before.reset()
            self.events = self.prefix.listener = before.events

    def reset(self) -> None:
        """Remove every cached prefix; running rows keep their blocks but publish no more."""
        if self.prefix is not None:
            self.prefix.clear()
            self.pool.uncache_all()

    def _publish(self, request: Request, table: IntArray, end: int, token_bytes: bytes, num_final: int = 0) -> bool:
        """Publish blocks of a table up to `end`, of which no step in flight computes the first `num_final`. Returns
        whether there were any."""
        state, prefix = request._state, self.prefix
        first = state.num_published_blocks
        if prefix is None or end <= first or not request.use_prefix_cache or state.prefix_epoch != prefix.epoch:
            return False
        blocks = table[first:end].astype(INT64, copy=False)
        spans = prefix.publish(state.prefix_node, token_bytes, first, blocks, request)
        run, start, length = spans[-1]
        state.prefix_node = new_tuple(Place, (run, start + length - 1))
        state.num_published_blocks = end
        self.pool.set_cached(blocks)
        if self.saves is not None:
            keys = block_keys(request, self.block_size)[first:end]
            step = self._newest_step
            for index, (block, key) in enumerate(zip(blocks.tolist(), keys, strict=True), start=first):
                self._key_of[block] = key, step if index >= num_final else FINAL
        if self.journal is not None:
            self.journal.append((request, blocks, spans))
        return True

    def take(self, count: int) -> Int64Array:
        """Allocate blocks; what was cached in them is forgotten."""
        blocks, evicted = self.pool.take(count)
        if len(evicted) and self.prefix is not None:
            self.prefix.evict(evicted)
            self.num_evictions += len(evicted)
            if self.saves is not None:
                self._note_saves(self.saves, evicted)
        return blocks

    def _note_saves(self, saves: list[Save], evicted: Int64Array) -> None:
        """Report evicted blocks to the connector; not those of a step in flight, which may yet fail to compute them."""
        wanted = self.wanted
        for block in evicted.tolist():
            key, step = self._key_of.pop(block)
            if wanted is not None and wanted.pop(key, 0) == 0:  # once it has left the pool no other can be saved
                continue
            if step < self._oldest_step:
                saves.append(Save(block, key))
                self.num_saves += 1

    def take_saves(self) -> Sequence[Save]:
        """Evictions since the last call, for an output."""
        if not self.saves:
            return ()
        saves, self.saves = self.saves, []
        return tuple(saves)


_NO_MATCH = Match(NO_BLOCKS, Root(), 0)
"""Where nothing is cached, so that it is not read what is."""


def _nodes(blocks: Int64Array, spans: list[Span]) -> list[tuple[int, Place]]:
    """The blocks of a journal entry, each with its node."""
    nodes = (Place(run, first + step) for run, first, count in spans for step in range(count))
    return list(zip(blocks.tolist(), nodes, strict=True))
