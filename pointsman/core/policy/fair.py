"""The order "fair": the tenant that has been served least is next.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).

    counter of a tenant   served tokens: input_weight for each prompt token, output_weight for each output token,
                          divided by the weight of the tenant
    next                  the waiting tenant with the lowest counter; within a tenant first come, first served
    lifted                a tenant that begins to wait gets at least the lowest counter of the waiting tenants (if no
                          tenant waits: the counter of the last tenant that left the queue), so that it saves no credit

A prompt counts when its request is admitted, without its cached tokens, which cost nothing. Output tokens count when
they are generated. Recompute after a preemption does not count, as the tenant did not cause it. An admission that a
failed step undoes does not count.

Counters are integers (`UNIT` for a token), so their values do not depend on when they are updated. They are updated
from the columns of the batch when a decision needs them, and when a request leaves its row.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import ConfigError
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.policy import Parameter, Policy
from pointsman.core.state.events import Admitted, Preempted, StepDecision, StepRun
from pointsman.core.state.interfaces import View
from pointsman.core.state.output import SchedulerOutput, StepUpdate
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]

UNIT = 1_000_000
"""Amount by which a token of weight 1 increases its tenant's counter, if the tenant has weight 1."""
_INITIAL = 64
_MIN_KEPT = 64
"""Idle tenants are removed only if there are more tenants than this, and stale heap entries only if there are more of
them than this. Both are removed when they may outnumber the tenants and entries in use."""


class _Tenant:
    """A tenant: its counter, its queue, and its numbers of requests."""

    __slots__ = ("base", "entry", "input_cost", "name", "num_requests", "num_running", "number", "output_cost", "queue")

    def __init__(self, name: str, number: int, input_cost: int, output_cost: int) -> None:
        self.name = name
        self.number = number
        """Index of the tenant in `Fair._outputs`."""
        self.base = 0
        """Counter of the tenant without the output tokens in `Fair._outputs`."""
        self.input_cost, self.output_cost = input_cost, output_cost
        self.num_running = 0
        self.num_requests = 0  # number of requests that are admitted and not finished
        self.queue = FirstComeFirstServed()
        self.entry: _Entry | None = None  # None while the queue is empty

    def add_cost(self, cost: int) -> None:
        """Add a cost to the counter; a negative cost corrects it."""
        self.base += cost

    def change_num_running(self, change: int) -> None:
        """Add `change` to the number of running requests."""
        self.num_running += change

    def change_num_requests(self, change: int) -> None:
        """Add `change` to the number of admitted requests that have not finished."""
        self.num_requests += change

    def set_entry(self, entry: _Entry | None) -> None:
        """Set the tenant's entry in the heap of waiting tenants; None: no request of the tenant waits."""
        self.entry = entry


class _Entry:
    """An entry of the heap of waiting tenants. The key is a past value of the tenant's counter, which only grows."""

    __slots__ = ("counter", "since", "tenant")

    def __init__(self, tenant: _Tenant, counter: int, since: int) -> None:
        self.tenant = tenant
        self.counter = counter
        self.since = since

    def raise_key(self, counter: int) -> None:
        """Raise the key to `counter`."""
        self.counter = counter

    def __lt__(self, other: _Entry) -> bool:
        if self.counter != other.counter:
            return self.counter < other.counter
        return self.since < other.since


class _Run:
    """An admitted request: how many of its tokens were counted for its tenant."""

    __slots__ = ("charge", "counted", "num_prompt", "row", "tenant")

    def __init__(self, tenant: _Tenant) -> None:
        self.tenant = tenant
        self.row: int | None = None
        self.counted = 0
        """Number of known tokens that were counted or cached; valid while the request has no row."""
        self.num_prompt = 0
        self.charge = 0
        """The cost of the request's last admission."""

    def count_admission(self, row: int, num_prompt: int, charge: int) -> None:
        """Count the admission of the request: add `charge` to the counter of the tenant."""
        self.row, self.num_prompt, self.charge = row, num_prompt, charge
        self.tenant.add_cost(charge)
        self.tenant.change_num_running(1)

    def count_lost_row(self, num_known: int, num_counted: int) -> None:
        """When the request loses its row: count its known tokens beyond `num_counted` for its tenant."""
        self.counted = num_known
        self.tenant.add_cost((num_known - num_counted) * self.tenant.output_cost)
        self.tenant.change_num_running(-1)
        self.row = None

    def undo_admission(self) -> None:
        """Undo the count of the request's last admission."""
        self.tenant.add_cost(-self.charge)
        self.tenant.change_num_running(-1)
        self.row, self.num_prompt = None, 0


class Fair(Policy):
    """The tenant that has been served least; within a tenant, first come, first served.

    Served tokens are weighted, output tokens more than prompt tokens, and divided by the weight of the tenant
    (`weights=gold/4+free/1`; 1 for tenants not named). This is the virtual token counter of Sheng et al. (OSDI 2024). A
    preempted request is the first of its tenant. A tenant gets no credit for idle time.

    Use it where tenants share a server that is at times full: a tenant that floods the server delays mostly itself.
    With one tenant this order equals "fcfs". It is only as reliable as the assignment of requests to tenants.

    Bound (from the paper, for tenants whose queue is never empty and whose requests are never skipped): the served
    tokens of two tenants differ by at most 2 max(input_weight L, output_weight M), divided by the lower of their
    weights. L is the longest prompt. M is the maximum number of tokens of all requests of a running batch, whole
    outputs included. input_weight is at most output_weight. Recompute after a preemption changes nothing, as only new
    tokens count.
    """

    kind = "order"
    name = "fair"
    reads = frozenset({"tenant"})
    is_preemptive = False
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("input_weight", 1.0, 0.001, 1000.0, doc="weight of a prompt token"),
        Parameter("output_weight", 2.0, 0.001, 1000.0, doc="weight of an output token"),
        Parameter("weights", "", doc="weights of tenants, like gold/4+free/1; 1 for others"),
    )

    def __init__(self, input_weight: float = 1.0, output_weight: float = 2.0, weights: str = "") -> None:
        self._input_weight, self._output_weight = input_weight, output_weight
        self._weights = read_weights(weights)
        self._view: View | None = None
        self._reset()

    def _reset(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._free_numbers: list[int] = []
        self._outputs: Int64Array = np.zeros(_INITIAL, dtype=np.int64)  # output tokens of each tenant, by number
        self._heap: list[_Entry] = []  # entries of waiting tenants, and stale entries
        self._num_waiting_tenants = 0
        self._num_entered = 0
        self._length = 0
        self._last: _Tenant | None = None  # the tenant that left the queue last
        self._num_kept = _MIN_KEPT
        self._num_steps = 0  # number of steps in flight
        self._entered: dict[_Tenant, int] = {}  # tenants that began to wait while a step was in flight, with their lift
        self._runs: dict[Request, _Run] = {}
        # By row: number of known tokens that were counted or cached, and the number of the tenant.
        self._counted: Int64Array = np.zeros(_INITIAL, dtype=np.int64)
        self._owner: Int64Array = np.zeros(_INITIAL, dtype=np.int64)
        self._rows: Int64Array | None = None  # rows of the columns below
        self._owners = self._known = self._owner[:0]

    def attach(self, view: View) -> None:
        self._view = view
        self._reset()

    def guaranteed_steps(self, num_steps: int) -> int:
        """The number of steps in which the tenant that is now next stays next, even if only its own counter grows."""
        if self._num_waiting_tenants <= 1:
            return num_steps
        first = self._lowest_entry()
        growth = first.tenant.num_running * first.tenant.output_cost  # per step
        if not growth:
            return num_steps
        heapq.heappop(self._heap)
        second = self._valid_top()
        heapq.heappush(self._heap, first)
        return min(num_steps, 1 + max(0, second.counter - first.counter - 1) // growth)

    def served(self, tenant: str) -> float:
        """The counter of a tenant, in tokens of weight 1; 0 for an unknown or removed tenant."""
        self._count_outputs()
        known = self._tenants.get(tenant)
        return 0.0 if known is None else self._counter_of(known) / UNIT

    def reason(self, request: Request) -> str:
        """Why the request is not the head of the queue, in words; "": the only reason is that other requests of its
        tenant are before it."""
        tenant, first = self._tenants[request.tenant], self._lowest_entry().tenant
        more = (self._counter_of(tenant) - self._counter_of(first)) // UNIT
        if tenant is first or more < 1:
            return ""
        return f"{_tenant_in_words(tenant)} has had {more:,} tokens more than {_tenant_in_words(first)}"

    # ------------------------------------------------------------------ the queue

    def __len__(self) -> int:
        return self._length

    def __contains__(self, request: Request) -> bool:
        return request._state.queue_entry is not None

    def __iter__(self) -> Iterator[Request]:
        for tenant in self._tenants.values():
            yield from tenant.queue

    def push(self, request: Request) -> None:
        tenant = self._tenants.get(request.tenant) or self._new_tenant(request.tenant)
        run = self._runs.get(request)
        if run is not None and run.row is not None:
            self._undo_admission(request, run)
        elif tenant.entry is None:
            lifted = self._raise_counter(tenant)
            if self._num_steps:
                self._entered[tenant] = self._entered.get(tenant, 0) + lifted
        self._insert_request(tenant, request)

    def put_back(self, requests: Sequence[Request]) -> None:
        for request in reversed(requests):
            self._insert_request(self._tenants[request.tenant], request)

    def peek(self) -> Request:
        return self._lowest_entry().tenant.queue.peek()

    def pop(self) -> Request:
        tenant = self._lowest_entry().tenant
        request = tenant.queue.pop()
        self._note_departure(tenant)
        return request

    def remove(self, request: Request) -> None:
        tenant = self._tenants[request.tenant]
        tenant.queue.remove(request)
        self._note_departure(tenant)

    def position(self, request: Request) -> int:
        """The number of requests before `request` with the present counters: all queued requests of tenants served
        less, and earlier requests of the same tenant."""
        self._count_outputs()
        own = self._tenants[request.tenant]
        entry = own.entry
        assert entry is not None
        place = (self._counter_of(own), entry.since)
        others = [t for t in self._tenants.values() if t.entry is not None and t is not own]
        before = sum(len(t.queue) for t in others if t.entry and (self._counter_of(t), t.entry.since) < place)
        return before + own.queue.position(request)

    def _insert_request(self, tenant: _Tenant, request: Request) -> None:
        if tenant.entry is None:
            self._num_entered += 1
            self._num_waiting_tenants += 1
            self._push_entry(tenant, self._num_entered)
        tenant.queue.push(request)
        self._length += 1

    def _note_departure(self, tenant: _Tenant) -> None:
        """Update the queue lengths after a request has left the queue of a tenant."""
        self._length -= 1
        if not len(tenant.queue):
            tenant.set_entry(None)
            self._num_waiting_tenants -= 1
            self._last = tenant
            if len(self._heap) > 2 * self._num_waiting_tenants + _MIN_KEPT:
                self._heap = [entry for entry in self._heap if entry.tenant.entry is entry]
                heapq.heapify(self._heap)

    def _push_entry(self, tenant: _Tenant, since: int) -> None:
        entry = _Entry(tenant, self._counter_of(tenant), since)
        tenant.set_entry(entry)
        heapq.heappush(self._heap, entry)

    def _lowest_entry(self) -> _Entry:
        """The heap entry of the next tenant, after an update of the counters. At least one tenant must wait."""
        if self._num_waiting_tenants > 1:
            self._count_outputs()
        return self._valid_top()

    def _valid_top(self) -> _Entry:
        """The valid heap entry with the lowest counter. Counters only grow, so a heap top with an up-to-date key is the
        lowest."""
        heap = self._heap
        while True:
            entry = heap[0]
            if entry.tenant.entry is not entry:
                heapq.heappop(heap)
                continue
            counter = self._counter_of(entry.tenant)
            if counter == entry.counter:
                return entry
            entry.raise_key(counter)
            heapq.heapreplace(heap, entry)

    # ------------------------------------------------------------------ counting

    def _counter_of(self, tenant: _Tenant) -> int:
        return tenant.base + int(self._outputs[tenant.number]) * tenant.output_cost

    def _count_outputs(self) -> None:
        """Count the output tokens that running requests generated since the last call."""
        view = self._view
        if view is None or not len(rows := view.rows):
            return
        known = view.num_tokens
        if rows is not self._rows:  # the columns stay valid while the same requests run
            self._store_counted()
            self._rows, self._owners, self._known = rows, self._owner[rows], self._counted[rows]
        new = known - self._known
        if np.count_nonzero(new):
            self._known = known
            # Sums in float64 are exact up to 2**53 tokens.
            sums = np.bincount(self._owners, weights=new, minlength=len(self._outputs))
            self._outputs += sums.astype(np.int64)

    def _store_counted(self) -> None:
        """Write the number of counted tokens of each row back to `_counted`, before another request gets a row."""
        if self._rows is not None:
            self._counted[self._rows] = self._known
            self._rows = None

    def on_admitted(self, event: Admitted) -> None:
        request = event.request
        self._store_counted()
        run = self._runs.get(request)
        if run is None:
            run = self._runs[request] = _Run(self._tenants[request.tenant])
            run.tenant.change_num_requests(1)
        tenant, row, known = run.tenant, request.row, request.num_tokens
        assert row is not None
        if request.num_prompt_tokens == run.num_prompt:  # new tokens are samples that arrived without a row
            charge = (known - run.counted) * tenant.output_cost
        else:
            charge = max(0, known - max(run.counted, event.num_cached_tokens)) * tenant.input_cost
        run.count_admission(row, request.num_prompt_tokens, charge)
        while row >= len(self._owner):
            self._counted = np.concatenate([self._counted, np.zeros_like(self._counted)])
            self._owner = np.concatenate([self._owner, np.zeros_like(self._owner)])
        self._counted[row], self._owner[row] = known, tenant.number

    def on_preempted(self, event: Preempted) -> None:
        self._count_lost_row(event.request)

    def on_parked(self, request: Request, now: float) -> None:
        self._count_lost_row(request)

    def on_finished(self, request: Request, now: float) -> None:
        self._count_lost_row(request)
        run = self._runs.pop(request, None)
        if run is not None:
            run.tenant.change_num_requests(-1)

    def on_step(self, step: StepDecision) -> None:
        self._num_steps += 1

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        """Raise again the counters of tenants that began to wait while a step was in flight, now that the output tokens
        of the step are counted."""
        self._num_steps -= 1
        if self._entered:
            entered, self._entered = self._entered, {}
            places = [(tenant, tenant.entry.since) for tenant in entered if tenant.entry is not None]
            for tenant, _ in places:
                tenant.set_entry(None)
                tenant.add_cost(-entered[tenant])
            self._num_waiting_tenants -= len(places)
            for tenant, since in places:
                self._raise_counter(tenant)
                self._num_waiting_tenants += 1
                self._push_entry(tenant, since)

    def on_failed(self, num_steps: int, now: float) -> None:
        self._num_steps -= num_steps

    def on_steps(self, run: StepRun) -> None:
        """Does nothing: steps of a fast-forward are never counted as in flight."""

    def _count_lost_row(self, request: Request) -> None:
        """Count the tokens of a request that loses its row."""
        run = self._runs.get(request)
        if run is None or run.row is None:
            return
        self._store_counted()
        run.count_lost_row(request.num_tokens, int(self._counted[run.row]))

    def _undo_admission(self, request: Request, run: _Run) -> None:
        """Undo what was counted for an admission, because the admission's step failed."""
        self._store_counted()
        tenant = run.tenant
        run.undo_admission()
        if run.counted == 0:  # its first admission
            del self._runs[request]
            tenant.change_num_requests(-1)
        if tenant.entry is not None:  # the counter has decreased: the entry's key is too high
            self._push_entry(tenant, tenant.entry.since)

    # ------------------------------------------------------------------ tenants

    def _new_tenant(self, name: str) -> _Tenant:
        number = self._free_numbers.pop() if self._free_numbers else len(self._tenants)
        if number == len(self._outputs):
            self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
        weight = self._weights.get(name, 1.0)
        costs = [max(1, round(UNIT * each / weight)) for each in (self._input_weight, self._output_weight)]
        tenant = self._tenants[name] = _Tenant(name, number, *costs)
        return tenant

    def _raise_counter(self, tenant: _Tenant) -> int:
        """Raise the counter of a tenant that begins to wait to the lowest counter of waiting tenants. Returns the
        increase."""
        self._count_outputs()
        level = 0
        if self._num_waiting_tenants:
            level = self._valid_top().counter
        elif self._last is not None:
            level = self._counter_of(self._last)
        lifted = max(0, level - self._counter_of(tenant))
        tenant.add_cost(lifted)
        if len(self._tenants) > self._num_kept:
            self._remove_idle_tenants(level, tenant)
        return lifted

    def _remove_idle_tenants(self, level: int, kept: _Tenant) -> None:
        """Remove idle tenants, except `kept`, whose counters are at most `level`. When such a tenant waits again, its
        counter would be raised to this level or more anyway, as the level only rises."""
        for tenant in list(self._tenants.values()):
            is_idle = tenant.entry is None and not tenant.num_requests and tenant is not self._last
            if is_idle and tenant is not kept and self._counter_of(tenant) <= level:
                del self._tenants[tenant.name]
                self._outputs[tenant.number] = 0
                self._free_numbers.append(tenant.number)
        self._num_kept = max(_MIN_KEPT, 2 * len(self._tenants))


def read_weights(text: str) -> dict[str, float]:
    """Parse the weights of tenants, `NAME/WEIGHT+NAME/WEIGHT`; the last "/" of each part separates name and weight.

    Raises:
        ConfigError: the syntax is wrong, a tenant is named twice, or a weight is not between 0.001 and 1000.
    """
    weights: dict[str, float] = {}
    for part in text.split("+") if text else ():
        name, _, weight = part.rpartition("/")
        try:
            value = float(weight)
        except ValueError:
            value = 0.0
        if not name or not 1e-3 <= value <= 1e3:
            raise ConfigError(
                f"weights of order 'fair' has the part {part!r}; write each part as NAME/WEIGHT, like gold/4, with a "
                "weight of 0.001 to 1000"
            )
        if name in weights:
            raise ConfigError(f"weights of order 'fair' names tenant {name!r} twice; give each tenant one weight")
        weights[name] = value
    return weights


def _tenant_in_words(tenant: _Tenant) -> str:
    return f"tenant {tenant.name}" if tenant.name else "the tenant without a name"
