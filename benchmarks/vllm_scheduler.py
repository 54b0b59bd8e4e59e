"""Cost of a step of our scheduler inside vLLM, beside vLLM's own.

Both use vLLM's interface: its `Request`s in, its `SchedulerOutput`s and `EngineCoreOutput`s out, `schedule` and
`update_from_output` as its engine core calls them, with results that are made outside the measured time. Both run in
the environment that `vllm_env.py` makes, each in a process of its own. They alternate, with the same configuration
(blocks of 16, prefix caching and statistics on). CPU time, medians of several rounds:

1. steady decode, plain; with requests that have two stop tokens, as many models do; with two steps in flight; with KV
   in several groups with windows; and with groups of states, which vLLM's own manager keeps for both;
2. the Azure conversation trace as a closed backlog, in a large pool (20,000 blocks) and in one that forces preemption
   (4,000);
3. prompts with eight tokens of output, without and with images: most of the work is admissions.

A third contender is the bound of 2 and 3: a scheduler that decides nothing, and makes vLLM's objects from a list.

    python benchmarks/vllm_scheduler.py --check
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _common import AZURE_TRACE, REPOSITORY, Targets, argument_parser, azure_lengths, finish, note, print_table, run
from _worker_process import WorkerProcess
from scheduler_step import BACKLOG_BLOCKS, BACKLOG_REQUESTS, measure_backlog, measure_decode
from vllm_env import VLLM_VERSION, is_complete, python_of

HERE = Path(__file__).resolve().parent
SIDES = {"vllm": "_vllm_worker.py", "pointsman": "_vllm_drop_in_worker.py"}
BOUND = "objects", "_vllm_objects_worker.py"
SIZES = (16, 64, 256, 1024)
TARGET_SIZE, TARGET_RATIO = 256, 35.0
WAYS: dict[str, tuple[dict[str, Any], float]] = {
    # Settings, and the minimum ratio of vLLM's own scheduler.
    "two stop tokens": ({"num_stop_tokens": 2}, TARGET_RATIO),
    "two steps in flight": ({"max_steps_in_flight": 2}, TARGET_RATIO),
    "full and a window": ({"layout": "window"}, TARGET_RATIO),
    "full and five windows": ({"layout": "windows"}, TARGET_RATIO),
    "full and three of states": ({"layout": "states"}, 45.0),
    "prompts with images": ({"layout": "images"}, TARGET_RATIO),
}
BACKLOG_TARGET = "vLLM's own / ours on the Azure backlog"
TARGET_BACKLOG_RATIOS = {20_000: 10.0, 4_000: 6.0}
"""Minimum ratios, by blocks of the pool."""
SHORT_OUTPUTS = {
    # Settings, and the minimum ratio of vLLM's own scheduler.
    "prompts and eight tokens of output": ({}, 1.5),
    "prompts with images": ({"layout": "images"}, 1.3),
}
SHORT_OUTPUTS_REQUESTS, SHORT_OUTPUTS_LENGTHS = 512, (1300, 8)
ROUNDS, BACKLOG_ROUNDS = 9, 5


def compare_decode(workers: Sequence[WorkerProcess], size: int, rounds: int, **settings: Any) -> dict[str, float]:
    """CPU us per step of each side, and the ratio of vLLM's own to ours."""
    figures = measure_decode(workers, size, rounds, **settings)
    own, ours = median(figures["vllm"]), median(figures["pointsman"])
    return {"vllm_us": round(own, 1), "pointsman_us": round(ours, 1), "ratio": round(own / ours, 2)}


def report_decode(
    workers: Sequence[WorkerProcess], sizes: Sequence[int], rounds: int, targets: Targets
) -> dict[str, Any]:
    """Steady decode: table, figures, target."""
    figures = {str(size): compare_decode(workers, size, rounds) for size in sizes}
    for way, (settings, _) in WAYS.items():
        figures[f"{TARGET_SIZE}, {way}"] = compare_decode(workers, TARGET_SIZE, rounds, **settings)
    rows = [[name, each["pointsman_us"], each["vllm_us"], each["ratio"]] for name, each in figures.items()]
    header = ["running", "Pointsman in vLLM", f"vLLM {VLLM_VERSION}", "ratio"]
    print_table("steady decode, CPU us of schedule + update_from_output per step", header, rows)
    wanted = {str(TARGET_SIZE): TARGET_RATIO} | {f"{TARGET_SIZE}, {way}": least for way, (_, least) in WAYS.items()}
    for name, least in wanted.items():
        if name in figures:
            targets.at_least(f"vLLM's own / ours at {name} running", figures[name]["ratio"], least)
        else:
            targets.skip(f"vLLM's own / ours at {name} running", "not among --sizes")
    return {"decode": figures}


def report_backlog(workers: Sequence[WorkerProcess], pools: Sequence[int], rounds: int, targets: Targets) -> Any:
    """The trace as a closed backlog: table, figures, targets."""
    lengths = azure_lengths(AZURE_TRACE, BACKLOG_REQUESTS)
    if lengths is None:
        targets.skip(BACKLOG_TARGET, "no trace")
        return {"backlog": None}
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for num_blocks in pools:
        results, ratio = measure_backlog(workers, lengths, num_blocks, rounds)
        assert ratio is not None
        for name, result in results.items():
            split = [result[f"{part}_seconds"] for part in ("add", "schedule", "update")]
            counts = [int(result["steps"]), int(result["preemptions"])]
            rows.append([f"{num_blocks:,}", name, result["per_million"], *split, *counts])
        rows.append([f"{num_blocks:,}", "ratio", ratio, *[None] * 5])
        rows.append([f"{num_blocks:,}", "ratio of the objects alone", _bound(results), *[None] * 5])
        targets.at_least(f"{BACKLOG_TARGET} with {num_blocks:,} blocks", ratio, TARGET_BACKLOG_RATIOS[num_blocks])
        rounded = {name: {key: round(value, 4) for key, value in result.items()} for name, result in results.items()}
        figures[str(num_blocks)] = {"ratio": round(ratio, 2), "bound": _bound(results), **rounded}
    header = ["blocks", "", "CPU s/M tokens", "add s", "schedule s", "update s", "steps", "preemptions"]
    print_table(f"Azure trace, first {len(lengths):,} requests at once, 256 sequences, budget 8,192", header, rows)
    return {"backlog": figures}


def report_short_outputs(workers: Sequence[WorkerProcess], rounds: int, targets: Targets) -> Any:
    """Prompts with short outputs, without images and with three each: table, figures, targets."""
    figures: dict[str, Any] = {}
    rows: list[list[object]] = []
    for name, (settings, least) in SHORT_OUTPUTS.items():
        lengths = [SHORT_OUTPUTS_LENGTHS] * SHORT_OUTPUTS_REQUESTS
        results, ratio = measure_backlog(workers, lengths, BACKLOG_BLOCKS[0], rounds, **settings)
        assert ratio is not None
        for side, each in results.items():
            parts = [each[f"{part}_seconds"] for part in ("add", "schedule", "update")]
            rows.append([name, side, *(part / SHORT_OUTPUTS_REQUESTS * 1e6 for part in (sum(parts), *parts))])
        rows.append([name, "ratio", ratio, *[None] * 3])
        rows.append([name, "ratio of the objects alone", _bound(results), *[None] * 3])
        targets.at_least(f"vLLM's own / ours on {name}", ratio, least)
        figures[name] = {"ratio": round(ratio, 2), "bound": _bound(results), **results}
    prompt, output = SHORT_OUTPUTS_LENGTHS
    title = f"{SHORT_OUTPUTS_REQUESTS} prompts of {prompt:,} tokens at once, {output} of output, CPU us per request"
    print_table(title, ["", "", "all", "add", "schedule", "update"], rows)
    return {"short_outputs": figures}


def _bound(results: dict[str, dict[str, float]]) -> float:
    """The ratio of vLLM's own scheduler to the cost of its objects alone."""
    return round(results["vllm"]["seconds"] / results["objects"]["seconds"], 1)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", help="numbers of running requests, as 16,64")
    parser.add_argument("--no-backlog", action="store_true", help="measure steady decode alone")
    arguments = parser.parse_args()
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else list(SIZES)
    targets = Targets()
    if not is_complete():
        note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
        for name in ("vLLM's own / ours in steady decode", BACKLOG_TARGET, *SHORT_OUTPUTS):
            targets.skip(name, "no environment for vLLM")
        return finish("vllm_scheduler", {"quick": arguments.quick, "decode": None}, targets, arguments.check)
    if arguments.quick:
        sizes = [size for size in sizes if size <= TARGET_SIZE]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    workers = [WorkerProcess(name, [python_of(), HERE / script], environment) for name, script in SIDES.items()]
    try:
        figures = report_decode(workers, sizes, 3 if arguments.quick else ROUNDS, targets)
        if not arguments.no_backlog:
            name, script = BOUND
            workers.append(WorkerProcess(name, [python_of(), HERE / script], environment))
            if arguments.quick:
                targets.skip(BACKLOG_TARGET, "--quick")  # the trace takes a minute
            else:
                figures |= report_backlog(workers, BACKLOG_BLOCKS, BACKLOG_ROUNDS, targets)
            figures |= report_short_outputs(workers, 1 if arguments.quick else BACKLOG_ROUNDS, targets)
        else:
            for name in (BACKLOG_TARGET, *SHORT_OUTPUTS):
                targets.skip(name, "--no-backlog")
    finally:
        for worker in workers:
            worker.close()
    return finish("vllm_scheduler", {"quick": arguments.quick, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
