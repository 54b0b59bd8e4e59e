"""Streaming engines limit chunks by the prefill gap by default; `LLM` and `Engine` do not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pointsman.engine import LLM, AsyncEngine, Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model
from pointsman.engine.params.engine_args import PREFILL_GAP, with_prefill_gap

SIZES: dict[str, Any] = {"num_blocks": 256, "max_model_len": 2048}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return load_model("demo", "float32")


def limits_of(engine: Engine) -> tuple[str, ...]:
    return engine.scheduler.config.token_limits


def test_only_streaming_engines_have_the_prefill_gap_limit(loaded: LoadedModel) -> None:
    async def of_async_engine(**knobs: Any) -> tuple[str, ...]:
        async with AsyncEngine(loaded, log_stats_interval=None, **SIZES, **knobs) as engine:
            return await engine.call(limits_of)

    assert asyncio.run(of_async_engine()) == (PREFILL_GAP,)
    assert asyncio.run(of_async_engine(token_limits=())) == ()
    assert limits_of(Engine(loaded, **SIZES)) == limits_of(LLM(loaded, log_stats_interval=None, **SIZES).engine) == ()


@pytest.mark.parametrize(
    "own",
    [
        {"token_limits": ()},
        {"token_limits": ("target-itl",)},
        {"enable_chunked_prefill": False},
        {"batching": "static"},
        {"long_prefill_token_threshold": 64},
        {"max_num_partial_prefills": 2},
        {"first_chunk_only": True},
    ],
)
def test_chunk_knobs_replace_the_prefill_gap_limit(own: dict[str, Any]) -> None:
    assert with_prefill_gap(own) == own


def test_other_knobs_keep_the_prefill_gap_limit() -> None:
    given = {"max_num_batched_tokens": 2048, "enable_chunked_prefill": True, "order": "fair", "num_draft_tokens": 4}
    assert with_prefill_gap(given) == {**given, "token_limits": (PREFILL_GAP,)}


@pytest.mark.parametrize("others", [{}, {"num_draft_tokens": 4}, {"max_steps_in_flight": 2}], ids=str)
def test_the_prefill_gap_limit_changes_no_tokens(loaded: LoadedModel, others: dict[str, Any]) -> None:
    """With a target that no step can meet, prompts are cut into chunks of minimum size."""
    prompts = [[5 + number] * 20 + list(range(10, 10 + 200 * number)) for number in range(5)]

    def outputs(**knobs: Any) -> tuple[list[tuple[int, ...]], int]:
        engine = Engine(loaded, **SIZES, **others, **knobs)
        found: dict[str, tuple[int, ...]] = {}
        for number, prompt in enumerate(prompts):
            engine.add_request(f"r{number}", prompt, GREEDY)
            for _ in range(3):
                found |= {each.request_id: tuple(each.outputs[0].token_ids) for each in engine.step()}
        while engine.has_unfinished_requests():
            found |= {each.request_id: tuple(each.outputs[0].token_ids) for each in engine.step()}
        num_steps = engine.counters.num_steps
        engine.close()
        return [found[f"r{number}"] for number in range(len(prompts))], num_steps

    whole, few = outputs()
    cut, many = outputs(token_limits=("prefill-gap:seconds=0.0001,least=8",))
    assert cut == whole
    assert many > few
