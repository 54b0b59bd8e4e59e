"""Which request comes next? The orders of the waiting queue.

To add one: a `Policy` with the methods of `Order` (`state/interfaces.py`), most easily a `FirstComeFirstServed`
(`fcfs.py`) with another `key`, and its name in `ORDERS` at the end of this file; or in a package of its own
(`registry.py`); or pass an object as `SchedulerConfig(order=...)`.

An order is a queue of its own. Those here are a heap (`fcfs.py`), and so are the parts of "earliest-ttft" and "fair",
which have files of their own. The key of a request is

    (class, 0 if it ran before else 1, its last admission or else its arrival, order of adding, number of the push)

so a preempted request returns to the front of its class, and requests preempted together resume in the order in which
they were admitted.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pointsman.core.policy.earliest_ttft import EarliestTTFT
from pointsman.core.policy.fair import Fair
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.interfaces import View
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class PriorityOrder(FirstComeFirstServed):
    """By priority, smaller first; within a priority as first come, first served."""

    name = "priority"
    is_preemptive = True
    reads = frozenset({"priority"})

    def urgency(self, request: Request) -> int:
        return request.priority


class FrontFirst(FirstComeFirstServed):
    """As "fcfs", but the request that was preempted last is the head (the field's schedulers push a victim to the
    front).

    It differs where a victim resumes, and is preempted again before an earlier victim behind it resumed.
    """

    name = "fcfs-front"

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, -request.loss_number, 0)
        return (1, request.arrival_time, request.sequence_number)


class _ByPrefill(FirstComeFirstServed):
    """Orders by what of a prompt is cached, or is not, when it is queued, less what the request has aged since.

    All requests age at the same rate, so that their order never changes, and the key is static: tokens plus `ageing`
    times the arrival time. A preempted request is at the front, as under "fcfs".
    """

    keeps_keys = False

    def __init__(self, ageing: float) -> None:
        super().__init__()
        self._ageing = ageing
        self._view: View | None = None

    def attach(self, view: View) -> None:
        self._view = view

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, request.serial, request.sequence_number)
        tokens = self._tokens(request)
        return (1, tokens + self._ageing * request.arrival_time, request.sequence_number, tokens)

    def _tokens(self, request: Request) -> int:
        raise NotImplementedError

    def _num_cached(self, request: Request) -> int:
        view = self._view
        return view.num_cached_tokens(request) if view is not None and view.has_prefix_cache else 0

    def _told(self, request: Request) -> tuple[int, int] | None:
        """Tokens in the keys of a request and of the head, if those are why it is not the head."""
        own, first = request._state.queue_entry, self.top
        return None if own is None or own[0] == 0 or first[0] == 0 or first[3] >= own[3] else (own[3], first[3])


class ShortestPrefill(_ByPrefill):
    """Fewest prompt tokens to compute first, less `ageing` tokens for each second that it has waited.

    Shortest job first with ageing, where the job is the prefill: its length is known, that of an output is not. Tokens
    that the prefix cache has when the request is queued are not counted.

    Of use where the server is at or above saturation and prompts differ much in length: it lowers the mean TTFT at the
    cost of the longest prompts. A greater `ageing` gives these more, and the mean less. Of no use below saturation,
    where nobody waits.

    Bound: a request with P tokens to prefill is overtaken only by requests that arrive less than P / `ageing` seconds
    after it. With an `ageing` of 0 there is none.
    """

    name = "shortest-prefill"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("ageing", 15.0, 0.0, 1e9, tried=(5.0, 15.0, 100.0, 1000.0), doc="tokens for a second of waiting"),
    )

    def __init__(self, ageing: float = 15.0) -> None:
        super().__init__(ageing)

    def _tokens(self, request: Request) -> int:
        return max(1, request.num_tokens - self._num_cached(request))

    def reason(self, request: Request) -> str:
        told = self._told(request)
        return f"its {told[0]:,} tokens to prefill wait for fewer ones ({told[1]:,} of the next)" if told else ""


class LongestPrefix(_ByPrefill):
    """Most cached tokens first, and `ageing` tokens more for each second that it has waited.

    As SGLang orders by the longest cached prefix: who shares one comes while it is still there. Here it is looked up
    when the request is queued, and not again.

    Of use above saturation where many prompts share long prefixes in a pool that cannot keep all of them: the mean and
    the longest TTFT sink together, with more hits. Of no use without shared prefixes, where it is "fcfs".

    Bound: a request of which C tokens are cached is overtaken only by requests that arrive less than (N - C) / `ageing`
    seconds after it, where N is the greatest length of a prompt. With an `ageing` of 0 there is none.
    """

    name = "longest-prefix"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("ageing", 100.0, 0.0, 1e9, tried=(10.0, 100.0, 1000.0), doc="tokens for a second of waiting"),
    )

    def __init__(self, ageing: float = 100.0) -> None:
        super().__init__(ageing)

    def _tokens(self, request: Request) -> int:
        return -self._num_cached(request)

    def reason(self, request: Request) -> str:
        told = self._told(request)
        return f"{-told[0]:,} of its tokens were cached when it came, and {-told[1]:,} of the next" if told else ""


class ArrivalPriority(PriorityOrder):
    """By priority, then by arrival, whether preempted or new, without priority preemption (vLLM's "priority")."""

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
