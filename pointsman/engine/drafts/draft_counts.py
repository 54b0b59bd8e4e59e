"""Chooses the number of drafts, from the odds of acceptance and the cost of a step that verifies them.

    Odds                    how often the expected token followed, by the length of the match before it
    StepCost                seconds of a step, by the number of tokens that it computes
    choose_draft_counts     the numbers of drafts with which a step gives the most tokens per second, possibly 0

Odds and costs are measured while the engine runs. Whether an expected token was the next token is known at no cost,
even if it was not verified as a draft. So a request that begins to repeat itself is noticed while it has no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from pointsman.engine.arrays import Float64Array, Int64Array

LONGEST = 16
"""Maximum length of a match, in tokens, with a probability of its own; longer matches are counted like matches of this
length."""
PRIOR = 4.0
"""Weight of the prior, the estimate from shorter matches, as a number of observed tokens."""
MAX_NOTED = 128.0
"""Number of observed tokens for a match length above which the counts of this length are halved."""
MIN_GAIN = 1.05
"""Minimum factor by which drafts must be expected to raise the tokens per second: estimates are rough."""


class Odds:
    """Estimates the probability that the expected token is the next token, by the length of the match.

    Each estimate starts from a prior, which is slightly better than the estimate for the next shorter length: the
    failure probability at length l is (l + 1) / (l + 2) of the failure probability at length l - 1. So where short
    matches fail, longer matches need not be tried one by one. Without observations the probability of success is
    l / (l + 2).
    """

    def __init__(self) -> None:
        self._num_observed = [0.0] * (LONGEST + 1)
        self._num_matched = [0.0] * (LONGEST + 1)
        self._lengths = np.zeros((0, 0), dtype=np.int64)

    def observe_matches(self, lengths: Iterable[int]) -> None:
        """Count for each match whether the expected token followed. `lengths`: length of each match, negative
        if another token followed, as `NgramLookup.append` returns it."""
        for length in lengths:
            at = min(abs(length), LONGEST)
            self._num_observed[at] += 1
            self._num_matched[at] += length > 0
            if self._num_observed[at] > MAX_NOTED:
                self._num_observed[at] /= 2
                self._num_matched[at] /= 2

    def probability_by_length(self) -> list[float]:
        """Return a list [LONGEST + 1]: entry l is the probability that the expected token is the next token after a
        match of length l; entry 0 is 0."""
        each = [0.0]
        for length in range(1, LONGEST + 1):
            prior = 1 - (1 - each[-1]) * (length + 1) / (length + 2)
            each.append((self._num_matched[length] + PRIOR * prior) / (self._num_observed[length] + PRIOR))
        return each

    def max_gain(self, lengths: Iterable[int]) -> float:
        """Upper bound of the expected number of accepted drafts after matches of these lengths, for any number of
        verified drafts. This method takes a tenth of the time of `probabilities`, which need not be called if the bound
        is too small."""
        each = self.probability_by_length()
        gain = each[LONGEST] / (1 - each[LONGEST])  # expected number of accepted drafts after an endless match
        gains = [gain] * (LONGEST + 1)
        for length in range(LONGEST - 1, 0, -1):
            gains[length] = gain = each[length] * (1 + gain)
        return sum([gains[min(length, LONGEST)] for length in lengths])

    def probabilities(self, lengths: npt.ArrayLike, num_tokens: int) -> Float64Array:
        """[n, num_tokens] for each match: the probability that the first 1, 2, ... expected tokens all follow the
        match.

        Args:
            lengths: [n] length of each match, at least 1.
            num_tokens: number of expected tokens per match.
        """
        if self._lengths.shape[1] != num_tokens:
            self._lengths = np.minimum(np.arange(LONGEST + 1)[:, None] + np.arange(num_tokens), LONGEST)
        table: Float64Array = np.array(self.probability_by_length())[self._lengths].cumprod(axis=1)
        return table[np.minimum(lengths, LONGEST)]


class StepCost:
    """Seconds of a step as a linear function of its number of tokens, fitted to the newest steps.

    Other programs can only make steps slower, so a step that took longer than the fitted time weighs a quarter, and its
    time is capped. Until steps of different sizes are measured, a prior slope is used: a step of twice as many tokens
    takes an eighth longer.

    Args:
        rounded: function that takes a number of tokens and returns the number of rows that the model computes for these
            tokens.
    """

    PRIOR_SLOPE = 1 / 8
    PRIOR_WEIGHT = 1 / 8
    """Weight of the prior slope: the weight of two measured steps, one a quarter larger and one a quarter smaller than
    the mean size."""
    FORGET = 1 / 32
    """Share by which each new step reduces the weight of all earlier steps."""
    ABOVE_WEIGHT = 1 / 4
    FAR_ABOVE = 3.0

    def __init__(self, rounded: Callable[[int], int]) -> None:
        self._rounded = rounded
        self._sizes = np.zeros(0, dtype=np.int64)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._base, self._slope = 0.0, 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Add a step of `num_tokens` tokens that took `seconds`."""
        x, weight = float(self._rounded(num_tokens)), 1.0
        if self._weight:
            line = self._base + self._slope * x
            if seconds > line:
                weight = self.ABOVE_WEIGHT
                seconds = min(seconds, self.FAR_ABOVE * line)
        kept = 1 - self.FORGET
        self._weight = self._weight * kept + weight
        self._x = self._x * kept + weight * x
        self._y = self._y * kept + weight * seconds
        self._xx = self._xx * kept + weight * x * x
        self._xy = self._xy * kept + weight * x * seconds
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        prior = self.PRIOR_WEIGHT * mean_x * mean_x
        variance = self._xx - self._weight * mean_x * mean_x
        covariance = self._xy - self._weight * mean_x * mean_y
        steepest = mean_y / mean_x
        slope = (covariance + prior * self.PRIOR_SLOPE * steepest) / (variance + prior)
        self._slope = min(max(slope, 0.0), steepest)
        self._base = mean_y - self._slope * mean_x

    def seconds_between(self, min_tokens: int, max_tokens: int) -> Float64Array:
        """[max_tokens - min_tokens + 1] estimated seconds of a step of `min_tokens` to `max_tokens` tokens; in an
        arbitrary unit before the first observed step."""
        if max_tokens >= len(self._sizes):
            self._sizes = np.array([self._rounded(size) for size in range(2 * max_tokens)], dtype=np.int64)
        sizes = self._sizes[min_tokens : max_tokens + 1]
        seconds: Float64Array
        if self._weight:
            seconds = np.multiply(sizes, self._slope, dtype=np.float64) + self._base
        else:
            seconds = 1 + self.PRIOR_SLOPE * (np.divide(sizes, sizes[0], dtype=np.float64) - 1)
        return seconds


def choose_draft_counts(probabilities: Float64Array, num_rows: int, cost: StepCost) -> Int64Array:
    """Choose the number of drafts of each request so that the step gives the most tokens per second.

    Args:
        probabilities: [n, max_drafts] probabilities from `Odds.probabilities`, which do not rise along a row.
        num_rows: number of requests in the step, including the n with probabilities.

    Returns:
        [n] number of drafts of each request, 0 to max_drafts.
    """
    flat = probabilities.ravel()
    order = np.argsort(-flat, kind="stable")  # stable, so that a draft follows the draft before it
    tokens = np.full(len(flat) + 1, float(num_rows))
    tokens[1:] += flat[order].cumsum()
    speed = tokens / cost.seconds_between(num_rows, num_rows + len(flat))
    best = int(speed.argmax())
    if speed[best] < MIN_GAIN * speed[0]:
        best = 0
    counts: Int64Array = np.bincount(order[:best] // probabilities.shape[1], minlength=len(probabilities))
    return counts
