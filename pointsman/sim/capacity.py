"""Capacity: finds the number of requests a second, users or replicas with which a service meets its targets.

A probe simulates a load: the same requests at another rate, or requests from another number of users. Each user waits
for an output, thinks, and sends the next request. The service meets its targets under a load if at least `share` of the
requests do: the goodput of `report/summary.py`. Bisection finds three limits:

    highest_rate      for a number of replicas: between a rate that meets the targets and one that misses them
    max_users        for a number of replicas: between two numbers of users, in the same way
    fewest_replicas   for a load: between a number that misses the targets and one that meets them

All assume that a higher load, or fewer replicas, never serve more requests in time. Near the limit this holds within
the noise of a workload of some thousand requests. The search ends when the two rates or numbers (the bracket) are as
close as `tolerance`. The result is also only as exact as the workload is long: a queue that grows slowly needs time to
show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.errors import SimulationError
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.report.summary import Targets, figures
from pointsman.sim.simulator import Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.topology import ONE_ENGINE, Topology
from pointsman.sim.workload import Workload

SPARSE_GAP = 1000.0
"""Mean seconds between requests at the lowest rate that is probed: requests then run one after the other."""
DENSE_GAP = 1e-6
"""Mean seconds between requests at the highest rate that is probed: all requests arrive at once."""
_STEP_DOWN, _STEP_UP, _FARTHEST_DOWN = 0.7, 1.4, 0.1
_SHORT_SPANS = 20
"""Minimum time from the first to the last arrival of a probe, in multiples of the TTFT target. A shorter probe cannot
show that the queue grows."""
_SHORT_LIVES = 5
"""Minimum time from the first to the last arrival of a probe, in multiples of a request's mean end-to-end time. A
shorter probe ends before the service, which is empty at the start, reaches its steady load."""


@dataclass(frozen=True, slots=True)
class Probe:
    """The result of one simulation."""

    rate: float
    """Arrivals a second. With users: the rate without the first tenth and the last fifth of the arrivals."""
    num_replicas: int
    share: float
    """Share of the requests that met all targets."""
    ttft_p99: float | None
    """99th percentile of the TTFT, in seconds; None: no request got a token."""
    itl_p99: float | None
    """99th percentile of the seconds between two tokens of a request, over the gaps of all requests."""
    e2e_mean: float | None
    """Mean seconds from the arrival of a request to its last token."""
    longest_gap_p99: float | None
    """99th percentile, over the requests, of a request's longest gap between two tokens, in seconds."""
    requests_per_second: float
    """Finished requests a second."""
    num_requests: int
    num_refused: int
    meets: bool
    num_users: int | None = None
    """Number of users; None: requests arrived at a rate that does not depend on the service."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a probe needs except the load and the number of replicas."""

    workload: Callable[[float], Workload]
    """Makes the workload of a load. The load is a mean rate, in requests a second, or a number of users. Every call
    gives the same requests."""
    is_of_users: bool = False
    """Whether the loads given to `workload` are numbers of users; otherwise they are rates."""
    config: SchedulerConfig
    """Configuration of each replica's scheduler."""
    step_time: StepTime
    targets: Targets
    share: float = 0.99
    """Minimum share of the requests that must meet all targets."""
    routing: Callable[[], Routing] = RoundRobin
    seed: int = 0
    host_memory: HostMemory | None = None
    """Host memory behind the KV pool of each engine; None: no host memory."""
    features: Features = PLAIN
    """Drafts of each engine, and the cost of its adapters."""
    topology: Topology = ONE_ENGINE
    """The engines of each replica."""
    on_probe: Callable[[Probe], None] | None = None
    """Function that is called with each finished probe."""
    progress: Progress | None = None
    """Function that gets the progress of each simulation, see `simulate`."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SimulationError(f"share of requests is {self.share}; it must be above 0 and at most 1")
        if not self.targets:
            raise SimulationError("no latency target is given; give one for TTFT or ITL")

    def probe(self, load: float, num_replicas: int) -> Probe:
        """Simulate the service under a load.

        Raises:
            SimulationError: none of the requests can ever run, so no load meets any target.
            KeyboardInterrupt: Ctrl-C ended the simulation; a partial probe has no result.
        """
        outcome = simulate(
            self.workload(load),
            self.config,
            self.step_time,
            num_replicas=num_replicas,
            routing=self.routing(),
            seed=self.seed,
            host_memory=self.host_memory,
            features=self.features,
            topology=self.topology,
            progress=self.progress,
        )
        if not outcome.is_complete:
            raise KeyboardInterrupt
        if outcome.refused and len(outcome.refused) == len(outcome.timings.arrival):
            raise SimulationError(f"all {len(outcome.refused):,} requests are refused. {outcome.refused[0][1]}")
        targets = self.targets
        report = figures(
            outcome,
            self.config,
            ttft_target=targets.ttft,
            itl_target=targets.itl,
            e2e_target=targets.e2e,
            num_bootstrap=0,
        )
        assert report.goodput is not None
        share, gaps = report.goodput.share.value or 0.0, outcome.timings.max_gap
        throughput = report.requests_per_second.value or 0.0
        probe = Probe(
            rate=_steady_rate(outcome.timings.arrival, throughput) if self.is_of_users else load,
            num_replicas=num_replicas,
            share=share,
            ttft_p99=report.ttft.p99.value,
            itl_p99=report.itl.p99.value,
            e2e_mean=report.e2e.mean.value,
            longest_gap_p99=float(np.percentile(gaps, 99)) if len(gaps) else None,
            requests_per_second=throughput,
            num_requests=report.counts.arrived,
            num_refused=report.counts.refused,
            meets=share >= self.share,
            num_users=int(load) if self.is_of_users else None,
        )
        if self.on_probe is not None:
            self.on_probe(probe)
        return probe


@dataclass(slots=True)
class Capacity:
    """The result: the best probe that meets the targets and the nearest probe that misses them."""

    meets: Probe | None = None
    """The probe that meets the targets with the highest load, or with the fewest replicas; None: no probe meets
    them."""
    misses: Probe | None = None
    """The probe nearest to `meets` that misses the targets; None: no probe misses them."""
    probes: list[Probe] = field(default_factory=list)
    """All probes, in the order in which they were made."""

    def add(self, probe: Probe) -> Probe:
        self.probes.append(probe)
        if probe.meets:
            self.meets = probe
        else:
            self.misses = probe
        return probe

    def is_short(self, targets: Targets) -> bool:
        """Whether the requests of the best probe arrive in too short a time to show a growing queue."""
        best = self.meets
        if best is None or not best.rate:
            return False
        min_span = max(_SHORT_SPANS * (targets.ttft or 0.0), _SHORT_LIVES * (best.e2e_mean or 0.0))
        return (best.num_requests - 1) / best.rate < min_span


def highest_rate(question: Question, num_replicas: int = 1, *, tolerance: float = 0.02) -> Capacity:
    """Search for the highest rate that `num_replicas` replicas serve within the targets.

    Three outcomes are possible: both `meets` and `misses` exist; `meets` is None if even requests that arrive far apart
    miss the targets; `misses` is None if the targets are met even if all requests arrive at one time.

    Args:
        tolerance: maximum difference between the rates of `misses` and `meets`, relative to the rate of `meets`.

    Raises:
        SimulationError: an argument is out of range.
    """
    _check_tolerance(tolerance)
    found = Capacity()
    if not found.add(question.probe(1 / SPARSE_GAP, num_replicas)).meets:
        return found
    at_once = found.add(question.probe(1 / DENSE_GAP, num_replicas))
    if at_once.meets:
        return found
    # The throughput under overload is near the highest rate that meets the targets.
    rate = max(at_once.requests_per_second, 2 / SPARSE_GAP)
    step = _STEP_UP if found.add(question.probe(rate, num_replicas)).meets else _STEP_DOWN
    while (step > 1) == found.probes[-1].meets:
        rate *= step
        step = min(max(step * step, _FARTHEST_DOWN), 1 / _FARTHEST_DOWN)
        found.add(question.probe(rate, num_replicas))
    while (bracket := _bracket_rates(found))[1] > bracket[0] * (1 + tolerance):
        found.add(question.probe(math.sqrt(bracket[0] * bracket[1]), num_replicas))
    return found


def max_users(question: Question, num_replicas: int = 1, *, tolerance: float = 0.02) -> Capacity:
    """Search for the maximum number of users that `num_replicas` replicas serve within the targets.

    As `highest_rate`: `meets` is None if a single user is not served in time, `misses` is None if one user
    for each request is served in time.

    Raises:
        SimulationError: an argument is out of range.
    """
    _check_tolerance(tolerance)
    found = Capacity()
    users, last = 1, found.add(question.probe(1, num_replicas))
    while last.meets and users < last.num_requests:
        users *= 2
        last = found.add(question.probe(users, num_replicas))
    if found.meets is None or found.misses is None:
        return found
    _bisect(lambda between: found.add(question.probe(between, num_replicas)).meets, users // 2, users, tolerance)
    return found


def fewest_replicas(question: Question, load: float, low: int, high: int) -> Capacity:
    """Search for the fewest replicas, from `low` to `high`, that serve `load` within the targets.

    `meets` is None if `high` replicas are too few; `misses` is None if `low` replicas are enough.

    Raises:
        SimulationError: an argument is out of range.
    """
    if not 1 <= low <= high:
        raise SimulationError(
            f"the range of replicas is {low} to {high}; it must begin at 1 or more and not end below its begin"
        )
    if not 0 < load < math.inf:
        raise SimulationError(f"the load is {load} requests a second or users; it must be finite and above 0")
    found = Capacity()
    if not found.add(question.probe(load, high)).meets or low == high:
        return found
    if found.add(question.probe(load, low)).meets:
        return found
    _bisect(lambda between: found.add(question.probe(load, between)).meets, high, low)
    return found


def _bisect(meets_at: Callable[[int], bool], meets: int, misses: int, tolerance: float = 0.0) -> None:
    """Halve the interval between an integer that meets the targets and one that misses them. The search ends when their
    difference is 1, or at most the share `tolerance` of the integer that meets the targets."""
    while abs(meets - misses) > max(1, tolerance * meets):
        middle = (meets + misses) // 2
        if meets_at(middle):
            meets = middle
        else:
            misses = middle


def _bracket_rates(found: Capacity) -> tuple[float, float]:
    assert found.meets is not None and found.misses is not None
    return found.meets.rate, found.misses.rate


def _steady_rate(arrivals: npt.NDArray[np.float64], throughput: float) -> float:
    """Requests a second without the first tenth and the last fifth of the arrivals, because some users have no more
    requests at the end. If all requests arrive at one time: the throughput."""
    first, last = (int(share * (len(arrivals) - 1)) for share in (0.1, 0.8))
    seconds = float(arrivals[last] - arrivals[first])
    return (last - first) / seconds if seconds > 0 else throughput


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < math.inf:
        raise SimulationError(f"tolerance is {tolerance}; it must be finite and above 0; 0.02 means 2 %")
