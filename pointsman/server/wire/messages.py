"""Messages between the API process and the engine process, over a pair of Unix sockets.

A frame is a length of four bytes, and the pickled message. Both ends are the same program, and the sockets have no
name, so no other program can write to them. An engine on another machine has a TCP connection. No message is read from
it before the other end has sent a secret (`service/remote.py`).
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
"""Maximum size of a frame in bytes; the largest legal message is far smaller."""


# ------------------------------------------------------------------------------------------------- to the engine


@dataclass(slots=True)
class EngineRequest:
    """One sample of one prompt, as the API process requests it. Times are by that process's `time.monotonic`, which
    all processes of a machine share. An engine on another machine adjusts its clock to it (`Start.clock_offset`).
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    priority: int = 0
    cache_salt: str | None = None
    arrival_time: float | None = None
    deadline: float | None = None
    """Time at which the request finishes with finish_reason "deadline", waiting or running; None: no limit."""
    tenant: str = ""
    """The tenant of the request."""
    ttft_target: float | None = None
    """Seconds from the request's arrival until the first token should be generated; None: no target."""
    retention: float | None = None
    """Seconds after the request's end for which its prefix should stay cached; None: not requested."""
    user: str | None = None
    """The client's name for the end user."""
    stream: bool = True
    """Whether each step may send a delta; False: one delta with the first token and one with all further tokens."""
    resumed: Resumed | None = None
    """The output that a dead engine has reported for the request; None: no output yet."""

    def __reduce__(self) -> tuple[type[EngineRequest], tuple[Any, ...]]:
        """Pickle the values without the field names, whose pickling would take longer than everything else."""
        return EngineRequest, _REQUEST_VALUES(self)


_REQUEST_VALUES = attrgetter(*(one.name for one in fields(EngineRequest)))


@dataclass(slots=True)
class Add:
    """Queue requests, in this order; later messages refer to them by their keys.

    An object that several requests share, such as a prompt's tokens, biases or a grammar, is pickled once. So samples
    of one prompt belong in one message.
    """

    requests: list[tuple[int, EngineRequest]]


@dataclass(slots=True)
class Abandon:
    """Abort the request of this key, whose outputs are no longer read."""

    key: int


@dataclass(slots=True)
class Ask:
    """A question or command to be answered between two steps."""

    key: int
    question: Question[Any]


@dataclass(slots=True)
class Stop:
    """End the engine: immediately, or, if `drain` is set, when all added requests have finished."""

    drain: bool


@dataclass(slots=True)
class Start:
    """The first message: the options of the engine."""

    options: dict[str, Any]
    """Keyword arguments of `Engine`."""
    record: str | None
    """The file of the scheduler's recording; None: no recording."""
    log_stats_interval: float | None
    max_step_retries: int
    warm_up: bool
    """Whether the engine runs test requests of every kind before it accepts requests."""
    name: str = ""
    """Prefix of the engine's log lines, after the program's name."""
    clock_offset: float = 0.0
    """Seconds by which the API process's `time.monotonic` is ahead of the engine's, if they are on two machines."""
    record_when_full: WhenFull = "stop"
    """What happens to the recording when the disk is full."""
    must_record: bool = True
    """Whether an engine whose recording cannot be opened does not start."""
    is_verbose: bool = False
    """Whether the engine also logs what its developers need."""


# ------------------------------------------------------------------------------------------------- from the engine


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """The description of an engine that has loaded its model."""

    pid: int
    model: str
    """The operator's name for the model: a directory, or "demo"."""
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
    """Number of tokens that the KV pool can hold; if layers are in KV groups, the number holds for requests of the
    maximum length."""
    full_length_requests: float
    """Number of requests of the maximum length that the KV pool can hold together."""
    scheduler: dict[str, Any]
    """The scheduler's configuration, from `SchedulerConfig.to_dict()`."""
    generation_defaults: dict[str, Any]
    """Sampling parameters that the model's generation settings recommend, by their names in `SamplingParams`."""

    @property
    def max_num_running(self) -> int:
        """Maximum number of requests that run concurrently, as configured at the start."""
        active: int | None = self.scheduler["max_num_active_seqs"]
        max_num_seqs: int = self.scheduler["max_num_seqs"]
        return max_num_seqs if active is None else active


@dataclass(slots=True)
class Failed:
    """The engine could not be created; `is_usage_error`: because of a wrong option, or a model that cannot run."""

    message: str
    is_usage_error: bool


class StepNote(NamedTuple):
    """Numbers of tokens and scheduler time of one step, for the metrics."""

    num_scheduled_tokens: int
    num_generated_tokens: int
    scheduler_seconds: float


PlainTokens: TypeAlias = tuple[int, str, list[int], int]
"""The delta of a request that only got tokens: the key of the request, then `text`, `token_ids` and
`num_cached_tokens` as in `Delta`. Nearly all deltas have this form, so the messages contain no `Delta` objects for
them."""


@dataclass(slots=True)
class Delta:
    """The changes of a request since its previous delta. If the reader was slow, a delta has the changes of several
    steps."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    """One of "stop", "length", "repetition", "abort", "deadline" and "error"; None while the request runs."""
    finish_detail: str = ""
    stop_reason: int | str | None = None
    prompt_logprobs: Logprobs | None = None
    """Log probabilities of the prompt, in the first delta if the client asked for them."""
    metrics: RequestMetrics | None = None
    """Times and counts of the request, in the last delta."""
    num_cached_tokens: int = 0
    embedding: npt.NDArray[np.float32] | None = None
    """Vector [hidden size] of a request with `PoolingParams`, in the last delta."""

    def merge(self, later: Delta) -> None:
        """Append the next delta of the same request."""
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
    """Changes of requests, and a `StepNote` for each step, since the previous message of this class."""

    accepted: list[int] = field(default_factory=list)
    """Keys of requests that the engine has queued."""
    tokens: list[PlainTokens] = field(default_factory=list)
    """Deltas of requests that only got tokens."""
    deltas: list[tuple[int, Delta]] = field(default_factory=list)
    """All other deltas, each with the key of its request: those of finished requests, and those with further fields."""
    errors: list[tuple[int, Exception]] = field(default_factory=list)
    """Errors of requests that were refused, or ended by the engine's death, each with the key of its request."""
    steps: list[StepNote] = field(default_factory=list)


@dataclass(slots=True)
class Answer:
    """The reply to an `Ask`."""

    key: int
    value: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class Beat:
    """A sign of life, which the engine's thread sends during a long step."""

    patience: float
    """Seconds of silence that the engine announces; 0: no longer than usual."""


# ------------------------------------------------------------------------------------------------- frames


def pack(message: object) -> bytes:
    """The frame of a message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(body)) + body


class Unpacker:
    """Reads messages from a stream of bytes that arrives in pieces."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterable[Any]:
        """The messages that become complete with `data`.

        Raises:
            ValueError: a frame is longer than `MAX_FRAME`, so the sender is no Pointsman process.
        """
        if not self._buffer and len(data) >= _HEAD.size:
            (length,) = _HEAD.unpack_from(data)
            if len(data) == _HEAD.size + length:  # usually exactly one frame
                return (pickle.loads(memoryview(data)[_HEAD.size :]),)
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[Any]:
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEAD.size:
            (length,) = _HEAD.unpack_from(buffer, start)
            if length > MAX_FRAME:
                raise ValueError(
                    f"a message has {length} bytes, but at most {MAX_FRAME} are allowed: the sender is not a Pointsman "
                    "process"
                )
            end = start + _HEAD.size + length
            if end > len(buffer):
                break
            with memoryview(buffer) as view, view[start + _HEAD.size : end] as body:
                message = pickle.loads(body)
            start = end
            yield message
        del buffer[:start]


def portable(error: BaseException) -> Exception:
    """An error that can be sent: `error` itself if it can be pickled and rebuilt, else another exception with the same
    message."""
    try:
        rebuilt = pickle.loads(pickle.dumps(error))
    except Exception:
        rebuilt = None
    if isinstance(rebuilt, Exception) and str(rebuilt) == str(error):
        return rebuilt
    kind = ValueError if isinstance(error, ValueError) else RuntimeError
    return kind(f"{type(error).__name__}: {error}")
