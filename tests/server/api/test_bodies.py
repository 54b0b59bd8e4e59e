"""Bodies: limits on the size of one body and of all together, and strict JSON."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any

import fastapi.routing
import pytest
from fastapi import APIRouter, FastAPI, Header
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Message, Receive, Scope, Send

from pointsman.server.api import bodies
from pointsman.server.api.bodies import (
    FREE_BYTES,
    MAX_CONTAINERS,
    MAX_TEXTS,
    BodyBudget,
    BodyLimitMiddleware,
    HeldBody,
    StrictRequest,
    StrictRoute,
    check_numbers,
)
from pointsman.server.wire.errors import ApiError, ErrorAnswers
from tests.server.limits import bodies_limit

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
    """The messages that an app sends in response to a request whose body arrives in the pieces `body`."""
    sent: list[Message] = []
    pieces = list(body)

    async def receive() -> Message:
        piece = pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(pieces)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": list(headers), "query_string": b""}
    asyncio.run(app(scope, receive, send))  # type: ignore[arg-type]  # a coroutine
    return sent


# ------------------------------------------------------------------------------------------------- size


def limited(limit: int) -> App:
    return middleware(reads_all, limit, BodyBudget(bodies_limit(1000)))


def middleware(app: Any, max_bytes: int, budget: BodyBudget) -> App:
    return BodyLimitMiddleware(app, max_bytes, 1000, budget, lambda _: "", ANSWER)


def held_body(budget: BodyBudget, tenant: str = "") -> HeldBody:
    return HeldBody(budget, lambda: tenant)


def test_body_of_exactly_the_maximum_size_is_read() -> None:
    assert call(limited(6), body=[b"abc", b"def"])[1]["body"] == b"6"


def test_content_length_over_limit_is_refused_unread() -> None:
    pieces: list[bytes] = []
    for length in (b"7", b"1" * 100):
        sent = call(limited(6), headers=[(b"content-length", length)], body=pieces)
        assert sent[0]["status"] == 413


def test_chunked_body_over_limit_is_refused_while_read() -> None:
    with pytest.raises(ApiError) as caught:  # which the app answers
        call(limited(6), body=[b"abc", b"def", b"g", b"never read"])
    assert caught.value.status_code == 413 and "6 bytes" in caught.value.detail


def test_false_content_length_does_not_evade_the_limit() -> None:
    with pytest.raises(ApiError):
        call(limited(6), headers=[(b"content-length", b"3")], body=[b"abc", b"defg"])


@pytest.fixture
def no_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "FREE_BYTES", 0)


@pytest.mark.usefixtures("no_free_bytes")
def test_bodies_of_all_requests_share_one_budget() -> None:
    budget = BodyBudget(bodies_limit(10))
    open_ones: list[int] = []

    async def reads_and_waits(scope: Any, receive: Any, send: Any) -> None:
        await reads_all(scope, receive, send)
        open_ones.append(budget.num_bytes)
        with pytest.raises(ApiError) as caught:
            held_body(budget).add(10 - budget.num_bytes + 1)
        assert caught.value.status_code == 429 and "the limit is 10" in caught.value.detail
        assert (caught.value.headers or {})["connection"] == "close"

    app = middleware(reads_and_waits, 8, budget)
    call(app, body=[b"abc", b"de"])
    assert open_ones == [5]
    assert budget.num_bytes == 0, "what was held is given back when the request is over"
    with pytest.raises(ApiError) as caught:
        call(middleware(reads_all, 100, budget), body=[b"12345678", b"9", b"10"])
    assert caught.value.status_code == 429
    assert budget.num_bytes == 0


def test_full_budget_still_accepts_small_bodies() -> None:
    """Otherwise a few large bodies that never end would block the requests of all clients."""
    budget = BodyBudget(bodies_limit(100_000))
    large = [held_body(budget) for _ in range(5)]
    with pytest.raises(ApiError):
        for held in large:
            held.add(FREE_BYTES)
            held.add(40_000)
    assert budget.num_bytes == 80_000
    small = held_body(budget)
    small.add(1)
    small.add(FREE_BYTES - 1)
    with pytest.raises(ApiError):
        small.add(20_001)
    small.add(20_000)
    assert budget.num_bytes == 100_000
    for held in (*large, small):
        held.release()
        held.release()
    assert budget.num_bytes == 0


@pytest.mark.usefixtures("no_free_bytes")
def test_one_tenants_bodies_do_not_use_the_whole_budget() -> None:
    budget = BodyBudget(bodies_limit(1000, is_shared=True))
    first = held_body(budget, "a")
    for _ in range(7):
        first.add(100)
    with pytest.raises(ApiError, match="of this tenant") as caught:
        held_body(budget, "a").add(100)
    assert caught.value.status_code == 429 and caught.value.reason == "queue_bytes"
    other = held_body(budget, "b")
    for _ in range(3):
        other.add(100)  # a single body may use the whole budget, of any tenant
    assert budget.num_bytes == 1000


def test_freed_memory_is_returned_to_the_system_after_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is returned after a delay, as the caller may still refer to the bytes."""
    trimmed: list[bool] = []
    monkeypatch.setattr(bodies, "TRIM_BYTES", 100)
    monkeypatch.setattr(bodies, "TRIM_SECONDS", 0.01)
    monkeypatch.setattr(bodies, "_trim", lambda: trimmed.append(True))

    async def give_back(*sizes: int) -> int:
        for size in sizes:
            budget.give_back("", size)
        await asyncio.sleep(0.05)
        return len(trimmed)

    async def run() -> None:
        budget.take("", 90, 0)
        assert await give_back(90) == 0, "few bytes"
        budget.take("", 50, 0)
        assert await give_back(20, 30) == 1, "once for both"
        budget.take("", 500, 0)
        assert await give_back(300) == 1, "as much is still held"
        assert await give_back(200) == 2

    budget = BodyBudget(bodies_limit(1000))
    asyncio.run(run())


# ------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("body", [b"[" + b"[]," * 90_000 + b"0]", b"[" + b"[]," * 90_000 + b"!]"])
def test_garbage_collection_is_off_while_a_body_is_parsed(body: bytes) -> None:
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


def refused(body: bytes) -> str:
    with pytest.raises(ApiError) as caught:
        check_numbers(body)
    assert caught.value.status_code == 400
    return str(caught.value.detail)


def test_json_strings_and_containers_are_counted_before_parsing() -> None:
    texts = json.dumps({str(number): 1 for number in range(MAX_TEXTS + 1)}).encode()
    assert f"{MAX_TEXTS + 1} texts" in refused(texts)
    check_numbers(json.dumps({str(number): 1 for number in range(MAX_TEXTS)}).encode())
    assert f"{MAX_CONTAINERS + 1} lists" in refused(b"[" + b"[]," * (MAX_CONTAINERS - 1) + b"{}]")
    check_numbers(b"[" + b"[]," * (MAX_CONTAINERS - 2) + b"{}]")
    check_numbers(b"[" + b"1," * 2_000_000 + b"1]")


@pytest.mark.parametrize(
    "text", ['"' * 250_000, "\\" * 300_000, '\\"' * 200_000, "[{" * 300_000, '["\\' * 200_000, "é\n" * 100_000]
)
def test_brackets_inside_strings_are_not_counted_as_containers(text: str) -> None:
    body = json.dumps({"prompt": text, "other": [text]}).encode()
    check_numbers(body)
    unescaped = json.dumps({"prompt": text}, ensure_ascii=False).encode()
    check_numbers(unescaped)


def test_strings_after_escaped_quotes_are_counted() -> None:
    """A string may end with an escaped backslash: the quotation mark after it ends the string."""
    body = json.dumps({f"{number}\\": 1 for number in range(MAX_TEXTS + 1)}).encode()
    assert f"{MAX_TEXTS + 1} texts" in refused(body)


# ------------------------------------------------------------------------------------------------- routes


class Wanted(BaseModel):
    text: str
    number: int = 3


def strict_app(monkeypatch: pytest.MonkeyPatch, *, is_direct: bool) -> FastAPI:
    """A route with a body and a header, with or without the direct call of its endpoint."""
    if not is_direct:
        monkeypatch.setattr(StrictRoute, "_direct_call", lambda self: None)
    router = APIRouter(route_class=StrictRoute)

    @router.post("/echo")
    async def echo(body: Wanted, seconds: Annotated[float | None, Header(alias="X-Seconds", gt=0)] = None) -> Response:
        if body.text == "refused":
            raise ApiError(429, "not now")
        return JSONResponse([body.text, body.number, seconds])

    app = FastAPI()
    app.include_router(router)
    ANSWER.install(app)
    return app


JSON = (b"content-type", b"application/json")


@pytest.mark.parametrize(
    ("headers", "body", "status", "is_read_by_fastapi"),
    [
        ([JSON], [b'{"text": "a", ', b'"number": 5}'], 200, False),
        ([(b"content-type", b"Application/JSON; charset=utf-8")], [b'{"text": "a", "other": 1}'], 200, False),
        ([JSON], [b'{"text": "refused"}'], 429, False),
        ([JSON, (b"x-seconds", b"2.5")], [b'{"text": "a"}'], 200, True),
        ([JSON, (b"x-seconds", b"-1")], [b'{"text": "a"}'], 400, True),
        ([JSON], [b'{"number": "five"}'], 400, False),  # a large body that is wrong is not read twice
        ([JSON], [b"[1]"], 400, False),
        ([JSON], [b"null"], 400, False),
        ([JSON], [b'"text"'], 400, False),
        ([JSON], [b""], 400, True),
        ([JSON], [b'{"text": NaN}'], 400, False),
        ([(b"content-type", b"text/plain")], [b'{"text": "a"}'], 400, False),
    ],
)
def test_direct_call_of_an_endpoint_responds_as_fastapi_does(
    headers: list[tuple[bytes, bytes]],
    body: list[bytes],
    status: int,
    is_read_by_fastapi: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_solved = 0
    solve = fastapi.routing.solve_dependencies

    async def counted(**arguments: Any) -> Any:
        nonlocal num_solved
        num_solved += 1
        return await solve(**arguments)

    monkeypatch.setattr(fastapi.routing, "solve_dependencies", counted)
    direct = call(strict_app(monkeypatch, is_direct=True), path="/echo", headers=headers, body=body)
    assert num_solved == is_read_by_fastapi
    assert direct[0]["status"] == status
    assert direct == call(strict_app(monkeypatch, is_direct=False), path="/echo", headers=headers, body=body)


def test_routes_with_other_parameters_use_fastapi() -> None:
    router = APIRouter(route_class=StrictRoute)

    async def body_and_query(body: Wanted, asked: int = 1) -> Response:
        return Response()

    async def two_bodies(body: Wanted, other: Wanted) -> Response:
        return Response()

    async def no_model(body: list[int]) -> Response:
        return Response()

    async def with_request(body: Wanted, request: Request) -> Response:
        return Response()

    def no_coroutine(body: Wanted) -> Response:
        return Response()

    async def simple(body: Wanted) -> Response:
        return Response()

    found = []
    for endpoint in (body_and_query, two_bodies, no_model, with_request, no_coroutine, simple):
        router.add_api_route(f"/{endpoint.__name__}", endpoint, methods=["POST"])
        route = router.routes[-1]
        assert isinstance(route, StrictRoute)
        found.append(route._direct_call() is not None)
    assert found == [False] * 5 + [True]
