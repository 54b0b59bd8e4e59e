"""Fixed steps: the times of a log's requests as functions of step times, while every step keeps its load.

A simulation of a log decides which requests each step has. Other step times that are nearly as good lead to nearly the
same steps. The time of a request is then a sum over its steps, from the arrival to its token, which is computed without
another simulation. Steps that no request's time separates count as one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.sim.accuracy import Times
from pointsman.sim.step_time import LinearStepTime, StepLoad, StepTime

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_SAME_TIME = 1e-6
"""Difference of two times of one event, as a share of a step's duration, that rounding may cause."""


class EngineSteps(NamedTuple):
    """The steps of one engine in a simulation, in order."""

    loads: FloatArray
    """Load of each step, [steps, fields of `StepLoad`]."""
    seconds: FloatArray
    """Duration of each step."""
    ends: FloatArray
    """End of each step; a step may begin later than the one before it ends."""


class RecordedSteps:
    """Step times that keep the steps of one engine."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._runs: list[tuple[StepLoad, int, float]] = []  # first load, number of steps, seconds of all

    def of_step(self, load: StepLoad) -> float:
        seconds = self._step_time.of_step(load)
        self._runs.append((load, 1, seconds))
        return seconds

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> FloatArray:
        return self._step_time.of_decodes(num_rows, num_context_tokens, num_steps)

    def note_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int, seconds: float) -> None:
        """Keep a run of decodes that has happened; see `WatchedStepTime.note_decodes`."""
        load = StepLoad(num_rows, num_rows, num_context_tokens, num_context_tokens, num_rows)
        self._runs.append((load, num_steps, seconds))

    def steps(self, ends: Sequence[float]) -> EngineSteps:
        """The steps so far.

        Args:
            ends: end of each event of the engine; an event is a step or a run of decodes. Steps that have been planned
                but have not ended are left out.
        """
        runs = self._runs[: len(ends)]
        counts = np.array([count for _, count, _ in runs])
        firsts = np.array([load for load, _, _ in runs], dtype=np.float64)
        number = np.concatenate([np.arange(count) for count in counts])
        loads = firsts.repeat(counts, axis=0)
        loads[:, 2:4] += (number * loads[:, 1])[:, None]
        # The steps of a run take nearly equal time, so only their sum is kept.
        seconds = (np.array([total for _, _, total in runs]) / counts).repeat(counts)
        until = (counts.repeat(counts) - 1 - number) * seconds
        return EngineSteps(loads, seconds, np.asarray(ends).repeat(counts) - until)


class FixedSteps:
    """The times of requests as functions of step times, with the steps of a simulation.

    Args:
        engines: the steps of each engine.
        engine_of: index of the engine of each request.
        times: the times of each request in the simulation.
    """

    def __init__(self, engines: Sequence[EngineSteps], engine_of: Int64Array, times: Times) -> None:
        self._times = times
        size = len(times)
        begin, share = np.zeros(size, dtype=np.int64), np.zeros(size)
        first, last = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)
        offset = 0
        cuts = [np.zeros(1, dtype=np.int64)]
        for index, steps in enumerate(engines):
            which = (engine_of == index).nonzero()[0]
            queued = times.queued[which]
            slack = _SAME_TIME * float(steps.seconds.min(initial=np.inf)) if len(which) else 0.0
            at = np.searchsorted(steps.ends, queued + slack)
            share[which] = np.minimum(1.0, (steps.ends[at] - queued) / steps.seconds[at])
            begin[which] = offset + at
            first[which] = offset + np.searchsorted(steps.ends, times.first_token[which] - slack)
            last[which] = offset + np.searchsorted(steps.ends, times.last_token[which] - slack)
            plain = steps.loads[:, 0] == steps.loads[:, 1]
            rows = steps.loads[:, 1]
            is_same = plain[1:] & plain[:-1] & (rows[1:] == rows[:-1])
            cuts += [np.array([offset]), offset + 1 + (~is_same).nonzero()[0]]
            offset += len(rows)
        at = np.unique(np.concatenate([*cuts, begin, begin + 1, first + 1, last + 1]))
        at = at[at < offset]
        loads = np.concatenate([steps.loads for steps in engines])
        self._counts = np.diff(np.append(at, offset)).astype(np.float64)
        self.loads: FloatArray = np.add.reduceat(loads, at) / self._counts[:, None]
        """Mean load of each segment, [segments, fields of `StepLoad`]."""
        # `at` has the first step of each segment; a request's steps are those from `begin`, of which it counts `share`.
        self._begin, self._share = np.searchsorted(at, begin), share
        self._first, self._last = np.searchsorted(at, first, "right"), np.searchsorted(at, last, "right")
        self.seconds = np.add.reduceat(np.concatenate([steps.seconds for steps in engines]), at)
        """Duration of each segment in the simulation."""
        self._floor: FloatArray | None = None

    def set_floor(self, floor: StepTime | None) -> None:
        """Set the shortest possible step times; None: not known."""
        self._floor = None
        if floor is not None:
            loads = [StepLoad(*load) for load in np.rint(self.loads).astype(int).tolist()]
            self._floor = np.array([floor.of_step(load) for load in loads])

    def step_seconds(self, step_time: LinearStepTime) -> FloatArray:
        """Duration of one step of each segment."""
        seconds = step_time.of_loads(self.loads)
        return seconds if self._floor is None else np.maximum(seconds, self._floor)

    def times(self, step_time: LinearStepTime) -> Times:
        """The times of the requests with these step times."""
        seconds = self.step_seconds(step_time)
        until = np.concatenate([[0.0], np.cumsum(seconds * self._counts)])
        start = until[self._begin] + (1 - self._share) * seconds[self._begin]
        queued = self._times.queued
        first, last = queued + until[self._first] - start, queued + until[self._last] - start
        return Times(queued, first, last, self._times.num_output_tokens)

    def total_seconds(self, step_time: LinearStepTime) -> float:
        """Duration of all steps."""
        return float((self.step_seconds(step_time) * self._counts).sum())
