"""`pointsman calibrate LOG`: prints the result of the fit as tables or JSON, and writes the profile and a plot."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from pointsman.cli.calibrate_result import print_json, print_result, save_profile
from pointsman.cli.errors import EXIT_OK, CommandError, check_writable, missing_library

if TYPE_CHECKING:
    from pointsman.sim.calibrate import Calibration
    from pointsman.sim.fit import Progress as FitProgress
    from pointsman.sim.profile import EngineSettings
    from pointsman.sim.step_time import RooflineStepTime

ERRORS = {
    "e2e_mape": "end to end, mean of absolute errors",
    "e2e_bias": "end to end, mean of signed errors",
    "ttft_mean_error": "TTFT, mean",
    "ttft_p50_error": "TTFT, p50",
    "ttft_p99_error": "TTFT, p99",
    "tpot_mean_error": "TPOT, mean",
    "step_mape": "step, mean of absolute errors",
    "step_bias": "step, mean of signed errors",
    "total_error": "all steps together",
}
UNITS = {
    "per_step": ("ms", 1e3),
    "per_row": ("us a request", 1e6),
    "per_token": ("us a token", 1e6),
    "per_context_token": ("ns a position read", 1e9),
    "per_attended": ("ns a position attended to", 1e9),
    "per_sample": ("us a sampled token", 1e6),
    "per_prefill": ("ms more with a prefill in it", 1e3),
    "expert_weights": ("ms for all routed experts", 1e3),
    "expert_share": ("of the experts that a token touches", 1),
    "r": ("1: the sum of all; above 1: step and context overlap with tokens and attended", 1),
}

Log = Annotated[
    str,
    typer.Argument(
        metavar="LOG",
        help="Result of vllm bench serve --save-result --save-detailed, JSON lines with queued_ts, first_token_ts and "
        "last_token_ts, a guidellm report, a recording with step times, or summaries of runs with their arrivals.",
    ),
]
Train = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Fit to the N requests that finish first, and predict the others [default: half of all, at most 300].",
    ),
]
TrainBudget = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="For summaries of runs: fit to the runs with this max_num_batched_tokens, and predict the others "
        "[default: every second run].",
    ),
]
MaxNumSeqs = Annotated[int, typer.Option(metavar="N", help="Setting of the log's engine.")]
MaxNumBatchedTokens = Annotated[int, typer.Option(metavar="N", help="Setting of the log's engine.")]
NumBlocks = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="KV blocks, as the engine reported them [default: estimated from --model and --device; without these, "
        "blocks never run out].",
    ),
]
BlockSize = Annotated[int, typer.Option(metavar="N", help="Tokens of a KV block.")]
MaxModelLen = Annotated[
    int | None,
    typer.Option(metavar="N", help="Maximum tokens of a request [default: those of the longest in the log]."),
]
AsyncScheduling = Annotated[
    bool, typer.Option(help="Whether the engine scheduled a step while the step before it ran, as vLLM does.")
]
DataParallelSize = Annotated[
    int,
    typer.Option(
        metavar="N", help="Engines behind the log's server, each with these settings, as for pointsman simulate."
    ),
]
EnableExpertParallel = Annotated[
    bool,
    typer.Option(
        "--enable-expert-parallel",
        help="The log's engines served a mixture of experts, each device with whole experts. Without --model, this "
        "also says that data parallel engines stepped together.",
    ),
]
NumDraftTokens = Annotated[
    int,
    typer.Option("--num-draft-tokens", "--num-speculative-tokens", metavar="N", help="Setting of the log's engine."),
]
Acceptance = Annotated[
    str | None,
    typer.Option(
        metavar="SHARES",
        help="With --num-draft-tokens: probability that each draft is accepted after the drafts before it, as for "
        "pointsman simulate.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Model of the log's engine, as for pointsman simulate. The fit then also starts from step times that "
        "follow from datasheets, and no step time is below what the device can reach. Needs --device.",
    ),
]
OnDevice = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="Device of the log's engine; see pointsman simulate --list."),
]
TensorParallel = Annotated[int, typer.Option(metavar="N", help="Devices that shared the model.")]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Share of the device's memory for the engine, to estimate --num-blocks [default: 0.9]."
    ),
]
ProfileFile = Annotated[str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the profile, as JSON.")]
PlotFile = Annotated[
    str | None, typer.Option("--plot", metavar="FILE", help="Draw the errors of all requests; needs matplotlib.")
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object instead of tables. Errors are those of the held-out requests, as fractions (0.01 "
        "is 1 %): e2e_mape is a mean of absolute errors; ttft_mean_error, ttft_p99_error and tpot_mean_error are "
        "signed (predicted / measured - 1).",
    ),
]


def _ignored_setting_notes(given: EngineSettings, recorded: EngineSettings) -> list[str]:
    """A note for each option that has no effect, because the recording contains another value of this setting."""
    asked, own, default = (asdict(each) for each in (given, recorded, type(given)()))
    return [
        f"{_as_option(name, asked[name])} has no effect: in the recording {name} is {own[name]}"
        for name in asked
        if asked[name] not in (default[name], own[name])
    ]


def _as_option(name: str, value: Any) -> str:
    option = name.replace("_", "-")
    return f"--no-{option}" if value is False else f"--{option} {value}"


def calibrate(
    log: Log,
    train: Train = None,
    train_budget: TrainBudget = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    num_blocks: NumBlocks = None,
    block_size: BlockSize = 16,
    max_model_len: MaxModelLen = None,
    async_scheduling: AsyncScheduling = True,
    data_parallel_size: DataParallelSize = 1,
    enable_expert_parallel: EnableExpertParallel = False,
    num_draft_tokens: NumDraftTokens = 0,
    acceptance: Acceptance = None,
    model: Model = None,
    device: OnDevice = None,
    tensor_parallel: TensorParallel = 1,
    gpu_memory_utilization: GpuMemoryUtilization = None,
    output: ProfileFile = None,
    plot: PlotFile = None,
    as_json: AsJson = False,
) -> int:
    """Fit step times to a log of a running engine, and report how well they predict.

    Give the settings of the engine that wrote the log. The defaults are vLLM's, with chunked prefill, full-sequence
    admission and first come, first served. Prompts are assumed to be distinct, so the prefix cache finds nothing.
    TTFT is first token - queued, E2E is last token - queued, and TPOT is (E2E - TTFT) / (output tokens - 1).
    Summaries of runs have their settings in each line, and need --model and --device if they are of several.

    Exit code 0: fitted; 2: the log or an option is wrong.
    """
    try:
        import scipy  # noqa: F401  before the log is read
    except ModuleNotFoundError:
        raise CommandError(missing_library("calibrate", "scipy", "sim")) from None
    from pointsman.cli.calibrate_runs import is_summaries, run_calibrate_runs
    from pointsman.sim.calibrate import calibrate as fit
    from pointsman.sim.errors import SimulationError
    from pointsman.sim.profile import EngineSettings
    from pointsman.sim.speculation import Speculation, parse_acceptance
    from pointsman.traces import TraceError

    check_writable(output)
    settings = EngineSettings(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        async_scheduling=async_scheduling,
        num_draft_tokens=num_draft_tokens,
    )
    if data_parallel_size < 1:
        raise CommandError(f"--data-parallel-size is {data_parallel_size}; it must be at least 1")
    if num_draft_tokens < 0:
        raise CommandError(f"--num-draft-tokens is {num_draft_tokens}; it must be at least 0")
    if acceptance is not None and not num_draft_tokens:
        raise CommandError("--acceptance has no effect without drafts; give --num-draft-tokens too")
    if is_summaries(log):
        return run_calibrate_runs(
            log,
            settings,
            train=train,
            train_budget=train_budget,
            model=model,
            device=device,
            tensor_parallel=tensor_parallel,
            gpu_memory_utilization=gpu_memory_utilization,
            output=output,
            plot=plot,
            as_json=as_json,
        )
    if train_budget is not None:
        raise CommandError(f"--train-budget has no effect: {log} has no summaries of runs; leave it out")
    if plot is not None:
        _check_plot(plot)
    begin = time.perf_counter()
    notes: list[str] = []
    given = settings
    try:
        estimate = _estimate_step_times(
            model, device, tensor_parallel, data_parallel_size, enable_expert_parallel=enable_expert_parallel
        )
        has_experts = enable_expert_parallel if estimate is None else estimate.shape.num_experts > 0
        settings = replace(
            settings, data_parallel_size=data_parallel_size, is_lockstep=has_experts and data_parallel_size > 1
        )
        if estimate is not None and num_blocks is None:
            settings, note = _with_estimated_blocks(settings, estimate, gpu_memory_utilization or 0.9)
            notes.append(note)
        elif gpu_memory_utilization is not None:
            raise CommandError(
                "--gpu-memory-utilization has no effect: it only serves to estimate --num-blocks from --model and "
                "--device; leave it out, or give --model and --device without --num-blocks"
            )
        drafts = None if acceptance is None else Speculation(acceptance=parse_acceptance(acceptance, num_draft_tokens))
        with _progress_bar() as progress:
            found = fit(log, settings, speculation=drafts, train=train, estimate=estimate, progress=progress)
        if found.profile.kind == "steps":
            notes += _ignored_setting_notes(given, found.profile.settings)
        found.profile.notes.extend(notes)
    except OSError as error:
        what = f"the log {log}" if error.filename in (None, log) else error.filename
        raise CommandError(f"cannot read {what}: {error.strerror}") from None
    except (SimulationError, TraceError) as error:
        raise CommandError(str(error)) from None
    seconds = time.perf_counter() - begin
    save_profile(found.profile, output)
    if plot is not None:
        _draw_plot(found, plot)
    if as_json:
        print_json(_result_as_json(found, seconds))
    else:
        print_result(found.profile, len(found.measured), seconds, _tables(found), output)
    return EXIT_OK


def _estimate_step_times(
    model: str | None,
    device: str | None,
    tensor_parallel: int,
    data_parallel_size: int,
    *,
    enable_expert_parallel: bool,
) -> RooflineStepTime | None:
    """Step times computed from the dimensions of the model and the figures of the device; None: neither model nor
    device was given."""
    if model is None and device is None:
        if tensor_parallel != 1:
            raise CommandError("--tensor-parallel has no effect without --model and --device; give both")
        return None
    if model is None or device is None:
        given, missing = ("--device", "--model") if model is None else ("--model", "--device")
        raise CommandError(f"{given} has no effect without {missing}; give both")
    from pointsman.sim.devices import device as device_called
    from pointsman.sim.shapes import model_shape
    from pointsman.sim.step_time import RooflineStepTime

    shape = model_shape(model)
    return RooflineStepTime(
        shape=shape,
        device=device_called(device),
        tensor_parallel=tensor_parallel,
        data_parallel=data_parallel_size if shape.num_experts else 1,
        has_expert_parallel=enable_expert_parallel,
    )


def _with_estimated_blocks(
    settings: EngineSettings, estimate: RooflineStepTime, gpu_memory_utilization: float
) -> tuple[EngineSettings, str]:
    """The settings with the number of KV blocks that fit the device, and a note with that number."""
    from pointsman.sim.memory import num_kv_blocks

    kv = num_kv_blocks(
        estimate.shape,
        estimate.device,
        settings.block_size,
        gpu_memory_utilization,
        estimate.tensor_parallel,
        data_parallel=estimate.data_parallel,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
    )
    note = (
        f"num_blocks {kv.num_blocks:,} is estimated for {estimate.shape.name} on {estimate.device.name}: give the "
        "number that the engine's log reports, if there is one"
    )
    return replace(settings, num_blocks=kv.num_blocks, kv_groups=kv.groups.kv_groups), note


@contextmanager
def _progress_bar() -> Iterator[FitProgress | None]:
    """A progress bar with the remaining time, if stderr is a terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("fitting"), BarColumn(), TextColumn("at most"), TimeRemainingColumn(), TextColumn("remain"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("fit")

        def update(done: int, maximum: int) -> None:
            bar.update(task, completed=done, total=maximum)

        yield update


# ---------------------------------------------------------------------- what is printed


def _result_as_json(found: Calibration, seconds: float) -> dict[str, Any]:
    """The result as a JSON object: errors of the held-out predictions, then the log and the fit from which these errors
    come."""
    profile = found.profile
    names = ("e2e_mape", "e2e_bias", "ttft_mean_error", "ttft_p50_error", "ttft_p99_error", "tpot_mean_error")
    errors = dict.fromkeys(names) | {
        name: value for name, value in profile.held_out_errors.items() if not name.startswith("num_")
    }
    return {
        **errors,
        "num_requests": profile.num_requests,
        "num_train": profile.num_train,
        "kind": profile.kind,
        "training": profile.training_errors,
        "step_time": profile.step_time.to_dict(),
        "alternatives": [each.to_dict() for each in profile.alternatives],
        "allowed": [
            {"step": each.question.name, "low": each.low, "seconds": each.seconds, "high": each.high}
            for each in found.allowed
        ],
        "seconds": round(seconds, 1),
        "notes": profile.notes,
    }


def _tables(found: Calibration) -> Iterator[Table]:
    """Errors and fitted numbers."""
    profile = found.profile
    errors = Table(box=None, pad_edge=False, header_style="bold")
    errors.add_column("predicted / measured - 1")
    errors.add_column("training", justify="right")
    errors.add_column("held out", justify="right")
    for name, meaning in ERRORS.items():
        if name in profile.held_out_errors:
            is_signed = not name.endswith("mape")
            errors.add_row(
                meaning,
                _percent(profile.training_errors[name], is_signed),
                _percent(profile.held_out_errors[name], is_signed),
            )
    yield errors
    coefficients = Table(box=None, pad_edge=False, header_style="bold")
    coefficients.add_column("a step takes")
    coefficients.add_column("", justify="right")
    coefficients.add_column("")
    values = profile.step_time.to_dict()
    for name, (unit, factor) in UNITS.items():
        if name.startswith("expert") and not profile.step_time.expert_weights:
            continue
        coefficients.add_row(name, f"{values[name] * factor:.4g}", unit)
    yield coefficients
    if found.allowed:
        allowed = Table(box=None, pad_edge=False, header_style="bold")
        for title in ("a step in which", "takes, ms", "the log allows"):
            allowed.add_column(title, justify="left" if title.startswith("a ") else "right")
        for each in found.allowed:
            span = f"{1e3 * each.low:.3g} to {1e3 * each.high:.3g}"
            allowed.add_row(each.question.name, f"{1e3 * each.seconds:.4g}", span)
        yield allowed


def _percent(value: float | int | None, is_signed: bool) -> str:
    if value is None:
        return "-"
    return f"{100 * value:+.2f} %" if is_signed else f"{100 * value:.2f} %"


# ---------------------------------------------------------------------- the plot


def _check_plot(path: str) -> None:
    """Check that the plot can be drawn, before the slow fit."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError:
        raise CommandError("--plot needs matplotlib; install it with: pip install matplotlib") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if (kind := Path(path).suffix[1:].lower()) not in known:
        raise CommandError(f"--plot is {path}; its name must end with one of {', '.join(sorted(known))}, not {kind!r}")


def _draw_plot(found: Calibration, path: str) -> None:
    from matplotlib.figure import Figure

    profile = found.profile
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    errors = 100 * (found.predicted / found.measured - 1)
    for which, label in ((found.is_training, "training"), (~found.is_training, "held out")):
        axes.plot(found.when[which], errors[which], ".", label=f"{label} ({np.count_nonzero(which)})")
    axes.axhline(0, color="gray", linewidth=0.8)
    by_request = profile.kind == "requests"
    axes.set_xlabel("queued at, seconds" if by_request else "step")
    axes.set_ylabel("error of end-to-end time, %" if by_request else "error of step time, %")
    axes.set_title(profile.source)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as error:
        raise CommandError(f"cannot write the plot {path}: {error.strerror}") from None
