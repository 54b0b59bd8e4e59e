"""How much a request may send, tried on an app that would say yes to everybody."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pointsman.server.api.guards import BodyLimitMiddleware, StrictRequest
from pointsman.server.wire.errors import ApiError, ErrorAnswers

ANSWER = ErrorAnswers(lambda _: None)
App = Callable[[Scope, Receive, Send], Awaitable[None]]


async def reads_all(scope: Scope, receive: Receive, send: Send) -> None:
    size = 0
    while True:
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(size).encode()})


def call(
    app: App, *, path: str = "/v1/models", headers: Sequence[tuple[bytes, bytes]] = (), body: Sequence[bytes] = (b"",)
) -> list[Message]:
    """The messages that an app sends in answer to a request whose body comes in these pieces."""
    sent: list[Message] = []
    pieces = list(body)

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers)}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]  # a coroutine
    return sent


# ------------------------------------------------------------------------------------------------- size


def limited(limit: int) -> App:
    return BodyLimitMiddleware(reads_all, limit, ANSWER)


def test_a_body_of_the_limit_is_read() -> None:
    assert call(limited(6), body=[b"abc", b"def"])[1]["body"] == b"6"


def test_a_told_length_is_refused_before_anything_is_read() -> None:
    pieces: list[bytes] = []
    for length in (b"7", b"1" * 100):
        sent = call(limited(6), headers=[(b"content-length", length)], body=pieces)
        assert sent[0]["status"] == 413


def test_a_length_that_is_not_told_is_refused_while_it_is_read() -> None:
    with pytest.raises(ApiError) as caught:  # which the app answers
        call(limited(6), body=[b"abc", b"def", b"g", b"never read"])
    assert caught.value.status_code == 413 and "6 bytes" in caught.value.detail


def test_a_wrong_length_does_not_help() -> None:
    with pytest.raises(ApiError):
        call(limited(6), headers=[(b"content-length", b"3")], body=[b"abc", b"defg"])


# ------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("body", [b"[" + b"[]," * 300_000 + b"0]", b"[" + b"[]," * 300_000 + b"!]"])
def test_no_collector_runs_while_a_body_is_parsed(body: bytes) -> None:
    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    collections: list[str] = []

    def note(phase: str, _: dict[str, int]) -> None:
        collections.append(phase)

    request = StrictRequest({"type": "http", "method": "POST", "headers": []}, receive)
    gc.callbacks.append(note)
    try:
        with suppress(ApiError):
            asyncio.run(request.json())
    finally:
        gc.callbacks.remove(note)
    assert len(collections) < 50 and gc.isenabled()
