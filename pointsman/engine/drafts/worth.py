"""The value of drafts: how likely they are accepted, and what a step costs that verifies them.

    Odds         how often the expected token came, by the length of the match before it
    StepCost     seconds of a step, by the number of tokens that it computes
    best_counts  the drafts with which a step gives the most tokens per second, none if that is best

Both are measured as the engine runs. Whether an expected token came is known at no cost, also when it was no
draft, so a request that begins to repeat itself is noticed while it has no drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from pointsman.engine.arrays import Float64Array, Int64Array

LONGEST = 16
"""Matches of this length and longer ones count as one."""
PRIOR = 4.0
"""Tokens of a length that weigh as much as what shorter ones say."""
MAX_NOTED = 128.0
"""From this many tokens of a length on, half of them are forgotten."""
MIN_GAIN = 1.05
"""By how much drafts must be expected to raise the tokens per second, for there to be any: estimates are rough."""


class Odds:
    """How often the expected token came, by the length of the match.

    The odds of a length begin at those of the next shorter one and a little better, so that where short matches mean
    nothing, each longer one need not be tried for itself: what fails after a match of l tokens is (l + 1) / (l + 2) of
    what fails after one of l - 1. With nothing noted, l of l + 2 come.
    """

    def __init__(self) -> None:
        self._noted = [0.0] * (LONGEST + 1)
        self._right = [0.0] * (LONGEST + 1)
        self._lengths = np.zeros((0, 0), dtype=np.int64)

    def note(self, judged: Iterable[int]) -> None:
        """Take in what `Trail.go_on` returned."""
        for length in judged:
            at = min(abs(length), LONGEST)
            self._noted[at] += 1
            self._right[at] += length > 0
            if self._noted[at] > MAX_NOTED:
                self._noted[at] /= 2
                self._right[at] /= 2

    def by_length(self) -> list[float]:
        """[LONGEST + 1]: the probability that the expected token comes, by the length of the match; 0 for none."""
        each = [0.0]
        for length in range(1, LONGEST + 1):
            prior = 1 - (1 - each[-1]) * (length + 1) / (length + 2)
            each.append((self._right[length] + PRIOR * prior) / (self._noted[length] + PRIOR))
        return each

    def most_gain(self, lengths: Iterable[int]) -> float:
        """How many tokens drafts behind matches of these lengths may bring, however many they are: an upper bound that
        costs a tenth of `chances`, and where it is too small there are no drafts."""
        each = self.by_length()
        gain = each[LONGEST] / (1 - each[LONGEST])  # of what would go on forever
        gains = [gain] * (LONGEST + 1)
        for length in range(LONGEST - 1, 0, -1):
            gains[length] = gain = each[length] * (1 + gain)
        return sum([gains[min(length, LONGEST)] for length in lengths])

    def chances(self, lengths: npt.ArrayLike, most: int) -> Float64Array:
        """[n, most]: the probability that the 1st, 2nd, ... of the expected tokens come, and all before them.

        Args:
            lengths: [n] of the matches, at least 1.
        """
        if self._lengths.shape[1] != most:
            self._lengths = np.minimum(np.arange(LONGEST + 1)[:, None] + np.arange(most), LONGEST)
        table: Float64Array = np.array(self.by_length())[self._lengths].cumprod(axis=1)
        return table[np.minimum(lengths, LONGEST)]


class StepCost:
    """Seconds of a step, as a line over the number of tokens that it computes, fitted to the newest steps.

    Other programs make steps slower and never faster, so a step above the line counts for a quarter, and one far above
    it as if it were less far. With too few sizes measured, twice the tokens cost an eighth more.

    Args:
        rounded: the number of rows that the model computes for a number of tokens.
    """

    PRIOR_SLOPE = 1 / 8
    PRIOR_WEIGHT = 1 / 8
    """Of that slope: as that of two steps a quarter of the mean size away from it."""
    FORGET = 1 / 32
    """Share of the past that a step makes forgotten."""
    ABOVE_WEIGHT = 1 / 4
    FAR_ABOVE = 3.0

    def __init__(self, rounded: Callable[[int], int]) -> None:
        self._rounded = rounded
        self._sizes = np.zeros(0, dtype=np.int64)
        self._weight = self._x = self._y = self._xx = self._xy = 0.0
        self._base, self._slope = 0.0, 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of `num_tokens` tokens took `seconds`."""
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

    def between(self, least: int, most: int) -> Float64Array:
        """[most - least + 1] the seconds of steps of `least` to `most` tokens; before the first step in any unit."""
        if most >= len(self._sizes):
            self._sizes = np.array([self._rounded(size) for size in range(2 * most)], dtype=np.int64)
        sizes = self._sizes[least : most + 1]
        seconds: Float64Array
        if self._weight:
            seconds = np.multiply(sizes, self._slope, dtype=np.float64) + self._base
        else:
            seconds = 1 + self.PRIOR_SLOPE * (np.divide(sizes, sizes[0], dtype=np.float64) - 1)
        return seconds


def best_counts(chances: Float64Array, num_rows: int, cost: StepCost) -> Int64Array:
    """The number of drafts of each request with which a step gives the most tokens per second.

    Args:
        chances: [n, most] as `Odds.chances`; they do not rise along a row.
        num_rows: requests in the step, these n among them.

    Returns:
        [n] 0 to most.
    """
    flat = chances.ravel()
    order = np.argsort(-flat, kind="stable")  # so that a draft comes behind the one before it
    tokens = np.full(len(flat) + 1, float(num_rows))
    tokens[1:] += flat[order].cumsum()
    speed = tokens / cost.between(num_rows, num_rows + len(flat))
    best = int(speed.argmax())
    if speed[best] < MIN_GAIN * speed[0]:
        best = 0
    counts: Int64Array = np.bincount(order[:best] // chances.shape[1], minlength=len(chances))
    return counts
