"""Prompts in parts on a real model: the output equals that of the whole prompt, whenever the parts arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pointsman.core import InvalidTransition, RequestRefused, UnknownRequest
from pointsman.engine import LLM, AsyncEngine, Engine, PoolingParams, SamplingParams, StructuredOutputsParams
from pointsman.engine.drafts.draft_counts import StepCost
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model, wrap_model
from tests.engine.tiny_models import FAMILIES, build

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6, 5, 5, 10, 11, 12, 13, 14, 3, 3, 9, 20, 21]
PARTS = [PROMPT[:6], PROMPT[6:7], PROMPT[7:15], PROMPT[15:]]
KNOBS: dict[str, Any] = {"num_blocks": 32, "block_size": 4, "max_model_len": 96, "max_num_seqs": 4}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


def whole(loaded: LoadedModel, params: SamplingParams = GREEDY) -> list[int]:
    (output,) = LLM(loaded, **KNOBS).generate({"prompt_token_ids": PROMPT}, params, use_tqdm=False)
    return output.token_ids


def run_out(engine: Engine) -> dict[str, Any]:
    """Step while any request is runnable; return the last outputs."""
    ended = {}
    while engine.has_runnable_requests():
        ended |= {one.request_id: one for one in engine.step() if one.finished}
        engine.scheduler.check_invariants()
    return ended


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.9, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0, max_tokens=12, min_tokens=12, repetition_penalty=1.5, presence_penalty=0.5, logprobs=1
    ),
]


@pytest.mark.parametrize("params", PARAMS, ids=["greedy", "random", "penalties"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("eager", [True, False], ids=["at once", "one by one"])
def test_a_prompt_in_parts_gives_the_output_of_the_whole_prompt(
    loaded: LoadedModel, params: SamplingParams, caching: bool, eager: bool
) -> None:
    engine = Engine(loaded, enable_prefix_caching=caching, **KNOBS)
    engine.add_request("a", PARTS[0], params, more_input=True)
    for index, part in enumerate(PARTS[1:]):
        if not eager:
            assert run_out(engine) == {}
        engine.extend("a", part, more_input=index < len(PARTS) - 2)
    output = run_out(engine)["a"]
    assert output.token_ids == whole(loaded, params)
    assert output.prompt_token_ids == PROMPT and output.finish_reason == "length"


def test_the_last_part_of_a_prompt_may_be_empty(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("a", PARTS[0], GREEDY, more_input=True)
    for part in PARTS[1:]:
        engine.extend("a", part, more_input=True)
    assert run_out(engine) == {}
    assert engine.scheduler.stats().num_parked == {"waiting_for_streaming_req": 1}
    engine.extend("a", ())
    assert run_out(engine)["a"].token_ids == whole(loaded)


def test_requests_waiting_for_input_share_a_small_pool(loaded: LoadedModel) -> None:
    """The KV of waiting requests is evicted meanwhile; the outputs are equal."""
    expected = whole(loaded)
    engine = Engine(loaded, **{**KNOBS, "num_blocks": 12, "max_model_len": 48})
    for number in range(5):
        engine.add_request(f"part-{number}", PARTS[0], GREEDY, more_input=True)
    assert run_out(engine) == {}
    for number in range(3):
        engine.add_request(f"other-{number}", [30 + number, *PROMPT], GREEDY)
    run_out(engine)
    for number in range(5):
        engine.extend(f"part-{number}", PROMPT[6:])
    ended = run_out(engine)
    assert [ended[f"part-{number}"].token_ids for number in range(5)] == [expected] * 5
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("knobs", [{"num_draft_tokens": 3}, {"max_steps_in_flight": 2}], ids=str)
def test_prompt_parts_give_equal_outputs_with_drafts_and_steps_in_flight(
    loaded: LoadedModel, knobs: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether drafts are searched and pay does not depend on measured times.
    monkeypatch.setattr(StepCost, "observe", lambda *_: None)
    monkeypatch.setattr("pointsman.engine.drafts.prompt_lookup.SEARCH_SHARE", 1e9)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    engine = Engine(loaded, **knobs, **KNOBS)
    for name in ("a", "b"):
        engine.add_request(name, PARTS[0], params, more_input=True)
    for index, part in enumerate(PARTS[1:]):
        run_out(engine)
        for name in ("a", "b"):
            engine.extend(name, part, more_input=index < len(PARTS) - 2)
    ended = run_out(engine)
    assert [ended[name].token_ids for name in ("a", "b")] == [whole(loaded, params)] * 2
    assert bool(engine.scheduler.stats().num_draft_tokens) == ("num_draft_tokens" in knobs)
    engine.close()


def test_a_prompt_part_reuses_the_kv_of_earlier_parts(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    request = engine.add_request("a", PARTS[0], GREEDY, more_input=True)
    found = []
    for index, part in enumerate(PARTS[1:]):
        run_out(engine)
        engine.extend("a", part, more_input=index < len(PARTS) - 2)
        engine.step()
        found.append(request.num_cached_tokens)
    assert found == [4, 4, 12], "of 6, 7 and 15 tokens those in full blocks of 4"
    assert run_out(engine)["a"].metrics.num_preemptions == 0


@pytest.mark.parametrize("early", [True, False], ids=["before its grammar is compiled", "behind the first part"])
def test_a_prompt_in_parts_gives_the_structured_output_of_the_whole(early: bool) -> None:
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["yes, it is", "no"]))
    engine = Engine(load_model("demo"), num_blocks=64)
    engine.add_request("whole", "The import statement", params)
    answer = run_out_with_grammars(engine)["whole"].text
    engine = Engine(load_model("demo"), num_blocks=64)
    engine.add_request("a", "The import", params, more_input=True)
    while not early and not engine.scheduler.stats().num_parked.get("waiting_for_streaming_req"):
        assert [one.finish_detail for one in engine.step()] == []
    engine.extend("a", " statement")
    output = run_out_with_grammars(engine)["a"]
    assert output.text == answer in ("yes, it is", "no") and output.prompt == "The import statement"
    engine.close()


def run_out_with_grammars(engine: Engine) -> dict[str, Any]:
    """Like `run_out`, but wait for grammars."""
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {one.request_id: one for one in engine.step() if one.finished}
    return ended


def test_a_stop_string_ends_the_output_after_a_prompt_in_parts(loaded: LoadedModel) -> None:
    engine = Engine(load_model("demo"), num_blocks=64)
    engine.add_request("a", "The import", SamplingParams(temperature=0, max_tokens=40, stop=["e"]), more_input=True)
    engine.extend("a", " statement")
    output = run_out(engine)["a"]
    assert output.finish_reason == "stop" and output.stop_reason == "e" and "e" not in output.text


def test_a_request_may_end_between_its_prompt_parts(loaded: LoadedModel) -> None:
    now = [0.0]
    engine = Engine(loaded, clock=lambda: now[0], watchdog_seconds=5.0, **KNOBS)
    engine.add_request("late", PARTS[0], GREEDY, more_input=True, deadline=60.0)
    engine.add_request("gone", PARTS[0], GREEDY, more_input=True)
    run_out(engine)
    aborted = engine.abort("gone")
    assert aborted is not None and aborted.finish_reason == "abort"
    for now[0] in (10.0, 30.0, 59.0):
        engine.step()
    assert engine.watchdog is not None and engine.watchdog.num_stalled == 0, "it waits for its caller"
    now[0] = 61.0
    (output,) = engine.end_overdue()
    assert (output.request_id, output.finish_reason, output.token_ids) == ("late", "deadline", [])
    for name in ("late", "gone"):
        with pytest.raises(UnknownRequest):
            engine.extend(name, [5])
    assert not engine.has_unfinished_requests()
    stats = engine.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_parameters_that_need_the_whole_prompt_are_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    with pytest.raises(ValueError, match="embeddings need the whole prompt"):
        engine.add_request("a", PROMPT, PoolingParams(), more_input=True)
    with pytest.raises(ValueError, match="prompt_logprobs need the whole prompt"):
        engine.add_request("a", PROMPT, SamplingParams(prompt_logprobs=1), more_input=True)
    engine.add_request("a", PROMPT, GREEDY, more_input=True)
    with pytest.raises(RequestRefused, match="max_model_len is 96"):
        engine.extend("a", [5] * 80)
    with pytest.raises(ValueError, match="outside the model's vocabulary"):
        engine.extend("a", [10**6])
    engine.extend("a", [5])
    with pytest.raises(InvalidTransition, match="no more input"):
        engine.extend("a", [5])
    with pytest.raises(UnknownRequest):
        engine.extend("b", [5])
    run_out(engine)


# ------------------------------------------------------------------------------------------------- asyncio


async def arriving(parts: Sequence[Any], pause: float = 0.01) -> AsyncIterator[Any]:
    for part in parts:
        await asyncio.sleep(pause)
        yield part


def test_an_iterator_of_parts_is_accepted_as_a_prompt(loaded: LoadedModel) -> None:
    async def test() -> None:
        async with AsyncEngine(loaded, log_stats_interval=None, **KNOBS) as engine:
            streams = [engine.generate(arriving(PARTS, pause), GREEDY) for pause in (0.0, 0.02)]
            for stream in streams:
                outputs = [output async for output in stream]
                assert outputs[-1].token_ids == whole(loaded) and outputs[-1].prompt_token_ids == PROMPT

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("caching", [True, False])
def test_many_prompts_in_parts_share_a_pool_with_blocks_for_one(loaded: LoadedModel, caching: bool) -> None:
    """Blocks run out repeatedly, and no request waits for another waiting one."""
    prompts = [[number + 1, *PROMPT] for number in range(8)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    knobs = {**KNOBS, "num_blocks": 12, "max_model_len": 44, "max_num_seqs": 8, "enable_prefix_caching": caching}
    outputs = LLM(loaded, **KNOBS).generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    async def answer(engine: AsyncEngine, number: int) -> list[int]:
        prompt, size = prompts[number], number % 3 + 3
        parts = [prompt[at : at + size] for at in range(0, len(prompt), size)]
        *_, last = [output async for output in engine.generate(arriving(parts, 0.003 * (number % 4)), params)]
        return last.token_ids

    async def test() -> None:
        async with AsyncEngine(loaded, log_stats_interval=None, **knobs) as engine:
            answers = await asyncio.gather(*(answer(engine, number) for number in range(8)))
            assert answers == [output.token_ids for output in outputs]
            stats = (await engine.stats()).scheduler
            assert stats.num_preemptions > 0 and stats.num_free_blocks == stats.num_blocks
            await engine.call(lambda engine: engine.scheduler.check_invariants())

    asyncio.run(asyncio.wait_for(test(), 60))


def test_the_texts_of_prompt_parts_are_joined_in_the_output() -> None:
    async def test() -> None:
        async with AsyncEngine(load_model("demo"), log_stats_interval=None, num_blocks=64) as engine:
            stream = engine.generate(arriving(["", "The import", "", " statement"]), GREEDY)
            outputs = [output async for output in stream]
            assert outputs[-1].prompt == "The import statement" and outputs[-1].text

    asyncio.run(asyncio.wait_for(test(), 60))


def test_a_failing_iterator_ends_its_request_and_raises_in_its_stream(loaded: LoadedModel) -> None:
    async def breaks() -> AsyncIterator[list[int]]:
        yield PARTS[0]
        await asyncio.sleep(0.05)
        raise ConnectionError("the microphone is gone")

    async def empty() -> AsyncIterator[list[int]]:
        for part in ():
            yield part

    async def too_long() -> AsyncIterator[list[int]]:
        yield PARTS[0]
        yield [5] * 100

    async def test() -> None:
        async with AsyncEngine(loaded, log_stats_interval=None, **KNOBS) as engine:
            for parts, error, message in (
                (breaks(), ConnectionError, "microphone"),
                (empty(), ValueError, "at least one"),
                (too_long(), RequestRefused, "max_model_len"),
            ):
                with pytest.raises(error, match=message):
                    async for _ in engine.generate(parts, GREEDY):
                        pass
            while await engine.call(Engine.has_unfinished_requests):
                await asyncio.sleep(0.01)
            assert (await engine.stats()).scheduler.num_parked == {}

    asyncio.run(asyncio.wait_for(test(), 60))


def test_dropping_a_stream_cancels_the_reading_of_prompt_parts(loaded: LoadedModel) -> None:
    given = []

    async def endless() -> AsyncIterator[list[int]]:
        while True:
            given.append(0)
            yield [5]
            await asyncio.sleep(0.01)

    async def test() -> None:
        async with AsyncEngine(loaded, log_stats_interval=None, **KNOBS) as engine:
            async with engine.generate(endless(), GREEDY) as stream:
                await stream.start()
                await asyncio.sleep(0.1)
            while await engine.call(Engine.has_unfinished_requests):
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            before = len(given)
            await asyncio.sleep(0.1)
            assert len(given) == before

    asyncio.run(asyncio.wait_for(test(), 60))
