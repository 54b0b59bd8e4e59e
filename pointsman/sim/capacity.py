"""How many requests a second, or how many users, does a service handle within its targets, and on how many replicas?

A probe simulates a load: the same requests at another speed, or from another number of users, each of whom waits for
an answer, thinks, and asks again. The service meets its targets under a load if at least `share` of the requests do:
the goodput of `report/summary.py`. Three questions are answered by bisection:

    highest_rate      of a number of replicas; between a rate that meets the targets and one that misses them
    most_users        of a number of replicas, in the same way
    fewest_replicas   for a load; between a number that misses the targets and one that meets them

All assume that a higher load, or fewer replicas, never serve more requests in time. Near the limit that is true within
the noise of a workload of some thousand requests, so the bracket is as exact as `tolerance`, and the answer as exact as
the workload is long: a queue that grows slowly needs time to show.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.errors import SimulationError
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.report.summary import Targets, figures
from pointsman.sim.simulator import Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.workload import Workload

SPARSE_GAP = 1000.0
"""Mean seconds between requests of the lowest rate that is probed: requests then run one after the other."""
DENSE_GAP = 1e-6
"""Of the highest: all requests are there at once."""
_STEP_DOWN, _STEP_UP, _FARTHEST_DOWN = 0.7, 1.4, 0.1
_SHORT_SPANS = 20
"""A probe whose arrivals last less than so many times the target of the TTFT is too short to show a growing queue."""
_SHORT_LIVES = 5
"""Or so many times what a request takes: it begins with an empty service, and is over before that is full."""


@dataclass(frozen=True, slots=True)
class Probe:
    """One simulation."""

    rate: float
    """Requests a second; of users, those that they sent once all had begun and before the first ones were done."""
    num_replicas: int
    share: float
    """Of the requests that met all targets."""
    ttft_p99: float | None
    """In seconds; None: no request got a token."""
    itl_p99: float | None
    """Of all gaps between two tokens of a request, those of all requests together."""
    e2e_mean: float | None
    """Seconds from the arrival of a request to its last token."""
    longest_gap_p99: float | None
    """99 % of the requests had no longer time between two of their tokens, in seconds."""
    requests_per_second: float
    """That finished."""
    num_requests: int
    num_refused: int
    meets: bool
    num_users: int | None = None
    """None: requests arrived at a rate, whatever the service did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a service: everything but the load and the number of replicas."""

    workload: Callable[[float], Workload]
    """The requests of a load: those that arrive at a mean rate, in requests a second, or those of a number of users.
    Each call gives the same requests."""
    is_of_users: bool = False
    """Whether a load is a number of users."""
    config: SchedulerConfig
    """Of each replica's scheduler."""
    step_time: StepTime
    targets: Targets
    share: float = 0.99
    """Of the requests, that must meet all targets."""
    routing: Callable[[], Routing] = RoundRobin
    seed: int = 0
    host_memory: HostMemory | None = None
    """Behind the pool of each replica; None: none."""
    on_probe: Callable[[Probe], None] | None = None
    """Called with each probe when it is done."""
    progress: Progress | None = None
    """Of the simulation that runs, see `simulate`."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise SimulationError(f"share is {self.share}; it must be above 0 and at most 1")
        if not self.targets:
            raise SimulationError("there is no target; give one on TTFT or ITL")

    def probe(self, load: float, num_replicas: int) -> Probe:
        """Simulate the service under a load.

        Raises:
            SimulationError: none of the requests can ever run, so that no load meets any target.
            KeyboardInterrupt: Ctrl-C ended the simulation; half a probe says nothing.
        """
        outcome = simulate(
            self.workload(load),
            self.config,
            self.step_time,
            num_replicas=num_replicas,
            routing=self.routing(),
            seed=self.seed,
            host_memory=self.host_memory,
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
    """The answer: between the best probe that meets the targets and the nearest one that misses them."""

    meets: Probe | None = None
    """With the highest rate, or the fewest replicas; None: none of the probes meets the targets."""
    misses: Probe | None = None
    """The nearest to it; None: none of the probes misses them."""
    probes: list[Probe] = field(default_factory=list)
    """All of them, in the order in which they were made."""

    def add(self, probe: Probe) -> Probe:
        self.probes.append(probe)
        if probe.meets:
            self.meets = probe
        else:
            self.misses = probe
        return probe

    def is_short(self, targets: Targets) -> bool:
        """Whether the requests of the best probe arrive in too short a time to show a queue that grows."""
        best = self.meets
        if best is None or not best.rate:
            return False
        least = max(_SHORT_SPANS * (targets.ttft or 0.0), _SHORT_LIVES * (best.e2e_mean or 0.0))
        return (best.num_requests - 1) / best.rate < least


def highest_rate(question: Question, num_replicas: int = 1, *, tolerance: float = 0.02) -> Capacity:
    """The highest rate that `num_replicas` serve within the targets.

    Three outcomes: both sides of the bracket are there; `meets` is None, as not even requests that arrive far apart
    meet the targets; `misses` is None, as all requests at once do.

    Args:
        tolerance: the bracket is at most this wide, relative to its lower end.

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
    # What it serves under overload is near what it serves in time.
    rate = max(at_once.requests_per_second, 2 / SPARSE_GAP)
    step = _STEP_UP if found.add(question.probe(rate, num_replicas)).meets else _STEP_DOWN
    while (step > 1) == found.probes[-1].meets:
        rate *= step
        step = min(max(step * step, _FARTHEST_DOWN), 1 / _FARTHEST_DOWN)
        found.add(question.probe(rate, num_replicas))
    while (bracket := _bracket(found))[1] > bracket[0] * (1 + tolerance):
        found.add(question.probe(math.sqrt(bracket[0] * bracket[1]), num_replicas))
    return found


def most_users(question: Question, num_replicas: int = 1, *, tolerance: float = 0.02) -> Capacity:
    """The most users that `num_replicas` serve within the targets.

    As `highest_rate`: `meets` is None if not even one user is served in time, `misses` is None if as many users as
    there are requests are.

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
    """The fewest replicas, from `low` to `high`, that serve `load` within the targets.

    `meets` is None if `high` are too few, `misses` is None if `low` are enough.

    Raises:
        SimulationError: an argument is out of range.
    """
    if not 1 <= low <= high:
        raise SimulationError(f"replicas are from {low} to {high}; the range must begin at 1 or more, and not descend")
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
    """Halve the way from a number that meets the targets to one that misses them, until they are neighbours, or as near
    as `tolerance`, relative to the one that meets them."""
    while abs(meets - misses) > max(1, tolerance * meets):
        middle = (meets + misses) // 2
        if meets_at(middle):
            meets = middle
        else:
            misses = middle


def _bracket(found: Capacity) -> tuple[float, float]:
    assert found.meets is not None and found.misses is not None
    return found.meets.rate, found.misses.rate


def _steady_rate(arrivals: npt.NDArray[np.float64], throughput: float) -> float:
    """Requests a second between the first tenth of the arrivals and the last fifth, when some users have nothing more
    to ask; the throughput, if they came all at once."""
    first, last = (int(share * (len(arrivals) - 1)) for share in (0.1, 0.8))
    seconds = float(arrivals[last] - arrivals[first])
    return (last - first) / seconds if seconds > 0 else throughput


def _check_tolerance(tolerance: float) -> None:
    if not 0 < tolerance < math.inf:
        raise SimulationError(f"tolerance is {tolerance}; it must be above 0: 0.02 is a bracket of 2 %")
