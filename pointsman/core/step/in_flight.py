"""Steps that were scheduled and are not over: what must be known to finish them, or to take them back."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepOrderError
from pointsman.core.kv.manager import Journal
from pointsman.core.state.batch import Members
from pointsman.core.state.output import Load, SchedulerOutput
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.admission import Grant


@dataclass(slots=True)
class AdmittedRequest:
    """One admission: what it got, and how to undo it."""

    request: Request
    row: int
    serial: int
    previous_status: RequestStatus
    previous_serial: int
    grant: Grant
    blocks: npt.NDArray[np.int64]
    """Its block table."""


@dataclass(slots=True)
class StepRecord:
    """A step in flight."""

    step_id: int
    journal: Journal = field(default_factory=list)
    """What entered the prefix tree while this was the newest step."""
    admitted: list[AdmittedRequest] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    """What it asks the host to load, for admitted requests and for those that wait for it."""
    output: SchedulerOutput | None = None
    is_over: bool = False
    """Whether its result has come."""
    members: Members | None = None
    """The running rows, if the output names all of them and all sample: then `update` need not look them up."""


def too_many_in_flight(in_flight: deque[StepRecord], most: int) -> StepOrderError:
    """Why no further step may be scheduled before the oldest one is updated."""
    return StepOrderError(
        f"{len(in_flight)} step(s) in flight, and max_steps_in_flight is {most}; "
        f"update step {in_flight[0].step_id} first"
    )


def not_the_oldest(in_flight: deque[StepRecord], output: SchedulerOutput) -> StepOrderError:
    """Why a step may not be updated, which is not the oldest one in flight."""
    oldest = f"step {in_flight[0].step_id} is the oldest" if in_flight else "no step is"
    return StepOrderError(f"step {output.step_id} cannot be updated now: {oldest} in flight")


def require_in_flight(in_flight: deque[StepRecord], output: SchedulerOutput) -> None:
    """Raises StepOrderError unless `output` is that of a step in flight."""
    if not any(record.output is output for record in in_flight):
        raise StepOrderError(f"step {output.step_id} is not in flight: it was updated or failed before")
