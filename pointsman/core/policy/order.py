"""Orders: choose the next request of the waiting queue.

To add an order, write a `Policy` with the methods of `Order` (`state/interfaces.py`), and name it in `ORDERS` at the
end of this file. The easiest way is a subclass of `FirstComeFirstServed` (`fcfs.py`) with another `key`. Or put the
order into a package of its own (`registry.py`), or pass an object as `SchedulerConfig(order=...)`.

An order is a queue. The orders in this file are heaps (`fcfs.py`). "earliest-ttft" and "fair", in their own files,
consist of several heaps. The key of a request in "fcfs" and "priority" is

    (urgency class, 0 if preempted else 1, number of the last admission if preempted else arrival time,
     number in the order of adding, number of the push)

so a preempted request returns to the front of its class, and requests preempted together resume in the order in which
they were admitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from pointsman.core.policy.earliest_ttft import EarliestTTFT
from pointsman.core.policy.fair import Fair
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.events import Admitted
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

LONG = 4.0
"""For "shortest-prefill": a prompt of this multiple of the mean length has the maximum delay."""
LEARNED_OVER = 128
"""For "shortest-prefill": number of recent requests over which the mean length is learned (an exponential mean)."""


class PriorityOrder(FirstComeFirstServed):
    """By priority, smaller first; within a priority as first come, first served."""

    name = "priority"
    is_preemptive = True
    reads = frozenset({"priority"})

    def urgency(self, request: Request) -> int:
        return request.priority


class FrontFirst(FirstComeFirstServed):
    """As "fcfs", but the request that was preempted last is the head.

    Other schedulers push a victim to the front of the queue in this way. The result differs from "fcfs" if a victim
    resumes and is preempted again before an earlier victim has resumed.
    """

    name = "fcfs-front"

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, -request.loss_number, 0)
        return (1, request.arrival_time, request.sequence_number)


class _ByPrefill(FirstComeFirstServed):
    """Base class of the orders by a number of tokens, cached tokens or tokens to prefill, and by arrival. The tokens
    are counted when the request is queued.

    All requests age at the same rate, so the order of waiting requests never changes, and the key is static. A
    preempted request is at the front, as under "fcfs".
    """

    keeps_keys = False

    def __init__(self) -> None:
        super().__init__()
        self._view: View | None = None

    def attach(self, view: View) -> None:
        self._view = view

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, request.serial, request.sequence_number)
        tokens = self._num_compared_tokens(request)
        return (1, self._place(request.arrival_time, tokens), request.sequence_number, tokens)

    def _num_compared_tokens(self, request: Request) -> int:
        raise NotImplementedError

    def _place(self, arrival_time: float, num_tokens: int) -> float:
        """The place of a request with this number of tokens; the request with the smallest place is next."""
        raise NotImplementedError

    def _num_cached(self, request: Request) -> int:
        view = self._view
        return view.num_cached_tokens(request) if view is not None and view.has_prefix_cache else 0

    def _compared_tokens(self, request: Request) -> tuple[int, int] | None:
        """The number of tokens in the key of a request, and in the key of the head of the queue. None: the number of
        tokens is not why the head is before the request."""
        own, first = request._state.queue_entry, self.top
        return None if own is None or own[0] == 0 or first[0] == 0 or first[3] >= own[3] else (own[3], first[3])


class ShortestPrefill(_ByPrefill):
    """Fewest prompt tokens to compute first; a request counts as arrived later, by at most `bound` seconds.

    This is shortest job first with ageing. The job is the prefill, since its length is known, and the length of the
    output is not. Tokens that the prefix cache has when the request is queued are not counted. The next request is the
    one with the earliest arrival time plus delay. The delay is one second for each `ageing` tokens, at most `bound`
    seconds. With an `ageing` of 0, `LONG` times the mean number of tokens of recent requests are delayed by `bound`
    seconds. Then the same parameters suit chats and documents, and slow and fast devices.

    Use it where prompts differ much in length: at and above saturation it lowers the mean TTFT at the cost of long
    prompts. A smaller `bound` helps long prompts, at the cost of the mean. Below saturation the queue is empty, and
    this order changes nothing.

    Bound: a request is bypassed only by requests that arrive less than `bound` seconds after it, whatever the load. If
    `ageing` is not 0, a request with P tokens to prefill is bypassed only by requests that arrive less than
    P / `ageing` seconds after it.
    """

    name = "shortest-prefill"
    version = 2
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("bound", 60.0, 0.0, 1e9, tried=(10.0, 30.0, 60.0, 120.0), doc="maximum delay of a long prompt, in s"),
        Parameter("waits", 2.0, 0.0, 1e9, tried=(1.0, 2.0, 4.0), doc="maximum delay, in mean waits of recent requests"),
        Parameter("ageing", 0.0, 0.0, 1e9, doc="tokens for a second of delay; 0: learned from recent prompts"),
    )

    def __init__(self, bound: float = 60.0, waits: float = 2.0, ageing: float = 0.0) -> None:
        super().__init__()
        self._bound, self._waits, self._ageing = bound, waits, ageing
        self._reset()

    def _reset(self) -> None:
        self._mean_tokens, self._num_learned = 0.0, 0
        self._mean_wait, self._num_admitted = 0.0, 0

    def attach(self, view: View) -> None:
        super().attach(view)
        self._reset()

    def on_admitted(self, event: Admitted) -> None:
        if not event.resumed:
            self._num_admitted = min(self._num_admitted + 1, LEARNED_OVER)
            wait = max(0.0, event.now - event.request.arrival_time)
            self._mean_wait += (wait - self._mean_wait) / self._num_admitted

    def put_back(self, requests: Sequence[Request]) -> None:
        learned = self._mean_tokens, self._num_learned
        super().put_back(requests)
        self._mean_tokens, self._num_learned = learned  # each request is learned from once

    def _num_compared_tokens(self, request: Request) -> int:
        return max(1, request.num_tokens - self._num_cached(request))

    def _place(self, arrival_time: float, num_tokens: int) -> float:
        if self._ageing:
            return arrival_time + min(num_tokens / self._ageing, self._bound)
        self._num_learned = min(self._num_learned + 1, LEARNED_OVER)
        self._mean_tokens += (num_tokens - self._mean_tokens) / self._num_learned
        bound = min(self._bound, self._waits * self._mean_wait)
        return arrival_time + bound * min(num_tokens / (LONG * self._mean_tokens), 1.0)

    def reason(self, request: Request) -> str:
        tokens = self._compared_tokens(request)
        return f"it has {tokens[0]:,} tokens to prefill, the head of the queue {tokens[1]:,}" if tokens else ""


class LongestPrefix(_ByPrefill):
    """Most cached tokens first, plus `ageing` tokens for each second of waiting.

    SGLang also orders by the longest cached prefix: requests that share a prefix start while it is still cached. Here
    the prefix is looked up once, when the request is queued.

    Use it above saturation, where many prompts share long prefixes and the pool cannot keep all of them: more cache
    hits lower both the mean and the longest TTFT. Without shared prefixes it equals "fcfs".

    Bound: a request with C cached tokens is bypassed only by requests that arrive less than (N - C) / `ageing` seconds
    after it, where N is the longest prompt. With an `ageing` of 0 there is no bound.
    """

    name = "longest-prefix"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("ageing", 100.0, 0.0, 1e9, tried=(10.0, 100.0, 1000.0), doc="tokens for a second of waiting"),
    )

    def __init__(self, ageing: float = 100.0) -> None:
        super().__init__()
        self._ageing = ageing

    def _num_compared_tokens(self, request: Request) -> int:
        return -self._num_cached(request)

    def _place(self, arrival_time: float, num_tokens: int) -> float:
        return num_tokens + self._ageing * arrival_time

    def reason(self, request: Request) -> str:
        tokens = self._compared_tokens(request)
        return (
            f"it had {-tokens[0]:,} cached tokens when queued, the head of the queue {-tokens[1]:,}" if tokens else ""
        )


class ArrivalPriority(PriorityOrder):
    """By priority, then by arrival, for preempted and new requests alike; without priority preemption (vLLM's
    "priority")."""

    name = "priority-by-arrival"
    is_preemptive = False

    def key(self, request: Request) -> tuple[Any, ...]:
        return (request.priority, request.arrival_time, request.sequence_number)


ORDERS: dict[str, type[Policy]] = {
    order.name: order
    for order in (
        FirstComeFirstServed,
        PriorityOrder,
        FrontFirst,
        ArrivalPriority,
        ShortestPrefill,
        LongestPrefix,
        EarliestTTFT,
        Fair,
    )
}
