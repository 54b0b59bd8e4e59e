"""Responses that are made while the client is watched: server-sent events, and bodies that take a while.

A `WatchedResponse` runs its work beside a task that waits for the client to hang up, and cancels it then; cancelling
closes the streams of the engine, which aborts their requests at the next step boundary. That costs two tasks per
request and nothing per token.

An event goes out in one write, and the next delta is read only when the transport has taken it. So a reader that is
slow or asleep holds the transport's buffer and one delta, in which everything that comes meanwhile is merged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Coroutine, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pointsman.server.wire.errors import ApiError

logger = logging.getLogger(__name__)

quote: Callable[[str], str] = encode_basestring_ascii
"""Text as JSON, everything outside ASCII escaped: some clients split lines at characters such as U+2028."""

DONE = b"data: [DONE]\n\n"
EVENT_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # or nginx collects events
}


class WatchedResponse(Response):
    """A response whose work ends when the client hangs up.

    Args:
        work: writes the whole response with the `send` it is given; errors before its first message become the error's
            own response.
    """

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._work(send))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, or as much as is done when the client hangs up.

    Args:
        receive: of ASGI; the request's body has been read.
        work: is cancelled when nobody waits for it.

    Raises:
        What the work raises.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_until_disconnected(receive))
    try:
        await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watcher.cancel()
        if not worker.done():
            worker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((worker,))
    if worker.cancelled():
        logger.debug("a client hung up before its answer was complete")
        return
    worker.result()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # pieces of a body that nobody asked for


class EventStream:
    """Server-sent events to one client. Several tasks may write; each event goes out whole.

    Args:
        send: of ASGI.
        headers: further ones of the response.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
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


def event(data: Mapping[str, Any]) -> bytes:
    """One event. All of it is ASCII, and no float in it is infinite."""
    return f"data: {json.dumps(data, allow_nan=False, separators=(',', ':'))}\n\n".encode("ascii")


def error_event(error: ApiError) -> bytes:
    """An error where the status has been sent already."""
    return event(error.body())


async def send_json(send: Send, body: Mapping[str, Any], headers: Mapping[str, str]) -> None:
    """A whole answer.

    Raises:
        ValueError: something in it is no JSON, such as a NaN; nothing has been sent.
    """
    data = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    facts = {**headers, "content-type": "application/json", "content-length": str(len(data))}
    await send({"type": "http.response.start", "status": 200, "headers": _raw(facts)})
    await send({"type": "http.response.body", "body": data, "more_body": False})


def _raw(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """Headers as ASGI wants them."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
