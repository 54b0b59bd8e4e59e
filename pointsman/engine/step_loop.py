"""StepLoop: runs the five parts of each step in order, or interleaved with the parts of other steps.

    schedule   the scheduler decides what runs
    prepare    the model's inputs are read from the scheduler
    run        the model computes, the sampler draws
    update     the scheduler appends the tokens and finishes requests
    report     tokens become outputs, for callers

With one step in flight these parts follow each other. With more (`max_steps_in_flight`), the thread that executes a
step uses the time in which other threads, or a GPU, compute the step. It updates and reports the preceding step,
schedules and prepares the next step, and launches the next step on the GPU: one part at each moment that the executing
step offers (`Meanwhile`). So all Python code stays in one thread; two threads would contend for Python's global lock
(GIL) when that costs most. A step that takes too little time to offer such a moment is updated and reported at its end,
as with one step in flight.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from pointsman.engine.errors import EngineStepError

if TYPE_CHECKING:
    from pointsman.core import Scheduler, SchedulerOutput, StepUpdate
    from pointsman.engine.counters import EngineCounters
    from pointsman.engine.drafts.prompt_lookup import PromptLookup
    from pointsman.engine.kv.events import KVEventsPublisher
    from pointsman.engine.model.prepared import PreparedStep
    from pointsman.engine.model.runner import LaunchedStep, ModelRunner, StepExecution
    from pointsman.engine.outputs.processor import OutputProcessor
    from pointsman.engine.pausing import Pausing


@dataclass(slots=True)
class _Step:
    output: SchedulerOutput
    prepared: PreparedStep | None = None
    launched: LaunchedStep | None = None


class _Updated(NamedTuple):
    output: SchedulerOutput
    update: StepUpdate
    execution: StepExecution


class StepLoop:
    """Runs the steps of one engine, in order.

    Args:
        scheduler: decides the steps; its `max_steps_in_flight` limits the steps in flight here.
        runner: prepares and executes steps.
        outputs: turns tokens into outputs.
        proposer: proposes drafts for the next steps; None: there are none.
        kv_events: publishes changes of the prefix cache; None: nothing is published.
        pausing: completes a pause when the last step in flight is updated.
        before_schedule: finishes overdue requests, and moves parked requests that are ready back to the queue.
        clock: the engine's clock, in seconds.
        counters: the engine's counters, to which this loop adds steps, tokens and times.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        outputs: OutputProcessor,
        *,
        proposer: PromptLookup | None,
        kv_events: KVEventsPublisher | None,
        pausing: Pausing,
        before_schedule: Callable[[], None],
        clock: Callable[[], float],
        counters: EngineCounters,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._outputs = outputs
        self._kv_events = kv_events
        self._pausing = pausing
        self._before_schedule = before_schedule
        self._clock = clock
        self._counters = counters
        self.proposer = proposer
        """Object that proposes drafts for the next steps; None: there are no drafts."""
        self.last_output: SchedulerOutput | None = None
        """The scheduler's output for the newest scheduled step, for displays; None before the first step."""
        self.on_report: Callable[[SchedulerOutput], None] | None = None
        """Listener that is called with the scheduler's output of every step after the step's outputs were reported."""
        self._max_in_flight = scheduler.config.max_steps_in_flight
        self._steps: deque[_Step] = deque()
        """Steps that are scheduled and not executed; the oldest of them may be executing."""
        self._executed: tuple[SchedulerOutput, StepExecution] | None = None
        """The step that precedes `_steps`, if the step was executed and the scheduler was not updated with its result
        yet."""
        self._updated: _Updated | None = None
        """The step that precedes `_executed`, if the scheduler was updated with the step's result and the step's
        outputs were not reported yet."""
        self._may_schedule = True
        """Whether further steps may be scheduled; False during `finish`."""
        self._part: Callable[[], object] | None = None
        """The next part of another step to run while a step is executed; None: there is no such part."""
        self._part_error: BaseException | None = None
        self._other_seconds = 0.0
        """Seconds of the current call of `run` in parts other than prepare and run."""

    def __len__(self) -> int:
        """Number of steps in flight: steps that are scheduled, and whose results the scheduler has not got yet."""
        return len(self._steps) + (self._executed is not None)

    def run(self) -> SchedulerOutput:
        """Execute one step: the oldest step in flight, or a new step if none is in flight.

        If further steps are in flight at the end of the call, the next call updates and reports this step while it
        executes the next step. Otherwise this call updates and reports it.

        Raises:
            EngineStepError: the model failed. This step and all later steps are void: the scheduler is in its state
                before this step, and the next call schedules again. Earlier steps were reported.
        """
        started, self._other_seconds = time.perf_counter(), 0.0
        try:
            if not self._steps:
                self._schedule_one()
            step = self._steps[0]
            execution = self._execute(step, step.prepared or self._prepare(step))
            self._report_all()
            self._steps.popleft()
            self._executed = step.output, execution
            if not self._steps:
                self._report_all()
        except BaseException:  # also KeyboardInterrupt: a decision that was not executed must be void
            self.void()
            raise
        self._counters.execute_time += time.perf_counter() - started - self._other_seconds
        return step.output

    def finish(self) -> None:
        """Execute, update and report every step in flight, and schedule no further step.

        Raises:
            EngineStepError: the model failed, see `run`.
        """
        self._may_schedule = False
        try:
            while self._steps:
                self.run()
        finally:
            self._may_schedule = True

    def void(self) -> None:
        """Void every step in flight: the scheduler returns to its state before the oldest of them."""
        self._steps.clear()
        self._executed = None
        self._runner.loaded.context.end()
        void = self._scheduler.outputs_in_flight
        if void and self._runner.connector is not None:
            self._runner.connector.void_transfers(void)
        if void:
            self._scheduler.fail(void[0], self._clock())
        if self._updated is not None:  # the scheduler has this step's tokens, so the step is not void
            self._report_updated()

    def void_if_interrupted(self) -> None:
        """Void every step in flight if an exception ended an earlier call after the scheduler's `schedule` and before
        this object recorded the output of `schedule`."""
        if len(self) != self._scheduler.num_steps_in_flight:
            self.void()

    # ------------------------------------------------------------------ the parts

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step. Every output must be executed and passed to the scheduler's `update`, in order."""
        started = time.perf_counter()
        self._before_schedule()
        now = self._clock()
        self.last_output = output = self._scheduler.schedule_again(now)
        for request, num_external in zip(output.admitted, output.num_external_tokens.tolist(), strict=True):
            self._outputs.record_admission(request, now, num_external)
        if self._runner.connector is not None and output.finished:  # requests whose KV took too long to load
            self._outputs.deliver_outputs(self._outputs.make_last_outputs(output.finished, now))
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.take_kv_events())
        self._counters.num_steps += 1
        self._counters.scheduler_time += time.perf_counter() - started
        return output

    def _update(self, output: SchedulerOutput, execution: StepExecution) -> StepUpdate:
        """Update the scheduler with the result of the oldest step in flight; the step must be reported next."""
        started = time.perf_counter()
        update = self._scheduler.update(output, execution.result, self._clock())
        self._counters.scheduler_time += time.perf_counter() - started
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.take_kv_events())
        self._counters.num_generated_tokens += len(update.token_ids)
        return update

    def _report_step(self, output: SchedulerOutput, update: StepUpdate, execution: StepExecution) -> None:
        """Report a step: make and hand out its outputs, and finish the requests that a stop string ends."""
        now = self._clock()
        outputs, stops = self._outputs.process(output, update, execution, now)
        for request_id, num_tokens, stop, reason, detail in stops:
            self._scheduler.finish(request_id, reason, now, keep_tokens=num_tokens, detail=detail, stop_reason=stop)
        if self.proposer is not None:
            self.proposer.propose(output, update, now)
        self._outputs.deliver_outputs(outputs)
        if self._pausing.waiting:
            self._pausing.complete_if_idle()
        if self.on_report is not None:
            self.on_report(output)

    # ------------------------------------------------------------------ in order

    def _execute(self, step: _Step, prepared: PreparedStep) -> StepExecution:
        if self._max_in_flight > 1:
            self._part = self._next_part()
            prepared.batches[0].meanwhile.do_part = self._run_part if self._part is not None else None
        try:
            return self._runner.run(prepared) if step.launched is None else self._runner.collect(step.launched)
        except Exception as error:
            if error is self._part_error:
                raise
            self._report_all()
            raise _step_error(step, error) from error
        finally:
            self._part_error = None
            prepared.batches[0].meanwhile.do_part = None

    def _schedule_one(self) -> None:
        started = time.perf_counter()
        self._steps.append(_Step(self.schedule()))
        self._other_seconds += time.perf_counter() - started

    def _prepare_newest_step(self) -> None:
        self._prepare(self._steps[-1])

    def _prepare(self, step: _Step) -> PreparedStep:
        try:
            step.prepared = self._runner.prepare(step.output)
        except Exception as error:
            raise _step_error(step, error) from error
        return step.prepared

    def _launch_newest_step(self) -> None:
        step = self._steps[-1]
        assert step.prepared is not None
        try:
            step.launched = self._runner.launch(step.prepared)
        except Exception as error:
            raise _step_error(step, error) from error

    def _report_all(self) -> None:
        """Update the scheduler with the executed step, and report all steps that are not reported yet."""
        if self._executed is not None:
            self._update_executed()
        if self._updated is not None:
            self._report_updated()

    def _update_executed(self) -> None:
        assert self._executed is not None
        started = time.perf_counter()
        (output, execution), self._executed = self._executed, None
        self._updated = _Updated(output, self._update(output, execution), execution)
        self._other_seconds += time.perf_counter() - started

    def _report_updated(self) -> None:
        assert self._updated is not None
        started = time.perf_counter()
        updated, self._updated = self._updated, None
        self._report_step(*updated)
        self._other_seconds += time.perf_counter() - started

    # ------------------------------------------------------------------ interleaved

    def _run_part(self) -> bool:
        """Run one part of another step while a step is executed; return whether there is a further part."""
        assert self._part is not None
        try:
            with torch.inference_mode(False):  # the mode of the executing step must not apply to other parts
                self._part()
                self._part = self._next_part()
        except BaseException as error:
            self._part_error = error
            raise
        return self._part is not None

    def _next_part(self) -> Callable[[], object] | None:
        if self._executed is not None:
            return self._update_executed
        if self._updated is not None:
            return self._report_updated
        newest = self._steps[-1]
        if newest.prepared is None:
            return self._prepare_newest_step
        if len(self._steps) > 1 and newest.launched is None and self._runner.can_launch_ahead(newest.prepared):
            return self._launch_newest_step  # so that a GPU starts this step immediately after the preceding one
        if self._may_schedule and len(self) < self._max_in_flight and self._scheduler.can_advance():
            return self._schedule_one
        return None


def _step_error(step: _Step, error: Exception) -> EngineStepError:
    return EngineStepError(f"step {step.output.step_id} failed: {type(error).__name__}: {error}")
