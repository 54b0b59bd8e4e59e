"""How an answer leaves: server-sent events, or one body of JSON, as ASGI messages.

An event goes out in one write, and `EventStream.write` returns when the transport has taken it. So a slow reader holds
the transport's buffer and one delta, into which everything that comes meanwhile is merged. While the transport has
room (`has_room`), `write_now` writes without a task: the server's own protocol offers that to the app, see `http.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from starlette.types import Scope, Send

WRITE_NOW = "pointsman.write_now"
"""The extension of ASGI with which a protocol offers to write a piece of a body without waiting: with `write`, as long
as `has_room` says that it can."""

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects events
}


class EventStream:
    """Server-sent events to one client. Several tasks may write; each event goes out whole.

    Args:
        send: of ASGI.
        headers: further headers of the response.
        scope: of the request.
    """

    def __init__(self, send: Send, headers: Mapping[str, str], scope: Scope | None = None) -> None:
        self._send = send
        extensions = (scope or {}).get("extensions") or {}
        offered = extensions.get(WRITE_NOW, {"has_room": lambda: False, "write": None})
        self.has_room: Callable[[], bool] = offered["has_room"]
        """Whether events can be sent without waiting."""
        self.write_now: Callable[[bytes], None] = offered["write"]
        """Sends events, for which there is room."""
        self._headers = {**EVENT_HEADERS, **headers}
        self._lock = asyncio.Lock()

    async def open(self) -> None:
        """Send the headers."""
        await self._send({"type": "http.response.start", "status": 200, "headers": _raw(self._headers)})

    async def write(self, events: bytes) -> None:
        """Send events; returns when the transport has room for more."""
        async with self._lock:
            await self._send({"type": "http.response.body", "body": events, "more_body": True})

    async def close(self, last: bytes = b"") -> None:
        """Send the last events and the end."""
        await self._send({"type": "http.response.body", "body": last + DONE, "more_body": False})


async def send_json(send: Send, pieces: Sequence[bytes], headers: Mapping[str, str] | None = None) -> None:
    """Send an answer that is not streamed: its JSON, in pieces, of which the transport takes one when it has room."""
    facts = {**(headers or {}), "content-type": "application/json", "content-length": str(sum(map(len, pieces)))}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(facts)})
    last = len(pieces) - 1
    for number, piece in enumerate(pieces):
        await send({"type": "http.response.body", "body": piece, "more_body": number < last})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers in ASGI's form."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
