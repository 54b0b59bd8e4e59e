"""Edits of logits equal a slow reference in plain Python, row by row, and transformers' processors."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

from pointsman.core import Scheduler, SchedulerConfig
from pointsman.core.state.output import StepResult
from pointsman.core.state.request import Request
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.sampling.logit_edits import EditedRow, LogitEdits, TokenCounts, bad_word_sequences
from pointsman.engine.sampling.race import probabilities
from tests.engine.text_tokenizers import byte_tokenizer

V = 23
TOKENS = st.integers(0, V - 1)


def request_of(params: SamplingParams, prompt: list[int], output: list[int], stop: tuple[int, ...] = ()) -> Request:
    request = Request(
        "r",
        prompt,
        arrival_time=0.0,
        max_tokens=500,
        min_tokens=params.min_tokens,
        stop_token_ids=stop,
        metadata=params,
    )
    if output:
        request._state.append_output(output)
    return request


def edited(logits: torch.Tensor, row: EditedRow, position: int) -> torch.Tensor:
    edits = LogitEdits()
    row.edit(0, position, edits)
    return edits.apply(logits)


def slow_edit(logits: list[float], request: Request, bad_words: list[tuple[int, ...]]) -> list[float]:
    params, prompt, output = request.metadata, request.prompt_token_ids.tolist(), request.output_token_ids.tolist()
    result = []
    for token, logit in enumerate(logits):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            logit = -math.inf
        for word in bad_words:
            if [*output, token][-len(word) :] == list(word):
                logit = -math.inf
        if len(output) < params.min_tokens and token in request.stop_set:
            logit = -math.inf
        logit += (params.logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * output.count(token)
        logit -= params.presence_penalty * (token in output)
        result.append(logit)
    return result


PARAMS = st.fixed_dictionaries(
    {
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.3, -0.4]),
        "min_tokens": st.sampled_from([0, 3, 9]),
        "logit_bias": st.none() | st.dictionaries(TOKENS, st.floats(-100, 100, width=32), max_size=4),
        "allowed_token_ids": st.none() | st.lists(TOKENS, min_size=1, max_size=9),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    PARAMS,
    st.lists(TOKENS, min_size=1, max_size=12),
    st.lists(TOKENS, max_size=20),
    st.lists(TOKENS, max_size=3),
    st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=4),
    st.integers(0, 2**31),
    st.integers(0, 20),
)
def test_edited_logits_equal_the_slow_reference(
    params: dict[str, Any],
    prompt: list[int],
    output: list[int],
    stop: list[int],
    bad_words: list[tuple[int, ...]],
    seed: int,
    counted_before: int,
) -> None:
    """All output tokens are counted in one step, or some of them in an earlier step."""
    request = request_of(SamplingParams(max_tokens=500, **params), prompt, output, tuple(stop))
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(seed)) * 3
    row = EditedRow(request, 1, V, bad_words)
    edited(logits, row, len(prompt) + min(counted_before, len(output)))
    found = edited(logits, row, request.num_tokens)[0]
    expected = torch.tensor(slow_edit(logits[0].tolist(), request, bad_words))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_repetition_penalty_equals_transformers() -> None:
    logits = torch.randn(1, V, generator=torch.Generator().manual_seed(1))
    prompt, output = [3, 4, 4, 9], [9, 2, 2, 11]
    request = request_of(SamplingParams(repetition_penalty=1.7), prompt, output)
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([prompt + output]), logits.clone())
    assert torch.equal(edited(logits, EditedRow(request, 1, V, ()), 8), expected)


@pytest.mark.parametrize(
    ("name", "value", "warper"),
    [
        ("min_p", 0.2, MinPLogitsWarper(0.2)),
        ("top_k", 6, TopKLogitsWarper(6)),
        ("top_p", 0.6, TopPLogitsWarper(0.6)),
    ],
)
def test_top_k_top_p_and_min_p_keep_the_tokens_of_transformers(name: str, value: float, warper: Any) -> None:
    n = 40
    logits = torch.randn(n, V, generator=torch.Generator().manual_seed(2)) * 2
    off: dict[str, Any] = {"top_k": np.zeros(n, dtype=np.int64), "top_p": np.ones(n), "min_p": np.zeros(n)}
    off[name] = np.full(n, value, dtype=off[name].dtype)
    kept = probabilities(logits, np.full(n, 0.7), **off) > 0
    assert torch.equal(kept, torch.isfinite(warper(None, logits / 0.7)))


def test_a_repeated_step_counts_tokens_once() -> None:
    params = SamplingParams(frequency_penalty=0.5)
    logits = torch.zeros(1, V)
    request = request_of(params, [1], [5, 5])
    row = EditedRow(request, 1, V, ())
    once = edited(logits, row, 3)
    assert torch.equal(edited(logits, row, 3), once) and once[0, 5] == -1.0
    request._state.append_output([5])
    assert edited(logits, row, 4)[0, 5] == -1.5
    assert torch.equal(edited(logits, row, 3), once), "an earlier position counts only the tokens before it"


def test_token_counts_grow_with_many_different_tokens() -> None:
    tokens = np.random.default_rng(0).integers(0, 3000, 4000)
    counts = TokenCounts(2000)
    for part in np.split(tokens, [1, 2, 700, 703]):
        counts.add(part)
    inside = tokens[tokens < 2000]
    assert np.array_equal(counts.counts, np.bincount(inside, minlength=2000))
    assert np.array_equal(np.sort(counts.known), np.unique(inside))


@pytest.mark.parametrize("length", [1, 2, 5])
def test_bad_words_read_only_the_end_of_the_output(length: int) -> None:
    """Bad words of one, two and five tokens are found; after 250,000 output tokens the search is as fast as after
    few."""
    word = tuple(range(3, 3 + length))
    request = request_of(SamplingParams(bad_words=["x"]), [1], [1, 2] * 128_000 + list(word[:-1]))
    row = EditedRow(request, 1, V, [word])
    seconds = []
    for _ in range(5):
        started = time.process_time()
        edits = LogitEdits()
        row.edit(0, request.num_tokens, edits)
        seconds.append(time.process_time() - started)
    assert torch.isinf(edits.apply(torch.zeros(1, V)))[0].nonzero().tolist() == [[word[-1]]]
    assert min(seconds) < 1e-3, "converting the whole output to Python integers would take milliseconds"


def test_output_since_returns_the_output_from_any_token() -> None:
    """Any part of the output can be read while the output grows out of the scheduler's ring of 256 tokens into the
    request's own array."""
    config = SchedulerConfig(num_blocks=50, block_size=16, max_model_len=700, max_num_seqs=2, max_num_batched_tokens=32)
    scheduler = Scheduler(config)
    request = Request("r", [1, 2, 3], arrival_time=0.0, max_tokens=600)
    scheduler.add(request, 0.0)
    kinds = set()
    for step in range(600):
        output = scheduler.schedule(0.0)
        scheduler.update(output, StepResult(token_ids=np.array([step % 97])), 0.0)
        whole = [token % 97 for token in range(step + 1)]
        for start in {0, max(0, step - 3), step, step + 1, request._state.num_own_output_tokens}:
            assert request.output_since(start).tolist() == whole[start:]
        kinds.add(request._state.num_own_output_tokens)
    assert len(kinds) > 2 and request.is_finished


def test_edits_change_only_their_rows_in_a_copy() -> None:
    logits = torch.zeros(3, V, dtype=torch.bfloat16)
    edits = LogitEdits()
    edits.bias(2, np.array([4]), np.array([1.5], dtype=np.float32))
    edits.mask(0, np.array([7, 8]))
    edits.allow(1, np.array([2]))
    found = edits.apply(logits)
    assert found.dtype == torch.float32 and not logits.any()
    assert (found[2].nonzero().tolist(), found[2, 4].item()) == ([[4]], 1.5)
    assert torch.isinf(found[0]).nonzero().flatten().tolist() == [7, 8]
    assert torch.isfinite(found[1]).nonzero().flatten().tolist() == [2]


def test_bad_words_match_with_and_without_a_leading_space() -> None:
    tokenizer = byte_tokenizer(259)

    def ids(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert bad_word_sequences(tokenizer, ["ab", " c"]) == [ids("ab"), ids(" ab"), ids("c"), ids(" c")]
    assert bad_word_sequences(None, []) == []
    with pytest.raises(ValueError, match="bad_words is 'ab' and the model has no tokenizer"):
        bad_word_sequences(None, ["ab"])
