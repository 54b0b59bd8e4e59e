"""The tokens of real models equal transformers' own `generate`, whatever the scheduler does to the requests.

The reference is `generate` in float32 with eager attention, one request at a time. Every family in `FAMILIES` gets the
same requests in one run that combines mixed steps of chunks and decodes, shared prefixes, and a pool so small that
requests are preempted. The requests of families in `THOROUGH` also run one at a time, with each of these conditions by
itself, and with static batching. Greedy tokens must be equal in every run, with every attention backend.

Controls at the end run an engine whose attention lacks a feature: its tokens must differ, so the tests detect a missing
feature.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from pointsman.core import SchedulerConfig
from pointsman.engine import Engine, RequestOutput, SamplingParams
from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.layout import layout_in_groups
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.params.engine_args import SCHEDULER_NAMES
from tests.engine.engine_loop import Seen, run
from tests.engine.tiny_models import FAMILIES, THOROUGH, VOCAB_SIZE, build
from tests.forms import short_of

pytestmark = pytest.mark.e2e

SHARED_PREFIX = 29
SUFFIXES = (2, 8, 21)
LONG = ((1, 9, 17, 30, 38, 41, 45, 24), 20)
"""Prompt lengths, and number of output tokens, for the thorough families; three prompts with a shared prefix are
added."""
SHORT = ((1, 17, 45), 12)
"""Prompt lengths, and number of output tokens, for the other families."""
LONGEST = 72
"""Number of tokens for which the pool of `TIGHT` has blocks; the longest request has 65 tokens."""
TIGHT: dict[str, Any] = {
    "block_size": 4,
    "max_num_seqs": 10,
    "max_num_batched_tokens": 40,
    "full_sequence_must_fit": False,
}
"""Knobs of `Case.tight_engine`."""
EVERYTHING: dict[str, Any] = {**TIGHT, "max_num_seqs": 6, "max_num_batched_tokens": 14}
"""The knobs of `TIGHT` with a smaller token budget, which cuts nearly every prompt into chunks."""

CLOSEST = 2e-5
"""Minimum difference between the logits of the two most likely tokens in the reference; rounding causes errors of
5e-6."""

BACKENDS = {"torch": "torch", "fast": "auto"}
"""Test id -> attention backend: PyTorch with the model's own layers, and the default, compiled attention with fused
layers."""


@dataclass
class Case:
    """One model for each attention backend, and the reference outputs of transformers."""

    loaded: dict[str, LoadedModel]
    features: str
    prompts: list[list[int]]
    output_tokens: int
    expected: list[list[int]]

    def engine(self, backend: str, **knobs: Any) -> Engine:
        return Engine(self.loaded[backend], **knobs)

    def tight_engine(self, backend: str, **knobs: Any) -> Engine:
        """An engine whose pool holds little more than the longest request, with any groups of layers."""
        loaded = self.loaded[backend]
        known = {name: value for name, value in knobs.items() if name in SCHEDULER_NAMES}
        config = SchedulerConfig(num_blocks=1, max_model_len=loaded.choose_max_model_len(None), **known)
        groups = layout_in_groups(loaded.layers, loaded.windows, config, only_if_it_saves=True).groups
        num_blocks = max(LONGEST // 4, config.replace(kv_groups=groups).max_blocks(LONGEST))
        return Engine(loaded, num_blocks=num_blocks, **knobs)


def make_prompts(lengths: tuple[int, ...], shortest: int) -> list[list[int]]:
    """Prompts of mixed lengths; the last three share a prefix with the longest."""
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, VOCAB_SIZE, max(n, shortest)).tolist() for n in lengths]
    longest = max(prompts, key=len)
    return [*prompts, *(longest[:SHARED_PREFIX] + rng.integers(3, VOCAB_SIZE, n).tolist() for n in SUFFIXES)]


def reference(model: Any, prompt: list[int], output_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=output_tokens, do_sample=False, pad_token_id=0,
        return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    first, second = torch.cat(output.logits).topk(2).values.T
    closest = float((first - second).min())
    assert closest > CLOSEST, f"two tokens are {closest:.1g} apart, which rounding may decide: take another seed"
    return output.sequences[0, len(prompt) :].tolist()


@pytest.fixture(params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(request.param)


@cache
def make_case(name: str) -> Case:
    family = FAMILIES[name]
    model = build(family(), seed=1)
    lengths, output_tokens = LONG if name in THOROUGH else SHORT
    prompts = make_prompts(lengths, family.min_prompt)
    loaded = {
        name: wrap_model(copy.deepcopy(model), max_model_len=family.max_model_len, attention=attention)
        for name, attention in BACKENDS.items()
    }
    expected = [reference(model, prompt, output_tokens) for prompt in prompts]
    distinct = len({token for tokens in expected for token in tokens})
    assert distinct > output_tokens * len(prompts) / 6, f"{distinct} distinct tokens are no test"
    return Case(loaded, family.features, prompts, output_tokens, expected)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def greedy(case: Case) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=case.output_tokens)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def assert_many_were_preempted(outputs: list[RequestOutput]) -> None:
    preempted = sum(output.metrics.num_preemptions > 0 for output in outputs)
    assert preempted > len(outputs) / 3, f"only {preempted} of {len(outputs)} were preempted"


# ------------------------------------------------------------------------------------------------- every family


class Watched:
    """A backend that records the attention features that layers request."""

    name = "watched"

    def __init__(self, backend: AttentionBackend) -> None:
        self.backend = backend
        self.features: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def attend(self, *arguments: Any, **features: Any) -> torch.Tensor:
        self.features |= {name for name, value in features.items() if value is not None and name != "scale"}
        return self.backend.attend(*arguments, **features)


@pytest.mark.parametrize(
    ("case", "backend"),
    short_of([*product(FAMILIES, BACKENDS)], [*product(THOROUGH, BACKENDS), *product(FAMILIES, ["fast"])]),
    indirect=True,
)
def test_chunks_prefixes_and_preemptions_change_no_tokens(case: Case, backend: str) -> None:
    """In the short form, every family runs with the default backend, and the thorough families with both backends."""
    seen = Seen()
    watched = Watched(case.loaded[backend].attention)
    outputs = run(case.tight_engine(backend, attention=watched, **EVERYTHING), case.prompts, greedy(case), seen)
    assert tokens(outputs) == case.expected
    assert watched.features == {word for word in ("window", "softcap", "sinks") if word in case.features}
    assert seen.mixed > 3 and seen.chunks > 3, f"{seen} is no mixed batch"
    assert sum(output.metrics.num_preemptions > 0 for output in outputs) > 1
    assert sum(output.num_cached_tokens >= SHARED_PREFIX // 2 for output in outputs) > 1


# ------------------------------------------------------------------------------------------ the thorough families

thorough = pytest.mark.parametrize("case", THOROUGH, indirect=True)


@thorough
def test_a_single_request_gets_the_reference_tokens(case: Case, backend: str) -> None:
    for prompt, expected in zip(case.prompts[::2], case.expected[::2], strict=True):
        engine = case.engine(backend, num_blocks=64, block_size=4)
        assert tokens(run(engine, [prompt], greedy(case))) == [expected]


@thorough
@pytest.mark.parametrize("caching", [True, False])
def test_chunked_mixed_batches_get_the_reference_tokens(case: Case, backend: str, caching: bool) -> None:
    engine = case.engine(
        backend, num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=12, enable_prefix_caching=caching
    )
    outputs = run(engine, case.prompts, greedy(case))
    assert tokens(outputs) == case.expected
    cached = [output.num_cached_tokens for output in outputs]
    assert all(count >= SHARED_PREFIX // 4 * 4 for count in cached[-3:]) if caching else not any(cached)


@thorough
def test_requests_with_cached_prefixes_get_the_reference_tokens(case: Case, backend: str) -> None:
    """Run everything twice: the second time, whole blocks of each prompt come from the cache."""
    engine = case.engine(backend, num_blocks=400, block_size=4)
    run(engine, case.prompts, greedy(case))
    engine.step()  # reports the ends, which frees the ids
    outputs = run(engine, case.prompts, greedy(case))
    assert tokens(outputs) == case.expected
    assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 4 * 4 for p in case.prompts]


@thorough
@pytest.mark.parametrize("knobs", [{"enable_prefix_caching": False}, {"order": "priority"}], ids=str)
def test_preempted_requests_get_the_reference_tokens(case: Case, backend: str, knobs: dict[str, Any]) -> None:
    outputs = run(case.tight_engine(backend, **TIGHT, **knobs), case.prompts, greedy(case))
    assert tokens(outputs) == case.expected
    assert_many_were_preempted(outputs)


@thorough
def test_static_batches_of_whole_prompts_get_the_reference_tokens(case: Case, backend: str) -> None:
    engine = case.engine(
        backend, num_blocks=400, block_size=4, max_num_seqs=4, max_num_batched_tokens=70, batching="static",
        enable_chunked_prefill=False,
    )  # fmt: skip
    assert tokens(run(engine, case.prompts, greedy(case))) == case.expected


@pytest.mark.parametrize("case", ["qwen3", "gpt2"], indirect=True)
def test_seeded_sampling_is_independent_of_other_requests(case: Case, backend: str) -> None:
    """Alone, batched, chunked or preempted: a seeded request gets the same tokens."""
    params = [
        SamplingParams(
            temperature=0.8 + 0.1 * (i % 3), top_k=(0, 40)[i % 2], top_p=(1.0, 0.9)[i % 2], seed=i, max_tokens=20
        )
        for i in range(len(case.prompts))
    ]
    alone = [
        run(case.engine(backend, num_blocks=32, block_size=4), [prompt], one)[0].token_ids
        for prompt, one in zip(case.prompts, params, strict=True)
    ]
    assert len({tuple(one) for one in alone}) == len(alone) and alone != case.expected
    roomy = case.engine(backend, num_blocks=400, block_size=4, max_num_seqs=8, max_num_batched_tokens=12)
    assert tokens(run(roomy, case.prompts, params)) == alone
    outputs = run(case.tight_engine(backend, **TIGHT), case.prompts, params)
    assert tokens(outputs) == alone
    assert_many_were_preempted(outputs)


# ------------------------------------------------------------------------------------------------------- controls


@pytest.mark.parametrize("name", ["gpt-oss", "mimo-v2-flash"])
def test_a_test_models_weights_ignore_earlier_random_numbers(name: str) -> None:
    """Otherwise random numbers drawn by earlier tests would change the weights of this test's models."""
    first = build(FAMILIES[name](), seed=1).state_dict()
    torch.randn(1)
    second = build(FAMILIES[name](), seed=1).state_dict()
    assert [key for key, value in first.items() if not torch.equal(value, second[key])] == []


class Without(Watched):
    """A backend that ignores one feature of attention."""

    def __init__(self, backend: AttentionBackend, feature: str) -> None:
        super().__init__(backend)
        self.feature = feature

    def attend(self, *arguments: Any, **features: Any) -> torch.Tensor:
        return super().attend(*arguments, **{**features, self.feature: NEUTRAL.get(self.feature)})


NEUTRAL = {"scale": 1.0}
"""Feature of attention -> the value that turns it off, if this is not None."""


@pytest.mark.parametrize(
    ("case", "feature"),
    [
        ("mistral", "window"),
        ("gemma2", "window"),
        ("gemma2", "softcap"),
        ("gemma3", "window"),
        ("gpt-oss", "window"),
        ("gpt-oss", "sinks"),
        ("granite", "scale"),
        ("vaultgemma", "window"),
    ],
    indirect=["case"],
)
def test_attention_without_a_feature_changes_tokens(case: Case, backend: str, feature: str) -> None:
    faulty = Without(case.loaded[backend].attention, feature)
    outputs = run(case.engine(backend, num_blocks=400, block_size=4, attention=faulty), case.prompts, greedy(case))
    wrong = sum(one != other for one, other in zip(tokens(outputs), case.expected, strict=True))
    assert wrong > len(case.prompts) / 4, f"without {feature} only {wrong} of {len(case.prompts)} outputs change"
