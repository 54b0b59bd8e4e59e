"""Alternatives: step times that explain a log about as well as a fit, and differ elsewhere as far as that allows.

A server that is always full shows how long full steps take, but not how long a step with one request takes: the same
full step may be mostly weights, which every step reads, or mostly work that each request adds. Fits from different
starts then explain the log equally well and differ by a factor for other loads. This module finds the two ends for a
few loads in question (`Question`): for each, the shortest and the longest step among all step times that

- explain the log (`Cost`), and
- have plausible ratios of coefficients: those of a start of the fit, with the standard deviations of its prior, and
- are not below the floor, if there is one.

Both conditions are one sum, half of whose square root is at most `REACH` standard deviations. The cost is that of fixed
steps (`fixed_steps.py`), so a proposal needs no simulation. Proposals that a simulation of the log contradicts are
drawn nearer to the fit.

SciPy is imported where it is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.sim.bounded import bounded
from pointsman.sim.step_time import LinearStepTime, StepLoad, StepTime

FloatArray = npt.NDArray[np.float64]
Cost = Callable[[LinearStepTime], float]
"""Function that says how badly step times explain a log, in squared standard deviations of the whole log."""
IsGood = Callable[[Sequence[LinearStepTime]], Sequence[bool]]
"""Function that judges proposals by simulations of the log: whether each explains it about as well as the fit."""

REACH = 2.5
"""Number of standard deviations, cost and prior together, that an alternative may use."""
NARROWER = (1.0, 0.65, 0.4, 0.2)
"""Shares of `REACH` that are tried, until a simulation agrees."""
MIN_GAIN = 0.02
"""An alternative is kept if it extends the range of a load in question by at least this share."""
MAX_ALTERNATIVES = 6
"""Maximum number of alternatives: each answer is computed once more for each."""
OPEN = 1.25
"""Longest divided by shortest predicted step from which the log leaves a load open."""
FAR = 6.0
"""Maximum distance of a coefficient from the center of its prior, in standard deviations."""


class Question(NamedTuple):
    """A load whose step time users ask for."""

    name: str
    load: StepLoad


class Range(NamedTuple):
    """The step times of a load that the log allows."""

    question: Question
    low: float
    seconds: float
    """The fit's step time."""
    high: float

    @property
    def is_open(self) -> bool:
        """Whether the log leaves this step time open."""
        return self.high > OPEN * self.low


def logarithms(step_time: LinearStepTime, names: Sequence[str]) -> FloatArray:
    """The logarithms of the coefficients `names`; of `r`, that of r - 1."""
    values: FloatArray = np.log([getattr(step_time, name) - (name == "r") for name in names])
    return values


def with_log_changes(step_time: LinearStepTime, names: Sequence[str], changes: FloatArray) -> LinearStepTime:
    """`step_time` with `changes` added to the logarithms of the coefficients `names`."""
    changed = np.clip(logarithms(step_time, names) + changes, -60, 60)
    values = dict(zip(names, np.exp(changed).tolist(), strict=True))
    if "r" in values:
        values["r"] = 1 + min(values["r"], 50)  # 51 is nearly the maximum of both times; a larger power overflows
    return replace(step_time, **values)


@dataclass(frozen=True, slots=True)
class Prior:
    """Plausible step times: a normal distribution of the logarithms of coefficients."""

    center: LinearStepTime
    spreads: Mapping[str, float]
    """Standard deviation of each coefficient's logarithm; of `r`, that of the logarithm of r - 1. Coefficients that are
    not named are fixed."""

    def at(self, place: FloatArray) -> LinearStepTime:
        """The step times at `place`, in standard deviations from the center."""
        names = list(self.spreads)
        return with_log_changes(self.center, names, place * np.array(list(self.spreads.values())))


class _Family:
    """The step times of one prior, and how well they explain the log."""

    def __init__(self, prior: Prior, cost: Cost) -> None:
        self._prior, self._cost = prior, cost
        self._size = len(prior.spreads)
        self.nearest, self.lowest = self._find_nearest()

    def at(self, place: FloatArray) -> LinearStepTime:
        return self._prior.at(place)

    def deviation(self, place: FloatArray) -> float:
        """Half of the squared deviation from the log and from the prior, in standard deviations."""
        return self._cost(self.at(place)) / 2 + float(place @ place) / 2

    def _find_nearest(self) -> tuple[FloatArray, float]:
        from scipy.optimize import minimize

        bounds = [(-FAR, FAR)] * self._size
        found: Any = minimize(self.deviation, np.zeros(self._size), method="L-BFGS-B", bounds=bounds)
        return found.x, float(found.fun)

    def extreme(self, load: StepLoad, sign: int, limit: float, floor: StepTime | None) -> FloatArray:
        """The place with the shortest (`sign` 1) or longest (-1) step of this load whose deviation is at most
        `limit`."""
        from scipy.optimize import minimize

        found: Any = minimize(
            lambda place: sign * math.log(bounded(self.at(place), floor).of_step(load)),
            self.nearest,
            method="SLSQP",
            bounds=[(-FAR, FAR)] * self._size,
            constraints={"type": "ineq", "fun": lambda place: limit - self.deviation(place)},
            options={"maxiter": 40, "ftol": 1e-4},
        )
        place: FloatArray = found.x
        while self.deviation(place) > 1.05 * limit and np.abs(place - self.nearest).max() > 0.01:
            place = 0.8 * place + 0.2 * self.nearest  # the search may end outside the limit
        return place


def find_alternatives(
    fit: LinearStepTime,
    questions: Sequence[Question],
    priors: Sequence[Prior],
    cost: Cost,
    *,
    floor: StepTime | None = None,
    are_good: IsGood | None = None,
) -> tuple[LinearStepTime, ...]:
    """Step times that explain a log about as well as `fit`, and span what the log leaves open.

    Args:
        fit: the step times that explain the log best.
        questions: the loads in question, the most important first.
        priors: what is plausible: each is one form of step times.
        cost: how badly step times explain the log.
        floor: the shortest possible step times; None: not known.
        are_good: judges proposals; None: `cost` is enough.

    Returns:
        At most `MAX_ALTERNATIVES` step times, without `fit` itself.
    """
    families = [_Family(prior, cost) for prior in priors]
    lowest = min(family.lowest for family in families)
    asked = [(question, sign) for question in questions for sign in (1, -1)]
    found: dict[tuple[Question, int], LinearStepTime] = {}
    for share in NARROWER:
        limit = lowest + (REACH * share) ** 2 / 2
        near = [family for family in families if family.lowest < limit]
        proposals = []
        for question, sign in asked:
            candidates = [family.at(family.extreme(question.load, sign, limit, floor)) for family in near]
            seconds = [sign * bounded(each, floor).of_step(question.load) for each in candidates]
            proposals.append(candidates[int(np.argmin(seconds))])
        verdicts = [True] * len(proposals) if are_good is None else are_good(proposals)
        found |= {key: each for key, each, is_good in zip(asked, proposals, verdicts, strict=True) if is_good}
        asked = [key for key in asked if key not in found]
        if not asked:
            break
    in_order = [(*key, found[key]) for question in questions for key in ((question, 1), (question, -1)) if key in found]
    return _spanning(fit, in_order, floor)


def _spanning(
    fit: LinearStepTime, found: Sequence[tuple[Question, int, LinearStepTime]], floor: StepTime | None
) -> tuple[LinearStepTime, ...]:
    """Those of `found` that extend the ranges of the ones before them."""
    kept: list[LinearStepTime] = []
    for question, sign, proposal in found:
        known = [bounded(each, floor).of_step(question.load) for each in (fit, *kept)]
        seconds = bounded(proposal, floor).of_step(question.load)
        is_further = seconds < min(known) * (1 - MIN_GAIN) if sign > 0 else seconds > max(known) * (1 + MIN_GAIN)
        if is_further and len(kept) < MAX_ALTERNATIVES:
            kept.append(proposal)
    return tuple(kept)


def ranges(
    fit: LinearStepTime,
    alternatives: Sequence[LinearStepTime],
    questions: Sequence[Question],
    floor: StepTime | None = None,
) -> list[Range]:
    """The range of each load in question over the fit and its alternatives."""
    found = []
    for question in questions:
        seconds = [bounded(each, floor).of_step(question.load) for each in (fit, *alternatives)]
        found.append(Range(question, min(seconds), seconds[0], max(seconds)))
    return found
