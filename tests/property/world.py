"""Runs a scheduler, a shadow host and a ledger side by side, and checks the promises after every call.

The ledger tracks each request's place (queued, parked or running), its tokens and its steps in flight, only from calls
and outputs. Nothing here looks inside the scheduler. Each operation of `World` makes one call, compares the answer with
what the ledger expects, and ends with `check`.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, TextIO

from pointsman.core import (
    ConfigError,
    DuplicateRequest,
    EncoderInput,
    FinishReason,
    InvalidTransition,
    ParkReason,
    PauseMode,
    ProposalError,
    Reason,
    Recorder,
    ReplayDifference,
    Request,
    RequestEventType,
    RequestRefused,
    RequestStatus,
    Scheduler,
    SchedulerConfig,
    SchedulerOutput,
    StepOrderError,
    StepResult,
    StepResultError,
    StepUpdate,
    UnknownRequest,
    replay,
)

from .admissions import check_admissions
from .expectations import Expectations, check_explanations, malformed_results, why_refused
from .group_shadow import GroupShadowHost
from .group_transfers import GroupDevice
from .kv_mirror import KVMirror
from .ledger import Entry, Kept, Part, Place, Tally, place_of
from .partials import check_caps
from .policies import is_in_sequence
from .shadow import ExecutedStep, Reference, ShadowFault, ShadowHost, reference_run, require
from .slots import HeldSlots
from .transfer_operations import end_transfer, give_up, overdue, passed_over, roll_back, take_over
from .transfers import Device
from .workload import RequestSpec


class World:
    """One scheduler, its host and its ledger."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        connector_seed: int | None = None,
        recording: TextIO | None = None,
        shadow_only: bool = False,
    ) -> None:
        self.config = config
        self.shadow_only = shadow_only  # only the host checks, for faults that it alone must detect
        self.host = GroupShadowHost(config) if config.has_kv_groups else ShadowHost(config)
        if connector_seed is not None:
            full_length = min(config.max_blocks(config.max_model_len), config.num_usable_blocks)
            most = config.num_usable_blocks - full_length
            kind = GroupDevice if config.has_kv_groups else Device
            self.host.device = kind(self.host, connector_seed, max_held_blocks=most)
        recorder = Recorder(recording) if recording is not None else None
        self.host.scheduler = self.scheduler = Scheduler(config, recorder=recorder, connector=self.host.device)
        self.is_recorded = recording is not None
        self.recording: io.StringIO | None = None  # one that began in the middle
        self.mirror = KVMirror(self.scheduler)
        self.now = 0.0
        self.is_busy = False
        """Whether the host schedules a step when the step before it ends, as in fast-forward."""
        self._newest_call = ""
        self.calls: Counter[str] = Counter()
        self.live: list[Entry] = []  # in order of adding
        self.entries: dict[Request, Entry] = {}
        self.unreported: list[Request] = []  # ended, not yet in an output
        self.repeated: set[Request] = set()  # end in a failed output: reported again, the id is free
        self.unreported_losses: list[Request] = []  # lost their row, not yet in an output
        self.conversations: list[list[int]] = []  # of requests that ended
        self.num_sequence_slots = config.num_sequence_slots
        self.output_lengths: list[int] = []  # of requests that ended by themselves
        self.last_done: SchedulerOutput | None = None
        self.last_update: SchedulerOutput | None = None
        self.older_update: SchedulerOutput | None = None
        self.proposed: dict[Request, list[int]] = {}  # drafts that wait at running requests
        self.tally = Tally()
        self.times_told: dict[Entry, tuple[Reason | None, float | None, int]] = {}  # why, since when, after which event
        self.reasons_told: Counter[Reason | None] = Counter()  # by every explanation of every request
        self.num_requests = 0
        self.num_admissions = 0
        self.num_losses = 0  # of rows, by requests that had not ended
        self.left_out: dict[Request, SchedulerOutput] = {}  # rows that the newest output does without
        self.batch_forms = False  # static: only the token budget stopped the last step's admissions
        self.num_completed_parts = 0
        self.num_recordings = 0  # that began in the middle
        self.num_capacity_ends = 0
        self.num_completions = 0  # of requests that sample nothing
        self.newest_step_id = -1
        self.last_row_error_step = -1  # the newest step that was scheduled when a row failed on its own
        self.slots = HeldSlots()
        self.num_withdrawals = 0  # number of times that blocks may have left the prefix cache other than by eviction
        self.num_cached_tokens = 0
        self.resync_due = False
        self.pause: PauseMode | None = None
        self.stands_before_an_input: set[Entry] = set()  # running requests without a token in the newest step
        self.stands: dict[
            Entry, tuple[tuple[Any, ...], float]
        ] = {}  # progress of each at the last check, and since when
        self.untold: dict[Entry, int] = {}  # admissions whose full block table is due since a step failed

    # ================================================================ requests

    def add(self, spec: RequestSpec) -> Entry | None:
        """Add a request; one that can never run must be refused, any other must not."""
        self._tick("add")
        room = min(self.config.max_model_len - 1, self.config.num_usable_tokens)
        longest = max(1, room, spec.shared + len(spec.tail))
        request = spec.build(self._new_id(spec), self.conversations, longest)
        park = ParkReason(spec.park) if spec.park else None
        reason = why_refused(request, self.config)
        if reason is not None:
            before = self._snapshot()
            error = self._expect(RequestRefused, lambda: self.scheduler.add(request, self.now, park=park))
            require(request.status is RequestStatus.FINISHED_REFUSED, f"refused, but {request.status}")
            require(any(c.isdigit() for c in str(error)), f"a refusal without numbers: {error}")
            require(before == self._snapshot(), f"a refused request ({reason}) changed the scheduler")
            self.tally.num_refused += 1
            self.check()
            return None
        self.scheduler.add(request, self.now, park=park)
        entry = Entry(
            request=request,
            reference=reference_run(request, self.config),
            place=Place.PARKED if park else Place.QUEUED,
            number=self.num_requests,
            more_input=request.more_input,
            prompt=request.prompt_token_ids.tolist(),
            inputs=list(request.encoder_inputs),
            parked_for=park.status.value if park else "",
        )
        entry.events.append(("PARKED", self.now, park.status.value) if park else ("QUEUED", self.now, ""))
        self.tally.num_added += 1
        self.live.append(entry)
        self.entries[request] = entry
        self.host.add(request)
        if spec.preloaded and request.reads_prefix_cache and self.host.device is not None:
            self.host.device.preload(request)
        self.check()
        return entry

    def extend(
        self, entry: Entry, tokens: list[int], inputs: list[EncoderInput], *, more: bool, max_tokens: int
    ) -> None:
        """The next part of a request's prompt; refused if none is expected, or if it would be too long or large."""
        self._tick("extend")
        name, known = entry.request.request_id, len(tokens) + sum(len(part.tokens) for part in entry.parts)
        options = {"more": more, "max_tokens": max_tokens, "encoder_inputs": inputs}
        call = partial(self.scheduler.extend, name, tokens, self.now, **options)
        largest = max((item.entry.num_embeddings for item in inputs), default=0)
        length, room = entry.request.num_prompt_tokens + known, min(max_tokens, 1)
        limits = (self.config.max_model_len - room, (entry.request.max_total_tokens or length + room) - room)
        before = self._snapshot()
        if not entry.more_input:
            self._expect(InvalidTransition, call)
        elif (
            (more and not tokens)
            or length > min(*limits, self.config.num_usable_tokens)
            or largest > min(self.config.encoder_budget, self.config.encoder_cache_size)
        ):
            self._expect(RequestRefused, call)
        else:
            call()
            entry.more_input = more
            entry.parts.append(Part(tokens, max_tokens, inputs))
            if entry.awaits_input:
                self._take_parts(entry)
            self.check()
            return
        require(before == self._snapshot(), "a part that was refused changed the scheduler")
        self.check()

    def _complete_part(self, entry: Entry) -> None:
        """Complete a part: the request waits for the next one, or continues with it."""
        request = entry.request
        if not entry.parts:  # otherwise its output is part of its prompt by now
            self._check_tokens(entry)
        if entry.place is Place.RUNNING:
            self.host.lose_row(request)
            self.unreported_losses.append(request)
            self._lose_row(entry, self.scheduler.stats().num_evictions, is_done=True)
        if entry.place is not Place.PARKED:
            self._park(entry, ParkReason.STREAMING_REQ)
        entry.kept = None
        entry.stale_until = self.host.in_flight[-1].output.step_id if self.host.in_flight else -1
        self.host.complete_part(request)
        self.num_admissions += 1  # it comes after requests that lost their rows before
        entry.last_admission = self.num_admissions
        entry.awaits_input = True
        self.num_completed_parts += 1
        if entry.parts:
            self._take_parts(entry)

    def _take_parts(self, entry: Entry) -> None:
        """Append the next part, and those after parts without output, to the prompt."""
        request = entry.request
        tokens = entry.prompt + list(entry.reference.tokens[: max(0, entry.num_output - 1)])
        while True:
            part = entry.parts.pop(0)
            entry.inputs += [item._replace(start=item.start + len(tokens)) for item in part.inputs]
            tokens += part.tokens
            if part.max_tokens or not entry.parts:
                break
        max_tokens = part.max_tokens
        given = [(item.start, item.entry) for item in request.encoder_inputs]
        expected = [(item.start, item.entry) for item in entry.inputs]
        require(given == expected, f"{request.request_id} has the inputs {given}, expected {expected}")
        require(request.prompt_token_ids.tolist() == tokens, f"{request.request_id} has another prompt than its parts")
        require(request.max_tokens == max_tokens, f"{request.request_id} has another max_tokens than its part")
        is_next = entry.waits_for_input_alone
        entry.awaits_input, entry.prompt, entry.num_output = False, tokens, 0
        room = min(max_tokens, 1)
        total = request.max_total_tokens or len(tokens) + room
        if len(tokens) + room > min(self.config.max_model_len, total) or len(tokens) > self.config.num_usable_tokens:
            entry.reference = Reference((), len(tokens), RequestStatus.FINISHED_LENGTH, None, frozenset())
            self._end(entry, RequestStatus.FINISHED_LENGTH)
            return
        entry.reference = reference_run(request, self.config)
        self.host.extend(request, tokens)
        if is_next:
            entry.place = Place.QUEUED
            entry.events.append(("QUEUED", self.now, ""))

    def _park(self, entry: Entry, reason: ParkReason) -> None:
        entry.place, entry.parked_for = Place.PARKED, reason.status.value
        entry.events.append(("PARKED", self.now, reason.status.value))

    def add_duplicate(self, request_id: str) -> None:
        """An id is in use until an output has reported its end."""
        self._tick("add_duplicate")
        request = Request(request_id, [1], arrival_time=0.0, max_tokens=1)
        before = self._snapshot()
        self._expect(DuplicateRequest, lambda: self.scheduler.add(request, self.now))
        require(before == self._snapshot(), "a duplicate changed the scheduler")
        self.check()

    def abort(self, entry: Entry) -> None:
        self._tick("abort")
        answer = self.scheduler.abort(entry.request.request_id, self.now)
        require(answer is entry.request, f"abort answered {answer}")
        self._end(entry, RequestStatus.FINISHED_ABORTED)
        self.check()

    def abort_unknown(self, request_id: str) -> None:
        """An id that is unknown or has ended: None, and nothing happens."""
        self._tick("abort_unknown")
        before = self._snapshot()
        require(self.scheduler.abort(request_id, self.now) is None, f"{request_id} was aborted after its end")
        answer = self.scheduler.finish(request_id, FinishReason.STOP, self.now)
        require(answer is None, f"{request_id} was finished after its end")
        require(before == self._snapshot(), "aborting an unknown request changed the scheduler")
        self.check()

    def finish(self, entry: Entry, reason: FinishReason, keep_tokens: int | None) -> None:
        """The host ends a request, for a stop string for example, and keeps the first `keep_tokens` of its output."""
        self._tick("finish")
        request = entry.request
        answer = self.scheduler.finish(
            request.request_id, reason, self.now, keep_tokens=keep_tokens, detail="the host", stop_reason="###"
        )
        require(answer is request, f"finish answered {answer}")
        num_generated = entry.num_output
        if keep_tokens is not None:
            entry.num_output = min(keep_tokens, entry.num_output)
        self._end(entry, reason.status, num_generated)
        require(request.finish_detail == "the host", f"detail {request.finish_detail!r}")
        require(request.stop_reason == "###", f"stop_reason {request.stop_reason!r}")
        self.check()

    def misuse(self, entry: Entry) -> None:
        """Calls that make no sense for a live request raise, and change nothing."""
        self._tick("misuse")
        name, before = entry.request.request_id, self._snapshot()
        self._expect(InvalidTransition, partial(self.scheduler.finish, name, FinishReason.REFUSED, self.now))
        self._expect(ValueError, partial(self.scheduler.finish, name, FinishReason.STOP, self.now, keep_tokens=-1))
        self._expect(DuplicateRequest, partial(self.scheduler.add, entry.request, self.now))
        require(before == self._snapshot(), "a call that makes no sense changed the scheduler")
        self.check()

    def park(self, entry: Entry, reason: ParkReason) -> None:
        """Park a waiting or running request, or change what a parked one waits for."""
        self._tick("park")
        self.scheduler.park(entry.request.request_id, reason, self.now)
        give_up(self, entry, parks=True)
        if entry.place is Place.RUNNING:
            self.host.lose_row(entry.request)
            self.unreported_losses.append(entry.request)
            self._lose_row(entry, self.scheduler.stats().num_evictions)
            self.tally.num_preempted_by_parking += 1
        self._park(entry, reason)
        require(entry.request.status is reason.status, f"parked for {reason}, but {entry.request.status}")
        self.check()

    def ready(self, entry: Entry) -> None:
        """Unpark a request; a request that is not parked is an error."""
        self._tick("ready")
        call = partial(self.scheduler.ready, entry.request.request_id, self.now)
        if entry.awaits_input and not entry.waits_for_input_alone:
            call()
            self._park(entry, ParkReason.STREAMING_REQ)
        elif entry.place is Place.PARKED and not entry.awaits_input and entry.load is None:
            call()
            entry.place = Place.QUEUED
            entry.events.append(("QUEUED", self.now, ""))
        else:
            before = self._snapshot()
            self._expect(InvalidTransition, call)
            require(before == self._snapshot(), "ready on a request that is not parked changed the scheduler")
        self.check()

    def set_priority(self, entry: Entry, priority: int) -> None:
        self._tick("set_priority")
        self.scheduler.set_priority(entry.request.request_id, priority, self.now)
        require(entry.request.priority == priority, "the priority was not set")
        self.check()

    def call_unknown(self, request_id: str) -> None:
        """Calls about a request that the scheduler does not hold raise, and change nothing."""
        self._tick("call_unknown")
        before = self._snapshot()
        self._expect(UnknownRequest, lambda: self.scheduler.park(request_id, ParkReason.GRAMMAR, self.now))
        self._expect(UnknownRequest, lambda: self.scheduler.ready(request_id, self.now))
        self._expect(UnknownRequest, lambda: self.scheduler.set_priority(request_id, 1, self.now))
        if request_id not in [request.request_id for request in self.unreported]:
            self._expect(UnknownRequest, lambda: self.scheduler.explain(request_id))
        require(before == self._snapshot(), "a call about an unknown request changed the scheduler")
        self.check()

    def set_max_num_active_seqs(self, limit: int) -> None:
        """Set the number of sequence slots; a number out of range raises, and changes nothing."""
        self._tick("set_max_num_active_seqs")
        if limit >= 1 and (limit <= self.config.max_num_seqs or self.config.batching == "prefill-first"):
            self.scheduler.set_max_num_active_seqs(limit, self.now)
            self.num_sequence_slots = limit
        else:
            before = self._snapshot()
            self._expect(ConfigError, lambda: self.scheduler.set_max_num_active_seqs(limit, self.now))
            require(before == self._snapshot(), "a limit out of range changed the scheduler")
        told = self.scheduler.config.max_num_active_seqs
        require(
            told is None or told == self.num_sequence_slots,
            f"max_num_active_seqs is {told}, expected {self.num_sequence_slots}",
        )
        self.check()

    def look_for_stalls(self, seconds: float) -> None:
        """Check `stalled`: the requests without progress for `seconds`, unless a pause stops them or they wait for
        their caller."""
        self._tick("stalled")
        before, stands = self._snapshot(), {}
        for entry in self.live:
            where = (
                entry.request.status,
                entry.last_admission,
                entry.num_tokens,
                entry.num_computed,
                self.pause is None,
            )
            seen = self.stands.get(entry)
            stands[entry] = seen if seen is not None and seen[0] == where else (where, self.now)
        self.stands = stands
        held = {None: (), PauseMode.ADMISSIONS: (Place.QUEUED,), PauseMode.ALL: (Place.QUEUED, Place.RUNNING)}[
            self.pause
        ]
        watched = {
            e.request.request_id: since
            for e, (_, since) in stands.items()
            if e.place not in held and not e.waits_for_caller
        }
        expected = {name: since for name, since in watched.items() if self.now - since >= seconds}
        told = {stall.explanation.request_id: stall.since for stall in self.scheduler.stalled(self.now, seconds)}
        require(told == expected, f"stalled are {told}, expected {expected}")
        require(before == self._snapshot(), "looking for stalls changed the scheduler")
        self.check()

    def set_pause(self, mode: PauseMode | None) -> None:
        """Pause in some mode, paused already or not; None: resume."""
        self._tick("pause" if mode else "resume")
        if mode is None:
            self.scheduler.resume(self.now)
        else:
            self.scheduler.pause(self.now, mode)
        if mode is None or (mode is not PauseMode.ALL and self.pause is PauseMode.ALL):
            self.left_out.clear()  # rows that a step in the pause left out may be in the next one
        self.pause = mode
        require(self.scheduler.pause_mode is mode, f"pause_mode is {self.scheduler.pause_mode}, expected {mode}")
        self.check()

    def reset_encoder_cache(self) -> None:
        """Reset the encoder cache: the next output must free the embeddings before it computes any."""
        self._tick("reset_encoder_cache")
        self.scheduler.reset_encoder_cache(self.now)
        self.host.encoder.distrust()
        self.check()

    def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        self._tick("reset_prefix_cache")
        self.scheduler.reset_prefix_cache(self.now, preempt_running=preempt_running)
        running = [entry for entry in self.live if entry.place is Place.RUNNING] if preempt_running else []
        for entry in sorted(running, key=lambda entry: entry.last_admission, reverse=True):
            self.host.lose_row(entry.request)
            self.unreported_losses.append(entry.request)
            self._lose_row(entry, self.scheduler.stats().num_evictions)
            self.tally.num_preempted_by_reset += 1
            entry.events.append(("PREEMPTED", self.now, ""))
            entry.place = Place.QUEUED
        for entry in self.live:
            give_up(self, entry)
        self.host.epoch += 1
        self.num_withdrawals += 1
        self.check()

    def start_recording(self) -> None:
        """Start a recording, if there are no requests; an earlier recording must replay. Otherwise it is refused."""
        self._tick("start_recording")
        self.check_recording()
        idle = not (self.live or self.host.in_flight or self.unreported or self.unreported_losses)
        require(self.scheduler.is_idle == idle, f"is_idle is {not idle}, with {len(self.live)} requests")
        if self.recording is not None:
            self._expect_no_recording()
            self.scheduler.stop_recording()
            self.recording = None
        if self.is_recorded or self.config.encoder_budget or self.host.device is not None or not idle:
            self._expect_no_recording()
            return
        self.recording = io.StringIO()
        self.scheduler.start_recording(Recorder(self.recording))
        self.num_recordings += 1
        self.host.epoch += 1
        self.num_withdrawals += 1
        self.output_lengths.clear()
        self.untold.clear()
        self.resync_due = False
        self.older_update, self.last_update = self.last_update, None
        require(
            self.scheduler.pause_mode is self.pause, f"a recording changed the pause to {self.scheduler.pause_mode}"
        )
        self.check()

    def _expect_no_recording(self) -> None:
        before = self._snapshot()
        self._expect(InvalidTransition, lambda: self.scheduler.start_recording(Recorder(io.StringIO())))
        require(before == self._snapshot(), "a recording that was refused changed the scheduler")
        self.check()

    def check_recording(self) -> None:
        """Check that the current recording replays."""
        if self.recording is None or self.shadow_only:
            return
        try:
            replay(io.StringIO(self.recording.getvalue()))
        except ReplayDifference as difference:
            raise ShadowFault(f"a recording does not replay: {difference}") from difference

    # ================================================================ steps

    def schedule(self) -> SchedulerOutput | None:
        """Schedule a step and execute it immediately; None if the maximum number of steps is in flight, so that
        `schedule` must raise."""
        self._tick("schedule")
        if len(self.host.in_flight) >= self.config.max_steps_in_flight:
            snapshot = self._snapshot()
            self._expect(StepOrderError, lambda: self.scheduler.schedule(self.now))
            require(snapshot == self._snapshot(), "a refused step changed the scheduler")
            self.check()
            return None
        overtime = [entry for entry in self.live if entry.load is not None]
        late = overdue(self)
        expected, before = Expectations.of(self), self.scheduler.stats()
        can_advance = self.scheduler.can_advance()
        expected.unreported += [entry.request for entry in late]
        output = self.scheduler.schedule(self.now)
        self.newest_step_id = output.step_id
        for entry in late:
            self._end(entry, RequestStatus.FINISHED_ERROR)
        is_told = can_advance or bool(overtime)  # a load beyond its timeout is found when a step is scheduled
        require(is_told or not output.num_rows, "a step has rows, and can_advance said that none could advance")
        self.host.execute(output)
        expected.passed = passed_over(self, output, expected.contenders(output), expected.num_held)
        if not self.shadow_only:
            expected.check(output)
        victims = [entry for entry in expected.running if entry.request in output.preempted]
        self._take_over(output, before.num_evictions)
        present = set(output.requests)
        rows = (entry.request for entry in self.live if entry.place is Place.RUNNING)
        self.left_out = {request: output for request in rows if request not in present}
        self.batch_forms = self.config.batching == "static" and any(
            self.scheduler.explain(entry.request.request_id).reason is Reason.BUDGET for entry in self.queue()
        )
        if not self.shadow_only:
            check_admissions(self, output, before, victims, tried_first=expected.is_decode_step(output))
        self.check()
        return output

    def _take_over(self, output: SchedulerOutput, num_evictions: int) -> None:
        """Move requests to their places by the output; `num_evictions`: before the step."""
        for request in output.preempted:
            entry = self.entries[request]
            if entry.place is Place.RUNNING:
                self._lose_row(entry, num_evictions)
                entry.events.append(("PREEMPTED", self.now, ""))
                entry.place = Place.QUEUED
        self.unreported_losses.clear()
        self.slots.keep(entry for entry in self.live if entry.place is Place.RUNNING)
        for index, request in enumerate(output.requests):
            entry = self.entries[request]
            if index >= output.num_continued:
                self.num_admissions += 1
                entry.place = Place.RUNNING
                entry.events.append(("RESUMED" if entry.ran_before else "SCHEDULED", self.now, ""))
                self.slots.take(request.adapter)
                entry.previous_admission, entry.last_admission = entry.last_admission, self.num_admissions
                entry.admitted_step = output.step_id
                entry.num_admitted = entry.num_tokens
                entry.num_withdrawals = self.num_withdrawals
                self._count_admission(output, index - output.num_continued)
            entry.num_computed = int(output.num_computed_tokens[index] + output.num_scheduled_tokens[index])
            self.proposed.pop(request, None)
        self.stands_before_an_input = {
            entry
            for entry in self.live
            if entry.place is Place.RUNNING
            and entry.request not in output.requests
            and any(item.start <= entry.num_computed < item.end for item in entry.inputs)
        }
        self.tally.num_draft_tokens += int(output.num_draft_tokens.sum())
        take_over(self, output)
        self.unreported.clear()
        if output.resync:
            told = [self.entries[request] for request in output.requests]
            self.untold = {entry: n for entry, n in self.untold.items() if entry.runs_since(n) and entry not in told}
            self.resync_due = bool(self.untold)
        self.tally.num_steps += 1
        self.tally.num_scheduled_tokens += output.total_num_scheduled_tokens
        self.num_cached_tokens += int(output.num_cached_tokens.sum())

    def _count_admission(self, output: SchedulerOutput, index: int) -> None:
        """Count a look-up in the prefix cache. It stays counted if the step fails: counters never fall."""
        request = output.admitted[index]
        known, resumed = int(output.num_cached_tokens[index]), bool(output.is_resumed[index])
        hit = known - int(output.num_external_tokens[index])
        looks_up = self.config.enable_prefix_caching and request.reads_prefix_cache
        entry = self.entries[request]
        queried = entry.num_tokens if looks_up else 0
        self.tally.admit(resumed=resumed, queried=queried, hit=hit, recomputed=max(0, entry.num_lost - known))

    def update(
        self, errors: Iterable[int] = (), unsampled: Iterable[int] = (), *, explicit_counts: bool = False
    ) -> StepUpdate | None:
        """Hand back the oldest step's samples; rows in `errors` (taken modulo the rows) failed on the host, those in
        `unsampled` have no token although they sample."""
        self._tick("update")
        if not self.host.in_flight:
            return None
        step = self.host.deliver()
        failed = {index % step.output.num_rows for index in errors} if step.output.num_rows else set()
        missing = {index % step.output.num_rows for index in unsampled} if step.output.num_rows else set()
        missing = {index for index in missing - failed if step.sampled[index]}
        result = self._result(step, failed, missing, explicit_counts)
        done = self.scheduler.update(step.output, result, self.now)
        self.older_update, self.last_update, self.last_done = self.last_update, step.output, step.output
        self._check_update(step, failed, missing, done)
        self.check()
        return done

    def _result(self, step: ExecutedStep, failed: set[int], missing: set[int], explicit_counts: bool) -> StepResult:
        runs = [[] if index in failed | missing else run for index, run in enumerate(step.sampled)]
        counts, tokens = [len(run) for run in runs], [token for run in runs for token in run]
        explicit_counts |= len(tokens) > sum(count > 0 for count in counts)
        messages = {index: f"row {index} broke" for index in sorted(failed)}
        copies = None if self.host.device is None else self.host.device.copies(step.output)
        counted = counts if explicit_counts else None
        return StepResult(tokens, counted, messages, 0.01, frozenset(missing), copies)

    def _check_update(self, step: ExecutedStep, failed: set[int], missing: set[int], done: StepUpdate) -> None:
        tokens: list[int] = []
        counts: list[int] = []
        finished: list[Request] = []
        over: list[Entry] = []
        again: list[Entry] = []
        for index, request in enumerate(step.output.requests):
            entry = self.entries[request]
            counts.append(0)
            if entry.place is Place.ENDED or (step.output.step_id <= entry.stale_until and index not in failed):
                continue
            if index in failed:
                finished.append(request)
                self.host.spoil(request, step)
                self.last_row_error_step = self.newest_step_id
                self.num_withdrawals += 1
                self._end(entry, RequestStatus.FINISHED_ERROR)
                require(f"row {index} broke" in request.finish_detail, f"detail {request.finish_detail!r}")
            elif index in missing:
                again.append(entry)
            elif step.sampled[index]:
                counts[-1] = self._check_run(entry, step, index)
                tokens += step.sampled[index][: counts[-1]]
                if entry.num_output == len(entry.reference.tokens):
                    over.append(entry)
                else:
                    self._check_tokens(entry)
            elif index in step.completed:
                over.append(entry)
                self.num_completions += 1
        self._sample_again(again, step)
        parts = [entry for entry in over if entry.is_part_over()]
        for entry in over:
            if entry not in parts:
                finished.append(entry.request)
                self._end_by_itself(entry)
        order = list(step.output.requests)
        finished.sort(key=order.index)
        for entry in parts:
            self._complete_part(entry)
        finished += [entry.request for entry in parts if entry.place is Place.ENDED]
        completed = [entry.request for entry in parts if entry.place is not Place.ENDED]
        require(list(done.completed_parts) == completed, f"update completed {done.completed_parts}, not {completed}")
        require(done.counts.tolist() == counts, f"update kept {done.counts.tolist()} tokens, expected {counts}")
        require(done.token_ids.tolist() == tokens, f"update kept {done.token_ids.tolist()}, expected {tokens}")
        require(list(done.finished) == finished, f"update ended {done.finished}, expected {finished}")

    def _sample_again(self, entries: list[Entry], step: ExecutedStep) -> None:
        """Restart the requests for which the step has no token."""
        for entry in reversed([entry for entry in entries if entry.place is Place.RUNNING]):
            self.host.lose_row(entry.request)
            self.unreported_losses.append(entry.request)
            self._lose_row(entry, self.scheduler.stats().num_evictions)
            self.tally.num_preempted_unsampled += 1
            entry.events.append(("PREEMPTED", self.now, ""))
            entry.place = Place.QUEUED
        for entry in entries:
            if self.host.drop_samples(entry.request, step):  # then it comes after requests that lost their rows before
                entry.stale_until = self.host.in_flight[-1].output.step_id
                self.num_admissions += 1
                entry.last_admission = self.num_admissions

    def _check_run(self, entry: Entry, step: ExecutedStep, index: int) -> int:
        """Check the number of kept tokens of a row's run: up to the token that ends the request."""
        run, name = step.sampled[index], entry.request.request_id
        left = list(entry.reference.tokens[entry.num_output :])
        kept = run[: len(left)]
        require(kept == left[: len(kept)], f"{name} got the tokens {run}, alone it gets {left}")
        if kept and not entry.num_output:
            entry.events.append(("FIRST_TOKEN", self.now, ""))
        entry.num_output += len(kept)
        self.tally.num_generated_tokens += len(kept)
        num_drafts = int(step.output.num_draft_tokens[index])
        if num_drafts:
            self.tally.num_drafts += 1
            self.tally.num_accepted_tokens += min(len(kept), len(run) - 1)
            entry.num_verified += num_drafts
            entry.num_accepted += min(len(kept), len(run) - 1)
            if entry.place is Place.RUNNING:  # still the same admission: no other is made while drafts are in flight
                entry.num_computed -= 1 + num_drafts - len(kept)
        return len(kept)

    def propose(self, drafts: dict[Request, list[int]], *, stale: bool) -> None:
        """Propose drafts for the rows of the last update; stale drafts, and drafts that cannot be scheduled, are
        dropped."""
        self._tick("propose")
        output = self.last_update
        if output is None:
            return
        each = [drafts.get(request, []) for request in output.requests]
        flat, counts = [token for tokens in each for token in tokens], [len(tokens) for tokens in each]
        self._check_refused_proposals(output, flat, counts)
        kept = self.scheduler.propose(output, flat, counts, self.now)
        expected = 0
        for index, (request, tokens) in enumerate(zip(output.requests, each, strict=True)):
            entry = self.entries[request]
            if not self._decodes(entry) or request.serial != output.serials[index]:
                continue
            room = entry.reference.limit - entry.num_tokens - 1
            self.proposed[request] = tokens[:room]
            expected += len(self.proposed[request])
        require(kept == expected, f"{kept} drafts wait, expected {expected}")
        self.tally.num_proposed_tokens += kept
        if stale and self.older_update is not None:
            late = self.older_update
            answer = self.scheduler.propose(late, [1] * late.num_rows, [1] * late.num_rows, self.now)
            require(answer == 0, f"{answer} drafts were taken for a step that was not the last")
        self.check()

    def _decodes(self, entry: Entry) -> bool:
        """Whether a request could have drafts: it runs, has nothing in flight, and one uncomputed token."""
        runs = entry.place is Place.RUNNING and entry.num_computed == entry.num_tokens - 1
        has_sampled = entry.request.num_admitted_tokens < entry.num_tokens  # since its admission
        return runs and has_sampled and not self.host.num_pending(entry.request)

    def _check_refused_proposals(self, output: SchedulerOutput, flat: list[int], counts: list[int]) -> None:
        """Proposals that fit no output: an error, and nothing changes."""
        before = self._snapshot()
        wrong = [(flat, [*counts, 0]), ([*flat, 1], counts)]
        if flat:
            wrong += [([-1, *flat[1:]], counts), (flat[1:], counts)]
        if counts:
            more = 1 + self.config.num_draft_tokens
            wrong.append(([1] * (more - counts[0]) + flat, [more, *counts[1:]]))
        for tokens, per_row in wrong:
            self._expect(ProposalError, partial(self.scheduler.propose, output, tokens, per_row, self.now))
        for step in self.host.in_flight[:1]:
            rows = [0] * step.output.num_rows
            self._expect(StepOrderError, partial(self.scheduler.propose, step.output, [], rows, self.now))
        require(before == self._snapshot(), "a refused proposal changed the scheduler")

    def update_out_of_order(self) -> None:
        """Only the oldest step in flight may be updated, and only a step in flight may fail."""
        self._tick("update_out_of_order")
        before = self._snapshot()
        early = [step.output for step in self.host.in_flight[1:]]
        late = [self.last_done] if self.last_done is not None else []
        for output in early + late:
            result = StepResult([0] * int(output.samples.sum()))
            self._expect(StepOrderError, partial(self.scheduler.update, output, result, self.now))
        for output in late:
            self._expect(StepOrderError, partial(self.scheduler.fail, output, self.now))
        require(before == self._snapshot(), "a call out of order changed the scheduler")
        self.check()

    def update_malformed(self, kind: int) -> None:
        """Update with a result that does not fit its output: `StepResultError`, and no part of the result is
        applied."""
        self._tick("update_malformed")
        if not self.host.in_flight:
            return
        step = self.host.in_flight[0]
        broken = malformed_results(step)
        result = broken[kind % len(broken)]
        before = self._snapshot()
        self._expect(StepResultError, lambda: self.scheduler.update(step.output, result, self.now), note=repr(result))
        require(before == self._snapshot(), f"a malformed result changed the scheduler: {result}")
        self.check()

    def fail(self, index: int, *, seen: bool) -> None:
        """Step `index` (modulo those in flight) failed on the host; `seen`: whether the workers received the block
        tables of the step."""
        self._tick("fail")
        if not self.host.in_flight:
            return
        index %= len(self.host.in_flight)
        self.scheduler.fail(self.host.in_flight[index].output, self.now)
        voided = self.host.void(index, seen=seen)
        self.last_done = voided[0].output
        for step in voided:
            self.unreported_losses += [r for r in step.output.preempted if r not in self.unreported_losses]
            self.unreported += step.output.finished
            self.repeated.update(step.output.finished)
            self.tally.num_failed_steps += 1
        for entry in self.live:
            if entry.place is Place.RUNNING:
                self._rewind(entry, [step.output for step in voided])
        roll_back(self, [step.output for step in voided])
        self.resync_due = True
        self.num_withdrawals += 1
        self.untold |= {entry: entry.last_admission for entry in self.live if entry.place is Place.RUNNING}
        self.check()

    def _rewind(self, entry: Entry, voided: list[SchedulerOutput]) -> None:
        if entry.admitted_step >= voided[0].step_id:
            entry.place = Place.QUEUED
            entry.events.append(("ROLLED_BACK", self.now, ""))
            entry.num_computed = 0
            entry.last_admission = entry.previous_admission
            return
        for output in voided:
            if entry.request in output.requests:
                entry.num_computed = int(output.num_computed_tokens[list(output.requests).index(entry.request)])
                return

    def drain(self) -> None:
        """Let all requests finish: none may wait for ever, and every block must return."""
        self.set_pause(None)
        for entry in [entry for entry in self.live if entry.place is Place.PARKED and entry.load is None]:
            self.ready(entry)
        for entry in [entry for entry in self.live if entry.more_input]:
            self.extend(entry, [], [], more=False, max_tokens=0)
        device = self.host.device
        if device is not None:
            device.is_calm = True
        bound = 50 + 8 * sum(entry.request.num_prompt_tokens + len(entry.reference.tokens) for entry in self.live)
        steps = 0
        while self.live:
            require(steps <= bound, f"livelock: {len(self.live)} requests still live after {steps} steps")
            while self.host.in_flight:
                self.update()
            if self.config.num_draft_tokens and steps % 4:
                self._propose_some(steps)
            self.schedule()
            steps += 1
            for entry in self.live:
                if entry.load is not None:
                    end_transfer(self, entry.load)
        while self.host.in_flight:
            self.update()
        self.schedule()
        self.update()
        for transfer in list(device.transfers.values()) if device is not None else []:
            end_transfer(self, transfer)  # no request waits for it: it may never have ended
        free = self.scheduler.stats().num_free_blocks
        require(free == self.config.num_usable_blocks, f"everything ended, and {free} blocks are free")
        require(not self.unreported, f"ends never reported: {self.unreported}")
        require(not self.scheduler.has_unfinished_requests(), "everything ended, but the scheduler says otherwise")
        self.check_recording()

    def _propose_some(self, number: int) -> None:
        """Drafts for all rows of the last update; the first few drafts of each row are right."""
        most = self.config.num_draft_tokens
        drafts = {}
        for entry in self.live:
            num_right = (number + entry.number) % (most + 1)
            drafts[entry.request] = [*self.host.continuation(entry.request, num_right), number % 4][:most]
        self.propose(drafts, stale=False)

    # ================================================================ what must be true at any time

    def check(self) -> None:
        """Compare the scheduler with the ledger."""
        self.slots.keep(entry for entry in self.live if entry.place is Place.RUNNING)
        if self.shadow_only:
            return
        self.scheduler.check_invariants()
        running = 0
        for entry in self.live:
            request = entry.request
            name = request.request_id
            place = place_of(request.status)
            require(place is entry.place, f"{name} is {request.status}, the ledger says {entry.place}")
            require(self.scheduler.get_request(name) is request, f"{name} is lost")
            seen = (request.num_tokens, request.num_computed_tokens, request.num_pending)
            expected = (entry.num_tokens, entry.num_computed, self.host.num_pending(request))
            require(seen == expected, f"{name} has (tokens, computed, pending) {seen}, expected {expected}")
            told = (request.num_draft_tokens, request.num_accepted_tokens)
            require(told == (entry.num_verified, entry.num_accepted), f"{name}: drafts and accepted are {told}")
            require(request.num_preemptions == entry.num_preemptions, f"{name}: {request.num_preemptions} preemptions")
            self._check_events(entry)
            running += place is Place.RUNNING
        if self.config.batching != "prefill-first":
            most = self.config.max_num_seqs
            require(running <= most, f"{running} requests run, and the limit is {most}")
        outputs = [step.output for step in self.host.in_flight]
        require(self.scheduler.outputs_in_flight == tuple(outputs), "other steps are in flight")
        require(self.scheduler.has_unreported_ends == bool(self.unreported), "unreported ends are miscounted")
        check_caps(self)
        self.mirror.check()
        device = self.host.device
        if device is not None:
            held, most = device.num_held, device.max_held_blocks
            require(held <= most, f"{held} blocks are held outside the batch, more than {most}")
        check_explanations(self)
        self.tally.check(self.scheduler.stats(), self.live, self.host.blocks_in_use())
        if self.live:
            require(self.scheduler.has_unfinished_requests(), "requests are live, but none is unfinished")

    def queue(self) -> list[Entry]:
        """The requests that wait for capacity, in the order in which they must be admitted."""
        order = str(self.config.order)
        queue = [entry for entry in self.live if entry.place is Place.QUEUED]
        if not is_in_sequence(order):
            own = self.scheduler._parts.table.queue
            return sorted(queue, key=lambda entry: own.position(entry.request))
        return sorted(queue, key=lambda entry: entry.queue_key(order))

    # ================================================================ helpers

    def _tick(self, call: str) -> None:
        self.calls[call] += 1
        if not (self.is_busy and call == "schedule" and self._newest_call == "update"):
            self.now += 0.25
        self._newest_call = call

    def _new_id(self, spec: RequestSpec) -> str:
        """A new id, or one that is free again because an output has reported its end."""
        self.num_requests += 1
        free = [request.request_id for request, entry in self.entries.items() if entry.place is Place.ENDED]
        untold = [request for request in self.unreported if request not in self.repeated]
        in_use = {entry.request.request_id for entry in self.live} | {request.request_id for request in untold}
        free = [name for name in free if name not in in_use]
        return free[-1] if spec.reuses_id and free else f"r{self.num_requests}"

    def _end(self, entry: Entry, status: RequestStatus, num_generated: int | None = None) -> None:
        request = entry.request
        require(request.status is status, f"{request.request_id} ended as {request.status}, expected {status}")
        self._check_tokens(entry)
        self.proposed.pop(request, None)
        entry.events.append(("FINISHED", self.now, request.finish_reason.value if request.finish_reason else ""))
        self._check_events(entry)
        entry.place, entry.load = Place.ENDED, None
        self.live.remove(entry)
        self.host.forget(request)
        ended_by_itself = request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.REPETITION)
        if ended_by_itself and request.max_tokens:
            self.output_lengths.append(entry.num_output if num_generated is None else num_generated)
        self.unreported.append(request)
        self.tally.finished[request.finish_reason.value if request.finish_reason else ""] += 1
        self.conversations.append(request.all_token_ids.tolist())

    def _end_by_itself(self, entry: Entry) -> None:
        request, reference = entry.request, entry.reference
        self._end(entry, reference.status)
        require(request.finish_detail in reference.details, f"{request.request_id} ended by {request.finish_detail!r}")
        require(request.stop_reason == reference.stop_reason, f"{request.request_id} stopped by {request.stop_reason}")
        self.num_capacity_ends += request.finish_detail == "kv_capacity"

    def _check_events(self, entry: Entry) -> None:
        """The log of a request has its events in order, with the times of the calls; without logging it is empty."""
        if self.shadow_only:
            return
        told = []
        for event in entry.request.events:
            detail = event.detail
            if event.type is RequestEventType.PREEMPTED and self.config.preemption_mode != "recompute" and detail:
                require(detail in ("swap", "recompute"), f"{entry.request.request_id} is to {detail!r}")
                detail = ""
            told.append((event.type.name, event.timestamp, detail))
        expected = entry.events if self.config.log_request_events else []
        require(told == expected, f"{entry.request.request_id} has the log {told}, expected {expected}")

    def _check_tokens(self, entry: Entry) -> None:
        output = entry.request.output_token_ids.tolist()
        right = list(entry.reference.tokens[: entry.num_output])
        require(output == right, f"{entry.request.request_id} has generated {output}, alone it generates {right}")

    def _lose_row(self, entry: Entry, num_evictions: int, *, is_done: bool = False) -> None:
        """Take a request off its row: preempted, parked or (`is_done`) with a complete part; `num_evictions`: before
        that."""
        self.proposed.pop(entry.request, None)
        entry.num_lost = min(entry.num_computed, entry.num_tokens)
        entry.kept = None
        caches = self.config.enable_prefix_caching and entry.request.reads_prefix_cache
        if caches and entry.num_withdrawals == self.num_withdrawals:
            entry.kept = Kept(entry.num_lost, (num_evictions, self.num_withdrawals))
        entry.num_computed = 0
        entry.ran_before = True
        if not is_done:
            entry.num_preemptions += 1
            self.tally.num_preemptions += 1
        entry.num_bypassed = 0
        self.num_losses += 1
        entry.loss = self.num_losses

    def _snapshot(self) -> tuple[Any, ...]:
        """The state that a refused call must not change."""
        return (
            [(r.status, r.num_tokens, r.num_computed_tokens, r.num_pending, r.priority) for r in self.host.sequences],
            replace(self.scheduler.stats(), num_refused=0),  # a refusal counts itself
            self.scheduler.has_unfinished_requests(),
        )

    def _expect(self, error: type[Exception], call: Callable[[], object], note: str = "") -> Exception:
        try:
            answer = call()
        except error as raised:
            return raised
        raise AssertionError(f"expected {error.__name__}, got {answer!r} {note}")
