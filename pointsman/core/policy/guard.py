"""Guards: check every result of a policy of another package.

If such a policy raises or breaks its contract, the step fails with the name of the policy, and no request is lost.
Policies of other packages are wrapped when a scheduler is built; built-in policies are called directly. The guard of an
order keeps its own list of queued requests. So it detects immediately that an order forgets a request, or returns a
request twice.

After `max_policy_failures` failed steps a policy is replaced by the default of its kind. The count starts again after
`SOUND_STEPS` steps without a failure. A policy that cannot be constructed or attached is replaced at the start.
Replacements depend on the calls of the scheduler alone. A recording has the failed steps, and its header has the
policies that were replaced before it began, so it can be replayed.

The guard logs one line for each failed step, with the traceback for the first failure of a policy, and one line for the
replacement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import ConfigError, PolicyError
from pointsman.core.policy.eviction import LRU
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.gate import Gate, Limit
from pointsman.core.policy.order import PriorityOrder
from pointsman.core.policy.policy import Policy, spec_of
from pointsman.core.policy.reserve import Reserve
from pointsman.core.policy.victim import VICTIMS, default_victim
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Eviction, Order, Victim, View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]
SOUND_STEPS = 100
"""Number of steps without a failure after which earlier failures of a policy no longer count."""


class Replaced(NamedTuple):
    """A policy of another package that failed and was replaced by the default of its kind."""

    kind: str
    policy: str
    """The name of the failed policy with parameters, as configured."""
    by: str
    """The name of the default policy; "" for a reserve or a limit, whose default does nothing."""
    error: str
    """The last error of the failed policy."""


def guarded(kind: str, policy: Any) -> Any:
    """The policy within a guard, which checks every result; a built-in policy is returned without a guard."""
    if is_own(type(policy)):
        return policy
    return _GUARDS[kind](policy)


def is_own(policy: type) -> bool:
    """Whether a policy class is built in, so that its objects need no guard."""
    return policy.__module__.startswith("pointsman.core.policy.")


def in_place_of(kind: str, policy: Any, spec: str, error: str, cause: Exception | None = None) -> Any:
    """A guard with the default policy, for a policy that is replaced at the start.

    Args:
        policy: the class of the replaced policy, or the policy object.
        spec: the name of the replaced policy with parameters.
        error: the error in words.
        cause: the exception to be logged; None: nothing is to be logged.
    """
    guard: Guard = _GUARDS[kind](_STARTING_DEFAULTS[kind](policy))
    guard.name, guard.version, guard.spec = policy.name, getattr(policy, "version", 1), spec
    guard.replace_at_start(error, cause)
    return guard


def head_of(queue: Order) -> Request:
    """The head of a queue that is not empty. Observers read it without changing the state of the queue."""
    return queue.peek_without_failing() if isinstance(queue, GuardedOrder) else queue.peek()


def replaced_among(policies: Iterable[Any]) -> tuple[Replaced, ...]:
    """The replaced policies among the `policies` of a scheduler."""
    return tuple(each.replaced for each in policies if isinstance(each, Guard) and each.replaced is not None)


class Guard:
    """Base class of the guards. A guard has the name, the version and the optional methods of its policy."""

    kind: ClassVar[str] = ""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.name: str = policy.name
        self.version: int = getattr(policy, "version", 1)
        self.spec = spec_of(policy)
        """The name of the policy with parameters."""
        self.replaced: Replaced | None = None
        """The failed policy, if it was replaced by the default; None: it was not replaced."""
        self._error: PolicyError | None = None  # raised at the next call of the policy in a step
        self._changes = itertools.count(1)
        self._view: View | None = None
        self._failure: PolicyError | None = None  # the failure of this step
        self._num_failures = self._num_sound = 0  # failed steps that count; steps since the last failed step
        self._has_logged = False  # whether a traceback was logged
        self._cause: Exception | None = None  # cause of a replacement at the start, to be logged

    def attach(self, view: View) -> None:
        """Attach the policy to the view of its scheduler. If that fails, the policy is replaced."""
        self._view = view
        if hasattr(self.policy, "attach"):
            try:
                self.policy.attach(view)
            except Exception as error:
                self.replace_at_start(error_in_words("attach", error), error)

    def replace_at_start(self, error: str, cause: Exception | None) -> None:
        """Replace the policy before it decides anything. `log_start` logs the replacement, with the traceback of the
        cause."""
        self._cause = cause
        self._replace_with_default(error)

    def log_start(self) -> None:
        """Log that the policy was replaced at the start, if it was replaced."""
        cause, self._cause = self._cause, None
        if cause is not None and self.replaced is not None:
            _log(
                "error",
                f"{self._policy_in_words()} cannot be used ({self.replaced.error}), and {self._replacement_in_words()}"
                "; correct the policy and start again",
                cause,
            )

    def step_succeeded(self) -> None:
        """Called when a step was decided without an error."""
        self._failure = None
        if self._num_failures:
            self._num_sound += 1
            if self._num_sound >= SOUND_STEPS:
                self._num_failures = 0

    def step_failed(self, max_failures: int) -> bool:
        """Called when a step failed. Returns whether this policy failed in the step. After `max_failures` failed steps
        the policy is replaced."""
        failure, self._failure = self._failure, None
        if failure is None:
            return False
        self._num_failures, self._num_sound = self._num_failures + 1, 0
        cause = failure.__cause__ if not self._has_logged else None
        self._has_logged |= cause is not None
        if self._num_failures < max_failures:
            _log("warning", f"{failure} (failed step {self._num_failures}; it is replaced after {max_failures})", cause)
            return True
        self._replace_with_default(failure.what)
        _log(
            "error",
            f"{failure}. It failed in {self._num_failures} steps, and {self._replacement_in_words()}; correct the "
            "policy and start again",
            cause,
        )
        return True

    def is_sound(self) -> bool:
        """Whether the next call of the policy is expected to succeed."""
        return self._error is None

    def forget_failure(self) -> None:
        """Forget a failure of a call outside a step, since the step repeats the call."""
        self._failure = None

    def _policy_in_words(self) -> str:
        return f"{self.kind} {self.spec!r}"

    def _replacement_in_words(self) -> str:
        return f"{self.policy.name or f'no {self.kind}'} decides in its place from now on"

    def _make_default(self) -> Any:
        """The default policy of this kind, which can start from any state of the scheduler."""
        raise NotImplementedError

    def _replace_with_default(self, error: str) -> None:
        default = self._make_default()
        self.replaced = Replaced(self.kind, self.spec, default.name, error)
        self._error = None
        if self._view is not None:
            default.attach(self._view)
        self.policy = default

    def guaranteed_steps(self, num_steps: int) -> int:
        """The result of the policy; 0 if the policy lacks this method, so that it is called in every step."""
        if not hasattr(self.policy, "guaranteed_steps"):
            return 0
        answer = self._call_policy("guaranteed_steps", num_steps)
        if not isinstance(answer, int) or not 0 <= answer <= num_steps:
            raise self._broken_contract(
                f"guaranteed_steps({num_steps}) returned {answer!r}; it must return an integer from 0 to {num_steps}"
            )
        return answer

    def as_listener(self) -> Policy:
        """The policy as a listener. Errors of its event methods are raised at its next call in a step, since only a
        step can fail."""
        return _as_listener(self)

    def _call_policy(self, method: str, *arguments: Any) -> Any:
        self._raise_pending_error()
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            raise self._broken_contract(error_in_words(method, error)) from error

    def _read_number(self, attribute: str) -> int:
        try:
            return int(getattr(self.policy, attribute))
        except Exception as error:
            raise self._broken_contract(error_in_words(attribute, error)) from error

    def _notify_policy(self, method: str, *arguments: Any) -> None:
        """Like `_call_policy`, but an error is raised later, at the next call of the policy in a step, since only a
        step can fail."""
        try:
            getattr(self.policy, method)(*arguments)
        except Exception as error:
            self.fail_next(error_in_words(method, error), error)

    def _raise_pending_error(self) -> None:
        if self._error is not None:
            self._failure, self._error = self._error, None
            raise self._failure

    def fail_next(self, what: str, cause: Exception | None = None) -> None:
        """Store the error `what`, to be raised at the next call of the policy in a step."""
        self._error = self._make_error(what)
        self._error.__cause__ = cause

    def _broken_contract(self, what: str) -> PolicyError:
        self._failure = self._make_error(what)
        return self._failure

    def _make_error(self, what: str) -> PolicyError:
        return PolicyError(f"{self._policy_in_words()}: {what}. The step failed and no request is lost", what)


class GuardedOrder(Guard):
    """The guard of an order of another package."""

    kind = "order"

    def __init__(self, policy: Order) -> None:
        super().__init__(policy)
        self.is_preemptive: bool = policy.is_preemptive
        self._queued: dict[Request, None] = {}
        self._strays: dict[Request, None] = {}  # queued requests that the policy's own queue may have lost

    def push(self, request: Request) -> None:
        self._queued[request] = None
        self._queue_requests("push", request, [request])

    def put_back(self, requests: Sequence[Request]) -> None:
        self._queued |= dict.fromkeys(requests)
        self._queue_requests("put_back", requests, requests)

    def _queue_requests(self, method: str, argument: Any, requests: Sequence[Request]) -> None:
        """Queue the `requests` by calling `method` of the policy with `argument`. They are queued even if the policy
        fails. Requests that the policy may have lost come first, by arrival."""
        if self._strays:  # a request returning from a failed step may have arrived before a stray
            newest = max(map(_arrival, self._strays))
            self._strays |= dict.fromkeys(each for each in requests if _arrival(each) < newest)
        try:
            getattr(self.policy, method)(argument)
        except Exception as error:
            self._take_over_queue()
            self.fail_next(error_in_words(method, error), error)

    def _take_over_queue(self) -> None:
        """Take over all queued requests, as the state of the policy's queue is unknown after a failure. The guard then
        pops these requests itself, in order of arrival, and removes each from the policy's queue."""
        self._strays |= self._queued

    def _remove_from_policy(self, request: Request) -> None:
        with contextlib.suppress(Exception):
            if request in self.policy:
                self.policy.remove(request)

    def peek(self) -> Request:
        self._raise_pending_error()
        if self._strays:
            return min(self._strays, key=_arrival)
        head = self._call_policy("peek")
        if not self._is_queued(head):
            self._take_over_queue()
            raise self._broken_contract(f"peek() returned {_head_in_words(head)}, which is not in the queue")
        return head  # type: ignore[no-any-return]

    def peek_without_failing(self) -> Request:
        """Like `peek`, for an explanation. If the policy fails, the head is the oldest request. The call changes no
        state and fails no step, since calls between steps are in no recording."""
        with contextlib.suppress(Exception):
            if not self._strays and self._is_queued(head := self.policy.peek()):
                return head  # type: ignore[no-any-return]
        return min(self._strays or self._queued, key=_arrival)

    def is_sound(self) -> bool:
        if self._strays or not self._queued or not super().is_sound():
            return super().is_sound()
        with contextlib.suppress(Exception):
            return self._is_queued(self.policy.peek())
        return False

    def _is_queued(self, head: Any) -> bool:
        return isinstance(head, Request) and head in self._queued

    def pop(self) -> Request:
        expected = self.peek()
        if expected in self._strays:
            del self._strays[expected]
            self._remove_from_policy(expected)
        else:
            try:
                head = self._call_policy("pop")
            except PolicyError:
                self._take_over_queue()
                raise
            if head is not expected:
                self._take_over_queue()
                raise self._broken_contract(
                    f"pop() returned {_head_in_words(head)}, but peek() returned {_head_in_words(expected)}; both must "
                    "return the head of the queue"
                )
        del self._queued[expected]
        return expected

    def remove(self, request: Request) -> None:
        del self._queued[request]
        if self._strays.pop(request, self) is not self:
            self._remove_from_policy(request)
            return
        try:
            self.policy.remove(request)
        except Exception as error:
            self._take_over_queue()
            self.fail_next(error_in_words("remove", error), error)

    def _make_default(self) -> Any:
        return _default_order(self)

    def _replace_with_default(self, error: str) -> None:
        super()._replace_with_default(error)
        self._strays.clear()
        for request in sorted(self._queued, key=_arrival):
            request._state.queue_entry = None  # it was an entry of the replaced order
            self.policy.push(request)

    def position(self, request: Request) -> int:
        """The number of requests before `request` in the queue; by arrival if the policy fails."""
        if request in self._strays:
            return sum(_arrival(other) < _arrival(request) for other in self._strays)
        if self._strays:  # the policy's own queue may still have some of these
            behind = sum(_arrival(other) < _arrival(request) for other in self._queued if other not in self._strays)
            return len(self._strays) + behind
        with contextlib.suppress(Exception):  # an explanation fails no step, as it is in no recording
            return int(self.policy.position(request))
        return sum(_arrival(other) < _arrival(request) for other in self._queued)

    def reason(self, request: Request) -> str:
        """Why the request is not the head of the queue, in words; "": the policy gives no reason."""
        with contextlib.suppress(Exception):
            if hasattr(self.policy, "reason") and not self._strays:
                return str(self.policy.reason(request))
        return ""

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, request: Request) -> bool:
        return request in self._queued

    def __iter__(self) -> Iterator[Request]:
        return iter(list(self._queued))


class GuardedVictim(Guard):
    """The guard of a victim policy of another package."""

    kind = "victim"

    def __init__(self, policy: Victim) -> None:
        super().__init__(policy)
        self._order = ""

    def set_order(self, order: str) -> None:
        """Set the name of the order policy. The default victim policy, which replaces a failed victim policy, depends
        on the order."""
        self._order = order
        if self.replaced is not None:
            self._replace_with_default(self.replaced.error)

    def _make_default(self) -> Any:
        return VICTIMS[default_victim(self._order)]()

    def choose(self, view: View, asking: int) -> int:
        answer = self._call_policy("choose", view, asking)
        num_running = len(view.rows)
        try:
            index = answer.__index__()
        except Exception:
            index = -1
        if not 0 <= index < num_running:
            raise self._broken_contract(
                f"choose() returned {answer!r}; it must return the index of a running request, below {num_running}"
            )
        return int(index)


class _NoReserve(Reserve):
    def blocks(self, request: Request, demand: Any, view: View) -> int:
        return 0


class GuardedReserve(Guard):
    """The guard of a reserve of another package."""

    kind = "reserve"

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.reason = policy.reason

    def _make_default(self) -> Any:
        return _NoReserve()

    @property
    def num_changes(self) -> int:
        if getattr(type(self.policy), "num_changes", 0) == 0 and "num_changes" not in vars(self.policy):
            return next(self._changes)  # without this attribute, the policy is called in every step
        return self._read_number("num_changes")

    def blocks(self, request: Request, demand: Any, view: View) -> int:
        answer = self._call_policy("blocks", request, demand, view)
        if not isinstance(answer, int) or answer < 0:
            raise self._broken_contract(f"blocks() returned {answer!r}; it must return a number of blocks, at least 0")
        return answer


class GuardedLimit(Guard, Limit):
    """The guard of a limit of another package."""

    kind = "limit"

    def __init__(self, policy: Limit) -> None:
        super().__init__(policy)
        self.limits_decode, self.limits_drafts = policy.limits_decode, policy.limits_drafts
        self.is_shared = policy.is_shared
        if hasattr(policy, "step_budget"):
            self.step_budget = self._step_budget

    def _make_default(self) -> Any:
        return Limit()

    @property
    def revision(self) -> int:  # type: ignore[override]
        if type(self.policy).revision == 0 and "revision" not in vars(self.policy):
            return next(self._changes)
        return self._read_number("revision")

    def guaranteed_steps(self, num_steps: int) -> int:
        return (
            super().guaranteed_steps(num_steps)
            if type(self.policy).guaranteed_steps is not Gate.guaranteed_steps
            else 0
        )

    def open_step(self, num_requests: int) -> None:
        self._notify_policy("open_step", num_requests)

    def open_queue(self) -> None:
        self._call_policy("open_queue")

    def _step_budget(self, most: int, view: View) -> int:
        if self.replaced:
            return most
        answer = self._call_policy("step_budget", most, view)
        if not isinstance(answer, int) or answer > most:
            raise self._broken_contract(
                f"step_budget() returned {answer!r}; it must return an integer of at most {most}, in tokens"
            )
        return answer

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        return bool(self._call_policy("lacks_step_time", request, num_running, num_tokens))

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        before = want.copy()
        self._call_policy("clip", batch, rows, want)
        if np.any(want > before) or np.any(want < 0):
            raise self._broken_contract(
                "clip() raised a row's number of tokens, or lowered it below 0; it may only lower it, to 0 or more"
            )

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        answer = self._call_policy("check", request, start, want, view)
        if isinstance(answer, Deferral) or (isinstance(answer, int) and min(want, 1) <= answer <= want):
            return answer
        raise self._broken_contract(
            f"check() returned {answer!r} for a request with {want} uncomputed tokens; it must return 1 to {want} "
            "tokens, or a Deferral"
        )

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        self._notify_policy("commit", request, start, num_tokens)

    def release(self, request: Request) -> None:
        self._notify_policy("release", request)


class GuardedEviction(Guard):
    """The guard of an eviction policy of another package. The policy is called where its error cannot fail a step. So
    the error is raised when the next step opens, and a failed call retains nothing."""

    kind = "eviction"

    def __init__(self, policy: Eviction) -> None:
        super().__init__(policy)
        self.share, self.per_tenant = policy.share, policy.per_tenant
        if not isinstance(self.share, (int, float)) or not 0 <= self.share <= 1:
            raise ConfigError(f"share of eviction {policy.name!r} is {self.share!r}; it must be a number from 0 to 1")

    def _make_default(self) -> Any:
        return LRU()

    def open_step(self) -> None:
        """Raise a PolicyError if the policy failed since the last step."""
        self._raise_pending_error()

    def started(self, request: Request, labels: Int64Array) -> None:
        self._notify_policy("started", request, labels)

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        try:
            answer = self.policy.retained(request, num_blocks, now)
        except Exception as error:
            self.fail_next(error_in_words("retained", error), error)
            return 0, now, 0
        try:
            count, until, label = answer
            is_sound = 0 <= count.__index__() <= num_blocks and 0 <= label.__index__() <= MAX_INT
            is_sound = is_sound and float(until) == until
        except Exception:  # a result of another type may raise anything
            is_sound = False
        if not is_sound:
            self.fail_next(
                f"retained() returned {answer!r}; it must return a number of blocks up to {num_blocks}, a time in "
                f"seconds, and a label from 0 to {MAX_INT}"
            )
            return 0, now, 0
        return int(count), float(until), int(label)


def _as_listener(guard: Guard) -> Policy:
    """A listener that reports to the guarded policy those events whose methods it overrides."""
    inner = guard.policy

    def safe(name: str) -> Callable[..., None]:
        return lambda self, *arguments: guard._notify_policy(name, *arguments)

    names = [name for name in dir(Policy) if name.startswith("on_")]
    own = {name: safe(name) for name in names if getattr(type(inner), name) is not getattr(Policy, name)}
    listener: Policy = type("GuardedListener", (Policy,), own)()
    return listener


def error_in_words(method: str, error: Exception) -> str:
    """The text of an error that a policy's method raised."""
    return f"{method} raised {type(error).__name__}: {error}"


def _log(level: str, message: str, cause: BaseException | None) -> None:
    import logging  # imported here: it takes a tenth of the core's import time

    logger = logging.getLogger(__name__)
    getattr(logger, level)("%s", message, exc_info=cause)


def _default_order(order: Any) -> Any:
    """The default order that replaces `order`, a policy object or its class."""
    return PriorityOrder() if getattr(order, "is_preemptive", False) is True else FirstComeFirstServed()


def _arrival(request: Request) -> tuple[float, int]:
    return request.arrival_time, request.sequence_number


def _head_in_words(request: object) -> str:
    return f"request {request.request_id!r}" if isinstance(request, Request) else repr(request)


_GUARDS: dict[str, Callable[[Any], Any]] = {
    "order": GuardedOrder,
    "victim": GuardedVictim,
    "reserve": GuardedReserve,
    "limit": GuardedLimit,
    "eviction": GuardedEviction,
}
_STARTING_DEFAULTS: dict[str, Callable[[Any], Any]] = {
    "order": _default_order,
    "victim": lambda _: VICTIMS[default_victim("")](),
    "reserve": lambda _: _NoReserve(),
    "limit": lambda _: Limit(),
    "eviction": lambda _: LRU(),
}
"""Functions, by kind, that make the default policy for a policy, or a policy class, that is replaced at the start."""
