"""Step logs: fits step times to the load and the seconds of each step in a log.

The log is a recording of a host that measures its steps (`StepResult.step_time`; the bundled engine does), or an
observed recording of vLLM. A host measures the time of the device. If there were unfinished requests until the next
step was scheduled, the time from one `schedule` to the next is also known. This time includes the host's work in
between; for a request it is the duration of a step. Seconds are linear in a step's load, so non-negative least squares
over relative errors fits them directly.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from io import BufferedReader
from os import PathLike
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.recording import NUM_ADAPTERS
from pointsman.files import MAX_MESSAGE, open_regular, shown
from pointsman.sim.accuracy import StepErrors
from pointsman.sim.errors import CalibrationError
from pointsman.sim.speculation import MAX_DRAFTS, Speculation, measured_speculation
from pointsman.sim.step_time import ATTENDED, LinearStepTime, StepLoad
from pointsman.traces import MAX_TOKENS, Observed, read_observed
from pointsman.traces.lines import numbered_lines
from pointsman.traces.values import Broken, check_number, parse_json_object

_TO_NEXT = "step times include what the host does between steps"
_DEVICE_ONLY = "times between steps are not in step times: the recording has no two steps in a row"
_WHOLE = "a step lasts from the end of the step before it to its own end, the engine's other work included"

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

COEFFICIENTS = ("per_step", "per_row", "per_token", "per_context_token", "per_attended", "per_sample", "per_prefill")
MAX_HOST = 2.0
"""If the next `schedule` comes later than this multiple of a step's time, the host is assumed to have waited for
something else, and the interval is not used."""
MIN_STEPS = 20
"""Minimum number of steps: fewer steps cannot determine seven coefficients and also judge the fit."""
ATTENDED_SPREAD = 10.0
"""Standard deviation of the prior of `per_attended`, in multiples of the prior's mean, `ATTENDED * per_token`."""
NUM_REWEIGHTED, OUTLIER = 4, 10.0
"""Number of rounds of a fit after the first round, and the multiple of its fitted time from which a step is an
outlier."""


class StepLog(NamedTuple):
    """The measured steps of a recording, in order."""

    loads: FloatArray
    """Loads of the steps, [steps, fields of `StepLoad`]."""
    seconds: FloatArray
    """Seconds of each step: from its `schedule` to the next one, if the host was busy; otherwise the measured time plus
    the median difference between such intervals and the measured times."""
    config: dict[str, Any]
    """The configuration of the scheduler."""
    num_requests: int
    about_times: str
    """Text about what the step times include."""
    model: str = ""
    """Name of the model, as `vllm serve` takes it; empty: the recording does not name the model."""
    speculation: Speculation | None = None
    """Drafts, with the acceptance that the recording shows; None: there were none."""
    has_adapters: BoolArray | None = None
    """[steps] whether the step had a request with an adapter; None: not recorded, or the engine had no adapters."""


def read_steps(path: str | PathLike[str]) -> StepLog:
    """The steps of a recording that have a time and computed a token.

    Raises:
        CalibrationError: a line is broken, or no step has a time.
        OSError: the file cannot be read.
    """

    loads: list[StepLoad] = []
    seconds: list[float] = []
    begins: list[tuple[int, float]] = []  # number and scheduling time of the steps in `seconds`
    planned: dict[int, tuple[StepLoad, float, list[tuple[int, int]]]] = {}
    drafts: Counter[tuple[int, int]] = Counter()  # decode steps of requests by (verified, accepted) drafts
    to_next: dict[int, float] = {}
    last: int | None = None  # the newest scheduled step, if there were always unfinished requests since
    unfinished: set[str] = set()
    config: dict[str, Any] = {}
    num_requests = num_untimed = 0
    with open_regular(path) as opened:
        lines = numbered_lines(BufferedReader(opened), of_recording=True)
        is_first = True
        for line_number, line in _name_path_in_errors(lines, path):
            try:
                call = parse_json_object(line)
                if is_first:
                    if "observed" in call:
                        return observed_steps(read_observed(path), path)
                    config, is_first = dict(call["config"]), False
                    continue
                name = call["call"]
                if name == "add":
                    num_requests += 1
                    unfinished.add(call["request"]["request_id"])
                elif name == "finish":
                    unfinished.discard(call["id"])
                elif name == "schedule":
                    load, now = _step_load(call["decision"]), check_number("now", call["now"])
                    if last is not None:
                        to_next[last] = now
                    planned[call["step"]] = load, now, _drafts_of_decodes(call["decision"])
                    last = call["step"] if load.num_rows else None
                elif name == "fail":
                    planned.pop(call["step"], None)
                    last = None
                elif name == "update":
                    unfinished.difference_update(each[0] for each in call["decision"]["finished"])
                    if not unfinished:
                        last = None
                    (load, begin, decodes), taken = planned.pop(call["step"]), call["step_time"]
                    for place, verified in decodes:
                        accepted = 0 if call["counts"] is None else max(0, call["counts"][place] - 1)
                        drafts[verified, min(accepted, verified)] += 1
                    if load.num_rows and taken is not None:
                        if check_number("step_time", taken) <= 0:
                            raise ValueError(f"step_time is {taken}; it must be more than 0 seconds")
                        loads.append(load)
                        seconds.append(float(taken))
                        begins.append((call["step"], begin))
                    elif load.num_rows:
                        num_untimed += 1
            except (Broken, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
                what = shown(f"{type(error).__name__}: {error}", MAX_MESSAGE)
                raise CalibrationError(
                    f"{path}, line {line_number}: not a recorded call of the scheduler ({what})"
                ) from None
    if not seconds:
        raise CalibrationError(
            f"{path}: none of its {num_untimed} steps has a step_time; record with a host that sets "
            "StepResult.step_time, as pointsman generate --record does, or calibrate with the timings of requests "
            "(vllm bench serve --save-result --save-detailed)"
        )
    device = np.array(seconds)
    cycles = np.array([to_next.get(step, math.nan) - begin for step, begin in begins])
    has_host = (cycles >= device) & (cycles <= MAX_HOST * device)
    rest = float(np.median((cycles - device)[has_host])) if has_host.any() else 0.0
    return StepLog(
        np.array(loads, dtype=np.float64),
        np.where(has_host, cycles, device + rest),
        config,
        num_requests,
        _TO_NEXT if has_host.any() else _DEVICE_ONLY,
        speculation=_speculation(config, ((*pair, steps) for pair, steps in drafts.items())),
    )


def _name_path_in_errors(lines: Iterator[tuple[int, str]], path: str | PathLike[str]) -> Iterator[tuple[int, str]]:
    try:
        yield from lines
    except Broken as error:
        raise CalibrationError(f"{path}, {error}") from None


def observed_steps(observed: Observed, path: str | PathLike[str]) -> StepLog:
    """The steps of an observed recording. A step lasts from the end of the step before it to its own end.

    Raises:
        CalibrationError: the simulator lacks an observed feature, or there is no step.
    """
    if observed.lacking:
        raise CalibrationError(
            f"{path}: {observed.scheduler} ran with {', '.join(observed.lacking)}, which the simulator does not "
            "support; record a server without these features"
        )
    is_timed = observed.seconds > 0
    if not is_timed.any():
        raise CalibrationError(f"{path}: the recording has no steps; send requests to the server while it is recorded")
    columns = [observed.steps[name] for name in StepLoad._fields]
    loads = np.stack(columns, axis=1).astype(np.float64)[is_timed]
    adapters = observed.steps.get(NUM_ADAPTERS)
    return StepLog(
        loads,
        observed.seconds[is_timed],
        observed.config,
        len(observed.requests),
        _WHOLE,
        observed.model,
        observed_speculation(observed),
        None if adapters is None else adapters[is_timed] > 0,
    )


def observed_speculation(observed: Observed) -> Speculation | None:
    """The drafts of an observed run; None: it had none.

    Raises:
        CalibrationError: the number of drafts in the configuration is impossible.
    """
    return _speculation(observed.config, (each for request in observed.requests for each in request.drafts))


def _speculation(config: dict[str, Any], counts: Iterable[tuple[int, int, int]]) -> Speculation | None:
    """The drafts of an engine with this configuration; None: it had none. `counts`: see `measured_speculation`."""
    most = config.get("num_draft_tokens", 0)
    if not isinstance(most, int) or not 0 <= most <= MAX_DRAFTS:
        raise CalibrationError(f"num_draft_tokens is {most!r}; it must be a whole number from 0 to {MAX_DRAFTS}")
    return measured_speculation(counts, most) if most else None


def _drafts_of_decodes(decision: dict[str, Any]) -> list[tuple[int, int]]:
    """(row index, number of drafts) of each row that decodes and was in the batch before, so could have drafts."""
    columns = zip(decision["num_scheduled_tokens"], decision["num_draft_tokens"], decision["samples"], strict=True)
    rows = list(enumerate(columns))[: decision["num_continued"]]
    return [(place, drafts) for place, (tokens, drafts, samples) in rows if samples and tokens == drafts + 1]


def _step_load(decision: dict[str, Any]) -> StepLoad:
    rows = list(zip(decision["num_computed_tokens"], decision["num_scheduled_tokens"], strict=True))
    for before, new in rows:
        if not (isinstance(before, int) and isinstance(new, int) and 0 <= before <= MAX_TOKENS and new > 0):
            raise ValueError(f"a row has {new!r} scheduled and {before!r} computed tokens; both must be whole numbers")
    num_drafts = decision["num_draft_tokens"]
    if not all(isinstance(each, int) and 0 <= each <= MAX_TOKENS for each in num_drafts):
        raise ValueError(f"num_draft_tokens is {num_drafts!r}; it must be a list of whole numbers")
    return StepLoad.of_rows(rows, sum(map(bool, decision["samples"])) + sum(num_drafts))


def fit_steps(loads: FloatArray, seconds: FloatArray) -> LinearStepTime:
    """The step times with the smallest relative squared errors among those whose coefficients are not negative.

    Errors are relative to the fit of the round before, in the first round to the measured times. If errors were
    relative to measured times alone, the fit to scattered times would be too short on average. Steps `OUTLIER` times as
    long as that fit (compilation, a stalled process) are then left out.

    Attention grows with the square of a prompt. Short prompts do not show the time for attention, and their scatter
    would be multiplied for long prompts. A prior of `per_attended`, with the weight of one step, determines this
    coefficient where the steps do not.

    Args:
        loads: loads of the steps, [steps, fields of `StepLoad`].
        seconds: measured seconds of each step.
    """
    columns = _coefficient_columns(loads)
    found = _weighted_fit(columns, seconds, seconds)
    for _ in range(NUM_REWEIGHTED):
        expected = columns @ found
        usual = (expected > 0) & (seconds < OUTLIER * expected)
        if np.count_nonzero(usual) < MIN_STEPS:
            break
        found = _weighted_fit(columns[usual], seconds[usual], expected[usual])
    return LinearStepTime(**dict(zip(COEFFICIENTS, found.tolist(), strict=True)))


def _weighted_fit(columns: FloatArray, seconds: FloatArray, scale: FloatArray) -> FloatArray:
    """The seven non-negative coefficients that minimise the squared errors, each divided by `scale`, plus the squared
    deviation from the prior."""
    weighted, measured = columns / scale[:, None], seconds / scale
    token, attended = COEFFICIENTS.index("per_token"), COEFFICIENTS.index("per_attended")
    found = _least_squares(weighted, measured)
    tied = weighted.copy()
    tied[:, token] += ATTENDED * weighted[:, attended]
    tied[:, attended] = 0.0
    expected = ATTENDED * _least_squares(tied, measured)[token]
    if expected == 0:
        return found
    error = math.sqrt(np.mean((weighted @ found - measured) ** 2))
    prior = np.zeros(len(COEFFICIENTS))
    prior[attended] = error / (ATTENDED_SPREAD * expected)
    return _least_squares(np.vstack([weighted, prior]), np.append(measured, error / ATTENDED_SPREAD))


def _least_squares(columns: FloatArray, values: FloatArray) -> FloatArray:
    """The non-negative coefficients of the columns with the smallest squared errors."""
    from scipy.optimize import nnls

    sizes = np.linalg.norm(columns, axis=0)
    sizes[sizes == 0] = 1.0
    found, _ = nnls(columns / sizes, values)
    coefficients: FloatArray = found / sizes
    return coefficients


def fit_adapter_share(loads: FloatArray, seconds: FloatArray, has_adapters: BoolArray) -> float:
    """The share by which steps with adapters take longer than equal steps without. 0 if steps of either kind are too
    few to show it; the time of adapters is then part of the step times."""
    if min(np.count_nonzero(has_adapters), np.count_nonzero(~has_adapters)) < MIN_STEPS:
        return 0.0
    plain = predict_steps(fit_steps(loads[~has_adapters], seconds[~has_adapters]), loads[has_adapters])
    usual = seconds[has_adapters] < OUTLIER * plain
    return max(0.0, float(seconds[has_adapters][usual].sum() / plain[usual].sum()) - 1)


def predict_steps(step_time: LinearStepTime, loads: FloatArray) -> FloatArray:
    """Predicted seconds of each step."""
    return np.array([step_time.of_step(StepLoad(*map(int, load))) for load in loads])


def step_errors(step_time: LinearStepTime, loads: FloatArray, seconds: FloatArray) -> StepErrors:
    """The errors of the predicted step times, relative to `seconds`."""
    return StepErrors.between(predict_steps(step_time, loads), seconds)


def _coefficient_columns(loads: FloatArray) -> FloatArray:
    """The factor of each coefficient in each step's seconds, [steps, 7 coefficients]."""
    tokens, rows, context, attended, samples = loads.T
    return np.stack(
        [np.ones(len(loads)), rows, tokens, context, attended, samples, tokens > np.maximum(rows, samples)], axis=1
    )
