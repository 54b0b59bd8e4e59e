"""vLLM with Pointsman's scheduler in the place of its own.

    vllm serve MODEL --scheduler-cls pointsman.integrations.vllm.Scheduler

vLLM makes the scheduler in its engine-core process and calls it as it calls its own. What that interface demands is in
`scheduler.py` (what vLLM calls), `requests.py` (its requests as ours), `schedules.py` (our decisions as its
`SchedulerOutput`) and `results.py` (what its model runner returned as our `StepResult`, and the outputs for clients);
`support.py` says what is refused at the start, and `settings.py` which flag of vLLM is which knob of ours.

What operators have of it is in `operation.py`: a socket (`control.py`) on which questions are answered
(`questions.py`), recordings among them (`recordings.py`). `client.py` and `exposition.py` are the other end, which
needs no vLLM; `check.py` tells whether the vLLM that is installed will do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pointsman.integrations.vllm.scheduler import Scheduler

__all__ = ["Scheduler"]


def __getattr__(name: str) -> Any:
    if name == "Scheduler":  # it needs vLLM, and what tells whether a vLLM will do must work without
        from pointsman.integrations.vllm.scheduler import Scheduler

        return Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
