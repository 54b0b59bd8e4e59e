"""Both schedulers of `vllm_engine.py`, vLLM's own and ours, counted, and timed where that is asked for.

vLLM is told of them with `--scheduler-cls`, and of `CoreClock` with `--worker-extension-cls`: its workers take methods
from there, and where there is one worker, it is in the process of the engine core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler

from pointsman.integrations.vllm import Scheduler as DropIn


class Count:
    """Of the one scheduler in this process, since it was made."""

    timed = False
    """Whether its calls are timed: reading the clock of a thread is a system call, of which a step would make four."""
    seconds = 0.0
    """CPU time of the thread in `schedule` and `update_from_output`, while they were timed."""
    steps = 0
    tokens = 0
    """For clients; in greedy decode there is one in each output."""


class CoreClock:
    """What a worker can be asked."""

    def core_clock(self, timed: bool) -> dict[str, float]:
        """CPU seconds of the process, all its threads, and of the scheduler in it; steps and output tokens. From here
        on the scheduler is timed, or not."""
        Count.timed = timed
        return {
            "core": time.process_time(),
            "scheduler": Count.seconds,
            "steps": Count.steps,
            "tokens": Count.tokens,
        }


class Timed:
    """Over a scheduler."""

    def schedule(self, *args: Any) -> Any:
        Count.steps += 1
        return _timed(super().schedule, *args)  # type: ignore[misc]

    def update_from_output(self, *args: Any) -> Any:
        outputs = _timed(super().update_from_output, *args)  # type: ignore[misc]
        Count.tokens += sum(len(each.outputs) for each in outputs.values())
        return outputs


def _timed(call: Callable[..., Any], *args: Any) -> Any:
    if not Count.timed:
        return call(*args)
    start = time.thread_time()
    answer = call(*args)
    Count.seconds += time.thread_time() - start
    return answer


class TimedOwn(Timed, OwnScheduler):
    """vLLM's own."""


class TimedDropIn(Timed, DropIn):
    """Ours."""
