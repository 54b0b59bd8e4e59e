"""The data between a scheduler and its host: `SchedulerOutput` out, `StepResult` in, `StepUpdate` back.

An output has n rows: continued requests first, in admission order, then the requests admitted in this step.

Outputs and updates are read-only: attributes cannot be assigned, sequences are tuples, arrays are flagged unwritable. A
host may keep an output or an update; the scheduler never changes it afterwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.state.documented import Documented
from pointsman.core.state.inputs import Adapter, EncoderEntry
from pointsman.core.state.numbers import set_writeable
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import Sealed

IntArray: TypeAlias = npt.NDArray[np.integer]
Integers: TypeAlias = IntArray | Sequence[int]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

NO_INTS: IntArray = np.zeros(0, dtype=np.int64)
set_writeable(NO_INTS, False)


@dataclass(frozen=True, slots=True, eq=False)
class Load:
    """Blocks that the host fills from outside the pool."""

    transfer_id: int
    """Id of the transfer, unique per scheduler."""
    request: Request
    local_blocks: IntArray
    """int64: the request's blocks before the loaded ones; their content is in the pool."""
    block_ids: IntArray
    """[m] int64: the blocks to fill, in order."""
    first_token: int
    """Position of the first token of `block_ids[0]` in the request, a multiple of the block size."""
    num_tokens: int
    """Number of tokens to load, a multiple of the block size; without `kv_groups`, m blocks. With `kv_groups` the load
    fills the blocks of each group that the next token attends to and the pool does not have."""
    is_async: bool
    block_groups: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, [m] int64: the index of the group that each block to fill belongs to."""
    block_places: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, [m] int64, ascending: the index of each block to fill in the block table of its group."""

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Save(NamedTuple):
    """A block whose content is evicted in this step."""

    block_id: int
    key: bytes
    """The key of the block's content, see `kv/digests.py`."""
    group: int = 0
    """Index of the group of layers whose KV the block holds."""


@dataclass(slots=True, eq=False)
class OutputFields(metaclass=Documented):
    """The fields of a `SchedulerOutput`, assignable while the step is decided."""

    step_id: int
    """Number of the step: counts up from 0, one per call of `schedule`."""
    total_num_scheduled_tokens: int
    """Number of scheduled tokens over all rows. 0 is legal: nothing to execute, but `update` is still called."""
    num_continued: int
    """Number of continued rows: rows [0, num_continued) ran before; rows [num_continued, n) are admitted in this
    step."""
    resync: bool
    """Whether `block_ids` holds the full block table of every row. True from the first output after a failed step until
    every request that was running at the failure has been in an output."""

    requests: Sequence[Request]
    """[n] the requests, in row order."""
    rows: IntArray
    """[n] int64: the scheduler's row of each request; constant while the request runs, reused afterwards."""
    serials: IntArray
    """[n] int64: number of the admission that the row belongs to; another serial means another admission."""
    num_computed_tokens: IntArray
    """[n] int64: number of each row's tokens whose KV exists before this step; also the first position that this step
    computes."""
    num_scheduled_tokens: IntArray
    """[n] int64, each at least 1: number of tokens that this step computes for each row."""
    samples: BoolArray
    """[n] bool: whether a token is sampled at the row's last position. False: the row is a chunk that ends before the
    last known token."""
    num_draft_tokens: IntArray
    """[n] int64: number of drafts, which are the last of the row's scheduled tokens. A row with drafts computes one
    token before them, and each of its positions may yield a token: see `StepResult.counts`."""
    draft_token_ids: IntArray
    """Ragged int32: the drafts, in row order."""
    completes: IntArray
    """[m] int64: indices (0 to n - 1) of the rows that compute the end of a prompt for which nothing is sampled
    (`max_tokens` 0). The request finishes with this step's update; the host decides how to use the row's hidden
    states."""

    num_cached_tokens: IntArray
    """[n - num_continued] int64: number of tokens of each admitted row that need not be computed: they are in the
    prefix cache, or are loaded."""
    num_external_tokens: IntArray
    """[n - num_continued] int64: number of the tokens in `num_cached_tokens` that a connector loaded before this step
    or loads for it."""
    is_resumed: BoolArray
    """[n - num_continued] bool: whether the admitted row ran before and was preempted."""

    block_ids: IntArray
    """Ragged int32: ids of the new blocks of continued rows and of all blocks of admitted rows (of every row if
    `resync`)."""
    block_rows: IntArray
    """int64, parallel to `block_ids` and ascending: the index (0 to n - 1) of the row that each block belongs to."""

    encoder_inputs: Sequence[tuple[Request, int]]
    """Encoder inputs to compute in this step, before the model runs: (request, index into its `encoder_inputs`). All
    other encoder inputs that the rows need were computed before, and not freed since."""
    freed_encoder_entries: Sequence[EncoderEntry]
    """Entries whose embeddings the host frees, if it has them, before it computes anything: this step may recompute a
    freed entry."""

    preempted: Sequence[Request]
    """Requests that lost their row since the last output. A host drops these requests' rows before it reads `admitted`:
    a preempted request may be resumed in this step."""
    finished: Sequence[Request]
    """Requests that finished since the last output, each once; then their ids are free again. A host drops these
    requests before it reads `admitted`: a new request may have the id of a finished one."""

    num_common_prefix_blocks: int = 0
    """With `count_common_prefix`: number of blocks that the tables of all rows begin with. This step may write to some
    of these blocks: without a causal mask, read no further than the least `num_computed_tokens`."""
    loads: Sequence[Load] = ()
    """Loads from a connector, see `kv/connector.py`. The host completes synchronous loads before the step computes, and
    starts asynchronous loads."""
    saves: Sequence[Save] = ()
    """Evicted blocks. The host copies them out in this order, before anything else, or their content is lost."""
    block_groups: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, parallel to `block_ids`, int64: the index of the group that each block belongs to."""
    block_places: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, parallel to `block_ids`, int64: the index of each block in the block table of its row and
    group; index i holds the tokens from i times the block size on. Do not read table entries that were never set, or
    that lie before the window: the block may be another request's."""


class SchedulerOutput(Sealed, OutputFields):
    """What to run in one step. Read-only."""

    __slots__ = ()
    _remedy: ClassVar[str] = "`Scheduler.schedule` decides what a step runs"

    @property
    def num_rows(self) -> int:
        """n: number of requests that run in this step."""
        return len(self.requests)

    @property
    def block_offsets(self) -> IntArray:
        """[n + 1] int64: row i's blocks are block_ids[block_offsets[i]:block_offsets[i + 1]]."""
        offsets: IntArray = self.block_rows.searchsorted(np.arange(self.num_rows + 1))
        return offsets

    @property
    def continued(self) -> Sequence[Request]:
        """Requests that ran before this step and continue in it."""
        return self.requests[: self.num_continued]

    @property
    def admitted(self) -> Sequence[Request]:
        """Requests that got their row in this step, new and resumed."""
        return self.requests[self.num_continued :]

    @property
    def adapters(self) -> list[Adapter | None]:
        """[n] the adapter of each row; None: the model alone. At most `max_loras` different adapters."""
        return [request.adapter for request in self.requests]

    @property
    def new(self) -> list[Request]:
        """Requests admitted for the first time."""
        return [r for r, resumed in zip(self.admitted, self.is_resumed.tolist(), strict=True) if not resumed]

    @property
    def resumed(self) -> list[Request]:
        """Requests admitted again after a preemption."""
        return [r for r, resumed in zip(self.admitted, self.is_resumed.tolist(), strict=True) if resumed]

    @property
    def prefill(self) -> list[Request]:
        """Requests that compute prompt tokens, or tokens lost to a preemption, in this step."""
        return [request for request, decodes in zip(self.requests, self._decodes(), strict=True) if not decodes]

    @property
    def decode(self) -> list[Request]:
        """Requests that compute only the token that they sampled last, and drafts after it."""
        return [request for request, decodes in zip(self.requests, self._decodes(), strict=True) if decodes]

    @property
    def num_attended_tokens(self) -> int:
        """Sum over the tokens of the step: number of positions that the token attends to, its own included."""
        computed, tokens = self.num_computed_tokens, self.num_scheduled_tokens
        return int(tokens.dot(computed)) + (int(tokens.dot(tokens)) + self.total_num_scheduled_tokens) // 2

    def num_pending(self) -> IntArray:
        """[n] int64: number of results of this step that the scheduler waits for in each row: a sample, or a completed
        prompt."""
        pending: IntArray = self.samples.astype(np.int64)
        if len(self.completes):
            pending[self.completes] += 1
        return pending

    def blocks(self, row_index: int) -> IntArray:
        """Block ids of row `row_index` (0 to n - 1) in this output: see `block_ids`."""
        start = self.block_rows.searchsorted(row_index)
        return self.block_ids[start : self.block_rows.searchsorted(row_index, side="right")]

    def _decodes(self) -> list[bool]:
        prompt_lens = [request.num_prompt_tokens for request in self.requests]
        beyond_prompt = self.num_computed_tokens >= np.array(prompt_lens, dtype=np.int64)
        is_last = self.num_scheduled_tokens - self.num_draft_tokens == 1
        return [bool(flag) for flag in beyond_prompt & self.samples & is_last]


class Copies(NamedTuple):
    """The copies that a host made between the pool and its own memory before a step computed."""

    num_blocks: int
    """Number of copied blocks, in both directions together."""
    seconds: float


@dataclass(slots=True)
class StepResult(metaclass=Documented):
    """The model's result for one output."""

    token_ids: IntArray | Sequence[int]
    """Sampled tokens, ragged, in row order; an int32 array is the fastest to check."""
    counts: IntArray | Sequence[int] | None = None
    """[n] number of `token_ids` of each row; None: one for each row with `samples`, 0 for the other rows. A row with d
    drafts has 1 to 1 + d tokens: the drafts that the model accepts, and the token that it samples after these
    drafts."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Error message by row index (0 to n - 1). The request of the row finishes with FINISHED_ERROR; `token_ids` has no
    token for the row."""
    step_time: float | None = None
    """Time that the step took on the host, in seconds; None: not known."""
    unsampled: Collection[int] = ()
    """Row indices (0 to n - 1) with `samples` for which the host computed the KV and has no token. The request of such
    a row keeps its tokens, is preempted if it still runs, and samples again once it is admitted again. The request's
    samples of later steps in flight are dropped."""
    copies: Copies | None = None
    """The host's copies for the output's saves and synchronous loads; None: no copies. The time that a step waits for
    the copies is part of `step_time`. `preemption_mode` "cheaper" uses their measured time."""


@dataclass(slots=True, eq=False)
class UpdateFields(metaclass=Documented):
    """The fields of a `StepUpdate`, assignable while the result is applied."""

    token_ids: IntArray
    """Appended tokens, ragged, in the order of the output's rows."""
    counts: IntArray
    """[n] int64: number of `token_ids` of each row; 0 where a request had finished or sampled nothing."""
    requests: Sequence[Request]
    """[n] the requests of the step's output, in row order."""
    finished: Sequence[Request] = ()
    """Requests that this update finished, in row order."""
    completed_parts: Sequence[Request] = ()
    """Requests that completed their present part of the prompt, in row order: they wait for the next part, or continue
    with it."""


class StepUpdate(Sealed, UpdateFields):
    """The part of a step result that `Scheduler.update` applied. Read-only. `new_tokens` lists the tokens by
    request."""

    __slots__ = ()

    def new_tokens(self) -> list[tuple[Request, list[int]]]:
        """Each request of the step's output with the tokens that this update appended to it, in row order; an empty
        list for a request that had finished or sampled nothing."""
        token_ids, found, end = self.token_ids.tolist(), [], 0
        for request, count in zip(self.requests, self.counts.tolist(), strict=True):
            start, end = end, end + count
            found.append((request, token_ids[start:end]))
        return found
