"""One trial of a search: a configuration simulated on stretches of a workload, and how well it meets the targets.

A `Judge` is everything that trials have in common; it is sent to each worker once. A `Job` is what is sent for each
simulation, a `Sample` what comes back, a `Score` what the samples of several stretches say together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.profile import Hull, WatchedStepTime
from pointsman.sim.report.intervals import Draws, distribution
from pointsman.sim.report.summary import Targets, met
from pointsman.sim.simulator import Outcome, Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.stretches import Stretch

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Job:
    """A simulation."""

    config: SchedulerConfig
    num_replicas: int
    stretch: int
    """Index into those of the judge."""
    is_watched: bool = False
    """Whether to note the hull of the loads of its steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """What a simulation found."""

    num_requests: int
    num_good: int
    """That met all targets."""
    closeness: float
    """Sum over the requests, see `Score`."""
    seconds: float
    """In which so many requests arrive."""
    ttft: FloatArray
    longest_gaps: FloatArray
    """Of each request with a token, as the one before."""
    e2e: FloatArray
    """From arrival to the last token."""
    gaps: FloatArray
    gap_counts: Int64Array
    kv_cache_usage: float
    """Highest share of the blocks of a replica that requests held."""
    num_preemptions: int
    num_refused: int
    hull: Hull | None
    """Of the loads of its steps; None: they were not noted."""


@dataclass(frozen=True, slots=True)
class Score:
    """How well a configuration meets the targets. Times are in seconds; None: no request got so far."""

    num_requests: int
    share: float
    """Of the requests, that met all targets."""
    goodput: float
    """Requests a second that met them: `share` of those that arrive."""
    closeness: float
    """Mean over the requests of the least of target / value, at most 1. Tells apart what meets nothing."""
    ttft_p99: float | None
    itl_p99: float | None
    """Of all gaps between two tokens."""
    longest_gap_p99: float | None
    """99 % of the requests have no longer gap."""
    e2e_p99: float | None
    kv_cache_usage: float
    num_preemptions: int
    num_refused: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """What simulations have in common."""

    stretches: tuple[Stretch, ...]
    step_time: StepTime
    targets: Targets
    routing: Callable[[], Routing] = RoundRobin
    seed: int = 0
    host_memory: HostMemory | None = None
    """Behind the pool of each replica; None: none."""

    def measure(self, job: Job, progress: Progress | None = None) -> Sample:
        """Simulate.

        Raises:
            KeyboardInterrupt: it was interrupted; half a simulation says nothing.
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
            progress=progress,
        )
        if not outcome.is_complete:
            raise KeyboardInterrupt
        timings = outcome.timings
        gaps, gap_counts = timings.gaps()
        has_token = ~np.isnan(timings.first_token)
        return Sample(
            num_requests=timings.count,
            num_good=int(np.count_nonzero(met(timings, self.targets))),
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
            hull=None if watched is None else watched.hull,
        )


def score(samples: Sequence[Sample]) -> Score:
    """What the samples of some stretches say together."""
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


def slack(found: Score, targets: Targets) -> float:
    """How far the slowest requests are from the targets: the least of target / p99, above 1 if all are met."""
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
    return np.nan_to_num(closest, nan=0.0)  # NaN: it did not get so far


def _p99(values: FloatArray, counts: Int64Array | None = None) -> float | None:
    blocks = np.zeros(len(values), dtype=np.int64)
    return distribution(values, counts, blocks, Draws(1, 0, 0)).p99.value
