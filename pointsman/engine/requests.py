"""The scheduler's requests, of prompts and of what callers ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pointsman.core import Request
from pointsman.engine.params.pooling import SILENT, PoolingParams
from pointsman.engine.params.sampling import SamplingParams

if TYPE_CHECKING:
    from pointsman.core.state.output import IntArray


def to_request(
    request_id: str,
    token_ids: IntArray | Sequence[int],
    params: SamplingParams | PoolingParams,
    *,
    arrival_time: float,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    priority: int = 0,
    cache_salt: str | None = None,
    more_input: bool = False,
) -> Request:
    """The request for a prompt, with its sampling parameters as metadata.

    Raises:
        RequestRefused: it could never run.
    """
    pooling = params if isinstance(params, PoolingParams) else None
    sampling = SILENT if isinstance(params, PoolingParams) else params
    # The text of a structured request ends where its grammar does, even before `min_tokens` and with `ignore_eos`: as
    # long as the text may go on, it is the sampler that keeps it from ending.
    is_structured = sampling.structured_outputs is not None
    max_tokens = 0 if pooling or more_input else sampling.max_tokens
    if max_tokens is None:
        max_tokens = max(1, max_model_len - len(token_ids))
    return Request(
        request_id,
        token_ids,
        arrival_time=arrival_time,
        max_tokens=max_tokens,
        min_tokens=0 if is_structured else sampling.min_tokens,
        priority=priority,
        eos_token_ids=eos_token_ids,
        ignore_eos=sampling.ignore_eos and not is_structured,
        stop_token_ids=tuple(sampling.stop_token_ids),
        repetition_detection=sampling.repetition_detection,
        cache_salt=cache_salt,
        # A cached prefix computes neither the logits before a prompt token nor its hidden state.
        use_prefix_cache=sampling.prompt_logprobs is None and (pooling is None or pooling.pooling == "last"),
        runs_ahead=not is_structured,  # a grammar says what may follow a token when it has seen the token
        more_input=more_input,
        metadata=sampling,
    )
