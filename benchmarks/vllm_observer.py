"""Cost of a recording: vLLM's own scheduler with Observer over it, beside the same without.

Both are in one process of the environment that `vllm_env.py` makes, with the same configuration (blocks of 16, prefix
caching and statistics on), and alternate step by step, so that a slow moment of the machine affects both. Measured is
the CPU time of all calls, and of the thread that writes the recording; for steady decode, the median of the ratios over
groups of steps:

1. steady decode, with one step in flight and with two (vLLM's asynchronous scheduler);
2. the Azure conversation trace as a closed backlog, where requests come and go in most steps.

    python benchmarks/vllm_observer.py --check
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _common import (
    AZURE_TRACE,
    REPOSITORY,
    Targets,
    argument_parser,
    azure_lengths,
    finish,
    note,
    print_table,
    run,
)
from _worker_process import WorkerProcess
from scheduler_step import BACKLOG_BLOCKS, BLOCK_SIZE, HEADROOM, MAX_MODEL_LEN, TOKEN_BUDGET
from vllm_env import is_complete, python_of

WORKER = Path(__file__).resolve().parent / "_vllm_observer_worker.py"
SIZES = (16, 256)
STEPS, QUICK_STEPS = {16: 6000, 256: 1500}, {16: 1500, 256: 300}
STEPS_IN_FLIGHT = (1, 2)
BACKLOG_REQUESTS, QUICK_REQUESTS = 1000, 150
TARGET = 1.03
"""Maximum ratio to the CPU of vLLM's own scheduler."""
WHAT = "vLLM's scheduler with Observer / without"


def settings_of(size: int, num_blocks: int, in_flight: int = 1) -> dict[str, int]:
    return {
        "num_blocks": num_blocks,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": size,
        "max_num_batched_tokens": TOKEN_BUDGET,
        "max_steps_in_flight": in_flight,
    }


def measure(worker: WorkerProcess, quick: bool) -> dict[str, dict[str, float]]:
    """Figures of each load, by its name."""
    found = {}
    for in_flight in STEPS_IN_FLIGHT:
        for size in SIZES:
            steps = (QUICK_STEPS if quick else STEPS)[size]
            settings = settings_of(size, 1 + size * -(-(HEADROOM + steps) // BLOCK_SIZE), in_flight)
            worker.ask("open", name="pair", settings=settings, running=size, waiting=None)
            found[f"{size} running, {in_flight} in flight"] = worker.ask("decode", name="pair", steps=steps)
            worker.ask("close", name="pair")
    lengths = azure_lengths(AZURE_TRACE, QUICK_REQUESTS if quick else BACKLOG_REQUESTS)
    if lengths is not None:
        settings = settings_of(256, BACKLOG_BLOCKS[0])
        worker.ask("open_backlog", name="backlog", settings=settings, lengths=lengths)
        found[AZURE] = worker.ask("advance_backlog", name="backlog", steps=MAX_STEPS)
    return found


AZURE = "Azure backlog"
MAX_STEPS = 1_000_000  # more than it has


def report(found: dict[str, dict[str, float]], targets: Targets) -> dict[str, Any]:
    """Table, figures, targets."""
    header = ["", "vLLM's own", "Observer adds", "of it, its thread", "ratio"]
    rows = [
        [name, each["own_us"], each["extra_us"], each["writer_us"], f"{each['ratio']:.3f}"]
        for name, each in found.items()
    ]
    print_table("CPU us of all calls of the scheduler per step", header, rows)
    for name, each in found.items():
        targets.at_most(f"{WHAT}, {name}", each["ratio"], TARGET)
    if AZURE not in found:
        targets.skip(f"{WHAT}, {AZURE}", "no trace")
    return {name: {key: round(value, 4) for key, value in each.items()} for name, each in found.items()}


def main() -> int:
    arguments = argument_parser(__doc__ or "").parse_args()
    targets = Targets()
    if not is_complete():
        note("skipped: there is no environment for vLLM; python benchmarks/vllm_env.py makes it")
        targets.skip(WHAT, "no environment for vLLM")
        return finish("vllm_observer", {"quick": arguments.quick, "loads": None}, targets, arguments.check)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
    worker = WorkerProcess("vllm", [python_of(), WORKER], environment)
    try:
        figures = report(measure(worker, arguments.quick), targets)
    finally:
        worker.close()
    return finish("vllm_observer", {"quick": arguments.quick, "loads": figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
