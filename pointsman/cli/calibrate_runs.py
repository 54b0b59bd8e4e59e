"""`pointsman calibrate RUNS`, for summaries of runs: prints the errors by token budget, and writes the profile."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from pointsman.cli.calibrate_result import print_json, print_result, save_profile
from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.progress_bar import ProgressBar
from pointsman.traces import TraceError, is_run_summaries

if TYPE_CHECKING:
    from pointsman.sim.profile import EngineSettings
    from pointsman.sim.summaries import RunCalibration

UNITS = {
    "linear": "of the peak FLOP/s, products with weights",
    "attention": "of the peak FLOP/s, attention",
    "memory": "of the peak memory bandwidth",
    "per_step": "s of any step",
}


def is_summaries(log: str) -> bool:
    """Whether the file has summaries of runs.

    Raises:
        CommandError: the file cannot be read.
    """
    try:
        return is_run_summaries(log)
    except OSError as error:
        raise CommandError(f"cannot read the log {log}: {error.strerror}") from None


def run_calibrate_runs(
    log: str,
    settings: EngineSettings,
    *,
    train: int | None,
    train_budget: int | None,
    model: str | None,
    device: str | None,
    tensor_parallel: int,
    gpu_memory_utilization: float | None,
    output: str | None,
    plot: str | None,
    as_json: bool,
) -> int:
    """Fit to summaries of runs. The options are those of `pointsman calibrate`.

    Args:
        settings: the settings that options gave; a run has its own, so they must be the defaults.

    Raises:
        CommandError: the file or an option is wrong.
    """
    from pointsman.sim.errors import SimulationError
    from pointsman.sim.summaries import calibrate_runs, read_problem

    if plot is not None:
        raise CommandError("--plot has no effect with summaries of runs, which have no times of requests; leave it out")
    default = asdict(type(settings)())
    for name, value in asdict(settings).items():
        if value != default[name]:
            raise CommandError(
                f"--{name.replace('_', '-')} has no effect: each line of {log} has its run's settings; leave it out"
            )
    begin = time.perf_counter()
    try:
        problem, left_out = read_problem(
            log,
            model,
            device,
            tensor_parallel=tensor_parallel,
            gpu_memory_utilization=gpu_memory_utilization or 0.9,
        )
        with ProgressBar("done", None, noun="simulations", figure="at most") as bar:

            def progress(done: int, maximum: int) -> None:
                bar.expect(maximum)
                bar.update(done, 0.0)

            found = calibrate_runs(
                problem, source=Path(log).name, train=train, train_budget=train_budget, progress=progress
            )
    except OSError as error:
        raise CommandError(f"cannot read {error.filename}: {error.strerror}") from None
    except (SimulationError, TraceError) as error:
        raise CommandError(str(error)) from None
    found.profile.notes[:0] = left_out
    seconds = time.perf_counter() - begin
    save_profile(found.profile, output)
    if as_json:
        print_json(_result(found, seconds))
    else:
        print_result(found.profile, len(found.runs), seconds, _tables(found), output)
    return EXIT_OK


def _result(found: RunCalibration, seconds: float) -> dict[str, Any]:
    profile = found.profile
    return {
        **profile.held_out_errors,
        "num_requests": profile.num_requests,
        "num_train": profile.num_train,
        "kind": profile.kind,
        "training": profile.training_errors,
        "efficiencies": {name: getattr(found.fit.efficiencies, name) for name in UNITS},
        "request_overhead": found.fit.request_overhead,
        "step_time": profile.step_time.to_dict(),
        "seconds": round(seconds, 1),
        "notes": profile.notes,
    }


def _tables(found: RunCalibration) -> Iterator[Table]:
    """Errors and fitted numbers."""
    errors = Table(box=None, pad_edge=False, header_style="bold")
    errors.add_column("mean of |predicted / measured - 1|")
    errors.add_column("runs", justify="right")
    for name in found.errors:
        errors.add_column(name, justify="right")
    budgets = np.array([run.max_num_batched_tokens for run in found.runs])
    for text, is_part in (("training", found.is_training), ("held out", ~found.is_training)):
        for budget in sorted(set(budgets[is_part].tolist())):
            chosen = is_part & (budgets == budget)
            figures = [f"{100 * np.abs(values[chosen]).mean():.1f} %" for values in found.errors.values()]
            errors.add_row(f"{text}, budget {budget:,}", str(int(chosen.sum())), *figures)
    yield errors
    numbers = Table(box=None, pad_edge=False, show_header=False)
    for name, unit in UNITS.items():
        numbers.add_row(name, f"{getattr(found.fit.efficiencies, name):.3g}", unit)
    numbers.add_row("request_overhead", f"{found.fit.request_overhead:.3g}", "s of a request, outside the engine")
    yield numbers
