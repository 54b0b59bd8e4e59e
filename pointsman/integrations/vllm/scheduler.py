"""The scheduler that vLLM's engine core constructs and calls: vLLM's `SchedulerInterface`, implemented by the core.

`Scheduler` is not a subclass of vLLM's abstract class, because that class gains abstract methods between versions; vLLM
does not check the type. vLLM's request objects hold the client's view of a request; the state of a request is in the
core. In names, `of_vllm` is an object of vLLM's and `ours` an object of the core's.

One thread of vLLM calls all methods. Methods that change state hold `lock`, because the threads of the control socket
use the scheduler too (`operation.py`). Methods that only read need no lock. The threads of the socket change the
scheduler only when a recording begins. The scheduler is idle then, and the change does not affect the values that these
methods read.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
import vllm.outputs
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.utils import strip_speculative_padding

from pointsman.core import (
    EncoderInput,
    FinishReason,
    ParkReason,
    PauseMode,
    PolicyError,
    Recorder,
    Request,
    RequestRefused,
    StepResult,
    StepResultError,
    StepUpdate,
)
from pointsman.core import Scheduler as Core
from pointsman.core import SchedulerOutput as Output
from pointsman.integrations.vllm.encoder_inputs import EncoderDecoderInputs, EncoderInputs, embedding_block_inputs
from pointsman.integrations.vllm.kv_events import KVEvents
from pointsman.integrations.vllm.kv_groups import KVGroups
from pointsman.integrations.vllm.layouts import core_groups
from pointsman.integrations.vllm.operation import Operation, open_record
from pointsman.integrations.vllm.policy_fields import FieldWarnings
from pointsman.integrations.vllm.requests import Sessions, check_retention, close_turn, open_turn, to_request
from pointsman.integrations.vllm.results import (
    REASONS,
    STATUSES,
    Details,
    Judge,
    Sampled,
    add_missing_vectors,
    finish_reason,
    plain_outputs,
    read_sampled,
    to_result,
)
from pointsman.integrations.vllm.scheduler_output import OutputMaker
from pointsman.integrations.vllm.settings import read_settings, scheduler_config
from pointsman.integrations.vllm.statistics import Drafts, Statistics
from pointsman.integrations.vllm.support import (
    check_recording,
    check_supported,
    check_version,
    is_one_full_group,
    maker,
)
from pointsman.integrations.vllm.views import (
    KVCacheManagerView,
    ReadOnly,
    ReadOnlyDict,
    ReadOnlyList,
    Source,
    keep_final_state,
    set_status,
    show_core_state,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_events import KVEventsConfig
    from vllm.v1.core.sched.output import SchedulerOutput as VLLMOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
    from vllm.v1.request import Request as VLLMRequest
    from vllm.v1.structured_output import StructuredOutputManager

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

new_grammar_output = maker(
    GrammarOutput,
    "structured_output_request_ids",
    "grammar_bitmask",
    "num_acceptable_drafts",
    optional=("num_acceptable_drafts",),
)
new_outputs = maker(
    EngineCoreOutputs,
    left=(  # fields that the engine core sets, or that outputs of other calls need
        "engine_index",
        "start_wave",
        "timestamp",
        "utility_output",
        "wave_complete",
        "weight_version",
    ),
)
new_ended = maker(EngineCoreOutput, "request_id", "new_token_ids", optional=("error",))
"""Constructor of an `EngineCoreOutput` that ends its request. Since vLLM 0.33 such an output can contain the error for
the client."""
new_error = getattr(vllm.outputs, "RequestError", None)
"""vLLM's class of the error in an output; None before vLLM 0.32. In vLLM 0.32 the class exists, but outputs have no
field for an error yet."""

PAUSES = {PauseState.PAUSED_NEW: PauseMode.ADMISSIONS, PauseState.PAUSED_ALL: PauseMode.ALL}


@dataclass(slots=True)
class Step:
    """A step in flight: the core's output for it, and vLLM's output made from that."""

    of_vllm: VLLMOutput
    output: Output | None
    """The core's output; None: a policy failed, so nothing was scheduled."""
    ids: list[str]
    """[rows] vLLM's request id of each row."""


class Scheduler:
    """Replaces vLLM's own scheduler: `--scheduler-cls pointsman.integrations.vllm.Scheduler`.

    Raises:
        UnsupportedVLLM: this version of vLLM, or its configuration, is not supported.
        ConfigError: a knob in `--additional-config` is unknown, out of range, or has no effect.
    """

    connector = None
    ec_connector = None

    def __init__(
        self,
        *,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        include_finished_set: bool = False,
        log_stats: bool = False,
        **_: Any,
    ) -> None:
        settings = read_settings(vllm_config.additional_config, vllm.__version__)
        check_version(vllm.__version__, allows_untested=settings.untested_version)
        check_supported(vllm_config, kv_cache_config)
        config = scheduler_config(vllm_config, kv_cache_config, block_size, settings.knobs, vllm.__version__)
        groups = None
        if not is_one_full_group(kv_cache_config):
            own = core_groups(vllm_config, kv_cache_config, config, hash_block_size or block_size)
            if own is not None:
                config = config.replace(kv_groups=own)
            else:
                check_recording(settings.record)
                groups = KVGroups(vllm_config, kv_cache_config, block_size, hash_block_size or block_size)
        recording = open_record(settings.record, vllm_config)
        self.core = Core(config, recorder=None if recording is None else Recorder(recording), kv_cache=groups)
        self.lock = threading.Lock()
        """Lock that a thread holds while it uses or changes `core`."""
        self.step_seconds = 0.0
        """Total time spent in `schedule` and `update_from_output`, in seconds."""
        self._requests: dict[str, VLLMRequest] = {}
        self.requests = ReadOnlyDict(self._requests)
        """vLLM's unfinished requests, by request id."""
        self.of_id: dict[str, Request] = {}
        """The core's requests, by vLLM's ids."""
        self._source = Source(
            self.core, self.of_id, has_placeholders=bool(vllm_config.scheduler_config.async_scheduling)
        )
        self._vllm_config = vllm_config
        self._block_sizes = block_size, hash_block_size or block_size
        self._grammars = structured_output_manager
        self._compiling: dict[str, VLLMRequest] = {}
        self._structured: set[str] = set()
        count_cached = None
        if config.enable_prefix_caching:
            count_cached = groups.num_published_tokens if groups is not None else self._num_full_prompt_tokens
        self._details = Details(self._requests, self.of_id, count_cached)
        self._sessions = Sessions()
        self._judge = Judge()
        self._refusals: dict[str, str] = {}
        """By request id: the error message for a request in `_unsent` that ended because of an error of the client."""
        self._unsent: list[VLLMRequest] = []  # finished outside `update_from_output`, which alone sends outputs
        self._steps: deque[Step] = deque()
        self._max_retention = settings.max_retention
        self._field_warnings = FieldWarnings(config)
        self._last_step: Step | None = None  # the step that was updated last; new drafts follow its tokens
        self._speculates = config.num_draft_tokens > 0
        self._may_hold_prefills = config.prefill_interval == "host"
        asynchronous = bool(vllm_config.scheduler_config.async_scheduling)
        self._runs_ahead = asynchronous or config.max_steps_in_flight == 1
        self._outputs = OutputMaker(
            v2_runner=bool(vllm_config.use_v2_model_runner),
            sends_tokens=vllm_config.parallel_config.pipeline_parallel_size > 1 and not asynchronous,
            runs_ahead=config.max_steps_in_flight > 1,
            uses_mrope=bool(getattr(vllm_config.model_config, "uses_mrope", False)),
            groups=groups,
            num_groups=len(config.kv_groups),
            num_kv_groups=len(kv_cache_config.kv_cache_groups),
            may_fail=self.core.may_fail,
        )
        self._encoder_inputs: EncoderInputs | EncoderDecoderInputs
        if vllm_config.model_config.is_encoder_decoder:
            self._encoder_inputs = EncoderDecoderInputs(
                config.encoder_budget, v2_runner=bool(vllm_config.use_v2_model_runner)
            )
        else:
            self._encoder_inputs = EncoderInputs(config.encoder_budget, config.encoder_cache_size)
        self._statistics = Statistics(self.core, config.num_draft_tokens, vllm_config) if log_stats else None
        detail = vllm_config.observability_config.per_request_spec_decode_metrics
        self._drafts = Drafts(config.num_draft_tokens, detail, self._statistics)
        self._kv_events = None
        if config.enable_kv_cache_events:
            full = (index for index, group in enumerate(config.kv_groups) if group.is_full)
            self._kv_events = KVEvents(vllm_config, block_size, next(full, 0))
        self._finished_ids: dict[int, set[str]] | None = defaultdict(set) if include_finished_set else None
        self._clock_offset = time.time() - time.monotonic()  # vLLM's arrival times are in wall-clock time
        self._in_order_of_adding = config.order in ("fcfs", "fcfs-front")
        """Whether the arrival time of an added request is raised to that of the request added before it. vLLM's own
        "fcfs" keeps the order of adding, and the clocks of front ends differ."""
        self._newest_arrival = -math.inf
        self.kv_cache_config = kv_cache_config
        self.kv_cache_manager: Any = KVCacheManagerView(self.core, kv_cache_config, block_size, self.of_id)
        if groups is not None:
            self.kv_cache_manager = groups.manager
        self.groups = groups
        """The KV groups whose blocks vLLM's manager holds; None: the core owns all blocks."""
        self._pause_state = PauseState.UNPAUSED
        self._has_clients = False  # whether clients other than the first have sent requests
        self._operation = Operation(self, vllm_config, settings, recording)

    def _num_full_prompt_tokens(self, ours: Request) -> int:
        """Number of tokens of a request that the prefix cache can find, if the core owns the blocks: the tokens in the
        full blocks of the request's prompt. All these blocks have been published."""
        return ours.num_prompt_tokens - ours.num_prompt_tokens % self.core.config.block_size

    def forget_steps(self) -> None:
        """Drop the state kept from earlier steps. Called when a recording begins."""
        self._last_step = None

    # ------------------------------------------------------------------ requests

    def add_request(self, request: VLLMRequest) -> None:
        """Queue a request of vLLM's; if it has a grammar, park it until the grammar is compiled. A request with the id
        of a session (a prompt that comes in parts) is the session's next part."""
        with self.lock:
            if self._operation.recordings.waiting is not None:
                self._operation.recordings.try_to_begin()
            name = request.request_id
            session = self._requests.get(name)
            if session is None:
                if request.resumable:
                    self._sessions.begin(name)
                self._queue_request(request)
                return
            if name not in self._sessions:
                raise ValueError(f"request id {name!r} is in use; wait until that request has finished")
            self._sessions.add(name, request)
            if name not in self.of_id:
                self._sessions.num_idle -= 1
                self._next_turn(session)

    def _next_turn(self, session: VLLMRequest) -> None:
        """Queue a session with its next part, or end the session if no part follows."""
        part = self._sessions.pop_part(session.request_id)
        if part is None:
            self._end_request(session, FinishReason.ABORT)
        else:
            open_turn(session, part)
            self._queue_request(session)

    def _queue_request(self, request: VLLMRequest) -> None:
        name = request.request_id
        now = time.monotonic()
        needs_grammar = request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self._requests[name] = request
        self._has_clients |= request.client_index != 0
        try:
            ours = to_request(
                request,
                self._unused_id(name),
                prompt_token_ids=request.prompt_token_ids if request.prompt_embeds is None else request._all_token_ids,
                arrival_time=self._arrival_time(request, now),
                runs_ahead=self._runs_ahead,
                encoder_inputs=self._read_inputs(request),
            )
            check_retention(ours, self._max_retention)
            if request.sampling_params is not None:
                self._field_warnings.check(request.sampling_params.extra_args)
            self.core.add(ours, now, park=ParkReason.GRAMMAR if needs_grammar else None)
        except RequestRefused as error:
            logger.error("%s", error)
            self._end_request(request, FinishReason.ERROR)
            self._refuse_request(request, str(error))
            return
        self.of_id[name] = ours
        show_core_state(request, self._source)
        if needs_grammar:
            self._compiling[name] = request
        if request.use_structured_output:
            self._structured.add(name)
        self._details.add(request)
        self._drafts.begin(request)
        if self._statistics is not None:
            request.record_event(EngineCoreEventType.QUEUED)

    def _refuse_request(self, request: VLLMRequest, why: str) -> None:
        """Report that a request ended because of an error of the client: since vLLM 0.33 as HTTP status 400 with the
        message `why`."""
        self._unsent.append(request)
        self._refusals[request.request_id] = why

    def _read_inputs(self, request: VLLMRequest) -> Sequence[EncoderInput]:
        """The encoder inputs of a request, or, for a prompt of embeddings, the inputs that identify its blocks.

        Raises:
            RequestRefused: the request could never run.
        """
        if request.prompt_embeds is not None:
            if request.resumable:
                raise RequestRefused(
                    f"request {request.request_id!r} refused: a prompt that comes in parts cannot be given as "
                    "embeddings; send it in one piece, or as tokens"
                )
            if not request.mm_features:
                is_keyed = self.groups is None and self.core.config.enable_prefix_caching
                return embedding_block_inputs(request, self.core.config.block_size) if is_keyed else ()
        return self._encoder_inputs.begin(request) if request.mm_features else ()

    def _arrival_time(self, request: VLLMRequest, now: float) -> float:
        """The arrival time of a request, in seconds on the core's clock."""
        arrival = float(request.arrival_time) - self._clock_offset
        if self._in_order_of_adding:
            self._newest_arrival = arrival = max(self._newest_arrival, min(arrival, now))
        return arrival

    def _unused_id(self, name: str) -> str:
        """The core's id for a request: vLLM's id, or another id while the workers have not been notified that an
        earlier request with vLLM's id has finished."""
        taken = self.core.is_id_in_use
        if not taken(name):
            return name
        return next(other for number in range(1, 2**31) if not taken(other := f"{name}#{number}"))

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[VLLMRequest]:
        """Finish requests early, for example aborted requests; `request_ids` None: all unfinished requests. Ids of
        unknown or finished requests are ignored.

        Returns:
            vLLM's requests that this call has finished.
        """
        with self.lock:
            if request_ids is None:
                names: Iterable[str] = list(self._requests)
            else:
                names = (request_ids,) if isinstance(request_ids, str) else dict.fromkeys(request_ids)
            ended = []
            now = time.monotonic()
            for name in names:
                request = self._requests.get(name)
                if request is None:
                    continue
                if name in self.of_id:
                    self.core.finish(self.of_id[name].request_id, REASONS[finished_status], now)
                else:
                    self._sessions.num_idle -= 1
                self._end_request(request, REASONS[finished_status])
                set_status(request, finished_status)
                ended.append(request)
            return ended

    def _end_request(self, request: VLLMRequest, reason: FinishReason) -> None:
        """Record that a request of vLLM's has finished."""
        name = request.request_id
        ours = self.of_id.get(name)
        if ours is not None:
            keep_final_state(request, ours, tokens=True)
        set_status(request, STATUSES[reason])
        del self._requests[name]
        self._compiling.pop(name, None)
        self._sessions.end(name)
        self._drop_core_request(name)
        if self._finished_ids is not None:
            self._finished_ids[request.client_index].add(name)

    def _drop_core_request(self, name: str) -> None:
        """Drop the core request that stands for a vLLM request, and the state kept for it."""
        self.of_id.pop(name, None)
        self._structured.discard(name)
        self._details.forget(name)
        self._encoder_inputs.end(name)

    def _take_grammars(self, now: float) -> None:
        """Queue requests whose grammar has been compiled, and finish those whose grammar failed."""
        for name, request in list(self._compiling.items()):
            grammar = request.structured_output_request.grammar
            if grammar is None:
                continue
            del self._compiling[name]
            if isinstance(grammar, Exception):
                logger.error("the grammar of request %s cannot be used: %s", name, grammar)
                self.core.finish(self.of_id[name].request_id, FinishReason.ERROR, now, detail=str(grammar))
                self._end_request(request, FinishReason.ERROR)
                self._refuse_request(request, f"Invalid structured outputs: {grammar}")
            else:
                self.core.ready(self.of_id[name].request_id, now)

    # ------------------------------------------------------------------ the step

    def schedule(self, throttle_prefills: bool = False) -> VLLMOutput:
        """Decide the next step, as vLLM's `SchedulerOutput`. `throttle_prefills`: whether prompts are held back, which
        aligns them in data parallel engines."""
        with self.lock:
            began = time.monotonic()
            if self._may_hold_prefills and throttle_prefills != self.core.holds_prefills:
                self.core.hold_prefills(throttle_prefills, began)
            of_vllm = self._schedule(began)
            self.step_seconds += time.monotonic() - began
            return of_vllm

    def _schedule(self, now: float) -> VLLMOutput:
        if self._compiling:
            self._take_grammars(now)
        try:
            output = self.core.schedule(now)
        except PolicyError:
            if self.groups is not None and self.groups.cuts_chunks:
                # A row's tokens of this step may not end where its next chunk begins: states exist at few positions.
                self.core.reset_prefix_cache(now, preempt_running=True)
            return self._step_without_rows()
        ids = self._outputs.ids(output)
        of_vllm = self._outputs.make(output, ids, self.core.max_drafts if self._speculates else 0)
        if output.encoder_inputs or output.freed_encoder_entries:
            of_vllm.free_encoder_mm_hashes = self._encoder_inputs.freed_identifiers(output)
            of_vllm.scheduled_encoder_inputs = self._encoder_inputs.scheduled_inputs(output)
        if output.preempted or output.finished or output.num_continued < len(ids):
            self._note_changes(output, now)
        if self._structured:
            self._mark_structured(of_vllm, output, ids)
        self._steps.append(Step(of_vllm, output, ids))
        return of_vllm

    def _step_without_rows(self) -> VLLMOutput:
        """vLLM's output of a step without requests, used when a policy has failed. The core has undone the decisions of
        the failed step. It logs the failure, and replaces a policy that keeps failing. The next call of `schedule`
        decides again.
        """
        of_vllm = self._outputs.without_rows()
        self._steps.append(Step(of_vllm, None, []))
        return of_vllm

    def _note_changes(self, output: Output, now: float) -> None:
        """Update the adapter's state for the requests that a step admits, preempts or finishes."""
        for ours in output.finished:
            request = ours.metadata
            if self.of_id.get(request.request_id) is ours:  # it finished without an update that reports its end
                self._end_request(request, ours.finish_reason or FinishReason.ERROR)
                request.stop_reason = ours.stop_reason
                self._unsent.append(request)
        if output.preempted:
            self._note_preemptions(output, now)
        if output.num_continued < output.num_rows:
            self._note_admissions(output, now)

    def _note_admissions(self, output: Output, now: float) -> None:
        """Process admissions: the next output of each admitted request reports its time in the queue and its number of
        cached prompt tokens."""
        hits, statistics = output.num_cached_tokens.tolist(), self._statistics
        for ours, num_hits, is_resumed in zip(output.admitted, hits, output.is_resumed.tolist(), strict=True):
            request = ours.metadata
            self._details.note_admitted(request.request_id)
            if request.prefill_stats is not None and not ours.num_preemptions:
                request.prefill_stats.set(ours.num_prompt_tokens, num_hits, 0)
            if statistics is not None:
                request.record_event(EngineCoreEventType.SCHEDULED, now)
                statistics.count_lookup(ours, num_hits, is_resumed)

    def _note_preemptions(self, output: Output, now: float) -> None:
        """Process preemptions. vLLM's metrics count a PREEMPTED event once an output has carried it to the client. The
        only causes that `vllm:num_preemptions` and `vllm:request_num_preemptions` count are lack of memory and resets,
        as vLLM has no others. A priority preemption gets no event; the core counts it (`pointsman:preemptions_total`).
        Until a preempted request is admitted again, vLLM's count of running requests by adapter still includes it.
        """
        for ours in output.preempted:
            request = ours.metadata
            if request.request_id not in self._requests:
                continue
            if ours.num_pending:  # otherwise the next output of the request follows its next admission
                self._details.note_preempted(request.request_id)
            if self._statistics is not None and ours.preemption_causes[-1].exists_in_vllm:
                request.record_event(EngineCoreEventType.PREEMPTED, now)

    def _mark_structured(self, of_vllm: VLLMOutput, output: Output, ids: list[str]) -> None:
        """Set two flags of vLLM's output: whether the step samples under a grammar; and whether one of these grammars
        still needs a token that is in flight."""
        last = output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens
        for index, name in enumerate(ids):
            if name in self._structured and output.samples[index]:
                of_vllm.has_structured_output_requests = True
                if last[index] > output.requests[index].num_tokens:
                    of_vllm.pending_structured_output_tokens = True

    def update_from_output(
        self, scheduler_output: VLLMOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Process the model runner's output of the oldest step in flight.

        Returns:
            `EngineCoreOutputs` by client index, for clients with outputs.
        """
        with self.lock:
            began = time.monotonic()
            outputs = self._update(scheduler_output, model_runner_output, began)
            self.step_seconds += time.monotonic() - began
            return outputs

    def _update(
        self, scheduler_output: VLLMOutput, model_runner_output: ModelRunnerOutput, now: float
    ) -> dict[int, EngineCoreOutputs]:
        step = self._steps.popleft()
        if step.of_vllm is not scheduler_output:
            raise ValueError(
                "this SchedulerOutput is not from the oldest step in flight; update steps in the order of their "
                "schedule"
            )
        output, ids = step.output, step.ids
        if output is None:
            return self._outputs_with_statistics(step, [], [], model_runner_output)
        sampled = read_sampled(model_runner_output, ids)
        result, update = self._update_core(output, sampled, model_runner_output, now)
        if self._speculates:
            self._last_step = step
        outputs, indices = plain_outputs(output, update, ids, sampled)
        if len(output.draft_token_ids):
            self._drafts.count_verified(output, result, update)
        if len(output.completes):
            rows = [index for index in output.completes.tolist() if index not in result.errors]
            indices = [*indices, *self._add_pooled(step, rows, sampled, model_runner_output.pooler_output, outputs)]
        self._details.add_to(outputs, indices, sampled, model_runner_output)
        if result.errors:
            indices = [*indices, *self._add_failed(step, result, update, outputs)]
        if self._structured:
            self._advance_grammars(outputs)
        if update.finished:
            self._finish_requests(update.finished, ids, outputs, indices)
        if self._kv_events is not None:
            if self.groups is None:
                self._kv_events.publish(self.core.take_kv_events())
            else:
                self._kv_events.publish_unchanged(self.groups.manager.take_events())
        return self._outputs_with_statistics(step, outputs, indices, model_runner_output)

    def _update_core(
        self, output: Output, sampled: Sampled, of_vllm: ModelRunnerOutput, now: float
    ) -> tuple[StepResult, StepUpdate]:
        """Pass the model runner's output to the core. A row of the output that contradicts the step fails its
        request."""
        try:
            result = to_result(output, sampled)
            if len(output.completes):
                result = add_missing_vectors(output, sampled, of_vllm.pooler_output, result)
            return result, self.core.update(output, result, now)
        except StepResultError:
            result = self._judge.find_errors(output, sampled)
        if len(output.completes):
            result = add_missing_vectors(output, sampled, of_vllm.pooler_output, result)
        for index in result.unsampled:
            name = output.requests[index].metadata.request_id
            logger.warning(
                "in step %d the model runner returned no token for request %s, which samples again",
                output.step_id,
                name,
            )
        return result, self.core.update(output, result, now)

    def _add_failed(
        self, step: Step, result: StepResult, update: StepUpdate, outputs: list[EngineCoreOutput]
    ) -> list[int]:
        """Add outputs for the requests that fail in this step, and return the indices of their rows."""
        assert step.output is not None
        indices = [index for index in result.errors if step.output.requests[index] in update.finished]
        for index in indices:
            request = self._requests[step.ids[index]]
            logger.error("request %s fails: %s", request.request_id, result.errors[index])
            events, headers = request.take_events(), request.trace_headers
            outputs.append(EngineCoreOutput(request.request_id, [], events=events, trace_headers=headers))
        return indices

    def _add_pooled(
        self, step: Step, rows: list[int], sampled: Sampled, pooled: Any, outputs: list[EngineCoreOutput]
    ) -> list[int]:
        """Add a pooling model's outputs for the prompts that a step completes, and return the indices of their rows."""
        indices = [index for index in rows if step.ids[index] in self._requests]
        outputs += [
            EngineCoreOutput(step.ids[index], [], pooling_output=pooled[sampled.runner_index(index)])
            for index in indices
        ]
        return indices

    def _advance_grammars(self, outputs: list[EngineCoreOutput]) -> None:
        """Advance the grammar of each request by the new tokens in the request's output."""
        for output in outputs:
            name = output.request_id
            if name not in self._structured or not output.new_token_ids:
                continue
            request = self._requests[name]
            request._output_token_ids.extend(output.new_token_ids)  # for a reasoning parser
            request._all_token_ids.extend(output.new_token_ids)
            if not self._grammar_accepts(request, output.new_token_ids):
                ours = self.of_id[name]
                self.core.finish(ours.request_id, FinishReason.ERROR, time.monotonic())
                self._end_request(request, FinishReason.ERROR)
                output.stop_reason = request.stop_reason = ours.stop_reason
                output.finish_reason = request.get_finished_reason()
                self._drafts.report(request, output)

    def _grammar_accepts(self, request: VLLMRequest, token_ids: list[int]) -> bool:
        """Advance the grammar of a request; return whether the grammar accepts the tokens."""
        try:
            if self._grammars.accept_tokens(request, token_ids):
                return True
        except Exception:  # an error from the grammar's library fails only this request
            logger.exception("the grammar of request %s failed on %s; the request fails", request.request_id, token_ids)
            return False
        logger.error(
            "the grammar of request %s does not allow the sampled tokens %s; the request fails",
            request.request_id,
            token_ids,
        )
        return False

    def _finish_requests(
        self, finished: Iterable[Request], ids: list[str], outputs: list[EngineCoreOutput], indices: Sequence[int]
    ) -> None:
        """Complete the outputs of requests that the core's update has finished. End each of these requests or, in a
        session, its current part."""
        at_row = None if isinstance(indices, range) else {index: at for at, index in enumerate(indices)}
        for ours in finished:
            request = ours.metadata
            name = request.request_id
            if name not in self._requests:  # the request has failed because of its grammar
                continue
            index = ids.index(name)
            output = outputs[index if at_row is None else at_row[index]]
            output.finish_reason = finish_reason(ours)
            output.stop_reason = request.stop_reason = ours.stop_reason
            self._drafts.report(request, output)
            if name in self._sessions and ours.finish_reason is not FinishReason.ERROR:
                self._end_turn(request, ours)
            else:
                self._end_request(request, ours.finish_reason or FinishReason.ERROR)

    def _end_turn(self, session: VLLMRequest, ours: Request) -> None:
        """Close the current part of a session, whose output is complete; begin the next part if it has arrived."""
        name = session.request_id
        if self._sessions.is_over(name):
            self._end_request(session, ours.finish_reason or FinishReason.STOP)
            return
        self._drop_core_request(name)
        keep_final_state(session, ours, tokens=False)
        close_turn(session, ours)
        if self._sessions.has_part(name):
            self._next_turn(session)
        else:
            self._sessions.num_idle += 1

    def _outputs_with_statistics(
        self, step: Step, outputs: list[EngineCoreOutput], indices: Sequence[int], result: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """The outputs of a step by client index; the first client also gets the statistics."""
        stats = None if self._statistics is None else self._statistics.take_stats(step.of_vllm, result)
        if outputs and not (self._has_clients or self._unsent or self._finished_ids):
            return {0: new_outputs(outputs=outputs, scheduler_stats=stats)}
        found = self._outputs_by_client(step, outputs, indices)
        if stats is not None:
            first = next(iter(found.values()), None)
            if first is None:
                first = found[0] = new_outputs()
            first.scheduler_stats = stats
        return found

    def _outputs_by_client(
        self, step: Step, outputs: list[EngineCoreOutput], indices: Sequence[int]
    ) -> dict[int, EngineCoreOutputs]:
        """The outputs by client index, including outputs for requests that finished outside `update_from_output`, and
        the ids of finished requests."""
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for index, output in zip(indices, outputs, strict=True):
            assert step.output is not None
            client = step.output.requests[index].metadata.client_index
            by_client.setdefault(client, []).append(output)
        for request in self._unsent:
            why = self._refusals.pop(request.request_id, None)
            ended = new_ended(
                request.request_id,
                [],
                finish_reason=request.get_finished_reason(),
                stop_reason=request.stop_reason,
                events=request.take_events(),
                trace_headers=request.trace_headers,
                error=None if why is None or new_error is None else new_error("validation_error", why),
            )
            by_client.setdefault(request.client_index, []).append(ended)
        self._unsent.clear()
        found = {client: new_outputs(outputs=its) for client, its in by_client.items()}
        if self._finished_ids:
            for client, names in self._finished_ids.items():
                found.setdefault(client, new_outputs()).finished_requests = names
            self._finished_ids.clear()
        return found

    # ------------------------------------------------------------------ drafts and grammars

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        """Pass the drafts of vLLM's proposer to the core: they follow the tokens of the step that was updated last."""
        with self.lock:
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
                    own = self._grammars.validate_tokens(self._requests[name], own)
                own = own[:most]
                proposed += own
                counts.append(len(own))
            assert step.output is not None
            self.core.propose(step.output, proposed, counts, time.monotonic())

    def update_draft_token_ids_in_output(self, draft_token_ids: DraftTokenIds, scheduler_output: VLLMOutput) -> None:
        """Part of vLLM's interface. vLLM calls it only with asynchronous speculation, which this scheduler refuses when
        vLLM starts."""
        raise NotImplementedError("asynchronous speculation is not supported; give --no-async-scheduling")

    def get_grammar_bitmask(self, scheduler_output: VLLMOutput) -> GrammarOutput | None:
        """The bitmasks of rows that sample under a grammar; None: the step has no such rows."""
        if not scheduler_output.has_structured_output_requests:
            return None
        step = next(step for step in self._steps if step.of_vllm is scheduler_output)
        assert step.output is not None
        rows = zip(step.ids, step.output.samples.tolist(), strict=True)
        names = [name for name, samples in rows if samples and name in self._structured]
        if not names:
            return None
        drafts = scheduler_output.scheduled_spec_decode_tokens
        mask = self._grammars.grammar_bitmask(self._requests, names, drafts)
        acceptable = [len(strip_speculative_padding(drafts.get(name, []))) for name in names]
        return new_grammar_output(names, mask, acceptable)

    # ------------------------------------------------------------------ pauses and resets

    def set_pause_state(self, pause_state: PauseState) -> None:
        with self.lock:
            self._pause_state = pause_state
            if pause_state == PauseState.UNPAUSED:
                self.core.resume(time.monotonic())
            else:
                self.core.pause(time.monotonic(), PAUSES[pause_state])

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache; with `reset_running_requests` running requests are preempted and recomputed.

        Returns:
            True: unlike vLLM's own method, this also succeeds with running requests. Running requests keep their KV,
                which new requests cannot share.
        """
        with self.lock:
            self.core.reset_prefix_cache(time.monotonic(), preempt_running=reset_running_requests)
            if self._statistics is not None:
                self._statistics.reset_prefix_cache()
            return True

    def reset_encoder_cache(self) -> None:
        """Forget all cached encoder embeddings; vLLM's workers drop them at the same time."""
        with self.lock:
            self.core.reset_encoder_cache(time.monotonic())

    def shutdown(self) -> None:
        """Close the control socket, recordings and publishers."""
        self._operation.close()
        if self._kv_events is not None:
            self._kv_events.close()

    # ------------------------------------------------------------------ reads

    def has_request(self, request_id: str) -> bool:
        return request_id in self._requests

    def has_unfinished_requests(self) -> bool:
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Number of unfinished requests that may still run; requests excluded by a pause do not count."""
        if self._pause_state == PauseState.PAUSED_ALL:
            return 0
        if self._pause_state == PauseState.PAUSED_NEW:
            return self.core.num_running
        return len(self._requests) - self._sessions.num_idle

    def has_finished_requests(self) -> bool:
        """Whether a further step must report finished requests to the workers or to a client."""
        return bool(self.core.has_unreported_ends or self._unsent or self._finished_ids)

    def has_requests(self) -> bool:
        return self.has_unfinished_requests() or self.has_finished_requests()

    @property
    def running(self) -> ReadOnlyList:
        """A snapshot of vLLM's running requests, in the order of their admissions."""
        return ReadOnlyList(ours.metadata for ours in self.core.running)

    @property
    def waiting(self) -> ReadOnlyList:
        """A snapshot of vLLM's unfinished requests that do not run: the queue in order, then the requests that wait for
        something other than capacity."""
        queued = [ours.metadata for ours in self.core.waiting]
        return ReadOnlyList(queued + self._requests_neither_queued_nor_running(queued))

    @property
    def deferred_waiting(self) -> frozenset[VLLMRequest]:
        """The waiting requests that wait for something other than capacity: a grammar, or the next part of a prompt."""
        return frozenset(self._requests_neither_queued_nor_running([ours.metadata for ours in self.core.waiting]))

    skipped_waiting = deferred_waiting
    """Same as `deferred_waiting`: the attribute's name in other versions of vLLM."""

    @property
    def kv_holding_waiting(self) -> ReadOnlyList:
        """Waiting requests that hold blocks: none do."""
        return ReadOnlyList()

    vllm_config = ReadOnly(lambda self: self._vllm_config)
    scheduler_config = ReadOnly(lambda self: self._vllm_config.scheduler_config)
    cache_config = ReadOnly(lambda self: self._vllm_config.cache_config)
    parallel_config = ReadOnly(lambda self: self._vllm_config.parallel_config)
    lora_config = ReadOnly(lambda self: self._vllm_config.lora_config)
    observability_config = ReadOnly(lambda self: self._vllm_config.observability_config)
    kv_events_config = ReadOnly(lambda self: self._vllm_config.kv_events_config)
    is_encoder_decoder = ReadOnly(lambda self: self._vllm_config.model_config.is_encoder_decoder)
    use_v2_model_runner = ReadOnly(lambda self: self._vllm_config.use_v2_model_runner)
    structured_output_manager = ReadOnly(lambda self: self._grammars)
    log_stats = ReadOnly(lambda self: self._statistics is not None)
    enable_kv_cache_events = ReadOnly(lambda self: self._kv_events is not None)
    block_size = ReadOnly(lambda self: self._block_sizes[0])
    hash_block_size = ReadOnly(lambda self: self._block_sizes[1])
    max_model_len = ReadOnly(lambda self: self.core.config.max_model_len)
    max_num_running_reqs = ReadOnly(lambda self: self.core.config.max_num_seqs)
    max_num_active_reqs = ReadOnly(lambda self: self.core.config.max_num_active_seqs or self.core.config.max_num_seqs)
    max_num_scheduled_tokens = ReadOnly(lambda self: self.core.config.max_num_batched_tokens)
    max_num_encoder_input_tokens = ReadOnly(lambda self: self.core.config.encoder_budget)
    num_spec_tokens = ReadOnly(lambda self: self.core.config.num_draft_tokens)
    num_lookahead_tokens = ReadOnly(lambda self: self._vllm_config.num_lookahead_tokens)
    policy = ReadOnly(lambda self: SchedulingPolicy(self._vllm_config.scheduler_config.policy))
    """The policy of the flag `--scheduling-policy`; `order` in `--additional-config` does not change it."""
    finished_req_ids = ReadOnly(lambda self: {ours.metadata.request_id for ours in self.core.unreported_ends})
    """The ids of requests whose end the next step reports to the workers."""

    def _requests_neither_queued_nor_running(self, queued: Sequence[VLLMRequest]) -> list[VLLMRequest]:
        """vLLM's unfinished requests that are neither queued nor running."""
        known = {each.request_id for each in queued}
        known.update(ours.metadata.request_id for ours in self.core.running)
        return [request for name, request in self._requests.items() if name not in known]

    def get_request_counts(self) -> tuple[int, int]:
        """The number of running requests, and the number of all other unfinished requests."""
        running = self.core.num_running
        return running, len(self._requests) - running

    def get_kv_cache_usage(self) -> float:
        return self.core.kv_cache_usage

    @property
    def pause_state(self) -> PauseState:
        return self._pause_state

    def get_kv_connector(self) -> None:
        return None

    def get_ec_connector(self) -> None:
        return None

    def get_kv_event_publisher_config(self) -> KVEventsConfig | None:
        return None if self._kv_events is None else self._kv_events.config

    def make_stats(self) -> SchedulerStats | None:
        return None if self._statistics is None else self._statistics.take_stats()
