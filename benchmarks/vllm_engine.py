"""vLLM from end to end with our scheduler, beside vLLM with its own: what the engine core costs per token.

A model so small that arithmetic hides nothing, and real vLLM on the CPU around it: requests come through its front end,
the engine core runs in a process of its own with everything that it does (the scheduler, the model runner, statistics,
messages), and answers go back. Counted is the CPU time of that process, of all its threads, from the moment when it has
all requests to the last output. The front end is not counted, except in the seconds by the clock.

Both sides have vLLM's defaults (prefix caching, synchronous scheduling, as on its CPU platform), statistics, one thread
for arithmetic, and the model runner in the engine core's process, as on a GPU. They take turns, ours first in every
other pair, and must answer with the same tokens. A ratio is the median of those of the pairs.

With a model of some size on the CPU all this drowns in arithmetic. On a GPU it is what the device waits for, or what
has to be done while it computes.

    python benchmarks/vllm_engine.py --check
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

from _common import REPOSITORY, Targets, argument_parser, finish, note, print_table, run
from _engine_model import Job, Shape, make_prompts, model_directory
from _worker_process import WorkerProcess
from vllm_env import VLLM_VERSION, is_complete, python_of

HERE = Path(__file__).resolve().parent
SHAPE = Shape("tiny", 64, 1, 2, 1, 32, 128, 512, 1024)
SIDES = {"pointsman": "TimedDropIn", "vllm": "TimedOwn"}
NAMES = {"pointsman": "Pointsman", "vllm": f"vLLM {VLLM_VERSION}"}
MOST_CPU = {64: 1.0, 256: 0.9}
"""By concurrent requests: our CPU time, vLLM's being 1."""
MOST_IDLE_MS = 5.0
"""CPU time of a second without requests, beyond vLLM's."""
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 256
PAIRS, PAIRS_QUICK = 7, 3
IDLE_TURNS, IDLE_SECONDS = 3, 0.5
SECONDS_TO_OPEN, SECONDS_TO_RUN = 240, 120
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

Turn = dict[str, Any]


def measure(running: int, pairs: int) -> tuple[dict[str, list[Turn]], dict[str, float]]:
    """With so many requests at once: what each turn of each side gave, and the CPU seconds of an idle turn.

    Raises:
        RuntimeError: the sides answered with different tokens.
    """
    command = [python_of(), HERE / "_vllm_engine_worker.py"]
    workers = {side: WorkerProcess(side, command, ENVIRONMENT) for side in SIDES}
    turns: dict[str, list[Turn]] = {side: [] for side in SIDES}
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda side: _open(workers[side], SIDES[side], running), SIDES))
        for pair in range(pairs + 1):  # the first one warms up
            prompts = make_prompts([Job(PROMPT_TOKENS, OUTPUT_TOKENS)] * running, SHAPE.vocab_size, pair)
            asked = {"name": str(pair), "prompts": prompts, "max_tokens": OUTPUT_TOKENS}
            for side in SIDES if pair % 2 else reversed(SIDES):
                turns[side].append(workers[side].ask("run", SECONDS_TO_RUN, **asked))
            if len({turns[side][-1]["digest"] for side in SIDES}) > 1:
                raise RuntimeError(
                    f"of {running} requests, some got other tokens from one scheduler than from the other"
                )
        idle: dict[str, list[float]] = {side: [] for side in SIDES}
        for side in list(SIDES) * IDLE_TURNS:
            idle[side].append(workers[side].ask("idle", SECONDS_TO_RUN, seconds=IDLE_SECONDS)["core"])
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(WorkerProcess.close, workers.values()))
    return {side: each[1:] for side, each in turns.items()}, {side: median(each) for side, each in idle.items()}


def _open(worker: WorkerProcess, scheduler: str, running: int) -> None:
    model = str(model_directory(SHAPE))
    settings = {"scheduler": scheduler, "model": model, "running": running, "max_model_len": SHAPE.max_model_len}
    worker.ask("open", SECONDS_TO_OPEN, **settings)


def figures_of(turns: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """Medians of each side, and of the ratios of the pairs, ours to vLLM's."""
    figures: dict[str, Any] = {}
    for side, each in turns.items():
        figures[side] = {
            "cpu_seconds_per_1000_tokens": round(median(1000 * turn["core"] / turn["tokens"] for turn in each), 5),
            "step_us": round(median(1e6 * turn["core"] / turn["steps"] for turn in each), 1),
            "scheduler_us": round(median(1e6 * turn["scheduler"] / turn["steps"] for turn in each), 1),
            "scheduler_share": round(median(turn["scheduler"] / turn["core"] for turn in each), 4),
            "seconds": round(median(turn["seconds"] for turn in each), 4),
        }
    pairs = list(zip(turns["pointsman"], turns["vllm"], strict=True))
    ratios = [(ours["core"] / ours["tokens"]) / (own["core"] / own["tokens"]) for ours, own in pairs]
    figures["ratios"] = [round(ratio, 4) for ratio in ratios]
    figures["ratio"] = round(median(ratios), 4)
    figures["seconds_ratio"] = round(median(ours["seconds"] / own["seconds"] for ours, own in pairs), 4)
    return figures


def report(running: int, pairs: int, targets: Targets) -> dict[str, Any]:
    """Table, figures and targets for so many requests at once."""
    turns, idle = measure(running, pairs)
    figures = figures_of(turns)
    rows: list[list[object]] = [[name, *figures[side].values()] for side, name in NAMES.items()]
    rows.append(["ratio", figures["ratio"], None, None, None, figures["seconds_ratio"]])
    header = ["scheduler", "CPU s/1,000 tokens", "CPU us a step", "scheduler's us", "its share", "seconds"]
    print_table(f"vLLM's engine core, {running} requests at once, {OUTPUT_TOKENS} tokens each", header, rows)
    for side, seconds in idle.items():
        figures[side]["idle_ms"] = round(1000 * seconds / IDLE_SECONDS, 2)
        note(f"  {NAMES[side]}: {figures[side]['idle_ms']:.3g} ms of CPU in a second without requests")
    beyond = figures["pointsman"]["idle_ms"] - figures["vllm"]["idle_ms"]
    if running in MOST_CPU:
        targets.at_most(
            f"engine core CPU at {running} requests, ours / vLLM's own", figures["ratio"], MOST_CPU[running]
        )
    targets.at_most("ms of CPU in a second without requests, beyond vLLM's own", beyond, MOST_IDLE_MS)
    return figures


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", help="numbers of requests at once, as 64,256")
    parser.add_argument("--pairs", type=_at_least_one, help=f"turns of each side (default {PAIRS})")
    arguments = parser.parse_args()
    quick, targets = arguments.quick, Targets()
    if not is_complete():
        note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
        return finish("vllm_engine", {"quick": quick, "requests": None}, targets, arguments.check)
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else list(MOST_CPU)
    if quick:
        sizes = sizes[:1]
    pairs = arguments.pairs or (PAIRS_QUICK if quick else PAIRS)
    figures = {str(size): report(size, pairs, targets) for size in sizes}
    return finish("vllm_engine", {"quick": quick, "requests": figures}, targets, arguments.check)


def _at_least_one(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    run(main)
