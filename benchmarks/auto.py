"""Preset `auto`: chooses its combination of policies, and measures its gain.

It is chosen on workloads of its own (`_policy_training.py`), by a coordinate search over the registered policies, each
with the parameters that it declares to try: the space of `pointsman tune`. One setting at a time takes the value with
the lowest score, until no setting lowers it by `MIN_GAIN`. The score of settings is the geometric mean, over all
workloads, loads and `FIGURES`, of a figure relative to that of vLLM's defaults; settings by which a figure below
saturation is worse than `MAX_WORSE` do not count. `auto` is judged on scenarios that neither it nor its policies were
chosen on, beside vLLM's defaults and every fixed budget and watermark.

    python benchmarks/auto.py --check
    python benchmarks/auto.py --choose
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import exp, inf, log
from statistics import mean
from typing import Any

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _policy_scenario import LOADS, Figures, Load, Scenario, measure
from _policy_training import TRAINING
from policies import BUDGETS, NUM_QUICK, SCENARIOS, WATERMARKS, Settings, described

from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.sim.tunables import tunables
from pointsman.sim.workers import available_cores

POLICIES = ("token_limits", "reserves", "order", "victim")
"""The chosen settings, those with the largest effect first."""
TRAINING_LOADS: tuple[Load, ...] = ("below", "above")
FIGURES = ("ttft_mean", "ttft_p99", "latency_mean")
MIN_GAIN = 0.005
"""Minimum decrease of the score for a setting."""
MAX_WORSE = 1.12
"""Maximum of a figure below saturation, relative to vLLM's defaults."""
MAX_MEAN, MAX_OTHER = 1.05, 1.2
"""Maximum of the mean TTFT, and of the other figures, relative to vLLM's defaults, on the scenarios that judge."""
MIN_TTFT = 0.01
"""Seconds that are added to both sides of a relation, so that a difference of milliseconds hardly counts."""
VLLM: Settings = SYSTEMS["vllm"]
FIXED: tuple[Settings, ...] = ({}, *BUDGETS, *WATERMARKS[1:])
ALL: dict[str, Scenario] = {**SCENARIOS, **{each.name: each for each in TRAINING}}
JUDGED = ("azure-late", "long-outputs-other", "chats-and-documents-other", "sharegpt", "coding-agents-other")
PATIENCE = 60.0
"""By so many seconds `auto` may lengthen the longest wait: the bound of its order."""
NUM_JUDGED, NUM_TRAINING = 3_000, 800
"""Number of requests of each workload, from the start."""
QUICK: tuple[tuple[str, Load], ...] = (("azure-late", "above"), ("chats-and-documents-other", "below"))


@dataclass(frozen=True)
class Job:
    """One simulation."""

    scenario: str
    load: Load
    settings: tuple[tuple[str, Any], ...]
    num_requests: int | None = None


class Simulations:
    """The figures of simulations, each run once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._found: dict[Job, Figures] = {}

    def run(self, jobs: Sequence[Job]) -> list[Figures]:
        """The figures of each."""
        missing = [job for job in dict.fromkeys(jobs) if job not in self._found]
        self._found.update(zip(missing, self._executor.map(simulated, missing), strict=True))
        return [self._found[job] for job in jobs]


def simulated(job: Job) -> Figures:
    """The figures of a job."""
    return measure(ALL[job.scenario], job.load, dict(job.settings), job.num_requests)


def items(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as a hashable key."""
    return tuple(sorted(settings.items()))


# ---------------------------------------------------------------------- choosing


def choose(simulations: Simulations) -> tuple[dict[str, Any], list[list[object]]]:
    """The settings of `auto`, and the result of each round of the search."""
    space = {each.name: each.values for each in tunables(frozenset()) if each.name in POLICIES}
    space["order"] = tuple(order for order in space["order"] if order != "fcfs-front")
    chosen: dict[str, Any] = {}
    (best,) = scores(simulations, [chosen])
    rounds: list[list[object]] = [["default", best]]
    gained = True
    while gained:
        gained = False
        for name in POLICIES:
            candidates = [{**chosen, name: value} for value in space[name]]
            found = scores(simulations, candidates)
            least = min(found)
            if least < best - MIN_GAIN:
                best, chosen, gained = least, candidates[found.index(least)], True
                rounds.append([described({name: chosen[name]}), best])
                note(f"  {rounds[-1]}")
    return chosen, rounds


def scores(simulations: Simulations, candidates: Sequence[Settings]) -> list[float]:
    """The score of each: lower is better, and vLLM's defaults have 1."""
    places = [(scenario, load) for scenario in TRAINING for load in TRAINING_LOADS]
    sides = [VLLM, *candidates]
    jobs = [
        Job(scenario.name, load, items(_beside(scenario, each)), NUM_TRAINING)
        for each in sides
        for scenario, load in places
    ]
    found = simulations.run(jobs)
    vllm, *others = (found[start : start + len(places)] for start in range(0, len(found), len(places)))
    return [_score(figures, vllm, [load for _, load in places]) for figures in others]


def _score(figures: Sequence[Figures], vllm: Sequence[Figures], loads: Sequence[Load]) -> float:
    ratios: list[float] = []
    for mine, theirs, load in zip(figures, vllm, loads, strict=True):
        relative = [relation(mine, theirs, name) for name in FIGURES]
        if load == "below" and max(relative) > MAX_WORSE:
            return inf
        ratios += relative
    return exp(mean(log(ratio) for ratio in ratios))


def relation(figures: Figures, beside: Figures, name: str) -> float:
    """A figure relative to that of other settings."""
    return float((getattr(figures, name) + MIN_TTFT) / (getattr(beside, name) + MIN_TTFT))


# ---------------------------------------------------------------------- judging


def judge(simulations: Simulations, quick: bool, targets: Targets) -> list[dict[str, Any]]:
    """`auto` beside vLLM's defaults and fixed settings, on every scenario at every load."""
    places = [(name, load) for name in JUDGED for load in LOADS]
    if quick:
        targets.skip("the other scenarios and loads", "--quick")
        places = list(QUICK)
    num_requests = NUM_QUICK if quick else NUM_JUDGED
    sides: list[Settings] = [VLLM, PRESETS["auto"], *FIXED]
    jobs = [
        Job(name, load, items(_beside(SCENARIOS[name], side)), num_requests) for name, load in places for side in sides
    ]
    found = simulations.run(jobs)
    rows = []
    for index, (name, load) in enumerate(places):
        vllm, auto, *fixed = found[index * len(sides) : (index + 1) * len(sides)]
        place = f"{name}, {load} saturation"
        for figure in FIGURES:
            at_most = MAX_MEAN if figure == "ttft_mean" else MAX_OTHER
            targets.at_most(f"{place}: {figure} of auto over vLLM's defaults", relation(auto, vllm, figure), at_most)
        targets.at_most(f"{place}: longest TTFT of auto, in s", auto.ttft_max, vllm.ttft_max + PATIENCE)
        best = min(fixed, key=lambda each: each.ttft_mean)
        row: dict[str, Any] = {"scenario": name, "load": load}
        for figure in (*FIGURES, "ttft_max", "itl_p99"):
            row |= {f"vLLM {figure}": getattr(vllm, figure), f"auto {figure}": getattr(auto, figure)}
        rows.append({**row, "best fixed ttft_mean": best.ttft_mean, "fixed": described(FIXED[fixed.index(best)])})
    return rows


def _beside(scenario: Scenario, settings: Settings) -> Settings:
    """Settings with at most as many sequence slots as their budget has tokens; others would be refused."""
    seats = scenario.config.max_num_seqs
    budget = settings.get("max_num_batched_tokens", scenario.config.max_num_batched_tokens)
    return settings if seats <= budget else {**settings, "max_num_seqs": budget}


# ---------------------------------------------------------------------- one run


@contextmanager
def simulating(num_workers: int) -> Iterator[Simulations]:
    """Simulations in worker processes."""
    with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as executor:
        try:
            yield Simulations(executor)
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            raise


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--workers", type=parse_positive_int, default=available_cores(), help="processes that simulate")
    parser.add_argument("--choose", action="store_true", help="search again, and compare with the preset as it is")
    arguments: argparse.Namespace = parser.parse_args()
    targets = Targets()
    figures: dict[str, Any] = {"quick": arguments.quick, "auto": PRESETS["auto"]}
    with simulating(arguments.workers) as simulations:
        if arguments.choose:
            chosen, rounds = choose(simulations)
            print_table("Chosen one after the other, on the training workloads", ["setting", "score"], rounds)
            figures["chosen"] = chosen
            mine, search = scores(simulations, [PRESETS["auto"], chosen])
            targets.at_most(f"score on the training workloads (chosen: {described(chosen)})", mine, search + MIN_GAIN)
        else:
            targets.skip("the preset is what the search chooses", "without --choose")
        rows = judge(simulations, arguments.quick, targets)
    print_table("auto beside vLLM's defaults, in seconds", list(rows[0]), [list(row.values()) for row in rows])
    figures["judged"] = rows
    return finish("auto", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
