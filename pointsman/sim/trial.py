"""Trials of a search: simulates a configuration on stretches of a workload, and scores it against the targets.

A `Judge` holds everything that trials have in common; each worker gets the judge once. A `Job` describes one
simulation, a `Sample` is its result, and a `Score` combines the samples of several stretches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.hull import SeenLoads, WatchedStepTime
from pointsman.sim.report.intervals import Draws, estimate_distribution
from pointsman.sim.report.summary import Targets, meets_targets
from pointsman.sim.simulator import Outcome, Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.stretches import Stretch
from pointsman.sim.topology import ONE_ENGINE, Topology

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """The description of one simulation."""

    config: SchedulerConfig
    num_replicas: int
    stretch: int
    """Index into the stretches of the judge."""
    is_watched: bool = False
    """Whether to record the loads of the simulation's steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of a simulation."""

    num_requests: int
    num_good: int
    """Number of requests that met all targets."""
    closeness: float
    """Sum of the closeness of all requests, see `Score.closeness`."""
    seconds: float
    """Seconds in which `num_requests` requests arrive."""
    ttft: FloatArray
    longest_gaps: FloatArray
    """Longest gap between two tokens of each request with a token; the requests are those of `ttft`, in the same
    order."""
    e2e: FloatArray
    """Seconds from arrival to the last token, of each request with a token."""
    gaps: FloatArray
    gap_counts: Int64Array
    kv_cache_usage: float
    """Maximum share of a replica's blocks that requests held at one time."""
    num_preemptions: int
    num_refused: int
    seen: SeenLoads | None
    """Loads of the simulation's steps; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of how well a configuration meets the targets. Times are in seconds; None: no request has the time."""

    num_requests: int
    share: float
    """Share of the requests that met all targets."""
    goodput: float
    """Requests a second that met all targets: `share` of the arrival rate."""
    closeness: float
    """Mean closeness of the requests to the targets. It ranks configurations with which no request meets all targets. A
    request's closeness is the minimum, over the targets, of target / measured time, at most 1."""
    ttft_p99: float | None
    itl_p99: float | None
    """99th percentile of all gaps between two tokens."""
    longest_gap_p99: float | None
    """99th percentile, over the requests, of a request's longest gap between two tokens."""
    e2e_p99: float | None
    kv_cache_usage: float
    num_preemptions: int
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Everything that the simulations of a search have in common."""

    stretches: tuple[Stretch, ...]
    step_time: StepTime
    targets: Targets
    routing: Callable[[], Routing] = RoundRobin
    seed: int = 0
    host_memory: HostMemory | None = None
    """Host memory behind the KV pool of each engine; None: no host memory."""
    features: Features = PLAIN
    """Drafts of each engine, and the cost of its adapters."""
    topology: Topology = ONE_ENGINE
    """The engines of each replica."""

    def measure(self, job: Job, progress: Progress | None = None) -> Sample:
        """Simulate a job.

        Raises:
            KeyboardInterrupt: the simulation was interrupted; a partial one has no result.
        """
        stretch = self.stretches[job.stretch]
        watched = WatchedStepTime(self.step_time) if job.is_watched else None
        outcome = simulate(
            stretch,
            job.config,
            watched or self.step_time,
            num_replicas=job.num_replicas,
            routing=self.routing(),
            seed=self.seed,
            host_memory=self.host_memory,
            features=self.features,
            topology=self.topology,
            progress=progress,
        )
        if not outcome.is_complete:
            raise KeyboardInterrupt
        timings = outcome.timings
        gaps, gap_counts = timings.gaps()
        has_token = ~np.isnan(timings.first_token)
        return Sample(
            num_requests=timings.count,
            num_good=int(np.count_nonzero(meets_targets(timings, self.targets))),
            closeness=float(_closeness(outcome, self.targets).sum()),
            seconds=stretch.seconds,
            ttft=(timings.first_token - timings.arrival)[has_token],
            longest_gaps=timings.max_gap[has_token],
            e2e=(timings.last_token - timings.arrival)[has_token],
            gaps=gaps,
            gap_counts=gap_counts,
            kv_cache_usage=max(
                (event.kv_cache_usage for timeline in outcome.timelines for event in timeline.events), default=0.0
            ),
            num_preemptions=sum(stats.num_preemptions for stats in outcome.stats),
            num_refused=len(outcome.refused),
            seen=None if watched is None else watched.seen,
        )


def combine_samples(samples: Sequence[Sample]) -> Score:
    """Combine the samples of some stretches."""
    count = sum(sample.num_requests for sample in samples)
    num_good = sum(sample.num_good for sample in samples)
    ttft, longest, e2e, gaps = (
        np.concatenate([getattr(sample, name) for sample in samples])
        for name in ("ttft", "longest_gaps", "e2e", "gaps")
    )
    counts = np.concatenate([sample.gap_counts for sample in samples])
    return Score(
        num_requests=count,
        share=num_good / count,
        goodput=num_good / sum(sample.seconds for sample in samples),
        closeness=sum(sample.closeness for sample in samples) / count,
        ttft_p99=_p99(ttft),
        itl_p99=_p99(gaps, counts),
        longest_gap_p99=_p99(longest),
        e2e_p99=_p99(e2e),
        kv_cache_usage=max(sample.kv_cache_usage for sample in samples),
        num_preemptions=sum(sample.num_preemptions for sample in samples),
        num_refused=sum(sample.num_refused for sample in samples),
    )


def target_margin(found: Score, targets: Targets) -> float:
    """Distance of the slowest requests from the targets: the minimum, over the targets, of target / p99; above 1 if all
    targets are met."""
    pairs = ((targets.ttft, found.ttft_p99), (targets.itl, found.longest_gap_p99), (targets.e2e, found.e2e_p99))
    ratios = [target / value for target, value in pairs if target is not None and value]
    return min(ratios, default=0.0)


def _closeness(outcome: Outcome, targets: Targets) -> FloatArray:
    timings = outcome.timings
    closest = np.ones(timings.count)
    values = (
        (targets.ttft, timings.first_token - timings.arrival),
        (targets.itl, timings.max_gap),
        (targets.e2e, timings.last_token - timings.arrival),
    )
    for target, value in values:
        if target is not None:
            np.minimum(closest, target / np.maximum(value, target), out=closest)
    return np.nan_to_num(closest, nan=0.0)  # NaN: there is no such time


def _p99(values: FloatArray, counts: Int64Array | None = None) -> float | None:
    blocks = np.zeros(len(values), dtype=np.int64)
    return estimate_distribution(values, counts, blocks, Draws(1, 0, 0)).p99.value
