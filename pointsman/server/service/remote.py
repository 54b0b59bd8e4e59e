"""Engines on other machines: something that runs programs there is asked for one, and its process connects to here.

    listener = await EngineListener.open("10.0.0.1", launch, template)
    engine = await listener.start(0, 0)           # an `EngineClient` like any other
    ...
    async def launch(invitation) -> int:          # on the other machine: `return await host_engine(invitation, share)`

An engine lives as long as two things do: the connection, and the call of `launch` that hosts it. When the call ends,
because the engine has ended or because the other machine has, the connection is closed; when the connection is closed,
the engine process exits (`engine_process.py`). A machine that vanishes without a word is noticed after
`SECONDS_OF_SILENCE`.

Which engine comes first is for the machines to decide: an engine that connects has the lowest number for which one is
waited for, whichever call hosts it. So the numbers of those that live have no gaps, however often they are replaced.

Messages are pickled, so bytes are read as messages only behind the token of the invitation, which is valid once. It
travels as `launch` sends it; who can read that network could call an engine. Run it where Ray or a similar system runs:
in a network of trusted machines.
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
"""From a connection to its token, which comes at once; this process may be slow to read it."""
SECONDS_TO_CONNECT = 10.0
SECONDS_TO_NEXT_HOST = 1.0
"""Before another host is asked for in place of one that is gone: whatever chooses it may not know yet."""
SECONDS_OF_SILENCE = 15
"""After which a machine that answers nothing counts as gone, by TCP's own probes."""
_HELLO = struct.Struct(f"!{TOKEN_BYTES}sdI")
"""The token, the sender's `time.monotonic`, and the number of bytes that follow: pickled options of the engine."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """What the process of an engine needs to connect."""

    host: str
    port: int
    token: bytes


Launch = Callable[[Invitation], Awaitable[int]]
"""Hosts an engine somewhere (`host_engine`); returns its exit code when it has ended. Cancelled, it ends it. Raises
`HostLostError` where what would have hosted it is gone."""


class HostLostError(EngineStartError):
    """What hosts an engine, or would have, is gone. Before its engine has connected, another host is asked for."""


class EngineListener:
    """Where engines of other machines connect to. Made by `open`; one event loop owns it.

    Args:
        sock: listens.
        launch: hosts an engine somewhere.
        template: what to make; the host adds options of its own, and the engine's number is in its name.
        timeout: seconds without a sign of life after which an engine counts as dead; 0: never.

    There are as many invitations that no engine has accepted as engines that are waited for.
    """

    def __init__(self, sock: socket.socket, launch: Launch, template: Start, timeout: float) -> None:
        self._sock = sock
        self._launch = launch
        self._template = template
        self._timeout = timeout
        self._invited: dict[bytes, asyncio.Future[int]] = {}  # the calls that will host an engine, by token
        self._waited_for: dict[int, asyncio.Future[_Arrival]] = {}  # by the engine's number
        self._greeting: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    @classmethod
    async def open(cls, host: str, launch: Launch, template: Start, timeout: float = DEFAULT_TIMEOUT) -> EngineListener:
        """Listen on any free port of an address of this machine, which other machines reach it by.

        Raises:
            OSError: it is no address of this machine.
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
        """Accept no more connections. Engines that are connected are not touched."""
        tasks = [self._accepting, *self._greeting]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._sock.close()

    async def start(self, index: int, num_restarts: int, tokenizer: Any = None) -> EngineClient:
        """As `StartEngine`: an engine that runs somewhere else. Waits as long as the launcher does.

        Raises:
            ValueError: the model cannot be run there, or a knob is out of range; the message says which.
            EngineStartError: no engine came, or it ended before its model was loaded.
        """
        arriving = self._waited_for[index] = asyncio.get_running_loop().create_future()
        self._invite()
        try:
            arrival = await arriving
        except asyncio.CancelledError:
            self._waited_for.pop(index, None)
            if len(self._invited) > len(self._waited_for):
                self._invited.popitem()[1].cancel()
            if not arriving.cancelled() and arriving.exception() is None:  # it has just come
                arriving.result().sock.close()
                arriving.result().hosting.cancel()
            raise
        start = replace(
            self._template,
            options={**self._template.options, **arrival.options},
            record=numbered(self._template.record, index, num_restarts),
            must_record=not num_restarts,
            name=f"engine {index}",
            clock_offset=arrival.clock_offset,
        )
        process = RemoteProcess(index, arrival.hosting, arrival.sock)
        return await EngineClient.connect(process, arrival.sock, start, tokenizer, self._timeout)

    def _invite(self) -> None:
        """Have one more engine hosted."""
        token = secrets.token_bytes(TOKEN_BYTES)
        host, port = self._sock.getsockname()[:2]
        hosting = self._invited[token] = asyncio.ensure_future(self._launch(Invitation(host, port, token)))
        hosting.add_done_callback(partial(self._note_end, token))

    def _note_end(self, token: bytes, hosting: asyncio.Future[int]) -> None:
        """A call has ended that was to host an engine. If none has connected, none will."""
        if self._invited.pop(token, None) is None:
            return
        if not hosting.cancelled() and isinstance(hosting.exception(), HostLostError):
            loop = asyncio.get_running_loop()
            loop.call_later(SECONDS_TO_NEXT_HOST, self._invite_missing)
        else:
            arriving = self._next_waited_for()
            if arriving is not None:
                arriving.set_exception(_not_started(hosting))

    def _invite_missing(self) -> None:
        """In place of an invitation that was lost with its host, unless it is not needed any more."""
        if len(self._invited) < len(self._waited_for):
            self._invite()

    def _next_waited_for(self) -> asyncio.Future[_Arrival] | None:
        """The engine of the lowest number that is waited for, which is not waited for any more; None: there is none."""
        numbers = [index for index, arriving in self._waited_for.items() if not arriving.done()]
        return self._waited_for.pop(min(numbers)) if numbers else None

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # of this connection, or no file is free
                logger.warning("an engine's connection could not be accepted: %s", error)
                await asyncio.sleep(0.1)
                continue
            task = loop.create_task(self._greet(sock))
            self._greeting.add(task)
            task.add_done_callback(self._greeting.discard)

    async def _greet(self, sock: socket.socket) -> None:
        """Take in a connection that shows a token; close every other."""
        taken = False
        try:
            sock.setblocking(False)
            async with asyncio.timeout(SECONDS_FOR_HELLO):
                token, sent_at, size = _HELLO.unpack(await _receive(sock, _HELLO.size))
                offset = time.monotonic() - sent_at
                if token not in self._invited or size > MAX_HELLO_BYTES:
                    logger.warning("a connection without the token of an engine was closed")
                    return
                options = pickle.loads(await _receive(sock, size))
            hosting = self._invited.pop(token, None)
            if hosting is not None and (arriving := self._next_waited_for()) is not None:
                keep_watch(sock)
                arriving.set_result(_Arrival(sock, offset, options, hosting))
                taken = True
        except (OSError, TimeoutError, EOFError) as error:
            logger.warning("a connection that was no engine's was closed: %s", first_line(error))
        finally:
            if not taken:
                sock.close()


class _Arrival(NamedTuple):
    """An engine process that has connected."""

    sock: socket.socket
    clock_offset: float
    options: dict[str, Any]
    hosting: asyncio.Future[int]
    """The call that hosts it."""


class RemoteProcess:
    """An engine process on another machine, as `EngineClient` needs it.

    Args:
        index: the engine's number.
        hosting: the call that hosts it, which returns its exit code.
        sock: the connection, which is closed when the call ends.
    """

    def __init__(self, index: int, hosting: asyncio.Future[int], sock: socket.socket) -> None:
        self._index = index
        self._hosting = hosting
        self._sock = sock
        self._code: int | None = None
        hosting.add_done_callback(self._note_end)

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._code

    def kill(self) -> None:
        """End it at once; in the event loop's thread. It counts as ended, whatever the other machine does."""
        self._end(-signal.SIGKILL)
        self._hosting.cancel()

    def _note_end(self, hosting: asyncio.Future[int]) -> None:
        if hosting.cancelled():
            self._end(-signal.SIGKILL)
        elif (error := hosting.exception()) is not None:
            if self._code is None:
                logger.warning("the host of engine %d is gone: %s", self._index, first_line(error))
            self._end(-signal.SIGKILL)
        else:
            self._end(hosting.result())

    def _end(self, code: int) -> None:
        if self._code is None:
            self._code = code
            with suppress(OSError):  # it is closed
                self._sock.shutdown(socket.SHUT_RDWR)


async def host_engine(invitation: Invitation, options: dict[str, Any], cores: Sequence[int] | None = None) -> int:
    """Run an engine for the API process that sent the invitation; returns its exit code, 0 after a `Stop` or when the
    API process is gone. Cancelled, it kills the engine.

    Args:
        invitation: from `EngineListener`.
        options: keyword arguments of `Engine` that are of this machine, over those of the API process.
        cores: as for `start_process`.

    Raises:
        ConnectionError: the API process cannot be reached.
    """
    loop = asyncio.get_running_loop()
    address = (invitation.host, invitation.port)
    try:
        connected = await loop.run_in_executor(None, socket.create_connection, address, SECONDS_TO_CONNECT)
    except OSError as error:
        raise ConnectionError(
            f"cannot connect to the API process at {invitation.host} port {invitation.port}: {error}; engines connect "
            "to any port there, so let the machines reach each other"
        ) from None
    with connected as sock:
        sock.settimeout(None)
        keep_watch(sock)
        body = pickle.dumps(options)
        sock.sendall(_HELLO.pack(invitation.token, time.monotonic(), len(body)) + body)
        process = start_process(sock, cores)
    try:
        return await loop.run_in_executor(None, process.wait)
    finally:
        if process.poll() is None:
            process.kill()


def keep_watch(sock: socket.socket) -> None:
    """Send what is written at once, and notice within `SECONDS_OF_SILENCE` that the other machine is gone."""
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


def numbered(record: str | None, index: int, num_restarts: int) -> str | None:
    """A file for the recording of an engine: none replaces another's."""
    if record is None:
        return None
    own = f"{record}.{index}" if index else record
    return f"{own}.restart-{num_restarts}" if num_restarts else own


async def _receive(sock: socket.socket, size: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: the connection ended before.
    """
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        part = await loop.sock_recv(sock, size - len(data))
        if not part:
            raise EOFError("it ended before its first message")
        data += part
    return bytes(data)


def _not_started(hosting: asyncio.Future[int]) -> Exception:
    """The error for a host that ended before its engine connected."""
    if hosting.cancelled():
        return EngineStartError("the host of the engine was ended")
    error = hosting.exception()
    if error is None:
        return EngineStartError(f"the engine process ended with exit code {hosting.result()}; its log says why")
    return error if isinstance(error, ValueError) else EngineStartError(first_line(error))
