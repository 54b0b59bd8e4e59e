"""Sends responses as ASGI messages: server-sent events, or one body of JSON.

An event is sent in one write, and `EventStream.write` returns when the transport has taken it. So a slow reader costs
the memory of the transport's buffer and one delta, into which later deltas are merged. While the transport is not full
(`can_write_now`), `write_now` writes without a task. The server's own protocol offers both functions to the app, see
`http.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope, Send

WRITE_NOW = "pointsman.write_now"
"""Name of the ASGI extension by which a protocol offers to write a part of a body without waiting: `write_now` may be
called while `can_write_now` returns True."""

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # otherwise nginx buffers events
}


class EventStream:
    """Server-sent events to one client. Several tasks may write; each event is sent whole.

    Args:
        send: ASGI's `send`.
        headers: further headers of the response.
        scope: ASGI scope of the request, with the extension `WRITE_NOW` if the protocol offers it.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], scope: Scope | None = None) -> None:
        self._send = send
        extensions = (scope or {}).get("extensions") or {}
        offered = extensions.get(WRITE_NOW, {"can_write_now": lambda: False, "write_now": None})
        self.can_write_now: Callable[[], bool] = offered["can_write_now"]
        """Returns whether events can be written without waiting."""
        self.write_now: Callable[[bytes], None] = offered["write_now"]
        """Writes events without waiting; to be called only while `can_write_now` returns True."""
        self._headers = {**EVENT_HEADERS, **headers}
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Send the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _raw(self._headers)})

    async def write(self, events: bytes) -> None:
        """Send events; returns when the transport can accept further bytes."""
        async with self._lock:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self, last: bytes = b"") -> None:
        """Send the last events and the end of the body."""
        await self._send({"type": "http.response.body", "body": last + DONE, "more_body": False})


async def send_json(send: Send, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
    """Send a response that is not streamed: its JSON in pieces, each sent when the transport can take it."""
    facts = {**(headers or {}), "content-type": "application/json", "content-length": str(sum(map(len, pieces)))}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(facts)})
    last = len(pieces) - 1
    for number, piece in enumerate(pieces):
        await send({"type": "http.response.body", "body": piece, "more_body": number < last})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI expects them: pairs of bytes."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
