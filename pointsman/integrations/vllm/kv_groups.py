"""KV in several layouts: implements the core's `KVCache` with vLLM's own `KVCacheManager`.

A model may store its KV in groups of layers, all from one pool: full attention, attention within a window or a chunk,
states of Mamba or of convolutions, KV of encoder outputs (cross-attention), blocks of different sizes. vLLM's manager
knows for each kind the blocks that a number of tokens takes, the blocks that are no longer needed, and the part of a
prefix that can be found again. The manager is called when a request is looked up or admitted, and for the few rows that
run out of slots. In a step without such rows it is not called.

Generated tokens enter the prefix cache when their request releases its blocks, as everywhere in this scheduler, and not
as soon as a block is full: in vLLM's own scheduler, publishing each full block takes a large part of the manager's time
in a step. The exception are states that are cached for prefixes: a row holds only its two newest states, so each state
is published before it is released.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import vllm
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager, CrossAttentionManager

from pointsman.core.kv.cache import Journal, KVCache, Match
from pointsman.core.state.batch import Batch
from pointsman.core.state.request import Request
from pointsman.integrations.vllm.state_ends import StateEnds
from pointsman.integrations.vllm.support import is_before

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
    from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
NO_BLOCKS: Int64Array = np.zeros(0, dtype=np.int64)
NO_NEW: Int32Array = np.zeros(0, dtype=np.int32)


class GroupPool:
    """vLLM's block pool with the attributes that the core reads. The pool's first block is never allocated."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._pool = block_pool
        self.num_blocks: int = block_pool.num_gpu_blocks
        self.num_usable = self.num_blocks - 1

    @property
    def num_free(self) -> int:
        free: int = self._pool.get_num_free_blocks()
        return free

    @property
    def num_cached_free(self) -> int:
        return sum(block.ref_cnt == 0 and block.block_hash is not None for block in self._pool.blocks)

    @property
    def num_blank(self) -> int:
        return self.num_free - self.num_cached_free

    @property
    def num_references(self) -> Int64Array:
        return np.fromiter((block.ref_cnt for block in self._pool.blocks), np.int64, self.num_blocks)

    @property
    def usage(self) -> float:
        return float(1.0 - self.num_free / self.num_usable) if self.num_usable else 0.0

    def num_in_use(self, blocks: Int64Array) -> int:
        return sum(self._pool.blocks[block].ref_cnt > 0 for block in blocks.tolist())


class _Group:
    """One of vLLM's managers, which holds the KV of one group, with values that steps read often."""

    __slots__ = (
        "extra",
        "gives_back",
        "is_of_encoder",
        "is_ring",
        "lag",
        "manager",
        "size",
        "tables",
        "window_behind_prompt",
    )

    def __init__(self, manager: SingleTypeKVCacheManager, max_model_len: int) -> None:
        self.manager = manager
        self.tables: dict[str, list[KVCacheBlock]] = manager.req_to_blocks
        self.size = int(manager.block_size)
        self.extra = self.size * int(getattr(manager, "num_speculative_blocks", 0))
        """Number of tokens that fit the blocks reserved for the drafts of a row."""
        self.is_ring = isinstance(manager, CircularBufferManager)
        """Whether each request has one block, whatever its length."""
        self.is_of_encoder = isinstance(manager, CrossAttentionManager)
        """Whether each request has exactly the blocks of its encoder inputs, from its first step on."""
        self.window_behind_prompt: int | None = getattr(manager, "rswa_window", None)
        """Number of newest tokens whose KV is kept besides the KV of the prompt; None: the group has no such window."""
        skipped = manager.get_num_skipped_tokens(max_model_len)
        self.gives_back = skipped >= self.size or self.window_behind_prompt is not None
        """Whether the group releases blocks of a request while the request runs."""
        lags: set[int] = {
            n - manager.get_num_skipped_tokens(n) for n in range(max(0, max_model_len - self.size), max_model_len + 1)
        }
        self.lag = lags.pop() if len(lags) == 1 else None
        """Number of newest tokens whose KV is kept; None: the number varies with the length of the sequence."""

    def _num_unneeded(self, final: int) -> int:
        """Number of leading blocks that are no longer needed when the first `final` tokens are final."""
        if self.lag is not None:
            return max(0, final - self.lag) // self.size
        return int(self.manager.get_num_skipped_tokens(final)) // self.size

    def release_unneeded(self, name: str, final: int, num_prompt_tokens: int) -> None:
        """Release the blocks that a request no longer needs; `final`: number of its leading tokens that no step in
        flight reads."""
        if self.window_behind_prompt is not None:
            self.manager.remove_skipped_blocks(name, final, num_prompt_tokens)
            return
        count = self._num_unneeded(final)
        blocks = self.tables[name]
        if count and not blocks[min(count, len(blocks)) - 1].is_null:
            self.manager.remove_skipped_blocks(name, final, num_prompt_tokens)

    def next_release(self, final: int, limit: int) -> int:
        """The smallest number of final tokens, up to `limit`, at which one more block is released; `limit`: no block is
        released before."""
        if self.window_behind_prompt is not None:
            num_left = max(0, final - self.window_behind_prompt)
            return min(limit, (num_left // self.size + 1) * self.size + self.window_behind_prompt)
        now = self._num_unneeded(final)
        if self.lag is not None:
            return min(limit, (now + 1) * self.size + self.lag)
        low, high = final, limit
        while high - low > 1:  # the number never decreases
            middle = (low + high) // 2
            low, high = (middle, high) if self._num_unneeded(middle) == now else (low, middle)
        return high

    def lacks_a_block(self, name: str, num_computed: int, num_prompt_tokens: int) -> bool:
        """Whether a row has lost a block that it reads or writes."""
        blocks = self.tables[name]
        first, end = 0, int(self.manager.get_num_skipped_tokens(num_computed)) // self.size
        if self.window_behind_prompt is not None:
            first = -(-num_prompt_tokens // self.size)
            end = max(num_prompt_tokens, num_computed - self.window_behind_prompt) // self.size
        return any(block.is_null for block in [*blocks[:first], *blocks[max(first, end) :]])


class KVGroups(KVCache):
    """The KV of a model whose layers form several groups.

    Args:
        vllm_config: vLLM's `VllmConfig`.
        kv_cache_config: vLLM's `KVCacheConfig`.
        block_size: the least common multiple of the groups' block sizes.
        hash_block_size: number of tokens covered by a block hash.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int, hash_block_size: int
    ) -> None:
        events = vllm_config.kv_events_config
        self.caches = bool(vllm_config.cache_config.enable_prefix_caching)
        self.manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=vllm_config.model_config.max_model_len,
            scheduler_block_size=block_size,
            hash_block_size=hash_block_size,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            enable_caching=self.caches,
            enable_kv_cache_events=events is not None and events.enable_kv_cache_events,
        )
        self.block_size = block_size
        self.unpublished = []
        self.pool = GroupPool(self.manager.block_pool)
        self._coordinator = self.manager.coordinator
        self._managers = self._coordinator.single_type_managers
        self._groups = [_Group(each, vllm_config.model_config.max_model_len) for each in self._managers]
        self._shapes = [
            (place, group.tables, group.size, group.extra)
            for place, group in enumerate(self._groups)
            if not (group.is_ring or group.is_of_encoder)
        ]
        self._has_encoder = any(group.is_of_encoder for group in self._groups)
        self._releasing = [group for group in self._groups if group.gives_back]
        self._states: list[MambaManager] = [
            each for each in self._managers if getattr(each, "mamba_cache_mode", "none") == "align"
        ]
        """The managers of states that are cached for prefixes. Rows with such states are checked in each step of their
        prefill."""
        self.ends = self._make_ends(vllm_config, block_size, hash_block_size) if self._states else None
        """Computes the ends of prefill chunks; None: chunks may end anywhere."""
        self.cuts_chunks = self.ends is not None
        self._nothing: tuple[Sequence[KVCacheBlock], ...] = tuple(() for _ in self._managers)
        self._max_model_len: int = vllm_config.model_config.max_model_len
        self._row_of: dict[int, Request] = {}
        """Running requests, by row of the core's batch."""
        self._new: dict[str, list[list[int]]] = {}
        """By vLLM's request id: the new blocks of a continued request, by group, that no scheduler output has reported
        yet."""
        self._published: dict[str, int] = {}
        """By vLLM's request id: number of published tokens of a request that was released since the newest step
        began."""
        self._not_publishing: set[str] = set()
        """vLLM's ids of requests that no longer publish blocks."""
        self._num_publications = 0
        self._is_ahead = False
        self._admitted = 0  # tokens of the newest admitted request at the end of its first step
        self._num_spare = self._num_spare_blocks(vllm_config)
        self._num_usable_tokens: dict[int, int] = {}
        """Maximum length, in tokens, of a sequence whose KV fits the pool; by the sequence's number of encoder
        embeddings."""

    def _make_ends(self, vllm_config: VllmConfig, block_size: int, hash_block_size: int) -> StateEnds:
        scheduler = vllm_config.scheduler_config
        budget = scheduler.max_num_scheduled_tokens
        longest = scheduler.max_num_batched_tokens if budget is None else budget
        if scheduler.long_prefill_token_threshold > 0:
            longest = min(longest, scheduler.long_prefill_token_threshold)
        finds_parts = bool(self._coordinator.enable_partial_hash_hits)
        return StateEnds(
            self._states,
            block_size,
            hash_block_size,
            finds_parts=finds_parts,
            max_chunk=longest,
            is_before_0_32=is_before(vllm.__version__, "0.32"),
        )

    def _num_spare_blocks(self, vllm_config: VllmConfig) -> int:
        """Maximum number of blocks that a request holds or asks for beyond the blocks of its sequence: the states from
        which its steps in flight continue, and copies of partially shared blocks."""
        if self.ends is None:
            return 0
        spare = len(self._states) * int(vllm_config.max_concurrent_batches)
        if self.ends.finds_parts:
            reserves_whole = vllm_config.scheduler_config.scheduler_reserve_full_isl
            spare += len(self._managers) - (0 if reserves_whole else len(self._states))
        return spare

    def _max_sequence_tokens(self, num_embeddings: int) -> int:
        """Maximum length of a sequence, in tokens, if the pool also holds the KV of `num_embeddings` encoder
        embeddings."""

        def needed(num_tokens: int) -> int:
            own = self._num_blocks_needed(
                "", num_tokens, self._nothing, 0, is_whole=True, num_embeddings=num_embeddings
            )
            return self._num_spare + own

        longest = self._num_usable_tokens.get(num_embeddings)
        if longest is None:
            longest = bisect_right(range(1, self._max_model_len + 1), self.pool.num_usable, key=needed)
            self._num_usable_tokens[num_embeddings] = longest
        return longest

    def prefix_cache_limit(self) -> str:
        """A sentence about prompts that are too short to find a prefix in the cache; "": no prompt is."""
        if not self.caches or not self._managers:
            return ""
        unit = self._managers[0].cache_hit_alignment_tokens
        remedy = ""
        if self.ends is not None and not self.ends.finds_parts:
            remedy = f" (with --prefix-match-unit, a divisor of {unit}, also at the end of a prompt)"
        elif self.ends is not None:
            remedy = f", or, in prompts, at their end or at the end of a block of {self.ends.size}"
        return (
            f"prompts of fewer than {unit + 1} tokens find nothing in the prefix cache: a cached prefix "
            f"ends at a multiple of {unit} tokens{remedy}, and one token is always computed"
        )

    @property
    def num_usable_tokens(self) -> int:
        return self._max_sequence_tokens(0)

    def num_usable_tokens_of(self, request: Request) -> int:
        return self._max_sequence_tokens(self._num_embeddings(request))

    def _num_embeddings(self, request: Request) -> int:
        """Number of a request's encoder embeddings for which the cross-attention layers store KV."""
        if not self._has_encoder:
            return 0
        return sum(item.entry.num_embeddings for item in request._state.encoder_inputs)

    @property
    def num_publications(self) -> int:
        """Number of times that blocks were published: after each time a lookup may find more blocks."""
        return self._num_publications

    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        self.journal = journal
        self._published.clear()
        self._is_ahead = oldest < step_id
        self.manager.new_step_starts()

    # ------------------------------------------------------------------ admission

    def look_up(self, request: Request) -> Match:
        of_vllm = request.metadata
        if not self.caches or not request.reads_prefix_cache:
            return Match(NO_BLOCKS, None, 0)
        _append_missing_tokens(request)
        found, num_tokens, boundary = self.manager.get_computed_blocks(of_vllm)
        if request.row is None:
            of_vllm.shared_prefix_boundary = boundary
        ids = [block.block_id for group in found.blocks for block in group if not block.is_null]
        return Match(np.array(ids, dtype=np.int64), (found, boundary), num_tokens)

    def is_settled(self, match: Match) -> bool:
        if match.node is None:
            return True
        found = match.node[0].blocks
        last = [(each, found[each.kv_cache_group_id][-1:]) for each in self._states]
        return not any(block.block_hash in each.cached_blocks_this_step for each, blocks in last for block in blocks)

    def cut(self, request: Request, start: int, num_tokens: int, max_tokens: int) -> int:
        if self.ends is None:
            return num_tokens
        junction = request.metadata.shared_prefix_boundary
        return self.ends.limit_chunk(
            start, num_tokens, max_tokens, request.num_prompt_tokens, request.num_tokens, junction
        )

    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        return self._blocks_to_start(request, match, num_tokens, is_whole=False)

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        return self._blocks_to_start(request, match, request.num_tokens, is_whole=True)

    def _blocks_to_start(self, request: Request, match: Match, num_tokens: int, *, is_whole: bool) -> int:
        blocks = self._nothing if match.node is None else match.node[0].blocks
        end = _prefill_end(request)
        name = request.metadata.request_id
        count = self._num_blocks_needed(
            name,
            num_tokens,
            blocks,
            match.num_tokens,
            is_whole=is_whole,
            prefill_end=end,
            num_embeddings=self._num_embeddings(request),
        )
        if request.row is None:
            for each in self._states:  # the managers of states record which request this count is for
                each.free(name)
        return count + self.pool.num_in_use(match.blocks)

    def _num_blocks_needed(
        self,
        name: str,
        num_tokens: int,
        found: tuple[Sequence[KVCacheBlock], ...],
        num_computed: int,
        *,
        is_whole: bool,
        prefill_end: int = 0,
        num_embeddings: int = 0,
    ) -> int:
        """The number of free blocks that a request needs for its first `num_tokens` tokens and its encoder embeddings.
        Its first `num_computed` tokens are already computed or cached. `is_whole`: in groups that release blocks, count
        the maximum number of blocks that the request holds at a time."""
        count: int = self._coordinator.get_num_blocks_to_allocate(
            request_id=name,
            num_tokens=min(num_tokens, self._max_model_len),
            new_computed_blocks=found,
            num_encoder_tokens=num_embeddings,
            total_computed_tokens=num_computed,
            num_local_computed_tokens=num_computed,
            num_tokens_main_model=min(num_tokens, self._max_model_len),
            apply_admission_cap=is_whole,
            prefill_end=prefill_end,
        )
        return count

    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        of_vllm = request.metadata
        of_vllm.num_computed_tokens = of_vllm.num_in_flight_tokens = 0
        found = None
        if match.node is not None:
            found, of_vllm.shared_prefix_boundary = match.node
        given = self.manager.allocate_slots(
            of_vllm,
            num_tokens - match.num_tokens,
            num_new_computed_tokens=match.num_tokens,
            new_computed_blocks=found,
            num_encoder_tokens=self._num_embeddings(request),
            delay_cache_blocks=True,
            has_scheduled_reqs=False,
        )
        assert given is not None, "the blocks of an admission were counted before"
        self._admitted = num_tokens
        return NO_BLOCKS

    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        """Number of tokens that an admitted row may have before its blocks must be checked. This is less than the
        capacity of the blocks if one of them leaves an attention window earlier: the check then releases that
        block."""
        if self.ends is not None:
            return self._admitted
        return self._num_tokens_before_check(request.metadata.request_id, 0, self._admitted)

    def _num_tokens_before_check(self, name: str, final: int, end: int) -> int:
        """Number of tokens that a row may have before its blocks must be checked. The row has blocks for `end` tokens,
        and its first `final` tokens are final."""
        slots = min(
            [len(tables[name]) * size - extra for _, tables, size, extra in self._shapes], default=self._max_model_len
        )
        for group in self._releasing:
            slots = min(slots, group.next_release(final, slots))
        return max(slots, end)

    # ------------------------------------------------------------------ running rows

    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        return self._blocks_to_grow(batch, rows, batch.num_computed_tokens[rows] + num_tokens, is_whole=False)

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        return self._blocks_to_grow(batch, rows, batch.num_tokens[rows], is_whole=True)

    def _blocks_to_grow(self, batch: Batch, rows: Int64Array, ends: Int64Array, *, is_whole: bool) -> Int64Array:
        needed = np.zeros(len(rows), dtype=np.int64)
        for index in (ends > batch.num_slots[rows]).nonzero()[0].tolist():
            row, end = rows.item(index), ends.item(index)
            name = self._row_of[row].metadata.request_id
            if is_whole:  # the row's tokens of this step may be scheduled, and read blocks that would be released
                needed[index] = self._num_blocks_for_row(batch, row, end, is_whole=True)
                continue
            if self._states:
                needed[index] = self._num_blocks_with_states(batch, row, end)
                continue
            final = self._num_final_tokens(batch, row) if self._releasing else 0
            count = 0
            for group in self._releasing:
                group.release_unneeded(name, final, self._row_of[row].num_prompt_tokens)
            for _, tables, size, extra in self._shapes:  # not a method: runs for thousands of rows a second
                missing = -(-(end + extra) // size) - len(tables[name])
                if missing > 0:
                    count += missing
            if count:
                needed[index] = count
            else:
                batch.num_slots[row] = self._num_tokens_before_check(name, final, end)
        return needed

    def _num_blocks_for_row(self, batch: Batch, row: int, end: int, *, is_whole: bool) -> int:
        request, start = self._row_of[row], batch.num_computed_tokens.item(row)
        name, prefill_end = request.metadata.request_id, _prefill_end(request)
        return self._num_blocks_needed(name, end, self._nothing, start, is_whole=is_whole, prefill_end=prefill_end)

    def _num_blocks_with_states(self, batch: Batch, row: int, end: int) -> int:
        """Release the blocks that a row with cached states no longer needs, and return the number of free blocks that
        the row needs for its first `end` tokens."""
        request, final = self._row_of[row], self._num_final_tokens(batch, row)
        name, start = request.metadata.request_id, batch.num_computed_tokens.item(row)
        self._publish_filled(request, final)
        self.manager.remove_skipped_blocks(name, final, request.num_prompt_tokens)
        prefill_end = _prefill_end(request) if self._coordinator.retention_interval == 0 else 0
        count: int = sum(
            # States have no admission cap; with the flag, their manager does not record where the chunk keeps a state.
            each.get_num_blocks_to_allocate(name, end, (), start, start, end, each in self._states, prefill_end)
            for each in self._managers
        )
        if not count:
            self._num_blocks_for_row(batch, row, end, is_whole=False)
            self._set_slots(batch, row, final, end)
        return count

    def _publish_filled(self, request: Request, num_tokens: int) -> None:
        """Publish the blocks that the first `num_tokens` tokens of a row with cached states fill. Partial blocks are
        not published: they hold only the state of the newest token, which a step in flight may still change."""
        states = self._states[0]
        num_filled = num_tokens // states.block_size
        if num_filled > states.num_cached_block.get(request.metadata.request_id, 0):
            _append_missing_tokens(request)
            self._publish(request, num_filled * states.block_size)

    def _set_slots(self, batch: Batch, row: int, final: int, end: int) -> None:
        """Set `num_slots` of a row that has blocks for `end` tokens and is about to compute the last of these
        tokens."""
        request = self._row_of[row]
        if self._states and batch.num_computed_tokens.item(row) < _prefill_end(request):
            batch.num_slots[row] = end
        else:
            batch.num_slots[row] = self._num_tokens_before_check(request.metadata.request_id, final, end)

    def _num_final_tokens(self, batch: Batch, row: int) -> int:
        """Number of final tokens of a row before the row's tokens of the current step. A token is final if no step in
        flight computes it or may have to recompute it."""
        computed = min(batch.num_computed_tokens.item(row), batch.num_tokens.item(row))
        return min(computed, self.num_final_tokens(self._row_of[row])) if self._is_ahead else computed

    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array | None:
        ends = batch.num_computed_tokens[rows] + num_tokens
        if int(self._blocks_to_grow(batch, rows, ends, is_whole=False).sum()) > self.pool.num_free:
            return None
        return self.grow(batch, rows, NO_BLOCKS, ends)

    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            name = self._row_of[row].metadata.request_id
            end = min(end, self._max_model_len)
            if self._states:
                self._num_blocks_for_row(
                    batch, row, end, is_whole=False
                )  # records where a state is kept within the chunk
            for place, tables, size, extra in self._shapes:
                if self._states or -(-(end + extra) // size) > len(tables[name]):
                    given = self._managers[place].allocate_new_blocks(name, end, end)
                    if given:
                        new = self._new.setdefault(name, [[] for _ in self._groups])
                        new[place] += [block.block_id for block in given]
            self._set_slots(batch, row, self._num_final_tokens(batch, row) if self._releasing else 0, end)
        return NO_NEW

    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        raise NotImplementedError("vLLM's manager has no block tables for several steps in one call; call `schedule`")

    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        return np.array([len(self.table(batch, row)) for row in rows.tolist()], dtype=np.int64)

    def table(self, batch: Batch, row: int) -> Int64Array:
        name = self._row_of[row].metadata.request_id
        held = [block.block_id for each in self._managers for block in each.req_to_blocks[name] if not block.is_null]
        return np.array(held, dtype=np.int64)

    # ------------------------------------------------------------------ publishing and freeing

    def publish_prompt(self, batch: Batch, request: Request) -> None:
        row = request.row
        assert row is not None
        self._row_of[row] = request
        most = request.num_tokens if self._states else request.num_prompt_tokens
        self._publish(request, min(batch.num_computed_tokens.item(row), most))

    def _publish(self, request: Request, num_tokens: int) -> None:
        of_vllm = request.metadata
        name = of_vllm.request_id
        if not self.caches or name in self._not_publishing:
            return
        before = [each.num_cached_block.get(name, 0) for each in self._managers]
        self.manager.cache_blocks(of_vllm, min(num_tokens, of_vllm.num_tokens))
        new: list[int] = []
        for each, start in zip(self._managers, before, strict=True):
            end = each.num_cached_block.get(name, 0)
            new += [block.block_id for block in each.req_to_blocks[name][start:end] if block.block_hash is not None]
        if new:
            self._num_publications += 1
            if self.journal is not None:
                self.journal.append((request, name, before, new))

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
        of_vllm = request.metadata
        assert request.row is not None
        if of_vllm.prefill_stats is not None:
            self._published[of_vllm.request_id] = self.manager.estimate_cached_tokens(of_vllm)
        if publish and self.caches:
            if self._states:
                self._publish_filled(request, num_valid_tokens)
            else:
                _append_missing_tokens(request)
                self._publish(request, num_valid_tokens)
        self.manager.free(of_vllm)
        self._new.pop(of_vllm.request_id, None)
        self._not_publishing.discard(of_vllm.request_id)
        self._row_of.pop(request.row, None)

    def num_published_tokens(self, request: Request) -> int:
        """Number of tokens of a request that the prefix cache can find; the request runs, or was released since the
        newest step began."""
        name = request.metadata.request_id
        if request.row is None:
            return self._published.get(name, 0)
        count: int = self.manager.estimate_cached_tokens(request.metadata)
        return count

    def undo(self, journal: Journal) -> None:
        for request, name, before, new in reversed(journal):
            self.manager.evict_blocks(set(new))
            if request.row is not None and request.metadata.request_id == name:
                for each, count in zip(self._managers, before, strict=True):
                    each.num_cached_block[name] = count  # recomputed blocks are published again

    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Evict all cached blocks if the request `publisher` has published a block: any cached block may depend on that
        block."""
        if any(entry[0] is publisher for journal in journals for entry in journal):
            self.reset()

    def reset(self) -> None:
        if not self._row_of:
            self.take_block_copies()  # drops the copies of a step that was not executed
            self.manager.reset_prefix_cache()
        else:  # while requests run, vLLM's own method refuses
            pool = self.manager.block_pool
            self.manager.evict_blocks({block.block_id for block in pool.blocks if block.block_hash is not None})
            self._not_publishing |= {request.metadata.request_id for request in self._row_of.values()}

    def broken(self, batch: Batch) -> str | None:
        for row, request in zip(batch.members.rows.tolist(), batch.members.requests, strict=True):
            if self._row_of.get(row) is not request:
                return f"{request} is not known in its row"
            name = request.metadata.request_id
            for place, group in enumerate(self._groups):
                num_blocks = len(group.tables[name])
                if group.is_of_encoder:
                    is_wrong = num_blocks != -(-self._num_embeddings(request) // group.size)
                elif group.is_ring:
                    is_wrong = num_blocks != 1
                else:
                    is_wrong = batch.num_slots.item(row) > num_blocks * group.size
                if is_wrong:
                    return f"{request} has {num_blocks} blocks in group {place}, and other slots"
                if group.lacks_a_block(name, batch.num_computed_tokens.item(row), request.num_prompt_tokens):
                    return f"{request} lacks a block of group {place} that it reads"
        held = {request.metadata.request_id for request in self._row_of.values()}
        for each in self._managers:
            strays = {name for name, blocks in each.req_to_blocks.items() if blocks} - held
            if strays:
                return f"group {each.kv_cache_group_id} holds blocks for {sorted(strays)}, which do not run"
        return None

    # ------------------------------------------------------------------ for the workers

    def blocks_of(self, request: Request) -> tuple[list[int], ...]:
        """The blocks of an admitted request, by group, as workers get them."""
        name = request.metadata.request_id
        self._new.pop(name, None)
        found: tuple[list[int], ...] = self.manager.get_block_ids(name)
        return found

    def take_new_blocks(self, names: Sequence[str]) -> list[tuple[list[int], ...] | None]:
        """The new blocks of each continued request, by group; None: the request has no new blocks."""
        if not self._new:
            return [None] * len(names)
        taken = [self._new.pop(name, None) for name in names]
        return [None if new is None else tuple(new) for new in taken]

    def take_blocks_to_zero(self) -> list[int] | None:
        """New blocks that workers must fill with zeros; None: there are none."""
        ids: list[int] = self.manager.take_new_block_ids()
        return ids if ids and self.manager.kv_cache_config.needs_kv_cache_zeroing else None

    def take_block_copies(self) -> list[KVCacheBlockCopy] | None:
        """Blocks that workers must copy before a step, because requests share a part of each; None: there are none. A
        later step may reuse the source blocks, because workers execute steps in order."""
        self.manager.take_boundary_state_offloads()  # for connectors
        copies, retained = self.manager.take_kv_cache_block_copies()
        self.manager.block_pool.free_blocks(retained)
        return copies or None


def _prefill_end(request: Request) -> int:
    """The position at which vLLM's prefill of a request ends; for a resumed request, this is the position of the newest
    token."""
    return max(request.num_prompt_tokens, request.num_tokens - 1)


def _append_missing_tokens(request: Request) -> None:
    """Append to vLLM's request the tokens that only the core's request has: vLLM's block hashes need them."""
    of_vllm = request.metadata
    more = request.num_tokens - of_vllm.num_tokens
    if more > 0 and not of_vllm.use_structured_output:  # else the grammar appends them
        of_vllm.append_output_token_ids(request.all_token_ids[-more:].tolist())
