"""The local server for pages."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from pointsman.web.local import MAX_BODY, MAX_CONNECTIONS, Ask, LocalServer, Refused

closed = threading.Event()


def double(ask: Ask) -> dict[str, int]:
    return {"twice": 2 * ask.json()["number"] + len(ask.query)}


def refuse(_: Ask) -> bytes:
    raise Refused(409, "not now")


def forever(_: Ask) -> Iterator[bytes]:
    try:
        yield b"first"
        while True:
            closed.wait(0.01)
            yield b""
    finally:
        closed.set()


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    routes = {("POST", "/double"): double, ("GET", "/refuse"): refuse, ("GET", "/film"): forever}
    found = LocalServer("<p>page</p>", routes)
    thread = threading.Thread(target=found.serve)
    thread.start()
    yield found
    found.close()
    thread.join()


def ask(
    server: LocalServer, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        named = {"authorization": f"Bearer {server.token}"} | headers
        connection.request(method, path, body, {name.replace("_", "-"): value for name, value in named.items()})
        answer = connection.getresponse()
        return answer.status, answer.read(), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def test_the_page_needs_no_token(server: LocalServer) -> None:
    status, body, headers = ask(server, "GET", "/", authorization="")
    assert (status, body) == (200, b"<p>page</p>")
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert ask(server, "HEAD", "/")[:2] == (200, b"")
    assert ask(server, "POST", "/", b"")[0] == 405


def test_a_route_gets_body_and_query(server: LocalServer) -> None:
    status, body, headers = ask(server, "POST", "/double?a=1", b'{"number": 4}', origin=server.url.split("/#")[0])
    assert (status, json.loads(body), headers["content-type"]) == (200, {"twice": 9}, "application/json")
    assert ask(server, "POST", "/double", b"{")[:2] == (400, b'{"error": "the body is not JSON"}')
    assert ask(server, "GET", "/refuse")[:2] == (409, b'{"error": "not now"}')
    assert ask(server, "GET", "/double")[0] == 404
    assert ask(server, "POST", "/double", b"", content_length=str(MAX_BODY + 1))[0] == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": ""}, 401),
        ({"authorization": "Bearer wrong"}, 401),
        ({"host": "example.org"}, 403),
        ({"host": "127.0.0.1"}, 403),  # of another port
        ({"origin": "http://example.org"}, 403),
        ({"origin": "null"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),  # another port of this machine
        ({"sec_fetch_site": "same-origin"}, 200),
    ],
)
def test_only_requests_with_token_and_own_origin_are_answered(
    server: LocalServer, headers: dict[str, str], status: int
) -> None:
    assert ask(server, "POST", "/double", b'{"number": 1}', **headers)[0] == status


def test_a_stream_is_closed_when_its_client_disconnects(server: LocalServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/film", headers={"authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.read(5) == b"first"
    assert not closed.is_set()
    answer.close()
    connection.close()
    assert closed.wait(10)


@pytest.mark.parametrize("sent", [b"", b"GET / HT"], ids=["silent", "incomplete request"])
def test_idle_connections_do_not_block_a_page(server: LocalServer, sent: bytes) -> None:
    with ExitStack() as stack:
        for _ in range(3 * MAX_CONNECTIONS):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=10))
            sock.sendall(sent)
        assert ask(server, "GET", "/")[0] == 200
        ends = time.monotonic() + 10
        while (found := num_threads()) > MAX_CONNECTIONS and time.monotonic() < ends:
            time.sleep(0.01)
        assert found <= MAX_CONNECTIONS


def num_threads() -> int:
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())
