"""Pausing: pauses and resumes an engine, with vLLM's modes for its unfinished requests.

| mode | running requests | waiting requests |
| --- | --- | --- |
| "abort" | are aborted, finish_reason "abort" | the same |
| "wait" | run until they finish | wait for `resume` |
| "keep" | are suspended, and continue after `resume` | wait for `resume` |

Requests may be added during a pause, and wait. A pause is complete when nothing will be computed until `resume`: no
step is in flight, and no request runs or all are suspended. Then the weights may be changed. With `clear_cache` all KV
of the old weights is dropped at that moment, and suspended requests recompute their KV.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, get_args

from pointsman.core import PauseMode

if TYPE_CHECKING:
    from pointsman.core import Scheduler

PauseChoice = Literal["abort", "wait", "keep"]
PAUSE_CHOICES: tuple[PauseChoice, ...] = get_args(PauseChoice)


class ResumedError(RuntimeError):
    """The engine was resumed before a pause was complete, so the caller of `pause` must not change the weights."""


class Pausing:
    """Pauses and resumes one engine.

    Args:
        scheduler: the engine's scheduler.
        clock: the engine's clock, in seconds.
        abort_all: function that aborts every request of the engine, and reports their last outputs.
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float], abort_all: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._abort_all = abort_all
        self._clears_cache = False
        self.waiting: list[Future[None]] = []
        """Futures that `pause` has returned and that are not done, because the pause is incomplete."""

    def pause(self, mode: PauseChoice, *, clear_cache: bool) -> Future[None]:
        """Pause the engine; the returned future is done when the pause is complete. The mode of a later call replaces
        the mode of earlier calls, for all callers.

        Raises:
            ValueError: there is no such mode.
        """
        if mode not in PAUSE_CHOICES:
            raise ValueError(f"the pause mode is {mode!r}; choose one of {', '.join(PAUSE_CHOICES)}")
        self._scheduler.pause(self._clock(), PauseMode.ALL if mode == "keep" else PauseMode.ADMISSIONS)
        self._clears_cache = clear_cache or (self._clears_cache and bool(self.waiting))
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # a caller that gives up waiting must not cancel the future
        self.waiting.append(future)
        if mode == "abort":
            self._abort_all()
        self.complete_if_idle()
        return future

    def resume(self) -> None:
        """Resume the engine; the futures of an incomplete pause raise `ResumedError`."""
        self._scheduler.resume(self._clock())
        self.fail(ResumedError("the engine was resumed before the pause was complete"))

    def complete_if_idle(self) -> None:
        """Complete the pause if no step is in flight and no request can run. Called after every step and every finished
        request while callers of `pause` wait (`waiting` is not empty)."""
        if not self.waiting or self._scheduler.has_runnable_requests() or self._scheduler.num_steps_in_flight:
            return
        if self._clears_cache:
            self._scheduler.reset_prefix_cache(self._clock(), preempt_running=True)
        waiting, self.waiting = self.waiting, []
        self._clears_cache = False
        for future in waiting:
            future.set_result(None)

    def fail(self, error: Exception) -> None:
        """Fail the futures of an incomplete pause with an error."""
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.set_exception(error)
