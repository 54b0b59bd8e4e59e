"""What a request must be before anything is made of it: an id that names it, tokens that the model has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pointsman.core import Request
    from pointsman.core.state.output import IntArray
    from pointsman.engine.params.sampling import SamplingParams


def check_request_id(request_id: object) -> None:
    """Raises ValueError: requests are looked up by their id and derive their seeds from it, and this one allows no such
    thing.
    """
    if not isinstance(request_id, str) or not request_id:
        what = "empty" if request_id == "" else f"of type {type(request_id).__name__}"
        raise ValueError(f"the request id is {what}; give text of at least one character")
    try:
        request_id.encode()
    except UnicodeEncodeError:
        raise ValueError(f"request id {request_id!r} is not valid Unicode (a lone surrogate); remove it") from None


def check_may_come_in_parts(request_id: str, params: SamplingParams, *, is_pooled: bool) -> None:
    """Raises ValueError: what is asked for needs the whole prompt from the start."""
    what = "embeddings" if is_pooled else "prompt_logprobs" if params.prompt_logprobs is not None else ""
    if what:
        raise ValueError(f"request {request_id!r}: {what} need the whole prompt at once; leave out more_input")


def checked_token_ids(request_id: str, prompt: Sequence[int], vocab_size: int) -> IntArray | Sequence[int]:
    """The prompt's tokens; those that are integers are in the vocabulary, and `Request` refuses all others.

    Raises:
        ValueError: the prompt is no sequence, or names a token that the model lacks.
    """
    try:
        token_ids = list(prompt)
    except TypeError:  # not iterable
        raise ValueError(
            f"request {request_id!r}: the prompt is of type {type(prompt).__name__}; give text or token ids"
        ) from None
    try:
        array = np.asarray(token_ids)
    except ValueError:  # ragged
        return token_ids
    bad: Sequence[int] = ()
    if array.dtype.kind in "iu":
        bad = array[(array < 0) | (array >= vocab_size)].ravel()[:1].tolist()
    elif array.dtype == object:  # some are beyond 64 bits
        bad = [one for one in token_ids if isinstance(one, (int, np.integer)) and not 0 <= one < vocab_size]
    if bad:
        raise ValueError(
            f"request {request_id!r}: token id {bad[0]} is outside the model's vocabulary of {vocab_size}; "
            "tokenize with the model's own tokenizer"
        )
    return array if array.dtype.kind in "iu" else token_ids


def most_output(request: Request, num_last_tokens: int, max_model_len: int) -> int:
    """How many tokens may be generated behind a prompt in parts, of which `num_last_tokens` are the last part's."""
    length = request.num_prompt_tokens + sum(len(part.token_ids) for part in request.parts) + num_last_tokens
    most: int | None = request.metadata.max_tokens
    return max(1, max_model_len - length) if most is None else most
