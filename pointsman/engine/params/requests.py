"""Makes the scheduler's `Request` from a prompt and its parameters, after checks that need no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from pointsman.core import Request
from pointsman.engine.params.pooling import SILENT, PoolingParams
from pointsman.engine.params.sampling import SamplingParams

if TYPE_CHECKING:
    from pointsman.core.state.output import IntArray


def check_request_id(request_id: object) -> None:
    """Check that a request's id is text that can be encoded; raises ValueError if it is not. Requests are found by
    their ids, and their seeds are derived from their ids.
    """
    if not isinstance(request_id, str) or not request_id:
        what = "empty" if request_id == "" else f"of type {type(request_id).__name__}"
        raise ValueError(f"the request id is {what}; give text of at least one character")
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise ValueError(f"request id {request_id!r} is not valid Unicode (a lone surrogate); remove it") from None


def check_deadline(request_id: str, deadline: float | None) -> None:
    """Check that a deadline is None or a finite number of seconds; raises ValueError if it is not."""
    if deadline is not None and not (isinstance(deadline, (int, float)) and math.isfinite(deadline)):
        raise ValueError(f"request {request_id!r}: the deadline is {deadline!r}; give seconds on the engine's clock")


def check_may_come_in_parts(request_id: str, params: SamplingParams, *, is_pooled: bool) -> None:
    """Check that a request's prompt may arrive in parts; raises ValueError if a parameter needs the whole prompt when
    the request is added."""
    what = "embeddings" if is_pooled else "prompt_logprobs" if params.prompt_logprobs is not None else ""
    if what:
        raise ValueError(f"request {request_id!r}: {what} need the whole prompt in one piece; leave out more_input")


def checked_token_ids(request_id: str, prompt: Sequence[int], vocab_size: int) -> IntArray | Sequence[int]:
    """The prompt's token ids. Integers are checked against the vocabulary; other types are left for `Request` to
    refuse.

    Raises:
        ValueError: the prompt is not a sequence, or has a token that the model lacks.
    """
    try:
        token_ids = list(prompt)
    except TypeError:  # not iterable
        raise ValueError(
            f"request {request_id!r}: the prompt is of type {type(prompt).__name__}; give text or token ids"
        ) from None
    try:
        array = np.asarray(token_ids)
    except ValueError:  # rows of unequal length
        return token_ids
    bad: Sequence[int] = ()
    if array.dtype.kind in "iu":
        bad = array[(array < 0) | (array >= vocab_size)].ravel()[:1].tolist()
    elif array.dtype == object:  # some integers are beyond 64 bits
        bad = [one for one in token_ids if isinstance(one, (int, np.integer)) and not 0 <= one < vocab_size]
    if bad:
        raise ValueError(
            f"request {request_id!r}: token id {bad[0]} is outside the model's vocabulary of {vocab_size}; "
            "tokenize with the model's own tokenizer"
        )
    return array if array.dtype.kind in "iu" else token_ids


def max_output_tokens(request: Request, num_last_tokens: int, max_model_len: int) -> int:
    """Maximum number of output tokens of a request whose prompt came in parts, the last one with `num_last_tokens`
    tokens."""
    length = request.num_prompt_tokens + sum(len(part.token_ids) for part in request.parts) + num_last_tokens
    limit: int | None = request.metadata.max_tokens
    return max(1, max_model_len - length) if limit is None else limit


def to_request(
    request_id: str,
    token_ids: IntArray | Sequence[int],
    params: SamplingParams | PoolingParams,
    *,
    arrival_time: float,
    eos_token_ids: tuple[int, ...],
    max_model_len: int,
    priority: int = 0,
    tenant: str = "",
    ttft_target: float | None = None,
    retention: float | None = None,
    cache_salt: str | None = None,
    more_input: bool = False,
    output_token_ids: Sequence[int] = (),
) -> Request:
    """Make the scheduler's `Request` for a prompt; its `metadata` are the sampling parameters.

    Raises:
        RequestRefused: the request could never run.
    """
    pooling = params if isinstance(params, PoolingParams) else None
    sampling = SILENT if isinstance(params, PoolingParams) else params
    # A structured request ends with its grammar, even before `min_tokens` and with `ignore_eos`. While the text may
    # continue, the sampler applies both.
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
        tenant=tenant,
        ttft_target=ttft_target,
        retention=retention,
        eos_token_ids=eos_token_ids,
        ignore_eos=sampling.ignore_eos and not is_structured,
        stop_token_ids=tuple(sampling.stop_token_ids),
        repetition_detection=sampling.repetition_detection,
        cache_salt=cache_salt,
        # A cached prefix has no logits and no hidden states of prompt tokens.
        use_prefix_cache=pooling is None or pooling.pooling == "last",
        skip_reading_prefix_cache=sampling.prompt_logprobs is not None,
        runs_ahead=not is_structured,  # a grammar needs each token before it can mask the next one
        more_input=more_input,
        output_token_ids=output_token_ids,
        metadata=sampling,
    )
