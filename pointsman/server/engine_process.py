"""The engine process. `EngineClient` starts it as `python -m pointsman.server.engine_process SOCKET`.

    main thread       reads requests and questions of the API process
    engine's thread   runs the steps
                      and writes their outputs to the socket (`outbox.py`) until it is full
    writer's thread   writes while the socket is full

The process exits when the socket is closed, on `Stop`, or when the engine dies, so it does not outlive the API process.
Signals to the server as a whole (Ctrl-C, a supervisor's SIGTERM to all processes) are handled by the API process and
ignored here. Programs find this process by the module's name in its command line: the name is part of the interface.
"""

from __future__ import annotations

import io
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pointsman.core import SchedulerOutput
from pointsman.core.observe.side_file import BackgroundFile, SideFile, reason_of
from pointsman.core.recording import Recorder
from pointsman.engine.aio.engine_thread import Add as ThreadAdd
from pointsman.engine.aio.engine_thread import Call, EngineThread
from pointsman.engine.aio.engine_thread import Stop as ThreadStop
from pointsman.engine.engine import SMALLER_POOL, Engine
from pointsman.engine.errors import EngineDeadError, GrammarError, first_line
from pointsman.engine.grammar.process import GrammarServer
from pointsman.engine.machine import keep_freed_pages
from pointsman.engine.memory import explain_out_of_memory
from pointsman.engine.params.engine_args import with_prefill_gap
from pointsman.engine.warming import warm_up
from pointsman.server.answering import Host, answer
from pointsman.server.outbox import RemoteMailbox, RemotePort
from pointsman.server.wire.messages import (
    Abandon,
    Add,
    Answer,
    Ask,
    Beat,
    EngineInfo,
    EngineRequest,
    Failed,
    Start,
    StepNote,
    Stop,
    Unpacker,
    pack,
    portable,
)
from pointsman.web.live import LiveFilm

if TYPE_CHECKING:
    from pointsman.core import Request

logger = logging.getLogger(__name__)

LAST_WORDS = 5.0
"""Maximum seconds to wait until the last outputs have been sent to the API process."""
RECEIVE_BYTES = 1 << 18


class EngineProcess:
    """Passes requests and questions of the API process to an engine.

    Args:
        engine: the only engine of this process, with its model loaded.
        sock: socket to the API process.
        start: the first message of the API process.
    """

    def __init__(self, engine: Engine, sock: socket.socket, start: Start) -> None:
        self._engine = engine
        self._sock = sock
        self._info = describe(engine, str(start.options.get("model") or "demo"))
        self._port = RemotePort(sock)
        self._scheduler_time = 0.0
        self._num_generated_tokens = 0
        self._thread = EngineThread(
            engine,
            max_step_retries=start.max_step_retries,
            log_stats_interval=start.log_stats_interval,
            on_step=self._note_step,
            on_beat=self._note_beat,
        )
        live = LiveFilm(engine.scheduler)
        self._host = Host(engine, self._port.mailboxes, live, self._thread.pulse)

    def run(self, unpacker: Unpacker) -> int:
        """Serve until the engine or the API process ends; returns the exit code. `unpacker` has read the `Start` and
        may hold the beginning of the next message."""
        self._thread.start()
        self._thread.ended.add_done_callback(self._wake_up)
        self._port.outbox.put(self._info)
        while data := self._receive():
            for message in unpacker.feed(data):
                self._handle(message)
        self._thread.ask_to_stop()
        self._thread.join()
        self._port.ring()
        self._port.outbox.wait_until_clear(LAST_WORDS)
        return 0 if self._thread.cause is None else 1

    def _receive(self) -> bytes:
        try:
            return self._sock.recv(RECEIVE_BYTES)
        except OSError:  # the API process was killed
            return b""

    def _wake_up(self, _: Future[None]) -> None:
        """End the main thread's wait for messages, as the engine's thread has ended."""
        try:
            self._sock.shutdown(socket.SHUT_RD)
        except OSError:
            return

    # ------------------------------------------------------------------ messages

    def _handle(self, message: object) -> None:
        match message:
            case Add(requests):
                for key, request in requests:
                    self._add(key, request)
            case Abandon(key):
                mailbox = self._port.mailboxes.pop(key, None)
                if mailbox is not None:
                    self._thread.abandon(mailbox.request.request_id, mailbox)
            case Ask():
                self._ask(message)
            case Stop(drain):
                try:
                    self._thread.send(ThreadStop(drain))
                except EngineDeadError:
                    return

    def _add(self, key: int, wanted: EngineRequest) -> None:
        mailbox = RemoteMailbox(self._port, key, wanted)

        def add(engine: Engine) -> Request:
            request = engine.add_request(
                wanted.request_id,
                wanted.prompt_token_ids,
                wanted.params,
                arrival_time=wanted.arrival_time,
                priority=wanted.priority,
                tenant=wanted.tenant,
                ttft_target=wanted.ttft_target,
                retention=wanted.retention,
                cache_salt=wanted.cache_salt,
                deadline=wanted.deadline,
                eager_text=True,
                resumed=wanted.resumed,
            )
            if wanted.resumed is not None:
                mailbox.note_reported(engine.outputs.output_so_far(request))
            return request

        self._port.mailboxes[key] = mailbox
        try:
            self._thread.send(ThreadAdd(wanted.request_id, mailbox, add))
        except EngineDeadError as error:
            mailbox.fail(error)
            self._port.ring()

    def _ask(self, message: Ask) -> None:
        future: Future[Any] = Future()
        future.add_done_callback(partial(self._answer, message.key))
        try:
            self._thread.send(Call(lambda _: answer(self._host, message.question), future))
        except EngineDeadError as error:
            future.set_exception(error)

    def _answer(self, key: int, future: Future[Any]) -> None:
        error = future.exception()
        value = None if error is not None else future.result()
        if isinstance(value, Future):  # the answer takes further steps
            value.add_done_callback(partial(self._answer, key))
        else:
            self._port.outbox.put(Answer(key, value, None if error is None else portable(error)))

    # ------------------------------------------------------------------ in the engine's thread

    def _note_beat(self, patience: float) -> None:
        if patience or self._port.outbox.is_clear:  # beats do not queue up for a slow API process
            self._port.outbox.put(Beat(patience))

    def _note_step(self, output: SchedulerOutput) -> None:
        counters = self._engine.counters
        generated = counters.num_generated_tokens - self._num_generated_tokens
        seconds = counters.scheduler_time - self._scheduler_time
        self._num_generated_tokens, self._scheduler_time = counters.num_generated_tokens, counters.scheduler_time
        if output.num_rows:
            self._port.note_step(StepNote(output.total_num_scheduled_tokens, generated, seconds))


def describe(engine: Engine, model: str) -> EngineInfo:
    """The engine's description for the API process and its log; `model` is the operator's name for the model."""
    config, pool = engine.scheduler.config, engine.kv_pool
    return EngineInfo(
        pid=os.getpid(),
        model=model,
        max_model_len=engine.max_model_len,
        vocab_size=engine.loaded.vocab_size,
        num_parameters=engine.loaded.num_parameters,
        dtype=str(engine.loaded.dtype).removeprefix("torch."),
        kv_cache_dtype=str(pool.dtype).removeprefix("torch."),
        device=str(engine.loaded.model.device),
        attention=engine.attention.name,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        kv_cache_bytes=pool.num_bytes,
        kv_cache_tokens=config.num_full_length_tokens,
        full_length_requests=config.num_full_length,
        scheduler=config.to_dict(),
        generation_defaults=dict(engine.loaded.generation_defaults),
    )


def main(descriptor: int) -> int:
    """Serve the API process at the other end of the socket with this file descriptor; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(stream=sys.stderr, format="pointsman: %(message)s")
    logging.getLogger("pointsman").setLevel(logging.INFO)
    with socket.socket(fileno=descriptor) as sock, ExitStack() as files:
        unpacker = Unpacker()
        start = _first_message(sock, unpacker)
        if start is None:
            return 0
        if start.is_verbose:
            logging.getLogger("pointsman").setLevel(logging.DEBUG)
        if start.name:
            logging.basicConfig(stream=sys.stderr, format=f"pointsman: {start.name}: %(message)s", force=True)
        try:
            recorder = None if start.record is None else Recorder(open_recording(start.record, start, files))
            keep_freed_pages(one_heap=True)
            grammars = start_compiler(files) if start.warm_up else None
            arguments = with_prefill_gap(start.options)
            engine = Engine(recorder=recorder, clock=clock_with_offset(start.clock_offset), **arguments)
            engine.kv_pool.map_memory()
            if start.warm_up:
                with explain_out_of_memory("the warm-up", SMALLER_POOL):
                    warm_up(engine, grammars)
        except (ValueError, OSError) as error:  # the model, a knob, or the recording's file
            sock.sendall(pack(Failed(str(error), is_usage_error=True)))
            return 2
        except Exception as error:
            logger.exception("the engine could not be made")
            sock.sendall(pack(Failed(f"{type(error).__name__}: {first_line(error)}", is_usage_error=False)))
            return 1
        return EngineProcess(engine, sock, start).run(unpacker)


def open_recording(path: str, start: Start, closing: ExitStack) -> SideFile:
    """Open the file of the scheduler's recording, and return the open file.

    Args:
        closing: callbacks for the end of this process; this function adds one that writes and closes the file.

    Raises:
        OSError: the file cannot be written, and `start` requires a recording.
    """
    try:
        file = BackgroundFile.create(path, when_full=start.record_when_full)
    except OSError as error:
        if start.must_record:
            raise
        ended = SideFile(io.StringIO(), path)
        ended.end_early(reason_of(error))
        return ended
    closing.callback(file.close)
    return file


def clock_with_offset(offset: float) -> Callable[[], float]:
    """Returns a function that reads the API process's clock, which is ahead of this machine's clock by `offset`
    seconds."""
    return (lambda: time.monotonic() + offset) if offset else time.monotonic


def start_compiler(closing: ExitStack) -> GrammarServer | None:
    """Start the process that compiles grammars, and return it. It imports its libraries while the model is loaded.
    None: xgrammar is not installed, or the process cannot be started.

    Args:
        closing: callbacks for the end of this process; this function adds one that ends the compiling process.
    """
    if find_spec("xgrammar") is None:
        return None
    try:
        server = GrammarServer()
    except GrammarError:  # reported when a request needs a grammar
        return None
    closing.callback(server.close)
    return server


def _first_message(sock: socket.socket, unpacker: Unpacker) -> Start | None:
    while data := sock.recv(RECEIVE_BYTES):
        for message in unpacker.feed(data):
            if not isinstance(message, Start):
                raise TypeError(
                    f"the first message of the API process is a {type(message).__name__}; it must be a Start"
                )
            return message  # the API process sends nothing more before the reply
    return None


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    with suppress(OSError, ValueError):  # stderr is full, or its reader has gone
        sys.stderr.flush()
    os._exit(code)  # threads of libraries are not waited for
