"""Crossing: estimates, with an interval, the load at which the share of misses reaches the share that is allowed.

Misses at a load are counted in groups: simulations that differ in their seed, or blocks of consecutive requests of one
simulation. Groups are independent or nearly so; requests within a group are not, because they share a queue. The share
at one load is the ratio of the sums over the groups. Its interval is Student's t over the groups, on the scale of
log-odds, since misses come in clusters and their counts are skewed (the delta method, as for any ratio estimate).

All loads have the same groups, so the shares at several loads rise together (common random numbers). Between loads the
log-odds are interpolated over the logarithm of the load; shares are made monotone first (isotonic regression). The
interval of the load inverts the test at each load: it contains the loads whose interval contains the allowed share
(Fieller's method, for a curve instead of a line).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.sim.report.intervals import student_t_percentile

FloatArray = npt.NDArray[np.float64]

_MAX_SHARE = 0.999
"""Shares of misses are clipped to this value: their log-odds stay finite."""
_WITHIN = 0.01
"""Distance, in log-odds, of loads without a miss from what is allowed, at least."""
_MIN_SLOPE = 1.0
"""Least slope of log-odds over the logarithm of the load: the odds of misses rise at least as the load does."""
_FARTHEST = 0.5
"""Farthest that the load of a group is continued beyond the known loads, as a difference of logarithms."""

MAX_RATIO = 100.0
"""Maximum ratio between a figure and an end of its interval that is shown as a number."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its interval. `value` is within `low` to `high`."""

    value: float
    low: float
    high: float

    @property
    def excess(self) -> float:
        """Distance of the farther end from the value, relative to the value; infinite if the low end is 0."""
        if self.low <= 0 or not math.isfinite(self.high):
            return math.inf
        return max(self.high / self.value, self.value / self.low) - 1

    @property
    def figures(self) -> tuple[float, float, float]:
        """The value and both ends. An end farther from the value than a factor of `MAX_RATIO` is 0 or infinite: so few
        samples say nothing about it."""
        is_bounded = 0 < self.value < math.inf
        low = 0.0 if is_bounded and self.low * MAX_RATIO < self.value else self.low
        return self.value, low, math.inf if is_bounded and self.high > self.value * MAX_RATIO else self.high

    def text(self) -> tuple[str, str, str]:
        """The value and both ends as text, with as many digits as the interval supports."""
        return digits_text(*self.figures)


def digits_text(value: float, low: float, high: float) -> tuple[str, str, str]:
    """A value and both ends of its interval as text. The last digit counts in steps of at most half of the interval's
    half width, in powers of ten; the value has at least one digit that is not 0."""
    if math.isfinite(high):
        half = max((high - low) / 2, 0.0)
    else:
        half = value if math.isfinite(value) else low if 0 < low < math.inf else 1.0
    if half <= 0:
        half = abs(value) * 0.01
    if half <= 0:
        return ("0", "0", "0")
    place = math.floor(math.log10(half))
    if 0 < value < math.inf:
        place = min(place, math.floor(math.log10(value)))
    if 0 < low < math.inf and round(low / 10.0**place) == 0:  # an end of 0 would say that nothing is possible
        place -= 1
    decimals = max(0, -place)

    def text(number: float) -> str:
        if not math.isfinite(number):
            return "no limit"
        rounded = round(number / 10.0**place) * 10.0**place if place > 0 else number
        return f"{rounded:,.{decimals}f}"

    return text(value), text(low), text(high)


@dataclass(frozen=True, slots=True)
class Misses:
    """Misses at one load, by group."""

    load: float
    late: FloatArray
    """Number of misses of each group, [groups]."""
    total: FloatArray
    """Number of requests, or of gaps, of each group, [groups]."""

    @property
    def share(self) -> float:
        total = float(self.total.sum())
        return float(self.late.sum()) / total if total else 0.0

    def odds(self, confidence: float) -> tuple[float, float, float]:
        """Log-odds of the share of misses: the estimate, and both ends of its interval.

        If no group has a miss, half a miss is assumed, and the upper end is that of one group with it.
        """
        total, count = float(self.total.sum()), len(self.total)
        if not total:
            return (-math.inf, -math.inf, -math.inf)
        late = float(self.late.sum())
        share = min(max(late, 0.5) / total, _MAX_SHARE)
        middle = math.log(share / (1 - share))
        if count < 2:
            return middle, -math.inf, math.inf
        if late <= 0:
            error = share
        else:
            residuals = self.late - late / total * self.total
            error = math.sqrt(count / (count - 1) * float(residuals @ residuals)) / total
        t = student_t_percentile(count - 1, (1 + confidence) / 2)
        half = t * error / (share * (1 - share))
        return middle, middle - half, middle + half


def crossing(misses: Sequence[Misses], allowed: float, confidence: float) -> Interval:
    """The load at which the share of misses reaches `allowed`, with its interval.

    Where the measured loads do not reach far enough, an end is 0 (the share is above `allowed` even at the lowest load)
    or infinite (it is below at the highest load); the value is then 0 or infinite too, if the estimate does not cross.

    Args:
        misses: at one load or more, in any order; all have the same groups.
        allowed: share of misses, above 0 and below 1.
    """
    known = sorted(misses, key=lambda each: each.load)
    loads = np.log([each.load for each in known])
    target = math.log(allowed / (1 - allowed))
    middle, low, high = (np.array(column) for column in zip(*(each.odds(confidence) for each in known), strict=True))
    # Without a miss a load is within what is allowed, even if so few requests cannot show it.
    has_misses = np.array([each.late.sum() > 0 for each in known])
    middle = _isotonic(np.where(has_misses, middle, np.minimum(middle, target - _WITHIN)))
    value = _root(loads, middle, target)
    # The ends are conservative: the first load that may miss, and the last load that may meet.
    lowest = _root(loads, np.maximum.accumulate(high), target)
    highest = _root(loads, np.minimum.accumulate(low[::-1])[::-1], target)
    if 0 < value < math.inf and len(known) > 1 and len(known[0].late) > 1:
        spread = _spread(known, loads, middle, math.log(value), target, confidence)
        lowest, highest = min(lowest, value * math.exp(-spread)), max(highest, value * math.exp(spread))
    return Interval(value, min(lowest, value), max(highest, value))


def _spread(
    known: Sequence[Misses], loads: FloatArray, middle: FloatArray, at: float, target: float, confidence: float
) -> float:
    """Half width of the interval of the logarithm of the load, from the loads at which the single groups cross.

    Few groups may have nearly all misses. So many groups count as would have as large a variance of their sum, were
    they equal (Kish's effective sample size).
    """
    total = np.array([each.total for each in known])
    late = np.maximum.accumulate(np.array([each.late for each in known]) / np.maximum(total, 1), axis=0)
    place = min(max(int(np.searchsorted(loads, at)), 1), len(loads) - 1)
    slope = max((middle[place] - middle[place - 1]) / (loads[place] - loads[place - 1]), _MIN_SLOPE)
    shares = np.clip(late, 0.5 / np.maximum(total, 1), _MAX_SHARE)
    odds = np.log(shares / (1 - shares))
    roots = [_root_of_group(loads, column, target, slope) for column in odds.T]
    at_value = np.array([np.interp(at, loads, column) for column in late.T])
    effective = max(1.0, float(at_value.sum()) ** 2 / max(float(at_value @ at_value), 1e-300))
    count = len(roots)
    return student_t_percentile(count - 1, (1 + confidence) / 2) * float(np.std(roots, ddof=1)) / math.sqrt(effective)


def _root_of_group(loads: FloatArray, odds: FloatArray, target: float, slope: float) -> float:
    """The logarithm of the load at which the log-odds of a group cross `target`. Beyond the known loads they are
    continued with the slope of all groups."""
    if odds[0] >= target:
        return float(loads[0] - min((odds[0] - target) / slope, _FARTHEST))
    if odds[-1] <= target:
        return float(loads[-1] + min((target - odds[-1]) / slope, _FARTHEST))
    place = int(np.searchsorted(odds, target))
    share = (target - odds[place - 1]) / (odds[place] - odds[place - 1])
    return float(loads[place - 1] + share * (loads[place] - loads[place - 1]))


def share_of_odds(odds: float) -> float:
    """The share with these log-odds."""
    return 1 / (1 + math.exp(-odds)) if odds > -700 else 0.0


def _root(log_loads: FloatArray, odds: FloatArray, target: float) -> float:
    """The load at which monotone log-odds reach `target`; 0 or infinity if they are above or below everywhere."""
    if odds[0] > target:
        return 0.0
    if odds[-1] < target:
        return math.inf
    place = int(np.searchsorted(odds, target, side="left"))
    if place == 0:
        return float(math.exp(log_loads[0]))
    before, after = float(odds[place - 1]), float(odds[place])
    if not math.isfinite(before) or not math.isfinite(after) or after <= before:
        share = 0.5
    else:
        share = (target - before) / (after - before)
    return float(math.exp(log_loads[place - 1] + share * (log_loads[place] - log_loads[place - 1])))


def _isotonic(values: FloatArray) -> FloatArray:
    """The nearest non-decreasing values (pool adjacent violators)."""
    means: list[float] = []
    sizes: list[int] = []
    for value in values.tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            size = sizes[-2] + sizes[-1]
            means[-2:] = [(means[-2] * sizes[-2] + means[-1] * sizes[-1]) / size]
            sizes[-2:] = [size]
    return np.repeat(means, sizes)


def mix(interval: Interval, shifts: Sequence[float], groups: int, confidence: float) -> Interval:
    """The interval of a mixture of models that are equally plausible.

    Args:
        interval: of the first model, from `groups` groups.
        shifts: for each other model, the logarithm of its value divided by that of the first model, -inf if it is 0.

    The error of sampling is the same in each model: Student's t on the logarithm of the value, scaled to each side of
    `interval`.
    """
    if not shifts or not 0 < interval.value < math.inf:
        return interval
    shares = (np.arange(2000) + 0.5) / 2000
    t = np.array([student_t_percentile(groups - 1, share) for share in shares[1000:].tolist()])
    scale = student_t_percentile(groups - 1, (1 + confidence) / 2)
    below = math.log(interval.value / interval.low) / scale if interval.low > 0 else math.inf
    above = math.log(interval.high / interval.value) / scale if math.isfinite(interval.high) else math.inf
    errors = np.concatenate([-t[::-1] * below, t * above])
    values = np.concatenate([errors + shift for shift in (0.0, *shifts)])
    low, high = np.quantile(np.maximum(values, -700.0), [(1 - confidence) / 2, (1 + confidence) / 2], method="lower")
    ends = (interval.value * math.exp(low) if low > -600 else 0.0, interval.value * math.exp(min(high, 700.0)))
    return Interval(interval.value, min(ends[0], interval.value), max(ends[1], interval.value))
