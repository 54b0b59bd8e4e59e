"""Step times from a log of steps: what each computed, and how many seconds it took.

The log is a recording of a host that measures its steps (`StepResult.step_time`; the bundled engine does). That is the
time of the device. Where the next step was scheduled while requests were there, the time from one `schedule` to the
next is known too: it has what the host does in between, and is what a step takes from the view of a request. Seconds
are linear in a step's load, so they are fitted at once, by non-negative least squares over relative errors.
"""

from __future__ import annotations

import json
import math
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.sim.accuracy import StepErrors
from pointsman.sim.errors import CalibrationError
from pointsman.sim.step_time import LinearStepTime, StepLoad
from pointsman.traces import MAX_TOKENS

FloatArray = npt.NDArray[np.float64]

COEFFICIENTS = ("per_step", "per_row", "per_token", "per_context_token", "per_attended", "per_sample")
REWEIGHTINGS = 4
"""Fits, each relative to the one before."""
MOST_HOST = 2.0
"""A host that takes this multiple of a step's time from its `schedule` to the next one waited for something else."""
MIN_STEPS = 20
"""Fewer do not determine six coefficients and leave some to judge them by."""


class StepLog(NamedTuple):
    """The measured steps of a recording, in order."""

    loads: FloatArray
    """[steps, 5]: the fields of `StepLoad`."""
    seconds: FloatArray
    """[steps] from its `schedule` to the next one, where the host was busy; otherwise what it measured, and the usual
    difference."""
    has_host: bool
    """Whether any of them is from one `schedule` to the next."""
    config: dict[str, Any]
    """Of the scheduler."""
    num_requests: int


def read_steps(path: str | PathLike[str]) -> StepLog:
    """The steps of a recording that have a time and computed something.

    Raises:
        CalibrationError: a line is broken, or no step has a time.
        OSError: the file cannot be read.
    """

    loads: list[StepLoad] = []
    seconds: list[float] = []
    begins: list[tuple[int, float]] = []  # of the same steps: number, and when it was scheduled
    planned: dict[int, tuple[StepLoad, float]] = {}
    to_next: dict[int, float] = {}
    last: int | None = None  # the step that was scheduled last, if there was work ever since
    unfinished: set[str] = set()
    config: dict[str, Any] = {}
    num_requests = num_untimed = 0
    with Path(path).open(encoding="utf-8") as lines:
        for line_number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                call = json.loads(line)
                if line_number == 1:
                    config = dict(call["config"])
                    continue
                name = call["call"]
                if name == "add":
                    num_requests += 1
                    unfinished.add(call["request"]["request_id"])
                elif name == "finish":
                    unfinished.discard(call["id"])
                elif name == "schedule":
                    load, now = _load(call["decision"]), float(call["now"])
                    if last is not None:
                        to_next[last] = now
                    planned[call["step"]] = load, now
                    last = call["step"] if load.num_rows else None
                elif name == "fail":
                    planned.pop(call["step"], None)
                    last = None
                elif name == "update":
                    unfinished.difference_update(each[0] for each in call["decision"]["finished"])
                    if not unfinished:
                        last = None
                    (load, begin), taken = planned.pop(call["step"]), call["step_time"]
                    if load.num_rows and taken is not None:
                        if not 0 < float(taken) < float("inf"):
                            raise ValueError(f"step_time is {taken}; it must be more than 0 seconds")
                        loads.append(load)
                        seconds.append(float(taken))
                        begins.append((call["step"], begin))
                    elif load.num_rows:
                        num_untimed += 1
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                what = f"{type(error).__name__}: {error}"
                raise CalibrationError(f"{path}, line {line_number}: no call of a recording ({what})") from None
    if not seconds:
        raise CalibrationError(
            f"{path}: none of its {num_untimed} steps has a step_time; record with a host that sets "
            "StepResult.step_time, as pointsman generate --record does, or calibrate with the timings of requests "
            "(vllm bench serve --save-result --save-detailed)"
        )
    device = np.array(seconds)
    cycles = np.array([to_next.get(step, math.nan) - begin for step, begin in begins])
    has_host = (cycles >= device) & (cycles <= MOST_HOST * device)
    rest = float(np.median((cycles - device)[has_host])) if has_host.any() else 0.0
    return StepLog(
        np.array(loads, dtype=np.float64),
        np.where(has_host, cycles, device + rest),
        bool(has_host.any()),
        config,
        num_requests,
    )


def _load(decision: dict[str, Any]) -> StepLoad:
    rows = list(zip(decision["num_computed_tokens"], decision["num_scheduled_tokens"], strict=True))
    for before, new in rows:
        if not (isinstance(before, int) and isinstance(new, int) and 0 <= before <= MAX_TOKENS and new > 0):
            raise ValueError(f"a row computes {new!r} tokens after {before!r}; both must be numbers of tokens")
    return StepLoad.of_rows(rows, sum(map(bool, decision["samples"])))


def fit_steps(loads: FloatArray, seconds: FloatArray) -> LinearStepTime:
    """The step times with the smallest relative squared errors among those whose coefficients are not negative.

    Args:
        loads: [steps, 5] the fields of `StepLoad`.
        seconds: [steps] what was measured.
    """
    from scipy.optimize import nnls

    columns = _columns(loads)
    # Relative to what was measured, a step that took long by chance would count less than one that did not, and the
    # fit would be too short. Relative to the fit itself the two count the same.
    scale = seconds
    for _ in range(REWEIGHTINGS):
        weighted = columns / scale[:, None]
        sizes = np.linalg.norm(weighted, axis=0)
        sizes[sizes == 0] = 1.0
        found, _ = nnls(weighted / sizes, seconds / scale)
        found /= sizes
        scale = np.maximum(columns @ found, 1e-3 * seconds)
    return LinearStepTime(**dict(zip(COEFFICIENTS, found.tolist(), strict=True)))


def predict_steps(step_time: LinearStepTime, loads: FloatArray) -> FloatArray:
    """[steps] seconds."""
    return np.array([step_time.of_step(StepLoad(*map(int, load))) for load in loads])


def step_errors(step_time: LinearStepTime, loads: FloatArray, seconds: FloatArray) -> StepErrors:
    """The errors over these steps."""
    return StepErrors.between(predict_steps(step_time, loads), seconds)


def _columns(loads: FloatArray) -> FloatArray:
    """[steps, 6] what each coefficient is multiplied with."""
    tokens, rows, context, attended, samples = loads.T
    return np.stack([np.ones(len(loads)), rows, tokens, context, attended, samples], axis=1)
