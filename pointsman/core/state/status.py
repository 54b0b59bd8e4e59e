"""The states of a request, the reasons for parking, preemption and finish, its events, and the pauses of a scheduler.

The states of a request:

    WAITING ----> RUNNING ----> FINISHED_*
       |  ^        |   ^
       v  |        v   |
     parked <--- PREEMPTED          (every state but the finished ones may also finish)
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class RequestStatus(enum.Enum):
    """The state of a request: exactly one of queued, parked, running or finished."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    WAITING_FOR_GRAMMAR = "waiting_for_grammar"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    WAITING_FOR_STREAMING_REQ = "waiting_for_streaming_req"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_REFUSED = "finished_refused"
    FINISHED_ERROR = "finished_error"
    FINISHED_DEADLINE = "finished_deadline"
    FINISHED_REPETITION = "finished_repetition"

    __hash__ = object.__hash__  # equality is identity, and Enum hashes its name in Python

    @property
    def is_finished(self) -> bool:
        return self in _FINISHED

    @property
    def is_parked(self) -> bool:
        return self in _PARKED


class ParkReason(enum.Enum):
    """What a parked request waits for, other than capacity."""

    GRAMMAR = "grammar"
    REMOTE_KVS = "remote_kvs"
    STREAMING_REQ = "streaming_req"

    @property
    def status(self) -> RequestStatus:
        return RequestStatus(f"waiting_for_{self.value}")


class PreemptionCause(enum.Enum):
    """Why a running request lost its row and its blocks before it finished."""

    MEMORY = "memory"
    """No block was free for a running request."""
    DISPLACED = "displaced"
    """Priority preemption: a more urgent waiting request was admitted in its place."""
    PARKED = "parked"
    """The host parked the request."""
    RESET = "reset"
    """The prefix cache was reset, with running requests to be recomputed."""
    UNSAMPLED = "unsampled"
    """The host returned no token for a row that samples, see `StepResult.unsampled`."""

    @property
    def exists_in_vllm(self) -> bool:
        """Whether vLLM preempts for this cause too, so that vLLM's metrics count such a preemption.

        vLLM's scheduler preempts in two places: when `allocate_slots` finds no block, and in
        `reset_prefix_cache(reset_running_requests=True)`.
        """
        return self in (PreemptionCause.MEMORY, PreemptionCause.RESET)


class FinishReason(enum.Enum):
    """Why a request finished; the values are those of the OpenAI API, if it has one for the reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    REFUSED = "refused"
    ERROR = "error"
    DEADLINE = "deadline"
    """The host finished the request, waiting or running, because its deadline passed."""
    REPETITION = "repetition"
    """The output repeats itself, see `repetition.py`."""

    __hash__ = object.__hash__

    @property
    def status(self) -> RequestStatus:
        return _STATUS_OF_REASON[self]


_STATUS_OF_REASON = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.REFUSED: RequestStatus.FINISHED_REFUSED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
    FinishReason.DEADLINE: RequestStatus.FINISHED_DEADLINE,
    FinishReason.REPETITION: RequestStatus.FINISHED_REPETITION,
}
_FINISHED = frozenset(_STATUS_OF_REASON.values())
_PARKED = frozenset(reason.status for reason in ParkReason)
_ENDS = _FINISHED - {RequestStatus.FINISHED_REFUSED}
# Undoing a failed step returns a request to the queue in the state that it had there, so RUNNING -> WAITING is legal.
NEXT: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: _FINISHED | _PARKED | {RequestStatus.RUNNING},
    RequestStatus.RUNNING: _ENDS | _PARKED | {RequestStatus.PREEMPTED, RequestStatus.WAITING},
    RequestStatus.PREEMPTED: _ENDS | _PARKED | {RequestStatus.RUNNING},
    **{parked: _ENDS | {RequestStatus.WAITING, RequestStatus.PREEMPTED} for parked in _PARKED},
    **{finished: frozenset() for finished in _FINISHED},
}


class RequestEventType(enum.IntEnum):
    """Kinds of events. The first three have the names and numbers of vLLM's `EngineCoreEventType`."""

    QUEUED = 1
    """The request entered the queue: it was added, or is ready after it was parked."""
    SCHEDULED = 2
    """The request was admitted for the first time."""
    PREEMPTED = 3
    """The request lost its blocks and returned to the queue."""
    RESUMED = 4
    """The request was admitted again. (vLLM records this as SCHEDULED, too.)"""
    PARKED = 5
    """The request waits for something other than capacity, which `detail` names; if it ran, it lost its blocks."""
    ROLLED_BACK = 6
    """The admission of the request is void, because its step failed; the request is back at its place in the queue."""
    FIRST_TOKEN = 7
    FINISHED = 8
    """The request finished; `detail` is the finish reason."""


class RequestEvent(NamedTuple):
    """One entry of a request's log."""

    type: RequestEventType
    timestamp: float
    """The `now` of the call in which the event happened."""
    detail: str = ""


class PauseMode(enum.Enum):
    """What a pause stops."""

    ALL = "all"
    """The scheduler schedules nothing. Running requests keep their blocks, and continue after the pause."""
    ADMISSIONS = "admissions"
    """The scheduler admits no request, preempted requests included; running requests continue until they finish."""


class Pause(NamedTuple):
    """A pause in effect."""

    mode: PauseMode
    since: float
    """Time at which the pause was requested, on the caller's clock."""
