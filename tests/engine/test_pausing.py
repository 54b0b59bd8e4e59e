"""Pausing a real engine: its requests, the completion of the pause, and changed weights afterwards."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pointsman.engine import LLM, AsyncEngine, Engine, EngineDeadError, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.pausing import PauseChoice, ResumedError
from tests.engine.tiny_models import FAMILIES, build

PROMPT = [5, 9, 2, 7, 7, 1, 3, 8, 4, 6, 5, 5]
LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
KNOBS: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.fixture
def make_async(loaded: LoadedModel) -> Iterator[Callable[..., AsyncEngine]]:
    made: list[AsyncEngine] = []

    def one(**knobs: Any) -> AsyncEngine:
        made.append(AsyncEngine(loaded, log_stats_interval=None, **{**KNOBS, **knobs}))
        return made[-1]

    yield one
    for engine in made:
        asyncio.run(engine.shutdown())


def tokens_of(engine: Engine) -> dict[str, tuple[list[int], str | None]]:
    """Run until all requests have finished; return request id -> tokens and finish reason."""
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {one.request_id: (one.token_ids, one.finish_reason) for one in engine.step() if one.finished}
    return ended


def undisturbed(loaded: LoadedModel, prompt: list[int] = PROMPT, params: SamplingParams = LONG) -> list[int]:
    (output,) = LLM(loaded, **KNOBS).generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    return output.token_ids


# ------------------------------------------------------------------------------------------------- the engine


def test_a_pause_is_complete_when_no_step_is_in_flight(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **{**KNOBS, "max_steps_in_flight": 2})
    engine.add_request("a", PROMPT, LONG)
    for _ in range(4):
        engine.step()
    paused = engine.pause("keep")
    assert engine.scheduler.num_steps_in_flight > 0 and not paused.done()
    while not paused.done():
        engine.step()
    assert engine.scheduler.num_steps_in_flight == 0 and not engine.has_runnable_requests()
    engine.resume()
    assert tokens_of(engine) == {"a": (undisturbed(loaded), "length")}
    engine.close()


@pytest.mark.parametrize("clear_cache", [False, True])
def test_suspended_requests_later_generate_the_same_tokens(loaded: LoadedModel, clear_cache: bool) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("a", PROMPT, LONG)
    for _ in range(5):
        engine.step()
    assert engine.pause("keep", clear_cache=clear_cache).done() and engine.is_paused
    engine.add_request("b", PROMPT, LONG)
    assert [engine.step() for _ in range(3)] == [[], [], []]
    assert not engine.has_runnable_requests() and engine.has_unfinished_requests()
    stats = engine.scheduler.stats()
    assert stats.num_running == (0 if clear_cache else 1)
    assert stats.num_free_blocks == stats.num_blocks if clear_cache else stats.num_free_blocks < stats.num_blocks
    assert not clear_cache or stats.num_cached_free_blocks == 0
    engine.resume()
    expected = undisturbed(loaded)
    assert tokens_of(engine) == {"a": (expected, "length"), "b": (expected, "length")}


def test_mode_wait_waits_for_running_requests_only(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **{**KNOBS, "max_num_seqs": 1})
    engine.add_request("a", PROMPT, LONG)
    engine.add_request("b", PROMPT, LONG)
    engine.step()
    paused = engine.pause("wait")
    assert not paused.done()
    ended = []
    while not paused.done():
        ended += [one.request_id for one in engine.step() if one.finished]
    assert ended == ["a"] and engine.scheduler.stats().num_cached_free_blocks == 0
    assert engine.step() == [] and not engine.has_runnable_requests()
    engine.resume()
    assert list(tokens_of(engine)) == ["b"]


def test_aborts_and_deadlines_also_complete_a_pause(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("a", PROMPT, LONG)
    engine.step()
    paused = engine.pause("wait")
    engine.abort("a")
    assert paused.done()


def test_mode_abort_ends_requests_and_the_next_step_returns_outputs(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **{**KNOBS, "max_num_seqs": 1})
    engine.add_request("a", PROMPT, LONG)
    engine.add_request("b", PROMPT, LONG)
    engine.step()
    assert engine.pause("abort").done()
    assert engine.has_unfinished_requests() and not engine.has_runnable_requests(), "only outputs remain"
    assert {one.request_id: one.finish_reason for one in engine.step()} == {"a": "abort", "b": "abort"}
    assert not engine.has_unfinished_requests()
    engine.add_request("c", PROMPT, LONG)
    assert engine.step() == []
    engine.resume()
    assert tokens_of(engine) == {"c": (undisturbed(loaded), "length")}


def test_a_later_pause_replaces_an_earlier_one(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("a", PROMPT, LONG)
    engine.step()
    first = engine.pause("wait", clear_cache=True)
    second = engine.pause("keep", clear_cache=False)
    assert first.done() and second.done()
    assert engine.scheduler.stats().num_running == 0, "the first one asked for an empty cache"


def test_resuming_an_incomplete_pause_raises_for_its_callers(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("a", PROMPT, LONG)
    engine.step()
    paused = engine.pause("wait")
    engine.resume()
    with pytest.raises(ResumedError):
        paused.result(timeout=0)
    assert tokens_of(engine) == {"a": (undisturbed(loaded), "length")}


def test_an_unknown_pause_mode_is_refused(loaded: LoadedModel) -> None:
    engine = Engine(loaded, **KNOBS)
    with pytest.raises(ValueError, match=r"'later'.*abort, wait, keep"):
        engine.pause("later")  # type: ignore[arg-type]
    assert not engine.is_paused


def test_llm_does_not_wait_for_ever_on_a_paused_engine(loaded: LoadedModel) -> None:
    llm = LLM(loaded, **KNOBS)
    llm.engine.pause("keep")
    with pytest.raises(RuntimeError, match="resume"):
        llm.generate({"prompt_token_ids": PROMPT}, LONG, use_tqdm=False)


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_weights_may_change_under_a_paused_engine(mode: PauseChoice) -> None:
    """Suspended requests continue from their tokens with the new weights; no old KV is read again."""
    old, new = build(FAMILIES["llama"](), seed=1), build(FAMILIES["llama"](), seed=2)
    before, after = wrap_model(copy.deepcopy(old), fuse=False), wrap_model(new, fuse=False)
    engine = Engine(before, **KNOBS)
    engine.add_request("a", PROMPT, LONG)
    for _ in range(8):
        engine.step()
    paused = engine.pause(mode)
    ended: dict[str, list[int]] = {}
    while not paused.done():
        ended |= {one.request_id: one.token_ids for one in engine.step() if one.finished}
    with torch.no_grad():
        for ours, theirs in zip(before.model.parameters(), after.model.parameters(), strict=True):
            ours.copy_(theirs)
    engine.resume()
    engine.add_request("b", PROMPT, LONG)
    ended |= {name: tokens for name, (tokens, _) in tokens_of(engine).items()}
    by_old, by_new = undisturbed(wrap_model(old, fuse=False)), undisturbed(after)
    assert by_old != by_new and ended["b"] == by_new
    if mode == "wait":
        assert ended["a"] == by_old
    else:
        kept = ended["a"][:8]
        assert kept == by_old[:8]
        rest = SamplingParams(temperature=0, max_tokens=LONG.max_tokens - 8, ignore_eos=True)  # type: ignore[operator]
        assert ended["a"][8:] == undisturbed(after, PROMPT + kept, rest)


# ------------------------------------------------------------------------------------------------- asyncio


def test_a_paused_engine_is_idle_and_streams_continue_afterwards(
    make_async: Callable[..., AsyncEngine], loaded: LoadedModel
) -> None:
    async def test() -> None:
        engine = make_async()
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.pause("keep")
        assert await engine.is_paused()
        waiting = engine.generate(PROMPT, LONG)
        await waiting.start()
        before = (await engine.stats()).counters.num_steps
        cpu = time.process_time()
        await asyncio.sleep(1.2)
        assert time.process_time() - cpu < 0.4, "it is idle, and does not poll for work"
        assert (await engine.stats()).counters.num_steps == before
        await engine.resume()
        for one in (stream, waiting):
            assert [output async for output in one][-1].token_ids == undisturbed(loaded)

    asyncio.run(asyncio.wait_for(test(), 60))


def test_mode_wait_returns_when_running_requests_have_finished(make_async: Callable[..., AsyncEngine]) -> None:
    async def test() -> None:
        engine = make_async()
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.pause("wait")
        assert (await engine.stats()).scheduler.num_running == 0
        assert [output async for output in stream][-1].finish_reason == "length"

    asyncio.run(asyncio.wait_for(test(), 60))


def test_deadlines_and_aborts_end_requests_of_a_paused_engine(make_async: Callable[..., AsyncEngine]) -> None:
    async def test() -> None:
        engine = make_async()
        stream = engine.generate(PROMPT, LONG, request_id="kept")
        await anext(stream)
        await engine.pause("keep")

        def add(inner: Engine) -> None:
            inner.add_request("late", PROMPT, LONG, deadline=inner.clock() + 0.2)

        await engine.call(add)
        while await engine.call(lambda inner: inner.scheduler.get_request("late")) is not None:
            await asyncio.sleep(0.05)
        assert await engine.abort("kept")
        assert [output async for output in stream][-1].finish_reason == "abort"
        stats = (await engine.stats()).scheduler
        assert stats.num_free_blocks == stats.num_blocks

    asyncio.run(asyncio.wait_for(test(), 60))


@pytest.mark.parametrize("drain", [False, True])
def test_a_paused_engine_can_be_shut_down(make_async: Callable[..., AsyncEngine], drain: bool) -> None:
    """Requests of a paused engine cannot finish, so a shutdown does not wait for them."""

    async def test() -> None:
        engine = make_async()
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.pause("keep")
        await engine.shutdown(drain=drain)
        assert [output async for output in stream][-1].finish_reason == "abort"
        with pytest.raises(EngineDeadError):
            await engine.pause()

    asyncio.run(asyncio.wait_for(test(), 20))


def test_an_engines_death_fails_its_pause(make_async: Callable[..., AsyncEngine]) -> None:
    async def test() -> None:
        engine = make_async()
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)

        def break_it(inner: Engine) -> None:
            def fail(*_: Any) -> None:
                raise RuntimeError("the device is gone")

            inner.runner.run = fail  # type: ignore[method-assign, assignment]

        await engine.call(break_it)
        with pytest.raises(EngineDeadError, match="the device is gone"):
            await engine.pause("wait")

    asyncio.run(asyncio.wait_for(test(), 60))
