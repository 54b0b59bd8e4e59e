"""Worker of `_scheduler_policies.py`: runs the policies that the settings name, under an advancing clock.

Requests have the fields that policies read: one of eight tenants, one of four priorities, a prompt of its own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from _pointsman_worker import PointsmanSession
from _scheduler_worker import BLOCK_SIZE, EOS, Settings, serve

from pointsman.core import Request, SchedulerOutput, StepResult

SECONDS_OF_A_STEP = 0.01
SECONDS_OF_A_TOKEN = 5e-6
"""Seconds of a step on the clock that policies read: under the target of `target-itl` with 4,096 requests."""


class PolicySession(PointsmanSession):
    """Steps begin when the step before has ended, and last longer with more tokens."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.now = 0.0
        scheduler = self.scheduler

        def update(output: SchedulerOutput, result: StepResult) -> None:
            self.now += SECONDS_OF_A_STEP + SECONDS_OF_A_TOKEN * output.total_num_scheduled_tokens
            scheduler.update(output, result, self.now)

        self.add = lambda request: scheduler.add(request, self.now)
        self.schedule = lambda: scheduler.schedule(self.now)
        self.update = update

    def make_request(self, request_id: str, prompt: npt.NDArray[np.int32], max_tokens: int) -> Request:
        number = next(self.arrivals)
        return Request(
            request_id,
            prompt,
            arrival_time=number * 1e-3,
            max_tokens=max_tokens,
            eos_token_ids=(EOS,),
            ignore_eos=True,
            tenant=f"tenant {number % 8}",
            priority=number % 4,
        )

    def _add_waiting(self) -> None:
        """Add a request with the longest output, so that a reserve for outputs keeps all of them waiting."""
        request_id = f"w{self.num_added}"
        self.num_added += 1
        self.waiting_ids.append(request_id)
        prompt = self.tokens(BLOCK_SIZE + self.num_added % 64)
        self.add(self.make_request(request_id, prompt, self.settings.max_model_len - len(prompt)))


if __name__ == "__main__":
    serve(PolicySession)
