"""Bounded step times: no step is faster than a floor.

A fit to a log says nothing about loads that the log does not have. The floor does: it is the time in which the device
can read what the step reads, and compute what the step computes (`RooflineStepTime.bound`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.sim.step_time import StepLoad, StepTime


class BoundedStepTime:
    """Step times, or the floor where they are below it.

    Args:
        step_time: the step times.
        floor: the shortest possible step times.
    """

    __slots__ = ("floor", "step_time")

    def __init__(self, step_time: StepTime, floor: StepTime) -> None:
        self.step_time = step_time
        self.floor = floor

    def of_step(self, load: StepLoad) -> float:
        return max(self.step_time.of_step(load), self.floor.of_step(load))

    def of_decodes(self, num_rows: int, num_context_tokens: int, num_steps: int) -> npt.NDArray[np.float64]:
        seconds = self.step_time.of_decodes(num_rows, num_context_tokens, num_steps)
        return np.maximum(seconds, self.floor.of_decodes(num_rows, num_context_tokens, num_steps), out=seconds)


def bounded(step_time: StepTime, floor: StepTime | None) -> StepTime:
    """The step times with a floor; None: without one."""
    return step_time if floor is None else BoundedStepTime(step_time, floor)
