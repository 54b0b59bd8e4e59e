"""The scheduler that vLLM's engine core makes and calls: the methods of vLLM's `SchedulerInterface`, over ours.

It is no subclass of vLLM's abstract class, which gains abstract methods between versions; vLLM asks for no type. Its
own request objects stay the clients' view of a request; where a request stands is ours to know.

One thread of vLLM calls all of this. What changes anything holds `lock` while it does, because operators ask from
threads of their own (`questions.py`). What vLLM only reads (`reads.py`) needs none: all that operators change is an
idle scheduler, into one that gives the same answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus

from pointsman.core import FinishReason, ParkReason, PauseMode, Recorder, Request, RequestRefused
from pointsman.core import Scheduler as Core
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.details import Details
from pointsman.integrations.vllm.drafts import Drafts
from pointsman.integrations.vllm.kv_events import KVEvents
from pointsman.integrations.vllm.locking import alone
from pointsman.integrations.vllm.operation import Operation, open_record
from pointsman.integrations.vllm.reads import Reads, Step, group_metadata
from pointsman.integrations.vllm.requests import to_request
from pointsman.integrations.vllm.results import (
    REASONS,
    STATUSES,
    Sampled,
    finish_reason,
    plain_outputs,
    read_sampled,
    to_result,
)
from pointsman.integrations.vllm.schedules import Schedules
from pointsman.integrations.vllm.sessions import Sessions, close_turn, open_turn
from pointsman.integrations.vllm.settings import read_settings, scheduler_config
from pointsman.integrations.vllm.statistics import Statistics
from pointsman.integrations.vllm.support import check_supported
from pointsman.integrations.vllm.versions import check_version

logger = logging.getLogger("vllm.pointsman")  # where vLLM's own log goes

PAUSES = {PauseState.PAUSED_NEW: PauseMode.ADMISSIONS, PauseState.PAUSED_ALL: PauseMode.ALL}


class Scheduler(Reads):
    """vLLM's scheduler, by name: `--scheduler-cls pointsman.integrations.vllm.Scheduler`.

    Raises:
        UnsupportedVLLM: this version, or what it is configured to do, is not supported.
        ConfigError: a knob in `--additional-config` means nothing, is out of range, or has no effect.
    """

    connector = None
    ec_connector = None

    def __init__(
        self,
        *,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        include_finished_set: bool = False,
        log_stats: bool = False,
        **_: Any,
    ) -> None:
        check_version(vllm.__version__)
        check_supported(vllm_config, kv_cache_config)
        settings = read_settings(vllm_config.additional_config)
        config = scheduler_config(vllm_config, kv_cache_config, block_size, settings.knobs)
        recording = open_record(settings.record, vllm_config)
        self.core = Core(config, recorder=None if recording is None else Recorder(recording))
        self.lock = threading.Lock()
        """Whoever holds it has `core` to itself."""
        self.step_seconds = 0.0
        """How long the steps took in here so far."""
        self.requests: dict[str, Any] = {}
        """vLLM's requests that have not ended, by id."""
        self.of_id: dict[str, Request] = {}
        """Ours, by the ids of vLLM's."""
        self._grammars = structured_output_manager
        self._compiling: dict[str, Any] = {}
        self._structured: set[str] = set()
        self._details = Details(self.requests, self.of_id, block_size if config.enable_prefix_caching else None)
        self._sessions = Sessions()
        self._unsent: list[Any] = []  # who ended outside `update_from_output`, which alone reaches the client
        self._steps: deque[Step] = deque()
        self._last_step: Step | None = None  # which drafts are for
        self._speculates = config.num_draft_tokens > 0
        asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        self._runs_ahead = asynchronous or config.max_steps_in_flight == 1
        self._schedules = Schedules(
            v2_runner=bool(vllm_config.use_v2_model_runner),
            sends_tokens=vllm_config.parallel_config.pipeline_parallel_size > 1 and not asynchronous,
            runs_ahead=config.max_steps_in_flight > 1,
        )
        self._statistics = Statistics(self.core, config.num_draft_tokens, vllm_config) if log_stats else None
        told_of_drafts = vllm_config.observability_config.per_request_spec_decode_metrics
        self._drafts = Drafts(config.num_draft_tokens, told_of_drafts, self._statistics)
        self._kv_events = KVEvents(vllm_config, block_size) if config.enable_kv_cache_events else None
        self._finished_ids: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._clock_offset = time.time() - time.monotonic()  # of vLLM's arrival times
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager = group_metadata(kv_cache_config, block_size)
        self._pause_state = PauseState.UNPAUSED
        self._has_clients = False  # more than the first
        self._operation = Operation(self, vllm_config, settings, recording)

    def forget_steps(self) -> None:
        """A recording begins: the scheduler knows nothing of earlier steps."""
        self._last_step = None

    # ------------------------------------------------------------------ requests

    @alone
    def add_request(self, request: Any) -> None:
        """Queue one of vLLM's requests; one with a grammar waits for it first. One whose name is that of a session is
        its next part."""
        if self._operation.recordings.waiting is not None:
            self._operation.recordings.try_to_begin()
        name = request.request_id
        session = self.requests.get(name)
        if session is None:
            if request.resumable:
                self._sessions.begin(name)
            self._queue(request)
            return
        if name not in self._sessions:
            raise ValueError(f"request id {name!r} is in use; wait for the end of the request that has it")
        self._sessions.add(name, request)
        if name not in self.of_id:
            self._sessions.num_idle -= 1
            self._next_turn(session)

    def _next_turn(self, session: Any) -> None:
        """A session goes on with its next part, which is there, or ends."""
        part = self._sessions.take(session.request_id)
        if part is None:
            self._end(session, FinishReason.ABORT)
        else:
            open_turn(session, part)
            self._queue(session)

    def _queue(self, request: Any) -> None:
        name = request.request_id
        now = time.monotonic()
        needs_grammar = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.requests[name] = request
        self._has_clients |= request.client_index != 0
        try:
            ours = to_request(
                request,
                self._free_id(name),
                prompt_token_ids=request.prompt_token_ids,
                arrival_time=request.arrival_time - self._clock_offset,
                runs_ahead=self._runs_ahead,
            )
            self.core.add(ours, now, park=ParkReason.GRAMMAR if needs_grammar else None)
        except RequestRefused as error:
            logger.error("%s", error)
            self._end(request, FinishReason.ERROR)
            self._unsent.append(request)
            return
        self.of_id[name] = ours
        if needs_grammar:
            self._compiling[name] = request
        if request.use_structured_output:
            self._structured.add(name)
        self._details.add(request)
        self._drafts.begin(request)
        if self._statistics is not None:
            request.record_event(EngineCoreEventType.QUEUED)

    def _free_id(self, name: str) -> str:
        """Its own name; another one while the end of a request of that name has not been told to the workers."""
        taken = self.core.is_id_in_use
        if not taken(name):
            return name
        return next(other for number in range(1, 2**31) if not taken(other := f"{name}#{number}"))

    @alone
    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Any]:
        """End requests from outside; None: all. Those that are unknown or have ended are passed over.

        Returns:
            vLLM's requests that ended.
        """
        if request_ids is None:
            names: Iterable[str] = list(self.requests)
        else:
            names = (request_ids,) if isinstance(request_ids, str) else dict.fromkeys(request_ids)
        ended = []
        now = time.monotonic()
        for name in names:
            request = self.requests.get(name)
            if request is None:
                continue
            if name in self.of_id:
                self.core.finish(self.of_id[name].request_id, REASONS[finished_status], now)
            else:
                self._sessions.num_idle -= 1
            self._end(request, REASONS[finished_status])
            request.status = finished_status
            ended.append(request)
        return ended

    def _end(self, request: Any, reason: FinishReason) -> None:
        """Forget a request that ended."""
        name = request.request_id
        request.status = STATUSES[reason]
        del self.requests[name]
        self._compiling.pop(name, None)
        self._sessions.end(name)
        self._forget(name)
        if self._finished_ids is not None:
            self._finished_ids[request.client_index].add(name)

    def _forget(self, name: str) -> None:
        """Our request for one of vLLM's is over."""
        self.of_id.pop(name, None)
        self._structured.discard(name)
        self._details.forget(name)

    def _take_grammars(self, now: float) -> None:
        """Requests whose grammar has been compiled join the queue; those whose grammar failed end."""
        for name, request in list(self._compiling.items()):
            grammar = request.structured_output_request.grammar
            if grammar is None:
                continue
            del self._compiling[name]
            if isinstance(grammar, Exception):
                logger.error("the grammar of request %s cannot be used: %s", name, grammar)
                self.core.finish(self.of_id[name].request_id, FinishReason.ERROR, now, detail=str(grammar))
                self._end(request, FinishReason.ERROR)
                self._unsent.append(request)
            else:
                self.core.ready(self.of_id[name].request_id, now)

    # ------------------------------------------------------------------ the step

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Decide what runs in the next step, as vLLM's `SchedulerOutput`."""
        with self.lock:
            began = time.monotonic()
            of_vllm = self._schedule(began)
            self.step_seconds += time.monotonic() - began
            return of_vllm

    def _schedule(self, now: float) -> Any:
        if self._compiling:
            self._take_grammars(now)
        output = self.core.schedule(now)
        ids = self._schedules.ids(output)
        of_vllm = self._schedules.make(output, ids, self.core.max_drafts if self._speculates else 0)
        if output.preempted or output.finished or output.num_continued < len(ids):
            self._note_changes(output, now)
        if self._structured:
            self._mark_structured(of_vllm, output, ids)
        self._steps.append(Step(of_vllm, output, ids))
        return of_vllm

    def _note_changes(self, output: Output, now: float) -> None:
        """Who was admitted, preempted, or ended by the decision itself."""
        for ours in output.finished:
            request = ours.metadata
            if self.of_id.get(request.request_id) is ours:  # no update told of it
                self._end(request, ours.finish_reason or FinishReason.ERROR)
                request.stop_reason = ours.stop_reason
                self._unsent.append(request)
        if output.preempted and self._statistics is not None:
            self._note_preemptions(output, now)
        if output.num_continued < output.num_rows:
            self._note_admissions(output, now)

    def _note_admissions(self, output: Output, now: float) -> None:
        """The next output of each tells how long it was queued, and what of its prompt was cached."""
        hits = output.num_cached_tokens.tolist()
        for ours, num_hits, is_resumed in zip(output.admitted, hits, output.is_resumed.tolist(), strict=True):
            request = ours.metadata
            self._details.note(request.request_id)
            stats = request.prefill_stats
            if stats is not None and not ours.num_preemptions:
                stats.set(ours.num_prompt_tokens, num_local_cached_tokens=num_hits, num_external_cached_tokens=0)
            if self._statistics is not None:
                request.record_event(EngineCoreEventType.SCHEDULED, now)
                self._statistics.looked_up(ours, num_hits, is_resumed)

    def _note_preemptions(self, output: Output, now: float) -> None:
        """vLLM's metrics count PREEMPTED events, once an output has carried them to the client: `vllm:num_preemptions`
        and `vllm:request_num_preemptions` are preemptions for memory and by a reset, because vLLM has no other cause. A
        displaced request gets no event; the core's counters have it (`pointsman:preemptions_total`)."""
        for ours in output.preempted:
            request = ours.metadata
            if request.request_id in self.requests and ours.preemption_causes[-1].exists_in_vllm:
                request.record_event(EngineCoreEventType.PREEMPTED, now)
                if ours.num_pending:  # else its next output comes after its next admission
                    self._details.note(request.request_id)

    def _mark_structured(self, of_vllm: Any, output: Output, ids: list[str]) -> None:
        """Whether the step samples under a grammar, and whether a token that it must see first is in flight."""
        last = output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens
        for index, name in enumerate(ids):
            if name in self._structured and output.samples[index]:
                of_vllm.has_structured_output_requests = True
                if last[index] > output.requests[index].num_tokens:
                    of_vllm.pending_structured_output_tokens = True

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in what the model runner returned for the oldest step in flight.

        Returns:
            `EngineCoreOutputs` by client, for those that have some.
        """
        with self.lock:
            began = time.monotonic()
            outputs = self._update(scheduler_output, model_runner_output, began)
            self.step_seconds += time.monotonic() - began
            return outputs

    def _update(self, scheduler_output: Any, model_runner_output: Any, now: float) -> dict[int, Any]:
        step = self._steps.popleft()
        if step.of_vllm is not scheduler_output:
            raise ValueError("this SchedulerOutput is not that of the oldest step in flight; update them in order")
        output, ids = step.output, step.ids
        sampled = read_sampled(model_runner_output, ids)
        result = to_result(output, sampled)
        update = self.core.update(output, result, now)
        if self._speculates:
            self._last_step = step
        outputs, indices = plain_outputs(output, update, ids, sampled)
        if len(output.draft_token_ids):
            self._drafts.verified(output, result, update)
        if len(output.completes):
            indices = [*indices, *self._add_pooled(step, sampled, model_runner_output.pooler_output, outputs)]
        self._details.tell(outputs, indices, sampled, model_runner_output)
        if self._structured:
            self._accept(outputs)
        if update.finished:
            self._finish(update.finished, ids, outputs, indices)
        if self._kv_events is not None:
            self._kv_events.publish(self.core.take_kv_events())
        return self._by_client(step, outputs, indices, model_runner_output)

    def _add_pooled(self, step: Step, sampled: Sampled, pooled: Any, outputs: list[Any]) -> list[int]:
        """What a pooling model made of the prompts that are complete now, and the indices of their rows."""
        indices = [index for index in step.output.completes.tolist() if step.ids[index] in self.requests]
        outputs += [
            EngineCoreOutput(step.ids[index], [], pooling_output=pooled[sampled.place(index)]) for index in indices
        ]
        return indices

    def _accept(self, outputs: list[Any]) -> None:
        """Grammars take in the tokens of their requests."""
        for output in outputs:
            name = output.request_id
            if name not in self._structured or not output.new_token_ids:
                continue
            request = self.requests[name]
            request._output_token_ids.extend(output.new_token_ids)  # where a reasoning parser reads them
            request._all_token_ids.extend(output.new_token_ids)
            if not self._grammars.accept_tokens(request, output.new_token_ids):
                logger.error("the grammar of request %s does not allow %s; it ends", name, output.new_token_ids)
                self.core.finish(self.of_id[name].request_id, FinishReason.ERROR, time.monotonic())
                self._end(request, FinishReason.ERROR)
                output.finish_reason = request.get_finished_reason()
                self._drafts.tell(request, output)

    def _finish(self, finished: Iterable[Request], ids: list[str], outputs: list[Any], indices: Sequence[int]) -> None:
        """Those that ended by this update."""
        at_row = None if len(indices) == len(ids) else {index: at for at, index in enumerate(indices)}
        for ours in finished:
            request = ours.metadata
            name = request.request_id
            if name not in self.requests:  # its grammar ended it
                continue
            index = ids.index(name)
            output = outputs[index if at_row is None else at_row[index]]
            output.finish_reason = finish_reason(ours)
            output.stop_reason = request.stop_reason = ours.stop_reason
            self._drafts.tell(request, output)
            if name in self._sessions and ours.finish_reason is not FinishReason.ERROR:
                self._end_turn(request, ours)
            else:
                self._end(request, ours.finish_reason or FinishReason.ERROR)

    def _end_turn(self, session: Any, ours: Request) -> None:
        """A part of a session is answered."""
        name = session.request_id
        close_turn(session, ours)
        self._forget(name)
        if self._sessions.has_part(name):
            self._next_turn(session)
        else:
            self._sessions.num_idle += 1

    def _by_client(self, step: Step, outputs: list[Any], indices: Sequence[int], result: Any) -> dict[int, Any]:
        """The outputs, sorted by the client that they are for; the first one gets the statistics too."""
        stats = None if self._statistics is None else self._statistics.take(step.of_vllm, result)
        if outputs and not (self._has_clients or self._unsent or self._finished_ids):
            return {0: EngineCoreOutputs(outputs=outputs, scheduler_stats=stats)}
        found = self._sorted(step, outputs, indices)
        if stats is not None:
            first = next(iter(found.values()), None)
            if first is None:
                first = found[0] = EngineCoreOutputs()
            first.scheduler_stats = stats
        return found

    def _sorted(self, step: Step, outputs: list[Any], indices: Sequence[int]) -> dict[int, Any]:
        """The outputs by client, with what else there is to tell each."""
        by_client: dict[int, list[Any]] = {}
        for index, output in zip(indices, outputs, strict=True):
            client = step.output.requests[index].metadata.client_index
            by_client.setdefault(client, []).append(output)
        for request in self._unsent:
            ended = EngineCoreOutput(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
            )
            by_client.setdefault(request.client_index, []).append(ended)
        self._unsent.clear()
        found = {client: EngineCoreOutputs(outputs=its) for client, its in by_client.items()}
        if self._finished_ids:
            for client, names in self._finished_ids.items():
                found.setdefault(client, EngineCoreOutputs()).finished_requests = names
            self._finished_ids.clear()
        return found

    # ------------------------------------------------------------------ drafts

    @alone
    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """What vLLM's proposer guesses to follow the tokens of the step that was updated last."""
        step = self._last_step
        if step is None:
            return
        drafts = dict(zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True))
        most = self.core.config.num_draft_tokens
        proposed: list[int] = []
        counts = []
        for name in step.ids:
            own = drafts.get(name) or []
            if own and name in self._structured:
                own = self._grammars.validate_tokens(self.requests[name], own)
            own = own[:most]
            proposed += own
            counts.append(len(own))
        self.core.propose(step.output, proposed, counts, time.monotonic())

    def update_draft_token_ids_in_output(self, draft_token_ids: Any, scheduler_output: Any) -> None:
        """Only of asynchronous speculation, which is refused at the start."""
        raise NotImplementedError("speculation runs synchronously here")

    # ------------------------------------------------------------------ pauses and resets

    @alone
    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause_state = pause_state
        if pause_state == PauseState.UNPAUSED:
            self.core.resume(time.monotonic())
        else:
            self.core.pause(time.monotonic(), PAUSES[pause_state])

    @alone
    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every cached prefix; with `reset_running_requests` what runs is computed anew.

        Returns:
            True: unlike vLLM's own, this succeeds whatever runs, which keeps its KV and shares it with nobody.
        """
        self.core.reset_prefix_cache(time.monotonic(), preempt_running=reset_running_requests)
        if self._statistics is not None:
            self._statistics.reset_prefix_cache()
        return True

    def reset_encoder_cache(self) -> None:
        """There is none."""

    def shutdown(self) -> None:
        """Answer no more, and close what is open."""
        self._operation.close()
        if self._kv_events is not None:
            self._kv_events.close()
