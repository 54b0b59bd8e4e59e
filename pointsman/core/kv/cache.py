"""The protocol of a KV cache: what the parts of a step ask of the object that owns the KV blocks.

Two implementations: `KVCacheManager` (`manager.py`), for any number of groups of layers with full attention, windows or
chunks, whose blocks are of one size; and that of a host over a manager of its own, for every other layout.

A row carries `num_slots`: the tokens that its blocks can hold, in every layout. So a step in which no row runs out of
slots asks nothing, and otherwise it asks about the rows that do. Whatever is said in blocks is about the pool: how many
free ones something takes. How many that are for a number of tokens only the implementation knows.
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
"""What entered the prefix cache while a step was the newest one, in order; its entries are the implementation's own."""


class Match(NamedTuple):
    """The cached prefix of a request."""

    blocks: Int64Array
    """Blocks that a request acquires with it, of all groups."""
    node: Any
    """Where it is, for the implementation."""
    num_tokens: int
    table: Int64Array | None = None
    """[groups, blocks] where the implementation has groups: what is cached at each place, maybe beyond the prefix; the
    number of blocks in the pool where it is nothing."""
    num_known: int = 0
    """Blocks at the beginning that others have computed too, as far as is known; maybe more than can be reused."""
    num_external: int = 0
    """Tokens after these that are to be loaded."""


class NewBlocks(NamedTuple):
    """Blocks in several tables for each row of an output, by row; see `SchedulerOutput.block_groups`."""

    ids: npt.NDArray[np.integer]
    rows: npt.NDArray[np.integer]
    groups: npt.NDArray[np.integer]
    places: npt.NDArray[np.integer]


class Pool(Protocol):
    """The blocks of a KV cache, as far as all parts of a step know them."""

    num_blocks: int
    num_usable: int
    """Blocks that requests can hold."""

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""

    @property
    def num_cached_free(self) -> int:
        """Of these, blocks whose content can still be found."""

    @property
    def num_blank(self) -> int:
        """And the others."""

    @property
    def num_references(self) -> Int64Array:
        """[blocks] how many tables name each block; it may take time to make."""

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are held."""

    def num_in_use(self, blocks: Int64Array) -> int:
        """How many of these blocks somebody holds."""


class KVCache(ABC):
    """The KV blocks of one scheduler. What is None or 0 here is a feature that an implementation may have."""

    block_size: int
    """Tokens in a block; of several layouts, in the one that is addressed by the scheduler."""
    pool: Pool
    prefix: PrefixCache | None = None
    """The prefix tree, of an implementation that has one."""
    caches: bool = False
    """Whether blocks stay cached after use."""
    num_groups: int = 1
    """Block tables of a row, each for a group of layers."""
    anchor: int | None = None
    """The index of the first group of full attention whose tables are in the core; None: there is none."""
    has_tables: bool = False
    """Whether a row has one table in the core, which only grows: then outputs list its blocks in order, without groups
    and places."""
    grows_for_steps: bool = False
    """Whether `grow_for_steps` may be called."""
    retaining: RetainingPool | None = None
    eviction: Eviction | None = None
    events: KVEvents | None = None
    """What enters and leaves the prefix cache, if enabled in the configuration."""
    journal: Journal | None = None
    """Where publications are logged; None: no step is in flight, so what is published is computed."""
    saves: list[Save] | None = None
    wanted: Counter[bytes] | None = None
    returned: list[Int64Array] | None = None
    """Blocks that requests released since the newest output; None: they are not tracked."""
    shared: list[tuple[Request, int]] | None = None
    has_connector: bool = False
    gives_back: bool = False
    """Whether a row may hold blocks that it no longer reads, until it is asked or `give_back` is called."""
    num_evictions: int = 0
    num_returns: int = 0
    """Changes whenever blocks that no row held are released."""
    num_saves: int = 0
    num_sound_tokens: Callable[[Request], int]
    """Of a running request, tokens whose KV no step in flight may yet change."""
    num_tokens_in_flight: Callable[[int], Int64Array]
    """Of that number of rows, the tokens of each that steps in flight compute."""
    unpublished: list[Request]
    """Requests whose prompt blocks `publish_deferred` has to publish."""
    cuts_chunks: bool = False
    """Whether chunks of prefills end where `cut` says, and what is found may not be settled yet."""

    @property
    @abstractmethod
    def num_usable_tokens(self) -> int:
        """The longest sequence that the pool can hold."""

    def num_usable_tokens_of(self, request: Request) -> int:
        """The longest sequence of this request that the pool can hold, beside what its encoder inputs take."""
        return self.num_usable_tokens

    def num_slots_for(self, num_tokens: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """As `View.num_slots_for`."""
        return num_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """The most blocks that a running request takes beside its own to generate so many tokens."""
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
        """Step `step_id` is being scheduled; `oldest` is the first one that is not over. `journal`: see `log_to`."""

    def log_to(self, journal: Journal | None) -> None:
        """Log publications there, which the newest step in flight computes; None: no step is in flight."""
        self.journal = journal

    # ------------------------------------------------------------------ admission

    @abstractmethod
    def look_up(self, request: Request) -> Match:
        """The cached prefix of the request's known tokens; at least one token is left to compute."""

    def is_settled(self, match: Match) -> bool:
        """Whether a row that starts in this step may read what was found. What a step computes may be published as soon
        as it is scheduled, and not every layout can be read in the same step."""
        return True

    def cut(self, request: Request, start: int, want: int, most: int) -> int:
        """How many of `want` tokens from `start` on the request may compute in this step, so that the states of layers
        can be cached where its chunk ends. 0: it waits for a step with more tokens, of which it may get `most`."""
        return want

    def with_external(self, match: Match, num_tokens: int) -> Match:
        """The same, of a request for which `num_tokens` after the cached ones are loaded."""
        return match

    @abstractmethod
    def num_blocks_to_start(self, request: Request, match: Match, num_tokens: int) -> int:
        """Free blocks that the request takes to hold its first `num_tokens`, if nobody held those of `match`."""

    def num_blocks_of_whole(self, request: Request, match: Match) -> int:
        """The most that it holds at a time until all its known tokens are computed: as `num_blocks_to_start` for these,
        unless blocks are given back meanwhile."""
        return self.num_blocks_to_start(request, match, request._state.num_tokens)

    @abstractmethod
    def admit(self, request: Request, match: Match, num_tokens: int, now: float) -> Int64Array:
        """Acquire the matched blocks, and new ones for the first `num_tokens`; returns the request's block table, empty
        without `has_tables`."""

    @abstractmethod
    def num_slots(self, request: Request, blocks: Int64Array) -> int:
        """Tokens that the blocks of a request can hold that `admit` has just returned."""

    def place(self, batch: Batch, row: int, blocks: Int64Array) -> None:  # noqa: B027
        """The request that was admitted last, with these blocks, has got a row."""

    # ------------------------------------------------------------------ running rows

    @abstractmethod
    def num_blocks_to_grow(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] free blocks that each row needs to advance by `num_tokens` of it."""

    def num_blocks_owed(self, batch: Batch, rows: Int64Array) -> Int64Array:
        """[rows] free blocks that each row still needs until all its known tokens are computed."""
        return self.num_blocks_to_grow(batch, rows, batch.num_tokens[rows] - batch.num_computed_tokens[rows])

    def num_owed_of(self, batch: Batch, row: int) -> int:
        """The element of `num_blocks_owed` of one row."""
        return int(self.num_blocks_owed(batch, batch.count_up[row : row + 1])[0])

    def num_slots_with(self, batch: Batch, rows: Int64Array, num_tokens: Int64Array) -> Int64Array:
        """[rows] tokens that each row can hold with the blocks that it needs to advance by `num_tokens` of it."""
        return batch.num_slots[rows] + self.num_blocks_to_grow(batch, rows, num_tokens) * self.block_size

    @abstractmethod
    def grow_by_one(self, batch: Batch, rows: Int64Array, num_tokens: int | Int64Array) -> Int32Array | None:
        """Give blocks for `num_tokens` more to each of these rows, which lack slots for at most a block of them; see
        `grow`. None, with nothing changed: there are too few."""

    @abstractmethod
    def grow(self, batch: Batch, rows: Int64Array, counts: Int64Array, ends: Int64Array) -> Int32Array:
        """Give the rows `counts` new blocks, at least 1 each, which they need to hold `ends` tokens. Returns them, in
        row order; none without `has_tables`."""

    @abstractmethod
    def grow_for_steps(
        self, batch: Batch, rows: Int64Array, num_computed: Int64Array, num_steps: int
    ) -> tuple[Int32Array, Int64Array, Int64Array]:
        """The blocks with which each row decodes one token in each of `num_steps` steps: see `KVCacheManager`."""

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
        """[rows, groups, blocks] the tables of all rows, read-only; entries of blocks that a row does not hold mean
        nothing. Only of an implementation whose tables are in the core."""
        raise NotImplementedError(f"{type(self).__name__} keeps its tables elsewhere")

    def first_blocks(self, batch: Batch, row: int, count: int) -> Int64Array:
        """The first `count` blocks of a row; of several groups [groups, count], -1 where it has none."""
        return self.table(batch, row)[:count]

    def num_common_blocks(self, rows: npt.NDArray[np.integer]) -> int:
        """Blocks at the beginning that the tables of these rows have in common, in the first group of full attention; 0
        without one."""
        return 0

    def tables(self, batch: Batch, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """The concatenated block tables of some rows, and for each block the index of its row in `rows`."""
        tables = [self.table(batch, row) for row in rows.tolist()]
        counts = np.array([len(table) for table in tables], dtype=np.int64)
        return np.concatenate([np.zeros(0, dtype=np.int64), *tables]), batch.count_up[: len(rows)].repeat(counts)

    def num_blocks_shared(self, batch: Batch) -> Int64Array:
        """[running] so many blocks' worth of tokens, at the beginning of each request, would be found again without it,
        because others hold their blocks."""
        rows = batch.members.rows
        blocks, owners = self.tables(batch, rows)
        places = np.arange(len(blocks)) - owners.searchsorted(owners)  # in its own table
        is_own = self.pool.num_references[blocks] == 1
        shared = self.num_blocks_of(batch, rows)
        np.minimum.at(shared, owners[is_own], places[is_own])  # what is before the first of its own stays
        return shared

    def give_back(self, batch: Batch) -> None:  # noqa: B027
        """If it `gives_back`: release what the rows hold that none of their next tokens reads. Called before they get
        their tokens of a step, if requests wait."""

    def new_blocks(
        self, batch: Batch, rows: Int64Array, grown: npt.NDArray[np.integer], *, whole: bool
    ) -> NewBlocks | None:
        """Without `has_tables`, for an output with these rows: blocks that the host does not know of, or `whole`
        tables; None: there are none, or the host knows them anyway. `grown` are the indices of the rows for which
        `grow_by_one` was called in this step, if it was."""
        return None

    # ------------------------------------------------------------------ publishing and freeing

    @abstractmethod
    def publish_prompt(self, batch: Batch, request: Request) -> None:
        """Publish the prompt blocks that the steps scheduled so far complete."""

    def publish_deferred(self, batch: Batch) -> None:
        """All admissions of the step are made; called if there is something `unpublished`."""
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
        flight computes any of its first `num_final_tokens`. Those of a request that `is_finished` may be retained."""

    @abstractmethod
    def undo(self, journal: Journal) -> None:
        """Undo the publications of a void step; those of later steps are undone already."""

    @abstractmethod
    def retract(self, journals: Iterable[Journal], publisher: Request, running: Iterable[Request]) -> None:
        """Remove what `publisher` published since the oldest of these steps, and what was published after it."""

    def continue_reports(self, before: KVCache) -> None:
        """Take over the eviction count, and the events if there are any, of the cache that this one replaces."""
        self.num_evictions = before.num_evictions

    @abstractmethod
    def reset(self) -> None:
        """Remove every cached prefix; running rows keep their blocks but publish no more."""

    def broken(self, batch: Batch) -> str | None:
        """What does not hold of its blocks between two calls, see `observe/invariants.py`; None: nothing is known."""
        return None

    def follow(
        self, num_sound_tokens: Callable[[Request], int], num_tokens_in_flight: Callable[[int], Int64Array]
    ) -> None:
        """What the steps in flight answer to these questions."""
        self.num_sound_tokens, self.num_tokens_in_flight = num_sound_tokens, num_tokens_in_flight

    def drop_unpublished(self) -> None:
        """The step that is being scheduled is void: what it would publish is not published."""
        self.unpublished = []

    def connect(self, *, saves: bool, saves_all: bool) -> None:
        """A connector loads and saves blocks. `saves`: evicted blocks are reported; `saves_all`: also those that no
        request has asked for."""
        self.has_connector = True
        self.saves = [] if saves else None
        self.wanted = None if saves_all else Counter()

    def track_shared(self) -> None:
        """Keep the requests of which others may find the first blocks referenced."""
        self.shared = []

    def track_returned(self, tracks: bool) -> None:
        """Whether blocks that requests release are kept for `take_returned`."""
        self.returned = (self.returned or []) if tracks else None

    def take_returned(self) -> Sequence[Int64Array]:
        """Blocks that requests released since the last call, one array for each; none if they are not tracked."""
        returned = self.returned
        if not returned:
            return ()
        self.returned = []
        return returned

    def take_saves(self) -> Sequence[Save]:
        """Evictions since the last call, for an output."""
        return ()
