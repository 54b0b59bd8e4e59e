"""EngineClient: starts the engine process, sends it requests and questions, and notices its death.

    client = await EngineClient.start({"model": "demo"})
    stream = client.generate(EngineRequest("a", [5, 6, 7], SamplingParams()))
    await stream.start()                      # raises if the request can never run
    async for delta in stream:
        print(delta.text)
    await client.shutdown()

Everything here runs in one event loop. Messages of the engine process arrive in `receiver.py`. A process that gives no
sign of life for too long (`heartbeat.py`) counts as dead from then on, and is killed; nothing waits for its exit.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from pointsman.core.observe.side_file import WhenFull
from pointsman.engine.errors import EngineDeadError, EngineStalledError, ModelLoadError
from pointsman.engine.stats import DEFAULT_INTERVAL
from pointsman.engine.text.tokenizer import model_directory, read_tokenizer
from pointsman.server.service.heartbeat import DEFAULT_TIMEOUT, INTERVAL, Heartbeat
from pointsman.server.service.receiver import ClientStream, Receiver
from pointsman.server.wire.messages import (
    Abandon,
    Add,
    Answer,
    Ask,
    Beat,
    Delta,
    EngineInfo,
    EngineRequest,
    Failed,
    Start,
    Stop,
    pack,
)
from pointsman.server.wire.questions import AnswerT, Question, TakePulse

logger = logging.getLogger(__name__)

ENGINE_PROCESS = "pointsman.server.engine_process"
"""The module that the engine process runs. Programs find the process by this name in its command line."""
SECONDS_TO_DIE = 10.0
"""Time for the engine process to exit after `Stop`, without draining. Then it is killed, and this process waits as long
again until it has exited."""
SECONDS_BETWEEN_POLLS = 0.01
MAX_UNREAD_BYTES = 16 * 1024 * 1024
"""Maximum number of bytes that wait for an engine process that does not read; with more, requests are refused."""
MAX_SENT_TOGETHER = 64
"""Maximum number of requests in one message; the next message follows when the engine has queued them. Queuing a long
prompt takes 0.2 ms between two steps, so a thousand requests in one message would delay the tokens and requests of all
other clients."""


class EngineStartError(RuntimeError):
    """The engine process ended before the model was loaded, for another reason than the options."""


class Process(Protocol):
    """An engine process; `subprocess.Popen` and `RemoteProcess` implement this."""

    def poll(self) -> int | None:
        """The exit code of the process; None while it runs."""

    def kill(self) -> None:
        """End the process immediately, as far as the system can."""


class NoProcess:
    """The process of an engine that was never started."""

    def poll(self) -> int | None:
        """0, the exit code of a process that has ended."""
        return 0

    def kill(self) -> None:
        """Does nothing, as there is no process."""


class EngineClient:
    """An engine in its own process. Created by `start`, or by `connect` for an existing process.

    Attributes:
        info: the engine's description of itself.
        tokenizer: the model's tokenizer, in this process; None if the model has none.
        receiver: the streams of unfinished requests; reports steps and finished requests.
        is_here: whether the engine process runs on this machine, as far as known.
        is_hung: whether the engine counts as dead because it gave no sign of life.
        dead: event, set when the engine process has ended, for any reason, or counts as dead.
        on_death: called with the streams of unfinished requests and the reason when the process has ended by itself;
            None: the streams fail.
        heartbeat: the heartbeat of the engine.
    """

    def __init__(self, process: Process, timeout: float = DEFAULT_TIMEOUT) -> None:
        self.info: EngineInfo = None  # type: ignore[assignment]  # `connect` returns no client without
        self.tokenizer: Any | None = None
        self.heartbeat = Heartbeat(timeout)
        self.receiver = Receiver(self._handle, self._on_close, self.heartbeat)
        self.is_here = True
        self.is_hung = False
        self.dead = asyncio.Event()
        self.on_death: Callable[[list[ClientStream], str], None] | None = None
        self._process = process
        self._name = ""
        self._keys = count()
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._ending: asyncio.Task[None] | None = None  # runs `_note_death` after the socket was closed
        self._gone = asyncio.Event()  # set when the process has exited, or cannot be ended
        self._pulse_key: int | None = None  # key of the question that the heartbeat waits for
        self._is_excused = False  # the engine is silent for too long, and a debugger is attached to it
        self._is_stopping = False
        self._death: str | None = None
        self._failed: Failed | None = None
        self._ready = asyncio.Event()

    @classmethod
    async def start(
        cls,
        options: Mapping[str, Any],
        *,
        record: str | None = None,
        record_when_full: WhenFull = "stop",
        must_record: bool = True,
        log_stats_interval: float | None = DEFAULT_INTERVAL,
        max_step_retries: int = 0,
        warm_up: bool = False,
        name: str = "",
        cores: Sequence[int] | None = None,
        tokenizer: Any | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> EngineClient:
        """Start an engine process and wait until its model is loaded, and warmed up if `warm_up` is set.

        Args:
            options: keyword arguments of `Engine`.
            record: file of the scheduler's recording; None: no recording.
            record_when_full: what happens to the recording when the disk is full.
            must_record: whether an engine whose recording cannot be opened does not start.
            log_stats_interval: seconds between lines of statistics in the log; None: no such lines.
            max_step_retries: maximum number of consecutive retries of a failed step.
            warm_up: whether the engine first runs test requests of every kind, so that no real request is slow.
            name: prefix of the engine's log lines, after the program's name.
            cores: the only processors that the process may run on, if the system can bind it to them; None: all.
            tokenizer: the model's tokenizer, if it was read before; None: it is read here.
            timeout: seconds without a sign of life after which the engine counts as dead, once its model is loaded; 0:
                never.

        Raises:
            ValueError: the model cannot be run, or a knob is out of range; the message says which.
            EngineStartError: the process ended for another reason.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            process = start_process(theirs, cores)
        start = Start(
            dict(options),
            record,
            log_stats_interval,
            max_step_retries,
            warm_up,
            name,
            record_when_full=record_when_full,
            must_record=must_record,
            is_verbose=logging.getLogger("pointsman").isEnabledFor(logging.DEBUG),
        )
        return await cls.connect(process, ours, start, tokenizer, timeout)

    @classmethod
    async def connect(
        cls,
        process: Process,
        sock: socket.socket,
        start: Start,
        tokenizer: Any | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> EngineClient:
        """Create an engine in an existing process, and wait until its model is loaded.

        Args:
            process: the process, started by `start_process` here or on another machine; ended if this call fails.
            sock: socket connected to the process; the API process has sent nothing yet.
            start: the engine's options.
            tokenizer: the model's tokenizer, if it was read before; None: it is read here.
            timeout: seconds without a sign of life after which the engine counts as dead; 0: never.

        Raises:
            ValueError, EngineStartError: as `start` raises them.
        """
        client = cls(process, timeout)
        client._name = start.name
        try:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            client.is_here = sock.family == socket.AF_UNIX
            create_connection = loop.create_unix_connection if client.is_here else loop.create_connection
            client._transport, _ = await create_connection(lambda: client.receiver, sock=sock)
            client._send(start)
            if tokenizer is None:
                directory = model_directory(start.options.get("model"))
                tokenizer = await loop.run_in_executor(None, read_tokenizer, directory)
            client.tokenizer = tokenizer
            await client._ready.wait()
            if client._failed is not None:
                raise _start_error(client._failed)
            if client._death is not None:
                raise EngineStartError(client._death)
        except BaseException:
            await client._kill()
            raise
        return client

    @classmethod
    def absent(cls, other: EngineClient) -> EngineClient:
        """A placeholder for an engine that is not started yet, with the description of `other`. It counts as dead."""
        client = cls(NoProcess())
        client.info, client.tokenizer, client.is_here = other.info, other.tokenizer, other.is_here
        client._death = "the engine has not been started yet"
        client.dead.set()
        client._gone.set()
        return client

    # ------------------------------------------------------------------ requests

    def generate(self, request: EngineRequest) -> ClientStream:
        """The stream of a request's deltas, for a reader in this event loop. The request is sent by `submit`, by
        `await stream.start()`, or when the stream is first read.
        """
        return ClientStream(request, self.submit, self.abandon)

    async def queue(self, streams: Sequence[ClientStream]) -> None:
        """Send the requests of streams, in order, and return when all are queued (and their grammars compiled).

        Raises:
            ValueError: one request can never run; the other requests remain queued until their streams are closed.
            EngineDeadError: the engine has died or is shutting down.
            EngineStalledError: the engine process does not read its socket.
        """
        await queue_in_turns(streams, self.submit)

    def submit(self, streams: Sequence[ClientStream]) -> None:
        """Send the requests of unsent streams in one message. They are queued in this order, and objects that they
        share (a prompt's tokens, biases, a grammar) are sent once.

        Raises:
            EngineDeadError: the engine process has ended.
            EngineStalledError: the engine process does not read its socket.
        """
        self.check_health()
        self.check_takes_requests()
        self.send(streams)

    def send(self, streams: Sequence[ClientStream]) -> None:
        """As `submit`, but without checking that the engine runs and reads its socket. If the engine has died
        unnoticed, `_mark_dead` handles these streams like all streams of the engine."""
        for stream in streams:
            stream.note_sent(next(self._keys))
            self.receiver.streams[stream.key] = stream
        self._send(Add([(stream.key, stream.request) for stream in streams]))

    def abandon(self, stream: ClientStream) -> None:
        """Abort the request of a stream that is no longer read. No effect if it was sent elsewhere or has finished."""
        if self.receiver.streams.get(stream.key) is stream:  # keys are unique within one engine only
            del self.receiver.streams[stream.key]
            self._send(Abandon(stream.key))
            self.receiver.report_end(stream, Delta(finish_reason="abort"))

    # ------------------------------------------------------------------ questions

    async def ask(self, question: Question[AnswerT]) -> AnswerT:
        """The engine's answer to a question.

        Raises:
            EngineDeadError: the engine process has ended.
            EngineStalledError: the engine has given no sign of life for `heartbeat.STALLED_AFTER` seconds.
            Exception: as the question's class documents.
        """
        self.check_health()
        self.check_answers()
        key = next(self._keys)
        future: asyncio.Future[AnswerT] = asyncio.get_running_loop().create_future()
        self._questions[key] = future
        self._send(Ask(key, question))
        try:
            return await future
        finally:
            self._questions.pop(key, None)

    def tell(self, question: Question[None]) -> None:
        """Send a command without waiting for an answer, for callers that cannot wait. If the engine is dead, nothing is
        sent."""
        self._send(Ask(next(self._keys), question))

    # ------------------------------------------------------------------ health and end

    @property
    def is_alive(self) -> bool:
        """Whether the engine process runs and does not count as dead."""
        return self._death is None

    @property
    def is_slow(self) -> bool:
        """Whether the engine is slow as `heartbeat.py` defines it, so that other engines should get new requests."""
        return self.heartbeat.is_slow

    @property
    def takes_requests(self) -> bool:
        """Whether the engine process runs, and reads requests from the socket."""
        transport = self._transport
        return self._death is None and not (
            transport is not None and transport.get_write_buffer_size() > MAX_UNREAD_BYTES
        )

    @property
    def death(self) -> str | None:
        """The reason why the engine process ended by itself; None while the process runs, or after `shutdown`."""
        return None if self._is_stopping else self._death

    def check_health(self) -> None:
        """Raises EngineDeadError: the engine process has ended."""
        if self._death is not None:
            raise EngineDeadError(self._death)

    def check_takes_requests(self) -> None:
        """Raises EngineStalledError: the engine process does not read, and `MAX_UNREAD_BYTES` wait for it."""
        if self._death is None and not self.takes_requests:
            raise EngineStalledError("the engine reads no requests at the moment; try again later")

    def check_answers(self) -> None:
        """Raises EngineStalledError: the engine is stalled, so that no question should be sent."""
        if self._death is None and self.heartbeat.is_stalled:
            raise EngineStalledError(
                f"{self._shown_name} has given no sign of life for {self._silence_text()}: it is in a long step, or "
                "stuck; try again later"
            )

    @property
    def _shown_name(self) -> str:
        name = self._name or "the engine"
        return f"{name} (process {self.info.pid})" if self.info else name

    def _silence_text(self) -> str:
        silence = self.heartbeat.seconds_of_silence
        since = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(time.time() - silence))
        return f"{silence:.0f} s, since {since}"

    async def shutdown(self, drain: bool = False, timeout: float | None = None) -> None:
        """End the engine process. May be called repeatedly, in any state.

        Args:
            drain: let sent requests finish and refuse new ones; False: abort sent requests, so that their streams end
                with finish_reason "abort".
            timeout: seconds that draining may take, after which the remaining requests are aborted; None: no limit.
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
        """End the engine process immediately; a running `shutdown` then returns."""
        self._is_stopping = True
        self._process.kill()

    async def _kill(self) -> None:
        """Kill the process, and wait until it has exited. The wait ends early if the process cannot be ended."""
        is_ours = self._process.poll() is None and self._death is None
        self._is_stopping = self._is_stopping or is_ours
        if self._transport is not None:
            self._transport.abort()
        if is_ours:
            self._process.kill()
        if self._transport is None:
            await self._exit_code()
        else:
            await self._gone.wait()

    async def wait_gone(self) -> None:
        """Wait until the process of a dead engine has exited, so that its memory and GPU are free. The wait ends early
        if the process cannot be ended."""
        await self._gone.wait()

    async def _exit_code(self) -> int | None:
        """Wait until the process has exited, and kill it if it does not exit in time. Returns the exit code; None: the
        process cannot be ended."""
        for kills in (True, False):
            limit = time.monotonic() + SECONDS_TO_DIE
            while (code := self._process.poll()) is None and time.monotonic() < limit:
                await asyncio.sleep(SECONDS_BETWEEN_POLLS)
            if code is not None:
                return code
            if kills:
                self._process.kill()
        logger.error("%s was killed, but its process still runs and keeps its memory", self._shown_name)
        return None

    # ------------------------------------------------------------------ the connection

    def _send(self, message: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(message))

    def _handle(self, message: Answer | Beat | EngineInfo | Failed) -> None:
        match message:
            case Answer(key, value) if key == self._pulse_key:
                self._pulse_key = None
                self.heartbeat.note_answer(value)
            case Answer(key, value, error):
                question = self._questions.pop(key, None)
                if question is not None and not question.done():
                    if error is None:
                        question.set_result(value)
                    else:
                        question.set_exception(error)
            case Beat(patience):
                self.heartbeat.note_sign_of_life(patience)
            case EngineInfo():
                self.info = message
                self._ready.set()
                self._check_heartbeat()
            case Failed():
                self._failed = message
                self._ready.set()

    def _on_close(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._note_death())
        self._ending.add_done_callback(lambda _: self._gone.set())

    async def _note_death(self) -> None:
        """After the end of the connection: wait until the process has exited, and mark the engine as dead."""
        code = await self._exit_code()
        if self._death is None:
            why = _describe_end(code)
            if not self._is_stopping:
                named = f"{self._name}, process {self.info.pid}," if self._name and self.info else "the engine process"
                logger.critical("%s %s", named, why)
            self._mark_dead(f"the engine process {why}")

    def _check_heartbeat(self) -> None:
        """Check the heartbeat, ask the engine for a sign of life, and schedule the next check after `INTERVAL`."""
        if self._death is not None:
            return
        if self.heartbeat.is_late and not self._is_debugged():
            self._end_hung()
            return
        asyncio.get_running_loop().call_later(INTERVAL, self._check_heartbeat)
        if self.heartbeat.start_question():
            self._pulse_key = next(self._keys)
            self._send(Ask(self._pulse_key, TakePulse()))

    def _is_debugged(self) -> bool:
        """Whether a silent engine may continue beyond the time limit, because a debugger is attached to it."""
        was_excused, self._is_excused = self._is_excused, self.is_here and is_traced(self.info.pid)
        if self._is_excused and not was_excused:
            logger.warning(
                "%s has given no sign of life for %s; a debugger is attached to it, so it is not killed",
                self._shown_name,
                self._silence_text(),
            )
        return self._is_excused

    def _end_hung(self) -> None:
        """Kill the process of an engine that was silent for too long; the engine counts as dead from now on."""
        self.is_hung = True
        why = (
            f"{self._shown_name} has given no sign of life for {self._silence_text()} (the limit is "
            f"{self.heartbeat.limit:.0f} s; --engine-timeout sets it): it hangs, and is ended"
        )
        logger.critical("%s", why)
        self._process.kill()
        if self._transport is not None:
            self._transport.abort()
        self._mark_dead(why)

    def _mark_dead(self, why: str) -> None:
        """Mark the engine as dead; called once. Unanswered questions fail. `on_death` gets the streams, so that a fleet
        resumes their requests. Without `on_death`, or at shutdown, the streams fail too."""
        self._death = "the engine has been shut down" if self._is_stopping else why
        orphans = self.receiver.take_all()
        why = self.receiver.last_words or self._death
        if self.on_death is not None and not self._is_stopping:
            self.on_death(orphans, why)
        else:
            for stream in orphans:
                stream.fail(EngineDeadError(why))
        for question in self._questions.values():
            if not question.done():
                question.set_exception(EngineDeadError(self._death))
        self._ready.set()
        self.dead.set()


def is_traced(pid: int) -> bool:
    """Whether a debugger or strace is attached to a process of this machine; False if the system does not show that."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and int(line.split()[1]) for line in status.splitlines())


def start_process(sock: socket.socket, cores: Sequence[int] | None = None) -> subprocess.Popen[bytes]:
    """Start an engine process, which creates its engine when it receives a `Start`.

    Args:
        sock: the engine process's end of the connection to the API process; the caller closes its own copy.
        cores: the only processors that the process may run on, if the system can bind it to them; None: all.
    """
    command = [sys.executable, "-m", ENGINE_PROCESS, str(sock.fileno())]
    process = subprocess.Popen(command, pass_fds=(sock.fileno(),), stdin=subprocess.DEVNULL)
    if cores is not None and hasattr(os, "sched_setaffinity"):
        with suppress(ProcessLookupError):  # the process has ended; the closed socket will show that
            os.sched_setaffinity(process.pid, cores)  # before its second thread starts: threads inherit it
    return process


async def queue_in_turns(streams: Sequence[ClientStream], submit: Callable[[Sequence[ClientStream]], None]) -> None:
    """Send the requests of streams with `submit`, in order, at most `MAX_SENT_TOGETHER` in one message; return when all
    are queued."""
    for first in range(0, len(streams), MAX_SENT_TOGETHER):
        together = streams[first : first + MAX_SENT_TOGETHER]
        submit(together)
        for stream in together:
            await stream.start()


def _start_error(failed: Failed) -> Exception:
    return ModelLoadError(failed.message) if failed.is_usage_error else EngineStartError(failed.message)


def _describe_end(code: int | None) -> str:
    if code is None:
        return "has closed its connection and does not end"
    if code >= 0:
        return f"ended with exit code {code}; its log says why"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = "; out of memory, perhaps" if -code == signal.SIGKILL and os.name == "posix" else ""
    return f"was ended by signal {name}{hint}"
