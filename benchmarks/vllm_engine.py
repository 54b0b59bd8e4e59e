"""vLLM from end to end with our scheduler, beside vLLM with its own: what the engine core costs per token.

A model so small that arithmetic hides nothing, and real vLLM on the CPU around it: requests come through its front end,
the engine core runs in a process of its own with everything that it does (the scheduler, the model runner, statistics,
messages), and answers go back. Counted is the CPU time of that process, of all its threads, from the moment when it has
all requests to the last output. The front end is not counted, except in the seconds by the clock.

Both sides have vLLM's defaults (prefix caching, synchronous scheduling, as on its CPU platform), statistics, one thread
for arithmetic, and the model runner in the engine core's process, as on a GPU. They alternate, ours first in every
other pair, and must produce the same tokens. A ratio is the median of the pairs' ratios. The scheduler's part of the
cost is measured in separate turns.

With a larger model on the CPU this cost would be hidden by arithmetic. On a GPU the device waits for it, or it must be
done while the device computes.

    python benchmarks/vllm_engine.py --check
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from _common import REPOSITORY, Targets, argument_parser, finish, note, parse_positive_int, print_table, run
from _engine_model import Job, Shape, make_prompts, model_directory
from _worker_process import WorkerProcess
from vllm_env import VLLM_VERSION, is_complete, python_of

HERE = Path(__file__).resolve().parent
SHAPE = Shape("tiny", 64, 1, 2, 1, 32, 128, 512, 1024)
SCHEDULERS = {"pointsman": "TimedDropIn", "vllm": "TimedOwn"}
TITLES = {"pointsman": "Pointsman", "vllm": f"vLLM {VLLM_VERSION}"}
MAX_CPU = {64: 1.0, 256: 0.9}
"""Maximum CPU time of ours, relative to vLLM's, by concurrent requests."""
MAX_IDLE_MS = 5.0
"""Maximum CPU time of a second without requests, beyond vLLM's."""
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 256
PAIRS, PAIRS_QUICK = 7, 3
TIMED_PAIRS = 3
IDLE_TURNS, IDLE_SECONDS = 3, 0.5
SECONDS_TO_OPEN, SECONDS_TO_RUN = 240, 120
ENVIRONMENT = {
    "PYTHONPATH": f"{REPOSITORY}:{HERE}",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

Turn = dict[str, Any]


@dataclass
class Side:
    """A vLLM with one scheduler, and the results of its turns."""

    worker: WorkerProcess
    scheduler: str
    turns: list[Turn] = field(default_factory=list)
    timed_turns: list[Turn] = field(default_factory=list)
    """Turns with a clock on the scheduler, which itself costs time."""
    idle: list[float] = field(default_factory=list)
    """CPU seconds of `IDLE_SECONDS` without requests."""

    def open(self, running: int) -> None:
        settings = {"scheduler": self.scheduler, "running": running, "max_model_len": SHAPE.max_model_len}
        self.worker.ask("open", SECONDS_TO_OPEN, model=str(model_directory(SHAPE)), **settings)

    def serve(self, name: str, prompts: list[list[int]], timed: bool = False) -> Turn:
        asked = {"name": name, "prompts": prompts, "max_tokens": OUTPUT_TOKENS, "timed": timed}
        return self.worker.ask("run", SECONDS_TO_RUN, **asked)

    def run_without_requests(self) -> None:
        self.idle.append(self.worker.ask("idle", SECONDS_TO_RUN, seconds=IDLE_SECONDS)["core"])


def measure(running: int, pairs: int) -> dict[str, Side]:
    """Run both sides alternately, with this number of requests at once.

    Raises:
        RuntimeError: the sides gave different tokens.
        WorkerFailed: a side did not start, or ended.
    """
    command = [python_of(), HERE / "_vllm_engine_worker.py"]
    sides = {name: Side(WorkerProcess(name, command, ENVIRONMENT), of) for name, of in SCHEDULERS.items()}
    try:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda side: side.open(running), sides.values()))
        for pair in range(1 + pairs + TIMED_PAIRS):  # the first one warms up
            prompts = make_prompts([Job(PROMPT_TOKENS, OUTPUT_TOKENS)] * running, SHAPE.vocab_size, pair)
            timed = pair > pairs
            turns = {}
            for name in sides if pair % 2 else reversed(sides):
                turns[name] = sides[name].serve(str(pair), prompts, timed)
            check_same_tokens(turns)
            for name, side in sides.items():
                if pair:
                    (side.timed_turns if timed else side.turns).append(turns[name])
        for side in list(sides.values()) * IDLE_TURNS:
            side.run_without_requests()
    finally:
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda side: side.worker.close(), sides.values()))
    return sides


def check_same_tokens(turns: Mapping[str, Turn]) -> None:
    """Check that the turns of a pair led to the same tokens.

    Raises:
        RuntimeError: they did not.
    """
    if len({turn["digest"] for turn in turns.values()}) > 1:
        raise RuntimeError("the two schedulers gave different tokens for the same requests")


def figures_of(sides: Mapping[str, Side]) -> dict[str, Any]:
    """Medians of each side, and of the ratios of the pairs, ours to vLLM's."""
    figures: dict[str, Any] = {}
    for name, side in sides.items():
        turns, timed = side.turns, side.timed_turns
        figures[name] = {
            "cpu_seconds_per_1000_tokens": round(median(1000 * _per_token(turn) for turn in turns), 5),
            "step_us": round(median(1e6 * turn["core"] / turn["steps"] for turn in turns), 1),
            "scheduler_us": round(median(1e6 * turn["scheduler"] / turn["steps"] for turn in timed), 1),
            "scheduler_share": round(median(turn["scheduler"] / turn["core"] for turn in timed), 4),
            "seconds": round(median(turn["seconds"] for turn in turns), 4),
            "idle_ms": round(1000 * median(side.idle) / IDLE_SECONDS, 2),
        }
    pairs = list(zip(sides["pointsman"].turns, sides["vllm"].turns, strict=True))
    ratios = [_per_token(ours) / _per_token(own) for ours, own in pairs]
    figures["ratios"] = [round(ratio, 4) for ratio in ratios]
    figures["ratio"] = round(median(ratios), 4)
    figures["seconds_ratio"] = round(median(ours["seconds"] / own["seconds"] for ours, own in pairs), 4)
    return figures


def _per_token(turn: Turn) -> float:
    return float(turn["core"] / turn["tokens"])


def report(running: int, pairs: int, targets: Targets) -> dict[str, Any]:
    """Table, figures and targets for this number of requests at once."""
    figures = figures_of(measure(running, pairs))
    rows: list[list[object]] = [[title, *figures[name].values()] for name, title in TITLES.items()]
    rows.append(["ratio", figures["ratio"], None, None, None, figures["seconds_ratio"], None])
    header = [
        "scheduler",
        "CPU s/1,000 tokens",
        "CPU us/step",
        "scheduler us/step",
        "share",
        "seconds",
        "idle CPU ms/s",
    ]
    print_table(f"vLLM's engine core, {running} requests at once, {OUTPUT_TOKENS} tokens each", header, rows)
    if running in MAX_CPU:
        targets.at_most(f"engine core CPU at {running} requests, ours / vLLM's own", figures["ratio"], MAX_CPU[running])
    beyond = figures["pointsman"]["idle_ms"] - figures["vllm"]["idle_ms"]
    targets.at_most("ms of CPU in a second without requests, beyond vLLM's own", beyond, MAX_IDLE_MS)
    return figures


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--sizes", help="numbers of requests at once, as 64,256")
    parser.add_argument("--pairs", type=parse_positive_int, help=f"turns of each side (default {PAIRS})")
    arguments = parser.parse_args()
    quick, targets = arguments.quick, Targets()
    if not is_complete():
        note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
        targets.skip("engine core CPU, ours / vLLM's own", "no environment for vLLM")
        return finish("vllm_engine", {"quick": quick, "requests": None}, targets, arguments.check)
    sizes = [int(size) for size in arguments.sizes.split(",")] if arguments.sizes else list(MAX_CPU)
    if quick:
        sizes = sizes[:1]
    pairs = arguments.pairs or (PAIRS_QUICK if quick else PAIRS)
    for size in MAX_CPU.keys() - set(sizes):
        targets.skip(f"engine core CPU at {size} requests, ours / vLLM's own", "--quick" if quick else "not in --sizes")
    figures = {str(size): report(size, pairs, targets) for size in sizes}
    return finish("vllm_engine", {"quick": quick, "requests": figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
