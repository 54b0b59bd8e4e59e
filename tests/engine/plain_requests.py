"""Makes requests from sampling parameters as the engine does, for tests of a scheduler without an engine."""

from __future__ import annotations

from typing import Any

from pointsman.core import Request
from pointsman.engine import SamplingParams

EOS = 2

FEATURES: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 8},
    {"top_p": 0.8},
    {"temperature": 1.4, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"presence_penalty": 1.1, "frequency_penalty": 0.6},
    {"temperature": 0.0, "frequency_penalty": -0.5, "logprobs": 2},
    {"logit_bias": {5: 4.0, 60: -100.0}, "top_k": 20},
    {"allowed_token_ids": list(range(3, 40)), "top_p": 0.9},
    {"temperature": 0.0, "bad_words": ["!", "#$", "a"]},
    {"min_tokens": 15, "stop_token_ids": [4, 9, 33], "ignore_eos": False},
    {"repetition_penalty": 1.2, "presence_penalty": 0.5, "top_k": 30, "top_p": 0.95, "min_p": 0.01,
     "bad_words": ["b c"], "logit_bias": {8: 2.0}, "min_tokens": 6, "logprobs": 4},
]  # fmt: skip
"""Sampling parameters, for one request each: every feature of sampling by itself, and some combinations."""


def request_for(name: str, prompt: list[int], params: SamplingParams) -> Request:
    """A request that arrived at time 0, with its parameters as metadata."""
    return Request(
        name,
        prompt,
        arrival_time=0.0,
        max_tokens=params.max_tokens or 1,
        min_tokens=params.min_tokens,
        eos_token_ids=(EOS,),
        ignore_eos=params.ignore_eos,
        stop_token_ids=tuple(params.stop_token_ids),
        skip_reading_prefix_cache=params.prompt_logprobs is not None,
        metadata=params,
    )
