"""The API process from start to exit.

start      listen on the port, try the chat template, start the engine process, load the tokenizer, say what is served
serving    until a signal comes or the engine dies
drain      SIGTERM or SIGINT: new requests get 503, running ones finish, up to `drain_timeout`; then the rest ends
           with finish_reason "abort". Exit code 0. A second signal ends at once.
death      the engine process ended by itself: every open request gets an error, and the exit code is 1, so that a
           supervisor starts the server anew.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pointsman.engine.machine import wait_briefly
from pointsman.engine.stats import DEFAULT_INTERVAL
from pointsman.server.config import ServerConfig
from pointsman.server.engine_client import EngineClient, EngineStartError
from pointsman.server.prompts import check_chat_template
from pointsman.server.startup import startup_lines

if TYPE_CHECKING:
    from fastapi import FastAPI

logger = logging.getLogger(__name__)

EXIT_OK, EXIT_FAILED = 0, 1

SECONDS_TO_TELL = 3.0
"""How long clients have to receive the error after the engine died, and the ends after a drain."""
KEEP_ALIVE = 30
"""Seconds that an idle connection is kept."""
LISTEN_BACKLOG = 2048


class AddressError(ValueError):
    """The server cannot listen where it was told to."""


def run(
    options: Mapping[str, Any],
    config: ServerConfig,
    *,
    record: str | None = None,
    log_stats_interval: float | None = DEFAULT_INTERVAL,
    max_step_retries: int = 0,
) -> int:
    """Serve until a signal or the engine's death; the exit code.

    Args:
        options: keyword arguments of `Engine`.
        config: the server's own.
        record: a file for the scheduler's recording.
        log_stats_interval: seconds between lines of statistics; None: none.
        max_step_retries: how often in a row a failed step is tried again.

    Raises:
        ValueError: the model cannot be run, a knob is out of range, the chat template is none, or the address cannot be
            listened on.
    """
    import uvloop

    from pointsman.server.app import create_app

    wait_briefly()  # the engine process; this one needs the processor too
    with listening(config) as sock, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = _Serving(options, config, sock, create_app)
        try:
            return runner.run(server.serve(record, log_stats_interval, max_step_retries))
        except EngineStartError as error:
            logger.critical("%s", error)
            return EXIT_FAILED


@contextmanager
def listening(config: ServerConfig) -> Iterator[socket.socket]:
    """A socket bound to the server's address; taken before a model is loaded for nothing.

    Raises:
        AddressError: the address is taken, or none of this machine's.
    """
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((config.host, config.port))
        except (OSError, UnicodeError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise AddressError(f"cannot listen on {config.host} port {config.port}: {why}; give another") from None
        yield sock


def url_of(sock: socket.socket, host: str) -> str:
    """Where the server listens."""
    port = sock.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class _Serving:
    """One run of the server."""

    def __init__(
        self,
        options: Mapping[str, Any],
        config: ServerConfig,
        sock: socket.socket,
        create_app: Callable[[EngineClient, ServerConfig], FastAPI],
    ) -> None:
        self._create_app = create_app
        self._client: EngineClient | None = None
        self._options = options
        self._config = config
        self._sock = sock
        self._stop = asyncio.Event()
        self._force = asyncio.Event()

    async def serve(self, record: str | None, log_stats_interval: float | None, max_step_retries: int) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        starting = loop.create_task(self._start(record, log_stats_interval, max_step_retries))
        await self._first_of(starting, self._stop.wait())
        if not starting.done():
            starting.cancel()
            await asyncio.wait([starting])
            return EXIT_OK
        client = self._client = starting.result()
        try:
            return await self._serve(client, self._create_app(client, self._config))
        finally:
            await client.shutdown()

    async def _start(self, record: str | None, log_stats_interval: float | None, max_step_retries: int) -> EngineClient:
        template = self._config.chat_template
        if template is not None:  # one that is broken is told of before a model is loaded for nothing
            await asyncio.to_thread(check_chat_template, template, self._options.get("model"))
        return await EngineClient.start(
            self._options,
            record=record,
            log_stats_interval=log_stats_interval,
            max_step_retries=max_step_retries,
            chat_template=template,
        )

    async def _serve(self, client: EngineClient, app: FastAPI) -> int:
        import uvicorn

        from pointsman.server.http import LimitedHttpProtocol

        class Server(uvicorn.Server):
            @contextmanager
            def capture_signals(self) -> Iterator[None]:  # they are this module's to answer
                yield

        server = Server(
            uvicorn.Config(
                app,
                loop="none",
                http=LimitedHttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=LISTEN_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE,
                timeout_graceful_shutdown=math.ceil(SECONDS_TO_TELL),
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        serving = asyncio.get_running_loop().create_task(server.serve(sockets=[self._sock]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        for line in startup_lines(client.info, self._config, url_of(self._sock, self._config.host)):
            logger.info("%s", line)
        await self._first_of(self._stop.wait(), client.dead.wait(), serving)
        app.state.gate.close()
        left = SECONDS_TO_TELL
        if not client.dead.is_set():
            left = max(left, await self._drain(client, app))
        code = EXIT_OK if client.death is None else EXIT_FAILED
        await client.shutdown()
        await self._first_of(app.state.gate.wait_empty(), self._force.wait(), timeout=SECONDS_TO_TELL)
        # What is complete for this process may still be on its way to a slow reader.
        server.config.timeout_graceful_shutdown = math.ceil(left)
        server.should_exit = True
        await self._first_of(serving, self._force.wait(), timeout=left + SECONDS_TO_TELL)
        server.force_exit = True
        await asyncio.wait([serving], timeout=SECONDS_TO_TELL)
        return code

    async def _drain(self, client: EngineClient, app: FastAPI) -> float:
        """Wait for those inside; the seconds of `drain_timeout` that are left."""
        started = time.monotonic()
        num_open = app.state.gate.num_open
        if num_open:
            logger.info(
                "finishing %d open requests, at most %g s; a second signal ends them now",
                num_open,
                self._config.drain_timeout,
            )
        await self._first_of(
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
    async def _first_of(*awaitables: Any, timeout: float | None = None) -> None:
        """Wait for the first of them; coroutines among them are cancelled then, tasks are not."""
        tasks = [asyncio.ensure_future(one) for one in awaitables]
        await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task, one in zip(tasks, awaitables, strict=True):
            if task is not one:
                task.cancel()


def log_to_stderr() -> None:
    """What the server's log looks like, for its commands."""
    logging.basicConfig(stream=sys.stderr, format="pointsman: %(message)s")
    logging.getLogger("pointsman").setLevel(logging.INFO)
