"""StepLoop: the five parts of a step, one after the other or interleaved with those of other steps.

    schedule   the scheduler decides what runs
    prepare    inputs of the model are read from the scheduler
    run        the model computes, the sampler draws
    update     the scheduler appends the tokens and finishes requests
    report     tokens become outputs, for callers

With one step in flight these follow each other. With more (`max_steps_in_flight`), the thread that executes a step has
something to do while other threads, or a GPU, compute for it: update and report the step before, schedule and prepare
the next one, and launch it on the GPU. It does so part by part, at the moments that the step offers (`Meanwhile`). So
all Python stays in one thread: two that run it take turns at its lock, and meet where it costs most. A step that offers
no such moment, because nothing in it takes long, is updated and reported at its end as if there were one step in
flight.
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
    """The steps of one engine on their way through its model, in order.

    Args:
        scheduler: decides; its `max_steps_in_flight` is the maximum number of steps here.
        runner: prepares and executes.
        outputs: makes outputs of the tokens.
        proposer: proposes drafts for the next steps; None: there are none.
        kv_events: publishes what entered and left the prefix cache; None: nothing is published.
        pausing: completes a pause when a step was the last to compute.
        before_schedule: finishes or returns to the queue what waited for something else than a step.
        clock: the engine's, in seconds.
        counters: of the engine; steps, tokens and the time spent here are counted there.
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
        """Proposes drafts for the next steps; None: there are none."""
        self.last_output: SchedulerOutput | None = None
        """The last step's decisions, for displays."""
        self.on_report: Callable[[SchedulerOutput], None] | None = None
        """Called with every step that was reported, after its outputs."""
        self._most = scheduler.config.max_steps_in_flight
        self._steps: deque[_Step] = deque()
        """Steps that were not executed yet; the oldest one may be executing."""
        self._executed: tuple[SchedulerOutput, StepExecution] | None = None
        """The step before them, if the scheduler does not know its result yet."""
        self._updated: _Updated | None = None
        """The step before that one, if it was not reported."""
        self._goes_on = True
        """Whether further steps are scheduled."""
        self._part: Callable[[], object] | None = None
        """The next part that can be done while a step is executed; None: there is none."""
        self._error_of_part: BaseException | None = None
        self._elsewhere = 0.0
        """Seconds of the present call that were spent on other parts than executing."""

    def __len__(self) -> int:
        """Steps that were scheduled and whose results the scheduler does not know."""
        return len(self._steps) + (self._executed is not None)

    def run(self) -> SchedulerOutput:
        """Execute the oldest step in flight, or schedule one. It is updated and reported by the next call, if that has
        a step to execute by then, or else by this one.

        Raises:
            EngineStepError: the model failed. The step, and any scheduled after it, is void: the scheduler is as it
                was before it, and the next call schedules again. Those before it were reported.
        """
        started, self._elsewhere = time.perf_counter(), 0.0
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
        except BaseException:  # also KeyboardInterrupt: the decision must not stand
            self.void()
            raise
        self._counters.execute_time += time.perf_counter() - started - self._elsewhere
        return step.output

    def finish(self) -> None:
        """Execute and report every step in flight, and schedule no further one.

        Raises:
            EngineStepError: see `run`.
        """
        self._goes_on = False
        try:
            while self._steps:
                self.run()
        finally:
            self._goes_on = True

    def void(self) -> None:
        """Void every step in flight: the scheduler returns to the state before the oldest."""
        self._steps.clear()
        self._executed = None
        self._runner.loaded.context.end()
        void = self._scheduler.outputs_in_flight
        if void and self._runner.connector is not None:
            self._runner.connector.void(void)
        if void:
            self._scheduler.fail(void[0], self._clock())
        if self._updated is not None:  # its tokens are known already
            self._report_updated()

    def void_if_broken_off(self) -> None:
        """Void everything if a call was left, by an exception, between the scheduler's decision and here."""
        if len(self) != self._scheduler.num_steps_in_flight:
            self.void()

    # ------------------------------------------------------------------ the parts

    def schedule(self) -> SchedulerOutput:
        """Decide what runs in the next step. Every output must be executed and updated, in order."""
        started = time.perf_counter()
        self._before_schedule()
        now = self._clock()
        self.last_output = output = self._scheduler.schedule_again(now)
        for request, num_external in zip(output.admitted, output.num_external_tokens.tolist(), strict=True):
            self._outputs.note_scheduled(request, now, num_external)
        if self._runner.connector is not None and output.finished:  # loads that took too long
            self._outputs.hand_out(self._outputs.end_all(output.finished, now))
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.take_kv_events())
        self._counters.num_steps += 1
        self._counters.scheduler_time += time.perf_counter() - started
        return output

    def _update(self, output: SchedulerOutput, execution: StepExecution) -> StepUpdate:
        """Give the scheduler the result of the oldest step in flight; its report must follow."""
        started = time.perf_counter()
        update = self._scheduler.update(output, execution.result, self._clock())
        self._counters.scheduler_time += time.perf_counter() - started
        if self._kv_events is not None:
            self._kv_events.publish(self._scheduler.take_kv_events())
        self._counters.num_generated_tokens += len(update.token_ids)
        return update

    def _report(self, output: SchedulerOutput, update: StepUpdate, execution: StepExecution) -> None:
        """Make outputs of an update, and finish the requests that a stop string ends."""
        now = self._clock()
        outputs, stops = self._outputs.process(output, update, execution, now)
        for request_id, num_tokens, stop, reason, detail in stops:
            self._scheduler.finish(request_id, reason, now, keep_tokens=num_tokens, detail=detail, stop_reason=stop)
        if self.proposer is not None:
            self.proposer.propose(output, update, now)
        self._outputs.hand_out(outputs)
        if self._pausing.waiting:
            self._pausing.settle()
        if self.on_report is not None:
            self.on_report(output)

    # ------------------------------------------------------------------ one after the other

    def _execute(self, step: _Step, prepared: PreparedStep) -> StepExecution:
        if self._most > 1:
            self._part = self._next_part()
            prepared.batches[0].meanwhile.do_part = self._do_part if self._part is not None else None
        try:
            return self._runner.run(prepared) if step.launched is None else self._runner.collect(step.launched)
        except Exception as error:
            if error is self._error_of_part:
                raise
            self._report_all()
            raise _failed(step, error) from error
        finally:
            self._error_of_part = None
            prepared.batches[0].meanwhile.do_part = None

    def _schedule_one(self) -> None:
        started = time.perf_counter()
        self._steps.append(_Step(self.schedule()))
        self._elsewhere += time.perf_counter() - started

    def _prepare_newest(self) -> None:
        self._prepare(self._steps[-1])

    def _prepare(self, step: _Step) -> PreparedStep:
        try:
            step.prepared = self._runner.prepare(step.output)
        except Exception as error:
            raise _failed(step, error) from error
        return step.prepared

    def _launch_newest(self) -> None:
        step = self._steps[-1]
        assert step.prepared is not None
        try:
            step.launched = self._runner.launch(step.prepared)
        except Exception as error:
            raise _failed(step, error) from error

    def _report_all(self) -> None:
        """Update and report what was executed."""
        if self._executed is not None:
            self._update_executed()
        if self._updated is not None:
            self._report_updated()

    def _update_executed(self) -> None:
        assert self._executed is not None
        started = time.perf_counter()
        (output, execution), self._executed = self._executed, None
        self._updated = _Updated(output, self._update(output, execution), execution)
        self._elsewhere += time.perf_counter() - started

    def _report_updated(self) -> None:
        assert self._updated is not None
        started = time.perf_counter()
        updated, self._updated = self._updated, None
        self._report(*updated)
        self._elsewhere += time.perf_counter() - started

    # ------------------------------------------------------------------ meanwhile

    def _do_part(self) -> bool:
        """Do one part of what can be done while a step is executed; whether there is a further one."""
        assert self._part is not None
        try:
            with torch.inference_mode(False):  # the step's own is not for what is made here
                self._part()
                self._part = self._next_part()
        except BaseException as error:
            self._error_of_part = error
            raise
        return self._part is not None

    def _next_part(self) -> Callable[[], object] | None:
        if self._executed is not None:
            return self._update_executed
        if self._updated is not None:
            return self._report_updated
        newest = self._steps[-1]
        if newest.prepared is None:
            return self._prepare_newest
        if len(self._steps) > 1 and newest.launched is None and self._runner.can_launch_ahead(newest.prepared):
            return self._launch_newest  # a GPU has it when it is done with the one before
        if self._goes_on and len(self) < self._most and self._scheduler.can_advance():
            return self._schedule_one
        return None


def _failed(step: _Step, error: Exception) -> EngineStepError:
    return EngineStepError(f"step {step.output.step_id} failed: {type(error).__name__}: {error}")
