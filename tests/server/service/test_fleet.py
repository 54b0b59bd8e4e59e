"""EngineFleet: requests of every kind are resumed when their engine dies; real engine processes are killed."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pointsman.core import RepetitionDetectionParams
from pointsman.engine import EngineDeadError, SamplingParams
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.server.service.engine_client import EngineClient, EngineStartError
from pointsman.server.service.fleet import EngineFleet, start_fleet
from pointsman.server.service.receiver import ClientStream
from pointsman.server.wire.messages import Delta, EngineRequest
from pointsman.server.wire.questions import ExplainAll, ResetPrefixCache, SetPriority, Stats
from tests.forms import short_or_long
from tests.server.engine_pool import cancel

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {"model": "demo", "num_blocks": 256, "block_size": 16, "max_num_seqs": 32, "num_threads": 1}
PROMPT = [300, 301, 302, 303, 304, 305, 306, 307, 308, 309, 310, 311, 312, 313, 314, 315, 316, 317, 318]
LONG = {"max_tokens": 160, "ignore_eos": True}
EMAIL = StructuredOutputsParams(regex=r"([a-z]{3,7} ){60,70}end\.")
CASES: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0, **LONG),
    "no-seed": SamplingParams(temperature=1.0, **LONG),
    "seed": SamplingParams(temperature=0.9, seed=7, top_k=50, top_p=0.95, min_p=0.01, **LONG),
    "penalties": SamplingParams(
        temperature=0.8, presence_penalty=0.5, frequency_penalty=0.4, repetition_penalty=1.2, **LONG
    ),
    "min-tokens": SamplingParams(temperature=1.2, min_tokens=120, max_tokens=200, stop_token_ids=list(range(250, 700))),
    "stop-token": SamplingParams(temperature=1.0, max_tokens=400, stop_token_ids=[777, 901, 1100, 333]),
    "grammar": SamplingParams(temperature=1.0, max_tokens=400, structured_outputs=EMAIL),
    "logprobs": SamplingParams(temperature=0.7, logprobs=3, prompt_logprobs=2, **LONG),
    "bias": SamplingParams(temperature=1.0, logit_bias={40: 2.0, 41: -5.0}, bad_words=["the", "import"], **LONG),
    "repetition": SamplingParams(
        temperature=0.3,
        max_tokens=400,
        ignore_eos=True,
        repetition_detection=RepetitionDetectionParams(max_pattern_size=12, min_pattern_size=1, min_count=3),
    ),
    "interval": SamplingParams(temperature=1.0, stream_interval=7, **LONG),
    "whole": SamplingParams(temperature=1.0, logprobs=0, **LONG),
}


def with_fleet(
    test: Callable[[EngineFleet], Awaitable[None]], num_engines: int = 2, max_resumes: int = 3, **options: Any
) -> None:
    """Run a test with engines that are started again."""

    def start(index: int, num_restarts: int, tokenizer: Any = None) -> Awaitable[EngineClient]:
        return EngineClient.start({**OPTIONS, **options}, log_stats_interval=None, tokenizer=tokenizer)

    async def run() -> None:
        fleet = await start_fleet(start, num_engines, 100, max_resumes)
        others = asyncio.all_tasks()
        try:
            async with asyncio.timeout(150):
                await test(fleet)
                await cancel(asyncio.all_tasks() - others)
        finally:
            await fleet.shutdown()

    asyncio.run(run())


async def read(stream: ClientStream) -> Delta:
    whole = Delta()
    async for delta in stream:
        whole.merge(delta)
    return whole


def streams_of(fleet: EngineFleet, cases: dict[str, SamplingParams]) -> dict[str, ClientStream]:
    return {
        name: fleet.generate(EngineRequest(f"case-{name}", PROMPT, params, stream=name != "whole"))
        for name, params in cases.items()
    }


def visible_facts(delta: Delta) -> dict[str, Any]:
    """All facts of a request that a client can see, except the digits that differ with the shape of a step."""
    facts: dict[str, Any] = {
        "text": delta.text,
        "token_ids": delta.token_ids,
        "finish": (delta.finish_reason, delta.finish_detail, delta.stop_reason),
        "cached": delta.num_cached_tokens,
    }
    for name, logprobs in (("logprobs", delta.logprobs), ("prompt_logprobs", delta.prompt_logprobs)):
        if logprobs is not None:
            facts[name] = (logprobs.counts, logprobs.token_ids, logprobs.ranks, logprobs.pieces)
            facts[f"{name} values"] = logprobs.values
    return facts


def comparable(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts that compare equal if their logits were computed in steps of other shapes."""
    return {
        name: pytest.approx(value, abs=1e-4) if name.endswith(" values") else value for name, value in facts.items()
    }


async def kill(engine: EngineClient) -> None:
    os.kill(engine.info.pid, signal.SIGKILL)
    await asyncio.wait_for(engine.dead.wait(), 10)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.003)


async def until_it_has(stream: ClientStream, num_tokens: int) -> None:
    await until(lambda: stream.num_output_tokens >= num_tokens)


async def until_idle(fleet: EngineFleet) -> None:
    """Wait until both engines live and have no request."""
    await until(lambda: fleet.num_alive == len(fleet.engines))
    for engine in fleet.engines:
        while (stats := await engine.ask(Stats())).scheduler.num_running or stats.scheduler.num_waiting:
            await asyncio.sleep(0.005)
        assert stats.scheduler.num_free_blocks == stats.scheduler.num_blocks


@pytest.mark.parametrize("draft_tokens", [pytest.param(3, marks=pytest.mark.long), 0])
def test_resumed_requests_of_every_kind_give_the_same_output(
    draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pointsman.server.service.fleet.LONGEST_DELAY", 0.2)  # the engine dies every few seconds
    rounds, generator = short_or_long(1, 12), random.Random(5)

    async def test(fleet: EngineFleet) -> None:
        undisturbed = streams_of(fleet, CASES)
        await fleet.queue(list(undisturbed.values()))
        expected = dict(zip(undisturbed, await asyncio.gather(*map(read, undisturbed.values())), strict=True))
        cut = set()
        for _ in range(rounds):
            await fleet.ask(ResetPrefixCache(preempt_running=False))
            streams = streams_of(fleet, CASES)
            await fleet.queue(list(streams.values()))
            reading = {name: asyncio.ensure_future(read(stream)) for name, stream in streams.items()}
            # Each of the two once, so that every request is cut, some of them twice.
            for at in sorted(generator.sample(range(1, 110), 2)):
                await until_it_has(streams["greedy"], at)
                victim = streams["greedy"].engine
                held = [one for one in streams.values() if one.engine == victim and not reading_is_over(one, expected)]
                before = {one.request.request_id: one.num_output_tokens for one in held}
                await kill(fleet.engines[victim])
                cut |= {name for name, num_tokens in before.items() if num_tokens}
            for name, task in reading.items():
                assert visible_facts(await task) == comparable(visible_facts(expected[name])), (
                    name,
                    streams[name].num_deaths,
                )
            await until_idle(fleet)
        missing = {f"case-{name}" for name in CASES} - cut
        assert not missing or rounds < 12, f"never cut in the middle: {missing}"
        assert len(cut) > len(CASES) / 2

    with_fleet(test, num_draft_tokens=draft_tokens)


def reading_is_over(stream: ClientStream, expected: dict[str, Delta]) -> bool:
    name = stream.request.request_id.removeprefix("case-")
    return stream.num_output_tokens >= len(expected[name].token_ids)


@pytest.mark.long
def test_resumed_bfloat16_stream_continues_with_most_likely_tokens() -> None:
    """Received tokens are kept. Each later token is the most likely one for an engine that computes all tokens in
    one step, except for rounding, as in an undisturbed stream."""
    params = SamplingParams(temperature=0, **LONG)

    async def shortfall(fleet: EngineFleet, tokens: list[int]) -> float:
        scoring = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
        found = (await read(fleet.generate(EngineRequest("score", PROMPT + tokens, scoring)))).prompt_logprobs
        assert found is not None
        positions = [[found.values[place] for place in one] for one in found.positions()][len(PROMPT) :]
        assert len(positions) == len(tokens)
        return max(max(values) - values[0] for values in positions)

    async def test(fleet: EngineFleet) -> None:
        undisturbed = await read(fleet.generate(EngineRequest("a", PROMPT, params)))
        allowed = await shortfall(fleet, undisturbed.token_ids) + 0.1
        wrong = [*undisturbed.token_ids[:80], *undisturbed.token_ids[81:]]
        assert await shortfall(fleet, wrong) > 10 * allowed, "a token that is lost would be noticed"
        for before in (3, 77, 140):
            stream = fleet.generate(EngineRequest("a", PROMPT, params))
            await stream.start()
            engine = fleet.engines[stream.engine]
            await until_it_has(stream, before)
            await kill(engine)
            received = list(stream.output_token_ids)
            whole = await read(stream)
            assert stream.num_deaths == 1 and whole.finish_reason == "length"
            assert received and whole.token_ids[: len(received)] == received
            assert len(whole.token_ids) == LONG["max_tokens"]
            assert await shortfall(fleet, whole.token_ids) <= allowed
            await until_idle(fleet)

    with_fleet(test, dtype="bfloat16")


@pytest.mark.long
def test_stop_string_may_span_the_resume_point() -> None:
    """The dying engine holds back the text that may begin the stop string, and the next engine completes it."""

    async def test(fleet: EngineFleet) -> None:
        plain = fleet.generate(EngineRequest("stop", PROMPT, SamplingParams(temperature=0.9, seed=3, **LONG)))
        pieces = [delta async for delta in plain]
        text = "".join(delta.text for delta in pieces)
        middle = len(text) // 2
        stop = text[middle : middle + 12]
        params = SamplingParams(temperature=0.9, seed=3, stop=[stop], **LONG)
        whole = await read(fleet.generate(EngineRequest("stop", PROMPT, params)))
        assert whole.finish_reason == "stop" and whole.stop_reason == stop and not whole.text.endswith(stop)
        num_tokens = len(whole.token_ids)
        num_cut = 0
        for before in range(1, 7):  # tokens before its end
            stream = fleet.generate(EngineRequest("stop", PROMPT, params))
            await stream.start()
            engine = fleet.engines[stream.engine]
            await until_it_has(stream, num_tokens - before - 1)
            await kill(engine)
            found = await read(stream)
            assert (found.text, found.token_ids, found.stop_reason) == (whole.text, whole.token_ids, stop)
            num_cut += stream.num_deaths
            await until(lambda: fleet.num_alive == 2)
        assert num_cut > 0

    with_fleet(test)


@pytest.mark.long
def test_request_that_kills_engines_fails_and_others_are_resumed() -> None:
    async def test(fleet: EngineFleet) -> None:
        deadly = fleet.generate(EngineRequest("deadly", PROMPT, SamplingParams(max_tokens=1500, ignore_eos=True)))
        reading = asyncio.ensure_future(read(deadly))
        for _ in range(3):
            await until(lambda: deadly.num_deaths < 3 and fleet.engines[deadly.engine].is_alive)
            await until_it_has(deadly, deadly.num_output_tokens + 1)
            await kill(fleet.engines[deadly.engine])
        with pytest.raises(EngineDeadError, match="3 engines have died with this request, which is resumed 2 times"):
            await reading
        other = await read(fleet.generate(EngineRequest("other", PROMPT, SamplingParams(max_tokens=8))))
        assert other.finish_reason is not None

    with_fleet(test, max_resumes=2)


def test_changed_priority_survives_and_waiting_requests_resume_in_order() -> None:
    async def test(fleet: EngineFleet) -> None:
        params = SamplingParams(max_tokens=300, ignore_eos=True, temperature=0)
        streams = [
            fleet.generate(EngineRequest(f"r{number}", PROMPT, params, arrival_time=float(number)))
            for number in range(6)
        ]
        await fleet.queue(streams)
        assert await fleet.ask(SetPriority(("r4", "unknown"), -5)) == ["r4"]
        before = {one.explanation.request_id: one.priority for one in await fleet.ask(ExplainAll())}
        await kill(fleet.engines[0])
        await until(lambda: fleet.num_alive == 1)
        while len(await fleet.ask(ExplainAll())) < 6:
            await asyncio.sleep(0.003)
        after = await fleet.ask(ExplainAll())
        assert {one.explanation.request_id: one.priority for one in after} == before
        positions = {one.explanation.request_id: one.explanation.position for one in after}
        queued = sorted((place, name) for name, place in positions.items() if place is not None)
        expected = sorted((name for _, name in queued), key=lambda name: (name != "r4", name))
        assert [name for _, name in queued] == expected
        for stream in streams:
            await stream.aclose()

    with_fleet(test, num_engines=1, order="priority", max_num_seqs=2)


def test_failed_start_of_one_engine_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """One engine is ready, one is starting, and the third fails: all processes have ended when the error is raised."""
    clients: list[EngineClient] = []
    make = EngineClient.__init__

    def noted(client: EngineClient, *arguments: Any) -> None:
        make(client, *arguments)
        clients.append(client)

    monkeypatch.setattr(EngineClient, "__init__", noted)

    async def start(index: int, num_restarts: int, tokenizer: Any = None) -> EngineClient:
        if index == 2:
            while not clients or clients[0].info is None:
                await asyncio.sleep(0.01)
            raise EngineStartError("the third does not start")
        if index == 1:
            while not clients or clients[0].info is None:
                await asyncio.sleep(0.001)
        return await EngineClient.start(OPTIONS, log_stats_interval=None)

    with pytest.raises(EngineStartError, match="the third does not start"):
        asyncio.run(start_fleet(start, 3, 5))
    assert clients and all(client._process.poll() is not None for client in clients)
