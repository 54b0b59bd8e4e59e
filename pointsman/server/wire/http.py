"""HTTP as this server speaks it: uvicorn's protocol on httptools, with limits on what a client can hold or send.

- A request line and headers of more than `MAX_HEADER_BYTES` get 431, and the connection is closed.
- A request that takes more than `SECONDS_TO_SEND` to arrive, body included, closes the connection.
- Of what is no HTTP the log says so once in `SECONDS_BETWEEN_WARNINGS`, with how often it happened.
- A further request before the response to the last (pipelining) is not read. The connection is closed behind that
  response, and the client sends the request again on another, as HTTP/1.1 provides.

- A streamed response may be written without a task, see `has_room` and `write`.

uvicorn stops reading while a pipelined request waits, and would not notice that the client is gone. Here a connection
is read until its end, and a client that hangs up stops its request at once.
"""

from __future__ import annotations

import logging
import time
from asyncio import TimerHandle
from collections.abc import Callable
from functools import partial
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from pointsman.server.wire.sse import WRITE_NOW

MAX_HEADER_BYTES = 64 * 1024
"""Of a request line and its headers together, before any API key is looked at."""
SECONDS_TO_SEND = 60.0
"""From a request's first byte to its last."""

SECONDS_BETWEEN_WARNINGS = 10.0
"""That say the same."""

_TOO_LARGE = b"the request line and headers are too large"


class SeldomFilter(logging.Filter):
    """Lets a warning through if none like it was for a while: clients must not fill the log.

    Args:
        seconds: at least, between two of them.
        clock: seconds.
    """

    def __init__(self, seconds: float = SECONDS_BETWEEN_WARNINGS, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._clock = clock
        self._seen: dict[str, tuple[float, int]] = {}  # by text: when the next may come, and how many did not

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged. It then says how many were not."""
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
    """Stops the parser."""


class LimitedHttpProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_bytes = 0
        self._is_in_headers = True
        self._ignores_input = False  # nothing more is read of what the client sends
        self._send_timer: TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Bytes from the client."""
        if self._ignores_input:
            return
        if self._send_timer is None and (self._is_in_headers or self.cycle is None or self.cycle.response_complete):
            self._send_timer = self.loop.call_later(SECONDS_TO_SEND, self._give_up)
        super().data_received(data)
        if self._is_in_headers:  # a name, or a value, may be incomplete
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES and not self._ignores_input:
                self._refuse_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed, by either side."""
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """A request begins."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._ignores_input = True
            self.cycle.keep_alive = False
            raise _Refused
        self._is_in_headers = True
        self._header_bytes = 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """A request's headers are complete."""
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADER_BYTES:
            self._refuse_headers()
            raise _Refused
        self._is_in_headers = False
        super().on_headers_complete()
        # The app's task begins in the next turn of the loop, and finds this.
        self.scope["extensions"] = {
            WRITE_NOW: {"has_room": partial(has_room, self.cycle), "write": partial(write, self.cycle)}
        }

    def on_message_complete(self) -> None:
        """A request is complete."""
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """The parser has stopped."""
        if not self._ignores_input:  # otherwise this class stopped it, and a response is on its way
            self._stop_timer()
            super().send_400_response(msg)

    def _refuse_headers(self) -> None:
        self._ignores_input = True
        self._stop_timer()
        head = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n%s" % (len(_TOO_LARGE), _TOO_LARGE))
        self.transport.close()

    def _give_up(self) -> None:
        self._send_timer = None
        self._ignores_input = True
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None


def has_room(cycle: RequestResponseCycle) -> bool:
    """Whether a piece of the body of a streamed response can be written now, as `send` would if it need not wait: its
    headers have been sent, its end has not, and the client reads as fast.
    """
    return not (
        cycle.flow.write_paused
        or cycle.disconnected
        or cycle.response_complete
        or not cycle.chunked_encoding
        or cycle.scope["method"] == "HEAD"
        or cycle.transport.is_closing()
    )


def write(cycle: RequestResponseCycle, piece: bytes) -> None:
    """Write a piece, not empty, for which there is room: no task and none of the app's layers are between."""
    cycle.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))
