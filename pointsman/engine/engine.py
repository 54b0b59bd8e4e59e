"""Engine: runs requests on a model, step by step, in the caller's thread.

    engine = Engine("demo")
    engine.add_request("a", "The import statement", SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text)

One thread owns an engine. `step` calls the scheduler's `schedule`, the model, and the scheduler's `update`, with up to
`max_steps_in_flight` steps in flight (`step_loop.py`). The rest of this module turns prompts into requests, and ends
requests outside a step. The `OutputProcessor` turns tokens into text and outputs.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.core import FinishReason, ParkReason, Request, Scheduler, SchedulerConfig, SchedulerOutput
from pointsman.engine.counters import EngineCounters
from pointsman.engine.deadlines import Deadlines
from pointsman.engine.drafts.prompt_lookup import PromptLookup
from pointsman.engine.errors import GrammarError
from pointsman.engine.grammar.compiler import GrammarCompiler
from pointsman.engine.grammar.process import DEFAULT_TIMEOUT, GrammarLimits
from pointsman.engine.kv.connector import make_kv_connector
from pointsman.engine.kv.events import KVEventsConfig, KVEventsPublisher
from pointsman.engine.kv.layout import choose_layout
from pointsman.engine.kv.pool import KVPool, choose_kv_dtype, choose_num_blocks
from pointsman.engine.machine import keep_freed_pages, return_freed_pages
from pointsman.engine.memory import GRAPH_SHARE, DeviceBudget, device_memory, explain_out_of_memory, use_device
from pointsman.engine.model.fingerprint import model_fingerprint
from pointsman.engine.model.largest_step import run_largest_step
from pointsman.engine.model.loader import device_of, load_with_attention
from pointsman.engine.model.pooling import check_can_pool
from pointsman.engine.model.runner import ModelRunner
from pointsman.engine.outputs.processor import OutputProcessor
from pointsman.engine.outputs.request_output import RequestOutput, Resumed
from pointsman.engine.params.engine_args import (
    DEFAULT_UTILIZATION,
    KVKnobs,
    check_prompt_lookup,
    check_utilization,
    speculation_knobs,
    with_defaults,
)
from pointsman.engine.params.pooling import SILENT, PoolingParams
from pointsman.engine.params.requests import (
    check_deadline,
    check_may_come_in_parts,
    check_request_id,
    checked_token_ids,
    max_output_tokens,
    to_request,
)
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.pausing import PauseChoice, Pausing
from pointsman.engine.step_loop import StepLoop
from pointsman.engine.text.tokenizer import encode
from pointsman.engine.threads import set_num_threads
from pointsman.engine.watchdog import make_watchdog

if TYPE_CHECKING:
    from pointsman.core.recording import Recorder
    from pointsman.core.state.output import IntArray
    from pointsman.engine.attention.backends import AttentionChoice
    from pointsman.engine.attention.paged import AttentionBackend
    from pointsman.engine.model.loaded import LoadedModel


logger = logging.getLogger(__name__)

SMALLER_STEPS = "lower max_num_batched_tokens or max_num_seqs, or free the device of other programs"
SMALLER_POOL = "lower gpu_memory_utilization, kv_cache_bytes or num_blocks, to leave more memory beside the KV pool"
"""Remedies in out-of-memory errors: `SMALLER_STEPS` before the KV pool is made, `SMALLER_POOL` afterwards."""
PATIENCE = 0.1
"""Maximum seconds for which `step`, if no request is runnable, waits for a grammar or for KV; then it runs an empty
step."""


class Engine:
    """Runs requests on a model.

    Args:
        model: a directory in the Hugging Face format, a GGUF file, the name of a small model ("demo", "smollm2"),
            OWNER/NAME on a hub (`sources/find.py`), or a model that is loaded already.
        revision: branch, tag or commit of a model on a hub; None: main.
        download_dir: cache directory for a model from a hub; None: huggingface_hub's cache.
        num_blocks: number of KV blocks; None: as many as fit `kv_cache_bytes`. If neither `num_blocks` nor
            `kv_cache_bytes` is given, the engine chooses the number and logs it; on a GPU the pool takes the memory
            that `gpu_memory_utilization` leaves.
        gpu_memory_utilization: share of a GPU's memory that the engine may take, above 0 and at most 1: weights, the
            largest step (run once to measure it) and the KV pool together (`memory.py`). None: 0.9. Refused on a CPU.
        dtype: element type of weights and KV: "float32", "bfloat16", or on a GPU "float16"; "auto": bfloat16 on a GPU,
            float32 on a CPU. Only for a model that is not loaded yet.
        max_model_len: maximum length of a sequence, prompt and output together; None: the model's own maximum.
        seed: the engine's seed, from which the seeds of requests without a seed are derived.
        recorder: object that records every call and decision of the scheduler; None: nothing is recorded.
        clock: function that returns the time in seconds; the core itself never reads a clock.
        kv_cache_dtype: element type of the KV pool: "float32", "bfloat16", or on a GPU "float16"; "auto": the model's
            type.
        device: "cpu", "cuda", "cuda:1", ...; "auto": a GPU if PyTorch sees one. For a model that is not loaded yet.
        enforce_eager: on a GPU, compute decode steps without CUDA graphs, as in vLLM. No effect on a CPU.
        attention: backend of the paged attention: "torch", "numba" (on a CPU), "triton" (on a GPU), a backend class, or
            "auto": the fastest backend; for a model that is loaded already also a backend object.
        fuse: whether modules of the model may be replaced by faster modules with the same results.
        quantization: form of linear layers: "int8": 8 bits, which is faster and changes outputs; "int4": as "int8", but
            4-bit layers of a GGUF file stay in 4 bits (see `model/linear.py`); None: as they were loaded.
        num_threads: number of threads of PyTorch and the kernels; None: chosen by `threads.py`.
        grammar_timeout: seconds of processor time that compiling the grammar of a request with structured output may
            take; the limit of elapsed time is three times as long.
        kv_offload_bytes: host memory for KV that the pool evicts, see `kv/offload.py`; None: no host memory.
        kv_store: directory in which KV is kept for other engines and later runs, see `kv/store.py`; None: no KV store.
        kv_store_role: "producer": computed KV is written to the store; "consumer": KV found in the store is loaded, not
            computed; "both".
        kv_store_bytes: maximum total size of the files in the KV store; None: limited by the disk only.
        kv_events_config: where to publish changes of the prefix cache, see `kv/events.py`; None: they are not
            published.
        disable_hybrid_kv_cache_manager: whether layers with a sliding window keep the KV of the whole context, like
            other layers; False: they keep the KV of their window only, see `kv/layout.py`; None: the layout that takes
            less memory.
        stream_interval: number of tokens from one output of a request to its next output; the first token and the last
            output are reported without delay.
        prompt_lookup_min, prompt_lookup_max: minimum and maximum length of the n-gram that is looked up: the request's
            newest tokens, which must occur earlier in the request to get drafts (`drafts/prompt_lookup.py`). Only with
            `num_draft_tokens`; None: 2 and 5.
        speculative_config: `num_draft_tokens` and the two arguments above in vLLM's form, instead of these three; see
            `params/engine_args.py`.
        watchdog_seconds: seconds without progress after which a request is reported in the log (`watchdog.py`); 0:
            never.
        scheduler_knobs: fields of `SchedulerConfig`. `params/engine_args.py` lists the engine's own defaults and the
            fields that an engine refuses.

    Raises:
        ModelLoadError, UnsupportedModel: the model cannot be read, or cannot be run correctly.
        ConfigError, ValueError: a knob is out of range.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = "demo",
        *,
        revision: str | None = None,
        download_dir: str | Path | None = None,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float | None = None,
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        device: str = "auto",
        enforce_eager: bool = False,
        max_model_len: int | None = None,
        seed: int = 0,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        attention: AttentionChoice | AttentionBackend = "auto",
        fuse: bool = True,
        quantization: str | None = None,
        num_threads: int | None = None,
        grammar_timeout: float = DEFAULT_TIMEOUT,
        stream_interval: int = 1,
        kv_offload_bytes: int | None = None,
        kv_store: str | Path | None = None,
        kv_store_role: str = "both",
        kv_store_bytes: int | None = None,
        kv_events_config: KVEventsConfig | Mapping[str, Any] | None = None,
        disable_hybrid_kv_cache_manager: bool | None = None,
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        speculative_config: Mapping[str, Any] | None = None,
        watchdog_seconds: float = 0.0,
        **scheduler_knobs: Any,
    ) -> None:
        if speculative_config is not None:
            lookup = {"prompt_lookup_min": prompt_lookup_min, "prompt_lookup_max": prompt_lookup_max}
            given = {name: value for name, value in lookup.items() if value is not None}
            scheduler_knobs |= speculation_knobs(speculative_config, scheduler_knobs | given)
            prompt_lookup_min, prompt_lookup_max = (scheduler_knobs.pop(name, None) for name in lookup)
        place = device_of(model, device)
        check_utilization(gpu_memory_utilization, place.type)
        knobs = with_defaults(scheduler_knobs, place.type)
        self.enforce_eager = enforce_eager
        """Whether decode steps on a GPU run without CUDA graphs."""
        events_config = KVEventsConfig.of(kv_events_config)
        self.loaded, self.attention = load_with_attention(
            model,
            dtype,
            attention,
            max_model_len=max_model_len,
            device=device,
            fuse=fuse,
            quantization=quantization,
            revision=revision,
            download_dir=download_dir,
        )
        place = self.loaded.model.device  # the device with its index, such as "cuda:0"
        use_device(place)
        set_num_threads(num_threads, self.loaded.num_parameters)
        keep_freed_pages()
        self.max_model_len = self.loaded.choose_max_model_len(max_model_len)
        kv_dtype = choose_kv_dtype(kv_cache_dtype, self.loaded.dtype, place)
        config = SchedulerConfig(
            num_blocks=1 if num_blocks is None else num_blocks,  # replaced below
            max_model_len=self.max_model_len,
            enable_kv_cache_events=events_config is not None,
            **knobs,
        )
        min_ngram, max_ngram = check_prompt_lookup(config, prompt_lookup_min, prompt_lookup_max)
        kv_knobs = KVKnobs(kv_offload_bytes, kv_store, kv_store_role, kv_store_bytes)
        kv_layout = choose_layout(self.loaded.layers, self.loaded.windows, config, disable_hybrid_kv_cache_manager)
        config = config.replace(kv_groups=kv_layout.groups)
        memory = device_memory(place)
        graph_bytes = 0 if memory is None or enforce_eager else int(memory.total * GRAPH_SHARE)
        device_budget = None
        if memory is not None and num_blocks is None and kv_cache_bytes is None:
            largest_step = partial(run_largest_step, self.loaded, self.attention, config, kv_layout, kv_dtype)
            with explain_out_of_memory("the largest step", SMALLER_STEPS):
                device_budget = DeviceBudget.measure(
                    largest_step, memory, gpu_memory_utilization or DEFAULT_UTILIZATION, graph_bytes
                )
            logger.info("%s", device_budget)
        num_blocks = choose_num_blocks(
            kv_layout,
            config,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            dtype=kv_dtype,
            device_budget=device_budget,
        )
        config = config.replace(num_blocks=num_blocks)
        self.kv_pool = KVPool(
            self.loaded.layers,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=kv_dtype,
            device=place,
            layout=kv_layout,
        )
        self.kv_pool.log_capacity(config)
        self.counters = EngineCounters()
        self.kv_connector = make_kv_connector(
            kv_knobs, config, partial(model_fingerprint, self.loaded), self.kv_pool, self.counters, clock
        )
        self.scheduler = Scheduler(config, recorder=recorder, connector=self.kv_connector)
        with explain_out_of_memory("preparing steps", SMALLER_POOL):
            self.runner = ModelRunner(
                self.loaded, self.kv_pool, self.scheduler, self.kv_connector, seed=seed, backend=self.attention
            )
            if memory is not None and not enforce_eager:
                self.runner.record_graphs(graph_bytes, lambda: memory.reserved)
        proposer = (
            PromptLookup(self.scheduler, min_ngram, max_ngram, self.counters, self.runner.num_computed_rows)
            if config.num_draft_tokens
            else None
        )
        self.clock = clock
        self.watchdog = make_watchdog(self.scheduler, watchdog_seconds, clock)
        self.kv_events = None
        if events_config is not None:
            self.kv_events = KVEventsPublisher(events_config, config.block_size, len(config.kv_groups))
        if self.kv_events is not None:
            weakref.finalize(self, self.kv_events.close)
        self.outputs = OutputProcessor(self.loaded.tokenizer, self.counters, stream_interval)
        self.grammars = GrammarCompiler(
            self.loaded.tokenizer,
            self.loaded.vocab_size,
            self.eos_token_ids,
            limits=GrammarLimits(timeout=grammar_timeout),
        )
        self.on_ready: Callable[[Request], None] | None = None
        """Listener that is called with every request that was parked for its grammar, once the grammar is ready."""
        self.deadlines = Deadlines()
        self.pausing = Pausing(self.scheduler, clock, self._abort_all)
        self.steps = StepLoop(
            self.scheduler,
            self.runner,
            self.outputs,
            proposer=proposer,
            kv_events=self.kv_events,
            pausing=self.pausing,
            before_schedule=self._before_schedule,
            clock=clock,
            counters=self.counters,
        )
        return_freed_pages()  # freed after loading

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.loaded.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's (text) configuration, as transformers has it."""
        return self.loaded.config

    @property
    def last_output(self) -> SchedulerOutput | None:
        """The scheduler's output for the newest scheduled step, for displays; None before the first step."""
        return self.steps.last_output

    @property
    def on_output(self) -> Callable[[RequestOutput], None] | None:
        """Listener that is called with every output as soon as it exists; `step` and `finish_steps` then return no
        outputs.

        Forwards to `OutputProcessor.on_output`, which the step loop uses too.
        """
        return self.outputs.on_output

    @on_output.setter
    def on_output(self, listener: Callable[[RequestOutput], None] | None) -> None:
        self.outputs.on_output = listener

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.loaded.eos_token_ids

    @property
    def default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of a request that gives none: the values that the model's generation_config.json
        recommends."""
        return SamplingParams(**self.loaded.generation_defaults)

    # ---------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        tenant: str = "",
        ttft_target: float | None = None,
        retention: float | None = None,
        cache_salt: str | None = None,
        deadline: float | None = None,
        prompt_text: str | None = None,
        eager_text: bool = False,
        more_input: bool = False,
        resumed: Resumed | None = None,
    ) -> Request:
        """Queue a request. A request whose grammar is not compiled yet is parked until the grammar is ready.

        Args:
            request_id: text, unique among unfinished requests; may be used again after the step that follows the
                request's finish.
            prompt: text, or token ids.
            params: sampling parameters, or `PoolingParams`: the output then has an embedding and no tokens. None:
                `default_sampling_params`.
            arrival_time: time of arrival, in seconds on the engine's clock; None: now.
            priority: urgency; a smaller number is more urgent. Used by the scheduling orders with priorities, such as
                "priority".
            tenant: the owner of the request; used by scheduling orders that are fair to tenants.
            ttft_target: target for the time to the first token, in seconds from the request's arrival; used by
                scheduling orders that have such targets. None: the order's default. A missed target does not end the
                request.
            retention: seconds for which the request's prefix should stay cached after it finishes; read by some
                eviction policies. None: the policy's default.
            cache_salt: text that separates prefix caches: only requests with an equal salt share cached prefixes.
            deadline: time on the engine's clock, in seconds, at which the request finishes with finish_reason
                "deadline", waiting or running; None: never.
            prompt_text: the prompt's text that outputs show if `prompt` is token ids.
            eager_text: whether the engine's thread makes the text when it reports a step, instead of when an output's
                text is read; needed for outputs that other threads read.
            more_input: whether later parts of the prompt follow (`extend`); nothing is generated before the last part.
            resumed: the output that another engine has generated for the request; generation continues after it. With
                the same model, seed and request id the new tokens equal those that the other engine would have
                generated.

        Raises:
            RequestRefused, DuplicateRequest, ValueError: the request can never run; the message has the reason. Other
                requests are not affected.
        """
        now = self.clock()
        check_deadline(request_id, deadline)
        params = params or self.default_sampling_params
        request = to_request(
            request_id,
            self._check_request(request_id, prompt, params, more_input=more_input),
            params,
            arrival_time=now if arrival_time is None else arrival_time,
            eos_token_ids=self.eos_token_ids,
            max_model_len=self.max_model_len,
            priority=priority,
            tenant=tenant,
            ttft_target=ttft_target,
            retention=retention,
            cache_salt=cache_salt,
            more_input=more_input,
            output_token_ids=() if resumed is None else resumed.token_ids,
        )
        grammar = self.grammars.find(request.metadata)
        needs_grammar = grammar is None and request.metadata.structured_outputs is not None
        self.scheduler.add(request, now, park=ParkReason.GRAMMAR if needs_grammar else None)
        try:
            if isinstance(params, PoolingParams):
                self.runner.pooler.add(request, params)
            if grammar is not None:
                self.runner.sampler.use_grammar(request, grammar)
            elif needs_grammar:
                self.grammars.add(request)
            if prompt_text is None and isinstance(prompt, str):
                prompt_text = prompt
            self.outputs.add(request, prompt_text, request.metadata, eager_text=eager_text, resumed=resumed)
        except BaseException:  # a request that only the scheduler knows would break every later step
            self._finish_request(request_id, FinishReason.ERROR, now)
            raise
        if deadline is not None:
            self.deadlines.add(request, deadline)
        return request

    def _check_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | PoolingParams,
        *,
        more_input: bool,
    ) -> IntArray | Sequence[int]:
        """Check a new request's id, prompt and parameters against this model; return the prompt's token ids.

        Raises:
            ValueError: this model cannot run the request, or the id is not valid.
        """
        check_request_id(request_id)
        content = self.tokenize(prompt) if isinstance(prompt, str) else prompt
        token_ids = checked_token_ids(request_id, content, self.loaded.vocab_size)
        is_pooled = isinstance(params, PoolingParams)
        if is_pooled:
            check_can_pool(self.loaded.model)
        sampling = SILENT if isinstance(params, PoolingParams) else params
        self.outputs.check(request_id, sampling)
        self.runner.sampler.check(sampling)
        self.grammars.check(sampling)
        if more_input:
            check_may_come_in_parts(request_id, sampling, is_pooled=is_pooled)
        return token_ids

    def extend(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        *,
        more_input: bool = False,
        prompt_text: str | None = None,
    ) -> None:
        """Append the next part of the prompt to a request that was added with `more_input`.

        Args:
            prompt: the part to append: text, which is tokenized separately and without BOS, or token ids; the last part
                may be empty.
            more_input: whether further parts follow.
            prompt_text: the text that outputs show for this part if `prompt` is token ids.

        Raises:
            UnknownRequest, InvalidTransition: there is no such request, or its prompt is complete.
            ValueError: the part is not valid, or the prompt would be too long; the request is unchanged.
        """
        tokens = self.tokenize(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt
        token_ids = checked_token_ids(request_id, tokens, self.loaded.vocab_size)
        request = self.scheduler.get_request(request_id)
        max_tokens = 0
        if not more_input and request is not None:
            max_tokens = max_output_tokens(request, len(token_ids), self.max_model_len)
        request = self.scheduler.extend(request_id, token_ids, self.clock(), more=more_input, max_tokens=max_tokens)
        text = prompt if isinstance(prompt, str) else prompt_text
        self.outputs.extend(request, "" if text is None and not len(token_ids) else text)

    def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a prompt; return its token ids, with the special tokens (BOS) that the tokenizer adds.

        Raises:
            ValueError: the model has no tokenizer, or the tokenizer cannot read the prompt.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"the model in {self.loaded.path or 'memory'} has no tokenizer; give the prompt as token ids"
            )
        return encode(self.tokenizer, prompt, add_special_tokens=add_special_tokens)

    def abort(self, request_id: str) -> RequestOutput | None:
        """Abort a request now; return its last output, or None if the request is unknown or has finished."""
        return self._finish_request(request_id, FinishReason.ABORT, self.clock())

    def end_overdue(self) -> list[RequestOutput]:
        """Finish the requests whose deadlines have passed; return their last outputs. Every step calls this first."""
        now = self.clock()
        finished = []
        for request in self.deadlines.take_overdue(now):
            detail = f"its deadline passed, {now - request.arrival_time:.3f} s after its arrival"
            output = self._finish_request(request.request_id, FinishReason.DEADLINE, now, detail)
            if output is not None:
                finished.append(output)
        return finished

    def take_grammars(self) -> list[RequestOutput]:
        """Move parked requests whose grammar has been compiled back to the queue. Finish requests whose grammar failed,
        and return their last outputs. Every step calls this.
        """
        now = self.clock()
        finished = []
        for request, grammar in self.grammars.take_finished():
            error = grammar if isinstance(grammar, GrammarError) else None
            if not isinstance(grammar, GrammarError) and request.status.is_parked:
                try:
                    self.runner.sampler.use_grammar(request, grammar)
                except GrammarError as raised:
                    error = raised
            if error is not None:
                output = self._finish_request(request.request_id, FinishReason.ERROR, now, str(error), error)
                if output is not None:
                    finished.append(output)
            elif request.status.is_parked:
                self.scheduler.ready(request.request_id, now)
                if self.on_ready is not None:
                    self.on_ready(request)
        return finished

    def take_transfers(self) -> list[RequestOutput]:
        """Move parked requests whose KV has been loaded back to the queue. Finish requests whose KV can neither be
        loaded nor computed, and return their last outputs. Every step calls this.
        """
        if self.kv_connector is None:
            return []
        outputs = self.outputs.make_last_outputs(self.kv_connector.report_finished(self.scheduler), self.clock())
        if self.on_output is not None:
            for output in outputs:
                self.on_output(output)
        return outputs

    def _finish_request(
        self, request_id: str, reason: FinishReason, now: float, detail: str = "", error: GrammarError | None = None
    ) -> RequestOutput | None:
        request = self.scheduler.finish(request_id, reason, now, detail=detail)
        if request is not None:
            if self.kv_events is not None:
                self.kv_events.publish(self.scheduler.take_kv_events())
            self.grammars.forget(request)
        output = None if request is None else self.outputs.make_last_output(request, now, error)
        if output is not None and self.on_output is not None:
            self.on_output(output)
        if self.pausing.waiting:
            self.pausing.complete_if_idle()
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs, a step is in flight, or `step` has outputs to return."""
        return self.outputs.has_kept_outputs or len(self.steps) > 0 or self.scheduler.has_unfinished_requests()

    def has_runnable_requests(self) -> bool:
        """Whether there is anything to compute: a step in flight, or a request that is neither paused nor parked.
        Parked requests wait for a grammar, KV or a part of their prompt."""
        return len(self.steps) > 0 or self.scheduler.has_runnable_requests()

    # -------------------------------------------------------------------------------------------------- pausing

    def pause(self, mode: PauseChoice = "abort", *, clear_cache: bool = True) -> Future[None]:
        """Stop admitting requests until `resume`, so that weights can be changed.

        Args:
            mode: treatment of unfinished requests: "abort", "wait" or "keep", see `pausing.py`.
            clear_cache: whether KV of the old weights is dropped, see `pausing.py`.

        Returns:
            A future that is done when the pause is complete, so that nothing is computed until `resume`. It may be done
            already on return, or only after further steps.

        Raises:
            ValueError: there is no such mode.
        """
        return self.pausing.pause(mode, clear_cache=clear_cache)

    def resume(self) -> None:
        """End a pause: continue suspended requests and admit waiting ones. No effect without a pause."""
        self.pausing.resume()

    @property
    def is_paused(self) -> bool:
        """Whether the engine was paused, in any mode, and not resumed since."""
        return self.scheduler.pause_mode is not None

    def _abort_all(self) -> None:
        for request in self.outputs.requests:
            output = self.abort(request.request_id)
            if output is not None:
                self._keep_outputs([output])

    # -------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[RequestOutput]:
        """Execute a step, and update the scheduler with its result. With several steps in flight, the scheduler may be
        updated with the result of the preceding step instead; see `step_loop.py`.

        Returns:
            Outputs of the requests that got a token or finished since the last call, in order; a request may have two
            outputs.

        Raises:
            EngineStepError: the model failed; the failure is the error's `__cause__`. The scheduler is in its state
                before the step, so the next call retries the step, and returns the outputs of earlier steps. The same
                holds for a KeyboardInterrupt before the update.
        """
        if self.grammars.num_waiting and not self.has_runnable_requests():
            self.grammars.wait(PATIENCE)
        elif self.kv_connector is not None and not self.has_runnable_requests():
            self.kv_connector.wait(PATIENCE)
        self.steps.void_if_interrupted()
        self.steps.run()
        return self.outputs.take_kept_outputs()

    def finish_steps(self) -> list[RequestOutput]:
        """Execute, update and report every step in flight, and schedule no further step; return the outputs.

        Raises:
            EngineStepError: the model failed, see `step`.
        """
        self.steps.finish()
        return self.outputs.take_kept_outputs()

    def close(self) -> None:
        """Void the steps in flight, and close the KV connector and the publisher of KV events."""
        self.steps.void()
        if self.kv_connector is not None:
            self.kv_connector.close()
        if self.kv_events is not None:
            self.kv_events.close()

    def _before_schedule(self) -> None:
        """Finish overdue requests, and move parked requests whose grammar or KV is ready back to the queue."""
        self._keep_outputs(self.end_overdue())  # first, so that no work is done for overdue requests
        if self.grammars.num_waiting:
            self._keep_outputs(self.take_grammars())
        if self.kv_connector is not None:
            self._keep_outputs(self.take_transfers())
        if self.watchdog is not None:
            self.watchdog.tick()

    def _keep_outputs(self, outputs: list[RequestOutput]) -> None:
        """Keep outputs for the next `step` to return, unless there is a listener `on_output`, which was already called
        with them."""
        if self.on_output is None:
            self.outputs.deliver_outputs(outputs)
