"""Steps that were scheduled and are not over: what must be known to finish them, or to take them back."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pointsman.core.admission import Grant
from pointsman.core.batch import Members
from pointsman.core.kv_cache import Journal
from pointsman.core.output import SchedulerOutput
from pointsman.core.request import Request
from pointsman.core.status import RequestStatus


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
    output: SchedulerOutput | None = None
    members: Members | None = None
    """The running rows, if the output names all of them and all sample: then `update` need not look them up."""
