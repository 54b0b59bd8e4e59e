"""`KVCache`: the interface through which a step looks up, allocates and frees KV blocks.

`KVCacheManager` (`manager.py`) implements it for any number of groups of layers with full attention, windows or chunks,
with blocks of one size. For every other layout a host implements this interface over a manager of its own.

A row has `num_slots`: the number of tokens that its blocks can hold, in every layout. A step calls the cache only for
rows that run out of slots. Every number of blocks is in blocks of the pool. Only the implementation knows how many
blocks a number of tokens takes.
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
"""The log of one step: the publications to the prefix cache that were made while this step was the newest, in order.
The implementation defines the entries."""


class Match(NamedTuple):
    """The cached prefix of a request."""

    blocks: Int64Array
    """The cached blocks, in all groups, that the request acquires."""
    node: Any
    """The node at which the cached prefix ends; its type is private to the implementation."""
    num_tokens: int
    table: Int64Array | None = None
    """[groups, blocks] the cached block at each place, possibly beyond the prefix; None: the implementation has no
    groups of layers. The entry of a place without a cached block is the number of blocks in the pool."""
    num_known: int = 0
    """Number of the request's leading blocks that other requests are known to have computed; possibly more than the
    request can reuse."""
    num_external: int = 0
    """Number of tokens after the first `num_tokens` that a connector loads."""


class NewBlocks(NamedTuple):
    """The blocks that an output reports if its rows have several block tables: parallel arrays, sorted by row. The
    fields of `SchedulerOutput` that begin with `block_` describe them."""

    ids: npt.NDArray[np.integer]
    rows: npt.NDArray[np.integer]
    groups: npt.NDArray[np.integer]
    places: npt.NDArray[np.integer]


class Pool(Protocol):
    """The part of a block pool that every step reads."""

    num_blocks: int
    num_usable: int
    """Number of blocks that requests can hold."""

    @property
    def num_free(self) -> int:
        """Number of blocks that are not referenced, cached blocks included."""

    @property
    def num_cached_free(self) -> int:
        """Number of free blocks whose content a lookup can still find."""

    @property
    def num_blank(self) -> int:
        """Number of free blocks without cached content."""

    @property
    def num_references(self) -> Int64Array:
        """[blocks] number of block tables that contain each block. The array may be computed on every read."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0 to 1."""

    def num_in_use(self, blocks: Int64Array) -> int:
        """Number of blocks in `blocks` that are referenced."""


class KVCache(ABC):
    """The KV blocks of one scheduler. An attribute that is None, False or 0 in this class belongs to an optional
    feature."""

    block_size: int
    """Number of tokens in a block; if the KV has several layouts, in the layout whose blocks the scheduler
    addresses."""
    pool: Pool
    prefix: PrefixCache | None = None
    """The prefix tree, if the implementation has one."""
    caches: bool = False
    """Whether blocks stay cached after use."""
    num_groups: int = 1
    """Number of block tables of a row, one for each group of layers."""
    anchor: int | None = None
    """Index of the first group of full attention whose block tables are in the core; None: there is no such group."""
    has_tables: bool = False
    """Whether a row has one block table in the core, which only grows. Outputs then list the row's blocks in order,
    without groups and places."""
    grows_for_steps: bool = False
    """Whether `grow_for_steps` may be called."""
    retaining: RetainingPool | None = None
    eviction: Eviction | None = None
    events: KVEvents | None = None
    """Log of content that enters and leaves the prefix cache; None: disabled in the configuration."""
    journal: Journal | None = None
    """The journal of the newest step in flight; None: no step is in flight, so all published blocks are computed."""
    saves: list[Save] | None = None
    wanted: Counter[bytes] | None = None
    returned: list[Int64Array] | None = None
    """Blocks that requests released since the newest output, one array for each release; None: not tracked."""
    shared: list[tuple[Request, int]] | None = None
    has_connector: bool = False
    gives_back: bool = False
    """Whether a row may hold blocks that it no longer reads, until the row needs a block or `give_back` is called."""
    num_evictions: int = 0
    num_returns: int = 0
    """Counter that changes whenever blocks are released other than by the release of a row."""
    num_saves: int = 0
    num_final_tokens: Callable[[Request], int]
    """Function of a running request: the number of its leading tokens whose KV no step in flight may change."""
    num_tokens_in_flight: Callable[[int], Int64Array]
    """Function of the number R of rows: [R] the number of each row's tokens that steps in flight compute."""
    unpublished: list[Request]
    """Requests whose prompt blocks `publish_deferred` publishes."""
    cuts_chunks: bool = False
    """Whether `cut` limits the chunks of prefills, and `is_settled` may return False."""

    @property
    @abstractmethod
    def num_usable_tokens(self) -> int:
        """Number of tokens of the longest sequence that the pool can hold."""

    def num_usable_tokens_of(self, request: Request) -> int:
        """Number of tokens of the longest sequence that the pool can hold for this request, beside its encoder
        inputs."""
        return self.num_usable_tokens

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Number of token slots that requests of `num_tokens` tokens hold, summed over all groups of layers; with one
        group this is `num_tokens`."""
        return num_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """Maximum number of further blocks that a running request needs to generate `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    @property
    @abstractmethod
    def num_publications(self) -> int:
        """Counter that changes whenever a lookup may find more blocks than before."""

    @property
    def num_held_publications(self) -> int:
        """Counter that changes whenever a lookup may find more referenced blocks than before."""
        return self.num_publications

    @property
    def has_duplicates(self) -> bool:
        """Whether a lookup may find more blocks once a block is evicted."""
        return False

    @property
    def reports_evictions(self) -> bool:
        """Whether an eviction may have to be reported in an output (`saves`)."""
        return False

    @abstractmethod
    def open_step(self, step_id: int, journal: Journal | None, oldest: int) -> None:
        """Begin to schedule step `step_id`. `oldest`: the oldest step whose result is not applied yet. `journal`: the
        journal of the newest step in flight; None: no step is in flight."""

    def log_to(self, journal: Journal | None) -> None:
        """Log later publications in `journal`, the journal of the newest step in flight, which computes the published
        blocks. None: no step is in flight."""
        self.journal = journal

    # ------------------------------------------------------------------ admission

    @abstractmethod
    def look_up(self, request: Request) -> Match:
        """The longest cached prefix of the request's known tokens. It never includes the last token: the model must
        compute that token to sample the next one."""

    def is_settled(self, match: Match) -> bool:
        """Whether a request that is admitted in this step may read the matched blocks. Blocks may be published as soon
        as the step that computes them is scheduled, and some layouts cannot be read in the same step."""
        return True

    def cut(self, request: Request, start: int, num_tokens: int, max_tokens: int) -> int:
        """Shorten a chunk so that it ends where layer states can be cached. Returns the number of tokens from `start`
        on, at most `num_tokens`, that the request may compute in this step. 0: the request waits for a step that can
        compute more of its tokens, at most `max_tokens`."""
        return num_tokens

    def with_external(self, match: Match, num_tokens: int) -> Match:
        """The match of a request for which a connector loads `num_tokens` tokens after the cached tokens."""
        return match

    @abstractmethod
    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        """Number of free blocks that the request needs for its first `num_tokens` tokens. The blocks of `match` are
        counted, too, as if they were free."""

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        """Maximum number of blocks that the request holds at a time until all its known tokens are computed. Equal to
        `num_blocks_to_start` for these tokens, unless the request gives back blocks meanwhile."""
        return self.num_blocks_to_start(request, match, request._state.num_tokens)

    @abstractmethod
    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        """Acquire the matched blocks, and allocate the further blocks for the first `num_tokens` tokens. Returns the
        request's block table, empty without `has_tables`."""

    @abstractmethod
    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        """Number of tokens that the blocks of the newly admitted request can hold. `blocks`: the result of `admit`."""

    def place(self, batch: Batch, row: int, blocks: Int64Array) -> None:  # noqa: B027
        """Assign to a row the blocks of the request that was admitted last. `blocks`: the result of `admit`."""

    # ------------------------------------------------------------------ running rows

    @abstractmethod
    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] number of free blocks that each row needs to compute `num_tokens` [rows] further tokens."""

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] number of free blocks that each row still needs until all its known tokens are computed."""
        return self.num_blocks_to_grow(batch, rows, batch.num_tokens[rows] - batch.num_computed_tokens[rows])

    def num_owed_of(self, batch: Batch, row: int) -> int:
        """Number of free blocks that the row `row` still needs until all its known tokens are computed."""
        return int(self.num_blocks_owed(batch, batch.count_up[row : row + 1])[0])

    def num_slots_after_growth(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] number of tokens that each row can hold once it has the blocks to compute `num_tokens` [rows] further
        tokens."""
        return batch.num_slots[rows] + self.num_blocks_to_grow(batch, rows, num_tokens) * self.block_size

    @abstractmethod
    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array | None:
        """Allocate blocks for `num_tokens` further tokens of each row, if each row lacks at most one block per table.
        Returns the new blocks in row order, empty without `has_tables`. None: the pool has too few blocks, and nothing
        has changed."""

    @abstractmethod
    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Allocate `counts[i]` new blocks, at least 1, for `rows[i]`, so that the row can hold `ends[i]` tokens.
        Returns the new blocks in row order, empty without `has_tables`."""

    @abstractmethod
    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """Allocate the blocks that each row needs to decode one token in each of `num_steps` steps. Returns the blocks
        in the order of allocation, and for each block the index of its row in `rows` and its step, from 0."""

    @abstractmethod
    def num_blocks_of(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] number of blocks that each row holds, shared blocks included."""

    @abstractmethod
    def table(self, batch: Batch, row: int) -> Int64Array:
        """The ids of the blocks that a row holds."""

    def group_table(self, batch: Batch, row: int) -> Int32Array:
        """[groups, blocks] a copy of the tables of a row; 0 where a block was given back."""
        return self.table(batch, row).astype(np.int32)[None]

    def group_tables(self, batch: Batch) -> Int32Array:
        """[rows, groups, blocks] the tables of all rows, read-only. Entries at places without a block of the row are
        meaningless. Only if the tables are in the core."""
        raise NotImplementedError(
            f"{type(self).__name__} has no group_tables(): its block tables are outside the core; call group_table()"
        )

    def first_blocks(self, batch: Batch, row: int, count: int) -> Int64Array:
        """The first `count` blocks of a row; with several groups [groups, count], -1 at places where the row has no
        block."""
        return self.table(batch, row)[:count]

    def num_common_blocks(self, rows: npt.NDArray[np.integer]) -> int:
        """Number of leading blocks that the tables of these rows share in the first group of full attention; 0 if there
        is no such group."""
        return 0

    def tables(self, batch: Batch, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The concatenated block tables of `rows`, and for each block the index of its row in `rows`."""
        tables = [self.table(batch, row) for row in rows.tolist()]
        counts = np.array([len(table) for table in tables], dtype=np.int64)
        return np.concatenate([np.zeros(0, dtype=np.int64), *tables]), batch.count_up[: len(rows)].repeat(counts)

    def num_blocks_shared(self, batch: Batch) -> Int64Array:
        """[running] number of leading blocks of each request that a lookup would still find if it were preempted,
        because other requests hold the blocks."""
        rows = batch.members.rows
        blocks, owners = self.tables(batch, rows)
        places = np.arange(len(blocks)) - owners.searchsorted(owners)  # index of each block in its table
        is_own = self.pool.num_references[blocks] == 1
        shared = self.num_blocks_of(batch, rows)
        np.minimum.at(shared, owners[is_own], places[is_own])  # the blocks before a row's first unshared block stay
        return shared

    def give_back(self, batch: Batch) -> None:  # noqa: B027
        """If `gives_back`: for each running row, release the blocks that none of its later tokens reads. If requests
        wait, a step calls this method before it schedules running requests."""

    def new_blocks(
        self, batch: Batch, rows: Int64Array, grown: npt.NDArray[np.integer], *, whole: bool
    ) -> NewBlocks | None:
        """Without `has_tables`: the blocks that an output with these rows reports. These are the blocks that the host
        does not know, or all blocks (`whole`). None: the host knows all blocks. `grown`: indices of the rows for which
        `grow_by_one` was called in this step."""
        return None

    # ------------------------------------------------------------------ publishing and freeing

    @abstractmethod
    def publish_prompt(self, batch: Batch, request: Request) -> None:
        """Publish the blocks of a request's prompt that are full once the steps scheduled so far have run."""

    def publish_deferred(self, batch: Batch) -> None:
        """Publish the blocks of `unpublished` requests after all admissions of the step. Called only if there are such
        requests."""
        raise NotImplementedError

    @abstractmethod
    def num_findable_tokens(self, request: Request) -> int:
        """Number of computed tokens of a request that a lookup would still find in the prefix cache."""

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
        """Release the blocks of a request's row, after publishing the blocks that the first `num_valid_tokens` tokens
        fill. No step in flight computes any of the first `num_final_tokens` tokens. `is_finished`: the request has
        finished, so its blocks may be retained."""

    @abstractmethod
    def undo(self, journal: Journal) -> None:
        """Undo the publications of a failed step. The publications of later steps are undone already."""

    @abstractmethod
    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Remove the blocks that `publisher` published in the steps of `journals`, and all blocks that follow them in
        the prefix cache."""

    def continue_reports(self, before: KVCache) -> None:
        """Continue the eviction count of `before`, the cache that this one replaces, and its KV events if they are
        enabled."""
        self.num_evictions = before.num_evictions

    @abstractmethod
    def reset(self) -> None:
        """Remove every cached prefix. Running rows keep their blocks, and publish no further blocks."""

    def broken(self, batch: Batch) -> str | None:
        """Describe a broken invariant of the blocks, checked between two calls (`observe/invariants.py`); None: no
        broken invariant was found."""
        return None

    def set_token_counters(
        self, num_final_tokens: Callable[[Request], int], num_tokens_in_flight: Callable[[int], Int64Array]
    ) -> None:
        """Set the functions that count the tokens that no step in flight may change, and the tokens in flight."""
        self.num_final_tokens, self.num_tokens_in_flight = num_final_tokens, num_tokens_in_flight

    def drop_unpublished(self) -> None:
        """Discard the deferred publications, because the step that is being scheduled is void."""
        self.unpublished = []

    def connect(self, *, saves: bool, saves_all: bool) -> None:
        """Prepare for a connector that loads and saves blocks. `saves`: whether outputs report evicted blocks.
        `saves_all`: whether they also report blocks that no preempted request needs."""
        self.has_connector = True
        self.saves = [] if saves else None
        self.wanted = None if saves_all else Counter()

    def track_shared(self) -> None:
        """Start to log in `shared` the requests whose leading blocks a lookup may find referenced."""
        self.shared = []

    def track_returned(self, tracks: bool) -> None:
        """Set whether blocks that requests release are kept for `take_returned`."""
        self.returned = (self.returned or []) if tracks else None

    def take_returned(self) -> Sequence[Int64Array]:
        """Blocks that requests released since the last call, one array per release; empty if releases are not
        tracked."""
        returned = self.returned
        if not returned:
            return ()
        self.returned = []
        return returned

    def take_pending_saves(self) -> Sequence[Save]:
        """The blocks evicted since the last call that an output must report."""
        return ()
