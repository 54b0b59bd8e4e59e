"""Preset `auto`: chooses its combination of policies, and measures its gain.

It is chosen on workloads of its own (`_policy_training.py`), by a coordinate search over the registered policies, each
with the parameters that it declares to try: the space of `pointsman tune`. One setting at a time takes the value with
the highest goodput, the mean over all workloads and loads, until no setting gains `MIN_GAIN`. It is judged on the
scenarios of `benchmarks/policies.py`, beside vLLM's defaults and every fixed budget and watermark.

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
from statistics import mean
from typing import Any

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _policy_scenario import LOADS, Load, Scenario, measure
from _policy_training import TRAINING
from policies import BUDGETS, NUM_QUICK, SCENARIOS, WATERMARKS, Settings, described

from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.sim.tunables import tunables
from pointsman.sim.workers import available_cores

POLICIES = ("token_limits", "reserves", "order", "victim")
"""The chosen settings, those with the largest effect first."""
TRAINING_LOADS: tuple[Load, ...] = ("below", "above")
MIN_GAIN = 0.005
"""Minimum gain of goodput for a setting."""
WORTHWHILE = 0.01
"""If the best fixed settings gain this much over vLLM's defaults, `auto` must beat the defaults too."""
NO_WORSE = 0.001
VLLM: Settings = SYSTEMS["vllm"]
FIXED: tuple[Settings, ...] = ({}, *BUDGETS, *WATERMARKS[1:])
ALL: dict[str, Scenario] = {**SCENARIOS, **{each.name: each for each in TRAINING}}
JUDGED = ("azure", "tenants", "mooncake", "long-outputs", "chats-and-documents")
NUM_JUDGED = 3_000
"""Number of requests of each workload, from the start."""
QUICK: tuple[tuple[str, Load], ...] = (("azure", "above"), ("chats-and-documents", "above"))


@dataclass(frozen=True)
class Job:
    """One simulation."""

    scenario: str
    load: Load
    settings: tuple[tuple[str, Any], ...]
    num_requests: int | None = None


class Simulations:
    """The goodputs of simulations, each run once."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._found: dict[Job, float] = {}

    def run(self, jobs: Sequence[Job]) -> list[float]:
        """The goodput of each."""
        missing = [job for job in dict.fromkeys(jobs) if job not in self._found]
        self._found.update(zip(missing, self._executor.map(goodput, missing), strict=True))
        return [self._found[job] for job in jobs]


def goodput(job: Job) -> float:
    """Share of the requests with a first token and all gaps within the targets of `_policy_scenario.py`."""
    return measure(ALL[job.scenario], job.load, dict(job.settings), job.num_requests).goodput


def items(settings: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Settings as a hashable key."""
    return tuple(sorted(settings.items()))


# ---------------------------------------------------------------------- choosing


def choose(simulations: Simulations) -> tuple[dict[str, Any], list[list[object]]]:
    """The settings of `auto`, and the result of each round of the search."""
    space = {each.name: each.values for each in tunables(frozenset()) if each.name in POLICIES}
    space["order"] = tuple(order for order in space["order"] if order != "fcfs-front")
    chosen: dict[str, Any] = {}
    (best,) = _on_training(simulations, [chosen])
    rounds: list[list[object]] = [["default", best]]
    gained = True
    while gained:
        gained = False
        for name in POLICIES:
            candidates = [{**chosen, name: value} for value in space[name]]
            found = _on_training(simulations, candidates)
            most = max(found)
            if most > best + MIN_GAIN:
                best, chosen, gained = most, candidates[found.index(most)], True
                rounds.append([described({name: chosen[name]}), best])
                note(f"  {rounds[-1]}")
    return chosen, rounds


def _on_training(simulations: Simulations, candidates: Sequence[Settings]) -> list[float]:
    """Mean goodput of each over the workloads and loads."""
    places = [(scenario, load) for scenario in TRAINING for load in TRAINING_LOADS]
    jobs = [Job(scenario.name, load, items(each)) for each in candidates for scenario, load in places]
    found = simulations.run(jobs)
    return [mean(found[start : start + len(places)]) for start in range(0, len(found), len(places))]


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
        best = max(fixed)
        place = f"{name}, {load} saturation"
        if best > vllm * (1 + WORTHWHILE):
            targets.holds(
                f"{place}: fixed settings have a goodput of {best:.3g}, vLLM's defaults {vllm:.3g}, auto {auto:.3g}; "
                "target: more than vLLM's defaults",
                auto > vllm * (1 + WORTHWHILE),
            )
        else:
            targets.at_least(f"{place}: goodput of auto", auto, vllm - NO_WORSE)
        rows.append(
            {
                "scenario": name,
                "load": load,
                "vllm": vllm,
                "best fixed": best,
                "fixed": described(FIXED[fixed.index(best)]),
                "auto": auto,
            }
        )
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
            print_table("Chosen one after the other, on the training workloads", ["setting", "mean goodput"], rounds)
            figures["chosen"] = chosen
            mine, search = _on_training(simulations, [PRESETS["auto"], chosen])
            targets.at_least(f"mean goodput on the training workloads (chosen: {described(chosen)})", mine, search)
        else:
            targets.skip("the preset is what the search chooses", "without --choose")
        rows = judge(simulations, arguments.quick, targets)
    print_table(
        "Goodput: TTFT at most 2 s, every gap at most 100 ms", list(rows[0]), [list(row.values()) for row in rows]
    )
    figures["judged"] = rows
    return finish("auto", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
