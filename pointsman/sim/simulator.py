"""Simulator: sends the requests of a workload to one or several replicas under a virtual clock.

The event that ends first happens first: an arrival, a step of a replica, or a run of its plain decodes. An arrival is
routed at its own time, with the knowledge of that time. Only the replica that gets the request ends its current run of
decodes early.

A replica is one engine, or several engines as `Topology` describes them.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from pointsman.core import SchedulerConfig, SchedulerStats
from pointsman.core.observe.film import FilmRecorder
from pointsman.sim.disaggregation import TransferTotals
from pointsman.sim.endpoint import Endpoint, Pool
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import CopyTotals, HostMemory
from pointsman.sim.outcome import Timeline, Timings
from pointsman.sim.request import SimRequest
from pointsman.sim.step_time import StepTime
from pointsman.sim.topology import ONE_ENGINE, EndpointMaker, Topology
from pointsman.sim.workload import Workload

Progress = Callable[[int, float], None]
"""Function that gets the number of finished requests and the virtual time, from time to time."""
_PROGRESS_EVERY = 256  # events


@dataclass(slots=True)
class Outcome:
    """The result of a simulation."""

    timings: Timings
    timelines: list[Timeline]
    stats: list[SchedulerStats]
    """Statistics of each engine's scheduler, at the end; of a prefill engine without its generated tokens, which no
    client gets."""
    seconds: float
    """Virtual time from the first arrival to the last event."""
    requests: list[SimRequest] = field(default_factory=list, repr=False)
    """All requests in the order of arrival: request i has row i of `timings`."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """(request id, reason) of each request that could never run."""
    is_complete: bool = True
    """Whether the simulation ran to its end; False: it was interrupted."""
    copies: list[CopyTotals] = field(default_factory=list)
    """Copies between each engine's pool and its host memory; empty without host memory."""
    names: list[str] = field(default_factory=list)
    """Name of each engine, such as "prefill 0"; empty: the engines are alike."""
    transfers: list[TransferTotals] = field(default_factory=list)
    """Transfers of KV from prefill to decode engines, of each replica; empty if no engine only decodes."""


def simulate(
    workload: Workload,
    config: SchedulerConfig,
    step_time: StepTime,
    *,
    num_replicas: int = 1,
    routing: Routing | None = None,
    is_stepping: bool = False,
    seed: int = 0,
    host_memory: HostMemory | None = None,
    features: Features = PLAIN,
    topology: Topology = ONE_ENGINE,
    request_overhead: float = 0.0,
    until: float = math.inf,
    progress: Progress | None = None,
    films: Sequence[FilmRecorder] = (),
) -> Outcome:
    """Run a workload to its end, or to the virtual time `until`.

    Args:
        config: configuration of each replica's scheduler.
        step_time: step times of each replica's device.
        routing: the rule that chooses a replica for each request; None: each replica in turn.
        is_stepping: schedule every step separately, with the same result but more slowly.
        host_memory: host memory behind each engine's KV pool; None: no host memory.
        features: drafts of each replica's engine, and the cost of its adapters.
        topology: the engines of each replica.
        request_overhead: seconds of each request outside the engine, before it arrives there: a request of the workload
            reaches a replica at its time, and counts as arrived these seconds before.
        progress: function that gets the progress, see `Progress`.
        films: recorders of the engines' decisions, one for each engine from the first on; the caller closes them.

    Ctrl-C ends the simulation; the outcome then contains the results so far.
    """
    return Simulation(
        workload,
        config,
        step_time,
        num_replicas=num_replicas,
        routing=routing or RoundRobin(),
        is_stepping=is_stepping,
        seed=seed,
        host_memory=host_memory,
        features=features,
        topology=topology,
        request_overhead=request_overhead,
        films=films,
    ).run(until, progress)


class Simulation:
    """A workload, its replicas, and the events so far."""

    def __init__(
        self,
        workload: Workload,
        config: SchedulerConfig,
        step_time: StepTime,
        *,
        num_replicas: int,
        routing: Routing,
        is_stepping: bool,
        seed: int,
        host_memory: HostMemory | None = None,
        features: Features = PLAIN,
        topology: Topology = ONE_ENGINE,
        request_overhead: float = 0.0,
        films: Sequence[FilmRecorder] = (),
    ) -> None:
        if num_replicas < 1:
            raise ValueError(f"num_replicas is {num_replicas}; it must be at least 1")
        self.timings = Timings(workload.num_requests or 1024)
        maker = EndpointMaker(
            topology,
            config,
            step_time,
            self.timings,
            is_stepping=is_stepping,
            seed=seed,
            host_memory=host_memory,
            features=features,
            num_replicas=num_replicas,
        )
        endpoints = [maker.make() for _ in range(num_replicas)]
        self._endpoint: Endpoint = endpoints[0] if num_replicas == 1 else Pool(endpoints, routing)
        self._names, self._transfers = maker.names, maker.transfers
        self.engines = self._endpoint.engines
        if len(films) > len(self.engines):
            raise ValueError(
                f"{len(films)} films for {len(self.engines)} engine(s); give at most one film for each engine"
            )
        for engine, film in zip(self.engines, films, strict=False):
            engine.scheduler.start_film(film)
        self._workload = workload
        self._request_overhead = request_overhead
        self._first: Iterator[tuple[float, SimRequest]] = iter(workload.first_arrivals())
        self._next_first = next(self._first, None)
        self._followers: list[tuple[float, int, SimRequest]] = []  # a heap: arrivals that follow a finished request
        self._requests: list[SimRequest] = []  # all requests so far, by number
        self._refused: list[tuple[str, str]] = []
        self._num_finished = 0

    def run(self, until: float, progress: Progress | None) -> Outcome:
        """Run the workload; see `simulate`."""
        is_complete = True
        try:
            self._run(until, progress)
        except KeyboardInterrupt:
            is_complete = False
        self.timings.close()
        ends = [engine.now for engine in self.engines]
        return Outcome(
            self.timings,
            [engine.timeline for engine in self.engines],
            [engine.stats() for engine in self.engines],
            max(ends) - (float(self.timings.arrival[0]) if self.timings.count else 0.0),
            self._requests,
            self._refused,
            is_complete,
            [engine.host.totals for engine in self.engines if engine.host is not None],
            self._names,
            [each.totals for each in self._transfers],
        )

    def _run(self, until: float, progress: Progress | None) -> None:
        endpoint, num_events = self._endpoint, 0
        arrival = self._next_arrival()
        while True:
            end = endpoint.plan_event(arrival)
            if end is None or arrival <= end:
                if arrival > until or arrival == math.inf:
                    return
                self._add_next_request(arrival)
                arrival = self._next_arrival()
                continue
            if end > until:
                return
            for number in endpoint.commit_event():
                self._num_finished += 1
                self._schedule_follow_up(number, endpoint.now)
            if endpoint.refused:
                self._note_refused(endpoint.now)
            if self._followers:
                arrival = self._next_arrival()
            num_events += 1
            if progress is not None and num_events % _PROGRESS_EVERY == 0:
                progress(self._num_finished, endpoint.now)

    def _next_arrival(self) -> float:
        first = math.inf if self._next_first is None else self._next_first[0]
        return min(first, self._followers[0][0]) if self._followers else first

    def _add_next_request(self, time: float) -> None:
        """Send the next request, which arrives at `time`, to the endpoint."""
        if self._next_first is not None and self._next_first[0] <= time:
            request = self._next_first[1]
            self._next_first = next(self._first, None)
        else:
            request = heapq.heappop(self._followers)[2]
        number = self.timings.add_request(time - self._request_overhead, request.num_prompt_tokens)
        self._requests.append(request)
        self._endpoint.add(number, request, time)
        if self._endpoint.refused:
            self._note_refused(time)

    def _note_refused(self, now: float) -> None:
        refused = self._endpoint.refused.copy()
        self._endpoint.refused.clear()
        for number, why in refused:
            self._refused.append((self._requests[number].request_id, why))
            self.timings.record_refusal(number)
            self._schedule_follow_up(number, now)

    def _schedule_follow_up(self, number: int, now: float) -> None:
        """Schedule the arrival, if any, that follows the end of a request."""
        follower = self._workload.on_finished(self._requests[number], now)
        if follower is not None:
            time, request = follower
            heapq.heappush(self._followers, (max(time, now), number, request))
