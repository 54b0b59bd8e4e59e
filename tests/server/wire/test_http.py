"""HTTP below the app: limits on input, and what happens when clients disconnect."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from logging import ERROR, WARNING, LogRecord
from typing import Any

import httpx2 as httpx
import pytest
import uvicorn
import uvloop
from _server_process import ServerProcess, resident_bytes, wait_until

from pointsman.server.wire.connections import RESERVE, SECONDS_TO_WAIT, Connections, Wait
from pointsman.server.wire.http import LimitedHttpProtocol, SeldomFilter
from pointsman.server.wire.sse import EventStream
from tests.forked_engines import start_server

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


def test_response_before_a_pipelined_request_is_complete(server: ServerProcess, connection: socket.socket) -> None:
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
def test_request_with_too_large_headers_gets_431(
    server: ServerProcess, connection: socket.socket, start: bytes
) -> None:
    connection.sendall(start)
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 431 ") and answer.endswith(b"the request line and headers are too large")


def test_endless_headers_do_not_grow_memory(server: ServerProcess, connection: socket.socket) -> None:
    before = resident_bytes(server.pid)
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
    with pytest.raises(OSError):  # the server has hung up long before the end
        for number in range(3000):
            connection.sendall(b"X-%d: " % number + b"x" * 16_000 + b"\r\n")
            time.sleep(0.0005)
    assert resident_bytes(server.pid) - before < 20 * 2**20


def test_invalid_http_gets_400(connection: socket.socket) -> None:
    connection.sendall(b"\x16\x03\x01 no HTTP at all\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 400 ")


def test_invalid_http_is_logged_rarely(server: ServerProcess) -> None:
    before = server.log().count("Invalid HTTP")
    for _ in range(30):
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(b"no HTTP\r\n\r\n")
            read_all(sock)
    assert server.log().count("Invalid HTTP") - before <= 3


def test_repeated_warning_states_how_many_were_dropped() -> None:
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


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
FLOODS = {  # what a client begins with, and what it then sends without end
    "trailers": (CHUNKED + b"0\r\n", b"X-Name: " + b"x" * 1000 + b"\r\n"),
    "small trailers": (CHUNKED + b"0\r\n", b"a:\r\n" * 200),
    "one trailer": (CHUNKED + b"0\r\nX: ", b"x" * 1000),
    "one name of a trailer": (CHUNKED + b"0\r\nX", b"x" * 1000),
    "chunk extensions": (CHUNKED, (b"1;" + b"x" * 1000 + b"\r\n \r\n")),
    "one chunk extension": (CHUNKED + b"1;", b"x" * 1000),
    "zeros of a chunk's size": (CHUNKED, b"0" * 1000),
    "chunks of one byte": (CHUNKED, b"1\r\n \r\n" * 200),
    "headers": (HEAD, b"X-Name: " + b"x" * 1000 + b"\r\n"),
    "small headers": (HEAD, b"a:\r\n" * 200),
    "blank lines": (b"", b"\r\n" * 500),
    "blank lines behind a request": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\r\n" * 500),
    "a body for an unknown path": (b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n\r\n", b"x" * 1000),
    "requests before the response": (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2, b"GET / HTTP/1.1\r\n\r\n" * 50),
    "an upgrade": (b"GET / HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", b"x" * 1000),
}


@pytest.mark.parametrize("flood", FLOODS)
def test_endless_body_is_dropped_after_a_while(server: ServerProcess, connection: socket.socket, flood: str) -> None:
    begin, endless = FLOODS[flood]
    before = peak = resident_bytes(server.pid)
    connection.sendall(begin)
    with pytest.raises(OSError):  # the server has hung up before the end
        for _ in range(300):
            connection.sendall(endless * (100_000 // len(endless)))
            peak = max(peak, resident_bytes(server.pid))
    assert peak - before < 16 * 2**20
    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200


@pytest.mark.parametrize("flood", FLOODS)
def test_overhead_bytes_sent_slowly_are_limited(server: ServerProcess, connection: socket.socket, flood: str) -> None:
    begin, endless = FLOODS[flood]
    connection.sendall(begin)
    with pytest.raises(OSError):
        for number in range(8000):
            connection.sendall(endless)
            time.sleep(0.0002 if number % 8 == 0 else 0)


def test_more_headers_than_the_maximum_are_refused(connection: socket.socket) -> None:
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 255 + b"\r\n")
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"X: x\r\n" * 256 + b"\r\n")
    assert read_all(connection).endswith(b"the request has more than 256 headers; send fewer")


def test_body_may_have_small_chunks_with_extensions_and_trailers(connection: socket.socket) -> None:
    body = json.dumps({"prompt": "a" * 5000, "max_tokens": 2, "ignore_eos": True}).encode()
    chunks = b"".join(b"2;a=b\r\n%b\r\n" % body[i : i + 2] for i in range(0, len(body) - 1, 2))
    last = body[len(body) & ~1 :]
    chunks += b"%x\r\n%b\r\n" % (len(last), last) if last else b""
    request = CHUNKED + chunks + b"0\r\nX-Request-Id: of-a-trailer\r\n\r\n"
    for _ in range(2):  # on one connection
        connection.sendall(request)
        answer = b""
        while b'"usage"' not in answer:
            answer += connection.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"of-a-trailer" not in answer


@pytest.mark.parametrize("size", [10, 300_000, 3_000_000])
def test_response_sent_before_the_end_of_the_body_reaches_the_client(connection: socket.socket, size: int) -> None:
    connection.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size)
    time.sleep(0.2)  # the response is there
    connection.sendall(b"x" * size)
    answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 404 ") and answer.count(b"connection: close") == 1


def test_a_connection_whose_request_was_not_read_to_its_end_is_closed_soon(connection: socket.socket) -> None:
    connection.sendall(b"POST /no HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n")
    assert read_all(connection).startswith(b"HTTP/1.1 404 ")
    with pytest.raises(OSError):
        for _ in range(60):
            connection.sendall(b"x")
            time.sleep(0.1)


def test_expect_100_continue_gets_100_before_the_body(connection: socket.socket) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 2}).encode()
    connection.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")


# ------------------------------------------------------------------------------------------------- many connections

MAX_CONNECTIONS = 24


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    """A server with few connections."""
    small = ("--model", "demo", "--num-blocks", "64", "--max-num-seqs", "2")
    with start_server(*small, "--max-connections", str(MAX_CONNECTIONS)) as running:
        yield running


def connect(server: ServerProcess, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20, source_address=(source, 0))


def ask(server: ServerProcess, request: bytes, source: str = "127.0.0.1") -> bytes:
    with connect(server, source) as sock:
        sock.sendall(request)
        return read_all(sock)


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nUser-Agent: x\r\nConnection: close\r\n\r\n".encode()


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0)
    try:
        return bool(sock.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\nX: "], ids=["nothing sent", "headers incomplete"])
def test_idle_connections_do_not_block_clients(narrow: ServerProcess, begun: bytes) -> None:
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(narrow)) for _ in range(2)]
        for sock in idle:
            sock.sendall(get("/health").replace(b"close", b"keep-alive"))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")
        for _ in range(4 * MAX_CONNECTIONS):
            idle.append(stack.enter_context(connect(narrow)))
            idle[-1].sendall(begun)
        for source in ("127.0.0.1", "127.0.0.2"):
            started = time.monotonic()
            assert ask(narrow, get("/health"), source).startswith(b"HTTP/1.1 200 ")
            assert time.monotonic() - started < 1.0
            assert (
                ask(narrow, raw(2).replace(b"Host: x", b"Connection: close\r\nHost: x"), source)[:12] == b"HTTP/1.1 200"
            )
        still = [place for place, sock in enumerate(idle) if is_open(sock)]
        assert MAX_CONNECTIONS - 4 <= len(still) <= MAX_CONNECTIONS
        assert still == list(range(len(idle)))[-len(still) :], "the oldest are closed first"
    assert narrow.log().count("closes one that waits for its client") == 1


def test_reserve_serves_operators_and_health_checks(narrow: ServerProcess) -> None:
    with ExitStack() as stack:
        used = [stack.enter_context(connect(narrow)) for _ in range(MAX_CONNECTIONS)]
        for sock in used:
            sock.sendall(HEAD + b"Content-Length: 10\r\n\r\n{")
        for path in ("/health", "/ready", "/metrics", "/version", "/is_paused", "/v1/requests"):
            assert ask(narrow, get(path)).startswith(b"HTTP/1.1 200 "), path
        assert ask(narrow, get("/v1/requests/x")).startswith(b"HTTP/1.1 404 ")
        for request in (get("/v1/models"), raw(2), get("/no")):
            answer = ask(narrow, request)
            assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in answer
            message = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert "max_connections" in message and message.endswith("try again in 1 s")
        further = [stack.enter_context(connect(narrow)) for _ in range(200)]
        assert ask(narrow, get("/health")).startswith(b"HTTP/1.1 200 "), "idle ones of the reserve are replaced"
        assert sum(map(is_open, further)) <= RESERVE
        metrics = ask(narrow, get("/metrics")).decode()
        (num_open,) = re.findall(r"^pointsman:stage_held\{.*stage=\"connections\".*\} (.*)$", metrics, re.MULTILINE)
        assert MAX_CONNECTIONS < float(num_open) <= MAX_CONNECTIONS + RESERVE
        assert not all(map(is_open, further)) and all(map(is_open, used))
    wait_until(lambda: ask(narrow, get("/v1/models")).startswith(b"HTTP/1.1 200 "), 10, "there is room again")


def test_many_connections_do_not_stall_a_stream(narrow: ServerProcess) -> None:
    with ExitStack() as stack:
        stream = stack.enter_context(connect(narrow))
        stream.sendall(raw(300, stream=True).replace(b"Host: x", b"Connection: close\r\nHost: x"))
        for _ in range(300):
            sock = stack.enter_context(connect(narrow))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset where it is closed
        stack.enter_context(stream)
        assert read_all(stream).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_incomplete_requests_do_not_delay_shutdown() -> None:
    small = ("--model", "demo", "--num-blocks", "64", "--no-warm-up", "--drain-timeout", "60")
    with start_server(*small) as server, ExitStack() as stack:
        begun = [b"", b"GET / HT", HEAD, HEAD + b"Content-Length: 10\r\n\r\n{", CHUNKED + b"1\r\n{\r\n0\r\nX"]
        socks = [stack.enter_context(connect(server)) for _ in begun]
        for sock, sent in zip(socks, begun, strict=True):
            sock.sendall(sent)
        time.sleep(0.3)
        started = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - started < 15
        answers = [read_all(sock) for sock in socks]
        assert [answer[9:12] for answer in answers] == [b"", b"", b"", b"503", b"503"]
        assert "Traceback" not in server.log()


# ------------------------------------------------------------------------------------------------- in this process


def body_of(answer: bytes) -> bytes:
    """The body in chunked transfer coding, which must be complete."""
    rest, body = answer.partition(b"\r\n\r\n")[2], b""
    while True:
        size, _, rest = rest.partition(b"\r\n")
        if size == b"0":
            assert rest == b"\r\n"
            return body
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]


def serving(app: Any, talk: Callable[[int], Any], connections: Connections | None = None) -> Any:
    """The result of `talk`, which gets the port and runs in a thread while a server serves `app`."""

    async def run() -> Any:
        protocol: Any = partial(LimitedHttpProtocol, connections=connections or Connections(8))
        config = uvicorn.Config(app, http=protocol, lifespan="off", log_config=None, access_log=False)
        server = uvicorn.Server(config)
        with socket.create_server(("127.0.0.1", 0)) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
            task = asyncio.ensure_future(server.serve(sockets=[sock]))
            while not server.started:
                await asyncio.sleep(0.01)
            try:
                return await asyncio.to_thread(talk, sock.getsockname()[1])
            finally:
                server.should_exit = server.force_exit = True
                await task

    return uvloop.run(run())


def write_now(events: EventStream, piece: bytes) -> bool:
    if not events.can_write_now():
        return False
    events.write_now(piece)
    return True


@pytest.mark.parametrize("method", [b"GET", b"HEAD"])
def test_direct_writes_keep_order_and_stop_for_a_slow_reader(
    method: bytes,
) -> None:
    """The protocol on a real socket, with an app of its own: before the headers, with a full buffer, after the end."""
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
        await events.write(b"data: last\n\n")  # when it can be written again
        written.append(write_now(events, b"data: behind\n\n"))
        await events.close()
        written.append(write_now(events, b"too late"))

    def exchange(port: int) -> bytes:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            client.sendall(method + b" / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            wait_until(lambda: written and (method == b"HEAD" or num_written), 20, "the app has written")
            return read_all(client)  # which has read nothing until now

    answer = serving(app, exchange)
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
    assert 50 < num_written < 100_000, "the transport's buffer is bounded"
    assert written == [False, True, False]


async def hello(scope: Any, receive: Any, send: Any) -> None:
    """Reads the body, and responds with as many bytes as the path says."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/plain")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"x" * int(scope["path"][1:])})


@pytest.mark.parametrize(
    ("wait", "sent"),
    [
        (Wait.REQUEST, b""),
        (Wait.REQUEST, b"GET /1 HTTP/1.1\r\nHost: x\r\n\r\n"),
        (Wait.HEADERS, b"G"),
        (Wait.HEADERS, b"\r\n"),
        (Wait.HEADERS, b"GET /1 HTTP/1.1\r\nHost: x\r\n"),
        (Wait.BODY, b"POST /1 HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n123456789"),
        (Wait.BODY, b"POST /1 HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX: x\r\n"),
    ],
)
def test_waiting_client_is_disconnected_after_the_time_limit(
    monkeypatch: pytest.MonkeyPatch, wait: Wait, sent: bytes
) -> None:
    monkeypatch.setitem(SECONDS_TO_WAIT, wait, 0.3)
    monkeypatch.setattr("pointsman.server.wire.connections.SECONDS_BETWEEN_SWEEPS", 0.02)
    connections = Connections(8)

    def talk(port: int) -> float:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
            started = time.monotonic()
            for byte in sent:  # one byte after the other: no byte extends the time
                client.sendall(bytes([byte]))
                time.sleep(0.001)
            with suppress(ConnectionResetError):
                read_all(client)
            return time.monotonic() - started

    assert 0.25 < serving(hello, talk, connections) < 5
    assert connections.closed["late"] == 1 and connections.num_open == 0


@pytest.mark.parametrize("end", ["close", "keep-alive"])
def test_a_client_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    monkeypatch.setitem(SECONDS_TO_WAIT, Wait.READER, 0.3)
    monkeypatch.setattr("pointsman.server.wire.connections.SECONDS_BETWEEN_SWEEPS", 0.02)
    connections = Connections(8)

    def talk(port: int) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(f"GET /30000000 HTTP/1.1\r\nHost: x\r\nConnection: {end}\r\n\r\n".encode())
            wait_until(lambda: connections.num_open == 1, 5, "it is connected")
            wait_until(lambda: connections.num_open == 0, 5, "it is dropped")

    serving(hello, talk, connections)
    assert connections.closed == {"replaced": 0, "late": 1, "refused": 0}


def test_a_client_that_reads_in_time_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SECONDS_TO_WAIT, Wait.END, 0.1)
    monkeypatch.setitem(SECONDS_TO_WAIT, Wait.REQUEST, 0.1)
    monkeypatch.setattr("pointsman.server.wire.connections.SECONDS_BETWEEN_SWEEPS", 0.02)

    def talk(port: int) -> bytes:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.settimeout(20)
            client.sendall(b"GET /3000000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            time.sleep(1)
            return read_all(client)

    assert body_of(serving(hello, talk)).count(b"x") == 3_000_000


def test_a_client_that_ends_its_side_or_resets_leaves_no_connection() -> None:
    connections = Connections(8)

    def talk(port: int) -> None:
        for number in range(40):
            with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
                if number % 2:
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"POST /9 HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n123"[: 1 + number * 2])
                if number % 4 == 0:
                    client.shutdown(socket.SHUT_WR)
                    read_all(client)
        wait_until(lambda: connections.num_open == 0, 5, "all are gone")

    serving(hello, talk, connections)
    assert connections.closed["refused"] == 0
