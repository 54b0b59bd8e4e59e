"""Predicts the time of a step, learned from observed steps, for policies that decide by step time."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import StepLoad

FloatArray = npt.NDArray[np.float64]

FIRST_CHUNK = 256
"""Maximum number of prompt tokens in a step while no step with prompt tokens was observed."""
GROWTH = 2
"""Times are predicted up to this multiple of the observed maximum of prompt tokens in a step, of requests, and of
context tokens."""
NUM_GROUPS, GROUP = 64, 16
"""Number of remembered groups of consecutive decode steps, and maximum number of steps in a group. Only the means of a
group are kept, so that noise averages out, and a second of decode does not replace all observations of other loads."""
NUM_CLASSES, PER_CLASS = 8, 16
"""Number of classes of remembered steps with prompt tokens, and number of steps in a class. A class is a range of the
mean context of the prompt tokens: below 512, 512 to 1023, 1024 to 2047, and so on. So the steps of a rare long prompt
are not replaced by those of short prompts. Steps near the limit have classes of their own."""
NEAR = 0.75
"""Minimum time of a step that is "near the limit", as a share of `StepTimes.limit`. Shorter steps say nothing about the
errors of predictions for steps that are filled up to the limit. They also predict the time of such steps poorly, since
reading weights and computing overlap. Once `MIN_FITTED` steps near the limit are known, other steps hardly count.
Before that, each step near the limit, and the step with the most prompt tokens, has the weight of `MIN_FITTED` other
steps, and is never an outlier."""
MIN_MARGIN = -0.1
"""Minimum margin that is applied to the target; it is negative, as steps may be shorter than predicted."""
RECENT, RECENT_GROUPS, MEMORY = 32, 8, 0.05
"""Number of recent steps, number of recent groups, and the weight of older steps and groups in a fit. Older
observations, when the device may have been faster, count only where nothing newer is known."""
SHIFT, SHIFT_STEPS = 0.2, 8
"""The speed of the device has changed if the relative errors of `SHIFT_STEPS` steps in a row all exceed `SHIFT`, with
the same sign."""
NUM_ERRORS, MIN_ERRORS = 64, 8
"""Maximum and minimum number of recent prediction errors from which the margin is computed."""
FIRST_MARGIN, MARGIN_FALLS = 0.1, 0.02
"""The margin while fewer than `MIN_ERRORS` errors are known, and the maximum decrease of the margin in a fit. Increases
have no maximum."""
REFIT_AFTER, REFIT_AT_LATEST = 4, 16
"""Number of observations between two fits: `REFIT_AFTER` if an error exceeded `OFF` and `OFF_DEVIATIONS` standard
deviations, otherwise `REFIT_AT_LATEST`. Until `MIN_FITTED` steps with prompt tokens were observed, there is a fit after
each of them."""
OFF, OFF_DEVIATIONS = 0.02, 3.0
MIN_FITTED = 16
RIDGE, SHARE_RIDGE = 1e-3, 1e-2
"""Ridge of each coefficient, relative to the weight of an observation. A constant load does not separate the
coefficients; the ridge divides the step time evenly among them. `SHARE_RIDGE` is for the share of decode
(`StepTimes.share`), which is 1 unless observations say otherwise: if every step is filled up to the target step time,
all step times are equal, and the observations fit almost any share."""
POSITION_SCALE = 4096
"""Number of positions to which a token attends in at most the time of its other work, unless observed steps with longer
contexts say otherwise."""
OUTLIER, MIN_OUTLIER = 4.0, 0.02
"""A fit leaves out an observation whose relative error exceeds `OUTLIER` standard deviations, and `MIN_OUTLIER`."""
MEAN_STEPS = 512
"""Time constant, in steps, of the exponential mean of the number of prompt tokens in a step."""
LONE, UNREACHABLE = 2, 1.5
"""A target below `UNREACHABLE` times the decode time of at most `LONE` requests cannot be kept by deferring requests.
This multiple of the decode time replaces such a target."""
PERCENTILE_99 = 2.326
"""The 99th percentile of the normal distribution, in standard deviations above the mean."""
MAD_TO_DEVIATION = 1.4826
"""Ratio of standard deviation to median absolute deviation in a normal distribution. An outlier does not change the
median absolute deviation."""


class StepTimes:
    """A model of the time of a step, fitted to observed steps.

    Decode alone: base + per_request * requests + per_context * context tokens. A step with prompt tokens: share * the
    time of decode alone + per_token * prompt tokens + per_attended * positions that the prompt tokens attend to (the
    product of prompt tokens and context). The share is below 1 where reading weights and computing overlap. No
    coefficient is negative.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self.margin = FIRST_MARGIN
        """The 99th percentile of the relative error of predictions, computed from a normal distribution with the median
        and the median absolute deviation of recent errors, so that a single slow step has no effect."""
        self.max_predicted_tokens = FIRST_CHUNK
        """Maximum number of prompt tokens for which the time of a step is predicted."""
        self._decode = (0.0, 0.0, 0.0)
        self._min_target = 0.0
        self._max_requests = self._max_context = 0.0
        self._mixed = (0.0, 0.0, 0.0)
        self._groups: deque[tuple[float, float, float]] = deque(maxlen=NUM_GROUPS)  # requests, context, seconds
        # A column for each step: number of the step, requests, context, prompt tokens, positions that these attend to,
        # seconds. An empty column has zeros. The second half of the columns is for steps near the limit.
        self._steps = np.zeros((6, 2 * NUM_CLASSES * PER_CLASS))
        self._class_sizes = [0] * (2 * NUM_CLASSES)
        self._near: deque[int] = deque(maxlen=RECENT)  # numbers of the latest steps near the limit
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._judged: deque[int] = deque(maxlen=SHIFT_STEPS)  # numbers of the steps of the latest errors
        self.mean_tokens = 0.0
        """Exponential mean of the number of prompt tokens in a step, steps without prompt tokens included."""
        self._num_new = self._num_new_groups = 0
        self._is_off = False
        self._deviation = 0.0
        self.num_mixed = 0
        """Number of observed steps with prompt tokens."""
        self._group_requests = self._group_size = self._group_context = 0
        self._group_seconds = self._group_slowest = 0.0

    # ------------------------------------------------------------------ learning

    def observe(self, load: StepLoad, seconds: float) -> None:
        """Learn from the time of a step."""
        if seconds <= 0:
            return
        num_requests = load.num_requests
        self.mean_tokens += (load.num_prefill_tokens - self.mean_tokens) / MEAN_STEPS
        if load.num_prefill_tokens:
            self._observe_mixed(load, seconds)
            return
        size = self._group_size
        if num_requests != self._group_requests or size == GROUP:
            self._close_group()
            self._group_requests = num_requests
            size = 0
        self._group_size = size + 1
        self._group_context += load.num_context_tokens
        self._group_seconds += seconds
        if num_requests > self._max_requests:  # more requests than are predicted: fit before the next step
            self._num_new_groups = REFIT_AT_LATEST
        if seconds > self._group_slowest:
            self._group_slowest = seconds

    def _observe_mixed(self, load: StepLoad, seconds: float) -> None:
        _, num_requests, num_context, num_tokens, num_attended = load
        num_attended -= num_context
        share, per_token, per_attended = self._mixed
        alone = self.decode_seconds(num_requests, num_context)
        predicted = share * alone + per_token * num_tokens + per_attended * num_attended
        index = min((num_attended // num_tokens >> 9).bit_length(), NUM_CLASSES - 1)
        number = self.num_mixed
        if seconds > max(self._target, self._min_target):  # over the target: fit before the next step
            self._num_new = REFIT_AT_LATEST
        near = NEAR * self.limit
        if predicted > near:
            error = seconds / predicted - 1
            self._errors.append(error)
            self._judged.append(number)
            if not -OFF < error < OFF:
                self._is_off |= abs(error) > OFF_DEVIATIONS * self._deviation
                if abs(error) > SHIFT and len(self._errors) >= SHIFT_STEPS:
                    self._follow_shift()
        if predicted > near or seconds > near:
            index += NUM_CLASSES
            self._near.append(number)
            self._num_new += 1
        elif len(self._near) < MIN_FITTED:
            self._num_new += 1
        size = self._class_sizes[index]
        self._class_sizes[index] = size + 1
        slot = index * PER_CLASS + size % PER_CLASS
        self._steps[:, slot] = number, num_requests, num_context, num_tokens, num_attended, seconds
        self.num_mixed = number + 1
        if GROWTH * num_tokens > self.max_predicted_tokens:
            self.max_predicted_tokens = GROWTH * num_tokens
            self._num_new = REFIT_AT_LATEST

    def _follow_shift(self) -> None:
        """If the speed of the device has changed, scale all earlier observations to the new speed."""
        newest = [self._errors[-number] for number in range(1, SHIFT_STEPS + 1)]
        if not (min(newest) > SHIFT or max(newest) < -SHIFT):
            return
        factor = 1 + _median_and_deviation(newest)[0]
        self._steps[5, self._steps[0] < self._judged[-SHIFT_STEPS]] *= factor
        for index, (requests, context, seconds) in enumerate(self._groups):
            self._groups[index] = requests, context, factor * seconds
        self._min_target *= factor
        self._errors.clear()
        self._num_new_groups = REFIT_AT_LATEST

    def _close_group(self) -> None:
        if self._group_size:
            requests, context, seconds = group = self._mean_of_group()
            self._groups.append(group)
            predicted = self.decode_seconds(requests, context)
            is_beyond = GROWTH * requests > self._max_requests or GROWTH * context > self._max_context
            if is_beyond or abs(seconds - predicted) > OFF * predicted:
                self._num_new_groups = REFIT_AT_LATEST
            self._num_new_groups += 1
        self._group_size = self._group_context = 0
        self._group_seconds = self._group_slowest = 0.0

    def _mean_of_group(self) -> tuple[float, float, float]:
        """Mean requests, context tokens and seconds of the open group. The mean of the seconds excludes the slowest
        step if the group has more than 3 steps."""
        size, seconds = self._group_size, self._group_seconds
        mean = (seconds - self._group_slowest) / (size - 1) if size > 3 else seconds / size
        return self._group_requests, self._group_context / size, mean

    def refit(self) -> None:
        """Fit the coefficients if there are enough new or unexpected observations."""
        if self._num_new_groups >= REFIT_AT_LATEST or (self._group_size and not self._max_requests):
            self._fit_decode()
            self._fit_mixed()
        elif self._num_new and (
            self._num_new >= (REFIT_AFTER if self._is_off else REFIT_AT_LATEST) or self.num_mixed <= MIN_FITTED
        ):
            self._fit_mixed()

    def _fit_decode(self) -> None:
        self._num_new_groups = 0
        groups = [*self._groups, self._mean_of_group()] if self._group_size else list(self._groups)
        if not groups:
            return
        known = np.array(groups).T
        if len(lone := known[2, known[0] <= LONE]):
            self._min_target = UNREACHABLE * lone.item(-1)
        self._max_requests, self._max_context, _ = (GROWTH * known.max(axis=1)).tolist()
        weights = np.where(np.arange(len(groups)) >= len(groups) - RECENT_GROUPS, 1.0, MEMORY)
        columns = np.stack((np.ones(len(groups)), known[0], known[1]))
        self._decode = _fit_coefficients(columns, known[2], weights, (0.0, 0.0, 0.0))

    def _fit_mixed(self) -> None:
        if self.num_mixed:
            knows_near = len(self._near) >= MIN_FITTED
            taken = self._steps[5].nonzero()[0]
            is_near = taken >= NUM_CLASSES * PER_CLASS
            number, requests, context, tokens, attended, seconds = self._steps[:, taken]
            base, per_request, per_context = self._decode
            requests, context = np.minimum(requests, self._max_requests), np.minimum(context, self._max_context)
            alone = base + per_request * requests + per_context * context
            recent = number >= (self._near[0] if knows_near else self.num_mixed - RECENT)
            columns = np.stack((alone, tokens, attended / POSITION_SCALE))
            weights = np.where(recent, 1.0, MEMORY)
            if knows_near:
                weights[~is_near] = MEMORY * MEMORY
            else:
                weights = np.maximum(weights, MIN_FITTED * tokens / tokens.max())
                weights[is_near] = MIN_FITTED
            share, per_token, per_attended = _fit_coefficients(
                columns, seconds, weights, (1.0, 0.0, 0.0), is_mixed=True
            )
            self._mixed = share, per_token, per_attended / POSITION_SCALE
            self.max_predicted_tokens = GROWTH * int(tokens.max())
        if len(self._errors) >= MIN_ERRORS:
            middle, self._deviation = _median_and_deviation(list(self._errors))
            self.margin = max(middle + PERCENTILE_99 * self._deviation, self.margin - MARGIN_FALLS)
        self._num_new, self._is_off = 0, False

    # ------------------------------------------------------------------ prediction

    @property
    def limit(self) -> float:
        """The maximum predicted time of a step with which the 99th percentile of its real time is at most the
        target."""
        return max(self._target, self._min_target) / (1 + max(self.margin, MIN_MARGIN))

    def decode_seconds(self, num_requests: float, num_context_tokens: float) -> float:
        """The time of a step in which `num_requests` requests decode and no prompt token is computed; 0: unknown."""
        base, per_request, per_context = self._decode
        requests, context = min(num_requests, self._max_requests), min(num_context_tokens, self._max_context)
        return base + per_request * requests + per_context * context

    @property
    def max_predicted_requests(self) -> float:
        """Maximum number of requests for which the time of decode is predicted."""
        return self._max_requests

    @property
    def max_observed_requests(self) -> float:
        """Number of requests of the largest observed step without prompt tokens."""
        return self._max_requests / GROWTH

    @property
    def share(self) -> float:
        """Share of the time of decode alone by which decode lengthens a step with prompt tokens."""
        return self._mixed[0]

    def prefill_seconds(self, num_tokens: float, start: int) -> float:
        """The time that `num_tokens` prompt tokens from position `start` on add to a step."""
        _, per_token, per_attended = self._mixed
        return num_tokens * (per_token + per_attended * (start + 0.5 * num_tokens))

    def fitting_tokens(self, seconds: float, start: int) -> int:
        """Maximum number of prompt tokens from position `start` on that take at most `seconds`."""
        if seconds <= 0:
            return 0
        _, per_token, per_attended = self._mixed
        first = per_token + per_attended * start
        divisor = first + math.sqrt(first * first + 2 * per_attended * seconds)
        if divisor * self.max_predicted_tokens <= 2 * seconds:
            return self.max_predicted_tokens
        return int(2 * seconds / divisor)


def _fit_coefficients(
    columns: FloatArray,
    seconds: FloatArray,
    weights: FloatArray,
    expected: tuple[float, float, float],
    is_mixed: bool = False,
) -> tuple[float, float, float]:
    """Non-negative coefficients of the columns that minimize the squares of the relative errors, outliers left out.

    Args:
        columns: the quantities that explain the times, [3 coefficients, n observations]; changed in place.
        seconds: the observed times, [n observations].
        weights: [n observations], changed in place: 1 for recent observations, less for older ones. An observation with
            a weight above 1 is never an outlier.
        expected: the coefficients where the observations do not determine them.
        is_mixed: whether the first coefficient is the share of decode. Then the third coefficient is at most the second
            where the observations do not determine it.
    """
    ridge = np.array((SHARE_RIDGE if is_mixed else RIDGE, RIDGE, RIDGE))
    columns /= seconds
    scale = columns.max(axis=1)
    if is_mixed:
        scale[2] = max(scale[1], scale[2])
    scale[scale == 0] = 1.0
    columns /= scale[:, None]
    prior = scale * expected
    found = _solve_non_negative(columns, weights, prior, ridge)
    errors = found.dot(columns) - 1
    middle, deviation = _median_and_deviation(errors[weights >= 1].tolist())
    far = (np.abs(errors - middle) > max(OUTLIER * deviation, MIN_OUTLIER)) & (weights <= 1)
    if far.any():
        weights[far] = 0.0
        found = _solve_non_negative(columns, weights, prior, ridge)
    first, second, third = (found / scale).tolist()
    return first, second, third


def _solve_non_negative(columns: FloatArray, weights: FloatArray, prior: FloatArray, ridge: FloatArray) -> FloatArray:
    """Non-negative coefficients ([3]) with which the columns ([3, observations]) sum closest to 1, by weighted least
    squares. The most negative coefficient is set to 0 until no coefficient is negative."""
    weighted = columns * weights
    normal = weighted.dot(columns.T)
    ridge = ridge * np.add.reduce(weights)
    normal.flat[:: len(normal) + 1] += ridge
    wanted = np.add.reduce(weighted, axis=1) + ridge * prior
    found = np.linalg.solve(normal, wanted)
    used = list(range(len(wanted)))
    while used and found.min() < 0:
        del used[int(found[used].argmin())]
        found = np.zeros(len(wanted))
        if used:
            found[used] = np.linalg.solve(normal[np.ix_(used, used)], wanted[used])
    return found


def _median_and_deviation(values: list[float]) -> tuple[float, float]:
    """Median of the values, and their standard deviation estimated from the median absolute deviation."""
    middle = sorted(values)[len(values) // 2]
    return middle, MAD_TO_DEVIATION * sorted([abs(value - middle) for value in values])[len(values) // 2]
