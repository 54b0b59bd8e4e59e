"""`KVCache`: the interface through which a step looks up, allocates and frees KV blocks.

`KVCacheManager` (`manager.py`) implements it for any number of groups of layers with full attention, windows or chunks,
with blocks of one size. For every other layout a host implements it over a manager of its own.

A row carries `num_slots`: the number of tokens that its blocks can hold, in every layout. A step calls the cache only
for rows that run out of slots. Numbers of blocks are always free blocks of the pool. Only the implementation knows how
many blocks a number of tokens takes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Eviction
from pointsman.core.state.output import Save
from pointsman.core.state.request import Request

if TYPE_CHECKING:
    from pointsman.core.kv.events import KVEvents
    from pointsman.core.kv.prefix_tree import PrefixCache
    from pointsman.core.kv.retained import RetainingPool

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Journal = list[Any]
"""Publications to the prefix cache while a step was the newest one, in order. The implementation defines the
entries."""


class Match(NamedTuple):
    """The cached prefix of a request."""

    blocks: Int64Array
    """Blocks of all groups that the request acquires."""
    node: Any
    """Its end in the prefix cache, for the implementation."""
    num_tokens: int
    table: Int64Array | None = None
    """[groups, blocks] if the implementation has groups: the cached block at each place, maybe beyond the prefix. A
    place without a cached block has the number of blocks in the pool."""
    num_known: int = 0
    """Leading blocks that other requests are known to have computed; maybe more than can be reused."""
    num_external: int = 0
    """Tokens after `num_tokens` that a connector loads."""


class NewBlocks(NamedTuple):
    """New blocks of an output whose rows have several tables, sorted by row; see `SchedulerOutput.block_groups`."""

    ids: npt.NDArray[np.integer]
    rows: npt.NDArray[np.integer]
    groups: npt.NDArray[np.integer]
    places: npt.NDArray[np.integer]


class Pool(Protocol):
    """The part of a block pool that every step reads."""

    num_blocks: int
    num_usable: int
    """Blocks that requests can hold."""

    @property
    def num_free(self) -> int:
        """Blocks that are not referenced, cached ones included."""

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can still be found."""

    @property
    def num_blank(self) -> int:
        """Free blocks without cached content."""

    @property
    def num_references(self) -> Int64Array:
        """[blocks] number of tables that contain each block. It may take time to make."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced."""

    def num_in_use(self, blocks: Int64Array) -> int:
        """Number of these blocks that are referenced."""


class KVCache(ABC):
    """The KV blocks of one scheduler. An attribute that is None, False or 0 here is an optional feature."""

    block_size: int
    """Tokens in a block; with several layouts, in the layout that the scheduler addresses."""
    pool: Pool
    prefix: PrefixCache | None = None
    """The prefix tree, if the implementation has one."""
    caches: bool = False
    """Whether blocks stay cached after use."""
    num_groups: int = 1
    """Number of block tables of a row, one for each group of layers."""
    anchor: int | None = None
    """The index of the first group of full attention whose tables are in the core; None: there is none."""
    has_tables: bool = False
    """Whether a row has one table in the core, which only grows. Outputs then list its blocks in order, without groups
    and places."""
    grows_for_steps: bool = False
    """Whether `grow_for_steps` may be called."""
    retaining: RetainingPool | None = None
    eviction: Eviction | None = None
    events: KVEvents | None = None
    """Events of content that enters and leaves the prefix cache; None: disabled in the configuration."""
    journal: Journal | None = None
    """The log of publications; None: no step is in flight, so published blocks are computed."""
    saves: list[Save] | None = None
    wanted: Counter[bytes] | None = None
    returned: list[Int64Array] | None = None
    """Blocks that requests released since the newest output; None: they are not tracked."""
    shared: list[tuple[Request, int]] | None = None
    has_connector: bool = False
    gives_back: bool = False
    """Whether a row may hold blocks that it no longer reads, until it needs a block or `give_back` is called."""
    num_evictions: int = 0
    num_returns: int = 0
    """Changes whenever blocks are released other than by the release of a row."""
    num_saves: int = 0
    num_sound_tokens: Callable[[Request], int]
    """Number of tokens of a running request whose KV no step in flight may change."""
    num_tokens_in_flight: Callable[[int], Int64Array]
    """For a number of rows, the tokens of each row that steps in flight compute."""
    unpublished: list[Request]
    """Requests whose prompt blocks `publish_deferred` publishes."""
    cuts_chunks: bool = False
    """Whether `cut` limits the chunks of prefills, and `is_settled` may be False."""

    @property
    @abstractmethod
    def num_usable_tokens(self) -> int:
        """The longest sequence that the pool can hold."""

    def num_usable_tokens_of(self, request: Request) -> int:
        """The longest sequence of this request that the pool can hold, beside its encoder inputs."""
        return self.num_usable_tokens

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """As `View.num_slots_for`."""
        return num_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Maximum number of further blocks that a running request needs to generate `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    @abstractmethod
    def num_publications(self) -> int:
        """Changes whenever a lookup may find more than before."""

    @property
    def num_held_publications(self) -> int:
        """Changes whenever a lookup may find more referenced blocks than before."""
        return self.num_publications

    @property
    def has_duplicates(self) -> bool:
        """Whether a lookup may find more once a block is evicted."""
        return False

    @property
    def reports_evictions(self) -> bool:
        """Whether an eviction may have to be reported."""
        return False

    @abstractmethod
    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        """Begin to schedule step `step_id`; `oldest` is the first step that is not over. `journal`: see `log_to`."""

    def log_to(self, journal: Journal | None) -> None:
        """Log further publications, whose blocks the newest step in flight computes. None: no step is in flight."""
        self.journal = journal

    # ------------------------------------------------------------------ admission

    @abstractmethod
    def look_up(self, request: Request) -> Match:
        """The cached prefix of the request's known tokens; at least one token is left to compute."""

    def is_settled(self, match: Match) -> bool:
        """Whether a request that is admitted in this step may read the matched blocks. Blocks may be published as soon
        as the step that computes them is scheduled, and not every layout can be read in the same step."""
        return True

    def cut(self, request: Request, start: int, want: int, most: int) -> int:
        """Number of the `want` tokens from `start` on that the request may compute in this step, so that layer states
        can be cached where its chunk ends. 0: it waits for a step with more tokens, up to `most`."""
        return want

    def with_external(self, match: Match, num_tokens: int) -> Match:
        """The match of a request for which a connector loads `num_tokens` tokens after the cached ones."""
        return match

    @abstractmethod
    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        """Number of free blocks that the request needs for its first `num_tokens` tokens, as if the blocks of `match`
        were free."""

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        """Maximum number of blocks that the request holds at a time until all its known tokens are computed. It equals
        `num_blocks_to_start` for these tokens, unless blocks are given back meanwhile."""
        return self.num_blocks_to_start(request, match, request._state.num_tokens)

    @abstractmethod
    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        """Acquire the matched blocks, and allocate the others for the first `num_tokens` tokens. Returns the request's
        block table, empty without `has_tables`."""

    @abstractmethod
    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        """Number of tokens that `blocks` can hold, which `admit` has just returned."""

    def place(self, batch: Batch, row: int, blocks: Int64Array) -> None:  # noqa: B027
        """Give a row the blocks of the request that was admitted last."""

    # ------------------------------------------------------------------ running rows

    @abstractmethod
    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] number of free blocks that each row needs to advance by its element of `num_tokens`."""

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] free blocks that each row still needs until all its known tokens are computed."""
        return self.num_blocks_to_grow(batch, rows, batch.num_tokens[rows] - batch.num_computed_tokens[rows])

    def num_owed_of(self, batch: Batch, row: int) -> int:
        """The element of `num_blocks_owed` of one row."""
        return int(self.num_blocks_owed(batch, batch.count_up[row : row + 1])[0])

    def num_slots_with(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] number of tokens that each row can hold once it has the blocks to advance by its element of
        `num_tokens`."""
        return batch.num_slots[rows] + self.num_blocks_to_grow(batch, rows, num_tokens) * self.block_size

    @abstractmethod
    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array | None:
        """Give each row blocks for `num_tokens` further tokens; each row lacks slots for at most one block of tokens.
        See `grow`. None: the pool has too few blocks, and nothing has changed."""

    @abstractmethod
    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Give each row its element of `counts` new blocks, at least 1, so that it can hold `ends` tokens. Returns the
        blocks in row order; none without `has_tables`."""

    @abstractmethod
    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Give each row the blocks to decode one token in each of `num_steps` steps: see `KVCacheManager`."""

    @abstractmethod
    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] blocks that each row holds, shared ones included."""

    @abstractmethod
    def table(self, batch: Batch, row: int) -> Int64Array:
        """The blocks that a row holds."""

    def group_table(self, batch: Batch, row: int) -> Int32Array:
        """[groups, blocks] a copy of the tables of a row; 0 where a block was given back."""
        return self.table(batch, row).astype(np.int32)[None]

    def group_tables(self, batch: Batch) -> Int32Array:
        """[rows, groups, blocks] the tables of all rows, read-only. Entries of blocks that a row does not hold are
        meaningless. Only if the tables are in the core."""
        raise NotImplementedError(f"{type(self).__name__} keeps its tables elsewhere")

    def first_blocks(self, batch: Batch, row: int, count: int) -> Int64Array:
        """The first `count` blocks of a row; with several groups [groups, count], -1 where it has none."""
        return self.table(batch, row)[:count]

    def num_common_blocks(self, rows: npt.NDArray[np.integer]) -> int:
        """Number of leading blocks that the tables of these rows share in the first group of full attention; 0 without
        one."""
        return 0

    def tables(self, batch: Batch, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The concatenated block tables of some rows, and for each block the index of its row in `rows`."""
        tables = [self.table(batch, row) for row in rows.tolist()]
        counts = np.array([len(table) for table in tables], dtype=np.int64)
        return np.concatenate([np.zeros(0, dtype=np.int64), *tables]), batch.count_up[: len(rows)].repeat(counts)

    def num_blocks_shared(self, batch: Batch) -> Int64Array:
        """[running] number of leading blocks of each request that a lookup would find without it, because other
        requests hold them."""
        rows = batch.members.rows
        blocks, owners = self.tables(batch, rows)
        places = np.arange(len(blocks)) - owners.searchsorted(owners)  # index of each block in its table
        is_own = self.pool.num_references[blocks] == 1
        shared = self.num_blocks_of(batch, rows)
        np.minimum.at(shared, owners[is_own], places[is_own])  # blocks before its first unshared one stay
        return shared

    def give_back(self, batch: Batch) -> None:  # noqa: B027
        """If it `gives_back`: release the blocks that none of the rows' next tokens reads. Called before running
        requests advance, if requests wait."""

    def new_blocks(
        self, batch: Batch, rows: Int64Array, grown: npt.NDArray[np.integer], *, whole: bool
    ) -> NewBlocks | None:
        """Without `has_tables`: the blocks that an output with these rows reports. These are blocks that the host does
        not know, or all (`whole`). None: there are none, or the host knows them anyway. `grown`: indices of the rows
        for which `grow_by_one` was called in this step."""
        return None

    # ------------------------------------------------------------------ publishing and freeing

    @abstractmethod
    def publish_prompt(self, batch: Batch, request: Request) -> None:
        """Publish the prompt blocks that the steps scheduled so far complete."""

    def publish_deferred(self, batch: Batch) -> None:
        """Publish the blocks of `unpublished` requests after all admissions of the step. Called only if there are
        any."""
        raise NotImplementedError

    @abstractmethod
    def num_findable_tokens(self, request: Request) -> int:
        """Computed tokens of a request that a lookup would still find."""

    @abstractmethod
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
        flight computes any of its first `num_final_tokens` tokens. Blocks of a request that `is_finished` may be
        retained."""

    @abstractmethod
    def undo(self, journal: Journal) -> None:
        """Undo the publications of a failed step; those of later steps are undone already."""

    @abstractmethod
    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Remove the blocks that `publisher` published since the oldest of these steps, and all blocks behind them."""

    def continue_reports(self, before: KVCache) -> None:
        """Take over the eviction count, and the events if there are any, of the cache that this one replaces."""
        self.num_evictions = before.num_evictions

    @abstractmethod
    def reset(self) -> None:
        """Remove every cached prefix; running rows keep their blocks but publish no more."""

    def broken(self, batch: Batch) -> str | None:
        """The broken invariant of its blocks between two calls, in words, see `observe/invariants.py`; None: none is
        known."""
        return None

    def follow(
        self, num_sound_tokens: Callable[[Request], int], num_tokens_in_flight: Callable[[int], Int64Array]
    ) -> None:
        """Set the functions that report the state of the steps in flight."""
        self.num_sound_tokens, self.num_tokens_in_flight = num_sound_tokens, num_tokens_in_flight

    def drop_unpublished(self) -> None:
        """Discard the deferred publications: the step that is being scheduled is void."""
        self.unpublished = []

    def connect(self, *, saves: bool, saves_all: bool) -> None:
        """Prepare for a connector that loads and saves blocks. `saves`: report evicted blocks; `saves_all`: also those
        that no preempted request needs."""
        self.has_connector = True
        self.saves = [] if saves else None
        self.wanted = None if saves_all else Counter()

    def track_shared(self) -> None:
        """Track requests whose first blocks a lookup may find referenced."""
        self.shared = []

    def track_returned(self, tracks: bool) -> None:
        """Set whether blocks that requests release are kept for `take_returned`."""
        self.returned = (self.returned or []) if tracks else None

    def take_returned(self) -> Sequence[Int64Array]:
        """Blocks that requests released since the last call, one array per release; none if they are not tracked."""
        returned = self.returned
        if not returned:
            return ()
        self.returned = []
        return returned

    def take_saves(self) -> Sequence[Save]:
        """Evictions since the last call, for an output."""
        return ()
