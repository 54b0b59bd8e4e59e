"""AsyncEngine: serves many concurrent requests to asyncio, each as a stream of outputs.

    engine = AsyncEngine("demo")
    async for output in engine.generate("The import statement", SamplingParams(max_tokens=32)):
        print(output.text)
    await engine.shutdown()

The engine and its scheduler run in a separate thread (`engine_thread.py`), which delivers outputs through a mailbox per
request (`mailbox.py`). No method blocks an event loop. Text prompts are tokenized in a third thread: a long prompt
takes milliseconds per thousand tokens, which would stall every stream in the event loop, and every step in the engine's
thread. Because only one thread tokenizes, requests are queued in the order in which they were sent.

A stream ends early in any way that Python offers: a cancelled task, `aclose()`, leaving `async with`, or a dropped
reference. Each of these aborts the request, whose blocks are free at the next step boundary.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pointsman.core import Explanation, Request
from pointsman.engine.aio.engine_thread import Add, Call, EngineThread, Expect, Stop
from pointsman.engine.aio.input_feed import InputFeed
from pointsman.engine.aio.mailbox import LoopMailbox, LoopPort
from pointsman.engine.engine import Engine
from pointsman.engine.errors import EngineDeadError
from pointsman.engine.outputs.embedding import EmbeddingRequestOutput
from pointsman.engine.outputs.request_output import RequestOutput
from pointsman.engine.params.engine_args import with_prefill_gap
from pointsman.engine.params.pooling import PoolingParams
from pointsman.engine.params.requests import check_request_id
from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams
from pointsman.engine.pausing import PauseChoice
from pointsman.engine.stats import DEFAULT_INTERVAL, EngineStats, read_stats

if TYPE_CHECKING:
    from types import TracebackType

    from pointsman.engine.model.loaded import LoadedModel

Answer = TypeVar("Answer")


class AsyncEngine:
    """An engine for asyncio. Any number of event loops and threads may share one object.

    Args:
        model: a directory in the Hugging Face format, a GGUF file, the name of a small model ("demo", "smollm2"),
            OWNER/NAME on a hub, or a model that is loaded already. The constructor loads it.
        max_step_retries: maximum number of consecutive retries of a failed step. The scheduler is rewound before each
            retry, so no request is lost. If the last retry fails too, the engine is dead.
        log_stats_interval: seconds between two log lines with statistics (see `stats.py`); None: no such lines.
        **knobs: arguments of `Engine`. If they set neither `token_limits` nor a limit for chunks, the token limit
            "prefill-gap" is added (`params/engine_args.py`).

    Raises:
        ModelLoadError, ConfigError, ValueError: see `Engine`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = "demo",
        *,
        max_step_retries: int = 0,
        log_stats_interval: float | None = DEFAULT_INTERVAL,
        **knobs: Any,
    ) -> None:
        self._take_over(Engine(model, **with_prefill_gap(knobs)), max_step_retries, log_stats_interval)

    @classmethod
    def from_engine(
        cls, engine: Engine, *, max_step_retries: int = 0, log_stats_interval: float | None = DEFAULT_INTERVAL
    ) -> AsyncEngine:
        """Make an `AsyncEngine` that owns an existing engine. Afterwards other code may use the engine only through
        `call`."""
        self = cls.__new__(cls)
        self._take_over(engine, max_step_retries, log_stats_interval)
        return self

    def _take_over(self, engine: Engine, max_step_retries: int, log_stats_interval: float | None) -> None:
        if not isinstance(max_step_retries, int) or max_step_retries < 0:
            raise ValueError(f"max_step_retries is {max_step_retries!r}; it must be an integer of at least 0")
        self._engine = engine
        self._ids = count()
        self._ports: dict[asyncio.AbstractEventLoop, LoopPort] = {}
        self._ports_lock = threading.Lock()
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pointsman-tokenizer")
        self._thread = EngineThread(engine, max_step_retries=max_step_retries, log_stats_interval=log_stats_interval)
        self._thread.start()
        # Garbage collection of an engine without a shutdown stops its thread; engine_thread stops it when Python exits.
        weakref.finalize(self, self._thread.ask_to_stop).atexit = False

    # ------------------------------------------------------------------ constants of the engine

    @property
    def tokenizer(self) -> Any | None:
        """The model's tokenizer, if it has one."""
        return self._engine.tokenizer

    @property
    def model_config(self) -> Any:
        """The model's (text) configuration, as transformers has it."""
        return self._engine.model_config

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a request, prompt and output together."""
        return self._engine.max_model_len

    # ------------------------------------------------------------------ requests

    def generate(
        self,
        prompt: str | Sequence[int] | AsyncIterator[str | Sequence[int]],
        params: SamplingParams | PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        ttft_target: float | None = None,
        retention: float | None = None,
        cache_salt: str | None = None,
        arrival_time: float | None = None,
    ) -> RequestStream:
        """Return a stream of a request's outputs. The first read, or `await stream.start()`, queues the request.

        Args:
            prompt: text, token ids, or an asynchronous iterator of parts that are text or token ids. Each part is
                computed when it arrives. The first part queues the request; generation begins when the iterator is
                exhausted.
            params: sampling or pooling parameters; None: those that the model's generation_config.json recommends.
                `output_kind` sets the content of each output of the stream: all tokens so far (CUMULATIVE), only new
                tokens (DELTA), or one final output (FINAL_ONLY). Several outputs that wait to be read are merged into
                one.
            request_id: text, unique among unfinished requests; None: "request-0", "request-1", ...
            priority: urgency; a smaller number is more urgent. Used by the scheduling orders with priorities, such as
                "priority". `set_priority` changes it.
            tenant: the owner of the request; used by scheduling orders that are fair to tenants.
            ttft_target: target for the time to the first token, in seconds from the request's arrival; used by
                scheduling orders that have such targets. None: the order's default. A missed target does not end the
                request.
            retention: seconds for which the request's prefix should stay cached after it finishes; read by some
                eviction policies. None: the policy's default.
            cache_salt: text that separates prefix caches: only requests with an equal salt share cached prefixes.
            arrival_time: time of arrival, in seconds on the engine's clock; None: the time of the first read or of
                `start`, before tokenizing.

        The first read raises:
            RequestRefused, DuplicateRequest, ValueError: the request can never run; the message has the reason.
                EngineDeadError: the engine has died or is shutting down; any later read may raise this error too.
        """
        return RequestStream(
            self,
            f"request-{next(self._ids)}" if request_id is None else request_id,
            prompt,
            params or self._engine.default_sampling_params,
            {
                "priority": priority,
                "tenant": tenant,
                "ttft_target": ttft_target,
                "retention": retention,
                "cache_salt": cache_salt,
                "arrival_time": arrival_time,
            },
        )

    async def embed(
        self,
        prompt: str | Sequence[int],
        params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        tenant: str = "",
        ttft_target: float | None = None,
        retention: float | None = None,
        cache_salt: str | None = None,
    ) -> EmbeddingRequestOutput:
        """Compute a prompt's vector, which is the result's `outputs.embedding`. Cancelling the call aborts the request.

        Args:
            params: pooling parameters; None: the last token's vector, scaled to length 1.
            prompt, request_id, priority, tenant, retention, cache_salt: the arguments of `generate`; `prompt` is a
                complete prompt, no iterator of parts.
            ttft_target: target for the time to the vector; otherwise as for `generate`.

        Raises:
            RuntimeError: the request finished without a vector; the message has the reason. Other exceptions as for the
                first read of a stream.
        """
        pooling = params or PoolingParams()
        stream = self.generate(
            prompt,
            pooling,
            request_id,
            priority=priority,
            tenant=tenant,
            ttft_target=ttft_target,
            retention=retention,
            cache_salt=cache_salt,
        )
        async with stream:
            return EmbeddingRequestOutput.of(await anext(stream))

    async def abort(self, request_id: str) -> bool:
        """Abort a request now; its stream ends with finish_reason "abort". Returns False if the request is unknown or
        has finished.

        A request whose prompt is still being tokenized is aborted when it is queued.

        Raises:
            EngineDeadError: the engine has died or been shut down.
        """
        return await self._call(lambda _: self._thread.abort(request_id))

    async def set_priority(self, request_id: str, priority: int) -> None:
        """Change the priority of an unfinished request; a queued request changes its place in the queue immediately.

        Args:
            request_id: id of a queued or running request whose prompt has been tokenized.
            priority: the new urgency; a smaller number is more urgent. Used by the scheduling orders with priorities,
                such as "priority".

        Raises:
            UnknownRequest: there is no such request, or it has finished.
            ValueError: the priority is not an integer of 64 bits.
            EngineDeadError: the engine has died or been shut down.
        """
        await self._call(lambda engine: engine.scheduler.set_priority(request_id, priority, engine.clock()))

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize a prompt in the tokenizing thread; return its token ids, with the special tokens (BOS) that the
        tokenizer adds.

        Raises:
            ValueError: the model has no tokenizer, or the tokenizer cannot read the prompt.
            EngineDeadError: the engine has died or been shut down.
        """
        self.check_health()
        try:
            future = self._tokenizing.submit(self._engine.tokenize, prompt, add_special_tokens=add_special_tokens)
        except RuntimeError:  # the tokenizing thread has ended
            raise self._thread.dead_error() from None
        return await asyncio.wrap_future(future)

    # ------------------------------------------------------------------ questions

    async def call(self, function: Callable[[Engine], Answer]) -> Answer:
        """Call `function(engine)` between two steps in the engine's thread, and return its result. The function should
        be quick, because every request waits for it. Its exceptions are raised here.

        Raises:
            EngineDeadError: the engine has died or been shut down.
        """
        return await self._call(function)

    async def explain(self, request_id: str) -> Explanation:
        """Explain a request: its state, why and since when it waits, and which requests block it.

        Raises:
            UnknownRequest: there is no such request, or its finish has already been reported.
        """
        return await self._call(lambda engine: engine.scheduler.explain(request_id))

    async def stats(self) -> EngineStats:
        """Read the totals and the current state of the engine and its scheduler."""
        return await self._call(lambda engine: read_stats(engine, engine.clock()))

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Drop every cached prefix. Running requests keep their KV; with `preempt_running` they are preempted and
        recompute it."""
        await self._call(
            lambda engine: engine.scheduler.reset_prefix_cache(engine.clock(), preempt_running=preempt_running)
        )

    async def set_max_num_active_seqs(self, limit: int | None) -> None:
        """Change the maximum number of running requests, from the next step on; None: `max_num_seqs`. Running requests
        continue.

        Raises:
            ConfigError: the limit is out of range.
        """
        await self._call(lambda engine: engine.scheduler.set_max_num_active_seqs(limit, engine.clock()))

    async def pause(self, mode: PauseChoice = "abort", *, clear_cache: bool = True) -> None:
        """Stop admitting requests until `resume`, and return when no step is in flight: then the weights may be
        changed.

        Args:
            mode: treatment of unfinished requests: "abort" aborts all, "wait" lets running requests finish, "keep"
                suspends all.
            clear_cache: whether cached prefixes are dropped when the pause is complete; suspended requests then
                recompute their KV.

        Raises:
            ValueError: there is no such mode.
            RuntimeError: the engine was resumed before the pause was complete.
            EngineDeadError: the engine has died or been shut down.
        """
        paused = await self._call(lambda engine: engine.pause(mode, clear_cache=clear_cache))
        await asyncio.wrap_future(paused)

    async def resume(self) -> None:
        """End a pause: continue suspended requests and admit waiting ones. No effect without a pause."""
        await self._call(lambda engine: engine.resume())

    async def is_paused(self) -> bool:
        """Whether the engine was paused, in any mode, and not resumed since."""
        return await self._call(lambda engine: engine.is_paused)

    async def _call(self, function: Callable[[Engine], Answer]) -> Answer:
        future: Future[Answer] = Future()
        self._thread.send(Call(function, future))
        return await asyncio.wrap_future(future)

    # ------------------------------------------------------------------ health and end

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted and computed: the engine has neither died nor been shut down."""
        return self._thread.is_running

    @property
    def errored(self) -> bool:
        """Whether a failure ended the engine."""
        return self._thread.cause is not None

    @property
    def dead_error(self) -> EngineDeadError | None:
        """The error that calls raise after the engine's end; None while the engine runs."""
        return None if self._thread.is_running else self._thread.dead_error()

    def check_health(self) -> None:
        """Raise if the engine does not run.

        Raises:
            EngineDeadError: the engine has died, for the reason in the error's `__cause__`, or has been shut down.
        """
        if not self._thread.is_running:
            raise self._thread.dead_error()

    async def shutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """End the engine and its thread. Further calls are allowed, also during a shutdown.

        Args:
            drain: whether requests may finish. True: refuse new requests, and let earlier requests finish, also those
                whose prompts are still being tokenized. False: abort all requests. Streams of queued or running
                requests end with finish_reason "abort"; streams whose requests are not queued yet raise
                `EngineDeadError`.
            timeout: maximum seconds for draining, after which unfinished requests are aborted; None: no limit. The step
                in progress always completes.
        """
        if not self._thread.will_end:
            return  # this process is a fork, and the engine belongs to its parent
        ended = asyncio.wrap_future(self._thread.ended)
        self._send_stop(drain)
        if drain and timeout is not None:
            await asyncio.wait([ended], timeout=timeout)
            self._send_stop(drain=False)
        await ended
        self._thread.join()
        self._tokenizing.shutdown(wait=False)

    def _send_stop(self, drain: bool) -> None:
        # A stopped engine needs no message.
        if self._thread.is_running:
            try:
                self._thread.send(Stop(drain))
            except EngineDeadError:
                return

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.shutdown()

    # ------------------------------------------------------------------ for streams

    def _port(self) -> LoopPort:
        """The port of the running event loop, made on the first call in this loop."""
        loop = asyncio.get_running_loop()
        with self._ports_lock:
            port = self._ports.get(loop)
            if port is None:
                self._ports = {known: port for known, port in self._ports.items() if not known.is_closed()}
                port = self._ports[loop] = LoopPort(loop)
            return port

    def _make_mailbox(self, params: SamplingParams | PoolingParams) -> LoopMailbox:
        return LoopMailbox(self._port(), finished_only=params.output_kind is RequestOutputKind.FINAL_ONLY)

    def _make_feed(self, request_id: str, parts: AsyncIterator[str | Sequence[int]], mailbox: LoopMailbox) -> InputFeed:
        thread = self._thread

        async def extend(part: str | Sequence[int], more_input: bool) -> None:
            text = part if isinstance(part, str) else None
            tokens = await self.tokenize(part, add_special_tokens=False) if isinstance(part, str) else part
            if len(tokens) or not more_input:
                await self._call(
                    lambda engine: engine.extend(request_id, tokens, more_input=more_input, prompt_text=text)
                )

        def give_up() -> None:
            thread.abandon(request_id, mailbox)
            mailbox.wake()

        return InputFeed(parts, extend, give_up)

    def _send_request(
        self,
        request_id: str,
        mailbox: LoopMailbox,
        prompt: Sequence[int],
        params: SamplingParams | PoolingParams,
        options: dict[str, Any],
    ) -> None:
        if (
            isinstance(params, SamplingParams) and params.output_kind is RequestOutputKind.DELTA
        ):  # the stream makes deltas, because it knows the last output that was read
            params = dataclasses.replace(params, output_kind=RequestOutputKind.CUMULATIVE)

        def add(engine: Engine) -> Request:
            return engine.add_request(request_id, prompt, params, eager_text=True, **options)

        self._thread.send(Add(request_id, mailbox, add))


class RequestStream(AsyncIterator[RequestOutput]):
    """The stream of one request's outputs, read by one task at a time. `AsyncEngine.generate` returns it.

    A stream that is dropped before its end aborts the request when it is garbage-collected; leaving `async with
    stream:` and `aclose()` abort it immediately. A read that is cancelled, also by a timeout, aborts the request too.
    If another task calls `aclose()`, the stream ends for the reading task without an error.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        prompt: str | Sequence[int] | AsyncIterator[str | Sequence[int]],
        params: SamplingParams | PoolingParams,
        options: dict[str, Any],
    ) -> None:
        self.request_id = request_id
        self._engine = engine
        self._prompt = prompt
        self._params = params
        self._options = options
        self._mailbox: LoopMailbox | None = None
        self._feed: InputFeed | None = None
        self._starting = asyncio.Lock()
        self._is_started = False
        self._refusal: Exception | None = None
        self._seen: RequestOutput | None = None
        self._is_over = False
        self._is_reading = False

    async def start(self) -> None:
        """Queue the request, and return when it is queued. So a server can notice a refusal before it sends the first
        byte of its response. Without this call the first read queues the request. Any number of tasks may call this
        method.

        Raises:
            RequestRefused, DuplicateRequest, ValueError: the request can never run; the message has the reason.
            EngineDeadError: the engine has died or is shutting down.
        """
        async with self._starting:
            if self._refusal is not None:
                raise self._refusal
            if self._is_started or self._is_over:
                return
            try:
                await self._queue()
            except BaseException as error:
                if isinstance(error, Exception):
                    self._refusal = error
                self._detach()
                raise
            self._is_started = True

    async def _queue(self) -> None:
        check_request_id(self.request_id)
        engine, prompt = self._engine, self._prompt
        if self._options["arrival_time"] is None:
            self._options["arrival_time"] = engine._engine.clock()
        self._mailbox = mailbox = engine._make_mailbox(self._params)
        text: str | None = None
        if isinstance(prompt, AsyncIterator):
            self._feed = engine._make_feed(self.request_id, prompt, mailbox)
            self._options["more_input"] = True
            prompt = await self._feed.first_part()
        if isinstance(prompt, str):
            engine._thread.send(Expect(self.request_id, mailbox))
            text, prompt = prompt, await engine.tokenize(prompt)
        if self._is_over:  # the stream was closed meanwhile
            return
        engine._send_request(self.request_id, mailbox, prompt, self._params, {**self._options, "prompt_text": text})
        await mailbox.wait_accepted()
        if self._feed is not None and not self._is_over:
            self._feed.start()

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        if self._is_over:
            raise StopAsyncIteration
        if self._is_reading:
            raise RuntimeError(f"request {self.request_id!r}: two tasks read its stream; read it in one task")
        self._is_reading = True
        try:
            if not self._is_started:
                await self.start()
            output = None if self._mailbox is None else await self._mailbox.wait_newer_than(self._seen)
        except BaseException:  # also when the reading task is cancelled
            self._detach()
            raise
        finally:
            self._is_reading = False
        if output is None:  # the stream was closed, or the prompt's iterator failed
            self._is_over = True
            if self._feed is not None and self._feed.error is not None:
                raise self._feed.error
            raise StopAsyncIteration
        seen, self._seen = self._seen, output
        self._is_over = output.finished
        if self._params.output_kind is RequestOutputKind.DELTA:
            output = output.since(seen)
        return output

    async def aclose(self) -> None:
        """End the stream, and abort its request if that is unfinished; the request's blocks are free at the next step
        boundary."""
        self._detach()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._is_over:
            self._abandon()

    def _detach(self) -> None:
        """End the stream, in the stream's event loop, and wake the tasks that wait for outputs."""
        self._abandon()
        if self._mailbox is not None:
            self._mailbox.wake()

    def _abandon(self) -> None:
        if self._feed is not None:
            self._feed.stop()
        if not self._is_over and self._mailbox is not None:
            self._engine._thread.abandon(self.request_id, self._mailbox)
        self._is_over = True
