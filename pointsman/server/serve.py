"""The API process from start to exit.

start      bind the port, find the model (and download it), try the chat template, start the engine process, load the
           tokenizer, warm up both processes, listen, log what is served
serving    until a signal comes or all engines are dead; a dead engine may be restarted (`service/fleet.py`)
leaving    SIGTERM or SIGINT: for `drain_delay` the server is not ready but still accepts requests, so that load
           balancers can notice. From here on, a second signal ends the server at once.
drain      new requests get 503, and open ones have up to `drain_timeout` to finish; the remaining ones then finish with
           finish_reason "abort". Exit code 0.
death      all engines are dead and none will be restarted: every open request gets an error. Exit code 1, so that a
           supervisor restarts the server.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pointsman.core.observe.side_file import WhenFull
from pointsman.engine.errors import first_line
from pointsman.engine.interruption import exit_on_signals
from pointsman.engine.kernels_ahead import kernels_compiled_ahead
from pointsman.engine.machine import wait_briefly
from pointsman.engine.sources.find import find_model
from pointsman.engine.stats import DEFAULT_INTERVAL
from pointsman.engine.text.tokenizer import (
    PLAIN_CHAT_TEMPLATE,
    check_model_directory,
    encode,
    model_directory,
    read_tokenizer,
    render_chat,
)
from pointsman.files import shown
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient, EngineStartError
from pointsman.server.service.fleet import DEFAULT_RESUMES, EngineFleet, start_fleet
from pointsman.server.service.heartbeat import DEFAULT_TIMEOUT
from pointsman.server.shares import share_out
from pointsman.server.startup import startup_lines
from pointsman.server.wire.connections import KEEP_ALIVE, Connections, raise_file_limit, size_for

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1

SECONDS_TO_REPORT = 3.0
"""Seconds in which clients can receive the error after the engine's death, or the last events after a drain."""
DEFAULT_RESTARTS = 5
"""Number of consecutive failures after which one of several engines is not restarted."""
NUM_ACCEPTED = 8
"""Number of connections accepted in one iteration of the event loop. libuv accepts one for each listening socket, so
there are 8 such sockets. With one socket, a client that connects after a thousand other clients waits for a thousand
iterations."""
LISTEN_BACKLOG = 2048
EXAMPLE_CHAT = ({"role": "user", "content": "Hello"},)
"""A conversation that every chat template can render."""


class AddressError(ValueError):
    """The server cannot listen on the configured address."""


def run(
    options: Mapping[str, Any],
    config: ServerConfig,
    *,
    record: str | None = None,
    record_when_full: WhenFull = "stop",
    log_stats_interval: float | None = DEFAULT_INTERVAL,
    max_step_retries: int = 0,
    warm_up: bool = True,
    data_parallel_size: int = 1,
    max_engine_restarts: int | None = None,
    max_resumes: int = DEFAULT_RESUMES,
    engine_timeout: float = DEFAULT_TIMEOUT,
) -> int:
    """Serve until a signal or the last engine's death; returns the exit code.

    Args:
        options: keyword arguments of `Engine`, for all engines together (`shares.py`).
        config: settings of the server.
        record: a file for the first engine's recording; further engines record to FILE.1, FILE.2, ...
        record_when_full: what happens to the recording when the disk is full.
        log_stats_interval: seconds between lines of statistics in the log; None: no such lines.
        max_step_retries: maximum number of consecutive retries of a failed step.
        warm_up: whether the engine runs test requests of every kind before a client's request is accepted.
        data_parallel_size: the number of engines.
        max_engine_restarts: number of consecutive failures after which an engine is not restarted. None: 0 for a single
            engine, whose death ends the server, otherwise `DEFAULT_RESTARTS`.
        max_resumes: maximum number of times that a request is resumed, in another or the restarted engine, after its
            engine died.
        engine_timeout: seconds without a sign of life after which an engine counts as dead; 0: never.

    Raises:
        ValueError: the model cannot be run, a knob is out of range, the machine is too small for the number of engines,
          the chat template cannot be used, or the server cannot listen on the address.
    """
    num_connections = size_for(config.max_connections, raise_file_limit())
    if max_engine_restarts is None:
        max_engine_restarts = 0 if data_parallel_size == 1 else DEFAULT_RESTARTS

    import uvloop

    connections = Connections(num_connections, per_address=config.max_connections_per_address)
    wait_briefly()  # for the engine process, which inherits it: idle threads should sleep, not spin
    with listening(config) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        # The event loop handles signals later, but does not run yet.
        with exit_on_signals({signal.SIGINT: EXIT_OK, signal.SIGTERM: EXIT_OK}):
            name, options = options.get("model"), with_model_found(options)
        shares = share_out(options, data_parallel_size, record)
        server = _Serving(options, config, sock, connections, str(name or "demo"))

        def start_engine(index: int, num_restarts: int, tokenizer: Any = None) -> Awaitable[EngineClient]:
            share = shares[index]
            return EngineClient.start(
                share.options,
                record=share.recording_path(num_restarts),
                record_when_full=record_when_full,
                must_record=not num_restarts,
                log_stats_interval=log_stats_interval,
                max_step_retries=max_step_retries,
                warm_up=warm_up,
                name=share.name,
                cores=share.cores,
                tokenizer=tokenizer,
                timeout=engine_timeout,
            )

        start = partial(start_fleet, start_engine, len(shares), max_engine_restarts, max_resumes)
        try:
            with kernels_compiled_ahead(options):
                return runner.run(server.serve(start, warm_up=warm_up))
        except EngineStartError as error:
            logger.critical("%s", error)
            return EXIT_FAILED


def with_model_found(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of `Engine`, with the argument `model` replaced by the model's path. A model with a hub
    name is downloaded first.

    Raises:
        ModelLoadError: there is no such model, or it cannot run here.
    """
    own = dict(options)
    model, revision, download_dir = (own.pop(name, None) for name in ("model", "revision", "download_dir"))
    path = find_model(model, revision=revision, download_dir=download_dir, check=_read_settings)
    if path.is_dir():
        check_model_directory(path)
    return {**own, "model": model if path == model_directory(model) else str(path)}


def _read_settings(path: Path) -> None:
    """Refuse a model that cannot run here. The imports in this function take seconds, so it is called only before a
    download."""
    from pointsman.engine.model.loader import read_settings

    read_settings(path)


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket bound to the server's address. It is bound before the model is loaded, so that errors are reported
    early.

    Raises:
        AddressError: the address is in use, or not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AddressError(
                f"cannot listen on {config.host} port {config.port}: {why}; give another --port, or --host"
            ) from None
        yield sock


def check_chat_template(template: str, model: str | Path | None) -> None:
    """Refuse a chat template that is empty, does not compile, or fails on a user's message. Only the model's tokenizer
    is read, as templates use its special tokens.

    Args:
        template: chat template that replaces the tokenizer's own.
        model: the model, as for `Engine`. A model without a tokenizer renders no template: its prompts are token ids.

    Raises:
        ValueError: the template cannot be used.
        ModelLoadError: the tokenizer cannot be read.
    """
    if not template.strip():
        raise ValueError("chat_template is empty; give a Jinja template, or leave it out for the model's own")
    tokenizer = read_tokenizer(model_directory(model))
    if tokenizer is None:
        return
    try:
        render_chat(tokenizer, EXAMPLE_CHAT, {"chat_template": template, "add_generation_prompt": True})
    except ValueError as error:
        cause = error.__cause__ or error  # Jinja's syntax errors have a line number
        line = getattr(cause, "lineno", None)
        where = "" if line is None else f" (line {line})"
        raise ValueError(
            f"chat_template cannot be used: {first_line(cause)}{where}; correct it, or leave it out for the model's own"
        ) from error


def warm_tokenizer(tokenizer: Any, template: str | None) -> None:
    """Render a conversation, and encode and decode its text. Templates and tokenizers prepare themselves at first use,
    which thus delays no request. A failure is only logged; each request that needs the tokenizer gets the error.

    Args:
        tokenizer: the API process's tokenizer.
        template: chat template that replaces the tokenizer's own.
    """
    options = {"chat_template": template or tokenizer.chat_template or PLAIN_CHAT_TEMPLATE}
    try:
        text = render_chat(tokenizer, EXAMPLE_CHAT, {**options, "add_generation_prompt": True})
        tokenizer.decode(encode(tokenizer, text))
    except Exception as error:
        logger.info(
            "a test conversation failed; requests that use the tokenizer or the chat template may fail too: %s",
            first_line(error),
        )


def url_of(sock: socket.socket, host: str) -> str:
    """The URL that the server listens at."""
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Serving:
    """One run of the server, from the start of the engines to the exit code."""

    def __init__(
        self,
        options: Mapping[str, Any],
        config: ServerConfig,
        sock: socket.socket,
        connections: Connections,
        model_name: str,
    ) -> None:
        self._model_name = model_name
        self._client: EngineFleet | None = None
        self._options = options
        self._config = config
        self._sock = sock
        self._connections = connections
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    async def serve(self, start: Callable[[], Awaitable[EngineFleet]], *, warm_up: bool) -> int:
        loop = asyncio.get_running_loop()
        signals = (signal.SIGINT, signal.SIGTERM)
        for number in signals:
            loop.add_signal_handler(number, self._on_signal)
        try:
            return await self._start_and_serve(start, warm_up)
        finally:
            for number in signals:  # uvloop's event loop keeps its handlers after it is closed
                loop.remove_signal_handler(number)

    async def _start_and_serve(self, start: Callable[[], Awaitable[EngineFleet]], warm_up: bool) -> int:
        starting = asyncio.get_running_loop().create_task(self._start(start, warm_up))
        # The import takes a second, while the engine loads the model.
        importing = asyncio.get_running_loop().run_in_executor(None, import_module, "pointsman.server.api.app")
        await self._wait_for_first(starting, self._stop.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return EXIT_OK
        client = self._client = starting.result()
        try:
            create_app = (await importing).create_app
            return await self._serve(client, create_app(client, self._config, self._connections))
        finally:
            await client.shutdown()

    async def _start(self, start: Callable[[], Awaitable[EngineFleet]], warm_up: bool) -> EngineFleet:
        template = self._config.chat_template
        if template is not None:  # reports a broken template before the model is loaded
            await asyncio.to_thread(check_chat_template, template, self._options.get("model"))
        logger.info("loading the model %s", shown(self._model_name, 200))
        client = await start()
        if warm_up and client.tokenizer is not None:
            try:
                await asyncio.to_thread(warm_tokenizer, client.tokenizer, template)
            except BaseException:  # a signal
                await client.shutdown()
                raise
        return client

    async def _serve(self, client: EngineFleet, app: FastAPI) -> int:
        import uvicorn

        from pointsman.server.wire.http import LimitedHttpProtocol, SeldomFilter

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:  # this module handles them
                yield

        protocol: Any = partial(LimitedHttpProtocol, connections=self._connections, reserve_app=app.state.reserve_app)
        server = Server(
            uvicorn.Config(
                app,
                loop="none",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=LISTEN_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=math.ceil(SECONDS_TO_REPORT),
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        for name in ("uvicorn.error", Connections.__module__):
            logging.getLogger(name).addFilter(SeldomFilter())
        # All current objects stay alive, so later collections skip them: examining them all blocks the loop for 0.15 s.
        gc.collect()
        gc.freeze()
        listeners = [self._sock, *(self._sock.dup() for _ in range(NUM_ACCEPTED - 1))]
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=listeners))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        infos = [engine.info for engine in client.engines]
        for line in startup_lines(infos, self._config, url_of(self._sock, self._config.host)):
            logger.info("%s", line)
        await self._wait_for_first(self._stop.wait(), client.dead.wait(), serving)
        # From now on a connection ends with its response, so that the client's next request goes to another server.
        server.config.encoded_headers.append((b"connection", b"close"))
        if self._config.drain_delay and not client.dead.is_set():
            app.state.gate.announce_shutdown()
            logger.info(
                "the server will shut down: /ready reports 503, but new requests are accepted for another %g s",
                self._config.drain_delay,
            )
            await self._wait_for_first(self._force.wait(), client.dead.wait(), timeout=self._config.drain_delay)
        app.state.gate.close()
        left = SECONDS_TO_REPORT
        if not client.dead.is_set():
            left = max(left, await self._drain(client, app))
        code = EXIT_OK if client.death is None else EXIT_FAILED
        await client.shutdown()
        await self._wait_for_first(app.state.gate.wait_empty(), self._force.wait(), timeout=SECONDS_TO_REPORT)
        # Complete responses may still be on their way to slow readers.
        server.config.timeout_graceful_shutdown = math.ceil(left)
        server.should_exit = True
        await self._wait_for_first(serving, self._force.wait(), timeout=left + SECONDS_TO_REPORT)
        server.force_exit = True
        await asyncio.wait([serving], timeout=SECONDS_TO_REPORT)
        return code

    async def _drain(self, client: EngineFleet, app: FastAPI) -> float:
        """Wait for open requests; returns the remaining seconds of `drain_timeout`."""
        started = time.monotonic()
        num_open = app.state.gate.num_open
        if num_open:
            logger.info(
                "finishing %d open requests, at most %g s; a second signal ends them now",
                num_open,
                self._config.drain_timeout,
            )
        await self._wait_for_first(
            app.state.gate.wait_empty(), self._force.wait(), client.dead.wait(), timeout=self._config.drain_timeout
        )
        if app.state.gate.num_open:
            logger.warning("%d requests did not finish in time and are aborted", app.state.gate.num_open)
        return max(0.0, self._config.drain_timeout - (time.monotonic() - started))

    def _on_signal(self) -> None:
        if not self._stop.is_set():
            self._stop.set()
        else:
            self._force.set()
            if self._client is not None:
                self._client.kill()

    @staticmethod
    async def _wait_for_first(*awaitables: Any, timeout: float | None = None) -> None:
        """Wait until one of the awaitables is done, at most `timeout` seconds. Then coroutines that are not done are
        cancelled; tasks continue."""
        tasks = [asyncio.ensure_future(one) for one in awaitables]
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task, one in zip(tasks, awaitables, strict=True):
            if task is not one:
                task.cancel()
