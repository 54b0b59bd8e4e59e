"""The scheduler: at every step it decides which requests run and how many tokens each advances.

    output = scheduler.schedule(now)                 decide, and commit the decision
    result = host.execute(output)                    the only part that differs between hosts
    done   = scheduler.update(output, result, now)   append tokens, stop conditions, free
             scheduler.propose(output, ...)          optional: drafts, to be verified in the next step (`drafts.py`)

`schedule` goes through five parts, in this order:

    1. displace   a more urgent waiting request may take the room of less urgent running ones (`displacement.py`)
    2. advance    the running requests, under limits, budget and blocks, preempting if need be (`running.py`)
    3. publish    their prompt blocks, so that the requests admitted next can share them (`kv_cache.py`)
    4. admit      waiting requests, one after the other, until one is a wall to those behind it (`intake.py`)
    5. emit       the output (`emission.py`, `output.py`)

There is no prefill phase and no decode phase (unless `batching` asks for them, see `work.py`): each request's
`num_computed_tokens` chases its `num_tokens`, and a prefill chunk is what the budget does to a long prompt. The
scheduler reads no clock and no random number; the same calls give the same decisions. One thread owns it. What a host
may ask without changing anything is in `questions.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pointsman.core.config import SchedulerConfig
from pointsman.core.errors import InvalidTransition, UnknownTransfer
from pointsman.core.kv.connector import AnswerLog, KVConnector
from pointsman.core.kv.events import KVEvent
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import make_transfers
from pointsman.core.observe.events import RequestLog
from pointsman.core.observe.questions import Questions
from pointsman.core.observe.stats import Counters
from pointsman.core.observe.watchdog import Stall, Watchdog
from pointsman.core.policy.adapters import AdapterSlots
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.policy.limits import FollowsLoad, make_limits
from pointsman.core.policy.order import make_order
from pointsman.core.policy.partial_prefills import make_partial_prefills
from pointsman.core.policy.reserve import make_reserves
from pointsman.core.policy.victim import make_victim
from pointsman.core.recording import NEW, Recorder, Start
from pointsman.core.state.batch import Batch
from pointsman.core.state.inputs import EncoderInput
from pointsman.core.state.numbers import checked_priority
from pointsman.core.state.output import Integers, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason, Pause, PauseMode, RequestStatus
from pointsman.core.step.admission import Admission
from pointsman.core.step.batching import Idle, make_work
from pointsman.core.step.displacement import Displacement, displaces
from pointsman.core.step.drafts import Drafts
from pointsman.core.step.emit import Emission
from pointsman.core.step.in_flight import StepRecord, not_the_oldest, require_in_flight, too_many_in_flight
from pointsman.core.step.in_order import make_running
from pointsman.core.step.intake import Intake
from pointsman.core.step.loading import make_loading
from pointsman.core.step.prompt_parts import Parts
from pointsman.core.step.request_table import End, Lifecycle
from pointsman.core.step.rewind import take_back
from pointsman.core.step.update import Update
from pointsman.core.step.validation import checked_end, refused, settle_limits


class Scheduler(Questions):
    """Continuous batching over a paged KV cache, for any host that can execute a `SchedulerOutput`.

    Args:
        config: every knob.
        recorder: where to write every call and every decision, so that they can be replayed; None: nowhere, until
            `start_recording`.
        connector: where KV comes from and goes to besides the pool, see `kv_connector.py`; None: nowhere.
        start: where the numbers of steps and admissions begin; a replay takes them from the recording.

    Raises:
        ConfigError: the configuration names a policy that does not exist, or is about a connector that is not there.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        recorder: Recorder | None = None,
        connector: KVConnector | None = None,
        start: Start = NEW,
    ) -> None:
        self.config = config
        self._counters = Counters(accepted_drafts=[0] * (1 + config.num_draft_tokens))
        answers = None if recorder is None or connector is None else AnswerLog(connector)
        self._has_connector = connector is not None
        self._assemble(start, answers or connector)
        self._recorder = recorder
        if recorder is not None:
            recorder.start(config, start, answers)

    def _assemble(self, start: Start, connector: KVConnector | None = None) -> None:
        """Make all parts anew, for the present configuration; only the counters go on."""
        config, counters = self.config, self._counters
        max_blocks = min(-(-config.max_model_len // config.block_size), config.num_usable_blocks)
        self._batch = batch = Batch(config.block_size, max_blocks, counters.accepted_drafts)
        self._kv = kv = KVCacheManager(config)
        self._drafts = drafts = Drafts(config, batch, counters)
        drafts.last_updated_step = start.step_id - 1
        encoder = EncoderCache(config) if config.encoder_budget else None
        limits = make_limits(config, encoder)
        self._load_limits = [limit for limit in limits if isinstance(limit, FollowsLoad)]
        queue = make_order(config.order)
        adapters = AdapterSlots(config)
        transfers = make_transfers(config, kv, connector)
        self._running = running = make_running(config, batch, kv, limits, make_victim(config, queue.name), drafts)
        partial, reserves = make_partial_prefills(config, batch), make_reserves(config)
        self._admission = Admission(config, kv, limits, reserves, adapters, partial, transfers)
        self._displacement = None
        if displaces(config, queue):
            self._displacement = Displacement(config, batch, kv, running, self._admission, adapters, encoder, drafts)
        log = RequestLog() if config.log_request_events else None
        self._life = life = Lifecycle(batch, kv, queue, adapters, encoder, self._admission, counters, log, transfers)
        life.next_serial = start.serial
        self._loading = loading = make_loading(config, kv, life, transfers, counters)
        self._intake = Intake(config, batch, kv, running, self._admission, life, counters, self._publish, loading)
        self._usual_work = self._work = make_work(
            self._running, life, self._publish, self._intake.admit, config.batching
        )
        self._idle = Idle(self._running, self._intake.admit)
        self._parts = Parts(config, self._life)
        self._update = Update(self._batch, self._kv, self._life, self._parts, self._counters)
        self._most_active_seqs = config.num_seats
        self._watchdog = Watchdog()
        self._next_step_id = start.step_id
        self._emission = Emission(self._batch, self._kv, self._life, counts_common_prefix=config.count_common_prefix)
        self._unpublished: list[Request] = []

    # ------------------------------------------------------------------ requests

    def add(self, request: Request, now: float, *, park: ParkReason | None = None) -> None:
        """Queue a request, or park it until `ready`.

        Raises:
            RequestRefused: it could never run; its status is then FINISHED_REFUSED and nothing of it is kept.
            DuplicateRequest: its id is in use.
        """
        self._life.require_free_id(request.request_id)
        park = None if park is None else ParkReason(park)
        if request.status is not RequestStatus.WAITING or request.sequence_number:
            raise InvalidTransition(f"request {request.request_id!r} was added before; make a new Request")
        why = settle_limits(self.config, request)
        if why is not None:
            self._counters.num_refused += 1
            raise refused(request, why)
        self._life.tell_time(now)
        self._life.add(request, now, park)
        self._counters.num_added += 1
        if self._recorder is not None:
            self._recorder.added(request, now, park)

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
        """The next part of the prompt of a request that was added with `more_input` (see `parts.py`).

        Args:
            token_ids: of the part; may be none if it is the last.
            more: whether further parts come.
            max_tokens: most tokens to generate before the next part is taken; 0: the part is only computed.
            encoder_inputs: of the part, as for `Request`; their placeholders are counted from its own first token.

        Raises:
            UnknownRequest, InvalidTransition: there is no such request, or its prompt is complete.
            RequestRefused: the part is none, or what it leads to could never run; the request is as before.
        """
        self._life.tell_time(now)
        request = self._life.require(request_id)
        part = self._parts.extend(request, token_ids, encoder_inputs, more=more, max_tokens=max_tokens)
        if self._recorder is not None:
            self._recorder.extended(request_id, part, more, now)
        return request

    def abort(self, request_id: str, now: float) -> Request | None:
        """End a request at its caller's wish, wherever it is. None: unknown, or ended already."""
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
        """End a request for the host's own reason, such as a stop string. None: unknown, or ended already.

        `keep_tokens` cuts its output to that many tokens.
        """
        request = self._life.get(request_id)
        if request is None:
            return None
        reason = checked_end(request_id, reason, keep_tokens)
        self._life.tell_time(now)
        self._life.end([End(request, reason, detail, stop_reason)])
        if keep_tokens is not None:
            request.truncate_output(keep_tokens)
        if self._recorder is not None:
            self._recorder.finished(request_id, reason, now, keep_tokens, detail, stop_reason)
        return request

    def park(self, request_id: str, reason: ParkReason, now: float) -> None:
        """Let a request wait for something other than capacity. It keeps its place and holds no blocks; a running one
        gives them back as if preempted.

        Raises:
            UnknownRequest: no such request, or it has ended.
        """
        reason = ParkReason(reason)
        self._life.tell_time(now)
        self._life.park(self._life.require(request_id), reason, now)
        if self._recorder is not None:
            self._recorder.parked(request_id, reason, now)

    def ready(self, request_id: str, now: float) -> None:
        """What a parked request waited for is there.

        Raises:
            UnknownRequest: no such request, or it has ended.
            InvalidTransition: it is not parked, or waits for input alone.
        """
        request = self._life.require_parked(request_id)
        self._life.tell_time(now)
        if self._parts.ready(request, now):
            self._life.ready(request)
        if self._recorder is not None:
            self._recorder.readied(request_id, now)

    def set_priority(self, request_id: str, priority: int, now: float) -> None:
        """Change a request's priority; if it is queued, its place changes at once.

        Raises:
            UnknownRequest: no such request, or it has ended.
            ValueError: the priority is no integer, or out of range.
        """
        request = self._life.require(request_id)
        priority = checked_priority(priority)
        self._life.set_priority(request, priority)
        if self._displacement is not None:
            self._displacement.forget()
        if self._recorder is not None:
            self._recorder.set_priority(request_id, priority, now)

    def reset_prefix_cache(self, now: float, *, preempt_running: bool = False) -> None:
        """Forget every cached prefix (after the weights changed, say), in the pool and in the connector.

        What runs goes on with the KV that it has, and publishes no more. With `preempt_running` it computes it anew
        instead: it returns to the queue with its tokens, and with the samples of steps in flight when they come back.
        """
        self._life.tell_time(now)
        if preempt_running:
            self._life.preempt_all()
        self._kv.reset()
        if self._loading is not None:
            self._loading.forget()
        if self._recorder is not None:
            self._recorder.reset_prefix_cache(preempt_running, now)

    def reset_encoder_cache(self, now: float) -> None:
        """Forget every embedding of encoder inputs; KV that was computed from them stays (`reset_prefix_cache`)."""
        if self._life.encoder is not None:
            self._life.encoder.reset()
        if self._recorder is not None:
            self._recorder.reset_encoder_cache(now)

    def set_max_num_active_seqs(self, limit: int | None, now: float) -> None:
        """Change how many requests may run at once, from the next step on; None: `max_num_seqs`. `config` says it.

        If more than `limit` run, they go on, and nobody is admitted until fewer do.

        Raises:
            ConfigError: the limit is out of range, see `SchedulerConfig.max_num_active_seqs`.
        """
        self.config = self.config.replace(max_num_active_seqs=limit)
        self._admission.max_num_active_seqs = seats = self.config.num_seats
        self._most_active_seqs = max(self._most_active_seqs, seats)
        if self._recorder is not None:
            self._recorder.set_max_num_active_seqs(limit, now)

    def pause(self, now: float, mode: PauseMode = PauseMode.ALL) -> None:
        """Schedule nothing (`PauseMode.ALL`), or admit nobody (`PauseMode.ADMISSIONS`), until `resume`.

        Steps in flight end as ever; while one is, the pause is not complete. Twice is fine, and the later mode counts.
        """
        mode = PauseMode(mode)
        if mode is not PauseMode.ALL and self.pause_mode is PauseMode.ALL:
            self._life.last_output = None  # as in `resume`
        self._life.pause = Pause(mode, now)
        self._work = self._idle if mode is PauseMode.ALL else self._usual_work
        if self._recorder is not None:
            self._recorder.paused(mode, now)

    def resume(self, now: float) -> None:
        """Go on after a `pause`; nothing happens if there was none."""
        self._life.pause = self._life.last_output = None  # whom a step in the pause left out, the next one need not
        self._work = self._usual_work
        if self._recorder is not None:
            self._recorder.resumed(now)

    def transfer_done(
        self, transfer_id: int, now: float, *, num_loaded_tokens: int | None = None, failed_blocks: Iterable[int] = ()
    ) -> Request | None:
        """An asynchronous load, or a send, has ended: the device will not touch its blocks any more.

        Of a load, `num_loaded_tokens` are there, from its first one on (None: all), as far as the first of the
        `failed_blocks`. Returns the request that ends by it (`kv_load_failure_policy` "fail"), or None.

        Raises:
            UnknownTransfer: no such transfer is under way.
        """
        if self._loading is None:
            raise UnknownTransfer(f"no transfer {transfer_id!r} is under way: this scheduler has no connector")
        self._life.tell_time(now)
        failed = sorted(int(block) for block in failed_blocks)
        ended = self._loading.done(transfer_id, num_loaded_tokens, failed)
        if self._recorder is not None:
            self._recorder.transfer_done(transfer_id, num_loaded_tokens, failed, now)
        return ended

    # ------------------------------------------------------------------ the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide what runs in the next step, and commit to it.

        Raises:
            StepOrderError: `max_steps_in_flight` outputs wait for their update already.
        """
        record = self._open_step(now)
        displacer = self._displace()
        advance = self._work(record, displacer, now)
        for request in self._unpublished:
            self._kv.publish_prompt(self._batch, request)
        self._unpublished.clear()
        output = self._emission.emit(record, advance)
        self._life.in_flight.append(record)
        self._next_step_id += 1
        self._counters.num_steps += 1
        self._counters.num_scheduled_tokens += output.total_num_scheduled_tokens
        if self._recorder is not None:
            self._recorder.scheduled(output, now)
        return output

    def update(self, output: SchedulerOutput, result: StepResult, now: float) -> StepUpdate:
        """Take in what came back from the model: append tokens, end what is done, free its blocks.

        Raises:
            StepOrderError: `output` is not the oldest step in flight.
            StepResultError: the result does not fit the output. Nothing was applied; the step is still in flight.
        """
        in_flight = self._life.in_flight
        if not in_flight or in_flight[0].output is not output:
            raise not_the_oldest(in_flight, output)
        self._life.tell_time(now)
        update = self._update.apply(in_flight[0], output, result, now)
        in_flight.popleft()
        self._drafts.last_updated_step = output.step_id
        self._batch.fence_passed(output.step_id)
        if not in_flight:
            self._kv.journal = None
        if self._recorder is not None:
            self._recorder.updated(output, result, update, now)
        return update

    def propose(self, output: SchedulerOutput, token_ids: Integers, counts: Integers, now: float) -> int:
        """Drafts: what the host guesses to follow the tokens of an updated output's rows, to be verified in their next
        step. They take the place of what was proposed before.

        Args:
            output: the step that was updated last. For an older one the proposal comes too late and is dropped.
            token_ids: the drafts, ragged, in row order; an int32 array costs least.
            counts: [output.num_rows] how many for each row, 0 to `num_draft_tokens`. Drafts of rows that do not decode
                (any more), or have further samples in flight, are dropped, as is what would pass a token limit.

        Returns:
            How many drafts wait now at these rows.

        Raises:
            StepOrderError: `output` has not been updated.
            ProposalError: the arguments do not fit the output. Nothing was kept.
        """
        kept = self._drafts.propose(output, token_ids, counts, len(self._life.in_flight) > 0)
        if self._recorder is not None:
            self._recorder.proposed(output, token_ids, counts, kept, now)
        return kept

    def fail(self, output: SchedulerOutput, now: float) -> None:
        """A step could not be executed: it, and every later one in flight, is void.

        Requests admitted since return to their places in the queue, the others are rewound and keep their blocks, and
        blocks published since leave the prefix cache, embeddings computed since the encoder cache. Preemptions and ends
        stand; the next output tells of them again and carries the full block table of every row.

        Raises:
            StepOrderError: `output` is not in flight.
        """
        require_in_flight(self._life.in_flight, output)
        self._life.tell_time(now)
        self._counters.num_failed_steps += take_back(output, self._batch, self._kv, self._life, self._loading)
        self._emission.resync()
        if self._recorder is not None:
            self._recorder.failed(output, now)

    # ------------------------------------------------------------------ what there is to tell

    def stalled(self, now: float, seconds: float) -> list[Stall]:
        """Requests without progress for `seconds` or longer; call it a few times in that many (see `watchdog.py`)."""
        return self._watchdog.stalled(self._life, self.explain, now, seconds)

    def take_kv_events(self) -> list[KVEvent]:
        """What entered and left the prefix cache since the last call, in order; with `enable_kv_cache_events`."""
        return self._kv.events.take() if self._kv.events is not None else []

    # ------------------------------------------------------------------ recordings

    def start_recording(self, recorder: Recorder) -> None:
        """Record all that happens from now on.

        A replay begins with a new scheduler, so this one becomes as a new one: it forgets every cached prefix, and what
        it learned of the requests so far. Counters go on, a pause stays, and so do the numbers of steps and admissions.

        Raises:
            InvalidTransition: a recording is under way, requests are here, or an output has yet to tell of something;
                or the host keeps embeddings, or a connector blocks, which a new scheduler would not know of.
        """
        if self._recorder is not None:
            raise InvalidTransition("a recording is under way; stop_recording() first")
        if self.config.encoder_budget or self._has_connector:
            what = "a connector" if self._has_connector else "encoder_budget"
            raise InvalidTransition(f"with {what} a recording begins with the scheduler: give it a recorder")
        if not self.is_idle:
            raise InvalidTransition(
                f"a recording begins when nobody is here: {self.num_running} running, {self.num_queued} queued, "
                f"{self.num_parked} parked, {self.num_steps_in_flight} step(s) in flight, and ends to tell of"
            )
        # One step's number is left out, so that drafts for a step of before come too late instead of being looked at.
        start = Start(self._next_step_id + 1, self._life.next_serial)
        kv, pause = self._kv, self._life.pause
        self._assemble(start)
        self._kv.continue_reports(kv)
        self._recorder = recorder
        recorder.start(self.config, start)
        if pause is not None:
            self.pause(pause.since, pause.mode)

    def stop_recording(self) -> None:
        """Record nothing from now on; what has been recorded so far can be replayed. Nothing happens if nothing is."""
        self._recorder = None

    # ------------------------------------------------------------------ parts of `schedule`

    def _open_step(self, now: float) -> StepRecord:
        in_flight = self._life.in_flight
        if len(in_flight) >= self.config.max_steps_in_flight:
            raise too_many_in_flight(in_flight, self.config.max_steps_in_flight)
        self._life.tell_time(now)
        if self._loading is not None:
            self._loading.expire(now)
        record = StepRecord(self._next_step_id)
        for limit in self._load_limits:
            limit.open_step(len(self._life.queue) + len(self._batch))
        self._kv.open_step(record.step_id, record.journal, in_flight[0].step_id if in_flight else record.step_id)
        if self._life.encoder is not None:
            self._life.encoder.open(record.step_id, now)
        return record

    def _displace(self) -> Request | None:
        """Part 1: make room for a more urgent waiting request; returns it if somebody gave way."""
        life = self._life
        if self._displacement is None or life.pause is not None or not len(life.queue) or not len(self._batch):
            return None
        head = life.queue.peek()
        displaced = self._displacement.choose(head)
        for request in displaced:
            life.preempt(request)
        self._counters.num_displaced += len(displaced)
        return head if displaced else None

    def _publish(self, request: Request) -> None:
        """Part 3: at once, or after the admissions if a host cannot share within a step."""
        if self.config.share_within_step:
            self._kv.publish_prompt(self._batch, request)
        else:
            self._unpublished.append(request)
