"""Predictions of real runs of vLLM with several token budgets: from datasheets, and by step times fitted to one budget.

The runs (`../shared/traces/vllm_0.22_budget_runs.jsonl`) are of vLLM 0.22.1 with prompts of 20,000 and 25,000 tokens in
quiet and busy phases, on an RTX 5090 and an A100. Each is simulated with its arrivals, under vLLM's own scheduling.

    datasheets   mean latencies from datasheets alone. Typical efficiencies were fitted to a part of these runs
                 (`TRAINED_ON`), which the table leaves out
    calibrated   as `pointsman calibrate RUNS --train-budget` fits: to the runs of one budget; the others are predicted
    pairs        two runs that differ in the budget alone, with measured mean latencies that differ by more than 10 %:
                 how often the better budget is named
    limits       the limit target-itl and the preset auto on the same loads, with the calibrated step times, against the
                 best fixed budget; beside it, the published adaptive budget as it was measured

Errors are means over runs of |predicted / measured - 1|. Some runs have a request that waited seconds for a reason of
its own (the first with a shape that is compiled), which no prediction has; medians are beside the means.

    python benchmarks/budget_runs.py --check
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from statistics import mean, median
from typing import Any, NamedTuple

from _common import REPOSITORY, Targets, argument_parser, finish, note, parse_positive_int, print_table, run

from pointsman.core import SchedulerConfig
from pointsman.core.presets import PRESETS
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import StepTime
from pointsman.sim.summaries import (
    RunFit,
    RunProblem,
    fit_summaries,
    read_problem,
    run_config,
    simulated_means,
)
from pointsman.sim.workers import available_cores
from pointsman.sim.workload import OpenLoop
from pointsman.traces import FIGURES, RunSummary, read_run_summaries

RUNS = REPOSITORY.parent / "shared" / "traces" / "vllm_0.22_budget_runs.jsonl"
TRAINED_ON = {
    ("RTX-5090", "Qwen/Qwen2.5-3B-Instruct"): (0, 1),
    ("A100-80GB-SXM", "meta-llama/Llama-3.2-3B"): (0, 1, 2, 3, 4),
}
"""Seeds of the runs to which the efficiencies of `efficiencies_of` were fitted, by device and model."""
GROUPS = (
    ("RTX-5090", "Qwen2.5-0.5B"),
    ("RTX-5090", "Qwen2.5-3B"),
    ("RTX-5090", "SmolLM3-3B"),
    ("A100-80GB-SXM", "Qwen2.5-3B"),
    ("A100-80GB-SXM", "Llama-3.2-3B"),
)
QUICK_GROUPS = (("A100-80GB-SXM", "Llama-3.2-3B"),)
TRAIN_BUDGETS = (2048, 16384)
"""Budgets that all groups have; each trains once."""
DIFFERENT = 0.1
"""Minimum relative difference of measured mean latencies by which one budget is better."""
MAX_DATASHEET_ERROR, MAX_CALIBRATED_ERROR, MIN_NAMED, MAX_WORSE = 0.20, 0.07, 0.95, 0.03
POLICIES: dict[str, dict[str, Any]] = {
    "target-itl": {"token_limits": ("target-itl",)},
    "target-itl:seconds=0.2": {"token_limits": ("target-itl:seconds=0.2",)},
    "auto": dict(PRESETS["auto"]),
}
"""Settings beside the highest budget of a load."""


class Key(NamedTuple):
    """What runs have in common that differ in the budget alone."""

    device: str
    model: str
    phases: str
    seed: int
    prompt: int
    output: int


class Predicted(NamedTuple):
    """The predicted means of a run, by name."""

    run: RunSummary
    means: dict[str, float]

    def error(self, name: str) -> float:
        return self.means[name] / self.run.mean[name] - 1


def key_of(run: RunSummary) -> Key:
    first = run.requests[0]
    return Key(run.device, run.model, run.phases, run.seed or 0, first.num_prompt_tokens, first.num_output_tokens)


# ---------------------------------------------------------------------- simulations, in worker processes


def _means(task: tuple[RunSummary, SchedulerConfig, StepTime, float]) -> dict[str, float]:
    return simulated_means(*task)


def _latencies(task: tuple[RunSummary, SchedulerConfig, StepTime, float]) -> list[float]:
    """The latency of each request of a run, by arrival."""
    run_, config, step_time, overhead = task
    timings = simulate(OpenLoop(run_.requests), config, step_time, request_overhead=overhead).timings
    latencies: list[float] = (timings.last_token - timings.arrival).tolist()
    return latencies


def predict(pool: Executor, problem: RunProblem, step_time: StepTime, overhead: float = 0.0) -> list[Predicted]:
    tasks = [
        (each, run_config(each, settings), step_time, overhead)
        for each, settings in zip(problem.runs, problem.settings, strict=True)
    ]
    return [Predicted(each, found) for each, found in zip(problem.runs, pool.map(_means, tasks), strict=True)]


# ---------------------------------------------------------------------- tables


def error_row(title: Sequence[Any], predicted: Sequence[Predicted]) -> list[Any]:
    """A row: the title, the number of runs, mean (and median) error of each figure in percent."""
    row: list[Any] = [*title, len(predicted)]
    for name in FIGURES:
        errors = [100 * abs(each.error(name)) for each in predicted]
        row.append(f"{mean(errors):.1f} ({median(errors):.1f})")
    return row


def mean_errors(predicted: Sequence[Predicted]) -> dict[str, float]:
    return {name: round(mean(abs(each.error(name)) for each in predicted), 4) for name in FIGURES}


def by_budget(predicted: Iterable[Predicted]) -> dict[int, list[Predicted]]:
    found = defaultdict(list)
    for each in predicted:
        found[each.run.max_num_batched_tokens].append(each)
    return dict(sorted(found.items()))


def named(predicted: Sequence[Predicted]) -> tuple[int, int]:
    """(pairs in which the better budget is named, all pairs)."""
    groups = defaultdict(list)
    for each in predicted:
        groups[key_of(each.run)].append(each)
    right = count = 0
    for group in groups.values():
        for one, other in itertools.combinations(group, 2):
            measured = one.run.mean["latency"] / other.run.mean["latency"]
            if max(measured, 1 / measured) > 1 + DIFFERENT:
                count += 1
                right += (one.means["latency"] < other.means["latency"]) == (measured < 1)
    return right, count


def title_of(problem: RunProblem) -> tuple[str, str]:
    return problem.estimate.device.name, problem.estimate.shape.name.partition("/")[2]


# ---------------------------------------------------------------------- (d) limits


def busy_phases(phases: str) -> list[tuple[float, float]]:
    """(begin, end) of the phases with the highest rate, from a text of seconds:requests a second."""
    spans, start = [], 0.0
    for text in phases.split(","):
        seconds, rate = map(float, text.split(":"))
        spans.append((rate, start, start + seconds))
        start += seconds
    highest = max(rate for rate, _, _ in spans)
    return [(begin, end) for rate, begin, end in spans if rate == highest]


def split_phases(run_: RunSummary, latencies: Sequence[float]) -> dict[str, float]:
    """Mean latency of all requests, and of those that arrive in quiet and in busy phases."""
    spans = busy_phases(run_.phases)
    parts: dict[str, list[float]] = {"all": list(latencies), "quiet": [], "busy": []}
    for request, latency in zip(run_.requests, latencies, strict=True):
        is_busy = any(begin <= request.arrival_time < end for begin, end in spans)
        parts["busy" if is_busy else "quiet"].append(latency)
    return {name: mean(values) for name, values in parts.items() if values}


def judge_limits(
    pool: Executor, problem: RunProblem, fit: RunFit, adaptive: dict[Key, float]
) -> dict[str, dict[str, list[float]]]:
    """For each policy and part of a load, its mean latency relative to that of the best fixed budget, of each load.

    The best fixed budget has the lowest mean latency over all requests of the load. "published" compares measured
    means: the adaptive budget's with the best fixed one's.
    """
    loads = defaultdict(list)
    for number, each in enumerate(problem.runs):
        loads[key_of(each)].append(number)
    tasks: list[tuple[RunSummary, SchedulerConfig, StepTime, float]] = []
    places: list[tuple[Key, str]] = []
    for key, numbers in loads.items():
        for number in numbers:
            tasks.append((problem.runs[number], run_config(problem.runs[number], problem.settings[number]),
                          fit.step_time, fit.request_overhead))  # fmt: skip
            places.append((key, str(problem.runs[number].max_num_batched_tokens)))
        widest = max(numbers, key=lambda number: problem.runs[number].max_num_batched_tokens)
        config = run_config(problem.runs[widest], problem.settings[widest])
        for name, settings in POLICIES.items():
            tasks.append((problem.runs[widest], config.replace(**settings), fit.step_time, fit.request_overhead))
            places.append((key, name))
    parts: dict[Key, dict[str, dict[str, float]]] = defaultdict(dict)
    for (key, name), task, latencies in zip(places, tasks, pool.map(_latencies, tasks), strict=True):
        parts[key][name] = split_phases(task[0], latencies)
    found: dict[str, dict[str, list[float]]] = {
        name: {"all": [], "quiet": [], "busy": []} for name in (*POLICIES, "published")
    }
    for key, by_setting in parts.items():
        fixed = [by_setting[name] for name in by_setting if name not in POLICIES]
        best = min(fixed, key=lambda each: each["all"])
        for name in POLICIES:
            for part, value in by_setting[name].items():
                found[name][part].append(value / best[part])
        if key in adaptive:
            measured = min(problem.runs[number].mean["latency"] for number in loads[key])
            found["published"]["all"].append(adaptive[key] / measured)
    return found


# ---------------------------------------------------------------------- the benchmark


def read_groups(quick: bool) -> list[RunProblem]:
    problems = [read_problem(RUNS, model, device)[0] for device, model in (QUICK_GROUPS if quick else GROUPS)]
    return [_thinned(each) for each in problems] if quick else problems


def _thinned(problem: RunProblem) -> RunProblem:
    """The runs with the first two seeds."""
    return problem.part([number for number, each in enumerate(problem.runs) if (each.seed or 0) < 2])


def is_unseen(problem: RunProblem, each: RunSummary) -> bool:
    """Whether the typical efficiencies were not fitted to this run."""
    seeds = TRAINED_ON.get((problem.estimate.device.name, problem.estimate.shape.name), ())
    return each.seed not in seeds or each.requests[0].num_output_tokens == 16


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--workers", type=parse_positive_int, default=available_cores(), help="worker processes")
    arguments = parser.parse_args()
    targets = Targets()
    if not RUNS.exists():
        note(f"skipped: no runs at {RUNS} (P-PAS, arXiv 2608.15171)")
        targets.skip("predictions of the runs", "no file")
        return finish("budget_runs", {"quick": arguments.quick}, targets, arguments.check)
    with ProcessPoolExecutor(arguments.workers, get_context("spawn")) as pool:
        figures = measure(pool, read_groups(arguments.quick), arguments.workers, targets)
    return finish("budget_runs", {"quick": arguments.quick, **figures}, targets, arguments.check)


def measure(pool: Executor, problems: Sequence[RunProblem], workers: int, targets: Targets) -> dict[str, Any]:
    """Print the tables. Returns the figures."""
    adaptive = {key_of(each): each.mean["latency"] for each in read_run_summaries(RUNS) if each.policy == "ppas"}
    datasheets: list[Predicted] = []
    rows: list[list[Any]] = []
    known: dict[str, dict[str, float]] = {}
    for problem in problems:
        predicted = predict(pool, problem, problem.estimate)
        known[" ".join(title_of(problem))] = {
            name: round(mean(each.error(name) for each in predicted), 3) for name in FIGURES
        }
        unseen = [each for each in predicted if is_unseen(problem, each.run)]
        for budget, some in by_budget(unseen).items():
            rows.append(error_row([*title_of(problem), budget], some))
        datasheets += unseen
    header = ["device", "model", "budget", "runs", *(f"{name}, %" for name in FIGURES)]
    print_table("from datasheets alone, on runs that no efficiency was fitted to: mean (median) error", header, rows)
    if datasheets:
        note(f"signed mean errors, all runs: {known}")

    calibrated: list[Predicted] = []
    ratios: dict[str, dict[str, list[float]]] = {}
    rows, right, count = [], 0, 0
    for problem in problems:
        for train_budget in TRAIN_BUDGETS:
            chosen = [n for n, each in enumerate(problem.runs) if each.max_num_batched_tokens == train_budget]
            fit = fit_summaries(problem.part(chosen), num_processes=workers)
            predicted = predict(pool, problem, fit.step_time, fit.request_overhead)
            others = [each for each in predicted if each.run.max_num_batched_tokens != train_budget]
            for budget, some in by_budget(others).items():
                rows.append(error_row([*title_of(problem), train_budget, budget], some))
            calibrated += others
            pairs = named(predicted)
            right, count = right + pairs[0], count + pairs[1]
            if train_budget == TRAIN_BUDGETS[0]:
                for name, parts in judge_limits(pool, problem, fit, adaptive).items():
                    for part, values in parts.items():
                        ratios.setdefault(name, {}).setdefault(part, []).extend(values)
    header = ["device", "model", "trained on", "predicted", "runs", *(f"{name}, %" for name in FIGURES)]
    print_table("calibrated on one budget, others predicted: mean (median) error", header, rows)
    sheet_right, sheet_count = named(datasheets)
    print_table(
        f"the better of two budgets, where measured mean latencies differ by more than {DIFFERENT:.0%}",
        ["step times", "named", "pairs", "share"],
        [
            ["datasheets", sheet_right, sheet_count, sheet_right / max(sheet_count, 1)],
            ["calibrated", right, count, right / max(count, 1)],
        ],
    )
    rows = [
        [name, part, len(values), mean(values), max(values), sum(value > 1 + MAX_WORSE for value in values)]
        for name, parts in ratios.items()
        for part, values in parts.items()
        if values
    ]
    header = ["policy", "requests", "loads", "mean ratio", "max ratio", f"above {1 + MAX_WORSE:g}"]
    print_table("mean latency, relative to the best fixed budget of each load", header, rows)

    figures: dict[str, Any] = {
        "datasheets": mean_errors(datasheets) if datasheets else None,
        "datasheets_signed": known,
        "calibrated": mean_errors(calibrated),
        "named_from_datasheets": round(sheet_right / sheet_count, 4) if sheet_count else None,
        "named_calibrated": round(right / count, 4),
        "limits": {
            name: {part: [round(mean(values), 4), round(max(values), 4)] for part, values in parts.items() if values}
            for name, parts in ratios.items()
        },
    }
    _check(figures, ratios, targets)
    return figures


def _check(figures: dict[str, Any], ratios: dict[str, dict[str, list[float]]], targets: Targets) -> None:
    for name in FIGURES:
        if figures["datasheets"]:
            targets.at_most(f"mean error of {name} from datasheets", figures["datasheets"][name], MAX_DATASHEET_ERROR)
        targets.at_most(f"mean error of {name}, calibrated", figures["calibrated"][name], MAX_CALIBRATED_ERROR)
    if figures["datasheets"] is None:
        targets.skip("errors from datasheets", "all runs of this device and model were used for the efficiencies")
    targets.at_least("share of pairs named, calibrated", figures["named_calibrated"], MIN_NAMED)
    for name in POLICIES:
        for part, values in ratios[name].items():
            targets.at_most(f"{name}, mean ratio to the best fixed budget, {part}", mean(values), 1 + MAX_WORSE)


if __name__ == "__main__":
    run(main)
