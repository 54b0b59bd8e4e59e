"""How long does a step take? Learned from the times of steps, for policies that decide by it."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import numpy.typing as npt

from pointsman.core.policy.policy import StepLoad

FloatArray = npt.NDArray[np.float64]

FIRST_CHUNK = 256
"""Prompt tokens of a step before any step with prompt tokens was seen."""
GROWTH = 2
"""Nothing is predicted beyond so many times the most that was seen: of prompt tokens in a step, of requests, of context
tokens."""
NUM_GROUPS, GROUP = 64, 16
"""Groups of consecutive decode steps that are remembered, and the steps of each at most: their mean counts, so that
noise averages out and a second of decoding does not displace all that is known of other loads."""
NUM_CLASSES, PER_CLASS = 8, 16
"""Steps with prompt tokens are remembered by the context of these tokens, in classes that double from 512 on: a long
prompt every minute is not forgotten for the short ones between. So are, apart from them, those near the limit."""
NEAR = 0.75
"""Times the limit: shorter steps say nothing about the errors of those that fill it, and less than proportionally how
long these take, where reading and computing overlap. With `MIN_FITTED` near it, others hardly count; before that each
counts as much as so many others, as does the step with the most prompt tokens, and none is an outlier."""
MIN_MARGIN = -0.1
"""Where steps are shorter than predicted."""
RECENT, RECENT_GROUPS, MEMORY = 32, 8, 0.05
"""The newest observations, and the weight of those before: what was seen before the device became slower counts only
where nothing newer is known."""
SHIFT, SHIFT_STEPS = 0.2, 8
"""So many steps in a row that are off by more than this share, all to one side: the device has another speed."""
NUM_ERRORS, MIN_ERRORS = 64, 8
"""Latest errors of the prediction that the margin is taken from, and with how many it begins to be."""
FIRST_MARGIN, MARGIN_FALLS = 0.1, 0.02
"""Before that, and by how much it falls at most when the coefficients follow: it rises at once."""
REFIT_AFTER, REFIT_AT_LATEST = 4, 16
"""Observations after which the coefficients follow, where the newest is off by more than `OFF` or `OFF_DEVIATIONS`
standard deviations, and otherwise. Until `MIN_FITTED` steps with prompt tokens were seen, every one is taken in."""
OFF, OFF_DEVIATIONS = 0.02, 3.0
MIN_FITTED = 16
RIDGE, SHARE_RIDGE = 1e-3, 1e-2
"""Of each coefficient, relative to an observation: what a constant load does not tell apart is divided evenly. The
second is of the share of decoding, which beside prompt tokens takes what it takes alone, unless steps say otherwise:
steps that all fill the target take the same time, so nearly any share would explain them."""
POSITION_SCALE = 4096
"""Attending to so many positions costs no more than the rest of a token, unless steps with longer contexts say so."""
OUTLIER, MIN_OUTLIER = 4.0, 0.02
"""Of a fit: farther off than so many standard deviations, and than this share, and it is left out."""
MEAN_STEPS = 512
"""Steps over which the mean of their prompt tokens is taken."""
LONE, UNREACHABLE = 2, 1.5
"""A target below so many times what decoding so few requests took cannot be kept, whoever waits; this is instead."""
PERCENTILE_99 = 2.326
"""In standard deviations of the normal distribution."""
MAD_TO_DEVIATION = 1.4826
"""Standard deviations of the normal distribution in a median absolute deviation, which an outlier does not move."""


class StepTimes:
    """What a step takes, learned from those that were.

    Decode alone: base + per_request * requests + per_context * context tokens. A step with prompt tokens: a share of
    that, since reading weights and computing overlap, + per_token * prompt tokens + per_attended * positions that they
    attend to, which is the product of prompt tokens and context. No coefficient is negative.
    """

    def __init__(self, target: float) -> None:
        self._target = target
        self.margin = FIRST_MARGIN
        """How much longer than predicted a step takes at the 99th percentile, relative; of a normal distribution with
        the median and the median absolute deviation of recent errors, so that a single slow step does not count."""
        self.most_tokens = FIRST_CHUNK
        """Prompt tokens up to which a prediction is trusted."""
        self._decode = (0.0, 0.0, 0.0)
        self._least_target = 0.0
        self._most_requests = self._most_context = 0.0
        self._mixed = (0.0, 0.0, 0.0)
        self._groups: deque[tuple[float, float, float]] = deque(maxlen=NUM_GROUPS)  # requests, context, seconds
        # Of each step: its number, requests, context, prompt tokens, positions they attend to, seconds; 0: none yet.
        # The second half is that of steps near the limit.
        self._steps = np.zeros((6, 2 * NUM_CLASSES * PER_CLASS))
        self._class_sizes = [0] * (2 * NUM_CLASSES)
        self._near: deque[int] = deque(maxlen=RECENT)  # numbers of the newest near the limit
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)
        self._judged: deque[int] = deque(maxlen=SHIFT_STEPS)  # numbers of the steps of the newest errors
        self.mean_tokens = 0.0
        """Prompt tokens of a step, all steps counted: an exponential mean."""
        self._num_new = self._num_new_groups = 0
        self._is_off = False
        self._deviation = 0.0
        self.num_mixed = 0
        """Steps with prompt tokens that were seen."""
        self._group_requests = self._group_size = self._group_context = 0
        self._group_seconds = self._group_slowest = 0.0

    # ------------------------------------------------------------------ learning

    def observe(self, load: StepLoad, seconds: float) -> None:
        """A step took so long."""
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
        if num_requests > self._most_requests:  # more than is predicted: it is known before the next step
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
        if seconds > max(self._target, self._least_target):  # whatever was predicted, it is known before the next step
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
        if GROWTH * num_tokens > self.most_tokens:
            self.most_tokens = GROWTH * num_tokens
            self._num_new = REFIT_AT_LATEST

    def _follow_shift(self) -> None:
        """All that is remembered from before the device changed its speed is scaled to the new one."""
        newest = [self._errors[-number] for number in range(1, SHIFT_STEPS + 1)]
        if not (min(newest) > SHIFT or max(newest) < -SHIFT):
            return
        factor = 1 + _middle_and_deviation(newest)[0]
        self._steps[5, self._steps[0] < self._judged[-SHIFT_STEPS]] *= factor
        for index, (requests, context, seconds) in enumerate(self._groups):
            self._groups[index] = requests, context, factor * seconds
        self._least_target *= factor
        self._errors.clear()
        self._num_new_groups = REFIT_AT_LATEST

    def _close_group(self) -> None:
        if self._group_size:
            requests, context, seconds = group = self._group()
            self._groups.append(group)
            predicted = self.decode_seconds(requests, context)
            is_beyond = GROWTH * requests > self._most_requests or GROWTH * context > self._most_context
            if is_beyond or abs(seconds - predicted) > OFF * predicted:
                self._num_new_groups = REFIT_AT_LATEST
            self._num_new_groups += 1
        self._group_size = self._group_context = 0
        self._group_seconds = self._group_slowest = 0.0

    def _group(self) -> tuple[float, float, float]:
        """Means of the open group; of the seconds without the slowest step, where enough are left."""
        size, seconds = self._group_size, self._group_seconds
        mean = (seconds - self._group_slowest) / (size - 1) if size > 3 else seconds / size
        return self._group_requests, self._group_context / size, mean

    def refit(self) -> None:
        """Take in what was observed, where it is much or not what was expected."""
        if self._num_new_groups >= REFIT_AT_LATEST or (self._group_size and not self._most_requests):
            self._fit_decode()
            self._fit_mixed()
        elif self._num_new and (
            self._num_new >= (REFIT_AFTER if self._is_off else REFIT_AT_LATEST) or self.num_mixed <= MIN_FITTED
        ):
            self._fit_mixed()

    def _fit_decode(self) -> None:
        self._num_new_groups = 0
        groups = [*self._groups, self._group()] if self._group_size else list(self._groups)
        if not groups:
            return
        known = np.array(groups).T
        if len(lone := known[2, known[0] <= LONE]):
            self._least_target = UNREACHABLE * lone.item(-1)
        self._most_requests, self._most_context, _ = (GROWTH * known.max(axis=1)).tolist()
        weights = np.where(np.arange(len(groups)) >= len(groups) - RECENT_GROUPS, 1.0, MEMORY)
        columns = np.stack((np.ones(len(groups)), known[0], known[1]))
        self._decode = _fitted(columns, known[2], weights, (0.0, 0.0, 0.0))

    def _fit_mixed(self) -> None:
        if self.num_mixed:
            knows_near = len(self._near) >= MIN_FITTED
            taken = self._steps[5].nonzero()[0]
            is_near = taken >= NUM_CLASSES * PER_CLASS
            number, requests, context, tokens, attended, seconds = self._steps[:, taken]
            base, per_request, per_context = self._decode
            requests, context = np.minimum(requests, self._most_requests), np.minimum(context, self._most_context)
            alone = base + per_request * requests + per_context * context
            recent = number >= (self._near[0] if knows_near else self.num_mixed - RECENT)
            columns = np.stack((alone, tokens, attended / POSITION_SCALE))
            weights = np.where(recent, 1.0, MEMORY)
            if knows_near:
                weights[~is_near] = MEMORY * MEMORY
            else:
                weights = np.maximum(weights, MIN_FITTED * tokens / tokens.max())
                weights[is_near] = MIN_FITTED
            share, per_token, per_attended = _fitted(columns, seconds, weights, (1.0, 0.0, 0.0), is_mixed=True)
            self._mixed = share, per_token, per_attended / POSITION_SCALE
            self.most_tokens = GROWTH * int(tokens.max())
        if len(self._errors) >= MIN_ERRORS:
            middle, self._deviation = _middle_and_deviation(list(self._errors))
            self.margin = max(middle + PERCENTILE_99 * self._deviation, self.margin - MARGIN_FALLS)
        self._num_new, self._is_off = 0, False

    # ------------------------------------------------------------------ what it says

    @property
    def limit(self) -> float:
        """What may be predicted, so that the 99th percentile is the target."""
        return max(self._target, self._least_target) / (1 + max(self.margin, MIN_MARGIN))

    def decode_seconds(self, num_requests: float, num_context_tokens: float) -> float:
        """Of a step in which all these requests decode; 0: not known."""
        base, per_request, per_context = self._decode
        requests, context = min(num_requests, self._most_requests), min(num_context_tokens, self._most_context)
        return base + per_request * requests + per_context * context

    @property
    def most_predicted(self) -> float:
        """Requests up to which decoding is predicted."""
        return self._most_requests

    @property
    def most_seen(self) -> float:
        """Requests of the largest step without prompt tokens."""
        return self._most_requests / GROWTH

    @property
    def share(self) -> float:
        """Of the seconds of decoding, what it adds to a step with prompt tokens."""
        return self._mixed[0]

    def prefill_seconds(self, num_tokens: float, start: int) -> float:
        """What prompt tokens from position `start` on add to a step."""
        _, per_token, per_attended = self._mixed
        return num_tokens * (per_token + per_attended * (start + 0.5 * num_tokens))

    def fitting_tokens(self, seconds: float, start: int) -> int:
        """How many prompt tokens from position `start` on take at most so long."""
        if seconds <= 0:
            return 0
        _, per_token, per_attended = self._mixed
        first = per_token + per_attended * start
        divisor = first + math.sqrt(first * first + 2 * per_attended * seconds)
        if divisor * self.most_tokens <= 2 * seconds:
            return self.most_tokens
        return int(2 * seconds / divisor)


def _fitted(
    columns: FloatArray,
    seconds: FloatArray,
    weights: FloatArray,
    expected: tuple[float, float, float],
    is_mixed: bool = False,
) -> tuple[float, float, float]:
    """Non-negative coefficients of the columns, for the least squares of relative errors without outliers.

    Args:
        columns: [3, n], changed in place.
        seconds: [n].
        weights: [n], changed in place: 1 of the newest observations, less of others; one of more than 1 is no outlier.
        expected: what the coefficients are where the observations do not tell.
        is_mixed: whether the first is the share of decoding, and the last at most the one before where the observations
            do not tell.
    """
    ridge = np.array((SHARE_RIDGE if is_mixed else RIDGE, RIDGE, RIDGE))
    columns /= seconds
    scale = columns.max(axis=1)
    if is_mixed:
        scale[2] = max(scale[1], scale[2])
    scale[scale == 0] = 1.0
    columns /= scale[:, None]
    prior = scale * expected
    found = _non_negative(columns, weights, prior, ridge)
    errors = found.dot(columns) - 1
    middle, deviation = _middle_and_deviation(errors[weights >= 1].tolist())
    far = (np.abs(errors - middle) > max(OUTLIER * deviation, MIN_OUTLIER)) & (weights <= 1)
    if far.any():
        weights[far] = 0.0
        found = _non_negative(columns, weights, prior, ridge)
    first, second, third = (found / scale).tolist()
    return first, second, third


def _non_negative(columns: FloatArray, weights: FloatArray, prior: FloatArray, ridge: FloatArray) -> FloatArray:
    """Coefficients of at least 0 with which the columns come closest to 1: the most negative one is left out until none
    is."""
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


def _middle_and_deviation(values: list[float]) -> tuple[float, float]:
    """Median and standard deviation, the latter from the median absolute deviation."""
    middle = sorted(values)[len(values) // 2]
    return middle, MAD_TO_DEVIATION * sorted([abs(value - middle) for value in values])[len(values) // 2]
