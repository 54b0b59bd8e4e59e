"""The API process's side of the engine: a stream of deltas per request, questions, and the engine process's life.

    client = await EngineClient.start({"model": "demo"})
    stream = client.generate(EngineRequest("a", await client.encode("The import statement"), SamplingParams()))
    await stream.start()                      # raises if the request can never run
    async for delta in stream:
        print(delta.text)
    await client.shutdown()

Everything here runs in one event loop. Text becomes tokens in a thread of this process, never in the engine's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any, cast

from pointsman.engine.errors import EngineDeadError, ModelLoadError
from pointsman.engine.pausing import PauseChoice
from pointsman.engine.stats import DEFAULT_INTERVAL, EngineStats
from pointsman.engine.text.tokenizer import PLAIN_CHAT_TEMPLATE, encode, model_directory, read_tokenizer, render_chat
from pointsman.server.client_stream import ClientStream
from pointsman.server.wire import (
    Abandon,
    Add,
    Answer,
    Ask,
    Delta,
    EngineInfo,
    EngineRequest,
    Failed,
    News,
    Question,
    RequestExplanation,
    Start,
    StepNote,
    Stop,
    Unpacker,
    pack,
)

logger = logging.getLogger(__name__)

SECONDS_TO_DIE = 10.0
"""How long an engine process that was told to end is waited for, beyond what draining may take, before it is killed."""


MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""What may wait for an engine process that does not read; beyond, requests are refused."""


class EngineStalledError(RuntimeError):
    """The engine process lives and does not read what it is sent."""


class EngineStartError(RuntimeError):
    """The engine process ended before its model was loaded, through no fault of the options."""


class EngineClient:
    """An engine in a process of its own. Made by `start`.

    Attributes:
        info: what the engine says about itself.
        tokenizer: of the model, in this process; None if it has none.
        dead: set when the engine process has ended, for whatever reason.
        on_steps: called with the steps that ran, in order.
        on_end: called when a request ended: its request, the last delta (with metrics, unless its reader let go of it)
            and its number of output tokens.
    """

    def __init__(self, process: subprocess.Popen[bytes], tokenizer: Any | None, chat_template: str | None) -> None:
        self.info: EngineInfo = None  # type: ignore[assignment]  # `start` returns no client without
        self.tokenizer = tokenizer
        self.dead = asyncio.Event()
        self.on_steps: Callable[[list[StepNote]], None] | None = None
        self.on_end: Callable[[EngineRequest, Delta, int], None] | None = None
        self._process = process
        self._chat_template = chat_template
        self._keys = count()
        self._streams: dict[int, ClientStream] = {}  # of requests that have not ended
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._is_stopping = False
        self._death: str | None = None
        self._failed: Failed | None = None
        self._ready = asyncio.Event()
        self._tokenizing = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pointsman-tokenizer")

    @classmethod
    async def start(
        cls,
        options: Mapping[str, Any],
        *,
        record: str | None = None,
        log_stats_interval: float | None = DEFAULT_INTERVAL,
        max_step_retries: int = 0,
        chat_template: str | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until its model is loaded.

        Args:
            options: keyword arguments of `Engine`.
            record: a file for the scheduler's recording.
            log_stats_interval: seconds between lines of statistics; None: none.
            max_step_retries: how often in a row a failed step is tried again.
            chat_template: in place of the tokenizer's own.

        Raises:
            ValueError: the model cannot be run, or a knob is out of range; the message says which.
            EngineStartError: the process ended for another reason.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "pointsman.server.engine_process", str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        tokenizer_read = asyncio.get_running_loop().run_in_executor(
            None, read_tokenizer, model_directory(options.get("model"))
        )
        client = cls(process, None, chat_template)
        try:
            ours.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: _Connection(client), sock=ours)
            client._send(Start(dict(options), record, log_stats_interval, max_step_retries))
            client.tokenizer = await tokenizer_read
            await client._ready.wait()
            if client._failed is not None:
                raise _start_error(client._failed)
            if client._death is not None:
                raise EngineStartError(client._death)
        except BaseException:
            await client._kill()
            raise
        return client

    # ------------------------------------------------------------------ requests

    def generate(self, request: EngineRequest) -> ClientStream:
        """The stream of a request's deltas, made in the event loop of its reader. The request is sent by `submit`, by
        `await stream.start()`, or by the first reading.
        """
        return ClientStream(self, next(self._keys), request)

    def submit(self, streams: Sequence[ClientStream]) -> None:
        """Send the requests of streams that were not sent yet, together: they are queued in this order, and what they
        share (a prompt's tokens, biases, a grammar) crosses once.

        Raises:
            EngineDeadError: the engine process has ended.
            EngineStalledError: it does not read what it is sent.
        """
        self.check_health()
        self.check_takes_requests()
        for stream in streams:
            self._streams[stream.key] = stream
            stream.note_sent()
        self._send(Add([(stream.key, stream.request) for stream in streams]))

    def abandon(self, stream: ClientStream) -> None:
        """Abort the request of a stream that nobody reads any more, unless it was not sent or has ended."""
        if self._streams.pop(stream.key, None) is not None:
            self._send(Abandon(stream.key))
            if self.on_end is not None:
                self.on_end(stream.request, Delta(finish_reason="abort"), stream.num_output_tokens)

    # ------------------------------------------------------------------ text

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The text's token ids.

        Raises:
            ValueError: there is no tokenizer, or the text is none that one could read.
        """
        return await self._in_thread(lambda: encode(self._tokenizer(), text, add_special_tokens=add_special_tokens))

    async def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        """The token ids that a chat template makes of a conversation; a plain template if the model has none.

        Raises:
            ValueError: there is no tokenizer, or the template fails on this conversation.
        """
        tokenizer = self._tokenizer()
        template = options.pop("chat_template", None) or self._chat_template
        if template is None and not tokenizer.chat_template:
            template = PLAIN_CHAT_TEMPLATE

        def render() -> list[int]:
            text = render_chat(tokenizer, messages, {**options, "chat_template": template})
            # The template has written special tokens such as BOS itself; the plain one has none.
            return encode(tokenizer, text, add_special_tokens=template is PLAIN_CHAT_TEMPLATE)

        return await self._in_thread(render)

    async def decode(self, token_ids: Sequence[int]) -> str:
        """The tokens' text, special tokens included.

        Raises:
            ValueError: there is no tokenizer, or a token id is outside the vocabulary.
        """
        tokenizer = self._tokenizer()
        for token_id in token_ids:
            if not 0 <= token_id < self.info.vocab_size:
                raise ValueError(f"token id {token_id} is outside the model's vocabulary of {self.info.vocab_size}")
        return await self._in_thread(lambda: str(tokenizer.decode(list(token_ids))))

    def _tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"the model in {self.info.model} has no tokenizer; give the prompt as token ids")
        return self.tokenizer

    async def _in_thread(self, function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)

    # ------------------------------------------------------------------ questions

    async def stats(self) -> EngineStats:
        """Counters and gauges of engine and scheduler at one moment.

        Raises:
            EngineDeadError: there is no engine to ask; so do the questions below.
        """
        stats: EngineStats = await self._ask("stats")
        return stats

    async def explain(self, request_id: str) -> RequestExplanation:
        """Where a request stands, why it waits, for whom and since when.

        Raises:
            UnknownRequest: no such request, or it has ended.
        """
        explanation: RequestExplanation = await self._ask("explain", request_id)
        return explanation

    async def explain_all(self) -> list[RequestExplanation]:
        """The same of every request that has not ended, in the order of their arrival here."""
        explanations: list[RequestExplanation] = await self._ask("explain_all")
        return explanations

    async def reset_prefix_cache(self, *, preempt_running: bool = False) -> None:
        """Forget every cached prefix. What runs goes on with the KV it has, or computes it anew (`preempt_running`)."""
        await self._ask("reset_prefix_cache", preempt_running)

    async def set_max_num_active_seqs(self, limit: int | None) -> int:
        """Change how many requests may run at once; None: `max_num_seqs`. Returns how many that are now.

        Raises:
            ConfigError: the limit is out of range.
        """
        seats: int = await self._ask("set_max_num_active_seqs", limit)
        return seats

    async def pause(self, mode: PauseChoice, clear_cache: bool) -> None:
        """Start nothing until `resume`, and return when nothing is computed any more; see `Engine.pause`.

        Raises:
            ResumedError: the engine was resumed before.
        """
        await self._ask("pause", (mode, clear_cache))

    async def resume(self) -> None:
        """Go on after a pause; nothing happens if there was none."""
        await self._ask("resume")

    async def is_paused(self) -> bool:
        """Whether it was paused, and not resumed since."""
        paused: bool = await self._ask("is_paused")
        return paused

    async def _ask(self, question: Question, argument: Any = None) -> Any:
        self.check_health()
        key = next(self._keys)
        self._questions[key] = future = asyncio.get_running_loop().create_future()
        self._send(Ask(key, question, argument))
        try:
            return await future
        finally:
            self._questions.pop(key, None)

    # ------------------------------------------------------------------ health and end

    @property
    def is_alive(self) -> bool:
        """Whether requests will be answered."""
        return self._death is None

    @property
    def death(self) -> str | None:
        """Why the engine is no more; None while it is, or after a shutdown that was asked for."""
        return None if self._is_stopping else self._death

    def check_health(self) -> None:
        """Raises EngineDeadError: the engine process has ended."""
        if self._death is not None:
            raise EngineDeadError(self._death)

    def check_takes_requests(self) -> None:
        """Raises EngineStalledError: the engine process reads nothing, and much waits for it already."""
        if self._transport is not None and self._transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            raise EngineStalledError("the engine takes nothing in at the moment; try again later")

    async def shutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """End the engine and its process. May be called again, in any state.

        Args:
            drain: let requests that were sent before finish and refuse new ones; False: abort them, so that their
                streams end with finish_reason "abort".
            timeout: seconds that draining may take, after which the rest is aborted; None: as long as it takes.
        """
        self._is_stopping = True
        if drain:
            self._send(Stop(drain=True))
            with suppress(TimeoutError):
                await asyncio.wait_for(self.dead.wait(), timeout)
        if self._death is None:
            self._send(Stop(drain=False))
            try:
                await asyncio.wait_for(self.dead.wait(), SECONDS_TO_DIE)
            except TimeoutError:
                logger.warning("the engine process does not end by itself; killing it")
        await self._kill()

    def kill(self) -> None:
        """End the engine process at once; whoever waits in `shutdown` need not wait longer."""
        self._is_stopping = True
        self._process.kill()

    async def _kill(self) -> None:
        """Make sure that the process is gone."""
        if self._transport is not None:
            self._transport.close()
        if self._process.poll() is None and self._death is None:
            self._process.kill()
        loop = asyncio.get_running_loop()
        try:
            await asyncio.wait_for(loop.run_in_executor(None, self._process.wait), SECONDS_TO_DIE)
        except TimeoutError:
            self._process.kill()
            await loop.run_in_executor(None, self._process.wait)
        self._tokenizing.shutdown(wait=False)

    # ------------------------------------------------------------------ the connection

    def _send(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def _handle(self, message: object) -> None:
        match message:
            case News():
                self._take(message)
            case Answer(key, value, error):
                question = self._questions.pop(key, None)
                if question is not None and not question.done():
                    if error is None:
                        question.set_result(value)
                    else:
                        question.set_exception(error)
            case EngineInfo():
                self.info = message
                self._ready.set()
            case Failed():
                self._failed = message
                self._ready.set()

    def _take(self, news: News) -> None:
        streams = self._streams
        for key in news.accepted:
            if (stream := streams.get(key)) is not None:
                stream.accept()
        for key, delta in news.deltas:
            if (stream := streams.get(key)) is not None:
                stream.put(delta)
                if delta.finish_reason is not None:
                    del streams[key]
                    if self.on_end is not None:
                        self.on_end(stream.request, delta, stream.num_output_tokens)
        for key, error in news.errors:
            if (stream := streams.pop(key, None)) is not None:
                stream.fail(error)
        if news.steps and self.on_steps is not None:
            self.on_steps(news.steps)

    async def _note_death(self) -> None:
        """The connection is gone, so the process is or will be."""
        loop = asyncio.get_running_loop()
        try:
            code = await asyncio.wait_for(loop.run_in_executor(None, self._process.wait), SECONDS_TO_DIE)
        except TimeoutError:
            self._process.kill()
            code = await loop.run_in_executor(None, self._process.wait)
        self._death = "the engine has been shut down" if self._is_stopping else _describe_end(code)
        if self.death is not None:
            logger.critical("%s", self.death)
        for stream in list(self._streams.values()):
            stream.fail(EngineDeadError(self._death))
        self._streams.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineDeadError(self._death))
        self._ready.set()
        self.dead.set()


class _Connection(asyncio.Protocol):
    """Bytes from the engine process become messages."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unpacker = Unpacker()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        for message in self._unpacker.feed(data):
            self._client._handle(message)

    def connection_lost(self, error: Exception | None) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._client._note_death())


def _start_error(failed: Failed) -> Exception:
    return ModelLoadError(failed.message) if failed.is_usage_error else EngineStartError(failed.message)


def _describe_end(code: int) -> str:
    if code >= 0:
        return f"the engine process ended with exit code {code}; its log says why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; out of memory, perhaps" if -code == signal.SIGKILL and os.name == "posix" else ""
    return f"the engine process was ended by signal {name}{hint}"
