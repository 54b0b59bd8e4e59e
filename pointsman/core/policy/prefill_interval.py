"""The interval between steps that compute prompts, while requests decode (vLLM's `prefill_schedule_interval`).

Between two such steps, partial prefills wait, and so does a request whose prompt is not cached: decode then runs in
longer stretches of short steps. In data parallel engines that wait for each other in every step, the steps with prompts
can be aligned, so that no engine waits for the prompt of another.

A step holds prompts back if all of the following are true:

    interval      fewer than `interval` steps have passed since the last step that computed a prompt; or, with the
                  interval "host", the host holds prompts back (`Scheduler.hold_prefills`)
    decode        a running request decodes
    no backlog    in the last step that held no prompt back, admissions emptied the queue, except for skipped requests;
                  otherwise the capacity bounds the prompts, and an interval would only lower the throughput

A request with one uncached token is admitted in any step, as it costs no more than a decode.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Limit
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.events import StepDecision, StepRun
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

Int64Array = npt.NDArray[np.int64]


class PrefillInterval(Limit):
    """Holds prompts back between two steps that compute prompts.

    Args:
        interval: number of steps from a step that computes a prompt to the next one; None: the host decides.
        batch: the running requests.
    """

    is_shared = True  # between two steps `holds` may be out of date, and `can_advance` must not rely on it

    def __init__(self, interval: int | None, batch: Batch) -> None:
        self._interval = interval
        self._batch = batch
        self.is_held_by_host = False
        """Whether the host holds prompts back."""
        self.holds = False
        """Whether the step holds prompts back."""
        self.held_last = False
        """Whether the newest decided step held prompts back."""
        self._num_since: int | None = None  # steps since the last step that computed a prompt; None: there was none
        self._has_backlog = False
        self._computes_prompt = False  # whether the present step does
        self._num_left: int | None = None  # queued requests after the step's admissions; None: no request was checked

    def set_held(self, is_held: bool) -> None:
        """Set whether the host holds prompts back from the next step on."""
        self.is_held_by_host = is_held

    # ------------------------------------------------------------------ as a limit

    def open_step(self, num_requests: int) -> None:
        self.holds = self._must_hold()
        self._computes_prompt, self._num_left = False, None

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if self.holds and batch.num_prefilling:
            want[(batch.flags[rows] & PREFILLING) != 0] = 0

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return Deferral(Reason.PREFILL_INTERVAL, 0) if self.holds_back(request, start) else want

    def holds_back(self, request: Request, start: int) -> bool:
        """Whether the step holds back a waiting request of which `start` tokens are cached."""
        return self.holds and start < request._state.num_tokens - 1

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        is_admitted = request._state.status is not RequestStatus.RUNNING
        if not is_admitted or start < request._state.num_tokens - 1:
            self._computes_prompt = True

    def close_queue(self, num_left: int) -> None:
        self._num_left = num_left

    def guaranteed_steps(self, num_steps: int) -> int:
        is_bounded = self._interval is not None and self._must_hold()
        return min(num_steps, self._num_remaining()) if is_bounded else num_steps

    def _must_hold(self) -> bool:
        """Whether the next step holds prompts back."""
        is_early = self.is_held_by_host if self._interval is None else self._num_remaining() > 0
        has_decode = len(self._batch.members.requests) > self._batch.num_prefilling
        return is_early and has_decode and not self._has_backlog

    def _num_remaining(self) -> int:
        """Number of the next steps that are too early for prompts."""
        if self._interval is None or self._num_since is None:
            return 0
        return max(0, self._interval - 1 - self._num_since)

    # ------------------------------------------------------------------ as a listener

    def on_step(self, step: StepDecision) -> None:
        """Count the step, and note whether its admissions left a backlog."""
        assert step.output is not None
        self.held_last = self.holds
        self._note_backlog(0 if self.holds else 1)
        if self._computes_prompt:
            self._num_since = 0
        elif step.output.num_rows and self._num_since is not None:
            self._num_since += 1
        self._computes_prompt = False

    def on_steps(self, run: StepRun) -> None:
        """As `on_step`, for steps of plain decodes."""
        num_held = run.num_steps if self._interval is None else min(run.num_steps, self._num_remaining())
        if not self.holds:
            num_held = 0
        self.held_last = num_held == run.num_steps
        self._note_backlog(run.num_steps - num_held)
        if self._num_since is not None:
            self._num_since += run.num_steps

    def on_failed(self, num_steps: int, now: float) -> None:
        """Compute the prompts of void steps in the next step."""
        self._num_since, self._has_backlog = None, False

    def _note_backlog(self, num_open: int) -> None:
        """Note the backlog that `num_open` steps, which held no prompt back, have left."""
        if num_open and self._num_left is not None:
            self._has_backlog = self._num_left > 0
        self._num_left = None


def make_prefill_interval(config: SchedulerConfig, batch: Batch) -> PrefillInterval | None:
    """The interval of the configuration; None: prompts may be computed in every step."""
    interval = config.prefill_interval
    if interval == 1:
        return None
    return PrefillInterval(interval if isinstance(interval, int) else None, batch)
