"""The order "earliest-ttft": earliest TTFT deadline first, and late requests last.

    deadline             arrival + TTFT target; the sort key
    on time              the request can still meet its deadline; the earliest deadline comes first
    late                 the request can no longer meet its deadline; it comes after all requests that are on time,
                         but every k-th admission is of the most overdue request

While there is capacity for all requests, earliest deadline first meets every deadline that can be met. Under overload
it soon misses all deadlines, as it spends each step on the request that is about to miss its deadline. So late requests
come last. A request is judged when it would be the head of the queue: it is late if now + its prefill time is past its
deadline. The prefill time is learned from the steps so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.policy import Parameter, Policy, StepLoad
from pointsman.core.state.events import Admitted
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

_RESUMED, _ON_TIME, _LATE = 0, 1, 2
_DECAY = 0.98
"""Weight of a step with prompts relative to the next such step: about the last fifty steps count."""


class EarliestTTFT(Policy):
    """Earliest TTFT deadline first; requests that can no longer meet theirs come last.

    The deadline is the arrival time plus the request's own `ttft_target`, or `default` for requests without one. A
    preempted request comes first, as under "fcfs". The predicted prefill time is the number of tokens times the seconds
    per token of the latest steps with prompts.

    Use it where requests have different targets, or where the server is at times above saturation and a late first
    token is worth little. More requests are then on time, at the cost of the late requests. With the same target for
    all requests, this order equals "fcfs" until requests are late.

    Bound: while requests are late, every `every`-th admission of a new request is that of the most overdue request. So
    a late request with n more overdue requests before it is among the next (n + 1) times `every` admissions. A request
    that is on time is admitted, or becomes late.
    """

    kind = "order"
    name = "earliest-ttft"
    reads = frozenset({"ttft_target"})
    is_preemptive = False
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("default", 5.0, 1e-3, 1e6, tried=(1.0, 2.0, 5.0), doc="target of requests without one, in seconds"),
        Parameter("every", 32, 1, 1_000_000, tried=(8, 32, 128), doc="every so many admissions, the most overdue one"),
    )

    def __init__(self, default: float = 5.0, every: int = 32) -> None:
        self._default = default
        self._every = every
        self._view: View | None = None
        self._ahead, self._late = _Ahead(self.deadline), _Late(self.deadline)
        self._reset()

    def _reset(self) -> None:
        self._judged_at: float | None = None
        self._took_late = False
        self._num_since_late = 0
        self._seconds = self._tokens = 0.0  # sums over steps with prompts, with `_DECAY`

    def attach(self, view: View) -> None:
        self._view = view
        self._reset()

    def guaranteed_steps(self, num_steps: int) -> int:
        """0 if the head of the queue is on time, since it may be late in the next step; otherwise all `num_steps`."""
        ahead = self._ahead
        return num_steps if not len(ahead) or ahead.top[0] == _RESUMED else 0

    def deadline(self, request: Request) -> float:
        """The deadline for the first token of a request, in seconds on the caller's clock."""
        target = request.ttft_target
        return request.arrival_time + (self._default if target is None else target)

    def reason(self, request: Request) -> str:
        """Why the request is not the head of the queue, in words; "": the only reason is that other requests have
        earlier deadlines."""
        if request not in self or request._state.queue_entry[0] != _LATE:  # type: ignore[index]
            return ""
        target = self.deadline(request) - request.arrival_time
        return f"it can no longer meet its TTFT target of {target:g} s, and requests that can come first"

    # ------------------------------------------------------------------ events

    def on_admitted(self, event: Admitted) -> None:
        if not event.resumed:
            waits = len(self._late) and not self._took_late
            self._num_since_late = self._num_since_late + 1 if waits else 0

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        if load.num_prefill_tokens:
            self._seconds = _DECAY * self._seconds + seconds
            self._tokens = _DECAY * self._tokens + load.num_tokens

    # ------------------------------------------------------------------ the queue

    def __len__(self) -> int:
        return len(self._ahead) + len(self._late)

    def __contains__(self, request: Request) -> bool:
        return request._state.queue_entry is not None

    def __iter__(self) -> Iterator[Request]:
        yield from self._ahead
        yield from self._late

    def push(self, request: Request) -> None:
        if not len(self) and self._view is not None:
            self._judged_at = self._view.now  # this request is judged in the next step
        self._ahead.push(request)

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._ahead.push(request)  # the next call of `_move_late_requests` moves it if it is late

    def peek(self) -> Request:
        self._move_late_requests()
        return self._heap_of_head().peek()

    def pop(self) -> Request:
        self._move_late_requests()
        heap = self._heap_of_head()
        self._took_late = heap is self._late
        request = heap.pop()
        if len(self):
            self._judged_at = None
        return request

    def remove(self, request: Request) -> None:
        self._heap_of(request).remove(request)

    def position(self, request: Request) -> int:
        heap, first = self._heap_of(request), self._heap_of_head()
        place = heap.position(request)
        if heap is first:
            return place if heap is self._ahead or place == 0 else place + len(self._ahead)
        return place + (len(self._ahead) if heap is self._late else 1)

    # ------------------------------------------------------------------ late requests

    def _heap_of(self, request: Request) -> FirstComeFirstServed:
        entry = request._state.queue_entry
        assert entry is not None
        return self._late if entry[0] == _LATE else self._ahead

    def _heap_of_head(self) -> FirstComeFirstServed:
        """The heap (`_ahead` or `_late`) whose first request is the head of the queue."""
        ahead, late = self._ahead, self._late
        if not len(late) or (len(ahead) and ahead.top[0] == _RESUMED):
            return ahead
        return late if not len(ahead) or self._num_since_late >= self._every - 1 else ahead

    def _move_late_requests(self) -> None:
        """Move late requests from `_ahead` to `_late` until the head of `_ahead` is on time. Acts only once in a step,
        and again after each admission, so that calls between steps change nothing."""
        assert self._view is not None
        now, ahead = self._view.now, self._ahead
        if now == self._judged_at:
            return
        self._judged_at = now
        while len(ahead) and ahead.top[0] == _ON_TIME:
            request = ahead.peek()
            if self.deadline(request) - self._prefill_seconds(request) >= now:
                return
            self._late.push(ahead.pop())

    def _prefill_seconds(self, request: Request) -> float:
        return request.num_tokens * self._seconds / self._tokens if self._tokens else 0.0


class _Ahead(FirstComeFirstServed):
    """The heap of preempted requests, which come first, and of requests that are on time."""

    def __init__(self, deadline: Callable[[Request], float]) -> None:
        super().__init__()
        self._deadline = deadline

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (_RESUMED, request.serial, request.sequence_number)
        return (_ON_TIME, self._deadline(request), request.sequence_number)


class _Late(_Ahead):
    """The heap of late requests."""

    def key(self, request: Request) -> tuple[Any, ...]:
        return (_LATE, self._deadline(request), request.sequence_number)
