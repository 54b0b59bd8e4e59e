"""A recording, replayed later on another machine, and asked why a request waited.

    python examples/replay_recording.py

`Recorder` writes each call and each decision of a scheduler. `replay` makes the calls on a new scheduler and compares
every decision. A listener asks that scheduler questions in the middle of the run.
"""

from __future__ import annotations

import io

from pointsman import Listener, Recorder, Request, Scheduler, SchedulerConfig, StepResult, replay
from pointsman.core import StepDecision


def record() -> str:
    """Three requests in a pool that holds two of them."""
    file = io.StringIO()
    config = SchedulerConfig(num_blocks=8, block_size=4, max_model_len=32, max_num_seqs=4)
    scheduler = Scheduler(config, recorder=Recorder(file))
    for number in range(3):
        prompt = range(10 * number, 10 * number + 10)
        scheduler.add(Request(f"r{number}", prompt, max_tokens=6, eos_token_ids=(), arrival_time=0.0), 0.0)
    now = 0.0
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule(now)
        now += 0.02
        scheduler.update(output, StepResult([7] * int(output.samples.sum())), now)
    return file.getvalue()


class Asking(Listener):
    """Asks the replaying scheduler about one request, whenever its answer changes."""

    def __init__(self, request_id: str) -> None:
        self.request_id, self.last = request_id, ""

    def attach(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        scheduler.add_listener(self)

    def on_step(self, step: StepDecision) -> None:
        sentence = self.scheduler.explain(self.request_id).sentence
        if sentence != self.last:
            print(f"step {step.step_id}: {sentence}")
        self.last = sentence


if __name__ == "__main__":
    report = replay(record().splitlines(), watch=Asking("r2").attach)
    print(f"{report.num_steps} steps replayed without a difference")
