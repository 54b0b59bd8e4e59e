"""Frontier: the latencies of a service over the request rate, from light load to beyond saturation.

A `Sweep` simulates samples of a workload (`samples.py`) at several rates. Its result is a `Curve` with a `Point` for
each rate: percentiles of TTFT and ITL, each with an interval. `highest_rate` reads the highest rate within targets from
a curve. The rates follow from earlier results:

    all at once   the throughput of an overloaded service, and the length of the samples
    spread        rates at fixed shares of this throughput
    beyond        higher rates, until the queue grows without end
    bends         the rates in the middle of the two neighbours whose latencies differ most

The interval of a percentile p is Woodruff's (1952): the interval of the share of the values above it, over the samples
(see `crossing.py`), is mapped back to values. With several step times, each percentile is also computed with the other
models on the first sample; chance then cancels out, and the interval is that of the mixture of all models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.capacity import DENSE_GAP, MAX_REQUESTS, MIN_REQUESTS, SPARSE_GAP
from pointsman.sim.crossing import Interval, Misses, mix, share_of_odds
from pointsman.sim.errors import SimulationError
from pointsman.sim.hull import SeenLoads
from pointsman.sim.report.intervals import consecutive_blocks, student_t_percentile, weighted_percentiles
from pointsman.sim.report.summary import ItlOf, Targets
from pointsman.sim.samples import Samples
from pointsman.sim.trial import Job, Part, Sample
from pointsman.sim.workers import Runner

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

Percentiles = Mapping[str, Interval]
"""Percentiles of a latency, in seconds, by the names of `PERCENTILES`; empty: there are no values."""

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Percentiles of a point, by name."""
NUM_SAMPLES = 6
"""Number of samples at each rate."""
MAX_RATES = 40
"""Maximum number of given rates."""
MAX_SIMULATED = 130_000
"""Number of simulated requests, for each replica, from which the length of the samples is chosen."""
_SPREAD = (0.05, 0.25, 0.45, 0.65, 0.8, 0.95, 1.1, 1.35)
"""First rates, as shares of the throughput of an overloaded service. The last one is beyond the throughput of faster
step times that are equally plausible."""
_LIGHT = 0.6
"""Share of the throughput below which samples have half as many requests: requests leave soon, so fewer are enough for
a steady load."""
_LIFE_AT = 0.8
"""Share of the throughput at which the time in which a request gets its tokens is measured."""
_LIVES, _SHORT_LIVES = 10, 5
"""Time from the first to the last arrival of a sample, in multiples of the time in which a request gets its tokens; and
the multiple below which samples count as short."""
_BEYOND, _NUM_BEYOND = 1.25, 4
"""Factor of the steps from rate to rate until the queue grows without end, and the maximum number of these steps."""
_NUM_BENDS = 3
"""Number of rates that are added where latencies differ most from rate to rate."""
_NEAR = 1.03
"""Ratio of two rates below which none is added between them."""
_KEEPS_UP, _GROWTH = 0.97, 1.5
"""A queue grows without end if fewer requests finish than this share of those that arrive, and the median TTFT of the
last third of the arrivals exceeds that of the first third by this factor."""


@dataclass(frozen=True, slots=True)
class Point:
    """The result of all samples at one rate. Times are in seconds."""

    rate: float
    """Requests a second that arrive at all replicas together."""
    ttft: Percentiles
    """Of the requests with a token."""
    itl: Mapping[ItlOf, Percentiles]
    """Of all gaps between two tokens; of the mean gap of each request; of the longest gap of each request."""
    num_requests: int
    """Number of requests that count, of all samples."""
    num_refused: int
    """Number of requests that can never run; they are in no percentile."""
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    busy: float
    """Share of the time in which a replica runs a step, mean over the replicas."""
    num_running: float
    """Mean number of requests between arrival and last token, by Little's law."""
    is_overloaded: bool
    """Whether the queue grows without end, so that the latencies rise with the length of the samples."""
    seen: SeenLoads | None = None
    """Loads of the first sample's steps; None: not recorded."""


@dataclass(slots=True)
class Curve:
    """The latencies of one service over the rate."""

    points: list[Point] = field(default_factory=list)
    """Points by rising rate."""
    throughput: float = math.nan
    """Finished requests a second of an overloaded service; NaN: not measured."""
    saturation: Interval | None = None
    """Requests a second above which the queue grows without end: between the last point at which it does not and the
    first at which it does, with the interval over the models of step times. None: no rate is so high, or all are."""
    num_requests: int = 0
    """Number of requests of a sample."""
    is_short: bool = False
    """Whether the samples are too short for a steady load near the throughput."""
    num_simulated: int = 0
    """Number of simulated requests."""
    num_simulations: int = 0
    is_complete: bool = False
    """Whether all rates were simulated; False: the sweep was interrupted."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The highest rate within targets, as a curve shows it."""

    rate: Interval
    """Requests a second. 0: the lowest rate of the curve misses the targets; infinite: the highest rate meets them."""
    limit: str
    """What limits the rate: "ttft" or "itl", the latency that misses its target first, or "queue", which grows without
    end; empty: nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All that a curve needs except the runner of its simulations."""

    samples: Samples
    """The source of the judge that simulates."""
    config: SchedulerConfig
    """Configuration of each replica's scheduler."""
    num_replicas: int = 1
    rates: Sequence[float] | None = None
    """Requests a second to simulate; None: chosen."""
    num_samples: int = NUM_SAMPLES
    num_requests: int | None = None
    """Number of requests of a sample; None: chosen."""
    confidence: float = 0.9
    """Share of the intervals that contain the percentile of an endless run."""
    num_models: int = 1
    """Number of step times of the judge; the first is the best model, the others are alternatives."""
    is_watched: bool = False
    """Whether to record the loads of steps."""
    on_point: Callable[[Point], None] | None = None
    """Function that is called with each result."""
    progress: Callable[[int, int], None] | None = None
    """Function that gets the number of finished simulations, and the expected number of all."""

    def __post_init__(self) -> None:
        if not 0 < self.confidence < 1:
            raise SimulationError(f"confidence is {self.confidence}; it must be above 0 and below 1, like 0.9")
        if self.num_samples < 2:
            raise SimulationError(f"the number of samples is {self.num_samples}; it must be at least 2")
        if self.rates is not None:
            if not 1 <= len(self.rates) <= MAX_RATES:
                raise SimulationError(f"the number of rates is {len(self.rates)}; it must be from 1 to {MAX_RATES}")
            for rate in self.rates:
                if not 1 / SPARSE_GAP <= rate <= 1 / DENSE_GAP:
                    raise SimulationError(
                        f"a rate is {rate} requests/s; it must be from {1 / SPARSE_GAP:g} to {1 / DENSE_GAP:g}"
                    )


def measure_curve(sweep: Sweep, runner: Runner) -> Curve:
    """Simulate the samples of a sweep. Ctrl-C ends it with the points so far.

    Raises:
        SimulationError: none of the requests can ever run, or a worker died.
    """
    search = _CurveSearch(sweep, runner)
    try:
        search.run()
    except KeyboardInterrupt:
        search.curve.is_complete = False
    return search.curve


def highest_rate(curve: Curve, percentile: str, targets: Targets) -> Reading:
    """The highest rate at which a percentile of each latency is within its target, and the queue does not grow.

    Latencies are interpolated between the points, on logarithmic scales. Where a latency falls from rate to rate, that
    of the lower rate counts for both. The ends of the interval are those of the rates at which the ends of the
    latency's interval reach the target.

    Args:
        curve: a curve with a point.
        percentile: a name of `PERCENTILES`.
        targets: for TTFT and ITL; one for the end-to-end time is ignored.
    """
    points = curve.points
    found, limit = Interval(math.inf, math.inf, math.inf), ""
    if curve.saturation is not None:
        found, limit = curve.saturation, "queue"
    rates = np.array([point.rate for point in points])
    latencies = {
        "ttft": (targets.ttft, [point.ttft for point in points]),
        "itl": (targets.itl, [point.itl[targets.itl_of] for point in points]),
    }
    for name, (target, by_rate) in latencies.items():
        if target is None or not any(by_rate):
            continue
        none = Interval(math.inf, math.inf, math.inf)
        intervals = [each.get(percentile, none) for each in by_rate]
        value, low, high = (
            _rate_within(rates, np.array([getattr(each, end) for each in intervals]), target)
            for end in ("value", "high", "low")
        )
        if value < found.value:
            limit = name
        found = Interval(min(found.value, value), min(found.low, low), min(found.high, high))
    return Reading(found, limit)


def at_rate(points: Sequence[Point], values: Sequence[float], rate: float) -> float:
    """A figure of the points at a rate between theirs, interpolated on logarithmic scales; beyond them, that of the
    nearest point.

    Args:
        points: by rising rate, at least one.
        values: of the points, above 0.
    """
    found = np.interp(math.log(rate), np.log([point.rate for point in points]), np.log(values))
    return float(math.exp(found))


def _rate_within(rates: FloatArray, values: FloatArray, target: float) -> float:
    values = np.maximum.accumulate(values)
    place = int(np.searchsorted(values, target, side="right"))  # the first rate that misses the target
    if place == 0:
        return 0.0
    if place == len(values):
        return math.inf
    before, after = float(values[place - 1]), float(values[place])
    share = math.log(target / before) / math.log(after / before) if math.isfinite(after) else 0.0
    return float(rates[place - 1] * (rates[place] / rates[place - 1]) ** share)


# ---------------------------------------------------------------------- a sweep in progress


class _CurveSearch:
    def __init__(self, sweep: Sweep, runner: Runner) -> None:
        self.curve = Curve()
        self._sweep, self._runner = sweep, runner
        self._num_expected = 0
        self._length = 0  # number of requests of a sample
        self._is_whole = False  # each sample has all requests of a trace
        self._shifts: list[float] = []  # logarithms of the throughputs with the other models, divided by the best's

    def run(self) -> None:
        sweep, curve = self._sweep, self.curve
        if sweep.rates is not None:
            self._expect(2 + sweep.num_models + len(sweep.rates) * self._num_at_rate())
            self._choose_length()
            self._measure(sorted(set(sweep.rates)))
            curve.is_complete = True
            return
        self._expect(2 + sweep.num_models + (len(_SPREAD) + _NUM_BENDS) * self._num_at_rate())
        self._choose_length()
        self._measure([self._within_limits(share * curve.throughput) for share in _SPREAD])
        for _ in range(_NUM_BEYOND):
            if curve.points[-1].is_overloaded:
                break
            self._num_expected += self._num_at_rate()
            self._measure([self._within_limits(curve.points[-1].rate * _BEYOND)])
        for _ in range(_NUM_BENDS):
            rate = self._bend()
            if rate is None:
                break
            self._measure([rate])
        curve.is_complete = True

    def _expect(self, num_simulations: int) -> None:
        self._num_expected = num_simulations

    def _num_of_samples(self) -> int:
        return 1 if self._is_whole else self._sweep.num_samples

    def _num_at_rate(self) -> int:
        return self._num_of_samples() + self._sweep.num_models - 1

    def _within_limits(self, rate: float) -> float:
        return min(max(rate, 1 / SPARSE_GAP), 1 / DENSE_GAP)

    # ------------------------------------------------------------------ simulations

    def _job(self, rate: float, number: int, model: int = 0) -> Job:
        length = self._length
        if rate < _LIGHT * self.curve.throughput and not self._is_whole and self._sweep.num_requests is None:
            length = max(min(length, MIN_REQUESTS * self._sweep.num_replicas), length // 2)
        return Job(self._sweep.config, self._sweep.num_replicas, Part(number, length), rate, model)

    def _run(self, jobs: Sequence[Job]) -> list[Sample]:
        found = []
        for sample in self._runner.run(jobs):
            if sample.num_refused and not len(sample.ttft):
                raise SimulationError(f"all {sample.num_requests:,} requests of a sample are refused. {sample.refusal}")
            self.curve.num_simulated += sample.num_simulated
            self.curve.num_simulations += 1
            if self._sweep.progress is not None:
                self._sweep.progress(self.curve.num_simulations, max(self.curve.num_simulations, self._num_expected))
            found.append(sample)
        return found

    def _choose_length(self) -> None:
        """Measure the throughput, and choose the number of requests of a sample."""
        replicas = self._sweep.num_replicas
        self._set_length(MIN_REQUESTS * replicas)
        (dense,) = self._run([self._job(1 / DENSE_GAP, 0)])
        rate = self._within_limits(_LIFE_AT * dense.throughput)
        (sample,) = self._run([self._job(rate, 0)])
        life = float(sample.e2e.mean()) if len(sample.e2e) else 0.0
        at_rate = self._sweep.num_samples + self._sweep.num_models - 1
        limit = min(MAX_REQUESTS, MAX_SIMULATED // (at_rate * (len(_SPREAD) + _NUM_BENDS)))
        wanted = math.ceil(_LIVES * life * rate)
        before = self._length
        self._set_length(max(MIN_REQUESTS * replicas, min(wanted, limit * replicas)))
        if self._length != before:
            (dense,) = self._run([self._job(1 / DENSE_GAP, 0)])
        others = self._run([self._job(1 / DENSE_GAP, 0, model) for model in range(1, self._sweep.num_models)])
        self._shifts = [math.log(other.throughput / dense.throughput) for other in others]
        self.curve.throughput = min(dense.throughput, 1 / DENSE_GAP)
        self.curve.num_requests = self._length
        self.curve.is_short = self._length < _SHORT_LIVES * life * rate

    def _set_length(self, num_requests: int) -> None:
        samples = self._sweep.samples
        self._length = samples.fit_length(self._sweep.num_requests or num_requests, self._sweep.num_samples)
        self._is_whole = samples.num_available is not None and self._length >= samples.num_available

    def _measure(self, rates: Sequence[float]) -> None:
        """Simulate all samples at these rates, in order."""
        for rate in dict.fromkeys(rates):
            count = self._num_of_samples()
            jobs = [self._job(rate, number) for number in range(count)]
            jobs[0] = replace(jobs[0], is_watched=self._sweep.is_watched)
            jobs += [self._job(rate, 0, model) for model in range(1, self._sweep.num_models)]
            samples = self._run(jobs)
            point = _make_point(rate, samples[:count], samples[count:], self._sweep.confidence)
            self._note_point(point)
            if self._sweep.on_point is not None:
                self._sweep.on_point(point)

    def _note_point(self, point: Point) -> None:
        curve = self.curve
        points = sorted((*curve.points, point), key=lambda each: each.rate)
        steady = max((place for place, each in enumerate(points) if not each.is_overloaded), default=-1)
        # What a higher rate does not show at all, a lower rate shows by chance.
        curve.points = [
            replace(each, is_overloaded=False) if place < steady else each for place, each in enumerate(points)
        ]
        curve.saturation = None
        if 0 <= steady < len(points) - 1:
            low, high = points[steady].rate, points[steady + 1].rate
            between = Interval(math.sqrt(low * high), low, high)
            groups = max(2, self._num_of_samples())
            curve.saturation = mix(between, self._shifts, groups, self._sweep.confidence)

    def _bend(self) -> float | None:
        """The rate between the two neighbours whose latencies differ most; None: all neighbours are near each other."""
        points = self.curve.points
        found, largest = None, 0.0
        for before, after in pairwise(points):
            if after.rate <= before.rate * _NEAR or before.is_overloaded:
                continue
            change = _change(before.ttft, after.ttft) + _change(before.itl["pooled"], after.itl["pooled"])
            if change > largest:
                found, largest = math.sqrt(before.rate * after.rate), change
        return found


def _change(before: Percentiles, after: Percentiles) -> float:
    """How much latencies differ: the sum of the logarithms of the ratios of median and p99."""
    if not before or not after:
        return 0.0
    return sum(abs(math.log(after[name].value / before[name].value)) for name in ("p50", "p99"))


# ---------------------------------------------------------------------- a point


def _make_point(rate: float, samples: Sequence[Sample], others: Sequence[Sample], confidence: float) -> Point:
    """`others`: the first sample with each of the other models of step times."""
    seconds = sum(sample.seconds for sample in samples)
    num_requests = sum(sample.num_requests for sample in samples)
    e2e = np.concatenate([sample.e2e for sample in samples])
    return Point(
        rate=rate,
        ttft=_percentiles(samples, others, lambda sample: _once(sample.ttft), confidence),
        itl={
            "pooled": _percentiles(samples, others, lambda sample: (sample.gaps, sample.gap_counts), confidence),
            "request": _percentiles(samples, others, lambda sample: _once(sample.tpot), confidence),
            "gap": _percentiles(samples, others, lambda sample: _once(_longest_gaps(sample)), confidence),
        },
        num_requests=num_requests,
        num_refused=sum(sample.num_refused for sample in samples),
        prompt_tokens_per_second=sum(sample.num_prompt_tokens for sample in samples) / seconds,
        output_tokens_per_second=sum(sample.num_output_tokens for sample in samples) / seconds,
        busy=float(np.mean([sample.busy for sample in samples])),
        num_running=float(e2e.sum()) / seconds,
        is_overloaded=_is_overloaded(samples),
        seen=samples[0].seen,
    )


def _is_overloaded(samples: Sequence[Sample]) -> bool:
    finishing = float(np.mean([min(sample.throughput, 1 / DENSE_GAP) for sample in samples]))
    arriving = sum(sample.num_requests for sample in samples) / sum(sample.seconds for sample in samples)
    thirds = [np.array_split(sample.ttft, 3) for sample in samples if len(sample.ttft) >= 3]
    if finishing >= _KEEPS_UP * arriving or not thirds:
        return False
    first, last = (float(np.median(np.concatenate([each[place] for each in thirds]))) for place in (0, 2))
    return last > _GROWTH * first


_Values = Callable[[Sample], tuple[FloatArray, Int64Array]]


def _once(values: FloatArray) -> tuple[FloatArray, Int64Array]:
    return values, np.ones(len(values), dtype=np.int64)


def _longest_gaps(sample: Sample) -> FloatArray:
    """Of the requests with several tokens: the longest gap of others is 0."""
    return sample.longest_gaps[sample.longest_gaps > 0]


def _percentiles(
    samples: Sequence[Sample], others: Sequence[Sample], read: _Values, confidence: float
) -> dict[str, Interval]:
    """The percentiles of one latency, with the intervals over the samples and the models."""
    read_values = [read(sample) for sample in samples]
    values, counts = (np.concatenate(column) for column in zip(*read_values, strict=True))
    if not len(values):
        return {}
    if len(samples) > 1:
        num_groups = len(samples)
        groups = np.repeat(np.arange(num_groups), [len(each) for each, _ in read_values])
    else:  # blocks of consecutive values
        num_groups = len(samples[0].arrived)
        groups = consecutive_blocks(len(values), num_groups)
    order = values.argsort(kind="stable")
    values, counts, groups = values[order], counts[order], groups[order]
    first = _values_at(*read(samples[0])) if others else {}
    by_model = [_values_at(*read(other)) for other in others]
    found = {}
    for name, share in PERCENTILES.items():
        interval = _interval(values, counts, groups, num_groups, share, confidence)
        shifts = [math.log(each[name] / first[name]) for each in by_model if each and first]
        found[name] = mix(interval, shifts, num_groups, confidence)
    return found


def _values_at(values: FloatArray, counts: Int64Array) -> dict[str, float]:
    if not len(values):
        return {}
    order = values.argsort()
    found = weighted_percentiles(values[order], counts[order], list(PERCENTILES.values()))
    return dict(zip(PERCENTILES, found.tolist(), strict=True))


def _few_groups(above: FloatArray, confidence: float) -> float:
    """The factor by which an interval is wider because few groups have most of the values above it: as many groups
    count as would have as large a variance of their sum, were they equal (Kish's effective sample size)."""
    total = float(above.sum())
    if len(above) < 2 or not total:
        return 1.0
    effective = round(total**2 / float(above @ above))
    quantiles = (student_t_percentile(count, (1 + confidence) / 2) for count in (max(1, effective - 1), len(above) - 1))
    few, all_groups = quantiles
    return few / all_groups


def _interval(
    values: FloatArray, counts: Int64Array, groups: Int64Array, num_groups: int, share: float, confidence: float
) -> Interval:
    """A percentile of sorted values, with its interval."""
    (value,) = weighted_percentiles(values, counts, [share]).tolist()
    above = np.bincount(groups, counts * (values > value), num_groups).astype(np.float64)
    total = np.bincount(groups, counts, num_groups).astype(np.float64)
    middle, _, high = Misses(0.0, above, total).odds(confidence)
    half, nominal = (high - middle) * _few_groups(above, confidence), math.log((1 - share) / share)
    ends = [1 - share_of_odds(nominal + half), 1 - share_of_odds(nominal - half)]
    low, top = weighted_percentiles(values, counts, ends).tolist()
    return Interval(value, min(low, value), max(top, value))
