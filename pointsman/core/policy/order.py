"""Which request comes next? The orders of the waiting queue.

To add one: a `Policy` with the methods of `Order` (`state/interfaces.py`), its name in `ORDERS` at the end of this
file; or in a package of its own (`registry.py`); or pass an object as `SchedulerConfig(order=...)`.

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
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class PriorityOrder(FirstComeFirstServed):
    """By priority, smaller first; within a priority as first come, first served."""

    name = "priority"
    displaces = True

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


class ShortestPrefill(FirstComeFirstServed):
    """Shortest prompt first, less what it has aged: `ageing` tokens for each second that it has waited.

    Shortest job first with ageing, where the job is the prefill: its length is known, that of an output is not. All
    requests age at the same rate, so their order never changes, and the key is static: prompt tokens plus `ageing`
    times the arrival time. A preempted request is at the front, as under "fcfs": it has blocks to gain back and a
    client that already reads.

    Of use where the server is busy and prompts differ much in length: it lowers the mean TTFT at the cost of the
    longest prompts. Of no use below saturation, where nobody waits. Tokens that the prefix cache has count too: a
    prompt is looked up when it is admitted, not while it waits.

    Bound: a request of P prompt tokens is overtaken only by requests that arrive less than P / `ageing` seconds after
    it. An `ageing` of 0 has no bound.
    """

    name = "shortest-prefill"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("ageing", 15.0, 0.0, 1e9, tried=(5.0, 15.0, 50.0, 150.0), doc="tokens for a second of waiting"),
    )

    def __init__(self, ageing: float = 15.0) -> None:
        super().__init__()
        self._ageing = ageing

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.status is RequestStatus.PREEMPTED:
            return (0, request.serial, request.sequence_number)
        return (1, request.num_tokens + self._ageing * request.arrival_time, request.sequence_number)

    def reason(self, request: Request) -> str:
        head = self.peek()
        if head.status is RequestStatus.PREEMPTED or head.num_tokens >= request.num_tokens:
            return ""
        return f"its prompt of {request.num_tokens:,} tokens waits for shorter ones ({head.num_tokens:,} is next)"


class ArrivalPriority(PriorityOrder):
    """By priority, then by arrival, whether preempted or new, without priority preemption (vLLM's "priority")."""

    name = "priority-by-arrival"
    displaces = False

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
        EarliestTTFT,
        Fair,
    )
}
