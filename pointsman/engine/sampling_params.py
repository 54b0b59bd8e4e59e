"""SamplingParams: how the next token is chosen and when a request ends, under the names vLLM's users know."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

GREEDY_BELOW = 1e-5
"""A temperature below this means greedy: dividing logits by it would overflow to no useful distribution."""

MAX_TOKEN_ID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request samples. Immutable and checked when built.

    Raises:
        ValueError: a value is out of range; one line with the value, the limit and the remedy.
    """

    n: int = 1
    """Samples per prompt. Only 1: for more, add the prompt several times; the copies share its cached prefix."""
    temperature: float = 1.0
    """Logits are divided by it; 0 is greedy."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens whose probabilities sum to at least this."""
    top_k: int = 0
    """Sample only from this many most likely tokens; 0 or -1: from all."""
    max_tokens: int | None = 16
    """Most tokens to generate; None: as many as the model's length allows."""
    min_tokens: int = 0
    """Before this many tokens neither EOS nor a stop token can be sampled."""
    seed: int | None = None
    """Fixes the request's tokens whatever runs beside it; None: derived from the engine's seed and the request's id."""
    stop_token_ids: Sequence[int] = ()
    """Further tokens that end the request, beside the model's EOS."""
    ignore_eos: bool = False
    """Whether generation goes on past EOS."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        if self.n != 1:
            raise ValueError(f"n is {self.n}; only 1 is supported: add the prompt n times instead")
        _check_number("temperature", self.temperature, "a number of 0 (greedy) or more")
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        _check_number("top_p", self.top_p, "a number above 0 and at most 1")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (1 turns it off)")
        _check_int("top_k", self.top_k, -1, "use 0 or -1 to turn it off")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, "ask for one token or more")
        _check_int("min_tokens", self.min_tokens, 0, "use 0 for no minimum")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens {self.max_tokens}; lower it")
        if self.seed is not None and (not isinstance(self.seed, int) or isinstance(self.seed, bool)):
            raise ValueError(f"seed is {self.seed!r}; it must be an integer, or None for one derived by the engine")
        for token_id in self.stop_token_ids:
            _check_int("a stop token id", token_id, 0, "give ids of the model's vocabulary")
            if token_id > MAX_TOKEN_ID:
                raise ValueError(f"a stop token id is {token_id}; it must be at most {MAX_TOKEN_ID}")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW


def _check_number(name: str, value: object, wanted: str) -> None:
    if isinstance(value, int) and abs(value) > sys.float_info.max:
        raise ValueError(f"{name} is too large a number; it must be {wanted}")  # which would fill the screen
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}; it must be {wanted}")


def _check_int(name: str, value: object, least: int, remedy: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer of at least {least}")
    if value < least:
        raise ValueError(f"{name} is {value}; it must be at least {least}: {remedy}")
