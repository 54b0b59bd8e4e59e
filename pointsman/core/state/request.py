"""A request: who asks, for what, and where it stands.

The scheduler keeps what every step touches (`num_tokens`, `num_computed_tokens`, `num_pending`) as columns of
the `Batch` while a request holds blocks, and in the request itself while it does not. The properties here read
from whichever is right, so a reader never needs to know.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pointsman.core.errors import InvalidTransition, RequestRefused
from pointsman.core.state.inputs import Adapter, EncoderInput, read_encoder_inputs
from pointsman.core.state.numbers import checked_integer, checked_priority
from pointsman.core.state.repetition import RepetitionDetectionParams, RepetitionWatch
from pointsman.core.state.status import NEXT, FinishReason, RequestStatus
from pointsman.core.state.tokens import Int32Array, IntArray, OutputTokens, shared_prompt

if TYPE_CHECKING:
    from pointsman.core.state.batch import Batch
    from pointsman.core.state.inputs import Part
    from pointsman.core.state.status import RequestEvent


class Request:
    """One prompt and what is generated for it.

    Args:
        request_id: the caller's name for it, unique among requests that have not ended.
        prompt_token_ids: int32, at least one; kept as one read-only array that samples of a prompt may share.
        arrival_time: seconds on the caller's clock; the order "fcfs" sorts by it.
        max_tokens: most tokens to generate; 0: nothing is sampled (embeddings), it ends when its prompt is computed.
        max_total_tokens: most tokens of prompt and output together; None: no such limit.
        min_tokens: before that many output tokens neither EOS nor a stop token ends the request.
        priority: smaller is more urgent.
        eos_token_ids: tokens that end the request, unless `ignore_eos`.
        stop_token_ids: further tokens that end it; the one that did is the `stop_reason`.
        repetition_detection: which repetitions at the end of its output end it; None: none does.
        cache_salt: only requests with an equal salt share cached prefixes.
        adapter: the LoRA that it runs with, as an `Adapter` or (name, version); None: the model alone. Only requests
            with an equal one share cached prefixes.
        encoder_inputs: images and the like, as `EncoderInput` or tuples of its fields: in the order of their
            placeholders, which do not overlap.
        use_prefix_cache: False: neither looks up nor publishes blocks.
        runs_ahead: False: none of its steps is scheduled while a sample of it is in flight, because the host can
            prepare that step only when it knows the newest token (a grammar, say).
        more_input: whether the prompt goes on in parts that come later (`Scheduler.extend`, see `parts.py`).
        metadata: the caller's own; never read here.

    Raises:
        RequestRefused: the arguments themselves can never run (an empty prompt, negative `max_tokens`, ...).
    """

    __slots__ = (
        "_num_accepted_tokens",
        "_num_computed_tokens",
        "_num_draft_tokens",
        "_num_pending",
        "_output",
        "_prompt_bytes",
        "adapter",
        "arrival_time",
        "awaits_input",
        "batch",
        "block_keys",
        "cache_salt",
        "content_generation",
        "deferral",
        "encoder_inputs",
        "eos_token_ids",
        "events",
        "finish_detail",
        "finish_reason",
        "holding",
        "ignore_eos",
        "limit_detail",
        "loss_number",
        "lost_tokens",
        "max_tokens",
        "max_total_tokens",
        "may_load",
        "metadata",
        "min_tokens",
        "more_input",
        "num_admitted_tokens",
        "num_cached_tokens",
        "num_overtaken",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "parts",
        "prefix_epoch",
        "prefix_node",
        "priority",
        "prompt_token_ids",
        "queue_entry",
        "queued_at",
        "repetition_detection",
        "repetition_watch",
        "request_id",
        "row",
        "runs_ahead",
        "sequence_number",
        "serial",
        "status",
        "stop_reason",
        "stop_set",
        "stop_token_ids",
        "token_limit",
        "use_prefix_cache",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: IntArray | Sequence[int],
        *,
        arrival_time: float,
        max_tokens: int,
        max_total_tokens: int | None = None,
        min_tokens: int = 0,
        priority: int = 0,
        eos_token_ids: tuple[int, ...] = (),
        ignore_eos: bool = False,
        stop_token_ids: tuple[int, ...] = (),
        repetition_detection: RepetitionDetectionParams | Mapping[str, int] | None = None,
        cache_salt: str | None = None,
        adapter: Adapter | tuple[str, int | str] | None = None,
        encoder_inputs: Sequence[EncoderInput | Sequence[Any]] = (),
        use_prefix_cache: bool = True,
        runs_ahead: bool = True,
        more_input: bool = False,
        metadata: Any = None,
    ) -> None:
        self.request_id = request_id
        self._take_prompt(prompt_token_ids)
        self.arrival_time = self._seconds(arrival_time)
        self.max_tokens = self._integer("max_tokens", max_tokens, 0)
        self.max_total_tokens = (
            None if max_total_tokens is None else self._integer("max_total_tokens", max_total_tokens, 1)
        )
        self.min_tokens = self._integer("min_tokens", min_tokens, 0)
        self.priority = self._priority(priority)
        self.eos_token_ids = tuple(self._integer("an EOS or stop token id", token, 0) for token in eos_token_ids)
        self.ignore_eos = ignore_eos
        self.stop_token_ids = tuple(self._integer("an EOS or stop token id", token, 0) for token in stop_token_ids)
        self.repetition_detection = self._repetition(repetition_detection)
        self.cache_salt = cache_salt
        self.adapter = None if adapter is None else self._adapter(adapter)
        self.encoder_inputs = self._encoder_inputs(encoder_inputs) if encoder_inputs else ()
        self.use_prefix_cache = use_prefix_cache
        self.runs_ahead = runs_ahead
        self.more_input = more_input
        self.metadata = metadata
        self._check()
        self._begin()

    def _begin(self) -> None:
        """Nothing has happened to it yet."""
        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.finish_detail = ""
        self.num_preemptions = 0
        self.events: list[RequestEvent] = []
        """What happened to it, if the scheduler's `log_request_events` is on."""
        self.num_cached_tokens = 0  # of the last admission, those that a connector loaded included
        self.num_admitted_tokens = 0  # known tokens at the last admission
        self.awaits_input = False  # all parts of its prompt are complete, and more are to come
        self.num_overtaken = 0  # requests behind it that were admitted, since it last lost its row

        # What follows is the scheduler's own bookkeeping.
        self.stop_set = frozenset(self.stop_token_ids) | (
            frozenset() if self.ignore_eos else frozenset(self.eos_token_ids)
        )
        self.token_limit = self.num_prompt_tokens + self.max_tokens
        self.limit_detail = "max_tokens"
        self.repetition_watch: RepetitionWatch | None = None  # made when it is added
        self.parts: deque[Part] = deque()  # of the prompt, not taken yet
        self.sequence_number = 0  # order of adding
        self.serial = 0  # the last admission, 0 before the first
        self.batch: Batch | None = None
        self.row: int | None = None
        self.queue_entry: list[Any] | None = None
        self.queued_at = 0.0  # when it entered the queue last, on the caller's clock
        self.deferral: Any = None
        self.lost_tokens = 0  # computed before it last lost its row
        self.loss_number = 0  # of that loss, in order over all requests
        self.holding: Any = None  # blocks that it holds without a row, see `transfers.py`
        self.may_load = True  # until a load has failed or succeeded, and again once it has run
        self.block_keys: list[bytes] = []  # see `content_keys.py`
        self.num_published_blocks = 0
        self.prefix_node: Any = None
        self.prefix_epoch = 0
        self.content_generation = -1  # of the marks in its key, see `set_prompt_key`
        self._num_computed_tokens = 0
        self._num_pending = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0
        self._output = OutputTokens()

    # ------------------------------------------------------------------ what it is

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"

    @property
    def num_tokens(self) -> int:
        """Known tokens: the prompt and the output so far."""
        if self.batch is not None and self.row is not None:
            return int(self.batch.num_tokens[self.row])
        return self.num_prompt_tokens + self._output.length

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV exists, or will when the steps in flight have run."""
        if self.batch is not None and self.row is not None:
            return int(self.batch.num_computed_tokens[self.row])
        return self._num_computed_tokens

    @property
    def num_draft_tokens(self) -> int:
        """Drafts of it that the model has verified."""
        if self.batch is not None and self.row is not None:
            return self._num_draft_tokens + self.batch.acceptance.of(self.row)[0]
        return self._num_draft_tokens

    @property
    def num_accepted_tokens(self) -> int:
        """Of these, the drafts that became its tokens."""
        if self.batch is not None and self.row is not None:
            return self._num_accepted_tokens + self.batch.acceptance.of(self.row)[1]
        return self._num_accepted_tokens

    @property
    def num_pending(self) -> int:
        """Samples that are scheduled and have not come back."""
        if self.batch is not None and self.row is not None:
            return int(self.batch.num_pending[self.row])
        return self._num_pending

    @property
    def output_token_ids(self) -> Int32Array:
        """[num_output_tokens] int32: a copy of the tokens generated so far."""
        flushed = self._output.array()
        if self.batch is not None and self.row is not None:
            return np.concatenate([flushed, self.batch.recent(self.row, self.num_prompt_tokens + len(flushed))])
        return flushed.copy()

    @property
    def all_token_ids(self) -> Int32Array:
        """[num_tokens] int32: prompt and output."""
        return np.concatenate([self.prompt_token_ids, self.output_token_ids])

    def tokens(self, start: int, end: int) -> Int32Array:
        """Known tokens `start` to `end` - 1, int32."""
        if end <= self.num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        return self.all_token_ids[start:end]

    @property
    def last_token_id(self) -> int:
        """The newest known token of a request without a row."""
        own = self._output.array()
        return int(own[-1] if len(own) else self.prompt_token_ids[-1])

    @property
    def is_finished(self) -> bool:
        return self.status.is_finished

    @property
    def phase(self) -> str:
        """For people: "waiting", "prefill" (until the first sample since admission), "decoding" or "finished"."""
        if self.status.is_finished:
            return "finished"
        if self.status is not RequestStatus.RUNNING or self.batch is None or self.row is None:
            return "waiting"
        return "prefill" if self.num_tokens == self.num_admitted_tokens else "decoding"

    @property
    def prompt_bytes(self) -> bytes:
        """The prompt's int32 tokens as bytes, with marks of their contents for placeholders: what the prefix tree is
        keyed by."""
        return self._prompt_bytes

    def set_prompt_key(self, prompt_bytes: bytes, generation: int) -> None:
        """Key the prompt by these bytes, in which each placeholder is a mark of that generation (`ContentMarks`)."""
        self._prompt_bytes = prompt_bytes
        self.content_generation = generation

    def known_bytes(self) -> bytes:
        """All known tokens as bytes; the prompt's own while nothing is generated."""
        if self.batch is not None and self.row is not None:
            self.batch.flush(self.row, self)
        return self._prompt_bytes + self._output.array().tobytes() if self._output.length else self._prompt_bytes

    # ------------------------------------------------------------------ what the scheduler changes

    def transition(self, status: RequestStatus) -> None:
        """Change the status.

        Raises:
            InvalidTransition: the life of a request has no such step.
        """
        if status not in NEXT[self.status]:
            raise InvalidTransition(f"request {self.request_id!r} cannot go from {self.status.name} to {status.name}")
        self.status = status

    def append_output(self, token_ids: IntArray | Sequence[int]) -> None:
        """Append tokens to the request's own array (the recent ones of a row come through here)."""
        self._output.extend(token_ids)

    def truncate_output(self, num_output_tokens: int) -> None:
        """Keep the first `num_output_tokens` of a request without a row."""
        self._output.truncate(num_output_tokens)

    def continue_with(
        self, prompt_token_ids: Int32Array, max_tokens: int, encoder_inputs: tuple[EncoderInput, ...]
    ) -> None:
        """A longer prompt, and no output yet, for a request without a row."""
        self._take_prompt(prompt_token_ids)
        self.encoder_inputs = encoder_inputs
        self.content_generation = -1  # what stands at its placeholders has yet to enter the key
        self.block_keys = []  # the last output token, of which a block may have been the last, is not in it
        self._output = OutputTokens()
        self.repetition_watch = None
        self.max_tokens = max_tokens
        self.awaits_input = False

    @property
    def num_own_output_tokens(self) -> int:
        """Output tokens in the request's own array; the rest, while it has a row, is in the batch's ring."""
        return self._output.length

    def leave_row(self, num_computed_tokens: int, num_pending: int) -> None:
        """Take over what the batch's columns held, when the row is released."""
        self.batch = None
        self.row = None
        self._num_computed_tokens = num_computed_tokens
        self._num_pending = num_pending

    def add_drafts(self, num_verified: int, num_accepted: int) -> None:
        """Count drafts that came back."""
        self._num_draft_tokens += num_verified
        self._num_accepted_tokens += num_accepted

    def settle_pending(self, count: int) -> None:
        """`count` samples of a request without a row have come back, or never will."""
        self._num_pending -= count

    def _take_prompt(self, token_ids: IntArray | Sequence[int]) -> None:
        self.prompt_token_ids, self._prompt_bytes = shared_prompt(self.request_id, token_ids)
        self.num_prompt_tokens = len(self.prompt_token_ids)

    def _check(self) -> None:
        if self.num_prompt_tokens == 0:
            self._refuse("the prompt is empty; give at least one token")
        if self.min_tokens > self.max_tokens and not self.more_input:
            self._refuse(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it")
        salt: object = self.cache_salt
        if salt is not None and not isinstance(salt, str):
            self._refuse(f"cache_salt is {salt!r}; it must be text")

    def _integer(self, name: str, value: object, least: int) -> int:
        try:
            return checked_integer(name, value, least)
        except ValueError as error:
            raise RequestRefused(f"request {self.request_id!r} refused: {error}") from None

    def _priority(self, value: object) -> int:
        try:
            return checked_priority(value)
        except ValueError as error:
            self._refuse(str(error))

    def _repetition(self, value: object) -> RepetitionDetectionParams | None:
        try:
            params = RepetitionDetectionParams(**value) if isinstance(value, Mapping) else value
        except (TypeError, ValueError) as error:
            self._refuse(str(error))
        if params is not None and not isinstance(params, RepetitionDetectionParams):
            self._refuse(f"repetition_detection is {value!r}; give RepetitionDetectionParams, or None")
        return params if params is not None and params.max_pattern_size else None

    def _seconds(self, value: object) -> float:
        if isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value):
            return float(value)
        raise RequestRefused(
            f"request {self.request_id!r} refused: arrival_time is {value}; give seconds on the caller's clock"
        )

    def _encoder_inputs(self, given: Sequence[EncoderInput | Sequence[Any]]) -> tuple[EncoderInput, ...]:
        try:
            return read_encoder_inputs(given, self.num_prompt_tokens)
        except ValueError as error:
            self._refuse(str(error))

    def _adapter(self, given: Sequence[Any]) -> Adapter:
        if isinstance(given, (tuple, list)) and len(given) == 2:
            name, version = given
            sound_version = isinstance(version, (int, str)) and not isinstance(version, bool)
            if isinstance(name, str) and name and sound_version:
                return Adapter(name, version)
        self._refuse(f"adapter is {given!r}; give (name, version), a text that is not empty and a number or text")

    def _refuse(self, why: str) -> NoReturn:
        raise RequestRefused(f"request {self.request_id!r} refused: {why}")
