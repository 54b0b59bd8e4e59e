"""Speed of a simulation beside AISimulate's, and equality of decodes at once and single steps.

An hour of the Azure conversation trace is simulated, without and with prefix cache, alternating with AISimulate's
offline
replay of the same hour. Both have the same limits and the same pool, and start-up is not counted: each replay is the
first of a new process, in which AISimulate computes its step times as it needs them. Its step times are those of its
default model for Llama 3.1 8B on an H100. Ours are 6 ms, 34 us for each token and 20 ns for each token of context,
which
is about the same. The hour is about 417,000 steps, with ten requests in each. AISimulate with a polynomial for its step
times, its cheapest form, is measured too, without a target. AISimulate needs the environment that `aisimulate_env.py`
makes.

The hour and the Mooncake trace, which has shared prefixes, are also simulated step by step, and compared.

Work grows with events, not with steps: 2,000 requests with outputs and gaps between arrivals ten times as long, in a
pool that never fills, must cost little more.

The quality of a simulation is that of its step times: they are fitted to the 105 requests that finish first in a log of
vLLM 0.19, and must predict the other 195.

    python benchmarks/simulator.py --check
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from _common import AZURE_TRACE, REPOSITORY, Targets, argument_parser, finish, note, paired_ratio, print_table, run
from _worker_process import WorkerProcess
from aisimulate_env import AISIMULATE_VERSION, is_complete, python_of

from pointsman.core import SchedulerConfig
from pointsman.sim.calibrate import calibrate
from pointsman.sim.profile import EngineSettings
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_trace

MOONCAKE_TRACE = AZURE_TRACE.with_name("mooncake_synthetic.jsonl")
VLLM_LOG = AZURE_TRACE.with_name("vllm_0.19_rtxpro6000_llama31_8b.jsonl")
VLLM_SETTINGS, VLLM_TRAIN = EngineSettings(max_num_seqs=128, max_num_batched_tokens=2048), 105
MAX_OFF = {"e2e_mape": 0.015, "ttft_p99_error": 0.04, "tpot_mean_error": 0.015}
STEP_TIME = LinearStepTime(per_step=6e-3, per_token=3.4e-5, per_context_token=2e-8)
LLAMA = {"model": "meta-llama/Meta-Llama-3.1-8B", "hardware": "h100_sxm"}
AISIMULATE = {"aisimulate": {**LLAMA, "timing": "default"}, "polynomial": {**LLAMA, "timing": "polynomial"}}
"""AISimulate's engines, by name of the side. The targets are for the first one."""
MAX_RATIOS = {"plain": 0.5, "cached": 0.5}
"""Our CPU seconds divided by AISimulate's, without and with prefix cache."""
COLUMNS = ("requests", "steps", "events", "cpu_seconds")
MOONCAKE_SECONDS = 10.0
GROWTH = 1.5
MEMORY_MIB = 1024
NUM_QUICK = 2_000
NUM_GROWTH = 2_000
TOLERANCE = 1e-9


def azure_config(caching: bool, num_blocks: int = 20_000) -> SchedulerConfig:
    """A configuration with a pool that is seldom short."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=caching,
    )


def mooncake_config() -> SchedulerConfig:
    """A configuration with 4 million tokens of KV."""
    return SchedulerConfig(
        num_blocks=250_000, max_model_len=131_072, max_num_seqs=256, max_num_batched_tokens=8_192, block_size=16
    )


def azure_trace(limit: int | None) -> list[TraceRequest] | None:
    """The requests with output."""
    return _read(AZURE_TRACE, limit)


def _read(path: Path, limit: int | None) -> list[TraceRequest] | None:
    if not path.exists():
        note(f"skipped: no trace at {path}")
        return None
    return [request for request in read_trace(path, limit=limit) if request.num_output_tokens]


def timed(trace: list[TraceRequest], config: SchedulerConfig, *, is_stepping: bool = False) -> tuple[Outcome, float]:
    """A simulation, and its CPU seconds."""
    start = process_time()
    outcome = simulate(OpenLoop(trace), config, STEP_TIME, is_stepping=is_stepping)
    return outcome, process_time() - start


class AISimulate:
    """AISimulate's replays of a trace.

    Args:
        trace: the requests; they share no prefix.
        folder: where the trace is written in Mooncake's format.
    """

    def __init__(self, trace: Sequence[TraceRequest], folder: Path) -> None:
        self._trace, self._path = trace, folder / "trace.jsonl"
        block_size = azure_config(False).block_size
        hashes = count()
        with self._path.open("w") as file:
            for request in trace:
                num_blocks = -(-request.num_prompt_tokens // block_size)
                line = {
                    "timestamp": 1e3 * (request.arrival_time - trace[0].arrival_time),
                    "input_length": request.num_prompt_tokens,
                    "output_length": request.num_output_tokens,
                    "hash_ids": [next(hashes) for _ in range(num_blocks)],
                }
                file.write(json.dumps(line) + "\n")
        self._script = Path(__file__).resolve().with_name("_aisimulate_worker.py")

    def replay(self, config: SchedulerConfig, name: str) -> dict[str, Any]:
        """Replay the trace with an engine, in a new process: CPU `seconds`, `mean_itl` in seconds.

        Raises:
            RuntimeError: it did not complete every request.
        """
        names = ("max_num_batched_tokens", "max_num_seqs", "enable_prefix_caching", "num_blocks", "max_model_len")
        settings = {name: getattr(config, name) for name in names}
        worker = WorkerProcess("AISimulate", [python_of(), self._script], {"HF_HUB_OFFLINE": "1"})
        try:
            described = {"settings": settings, "engine": AISIMULATE[name], "trace": str(self._path)}
            return self._check(worker.ask("replay", None, block_size=config.block_size, **described))
        finally:
            worker.close()

    def _check(self, answer: dict[str, Any]) -> dict[str, Any]:
        if answer["completed"] != len(self._trace):
            raise RuntimeError(f"AISimulate completed {answer['completed']} of {len(self._trace)} requests")
        return answer


def mean_itl(outcome: Outcome) -> float:
    """Mean seconds between two tokens of a request, of those that were not refused."""
    timings = outcome.timings
    seconds = timings.last_token - timings.first_token
    ran = np.isfinite(seconds)
    return float(seconds[ran].sum() / (timings.num_output_tokens[ran] - 1).sum())


def costs(
    trace: list[TraceRequest], config: SchedulerConfig, rounds: int, peer: AISimulate | None = None
) -> dict[str, Any]:
    """The cost of a simulation, alternating with AISimulate's replays if there are any; medians."""
    seconds: list[float] = []
    theirs: dict[str, list[dict[str, Any]]] = {} if peer is None else {name: [] for name in AISIMULATE}
    for _ in range(rounds):
        outcome, cpu = timed(trace, config)
        seconds.append(cpu)
        if peer is not None:
            for name, replays in theirs.items():
                replays.append(peer.replay(config, name))
    timeline = outcome.timelines[0]
    found: dict[str, Any] = {
        "requests": len(trace),
        "steps": timeline.num_steps,
        "events": len(timeline.events),
        "virtual_seconds": round(outcome.seconds, 1),
        "cpu_seconds": round(median(seconds), 3),
        "mean_itl": round(mean_itl(outcome), 5),
        "preemptions": outcome.stats[0].num_preemptions,
    }
    for name, replays in theirs.items():
        its_seconds = [replay["seconds"] for replay in replays]
        found[f"{name}_seconds"] = round(median(its_seconds), 3)
        found[f"{name}_ratio"] = round(paired_ratio(seconds, its_seconds), 3)
        found[f"{name}_mean_itl"] = round(replays[0]["mean_itl"], 5)
    return found


def difference(fast: Outcome, slow: Outcome) -> float:
    """The largest relative difference of a time; infinite if a decision differs."""
    if fast.stats != slow.stats or fast.timelines[0].num_steps != slow.timelines[0].num_steps:
        return float("inf")
    found = 0.0
    for name in ("scheduled", "first_token", "last_token"):
        one, other = getattr(fast.timings, name), getattr(slow.timings, name)
        found = max(found, float(np.max(np.abs(one - other) / np.maximum(np.abs(other), 1e-9))))
    for name in ("num_output_tokens", "num_preemptions", "reason", "num_cached_tokens"):
        if not np.array_equal(getattr(fast.timings, name), getattr(slow.timings, name)):
            return float("inf")
    return found


def exactness(trace: list[TraceRequest], config: SchedulerConfig) -> dict[str, Any]:
    """Decodes at once beside single steps."""
    fast, fast_seconds = timed(trace, config)
    slow, slow_seconds = timed(trace, config, is_stepping=True)
    return {
        "requests": len(trace),
        "steps": slow.timelines[0].num_steps,
        "difference": difference(fast, slow),
        "speedup": round(slow_seconds / fast_seconds, 2),
    }


def growth(trace: list[TraceRequest], rounds: int) -> float:
    """CPU time with outputs and gaps between arrivals ten times as long, relative to the plain ones."""
    longer = [
        replace(each, arrival_time=10 * each.arrival_time, num_output_tokens=10 * each.num_output_tokens)
        for each in trace
    ]
    config = azure_config(False, num_blocks=400_000)
    ratios = []
    for _ in range(rounds):
        _, plain = timed(trace, config)
        outcome, long = timed(longer, config)
        if outcome.stats[0].num_preemptions:
            raise RuntimeError("the pool had too few blocks, so requests were preempted; growth cannot be measured")
        ratios.append(long / plain)
    return median(ratios)


def memory_mib(what: str) -> float:
    """Peak memory of a process that runs a whole trace, in MiB."""
    done = subprocess.run(
        [sys.executable, __file__, "--only", what], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return float(json.loads(done.stdout.splitlines()[-1])["mib"])


def run_only(what: str) -> int:
    """The run that `memory_mib` starts."""
    path, config = (MOONCAKE_TRACE, mooncake_config()) if what == "mooncake" else (AZURE_TRACE, azure_config(True))
    trace = _read(path, None)
    assert trace is not None
    timed(trace, config)
    print(json.dumps({"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
    return 0


def measure_calibration(targets: Targets) -> dict[str, float] | None:
    """Error, on the rest of a log, of step times that are fitted to its first part."""
    if not VLLM_LOG.exists():
        targets.holds("the log of vLLM is needed and not there", False)
        return None
    errors = calibrate(VLLM_LOG, VLLM_SETTINGS, train=VLLM_TRAIN).held_out.to_dict()
    found = {name: round(errors[name], 4) for name in MAX_OFF}
    for name, most in MAX_OFF.items():
        targets.at_most(f"{name} of the requests behind the fit to a log", abs(found[name]), most)
    note(f"  calibrated on {VLLM_TRAIN} requests, the others: " + ", ".join(f"{k} {v:.2%}" for k, v in found.items()))
    return found


def measure_azure(quick: bool, targets: Targets) -> dict[str, Any]:
    """The Azure trace beside AISimulate: figures by kind of run, and targets."""
    trace = azure_trace(NUM_QUICK if quick else None)
    if trace is None:
        targets.holds("the Azure trace is needed and not there", False)
        return {}
    missing = "--quick" if quick else None
    if missing is None and not is_complete():
        missing = "there is no environment for it; python benchmarks/aisimulate_env.py makes it"
    if missing is not None:
        note(f"skipped: AISimulate ({missing})")
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        peer = AISimulate(trace, Path(folder)) if missing is None else None
        for kind, most in MAX_RATIOS.items():
            figures[kind] = costs(trace, azure_config(kind == "cached"), 1 if quick else 3, peer)
            name = f"Azure, {kind}: CPU seconds / AISimulate's"
            if missing is not None:
                targets.skip(name, missing)
            else:
                targets.at_most(name, figures[kind]["aisimulate_ratio"], most)
    return figures


def report_azure(figures: dict[str, Any]) -> None:
    """Tables of the Azure trace beside AISimulate, where it was measured."""
    header, version = ["", "CPU s", "ratio", "ms between tokens"], AISIMULATE_VERSION.partition(".dev")[0]
    for kind, found in figures.items():
        if "aisimulate_seconds" not in found:
            continue
        rows: list[list[object]] = [["Pointsman", found["cpu_seconds"], None, 1e3 * found["mean_itl"]]]
        for name, words in {"aisimulate": "AISimulate", "polynomial": "AISimulate, polynomial step times"}.items():
            seconds, ratio, itl = (found[f"{name}_{key}"] for key in ("seconds", "ratio", "mean_itl"))
            rows.append([words, seconds, ratio, 1e3 * itl])
        print_table(f"Azure, {kind}, {found['requests']:,} requests, beside AISimulate {version}", header, rows)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", choices=["azure", "mooncake"], help="run one whole trace and print its peak memory")
    parser.add_argument("--no-calibration", action="store_true", help="do not fit step times to the log, half a minute")
    arguments = parser.parse_args()
    if arguments.only:
        return run_only(arguments.only)
    quick, targets = arguments.quick, Targets()
    figures: dict[str, Any] = {"quick": quick, "azure": measure_azure(quick, targets)}
    report_azure(figures["azure"])
    rows = [[f"Azure, {name}", *(found[key] for key in COLUMNS)] for name, found in figures["azure"].items()]
    mooncake = _read(MOONCAKE_TRACE, 400 if quick else None)
    if mooncake is not None:
        found = figures["mooncake"] = costs(mooncake, mooncake_config(), 1)
        rows.append(["Mooncake", *(found[key] for key in COLUMNS)])
        if not quick:
            targets.at_most("CPU seconds of the Mooncake trace", found["cpu_seconds"], MOONCAKE_SECONDS)
    print_table("simulations", ["", "requests", "steps", "events", "CPU s"], rows)

    figures["exact"] = {}
    num_exact = NUM_QUICK if quick else None
    for name, trace, config in (
        ("azure", azure_trace(num_exact), azure_config(False)),
        ("azure, cached", azure_trace(num_exact), azure_config(True)),
        ("mooncake", mooncake, mooncake_config()),
    ):
        if trace is None:
            targets.holds(f"{name}: the trace is needed and not there", False)
            continue
        compared = figures["exact"][name] = exactness(trace, config)
        note(f"  {name}: {compared['steps']} steps, {compared['speedup']} times faster than one by one")
        targets.at_most(f"difference from single steps, {name}", compared["difference"], TOLERANCE)
    small = azure_trace(NUM_GROWTH)
    if small is not None:
        figures["growth"] = round(growth(small[: NUM_GROWTH // 4] if quick else small, 5 if quick else 3), 3)
        targets.at_most("outputs and gaps ten times as long, CPU time", figures["growth"], GROWTH)
    if arguments.no_calibration:
        targets.skip("errors of a calibration", "--no-calibration")
    else:
        figures["calibration"] = measure_calibration(targets)
    if quick:
        targets.skip("peak memory", "--quick")
    elif mooncake is not None and small is not None:
        figures["memory_mib"] = {what: round(memory_mib(what)) for what in ("azure", "mooncake")}
        for what, mib in figures["memory_mib"].items():
            targets.at_most(f"peak memory in MiB, {what}", mib, MEMORY_MIB)
    return finish("simulator", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
