"""Steps in flight: the records from which a step is updated or rolled back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.core.errors import StepOrderError
from pointsman.core.kv.cache import Journal, Match
from pointsman.core.state.batch import Members
from pointsman.core.state.events import StepDecision
from pointsman.core.state.output import Load, SchedulerOutput
from pointsman.core.state.reason import Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.running import Advance


class Grant(NamedTuple):
    """The cache hit, tokens and placeholders with which a request is admitted."""

    match: Match
    num_tokens: int
    """Number of tokens that the request computes in this step, at least 1 unless `is_async`."""
    num_cached_tokens: int
    """Number of leading tokens whose KV is cached or loaded."""
    charge: int
    """Number of tokens that are charged to the step's budget, at least `num_tokens`."""
    num_external_tokens: int = 0
    """Number of cached tokens that a connector loads or has loaded."""
    num_drafts: int = 0
    """Number of placeholders that the step verifies beside these tokens (`SchedulerConfig.pad_first_decodes`)."""
    is_async: bool = False
    """Whether KV must be loaded before the admission; if so, the request computes no token in this step."""

    @property
    def end(self) -> int:
        """Number of tokens for which the request has blocks after this step."""
        return self.num_cached_tokens + self.num_tokens + self.num_drafts


@dataclass(slots=True)
class AdmittedRequest:
    """One admission: the grant, and the state to restore if the admission is undone."""

    request: Request
    row: int
    serial: int
    previous_status: RequestStatus
    previous_serial: int
    grant: Grant
    blocks: npt.NDArray[np.int64]
    """Block table of the request."""
    samples: bool
    """Whether the request computes all its known tokens in this step, and so samples a token."""


@dataclass(slots=True)
class StepRecord(StepDecision):
    """A step that is being scheduled, or in flight."""

    journal: Journal = field(default_factory=list)
    """Changes to the prefix tree while this step was the newest."""
    preemptor: Request | None = None
    """Waiting request for which running requests were preempted."""
    advance: Advance | None = None
    """Tokens and blocks of the running rows; None: not yet decided."""
    admitted: list[AdmittedRequest] = field(default_factory=list)
    loads: Sequence[Load] = ()
    """Loads of KV that the host must do, for admitted requests and for requests that wait for their KV."""
    is_over: bool = False
    """Whether the step's result has been applied."""
    members: Members | None = None
    """The running rows, if the output contains all of them and all sample, so that `update` need not look the rows up;
    otherwise None."""

    def set_preemptor(self, request: Request | None) -> None:
        """Set the waiting request for which running requests were preempted; None: no request was preempted."""
        self.preemptor = request

    def add_load(self, load: Load) -> None:
        """Add a load of KV that the host must do."""
        self.loads = (*self.loads, load)

    def set_over(self) -> None:
        """Record that the step's result has been applied."""
        self.is_over = True

    def set_blocked_reason(self, reason: Reason) -> None:
        """Set the reason why the head of the queue is not admitted."""
        self.blocked_by = reason

    def set_advance(self, advance: Advance) -> None:
        """Set the tokens and blocks of the running rows."""
        self.advance = advance

    def set_output(self, output: SchedulerOutput, members: Members, returned: Sequence[npt.NDArray[np.int64]]) -> None:
        """Set the step's output. `members`: the running rows; `returned`: the new value of `returned_blocks`, see
        `StepDecision`."""
        self.output = output
        self.returned_blocks = returned
        samples = output.samples
        if samples is members.trues or len(samples) == len(members.requests) == np.count_nonzero(samples):
            self.members = members


class StepsInFlight:
    """The steps that are scheduled and not yet updated, oldest first."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.records: deque[StepRecord] = deque()

    @property
    def newest_step_id(self) -> int | None:
        return self.records[-1].step_id if self.records else None

    def too_many_error(self) -> StepOrderError:
        """The error for a further step while `max_steps` steps are in flight."""
        return StepOrderError(
            f"{len(self.records)} step(s) in flight, and max_steps_in_flight is {self.max_steps}; "
            f"update step {self.records[0].step_id} first"
        )

    def not_oldest_error(self, output: SchedulerOutput) -> StepOrderError:
        """The error for the update of a step that is not the oldest step in flight."""
        oldest = f"step {self.records[0].step_id} is the oldest" if self.records else "no step is"
        return StepOrderError(f"step {output.step_id} cannot be updated now: {oldest} in flight")

    def remove_from(self, output: SchedulerOutput) -> list[StepRecord]:
        """Remove a step and all later steps; returns their records, newest first. Raises StepOrderError if the step is
        not in flight."""
        if not any(record.output is output for record in self.records):
            raise StepOrderError(f"step {output.step_id} is not in flight: it was updated or failed before")
        taken: list[StepRecord] = []
        while not taken or taken[-1].output is not output:
            taken.append(self.records.pop())
        return taken

    def num_tokens(self, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows] number of tokens that steps in flight compute in each row. A row of a step in flight is not
        reused."""
        count = np.zeros(num_rows, dtype=np.int64)
        for record in self.records:
            output = record.output
            if output is not None and not record.is_over:
                count[output.rows] += output.num_scheduled_tokens
        return count

    def num_final_tokens(self, request: Request) -> int:
        """Number of leading tokens of a running request whose KV is final. Steps in flight may still fail, and then the
        KV that they load or share with an admission is lost."""
        state = request._state
        count = state.num_computed_tokens
        for record in self.records:
            output = record.output
            if output is None or record.is_over:
                continue
            if any(entry.serial == state.serial for entry in record.admitted):
                return 0
            own = (output.rows == state.row) & (output.serials == state.serial)
            count -= int(output.num_scheduled_tokens[own].sum())
        return count
