"""Engine: the synchronous loop of scheduler and model.

    engine = Engine("demo")
    engine.add_request("a", "The import statement", SamplingParams(max_tokens=32))
    while engine.has_unfinished_requests():
        for output in engine.step():
            print(output.request_id, output.text)

One thread owns an engine. `step` is the scheduler's `schedule`, the runner's `execute` and the scheduler's `update`;
everything else here is bookkeeping for the caller: prompts into requests, tokens into text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from pointsman.core import Request, Scheduler, SchedulerConfig, SchedulerOutput, StepUpdate
from pointsman.engine.errors import EngineStepError
from pointsman.engine.kv_pool import KVPool, choose_num_blocks
from pointsman.engine.model_loader import LoadedModel, load_model
from pointsman.engine.model_runner import ModelRunner
from pointsman.engine.output import CompletionOutput, Detokenizer, RequestMetrics, RequestOutput
from pointsman.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pointsman.core.preemption import Victim
    from pointsman.core.queue import Order
    from pointsman.core.recording import Recorder
    from pointsman.engine.attention import AttentionBackend


@dataclass(slots=True)
class _Live:
    """What the engine keeps of a request until it ends."""

    request: Request
    prompt: str | None
    prompt_token_ids: list[int]
    token_ids: list[int]
    metrics: RequestMetrics
    detokenizer: Detokenizer


class Engine:
    """Runs requests on a model.

    Args:
        model: a directory, "demo" for the packaged model, or a model that is loaded already.
        num_blocks: KV blocks; or `kv_cache_bytes`, a budget that they must fit. Neither: a default that is logged.
        dtype: "float32" or "bfloat16", of weights and KV.
        max_model_len: longest sequence, prompt and output together; None: what the model was made for.
        seed: of the requests that give none.
        recorder: records every call and decision of the scheduler.
        clock: seconds; the core itself never reads one.
        attention: a backend in place of plain PyTorch.

    All other arguments are fields of `SchedulerConfig` and mean what they say there.

    Raises:
        ModelLoadError, UnsupportedModel: the model cannot be read, or not be run correctly.
        ConfigError, ValueError: a knob is out of range.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = "demo",
        *,
        num_blocks: int | None = None,
        kv_cache_bytes: int | None = None,
        dtype: str = "float32",
        block_size: int = 16,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        order: str | Order = "fcfs",
        batching: Literal["mixed", "static"] = "mixed",
        watermark: float = 0.0,
        enable_prefix_caching: bool = True,
        enable_chunked_prefill: bool = True,
        long_prefill_token_threshold: int = 0,
        victim: str | Victim | None = None,
        displace: bool | None = None,
        full_sequence_must_fit: bool = True,
        seed: int = 0,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype)
        self.max_model_len = _choose_max_model_len(self.loaded, max_model_len)
        # The pool's size depends on these two, and SchedulerConfig checks them only together with the pool's size.
        for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
        num_blocks = choose_num_blocks(
            self.loaded.layers,
            num_blocks=num_blocks,
            kv_cache_bytes=kv_cache_bytes,
            block_size=block_size,
            dtype=self.loaded.dtype,
            max_model_len=self.max_model_len,
            max_num_seqs=max_num_seqs,
        )
        config = SchedulerConfig(
            num_blocks=num_blocks,
            max_model_len=self.max_model_len,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_chunked_prefill=enable_chunked_prefill,
            long_prefill_token_threshold=long_prefill_token_threshold,
            enable_prefix_caching=enable_prefix_caching,
            order=order,
            victim=victim,
            displace=displace,
            watermark=watermark,
            full_sequence_must_fit=full_sequence_must_fit,
            batching=batching,
        )
        self.scheduler = Scheduler(config, recorder=recorder)
        self.kv_pool = KVPool(
            self.loaded.layers,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=self.loaded.dtype,
            device=self.loaded.model.device,
        )
        self.kv_pool.log_capacity(self.max_model_len)
        self.runner = ModelRunner(self.loaded, self.kv_pool, self.scheduler, seed=seed, backend=attention)
        self.clock = clock
        self.last_output: SchedulerOutput | None = None
        """The last step's decisions, for displays."""
        self._live: dict[str, _Live] = {}

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self.loaded.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's (text) configuration, as transformers has it."""
        return self.loaded.config

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.loaded.eos_token_ids

    # ---------------------------------------------------------------------------------------------- requests

    def add_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Request:
        """Queue a prompt.

        Args:
            request_id: unique among requests that have not ended; free again with the step after its end.
            prompt: text, or token ids.
            params: None: the defaults of `SamplingParams`.
            arrival_time: seconds on the engine's clock; None: now.
            priority: smaller is more urgent; read under order "priority".
            cache_salt: only requests with an equal salt share cached prefixes.

        Raises:
            RequestRefused, DuplicateRequest, ValueError: it can never run, with the reason; nothing else is disturbed.
        """
        now = self.clock()
        request, text = self.make_request(
            request_id,
            prompt,
            params or SamplingParams(),
            arrival_time=now if arrival_time is None else arrival_time,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.scheduler.add(request, now)
        self._live[request_id] = _Live(
            request=request,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids.tolist(),
            token_ids=[],
            metrics=RequestMetrics(arrival_time=request.arrival_time),
            detokenizer=Detokenizer(self.tokenizer),
        )
        return request

    def make_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> tuple[Request, str | None]:
        """The request for a prompt, not added yet, and the prompt's text if it was given as text.

        Raises:
            RequestRefused, ValueError: the prompt cannot be a request of this model.
        """
        text = prompt if isinstance(prompt, str) else None
        token_ids = self.tokenize(prompt) if isinstance(prompt, str) else list(prompt)
        vocab_size = self.loaded.vocab_size
        for token_id in token_ids:
            if isinstance(token_id, (int, np.integer)) and not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"request {request_id!r}: token id {token_id} is outside the model's vocabulary of {vocab_size}; "
                    "tokenize with the model's own tokenizer"
                )
        max_tokens = params.max_tokens
        if max_tokens is None:
            max_tokens = max(1, self.max_model_len - len(token_ids))
        request = Request(
            request_id,
            token_ids,
            arrival_time=arrival_time,
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            priority=priority,
            eos_token_ids=self.eos_token_ids,
            ignore_eos=params.ignore_eos,
            stop_token_ids=tuple(params.stop_token_ids),
            cache_salt=cache_salt,
            metadata=params,
        )
        return request, text

    def tokenize(self, prompt: str) -> list[int]:
        """The prompt's token ids.

        Raises:
            ValueError: the model has no tokenizer, or the prompt is no text that one could read.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"the model in {self.loaded.path or 'memory'} has no tokenizer; give the prompt as token ids"
            )
        try:
            token_ids: list[int] = self.tokenizer(prompt)["input_ids"]
        except TypeError:  # what tokenizers says of lone surrogates, which UTF-8 has no bytes for
            raise ValueError("the prompt is not valid Unicode text (a lone surrogate); remove or replace it") from None
        return token_ids

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its last output, or None if it is unknown or has ended."""
        now = self.clock()
        if self.scheduler.abort(request_id, now) is None:
            return None
        return self._output_of(self._live[request_id], now)

    def has_unfinished_requests(self) -> bool:
        """Whether any request waits or runs."""
        return self.scheduler.has_unfinished_requests()

    # -------------------------------------------------------------------------------------------------- steps

    def step(self) -> list[RequestOutput]:
        """Run one step; the requests that got a token or ended in it.

        Raises:
            EngineStepError: the model failed. Its cause is the failure; the scheduler is as it was before the step,
                so stepping again tries again.
        """
        output = self.scheduler.schedule(self.clock())
        self.last_output = output
        try:
            result = self.runner.execute(output)
        except BaseException as error:  # also KeyboardInterrupt: whatever happens, the decision must not stand
            self.scheduler.fail(output, self.clock())
            if not isinstance(error, Exception):
                raise
            raise EngineStepError(f"step {output.step_id} failed: {type(error).__name__}: {error}") from error
        now = self.clock()
        return self._outputs(output, self.scheduler.update(output, result, now), now)

    def _outputs(self, output: SchedulerOutput, update: StepUpdate, now: float) -> list[RequestOutput]:
        """Append the step's tokens and report whoever got some, or ended."""
        touched: dict[str, _Live] = {}
        ends = np.cumsum(update.counts)
        for row in np.nonzero(update.counts)[0].tolist():
            live = self._live[output.requests[row].request_id]
            live.token_ids.extend(update.token_ids[ends[row] - update.counts[row] : ends[row]].tolist())
            if live.metrics.first_token_time is None:
                live.metrics.first_token_time = now
                live.metrics.num_cached_tokens = live.request.num_cached_tokens
            touched[live.request.request_id] = live
        for request in update.finished:  # a row that ended by an error got no token
            touched[request.request_id] = self._live[request.request_id]
        return [self._output_of(live, now) for live in touched.values()]

    def _output_of(self, live: _Live, now: float) -> RequestOutput:
        """A snapshot for the caller; the last one also ends the engine's own bookkeeping."""
        request, metrics = live.request, live.metrics
        metrics.num_preemptions = request.num_preemptions
        if request.is_finished:
            metrics.finished_time = now
            self._forget(request)
        completion = CompletionOutput(
            live.detokenizer,
            list(live.token_ids),
            request.finish_reason.value if request.finish_reason is not None else None,
            request.finish_detail,
            request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=live.prompt,
            prompt_token_ids=live.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            metrics=metrics,
        )

    def _forget(self, request: Request) -> None:
        self._live.pop(request.request_id, None)


def _choose_max_model_len(loaded: LoadedModel, max_model_len: int | None) -> int:
    longest = loaded.max_position_embeddings
    if max_model_len is None:
        if longest is None:
            raise ValueError(f"the model in {loaded.path} does not say how long a sequence may be; give max_model_len")
        return longest
    if not isinstance(max_model_len, int) or max_model_len < 1:
        raise ValueError(f"max_model_len is {max_model_len!r}; it must be an integer of at least 1")
    if longest is not None and max_model_len > longest:
        raise ValueError(f"max_model_len is {max_model_len}, but the model was made for at most {longest}; lower it")
    return max_model_len
