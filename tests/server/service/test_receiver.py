"""Streams of a real engine process: each way to end one, at each moment, ends it for all readers."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeAlias

import pytest

from pointsman.engine import SamplingParams
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.receiver import ClientStream
from pointsman.server.wire.messages import Delta, EngineRequest
from pointsman.server.wire.questions import ExplainAll
from tests.server.engine_pool import engine_pool

pytestmark = pytest.mark.e2e

ENDLESS = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
Work: TypeAlias = Callable[[EngineClient], Awaitable[None]]


def with_client(test: Work) -> None:
    engine_pool().run(test, model="demo", num_blocks=512, num_threads=1)


_numbers = count()


def stream_of(client: EngineClient, params: SamplingParams = ENDLESS) -> ClientStream:
    return client.generate(EngineRequest(f"request-{next(_numbers)}", [5, 6], params))


def test_unread_deltas_are_merged() -> None:
    async def test(client: EngineClient) -> None:
        stream = stream_of(client, SamplingParams(max_tokens=50, temperature=0, ignore_eos=True))
        await stream.start()
        while await client.ask(ExplainAll()):
            await asyncio.sleep(0.01)
        (delta,) = [delta async for delta in stream]
        assert (len(delta.token_ids), delta.finish_reason, stream.num_output_tokens) == (50, "length", 50)

    with_client(test)


def test_stream_closed_before_sending_sends_nothing() -> None:
    async def test(client: EngineClient) -> None:
        stream = stream_of(client)
        await stream.aclose()
        await stream.start()
        assert [delta async for delta in stream] == [] and await client.ask(ExplainAll()) == []

    with_client(test)


@contextmanager
def standing_still(client: EngineClient) -> Iterator[None]:
    """Context in which the engine sends nothing."""
    os.kill(client.info.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(client.info.pid, signal.SIGCONT)


@pytest.mark.parametrize("read", [ClientStream.start, lambda stream: anext(stream, None)], ids=["start", "read"])
def test_closing_ends_waiting_readers(read: Callable[..., Any]) -> None:
    async def test(client: EngineClient) -> None:
        with standing_still(client):
            stream = stream_of(client)
            waiting = asyncio.ensure_future(read(stream))
            await asyncio.sleep(0.05)
            assert not waiting.done()
            await stream.aclose()
            assert await asyncio.wait_for(waiting, 5) is None

    with_client(test)


def test_closing_as_a_delta_arrives_ends_the_stream() -> None:
    async def test(client: EngineClient) -> None:
        with standing_still(client):
            stream = stream_of(client)
            reading = asyncio.ensure_future(anext(stream, None))
            await asyncio.sleep(0.05)
            stream.put(Delta(token_ids=[5]))  # as its delta does, in the same iteration of the loop
            await stream.aclose()
            assert await reading is None
            assert await asyncio.wait_for(anext(stream, None), 5) is None

    with_client(test)


def test_cancelled_reader_aborts_the_request() -> None:
    async def test(client: EngineClient) -> None:
        ends: list[tuple[str, str | None]] = []
        client.receiver.on_end = lambda request, last, _: ends.append((request.request_id, last.finish_reason))
        stream = stream_of(client)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                async for _ in stream:
                    pass
        client.receiver.on_end = None
        assert ends == [(stream.request.request_id, "abort")]
        assert [delta async for delta in stream] == []

    with_client(test)


def test_shortcut_handles_deltas_in_order_while_the_reader_waits() -> None:
    """The reader is sometimes busy, the shortcut sometimes refuses: each delta arrives once, and all in order."""

    async def test() -> None:
        generator = random.Random(4)
        stream = ClientStream(
            EngineRequest("a", [5], ENDLESS), lambda streams: streams[0].note_sent(), lambda stream: None
        )
        found: list[int] = []
        num_short = 0
        may_be_short = True

        def shortcut(text: str, token_ids: list[int], num_cached_tokens: int) -> bool:
            nonlocal num_short
            if not may_be_short:
                return False
            found.extend(token_ids)
            num_short += 1
            return True

        async def read() -> None:
            async for delta in stream:
                for _ in range(generator.randrange(3)):  # as if it waited for the transport
                    await asyncio.sleep(0)
                found.extend(delta.token_ids)

        reading = asyncio.ensure_future(read())
        stream.put(Delta(token_ids=[0]))  # before there is a shortcut
        stream.shortcut = shortcut
        for number in range(1, 1000):
            may_be_short = generator.random() < 0.7
            if generator.random() < 0.9:
                stream.put_tokens("", [number], 0)
            else:  # one with more than tokens
                stream.put(Delta(token_ids=[number]))
            for _ in range(generator.randrange(4)):
                await asyncio.sleep(0)
        stream.put(Delta(token_ids=[1000], finish_reason="stop"))
        await asyncio.wait_for(reading, 5)
        assert found == stream.output_token_ids == list(range(1001))
        assert 100 < num_short < 900

    asyncio.run(test())


def test_reader_gets_the_delta_if_the_shortcut_raises_an_error() -> None:
    """All clients share the receiver, which an error of one client must not reach."""

    async def test() -> None:
        stream = ClientStream(
            EngineRequest("a", [5], ENDLESS), lambda streams: streams[0].note_sent(), lambda stream: None
        )

        def shortcut(text: str, token_ids: list[int], num_cached_tokens: int) -> bool:
            raise RuntimeError("the transport is closed")

        stream.shortcut = shortcut
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.put_tokens("five", [5], 3)
        assert await asyncio.wait_for(reading, 5) == Delta("five", [5], num_cached_tokens=3) and stream.shortcut is None

    asyncio.run(test())
