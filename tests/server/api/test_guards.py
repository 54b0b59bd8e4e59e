"""Who may call, and with how much, tried on an app that would say yes to everybody."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pointsman.server.api.guards import ApiKeyMiddleware, BodyLimitMiddleware, StrictRequest
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


def guarded(*keys: str) -> App:
    return ApiKeyMiddleware(reads_all, keys, ANSWER)


def bearer(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", value)]


@pytest.mark.parametrize("value", [b"Bearer first", b"Bearer second", b"bearer second", b"Bearer  first "])
def test_any_of_the_keys_opens(value: bytes) -> None:
    assert call(guarded("first", "second"), headers=bearer(value))[0]["status"] == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"first",
        b"Bearer",
        b"Bearer ",
        b"Bearer firs",
        b"Bearer first2",
        b"Basic first",
        b"Bearer \xff\xfe",
        b"Bearer FIRST",
    ],
)
def test_nothing_else_opens(value: bytes) -> None:
    sent = call(guarded("first", "second"), headers=bearer(value))
    assert sent[0]["status"] == 401
    assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]


def test_no_header_does_not_open() -> None:
    assert call(guarded("first"))[0]["status"] == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_supervisors_need_no_key(path: str) -> None:
    assert call(guarded("first"), path=path)[0]["status"] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/completions",
        "/tokenize",
        "/v1/requests",
        "/docs",
        "/openapi.json",
        "/health/",
        "//health",
        "/HEALTH",
        "/health/../v1/models",
        "/reset_prefix_cache",
        "/pause",
        "/resume",
        "/is_paused",
        "/max_num_active_seqs",
    ],
)
def test_everything_else_needs_one(path: str) -> None:
    assert call(guarded("first"), path=path)[0]["status"] == 401


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
