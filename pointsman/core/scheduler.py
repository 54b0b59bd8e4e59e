"""The scheduler: decides which requests run in each step, and how many tokens of each request the step computes.

    output = scheduler.schedule(now)                 decide, and commit the decision
    result = host.execute(output)                    the only part that differs between hosts
    done   = scheduler.update(output, result, now)   append tokens, test stop conditions, free blocks
             scheduler.propose(output, ...)          optional: drafts, to be verified in the next step

`schedule` and `update` are here, with their parts in order. The parts are in `step/`, the choice of requests in
`policy/`, the allocation of blocks in `kv/`, the state that all parts share in `state/`.

There is no prefill phase and no decode phase (unless `batching` is "prefill-first"): each request's
`num_computed_tokens` chases its `num_tokens`, and a prefill chunk is a long prompt cut to the budget. The scheduler
reads no clock and no random number; the same calls give the same decisions. One thread owns it.

A host writes to no object that it gets from here. Outputs, updates and requests are read-only; the host may keep them,
and only the scheduler's methods change them (`set_priority`, `extend`, `park`, ...). A view (`block_table`) is valid
until the next call; other arrays and lists that a method returns are copies. The scheduler copies from a `StepResult`
and its arrays, and never reads `Request.metadata`. A listener gets the scheduler's own record of a step, and must not
change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any
from warnings import warn

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import ClockError, InvalidTransition, PolicyError, StepResultError, UnknownTransfer
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.connector import AnswerLog, KVConnector
from pointsman.core.kv.events import KVEvent
from pointsman.core.observe.explain import Explanation, explain, find_holder
from pointsman.core.observe.invariants import check
from pointsman.core.observe.request_log import RequestLog
from pointsman.core.observe.stats import SchedulerStats, Statistics
from pointsman.core.observe.watchdog import Stall, Watchdog
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.guard import Guard, Replaced, replaced_among
from pointsman.core.recording import Recorder, RecordingState
from pointsman.core.state.events import Call, Events, Listener, Need, send
from pointsman.core.state.inputs import EncoderInput
from pointsman.core.state.numbers import MAX_INT, checked_priority
from pointsman.core.state.output import Integers, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import sealed_as
from pointsman.core.state.status import FinishReason, ParkReason, Pause, PauseMode, PreemptionCause, RequestStatus
from pointsman.core.step.assembly import NEW, Start, assemble
from pointsman.core.step.emit import input_token_ids
from pointsman.core.step.in_flight import StepRecord
from pointsman.core.step.request_table import End
from pointsman.core.step.rewind import roll_back
from pointsman.core.step.running import InOrder
from pointsman.core.step.validation import checked_end, refused, settle_limits

if TYPE_CHECKING:
    from pointsman.core.observe.film import FilmRecorder

Int32Array = npt.NDArray[np.int32]


class Scheduler:
    """Continuous batching over a paged KV cache, for any host that can execute a `SchedulerOutput`.

    Args:
        config: all knobs.
        recorder: object that writes every call and every decision, so that a replay can repeat them; None: no recording
            until `start_recording`.
        connector: object that saves KV outside the pool and loads it back, see `kv/connector.py`; None: KV stays in the
            pool.
        kv_cache: owner of the KV blocks, see `kv/cache.py`; None: the scheduler owns them, in one pool of equal blocks.
        listeners: objects that are notified of every decision, see `state/events.py`.
        start: first step number and admission number; a replay reads both numbers from the recording.
        check_guaranteed_steps: whether `advance` compares the policies' `guaranteed_steps` with the policies'
            decisions, and raises `PolicyError` if they differ; for tests of policies.

    Raises:
        ConfigError: the configuration names a policy that does not exist, or needs a connector and there is none.
    """

    __slots__ = (
        "__weakref__",
        "_admission",
        "_batch",
        "_budget",
        "_check_guaranteed_steps",
        "_config",
        "_drafts",
        "_emission",
        "_encoder",
        "_events",
        "_fast_forward",
        "_guards",
        "_kv",
        "_kv_cache",
        "_listeners",
        "_load_followers",
        "_loading",
        "_max_seen_active_seqs",
        "_next_step_id",
        "_now",
        "_open_eviction",
        "_parts",
        "_priority_preemption",
        "_recorder",
        "_run_parts",
        "_running",
        "_statistics",
        "_steps",
        "_swap",
        "_table",
        "_update",
        "_view",
        "_watchdog",
    )

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        recorder: Recorder | None = None,
        connector: KVConnector | None = None,
        kv_cache: KVCache | None = None,
        listeners: Iterable[Listener] = (),
        start: Start = NEW,
        check_guaranteed_steps: bool = False,
    ) -> None:
        self._check_guaranteed_steps = check_guaranteed_steps
        self._now = -inf  # time of the newest call
        self._config = config
        self._statistics = Statistics(config.num_draft_tokens)
        self._events = Events(lambda request, reason: find_holder(request, reason, self._parts))
        self._recorder = recorder
        self._listeners = tuple(listeners)
        self._kv_cache = kv_cache
        answers = None if recorder is None or connector is None else AnswerLog(connector)
        if recorder is not None:
            self._listeners = (*self._listeners, recorder)
        self._assemble(start, answers or connector)
        if recorder is not None:
            recorder.start(config, start._replace(replaced=self.replaced_policies), self.policies, answers)

    def _assemble(self, start: Start, connector: KVConnector | None = None) -> None:
        """Create all parts of the scheduler for the current configuration, except statistics and listeners, which are
        kept."""
        config, events = self._config, self._events
        log = [RequestLog()] if config.log_request_events else []
        events.set_listeners([self._statistics, *log, *self._listeners])
        self._parts = parts = assemble(
            config,
            start,
            connector,
            events,
            self._statistics.accepted_drafts,
            self._kv_cache,
            checks_guaranteed_steps=self._check_guaranteed_steps,
        )
        events.set_listeners([self._statistics, *log, *parts.policy_listeners, *self._listeners])
        self._batch, self._kv, self._table, self._steps = parts.batch, parts.kv, parts.table, parts.steps
        self._running, self._drafts, self._emission = parts.running, parts.drafts, parts.emission
        self._admission, self._priority_preemption, self._loading = (
            parts.admission,
            parts.priority_preemption,
            parts.loading,
        )
        self._swap = parts.swap
        self._update, self._encoder, self._load_followers = parts.update, parts.encoder, parts.gates.load_followers
        self._fast_forward, self._view, self._budget = parts.fast_forward, parts.view, parts.budget
        self._guards = tuple(policy for policy in parts.policies if isinstance(policy, Guard))
        self._open_eviction: Callable[[], None] | None = getattr(parts.kv.eviction, "open_step", None)
        self._max_seen_active_seqs = config.num_sequence_slots
        self._watchdog = Watchdog()
        self._next_step_id = start.step_id
        self._choose_step_method()

    # ------------------------------------------------------------------ the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide how many tokens of which requests the next step computes, and commit the decision.

        A row may read blocks that another row writes in the same step: the host writes a layer's KV for all rows before
        any row attends, or sets `share_within_step=False`.

        Raises:
            StepOrderError: `max_steps_in_flight` outputs already wait for their update.
            ClockError: `now` is earlier than the time of an earlier call, or not a number. Nothing has changed.
            PolicyError: a policy of another package raised, or broke its contract. The step is void, as after `fail`;
                preemptions before the error remain valid. Call again: after `max_policy_failures` such steps the
                default policy of the same kind replaces the failing policy.
        """
        step = self._open_step(now)
        try:
            if self._budget.policies:
                self._budget.open_step(self._view)
            if self._open_eviction is not None:
                self._open_eviction()
            output = self._run_parts(step)  # preempt, advance, publish, admit, emit: see `_mixed_step`
        except PolicyError as error:
            self._roll_back([step], now)
            self._note_policy_failure(error, now)
            raise
        for guard in self._guards:
            guard.step_succeeded()
        step.set_output(output, self._batch.members, self._kv.take_returned() if self._kv.returned else ())
        self._steps.records.append(step)
        self._next_step_id += 1
        for method in self._events.stepped:
            method(step)
        if self._events.called:
            send(self._events.called, Call("schedule", now, {"output": output}))
        return output

    def schedule_again(self, now: float) -> SchedulerOutput:
        """Call `schedule` repeatedly until a call ends without a policy failure, for a host that can repeat a failed
        step immediately. A policy that keeps failing is replaced.

        Raises:
            StepOrderError: as in `schedule`.
        """
        while True:
            try:
                return self.schedule(now)
            except PolicyError:
                continue

    def _note_policy_failure(self, error: PolicyError, now: float) -> None:
        failed = [guard for guard in self._guards if guard.step_failed(self._config.max_policy_failures)]
        self._statistics.policies_failed([(guard.kind, guard.spec) for guard in failed])
        if self._events.called:
            send(self._events.called, Call("schedule_failed", now, {"error": str(error)}))

    def _mixed_step(self, step: StepRecord) -> SchedulerOutput:
        """The five parts of a step that computes prompts and decodes together (`batching` is "mixed" or "static")."""
        if self._kv.gives_back and len(self._table.queue):
            self._kv.give_back(self._batch)
        # 1. Preempt: a more urgent waiting request preempts running ones (`step/priority_preemption.py`).
        if self._priority_preemption is not None:
            self._preempt_for_urgent(step)
        # 2. Advance: the running requests, under limits, budget and blocks; may preempt for memory (`step/running.py`).
        advance = self._running.advance(len(self._steps.records) > 0, self._table.preempt)
        step.set_advance(advance)
        # 3. Publish: their prompt blocks, so that requests admitted next can share them (`kv/manager.py`).
        for request in advance.unpublished:
            self._kv.publish_prompt(self._batch, request)
        # 4. Admit: waiting requests in order, until one blocks the queue (`step/admission.py`).
        self._admission.admit(step)
        if self._kv.unpublished:
            self._kv.publish_deferred(self._batch)
        # 5. Emit: the output (`step/emit.py`).
        return self._emission.emit(step)

    def _prefill_first_step(self, step: StepRecord) -> SchedulerOutput:
        """A step that computes either prompts or decodes: decoding requests advance only if the step computes no
        prompt."""
        running, table = self._running, self._table
        assert isinstance(running, InOrder), "checked by the configuration"
        if self._kv.gives_back and len(table.queue):
            self._kv.give_back(self._batch)
        prefills = running.advance_prefills(table.preempt)
        step.set_advance(prefills)
        for request in prefills.unpublished:
            self._kv.publish_prompt(self._batch, request)
        self._admission.admit(step)
        if not prefills.total and not step.admitted:
            in_flight = len(self._steps.records) > 0
            step.set_advance(running.advance_decodes(in_flight, table.preempt, was_preempted=prefills.preempted))
        if self._kv.unpublished:
            self._kv.publish_deferred(self._batch)
        return self._emission.emit(step)

    def _paused_step(self, step: StepRecord) -> SchedulerOutput:
        """A step during a pause: no row advances; `Admission` records why the head of the queue waits."""
        step.set_advance(self._running.empty_advance())
        self._admission.admit(step)
        return self._emission.emit(step)

    def update(self, output: SchedulerOutput, result: StepResult, now: float) -> StepUpdate:
        """Apply the model's result: append tokens, finish requests that stop, free their blocks.

        Raises:
            StepOrderError: `output` is not the oldest step in flight.
            StepResultError: the result does not fit the output. Nothing was applied; the step is still in flight.
            ClockError: as in `schedule`.
        """
        records = self._steps.records
        if not records or records[0].output is not output:
            raise self._steps.not_oldest_error(output)
        if not isinstance(result, StepResult):
            raise StepResultError(f"the result passed to update() is {result!r}; pass StepResult(token_ids)")
        if not now >= self._now:  # also true for not-a-number
            raise self._clock_error(now)
        step, self._now = records[0], now
        # 1. Append and 2. stop: check the result, append its tokens, test stop conditions (`step/update.py`).
        fields, ends = self._update.append(step, output, result, now)
        if self._swap is not None:
            self._swap.observe(result.copies)
        # 3. Free: requests that stop finish, and release their blocks.
        if ends:
            self._update.finish(fields, ends, now)
        # 4. Close: the step is no longer in flight, and rows that were fenced until its update may be reused.
        records.popleft()
        self._drafts.set_updated_step(step.step_id)
        if self._batch.fenced_rows:
            self._batch.free_fenced_rows(step.step_id)
        if not records:
            self._kv.log_to(None)
        # 5. Report: seal the update, and notify listeners.
        fields.token_ids.setflags(False)  # type: ignore[call-arg]
        update = sealed_as(StepUpdate, fields)
        for method in self._events.updated:
            method(output, update, now)
        if self._events.called:
            send(self._events.called, Call("update", now, {"output": output, "result": result, "update": update}))
        return update

    def propose(self, output: SchedulerOutput, token_ids: Integers, counts: Integers, now: float) -> int:
        """Propose drafts: the tokens that the host expects next for the rows of an updated output. The next step of
        these rows verifies the drafts. Drafts replace earlier drafts of the same rows.

        Args:
            output: the output that was updated last. A proposal for an older output is stale and is dropped.
            token_ids: the drafts of all rows, one row after the other; an int32 array is fastest.
            counts: [output.num_rows] number of drafts of each row, 0 to `num_draft_tokens`. Drafts beyond a token limit
                are dropped, and so are drafts of rows that no longer decode or that have further samples in flight.

        Returns:
            The number of drafts that were kept.

        Raises:
            StepOrderError: `output` has not been updated.
            ProposalError: the arguments do not fit the output. No draft was kept.
        """
        kept = self._drafts.propose(output, token_ids, counts, len(self._steps.records) > 0)
        if self._events.called:
            arguments = {"output": output, "token_ids": token_ids, "counts": counts, "kept": kept}
            send(self._events.called, Call("propose", now, arguments))
        return kept

    def fail(self, output: SchedulerOutput, now: float) -> None:
        """Void a step that could not be executed, and every later step in flight.

        Requests that a void step admitted return to their places in the queue; other requests are rewound and keep
        their blocks. Blocks that a void step published leave the prefix cache, and embeddings that it computed leave
        the encoder cache. Preemptions and finished requests remain valid; the next output reports them again, with the
        full block table of every row.

        Raises:
            StepOrderError: `output` is not in flight.
            ClockError: as in `schedule`. The step is still in flight.
        """
        if not now >= self._now:
            raise self._clock_error(now)
        void, self._now = self._steps.remove_from(output), now
        self._roll_back(void, now)
        for method in self._events.failed:
            method(len(void), now)
        if self._events.called:
            send(self._events.called, Call("fail", now, {"output": output}))

    def _roll_back(self, void: list[StepRecord], now: float) -> None:
        """Roll back the steps in `void`, newest first. These steps were removed from the steps in flight, or never were
        in flight."""
        roll_back(void, self._steps, self._batch, self._kv, self._table, self._encoder, self._loading, now)
        self._kv.drop_unpublished()
        self._admission.forget()
        self._emission.resync()

    # ------------------------------------------------------------------ many steps in one call

    def horizon(self, limit: int = MAX_INT) -> int:
        """The old name of `guaranteed_steps`."""
        warn("`horizon` is now called `guaranteed_steps`", DeprecationWarning, stacklevel=2)
        return self.guaranteed_steps(limit)

    def guaranteed_steps(self, limit: int = MAX_INT) -> int:
        """Number of the next steps, at most `limit`, that are guaranteed to be plain decodes: every running request
        decodes one token, and nothing else happens. The guarantee holds if only `advance` is called and no token stops
        a request. 0: the next step must be scheduled. Also 0 while a step is in flight, a listener needs every step, or
        a policy fails: then `schedule` raises the error, and this method does not.
        """
        if not self._guards:
            return self._fast_forward.guaranteed_steps(limit)
        if not all(guard.is_sound() for guard in self._guards):
            return 0
        try:
            return self._fast_forward.guaranteed_steps(limit)
        except PolicyError:
            for guard in self._guards:
                guard.forget_failure()
            return 0

    def advance(
        self,
        times: Sequence[float] | npt.NDArray[np.float64],
        token_ids: Integers,
        last_token_ids: Integers | None = None,
    ) -> StepUpdate:
        """Decide and apply several steps in one call, one step for each end time in `times`. The state is then as after
        the same number of calls of `schedule` and `update`. No `SchedulerOutput` is created; everything that the
        outputs would report counts as reported.

        Args:
            times: [steps + 1] seconds: the time at which the first step is scheduled, then the end time of each step,
                at which the step is updated and the next step is scheduled.
            token_ids: the sampled tokens: [rows], the same in each step, or [steps, rows]. Rows are the running
                requests in admission order. Only the last step's tokens may stop requests.
            last_token_ids: [rows] sampled tokens of the last step; None: those in `token_ids`.

        Returns:
            The update of the last step.

        Raises:
            StepOrderError: not all of these steps are guaranteed plain decodes, see `guaranteed_steps`. Nothing has
                changed.
            StepResultError: a token array has a wrong shape or type, or a token stops a request before the last step.
                Nothing has changed.
            ClockError: the first time is earlier than the time of an earlier call, or the last time than the first.
                Nothing has changed.
        """
        if len(times) and not times[-1] >= times[0] >= self._now:
            raise self._clock_error(times[-1] if times[0] >= self._now else times[0], times[0])
        first = self._next_step_id
        update, run = self._fast_forward.advance(first, times, token_ids, last_token_ids)
        self._next_step_id += run.num_steps
        self._now = float(run.times[-1])
        for method in self._events.ran_steps:
            method(run)
        if self._events.called:
            arguments = {"first_step_id": first, "times": times, "token_ids": token_ids, "run": run}
            send(self._events.called, Call("advance", run.times[-1], {**arguments, "last_token_ids": last_token_ids}))
        return update

    # ------------------------------------------------------------------ parts of the step

    def _open_step(self, now: float) -> StepRecord:
        records = self._steps.records
        if len(records) >= self._steps.max_steps:
            raise self._steps.too_many_error()
        if not now >= self._now:  # also true for not-a-number
            raise self._clock_error(now)
        self._now = now
        self._view.open_step(now)
        if self._loading is not None:
            self._loading.end_overdue_loads(now)
        step = StepRecord(self._next_step_id, now)
        for open_step in self._load_followers:
            open_step(len(self._table.queue) + len(self._batch))
        self._kv.open_step(step.step_id, step.journal, records[0].step_id if records else step.step_id)
        if self._encoder is not None:
            self._encoder.begin_step(step.step_id, now)
        return step

    def _clock_error(self, now: float, first: float = -inf) -> ClockError:
        return ClockError(
            f"now is {now}, and it was {max(first, self._now)} in an earlier call or step; pass the time of a clock "
            "that never goes back, such as time.monotonic()"
        )

    def _choose_step_method(self) -> None:
        """Choose the method that runs the parts of a step, by `batching` and the pause mode."""
        self._run_parts: Callable[[StepRecord], SchedulerOutput] = self._paused_step
        if self.pause_mode is not PauseMode.ALL:
            is_mixed = self._config.batching != "prefill-first"
            self._run_parts = self._mixed_step if is_mixed else self._prefill_first_step

    def _preempt_for_urgent(self, step: StepRecord) -> None:
        table = self._table
        assert self._priority_preemption is not None
        if self._admission.pause is not None or not len(table.queue) or not len(self._batch):
            return
        head = table.queue.peek()
        victims = self._priority_preemption.choose(head)
        for request in victims:
            table.preempt(request, PreemptionCause.DISPLACED, Need(head, 0, ""), step.now)
        if victims and self._budget.policies:  # the victims' tokens return to the step's budget
            self._budget.open_step(self._view)
        step.set_preemptor(head if victims else None)

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, now: float, *, park: ParkReason | None = None) -> None:
        """Queue a request, or park it until `ready`.

        Raises:
            RequestRefused: the request could never run; its status is then FINISHED_REFUSED, and the scheduler does not
                keep it.
            DuplicateRequest: the request's id is in use.
        """
        self._table.require_free_id(request.request_id)
        park = None if park is None else ParkReason(park)
        if request._state.status is not RequestStatus.WAITING or request._state.sequence_number:
            raise InvalidTransition(f"request {request.request_id!r} was already added once; create a new Request")
        why = settle_limits(self._config, self._kv, request)
        if why is not None:
            for method in self._events.refused:
                method(request, why, now)
            raise refused(request, why)
        self._now = max(self._now, now)  # a simulated request may arrive while a step runs
        self._table.add(request, park, now)
        if self._events.called:
            send(self._events.called, Call("add", now, {"request": request, "park": park}))

    def extend(
        self,
        request_id: str,
        token_ids: Integers,
        now: float,
        *,
        more: bool = False,
        max_tokens: int,
        encoder_inputs: Sequence[EncoderInput | Sequence[Any]] = (),
    ) -> Request:
        """Append the next part of the prompt of a request that was added with `more_input` (see
        `step/prompt_parts.py`).

        Args:
            token_ids: the tokens of the part; may be empty if it is the last.
            more: whether further parts follow.
            max_tokens: maximum number of tokens to generate before the next part is appended; 0: only compute the
                part's KV.
            encoder_inputs: the encoder inputs of the part, as for `Request`; positions of placeholders are counted from
                the part's first token.

        Raises:
            UnknownRequest, InvalidTransition: there is no such request, or its prompt is complete.
            RequestRefused: the part is invalid, or the extended request could never run; the request is unchanged.
        """
        request = self._table.require(request_id)
        extend = self._parts.prompt_parts.extend
        part = extend(request, token_ids, encoder_inputs, now, more=more, max_tokens=max_tokens)
        if self._events.called:
            send(self._events.called, Call("extend", now, {"request_id": request_id, "part": part, "more": more}))
        return request

    def abort(self, request_id: str, now: float) -> Request | None:
        """Abort a request in any state; returns the request, or None if no unfinished request has this id.
        See `finish`."""
        return self.finish(request_id, FinishReason.ABORT, now)

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        now: float,
        *,
        keep_tokens: int | None = None,
        detail: str = "",
        stop_reason: int | str | None = None,
    ) -> Request | None:
        """Finish a request for the host's own reason, such as a stop string; returns the request, or None if no
        unfinished request has this id.

        The request is in `finished` of the next output, and in no `StepUpdate.finished`. Its id is in use until then.
        If a step in flight has a row of the request, the step's result still has tokens for that row, and these tokens
        are dropped.

        `keep_tokens`: number of output tokens to keep; None: all.
        """
        request = self._table.get(request_id)
        if request is None:
            return None
        reason = checked_end(request_id, reason, keep_tokens)
        self._table.finish([End(request, reason, detail, stop_reason)], now)
        if keep_tokens is not None:
            request._state.truncate_output(keep_tokens)
        if self._events.called:
            arguments = {"request_id": request_id, "reason": reason, "keep_tokens": keep_tokens}
            arguments |= {"detail": detail, "stop_reason": stop_reason}
            send(self._events.called, Call("finish", now, arguments))
        return request

    def park(self, request_id: str, reason: ParkReason, now: float) -> None:
        """Make a request wait for something other than capacity. A parked request keeps its order among waiting
        requests and holds no blocks; a running request first releases its blocks as in a preemption.

        Raises:
            UnknownRequest: no such request, or it has finished.
        """
        reason = ParkReason(reason)
        self._table.park(self._table.require(request_id), reason, now)
        if self._events.called:
            send(self._events.called, Call("park", now, {"request_id": request_id, "reason": reason}))

    def ready(self, request_id: str, now: float) -> None:
        """Return a parked request to the queue: its reason to wait no longer applies.

        Raises:
            UnknownRequest: no such request, or it has finished.
            InvalidTransition: the request is not parked, or waits only for the next part of its prompt.
        """
        request = self._table.require_parked(request_id)
        if self._parts.prompt_parts.ready(request, now):
            self._table.ready(request, now)
        if self._events.called:
            send(self._events.called, Call("ready", now, {"request_id": request_id}))

    def set_priority(self, request_id: str, priority: int, now: float) -> None:
        """Change a request's priority; a queued request moves to its new place immediately.

        Raises:
            UnknownRequest: no such request, or it has finished.
            ValueError: the priority is not an integer, or is out of range.
        """
        request = self._table.require(request_id)
        priority = checked_priority(priority)
        self._table.set_priority(request, priority)
        if self._priority_preemption is not None:
            self._priority_preemption.forget()
        if self._events.called:
            send(self._events.called, Call("set_priority", now, {"request_id": request_id, "priority": priority}))

    def reset_prefix_cache(self, now: float, *, preempt_running: bool = False) -> None:
        """Remove every cached prefix in the pool and in the connector, for example after the weights changed.

        Running requests keep their KV and publish no further blocks. With `preempt_running` they return to the queue
        with their tokens and recompute their KV; updates of steps in flight still append their samples.
        """
        if preempt_running:
            self._table.preempt_all(now)
        self._kv.reset()
        if self._swap is not None:
            self._swap.forget()
        if self._loading is not None:
            self._loading.forget(now)
        if self._events.called:
            send(self._events.called, Call("reset_prefix_cache", now, {"preempt_running": preempt_running}))

    def reset_encoder_cache(self, now: float) -> None:
        """Remove every cached embedding of encoder inputs; KV computed from embeddings stays (`reset_prefix_cache`
        removes it)."""
        if self._encoder is not None:
            self._encoder.reset()
        if self._events.called:
            send(self._events.called, Call("reset_encoder_cache", now, {}))

    def set_max_num_active_seqs(self, limit: int | None, now: float) -> None:
        """Set the maximum number of running requests from the next step on; None: `max_num_seqs`. The property `config`
        contains the new limit.

        If more than `limit` requests run, they continue, and no request is admitted until fewer run.

        Raises:
            ConfigError: the limit is out of range, see `SchedulerConfig.max_num_active_seqs`.
        """
        self._config = self._config.replace(max_num_active_seqs=limit)
        num_slots = self._config.num_sequence_slots
        self._admission.set_max_num_active_seqs(num_slots)
        self._max_seen_active_seqs = max(self._max_seen_active_seqs, num_slots)
        if self._events.called:
            send(self._events.called, Call("set_max_num_active_seqs", now, {"limit": limit}))

    def hold_prefills(self, is_held: bool, now: float) -> None:
        """Hold prompts back from the next step on, while requests decode; False: end this. For hosts that align the
        prompts of several engines (see `SchedulerConfig.prefill_interval`).

        Raises:
            InvalidTransition: `prefill_interval` is not "host".
        """
        if self._config.prefill_interval != "host":
            raise InvalidTransition(
                f"prefill_interval is {self._config.prefill_interval}, so the scheduler decides when prompts wait; set "
                'it to "host"'
            )
        interval = self._parts.gates.interval
        assert interval is not None
        interval.set_held(bool(is_held))
        if self._events.called:
            send(self._events.called, Call("hold_prefills", now, {"is_held": bool(is_held)}))

    @property
    def holds_prefills(self) -> bool:
        """Whether the host holds prompts back (`hold_prefills`)."""
        interval = self._parts.gates.interval
        return interval is not None and interval.is_held_by_host

    def pause(self, now: float, mode: PauseMode = PauseMode.ALL) -> None:
        """Schedule nothing (`PauseMode.ALL`), or admit no request (`PauseMode.ADMISSIONS`), until `resume`.

        Steps in flight finish as usual; the pause is complete when no step is in flight. A second call changes the
        mode.
        """
        mode = PauseMode(mode)
        if mode is not PauseMode.ALL and self.pause_mode is PauseMode.ALL:
            self._emission.forget_output()  # as in `resume`
        self._admission.set_pause(Pause(mode, now))
        self._choose_step_method()
        if self._events.called:
            send(self._events.called, Call("pause", now, {"mode": mode}))

    def resume(self, now: float) -> None:
        """End a `pause`; no effect if the scheduler is not paused."""
        self._admission.set_pause(None)
        self._emission.forget_output()  # rows that the steps of the pause left out run in the next step
        self._choose_step_method()
        if self._events.called:
            send(self._events.called, Call("resume", now, {}))

    def transfer_done(
        self, transfer_id: int, now: float, *, num_loaded_tokens: int | None = None, failed_blocks: Iterable[int] = ()
    ) -> Request | None:
        """Report that an asynchronous load or send has finished: the device no longer accesses its blocks.

        After a load, the first `num_loaded_tokens` tokens (None: all) are valid, up to the first block in
        `failed_blocks`. Returns the request that fails because its KV is missing (`kv_load_failure_policy` "fail"), or
        None.

        Raises:
            UnknownTransfer: no such transfer is under way.
        """
        if self._loading is None:
            raise UnknownTransfer(f"no transfer {transfer_id!r} is under way: this scheduler has no connector")
        failed = sorted(int(block) for block in failed_blocks)
        ended = self._loading.end_transfer(transfer_id, num_loaded_tokens, failed, now)
        if self._events.called:
            arguments = {"transfer_id": transfer_id, "num_loaded_tokens": num_loaded_tokens, "failed_blocks": failed}
            send(self._events.called, Call("transfer_done", now, arguments))
        return ended

    # ------------------------------------------------------------------ reports

    def stalled(self, now: float, seconds: float) -> list[Stall]:
        """Requests without progress for `seconds` or longer. Progress is only noticed by calls of this method, so call
        it a few times in every `seconds` (see `watchdog.py`)."""
        return self._watchdog.stalled(self._parts, self.explain, now, seconds)

    def take_kv_events(self) -> list[KVEvent]:
        """Return the events of blocks that entered or left the prefix cache since the last call, in order; needs
        `enable_kv_cache_events`."""
        return self._kv.events.take_events() if self._kv.events is not None else []

    # ------------------------------------------------------------------ listeners and recordings

    def add_listener(self, listener: Listener) -> None:
        """Report every decision to a listener from now on, see `state/events.py`. Adding a listener twice has no
        effect."""
        if listener in self._listeners:
            return
        self._listeners = (*self._listeners, listener)
        self._events.set_listeners([*self._events.listeners, listener])
        self._kv.track_returned(self._events.wants_blocks)

    def remove_listener(self, listener: Listener) -> None:
        """Stop reporting decisions to a listener; no effect on a listener that was not added."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
        self._events.set_listeners([other for other in self._events.listeners if other is not listener])
        self._kv.track_returned(self._events.wants_blocks)

    def check_recordable(self) -> None:
        """Check that a recording may begin after the scheduler has run, once there are no requests.

        Raises:
            InvalidTransition: a recording may never begin, as the scheduler has an encoder cache, a connector or the
                caller's `kv_cache`, whose state the new scheduler of a replay lacks.
        """
        if self._config.encoder_budget or self._kv.has_connector:
            what = "a connector" if self._kv.has_connector else "encoder_budget"
            raise InvalidTransition(
                f"a scheduler with {what} can only be recorded from its creation; pass recorder=Recorder(file) to "
                "Scheduler()"
            )
        if self._kv_cache is not None:
            kind = type(self._kv).__name__
            raise InvalidTransition(
                f"a scheduler whose kv_cache is a {kind} cannot be recorded, since a replay would need this kv_cache; "
                "record a film with start_film() instead"
            )

    def start_recording(self, recorder: Recorder) -> None:
        """Record every call and decision from now on.

        A replay begins with a new scheduler, so this scheduler is reset to the state of a new one: cached prefixes and
        the policies' observations of past requests are dropped. Counters, a pause, and step and admission numbers
        continue.

        Raises:
            InvalidTransition: a recording is under way, there are requests or steps in flight, or the next output has a
                finish or a preemption to report; or no recording can begin, see `check_recordable`.
        """
        if self._recorder is not None:
            raise InvalidTransition("a recording is already under way; call stop_recording() first")
        self.check_recordable()
        if not self.is_idle:
            raise InvalidTransition(
                f"a recording can begin only while the scheduler is idle; it has {self.num_running} running, "
                f"{self.num_queued} queued and {self.num_parked} parked request(s), {self.num_steps_in_flight} step(s) "
                "in flight, or finished requests that no output has reported; finish them, then call schedule() and "
                "update()"
            )
        # One step number is left out, so that drafts for an earlier step are stale and not checked.
        start = Start(self._next_step_id + 1, self._table.next_serial, self.replaced_policies)
        kv, pause = self._kv, self._admission.pause
        self._recorder = recorder
        self._listeners = (*self._listeners, recorder)
        self._assemble(start)
        self._kv.continue_reports(kv)
        recorder.start(self._config, start._replace(replaced=self.replaced_policies), self.policies)
        if pause is not None:
            self.pause(pause.since, pause.mode)

    def stop_recording(self) -> None:
        """Stop recording; the recording so far can be replayed. No effect if no recording is active."""
        if self._recorder is not None:
            self.remove_listener(self._recorder)
            self._recorder = None

    def start_film(self, film: FilmRecorder) -> None:
        """Record every decision in a film (`observe/film.py`), until `remove_listener(film)` and `film.close()`."""
        film.start(self.config, self.policies, max(self._now, 0.0), lambda: self._parts)
        self.add_listener(film)

    # ------------------------------------------------------------------ queries

    def __repr__(self) -> str:
        pool = self._kv.pool
        return (
            f"<Scheduler: {self.num_running} running, {self.num_queued} queued, "
            f"{pool.num_free} of {self._config.num_usable_blocks} blocks free>"
        )

    @property
    def recording(self) -> RecordingState | None:
        """The state of the active recording; None: no recording is active."""
        return None if self._recorder is None else self._recorder.state

    @property
    def config(self) -> SchedulerConfig:
        """The configuration, with the limit that `set_max_num_active_seqs` set last."""
        return self._config

    @property
    def policies(self) -> dict[str, int]:
        """The version of each policy in use, keyed by the policy's name."""
        return {policy.name: policy.version for policy in self._parts.policies if policy.name}

    @property
    def replaced_policies(self) -> tuple[Replaced, ...]:
        """Policies of other packages that failed too often or could not be constructed, each with its replacement."""
        return replaced_among(self._parts.policies)

    @property
    def may_fail(self) -> bool:
        """Whether `schedule` may raise `PolicyError`: a policy of another package decides."""
        return bool(self._guards)

    def has_unfinished_requests(self) -> bool:
        """Whether any request is queued, parked or running. `is_idle` also considers finished requests that no output
        has reported yet."""
        return bool(len(self._batch) or len(self._table.queue) or self._table.parked)

    def has_runnable_requests(self) -> bool:
        """Whether a step may run anything now: a request is running or queued, and no pause stops it.

        If not, a host may wait for a call instead of scheduling empty steps. (The next output reports requests that
        finished since the last output; a host that needs this report schedules a step anyway.)
        """
        mode = self.pause_mode
        if mode is PauseMode.ALL:
            return False
        return bool(len(self._batch) or (mode is None and len(self._table.queue)))

    def get_request(self, request_id: str) -> Request | None:
        """The request with this id that has not finished, or None."""
        return self._table.get(request_id)

    def is_id_in_use(self, request_id: str) -> bool:
        """Whether a new request with this id would be refused as a duplicate: a request with this id has not finished,
        or no output has reported its finish yet."""
        return request_id in self._table.requests

    @property
    def pause_mode(self) -> PauseMode | None:
        """The mode of the pause; None: not paused."""
        return None if self._admission.pause is None else self._admission.pause.mode

    @property
    def num_running(self) -> int:
        """Number of requests that hold blocks and take part in steps."""
        return len(self._batch.members.requests)

    @property
    def running(self) -> tuple[Request, ...]:
        """The running requests, in admission order."""
        return self._batch.members.requests

    @property
    def running_rows(self) -> npt.NDArray[np.int64]:
        """[num_running] int64, read-only: the rows of the running requests, in admission order."""
        return self._batch.members.rows

    @property
    def running_num_tokens(self) -> npt.NDArray[np.int64]:
        """[num_running] int64: number of known tokens of each running request, in admission order."""
        return self._batch.num_tokens[self._batch.members.rows]

    @property
    def num_queued(self) -> int:
        """Number of requests that wait for capacity."""
        return len(self._table.queue)

    @property
    def waiting(self) -> tuple[Request, ...]:
        """The requests that wait for capacity, the next to be admitted first. O(n log n), or slower if the order policy
        has no key for each request."""
        queue = self._table.queue
        if isinstance(queue, FirstComeFirstServed):
            return tuple(sorted(queue, key=lambda request: request._state.queue_entry or []))
        return tuple(sorted(queue, key=queue.position))

    @property
    def num_parked(self) -> int:
        """Number of parked requests: they wait for something other than capacity."""
        return len(self._table.parked)

    @property
    def kv_cache_usage(self) -> float:
        """Number of KV blocks that requests hold, as a share of the pool's usable blocks: 0 to 1."""
        return self._kv.pool.usage

    def gauges(self) -> tuple[int, int, int, float]:
        """Return (`num_running`, `num_queued`, `num_parked`, `kv_cache_usage`), for hosts that report them in every
        step."""
        table = self._table
        return len(self._batch.members.requests), len(table.queue), len(table.parked), self._kv.pool.usage

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._steps.records)

    @property
    def outputs_in_flight(self) -> tuple[SchedulerOutput, ...]:
        """Outputs of the steps in flight, in the order in which `update` accepts them."""
        return tuple([record.output for record in self._steps.records if record.output is not None])

    @property
    def has_unreported_ends(self) -> bool:
        """Whether the next output reports a finished request; until then the id of the request is in use."""
        return bool(self._table.finished)

    @property
    def unreported_ends(self) -> tuple[Request, ...]:
        """The finished requests that the next output reports."""
        return tuple(self._table.finished)

    @property
    def is_idle(self) -> bool:
        """Whether there is no request, no step in flight, and nothing for the next output to report."""
        return not (self._table.requests or self._steps.records or self._table.preempted or self._table.finished)

    def can_advance(self) -> bool:
        """Whether a step that is scheduled now may have anything to run: a request is queued, or a running request has
        an uncomputed token that no step in flight covers, and no pause stops the request. For hosts that run ahead and
        avoid empty steps.
        """
        if self.pause_mode is PauseMode.ALL:
            return False
        wants = self._running.wants
        waits = self.pause_mode is None and len(self._table.queue)
        return bool(waits or wants(with_drafts=False, alone=True)[1].any())

    @property
    def max_drafts(self) -> int:
        """Maximum number of drafts that a step would verify for a request now (`num_draft_tokens`, `draft_table`)."""
        return self._config.max_drafts(len(self._batch))

    @property
    def block_table(self) -> Int32Array:
        """int32 [rows, blocks], read-only: row `output.rows[i]` is the block table of request i of the output, in the
        first group of KV. Valid until the next call. Not available with a `kv_cache` of the host."""
        return self._kv.group_tables(self._batch)[:, 0]

    @property
    def group_block_tables(self) -> Int32Array:
        """int32 [rows, groups, blocks], read-only: the block table of each row in each group of KV. Entries of blocks
        behind a window, or past the end of a table, are undefined. Valid until the next call. Not available with a
        `kv_cache` of the host."""
        return self._kv.group_tables(self._batch)

    def block_tables(self, request_id: str) -> Int32Array:
        """int32 [groups, blocks]: a copy of a request's block table in each group of KV, 0 where a block was returned
        to the pool; no blocks while the request has no row.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        row = self._table.require(request_id).row
        if row is None:
            return np.zeros((max(1, len(self._config.kv_groups)), 0), dtype=np.int32)
        return self._kv.group_table(self._batch, row)

    def waiting_drafts(self, request_id: str) -> list[int]:
        """Token ids of the proposed drafts that wait for the next step of a request; empty while the request has no
        row.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        row = self._table.require(request_id).row
        return [] if row is None else self._drafts.of_row(row)

    def input_token_ids(self, output: SchedulerOutput, *, allow_unsampled: bool = False) -> Int32Array:
        """[total_num_scheduled_tokens] int32: the tokens that a step computes, row after row, drafts included.

        Args:
            allow_unsampled: whether the array contains `UNSAMPLED` in place of tokens that an earlier step in flight
                has yet to sample; the host knows these tokens when it executes the step.

        Raises:
            StepOrderError: an earlier step in flight has yet to sample a token, and `allow_unsampled` is False.
        """
        return input_token_ids(self._batch, output, allow_unsampled)

    def explain(self, request_id: str) -> Explanation:
        """Explain the state of a request: why it waits, for which requests, and since when.

        Raises:
            UnknownRequest: no such request, or an output has reported it finished.
        """
        request = self._table.requests.get(request_id) or self._table.require(request_id)
        return explain(request, self._parts, self._config)

    def stats(self) -> SchedulerStats:
        """A snapshot of counters and gauges."""
        return self._statistics.snapshot(self._parts)

    def check_invariants(self) -> None:
        """Verify the invariants of blocks, of requests' places and of counters. Can be called in any state. O(requests
        + blocks): for tests and sampling.

        Raises:
            InvariantError: naming the invariant ("promise") that is broken.
        """
        check(self._config, self._parts, self._max_seen_active_seqs)
