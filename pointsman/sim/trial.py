"""Trials of a search: simulates a configuration on parts of a workload, and measures it against the targets.

A `Judge` holds everything that trials have in common; each worker gets the judge once. A `Job` describes one
simulation, a `Sample` is its result, and a `Score` combines the samples of several parts. A `Source` makes the
workload of a part: a stretch of a trace, or the requests of a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.features import PLAIN, Features
from pointsman.sim.fleet import RoundRobin, Routing
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.hull import SeenLoads, WatchedStepTime
from pointsman.sim.outcome import Timings
from pointsman.sim.report.course import Course, courses
from pointsman.sim.report.intervals import Draws, consecutive_blocks, estimate_distribution
from pointsman.sim.report.summary import Targets, gap_blocks, mean_gaps, meets_targets
from pointsman.sim.simulator import Outcome, Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.topology import ONE_ENGINE, Topology
from pointsman.sim.workload import Workload

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_GAP_BLOCKS = 200
"""Blocks of time by which gaps are assigned to the counted part of a simulation."""


class Part(NamedTuple):
    """A part of a source."""

    number: int
    """The place of the part among the parts of the source, from 0."""
    num_requests: int = 0
    """Number of requests; 0: the source determines it."""
    backlog: int = 0
    """Number of other requests that arrive at the beginning and do not count; a source may ignore it."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """The workload of a part, and the share of its arrivals that count: a service starts empty, and users who have no
    more requests leave it empty."""

    workload: Workload
    begin: float = 0.0
    """Share of the arrivals, from the first on, that do not count."""
    end: float = 1.0
    """Share of the arrivals after which none counts."""
    num_blocks: int = 1
    """Number of blocks of consecutive arrivals for which misses are counted."""
    seconds: float | None = None
    """Mean seconds in which as many requests arrive as the part has; None: as in the simulation."""


class Source(Protocol):
    """Makes the workloads of parts. Every call with equal arguments gives equal requests."""

    def draw(self, part: Part, load: float) -> Drawn:
        """The workload of a part under a load: a number of requests a second or of users, or a factor of speed, as the
        source defines."""


@dataclass(frozen=True, slots=True)
class Job:
    """The description of one simulation."""

    config: SchedulerConfig
    num_replicas: int
    part: Part
    load: float = 1.0
    model: int = 0
    """Index into the step times of the judge."""
    is_watched: bool = False
    """Whether to record the loads of the simulation's steps."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The result of a simulation, of the arrivals that count."""

    num_requests: int
    num_simulated: int
    """Number of requests, those that do not count included."""
    late: Int64Array
    """Number of requests that missed a target of their own, by block."""
    arrived: Int64Array
    """Number of requests by block."""
    late_gaps: Int64Array
    """Number of gaps longer than a target on the pooled ITL, by block; 0 if there is no such target."""
    num_gaps: Int64Array
    """Number of gaps by block."""
    closeness: float
    """Sum of the closeness of all requests, see `Score.closeness`."""
    seconds: float
    """Seconds in which `num_requests` requests arrive."""
    ttft: FloatArray
    tpot: FloatArray
    """Mean gap of each request with several tokens."""
    longest_gaps: FloatArray
    """Longest gap between two tokens of each request with a token; the requests are those of `ttft`, in the same
    order."""
    e2e: FloatArray
    """Seconds from arrival to the last token, of each request with a token."""
    gaps: FloatArray
    gap_counts: Int64Array
    throughput: float
    """Finished requests a second, of the middle of all that finish; infinite if they finish at one time."""
    num_prompt_tokens: int
    num_output_tokens: int
    busy: float
    """Share of the time in which a replica runs a step, mean over the replicas."""
    kv_cache_usage: float
    """Maximum share of a replica's blocks that requests held at one time."""
    num_preemptions: int
    num_refused: int
    refusal: str
    """Why the first refused request can never run; empty: none was refused."""
    seen: SeenLoads | None
    """Loads of the simulation's steps; None: not recorded."""


@dataclass(frozen=True, slots=True)
class Score:
    """Figures of how well a configuration meets the targets. Times are in seconds; None: no request has the time."""

    num_requests: int
    share: float
    """Share of the requests that met all targets of their own; with a target on the pooled ITL, at most the share of
    the gaps that met it."""
    goodput: float
    """Requests a second that met all targets: `share` of the arrival rate."""
    closeness: float
    """Mean closeness of the requests to the targets. It ranks configurations with which no request meets all targets. A
    request's closeness is the minimum, over its targets, of target / measured time, at most 1."""
    ttft_p99: float | None
    tpot_p99: float | None
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

    source: Source
    step_times: tuple[StepTime, ...]
    """The model of step times, and alternatives to it."""
    targets: Targets
    routing: Callable[[], Routing] = RoundRobin
    seed: int = 0
    host_memory: HostMemory | None = None
    """Host memory behind the KV pool of each engine; None: no host memory."""
    features: Features = PLAIN
    """Drafts of each engine, and the cost of its adapters."""
    topology: Topology = ONE_ENGINE
    """The engines of each replica."""
    request_overhead: float = 0.0
    """Seconds of each request outside the steps, before its first token."""

    def measure(self, job: Job, progress: Progress | None = None) -> Sample:
        """Simulate a job.

        Raises:
            KeyboardInterrupt: the simulation was interrupted; a partial one has no result.
        """
        drawn = self.source.draw(job.part, job.load)
        step_time = self.step_times[job.model]
        watched = WatchedStepTime(step_time) if job.is_watched else None
        outcome = simulate(
            drawn.workload,
            job.config,
            watched or step_time,
            num_replicas=job.num_replicas,
            routing=self.routing(),
            seed=self.seed,
            host_memory=self.host_memory,
            features=self.features,
            request_overhead=self.request_overhead,
            topology=self.topology,
            progress=progress,
        )
        if not outcome.is_complete:
            raise KeyboardInterrupt
        return _make_sample(outcome, drawn, self.targets, None if watched is None else watched.seen)


def _make_sample(outcome: Outcome, drawn: Drawn, targets: Targets, seen: SeenLoads | None) -> Sample:
    timings, runs = outcome.timings, courses(outcome)
    first, last = int(drawn.begin * timings.count), max(1, int(drawn.end * timings.count))
    counted = slice(min(first, last - 1), last)
    blocks = consecutive_blocks(counted.stop - counted.start, drawn.num_blocks)
    is_late = ~meets_targets(timings, targets)[counted]
    gaps, gap_counts = timings.gaps()
    # Gaps are assigned by their place in time; the share of gaps before an arrival is about that of arrivals.
    place = (gap_blocks(runs, len(gaps), _GAP_BLOCKS) + 0.5) / _GAP_BLOCKS
    is_counted = (place >= drawn.begin) & (place <= drawn.end)
    gaps, gap_counts, place = gaps[is_counted], gap_counts[is_counted], place[is_counted]
    of_gaps = np.minimum(
        ((place - drawn.begin) / (drawn.end - drawn.begin) * drawn.num_blocks).astype(np.int64), drawn.num_blocks - 1
    )
    limit = targets.pooled_itl
    is_late_gap = np.zeros(len(gaps), dtype=np.bool_) if limit is None else gaps > limit
    arrival, first_token = timings.arrival[counted], timings.first_token[counted]
    last_token, num_output = timings.last_token[counted], timings.num_output_tokens[counted]
    has_token = ~np.isnan(first_token)
    begin, end = float(arrival[0]), float(arrival[-1])
    num_requests = len(arrival)
    return Sample(
        num_requests=num_requests,
        num_simulated=timings.count,
        late=np.bincount(blocks, is_late, drawn.num_blocks).astype(np.int64),
        arrived=np.bincount(blocks, minlength=drawn.num_blocks),
        late_gaps=np.bincount(of_gaps, gap_counts * is_late_gap, drawn.num_blocks).astype(np.int64),
        num_gaps=np.bincount(of_gaps, gap_counts, drawn.num_blocks).astype(np.int64),
        closeness=float(_closeness(timings, targets)[counted].sum()),
        seconds=drawn.seconds if drawn.seconds is not None else (end - begin) * num_requests / max(1, num_requests - 1),
        ttft=(first_token - arrival)[has_token],
        tpot=mean_gaps(timings)[counted][has_token & (num_output > 1)],
        longest_gaps=timings.max_gap[counted][has_token],
        e2e=(last_token - arrival)[has_token],
        gaps=gaps,
        gap_counts=gap_counts,
        throughput=_throughput(timings.last_token[: timings.count]),
        num_prompt_tokens=int(timings.num_prompt_tokens[counted].sum()),
        num_output_tokens=int(num_output.sum()),
        busy=_busy(runs, begin, end),
        kv_cache_usage=max((float(run.kv_cache_usage.max()) for run in runs if len(run.end)), default=0.0),
        num_preemptions=sum(stats.num_preemptions for stats in outcome.stats),
        num_refused=len(outcome.refused),
        refusal=outcome.refused[0][1] if outcome.refused else "",
        seen=seen,
    )


def combine_samples(samples: Sequence[Sample]) -> Score:
    """Combine the samples of some parts."""
    count = sum(sample.num_requests for sample in samples)
    late, late_gaps, num_gaps = (
        sum(int(getattr(sample, name).sum()) for sample in samples) for name in ("late", "late_gaps", "num_gaps")
    )
    ttft, tpot, longest, e2e, gaps = (
        np.concatenate([getattr(sample, name) for sample in samples])
        for name in ("ttft", "tpot", "longest_gaps", "e2e", "gaps")
    )
    counts = np.concatenate([sample.gap_counts for sample in samples])
    share = min(1 - late / count, 1 - late_gaps / max(1, num_gaps))
    return Score(
        num_requests=count,
        share=share,
        goodput=share * count / sum(sample.seconds for sample in samples),
        closeness=sum(sample.closeness for sample in samples) / count,
        ttft_p99=_p99(ttft),
        tpot_p99=_p99(tpot),
        itl_p99=_p99(gaps, counts),
        longest_gap_p99=_p99(longest),
        e2e_p99=_p99(e2e),
        kv_cache_usage=max(sample.kv_cache_usage for sample in samples),
        num_preemptions=sum(sample.num_preemptions for sample in samples),
        num_refused=sum(sample.num_refused for sample in samples),
    )


def resample_goodputs(samples: Sequence[Sample], draws: Draws) -> FloatArray:
    """The goodput of `combine_samples` in each resample of the blocks of all samples, [resamples].

    Args:
        draws: of as many blocks as the samples have together.
    """
    late, arrived, late_gaps, num_gaps = (
        draws.times @ np.concatenate([getattr(sample, name) for sample in samples]).astype(np.float64)
        for name in ("late", "arrived", "late_gaps", "num_gaps")
    )
    rate = sum(sample.num_requests for sample in samples) / sum(sample.seconds for sample in samples)
    shares = np.minimum(1 - late / np.maximum(arrived, 1), 1 - late_gaps / np.maximum(num_gaps, 1))
    found: FloatArray = shares * rate
    return found


def itl_p99(found: Score, targets: Targets) -> float | None:
    """The 99th percentile of the figure that a target on the ITL holds for."""
    return {"pooled": found.itl_p99, "request": found.tpot_p99, "gap": found.longest_gap_p99}[targets.itl_of]


def target_margin(found: Score, targets: Targets) -> float:
    """Distance of the slowest requests from the targets: the minimum, over the targets, of target / p99; above 1 if all
    targets are met."""
    pairs = ((targets.ttft, found.ttft_p99), (targets.itl, itl_p99(found, targets)), (targets.e2e, found.e2e_p99))
    ratios = [target / value for target, value in pairs if target is not None and value]
    return min(ratios, default=0.0)


def _closeness(timings: Timings, targets: Targets) -> FloatArray:
    closest = np.ones(timings.count)
    values = (
        (targets.ttft, timings.first_token - timings.arrival),
        (targets.itl if targets.itl_of == "gap" else None, timings.max_gap),
        (targets.itl if targets.itl_of == "request" else None, mean_gaps(timings)),
        (targets.e2e, timings.last_token - timings.arrival),
    )
    for target, value in values:
        if target is not None:
            np.minimum(closest, target / np.maximum(value, target), out=closest)
    closest[np.isnan(timings.first_token)] = 0.0
    return np.nan_to_num(closest, nan=0.0)  # NaN: there is no such time


def _throughput(ends: FloatArray) -> float:
    """Requests a second that finish, between the first fifth and the last fifth of those that do."""
    ends = np.sort(ends[~np.isnan(ends)])
    if not len(ends):
        return 0.0
    first, last = int(0.2 * (len(ends) - 1)), int(0.8 * (len(ends) - 1))
    seconds = float(ends[last] - ends[first])
    return (last - first) / seconds if seconds > 0 else float("inf")


def _busy(runs: Sequence[Course], begin: float, end: float) -> float:
    """Share of the time from `begin` to `end` in which steps ran, mean over the replicas."""
    if end <= begin:
        return 1.0
    within = sum(float(np.maximum(np.minimum(run.end, end) - np.maximum(run.start, begin), 0.0).sum()) for run in runs)
    return within / ((end - begin) * len(runs))


def _p99(values: FloatArray, counts: Int64Array | None = None) -> float | None:
    blocks = np.zeros(len(values), dtype=np.int64)
    return estimate_distribution(values, counts, blocks, Draws(1, 0, 0)).p99.value
