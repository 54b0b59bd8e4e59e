"""What vLLM's router, in front of a server on the same machine, makes of requests for operators.

It passes every path on, without the headers of the request, and lets pages of every site read the answers to
completions.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2 as httpx
import pytest
import router_env
from _server_process import free_port, wait_until

from tests.forked_engines import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.soak]

BODY = {"model": "demo", "prompt": "The import statement", "max_tokens": 4}
LONG = {**BODY, "max_tokens": 1500, "ignore_eos": True}
PAGE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
A, B, OPERATOR = ({"authorization": f"Bearer sesame-{name}"} for name in ("a", "b", "operator"))
KEYS = ("--api-key", "sesame-a", "--api-key", "sesame-b", "--operator-key", "sesame-operator")


@pytest.fixture(scope="module")
def router() -> Path:
    """The router's command."""
    if router_env.make([]) != 0:
        pytest.skip("vLLM's router cannot be installed here; python benchmarks/router_env.py says why")
    return router_env.router_of()


@contextmanager
def routed(router: Path, url: str, log: Path, *options: str) -> Iterator[httpx.Client]:
    """A client of a router in front of the server with this URL."""
    port = free_port()
    command = [router, "--worker-urls", url, "--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--policy", "round_robin", *options], stdout=output, stderr=subprocess.STDOUT, env=os.environ
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            def answers() -> bool:
                assert process.poll() is None, log.read_text()
                try:
                    return client.get("/health").status_code == 200
                except httpx.TransportError:
                    return False

            wait_until(answers, 60, "the router answers")
            yield client
    finally:
        process.kill()
        process.wait(30)


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_without_keys_nobody_operates_through_a_router(router: Path, tmp_path: Path) -> None:
    with (
        start_server("--model", "demo") as server,
        httpx.Client(base_url=server.url, timeout=60) as direct,
        routed(router, server.url, tmp_path / "log") as through,
    ):
        assert through.post("/v1/completions", json=BODY, headers=PAGE).headers["access-control-allow-origin"] == "*"
        for headers in ({}, PAGE, {"x-forwarded-for": "127.0.0.1"}, {"user-agent": "curl/8"}):
            for call in ("POST /pause", "POST /resume", "GET /is_paused", "GET /v1/requests"):
                message = message_of(through.request(*call.split(), headers=headers), 403)
                assert "--operator-key" in message and "User-Agent" in message
            assert "--operator-key" in message_of(through.post("/pause", json={}, headers=headers), 403)
        assert direct.get("/is_paused").json() == {"is_paused": False}
        assert direct.post("/pause").json() == {"status": "paused"}
        assert direct.post("/resume").json() == {"status": "resumed"}


def test_with_an_operator_key_no_client_operates_through_a_router(router: Path, tmp_path: Path) -> None:
    with (
        start_server("--model", "demo", *KEYS) as server,
        httpx.Client(base_url=server.url, timeout=60) as direct,
        routed(router, server.url, tmp_path / "log") as through,
    ):
        assert through.post("/v1/completions", json=BODY, headers=A).status_code == 200
        assert through.post("/v1/completions", json=BODY).status_code == 401
        for headers in (A, {}, OPERATOR):  # the router keeps the key of what it does not know
            assert "Authorization" in message_of(through.post("/pause", headers=headers), 401)
        assert "--operator-key" in message_of(direct.post("/pause", headers=A), 403)
        assert direct.post("/pause", headers=OPERATOR).json() == {"status": "paused"}
        assert direct.post("/resume", headers=OPERATOR).json() == {"status": "resumed"}


def test_a_routers_own_key_is_a_clients(router: Path, tmp_path: Path) -> None:
    """It sends that key with everything that it passes on unread, whatever key the request had."""

    async def run(server: str, routed_by: str) -> None:
        async with httpx.AsyncClient(base_url=server, timeout=60) as direct:
            sent = [asyncio.ensure_future(direct.post("/v1/completions", json=LONG, headers=key)) for key in (A, B)]
            while len((await direct.get("/v1/requests", headers=OPERATOR)).json()["data"]) < 2:
                await asyncio.sleep(0.01)
            async with httpx.AsyncClient(base_url=routed_by, timeout=60) as through:
                assert (await through.post("/pause", headers=OPERATOR)).status_code == 403
                seen = (await through.get("/v1/requests", headers=B)).json()["data"]
            own = (await direct.get("/v1/requests", headers=A)).json()["data"]
            assert len(own) == 1 and [one["id"] for one in seen] == [one["id"] for one in own]
            await direct.post("/pause", headers=OPERATOR)
            await asyncio.gather(*sent)

    with (
        start_server("--model", "demo", *KEYS) as server,
        routed(router, server.url, tmp_path / "log", "--api-key", "sesame-a") as through,
    ):
        asyncio.run(run(server.url, str(through.base_url)))


def test_the_option_that_operating_md_names_makes_it_ask_for_readiness(router: Path, tmp_path: Path) -> None:
    """A draining server is healthy and not ready: asked for its health, it would get every retry."""
    asked: list[str] = []

    class Draining(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            status = 503 if self.path == "/ready" and asked.count("/ready") > 1 else 200  # a router waits for its start
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Draining)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    options = ("--health-check-endpoint", "/ready", "--health-check-interval-secs", "1")
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        with routed(router, url, tmp_path / "log", *options, "--health-failure-threshold", "1") as through:
            wait_until(lambda: asked.count("/ready") >= 3, 30, "the router asks whether the server is ready")
            assert through.post("/v1/completions", json=BODY).status_code == 503
    finally:
        server.shutdown()
        server.server_close()
