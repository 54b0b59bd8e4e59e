"""vLLM's router in front of servers: operators' requests through it, and its choice of servers.

The router forwards every path without the headers of the request, and lets pages of every site read completions.
"""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx2 as httpx
import pytest
import router_env
from _router_process import RouterFailed, start_router
from _scale_load import prefix
from _scale_router import DRAIN_PROMPT, MIN_HIT_RATE, Routed, drain, prefixes
from _server_process import free_port, wait_until

from tests.forked_engines import start_server

pytestmark = [pytest.mark.e2e, pytest.mark.long]

PORT = r"(?<![\d.])(?:8[0-9]{3}|5[0-9]{3})\b"
"""Pattern of a port in the document's commands."""
ROOT = Path(__file__).resolve().parents[2]
ROUTING = ROOT / "docs" / "guides" / "route_requests.md"
MANIFEST = ROOT / "examples" / "kubernetes" / "pointsman.yaml"
BODY = {"model": "demo", "prompt": "The import statement", "max_tokens": 4}
LONG = {**BODY, "max_tokens": 1500, "ignore_eos": True}
PAGE = {"origin": "http://evil.example", "sec-fetch-site": "cross-site"}
A, B, OPERATOR = ({"authorization": f"Bearer sesame-{name}"} for name in ("a", "b", "operator"))
KEYS = ("--api-key", "sesame-a", "--api-key", "sesame-b", "--operator-key", "sesame-operator")


@pytest.fixture(scope="module", autouse=True)
def router() -> None:
    """The router is installed."""
    if router_env.make([]) != 0:
        pytest.skip("vLLM's router cannot be installed here; python benchmarks/router_env.py says why")


@contextmanager
def routed(url: str, *options: str) -> Iterator[httpx.Client]:
    """A client of a router in front of the server with this URL."""
    with (
        start_router([url], "--policy", "round_robin", *options) as router,
        httpx.Client(base_url=router.url, timeout=60) as client,
    ):
        yield client


def message_of(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    return message


def test_without_keys_operator_endpoints_refuse_a_router() -> None:
    with (
        start_server("--model", "demo") as server,
        httpx.Client(base_url=server.url, timeout=60) as direct,
        routed(server.url) as through,
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


def test_client_key_cannot_operate_through_a_router() -> None:
    with (
        start_server("--model", "demo", *KEYS) as server,
        httpx.Client(base_url=server.url, timeout=60) as direct,
        routed(server.url) as through,
    ):
        assert through.post("/v1/completions", json=BODY, headers=A).status_code == 200
        assert through.post("/v1/completions", json=BODY).status_code == 401
        for headers in (A, {}, OPERATOR):  # the router keeps the key of what it does not know
            assert "Authorization" in message_of(through.post("/pause", headers=headers), 401)
        assert "--operator-key" in message_of(direct.post("/pause", headers=A), 403)
        assert direct.post("/pause", headers=OPERATOR).json() == {"status": "paused"}
        assert direct.post("/resume", headers=OPERATOR).json() == {"status": "resumed"}


def test_router_key_counts_as_a_client_key() -> None:
    """The router sends that key with everything that it forwards unread, in place of the request's key."""

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
        routed(server.url, "--api-key", "sesame-a") as through,
    ):
        asyncio.run(run(server.url, str(through.base_url)))


def test_documented_router_option_checks_readiness() -> None:
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
        with routed(url, *options, "--health-failure-threshold", "1") as through:
            wait_until(lambda: asked.count("/ready") >= 3, 30, "the router asks whether the server is ready")
            assert through.post("/v1/completions", json=BODY).status_code == 503
    finally:
        server.shutdown()
        server.server_close()


# ------------------------------------------------------------------------------------------------------ two servers


@pytest.fixture
def two() -> Iterator[Routed]:
    with ExitStack() as stack:
        yield Routed(stack, start_server)


def test_router_keeps_prefixes_together_and_loses_no_request(two: Routed) -> None:
    with two.router("cache_aware") as router:
        figures = asyncio.run(prefixes(two, router, 96))
        assert figures["hit_rate"] >= MIN_HIT_RATE
        for path in re.findall(r"path: (/\w+), port: http}", MANIFEST.read_text().partition("kind: Deployment")[2]):
            assert httpx.get(f"{router.url}{path}").status_code == 200, f"the manifest probes {path}"
        drained = asyncio.run(drain(("127.0.0.1", router.port), two.servers[0]))
        assert (drained["failures"], drained["exit_code"]) == ([], 0)


def test_ending_an_idle_server_loses_no_request(two: Routed) -> None:
    """The router knows its prefix, and sends it requests until it notices the end."""
    prompt = {"model": "demo", "prompt": prefix(0)[:DRAIN_PROMPT], "max_tokens": 1}
    with two.router("cache_aware") as router:
        assert httpx.post(f"{router.url}/v1/completions", json=prompt).status_code == 200
        reached = re.compile(r'^vllm:request_success_total{.*"length".*} 1.0$', re.MULTILINE)
        (home,) = [server for server in two.servers if reached.search(httpx.get(f"{server.url}/metrics").text)]
        drained = asyncio.run(drain(("127.0.0.1", router.port), home, num_clients=1, num_prefixes=1))
        assert (drained["failures"], drained["exit_code"]) == ([], 0)


def test_kv_aware_routing_finds_the_server_that_cached_the_prefix(two: Routed) -> None:
    """The router learns it from the servers' events alone: each prompt was sent to a server past the router before.
    Token ids, text and conversations, of which the router asks the servers for the tokens."""
    text = "The import statement combines two operations: it searches for the module, and binds the result. "
    found = []
    with two.router("kv_aware") as router, httpx.Client(timeout=60) as client:
        for number in range(6):
            home = two.servers[number % 2].url
            for path, body in (
                ("/v1/completions", {"prompt": [300 + number, *range(310, 374)]}),
                ("/v1/completions", {"prompt": f"{number} {text * 2}"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"{number} {text * 2}"}]}),
            ):
                for url in (home, router.url):
                    answer = client.post(f"{url}{path}", json={"model": "demo", "max_tokens": 2, **body})
                    assert answer.status_code == 200, answer.text
                    time.sleep(0.5)  # until the events are there
                found.append(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
    assert min(found) >= 32, found


def test_publishing_where_no_router_listens_is_logged() -> None:
    events = f'{{"endpoint": "tcp://127.0.0.1:{free_port()}"}}'
    with start_server("--model", "demo", "--no-warm-up", "--kv-events-config", events) as server:
        assert "routers connect, too" in server.log()


# ------------------------------------------------------------------------------------------------------ the document


def scripts() -> list[list[str]]:
    """The commands of each shell block in docs/guides/route_requests.md that starts a router, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", ROUTING.read_text(), re.DOTALL)
    lines = [block.replace("\\\n", " ").splitlines() for block in blocks if "--worker-urls" in block]
    return [[line for line in block if line and not line.startswith("#")] for block in lines]


@pytest.mark.parametrize("script", scripts())
def test_documented_router_commands_run(script: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers and router are started with their options, on other ports; the commands below talk to them."""
    monkeypatch.setenv("POINTSMAN_OPERATOR_KEY", "sesame")
    monkeypatch.chdir(tmp_path)
    numbers = set(re.findall(PORT, "\n".join(script)))
    assert len(numbers) >= 3, "two servers and a router"
    ports = {number: str(free_port()) for number in numbers}
    answers = []
    with ExitStack() as stack:
        for line in script:
            command, _, comment = re.sub(PORT, lambda found: ports[found[0]], line).partition("  #")
            words = shlex.split(command.rstrip().removesuffix("&"))
            if words[0] == "export":
                assert words[1].startswith("POINTSMAN_OPERATOR_KEY="), line
            elif words[:2] == ["pointsman", "serve"]:
                stack.enter_context(start_server(*words[2:], "--no-warm-up"))
            elif words[0] == "router/bin/vllm-router":
                at, port = words.index("--worker-urls") + 1, words.index("--port")
                urls, rest = words[at : at + 2], [*words[1 : at - 1], *words[at + 2 :]]
                del rest[port - 1 : port + 1]
                stack.enter_context(start_router(urls, *rest, port=int(words[port + 1])))
            elif words[0] != "kill":  # the stack ends them
                run = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
                assert run.returncode == 0, f"{command}\n{run.stderr}"
                answers.append((comment.strip(), run.stdout))
                time.sleep(0.5)  # until the events are there
    assert [text for comment, text in answers if '"error"' in text and "refused" not in comment] == []
    refused = [text for comment, text in answers if comment.startswith("refused")]
    assert all("Authorization" in text for text in refused)
    assert any('"text"' in text for _, text in answers)
    found = [json.loads(text)["usage"] for comment, text in answers if comment.startswith("cached_tokens")]
    assert len(found) == ("kv_aware" in "".join(script))
    assert all(usage["prompt_tokens_details"]["cached_tokens"] >= 32 for usage in found)


def test_router_error_names_a_server_that_does_not_respond() -> None:
    """The router stops waiting for its servers after the seconds of `--worker-startup-timeout-secs`."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(RouterFailed) as caught:
        start_router([url], "--worker-startup-timeout-secs", "3", timeout=30)
    assert url in str(caught.value)
