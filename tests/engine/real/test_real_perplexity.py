"""Perplexity of published models on Python's tutorial, from prompt log probabilities, equals transformers'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.linear import SMALL_BATCH
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model
from tests.engine.engine_loop import run
from tests.engine.real.python_docs import tutorial
from tests.engine.real.reference import Reference, loaded, token_ids_of
from tests.engine.real.weights import NAMES, weights_of

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_TOKENS, WINDOW = 20_000, 1_000
PRECISION = {"float32": 0.001, "bfloat16": 0.01}
"""Largest allowed relative difference of the two perplexities."""


def windows_of(name: str) -> list[list[int]]:
    """The text, cut into sequences of `WINDOW` tokens; each follows the tokens that the tokenizer puts at the beginning
    of a text."""
    beginning = token_ids_of(name, "")
    token_ids = token_ids_of(name, tutorial())[len(beginning) :]
    assert len(token_ids) >= NUM_TOKENS
    return [beginning + token_ids[start : start + WINDOW] for start in range(0, NUM_TOKENS, WINDOW)]


def perplexity(logprobs: list[float]) -> float:
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def theirs(name: str, dtype: str, windows: list[list[int]]) -> list[float]:
    """transformers' log probabilities of all tokens except the first token of each window."""
    reference = Reference(name, getattr(torch, dtype))
    found: list[float] = []
    for window in windows:
        logits = reference.logits(window[:1], window[1:])
        norms = [part.logsumexp(-1) for part in logits.split(100)]  # at once, each copy of Gemma's takes a gigabyte
        found += (logits[range(len(window) - 1), window[1:]] - torch.cat(norms)).tolist()
    return found


def ours(model: LoadedModel, windows: list[list[int]], **options: Any) -> list[float]:
    """An engine's log probabilities of the same tokens, with one request for each window, all at the same time."""
    engine = Engine(model, max_model_len=WINDOW + 8, num_blocks=400, **options)
    found: list[float] = []
    for output in run(engine, windows, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)):
        assert output.prompt_logprobs is not None
        entries = zip(windows[int(output.request_id)][1:], output.prompt_logprobs[1:], strict=True)
        found += [entry[token].logprob for token, entry in entries if entry is not None]
    return found


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("name", NAMES)
def test_perplexity_equals_transformers(name: str, dtype: str, record_property: Callable[[str, object], None]) -> None:
    windows = windows_of(name)
    own, reference = ours(loaded(name, dtype), windows), theirs(name, dtype, windows)
    assert len(own) == len(reference) == sum(len(window) - 1 for window in windows)
    assert perplexity(own) == pytest.approx(perplexity(reference), rel=PRECISION[dtype])
    record_property("ours", perplexity(own))
    record_property("transformers", perplexity(reference))
    record_property("largest difference", max(abs(a - b) for a, b in zip(own, reference, strict=True)))


@pytest.mark.parametrize("name", NAMES)
def test_8_bit_weights_hardly_raise_perplexity(name: str, record_property: Callable[[str, object], None]) -> None:
    windows = windows_of(name)
    exact = perplexity(ours(loaded(name), windows))
    rounded = perplexity(ours(load_model(weights_of(name), quantization="int8"), windows))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.01)
    record_property("float32", exact)
    record_property("int8", rounded)


@pytest.mark.parametrize("dtype", PRECISION)
@pytest.mark.parametrize("name", NAMES)
def test_4_bit_weights_of_a_file_hardly_raise_perplexity(
    name: str, dtype: str, record_property: Callable[[str, object], None]
) -> None:
    windows = windows_of(name)
    exact = perplexity(ours(loaded(name), windows))
    model = load_model(weights_of(name), dtype=dtype, quantization="int4")
    rounded = perplexity(ours(model, windows))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.01)
    record_property("int4 / float32, many rows", rounded / exact)
    # A few tokens a step, as in decoding; a fifth of the text, because that takes a while.
    few = windows[: len(windows) // 5]
    exact = perplexity(ours(loaded(name), few))
    rounded = perplexity(ours(model, few, max_num_batched_tokens=SMALL_BATCH, max_num_seqs=SMALL_BATCH))
    assert rounded != exact and rounded == pytest.approx(exact, rel=0.01)
    record_property("int4 / float32, few rows", rounded / exact)
