"""Calibration: turns a log of what an engine did into a profile that predicts what it will do.

    calibrate(path, settings, train)       reads the log and finds out which kind it is
        timings of requests                `fit.py`: a search that runs the simulator
        a recording with step times        `step_log.py`: a linear fit
    Calibration                            the profile (`profile.py`), and its predictions for the log

The log is split in time: the requests that finish first are fitted; the predictions for all other requests are judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core import ConfigError, KVGroup
from pointsman.core.recording import FORMAT as RECORDING
from pointsman.files import open_regular
from pointsman.sim.accuracy import RequestErrors, StepErrors, Times
from pointsman.sim.errors import CalibrationError
from pointsman.sim.features import Features
from pointsman.sim.fit import Problem, Progress, search_step_times, simulate_log, simulated_times, typical_load
from pointsman.sim.profile import EngineSettings, Hull, Profile, WatchedStepTime
from pointsman.sim.speculation import Speculation
from pointsman.sim.step_log import MIN_STEPS, StepLog, fit_adapter_share, fit_steps, predict_steps, read_steps
from pointsman.sim.step_time import RooflineStepTime
from pointsman.traces import MeasuredRequest, about_left_out, read_measurements

POOR_FIT = 0.05
"""Mean error of end-to-end times above which the given settings are probably wrong, rather than the fitted step times.
With correct settings, logs reach 0.02."""
POOR_STEPS = 0.2
"""Error of the total time of all held-out steps above which a fit is poor. Single steps scatter, but their sum should
not."""
MIN_TRAIN = 10
"""Minimum number of requests for a fit. Fewer do not determine five coefficients."""
MIN_HELD_OUT = 1
MAX_DEFAULT_TRAIN = 300
"""Maximum number of training requests if `train` is None: enough for a fit, and more requests make the fit slower."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A profile, and its prediction for each request or step of the log."""

    profile: Profile
    training: RequestErrors | StepErrors
    held_out: RequestErrors | StepErrors
    is_training: npt.NDArray[np.bool_]
    """Whether the fit used a request or step; one value for each request, by arrival, or for each step."""
    measured: npt.NDArray[np.float64]
    """End-to-end seconds of each request, or seconds of each step."""
    predicted: npt.NDArray[np.float64]
    when: npt.NDArray[np.float64]
    """Seconds at which each request was queued; for steps, the step numbers."""


def calibrate(
    path: str | PathLike[str],
    settings: EngineSettings | None = None,
    *,
    speculation: Speculation | None = None,
    train: int | None = None,
    estimate: RooflineStepTime | None = None,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """Fit step times to a log.

    Args:
        path: measured JSON lines, a result of `vllm bench serve`, a guidellm report, or a recording with step times.
        settings: the settings of the engine that wrote the log; None: vLLM's defaults. A recording contains its own
            settings.
        speculation: the drafts of the engine, if `settings` has drafts; the fitted step times include the drafter's. A
            recording shows its own drafts.
        train: number of training requests, which are those that finish first; for a recording, number of training
            steps, from the first on. All other requests or steps are predicted. None: half of the requests, at most
            `MAX_DEFAULT_TRAIN`, or half of the steps.
        estimate: step times computed from the log's model and device, as an additional start of the search; None: not
            known.
        num_processes: number of parallel simulations in a fit to requests; None: one for each CPU.
        progress: see `fit.Progress`.

    Raises:
        CalibrationError: the log is too short, does not agree with the settings, or has impossible times.
        TraceError: a line of the log is broken.
        OSError: the log cannot be read.
    """
    if _is_recording(path):
        return calibrate_steps(read_steps(path), path, train=train)
    measured = read_measurements(path)
    try:
        found = from_requests(
            measured,
            settings or EngineSettings(),
            source=Path(path).name,
            speculation=speculation,
            train=train,
            estimate=estimate,
            num_processes=num_processes,
            progress=progress,
        )
    except CalibrationError as error:
        raise CalibrationError(f"{path}: {error}") from None
    if measured.left_out:
        found.profile.notes.insert(0, about_left_out(measured.num_rows, measured.left_out))
    return found


def from_requests(
    measured: Sequence[MeasuredRequest],
    settings: EngineSettings,
    *,
    source: str = "log",
    speculation: Speculation | None = None,
    train: int | None = None,
    estimate: RooflineStepTime | None = None,
    num_processes: int | None = None,
    progress: Progress | None = None,
) -> Calibration:
    """As `calibrate`, for timings of requests as `read_measurements` returns them."""
    num_train = _num_train(train, len(measured), "requests", MIN_TRAIN, MAX_DEFAULT_TRAIN, source)
    _check_times(measured, source)
    config = _config(measured, settings, source)
    times = Times.of(measured)
    order = np.argsort(times.last_token, kind="stable")
    trained, others = order[:num_train], order[num_train:]
    features = Features(speculation=speculation)
    features.check(config)
    problem = Problem(measured, trained, config, features)
    guess = None if estimate is None else estimate.to_linear(typical_load(problem))
    step_time = search_step_times(problem, estimate=guess, num_processes=num_processes, progress=progress)

    watched = WatchedStepTime(step_time)
    simulate_log(measured, config, watched, awaited=trained, features=features)  # the loads that the fit has seen
    everything = np.arange(len(measured))
    timings = simulate_log(measured, config, step_time, features=features)
    predicted = simulated_times(timings, everything, times.num_output_tokens, float(np.nanmax(timings.last_token)))
    training = RequestErrors.between(predicted[trained], times[trained])
    held_out = RequestErrors.between(predicted[others], times[others])
    profile = Profile(
        step_time=step_time,
        settings=settings,
        hull=watched.hull,
        source=source,
        speculation=speculation,
        kind="requests",
        num_requests=len(measured),
        num_train=num_train,
        training_errors=training.to_dict(),
        held_out_errors=held_out.to_dict(),
        notes=_notes(settings, training, held_out),
    )
    is_training = np.zeros(len(measured), dtype=bool)
    is_training[trained] = True
    return Calibration(profile, training, held_out, is_training, times.e2e, predicted.e2e, times.queued)


def calibrate_steps(log: StepLog, path: str | PathLike[str], *, train: int | None = None) -> Calibration:
    """As `calibrate`, for the steps of the recording in `path`.

    Without `train` the errors are those of a fit to the first half. The profile is then fitted to all steps, because
    loads late in the recording matter as much as early ones.
    """
    num_steps = len(log.seconds)
    num_train = _num_train(train, num_steps, "steps with a time", MIN_STEPS, num_steps, path)
    log, share = _without_adapters(log)
    step_time = fit_steps(log.loads[:num_train], log.seconds[:num_train])
    predicted = predict_steps(step_time, log.loads)
    training = StepErrors.between(predicted[:num_train], log.seconds[:num_train])
    held_out = StepErrors.between(predicted[num_train:], log.seconds[num_train:])
    fitted = slice(num_train if train is not None else num_steps)
    if train is None:
        step_time = fit_steps(log.loads, log.seconds)
    profile = Profile(
        step_time=step_time,
        settings=_recorded_settings(log.config, path),
        hull=Hull.of_loads(log.loads[fitted]),
        source=Path(path).name,
        model=log.model,
        speculation=log.speculation,
        adapter_share=share,
        kind="steps",
        num_requests=max(log.num_requests, 1),
        num_train=num_train,
        training_errors=training.to_dict(),
        held_out_errors=held_out.to_dict(),
        notes=[
            "settings are those of the recording",
            log.about_times,
            *_feature_notes(log, share),
            *_step_notes(held_out, is_all=train is None),
        ],
    )
    numbers = np.arange(num_steps)
    return Calibration(
        profile, training, held_out, numbers < num_train, log.seconds, predicted, numbers.astype(np.float64)
    )


def _without_adapters(log: StepLog) -> tuple[StepLog, float]:
    """The log with the times that its steps would take without adapters, and the share that adapters add to a step."""
    if log.has_adapters is None:
        return log, 0.0
    share = fit_adapter_share(log.loads, log.seconds, log.has_adapters)
    return log._replace(seconds=np.where(log.has_adapters, log.seconds / (1 + share), log.seconds)), share


# ---------------------------------------------------------------------- checks


def _num_train(
    train: int | None, count: int, what: str, minimum: int, maximum: int, source: str | PathLike[str]
) -> int:
    if train is None:
        train = min(count // 2, maximum)
        if train < minimum:
            raise CalibrationError(
                f"{source}: the log has {count} {what}; a fit needs at least {2 * minimum}, half to judge it by: "
                "record more"
            )
        return train
    if train >= count:
        raise CalibrationError(
            f"train is {train}, but the log has {count} {what} and some must remain to judge the fit by: "
            f"use at most {count - MIN_HELD_OUT}"
        )
    if train < minimum:
        raise CalibrationError(f"train is {train}; a fit needs at least {minimum} {what}")
    return train


def _check_times(measured: Sequence[MeasuredRequest], source: str) -> None:
    """Refuse times that no engine can have measured."""
    for each in measured:
        name = each.request_id or f"queued at {each.queued:g} s"
        if not each.ttft > 0:
            raise CalibrationError(
                f"{source}, request {name}: the first token came {each.ttft:g} s after the request was queued; the "
                "time must be more than 0 s: remove the request from the log"
            )
        if each.request.num_output_tokens == 1 and each.last_token > each.first_token:
            raise CalibrationError(
                f"{source}, request {name}: the request has 1 output token, but its last token came "
                f"{each.last_token - each.first_token:g} s after its first; correct the number of output tokens"
            )
    with_gaps = [each for each in measured if each.request.num_output_tokens > 1]
    if with_gaps and all(each.last_token == each.first_token for each in with_gaps):
        raise CalibrationError(
            f"{source}: every request got its first and its last token at one time, so outputs were not streamed; "
            "measure with streaming"
        )


def _config(measured: Sequence[MeasuredRequest], settings: EngineSettings, source: str) -> Any:
    lengths = [each.request.num_prompt_tokens + each.request.num_output_tokens for each in measured]
    longest = max(lengths)
    if settings.max_model_len is not None and longest > settings.max_model_len:
        name = measured[lengths.index(longest)].request_id
        raise CalibrationError(
            f"{source}, request {name}: the request has {longest} tokens, more than max_model_len "
            f"{settings.max_model_len}; give the engine's max_model_len"
        )
    if settings.num_blocks is not None and longest > settings.num_blocks * settings.block_size:
        raise CalibrationError(
            f"{source}: a request has {longest} tokens, but num_blocks {settings.num_blocks} with block_size "
            f"{settings.block_size} hold only {settings.num_blocks * settings.block_size}; give the engine's "
            "num_blocks and block_size"
        )
    try:
        config = settings.config(longest, len(measured))
    except ConfigError as error:
        raise CalibrationError(str(error)) from None
    return config


def _notes(settings: EngineSettings, training: RequestErrors, held_out: RequestErrors) -> list[str]:
    notes = []
    worst = max(training.e2e_mape, held_out.e2e_mape)
    if worst > POOR_FIT:
        notes.append(
            f"the fit misses end-to-end times by {worst:.1%} on average: did the engine have other settings than "
            f"max_num_seqs {settings.max_num_seqs} and max_num_batched_tokens {settings.max_num_batched_tokens}, or "
            "other load beside these requests?"
        )
    if settings.num_blocks is None:
        notes.append("num_blocks was not given: KV blocks are never short in this fit")
    if settings.max_model_len is None:
        notes.append("max_model_len was not given: it is the longest request of the log")
    notes.append("prompts are taken as distinct: nothing is found in a prefix cache")
    return notes


def _feature_notes(log: StepLog, adapter_share: float) -> list[str]:
    notes = []
    if (drafts := log.speculation) is not None:
        shares = ", ".join(f"{each:.2f}" for each in drafts.acceptance)
        notes.append(
            f"drafts are proposed in {drafts.proposal[0]:.0%} of a request's decode steps, and accepted with "
            f"probability {shares} after the drafts before: {drafts.mean_length:.2f} tokens a step; step times include "
            "the drafter"
        )
    if log.has_adapters is not None:
        notes.append(
            f"steps with adapters take {adapter_share:.0%} longer"
            if adapter_share or not log.has_adapters.all()
            else "all steps have adapters, so step times include their time"
        )
    return notes


def _step_notes(held_out: StepErrors, *, is_all: bool) -> list[str]:
    notes = ["errors are those of a fit to the first half; the profile is fitted to all steps"] if is_all else []
    if abs(held_out.total_error) <= POOR_STEPS:
        return notes
    return [
        *notes,
        f"the fit misses the time of all held-out steps together by {held_out.total_error:+.0%}: had they other loads "
        "than the steps before them, or was the machine busy with other work? Record longer, with light load and heavy "
        "load in both halves",
    ]


def _is_recording(path: str | PathLike[str]) -> bool:
    with open_regular(path) as file:
        head = BufferedReader(file).readline(2**20)
    try:
        header = json.loads(head)
    except (ValueError, RecursionError):
        return False
    return isinstance(header, dict) and header.get("format") == RECORDING


def _recorded_settings(config: dict[str, Any], path: str | PathLike[str]) -> EngineSettings:
    try:
        return EngineSettings(
            max_num_seqs=config["max_num_seqs"],
            max_num_batched_tokens=config["max_num_batched_tokens"],
            num_blocks=config["num_blocks"],
            block_size=config["block_size"],
            max_model_len=config["max_model_len"],
            async_scheduling=config.get("max_steps_in_flight", 1) > 1,
            kv_groups=tuple(KVGroup(*group) for group in config.get("kv_groups", ())),
            num_draft_tokens=config.get("num_draft_tokens", 0),
            max_loras=config.get("max_loras", 0),
            prefill_interval=config.get("prefill_interval", 1),
        )
    except (KeyError, TypeError) as error:
        raise CalibrationError(f"{path}, line 1: the recording's config has no {error}; make a new recording") from None
