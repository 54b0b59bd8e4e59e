"""HTTP below the app: what clients may send, and what happens to their requests when they go."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from functools import partial
from logging import ERROR, WARNING, LogRecord
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
from _server_process import ServerProcess, resident_bytes, wait_until

from pointsman.server.wire.connections import Connections
from pointsman.server.wire.http import LimitedHttpProtocol, SeldomFilter
from pointsman.server.wire.sse import EventStream

pytestmark = pytest.mark.e2e


def raw(max_tokens: int, **fields: Any) -> bytes:
    body = json.dumps({"prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, **fields}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + (
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )


@pytest.fixture
def connection(server: ServerProcess) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 16):
        parts.append(part)
    return b"".join(parts)


def open_requests(server: ServerProcess) -> int:
    return len(httpx.get(f"{server.url}/v1/requests", timeout=20).json()["data"])


@pytest.mark.parametrize("stream", [True, False])
def test_pipelining_does_not_hide_a_disconnect(server: ServerProcess, connection: socket.socket, stream: bool) -> None:
    connection.sendall(raw(8000, stream=stream) * 2)
    wait_until(lambda: open_requests(server) >= 1, 20, "the first request is there")
    connection.close()
    wait_until(lambda: open_requests(server) == 0, 5, "nothing runs for one who has gone")
    assert "Traceback" not in server.log()


def test_the_answer_before_a_pipelined_request_is_whole(server: ServerProcess, connection: socket.socket) -> None:
    connection.sendall(raw(3) + raw(3))
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 200") and answer.count(b"HTTP/1.1") == 1
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 3


def test_a_connection_serves_one_request_after_the_other(server: ServerProcess) -> None:
    with httpx.Client() as client:
        for _ in range(5):
            body = {"prompt": "a", "max_tokens": 3}
            assert client.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


@pytest.mark.parametrize(
    "start",
    [b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X-Long: " + b"x" * 70_000 + b"\r\n\r\n", b"GET /" + b"x" * 70_000],
    ids=["header", "url without an end"],
)
def test_headers_have_a_limit(server: ServerProcess, connection: socket.socket, start: bytes) -> None:
    connection.sendall(start)
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") and answer.endswith(b"the request line and headers are too large")


def test_headers_without_end_take_no_memory(server: ServerProcess, connection: socket.socket) -> None:
    before = resident_bytes(server.pid)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    with pytest.raises(OSError):  # the server has hung up long before the end
        for number in range(3000):
            connection.sendall(b"X-%d: " % number + b"x" * 16_000 + b"\r\n")
            time.sleep(0.0005)
    assert resident_bytes(server.pid) - before < 20 * 2**20


def test_what_is_no_http_gets_400(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_the_log_says_seldom_that_something_is_no_http(server: ServerProcess) -> None:
    before = server.log().count("Invalid HTTP")
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(b"no HTTP\r\n\r\n")
            read_all(sock)
    assert server.log().count("Invalid HTTP") - before <= 3


def test_a_warning_comes_back_with_the_number_of_those_left_out() -> None:
    now = [0.0]
    seldom = SeldomFilter(10.0, lambda: now[0])
    logged = []
    for at, text, level in (
        (0, "a", WARNING), (1, "a", WARNING), (2, "b", WARNING), (9, "a", WARNING), (9, "a", ERROR),
        (10, "a", WARNING), (11, "a", WARNING), (30, "a", WARNING), (50, "a", WARNING),
    ):  # fmt: skip
        now[0] = at
        record = LogRecord("x", level, "", 0, text, None, None)
        if seldom.filter(record):
            logged.append((at, record.getMessage()))
    said = "more since it was last said"
    assert logged == [(0, "a"), (2, "b"), (9, "a"), (10, f"a (2 {said})"), (30, f"a (1 {said})"), (50, "a")]


@pytest.mark.parametrize("is_told", [True, False], ids=["a length is given", "in chunks"])
def test_after_a_body_that_is_too_large_the_connection_is_closed(connection: socket.socket, is_told: bool) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if is_told:
        connection.sendall(head + b"Content-Length: 200000000\r\n\r\n")
    else:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n400001\r\n" + b" " * 0x400001)
    answer = read_all(connection)  # to its end: the server has hung up
    assert answer.startswith(b"HTTP/1.1 413 ") and b"connection: close" in answer.lower()
    with pytest.raises(OSError):
        for _ in range(200):
            connection.sendall(b" " * 1_000_000)


def body_of(answer: bytes) -> bytes:
    """The body that chunked transfer coding carries, which must be whole."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def write_now(events: EventStream, piece: bytes) -> bool:
    if not events.has_room():
        return False
    events.write_now(piece)
    return True


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_events_written_without_waiting_are_in_their_places_and_stop_where_a_client_does_not_read(
    method: bytes,
) -> None:
    """The protocol on a real socket, with an app of its own: before the headers, without room, after the end."""
    written: list[bool] = []
    num_written = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_written
        events = EventStream(send, {}, scope)
        written.append(write_now(events, b"too early"))
        await events.open()
        await events.write(b"data: first\n\n")
        while num_written < 100_000 and write_now(events, b"data: %01000d\n\n" % num_written):
            num_written += 1
        await events.write(b"data: last\n\n")  # when there is room again
        written.append(write_now(events, b"data: behind\n\n"))
        await events.close()
        written.append(write_now(events, b"too late"))

    async def exchange() -> bytes:
        protocol: Any = partial(LimitedHttpProtocol, connections=Connections(8))
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            serving = asyncio.ensure_future(server.serve(sockets=[sock]))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
            client = socket.create_connection(sock.getsockname(), timeout=20)
            client.sendall(method + b" / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            while len(written) < 1 or (method == b"GET" and not num_written):
                await asyncio.sleep(0.01)
            answer = await asyncio.to_thread(read_all, client)  # which has read nothing until now
            client.close()
            server.should_exit = True
            await serving
            return answer

    answer = asyncio.run(exchange())
    if method == b"HEAD":
        assert answer.endswith(b"\r\n\r\n") and (num_written, written) == (0, [False] * 3)
        return
    lines = [
        b"data: first",
        *(b"data: %01000d" % number for number in range(num_written)),
        b"data: last",
        b"data: behind",
    ]
    assert body_of(answer).split(b"\n\n") == [*lines, b"data: [DONE]", b""]
    assert 100 < num_written < 100_000, "the transport's buffer is bounded"
    assert written == [False, True, False]
