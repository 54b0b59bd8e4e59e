"""Runs published models in transformers, in float32, with eager attention, one sequence at a time.

The exported weights, in the Hugging Face format, are also used for vLLM.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from pointsman.engine.gguf.export import export_directory
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import load_model
from tests.engine.real.weights import weights_of

CLOSEST = 1e-3
"""Margin of the two most likely tokens, in standard deviations of the logits, below which rounding may decide."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A greedy token that differs from the reference's token, at a position where the reference's two most likely
    tokens have nearly equal logits."""

    place: int
    """Number of output tokens before the token."""
    token: int
    logit: float
    """The token's logit in the reference."""
    best_token: int
    best_logit: float


class NearTie(UserWarning):
    """Warning: a token differs from the reference's because of rounding."""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A folder for exported models while the tests run."""
    return tempfile.TemporaryDirectory(prefix="pointsman-exported-")


@cache
def exported(name: str) -> Path:
    """A directory with a named model in float32; skips the test if the model is not installed."""
    directory = Path(_folder().name) / name
    export_directory(weights_of(name), directory, "float32")
    return directory


@lru_cache(maxsize=1)
def loaded(name: str, dtype: str = "float32") -> LoadedModel:
    """A named model, loaded for an engine; skips the test if the model is not installed. The last model is cached."""
    return load_model(weights_of(name), dtype)


def token_ids_of(name: str, text: str) -> list[int]:
    """A prompt's token ids, including special tokens that the tokenizer adds."""
    tokenizer = loaded(name).tokenizer
    assert tokenizer is not None
    token_ids: list[int] = tokenizer(text)["input_ids"]
    return token_ids


class Reference:
    """A named model in transformers; skips the test if the model is not installed."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            exported(name), attn_implementation="eager", dtype=dtype
        ).eval()
        self._name = name
        self._ties: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tie]] = {}

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Logits for each of `tokens` after `prompt`, a row per token, in float32, from one pass."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits: torch.Tensor = self.model(ids, logits_to_keep=len(tokens)).logits[0]
        return logits.float()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens after a prompt, including the token that ends the text."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Tie]:
        """Check that each token is the most likely one after the prompt and the tokens before it.

        Differences at near ties are returned, and reported as warnings.

        Raises:
            AssertionError: a token differs, and there is no near tie.
        """
        key = (tuple(prompt), tuple(tokens))
        if key not in self._ties:
            self._ties[key] = list(self._find_ties(prompt, tokens))
        for tie in self._ties[key]:
            warnings.warn(f"{self._name}, prompt {prompt}: {tie}", NearTie, stacklevel=2)
        return self._ties[key]

    def _find_ties(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Tie]:
        logits = self.logits(prompt, tokens)
        best = logits.max(-1)
        chosen = logits[range(len(tokens)), list(tokens)]
        margins = (best.values - chosen) / logits.std(-1)
        ties = []
        for place in (best.indices != torch.tensor(tokens)).nonzero().flatten().tolist():
            tie = Tie(place, tokens[place], float(chosen[place]), int(best.indices[place]), float(best.values[place]))
            assert margins[place] < CLOSEST, f"{self._name}, prompt {prompt}: {tie} is {margins[place]:.2g} away"
            ties.append(tie)
        return ties


@lru_cache(maxsize=1)
def reference(name: str) -> Reference:
    """The reference of a model, cached because tests of one model follow each other."""
    return Reference(name)
