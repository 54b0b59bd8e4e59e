"""Tenants of one server: the requests of one neither block nor reveal anything to another."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx
import pytest

from pointsman.server.api import bodies
from pointsman.server.api.app import create_app
from pointsman.server.api.bodies import StrictRequest
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from tests.server.engine_pool import engine_pool

pytestmark = pytest.mark.e2e

Test = Callable[[httpx.AsyncClient, Any], Awaitable[None]]


def with_app(test: Test, **config: Any) -> None:
    """An app whose tenants are named by a header, in front of a real engine process."""

    async def run(client: EngineClient) -> None:
        app = create_app(EngineFleet([client]), ServerConfig(tenant_from="header:X-Tenant", **config))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            await test(http, app)

    engine_pool().run(run, model="demo", num_blocks=512, num_threads=1)


async def complete(http: httpx.AsyncClient, tenant: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "a word", "max_tokens": 1, **fields}
    return await http.post("/v1/completions", json=body, headers={"X-Tenant": tenant})


@pytest.mark.parametrize("is_isolated", [False, True])
def test_isolate_prefixes_prevents_cache_hits_between_tenants(is_isolated: bool) -> None:
    async def test(http: httpx.AsyncClient, app: Any) -> None:
        async def num_cached(tenant: str, **fields: Any) -> int:
            prompt = f"what {is_isolated} has asked, word by word, " * 20
            answer = (await complete(http, tenant, prompt=prompt, **fields)).json()
            cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert await num_cached("a") == 0
        assert await num_cached("a") > 0
        assert (await num_cached("b") == 0) is is_isolated
        assert await num_cached("a", cache_salt="own") == 0
        assert await num_cached("a", cache_salt="own") > 0
        assert (await num_cached("b", cache_salt="own") == 0) is is_isolated
        assert await num_cached("b", cache_salt="1:a") == 0

    with_app(test, isolate_prefixes=is_isolated)


def test_requests_of_one_tenant_do_not_block_others() -> None:
    async def test(http: httpx.AsyncClient, app: Any) -> None:
        fields = {"max_tokens": 300, "ignore_eos": True}
        flood = [asyncio.ensure_future(complete(http, "a", **fields)) for _ in range(100)]
        await asyncio.sleep(0.5)
        other = await asyncio.gather(*(complete(http, "b") for _ in range(5)))
        assert [answer.status_code for answer in other] == [200] * 5
        for task in flood:
            if not task.done():
                task.cancel()
        answers = await asyncio.gather(*flood, return_exceptions=True)
        refused = [one for one in answers if isinstance(one, httpx.Response) and one.status_code == 429]
        assert refused and "of this tenant are open" in refused[0].json()["error"]["message"]
        metrics = (await http.get("/metrics")).text
        assert 'stage="requests"' in metrics and "pointsman:tenant_stage_held{" in metrics

    with_app(test, max_waiting_requests=4)


def test_prompt_with_too_many_token_ids_is_refused_before_validation() -> None:
    async def test(http: httpx.AsyncClient, app: Any) -> None:
        for path, name, prompt in (
            ("/v1/completions", "prompt", [1] * 20_000),
            ("/v1/completions", "prompt", [1] * 20_000 + ["no id"]),
            ("/v1/completions", "prompt", [[1], [1] * 20_000]),
            ("/v1/embeddings", "input", [1] * 20_000),
        ):
            for headers in ({}, {"X-Request-TTFT-Target": "5"}):
                refused = await http.post(path, json={name: prompt}, headers=headers)
                error = refused.json()["error"]
                assert refused.status_code == 400 and error["param"] == name
                assert "max_model_len is 16384; shorten the prompt" in error["message"]
        taken = await http.post("/v1/completions", json={"prompt": [1] * 16_384, "max_tokens": 1})
        assert "leaves no room for a generated token" in taken.json()["error"]["message"]

    with_app(test)


@pytest.mark.parametrize(
    "body", [[], "a", 5, None, {"prompt": 5}, {"prompt": []}, {"prompt": {}}, {"prompt": [None, [1]]}, {"input": "a"}]
)
def test_prompt_length_check_accepts_bodies_of_any_other_form(body: Any) -> None:
    async def read() -> Any:
        async def receive() -> Any:
            return {"type": "http.request", "body": json.dumps(body).encode()}

        scope = {"type": "http", "method": "POST", "headers": [], bodies.MAX_PROMPT_TOKENS: 1}
        return await StrictRequest(scope, receive).json()

    assert asyncio.run(read()) == body


def test_tokenization_is_cancelled_when_its_client_disconnects() -> None:
    async def test(http: httpx.AsyncClient, app: Any) -> None:
        body = json.dumps({"prompt": "\U0001f600\U0001f680" * 100_000, "return_token_strs": True}).encode()
        sent: list[Any] = []
        has_left = asyncio.Event()
        pieces = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if pieces:
                return pieces.pop()
            await has_left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        headers = [(b"content-type", b"application/json"), (b"x-tenant", b"a")]
        scope = {"type": "http", "method": "POST", "path": "/tokenize", "headers": headers, "query_string": b""}
        request = asyncio.ensure_future(app(scope, receive, send))
        await asyncio.sleep(0.05)
        has_left.set()
        await asyncio.wait_for(request, 1)
        assert not sent and app.state.gate.num_open == 0

    with_app(test)
