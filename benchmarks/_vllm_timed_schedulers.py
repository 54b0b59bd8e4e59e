"""Both schedulers of `vllm_engine.py`, vLLM's own and ours, with a clock on the calls of a step.

vLLM is told of them with `--scheduler-cls`, and of `CoreClock` with `--worker-extension-cls`: its workers take methods
from there, and where there is one worker, it is in the process of the engine core. The clock costs both sides the same,
some microseconds a step.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler

from pointsman.integrations.vllm import Scheduler as DropIn


class Count:
    """Of the one scheduler in this process, since it was made."""

    seconds = 0.0
    """CPU time of the thread in `schedule` and `update_from_output`."""
    steps = 0
    tokens = 0
    """For clients; in greedy decode there is one in each output."""


class CoreClock:
    """What a worker can be asked."""

    def core_clock(self) -> dict[str, float]:
        """CPU seconds of the process, all its threads, and of the scheduler in it; steps and output tokens."""
        return {
            "core": time.process_time(),
            "scheduler": Count.seconds,
            "steps": Count.steps,
            "tokens": Count.tokens,
        }


class Timed:
    """Over a scheduler."""

    def schedule(self, *args: Any) -> Any:
        start = time.thread_time()
        output = super().schedule(*args)  # type: ignore[misc]
        Count.seconds += time.thread_time() - start
        Count.steps += 1
        return output

    def update_from_output(self, *args: Any) -> Any:
        start = time.thread_time()
        outputs = super().update_from_output(*args)  # type: ignore[misc]
        Count.seconds += time.thread_time() - start
        Count.tokens += sum(len(each.outputs) for each in outputs.values())
        return outputs


class TimedOwn(Timed, OwnScheduler):
    """vLLM's own."""


class TimedDropIn(Timed, DropIn):
    """Ours."""
