"""The data between a scheduler and its host: `SchedulerOutput` out, `StepResult` in, `StepUpdate` back.

An output has n rows: continued requests first, in admission order, then the requests admitted in this step.

Outputs and updates are read-only: attributes cannot be assigned, sequences are tuples, arrays are flagged unwritable. A
host may keep all of it; the scheduler never changes it afterwards.
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
    """Unique per scheduler."""
    request: Request
    local_blocks: IntArray
    """int64: the request's blocks before them, whose content is in the pool."""
    block_ids: IntArray
    """[m] int64: the blocks to fill, in order."""
    first_token: int
    """Position in the request of the first token of `block_ids[0]`, a multiple of the block size."""
    num_tokens: int
    """A multiple of the block size; without `kv_groups`, m blocks. With `kv_groups` the load fills the blocks of each
    group that the next token attends to and the pool does not have."""
    is_async: bool
    block_groups: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, [m] int64: the group of each block to fill."""
    block_places: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, [m] int64, ascending: the index of each in the table of its group."""

    @property
    def request_id(self) -> str:
        return self.request.request_id


class Save(NamedTuple):
    """A block whose content is evicted in this step."""

    block_id: int
    key: bytes
    """The name of its content, see `kv/digests.py`."""
    group: int = 0
    """The group of layers whose KV it is."""


@dataclass(slots=True, eq=False)
class OutputFields(metaclass=Documented):
    """The fields of a `SchedulerOutput`, assignable while the step is decided."""

    step_id: int
    """Counts up from 0, one per call of `schedule`."""
    total_num_scheduled_tokens: int
    """Tokens over all rows. 0 is legal: nothing to execute, but `update` is still called."""
    num_continued: int
    """Rows [0, num_continued) ran before; rows [num_continued, n) are admitted in this step."""
    resync: bool
    """True from the first output after a failed step until every request that ran then has been in an output:
    `block_ids` holds the full table of every row."""

    requests: Sequence[Request]
    """[n] the requests, in row order."""
    rows: IntArray
    """[n] int64: the scheduler's row of each request; stable while the request runs, reused afterwards."""
    serials: IntArray
    """[n] int64: the admission that the row belongs to; another serial means another admission."""
    num_computed_tokens: IntArray
    """[n] int64: tokens whose KV exists before this step; the first position that this step computes."""
    num_scheduled_tokens: IntArray
    """[n] int64, each at least 1: tokens that this step computes."""
    samples: BoolArray
    """[n] bool: whether the row's last position yields a token (False: a chunk that ends inside the known tokens)."""
    num_draft_tokens: IntArray
    """[n] int64: number of the row's scheduled tokens, at their end, that are drafts. Such a row computes one token
    beside them, and each of its positions may yield a token: see `StepResult.counts`."""
    draft_token_ids: IntArray
    """Ragged int32: the drafts, in row order."""
    completes: IntArray
    """[m] int64: row indices (0 to n - 1) that compute the end of a prompt for which nothing is sampled (`max_tokens`
    0). The request finishes with this step's update; the host decides how to use its hidden states."""

    num_cached_tokens: IntArray
    """[n - num_continued] int64: tokens of each admitted row that need not be computed: they were found in the prefix
    cache, or are loaded."""
    num_external_tokens: IntArray
    """[n - num_continued] int64: of these, tokens that come from a connector, loaded before or for this step."""
    is_resumed: BoolArray
    """[n - num_continued] bool: whether the admitted row ran before and was preempted."""

    block_ids: IntArray
    """Ragged int32: new blocks of continued rows, all blocks of admitted rows (and of every row if `resync`)."""
    block_rows: IntArray
    """int64, parallel to `block_ids` and ascending: the index (0 to n - 1) of the row that each block is for."""

    encoder_inputs: Sequence[tuple[Request, int]]
    """Encoder inputs to compute in this step, before the model runs: (request, index into its `encoder_inputs`). All
    others that the rows need were computed before, and not freed since."""
    freed_encoder_entries: Sequence[EncoderEntry]
    """Embeddings to free before anything is computed, if the host has them: one may be recomputed in this step."""

    preempted: Sequence[Request]
    """Requests that lost their row since the last output. A host drops their rows first: one may be resumed here."""
    finished: Sequence[Request]
    """Requests that finished since the last output, each once; after this their ids are free again. A host drops them
    first: an id may be among the new ones."""

    num_common_prefix_blocks: int = 0
    """With `count_common_prefix`: number of blocks that the tables of all rows begin with.
    Some may be written in this step: without a causal mask, read no further than the least `num_computed_tokens`."""
    loads: Sequence[Load] = ()
    """Loads from a connector, see `kv/connector.py`: before the step computes or, if asynchronous, from now on."""
    saves: Sequence[Save] = ()
    """Evicted blocks: copy them out first, in this order, or their content is lost."""
    block_groups: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, parallel to `block_ids`, int64: the index of the group that each block is for."""
    block_places: IntArray = field(default_factory=lambda: NO_INTS)
    """With `kv_groups`, parallel to `block_ids`, int64: its index in the table of the row and the group; index i is for
    the tokens from i times the block size on. Do not read places that were never named, or whose block is behind the
    window: the block may be another request's."""


class SchedulerOutput(Sealed, OutputFields):
    """What to run in one step. Read-only."""

    __slots__ = ()
    _remedy: ClassVar[str] = "`Scheduler.schedule` decides what a step runs"

    @property
    def num_rows(self) -> int:
        """n: the requests that run in this step."""
        return len(self.requests)

    @property
    def block_offsets(self) -> IntArray:
        """[n + 1] int64: row i's blocks are block_ids[block_offsets[i]:block_offsets[i + 1]]."""
        offsets: IntArray = self.block_rows.searchsorted(np.arange(self.num_rows + 1))
        return offsets

    @property
    def continued(self) -> Sequence[Request]:
        """Requests that ran before and continue."""
        return self.requests[: self.num_continued]

    @property
    def admitted(self) -> Sequence[Request]:
        """Requests that got their row in this step, new and resumed."""
        return self.requests[self.num_continued :]

    @property
    def adapters(self) -> list[Adapter | None]:
        """[n] the adapter of each row; None: the model alone. At most `max_loras` different ones."""
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
        """Requests that compute just the token they sampled last, and drafts after it."""
        return [request for request, decodes in zip(self.requests, self._decodes(), strict=True) if decodes]

    @property
    def num_attended_tokens(self) -> int:
        """Sum, over the tokens of the step, of the positions that each attends to, its own included."""
        computed, tokens = self.num_computed_tokens, self.num_scheduled_tokens
        return int(tokens.dot(computed)) + (int(tokens.dot(tokens)) + self.total_num_scheduled_tokens) // 2

    def num_pending(self) -> IntArray:
        """[n] int64: the results of this step that the scheduler waits for, by row: a sample, or a completed prompt."""
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
    """The copies of a host between the pool and its memory before a step computed."""

    num_blocks: int
    """In both directions."""
    seconds: float


@dataclass(slots=True)
class StepResult(metaclass=Documented):
    """The model's result for one output."""

    token_ids: IntArray | Sequence[int]
    """Sampled tokens, ragged, in row order; an int32 array costs least."""
    counts: IntArray | Sequence[int] | None = None
    """[n] tokens of each row; None: one for each row with `samples`, none for the others. A row with d drafts has 1 to
    1 + d: the drafts that the model accepts, and the token that it samples after them."""
    errors: Mapping[int, str] = field(default_factory=dict)
    """Row index (0 to n - 1) -> message: that request finishes with FINISHED_ERROR; it has no token here."""
    step_time: float | None = None
    """Seconds that the step took on the host, if known."""
    unsampled: Collection[int] = ()
    """Row indices (0 to n - 1) with `samples` for which the host computed the KV and has no token. Such a request keeps
    its tokens, is preempted if it still runs, and samples again once it is admitted again. Its samples of later steps
    in flight are dropped."""
    copies: Copies | None = None
    """The output's saves and synchronous loads that the host copied; None: none. The time that a step waits for them is
    part of its time. `preemption_mode` "cheaper" uses it."""


@dataclass(slots=True, eq=False)
class UpdateFields(metaclass=Documented):
    """The fields of a `StepUpdate`, assignable while the result is applied."""

    token_ids: IntArray
    """Tokens that were appended, ragged, parallel to the output's requests."""
    counts: IntArray
    """[n] int64: how many of `token_ids` belong to each row; 0 where a request had finished or sampled nothing."""
    requests: Sequence[Request]
    """[n] The output's requests."""
    finished: Sequence[Request] = ()
    """Requests that finished by this update, in row order."""
    completed_parts: Sequence[Request] = ()
    """Requests that completed their present part, in row order: they wait for the next part, or continue with it."""


class StepUpdate(Sealed, UpdateFields):
    """The part of a step result that `Scheduler.update` applied. Read-only. `new_tokens` has it by request."""

    __slots__ = ()

    def new_tokens(self) -> list[tuple[Request, list[int]]]:
        """Each request of the step's output with the tokens that this update appended to it, in row order; an empty
        list where it had finished or sampled nothing."""
        token_ids, found, end = self.token_ids.tolist(), [], 0
        for request, count in zip(self.requests, self.counts.tolist(), strict=True):
            start, end = end, end + count
            found.append((request, token_ids[start:end]))
        return found
