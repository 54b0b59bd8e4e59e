"""Events that a scheduler reports to recordings, statistics, request logs, policies and pages.

A `Listener` overrides the methods of the events that it needs. `Events` holds, for each kind of event, the methods to
call: with no listener an event costs one test. Events are reported after they have happened, in order, on the thread
that owns the scheduler. A listener may read the state, and must not call the scheduler.

    called      a call from outside that changed something, with the arguments to repeat it
    added, refused, queued, parked, deferred, admitted, preempted, rolled_back, finished
                what happened to one request
    stepped     a step is decided: the columnar record of all its rows
    updated     the result of a step was applied
    ran_steps   several steps were decided and applied in one call (fast-forward)
    failed      steps were rolled back
    proposed, loading, loaded
                drafts from the host, and KV from a connector
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from pointsman.core.state.documented import Documented
from pointsman.core.state.reason import Reason, Recovery
from pointsman.core.state.status import PreemptionCause

if TYPE_CHECKING:
    from pointsman.core.state.output import SchedulerOutput, StepUpdate
    from pointsman.core.state.request import Request


class Call(NamedTuple):
    """A call of a scheduler's method by the host, reported after the method returned."""

    name: str
    now: float
    arguments: dict[str, Any]


class Deferred(NamedTuple):
    """A queued request was not admitted, for another reason than in the step before."""

    request: Request
    reason: Reason
    missing: int
    """Number of units that the request lacks: sequence slots, tokens, blocks or others, depending on the reason; 0 if
    the reason is no shortage."""
    holder: str | None
    """Id of the request that holds the largest share of the resource, or that this request waits behind."""
    now: float


class Admitted(NamedTuple):
    """A request got a row."""

    request: Request
    resumed: bool
    """Whether the request ran before and was preempted."""
    num_cached_tokens: int
    """Number of tokens that the request need not compute."""
    num_external_tokens: int
    """Number of the tokens in `num_cached_tokens` that a connector loads, or has loaded."""
    uses_prefix_cache: bool
    """Whether the prefix cache was looked up for the request."""
    now: float


class Need(NamedTuple):
    """The request for which another request, the victim, is preempted, and how the victim was chosen."""

    request: Request
    """The first running request in admission order that lacks blocks, or the more urgent waiting request that is
    admitted."""
    num_missing_blocks: int
    """Number of blocks that all running requests lack together; 0: a priority preemption."""
    chosen_by: str
    """Name of the victim policy that chose the victim; "": no policy was called."""


class Preempted(NamedTuple):
    """A running request lost its row and returned to the queue, or is parked."""

    request: Request
    cause: PreemptionCause
    num_lost_tokens: int
    """Number of computed tokens whose KV the request released."""
    num_cached_tokens: int
    """Number of the lost tokens that a prefix cache lookup would still find."""
    now: float
    recovery: Recovery | None = None
    """How the request gets back lost KV that is evicted; None: by recomputing it (`preemption_mode`)."""
    need: Need | None = None
    """The request that needed the blocks or the row; None: no other request did, see `cause`."""


class LoadStarted(NamedTuple):
    """The host is asked to load KV for a request."""

    request: Request
    num_tokens: int
    is_async: bool
    now: float


class LoadFinished(NamedTuple):
    """A load has ended: it delivered the KV of `num_tokens` tokens."""

    request: Request
    num_tokens: int
    failed: bool
    """Whether the load delivered fewer tokens than requested, or took too long."""
    now: float


@dataclass(slots=True)
class StepDecision(metaclass=Documented):
    """The record of one step; `output` has its columns: rows, tokens and new blocks."""

    step_id: int
    now: float
    output: SchedulerOutput | None = None
    blocked_by: Reason | None = None
    """Why the head of the queue was not admitted; None: the queue is empty, or its head was admitted."""
    returned_blocks: Sequence[npt.NDArray[np.int64]] = ()
    """Ids of the blocks that requests released since the step before, one array for each release; filled only if a
    listener has `wants_blocks`."""


class StepRun(NamedTuple):
    """Steps that were decided, executed and applied in one call: in each step, every running request decoded one
    token."""

    first_step_id: int
    num_steps: int
    times: Sequence[float] | npt.NDArray[np.float64]
    """[num_steps + 1] time of the first step's start, then of each step's end, which is the start of the next step."""
    requests: tuple[Request, ...]
    rows: npt.NDArray[np.integer]
    """[n] rows of the requests, in admission order."""
    serials: npt.NDArray[np.integer]
    num_computed_tokens: npt.NDArray[np.integer]
    """[n] number of computed tokens of each row before the first step."""
    block_ids: npt.NDArray[np.integer]
    """Ids of the blocks that the rows got, in the order of allocation."""
    block_rows: npt.NDArray[np.integer]
    """Parallel to `block_ids`: the index in `requests` of the request that got the block."""
    block_steps: npt.NDArray[np.integer]
    """Parallel to `block_ids`: the index of the step in which the block was allocated, from 0."""
    preempted: tuple[Request, ...]
    """Requests that were preempted before the first step, as the output of that step would have reported them."""
    finished: tuple[Request, ...]
    blocked_by: Reason | None
    """Why the head of the queue was not admitted, the same reason in all of the steps; None: the queue is empty."""
    returned_blocks: Sequence[npt.NDArray[np.int64]]
    """Ids of the blocks that requests released since the step before the first one, see `StepDecision`."""
    update: StepUpdate
    """The scheduler's update for the last step."""


class Listener:
    """Receives the events of a scheduler. Every method does nothing: override the methods that you need."""

    wants_blocks = False
    """Whether `StepDecision.returned_blocks` must be recorded."""

    def on_call(self, event: Call) -> None: ...

    def on_added(self, request: Request, now: float) -> None:
        """The request was accepted; it is queued or parked next."""

    def on_refused(self, request: Request, why: str, now: float) -> None:
        """The request can never run."""

    def on_queued(self, request: Request, now: float) -> None:
        """The request entered the queue: it was added, or is no longer parked."""

    def on_parked(self, request: Request, now: float) -> None:
        """The request is parked: it waits for something other than capacity. Its status says for what."""

    def on_deferred(self, event: Deferred) -> None: ...

    def on_admitted(self, event: Admitted) -> None: ...

    def on_preempted(self, event: Preempted) -> None: ...

    def on_rolled_back(self, request: Request, now: float) -> None:
        """The admission of the request is void, because its step failed; it is back at its place in the queue."""

    def on_finished(self, request: Request, now: float) -> None:
        """The request finished; see its `finish_reason`."""

    def on_step(self, step: StepDecision) -> None:
        """A step is decided."""

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """The result of a step was applied."""

    def on_steps(self, run: StepRun) -> None:
        """Several steps were decided and applied in one call. While a listener overrides `on_step` or `on_update` but
        not this method, steps are decided one by one."""

    def on_failed(self, num_steps: int, now: float) -> None:
        """The newest `num_steps` steps in flight were rolled back."""

    def on_proposed(self, num_drafts: int) -> None:
        """The host proposed `num_drafts` drafts, which the next step verifies."""

    def on_load_started(self, event: LoadStarted) -> None: ...

    def on_load_finished(self, event: LoadFinished) -> None: ...


_Event = TypeVar("_Event")
_Methods = tuple[Callable[[_Event], None], ...]
_RequestMethods: TypeAlias = "tuple[Callable[[Request, float], None], ...]"


class Events:
    """The methods to call for each kind of event, in the order of the listeners."""

    __slots__ = (
        "added",
        "admitted",
        "called",
        "deferred",
        "failed",
        "find_holder",
        "finished",
        "listeners",
        "load_finished",
        "load_started",
        "needs_every_step",
        "parked",
        "preempted",
        "proposed",
        "queued",
        "ran_steps",
        "refused",
        "rolled_back",
        "stepped",
        "updated",
        "wants_blocks",
    )

    def __init__(self, find_holder: Callable[[Request, Reason], str | None]) -> None:
        self.find_holder = find_holder
        """Function that finds the id of the request that holds the resource for which another request waits; called
        only if a listener overrides `on_deferred`."""
        self.set_listeners(())

    def set_listeners(self, listeners: Iterable[Listener]) -> None:
        """Report to these listeners from now on, in this order."""
        self.listeners: tuple[Listener, ...] = tuple(listeners)
        self._collect_methods()

    def _collect_methods(self) -> None:
        listeners = self.listeners
        self.wants_blocks = any(listener.wants_blocks for listener in listeners)
        self.called: _Methods[Call] = _overriding_methods(listeners, "on_call")
        self.added: _RequestMethods = _overriding_methods(listeners, "on_added")
        self.refused: tuple[Callable[[Request, str, float], None], ...] = _overriding_methods(listeners, "on_refused")
        self.queued: _RequestMethods = _overriding_methods(listeners, "on_queued")
        self.parked: _RequestMethods = _overriding_methods(listeners, "on_parked")
        self.deferred: _Methods[Deferred] = _overriding_methods(listeners, "on_deferred")
        self.admitted: _Methods[Admitted] = _overriding_methods(listeners, "on_admitted")
        self.preempted: _Methods[Preempted] = _overriding_methods(listeners, "on_preempted")
        self.rolled_back: _RequestMethods = _overriding_methods(listeners, "on_rolled_back")
        self.finished: _RequestMethods = _overriding_methods(listeners, "on_finished")
        self.stepped: _Methods[StepDecision] = _overriding_methods(listeners, "on_step")
        self.ran_steps: _Methods[StepRun] = _overriding_methods(listeners, "on_steps")
        follows = {*_overriding_listeners(listeners, "on_step"), *_overriding_listeners(listeners, "on_update")}
        self.needs_every_step = not follows <= set(_overriding_listeners(listeners, "on_steps"))
        self.failed: tuple[Callable[[int, float], None], ...] = _overriding_methods(listeners, "on_failed")
        self.proposed: _Methods[int] = _overriding_methods(listeners, "on_proposed")
        self.load_started: _Methods[LoadStarted] = _overriding_methods(listeners, "on_load_started")
        self.load_finished: _Methods[LoadFinished] = _overriding_methods(listeners, "on_load_finished")
        self.updated: tuple[Callable[[SchedulerOutput, StepUpdate, float], None], ...] = _overriding_methods(
            listeners, "on_update"
        )


def send(methods: _Methods[_Event], event: _Event) -> None:
    """Report an event: call `methods`, those of all listeners for this kind of event, in order."""
    for method in methods:
        method(event)


def _overriding_methods(listeners: Iterable[Listener], name: str) -> tuple[Any, ...]:
    """The bound methods called `name`, of the listeners whose class overrides this method."""
    return tuple([getattr(listener, name) for listener in _overriding_listeners(listeners, name)])


def _overriding_listeners(listeners: Iterable[Listener], name: str) -> list[Listener]:
    """The listeners whose class overrides the method called `name`."""
    base = getattr(Listener, name)
    return [listener for listener in listeners if getattr(type(listener), name) is not base]
