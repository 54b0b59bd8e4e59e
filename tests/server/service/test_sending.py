"""Sending: the limit on unqueued requests, and the order of tenants."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pointsman.engine import SamplingParams
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.server.service import sending as module
from pointsman.server.service.sending import MAX_OUT, MAX_TOGETHER, Sending
from pointsman.server.stages import GRAMMARS
from pointsman.server.wire.errors import ApiError
from tests.server.limits import stage_limit

PLAIN = SamplingParams()
WITH_GRAMMAR = SamplingParams(structured_outputs=StructuredOutputsParams(json_object=True))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise `PATIENCE`, as a busy machine may not run the test for a second."""
    monkeypatch.setattr(module, "PATIENCE", 60.0)


class Engine:
    """Queues sent requests when a test calls for it."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []
        self._steps = asyncio.Condition()
        self._num_steps = 0

    async def queue(self, streams: Sequence[Any]) -> None:
        self.sent.append((streams[0].tenant, len(streams)))
        async with self._steps:
            until = self._num_steps + 1
            await self._steps.wait_for(lambda: self._num_steps >= until)

    async def step(self) -> None:
        async with self._steps:
            self._num_steps += 1
            self._steps.notify_all()
        await asyncio.sleep(0.01)


def requests(tenant: str, params: SamplingParams = PLAIN, count: int = 1) -> Any:
    return [cast(Any, SimpleNamespace(tenant=tenant, request=SimpleNamespace(params=params))) for _ in range(count)]


def sending_to(engine: Engine, *, is_shared: bool = True, grammars: int = 10) -> Sending:
    return Sending(engine, stage_limit(GRAMMARS, grammars, is_shared=is_shared), is_shared=is_shared)


def send(sending: Sending, tenant: str, number: int) -> list[asyncio.Future[None]]:
    return [asyncio.ensure_future(sending.queue(tenant, requests(tenant))) for _ in range(number)]


def tenants(engine: Engine) -> Counter[str]:
    return Counter(tenant for tenant, _ in engine.sent)


def test_one_tenant_does_not_block_sending_for_others() -> None:
    async def run() -> None:
        engine = Engine()
        sending = sending_to(engine)
        tasks = send(sending, "a", 300)
        await asyncio.sleep(0.01)
        assert tenants(engine) == {"a": MAX_OUT * 3 // 4}
        tasks += send(sending, "b", 10)
        await asyncio.sleep(0.01)
        assert tenants(engine)["b"] == 10
        tasks += send(sending, "b", 200)
        await asyncio.sleep(0.01)
        assert sum(tenants(engine).values()) == MAX_OUT
        await engine.step()
        assert abs(tenants(engine)["a"] - tenants(engine)["b"]) <= MAX_OUT
        while not all(task.done() for task in tasks):
            await engine.step()
        assert tenants(engine) == {"a": 300, "b": 210}

    asyncio.run(run())


def test_single_tenant_may_use_the_whole_limit() -> None:
    async def run() -> None:
        engine = Engine()
        tasks = send(sending_to(engine, is_shared=False), "", 300)
        await asyncio.sleep(0.01)
        assert len(engine.sent) == MAX_OUT
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())


def test_many_samples_are_sent_in_groups_and_in_order() -> None:
    async def run() -> None:
        engine = Engine()
        task = asyncio.ensure_future(sending_to(engine).queue("a", requests("a", count=2 * MAX_TOGETHER + 1)))
        while not task.done():
            await engine.step()
            await asyncio.sleep(0)
        assert [size for _, size in engine.sent] == [MAX_TOGETHER, MAX_TOGETHER, 1]

    asyncio.run(run())


def test_cancelled_groups_are_not_sent_and_do_not_block_later_ones() -> None:
    async def run() -> None:
        engine = Engine()
        sending = sending_to(engine)
        tasks = send(sending, "a", 100)
        await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        num_sent = len(engine.sent)
        again = send(sending, "a", MAX_OUT * 3 // 4)
        await asyncio.sleep(0.01)
        assert len(engine.sent) - num_sent == MAX_OUT * 3 // 4
        await engine.step()
        await asyncio.gather(*again)

    asyncio.run(run())


def test_hung_engine_delays_waiting_groups_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)

    async def run() -> None:
        engine = Engine()
        tasks = send(sending_to(engine), "a", 100)
        await asyncio.sleep(0.02)
        assert len(engine.sent) < 100
        await asyncio.sleep(0.1)
        assert len(engine.sent) == 100
        await engine.step()
        await asyncio.gather(*tasks)

    asyncio.run(run())


def test_requests_waiting_for_a_grammar_are_limited_per_tenant() -> None:
    async def run() -> None:
        engine = Engine()
        sending = sending_to(engine, grammars=8)
        waiting = [asyncio.ensure_future(sending.queue("a", requests("a", WITH_GRAMMAR))) for _ in range(6)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError, match="requests of this tenant wait for a grammar") as caught:
            await sending.queue("a", requests("a", WITH_GRAMMAR))
        assert caught.value.status_code == 429 and caught.value.reason == "queue_grammars"
        waiting.append(asyncio.ensure_future(sending.queue("b", requests("b", WITH_GRAMMAR))))
        plain = send(sending, "a", 1)
        await asyncio.sleep(0.01)
        assert len(engine.sent) == 8
        await engine.step()
        await asyncio.gather(*waiting, *plain)

    asyncio.run(run())
