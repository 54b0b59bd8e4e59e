"""Embeddings equal transformers': whole prompts, chunks, batches with requests that generate, preemption, failures."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core import RequestRefused
from pointsman.engine import LLM, AsyncEngine, Engine, EngineStepError, PoolingParams, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.model.runner import NOT_FINITE
from pointsman.engine.params.pooling import Pooling
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, build

KNOBS: dict[str, Any] = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
TOLERANCE = 1e-4
FAMILY_NAMES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "cohere")
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


def prompts_of(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    choose = random.Random(seed)
    return [[choose.randrange(3, VOCAB_SIZE) for _ in range(choose.randint(1, longest))] for _ in range(count)]


def expected(family: str, prompts: list[list[int]], pooling: Pooling, normalize: bool = True) -> np.ndarray:
    """[prompts, hidden_size] vectors that transformers computes, one prompt at a time."""
    model = build(FAMILIES[family](), seed=1)
    vectors = []
    with torch.inference_mode():
        for prompt in prompts:
            states = model.base_model(torch.tensor([prompt])).last_hidden_state[0].float()
            vector = states[-1] if pooling == "last" else states.mean(dim=0)
            vectors.append(torch.nn.functional.normalize(vector, dim=0) if normalize else vector)
    return torch.stack(vectors).numpy()


def embedded(llm: LLM, prompts: list[list[int]], pooling: Pooling, **options: Any) -> np.ndarray:
    outputs = llm.embed([{"prompt_token_ids": one} for one in prompts], pooling, use_tqdm=False, **options)
    assert [one.prompt_token_ids for one in outputs] == prompts
    assert all(one.outputs.embedding.dtype == np.float32 for one in outputs)
    return np.stack([one.outputs.embedding for one in outputs])


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("fuse", [True, False])
def test_embedding_vectors_equal_those_of_transformers(family: str, pooling: Pooling, fuse: bool) -> None:
    llm = LLM(wrap_model(build(FAMILIES[family](), seed=1), fuse=fuse), **KNOBS)
    prompts = prompts_of(6)
    for normalize in (True, False):
        ours = embedded(llm, prompts, pooling, normalize=normalize)
        theirs = expected(family, prompts, pooling, normalize)
        error = np.abs(ours - theirs).max() / max(1.0, float(np.abs(theirs).max()))
        print(f"{family}, {pooling}, fuse={fuse}, normalize={normalize}: largest error {error:.1e}")
        assert error < TOLERANCE
        if normalize:
            assert np.allclose(np.linalg.norm(ours, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_chunked_prompts_get_the_vectors_of_whole_prompts(loaded: LoadedModel, pooling: Pooling) -> None:
    prompts = prompts_of(5, seed=3)
    llm = LLM(loaded, **{**KNOBS, "max_num_batched_tokens": 8, "long_prefill_token_threshold": 3})
    assert np.abs(embedded(llm, prompts, pooling) - expected("qwen3", prompts, pooling)).max() < TOLERANCE


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_preempted_prompt_is_pooled_again(loaded: LoadedModel, pooling: Pooling) -> None:
    """Decoding requests preempt embedding requests whose prompts are half computed; then all requests are preempted."""
    prompts = prompts_of(4, seed=4, longest=30)
    prompts = [prompt + prompt[:1] * (24 - len(prompt)) for prompt in prompts]
    engine = Engine(
        loaded, **{**KNOBS, "num_blocks": 24, "max_num_batched_tokens": 10, "full_sequence_must_fit": False}
    )
    for number in range(3):
        engine.add_request(f"text-{number}", [5, 6, 7, number + 3], SamplingParams(max_tokens=28, ignore_eos=True))
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, PoolingParams(pooling))
    found: dict[str, np.ndarray] = {}
    preempted = steps = 0
    while engine.has_unfinished_requests():
        steps += 1
        if steps in (6, 9):
            engine.scheduler.reset_prefix_cache(engine.clock(), preempt_running=True)
        for output in engine.step():
            if output.embedding is not None:
                found[output.request_id] = output.embedding
                preempted += output.metrics.num_preemptions
        engine.scheduler.check_invariants()
    assert preempted > 0 and len(engine.runner.pooler) <= 1
    ours = np.stack([found[str(number)] for number in range(len(prompts))])
    assert np.abs(ours - expected("qwen3", prompts, pooling)).max() < TOLERANCE


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_chunk_that_failed_is_not_counted_twice(
    loaded: LoadedModel, pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts_of(1, seed=5)
    prompt = prompt * 3
    engine = Engine(loaded, **{**KNOBS, "max_num_batched_tokens": 8})
    engine.add_request("a", prompt[:30], PoolingParams(pooling))
    take, calls = engine.runner.pooler.add_states, 0

    def failing(*args: Any) -> Any:
        """Raise in every second step, after the hidden states of the step were added."""
        nonlocal calls
        vectors, calls = take(*args), calls + 1
        if calls % 2 == 0:
            raise RuntimeError("the device hiccups")
        return vectors

    monkeypatch.setattr(engine.runner.pooler, "add_states", failing)
    failures, outputs = 0, []
    while engine.has_unfinished_requests():
        try:
            outputs += engine.step()
        except EngineStepError:
            failures += 1
    assert failures or pooling == "last"
    assert np.abs(outputs[-1].embedding - expected("qwen3", [prompt[:30]], pooling)[0]).max() < TOLERANCE


def test_generating_and_embedding_requests_share_steps(loaded: LoadedModel) -> None:
    prompts, params = prompts_of(4, seed=6), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=2)
    asks_all = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, prompt_logprobs=1)
    llm = LLM(loaded, **KNOBS)
    texts = [{"prompt_token_ids": one} for one in prompts]
    alone = [one.token_ids for one in llm.generate(texts, params, use_tqdm=False)]
    logprobs = llm.generate(texts[0], asks_all, use_tqdm=False)[0].prompt_logprobs
    engine = Engine(loaded, **KNOBS)
    for number, prompt in enumerate(prompts):
        engine.add_request(f"text-{number}", prompt, params)
        engine.add_request(f"mean-{number}", prompt, PoolingParams("mean"))
        engine.add_request(f"last-{number}", prompt, PoolingParams("last"))
    engine.add_request("logprobs", prompts[0], asks_all)
    ended = {}
    while engine.has_unfinished_requests():
        ended |= {one.request_id: one for one in engine.step() if one.finished}
    assert [ended[f"text-{number}"].token_ids for number in range(4)] == alone
    for pooling in POOLINGS:
        ours = np.stack([ended[f"{pooling}-{number}"].embedding for number in range(4)])
        assert np.abs(ours - expected("qwen3", prompts, pooling)).max() < TOLERANCE
    found = ended["logprobs"].prompt_logprobs
    assert found is not None and logprobs is not None
    for one, other in zip(found[1:], logprobs[1:], strict=True):
        assert one is not None and other is not None and one.keys() == other.keys()
    assert ended["mean-0"].finish_reason == "stop" and ended["mean-0"].token_ids == []
    assert ended["text-0"].embedding is None


def test_only_last_token_pooling_uses_the_prefix_cache(loaded: LoadedModel) -> None:
    prompt = prompts_of(1, seed=7, longest=40)[0] + [9] * 20
    llm = LLM(loaded, **KNOBS)
    cached = {}
    for pooling in POOLINGS:
        for _ in range(2):
            (output,) = llm.embed({"prompt_token_ids": prompt}, pooling, use_tqdm=False)
            cached[pooling] = output.num_cached_tokens
            assert np.abs(output.outputs.embedding - expected("qwen3", [prompt], pooling)[0]).max() < TOLERANCE
    assert cached["last"] == (len(prompt) - 1) // 4 * 4 and cached["mean"] == 0


def test_invalid_embedding_requests_are_refused(loaded: LoadedModel) -> None:
    llm = LLM(loaded, **KNOBS)
    with pytest.raises(ValueError, match=r'"last" or "mean"'):
        llm.embed({"prompt_token_ids": [1]}, "first", use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="129 tokens and max_model_len is 128"):
        llm.embed({"prompt_token_ids": [5] * 129}, use_tqdm=False)
    assert embedded(llm, [[5] * 128], "mean").shape[0] == 1
    with pytest.raises(RequestRefused, match="empty"):
        Engine(loaded, **KNOBS).add_request("a", [], PoolingParams())


def test_a_vector_that_is_not_finite_is_an_error_of_its_request(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(loaded, **KNOBS)
    engine.add_request("bad", [5, 6], PoolingParams())
    engine.add_request("good", [7, 8], PoolingParams())
    take = engine.runner.pooler.add_states

    def spoiled(chunks: Any, hidden: torch.Tensor) -> Any:
        hidden = hidden.clone()
        hidden[0, 0] = torch.nan
        return take(chunks, hidden)

    monkeypatch.setattr(engine.runner.pooler, "add_states", spoiled)
    ended = {one.request_id: one for one in engine.step()}
    assert (ended["bad"].finish_reason, ended["bad"].finish_detail) == ("error", NOT_FINITE)
    assert ended["bad"].embedding is None and ended["good"].embedding is not None


def test_many_callers_of_an_async_engine_get_their_vectors(loaded: LoadedModel) -> None:
    prompts = prompts_of(12, seed=8)

    async def test() -> np.ndarray:
        async with AsyncEngine(loaded, log_stats_interval=None, **KNOBS) as engine:
            params = PoolingParams("mean")
            found = await asyncio.gather(*(engine.embed(prompt, params) for prompt in prompts))
            stats = await engine.stats()
            assert stats.scheduler.num_running == 0 and stats.counters.num_generated_tokens == 0
            assert stats.counters.num_prompt_tokens == sum(map(len, prompts))
            return np.stack([one.outputs.embedding for one in found])

    assert np.abs(asyncio.run(test()) - expected("qwen3", prompts, "mean")).max() < TOLERANCE
