"""Pointsman's side of `scheduler_step.py`."""

from __future__ import annotations

from itertools import count

import numpy as np
import numpy.typing as npt
from _scheduler_worker import BLOCK_SIZE, EOS, STOP_TOKENS, Session, Settings, serve

from pointsman.core import Request, Scheduler, SchedulerConfig, SchedulerOutput, StepResult


class PointsmanSession(Session):
    """Pointsman's scheduler; its counters are always on."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.scheduler = scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=settings.num_blocks,
                num_reserved_blocks=1,  # as vLLM's block 0, so that both have the same room
                block_size=BLOCK_SIZE,
                max_model_len=settings.max_model_len,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_steps_in_flight=settings.max_steps_in_flight,
                num_draft_tokens=settings.num_draft_tokens,
                max_loras=settings.num_loras,
                enable_prefix_caching=True,
                **settings.knobs,
            )
        )
        self.arrivals = count()
        self.add = lambda request: scheduler.add(request, 0.0)
        self.schedule = lambda: scheduler.schedule(0.0)
        self.update = lambda output, result: scheduler.update(output, result, 0.0)
        self.propose = lambda output, token_ids, counts: scheduler.propose(output, token_ids, counts, 0.0)
        self.abort = lambda request_id: scheduler.abort(request_id, 0.0)

    def make_request(self, request_id: str, prompt: npt.NDArray[np.int32], max_tokens: int) -> Request:
        return Request(
            request_id,
            prompt,
            arrival_time=float(next(self.arrivals)),
            max_tokens=max_tokens,
            eos_token_ids=(EOS,),
            ignore_eos=True,
            adapter=(f"adapter {len(prompt) % self.settings.num_loras}", 1) if self.settings.num_loras else None,
            stop_token_ids=STOP_TOKENS[: self.settings.num_stop_tokens],
        )

    def result(self, output: SchedulerOutput) -> StepResult:
        return StepResult(self.tokens(int(output.samples.sum())))

    def decode_result(self, like: SchedulerOutput) -> StepResult:
        return StepResult(self.tokens(like.num_rows))

    def verified_result(self, running: int) -> StepResult:
        counts = self.rng.integers(1, 2 + self.settings.num_draft_tokens, size=running)
        return StepResult(self.tokens(int(counts.sum())), counts)

    def num_scheduled(self, output: SchedulerOutput) -> tuple[int, int]:
        return output.num_rows, output.total_num_scheduled_tokens

    def counts(self) -> tuple[int, int]:
        return self.scheduler.num_running, self.scheduler.num_queued

    def num_preemptions(self, request: Request) -> int:
        return request.num_preemptions


if __name__ == "__main__":
    serve(PointsmanSession)
