"""Counted schedulers of `vllm_engine.py`, vLLM's own and ours, which are also timed on request.

vLLM loads them with `--scheduler-cls`, and `CoreClock` with `--worker-extension-cls`: its workers take methods from
there. A single worker is in the process of the engine core.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler as OwnScheduler

from pointsman.integrations.vllm import Scheduler as DropIn


class Count:
    """Counters of the only scheduler in this process, since it was made."""

    timed = False
    """Whether its calls are timed: reading the clock of a thread is a system call, and a step would make four."""
    seconds = 0.0
    """CPU time of the thread in `schedule` and `update_from_output`, while they were timed."""
    steps = 0
    tokens = 0
    """Output tokens for clients; in greedy decode each output has one."""


class CoreClock:
    """Methods that can be called on a worker."""

    def core_clock(self, timed: bool) -> dict[str, float]:
        """CPU seconds of the process, all its threads, and of the scheduler in it; steps and output tokens. `timed`
        switches the timing of the scheduler on or off."""
        Count.timed = timed
        return {
            "core": time.process_time(),
            "scheduler": Count.seconds,
            "steps": Count.steps,
            "tokens": Count.tokens,
        }


class Timed:
    """Mixin over a scheduler."""

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
    """vLLM's own scheduler."""


class TimedDropIn(Timed, DropIn):
    """Ours."""
