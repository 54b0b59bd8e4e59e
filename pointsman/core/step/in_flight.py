"""Steps in flight: the records that complete a step or roll it back."""

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
    """The tokens and blocks that an admission gives a request."""

    match: Match
    num_tokens: int
    """Tokens it computes in this step, at least 1 unless `is_async`."""
    num_cached_tokens: int
    """Tokens that need no computation."""
    charge: int
    """Tokens that count against the step's budget, at least `num_tokens`."""
    num_external_tokens: int = 0
    """Cached tokens that a connector loads or has loaded."""
    num_drafts: int = 0
    """Placeholders verified beside its tokens (`SchedulerConfig.pad_first_decodes`)."""
    is_async: bool = False
    """Whether KV must be loaded before the admission: then the request computes nothing in this step."""

    @property
    def end(self) -> int:
        """Number of tokens for which it has blocks after this step."""
        return self.num_cached_tokens + self.num_tokens + self.num_drafts


@dataclass(slots=True)
class AdmittedRequest:
    """One admission: its grant, and the state to restore if it is undone."""

    request: Request
    row: int
    serial: int
    previous_status: RequestStatus
    previous_serial: int
    grant: Grant
    blocks: npt.NDArray[np.int64]
    """Its block table."""
    samples: bool
    """Whether it computes all its known tokens, and so samples."""


@dataclass(slots=True)
class StepRecord(StepDecision):
    """A step that is being scheduled, or in flight."""

    journal: Journal = field(default_factory=list)
    """Changes to the prefix tree while this was the newest step."""
    preemptor: Request | None = None
    """The waiting request for which running ones were preempted."""
    advance: Advance | None = None
    """The work of the running rows."""
    admitted: list[AdmittedRequest] = field(default_factory=list)
    loads: Sequence[Load] = ()
    """Loads for the host, of admitted requests and of requests that wait for their KV."""
    is_over: bool = False
    """Whether its result has arrived."""
    members: Members | None = None
    """The running rows, if the output names all of them and all sample: then `update` need not look them up."""

    def preempted_for(self, request: Request | None) -> None:
        """Note the waiting request for which running ones were preempted; None: none was preempted."""
        self.preemptor = request

    def loaded(self, load: Load) -> None:
        """Add a load for the host."""
        self.loads = (*self.loads, load)

    def result_arrived(self) -> None:
        """Note that the step is over and its result is applied."""
        self.is_over = True

    def blocked(self, reason: Reason) -> None:
        """Note why the head of the queue is not admitted."""
        self.blocked_by = reason

    def advanced(self, advance: Advance) -> None:
        """Note the work of the running rows."""
        self.advance = advance

    def emitted(self, output: SchedulerOutput, members: Members, returned: Sequence[npt.NDArray[np.int64]]) -> None:
        """Note the step's output. `members` are the running rows; `returned`: see `returned_blocks`."""
        self.output = output
        self.returned_blocks = returned
        samples = output.samples
        if samples is members.trues or len(samples) == len(members.requests) == np.count_nonzero(samples):
            self.members = members


class StepsInFlight:
    """Steps scheduled and not yet updated, oldest first."""

    def __init__(self, max_steps: int) -> None:
        self.max_steps = max_steps
        self.records: deque[StepRecord] = deque()

    @property
    def newest_step_id(self) -> int | None:
        return self.records[-1].step_id if self.records else None

    def too_many(self) -> StepOrderError:
        """The error for a further step while `max_steps` are in flight."""
        return StepOrderError(
            f"{len(self.records)} step(s) in flight, and max_steps_in_flight is {self.max_steps}; "
            f"update step {self.records[0].step_id} first"
        )

    def not_the_oldest(self, output: SchedulerOutput) -> StepOrderError:
        """The error for the update of a step that is not the oldest in flight."""
        oldest = f"step {self.records[0].step_id} is the oldest" if self.records else "no step is"
        return StepOrderError(f"step {output.step_id} cannot be updated now: {oldest} in flight")

    def take_from(self, output: SchedulerOutput) -> list[StepRecord]:
        """Remove a step and all later ones, newest first. Raises StepOrderError if it is not in flight."""
        if not any(record.output is output for record in self.records):
            raise StepOrderError(f"step {output.step_id} is not in flight: it was updated or failed before")
        taken: list[StepRecord] = []
        while not taken or taken[-1].output is not output:
            taken.append(self.records.pop())
        return taken

    def num_tokens(self, num_rows: int) -> npt.NDArray[np.int64]:
        """[num_rows] tokens that steps in flight compute in each row. A row that they name is not reused."""
        count = np.zeros(num_rows, dtype=np.int64)
        for record in self.records:
            output = record.output
            if output is not None and not record.is_over:
                count[output.rows] += output.num_scheduled_tokens
        return count

    def num_sound_tokens(self, request: Request) -> int:
        """Tokens of a running request whose KV is final. Steps in flight may yet fail, and take with them the KV that
        they load or share with an admission."""
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
