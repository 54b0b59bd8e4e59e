"""Percentiles of weighted values, and their confidence intervals.

Requests that arrive one after the other share a queue, so their latencies are correlated. A bootstrap that draws single
requests would give intervals that are too narrow. Here it draws whole blocks, with replacement. A block consists of
consecutive requests, or consecutive gaps between tokens.

    values, sorted        v0 <= v1 <= ... in at most `CELLS` cells of about equal weight
    histogram             [blocks, cells]: the weight of each block in each cell
    draws                 [resamples, blocks]: how often a resample has each block
    draws @ histogram     [resamples, cells]: the histogram of each resample, from which percentiles are read

A resample costs a row of a matrix product, whatever the number of values. Up to `CELLS` values the cells are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

SHARES = (0.5, 0.9, 0.95, 0.99)
CELLS = 4096
MAX_BLOCKS = 40
MIN_BLOCKS = 10
"""Minimum number of blocks for an interval."""
MIN_BEYOND = 5
"""Minimum number of values beyond a percentile for an interval: fewer values do not show their spread."""
_Z = 1.959964  # 97.5 % of a normal distribution lie below
_MANY = 200
"""Degrees of freedom above which Student's t is computed from the normal distribution (Abramowitz and Stegun,
26.7.8)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure (`value`) with its 95 % confidence interval (`low` to `high`). `value` None: the figure is missing;
    `low` and `high` None: there is no interval."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """Summary statistics of `count` values of one kind."""

    count: int
    mean: Estimate
    p50: Estimate
    p90: Estimate
    p95: Estimate
    p99: Estimate
    max: Estimate


NONE = Estimate()
EMPTY = Distribution(0, NONE, NONE, NONE, NONE, NONE, NONE)


class Draws:
    """The resamples: how often each contains each block. Computes intervals from the values of a figure in them."""

    def __init__(self, num_blocks: int, num_resamples: int, seed: int) -> None:
        if num_blocks < MIN_BLOCKS:
            num_resamples = 0
        self.num_blocks = num_blocks
        self.num_resamples = num_resamples
        rng = np.random.default_rng(seed)
        blocks = max(1, num_blocks)
        self.times = rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=num_resamples).astype(np.float64)
        """How often each resample contains each block, [resamples, blocks]."""
        # A resample of n blocks spreads like n - 1 blocks, and the spread of few blocks is less certain.
        self._widening = student_t_percentile(blocks - 1) / _Z * math.sqrt(blocks / (blocks - 1)) if blocks > 1 else 1.0

    def interval(self, value: float, resampled: FloatArray, lowest: float, highest: float) -> Estimate:
        """`value` with an interval: the middle 95 % of the resampled values, widened for few blocks and clipped to
        `lowest` and `highest`."""
        resampled = resampled[~np.isnan(resampled)]
        if not len(resampled):
            return Estimate(value)
        low, high = np.quantile(resampled, [0.025, 0.975])
        low, high = value - self._widening * (value - low), value + self._widening * (high - value)
        return Estimate(value, float(min(value, max(low, lowest))), float(max(value, min(high, highest))))


def choose_num_blocks(num_values: int) -> int:
    """The number of blocks for `num_values` requests: the square root of `num_values`, at most `MAX_BLOCKS`."""
    return min(MAX_BLOCKS, math.isqrt(num_values))


def consecutive_blocks(num_values: int, num_blocks: int) -> Int64Array:
    """The block number of each of `num_values` values in order: all blocks have about the same number of values."""
    return np.arange(num_values, dtype=np.int64) * max(1, num_blocks) // max(1, num_values)


def weighted_percentiles(values: FloatArray, counts: Int64Array, shares: Sequence[float]) -> FloatArray:
    """`np.quantile` of sorted values that occur `counts` times each, without repeating them."""
    return _percentiles(values, counts.cumsum(), shares)


def estimate_distribution(
    values: FloatArray, counts: Int64Array | None, blocks: Int64Array, draws: Draws
) -> Distribution:
    """Mean and percentiles of values that occur `counts` times each (None: once); NaN is left out.

    Args:
        blocks: the block number of each value.
    """
    is_there = ~np.isnan(values)
    if not is_there.all():
        values, blocks = values[is_there], blocks[is_there]
        counts = None if counts is None else counts[is_there]
    if not len(values):
        return EMPTY
    order = values.argsort()
    values, blocks = values[order], blocks[order]
    counts = np.ones(len(values), dtype=np.int64) if counts is None else counts[order]
    below = counts.cumsum()
    total = int(below[-1])
    points = [float(values @ counts) / total, *_percentiles(values, below, SHARES).tolist()]
    lowest, highest = float(values[0]), float(values[-1])
    estimates = [Estimate(point) for point in points]
    if draws.num_resamples:
        resampled = _resampled(values, counts, below, blocks, draws)
        for index, point in enumerate(points):
            if index == 0 or total * (1 - SHARES[index - 1]) >= MIN_BEYOND:
                estimates[index] = draws.interval(point, resampled[index], lowest, highest)
    mean, p50, p90, p95, p99 = estimates
    return Distribution(total, mean, p50, p90, p95, p99, Estimate(highest))


def estimate_share(
    flags: npt.NDArray[np.bool_], counts: Int64Array | None, blocks: Int64Array, draws: Draws
) -> Estimate:
    """The share of values whose flag is True; the values occur `counts` times each (None: once).

    Args:
        blocks: the block number of each value.
    """
    if not len(flags):
        return NONE
    weights = np.ones(len(flags)) if counts is None else counts.astype(np.float64)
    value = float(weights[flags].sum() / weights.sum())
    if not draws.num_resamples:
        return Estimate(value)
    good = draws.times @ np.bincount(blocks, weights * flags, draws.num_blocks)
    every = draws.times @ np.bincount(blocks, weights, draws.num_blocks)
    return draws.interval(value, _divide_or_nan(good, every), 0.0, 1.0)


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of a figure over independent runs, with Student's interval; no value if one run lacks the figure.

    Figures are not negative, so intervals begin at 0 or above.
    """
    values = [estimate.value for estimate in estimates if estimate.value is not None]
    if len(values) < len(estimates):
        return NONE
    mean = math.fsum(values) / len(values)
    if len(values) < 2:
        return Estimate(mean)
    half = student_t_percentile(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(mean, max(0.0, mean - half), mean + half)


@cache
def student_t_percentile(degrees_of_freedom: int, share: float = 0.975) -> float:
    """The percentile of Student's t distribution below which `share` of it lies; `share` is at least 0.5.

    The distribution function of whole degrees of freedom is a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4);
    bisection inverts it.
    """
    degrees = degrees_of_freedom
    low, high = 0.0, 1.0
    while _student_share(degrees, high) < share:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        if _student_share(degrees, middle) < share:
            low = middle
        else:
            high = middle
    return high


def _student_share(degrees: int, t: float) -> float:
    """The share of Student's t distribution below `t`, which is at least 0."""
    if degrees > _MANY:
        return NormalDist().cdf(t * (1 - 1 / (4 * degrees)) / math.sqrt(1 + t * t / (2 * degrees)))
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees % 2:
        term, total = cosine, cosine if degrees > 1 else 0.0
        for odd in range(3, degrees - 1, 2):
            term *= cosine * cosine * (odd - 1) / odd
            total += term
        middle = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        term = total = 1.0
        for even in range(2, degrees - 1, 2):
            term *= cosine * cosine * (even - 1) / even
            total += term
        middle = math.sin(angle) * total
    return (1 + middle) / 2


def _percentiles(values: FloatArray, below: Int64Array, shares: Sequence[float]) -> FloatArray:
    """The percentiles `shares` of the sorted `values`; `below`: cumulative sums of the values' counts."""
    place = (below[-1] - 1) * np.asarray(shares)
    first = np.floor(place)
    low = values[below.searchsorted(first, side="right")]
    high = values[below.searchsorted(np.minimum(first + 1, below[-1] - 1), side="right")]
    found: FloatArray = low + (place - first) * (high - low)
    return found


def _resampled(
    values: FloatArray, counts: Int64Array, below: Int64Array, blocks: Int64Array, draws: Draws
) -> list[FloatArray]:
    """The mean and the percentiles of each resample of sorted values; NaN for a resample without values."""
    num_blocks, weights = draws.num_blocks, counts.astype(np.float64)
    if len(values) <= CELLS:
        cells, num_cells, levels = np.arange(len(values)), len(values), values
    else:
        num_cells = CELLS
        cells = (below - counts) * CELLS // below[-1]
        inside = np.bincount(cells, weights, CELLS)
        levels = np.bincount(cells, weights * values, CELLS) / np.maximum(inside, 1)
    histogram = np.bincount(blocks * num_cells + cells, weights, num_blocks * num_cells).reshape(num_blocks, num_cells)
    drawn = draws.times @ histogram
    np.cumsum(drawn, axis=1, out=drawn)
    total = drawn[:, -1]
    is_there = total > 0
    found = [_divide_or_nan(draws.times @ np.bincount(blocks, weights * values, num_blocks), total)]
    for quantile in SHARES:
        place = np.floor((total - 1) * quantile)
        cell = np.minimum((drawn <= place[:, None]).sum(axis=1), num_cells - 1)
        found.append(np.where(is_there, levels[cell], np.nan))
    return found


def _divide_or_nan(sums: FloatArray, totals: FloatArray) -> FloatArray:
    shares: FloatArray = np.divide(sums, totals, out=np.full(len(sums), np.nan), where=totals > 0)
    return shares
