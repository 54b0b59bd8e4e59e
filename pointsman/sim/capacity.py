"""Capacity: finds the number of requests a second, users or replicas with which a service meets its targets.

A service meets its targets under a load if at least `share` of the requests do, and, with a target on the pooled ITL,
if at least `share` of the gaps between tokens do. The capacity is the load at which the share of misses reaches what
is allowed. Samples of the workload (`samples.py`) are simulated at each load; `crossing.py` estimates the load from
all samples, with an interval. A search has four steps:

    bracket    two short samples: a load that meets the targets, and one that misses them
    refine     all samples, at the loads near the estimate and near both ends of its interval
    begin      the same requests after a backlog. A service that starts empty misses too few targets, one that starts
               with a backlog too many; in long samples both are equal. The result of an endless run is between them
    grow       more samples or longer ones, until the interval is as narrow as wanted, or a limit is reached

Users are whole numbers. A number of replicas is found as a load for each replica: the misses then rise with it, as with
a rate. The simulated loads depend only on earlier results, so the result does not depend on the number of workers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.crossing import Interval, Misses, crossing, mix, share_of_odds
from pointsman.sim.errors import SimulationError
from pointsman.sim.hull import SeenLoads
from pointsman.sim.report.summary import Targets
from pointsman.sim.samples import Samples
from pointsman.sim.trial import Job, Part, Sample, Score, combine_samples
from pointsman.sim.workers import Runner

Unit = Literal["rate", "users", "replicas"]
"""What is searched: requests a second, users, or replicas for a load."""

SPARSE_GAP = 1000.0
"""Mean seconds between requests of a replica at the lowest rate that is simulated: requests run one after the other."""
DENSE_GAP = 1e-6
"""Mean seconds between requests at the highest rate that is simulated: all requests arrive at once."""
NUM_SAMPLES = 8
"""Number of samples of the first estimate."""
MAX_SAMPLES = 32
MIN_REQUESTS, MAX_REQUESTS = 600, 20_000
"""Minimum and maximum number of requests of a sample, for each replica, where they are not given."""
MAX_SIMULATED = 60_000
"""Number of simulated requests, for each replica, after which no more samples are added."""
_SPANS, _LIVES = 40, 10
"""Time from the first to the last arrival of a sample, in multiples of the longest target, and of the time in which a
request gets its tokens. In a shorter sample the service, which is empty at the start, has no steady load, and a queue
that grows slowly does not show."""
_SHORTEST = 4
"""Time from the first to the last arrival of a sample that brackets the result, in multiples of the longest target."""
_SHORT_SPANS, _SHORT_LIVES = 20, 5
"""The times below which samples of a given number of requests count as short."""
_START = 0.8
"""First simulated load, as a share of the throughput of an overloaded service."""
_NUM_FIRST = 2
"""Number of samples that bracket the result."""
_STEP_UP, _USER_STEP, _STEP_NEAR, _LONGEST_STEP = 1.3, 4.0, 1.1, 10.0
"""Factors of the steps from load to load until the targets are missed: first steps of a search, of a search for users,
of a search near a known load; and the longest step."""
_STEPS = (1.06, 1.1, 1.15, 1.3, 1.5, 2.0, 4.0, 10.0)
"""Factors of the steps beyond the known loads, where the interval reaches farther, by round."""
_NEAR, _NEAR_END = 1.25, 1.12
"""Ratios of two loads at which they are near enough: for a bracket, and for an end of the interval."""
_NEAR_ODDS = 1.0
"""Difference of the log-odds of misses at two loads at which they are near enough, too: interpolation is then exact."""
_SAME = 1.01
"""Ratio below which two loads are one."""
_MIN_GROWTH = 1.4
"""Minimum factor by which the number of samples grows."""
_PARTS_OF_BUDGET = 60
"""Number of samples for which the number of simulated requests must be enough, at all loads together."""
_LOADS = 6
"""Number of loads, for each of which samples of another length are simulated anew, about."""
_OF_STARTS = 4
"""Number of samples by which the beginnings, empty or with a backlog, are compared."""
_OF_MODELS = 2
"""Number of samples by which models of step times are compared; they are the same samples, so chance cancels out."""
_LENGTH_OF_MODELS = 0.5
"""Length of these samples, as a share of the others' length."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of the samples at one load."""

    load: float
    """Requests a second, or users."""
    num_replicas: int
    num_samples: int
    num_groups: int
    """Number of groups of requests from which the interval of the share is computed."""
    share: Interval
    """Share of the requests that met all targets of their own, or of the gaps within a target on the pooled ITL if that
    is less; with the interval of the question's confidence."""
    gaps_share: float | None
    """Share of the gaps within a target on the pooled ITL; None: there is no such target."""
    figures: Score
    rate: float
    """Requests a second that arrive."""
    e2e_mean: float | None
    """Mean seconds from the arrival of a request to its last token."""
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    busy: float
    """Share of the time in which a replica runs a step, mean over the replicas."""
    meets: bool
    """Whether the share reaches the wanted one; its interval may contain the wanted one."""
    seen: SeenLoads | None = None
    """Loads of all steps; None: not recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a search needs except the runner of its simulations."""

    samples: Samples
    """The source of the judge that simulates."""
    config: SchedulerConfig
    """Configuration of each replica's scheduler."""
    targets: Targets
    unit: Unit = "rate"
    num_replicas: int = 1
    """Number of replicas; of a search for replicas, the maximum."""
    min_replicas: int = 1
    load: float = 0.0
    """Of a search for replicas: requests a second or users to serve."""
    share: float = 0.99
    """Minimum share of the requests that must meet all targets."""
    confidence: float = 0.9
    """Share of the intervals that contain the result of an endless run."""
    within: float = 0.1
    """Wanted distance of each end of the interval from the result, relative to the result."""
    num_requests: int | None = None
    """Number of requests of a sample; None: chosen by the targets."""
    max_samples: int = MAX_SAMPLES
    max_simulated: int = MAX_SIMULATED
    num_models: int = 1
    """Number of step times of the judge: the best model, and alternatives to it."""
    model: int = 0
    """Index of the best model."""
    is_watched: bool = False
    """Whether to record the loads of steps, see `Measured.seen`."""
    on_load: Callable[[Measured], None] | None = None
    """Function that is called with the result at each load."""
    progress: Callable[[int, float], None] | None = None
    """Function that gets the number of simulated requests, and the distance of the interval's ends so far."""

    def __post_init__(self) -> None:
        for name, value in (("share of requests", self.share), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise SimulationError(f"{name} is {value}; it must be above 0 and below 1, like 0.99")
        if not 0 < self.within < math.inf:
            raise SimulationError(f"within is {self.within}; it must be finite and above 0; 0.1 means 10 %")
        if not self.targets:
            raise SimulationError("no latency target is given; give one for TTFT or ITL")
        if self.max_samples < 2:
            raise SimulationError(f"the number of samples is {self.max_samples}; it must be at least 2")
        if not 1 <= self.min_replicas <= self.num_replicas:
            raise SimulationError(
                f"the range of replicas is {self.min_replicas} to {self.num_replicas}; it must begin at 1 or more and "
                "not end below its begin"
            )
        if self.unit == "replicas" and not 0 < self.load < math.inf:
            raise SimulationError(f"the load is {self.load} requests a second or users; it must be finite and above 0")


@dataclass(slots=True, kw_only=True)
class Capacity:
    """The result of a search; after an interruption, the result so far."""

    interval: Interval | None = None
    """Requests a second, users or replicas, over the samples and the models of step times; None: interrupted before an
    estimate. 0 requests or users: nothing meets the targets; infinite: any load of the samples does, or for replicas
    that the maximum is too few."""
    sampling: Interval | None = None
    """The same with the best model of step times alone."""
    alternatives: list[float] = field(default_factory=list)
    """Results with the other models."""
    num_samples: int = 0
    num_groups: int = 0
    """Number of samples; of a trace that is one sample, of its blocks."""
    num_requests: int = 0
    """Number of requests of a sample."""
    loads: list[Measured] = field(default_factory=list)
    """Results of all loads with all samples, by rising load for each replica."""
    is_of_gaps: bool = False
    """Whether the pooled ITL, not a target of the requests, limits the result."""
    is_narrow: bool = False
    """Whether the interval is as narrow as wanted."""
    is_of_start: bool = False
    """Whether most of the interval's width comes from the beginning of the samples, empty or with a backlog: longer
    samples would make it narrower, more samples would not."""
    is_short: bool = False
    """Whether the samples are too short to show a queue that grows slowly."""
    num_simulated: int = 0
    """Number of simulated requests."""
    is_complete: bool = False

    @property
    def at(self) -> Measured | None:
        """The result at the highest simulated load within the targets and the capacity, or at the lowest one within
        the targets; None: no simulated load is."""
        meets = [each for each in self.loads if each.meets]
        if self.interval is None or not meets:
            return None
        value = self.interval.value
        below = [each for each in meets if each.load <= value * _SAME]
        if meets[0].load == meets[-1].load:  # of a search for replicas
            below = [each for each in meets if each.num_replicas >= value]
        return (below or meets[:1])[-1]

    @property
    def beyond(self) -> Measured | None:
        """The result at the lowest simulated load that misses the targets."""
        misses = [each for each in self.loads if not each.meets]
        return misses[0] if misses else None


def find_capacity(question: Question, runner: Runner) -> Capacity:
    """Search for the capacity. Ctrl-C ends the search with the result so far.

    Raises:
        SimulationError: none of the requests can ever run, or a worker died.
    """
    search = CapacitySearch(question, runner)
    try:
        search.run()
    except KeyboardInterrupt:
        search.note_result()
    return search.found


class CapacitySearch:
    """A search in progress."""

    def __init__(self, question: Question, runner: Runner) -> None:
        self.found = Capacity()
        self._question, self._runner = question, runner
        self._backlog = 0.0  # the requests of so many seconds arrive at the beginning
        self._samples: dict[float, list[Sample]] = {}  # by load of a replica; all have the current length
        self._num_requests = 0
        self._allowed = 1 - question.share
        self._count = 0  # number of samples of the current estimate
        self._start = 0.0  # logarithm of the load after a backlog, divided by that from an empty start
        self._criteria = [("late", "arrived")]
        if question.targets.pooled_itl is not None:
            self._criteria.append(("late_gaps", "num_gaps"))

    def run(self) -> None:
        """Search; an interruption leaves the result so far to `note_result`."""
        loads = self._bracket()
        self._refine(self._num_first(), loads)
        self._grow()
        self.note_result()
        self._compare_models()
        self.found.is_complete = True

    def note_result(self) -> None:
        """Set the result from the samples so far."""
        found, question = self.found, self._question
        if not self._count:
            return
        interval, found.is_of_gaps = self._crossing(self._count)
        found.sampling = found.interval = self._in_units(self._with_start(interval))
        found.num_samples, found.num_requests = self._count, self._num_requests
        found.loads = [self._measured(load, self._count) for load in self._known(self._count)]
        found.num_groups = found.loads[0].num_groups if found.loads else 0
        found.is_narrow = self._excess(found.sampling) <= question.within
        found.is_short = self._is_short()

    # ------------------------------------------------------------------ loads

    def _in_units(self, loads: Interval) -> Interval:
        """Loads of a replica in the unit of the question."""
        question = self._question
        if question.unit != "replicas":
            value, low, high = (end * question.num_replicas for end in (loads.value, loads.low, loads.high))
            if question.unit == "users":
                value, low, high = (math.floor(end + 1e-9) if end < math.inf else end for end in (value, low, high))
            return Interval(value, low, high)
        value, low, high = (
            math.inf
            if load < (1 - 1e-9) * question.load / question.num_replicas
            else max(question.min_replicas, math.ceil(question.load / load - 1e-9))
            for load in (loads.value, loads.high, loads.low)
        )
        return Interval(value, low, high)

    def _excess(self, interval: Interval) -> float:
        """`Interval.excess`; 0 if each end is at most one user or one replica away."""
        is_next = self._question.unit != "rate" and interval.high - 1 <= interval.value <= interval.low + 1
        return 0.0 if is_next else interval.excess

    def _snap(self, load: float) -> float:
        """The nearest load of a replica that can be simulated: users and replicas are whole numbers."""
        question = self._question
        if question.unit == "rate":
            return min(max(load, 1 / SPARSE_GAP), 1 / DENSE_GAP)
        if question.unit == "users":
            highest = question.num_replicas * MAX_REQUESTS
            return min(max(1, round(load * question.num_replicas)), highest) / question.num_replicas
        count = round(question.load / load) if load > 0 else question.num_replicas
        return question.load / min(max(count, question.min_replicas), question.num_replicas)

    def _job(self, load: float, number: int) -> Job:
        question = self._question
        arriving = question.load if question.unit == "replicas" else load * question.num_replicas
        part = Part(number, self._num_requests, min(self._num_requests, math.ceil(self._backlog * arriving)))
        replicas = round(question.load / load) if question.unit == "replicas" else question.num_replicas
        return Job(question.config, replicas, part, arriving, question.model, question.is_watched)

    # ------------------------------------------------------------------ simulations

    def _measure(self, loads: Sequence[float], count: int) -> None:
        """Simulate the first `count` samples at these loads of a replica, those that are missing."""
        loads = list(dict.fromkeys(map(self._snap, loads)))
        missing = [(load, number) for load in loads for number in range(len(self._samples.get(load, ())), count)]
        samples = self._runner.run([self._job(load, number) for load, number in missing])
        for (load, number), sample in zip(missing, samples, strict=True):
            self._note_simulated(sample)
            self._samples.setdefault(load, []).append(sample)
            if number == count - 1 and self._question.on_load is not None:
                self._question.on_load(self._measured(load, count))

    def _note_simulated(self, sample: Sample) -> None:
        if sample.num_refused and not len(sample.ttft):
            raise SimulationError(f"all {sample.num_requests:,} requests of a sample are refused. {sample.refusal}")
        self.found.num_simulated += sample.num_simulated
        if self._question.progress is not None:
            interval = self.found.sampling
            self._question.progress(self.found.num_simulated, math.inf if interval is None else interval.excess)

    def _known(self, count: int) -> list[float]:
        return sorted(load for load, samples in self._samples.items() if len(samples) >= count)

    def _misses(self, load: float, count: int, block: int | None = None) -> list[Misses]:
        """The misses of each criterion at one load. `block`: only of this block of each sample."""
        samples = self._samples[load][:count]
        return [Misses(load, *(_of_groups(samples, name, block) for name in names)) for names in self._criteria]

    def _crossing(self, count: int, block: int | None = None) -> tuple[Interval, bool]:
        """The load of a replica at which the first criterion is missed, and whether this is that of the gaps."""
        by_load = [self._misses(load, count, block) for load in self._known(count)]
        found = [crossing(each, self._allowed, self._question.confidence) for each in zip(*by_load, strict=True)]
        value, low, high = (min(getattr(each, name) for each in found) for name in ("value", "low", "high"))
        return Interval(value, low, high), found[-1].value < found[0].value

    def _meets(self, load: float) -> bool:
        return all(each.share <= self._allowed for each in self._misses(load, len(self._samples[load])))

    def _measured(self, load: float, count: int) -> Measured:
        samples, misses = self._samples[load][:count], self._misses(load, count)
        worst = max(misses, key=lambda each: each.share)
        _, low, high = worst.odds(self._question.confidence)
        met = 1 - worst.share
        e2e = np.concatenate([sample.e2e for sample in samples])
        seconds = sum(sample.seconds for sample in samples) or math.nan
        job = self._job(load, 0)
        return Measured(
            load=job.load,
            num_replicas=job.num_replicas,
            num_samples=count,
            num_groups=len(worst.late),
            share=Interval(met, min(met, share_of_odds(-high)), max(met, share_of_odds(-low))),
            gaps_share=1 - misses[1].share if len(misses) > 1 else None,
            figures=combine_samples(samples),
            rate=sum(sample.num_requests for sample in samples) / seconds,
            e2e_mean=float(e2e.mean()) if len(e2e) else None,
            prompt_tokens_per_second=sum(sample.num_prompt_tokens for sample in samples) / seconds,
            output_tokens_per_second=sum(sample.num_output_tokens for sample in samples) / seconds,
            busy=float(np.mean([sample.busy for sample in samples])),
            meets=met >= self._question.share,
            seen=SeenLoads.of_parts(sample.seen for sample in samples) if self._question.is_watched else None,
        )

    # ------------------------------------------------------------------ the bracket

    def _bracket(self) -> list[float]:
        """Loads of a replica near the capacity, found with few short samples. Chooses the length of the samples."""
        question = self._question
        self._set_length(MIN_REQUESTS * question.num_replicas)
        if question.unit == "replicas":
            load = question.load / question.num_replicas
        elif question.unit == "users":
            load = 1 / question.num_replicas
        else:
            (sample,) = self._runner.run([self._job(1 / DENSE_GAP, 0)])
            self._note_simulated(sample)
            load = _START * min(sample.throughput, 1 / DENSE_GAP) / question.num_replicas
            self._set_length(math.ceil(_SHORTEST * self._longest_target() * load * question.num_replicas))
        load = self._snap(load)
        self._measure([load], _NUM_FIRST)
        up = _USER_STEP if question.unit == "users" else _STEP_UP
        low, high = self._step_up(load, up) if self._meets(load) else self._step_down(load, 1 / _STEP_UP)
        while low and high and high / low > _NEAR:
            middle = self._snap(math.sqrt(low * high))
            if middle in (low, high):
                break
            self._measure([middle], _NUM_FIRST)
            low, high = (middle, high) if self._meets(middle) else (low, middle)
        loads = [each for each in (low, high) if each]
        life = max((float(np.mean(sample.e2e)) for sample in self._samples[loads[0]] if len(sample.e2e)), default=0.0)
        rate = sum(sample.num_requests / sample.seconds for sample in self._samples[loads[0]]) / _NUM_FIRST
        self._set_length(math.ceil(max(_SPANS * self._longest_target(), _LIVES * life) * rate))
        if loads[0] in self._samples:
            return loads
        # Longer samples meet the targets only at lower loads: a queue has more time to grow.
        near = self._bracket_near(loads[0])
        return [near[0], self._snap(near[0] * _STEP_NEAR)] if len(near) > 1 else near

    def _bracket_near(self, load: float, count: int = _NUM_FIRST) -> list[float]:
        """Loads of a replica near the capacity, which is near `load`."""
        load = self._snap(load)
        self._measure([load], count)
        low, high = self._step_up(load, _STEP_NEAR) if self._meets(load) else self._step_down(load, 1 / _STEP_NEAR)
        return [each for each in (low, high) if each]

    def _step_up(self, load: float, factor: float) -> tuple[float, float]:
        """A load that meets the targets and one that misses them, above a load that meets them; (load, 0): none
        misses. `factor`: of the first step; later ones are longer."""
        while (higher := self._snap(load * factor)) > load * _SAME:
            self._measure([higher], self._num_measured(load))
            if not self._meets(higher):
                return load, higher
            load, factor = higher, min(factor * factor, _LONGEST_STEP)
        return load, 0.0

    def _step_down(self, load: float, factor: float) -> tuple[float, float]:
        """The same below a load that misses the targets; (0, load): none meets."""
        while (lower := self._snap(load * factor)) < load / _SAME:
            self._measure([lower], self._num_measured(load))
            if self._meets(lower):
                return lower, load
            load, factor = lower, max(factor * factor, 1 / _LONGEST_STEP)
        return 0.0, load

    def _num_measured(self, load: float) -> int:
        return len(self._samples[load])

    def _longest_target(self) -> float:
        return max(self._question.targets.ttft or 0.0, self._question.targets.e2e or 0.0)

    def _set_length(self, num_requests: int) -> None:
        """Set the number of requests of a sample, within the limits; samples of another length are dropped."""
        question = self._question
        replicas = question.num_replicas
        limit = min(MAX_REQUESTS, question.max_simulated // _PARTS_OF_BUDGET)
        length = question.num_requests or max(MIN_REQUESTS * replicas, min(num_requests, limit * replicas))
        length = question.samples.fit_length(length, NUM_SAMPLES)
        if length != self._num_requests:
            self._num_requests = length
            self._samples = {}

    # ------------------------------------------------------------------ the estimate

    def _is_whole(self) -> bool:
        """Whether a sample has all requests of the trace."""
        available = self._question.samples.num_available
        return available is not None and self._num_requests >= available

    def _num_first(self) -> int:
        return 1 if self._is_whole() else min(NUM_SAMPLES, self._max_samples())

    def _max_samples(self) -> int:
        available, wanted = self._question.samples.num_available, self._question.max_samples
        if self._is_whole():
            return 1
        return wanted if available is None else min(wanted, max(2, available // self._num_requests))

    def _refine(self, count: int, loads: Sequence[float], *, with_ends: bool = True) -> None:
        """Measure loads until the estimate, and both ends of its interval, are between loads near each other.
        `with_ends`: False if only the estimate is wanted, to compare it with another."""
        self._measure(loads, count)
        self._count = count
        for step in _STEPS:
            interval, _ = self._crossing(count)
            self.found.sampling = self._in_units(interval)
            wanted = self._missing_loads(interval, count, step, with_ends)
            if not wanted:
                return
            self._measure(wanted, count)

    def _missing_loads(self, interval: Interval, count: int, step: float, with_ends: bool) -> list[float]:
        """Loads to measure: at the estimate and at the ends of its interval; where an end is beyond all known loads,
        `step` times the last one."""
        known = self._known(count)
        near = 1 + min(0.05, self._question.within / 3)
        ends = [(interval.value, near), (interval.low, _NEAR_END), (interval.high, _NEAR_END)]
        wanted: list[float] = []
        for end, ratio in ends if with_ends else [(interval.value, _NEAR_END)]:
            if end == 0:
                wanted.append(self._beyond(known[0], 1 / step))
            elif end == math.inf:
                wanted.append(self._beyond(known[-1], step))
            else:
                below = max((load for load in known if load <= end * (1 + 1e-9)), default=known[0])
                above = min((load for load in known if load >= end * (1 - 1e-9)), default=known[-1])
                if above > below * ratio and self._odds(above, count) > self._odds(below, count) + _NEAR_ODDS:
                    is_at_one = end < below * _SAME or end > above / _SAME
                    wanted.append(self._snap(math.sqrt(below * above) if is_at_one else end))
        fresh: list[float] = []
        for load in wanted:
            if all(not load / _SAME < other < load * _SAME for other in (*known, *fresh)):
                fresh.append(load)
        return fresh

    def _beyond(self, load: float, factor: float) -> float:
        """Another load beyond a load, about `factor` times as high; the load itself if there is none. Whole numbers of
        users or replicas may be farther apart."""
        beyond = load
        for power in range(1, 12):
            beyond = self._snap(load * factor**power)
            if not 1 / _SAME < beyond / load < _SAME:
                break
        return beyond

    def _grow(self) -> None:
        """Take more samples, or longer ones, until the interval is as narrow as wanted."""
        self._compare_starts()
        while True:
            interval, _ = self._crossing(self._count)
            self.found.is_of_start = False
            sampling, whole = (self._excess(self._in_units(each)) for each in (interval, self._with_start(interval)))
            if whole <= self._question.within or (interval.low == interval.high and interval.value in (0, math.inf)):
                return
            self.found.is_of_start = math.exp(-self._start / 2) - 1 > min(sampling, self._question.within / 2)
            if self.found.is_of_start and self._lengthen():
                continue
            if sampling <= self._question.within or not self._add_samples(sampling):
                return

    def _lengthen(self) -> bool:
        """Double the length of the samples; returns whether that is possible."""
        question, before = self._question, self._num_requests
        if question.num_requests is not None or self._is_whole():
            return False
        if not self._has_budget(_LOADS * NUM_SAMPLES * 2 * before):
            return False
        interval, _ = self._crossing(self._count)
        value = self._with_start(interval).value
        self._set_length(2 * before)
        if self._num_requests == before:
            return False
        self._refine(self._num_first(), [value * 0.97, value * 1.03])
        self._compare_starts()
        return True

    def _add_samples(self, excess: float) -> bool:
        """Take more samples, at most twice as many; returns whether that is possible."""
        interval, _ = self._crossing(self._count)
        loads, limit = self._loads_around(interval), self._max_samples()
        factor = min(2.0, max(_MIN_GROWTH, (excess / self._question.within) ** 2))
        count = min(limit, max(self._count + 2, math.ceil(self._count * factor)))
        if count <= self._count or not self._has_budget(len(loads) * (count - self._count) * self._num_requests):
            return False
        self._refine(count, loads)
        return True

    def _has_budget(self, num_requests: int) -> bool:
        """Whether so many more requests may be simulated."""
        limit = self._question.max_simulated * self._question.num_replicas
        return self.found.num_simulated + num_requests <= limit

    def _compare_starts(self) -> None:
        """Estimate the load from the first samples after a backlog: requests of the time of a target and of a
        request's life arrive at the beginning."""
        interval, _ = self._crossing(self._count)
        question = self._question
        self._start = 0.0
        if self._is_whole() or not question.samples.has_backlog or not 0 < interval.value < math.inf:
            return
        count = min(self._count, _OF_STARTS)
        near = min(self._known(count), key=lambda load: abs(math.log(load / interval.value)))
        life = float(np.mean(np.concatenate([sample.e2e for sample in self._samples[near][:count]])))
        seconds = self._longest_target() + life
        self._start = min(0.0, self._shift(question, count, seconds)[0])

    def _with_start(self, loads: Interval) -> Interval:
        """An interval of loads, widened by the difference that a backlog at the beginning makes."""
        return Interval(loads.value * math.exp(self._start / 2), loads.low * math.exp(self._start), loads.high)

    def _shift(self, question: Question, count: int, backlog: float = 0.0) -> tuple[float, float]:
        """The logarithm of the load of a similar question, divided by the load of this one, on the same first samples:
        chance then cancels out. Second: the load of the similar question."""
        mine, _ = self._crossing(count)
        other = self._similar(question, count, self._num_requests, mine.value, backlog)
        theirs, _ = other._crossing(count)
        if not 0 < mine.value < math.inf or theirs.value == math.inf:
            return 0.0, theirs.value
        return (math.log(theirs.value / mine.value) if theirs.value else -math.inf), theirs.value

    def _similar(
        self, question: Question, count: int, num_requests: int, load: float, backlog: float = 0.0
    ) -> CapacitySearch:
        """The search of a similar question, with an estimate of the load alone, which is near `load`."""
        before, report = self.found.num_simulated, question.progress
        excess = math.inf if self.found.sampling is None else self.found.sampling.excess
        other = CapacitySearch(
            replace(
                question,
                on_load=None,
                progress=None if report is None else lambda number, _: report(before + number, excess),
            ),
            self._runner,
        )
        other._num_requests, other._backlog = num_requests, backlog
        other._refine(count, other._bracket_near(load, count), with_ends=False)
        self.found.num_simulated += other.found.num_simulated
        return other

    def _odds(self, load: float, count: int) -> float:
        """Log-odds of the share of misses at a load, of the criterion with most misses."""
        return max(each.odds(self._question.confidence)[0] for each in self._misses(load, count))

    def _loads_around(self, interval: Interval) -> list[float]:
        """The known loads directly below and above the estimate and the ends of its interval."""
        known = np.array(self._known(self._count))
        found: set[float] = set()
        for end in (interval.low, interval.value, interval.high):
            place = int(np.searchsorted(known, end))
            found.update(known[max(0, place - 1) : place + 1].tolist())
        return sorted(found)

    def _is_short(self) -> bool:
        """Whether the arrivals of a sample at the capacity take too little time to show a growing queue."""
        at = self.found.at
        if at is None:
            return False
        seconds = self._num_requests / at.rate
        return seconds < max(_SHORT_SPANS * self._longest_target(), _SHORT_LIVES * (at.e2e_mean or 0.0))

    # ------------------------------------------------------------------ other models of step times

    def _compare_models(self) -> None:
        """Widen the interval by the results with the other models of step times, on the first samples, shortened."""
        found, question = self.found, self._question
        interval, _ = self._crossing(self._count)
        if question.num_models < 2 or not 0 < interval.value < math.inf:
            return
        count, shifts, base, length = min(self._count, _OF_MODELS), [], self, self._num_requests
        if question.num_requests is None and not self._is_whole():
            length = max(MIN_REQUESTS * question.num_replicas, math.ceil(_LENGTH_OF_MODELS * length))
        if length < self._num_requests:
            base = self._similar(question, count, length, interval.value)
        interval, before = self._with_start(interval), base.found.num_simulated
        for model in range(question.num_models):
            if model != question.model:
                shift, load = base._shift(replace(question, model=model), count)
                shifts.append(shift)
                value = load if load in (0, math.inf) else interval.value * math.exp(shift)
                found.alternatives.append(self._in_units(Interval(value, value, value)).value)
        if base is not self:
            found.num_simulated += base.found.num_simulated - before
        found.interval = self._in_units(mix(interval, shifts, found.num_groups, question.confidence))


def _of_groups(samples: Sequence[Sample], name: str, block: int | None) -> npt.NDArray[np.float64]:
    """Counts of the groups: the samples, or the blocks of the only sample. `block`: of this block of each sample."""
    counts = np.array([getattr(sample, name) for sample in samples], dtype=np.float64)
    if block is not None:
        return counts[:, block]
    found: npt.NDArray[np.float64] = counts.sum(axis=1) if len(samples) > 1 else counts[0]
    return found
