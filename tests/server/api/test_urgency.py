"""Priority, TTFT target, retention and tenant of clients' requests, from HTTP to a real engine process."""

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
from tests.server.engine_pool import engine_pool
from tests.server.metrics.test_metrics import flat
from tests.server.orders import BY_URGENCY

pytestmark = pytest.mark.e2e

FIELDS = {"prompt": "The import statement", "max_tokens": 4, "ignore_eos": True, "temperature": 0}
KEYS = {"api_keys": ("key-of-a", "key-of-b"), "api_key_names": ("alice", ""), "operator_keys": ("operators",)}

Test = Callable[[httpx.AsyncClient, EngineClient], Awaitable[None]]


def with_server(test: Test, **config: Any) -> None:
    """An app in this process, in front of an engine whose policies read priorities, targets and retentions."""

    async def run(client: EngineClient) -> None:
        transport = httpx.ASGITransport(
            create_app(EngineFleet([client]), ServerConfig(**config)), raise_app_exceptions=False
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as http:
            await test(http, client)

    engine_pool().run(run, model="demo", num_blocks=128, num_threads=1, order=BY_URGENCY, eviction="retention")


class Paused:
    """Requests that wait in the queue, because the server is paused."""

    def __init__(self, http: httpx.AsyncClient, key: str | None = None) -> None:
        self._http = http
        self._operator = bearer(key)
        self._sent: list[asyncio.Future[Any]] = []
        self._num_samples = 0

    async def __aenter__(self) -> Paused:
        await self._http.post("/pause", params={"mode": "keep"}, headers=self._operator)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.post("/resume", headers=self._operator)
        answers = await asyncio.gather(*self._sent)
        assert [answer.status_code for answer in answers] == [200] * len(answers)

    async def send(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **fields: Any) -> None:
        """Send a request, and return when it is queued."""
        body = {**(FIELDS if path == "/v1/completions" else {}), **fields}
        self._sent.append(asyncio.ensure_future(self._http.post(path, json=body, headers=headers)))
        self._num_samples += fields.get("n", 1)
        while len(await self.states()) < self._num_samples:
            await asyncio.sleep(0.002)

    async def states(self) -> list[dict[str, Any]]:
        """The states of all waiting requests."""
        data: list[dict[str, Any]] = (await self._http.get("/v1/requests", headers=self._operator)).json()["data"]
        return data

    async def queue(self) -> list[str]:
        """The ids of waiting requests in the order of the queue."""
        return [one["id"] for one in sorted(await self.states(), key=lambda one: one["position"])]


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


def test_queue_is_sorted_by_priority_and_ttft_target() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        async with Paused(http) as paused:
            await paused.send(request_id="plain")
            await paused.send(request_id="loose", ttft_target=20)
            await paused.send(request_id="tight", ttft_target=20, headers={"X-Request-TTFT-Target": "2.5"})
            await paused.send(request_id="pair", priority=-1, n=2)
            await paused.send("/v1/embeddings", {"X-Request-TTFT-Target": "1"}, input="a", request_id="vector")
            await paused.send(
                "/v1/chat/completions",
                {"X-Request-TTFT-Target": "0.5"},
                messages=[{"role": "user", "content": "a"}],
                max_tokens=2,
            )
            *pair, chat, vector, tight, loose, plain = await paused.queue()
            assert pair == ["cmpl-pair-0", "cmpl-pair-1"] and chat.startswith("chatcmpl-")
            assert [vector, tight, loose, plain] == ["embd-vector", "cmpl-tight", "cmpl-loose", "cmpl-plain"]
            states = {one["id"]: one for one in await paused.states()}
            targets = [states[name]["ttft_target"] for name in (*pair, chat, vector, tight, loose, plain)]
            assert targets == [None, None, 0.5, 1.0, 2.5, 20.0, None]

            changed = await http.post("/v1/requests/cmpl-plain/priority", params={"priority": -9})
            assert (changed.status_code, changed.json()) == (200, {"priority": -9, "requests": ["cmpl-plain"]})
            changed = await http.post("/v1/requests/cmpl-pair/priority", params={"priority": 9})
            assert changed.json() == {"priority": 9, "requests": ["cmpl-pair-0", "cmpl-pair-1"]}
            by_engine_id = f"/v1/requests/{states['cmpl-loose']['engine_id']}/priority"
            assert (await http.post(by_engine_id, params={"priority": -3})).json()["requests"] == ["cmpl-loose"]
            assert await paused.queue() == ["cmpl-plain", "cmpl-loose", chat, "embd-vector", "cmpl-tight", *pair]
            assert {one["id"]: one["priority"] for one in await paused.states()}["cmpl-plain"] == -9
        gone = await http.post("/v1/requests/cmpl-plain/priority", params={"priority": 1})
        assert gone.status_code == 404 and "'cmpl-plain'" in gone.json()["error"]["message"]
        for value in ("soon", "1.5", str(2**63), None):
            params = {} if value is None else {"priority": value}
            refused = await http.post("/v1/requests/cmpl-plain/priority", params=params)
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"

    with_server(test)


def test_priority_limits_apply_to_clients_but_not_to_operators() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        async with Paused(http) as paused:
            await paused.send(request_id="a", priority=-2, ttft_target=0.5)
            for fields, headers, param in (
                ({"priority": -3}, {}, "priority"),
                ({"ttft_target": 0.4}, {}, "ttft_target"),
                ({"ttft_target": 9}, {"X-Request-TTFT-Target": "0.25"}, "ttft_target"),
            ):
                refused = await http.post("/v1/completions", json={**FIELDS, **fields}, headers=headers)
                error = refused.json()["error"]
                assert (refused.status_code, error["param"]) == (400, param)
                assert f"{param} is {headers.get('X-Request-TTFT-Target', fields[param])}" in error["message"]
                assert error["message"].endswith("at least: raise it")
            assert (await http.post("/v1/requests/cmpl-a/priority", params={"priority": -50})).status_code == 200
            assert [(one["priority"], one["ttft_target"]) for one in await paused.states()] == [(-50, 0.5)]

    with_server(test, min_request_priority=-2, min_ttft_target=0.5)


def test_retention_within_the_limit_keeps_the_prefix_cached() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        prompt = " ".join(["word"] * 100)
        async with Paused(http) as paused:
            await paused.send(request_id="a", prompt=prompt, retention=0)
            await paused.send(request_id="b", prompt=prompt, retention=59.5)
            states = {one["id"]: one for one in await paused.states()}
            assert {name: one["retention"] for name, one in states.items()} == {"cmpl-a": 0.0, "cmpl-b": 59.5}
            assert "Its prefix is retained for 59.5 s after its end" in states["cmpl-b"]["explanation"]
        while not flat((await http.get("/metrics")).text)["pointsman:kv_blocks{state=retained}"]:
            await asyncio.sleep(0.01)
        refused = await http.post("/v1/completions", json={**FIELDS, "retention": 60.5})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "retention")
        assert error["message"] == "retention is 60.5 s; this server takes 60 s at most: lower it"

    with_server(test, max_retention=60.0)


def test_tenant_is_the_name_of_the_key_and_has_its_own_metrics() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        async def metrics() -> dict[str, float]:
            found = flat((await http.get("/metrics")).text)
            held, num_open = "pointsman:tenant_stage_held", found["pointsman:tenant_open_requests{tenant=alice}"]
            assert found[f"{held}{{stage=requests,tenant=alice}}"] == num_open
            return {
                name: value
                for name, value in found.items()
                if name.startswith("pointsman:tenant_") and not name.startswith(held)
            }

        before = await metrics()
        assert before == {
            f"pointsman:tenant_{kind}{{tenant={tenant}}}": 0
            for kind in ("prompt_tokens_total", "generation_tokens_total", "open_requests", "unstarted_requests")
            for tenant in ("alice", "key-2")
        }
        async with Paused(http, "operators") as paused:
            await paused.send(headers=bearer("key-of-a"), request_id="a", user="mallory", n=3)
            await paused.send(headers=bearer("key-of-b"), request_id="b")
            await paused.send(headers=bearer("operators"), request_id="c")
            tenants = {one["id"]: (one["tenant"], one["user"]) for one in await paused.states()}
            assert tenants == {
                **{f"cmpl-a-{sample}": ("alice", "mallory") for sample in range(3)},
                "cmpl-b": ("key-2", None),
                "cmpl-c": ("operator", None),
            }
            during = await metrics()
            for kind in ("open", "unstarted"):
                values = [during[f"pointsman:tenant_{kind}_requests{{tenant={one}}}"] for one in ("alice", "key-2")]
                assert values == [3, 1]
        after = await metrics()
        total = flat((await http.get("/metrics")).text)
        num_prompt = after["pointsman:tenant_prompt_tokens_total{tenant=key-2}"]
        assert num_prompt > 0
        for tenant, num_samples in (("alice", 3), ("key-2", 1), ("operator", 1)):
            assert after[f"pointsman:tenant_generation_tokens_total{{tenant={tenant}}}"] == 4 * num_samples
            assert after[f"pointsman:tenant_prompt_tokens_total{{tenant={tenant}}}"] == num_prompt * num_samples
            assert after[f"pointsman:tenant_open_requests{{tenant={tenant}}}"] == 0
            assert after[f"pointsman:tenant_unstarted_requests{{tenant={tenant}}}"] == 0
        assert total["pointsman:requests_refused_total{reason=invalid}"] == 0

    with_server(test, **KEYS)


def test_tenant_header_is_read_if_configured() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        async with Paused(http, "operators") as paused:
            await paused.send(headers={**bearer("key-of-a"), "x-tenant": 'b"\\ob'}, request_id="a")
            await paused.send(headers=bearer("key-of-a"), request_id="b", user="mallory")
            assert [one["tenant"] for one in await paused.states()] == ['b"\\ob', "alice"]
        twice = [(b"x-tenant", b"bob"), (b"x-tenant", b"alice"), (b"authorization", b"Bearer key-of-a")]
        refused = await http.post("/v1/completions", json=FIELDS, headers=twice)
        assert refused.status_code == 400 and "X-Tenant occurs 2 times" in refused.json()["error"]["message"]
        assert 'tenant="b\\"\\\\ob"' in (await http.get("/metrics")).text

    with_server(test, **KEYS, tenant_from="header:X-Tenant")


def test_invalid_user_does_not_become_a_metric_label() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for user in ("bob", "caf\u00e9\n"):
            answer = await http.post("/v1/completions", json={**FIELDS, "user": user})
            assert answer.status_code == 200
        body = b'{"prompt": "a", "max_tokens": 1, "user": "\\ud800"}'
        refused = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert refused.status_code == 400
        metrics = flat((await http.get("/metrics")).text)
        assert metrics["pointsman:tenant_generation_tokens_total{tenant=caf\u00e9\n}"] == 4

    with_server(test, tenant_from="user")
