"""EngineClient: an engine in its own process, seen from the API process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pointsman.core.errors import UnknownRequest
from pointsman.engine import LLM, EngineDeadError, SamplingParams
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.prompts import PromptReader, TextPrompts
from pointsman.server.service.receiver import ClientStream
from pointsman.server.wire.messages import Delta, EngineRequest, StepNote
from pointsman.server.wire.questions import Explain, ExplainAll, Stats
from tests.server.engine_pool import engine_pool
from tests.server.limits import text_work

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {
    "model": "demo",
    "num_blocks": 64,
    "max_num_seqs": 8,
    "max_steps_in_flight": 1,
    "num_threads": 1,
}
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
ENDLESS = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
PROMPT = "The import statement"


def with_client(test: Callable[[EngineClient], Awaitable[None]], **options: Any) -> None:
    engine_pool().run(test, **{**OPTIONS, **options})


async def read(stream: ClientStream) -> Delta:
    whole = Delta()
    async for delta in stream:
        whole.merge(delta)
    return whole


def test_client_gets_the_same_texts_as_a_local_engine() -> None:
    llm = LLM("demo", num_blocks=64, num_threads=1)
    texts = [PROMPT, "A list is", "The import statement combines"]
    expected = [(one.text, one.token_ids) for one in llm.generate(texts, GREEDY, use_tqdm=False)]

    async def test(client: EngineClient) -> None:
        reader = PromptReader(client.tokenizer, client.info, text_work())
        prompts = await reader.read(TextPrompts("prompt", texts))
        before = await client.ask(Stats())
        steps: list[StepNote] = []
        ends: list[tuple[str, str | None, int]] = []
        client.receiver.on_steps = steps.extend
        client.receiver.on_end = lambda request, last, n: ends.append((request.request_id, last.finish_reason, n))
        streams = [
            client.generate(EngineRequest(text, prompt.token_ids, GREEDY, stream=index != 1))
            for index, (text, prompt) in enumerate(zip(texts, prompts, strict=True))
        ]
        found = await asyncio.gather(*(read(stream) for stream in streams))
        assert [(delta.text, delta.token_ids) for delta in found] == expected
        assert sorted(ends) == sorted((text, "length", 40) for text in texts)
        for delta in found:
            metrics = delta.metrics
            assert metrics is not None and metrics.first_scheduled_time is not None
            assert metrics.first_token_time is not None and metrics.finished_time is not None
            assert metrics.arrival_time <= metrics.first_scheduled_time <= metrics.first_token_time
            assert metrics.first_token_time <= metrics.finished_time
            assert type(metrics.finished_time) is type(metrics.first_token_time) is float  # not NumPy's, nor its bytes
        assert sum(step.num_generated_tokens for step in steps) == 120
        stats = await client.ask(Stats())
        assert stats.scheduler.kv_cache_usage == 0
        assert stats.counters.num_generated_tokens - before.counters.num_generated_tokens == 120
        num_scheduled = stats.scheduler.num_scheduled_tokens - before.scheduler.num_scheduled_tokens
        assert sum(step.num_scheduled_tokens for step in steps) == num_scheduled

    with_client(test, max_steps_in_flight=2)


def test_requests_sent_together_are_queued_in_order_and_fail_separately() -> None:
    async def test(client: EngineClient) -> None:
        streams = [client.generate(EngineRequest(f"one-{number}", [5, 6], ENDLESS)) for number in range(20)]
        bad = client.generate(EngineRequest("bad", [99_999], GREEDY))
        client.submit([*streams[:10], bad, *streams[10:]])
        for stream in streams:
            await stream.start()  # sends nothing again: the ids would be in use
        with pytest.raises(ValueError, match="token id 99999"):
            await bad.start()
        found = [one.explanation.request_id for one in await client.ask(ExplainAll())]
        assert found == [f"one-{number}" for number in range(20)]
        for stream in streams:
            await stream.aclose()

    with_client(test)


def test_refusal_is_raised_before_the_first_delta() -> None:
    async def test(client: EngineClient) -> None:
        stream = client.generate(EngineRequest("long", [5] * 20_000, GREEDY))
        with pytest.raises(ValueError, match="the prompt has 20000 tokens and max_model_len is"):
            await stream.start()
        with pytest.raises(ValueError, match="token id 99999 is outside the model's vocabulary"):
            await client.generate(EngineRequest("odd", [99_999], GREEDY)).start()
        running = client.generate(EngineRequest("a", [5, 6], ENDLESS))
        await running.start()
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            await client.generate(EngineRequest("a", [5, 6], GREEDY)).start()
        assert (await anext(running)).token_ids
        await running.aclose()

    with_client(test)


def test_closing_or_cancelling_a_stream_frees_the_blocks() -> None:
    async def test(client: EngineClient) -> None:
        closed = client.generate(EngineRequest("closed", [5, 6], ENDLESS))
        await anext(closed)
        reader = asyncio.ensure_future(read(client.generate(EngineRequest("cancelled", [7, 8], ENDLESS))))
        await asyncio.sleep(0.1)
        assert (await client.ask(Explain("closed"))).explanation.status.value == "running"
        assert {one.explanation.request_id for one in await client.ask(ExplainAll())} == {"closed", "cancelled"}
        await closed.aclose()
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert [delta async for delta in closed] == []
        end = time.monotonic() + 10
        while (await client.ask(Stats())).scheduler.kv_cache_usage > 0:
            assert time.monotonic() < end
        with pytest.raises(UnknownRequest):
            await client.ask(Explain("closed"))
        assert await client.ask(ExplainAll()) == []

    with_client(test, max_steps_in_flight=2)


def test_closing_a_stream_of_a_replaced_engine_aborts_no_other_request() -> None:
    """Each engine numbers its requests from 0, and a reader may close its stream minutes after the last token."""

    async def test(client: EngineClient) -> None:
        async with asyncio.timeout(10):
            other = client.generate(EngineRequest("other", [5, 6], SamplingParams(max_tokens=50, ignore_eos=True)))
            await other.start()
            closed = client.generate(EngineRequest("closed", [5, 6], SamplingParams(max_tokens=1)))
            closed.note_sent(other.key)  # by the earlier engine
            await closed.aclose()
            assert sum([len(delta.token_ids) async for delta in other]) == 50

    with_client(test)


def test_explanation_has_user_and_deadline() -> None:
    async def test(client: EngineClient) -> None:
        first = client.generate(EngineRequest("first", [5, 6], ENDLESS))
        await anext(first)
        now = time.monotonic()
        waiting = client.generate(EngineRequest("second", [7] * 9, GREEDY, user="tenant", deadline=now + 50))
        await waiting.start()
        await anext(first)
        told = await client.ask(Explain("second"))
        assert (told.user, told.num_prompt_tokens, told.max_tokens, told.num_output_tokens) == ("tenant", 9, 40, 0)
        assert told.explanation.reason is not None and told.explanation.reason.value == "sequence_limit"
        assert told.explanation.blocker == "first" and told.deadline_in is not None and 0 < told.deadline_in <= 50
        assert told.waiting_for is not None and 0 <= told.waiting_for <= told.age
        await waiting.aclose()
        await first.aclose()

    with_client(test, max_num_seqs=1)


def test_killed_engine_fails_all_streams() -> None:
    async def test(client: EngineClient) -> None:
        streams = [client.generate(EngineRequest(str(key), [5, 6], ENDLESS)) for key in range(3)]
        for stream in streams:
            await anext(stream)
        os.kill(client.info.pid, signal.SIGKILL)
        started = time.monotonic()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="the engine process was ended by signal SIGKILL"):
                await read(stream)
        assert time.monotonic() - started < 5 and not client.is_alive and client.dead.is_set()
        assert client.death is not None
        with pytest.raises(EngineDeadError):
            await client.ask(Stats())
        with pytest.raises(EngineDeadError):
            await client.generate(EngineRequest("late", [5], GREEDY)).start()

    with_client(test, max_steps_in_flight=2)


def test_drain_finishes_sent_requests() -> None:
    async def test(client: EngineClient) -> None:
        streams = [client.generate(EngineRequest(str(key), [5, 6], GREEDY)) for key in range(10)]
        for stream in streams:
            await stream.start()
        reading = asyncio.gather(*(read(stream) for stream in streams))
        await client.shutdown(drain=True, timeout=60)
        assert [(one.finish_reason, len(one.token_ids)) for one in await reading] == [("length", 40)] * 10
        assert client.death is None and not client.is_alive

    with_client(test)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "/nowhere"}, "/nowhere"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_failed_engine_start_reports_the_cause(options: dict[str, Any], message: str) -> None:
    async def run() -> None:
        await EngineClient.start({**OPTIONS, **options})

    with pytest.raises(ValueError, match=message):
        asyncio.run(run())
