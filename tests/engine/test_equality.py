"""The tokens of real models equal transformers' own `generate`, whatever the scheduler does to the requests.

The reference is `generate` in float32 with eager attention, one request at a time. The engine then gets the same
requests alone, in mixed batches of chunks and decodes, with shared prefixes, and with a pool so small that more than
half of them are preempted; greedy tokens must be equal each time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import FAMILIES, VOCAB_SIZE, build

from pointsman.engine import Engine, RequestOutput, SamplingParams
from pointsman.engine.model_loader import LoadedModel, wrap_model

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 24
PROMPT_LENS = (1, 3, 9, 16, 17, 30, 41, 45, 5, 12, 24)
SHARED_PREFIX = 29
TIGHT: dict[str, Any] = {
    "num_blocks": 19,
    "block_size": 4,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 40,
    "full_sequence_must_fit": False,
}
"""A pool that holds the longest request and little more."""


@dataclass
class Family:
    """A model twice, transformers' own and ours, and the reference outputs."""

    loaded: LoadedModel
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts() -> list[list[int]]:
    """Prompts of mixed lengths; the last three share a prefix with the longest."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, VOCAB_SIZE, n).tolist() for n in PROMPT_LENS]
    longest = max(prompts, key=len)
    return [*prompts, *(longest[:SHARED_PREFIX] + rng.integers(3, VOCAB_SIZE, n).tolist() for n in (2, 8, 21))]


def reference(model: Any, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    model = build(FAMILIES[request.param](), seed=1)
    prompts = make_prompts()
    expected = [reference(model, prompt) for prompt in prompts]
    distinct = len({token for tokens in expected for token in tokens})
    assert distinct > 60, f"{distinct} distinct tokens are too uniform to be a test"
    return Family(wrap_model(copy.deepcopy(model)), prompts, expected)


def run(
    engine: Engine, prompts: list[list[int]], params: SamplingParams | list[SamplingParams] | None = None
) -> list[RequestOutput]:
    """All prompts at once, outputs in their order."""
    params = params or SamplingParams(temperature=0, max_tokens=OUTPUT_TOKENS)
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, params[index] if isinstance(params, list) else params)
    done: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        done.update((output.request_id, output) for output in engine.step() if output.finished)
        engine.scheduler.check_invariants()
    return [done[str(index)] for index in range(len(prompts))]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_most_were_preempted(outputs: list[RequestOutput]) -> None:
    preempted = sum(output.metrics.num_preemptions > 0 for output in outputs)
    assert preempted > len(outputs) / 2, f"only {preempted} of {len(outputs)} were preempted"


def test_alone(family: Family) -> None:
    for prompt, expected in zip(family.prompts, family.expected, strict=True):
        engine = Engine(family.loaded, num_blocks=32, block_size=4)
        assert tokens(run(engine, [prompt])) == [expected]


@pytest.mark.parametrize("caching", [True, False])
def test_mixed_batches_with_chunks(family: Family, caching: bool) -> None:
    engine = Engine(
        family.loaded,
        num_blocks=400,
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=12,
        enable_prefix_caching=caching,
    )
    outputs = run(engine, family.prompts)
    assert tokens(outputs) == family.expected
    cached = [output.num_cached_tokens for output in outputs]
    assert all(count >= SHARED_PREFIX // 4 * 4 for count in cached[-3:]) if caching else not any(cached)


def test_prefixes_of_earlier_requests(family: Family) -> None:
    """Run everything twice: the second time, whole blocks of each prompt come from the cache."""
    engine = Engine(family.loaded, num_blocks=400, block_size=4)
    run(engine, family.prompts)
    engine.step()  # reports the ends, which frees the ids
    outputs = run(engine, family.prompts)
    assert tokens(outputs) == family.expected
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 4 * 4 for p in family.prompts]


@pytest.mark.parametrize("knobs", [{}, {"enable_prefix_caching": False}, {"order": "priority"}], ids=str)
def test_under_memory_pressure(family: Family, knobs: dict[str, Any]) -> None:
    outputs = run(Engine(family.loaded, **TIGHT, **knobs), family.prompts)
    assert tokens(outputs) == family.expected
    assert_most_were_preempted(outputs)


def test_static_batching_and_whole_prompts(family: Family) -> None:
    engine = Engine(
        family.loaded, num_blocks=400, block_size=4, max_num_seqs=4, max_num_batched_tokens=70, batching="static",
        enable_chunked_prefill=False,
    )  # fmt: skip
    assert tokens(run(engine, family.prompts)) == family.expected


@pytest.mark.parametrize("family", ["qwen3", "gpt2"], indirect=True)
def test_seeded_sampling_does_not_see_its_neighbours(family: Family) -> None:
    """Alone, batched and chunked, and preempted: a seeded request's tokens are its own."""
    params = [
        SamplingParams(
            temperature=0.8 + 0.1 * (i % 3), top_k=(0, 40)[i % 2], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=24
        )
        for i in range(len(family.prompts))
    ]
    alone = [
        run(Engine(family.loaded, num_blocks=32, block_size=4), [prompt], one)[0].token_ids
        for prompt, one in zip(family.prompts, params, strict=True)
    ]
    assert len({tuple(one) for one in alone}) == len(alone) and alone != family.expected
    roomy = Engine(family.loaded, num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=12)
    assert tokens(run(roomy, family.prompts, params)) == alone
    outputs = run(Engine(family.loaded, **TIGHT), family.prompts, params)
    assert tokens(outputs) == alone
    assert_most_were_preempted(outputs)
