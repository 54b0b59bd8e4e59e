"""HTTP: uvicorn's protocol on httptools, with limits on headers, overhead and ignored bytes of a connection.

- A request line and headers of more than `MAX_HEADER_BYTES`, or more than `MAX_HEADERS` headers, get 431.
- The overhead of a chunked body (sizes, extensions and trailers) is limited to `MAX_OVERHEAD_BYTES` and
  `MAX_OVERHEAD_PER_BYTE` times the body; more gets 400. Trailers are dropped.
- A response before the end of its request (401, 413, 431 and the like) ends the connection. Of the rest of the request,
  at most `MAX_IGNORED_BYTES` are read, for at most `connections.SECONDS_TO_WAIT[Wait.END]`.
- Limits on the number of connections and on their waiting times are in `connections.py`.
- Input that is not HTTP is logged at most once in `SECONDS_BETWEEN_WARNINGS`, with the number of cases.
- A pipelined request (sent before the last response is complete) is not read. The connection is closed after that
  response, and the client sends the request again on another connection, as HTTP/1.1 provides.

- A streamed response may be written without a task, see `can_write_now` and `write_now`.

uvicorn stops reading while a pipelined request waits, and would not notice that the client is gone. Here a connection
is read until it ends, and a request is aborted immediately when its client hangs up.
"""

from __future__ import annotations

import asyncio
import logging
import select
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pointsman.server.wire.connections import Connections, Place, Wait
from pointsman.server.wire.sse import WRITE_NOW

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEADER_BYTES = 64 * 1024
"""Maximum bytes of a request line and the headers together. The limit is checked before the API key."""
MAX_HEADERS = 256
"""Maximum number of headers of a request. Browsers and proxies send about 30; Apache allows 100."""
MAX_OVERHEAD_BYTES = 64 * 1024
MAX_OVERHEAD_PER_BYTE = 4
"""Maximum bytes of overhead per byte of the body. A chunk of two bytes has six bytes of overhead, a chunk of 8 KiB has
eight."""
MAX_IGNORED_BYTES = 4 * 1024 * 1024
"""Maximum bytes that are read and dropped before a connection is closed: the default of `max_request_bytes`."""

SECONDS_BETWEEN_WARNINGS = 10.0
"""Minimum seconds between equal warnings."""

_TOO_LARGE_STATUS = b"431 Request Header Fields Too Large"
_TOO_LARGE = b"the request line and headers are too large"
_TOO_MANY = b"the request has more than %d headers; send fewer" % MAX_HEADERS
_TOO_MUCH_OVERHEAD = b"the body's chunks are too small, or their extensions and trailers too large; send larger chunks"
_ENDING = b"the server is shutting down; try another one"
_NO_PLACE = b"all connections of the server are in use; try again in 1 s"


class SeldomFilter(logging.Filter):
    """Drops a warning shortly after an equal one, so that clients cannot fill the log.

    Args:
        seconds: minimum time between equal warnings.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: float = SECONDS_BETWEEN_WARNINGS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # by text: when the next is logged, number dropped

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; the number of dropped equal records is then added to its text."""
        if record.levelno != logging.WARNING:
            return True
        now, text = self._clock(), str(record.msg)
        next_at, num_dropped = self._seen.get(text, (now, 0))
        if now < next_at:
            self._seen[text] = (next_at, num_dropped + 1)
            return False
        self._seen[text] = (now + self._seconds, 0)
        if num_dropped:
            record.msg = f"{text} ({num_dropped} more since it was last said)"
        return True


class _Refused(Exception):
    """Raised in a callback of the HTTP parser to stop the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection of a client, with the limits that the module describes.

    Args:
        args: positional arguments of uvicorn's protocol.
        connections: all connections of the server.
        reserve_app: handles requests on reserve connections; None: the server's app handles them.
        kwargs: keyword arguments of uvicorn's protocol.
    """

    def __init__(
        self, *args: Any, connections: Connections, reserve_app: ASGI3Application | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.place: Place | None = None
        self._all = connections
        self._reserve_app = reserve_app
        self._is_in_headers = True
        self._is_whole = True  # whether no request is incomplete
        self._num_received = self._num_body = 0  # numbers of received bytes of the request, and of its body
        self._ignores_input = False  # whether further input is dropped
        self._is_refused = False  # whether `_refuse` wrote the last response
        self._num_ignored = 0

    # ------------------------------------------------------------------------------------------- called by the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called when a client has connected."""
        self._socket = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._output = Output(self._socket, self._close)
        super().connection_made(cast(asyncio.Transport, self._output))
        if not self._all.add(self, self.client[0] if self.client else ""):
            self._refuse(b"503 Service Unavailable", _NO_PLACE)

    def data_received(self, data: bytes) -> None:
        """Called with bytes from the client."""
        if self._ignores_input:
            self._count_ignored(len(data))
            return
        self._num_received += len(data)
        super().data_received(data)
        if not self._ignores_input:
            self._check_overhead()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection is closed, by either side."""
        self._all.remove(self)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Called when the buffer is full, as the client reads more slowly than the app writes."""
        super().pause_writing()
        self._all.wait(self, Wait.READER)

    def resume_writing(self) -> None:
        """Called when the client has read most of the buffer."""
        super().resume_writing()
        self._wait()

    def shutdown(self) -> None:
        """Called when the server shuts down: an incomplete request is not waited for."""
        if self._is_whole or self._is_in_headers or self.transport.is_closing() or self.cycle.response_started:
            super().shutdown()
        else:
            self._refuse(b"503 Service Unavailable", _ENDING)

    # ----------------------------------------------------------------------------------------- called by the parser

    def on_message_begin(self) -> None:
        """Called when a request begins."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._ignores_input = True
            self.cycle.keep_alive = False
            raise _Refused
        self._is_in_headers, self._is_whole = True, False
        self._num_body = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called with a header, or with a trailer after a chunked body; trailers are dropped."""
        if not self._is_in_headers:
            return
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(_TOO_LARGE_STATUS, _TOO_MANY)
            raise _Refused
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Called when a request's headers are complete."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._refuse(_TOO_LARGE_STATUS, _TOO_LARGE)
            raise _Refused
        self._is_in_headers = False
        is_ordinary = self._all.is_ordinary(self)
        self.app = self.config.loaded_app if is_ordinary or self._reserve_app is None else self._reserve_app
        super().on_headers_complete()
        # A response before the end of the request ends the connection; `on_message_complete` cancels this.
        self.cycle.default_headers = [*self.cycle.default_headers, CLOSE_HEADER]
        # The app's task begins in the next iteration of the loop, so the task sees this value.
        self.scope["extensions"] = {
            WRITE_NOW: {
                "can_write_now": partial(can_write_now, self.cycle),
                "write_now": partial(write_now, self.cycle),
            }
        }

    def on_body(self, body: bytes) -> None:
        """Called with a part of a request's body."""
        self._num_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Called when a request is complete."""
        self._is_whole = True
        if self._all.is_ordinary(self):
            self.cycle.default_headers = self.server_state.default_headers
        super().on_message_complete()

    # ------------------------------------------------------------------------------------------------ called by both

    def on_response_complete(self) -> None:
        """Called when a response is complete; some of its bytes may not be sent yet."""
        super().on_response_complete()
        self._num_received = 0
        self._wait()

    def send_400_response(self, msg: str) -> None:
        """Called when the parser has stopped: respond with the error 400, unless this class has stopped the parser."""
        if not self._ignores_input:  # otherwise this class stopped it, and a response is on its way
            self._is_refused = True
            super().send_400_response(msg)

    def has_input(self) -> bool:
        """Whether unread bytes, or the end of the input, have arrived."""
        poll = select.poll()
        poll.register(self._socket.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))

    def has_output(self) -> bool:
        """Whether written bytes are not sent yet."""
        return self._socket.get_write_buffer_size() > 0

    def drop(self) -> None:
        """Close the connection immediately; unsent bytes are lost."""
        self._ignores_input = True
        self._socket.abort()

    def _wait(self) -> None:
        """Report to `Connections` the event that the connection waits for now."""
        if self.transport.is_closing():
            return
        if self.flow.write_paused:
            wait = Wait.READER
        elif not self._is_whole:
            wait = Wait.HEADERS if self._is_in_headers else Wait.BODY
        elif self.cycle is not None and not self.cycle.response_complete:
            wait = Wait.NOTHING
        elif self._num_received:
            wait = Wait.HEADERS  # blank lines before a request
        else:
            wait = Wait.REQUEST
        self._all.wait(self, wait)

    def _check_overhead(self) -> None:
        """Refuse a request whose headers are too large, or whose chunked body has too much overhead."""
        overhead = self._num_received - self._num_body
        if self._is_in_headers:
            if overhead > MAX_HEADER_BYTES:
                self._refuse(_TOO_LARGE_STATUS, _TOO_LARGE)
        elif overhead > MAX_HEADER_BYTES + MAX_OVERHEAD_BYTES + MAX_OVERHEAD_PER_BYTE * self._num_body:
            if self.cycle.response_started:
                self.drop()
            else:
                self._refuse(b"400 Bad Request", _TOO_MUCH_OVERHEAD)

    def _refuse(self, status: bytes, message: bytes) -> None:
        """Respond in place of the app, notify the app that the client is gone, and end the connection."""
        self._ignores_input = self._is_refused = True
        head = b"HTTP/1.1 %s\r\ncontent-type: text/plain\r\nconnection: close\r\n" % status
        self._socket.write(head + b"content-length: %d\r\n\r\n%s" % (len(message), message))
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()

    def _close(self) -> None:
        """End the connection after the written bytes.

        If the client is still sending its request, further bytes are read and dropped for a while. Closing a connection
        with unread bytes makes TCP reset it, and the client might lose the response.
        """
        if self._socket.is_closing():
            return
        has_response = self._is_refused or (not self._is_in_headers and self.cycle.response_started)
        if self._is_whole or not has_response or self.transport.is_closing():
            self._all.wait(self, Wait.READER)  # with an empty buffer, the loop closes it in its next iteration
            self._socket.close()
            return
        self._ignores_input = True
        self._output.is_closing = _always_true
        self._socket.write_eof()
        self.flow.resume_reading()
        self._all.wait(self, Wait.END)

    def _count_ignored(self, num_bytes: int) -> None:
        self._num_ignored += num_bytes
        if self._num_ignored > MAX_IGNORED_BYTES:
            self.drop()


class Output:
    """The transport with a replaced `close`; uvicorn's protocol writes to it.

    Its attributes are the transport's own methods, so that a write costs no extra call.
    """

    __slots__ = ("close", "get_extra_info", "is_closing", "pause_reading", "resume_reading", "write")

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.close = close
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.write = transport.write


def _always_true() -> bool:
    return True


def can_write_now(cycle: RequestResponseCycle) -> bool:
    """Whether a part of a streamed response's body can be written without waiting: the headers have been sent, the end
    of the body has not, and the transport's buffer is not full.
    """
    return not (
        cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.chunked_encoding
        or cycle.scope["method"] == "HEAD"
        or cycle.transport.is_closing()
    )


def write_now(cycle: RequestResponseCycle, piece: bytes) -> None:
    """Write a non-empty part of a body directly, bypassing task and middleware; to be called only while `can_write_now`
    returns True."""
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
