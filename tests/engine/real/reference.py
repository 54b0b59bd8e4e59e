"""Published models as transformers computes them: in float32, with eager attention, one sequence at a time.

The same weights in the Hugging Face format are what vLLM reads, too.
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
"""Margin of the two likeliest tokens, in standard deviations of the logits, below which rounding may decide."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A greedy token that is not the reference's, at a place where its two likeliest tokens are as good as equal."""

    place: int
    """Number of output tokens before it."""
    token: int
    logit: float
    """Of the token, in the reference."""
    best_token: int
    best_logit: float


class NearTie(UserWarning):
    """Tokens differ from the reference's where rounding decides."""


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Where exported models are kept while the tests run."""
    return tempfile.TemporaryDirectory(prefix="pointsman-exported-")


@cache
def exported(name: str) -> Path:
    """A directory with a named model in float32; skips the test where the model is not installed."""
    directory = Path(_folder().name) / name
    export_directory(weights_of(name), directory, "float32")
    return directory


@lru_cache(maxsize=1)
def loaded(name: str, dtype: str = "float32") -> LoadedModel:
    """A named model as an engine runs it; skips the test where the model is not installed. The last one is kept."""
    return load_model(weights_of(name), dtype)


def token_ids_of(name: str, text: str) -> list[int]:
    """A prompt's tokens, with those that the tokenizer adds."""
    tokenizer = loaded(name).tokenizer
    assert tokenizer is not None
    token_ids: list[int] = tokenizer(text)["input_ids"]
    return token_ids


class Reference:
    """A named model in transformers; skips the test where the model is not installed."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            exported(name), attn_implementation="eager", dtype=dtype
        ).eval()
        self._name = name
        self._ties: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tie]] = {}

    @torch.no_grad()
    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Those from which each of `tokens` was chosen behind `prompt`, a row per token, in float32; in one pass."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        logits: torch.Tensor = self.model(ids, logits_to_keep=len(tokens)).logits[0]
        return logits.float()

    def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Greedy tokens, with the one that ends the text."""
        ids = torch.tensor([prompt])
        output = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        tokens: list[int] = output[0, len(prompt) :].tolist()
        return tokens

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[Tie]:
        """Each token is the likeliest behind the prompt and those before it. Differences at near ties are returned, and
        reported as warnings.

        Raises:
            AssertionError: a token differs, and not at a near tie.
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
    """That of the tests of one model, which follow each other."""
    return Reference(name)
