"""What if a policy raises, or breaks its contract? The step fails with its name, and no request is lost.

Policies of other packages are wrapped when a scheduler is built; the built-in ones are called directly. The wrapper
of an order knows which requests are queued, so an order that forgets one, or returns one twice, is found at once.

A policy that fails again and again is replaced: after `max_policy_failures` failed steps the default of its kind
decides. The failures are forgotten after `SOUND_STEPS` steps without one. A policy that cannot be constructed or
attached is replaced at the start. All of this depends on the calls alone. A recording has the failed steps, and its
header the policies that were replaced before, so it replays.

The guard logs each failed step in one line, the first one of a policy with the traceback, and the replacement.
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
"""Steps without a failure, after which earlier failures of a policy count no more."""


class Replaced(NamedTuple):
    """A policy of another package that failed, so that the default of its kind decides in its place."""

    kind: str
    policy: str
    """As it was named."""
    by: str
    """The default; "": none, for a reserve or a limit."""
    error: str
    """Its last one."""


def guarded(kind: str, policy: Any) -> Any:
    """The policy, with every answer checked."""
    if is_own(type(policy)):
        return policy
    return _GUARDS[kind](policy)


def is_own(policy: type) -> bool:
    """Whether a class of policies is one of those here, and needs no guard."""
    return policy.__module__.startswith("pointsman.core.policy.")


def in_place_of(kind: str, policy: Any, spec: str, error: str, cause: Exception | None = None) -> Any:
    """The guard of a policy that is replaced before it decides anything.

    Args:
        policy: its class, or the object.
        spec: as it is named.
        error: what it failed with.
        cause: the exception, for the log; None: it has been logged.
    """
    guard: Guard = _GUARDS[kind](_STARTING_DEFAULTS[kind](policy))
    guard.name, guard.version, guard.spec = policy.name, getattr(policy, "version", 1), spec
    guard.replace_at_start(error, cause)
    return guard


def head_of(queue: Order) -> Request:
    """The head of a queue that is not empty, for what only observes."""
    return queue.glance() if isinstance(queue, GuardedOrder) else queue.peek()


def replaced_among(policies: Iterable[Any]) -> tuple[Replaced, ...]:
    """Of a scheduler's policies, those that were replaced."""
    return tuple(each.replaced for each in policies if isinstance(each, Guard) and each.replaced is not None)


class Guard:
    """What the guards have in common: the name, the version and the optional parts of the policy inside."""

    kind: ClassVar[str] = ""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.name: str = policy.name
        self.version: int = getattr(policy, "version", 1)
        self.spec = spec_of(policy)
        """The policy as it is named."""
        self.replaced: Replaced | None = None
        """None: the policy decides."""
        self._error: PolicyError | None = None  # to be raised when the policy is asked next
        self._changes = itertools.count(1)
        self._view: View | None = None
        self._failure: PolicyError | None = None  # of this step
        self._num_failures = self._num_sound = 0  # steps: failed ones that count, and those since the newest
        self._has_logged = False  # a traceback
        self._cause: Exception | None = None  # of a replacement at the start that is not logged yet

    def attach(self, view: View) -> None:
        """Give the policy its view, at the start. One that fails is replaced."""
        self._view = view
        if hasattr(self.policy, "attach"):
            try:
                self.policy.attach(view)
            except Exception as error:
                self.replace_at_start(raised("attach", error), error)

    def replace_at_start(self, error: str, cause: Exception | None) -> None:
        """The policy cannot be used; `log_start` logs it with the traceback of the cause, if there is one."""
        self._cause = cause
        self._replace(error)

    def log_start(self) -> None:
        """Log that the policy was replaced before it decided anything; nothing happens where that was not so."""
        cause, self._cause = self._cause, None
        if cause is not None and self.replaced is not None:
            _log(
                "error",
                f"{self._described()} cannot be used ({self.replaced.error}), and {self._standing_in()}; correct the "
                "policy and start again",
                cause,
            )

    def step_succeeded(self) -> None:
        """A step was decided."""
        self._failure = None
        if self._num_failures:
            self._num_sound += 1
            if self._num_sound >= SOUND_STEPS:
                self._num_failures = 0

    def step_failed(self, max_failures: int) -> bool:
        """A step failed; whether this policy failed in it. It is replaced if that was the last step that it may
        cost."""
        failure, self._failure = self._failure, None
        if failure is None:
            return False
        self._num_failures, self._num_sound = self._num_failures + 1, 0
        cause = failure.__cause__ if not self._has_logged else None
        self._has_logged |= cause is not None
        if self._num_failures < max_failures:
            _log("warning", f"{failure} (failed step {self._num_failures}; it is replaced after {max_failures})", cause)
            return True
        self._replace(failure.what)
        _log(
            "error",
            f"{failure}. It failed in {self._num_failures} steps, and {self._standing_in()}; correct the policy and "
            "start again",
            cause,
        )
        return True

    def is_sound(self) -> bool:
        """Whether the policy, asked now, would answer, as far as is known."""
        return self._error is None

    def forget_failure(self) -> None:
        """What failed was no step: it was asked ahead, and is asked again."""
        self._failure = None

    def _described(self) -> str:
        return f"{self.kind} {self.spec!r}"

    def _standing_in(self) -> str:
        return f"{self.policy.name or f'no {self.kind}'} decides in its place from now on"

    def _default(self) -> Any:
        """A built-in policy that can decide from any state."""
        raise NotImplementedError

    def _replace(self, error: str) -> None:
        default = self._default()
        self.replaced = Replaced(self.kind, self.spec, default.name, error)
        self._error = None
        if self._view is not None:
            default.attach(self._view)
        self.policy = default

    def guaranteed_steps(self, num_steps: int) -> int:
        """0 without the method: every step is decided on its own."""
        if not hasattr(self.policy, "guaranteed_steps"):
            return 0
        answer = self._call("guaranteed_steps", num_steps)
        if not isinstance(answer, int) or not 0 <= answer <= num_steps:
            raise self._broken(f"guaranteed_steps({num_steps}) is {answer!r}; it must be between 0 and {num_steps}")
        return answer

    def hearing(self) -> Policy:
        """The policy as a listener. What it raises then is raised when it is asked next, in a step that can fail."""
        return _hearing(self)

    def _call(self, method: str, *arguments: Any) -> Any:
        self._raise_what_failed()
        try:
            return getattr(self.policy, method)(*arguments)
        except Exception as error:
            raise self._broken(raised(method, error)) from error

    def _read_number(self, attribute: str) -> int:
        try:
            return int(getattr(self.policy, attribute))
        except Exception as error:
            raise self._broken(raised(attribute, error)) from error

    def _tell(self, method: str, *arguments: Any) -> None:
        """As `_call`, where a failure must wait for a moment at which the step can fail."""
        try:
            getattr(self.policy, method)(*arguments)
        except Exception as error:
            self.fail_next(raised(method, error), error)

    def _raise_what_failed(self) -> None:
        if self._error is not None:
            self._failure, self._error = self._error, None
            raise self._failure

    def fail_next(self, what: str, cause: Exception | None = None) -> None:
        """Raise this when the policy is asked next."""
        self._error = self._to_raise(what)
        self._error.__cause__ = cause

    def _broken(self, what: str) -> PolicyError:
        self._failure = self._to_raise(what)
        return self._failure

    def _to_raise(self, what: str) -> PolicyError:
        return PolicyError(f"{self._described()}: {what}. The step failed and no request is lost", what)


class GuardedOrder(Guard):
    """An order of another package."""

    kind = "order"

    def __init__(self, policy: Order) -> None:
        super().__init__(policy)
        self.is_preemptive: bool = policy.is_preemptive
        self._queued: dict[Request, None] = {}
        self._strays: dict[Request, None] = {}  # that the policy did not take

    def push(self, request: Request) -> None:
        self._queued[request] = None
        self._insert("push", request, [request])

    def put_back(self, requests: Sequence[Request]) -> None:
        self._queued |= dict.fromkeys(requests)
        self._insert("put_back", requests, requests)

    def _insert(self, method: str, argument: Any, requests: Sequence[Request]) -> None:
        """Whatever the policy does, these are queued: those that it does not take come first, in the order given."""
        if self._strays:  # one that came before some of these, and returns from a step that failed
            newest = max(map(_came, self._strays))
            self._strays |= dict.fromkeys(each for each in requests if _came(each) < newest)
        try:
            getattr(self.policy, method)(argument)
        except Exception as error:
            self._distrust()
            self.fail_next(raised(method, error), error)

    def _distrust(self) -> None:
        """What the policy did before it failed is not known: all that are queued now are served from here, in the order
        in which they came, and leave its queue when they do."""
        self._strays |= self._queued

    def _leave_inner(self, request: Request) -> None:
        with contextlib.suppress(Exception):
            if request in self.policy:
                self.policy.remove(request)

    def peek(self) -> Request:
        self._raise_what_failed()
        if self._strays:
            return min(self._strays, key=_came)
        head = self._call("peek")
        if not self._is_queued(head):
            self._distrust()
            raise self._broken(f"peek returned {_named(head)}, which is not queued")
        return head  # type: ignore[no-any-return]

    def glance(self) -> Request:
        """As `peek`, for an explanation: no step fails, and the head is the oldest where the policy has none. What is
        asked between steps is in no recording, so it changes nothing."""
        with contextlib.suppress(Exception):
            if not self._strays and self._is_queued(head := self.policy.peek()):
                return head  # type: ignore[no-any-return]
        return min(self._strays or self._queued, key=_came)

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
            self._leave_inner(expected)
        else:
            try:
                head = self._call("pop")
            except PolicyError:
                self._distrust()
                raise
            if head is not expected:
                self._distrust()
                raise self._broken(f"pop returned {_named(head)}, and peek {_named(expected)}")
        del self._queued[expected]
        return expected

    def remove(self, request: Request) -> None:
        del self._queued[request]
        if self._strays.pop(request, self) is not self:
            self._leave_inner(request)
            return
        try:
            self.policy.remove(request)
        except Exception as error:
            self._distrust()
            self.fail_next(raised("remove", error), error)

    def _default(self) -> Any:
        return _default_order(self)

    def _replace(self, error: str) -> None:
        super()._replace(error)
        self._strays.clear()
        for request in sorted(self._queued, key=_came):
            request._state.queue_entry = None  # of the order before, if that kept one
            self.policy.push(request)

    def position(self, request: Request) -> int:
        """The number of requests before it, by the guard's own list where the policy cannot say."""
        if request in self._strays:
            return sum(_came(other) < _came(request) for other in self._strays)
        if self._strays:  # the policy's own queue may still have some of these
            behind = sum(_came(other) < _came(request) for other in self._queued if other not in self._strays)
            return len(self._strays) + behind
        with contextlib.suppress(Exception):  # an explanation fails no step: no recording has it
            return int(self.policy.position(request))
        return sum(_came(other) < _came(request) for other in self._queued)

    def reason(self, request: Request) -> str:
        """Why it is not first, in the policy's words; "": it has none."""
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
    """A victim policy of another package."""

    kind = "victim"

    def __init__(self, policy: Victim) -> None:
        super().__init__(policy)
        self._order = ""

    def follow(self, order: str) -> None:
        """The name of the order, by which the default goes."""
        self._order = order
        if self.replaced is not None:
            self._replace(self.replaced.error)

    def _default(self) -> Any:
        return VICTIMS[default_victim(self._order)]()

    def choose(self, view: View, asking: int) -> int:
        answer = self._call("choose", view, asking)
        num_running = len(view.rows)
        try:
            index = answer.__index__()
        except Exception:
            index = -1
        if not 0 <= index < num_running:
            raise self._broken(
                f"choose returned {answer!r}; it must be an index below {num_running}, of a running request"
            )
        return int(index)


class _NoReserve(Reserve):
    def blocks(self, request: Request, demand: Any, view: View) -> int:
        return 0


class GuardedReserve(Guard):
    """A reserve of another package."""

    kind = "reserve"

    def __init__(self, policy: Any) -> None:
        super().__init__(policy)
        self.reason = policy.reason

    def _default(self) -> Any:
        return _NoReserve()

    @property
    def num_changes(self) -> int:
        if getattr(type(self.policy), "num_changes", 0) == 0 and "num_changes" not in vars(self.policy):
            return next(self._changes)  # it does not say when it changes: it is asked in every step
        return self._read_number("num_changes")

    def blocks(self, request: Request, demand: Any, view: View) -> int:
        answer = self._call("blocks", request, demand, view)
        if not isinstance(answer, int) or answer < 0:
            raise self._broken(f"blocks returned {answer!r}; it must be a number of blocks, 0 or more")
        return answer


class GuardedLimit(Guard, Limit):
    """A limit of another package."""

    kind = "limit"

    def __init__(self, policy: Limit) -> None:
        super().__init__(policy)
        self.limits_decode, self.limits_drafts = policy.limits_decode, policy.limits_drafts
        self.is_shared = policy.is_shared
        if hasattr(policy, "step_budget"):
            self.step_budget = self._step_budget

    def _default(self) -> Any:
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
        self._tell("open_step", num_requests)

    def open_queue(self) -> None:
        self._call("open_queue")

    def _step_budget(self, most: int, view: View) -> int:
        if self.replaced:
            return most
        answer = self._call("step_budget", most, view)
        if not isinstance(answer, int) or answer > most:
            raise self._broken(f"step_budget returned {answer!r}; it must be an integer of at most {most}")
        return answer

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        return bool(self._call("lacks_step_time", request, num_running, num_tokens))

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        before = want.copy()
        self._call("clip", batch, rows, want)
        if np.any(want > before) or np.any(want < 0):
            raise self._broken("clip must lower what rows want, and to no less than 0")

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        answer = self._call("check", request, start, want, view)
        if isinstance(answer, Deferral) or (isinstance(answer, int) and min(want, 1) <= answer <= want):
            return answer
        raise self._broken(f"check returned {answer!r} of {want} tokens; it must be 1 to {want}, or a Deferral")

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        self._tell("commit", request, start, num_tokens)

    def release(self, request: Request) -> None:
        self._tell("release", request)


class GuardedEviction(Guard):
    """An eviction policy of another package. It is asked where no step can fail, so what it raises is raised when the
    next step opens, and until then nothing is retained."""

    kind = "eviction"

    def __init__(self, policy: Eviction) -> None:
        super().__init__(policy)
        self.share, self.per_tenant = policy.share, policy.per_tenant
        if not isinstance(self.share, (int, float)) or not 0 <= self.share <= 1:
            raise ConfigError(f"share of eviction {policy.name!r} is {self.share!r}; it must be between 0 and 1")

    def _default(self) -> Any:
        return LRU()

    def open_step(self) -> None:
        """Raises PolicyError if it failed since the last step."""
        self._raise_what_failed()

    def started(self, request: Request, labels: Int64Array) -> None:
        self._tell("started", request, labels)

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        try:
            answer = self.policy.retained(request, num_blocks, now)
        except Exception as error:
            self.fail_next(raised("retained", error), error)
            return 0, now, 0
        try:
            count, until, label = answer
            is_sound = 0 <= count.__index__() <= num_blocks and 0 <= label.__index__() <= MAX_INT
            is_sound = is_sound and float(until) == until
        except Exception:  # whatever an answer of another type raises
            is_sound = False
        if not is_sound:
            self.fail_next(
                f"retained returned {answer!r}; it must be a number of blocks up to {num_blocks}, seconds, and a label "
                f"from 0 to {MAX_INT}"
            )
            return 0, now, 0
        return int(count), float(until), int(label)


def _hearing(guard: Guard) -> Policy:
    """A listener that has the events which the guarded policy overrides, and no others."""
    inner = guard.policy

    def safe(name: str) -> Callable[..., None]:
        return lambda self, *arguments: guard._tell(name, *arguments)

    names = [name for name in dir(Policy) if name.startswith("on_")]
    own = {name: safe(name) for name in names if getattr(type(inner), name) is not getattr(Policy, name)}
    hearing: Policy = type("Hearing", (Policy,), own)()
    return hearing


def raised(method: str, error: Exception) -> str:
    """What a failing part of a policy did, in words."""
    return f"{method} raised {type(error).__name__}: {error}"


def _log(level: str, message: str, cause: BaseException | None) -> None:
    import logging  # here: it is a tenth of the core's import

    logger = logging.getLogger(__name__)
    getattr(logger, level)("%s", message, exc_info=cause)


def _default_order(order: Any) -> Any:
    """The default in the place of an order, or of a class of orders."""
    return PriorityOrder() if getattr(order, "is_preemptive", False) is True else FirstComeFirstServed()


def _came(request: Request) -> tuple[float, int]:
    return request.arrival_time, request.sequence_number


def _named(request: object) -> str:
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
"""What stands in for a policy, or a class of policies, that cannot be used."""
