"""Requests: their arguments, which never change, and their state, which is read-only for hosts.

    Request         a host creates and adds it, and finds it in outputs; its slots are the arguments, and read-only
    Request._state  a `RequestState`: everything that changes; the core writes it, a host reads it through properties

Fields that a later call may change (`set_priority`, `extend`: the priority, the prompt and its encoder inputs,
`max_tokens`) are in the state from the beginning.

Counts that every step changes (`num_tokens`, `num_computed_tokens`, `num_pending`) are columns of the `Batch` while a
request holds a row, and fields of its state otherwise. The properties here read the right one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from sys import float_info
from typing import Any, ClassVar, NoReturn, Protocol, Self
from warnings import warn

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import InvalidTransition, RequestRefused
from pointsman.core.state.inputs import Adapter, EncoderInput, Part, read_encoder_inputs
from pointsman.core.state.numbers import MAX_INT, checked_integer, checked_priority
from pointsman.core.state.reason import Deferral, Recovery
from pointsman.core.state.repetition import RepetitionDetectionParams, RepetitionWatch
from pointsman.core.state.sealed import Sealed, sealed_as
from pointsman.core.state.status import NEXT, FinishReason, PreemptionCause, RequestEvent, RequestStatus
from pointsman.core.state.tokens import Int32Array, IntArray, OutputTokens, shared_prompt, token_array

Int64Array = npt.NDArray[np.int64]

MAX_FLOAT = float_info.max
"""The largest float; a greater integer cannot be converted to one."""


class Columns(Protocol):
    """The columns and methods of the `Batch` that a request with a row reads."""

    num_tokens: Int64Array
    num_computed_tokens: Int64Array
    num_pending: Int64Array

    def tokens_since(self, row: int, start: int) -> Int32Array:
        """A view of the tokens from position `start` to the end of a row's sequence, valid until the next append. These
        tokens are not yet in the request's own array."""

    def draft_counts_of(self, row: int) -> tuple[int, int]:
        """Number of drafts verified since the row was assigned, and number of drafts accepted."""


class RequestState:
    """The changing state of a request. Only the core writes it."""

    __slots__ = (
        "_num_accepted_tokens",
        "_num_computed_tokens",
        "_num_draft_tokens",
        "_num_pending",
        "_output",
        "awaits_input",
        "batch",
        "block_keys",
        "content_generation",
        "deferral",
        "deferred_since",
        "encoder_inputs",
        "events",
        "finish_detail",
        "finish_reason",
        "holding",
        "limit_detail",
        "loss_number",
        "lost_tokens",
        "max_tokens",
        "may_load",
        "more_input",
        "num_admitted_tokens",
        "num_bypassed",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "parts",
        "preemption_causes",
        "prefix_epoch",
        "prefix_node",
        "priority",
        "prompt_bytes",
        "prompt_token_ids",
        "queue_entry",
        "queued_at",
        "recovery",
        "repetition_watch",
        "request_id",
        "row",
        "sequence_number",
        "serial",
        "status",
        "stop_reason",
        "token_limit",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: IntArray | Sequence[int],
        max_tokens: int,
        priority: int,
        more_input: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids, self.prompt_bytes = shared_prompt(request_id, prompt_token_ids)
        """`prompt_bytes`: the prompt's int32 tokens, with content marks for placeholders: the prompt's key in the
        prefix tree."""
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.encoder_inputs: tuple[EncoderInput, ...] = ()
        self.max_tokens = max_tokens
        self.priority = priority
        self.more_input = more_input

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.finish_detail = ""
        self.num_preemptions = 0
        self.preemption_causes: tuple[PreemptionCause, ...] = ()
        """The cause of each preemption, in order."""
        self.events: list[RequestEvent] = []
        self.num_cached_tokens = 0  # cached at the last admission, including tokens that a connector loaded
        self.num_admitted_tokens = 0  # number of known tokens at the last admission
        self.awaits_input = False  # all parts of the prompt are complete, and more are expected
        self.num_bypassed = 0  # requests behind this one that were admitted since it last lost its row

        self.token_limit = self.num_prompt_tokens + max_tokens
        self.limit_detail = "max_tokens"
        self.repetition_watch: RepetitionWatch | None = None  # created when the request is added
        self.parts: list[Part] = []  # later parts of the prompt, not yet appended to it
        self.sequence_number = 0  # numbers the requests in the order in which they were added
        self.serial = 0  # number of the last admission, 0 before the first
        self.batch: Columns | None = None
        self.row: int | None = None
        self.queue_entry: list[Any] | None = None
        self.queued_at = 0.0  # time at which the request last entered the queue, on the caller's clock
        self.deferral: Deferral | None = None  # why the newest step that checked the request did not admit it
        self.deferred_since = 0.0  # time since which the reason of `deferral` holds
        self.lost_tokens = 0  # tokens that were computed when the request last lost its row
        self.recovery: Recovery | None = None  # how the request gets its lost KV back; None: by recomputing it
        self.loss_number = 0  # number of the last row loss, counted over all requests
        self.holding: Any = None  # blocks that the request holds without a row, see `kv/transfers.py`
        self.may_load = True  # whether KV may be loaded: False from the end of a load until the next admission
        self.block_keys: tuple[bytes, ...] = ()  # keys of the leading full blocks, see `kv/digests.py`
        self.num_published_blocks = 0
        self.prefix_node: Any = None
        self.prefix_epoch = 0
        self.content_generation = -1  # generation of the content marks in `prompt_bytes`, see `set_prompt_key`
        self._num_computed_tokens = 0
        self._num_pending = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._output = OutputTokens()

    # ------------------------------------------------------------------ reading

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the output so far."""
        if self.batch is not None and self.row is not None:
            return self.batch.num_tokens.item(self.row)
        return self.num_prompt_tokens + self._output.length

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV exists, or will exist when the steps in flight have run."""
        if self.batch is not None and self.row is not None:
            return self.batch.num_computed_tokens.item(self.row)
        return self._num_computed_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Number of the request's drafts that the model has verified."""
        if self.batch is not None and self.row is not None:
            return self._num_draft_tokens + self.batch.draft_counts_of(self.row)[0]
        return self._num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Number of the request's drafts that the model has accepted; they became tokens of the output."""
        if self.batch is not None and self.row is not None:
            return self._num_accepted_tokens + self.batch.draft_counts_of(self.row)[1]
        return self._num_accepted_tokens

    @property
    def num_pending(self) -> int:
        """Number of samples that are scheduled and not yet returned."""
        if self.batch is not None and self.row is not None:
            return self.batch.num_pending.item(self.row)
        return self._num_pending

    @property
    def num_own_output_tokens(self) -> int:
        """Number of output tokens in the request's own array; while the request has a row, newer tokens are in the
        batch."""
        return self._output.length

    @property
    def output_token_ids(self) -> Int32Array:
        """[num_output_tokens] int32: a copy of the tokens generated so far."""
        flushed = self._output.array()
        if self.batch is not None and self.row is not None:
            return np.concatenate([flushed, self.batch.tokens_since(self.row, self.num_prompt_tokens + len(flushed))])
        return flushed.copy()

    def output_since(self, start: int) -> Int32Array:
        """A copy of the output tokens from index `start` on, int32. Tokens that are still in the batch are copied
        without the rest of the output."""
        if self.batch is not None and self.row is not None and start >= self._output.length:
            return self.batch.tokens_since(self.row, self.num_prompt_tokens + start).copy()
        return self.output_token_ids[start:]

    def tokens(self, start: int, end: int) -> Int32Array:
        """Known tokens at positions `start` to `end` - 1, int32."""
        if end <= self.num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])[start:end]

    @property
    def last_token_id(self) -> int:
        """The newest known token of a request without a row."""
        return self._output.array().item(-1) if self._output.length else self.prompt_token_ids.item(-1)

    @property
    def phase(self) -> str:
        """One of "waiting", "prefill", "decoding" and "finished", see `Request.phase`."""
        if self.status.is_finished:
            return "finished"
        if self.status is not RequestStatus.RUNNING or self.batch is None or self.row is None:
            return "waiting"
        return "prefill" if self.num_tokens == self.num_admitted_tokens else "decoding"

    def known_bytes(self) -> bytes:
        """All known tokens as bytes, the prompt as in `prompt_bytes`; without output, `prompt_bytes` itself."""
        if self.batch is not None and self.row is not None:
            start = self.num_prompt_tokens + self._output.length
            if start < self.batch.num_tokens.item(self.row):
                self._output.append_without_copy(self.batch.tokens_since(self.row, start).copy())
        return self.prompt_bytes + self._output.array().tobytes() if self._output.length else self.prompt_bytes

    # ------------------------------------------------------------------ moving between queue and rows

    def set_encoder_inputs(self, encoder_inputs: tuple[EncoderInput, ...]) -> None:
        """Set the encoder inputs of the prompt."""
        self.encoder_inputs = encoder_inputs

    def record_added(self, sequence_number: int) -> None:
        """Record that a scheduler has added the request."""
        self.sequence_number = sequence_number

    def set_limit(self, token_limit: int, detail: str) -> None:
        """Set the number of known tokens at which the request finishes; `detail` is the name of the limit."""
        self.token_limit, self.limit_detail = token_limit, detail

    def set_watch(self, watch: RepetitionWatch) -> None:
        """Set the repetition watch: a repetition that it finds finishes the request."""
        self.repetition_watch = watch

    def record_queued(self, now: float) -> None:
        """Record that the request enters the queue."""
        self.queued_at = now

    def set_deferral(self, deferral: Deferral | None, now: float) -> bool:
        """Record why the newest step that checked the request did not admit it. Returns whether the reason differs from
        the recorded one; if so, the time of the reason is set to `now`."""
        before, self.deferral = self.deferral, deferral
        if before is not None and deferral is not None and before.reason is deferral.reason:
            return False
        self.deferred_since = now
        return True

    def clear_deferral(self) -> None:
        """Clear the reason why the request waits."""
        self.deferral = None

    def add_bypasses(self, count: int) -> None:
        """Record that `count` requests behind this one in the queue were admitted."""
        self.num_bypassed += count

    def record_admitted(self, serial: int, num_cached_tokens: int) -> None:
        """Record that the request runs, with admission number `serial`, and need not compute its first
        `num_cached_tokens` tokens."""
        self.serial = serial
        self.change_status(RequestStatus.RUNNING)
        self.deferral = None
        self.num_admitted_tokens = self.num_tokens
        self.num_cached_tokens = num_cached_tokens
        self.may_load = True

    def set_row(self, batch: Columns, row: int) -> None:
        """Record that the request has a row of the batch."""
        self.batch, self.row = batch, row

    def leave_row(self, num_computed_tokens: int, num_pending: int) -> None:
        """Store the values of the batch's columns for the request, because its row is released."""
        self.batch = None
        self.row = None
        self._num_computed_tokens = num_computed_tokens
        self._num_pending = num_pending

    def record_row_loss(self, loss_number: int, cause: PreemptionCause | None) -> None:
        """Record that the request lost its row and its KV. `loss_number` counts the losses of all requests. `cause` is
        None if the row had no more tokens to compute."""
        self.loss_number = loss_number
        self.lost_tokens = min(self._num_computed_tokens, self.num_tokens)
        self._num_computed_tokens = 0
        self.num_bypassed = 0
        if cause is not None:
            self.num_preemptions += 1
            self.preemption_causes += (cause,)

    def set_recovery(self, recovery: Recovery | None) -> None:
        """Set how the request gets its lost KV back; None: by recomputing it."""
        self.recovery = recovery

    def undo_admission(self, status: RequestStatus, serial: int) -> None:
        """Undo the admission of the request: restore the status and the serial that it had before."""
        self.leave_row(0, 0)
        self.change_status(status)
        self.serial = serial

    def drop_results_in_flight(self, serial: int) -> None:
        """Drop the request's results of steps in flight, by giving the request a serial that these steps do not
        name."""
        self.serial = serial
        self._num_pending = 0

    def set_holding(self, holding: Any) -> None:
        """Record the blocks that the request holds without a row; None: it holds none."""
        self.holding = holding

    def end_loads(self) -> None:
        """Record that no more KV is loaded for the request until it is admitted."""
        self.may_load = False

    def record_finished(self, reason: FinishReason, detail: str, stop_reason: int | str | None) -> None:
        self.change_status(reason.status)
        self.finish_reason, self.finish_detail, self.stop_reason = reason, detail, stop_reason
        self.deferral = None

    # ------------------------------------------------------------------ changing

    def set_priority(self, priority: int) -> None:
        """Set the priority; a smaller one is more urgent."""
        self.priority = priority

    def add_part(self, part: Part, *, more_input: bool) -> None:
        """Store a later part of the prompt, to be appended when the present parts are complete. `more_input`: whether
        further parts follow."""
        self.more_input = more_input
        self.parts.append(part)

    def await_input(self) -> None:
        """Record that all parts of the prompt are complete and more are expected."""
        self.awaits_input = True

    def set_prompt_key(self, prompt_bytes: bytes, generation: int) -> None:
        """Set the prompt's key in the prefix tree: `prompt_bytes`, in which each placeholder is a content mark of this
        generation (`ContentMarks`)."""
        self.prompt_bytes = prompt_bytes
        self.content_generation = generation

    def change_status(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            InvalidTransition: a request cannot change from its present status to this one.
        """
        if status not in NEXT[self.status]:
            raise InvalidTransition(
                f"request {self.request_id!r} cannot change from status {self.status.name} to {status.name}"
            )
        self.status = status

    def append_output(self, token_ids: IntArray | Sequence[int]) -> None:
        """Append a copy of tokens to the request's own array."""
        self._output.extend(token_ids)

    def append_recent(self, tokens: Int32Array, offset: int, end: int) -> None:
        """Append a copy of the row's newest tokens, up to position `end`, to the request's own array. The token at
        position i is `tokens[offset + i]`."""
        own = self._output
        own.append_without_copy(tokens[offset + self.num_prompt_tokens + own.length : offset + end].copy())

    def append_without_copy(self, tokens: Int32Array) -> None:
        """Append tokens to the request's own array without a copy: the caller must not keep `tokens`."""
        self._output.append_without_copy(tokens)

    def truncate_output(self, num_output_tokens: int) -> None:
        """Keep only the first `num_output_tokens` output tokens of a request without a row."""
        self._output.truncate(num_output_tokens)

    def replace_prompt(
        self, prompt_token_ids: Int32Array, max_tokens: int, encoder_inputs: tuple[EncoderInput, ...]
    ) -> None:
        """Replace the prompt by a longer one, and clear the output. Only for a request without a row."""
        self.prompt_token_ids, self.prompt_bytes = shared_prompt(self.request_id, prompt_token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)
        self.encoder_inputs = encoder_inputs
        self.content_generation = -1  # the key does not yet contain the marks of encoder inputs
        self.block_keys = ()  # the last output token, which may have completed a block, is not in the prompt
        self._output = OutputTokens()
        self.repetition_watch = None
        self.max_tokens = max_tokens
        self.awaits_input = False

    def add_drafts(self, num_verified: int, num_accepted: int) -> None:
        """Add to the numbers of verified and of accepted drafts."""
        self._num_draft_tokens += num_verified
        self._num_accepted_tokens += num_accepted

    def subtract_pending(self, count: int) -> None:
        """Subtract `count` from the pending samples of a request without a row: these samples were returned, or never
        will be."""
        self._num_pending -= count


class _RequestFields:
    """The slots of a `Request`, assignable while the request is built."""

    __slots__ = (
        "_state",
        "adapter",
        "arrival_time",
        "cache_salt",
        "eos_token_ids",
        "ignore_eos",
        "max_total_tokens",
        "metadata",
        "min_tokens",
        "reads_prefix_cache",
        "repetition_detection",
        "request_id",
        "retention",
        "runs_ahead",
        "skip_reading_prefix_cache",
        "stop_set",
        "stop_token_ids",
        "tenant",
        "ttft_target",
        "use_prefix_cache",
    )

    _state: RequestState
    request_id: str
    arrival_time: float
    max_total_tokens: int | None
    min_tokens: int
    eos_token_ids: tuple[int, ...]
    ignore_eos: bool
    stop_token_ids: tuple[int, ...]
    stop_set: frozenset[int]
    """All tokens that finish the request: `stop_token_ids`, and `eos_token_ids` unless `ignore_eos`."""
    repetition_detection: RepetitionDetectionParams | None
    cache_salt: str | None
    adapter: Adapter | None
    use_prefix_cache: bool
    skip_reading_prefix_cache: bool
    reads_prefix_cache: bool
    """Whether the prefix cache is looked up for the request."""
    runs_ahead: bool
    tenant: str
    ttft_target: float | None
    retention: float | None
    metadata: Any


class Request(Sealed, _RequestFields):
    """One prompt and its output. Read-only: only its scheduler changes it.

    Args:
        request_id: the caller's name for the request, unique among requests that have not finished.
        prompt_token_ids: token ids of the prompt, int32, at least one; copied into a read-only array. If this is the
            `prompt_token_ids` array of another request, the two requests share it.
        arrival_time: time of arrival, in seconds on the caller's clock; the order "fcfs" sorts by it.
        max_tokens: maximum number of tokens to generate; 0: nothing is sampled (embeddings), and the request finishes
            when its prompt is computed.
        max_total_tokens: maximum number of tokens of prompt and output together; None: no such limit.
        min_tokens: number of output tokens before which neither EOS nor a stop token finishes the request.
        priority: urgency of the request; smaller is more urgent.
        eos_token_ids: tokens that finish the request, unless `ignore_eos`.
        stop_token_ids: further tokens that finish the request; the one that did is the `stop_reason`.
        repetition_detection: which repetitions at the end of the output finish the request; None: none of them.
        cache_salt: text that separates caches: only requests with an equal salt share cached prefixes.
        adapter: the LoRA that the request runs with, as an `Adapter` or (name, version); None: the model alone. Only
            requests with an equal adapter share cached prefixes.
        encoder_inputs: images and other inputs of an encoder, each as `EncoderInput` or a tuple of its fields; in the
            order of their placeholders, which do not overlap.
        use_prefix_cache: whether the request looks up cached blocks and publishes its own.
        skip_reading_prefix_cache: whether the request looks up no cached blocks, because all tokens of its prompt are
            to be computed. Its own blocks are still published.
        runs_ahead: whether a step of the request may be scheduled while a sample of the request is in flight. False if
            the host needs the newest token to prepare the next step (a grammar, say).
        more_input: whether the prompt continues in later parts (`Scheduler.extend`).
        tenant: the owner of the request, for policies that are fair to tenants.
        ttft_target: seconds from the arrival within which the first token is wanted, for policies that order by it;
            None: the policy's default. A request that misses its target still runs.
        retention: seconds after the end of the request for which its blocks are worth keeping in the prefix cache, at
            least 0, for eviction policies that read it; None: the policy's default. No block is reserved.
        output_token_ids: tokens that the request has generated before, in another scheduler. It continues after them,
            as after a preemption. They count as its output, so `max_tokens`, `min_tokens` and every stop condition
            include them.
        metadata: any object of the caller; Pointsman never reads it.

    Raises:
        RequestRefused: the arguments themselves can never run (an empty prompt, negative `max_tokens`, ...).
    """

    __slots__ = ()
    _remedy: ClassVar[str] = "call the scheduler to change a request: set_priority, extend, park, ready, finish"

    def __new__(
        cls,
        request_id: str,
        prompt_token_ids: IntArray | Sequence[int],
        *,
        arrival_time: float,
        max_tokens: int,
        max_total_tokens: int | None = None,
        min_tokens: int = 0,
        priority: int = 0,
        eos_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        stop_token_ids: Sequence[int] = (),
        repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None,
        cache_salt: str | None = None,
        adapter: Adapter | tuple[str, int | str] | None = None,
        encoder_inputs: Sequence[EncoderInput | Sequence[Any]] = (),
        use_prefix_cache: bool = True,
        skip_reading_prefix_cache: bool = False,
        runs_ahead: bool = True,
        more_input: bool = False,
        tenant: str = "",
        ttft_target: float | None = None,
        retention: float | None = None,
        output_token_ids: IntArray | Sequence[int] = (),
        metadata: Any = None,
    ) -> Self:
        # Arguments of the usual type and in range skip their checks: a simulator makes many requests.
        checks = _Checks(request_id)
        if not isinstance(request_id, str):
            checks.refuse(f"its id is of type {type(request_id).__name__}; give a string")
        is_usual = (
            type(max_tokens) is type(min_tokens) is type(priority) is int
            and 0 <= max_tokens <= MAX_INT
            and 0 <= min_tokens <= MAX_INT
            and 0 <= priority <= MAX_INT
        )
        fields: Any = _RequestFields()
        fields._state = state = RequestState(
            request_id,
            prompt_token_ids,
            max_tokens if is_usual else checks.integer("max_tokens", max_tokens, 0),
            priority if is_usual else checks.priority(priority),
            more_input,
        )
        fields.request_id = request_id
        is_finite = type(arrival_time) is float and isfinite(arrival_time)
        fields.arrival_time = arrival_time if is_finite else checks.seconds(arrival_time)
        fields.max_total_tokens = None
        if max_total_tokens is not None:
            fields.max_total_tokens = checks.integer("max_total_tokens", max_total_tokens, 1)
        fields.min_tokens = min_tokens if is_usual else checks.integer("min_tokens", min_tokens, 0)
        fields.eos_token_ids = (
            () if type(eos_token_ids) is tuple and not eos_token_ids else checks.token_ids(eos_token_ids)
        )
        fields.ignore_eos = ignore_eos
        fields.stop_token_ids = (
            () if type(stop_token_ids) is tuple and not stop_token_ids else checks.token_ids(stop_token_ids)
        )
        fields.stop_set = frozenset(
            fields.stop_token_ids if ignore_eos else fields.eos_token_ids + fields.stop_token_ids
        )
        fields.repetition_detection = None
        if repetition_detection is not None:
            fields.repetition_detection = checks.repetition(repetition_detection)
        fields.cache_salt = None if cache_salt is None else checks.salt(cache_salt)
        fields.adapter = None if adapter is None else checks.adapter(adapter)
        if encoder_inputs:
            state.set_encoder_inputs(checks.encoder_inputs(encoder_inputs, state.num_prompt_tokens))
        fields.use_prefix_cache = use_prefix_cache
        fields.skip_reading_prefix_cache = skip_reading_prefix_cache
        fields.reads_prefix_cache = use_prefix_cache and not skip_reading_prefix_cache
        fields.runs_ahead = runs_ahead
        fields.tenant = tenant if type(tenant) is str else checks.tenant(tenant)
        fields.ttft_target = None if ttft_target is None else checks.ttft_target(ttft_target)
        fields.retention = None if retention is None else checks.retention(retention)
        fields.metadata = metadata
        if state.num_prompt_tokens == 0:
            checks.refuse("the prompt is empty; give at least one token")
        if fields.min_tokens > state.max_tokens and not more_input:
            checks.refuse(f"min_tokens is {min_tokens}, more than max_tokens {max_tokens}; lower it")
        if len(output_token_ids):
            if more_input:
                checks.refuse(
                    "output_token_ids are given and more_input is True; give the whole prompt, or no output_token_ids"
                )
            if len(output_token_ids) >= state.max_tokens:
                checks.refuse(
                    f"{len(output_token_ids)} output_token_ids are given and max_tokens is {max_tokens}, so no token "
                    "is left to generate; raise max_tokens"
                )
            state.append_output(token_array(request_id, output_token_ids))
        return sealed_as(cls, fields)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    # ------------------------------------------------------------------ fields that a call may change

    @property
    def prompt_token_ids(self) -> Int32Array:
        """[num_prompt_tokens] int32, read-only: the prompt, with the later parts appended so far."""
        return self._state.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self._state.num_prompt_tokens

    @property
    def encoder_inputs(self) -> tuple[EncoderInput, ...]:
        """The encoder inputs of the prompt, in the order of their placeholders."""
        return self._state.encoder_inputs

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens to generate after the prompt."""
        return self._state.max_tokens

    @property
    def more_input(self) -> bool:
        """Whether further parts of the prompt are expected."""
        return self._state.more_input

    @property
    def parts(self) -> tuple[Part, ...]:
        """Later parts of the prompt that are not yet appended to it."""
        return tuple(self._state.parts)

    @property
    def priority(self) -> int:
        """Urgency of the request; smaller is more urgent."""
        return self._state.priority

    # ------------------------------------------------------------------ status

    @property
    def status(self) -> RequestStatus:
        return self._state.status

    @property
    def is_finished(self) -> bool:
        return self._state.status.is_finished

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._state.finish_reason

    @property
    def finish_detail(self) -> str:
        """More about the finish reason, such as the limit that was reached."""
        return self._state.finish_detail

    @property
    def stop_reason(self) -> int | str | None:
        """The stop token or stop string that finished the request, or "repetition_detected"."""
        return self._state.stop_reason

    @property
    def phase(self) -> str:
        """For display: "waiting", "prefill" (until the first sample since admission), "decoding" or "finished"."""
        return self._state.phase

    @property
    def awaits_input(self) -> bool:
        """Whether all parts of the prompt are complete, and more are expected."""
        return self._state.awaits_input

    @property
    def row(self) -> int | None:
        """The row of the request while it runs, as in `SchedulerOutput.rows`."""
        return self._state.row

    @property
    def serial(self) -> int:
        """Number of the request's last admission, counted over all requests, as in `SchedulerOutput.serials`; 0 before
        the first."""
        return self._state.serial

    @property
    def sequence_number(self) -> int:
        """Number of the request in the order in which requests are added, from 1; 0 before it is added."""
        return self._state.sequence_number

    @property
    def queued_at(self) -> float:
        """Time at which the request last entered the queue, on the caller's clock."""
        return self._state.queued_at

    @property
    def num_preemptions(self) -> int:
        return self._state.num_preemptions

    @property
    def preemption_causes(self) -> tuple[PreemptionCause, ...]:
        """The cause of each preemption, in order."""
        return self._state.preemption_causes

    @property
    def num_bypassed(self) -> int:
        """Number of requests behind this one in the queue that bypassed it since it last lost its row."""
        return self._state.num_bypassed

    @property
    def num_overtaken(self) -> int:
        """The old name of `num_bypassed`."""
        warn("`num_overtaken` is now called `num_bypassed`", DeprecationWarning, stacklevel=2)
        return self.num_bypassed

    @property
    def loss_number(self) -> int:
        """Number of the request's last row loss, counted over all requests; 0 before the first. Of several requests
        preempted together, the one that is to resume first has the highest number."""
        return self._state.loss_number

    @property
    def prefix_epoch(self) -> int:
        """Number of resets of the prefix cache before the request was last admitted; negative: the request's KV must
        not be shared."""
        return self._state.prefix_epoch

    @property
    def events(self) -> tuple[RequestEvent, ...]:
        """The log of the request's events, filled if the scheduler's `log_request_events` is on."""
        return tuple(self._state.events)

    # ------------------------------------------------------------------ its tokens

    @property
    def token_limit(self) -> int:
        """Number of known tokens at which the request finishes; valid once the request is added."""
        return self._state.token_limit

    @property
    def limit_detail(self) -> str:
        """The name of the limit that determines `token_limit`, such as "max_tokens"."""
        return self._state.limit_detail

    @property
    def num_tokens(self) -> int:
        """Number of known tokens: the prompt and the output so far."""
        return self._state.num_tokens

    @property
    def num_output_tokens(self) -> int:
        return self._state.num_output_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV exists, or will exist when the steps in flight have run."""
        return self._state.num_computed_tokens

    @property
    def num_pending(self) -> int:
        """Number of samples that are scheduled and not yet returned."""
        return self._state.num_pending

    @property
    def num_cached_tokens(self) -> int:
        """Number of tokens that were already computed at the last admission, including those that a connector
        loaded."""
        return self._state.num_cached_tokens

    @property
    def num_admitted_tokens(self) -> int:
        """Number of known tokens at the last admission."""
        return self._state.num_admitted_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Number of the request's drafts that the model has verified."""
        return self._state.num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Number of the request's drafts that the model has accepted; they became tokens of the output."""
        return self._state.num_accepted_tokens

    @property
    def output_token_ids(self) -> Int32Array:
        """[num_output_tokens] int32: a copy of the tokens generated so far."""
        return self._state.output_token_ids

    @property
    def all_token_ids(self) -> Int32Array:
        """[num_tokens] int32: a copy of the prompt and the output so far."""
        return np.concatenate([self._state.prompt_token_ids, self._state.output_token_ids])

    def tokens(self, start: int, end: int) -> Int32Array:
        """Known tokens at positions `start` to `end` - 1, int32: a copy, or a read-only view of the prompt."""
        return self._state.tokens(start, end)

    def output_since(self, start: int) -> Int32Array:
        """A copy of the output tokens from index `start` on, int32; O(number of these tokens) if they are the newest
        ones."""
        return self._state.output_since(start)


class _Checks:
    """Checks of the arguments: every method returns the checked value, or raises RequestRefused."""

    __slots__ = ("_request_id",)

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id

    def refuse(self, why: str) -> NoReturn:
        raise RequestRefused(f"request {self._request_id!r} refused: {why}")

    def integer(self, name: str, value: object, minimum: int) -> int:
        try:
            return checked_integer(name, value, minimum)
        except ValueError as error:
            raise RequestRefused(f"request {self._request_id!r} refused: {error}") from None

    def token_ids(self, values: Sequence[int]) -> tuple[int, ...]:
        """EOS or stop token ids, as a tuple."""
        if not isinstance(values, Iterable):
            self.refuse(f"EOS or stop token ids are {values!r}; give a list of token ids, such as [{values!r}]")
        for token in values:
            if type(token) is not int or not 0 <= token <= MAX_INT:
                return tuple([self.integer("an EOS or stop token id", each, 0) for each in values])
        return tuple(values)

    def priority(self, value: object) -> int:
        try:
            return checked_priority(value)
        except ValueError as error:
            self.refuse(str(error))

    def seconds(self, value: object) -> float:
        if type(value) is float and isfinite(value):
            return value
        if isinstance(value, (int, float, np.integer, np.floating)) and -MAX_FLOAT <= value <= MAX_FLOAT:
            return float(value)
        self.refuse(f"arrival_time is {value}; give seconds on the caller's clock")

    def tenant(self, value: object) -> str:
        if isinstance(value, str):
            return value
        self.refuse(f"tenant is {value!r}; it must be text")

    def ttft_target(self, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= MAX_FLOAT:
            return float(value)
        self.refuse(f"ttft_target is {value!r}; give seconds above 0, or None")

    def retention(self, value: object) -> float:
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_FLOAT:
            return float(value)
        self.refuse(f"retention is {value!r}; give seconds, at least 0, or None")

    def salt(self, value: object) -> str | None:
        if value is None or isinstance(value, str):
            return value
        self.refuse(f"cache_salt is {value!r}; it must be text")

    def repetition(self, value: object) -> RepetitionDetectionParams | None:
        try:
            params = RepetitionDetectionParams(**value) if isinstance(value, Mapping) else value
        except (TypeError, ValueError) as error:
            self.refuse(str(error))
        if not isinstance(params, RepetitionDetectionParams):
            self.refuse(f"repetition_detection is {value!r}; give RepetitionDetectionParams, or None")
        return params if params.max_pattern_size else None

    def encoder_inputs(
        self, values: Sequence[EncoderInput | Sequence[Any]], num_tokens: int
    ) -> tuple[EncoderInput, ...]:
        try:
            return read_encoder_inputs(values, num_tokens)
        except ValueError as error:
            self.refuse(str(error))

    def adapter(self, value: Sequence[Any]) -> Adapter:
        if isinstance(value, (tuple, list)) and len(value) == 2:
            name, version = value
            sound_version = isinstance(version, (int, str)) and not isinstance(version, bool)
            if isinstance(name, str) and name and sound_version:
                return Adapter(name, version)
        self.refuse(
            f"adapter is {value!r}; give (name, version), where name is a non-empty string and version a "
            "number or a string"
        )
