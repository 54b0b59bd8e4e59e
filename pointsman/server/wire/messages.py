"""What crosses between the API process and the engine process: messages over a pair of Unix sockets.

A frame is four bytes of length, and the message, pickled. Both ends are the same program, and the sockets have no name,
so no other program can write into them. Where the engine is on another machine it is a TCP connection, of which no
message is read before the other end has shown a secret (`service/remote.py`).
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from pointsman.core.observe.side_file import WhenFull
from pointsman.engine.outputs.request_output import RequestMetrics

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pointsman.engine.outputs.request_output import Resumed
    from pointsman.engine.params.pooling import PoolingParams
    from pointsman.engine.params.sampling import SamplingParams
    from pointsman.server.wire.logprobs import Logprobs
    from pointsman.server.wire.questions import Question

_HEAD = struct.Struct("!I")
MAX_FRAME = 2**31
"""Bytes; the largest legal message is far smaller."""


# ------------------------------------------------------------------------------------------------- what is asked for


@dataclass(slots=True)
class EngineRequest:
    """One sample of one prompt, as the API process asks for it. Times are of its `time.monotonic`, which all processes
    of a machine share; an engine on another machine sets its clock by that (`Start.clock_offset`).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float | None = None
    deadline: float | None = None
    """When it finishes with finish_reason "deadline", waiting or running; None: never."""
    tenant: str = ""
    """Whose request it is."""
    ttft_target: float | None = None
    """Seconds from its arrival within which its first token is wanted."""
    retention: float | None = None
    """Seconds after its end for which its prefix is worth keeping cached."""
    user: str | None = None
    """What its client calls the user."""
    stream: bool = True
    """False: after the first delta, which reports the first token, one with all remaining tokens is enough."""
    resumed: Resumed | None = None
    """What an engine that died has reported of it; None: nothing yet."""

    def __reduce__(self) -> tuple[type[EngineRequest], tuple[Any, ...]]:
        """Its values without the names of the fields, which take longer than all the rest."""
        return EngineRequest, _REQUEST_VALUES(self)


_REQUEST_VALUES = attrgetter(*(one.name for one in fields(EngineRequest)))


@dataclass(slots=True)
class Add:
    """Queue requests, in this order; their keys name them from now on.

    An object that several of them refer to, such as a prompt's tokens, biases or a grammar, is pickled once, so samples
    of one prompt belong in one message.
    """

    requests: list[tuple[int, EngineRequest]]


@dataclass(slots=True)
class Abandon:
    """Abort this request: its outputs have no reader any more."""

    key: int


@dataclass(slots=True)
class Ask:
    """A question or command to be answered between two steps."""

    key: int
    question: Question[Any]


@dataclass(slots=True)
class Stop:
    """End the engine: at once, or when all added requests have finished."""

    drain: bool


@dataclass(slots=True)
class Start:
    """The first message: what to make."""

    options: dict[str, Any]
    """Keyword arguments of `Engine`."""
    record: str | None
    """A file for the scheduler's recording."""
    log_stats_interval: float | None
    max_step_retries: int
    warm_up: bool
    """Whether requests are rehearsed before the engine takes any."""
    name: str = ""
    """What lines of its log begin with, beside the program's name."""
    clock_offset: float = 0.0
    """Seconds by which the API process's `time.monotonic` is ahead of the engine's, where they are on two machines."""
    record_when_full: WhenFull = "stop"
    """What a full disk does to the recording."""
    must_record: bool = True
    """Whether an engine whose recording cannot be opened does not start."""


# ------------------------------------------------------------------------------------------------- what comes back


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The description of an engine that has loaded its model."""

    pid: int
    model: str
    """As the operator named it: a directory, or "demo"."""
    max_model_len: int
    vocab_size: int
    num_parameters: int
    dtype: str
    kv_cache_dtype: str
    device: str
    attention: str
    num_blocks: int
    block_size: int
    kv_cache_bytes: int
    kv_cache_tokens: int
    """Tokens that the pool holds; with KV in groups of layers, in requests of the longest length."""
    full_length_requests: float
    """Requests of the longest length that it holds at once."""
    scheduler: dict[str, Any]
    """`SchedulerConfig.to_dict()`."""
    generation_defaults: dict[str, Any]
    """Sampling parameters that the model's own generation settings recommend, by their names in `SamplingParams`."""

    @property
    def max_num_running(self) -> int:
        """Maximum number of requests that run at once, as configured at the start."""
        active: int | None = self.scheduler["max_num_active_seqs"]
        max_num_seqs: int = self.scheduler["max_num_seqs"]
        return max_num_seqs if active is None else active


@dataclass(slots=True)
class Failed:
    """The engine could not be made: the caller's fault (a bad knob, a model that cannot be run), or not."""

    message: str
    is_usage_error: bool


class StepNote(NamedTuple):
    """One step, for the metrics."""

    num_scheduled_tokens: int
    num_generated_tokens: int
    scheduler_seconds: float


PlainTokens: TypeAlias = tuple[int, str, list[int], int]
"""The delta of a request that only got tokens: its key, then `text`, `token_ids` and `num_cached_tokens` as in `Delta`.
Nearly every delta is one, so no object is made of it on its way."""


@dataclass(slots=True)
class Delta:
    """What is new about a request since its last delta; of several steps if the reader was slow."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    """"stop", "length", "repetition", "abort", "deadline" or "error"; None while it runs."""
    finish_detail: str = ""
    stop_reason: int | str | None = None
    prompt_logprobs: Logprobs | None = None
    """In the first one, if asked for."""
    metrics: RequestMetrics | None = None
    """In the last one."""
    num_cached_tokens: int = 0
    embedding: npt.NDArray[np.float32] | None = None
    """In the last one, of a request with `PoolingParams`."""

    def merge(self, later: Delta) -> None:
        """Append the delta that follows this one."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is None:
            self.logprobs = later.logprobs
        elif later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        self.finish_reason = later.finish_reason
        self.finish_detail = later.finish_detail
        self.stop_reason = later.stop_reason
        if self.prompt_logprobs is None:
            self.prompt_logprobs = later.prompt_logprobs
        self.metrics = later.metrics
        self.num_cached_tokens = later.num_cached_tokens
        self.embedding = later.embedding


@dataclass(slots=True)
class EngineOutputs:
    """What happened to requests, and which steps ran, since the last message of this kind."""

    accepted: list[int] = field(default_factory=list)
    """Keys of requests that are queued now."""
    tokens: list[PlainTokens] = field(default_factory=list)
    """Of requests that only got tokens."""
    deltas: list[tuple[int, Delta]] = field(default_factory=list)
    """Of the others: those that finished, and those with more than tokens."""
    errors: list[tuple[int, Exception]] = field(default_factory=list)
    """Of requests that were refused, or that the engine's death ended."""
    steps: list[StepNote] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """To an `Ask`."""

    key: int
    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Beat:
    """The engine's thread goes on, in a step that takes long."""

    patience: float
    """Seconds for which it may be silent now; 0: for no longer than usual."""


# ------------------------------------------------------------------------------------------------- frames


def pack(message: object) -> bytes:
    """The frame of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Messages out of a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[Any]:
        """The messages that are complete with these bytes.

        Raises:
            ValueError: a frame is longer than any message could be: this is not the other end.
        """
        if not self._buffer and len(data) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(data)
            if len(data) == _HEAD.size + length:  # one whole frame, as a rule
                return (pickle.loads(memoryview(data)[_HEAD.size :]),)
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes; the limit is {MAX_FRAME}")
            end = start + _HEAD.size + length
            if end > len(buffer):
                break
            with memoryview(buffer) as view, view[start + _HEAD.size : end] as body:
                message = pickle.loads(body)
            start = end
            yield message
        del buffer[:start]


def portable(error: BaseException) -> Exception:
    """An error that can cross: the given one if it can be pickled and rebuilt, else one with its message."""
    try:
        rebuilt = pickle.loads(pickle.dumps(error))
    except Exception:
        rebuilt = None
    if isinstance(rebuilt, Exception) and str(rebuilt) == str(error):
        return rebuilt
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(f"{type(error).__name__}: {error}")
