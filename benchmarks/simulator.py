"""How long a simulation takes, and whether decodes that are done at once give what single steps give.

The unit is the CPU time of 1,000 plain steps (`schedule` and `update`) of the same scheduler with 16 running requests,
measured in turns with each simulation. Steps have become cheaper since the targets were set, so there are two
figures: in steps of today, and in steps of then (`STEPS_THEN`), which is what the targets are held against. Simulated
are an hour of the Azure conversation trace, without and with prefix cache, and the Mooncake trace with its shared
prefixes; the first requests of both also step by step, and compared. A step costs 6 ms, 34 us for each token and 20 ns
for each token of context: the hour is about 417,000 steps, with ten requests in each.

Work grows with events, not with steps: 2,000 requests whose outputs, and the time between whose arrivals, are ten
times as long, in a pool that never fills, must cost little more.

A simulation is worth what its step times are: they are fitted to the 105 requests that finish first in a log of vLLM
0.19, and must predict the other 195.

    python benchmarks/simulator.py --check
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any

import numpy as np
from _common import AZURE_TRACE, REPOSITORY, Targets, argument_parser, finish, note, print_table, run

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.sim.calibrate import calibrate
from pointsman.sim.profile import EngineSettings
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_trace

MOONCAKE_TRACE = AZURE_TRACE.with_name("mooncake_synthetic.jsonl")
VLLM_LOG = AZURE_TRACE.with_name("vllm_0.19_rtxpro6000_llama31_8b.jsonl")
VLLM_SETTINGS, VLLM_TRAIN = EngineSettings(max_num_seqs=128, max_num_batched_tokens=2048), 105
MOST_OFF = {"e2e_mape": 0.015, "ttft_p99_error": 0.04, "tpot_mean_error": 0.015}
STEP_TIME = LinearStepTime(per_step=6e-3, per_token=3.4e-5, per_context_token=2e-8)
AZURE_UNITS = {False: 250.0, True: 330.0}  # at most, without and with prefix cache, in steps of then
STEPS_THEN = 1.35
"""A plain step of commit e657891, of the day on which the targets were set, takes so many times what one of today
takes: 16.0 ms for 1,000 to 11.8, the least of six runs each, interleaved (docs/decisions/0064-plain-steps.md)."""
SAMPLE_SECONDS = 0.05
SAMPLE_STEPS, WARM_UP_STEPS = 100, 20
"""Of the unit, at a time."""
COLUMNS = ("requests", "steps", "events", "cpu_seconds", "units", "units_of_today")
MOONCAKE_SECONDS = 10.0
GROWTH = 1.5
MEMORY_MIB = 1024
NUM_QUICK = 2_000
NUM_GROWTH = 2_000
TOLERANCE = 1e-9


def azure_config(caching: bool, num_blocks: int = 20_000) -> SchedulerConfig:
    """A pool that is seldom short."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=caching,
    )


def mooncake_config() -> SchedulerConfig:
    """4 million tokens of KV."""
    return SchedulerConfig(
        num_blocks=250_000, max_model_len=131_072, max_num_seqs=256, max_num_batched_tokens=8_192, block_size=16
    )


class Unit:
    """1,000 plain steps with 16 running requests, measured all through what it is the unit of.

    A shared machine changes its speed within seconds, by up to two, and plain steps feel it more than a simulation
    does. A few steps every 50 ms see the same moments.
    """

    def __init__(self) -> None:
        self._result = StepResult(np.full(16, 7, dtype=np.int32))
        self._samples: list[float] = []
        self._taken = 0.0
        self._renew()

    def time(self, trace: list[TraceRequest], config: SchedulerConfig) -> tuple[Outcome, float, float]:
        """A simulation, its CPU seconds, and those of the unit meanwhile."""
        self._samples.clear()
        before = signal.signal(signal.SIGALRM, lambda *_: self._sample())
        try:
            self._sample()
            self._taken = 0.0  # of the simulation's time
            outcome, seconds = timed(trace, config)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return outcome, seconds - self._taken, fmean(self._samples)

    def _sample(self) -> None:
        start = process_time()
        if self._num_left < SAMPLE_STEPS + WARM_UP_STEPS:
            self._renew()
        self._step(WARM_UP_STEPS)  # the caches are the simulation's
        self._samples.append(self._step(SAMPLE_STEPS) * 1_000 / SAMPLE_STEPS)
        signal.setitimer(signal.ITIMER_REAL, SAMPLE_SECONDS)  # until the next one
        self._taken += process_time() - start

    def _step(self, count: int) -> float:
        """CPU seconds of so many steps."""
        start = process_time()
        for _ in range(count):
            self._scheduler.update(self._scheduler.schedule(0.0), self._result, 0.0)
        self._num_left -= count
        return process_time() - start

    def _renew(self) -> None:
        """A scheduler whose requests have all their tokens ahead of them."""
        self._scheduler = Scheduler(azure_config(False).replace(num_blocks=17_000))
        self._num_left = 16_000
        for index in range(16):
            self._scheduler.add(Request(f"r{index}", range(20), arrival_time=0.0, max_tokens=self._num_left), 0.0)
        self._step(2 * WARM_UP_STEPS)


def azure_trace(limit: int | None) -> list[TraceRequest] | None:
    """The requests that generated something."""
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


def in_units(trace: list[TraceRequest], config: SchedulerConfig, unit: Unit, rounds: int) -> dict[str, Any]:
    """A simulation, and what it costs; medians."""
    units, seconds = [], []
    for _ in range(rounds):
        outcome, cpu, unit_seconds = unit.time(trace, config)
        units.append(cpu / unit_seconds / STEPS_THEN)
        seconds.append(cpu)
    timeline = outcome.timelines[0]
    return {
        "requests": len(trace),
        "steps": timeline.num_steps,
        "events": len(timeline.events),
        "virtual_seconds": round(outcome.seconds, 1),
        "cpu_seconds": round(median(seconds), 3),
        "units": round(median(units), 1),
        "units_of_today": round(median(units) * STEPS_THEN, 1),
        "preemptions": outcome.stats[0].num_preemptions,
    }


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
            raise RuntimeError("the pool was short; growth with events cannot be measured")
        ratios.append(long / plain)
    return median(ratios)


def memory_mib(what: str) -> float:
    """Peak memory of a process that runs a whole trace, in MiB."""
    done = subprocess.run(
        [sys.executable, __file__, "--only", what], capture_output=True, text=True, check=True, cwd=REPOSITORY
    )
    return float(json.loads(done.stdout.splitlines()[-1])["mib"])


def run_only(what: str) -> int:
    """What `memory_mib` starts."""
    path, config = (MOONCAKE_TRACE, mooncake_config()) if what == "mooncake" else (AZURE_TRACE, azure_config(True))
    trace = _read(path, None)
    assert trace is not None
    timed(trace, config)
    print(json.dumps({"mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
    return 0


def measure_calibration(targets: Targets) -> dict[str, float] | None:
    """How far step times that are fitted to a part of the log are off on the rest."""
    if not VLLM_LOG.exists():
        targets.holds("the log of vLLM is needed and not there", False)
        return None
    errors = calibrate(VLLM_LOG, VLLM_SETTINGS, train=VLLM_TRAIN).held_out.to_dict()
    found = {name: round(errors[name], 4) for name in MOST_OFF}
    for name, most in MOST_OFF.items():
        targets.at_most(f"{name} of the requests behind the fit to a log", abs(found[name]), most)
    note(f"  calibrated on {VLLM_TRAIN} requests, the others: " + ", ".join(f"{k} {v:.2%}" for k, v in found.items()))
    return found


def measure_azure(quick: bool, unit: Unit, targets: Targets) -> dict[str, Any]:
    """The Azure trace, in units."""
    trace = azure_trace(NUM_QUICK if quick else None)
    names = {False: "Azure, no prefix cache, units", True: "Azure, prefix cache, units"}
    if trace is None:
        targets.holds("the Azure trace is needed and not there", False)
        return {}
    figures: dict[str, Any] = {}
    share = len(trace) / 19_366
    for caching, name in names.items():
        found = in_units(trace, azure_config(caching), unit, 3 if quick else 5)
        figures["cached" if caching else "plain"] = found
        targets.at_most(f"{name} for {len(trace)} requests", found["units"], round(share * AZURE_UNITS[caching], 1))
    return figures


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", choices=["azure", "mooncake"], help="run one whole trace and print its peak memory")
    parser.add_argument("--no-calibration", action="store_true", help="do not fit step times to the log, half a minute")
    arguments = parser.parse_args()
    if arguments.only:
        return run_only(arguments.only)
    quick, targets, unit = arguments.quick, Targets(), Unit()
    figures: dict[str, Any] = {"quick": quick, "azure": measure_azure(quick, unit, targets)}
    rows = [[f"Azure, {name}", *(found[key] for key in COLUMNS)] for name, found in figures["azure"].items()]
    mooncake = _read(MOONCAKE_TRACE, 400 if quick else None)
    if mooncake is not None:
        found = figures["mooncake"] = in_units(mooncake, mooncake_config(), unit, 1)
        rows.append(["Mooncake", *(found[key] for key in COLUMNS)])
        if not quick:
            targets.at_most("CPU seconds of the Mooncake trace", found["cpu_seconds"], MOONCAKE_SECONDS)
    header = ["", "requests", "steps", "events", "CPU s", "units", "of today"]
    print_table(
        "A simulation, in units of 1,000 plain steps with 16 requests, as they were and as they are", header, rows
    )

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
