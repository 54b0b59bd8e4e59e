"""Course of a replica's load over time: turns events into quantities (levels) that are constant until the next
event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from pointsman.sim.outcome import Event, Timeline
from pointsman.sim.simulator import Outcome

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Course:
    """The events of one replica as arrays with one element for each event, and the replica's load during the event."""

    start: FloatArray
    end: FloatArray
    num_steps: Int64Array
    num_rows: Int64Array
    """Number of requests in each step of the event."""
    num_tokens: Int64Array
    """Number of tokens computed in all steps of the event."""
    num_waiting: Int64Array
    kv_cache_usage: FloatArray
    """The larger of the shares of used blocks before and after the event: a finished request frees its blocks at the
    event's end."""


@dataclass(frozen=True, slots=True)
class Levels:
    """A quantity over time: its value is `values[i]` from `times[i]` to `times[i + 1]`, the last one until `end`, in
    virtual seconds."""

    times: FloatArray
    values: FloatArray
    end: float

    @property
    def mean(self) -> float | None:
        """The mean of the levels, weighted by time, from the first entry on."""
        if not len(self.times) or self.end <= self.times[0]:
            return None
        return float(np.diff(self.times, append=self.end) @ self.values / (self.end - self.times[0]))

    @property
    def max(self) -> float | None:
        return float(self.values.max()) if len(self.values) else None


def time_span(outcome: Outcome) -> tuple[float, float]:
    """Time of the first arrival, and the end of the simulation, in virtual seconds."""
    timings = outcome.timings
    begin = float(timings.arrival[0]) if timings.count else 0.0
    return begin, begin + outcome.seconds


def courses(outcome: Outcome) -> list[Course]:
    """The course of each replica."""
    return [_course(timeline) for timeline in outcome.timelines]


def _course(timeline: Timeline) -> Course:
    events = timeline.events
    num_fields = len(Event._fields)
    columns = np.fromiter(chain.from_iterable(events), np.float64, num_fields * len(events)).reshape(-1, num_fields)
    start, end, num_steps, num_rows, num_tokens, num_waiting, usage = np.ascontiguousarray(columns.T)
    before = np.concatenate([[0.0], usage[:-1]])[: len(usage)]
    return Course(
        start,
        end,
        num_steps.astype(np.int64),
        num_rows.astype(np.int64),
        num_tokens.astype(np.int64),
        num_waiting.astype(np.int64),
        np.maximum(before, usage),
    )


def levels(course: Course, values: FloatArray | Int64Array, begin: float, end: float) -> Levels:
    """The levels over time of `values`, one value for each event of `course`; 0 while the replica was idle."""
    stops = np.append(course.start[1:] > course.end[:-1], True)[: len(course.end)]
    times = np.concatenate([[begin], course.start, course.end[stops]])
    held = np.concatenate([[0.0], values, np.zeros(np.count_nonzero(stops))])
    order = times.argsort(kind="stable")
    return _without_empty_levels(times[order], held[order], end)


def sum_levels(parts: Sequence[Levels]) -> Levels:
    """The sum of a quantity over several replicas."""
    if len(parts) == 1:
        return parts[0]
    times = np.concatenate([part.times for part in parts])
    changes = np.concatenate([np.diff(part.values, prepend=0.0) for part in parts])
    order = times.argsort(kind="stable")
    return _without_empty_levels(times[order], changes[order].cumsum(), parts[0].end)


def scale_levels(part: Levels, factor: float) -> Levels:
    """The levels multiplied by `factor`."""
    return Levels(part.times, part.values * factor, part.end)


def downsample_levels(part: Levels, max_points: int) -> Levels:
    """At most `max_points` entries of `part`: the minimum and maximum of each of `max_points` / 2 intervals of equal
    duration."""
    times, values = part.times, part.values
    num_stretches = max(1, max_points // 2)
    if len(times) <= max_points:
        return part
    width = max(float(times[-1] - times[0]), 1e-12)
    stretch = np.minimum((times - times[0]) / width * num_stretches, num_stretches - 1).astype(np.int64)
    order = np.lexsort((values, stretch))  # within a stretch from the lowest to the highest
    edges = np.flatnonzero(np.diff(stretch[order], prepend=-1))
    lowest, highest = order[edges], order[np.append(edges[1:], len(order)) - 1]
    kept = np.unique(np.concatenate([lowest, highest]))
    return Levels(times[kept], values[kept], part.end)


def average_levels(part: Levels, num_intervals: int) -> Levels:
    """The mean of the levels in each of `num_intervals` intervals of equal duration."""
    times, values = np.append(part.times, part.end), part.values
    area = np.concatenate([[0.0], (values * np.diff(times)).cumsum()])
    edges = np.linspace(times[0], times[-1], num_intervals + 1)
    return Levels(edges[:-1], np.diff(np.interp(edges, times, area)) / np.diff(edges), part.end)


def _without_empty_levels(times: FloatArray, values: FloatArray, end: float) -> Levels:
    """The levels without entries of no duration: of several entries at one time, the last one is kept."""
    is_last = np.append(times[1:] > times[:-1], True)[: len(times)]
    return Levels(times[is_last], values[is_last], end)
