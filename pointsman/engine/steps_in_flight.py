"""Steps that were scheduled and whose results the scheduler does not know yet, in order.

    output, execution = steps.run_oldest()     schedules and submits as many as may be in flight, waits for the oldest

With one step in flight everything happens in the caller's thread. With more, a `Worker` executes the steps, and the
caller has the time of the forward pass for everything else.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from pointsman.engine.errors import EngineStepError
from pointsman.engine.openings import Openings
from pointsman.engine.worker import Worker

if TYPE_CHECKING:
    from pointsman.core import Scheduler, SchedulerOutput
    from pointsman.engine.counters import EngineCounters
    from pointsman.engine.model_runner import ModelRunner, PreparedStep, StepExecution


class _Step(NamedTuple):
    output: SchedulerOutput
    execution: Future[StepExecution] | PreparedStep
    """As the worker will give it; without a worker, what to run when it is collected."""


class StepsInFlight:
    """The steps of one engine on their way through its model.

    Args:
        scheduler: whose outputs these are; its `max_steps_in_flight` says how many, and whether there is a worker.
        runner: prepares and executes them.
        schedule: decides one more.
        clock: the engine's, in seconds.
        counters: of the engine; the time that is spent here is counted there.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        schedule: Callable[[], SchedulerOutput],
        clock: Callable[[], float],
        counters: EngineCounters,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._schedule = schedule
        self._clock = clock
        self._counters = counters
        self._most = scheduler.config.max_steps_in_flight
        self._openings = Openings()
        self._worker = Worker("pointsman-steps", self._openings) if self._most > 1 else None
        self._steps: deque[_Step] = deque()

    def __len__(self) -> int:
        """Steps that were submitted and not collected."""
        return len(self._steps)

    def run_oldest(self) -> tuple[SchedulerOutput, StepExecution]:
        """The oldest step in flight and what came back from the model for it.

        Before it waits, further steps are scheduled and submitted, as far as they may be in flight and would have
        something to run.

        Raises:
            EngineStepError: the model failed. The step, and any scheduled after it, is void: the scheduler is as it
                was before it, and the next call decides anew.
        """
        while not self._steps or (len(self._steps) < self._most and self._scheduler.can_advance()):
            if self._steps:
                self._openings.wait()
            self._submit(self._schedule())
        return self.collect()

    def collect(self) -> tuple[SchedulerOutput, StepExecution]:
        """The same without scheduling a further step; there is one in flight.

        Raises:
            EngineStepError: see `run_oldest`.
        """
        started = time.perf_counter()
        output, pending = self._steps[0]
        try:
            execution = pending.result() if isinstance(pending, Future) else self._runner.run(pending)
        except BaseException as error:  # also KeyboardInterrupt, while it waits: the decision must not stand
            self.void()
            if not isinstance(error, Exception):
                raise
            raise EngineStepError(f"step {output.step_id} failed: {type(error).__name__}: {error}") from error
        self._steps.popleft()
        self._counters.execute_time += time.perf_counter() - started
        return output, execution

    def void(self) -> None:
        """Take back every step in flight, as soon as the model is done with the one that it executes."""
        futures = [step.execution for step in self._steps if isinstance(step.execution, Future)]
        wait([future for future in futures if not future.cancel()])
        self._steps.clear()
        self._runner.loaded.context.end()
        void = self._scheduler.outputs_in_flight
        if void and self._runner.connector is not None:
            self._runner.connector.void(void)
        if void:
            self._scheduler.fail(void[0], self._clock())

    def void_if_broken_off(self) -> None:
        """Take back everything if a call ended, by an exception, between the scheduler's decision and here."""
        if len(self._steps) != self._scheduler.num_steps_in_flight:
            self.void()

    def close(self) -> None:
        """Take back every step, and end the worker until there is a further one."""
        self.void()
        if self._worker is not None:
            self._worker.close()

    def _submit(self, output: SchedulerOutput) -> None:
        """Have a step executed, behind those before it."""
        started = time.perf_counter()
        try:
            prepared = self._runner.prepare(output)
        except Exception as error:
            self.void()
            raise EngineStepError(f"step {output.step_id} failed: {type(error).__name__}: {error}") from error
        execution: Future[StepExecution] | PreparedStep = prepared
        if self._worker is not None:
            prepared.batch.announce = self._openings.announce
            execution = self._worker.submit(partial(self._runner.run, prepared))
        self._steps.append(_Step(output, execution))
        self._counters.execute_time += time.perf_counter() - started
