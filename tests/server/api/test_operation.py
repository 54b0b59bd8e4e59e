"""Operators' commands over HTTP: pause in every mode, resume, empty the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2 as httpx
import pytest

from pointsman.server.api.app import create_app
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.wire.questions import Stats
from tests.server.engine_pool import engine_pool

pytestmark = pytest.mark.e2e

FIELDS = {"prompt": "The import statement", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
LONG = {**FIELDS, "max_tokens": 400}

Test = Callable[[httpx.AsyncClient, EngineClient], Awaitable[None]]


def with_server(test: Test, **config: Any) -> None:
    """An app in this process, in front of a real engine process."""

    async def run(client: EngineClient) -> None:
        transport = httpx.ASGITransport(
            create_app(EngineFleet([client]), ServerConfig(**config)), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            await test(http, client)

    engine_pool().run(run, model="demo", num_blocks=512, num_threads=1)


async def states(http: httpx.AsyncClient) -> list[tuple[str, str | None]]:
    data = (await http.get("/v1/requests")).json()["data"]
    return [(one["state"], one["reason"]) for one in data]


async def until_it_runs(http: httpx.AsyncClient, num_tokens: int = 5) -> None:
    """Wait until the only request has generated some tokens."""
    while not any(one["num_output_tokens"] >= num_tokens for one in (await http.get("/v1/requests")).json()["data"]):
        await asyncio.sleep(0.005)


def test_pause_keep_resumes_requests_with_the_same_output() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        expected = (await http.post("/v1/completions", json=LONG)).json()["choices"][0]["text"]
        running = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await until_it_runs(http)
        answer = await http.post("/pause", params={"mode": "keep", "clear_cache": "false"})
        assert (answer.status_code, answer.json()) == (200, {"status": "paused"})
        assert (await http.get("/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        while len(await states(http)) < 2:
            await asyncio.sleep(0.005)
        assert await states(http) == [("running", "paused"), ("waiting", "paused")]
        metrics = (await http.get("/metrics")).text
        lines = [line for line in metrics.splitlines() if line.startswith("pointsman:requests_waiting{")]
        assert [line.rsplit(" ", 1)[1] for line in lines if '"paused"' in line] == ["1.0"]
        await asyncio.sleep(0.2)
        assert not running.done() and not waiting.done()
        assert (await http.post("/resume")).json() == {"status": "resumed"}
        assert (await http.get("/is_paused")).json() == {"is_paused": False}
        for one in (running, waiting):
            assert (await one).json()["choices"][0]["text"] == expected

    with_server(test)


def test_pause_wait_responds_after_running_requests_end() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        running = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await until_it_runs(http)
        pausing = asyncio.ensure_future(http.post("/pause", params={"mode": "wait"}))
        while not (await http.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0.005)
        assert (await pausing).json() == {"status": "paused"}
        assert (await running).json()["choices"][0]["finish_reason"] == "length"
        assert (await client.ask(Stats())).scheduler.num_cached_free_blocks == 0

    with_server(test)


def test_pause_replaced_by_resume_gets_409() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        running = asyncio.ensure_future(http.post("/v1/completions", json={**LONG, "max_tokens": 1500}))
        await until_it_runs(http)
        pausing = asyncio.ensure_future(http.post("/pause", params={"mode": "wait"}))
        while not (await http.get("/is_paused")).json()["is_paused"]:
            await asyncio.sleep(0.005)
        await http.post("/resume")
        overtaken = await pausing
        assert overtaken.status_code == 409 and "resumed" in overtaken.json()["error"]["message"]
        running.cancel()

    with_server(test)


def test_default_pause_aborts_requests_and_queues_new_ones() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        running = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await until_it_runs(http)
        assert (await http.post("/pause")).json() == {"status": "paused"}
        assert (await running).json()["choices"][0]["finish_reason"] == "abort"
        stats = (await client.ask(Stats())).scheduler
        assert stats.num_free_blocks == stats.num_blocks and stats.num_cached_free_blocks == 0
        coming = asyncio.ensure_future(http.post("/v1/completions", json=FIELDS))
        while not await states(http):
            await asyncio.sleep(0.005)
        await http.post("/resume")
        assert (await coming).json()["usage"]["completion_tokens"] == 60

    with_server(test)


def test_unknown_pause_mode_gets_400_and_pauses_nothing() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        answer = await http.post("/pause", params={"mode": "later"})
        assert answer.status_code == 400 and "mode" in answer.json()["error"]["message"]
        assert (await http.get("/is_paused")).json() == {"is_paused": False}

    with_server(test)


def test_prefix_cache_reset_can_preempt_running_requests() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        expected = (await http.post("/v1/completions", json=LONG)).json()["choices"][0]["text"]
        before = (await client.ask(Stats())).scheduler.num_preemptions
        running = asyncio.ensure_future(http.post("/v1/completions", json=LONG))
        await until_it_runs(http)
        answer = await http.post("/reset_prefix_cache", params={"reset_running_requests": "true"})
        assert answer.json() == {"success": True}
        assert (await client.ask(Stats())).scheduler.num_preemptions == before + 1
        assert (await running).json()["choices"][0]["text"] == expected

    with_server(test)


def test_maximum_of_running_requests_can_be_changed() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        answer = await http.post("/max_num_active_seqs", params={"limit": 1})
        assert (answer.status_code, answer.json()) == (200, {"max_num_active_seqs": 1})
        asked = [asyncio.ensure_future(http.post("/v1/completions", json=LONG)) for _ in range(3)]
        await until_it_runs(http)
        assert sorted(await states(http), key=str) == [
            ("running", None),
            ("waiting", "behind"),
            ("waiting", "sequence_limit"),
        ]
        for limit in (0, 10**6, "many"):
            refused = await http.post("/max_num_active_seqs", params={"limit": limit})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "limit"
        answer = await http.post("/max_num_active_seqs")
        assert answer.json()["max_num_active_seqs"] == client.info.max_num_running
        while (await states(http)).count(("running", None)) < 3:
            await asyncio.sleep(0.005)
        answers = await asyncio.gather(*asked)
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1

    with_server(test)
