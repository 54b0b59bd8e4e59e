"""Scenarios: a scenario is a claim about schedulers, with the simulations and checks that test it.

    Scenario   the claim; the variants to compare; figures; the checks, each a part of the claim
    Variant    one simulation: a workload and the settings of the scheduler
    Finding    the figures of each variant, over one or several seeds, and whether each part of the claim holds

Every simulation is a call of `simulate`: the real scheduler under the virtual clock. A check is computed from the
figures, so another model, device or seed may lead to another conclusion.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig, SchedulerStats
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.report.course import Levels
from pointsman.sim.report.intervals import Estimate, over_seeds
from pointsman.sim.report.layout import NOTHING, format_duration, format_number
from pointsman.sim.report.summary import Report, figures
from pointsman.sim.simulator import Outcome, Progress, simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.workload import Workload

FloatArray = npt.NDArray[np.float64]

MAX_MODEL_LEN = 131_072
H100_BLOCKS = 28_048
"""Number of KV blocks that `memory.py` estimates for Llama 3.1 8B on an H100 of 80 GB, with 16 tokens a block."""
RTX_4090_BLOCKS = 2_395
"""The same estimate for an RTX 4090 of 24 GB: a small pool."""


def settings(num_blocks: int = H100_BLOCKS, **values: Any) -> SchedulerConfig:
    """The scheduler's default configuration with the given values."""
    return SchedulerConfig(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, **values)


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the compared simulations."""

    name: str
    config: SchedulerConfig
    workload: Callable[[int], Workload]
    """Function that makes the workload of a seed."""
    load: str = ""
    """The name of the workload, in a scenario with several workloads."""
    num_replicas: int = 1
    step_time: StepTime | None = None
    """Step times of this variant's devices; None: the step times given to `Scenario.run`."""
    host_memory: HostMemory | None = None
    """Host memory behind the KV pool of each replica; None: no host memory."""


class Run(NamedTuple):
    """The result of one simulation."""

    outcome: Outcome
    report: Report

    @property
    def stats(self) -> Sequence[SchedulerStats]:
        """The statistics of each replica."""
        return self.outcome.stats

    def total(self, counter: str) -> int:
        """The sum of a scheduler counter over all replicas."""
        return sum(getattr(stats, counter) for stats in self.stats)

    def is_of_streams(self, *streams: str) -> npt.NDArray[np.bool_]:
        """Whether each request belongs to one of the streams with these names, [requests]."""
        return np.array([request.tenant in streams for request in self.outcome.requests], dtype=bool)

    @property
    def ttft(self) -> FloatArray:
        """TTFT of each request in seconds, [requests]; NaN for a request without a token."""
        seconds: FloatArray = self.outcome.timings.first_token - self.outcome.timings.arrival
        return seconds

    @property
    def e2e(self) -> FloatArray:
        """End-to-end time of each request in seconds, [requests]; NaN for a request without a token."""
        seconds: FloatArray = self.outcome.timings.last_token - self.outcome.timings.arrival
        return seconds


Unit: TypeAlias = Literal["s", "%", ""]
"""The unit of a figure: seconds, a share, or a number."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A column of the table."""

    name: str
    unit: Unit
    read: Callable[[Run], float | None]
    """Function that reads the figure from a simulation, in seconds, as a share of 1, or as a number; None: the
    simulation has no such figure."""

    def text(self, estimate: Estimate) -> str:
        """The value as text, with its unit and, if there is one, its interval."""
        interval = self.interval(estimate)
        value = NOTHING if estimate.value is None else self.format_value(estimate.value)
        return f"{value} ({interval})" if interval else value

    def interval(self, estimate: Estimate) -> str:
        """The interval as text, in the unit of the value; empty if there is no interval."""
        if estimate.value is None or estimate.low is None or estimate.high is None:
            return ""
        factor = 1.0
        if self.unit:
            factor = 100.0 if self.unit == "%" else 1.0 if estimate.value >= 1 else 1e3  # as in `format_duration`
        return f"{format_number(factor * estimate.low)}-{format_number(factor * estimate.high)}"

    def format_value(self, value: float) -> str:
        """A value as text, with its unit; NaN: there is no value."""
        if math.isnan(value):
            return NOTHING
        if self.unit == "s":
            return format_duration(value)
        return f"{format_number(100 * value)} %" if self.unit == "%" else format_number(value)


@dataclass(frozen=True, slots=True)
class Check:
    """A part of the claim, and whether it holds in these simulations."""

    claim: str
    holds: bool
    figures: str
    """The figures that decide the check, as text."""


@dataclass(frozen=True, slots=True)
class Bars:
    """A part of the picture: one figure, a bar for each variant."""

    figure: str


@dataclass(frozen=True, slots=True)
class Points:
    """A part of the picture: one figure over another, a point for each of some variants, connected in the order of the
    variants."""

    across: str
    up: str
    variants: tuple[str, ...]
    load: str = ""


@dataclass(frozen=True, slots=True)
class Course:
    """A part of the picture: a line over time, in percent, for each of at most two variants of a workload."""

    caption: str
    read: Callable[[Outcome, SchedulerConfig], Levels]
    load: str = ""


Panel: TypeAlias = Bars | Points | Course


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A claim about schedulers, and the simulations and checks that test it."""

    name: str
    claim: str
    """The claim in one sentence."""
    source: str
    """The text that makes the claim."""
    setting: str
    """The workload and the compared variants, in a sentence or two."""
    variants: tuple[Variant, ...]
    figures: tuple[Figure, ...]
    checks: Callable[[Finding], list[Check]]
    panels: tuple[Panel, ...]

    def __post_init__(self) -> None:
        names = [(variant.load, variant.name) for variant in self.variants]
        if len(set(names)) < len(names):
            raise ValueError(f"scenario {self.name}: two variants of one workload have the same name; rename one")

    @property
    def num_requests(self) -> int | None:
        """Number of requests of all simulations of the scenario with one seed; None: not known."""
        counts = [variant.workload(0).num_requests for variant in self.variants]
        return sum(each for each in counts if each is not None) if None not in counts else None

    def run(self, step_time: StepTime, *, seeds: Sequence[int] = (0,), progress: Progress | None = None) -> Finding:
        """Simulate every variant with every seed. Ctrl-C ends the simulations; the finding then has the rows so far.

        Args:
            step_time: step times of each replica's device, unless a variant has its own.
            seeds: seeds of the workloads; with several, figures are means with Student's 95 % interval.
            progress: as in `simulate`, with the number of finished requests of all simulations so far.
        """
        if not seeds:
            raise ValueError("seeds is empty; give at least one seed")
        rows: list[Row] = []
        num_done = 0
        for variant in self.variants:
            runs: list[Run] = []
            for seed in seeds:
                outcome = simulate(
                    variant.workload(seed),
                    variant.config,
                    variant.step_time or step_time,
                    num_replicas=variant.num_replicas,
                    host_memory=variant.host_memory,
                    progress=None if progress is None else _offset_progress(num_done, progress),
                )
                if not outcome.is_complete:
                    return Finding(self, tuple(rows), tuple(seeds), is_complete=False)
                num_done += outcome.timings.count
                runs.append(Run(outcome, figures(outcome, variant.config, num_bootstrap=0)))
            values = [[Estimate(figure.read(run)) for run in runs] for figure in self.figures]
            rows.append(Row(variant, tuple(map(over_seeds, values)), runs[0].outcome))
        return Finding(self, tuple(rows), tuple(seeds))


def _offset_progress(num_done: int, progress: Progress) -> Progress:
    """`progress` of a simulation that follows earlier ones, in which `num_done` requests finished."""
    return lambda num_finished, now: progress(num_done + num_finished, now)


@dataclass(frozen=True, slots=True)
class Row:
    """A variant and its figures, in the order of `Scenario.figures`."""

    variant: Variant
    values: tuple[Estimate, ...]
    outcome: Outcome = field(repr=False)
    """Outcome of the simulation with the first seed, for lines over time."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a scenario."""

    scenario: Scenario
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    is_complete: bool = True
    """Whether all simulations ran; False: the scenario was interrupted, and rows are missing."""

    def value(self, figure: str, variant: str, load: str = "") -> float:
        """A figure of a variant; NaN if the variant does not have the figure."""
        row = next(row for row in self.rows if (row.variant.name, row.variant.load) == (variant, load))
        found = row.values[self._index_of(figure)].value
        return math.nan if found is None else found

    def text(self, figure: str, variant: str, load: str = "") -> str:
        """A figure of a variant as text, with its unit."""
        return self.scenario.figures[self._index_of(figure)].format_value(self.value(figure, variant, load))

    def column(self, figure: str, load: str = "") -> list[float]:
        """A figure of all variants of a workload."""
        return [self.value(figure, row.variant.name, load) for row in self.rows if row.variant.load == load]

    @property
    def checks(self) -> list[Check]:
        """The checks with their verdicts; no checks if rows are missing."""
        return self.scenario.checks(self) if self.is_complete else []

    def to_dict(self) -> dict[str, Any]:
        """The finding for JSON."""
        scenario = self.scenario
        return {
            "scenario": scenario.name,
            "claim": scenario.claim,
            "source": scenario.source,
            "setting": scenario.setting,
            "seeds": list(self.seeds),
            "is_complete": self.is_complete,
            "units": {figure.name: figure.unit for figure in scenario.figures},
            "rows": [self._row_as_dict(row) for row in self.rows],
            "checks": [{"claim": each.claim, "holds": each.holds, "figures": each.figures} for each in self.checks],
        }

    def _row_as_dict(self, row: Row) -> dict[str, Any]:
        variant = row.variant
        return {
            "workload": variant.load,
            "variant": variant.name,
            "num_replicas": variant.num_replicas,
            "figures": {
                figure.name: {"value": each.value, "low": each.low, "high": each.high}
                for figure, each in zip(self.scenario.figures, row.values, strict=True)
            },
            "config": variant.config.to_dict(),
        }

    def _index_of(self, figure: str) -> int:
        return [each.name for each in self.scenario.figures].index(figure)


# ---------------------------------------------------------------------- figures that several scenarios have


def preemptions(run: Run) -> float:
    """Number of preemptions for any cause."""
    return run.total("num_preemptions")


def recomputed(run: Run) -> float | None:
    """Tokens recomputed after a preemption, as a share of all computed tokens."""
    return run.report.recomputed_share.value


def output_rate(run: Run) -> float | None:
    """Generated output tokens a second."""
    return run.report.output_tokens_per_second.value


def ttft_p99(run: Run) -> float | None:
    return run.report.ttft.p99.value


def itl_p99(run: Run) -> float | None:
    return run.report.itl.p99.value


def mean_e2e(run: Run) -> float | None:
    return run.report.e2e.mean.value


def quantile(values: FloatArray, share: float) -> float | None:
    """The quantile at `share` of the values that are not NaN."""
    values = values[~np.isnan(values)]
    return float(np.quantile(values, share)) if len(values) else None


def format_ratio(value: float) -> str:
    """A ratio as text, such as "1.5 times"."""
    return f"{format_number(value)} times"
