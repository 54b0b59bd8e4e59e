"""Engines on other machines: a launcher (such as Ray) runs the engine process, which connects to this process.

    listener = await EngineListener.open("10.0.0.1", launch, template)
    engine = await listener.start(0, 0)           # an `EngineClient` like any other
    ...
    async def launch(invitation) -> int:          # on the other machine: `return await host_engine(invitation, share)`

An engine lives as long as its connection is open and the call of `launch` that hosts the engine is running. When the
call ends, because the engine or its machine is gone, the connection is closed. When it is closed, the engine process
exits (`engine_process.py`). A machine that disappears silently is noticed after `SECONDS_OF_SILENCE`.

Engines get their numbers in the order in which they connect: each gets the lowest number whose engine has not connected
yet, regardless of the call that hosts the engine. So the numbers of living engines have no gaps, however often they are
replaced.

Messages are pickled, so bytes are read as messages only after the token of the invitation, which is valid once.
`launch` sends the token over its own network; a reader of that network could call an engine. Run this only where Ray or
a similar system may run: in a network of trusted machines.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import secrets
import signal
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from pointsman.engine.errors import first_line
from pointsman.server.service.engine_client import EngineClient, EngineStartError, start_process
from pointsman.server.service.heartbeat import DEFAULT_TIMEOUT
from pointsman.server.wire.messages import Start

logger = logging.getLogger(__name__)

TOKEN_BYTES = 32
MAX_HELLO_BYTES = 1 << 20
SECONDS_FOR_HELLO = 60.0
"""Maximum seconds from the start of a connection until its token is read. The token is sent immediately, but this
process may read it late."""
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_NEXT_HOST = 1.0
"""Seconds before a lost host is replaced, as the launcher may not know of the loss yet."""
SECONDS_OF_SILENCE = 15
"""Seconds after which TCP's keep-alive counts a silent machine as gone."""
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sdI")
"""The token, the sender's `time.monotonic`, and the length of the pickled engine options that follow."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """The address to which an engine process connects, and the token that it sends."""

    host: str
    port: int
    token: bytes


Launch = Callable[[Invitation], Awaitable[int]]
"""A function that hosts an engine somewhere (`host_engine`), and returns the engine's exit code when it has ended. If
cancelled, it ends the engine. It raises `HostLostError` if the host is gone."""


class HostLostError(EngineStartError):
    """The host of an engine is gone. If the engine had not connected yet, the launcher is asked for another host."""


class EngineListener:
    """Accepts connections of engines on other machines. Created by `open`; to be used in one event loop.

    Args:
        sock: a listening socket.
        launch: the launcher, which hosts an engine somewhere.
        template: the options of all engines; the host adds its own options, and the name gets the engine's number.
        timeout: seconds without a sign of life after which an engine counts as dead; 0: never.

    The number of open invitations equals the number of engines that are waited for.
    """

    def __init__(self, sock: socket.socket, launch: Launch, template: Start, timeout: float) -> None:
        self._sock = sock
        self._launch = launch
        self._template = template
        self._timeout = timeout
        self._invited: dict[bytes, asyncio.Future[int]] = {}  # by token: pending launcher calls not yet connected
        self._waited_for: dict[int, asyncio.Future[_Arrival]] = {}  # by number: engines that are waited for
        self._greeting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @classmethod
    async def open(cls, host: str, launch: Launch, template: Start, timeout: float = DEFAULT_TIMEOUT) -> EngineListener:
        """Listen on any free port of an address by which other machines reach this one.

        Raises:
            OSError: the address is not one of this machine.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.bind((host, 0))
            sock.listen(128)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
        return cls(sock, launch, template, timeout)

    async def close(self) -> None:
        """Accept no more connections. Connected engines continue."""
        tasks = [self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def start(self, index: int, num_restarts: int, tokenizer: Any = None) -> EngineClient:
        """Start an engine on another machine, as `StartEngine`. Waits as long as the launcher does.

        Raises:
            ValueError: the model cannot be run there, or a knob is out of range; the message says which.
            EngineStartError: no engine connected, or the engine ended before its model was loaded.
        """
        arriving = self._waited_for[index] = asyncio.get_running_loop().create_future()
        self._invite()
        try:
            arrival = await arriving
        except asyncio.CancelledError:
            self._waited_for.pop(index, None)
            if len(self._invited) > len(self._waited_for):
                self._invited.popitem()[1].cancel()
            if not arriving.cancelled() and arriving.exception() is None:  # it has just connected
                arriving.result().sock.close()
                arriving.result().hosting.cancel()
            raise
        start = replace(
            self._template,
            options={**self._template.options, **arrival.options},
            record=recording_path(self._template.record, index, num_restarts),
            must_record=not num_restarts,
            name=f"engine {index}",
            clock_offset=arrival.clock_offset,
        )
        process = RemoteProcess(index, arrival.hosting, arrival.sock)
        return await EngineClient.connect(process, arrival.sock, start, tokenizer, self._timeout)

    def _invite(self) -> None:
        """Ask the launcher for one more engine."""
        token = secrets.token_bytes(TOKEN_BYTES)
        host, port = self._sock.getsockname()[:2]
        hosting = self._invited[token] = asyncio.ensure_future(self._launch(Invitation(host, port, token)))
        hosting.add_done_callback(partial(self._note_end, token))

    def _note_end(self, token: bytes, hosting: asyncio.Future[int]) -> None:
        """After the end of a launcher call whose engine has not connected: replace the lost host, or report the
        failure."""
        if self._invited.pop(token, None) is None:
            return
        if not hosting.cancelled() and isinstance(hosting.exception(), HostLostError):
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS_TO_NEXT_HOST, self._invite_missing)
        else:
            arriving = self._next_waited_for()
            if arriving is not None:
                arriving.set_exception(_start_error(hosting))

    def _invite_missing(self) -> None:
        """Send another invitation in place of one whose host was lost, if an engine is still waited for."""
        if len(self._invited) < len(self._waited_for):
            self._invite()

    def _next_waited_for(self) -> asyncio.Future[_Arrival] | None:
        """Remove and return the future of the lowest number whose engine has not connected yet; None: no engine is
        waited for."""
        numbers = [index for index, arriving in self._waited_for.items() if not arriving.done()]
        return self._waited_for.pop(min(numbers)) if numbers else None

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # the connection failed, or too many files are open
                logger.warning("an engine's connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._greet(sock))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Accept a connection that sends a valid token; close every other connection."""
        taken = False
        try:
            sock.setblocking(False)
            async with asyncio.timeout(SECONDS_FOR_HELLO):
                token, sent_at, size = _HELLO.unpack(await _receive(sock, _HELLO.size))
                offset = time.monotonic() - sent_at
                if token not in self._invited or size > MAX_HELLO_BYTES:
                    logger.warning("closed a connection that sent no valid token of an engine")
                    return
                options = pickle.loads(await _receive(sock, size))
            hosting = self._invited.pop(token, None)
            if hosting is not None and (arriving := self._next_waited_for()) is not None:
                enable_keep_alive(sock)
                arriving.set_result(_Arrival(sock, offset, options, hosting))
                taken = True
        except (OSError, TimeoutError, EOFError) as error:
            logger.warning("closed a connection that does not come from an engine: %s", first_line(error))
        finally:
            if not taken:
                sock.close()


class _Arrival(NamedTuple):
    """An engine process that has connected."""

    sock: socket.socket
    clock_offset: float
    options: dict[str, Any]
    hosting: asyncio.Future[int]
    """The pending launcher call that hosts the engine; it lasts as long as the engine runs."""


class RemoteProcess:
    """An engine process on another machine, with the methods of `Process`.

    Args:
        index: the engine's number.
        hosting: the pending launcher call that hosts the engine; it returns the engine's exit code.
        sock: the connection, which is closed when that call ends.
    """

    def __init__(self, index: int, hosting: asyncio.Future[int], sock: socket.socket) -> None:
        self._index = index
        self._hosting = hosting
        self._sock = sock
        self._code: int | None = None
        hosting.add_done_callback(self._note_end)

    def poll(self) -> int | None:
        """The exit code of the process; None while it runs."""
        return self._code

    def kill(self) -> None:
        """End the process immediately; in the event loop's thread. It counts as ended even if its machine does not
        respond."""
        self._end(-signal.SIGKILL)
        self._hosting.cancel()

    def _note_end(self, hosting: asyncio.Future[int]) -> None:
        if hosting.cancelled():
            self._end(-signal.SIGKILL)
        elif (error := hosting.exception()) is not None:
            if self._code is None:
                logger.warning("the host of engine %d was lost: %s", self._index, first_line(error))
            self._end(-signal.SIGKILL)
        else:
            self._end(hosting.result())

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            with suppress(OSError):  # already closed
                self._sock.shutdown(socket.SHUT_RDWR)


async def host_engine(invitation: Invitation, options: dict[str, Any], cores: Sequence[int] | None = None) -> int:
    """Run an engine for the API process that sent the invitation. Returns its exit code: 0 after a `Stop` or when the
    API process is gone. If cancelled, kills the engine.

    Args:
        invitation: the invitation of an `EngineListener`.
        options: keyword arguments of `Engine` for this machine; they override those of the API process.
        cores: the only processors that the engine may run on, as for `start_process`; None: all.

    Raises:
        ConnectionError: the API process cannot be reached.
    """
    loop = asyncio.get_running_loop()
    address = (invitation.host, invitation.port)
    try:
        connected = await loop.run_in_executor(None, socket.create_connection, address, SECONDS_TO_CONNECT)
    except OSError as error:
        raise ConnectionError(
            f"cannot connect to the API process at {invitation.host} port {invitation.port}: {error}; the port "
            "is a random free one, so no firewall may block connections from this machine"
        ) from None
    with connected as sock:
        sock.settimeout(None)
        enable_keep_alive(sock)
        body = pickle.dumps(options)
        sock.sendall(_HELLO.pack(invitation.token, time.monotonic(), len(body)) + body)
        process = start_process(sock, cores)
    try:
        return await loop.run_in_executor(None, process.wait)
    finally:
        if process.poll() is None:
            process.kill()


def enable_keep_alive(sock: socket.socket) -> None:
    """Set a socket to send written bytes without delay, and to notice a lost peer within `SECONDS_OF_SILENCE`."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SECONDS_OF_SILENCE // 3),
        ("TCP_KEEPINTVL", SECONDS_OF_SILENCE // 3),
        ("TCP_KEEPCNT", 2),
        ("TCP_USER_TIMEOUT", 1000 * SECONDS_OF_SILENCE),
    ):
        if (option := getattr(socket, name, None)) is not None:  # not every system has all of them
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def recording_path(record: str | None, index: int, num_restarts: int) -> str | None:
    """The file of an engine's recording; each start of each engine has a file of its own."""
    if record is None:
        return None
    own = f"{record}.{index}" if index else record
    return f"{own}.restart-{num_restarts}" if num_restarts else own


async def _receive(sock: socket.socket, size: int) -> bytes:
    """Receive exactly `size` bytes.

    Raises:
        EOFError: the connection ended before `size` bytes had arrived.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise EOFError("the connection ended before its first message")
        data += part
    return bytes(data)


def _start_error(hosting: asyncio.Future[int]) -> Exception:
    """The error for a host that ended before its engine connected."""
    if hosting.cancelled():
        return EngineStartError("the host of the engine was ended")
    error = hosting.exception()
    if error is None:
        return EngineStartError(f"the engine process ended with exit code {hosting.result()}; its log says why")
    return error if isinstance(error, ValueError) else EngineStartError(first_line(error))
