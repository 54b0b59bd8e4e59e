"""Requests as the engine makes them of sampling parameters, for tests that drive a scheduler without an engine."""

from __future__ import annotations

from pointsman.core import Request
from pointsman.engine import SamplingParams

EOS = 2


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
        use_prefix_cache=params.prompt_logprobs is None,
        metadata=params,
    )
