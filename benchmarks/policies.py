"""Gain of each policy of the scheduler, on fixed scenarios, against the current default.

A row of the table is a `Comparison`: a question, a scenario at a load, settings to beat, a policy, a figure and its
target. The row has the gain on the scenario on which the policy and its parameters were chosen, and on another one
(`JUDGED_ON`): other requests, lengths, seeds or devices. Targets hold for the other one. The scenarios are in
`_policy_*.py`. Every simulation is the real scheduler under the virtual clock, so its
figures do not depend on the machine. Each simulation is run once, on all cores.

    python benchmarks/policies.py --check
    python benchmarks/policies.py --scenario azure --load above --set watermark=0.02 --set victim=latest
    python benchmarks/policies.py --scenario azure --saturation
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from time import monotonic, process_time
from typing import Any, TypeAlias

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _policy_agents import AGENTS_AND_GREED, AGENTS_BESIDE_FLOOD
from _policy_azure import AZURE, AZURE_CACHED, AZURE_LATE, AZURE_LATE_CACHED
from _policy_chats_and_documents import CHATS_AND_DOCUMENTS, CHATS_AND_DOCUMENTS_OTHER
from _policy_coding_agents import CODING_AGENTS, CODING_AGENTS_OTHER
from _policy_long_outputs import (
    LONG_OUTPUTS,
    LONG_OUTPUTS_CACHED,
    LONG_OUTPUTS_OTHER,
    LONG_OUTPUTS_OTHER_CACHED,
    LONG_OUTPUTS_OTHER_SLOW_LINK,
    LONG_OUTPUTS_SLOW_LINK,
)
from _policy_mooncake import MOONCAKE, MOONCAKE_SHORT
from _policy_scenario import LOADS, Figures, Load, Scenario, highest_speed, measure, saturation
from _policy_shared_gpt import SHARED_GPT
from _policy_tenants import TENANTS, TENANTS_LATE

from pointsman.core import ConfigError
from pointsman.sim.workers import available_cores

NUM_QUICK = 2_000
SCENARIOS: dict[str, Scenario] = {
    each.name: each
    for each in (
        AZURE,
        AZURE_CACHED,
        TENANTS,
        MOONCAKE,
        MOONCAKE_SHORT,
        LONG_OUTPUTS,
        LONG_OUTPUTS_CACHED,
        LONG_OUTPUTS_SLOW_LINK,
        CHATS_AND_DOCUMENTS,
        AGENTS_BESIDE_FLOOD,
        AGENTS_AND_GREED,
        AZURE_LATE,
        AZURE_LATE_CACHED,
        TENANTS_LATE,
        LONG_OUTPUTS_OTHER,
        LONG_OUTPUTS_OTHER_CACHED,
        LONG_OUTPUTS_OTHER_SLOW_LINK,
        CHATS_AND_DOCUMENTS_OTHER,
        SHARED_GPT,
        CODING_AGENTS,
        CODING_AGENTS_OTHER,
    )
}
JUDGED_ON: dict[str, str] = {
    "azure": "azure-late",
    "azure-cached": "azure-late-cached",
    "tenants": "tenants-late",
    "mooncake": "coding-agents",
    "mooncake-short": "azure-late",
    "long-outputs": "long-outputs-other",
    "long-outputs-cached": "long-outputs-other-cached",
    "long-outputs-slow-link": "long-outputs-other-slow-link",
    "chats-and-documents": "chats-and-documents-other",
    "agents": "coding-agents-other",
    "agents-and-greed": "coding-agents-other",
}
"""By scenario on which policies were chosen, the one on which they are judged."""
Settings = Mapping[str, Any]
"""Values of `SchedulerConfig` in addition to those of the scenario."""
CAPACITY = "capacity"
"""The figure that is not a field of `Figures`: the highest speed at which figures are within limits."""
QUICK_TOLERANCE = 0.1
"""Relative tolerance of a capacity."""
HIGHER_IS_BETTER = {
    "goodput",
    "within_target",
    "prefix_hit_share",
    "agents_hit_share",
    "requests_per_second",
    "output_tokens_per_second",
    CAPACITY,
}
SHOWN = ("ttft_mean", "ttft_p99", "itl_p99", "goodput", "recomputed_share", "preemptions", "prefix_hit_share")


# ---------------------------------------------------------------------- what is asked


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target of a policy's figure, compared with the best of the settings to beat."""

    limit: float
    relative: bool = True
    """Whether the limit is a multiple of the figure to beat, or a value of the figure."""

    def bound(self, beaten: float, is_higher_better: bool, quick: bool) -> float:
        """The minimum or maximum value that meets it; with `quick`, half of the gain, or twice the tolerance."""
        bound = self.limit * beaten if self.relative else self.limit
        if not quick:
            return bound
        is_gain = bound > beaten if is_higher_better else bound < beaten
        if not is_gain and not self.relative:  # to beat is already within a limit that is a value
            return bound
        return beaten + (bound - beaten) * (0.5 if is_gain else 2)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One row: a policy beside the settings to beat."""

    question: str
    scenario: str
    load: Load
    policy: Settings
    against: Sequence[Settings] = ({},)
    """Settings to beat; of several, the best in hindsight counts; {} is the scenario unchanged."""
    figure: str
    """A field of `Figures`, or `CAPACITY`."""
    target: Target
    limits: Mapping[str, float] | None = None
    """Limits of a capacity: maximum values of figures."""
    in_quick: bool = True
    """Whether `--quick` has it: one load of each question, in under a minute."""
    given: tuple[str, float] | None = None
    """(figure, maximum): only settings of `against` that meet it count."""

    @property
    def name(self) -> str:
        """The row's name in a verdict."""
        return f"{self.question}: {self.figure} of {described(self.policy)}, {self.place}"

    @property
    def place(self) -> str:
        """The scenario, and the load if the figure has one."""
        return self.scenario if self.figure == CAPACITY else f"{self.scenario}, {self.load} saturation"

    @property
    def elsewhere(self) -> Comparison:
        """The same comparison on the scenario on which the policy is judged."""
        return replace(self, scenario=JUDGED_ON[self.scenario])

    def jobs(self, num_requests: int | None) -> list[Job]:
        """The simulations that it needs: the policy, then the settings to beat."""
        limits = tuple(sorted((self.limits or {}).items()))
        return [Job.of(self.scenario, self.load, each, num_requests, limits) for each in (self.policy, *self.against)]


WATERMARKS = [{"watermark": share} for share in (0.0, 0.01, 0.02, 0.05)]
SHORT_POOLS: tuple[tuple[str, Load], ...] = (("azure", "above"), ("long-outputs", "at"), ("long-outputs", "above"))
BUDGETS = [{"max_num_batched_tokens": budget} for budget in (256, 512, 1024, 2048, 4096, 8192)]
TARGET_ITL: Settings = {"token_limits": ("target-itl:seconds=0.05",)}
MAX_ITL = 1.02 * 0.05
COMPARISONS: tuple[Comparison, ...] = (
    *(
        Comparison(
            question="who is preempted",
            scenario=scenario,
            load="above",
            policy={"victim": "least-cost"},
            against=({"victim": "latest"},),
            figure="recomputed_tokens",
            target=Target(limit=limit),
        )
        for scenario, limit in (("azure", 0.5), ("azure-cached", 1.03))
    ),
    *(
        Comparison(
            question="recompute or swap",
            scenario=scenario,
            load="above",
            policy={"preemption_mode": "cheaper"},
            figure=figure,
            target=target,
            in_quick=False,
        )
        for scenario, figure, target in (
            ("long-outputs-cached", "recomputed_share", Target(limit=0.05, relative=False)),
            ("long-outputs-cached", "ttft_mean", Target(limit=0.5)),
            ("long-outputs-slow-link", "ttft_mean", Target(limit=1.02)),
            ("long-outputs-slow-link", "output_tokens_per_second", Target(limit=0.98)),
        )
    ),
    *(
        Comparison(
            question="how much stays free",
            scenario=scenario,
            load=load,
            policy={"reserves": ("growth",)},
            against=WATERMARKS,
            figure="ttft_mean",
            target=Target(limit=1.05),
            in_quick=(scenario, load) == ("azure", "above"),
        )
        for scenario, load in SHORT_POOLS
    ),
    Comparison(
        question="chunk size",
        scenario="chats-and-documents",
        load="at",
        policy=TARGET_ITL,
        figure="itl_p99",
        target=Target(limit=MAX_ITL, relative=False),
    ),
    Comparison(
        question="decode between prompts",
        scenario="chats-and-documents",
        load="at",
        policy={"token_limits": ("decode-share",)},
        against=BUDGETS,
        figure="latency_mean",
        target=Target(limit=1.03),
    ),
    Comparison(
        question="who comes next",
        scenario="azure",
        load="above",
        policy={"order": "shortest-prefill", "reserves": ("growth",)},
        against=({"reserves": ("growth",)},),
        figure="ttft_mean",
        target=Target(limit=0.85),
    ),
    Comparison(
        question="who comes next",
        scenario="azure",
        load="above",
        policy={"order": "earliest-ttft"},
        figure="within_target",
        target=Target(limit=0.85, relative=False),
    ),
    Comparison(
        question="who comes next",
        scenario="tenants",
        load="above",
        policy={"order": "fair"},
        figure="light_ttft_mean",
        target=Target(limit=2.0, relative=False),
    ),
    Comparison(
        question="who comes next",
        scenario="mooncake",
        load="above",
        policy={"order": "longest-prefix"},
        figure="ttft_mean",
        target=Target(limit=0.9),
    ),
    *(
        Comparison(
            question="past a blocked head",
            scenario="azure",
            load="above",
            policy={"watermark": 0.02, "reserves": ("bypass",)},
            against=({"watermark": 0.02},),
            figure=figure,
            target=Target(limit=limit),
            in_quick=figure != "ttft_p99",  # of 2,000 requests it is that of 20
        )
        for figure, limit in (("ttft_mean", 0.9), ("ttft_p99", 1.05), ("ttft_max", 1.1))
    ),
    *(
        Comparison(
            question="growth beside bypass",
            scenario=scenario,
            load=load,
            policy={"reserves": ("growth", "bypass")},
            against=({"reserves": ("growth",)},),
            figure=figure,
            target=Target(limit=limit),
            in_quick=figure == "ttft_mean" and scenario == "azure",
        )
        for scenario, load in (("azure", "at"), ("long-outputs", "at"))
        for figure, limit in (("ttft_mean", 1.0), ("ttft_p99", 1.2))
    ),
    *(
        Comparison(
            question="what is evicted",
            scenario="mooncake",
            load=load,
            policy={"eviction": "reuse"},
            figure="prefix_hit_share",
            target=Target(limit=0.98),
            in_quick=load == "at",
        )
        for load in LOADS
    ),
    *(
        Comparison(
            question="what is evicted",
            scenario=scenario,
            load=load,
            policy={"eviction": "retention"},
            figure="agents_hit_share",
            target=Target(limit=0.8, relative=False),
            in_quick=(scenario, load) == ("agents", "at"),
        )
        for scenario in ("agents", "agents-and-greed")
        for load in LOADS
    ),
)
GRIDS: tuple[tuple[str, Load, Sequence[Settings]], ...] = (
    ("azure", "above", WATERMARKS),
    ("mooncake-short", "above", WATERMARKS),
    ("long-outputs", "above", WATERMARKS),
    ("mooncake", "at", BUDGETS),
    ("chats-and-documents", "at", BUDGETS),
)
"""Fixed settings that policies are compared with: scenario, load, settings."""


# ---------------------------------------------------------------------- simulations


@dataclass(frozen=True)
class Job:
    """One simulation, or those of a capacity."""

    scenario: str
    load: Load
    settings: tuple[tuple[str, Any], ...]
    """Sorted by name, so that equal ones are run once."""
    num_requests: int | None
    limits: tuple[tuple[str, float], ...] = ()
    """Limits of a capacity, which takes several simulations; empty: one simulation at the load."""

    @classmethod
    def of(
        cls,
        scenario: str,
        load: Load,
        settings: Settings,
        num_requests: int | None,
        limits: tuple[tuple[str, float], ...] = (),
    ) -> Job:
        """Settings that are those of the scenario are left out."""
        own = SCENARIOS[scenario].config
        hashable = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
        changed = {
            name: value for name, value in hashable.items() if not hasattr(own, name) or getattr(own, name) != value
        }
        return cls(scenario, load, tuple(sorted(changed.items())), num_requests, limits)


@dataclass(frozen=True)
class Capacity:
    """The highest speed of a scenario within limits."""

    capacity: float
    cpu_seconds: float


Result: TypeAlias = Figures | Capacity


@dataclass
class Results:
    """The figures of finished simulations, or the errors of failed ones."""

    found: dict[Job, Result] = field(default_factory=dict)
    failed: dict[Job, str] = field(default_factory=dict)

    def run(self, jobs: Iterable[Job], num_workers: int) -> None:
        """Run the missing simulations."""
        missing = [job for job in dict.fromkeys(jobs) if job not in self.found and job not in self.failed]
        if num_workers == 1 or len(missing) < 2:
            answers: Iterable[Result | str] = map(simulated, missing)
            self._note(missing, answers)
            return
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(num_workers, len(missing)), context) as pool:
            try:
                self._note(missing, pool.map(simulated, missing))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def _note(self, jobs: Sequence[Job], answers: Iterable[Result | str]) -> None:
        for job, answer in zip(jobs, answers, strict=True):
            if isinstance(answer, str):
                self.failed[job] = answer
            else:
                self.found[job] = answer


def simulated(job: Job) -> Result | str:
    """The result of a job, or its error."""
    scenario, settings = SCENARIOS[job.scenario], dict(job.settings)
    try:
        if not job.limits:
            return measure(scenario, job.load, settings, job.num_requests)
        start, tolerance = process_time(), 0.02 if job.num_requests is None else QUICK_TOLERANCE
        speed = highest_speed(scenario, settings, dict(job.limits), job.num_requests, tolerance)
        return Capacity(speed, process_time() - start)
    except (ConfigError, KeyError, OSError, RuntimeError) as error:
        return str(error)


# ---------------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """The result of a comparison."""

    comparison: Comparison
    beaten: Settings
    before: float
    after: float
    bound: float

    @property
    def gain(self) -> str:
        """The change of the figure in percent of what it was."""
        return f"{100 * (self.after / self.before - 1):+.0f} %" if self.before else ""

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        place = {"scenario": self.comparison.scenario, "load": self.comparison.load}
        return {**place, "against": dict(self.beaten), "before": self.before, "after": self.after}

    @property
    def is_met(self) -> bool:
        """Whether the target is met."""
        is_higher = self.comparison.figure in HIGHER_IS_BETTER
        return self.after >= self.bound if is_higher else self.after <= self.bound


def judged(comparison: Comparison, results: Results, num_requests: int | None, quick: bool) -> Row | str:
    """A row, or the reason why there is none."""
    jobs = comparison.jobs(num_requests)
    for job in jobs:
        if job in results.failed:
            return results.failed[job]
    policy, *others = (results.found[job] for job in jobs)
    pairs = list(zip(comparison.against, others, strict=True))
    if comparison.given is not None:
        name, most = comparison.given
        pairs = [pair for pair in pairs if getattr(pair[1], name) <= most]
        if not pairs:
            return f"nothing to beat has {name} of at most {most:g}"
    values = [getattr(figures, comparison.figure) for _, figures in pairs]
    after = getattr(policy, comparison.figure)
    if after is None or None in values:
        return f"there is no {comparison.figure} on {comparison.scenario}"
    is_higher_better = comparison.figure in HIGHER_IS_BETTER
    before = max(values) if is_higher_better else min(values)
    beaten = pairs[values.index(before)][0]
    bounds = [comparison.target.bound(before, is_higher_better, each) for each in {quick, False}]
    bound = min(bounds) if is_higher_better else max(bounds)  # the quick one is never stricter
    return Row(comparison, beaten, before, after, bound)


def print_grids(results: Results, num_requests: int | None) -> dict[str, Any]:
    """A table of each grid, and its figures for JSON."""
    found: dict[str, Any] = {}
    for scenario, load, grid in GRIDS:
        there: dict[str, Figures] = {}
        for settings in grid:
            result = results.found.get(Job.of(scenario, load, settings, num_requests))
            if isinstance(result, Figures):
                there[described(settings)] = result
        rows = [[name, *(getattr(figures, each) for each in SHOWN)] for name, figures in there.items()]
        print_table(f"{scenario}, {load} saturation", ["", *SHOWN], rows)
        found[f"{scenario}, {load}"] = {name: figures.to_dict() for name, figures in there.items()}
    return found


def described(settings: Settings) -> str:
    """Settings as text."""
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "default"


def compare(quick: bool, num_workers: int) -> tuple[dict[str, Any], Targets]:
    """All comparisons and grids: the figures for JSON, and which targets are met."""
    num_requests = NUM_QUICK if quick else None
    start = monotonic()
    asked = [each for each in COMPARISONS if each.in_quick or not quick]
    jobs = [job for each in asked for side in (each, each.elsewhere) for job in side.jobs(num_requests)]
    if not quick:
        jobs += [Job.of(scenario, load, settings, None) for scenario, load, grid in GRIDS for settings in grid]
    results = Results()
    results.run(jobs, num_workers)
    targets = Targets()
    rows: list[list[object]] = []
    found: list[dict[str, Any]] = []
    for each in COMPARISONS:
        if each not in asked:
            targets.skip(each.elsewhere.name, "--quick")
            continue
        sides = [judged(side, results, num_requests, quick) for side in (each, each.elsewhere)]
        for side, row in zip((each, each.elsewhere), sides, strict=True):
            if isinstance(row, str):
                targets.holds(f"{side.name}: not measured: {row}", False)
        if any(isinstance(row, str) for row in sides):
            continue
        chosen, other = (row for row in sides if isinstance(row, Row))
        check_bound = targets.at_least if each.figure in HIGHER_IS_BETTER else targets.at_most
        check_bound(each.elsewhere.name, other.after, other.bound)
        cells = [cell for row in (chosen, other) for cell in (row.comparison.place, row.before, row.after, row.gain)]
        rows.append([each.figure, described(each.policy), *cells, other.bound])
        found.append(
            {
                "question": each.question,
                "figure": each.figure,
                "policy": dict(each.policy),
                "chosen": chosen.to_dict(),
                "judged": {**other.to_dict(), "bound": other.bound, "met": other.is_met},
            }
        )
    header = [
        "figure",
        "policy",
        "chosen on",
        "before",
        "after",
        "gain",
        "judged on",
        "before",
        "after",
        "gain",
        "target",
    ]
    grids = {} if quick else print_grids(results, num_requests)
    print_table("Policies, compared", header, rows)
    cpu = sum(figures.cpu_seconds for figures in results.found.values())
    note(f"{len(results.found)} simulations, {cpu:.0f} CPU seconds, {monotonic() - start:.0f} seconds")
    figures = {"quick": quick, "simulations": len(results.found), "cpu_seconds": round(cpu, 1)}
    return {**figures, "comparisons": found, "grids": grids}, targets


# ---------------------------------------------------------------------- one run


def experiment(arguments: argparse.Namespace) -> int:
    """One scenario with the settings of the command line, at one load or at all."""
    scenario = SCENARIOS[arguments.scenario]
    note(f"{scenario.name}: {scenario.about}")
    if arguments.saturation:
        note(f"the queue grows above a speed of {saturation(scenario):.3g}; loads: {dict(scenario.speeds)}")
        return 0
    settings = dict(arguments.set)
    loads: Sequence[Load | float] = [arguments.load] if arguments.load else LOADS
    if arguments.speed is not None:
        loads = [arguments.speed]
    num_requests = arguments.requests or (NUM_QUICK if arguments.quick else None)
    found_at = {load: measure(scenario, load, settings, num_requests).to_dict() for load in loads}
    names = [name for name in next(iter(found_at.values())) if name != "ttft_mean_of"]
    tenants = next(iter(found_at.values()))["ttft_mean_of"]
    rows = [[name, *(found[name] for found in found_at.values())] for name in names]
    rows += [
        [f"ttft_mean, {tenant}", *(found["ttft_mean_of"][tenant] for found in found_at.values())] for tenant in tenants
    ]
    print_table(described(settings), ["", *map(str, found_at)], rows)
    print(json.dumps({"scenario": scenario.name, "settings": settings, "figures": found_at}), flush=True)
    return 0


def setting(text: str) -> tuple[str, Any]:
    """The name and the value of key=value; a value that is no JSON is a word."""
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not a setting; write NAME=VALUE, such as watermark=0.02")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--workers", type=parse_positive_int, default=available_cores(), help="processes that simulate")
    parser.add_argument("--scenario", choices=SCENARIOS, help="run this one alone and print its figures")
    parser.add_argument("--load", choices=LOADS, help="of that run [default: all three]")
    parser.add_argument("--speed", type=float, help="of that run, instead of a load")
    parser.add_argument("--requests", type=parse_positive_int, help="only the first ones of that run")
    parser.add_argument("--set", action="append", default=[], type=setting, metavar="KEY=VALUE", help="a setting of it")
    parser.add_argument("--saturation", action="store_true", help="find the speed from which on its queue grows")
    arguments = parser.parse_args()
    if arguments.scenario:
        return experiment(arguments)
    figures, targets = compare(arguments.quick, arguments.workers)
    return finish("policies", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
