"""Fit to summaries of runs: finds the efficiencies with which simulations of the runs have the measured means.

A summary of a run has its arrivals and means over its requests (`traces/run_summaries.py`), and no times of requests.
A mean says less than a log of requests, so only a few numbers of the roofline are fitted (`SPREADS`), each with a prior
about the device's typical value: a run with one token budget cannot separate them, and what it leaves open then still
predicts other budgets.

    read_problem       runs of one model on one device, and the scheduler's settings of each
    fit_summaries      least squares over logarithms: of simulated to measured means, and of the numbers to their prior
    calibrate_runs     fits to a part of the runs, judges by the others, and makes a profile

SciPy is imported where it is used: the rest of the simulator does not need it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.errors import CalibrationError, UnknownName
from pointsman.sim.memory import num_kv_blocks
from pointsman.sim.profile import EngineSettings, Profile, WatchedStepTime
from pointsman.sim.shapes import model_shape
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import Efficiencies, LinearStepTime, RooflineStepTime, StepLoad, StepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import FIGURES, RunSummary, read_run_summaries

FloatArray = npt.NDArray[np.float64]
Progress = Callable[[int, int], None]
"""Function that gets the number of finished simulations and the maximum number, from time to time."""

SPREADS = {"linear": 0.15, "attention": 0.15, "memory": 0.05, "per_step": 0.4, "request_overhead": 0.7}
"""Fitted numbers, each with the standard deviation of its prior: that of the number's logarithm about the typical value
of the device. `request_overhead` is none of the step: seconds of each request outside the engine."""
OVERHEAD_PER_TOKEN = 4e-6
"""Typical `request_overhead` of a prompt token, in seconds: client and server write, send, read and hash prompts."""
RELATIVE = 0.05
"""Relative error of a simulated mean that is expected of correct numbers."""
SOFT = 1.0
"""An error above this multiple of `RELATIVE` adds to the cost linearly, not squared: some runs have a request that
waited seconds for a compiler, or for another program."""
MAX_TRAIN = 12
"""Maximum number of runs in a fit: the runs that are at equal distances by their mean latency are taken."""
MIN_TRAIN, MIN_HELD_OUT = 2, 1
MAX_ITERATIONS, STEP = 8, 0.02
"""Maximum number of iterations, and the change of a number's logarithm by which its slope is measured."""


@dataclass(frozen=True, slots=True)
class RunProblem:
    """Runs of one model on one device."""

    runs: tuple[RunSummary, ...]
    settings: tuple[EngineSettings, ...]
    """The engine's settings in each run."""
    estimate: RooflineStepTime
    """Step times from datasheets, about which the prior lies."""

    def part(self, indices: Sequence[int]) -> RunProblem:
        """The same problem with these runs only."""
        return RunProblem(
            tuple(self.runs[index] for index in indices),
            tuple(self.settings[index] for index in indices),
            self.estimate,
        )


@dataclass(frozen=True, slots=True)
class RunFit:
    """Fitted numbers."""

    efficiencies: Efficiencies
    request_overhead: float
    """Seconds of each request outside the engine: in the client, the network and the API server."""
    step_time: LinearStepTime
    """The step times of these efficiencies, as they were simulated."""


@dataclass(frozen=True, slots=True)
class RunCalibration:
    """A profile, and its predictions for the runs."""

    profile: Profile
    fit: RunFit
    runs: tuple[RunSummary, ...]
    is_training: npt.NDArray[np.bool_]
    """Whether the fit used a run."""
    errors: dict[str, FloatArray]
    """Of each figure: predicted / measured - 1 of each run."""


# ---------------------------------------------------------------------- a simulation of a run


def run_settings(
    run: RunSummary, estimate: RooflineStepTime, gpu_memory_utilization: float = 0.9, block_size: int = 16
) -> EngineSettings:
    """The engine's settings in a run, with the KV blocks that fit the device."""
    kv = num_kv_blocks(
        estimate.shape,
        estimate.device,
        block_size,
        gpu_memory_utilization,
        estimate.tensor_parallel,
        max_num_batched_tokens=run.max_num_batched_tokens,
        max_num_seqs=run.max_num_seqs,
    )
    return EngineSettings(
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        num_blocks=kv.num_blocks,
        block_size=block_size,
    )


def run_config(run: RunSummary, settings: EngineSettings) -> SchedulerConfig:
    """The configuration of vLLM's scheduler in a run."""
    return settings.config(
        max(each.num_prompt_tokens + each.num_output_tokens for each in run.requests), len(run.requests)
    )


def simulated_means(
    run: RunSummary, config: SchedulerConfig, step_time: StepTime, request_overhead: float = 0.0
) -> dict[str, float]:
    """The mean of each of `FIGURES` in a simulation of the run, in seconds; without "tpot" if outputs have one token.

    Args:
        config: the scheduler's configuration.
        step_time: how long a step takes.
        request_overhead: seconds of each request outside the engine, which its client measures, too.
    """
    timings = simulate(OpenLoop(run.requests), config, step_time, request_overhead=request_overhead).timings
    ttft, latency = timings.first_token - timings.arrival, timings.last_token - timings.arrival
    found = {"ttft": float(ttft.mean()), "latency": float(latency.mean())}
    has_gaps = timings.num_output_tokens > 1
    if has_gaps.any():
        found["tpot"] = float(((latency - ttft)[has_gaps] / (timings.num_output_tokens[has_gaps] - 1)).mean())
    return {name: found[name] for name in FIGURES if name in found}


def typical_overhead(runs: Sequence[RunSummary]) -> float:
    """Typical seconds of a request outside the engine, by the runs' mean prompt."""
    return OVERHEAD_PER_TOKEN * float(
        np.mean([each.num_prompt_tokens for run in runs for each in run.requests], dtype=np.float64)
    )


# ---------------------------------------------------------------------- the fit


def fit_summaries(problem: RunProblem, *, num_processes: int | None = None, progress: Progress | None = None) -> RunFit:
    """The numbers with which simulations of the runs have about the measured means.

    Args:
        problem: the training runs.
        num_processes: number of parallel simulations; None: one for each CPU.
        progress: see `Progress`.
    """
    from scipy.optimize import least_squares

    if len(problem.runs) > MAX_TRAIN:
        by_latency = np.argsort([run.mean["latency"] for run in problem.runs], kind="stable")
        places = np.linspace(0, len(by_latency) - 1, MAX_TRAIN).round().astype(int)
        problem = problem.part(by_latency[places].tolist())
    spreads = np.array(list(SPREADS.values()))
    maximum = len(problem.runs) * (1 + len(spreads)) * MAX_ITERATIONS
    with _pool(problem, num_processes or os.cpu_count() or 1) as run_all:
        num_done = 0

        def misses(points: Sequence[FloatArray]) -> list[FloatArray]:
            """The errors at each point, in multiples of those that are expected, with the distances to the prior."""
            nonlocal num_done
            numbers = range(len(problem.runs))
            log_errors = run_all([(number, point.tolist()) for point in points for number in numbers])
            num_done += len(log_errors)
            if progress is not None:
                progress(num_done, max(maximum, num_done))
            found = []
            for index, point in enumerate(points):
                own = log_errors[index * len(numbers) : (index + 1) * len(numbers)]
                errors = np.concatenate(own) / RELATIVE
                # Squared, this is the soft loss of an error; the prior stays quadratic.
                soft = np.sign(errors) * np.sqrt(2 * SOFT**2 * (np.sqrt(1 + (errors / SOFT) ** 2) - 1))
                found.append(np.concatenate([soft, point / spreads]))
            return found

        def slopes(point: FloatArray) -> FloatArray:
            moves = STEP * np.eye(len(point))
            here, *others = misses([point, *(point + move for move in moves)])
            return (np.array(others) - here).T / STEP

        highest = np.log(
            [_highest(problem.estimate, name) / _typical(problem, name) for name in SPREADS], dtype=np.float64
        )
        best: Any = least_squares(
            lambda point: misses([point])[0],
            np.zeros(len(spreads)),
            jac=slopes,
            bounds=(np.full(len(spreads), -3.0), np.maximum(highest, 1e-6)),
            max_nfev=MAX_ITERATIONS,
            xtol=2e-3,
            ftol=1e-3,
        )
    return _at(problem, best.x)


def _typical(problem: RunProblem, name: str) -> float:
    if name == "request_overhead":
        return typical_overhead(problem.runs)
    return float(getattr(problem.estimate.efficiencies, name))


def _highest(estimate: RooflineStepTime, name: str) -> float:
    """The highest value that a fitted number may have."""
    if name in ("linear", "attention"):
        return estimate.device.headroom
    return 1.0 if name == "memory" else math.inf


def _at(problem: RunProblem, point: FloatArray) -> RunFit:
    """The numbers at a point: the changes of their logarithms from the typical values."""
    values = {
        name: _typical(problem, name) * math.exp(change) for name, change in zip(SPREADS, point.tolist(), strict=True)
    }
    overhead = values.pop("request_overhead")
    efficiencies = replace(problem.estimate.efficiencies, **values)
    return RunFit(efficiencies, overhead, linear_of(replace(problem.estimate, efficiencies=efficiencies), problem.runs))


def linear_of(estimate: RooflineStepTime, runs: Sequence[RunSummary]) -> LinearStepTime:
    """The form that profiles have, near the load of a step in which a request decodes and another one computes a chunk
    of its prompt."""
    requests = [each for run in runs for each in run.requests]
    prompt = round(np.mean([each.num_prompt_tokens for each in requests]))
    chunk = min(prompt, min(run.max_num_batched_tokens for run in runs))
    return estimate.to_linear(StepLoad.of_rows([(prompt, 1), (prompt // 2, chunk)]))


_problem: RunProblem | None = None
"""The problem that this worker process simulates."""


def _init_worker(problem: RunProblem) -> None:
    global _problem
    _problem = problem


def _log_errors(task: tuple[int, list[float]]) -> FloatArray:
    """Logarithms of simulated to measured means of a run: (number of the run, point)."""
    assert _problem is not None
    number, point = task
    fit, run = _at(_problem, np.array(point)), _problem.runs[number]
    config = run_config(run, _problem.settings[number])
    means = simulated_means(run, config, fit.step_time, fit.request_overhead)
    return np.log([means[name] / run.mean[name] for name in run.mean])


@contextmanager
def _pool(
    problem: RunProblem, num_processes: int
) -> Iterator[Callable[[list[tuple[int, list[float]]]], list[FloatArray]]]:
    """A function that simulates many tasks, in worker processes; with one process, in this one."""
    if num_processes == 1:
        _init_worker(problem)
        yield lambda tasks: [_log_errors(task) for task in tasks]
        return
    context = get_context("spawn")  # a fork would copy locks that other threads hold
    with ProcessPoolExecutor(num_processes, context, _init_worker, (problem,)) as pool:
        yield lambda tasks: list(pool.map(_log_errors, tasks))


# ---------------------------------------------------------------------- the calibration


def read_problem(
    path: str | PathLike[str],
    model: str | None = None,
    on_device: str | None = None,
    *,
    tensor_parallel: int = 1,
    gpu_memory_utilization: float = 0.9,
    block_size: int = 16,
) -> tuple[RunProblem, list[str]]:
    """The runs of a file that vLLM's own scheduler ran with one model on one device.

    Args:
        path: the file.
        model: the model's name; None: the only one of the file.
        on_device: the device's name or description; None: the only one of the file.

    Returns:
        The problem, and notes about the runs that are left out.

    Raises:
        CalibrationError: no run is left, or the file has several models or devices and no name was given.
        TraceError: a line is broken.
        SimulationError: a name is unknown, or the model does not fit the device.
        OSError: the file cannot be read.
    """
    runs = read_run_summaries(path)
    model, on_device = (
        wanted or _only(path, kind, [getattr(run, kind) for run in runs])
        for wanted, kind in ((model, "model"), (on_device, "device"))
    )
    estimate = RooflineStepTime(shape=model_shape(model), device=device(on_device), tensor_parallel=tensor_parallel)
    kept, notes = list(runs), []
    for is_kept, why in (
        (lambda run: _is_same(run.model, estimate.shape.name, lambda name: model_shape(name).name), "of other models"),
        (lambda run: _is_same(run.device, estimate.device.name, lambda name: device(name).name), "on other devices"),
        (lambda run: run.policy == "fcfs", "with another policy than fcfs"),
        (lambda run: not run.num_failed, "with failed requests"),
    ):
        left = [run for run in kept if is_kept(run)]
        if len(left) < len(kept):
            notes.append(f"{len(kept) - len(left)} runs {why} are left out")
        kept = left
    if not kept:
        raise CalibrationError(f"{path}: no run is left: {'; '.join(notes)}")
    settings = tuple(run_settings(run, estimate, gpu_memory_utilization, block_size) for run in kept)
    return RunProblem(tuple(kept), settings, estimate), notes


def _only(path: str | PathLike[str], kind: str, values: Sequence[str]) -> str:
    found = sorted(set(values))
    if len(found) == 1 and found[0]:
        return found[0]
    if len(found) > 1:
        raise CalibrationError(f"{path}: the runs are of several {kind}s: {', '.join(found)}; give --{kind}")
    raise CalibrationError(f"{path}: the runs do not name their {kind}; give --{kind}")


def _is_same(name: str, wanted: str, look_up: Callable[[str], str]) -> bool:
    """Whether a run's model or device, if it names one, is the wanted one."""
    try:
        return not name or look_up(name) == wanted
    except UnknownName:
        return False


def calibrate_runs(
    problem: RunProblem,
    *,
    source: str = "runs",
    train: int | None = None,
    train_budget: int | None = None,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> RunCalibration:
    """Fit to a part of the runs, and predict the others.

    Args:
        problem: the runs.
        source: name of the file.
        train: number of training runs, from the first on; None: every second run, or as `train_budget` says.
        train_budget: train with the runs that had this `max_num_batched_tokens`.
        num_processes: number of parallel simulations; None: one for each CPU.
        progress: see `Progress`.

    Raises:
        CalibrationError: too few runs train, or none is held out.
    """
    is_training = _choose(problem.runs, train, train_budget, source)
    trained = problem.part(np.flatnonzero(is_training).tolist())
    fit = fit_summaries(trained, num_processes=num_processes, progress=progress)
    watched = WatchedStepTime(fit.step_time)
    means = [
        simulated_means(run, run_config(run, settings), watched if training else fit.step_time, fit.request_overhead)
        for run, settings, training in zip(problem.runs, problem.settings, is_training.tolist(), strict=True)
    ]
    errors = {
        name: np.array([mean[name] / run.mean[name] - 1 for mean, run in zip(means, problem.runs, strict=True)])
        for name in FIGURES
        if all(name in run.mean for run in problem.runs)
    }
    profile = Profile(
        step_time=fit.step_time,
        settings=trained.settings[0],
        hull=watched.hull,
        source=source,
        model=problem.estimate.shape.name,
        kind="runs",
        num_requests=sum(len(run.requests) for run in problem.runs),
        num_train=len(trained.runs),
        training_errors=_error_summary(errors, is_training),
        held_out_errors=_error_summary(errors, ~is_training),
        request_overhead=fit.request_overhead,
        notes=_notes(fit, problem, trained),
    )
    return RunCalibration(profile, fit, problem.runs, is_training, errors)


def _choose(
    runs: Sequence[RunSummary], train: int | None, train_budget: int | None, source: str
) -> npt.NDArray[np.bool_]:
    """Whether each run is a training run."""
    if train is not None and train_budget is not None:
        raise CalibrationError("train and train_budget are both given; give one of them")
    budgets = [run.max_num_batched_tokens for run in runs]
    if train_budget is not None and train_budget not in budgets:
        known = ", ".join(map(str, sorted(set(budgets))))
        raise CalibrationError(f"{source}: no run has the budget {train_budget}; the runs have {known}")
    if train_budget is not None:
        chosen = np.array([budget == train_budget for budget in budgets])
    else:
        chosen = np.array([number % 2 == 0 if train is None else number < train for number in range(len(runs))])
    num_train = int(chosen.sum())
    if num_train < MIN_TRAIN or len(runs) - num_train < MIN_HELD_OUT:
        raise CalibrationError(
            f"{source}: {num_train} of {len(runs)} runs would train; at least {MIN_TRAIN} must, and at least "
            f"{MIN_HELD_OUT} must remain to judge the fit by"
        )
    return chosen


def _error_summary(errors: dict[str, FloatArray], chosen: npt.NDArray[np.bool_]) -> dict[str, float | int | None]:
    """Mean of absolute errors, and of signed ones, of each figure."""
    found: dict[str, float | int | None] = {"num_runs": int(chosen.sum())}
    for name, values in errors.items():
        found[f"{name}_mape"] = float(np.abs(values[chosen]).mean())
        found[f"{name}_bias"] = float(values[chosen].mean())
    return found


def _notes(fit: RunFit, problem: RunProblem, trained: RunProblem) -> list[str]:
    shares, typical = fit.efficiencies, problem.estimate.efficiencies
    changes = ", ".join(
        f"{name} {getattr(shares, name):.3g} (typical {getattr(typical, name):.3g})"
        for name in SPREADS
        if name != "request_overhead"
    )
    budgets = sorted({run.max_num_batched_tokens for run in trained.runs})
    return [
        f"fitted on {problem.estimate.device.name}: {changes}",
        f"each request spends {fit.request_overhead * 1e3:.0f} ms outside the engine: in the client, the network and "
        "the API server",
        f"max_num_batched_tokens of the training runs: {', '.join(map(str, budgets))}",
        f"num_blocks {trained.settings[0].num_blocks:,} is estimated for {problem.estimate.device.name}",
        "prompts are taken as distinct: nothing is found in a prefix cache",
    ]
