"""Loads by time: for how long a run's steps had which load, and the hull of a log that follows from it.

    SeenLoads          seconds by load: for each field of `StepLoad`, a histogram of the duration of steps
    Hull               the range of each field of a log's loads, without the 1 % of the time on either side
    WatchedStepTime    step times that add the steps of a simulation to `SeenLoads`
    warn_outside       says for which share of its time a simulation is outside a hull

Loads count by time, not by occurrence: a run that begins empty has steps with one request, but only for a moment, and
no step time can be learnt from these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from pointsman.sim.step_time import StepLoad, StepTime

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

PARTS = {
    "num_rows": "requests in a step",
    "num_tokens": "tokens in a step",
    "num_context_tokens": "positions read in a step",
    "num_attended": "positions attended to in a step",
}
"""Names, in messages, of the fields of a step's load whose ranges are compared. Sampled tokens follow the requests."""
SHARE = 0.01
"""Share of the time that lies outside a hull on either side of a field's range."""
MIN_SHARE = 0.02
"""Minimum share of a simulation's time outside a hull that causes a warning."""
MIN_RATIO, MIN_DISTANCE = 1.1, 0.01
"""A load is outside a hull if it differs from the bound by more than this factor. Below the lower bound, the difference
must also exceed this share of the upper bound: the smallest steps of two runs differ by chance."""

_EXACT, _PER_E = 64, 50
"""Bins of a histogram: one for each value below `_EXACT`, then `_PER_E` for each factor of e, which is 2 % a bin."""
_NUM_BINS = _EXACT + 45 * _PER_E
_MAX_BUFFERED = 4096


def _bins(values: FloatArray) -> Int64Array:
    """The bin of each value."""
    large = np.maximum(values, _EXACT) / _EXACT
    bins = np.where(values < _EXACT, values, _EXACT + np.log(large) * _PER_E)
    return np.minimum(bins, _NUM_BINS - 1).astype(np.int64)


def _lower_edge(index: int) -> float:
    return index if index < _EXACT else _EXACT * float(np.exp((index - _EXACT) / _PER_E))


class SeenLoads:
    """Seconds by load: one histogram for each field of `StepLoad`, with bins of 2 % above 64. Empty at first."""

    def __init__(self) -> None:
        self._seconds = np.zeros((len(StepLoad._fields), _NUM_BINS))
        self._low = np.full(len(StepLoad._fields), np.inf)
        self._high = np.full(len(StepLoad._fields), -np.inf)
        self._steps: list[tuple[StepLoad, float]] = []
        self._decodes: list[tuple[int, int, int, float]] = []

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenLoads):
            return NotImplemented
        self._flush()
        other._flush()
        is_equal: bool = np.array_equal(self._seconds, other._seconds)
        return is_equal

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def add_step(self, load: StepLoad, seconds: float) -> None:
        """Add a step and its duration."""
        self._steps.append((load, seconds))
        if len(self._steps) >= _MAX_BUFFERED:
            self._flush()

    def add_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int, seconds: float) -> None:
        """Add `num_steps` steps in which every row decodes one token, which take `seconds` together. The first step
        reads `num_context_tokens` positions, every later one `num_rows` more."""
        self._decodes.append((num_rows, num_context_tokens, num_steps, seconds))
        if len(self._decodes) >= _MAX_BUFFERED:
            self._flush()

    def add_loads(self, loads: FloatArray, seconds: FloatArray) -> None:
        """Add an array of loads, [steps, fields of `StepLoad`], and the duration of each step."""
        if not len(loads):
            return
        self._low = np.minimum(self._low, loads.min(axis=0))
        self._high = np.maximum(self._high, loads.max(axis=0))
        for histogram, bins in zip(self._seconds, _bins(loads).T, strict=True):
            histogram += np.bincount(bins, seconds, _NUM_BINS)

    def add(self, other: SeenLoads) -> None:
        """Add the loads of another simulation."""
        other._flush()
        self._seconds += other._seconds
        self._low, self._high = np.minimum(self._low, other._low), np.maximum(self._high, other._high)

    @classmethod
    def of_parts(cls, parts: Iterable[SeenLoads | None]) -> SeenLoads:
        """The loads of several simulations together; None: the loads of a simulation were not recorded."""
        whole = cls()
        for part in parts:
            if part is not None:
                whole.add(part)
        return whole

    def _flush(self) -> None:
        if self._steps:
            self.add_loads(
                np.array([load for load, _ in self._steps], dtype=np.float64),
                np.array([seconds for _, seconds in self._steps]),
            )
            self._steps.clear()
        if self._decodes:
            rows, context, steps, seconds = np.array(self._decodes, dtype=np.float64).T
            for share in (0.25, 0.75):  # half of the time each, at the middle of either half of the run
                read = np.floor(context + share * (steps - 1) * rows)
                self.add_loads(np.stack([rows, rows, read, read, rows], axis=1), seconds / 2)
            self._decodes.clear()

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        self._flush()
        return float(self._seconds[0].sum())

    def hull(self) -> Hull:
        """The hull of these loads.

        Raises:
            ValueError: there are no loads.
        """
        if not self.seconds > 0:
            raise ValueError("there are no steps with a duration")
        ranges = {}
        for number, part in enumerate(StepLoad._fields):
            below = np.cumsum(self._seconds[number])
            total = below[-1]
            first = int(np.searchsorted(below, SHARE * total, side="right"))
            last = int(np.searchsorted(below, (1 - SHARE) * total))
            low = max(self._low[number], np.ceil(_lower_edge(first)))
            high = min(self._high[number], np.ceil(_lower_edge(last + 1)) - 1)
            ranges[part] = (int(low), int(max(low, high)))
        return Hull(ranges)

    def share_above(self, part: str, value: float) -> float:
        """Share of the time in which the field `part` was above `value`."""
        return self._share(part, lambda bins: bins > _bins(np.array([value])))

    def share_below(self, part: str, value: float) -> float:
        """Share of the time in which the field `part` was below `value`."""
        return self._share(part, lambda bins: bins < _bins(np.array([value])))

    def _share(self, part: str, which: Any) -> float:
        if not self.seconds > 0:
            return 0.0
        histogram = self._seconds[StepLoad._fields.index(part)]
        return float(histogram[which(np.arange(_NUM_BINS))].sum() / histogram.sum())


class Outside(NamedTuple):
    """A field of `StepLoad` that is outside a hull."""

    part: str
    share: float
    """Share of the simulated time."""
    is_above: bool
    bound: int
    """The end of the hull's range that is exceeded."""

    @property
    def about(self) -> str:
        """Text such as "fewer requests in a step"."""
        return f"{'more' if self.is_above else 'fewer'} {PARTS[self.part]}"


class Hull:
    """The range of each field of `StepLoad` in a log, without `SHARE` of the time on either side."""

    __slots__ = ("ranges",)

    def __init__(self, ranges: Mapping[str, tuple[int, int]]) -> None:
        self.ranges: dict[str, tuple[int, int]] = dict(ranges)
        """(low, high) of each field of `StepLoad`, by its name."""

    def __eq__(self, other: object) -> bool:
        return self.ranges == other.ranges if isinstance(other, Hull) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # it is mutable

    def __repr__(self) -> str:
        return f"Hull({self.ranges})"

    @classmethod
    def of_loads(cls, loads: Iterable[Iterable[float]], seconds: FloatArray | None = None) -> Hull:
        """The hull of loads, [steps, fields of `StepLoad`].

        Args:
            loads: the load of each step.
            seconds: duration of each step; None: all are equal.
        """
        array = np.array(list(loads), dtype=np.float64)
        seen = SeenLoads()
        seen.add_loads(array, np.ones(len(array)) if seconds is None else seconds)
        return seen.hull()

    def outside(self, seen: SeenLoads) -> list[Outside]:
        """Where a simulation is outside this hull for at least `MIN_SHARE` of its time."""
        found = []
        for part in PARTS:
            low, high = self.ranges[part]
            below = seen.share_below(part, min(low / MIN_RATIO, low - MIN_DISTANCE * high))
            above = seen.share_above(part, MIN_RATIO * high)
            found += [Outside(part, below, False, low), Outside(part, above, True, high)]
        return [each for each in found if each.share >= MIN_SHARE]


class WatchedStepTime:
    """Step times that record the loads of the steps, and for how long they last.

    A replica plans more decodes than happen before the next arrival. It therefore calls `note_decodes` with those that
    did happen.
    """

    def __init__(self, step_time: StepTime) -> None:
        self.step_time: StepTime = step_time.step_time if isinstance(step_time, WatchedStepTime) else step_time
        self.seen = SeenLoads()

    def of_step(self, load: StepLoad) -> float:
        seconds = self.step_time.of_step(load)
        self.seen.add_step(load, seconds)
        return seconds

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        return self.step_time.of_decodes(num_rows, num_context_tokens, num_steps)

    def note_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int, seconds: float) -> None:
        """Record a run of decodes that has happened; see `SeenLoads.add_decodes`."""
        self.seen.add_decodes(num_rows, num_context_tokens, num_steps, seconds)

    def take_seen(self) -> SeenLoads:
        """The loads since the last call."""
        seen, self.seen = self.seen, SeenLoads()
        return seen


class _Seen(Protocol):
    """A profile, as `warn_outside` reads it."""

    @property
    def hull(self) -> Hull: ...
    @property
    def source(self) -> str: ...


def warn_outside(profile: _Seen, seen: SeenLoads) -> list[str]:
    """A sentence on where a simulation is outside the hull of the profile's log; no sentence if it is inside.

    Args:
        profile: the profile whose step times were used.
        seen: the loads of the simulation, see `WatchedStepTime`.
    """
    found = [
        f"{each.share:.0%} of the simulated time has {each.about} than its {each.bound:,}"
        for each in profile.hull.outside(seen)
    ]
    if not found:
        return []
    return [
        f"step times are extrapolated beyond those of {profile.source}: {', '.join(found)}; calibrate with a log of "
        "such a load"
    ]
