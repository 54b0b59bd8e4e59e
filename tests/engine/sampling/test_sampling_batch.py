"""A request's tokens do not depend on other requests, on preemption, on failed steps or on its row.

The scheduler and the sampler are real; a function from a sequence to logits replaces the model.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import Scheduler, SchedulerConfig, SchedulerOutput
from pointsman.core.state.output import StepResult
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling.logit_edits import EditedRow
from pointsman.engine.sampling.logprobs import TokenLogprobs
from pointsman.engine.sampling.race import derive_seed
from pointsman.engine.sampling.sampler import Sampler
from tests.engine.plain_requests import FEATURES, request_for
from tests.engine.text_tokenizers import byte_tokenizer

V = 97
TOKENIZER = byte_tokenizer(V)


def logits_after(sequence: np.ndarray) -> torch.Tensor:
    """[V] logits, a function of a sequence's last tokens and length. Only few tokens are likely, so penalties and top-p
    change the tokens."""
    generator = torch.Generator().manual_seed(int(sequence[-3:] @ [1, 97, 9409][: len(sequence[-3:])]) % 50)
    return torch.randn(V, generator=generator) * 3


class Host:
    """Runs requests to their end, and keeps the log probabilities of all requests."""

    def __init__(self, num_blocks: int = 400, fail: tuple[int, ...] = (), budget: int = 64) -> None:
        config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=4,
            max_model_len=120,
            max_num_seqs=12,
            max_num_batched_tokens=budget,
            full_sequence_must_fit=False,
        )
        self.scheduler = Scheduler(config)
        self.sampler = Sampler(V, 7, TOKENIZER)
        self.fail = fail
        self.now = 0.0
        self.logprobs: dict[str, list[TokenLogprobs]] = {}

    def run(self, requests: dict[str, tuple[list[int], SamplingParams]]) -> dict[str, list[int]]:
        added = {}
        for name, (prompt, params) in requests.items():
            added[name] = request_for(name, prompt, params)
            self.scheduler.add(added[name], self.now)
        step = 0
        while self.scheduler.has_unfinished_requests():
            step += 1
            self.now += 1.0
            output = self.scheduler.schedule(self.now)
            result = self.sample(output)
            if step % 7 in self.fail:
                self.scheduler.fail(output, self.now)
                continue
            for index, entries in result[1].items():
                self.logprobs.setdefault(output.requests[index].request_id, []).extend(entries)
            self.scheduler.update(output, result[0], self.now)
        last = self.scheduler.schedule(self.now)  # reports finished requests, whose ids are then free
        self.scheduler.update(last, self.sample(last)[0], self.now)
        self.scheduler.check_invariants()
        return {name: request.output_token_ids.tolist() for name, request in added.items()}

    def sample(self, output: SchedulerOutput) -> tuple[StepResult, dict[int, list[TokenLogprobs]]]:
        sampling = output.samples.nonzero()[0]
        positions = (output.num_computed_tokens + output.num_scheduled_tokens)[sampling]
        batch = self.sampler.prepare(output, sampling, positions)
        sequences = [
            output.requests[index].all_token_ids[:position]
            for index, position in zip(sampling.tolist(), positions.tolist(), strict=True)
        ]
        if not sequences:
            return StepResult(token_ids=[]), {}
        sampled = self.sampler.run(torch.stack([logits_after(sequence) for sequence in sequences]), batch)
        assert sampled.ok.all()
        return StepResult(token_ids=sampled.token_ids), sampled.logprobs


def requests_of(features: list[dict[str, Any]]) -> dict[str, tuple[list[int], SamplingParams]]:
    return {
        f"r{i}": (
            [3 + (5 * i + j) % 40 for j in range(2 + 3 * i % 11)],
            SamplingParams(**{"max_tokens": 30, "ignore_eos": True, "seed": i, **feature}),
        )
        for i, feature in enumerate(features)
    }


@pytest.mark.parametrize("fail", [(), (2, 5)])
def test_tokens_are_the_same_alone_batched_and_preempted(fail: tuple[int, ...]) -> None:
    """Requests with every sampling feature run in a pool so small that they are preempted, and some steps fail."""
    requests = requests_of(FEATURES)
    alone, alone_logprobs = {}, {}
    for name, one in requests.items():
        host = Host()
        alone.update(host.run({name: one}))
        alone_logprobs.update(host.logprobs)
    batched = Host()
    assert batched.run(requests) == alone
    tight = Host(num_blocks=30, fail=fail, budget=20)
    assert tight.run(requests) == alone
    stats = tight.scheduler.stats()
    assert stats.num_preemptions > 3
    assert set(alone_logprobs) == set(tight.logprobs) == {"r7", "r12"}
    for name, entries in tight.logprobs.items():
        assert [entry.token_ids[0] for entry in entries] == alone[name]
        for mine, theirs in zip(entries, alone_logprobs[name], strict=True):
            assert mine.token_ids.tolist() == theirs.token_ids.tolist() and mine.rank == theirs.rank
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-5)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.sampled_from(FEATURES), min_size=1, max_size=9),
    st.integers(8, 40),
    st.sets(st.integers(0, 6), max_size=2),
    st.permutations(range(9)),
)
def test_batch_mix_row_order_and_failed_steps_change_no_tokens(
    features: list[dict[str, Any]], num_blocks: int, fail: set[int], order: list[int]
) -> None:
    requests = requests_of(features)
    shuffled = {f"r{i}": requests[f"r{i}"] for i in order if f"r{i}" in requests}
    expected = Host().run(requests)
    assert Host(max(num_blocks, 11), tuple(fail), 24).run(shuffled) == expected


def test_a_reused_row_has_no_state_of_earlier_requests() -> None:
    """Groups of different requests use the same rows one after the other; no request gets parameters or token counts of
    another."""
    host = Host()
    for wave in range(3):
        features = FEATURES[wave:] + FEATURES[:wave]
        requests = requests_of(features)
        assert host.run(requests) == Host().run(requests)


def test_state_of_finished_requests_is_freed() -> None:
    host = Host(num_blocks=30)
    host.run(requests_of(FEATURES))
    assert host.scheduler.stats().num_preemptions > 0
    gc.collect()
    kept = [one for one in gc.get_objects() if type(one) is EditedRow]
    assert not kept


def test_requests_without_a_seed_derive_one_from_their_id() -> None:
    prompt = [3, 4, 5]
    free = Host().run({name: (prompt, SamplingParams(ignore_eos=True)) for name in "ab"})
    assert free["a"] != free["b"]
    named = Host().run({"x": (prompt, SamplingParams(ignore_eos=True, seed=derive_seed(7, "a")))})
    assert named["x"] == free["a"]


def test_outputs_obey_all_sampling_parameters() -> None:
    """Whole outputs have no token that is not allowed, no bad word, and no early end."""
    requests = requests_of(FEATURES)
    found = Host().run(requests)
    assert set(found["r9"]) <= set(range(3, 40)) and 60 not in found["r8"]
    assert not {4, 9, 33} & set(found["r11"][:15])
    assert len(set(found["r5"])) > len(set(found["r0"]))


def test_a_bad_word_is_not_sampled() -> None:
    """The bad word has two tokens, which greedy sampling would choose; each of them is still allowed without the
    other."""
    prompt, free = [3, 4, 5], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    tokens = Host().run({"r": (prompt, free)})["r"]
    pairs = [tokens[i : i + 2] for i in range(5, 28)]
    word = next(word for pair in pairs if TOKENIZER(word := TOKENIZER.decode(pair))["input_ids"] == pair)
    found = Host().run({"r": (prompt, replace(free, bad_words=[word]))})["r"]
    at = TOKENIZER.decode(tokens).index(word)
    assert word not in TOKENIZER.decode(found)
    assert TOKENIZER.decode(found)[: at + 1] == TOKENIZER.decode(tokens)[: at + 1]


def test_check_refuses_unknown_tokens_and_missing_tokenizers() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids names token 97"):
        Sampler(V).check(SamplingParams(allowed_token_ids=[97]))
    with pytest.raises(ValueError, match="no tokenizer"):
        Sampler(V).check(SamplingParams(bad_words=["a"]))
    Sampler(V, tokenizer=TOKENIZER).check(SamplingParams(bad_words=["a"], allowed_token_ids=[96]))
