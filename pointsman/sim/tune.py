"""Tuning: searches for the settings that serve a workload best within its targets.

The best settings have the highest goodput: requests a second that meet all targets, for each replica where replicas are
searched. Settings are chosen on one part of the workload and judged on the other (`stretches.py`), beside the defaults.
A search has five phases. Each simulates batches of points of a space (`tunables.py`):

    begin      the defaults, and all combinations of a few values of the two settings with the largest effect
    explore    points that Optuna proposes (TPE)
    simplify   settings of the best point return to their defaults where that costs nothing
    climb      moves to the best neighbour, as long as there is a better one
    judge      the choice and the defaults, on the held-out part

A point that is hopeless on the first stretch is not simulated on the others. The simulated points depend only on
earlier results and the seed, so the result does not depend on the number of workers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.core.policy.registry import check_policies
from pointsman.sim.errors import ModelTooLarge, SimulationError
from pointsman.sim.hull import SeenLoads
from pointsman.sim.report.intervals import NONE, Draws, Estimate
from pointsman.sim.report.summary import Targets
from pointsman.sim.stretches import Parts
from pointsman.sim.trial import Job, Part, Sample, Score, combine_samples, resample_goodputs, target_margin
from pointsman.sim.tunables import DESIGN, REPLICAS, Point, Space
from pointsman.sim.workers import Runner

MIN_GAIN = 0.03
"""Minimum relative gain over the defaults, on the held-out part, that counts."""
P99 = 0.99
"""Share of the requests, and of the gaps with a target on the pooled ITL, that targets on the 99th percentile mean."""
_NUM_RESAMPLES = 2000
NUM_TRIALS = 48
_BATCH = 8
"""Number of points that Optuna proposes before it gets their results. Another number changes the result of a seed;
another number of workers does not."""
_HOPELESS = 0.75
"""Share of the best goodput on the first stretch below which a point is not simulated on the other stretches."""
_SHORT = 0.8
"""If a replica's requests hold at least this share of the blocks, the pool counts as possibly short of blocks."""
_MAX_CLIMBS = 3
_AS_GOOD = 0.995
"""Share of the best goodput from which points count as equal: the simplest of them is chosen."""
_TIE = 1e-3
"""Weight of `Score.closeness` relative to the goodput, when points are compared: closeness decides only between points
of equal goodput."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A point and its score on the training part."""

    settings: dict[str, Any]
    """Values of the point by setting name."""
    config: SchedulerConfig
    num_replicas: int
    train: Score
    """Score on the training part; if the point was hopeless on the first stretch of this part, the score on that
    stretch."""
    is_hopeless: bool

    @property
    def goodput(self) -> float:
        """Requests a second within the targets, for each replica."""
        return self.train.goodput / self.num_replicas


@dataclass(frozen=True, slots=True)
class Judged:
    """A trial, and its score on the held-out part."""

    trial: Trial
    held_out: Score
    interval: Estimate = NONE
    """`goodput` with its 95 % interval, from a bootstrap over blocks of consecutive requests; no ends: too few of
    them."""
    alternatives: tuple[float, ...] = ()
    """`goodput` with the other step times of the judge."""

    @property
    def goodput(self) -> float:
        """Goodput on the held-out part, for each replica."""
        return self.held_out.goodput / self.trial.num_replicas

    @property
    def meets_p99(self) -> bool:
        """Whether all targets are met for 99 % of the requests, and of the gaps with a target on the pooled ITL."""
        return self.held_out.share >= P99


@dataclass(slots=True, kw_only=True)
class Tuning:
    """The result of a search; after an interruption, the result so far."""

    trials: list[Trial] = field(default_factory=list)
    """All trials in the order of the search; the first has the defaults, on the fewest replicas."""
    defaults: Trial | None = None
    """The defaults on the number of replicas that suits them best."""
    chosen: Trial | None = None
    """The best trial on the training part."""
    judged_defaults: Judged | None = None
    judged: Judged | None = None
    """The chosen trial with its score on the held-out part; None: not judged yet."""
    gain_interval: Estimate = NONE
    """`gain` with its 95 % interval; the resamples have the same requests for both trials."""
    neighbours: list[tuple[str, Trial]] = field(default_factory=list)
    """(setting, trial) of the trials that differ from the chosen one in one setting, by one value in its list."""
    not_searched: list[str] = field(default_factory=list)
    """Settings that make no difference because the KV pool is never short of blocks."""
    seen: SeenLoads | None = None
    """Loads of the steps of the chosen trial, on the held-out part."""
    is_complete: bool = False

    @property
    def gain(self) -> float | None:
        """Goodput of the chosen trial divided by that of the defaults, minus 1, on the held-out part. Infinite if only
        the defaults have goodput 0. None if both have goodput 0, or the chosen trial was not judged."""
        if self.judged is None or self.judged_defaults is None:
            return None
        mine, theirs = self.judged.goodput, self.judged_defaults.goodput
        if not theirs:
            return math.inf if mine else None
        return mine / theirs - 1

    @property
    def other_gains(self) -> list[float]:
        """`gain` with each of the other step times of the judge."""
        if self.judged is None or self.judged_defaults is None:
            return []
        pairs = zip(self.judged.alternatives, self.judged_defaults.alternatives, strict=True)
        return [mine / theirs - 1 if theirs else math.inf if mine else 0.0 for mine, theirs in pairs]

    @property
    def is_gain(self) -> bool:
        """Whether the chosen trial is worth a change: the gain is above `MIN_GAIN`, and its interval above 0."""
        low = self.gain_interval.low
        return self.gain is not None and self.gain > MIN_GAIN and (low is None or low > 0)

    @property
    def recommended(self) -> Judged | None:
        """The chosen trial if it is worth a change, otherwise the defaults; None: the choice was not judged."""
        return self.judged if self.is_gain else self.judged_defaults

    @property
    def meets_nothing(self) -> bool:
        """Whether no request met the targets, whatever the settings."""
        return all(trial.train.share == 0 for trial in self.trials)

    def frontier(self) -> list[Trial]:
        """The trials that no other trial beats in goodput, TTFT p99 and ITL p99 together, by descending goodput."""
        found: dict[tuple[float, ...], Trial] = {}
        for trial in self.trials:
            if not trial.is_hopeless:
                found.setdefault(_merits(trial), trial)
        best = [key for key in found if not any(_beats(other, key) for other in found)]
        return [found[key] for key in sorted(best, reverse=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The description of a search: its space, requests, targets and length."""

    space: Space
    parts: Parts
    """Training and held-out part of the workload; the judge has the same stretches, training stretches first."""
    targets: Targets
    sized: Callable[[SchedulerConfig], SchedulerConfig] = lambda config: config
    """Function that adds the number of blocks to a configuration; may raise `ModelTooLarge`."""
    num_models: int = 1
    """Number of step times of the judge: settings are chosen with the first, and judged with all."""
    num_trials: int = NUM_TRIALS
    """Number of points in the first two phases."""
    seed: int = 0
    progress: Callable[[int, int, float], None] | None = None
    """Function that gets the number of tried points, the expected number, and the best goodput."""

    def __post_init__(self) -> None:
        if not self.targets:
            raise SimulationError("no latency target is given; give one for TTFT or ITL")
        if self.num_trials < 1:
            raise SimulationError(f"the number of trials is {self.num_trials}; it must be at least 1")


def tune(search: Search, runner: Runner) -> Tuning:
    """Search for the best settings. Ctrl-C ends the search with the result so far.

    Raises:
        SimulationError: a worker died.
        ModelTooLarge: the defaults do not fit the device.
        ModuleNotFoundError: Optuna is not installed.
    """
    under_way = _Tuner(search, runner)
    try:
        under_way.run()
    except KeyboardInterrupt:
        under_way.note_best()
    return under_way.found


class _Tuner:
    """A search in progress."""

    def __init__(self, search: Search, runner: Runner) -> None:
        self.found = Tuning()
        self._search, self._runner = search, runner
        self._space = search.space
        self._trials: dict[Point, Trial | None] = {}  # None: the point does not fit the device, or contradicts the base
        self._first: dict[Point, float] = {}  # goodput per replica on the first stretch, except of hopeless points
        self._names: list[str] = [each.name for each in self._space.tunables]
        self._for_short_pool = [each.name for each in self._space.tunables if each.is_for_short_pool]
        self._num_expected = search.num_trials + 2 * len(self._names)

    def run(self) -> None:
        self._try_design()
        self._explore()
        self._simplify()
        self._climb()
        self._judge_chosen()
        self.found.is_complete = True

    # ------------------------------------------------------------------ phases

    def _try_design(self) -> None:
        space = self._space
        defaults = [space.base]
        replicas = next((each for each in space.tunables if each.name == REPLICAS), None)
        if replicas is not None:
            defaults = [space.make_point({REPLICAS: number}) for number in replicas.values]
        self._search.sized(space.config(space.base))  # raises if the defaults do not fit
        self._simulate_points(defaults, is_sparing=False)
        known = [self._trials[point] for point in defaults]
        self.found.defaults = max((trial for trial in known if trial), key=_train_value)
        names = [name for name in DESIGN if name in self._names]
        combinations = product(*(DESIGN[name] for name in names))
        design = [space.make_point(dict(zip(names, values, strict=True))) for values in combinations]
        if replicas is not None:  # alternating, as all combinations would be too many
            counts = replicas.values
            design = [
                space.make_point({**space.settings(point), REPLICAS: counts[index % len(counts)]})
                for index, point in enumerate(design)
            ]
        self._simulate_points(design[: max(0, self._search.num_trials - len(defaults))])
        if not any(self._may_be_short(trial) for trial in self.found.trials):
            self.found.not_searched = self._for_short_pool
            self._names = [name for name in self._names if name not in self._for_short_pool]

    def _explore(self) -> None:
        import optuna
        from optuna.distributions import CategoricalDistribution, IntDistribution

        searched = [each for each in self._space.tunables if each.name in self._names]
        if not searched:
            return
        # Notches instead of values: all neighbours of an ordered setting are then equally far apart.
        distributions: dict[str, Any] = {
            each.name: IntDistribution(0, len(each.values) - 1)
            if each.is_ordered
            else CategoricalDistribution(list(range(len(each.values))))
            for each in searched
        }

        def notches(point: Point) -> dict[str, int]:
            settings = self._space.settings(point)
            return {each.name: each.values.index(settings[each.name]) for each in searched}

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=self._search.seed, multivariate=True, n_startup_trials=len(self._trials) + _BATCH
            )
        study = optuna.create_study(direction="maximize", sampler=sampler)
        for point, trial in self._trials.items():
            study.add_trial(
                optuna.trial.create_trial(
                    params=notches(point), distributions=distributions, value=self._reported_value(point, trial)
                )
            )
        while (num_left := self._search.num_trials - len(self._trials)) > 0:
            asked = []
            for _ in range(min(_BATCH, num_left)):
                proposed = study.ask(distributions)
                values = {each.name: each.values[proposed.params[each.name]] for each in searched}
                asked.append((proposed, self._space.make_point(values)))
            before = len(self._trials)
            self._simulate_points([point for _, point in asked])
            for proposed, point in asked:
                study.tell(proposed, self._reported_value(point, self._trials[point]))
            if len(self._trials) == before:  # Optuna proposes only known points: the space is (nearly) exhausted
                return

    def _simplify(self) -> None:
        best = self._best_point()
        min_score, settings = _AS_GOOD * self._score(best), self._space.settings
        current, base = best, settings(self._space.base)
        changed = self._space.changed_settings(best)
        # First all settings that matter only for a short pool, together; then the other changes, one after the other.
        for names in ([name for name in changed if name in self._for_short_pool], *([name] for name in changed[::-1])):
            values = {name: base[name] for name in names if settings(current)[name] != base[name]}
            if values:
                simpler = self._space.make_point({**settings(current), **values})
                self._simulate_points([simpler])
                if self._score(simpler) >= min_score:
                    current = simpler

    def _climb(self) -> None:
        for _ in range(_MAX_CLIMBS):
            chosen = self._choose_point()
            trial = self._trials[chosen]
            is_short = trial is not None and self._may_be_short(trial)
            names = [name for name in self._names if is_short or name not in self._for_short_pool]
            neighbours = self._space.neighbours(chosen, names)
            self._simulate_points(point for _, point in neighbours)
            self.found.neighbours = [(name, trial) for name, point in neighbours if (trial := self._trials[point])]
            if self._choose_point() == chosen:
                break
        self.found.chosen = self._trials[chosen]

    def _judge_chosen(self) -> None:
        defaults, chosen = self.found.defaults, self.found.chosen
        assert defaults is not None and chosen is not None
        first = len(self._search.parts.train)
        stretches = [Part(first + number) for number in range(len(self._search.parts.held_out))]
        trials = [chosen] if chosen is defaults else [chosen, defaults]
        jobs = [
            Job(trial.config, trial.num_replicas, stretch, model=model, is_watched=trial is chosen and model == 0)
            for model in range(self._search.num_models)
            for trial in trials
            for stretch in stretches
        ]
        every = list(self._runner.run(jobs))
        size = len(stretches)
        samples = every[: size * len(trials)]  # with the best step times
        draws = Draws(sum(len(sample.arrived) for sample in samples[:size]), _NUM_RESAMPLES, self._search.seed)
        judged, resampled = [], []
        for trial, at in zip(trials, range(0, len(samples), size), strict=True):
            mine = samples[at : at + size]
            others = tuple(
                _per_replica(every[start : start + size], trial.num_replicas)
                for start in range(at + len(samples), len(every), len(samples))
            )
            score, goodputs = combine_samples(mine), resample_goodputs(mine, draws) / trial.num_replicas
            goodput = score.goodput / trial.num_replicas
            judged.append(Judged(trial, score, draws.interval(goodput, goodputs, 0.0, math.inf), others))
            resampled.append(goodputs)
        self.found.judged, self.found.judged_defaults = judged[0], judged[-1]
        gain = self.found.gain
        if gain is not None and math.isfinite(gain):
            gains = np.divide(
                resampled[0], resampled[-1], out=np.full(len(resampled[0]), np.nan), where=resampled[-1] > 0
            )
            self.found.gain_interval = draws.interval(gain, gains - 1, -1.0, math.inf)
        self.found.seen = SeenLoads.of_parts(sample.seen for sample in samples[:size])

    # ------------------------------------------------------------------ points

    def _simulate_points(self, points: Iterable[Point], *, is_sparing: bool = True) -> None:
        """Simulate the points that were not simulated before. If `is_sparing`, simulate hopeless ones only on the first
        stretch."""
        configs: dict[Point, SchedulerConfig] = {}
        for point in points:
            if point in self._trials or point in configs:
                continue
            try:
                config = self._search.sized(self._space.config(point))
                check_policies(config)
                configs[point] = config
            except (ConfigError, ModelTooLarge):
                self._trials[point] = None
        fresh = list(configs)
        others = range(1, len(self._search.parts.train))
        jobs = [Job(configs[point], self._space.num_replicas(point), Part(0)) for point in fresh]
        samples: dict[Point, list[Sample]] = {}
        for point, sample in zip(fresh, self._runner.run(jobs), strict=True):
            samples[point] = [sample]
            self._report_progress(len(self._trials) + len(samples) / (2 if others else 1))
        first = {point: _per_replica(found, self._space.num_replicas(point)) for point, found in samples.items()}
        is_sparing = is_sparing and len(others) > 0
        min_score = _HOPELESS * max([*first.values(), *self._first.values()], default=0.0) if is_sparing else 0.0
        hopeful = [point for point in fresh if first[point] >= min_score]
        jobs = [
            Job(configs[point], self._space.num_replicas(point), Part(stretch))
            for point in hopeful
            for stretch in others
        ]
        results = self._runner.run(jobs)
        for point in fresh:
            if point in hopeful:
                for _ in others:
                    samples[point].append(next(results))
                    self._report_progress(len(self._trials) + 1)
                self._first[point] = first[point]
            trial = Trial(
                self._space.settings(point),
                configs[point],
                self._space.num_replicas(point),
                combine_samples(samples[point]),
                is_hopeless=point not in hopeful,
            )
            self._trials[point] = trial
            self.found.trials.append(trial)

    def _report_progress(self, num_tried: float) -> None:
        if self._search.progress is not None:
            best = max((trial.goodput for trial in self.found.trials if not trial.is_hopeless), default=0.0)
            self._search.progress(int(num_tried), max(self._num_expected, int(num_tried)), best)

    def _score(self, point: Point) -> float:
        """The score of a point that was simulated in full; other points cannot be chosen."""
        trial = self._trials[point]
        return -1.0 if trial is None or trial.is_hopeless else _train_value(trial)

    def _reported_value(self, point: Point, trial: Trial | None) -> float:
        """The value reported to Optuna. For a hopeless point: the best point's score, multiplied by the ratio of the
        two points' scores on the first stretch."""
        if trial is None:
            return 0.0
        if not trial.is_hopeless:
            return _train_value(trial)
        best = self._best_point()
        return self._score(best) * _train_value(trial) / (self._first[best] + _TIE) if self._first[best] else 0.0

    def _train_share(self, point: Point) -> float:
        trial = self._trials[point]
        return 0.0 if trial is None else trial.train.share

    def _best_point(self) -> Point:
        return max(self._trials, key=self._score)

    def _choose_point(self) -> Point:
        """Of the points that count as equal to the best: one with the fewest changes, and of several such points the
        one with the largest margin to the targets. If the best point meets the targets for 99 % of the requests, so do
        the points that count as equal."""
        best = self._best_point()
        min_score, min_share = _AS_GOOD * self._score(best), min(P99, self._train_share(best))
        as_good = [
            point for point in self._trials if self._score(point) >= min_score and self._train_share(point) >= min_share
        ]
        changes = {point: len(self._space.changed_settings(point)) for point in as_good}
        fewest = min(changes.values())

        def margin(point: Point) -> float:
            trial = self._trials[point]
            assert trial is not None
            return target_margin(trial.train, self._search.targets)

        return max((point for point in as_good if changes[point] == fewest), key=margin)

    def note_best(self) -> None:
        """Set `found.chosen` to the trial of the best point so far."""
        if self.found.trials:
            self.found.chosen = self._trials[self._choose_point()]

    def _may_be_short(self, trial: Trial) -> bool:
        return trial.train.kv_cache_usage >= _SHORT or trial.train.num_preemptions > 0


def _train_value(trial: Trial) -> float:
    return (trial.train.goodput + _TIE * trial.train.closeness) / trial.num_replicas


def _per_replica(samples: Sequence[Sample], num_replicas: int) -> float:
    return combine_samples(samples).goodput / num_replicas


def _merits(trial: Trial) -> tuple[float, ...]:
    """Goodput, negative TTFT p99 and negative ITL p99 of a trial, to compare it with other trials; larger is better."""
    times = (trial.train.ttft_p99, trial.train.itl_p99)
    return (trial.goodput, *(-math.inf if time is None else -time for time in times))


def _beats(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one != other and all(mine >= theirs for mine, theirs in zip(one, other, strict=True))
