"""Who may call, and with how much, tried on an app that would say yes to everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from pointsman.server.api.guards import ApiKeyMiddleware
from pointsman.server.wire.errors import ErrorAnswers

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
