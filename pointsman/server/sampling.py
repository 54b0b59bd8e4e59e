"""From a client's fields to `SamplingParams`: defaults of the model and of the server, limits of the operator."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pointsman.core import RepetitionDetectionParams
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.server.errors import ApiError, shown

if TYPE_CHECKING:
    from pointsman.server.config import ServerConfig
    from pointsman.server.protocol import SamplingFields
    from pointsman.server.wire import EngineInfo

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields for which a model may recommend values; a client's own go before them."""
SAME_NAME = (
    "min_tokens",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "bad_words",
    "allowed_token_ids",
)
_INT64 = 2**64


def check_limits(body: SamplingFields, num_samples: int, logprobs: int | None, config: ServerConfig) -> None:
    """Refuse what the operator does not allow. Cheap: before anything is made of the prompt.

    Args:
        body: the request.
        num_samples: per prompt.
        logprobs: per position of the output.
        config: the limits.

    Raises:
        ApiError: 400, with the limit.
    """
    if num_samples > config.max_n:
        raise ApiError(400, f"n is {num_samples}; this server gives at most {config.max_n}: lower it", param="n")
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and value > config.max_logprobs:
            raise ApiError(
                400, f"{name} is {value}; this server gives at most {config.max_logprobs}: lower it", param=name
            )


def check_priority(priority: int, info: EngineInfo) -> None:
    """Refuse a priority that would have no effect.

    Raises:
        ApiError: 400.
    """
    order = info.scheduler.get("order")
    if priority and order == "fcfs":
        raise ApiError(
            400,
            f"priority is {priority}, and this server takes requests in the order of their arrival; leave it 0, or "
            "start the server with order priority",
            param="priority",
        )


def choose_max_tokens(
    asked: int | None, num_prompt_tokens: int, default: int | None, name: str, info: EngineInfo, config: ServerConfig
) -> int:
    """How many tokens a request may generate.

    Args:
        asked: what the client wants; None: it left it out.
        num_prompt_tokens: of its prompt.
        default: if it left it out; None: what fits.
        name: of the field, for errors.
        info: the model's length.
        config: the operator's limit.

    Raises:
        ApiError: 400, it wants more than fits or than is allowed, or nothing fits.
    """
    room = info.max_model_len - num_prompt_tokens
    if room < 1:
        raise ApiError(
            400,
            f"the prompt has {num_prompt_tokens} tokens and max_model_len is {info.max_model_len}, which leaves no "
            f"room for a generated token; shorten the prompt to {info.max_model_len - 1} tokens",
        )
    limit = config.max_tokens_limit
    if asked is None:
        return min(one for one in (default, room, limit) if one is not None)
    if limit is not None and asked > limit:
        raise ApiError(400, f"{name} is {asked}; this server gives at most {limit}: lower it", param=name)
    if asked > room:
        raise ApiError(
            400,
            f"{name} is {asked} and the prompt has {num_prompt_tokens} tokens, together more than max_model_len "
            f"{info.max_model_len}; lower {name} to {room}, or shorten the prompt",
            param=name,
        )
    return asked


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """How the first sample of a prompt is to be generated; `for_sample` makes those of the others from it.

    Args:
        body: the request.
        max_tokens: most tokens.
        logprobs: per position of the output; None: none.
        prompt_logprobs: per position of the prompt; None: none.
        defaults: what the model recommends.

    Raises:
        ValueError, ApiError: a value, or a combination of values, cannot be had.
    """
    values: dict[str, Any] = {name: getattr(body, name) for name in SAME_NAME}
    for name in DEFAULTED:
        value = getattr(body, name)
        if value is None:
            value = defaults.get(name)
        if value is not None:
            values[name] = value
    return SamplingParams(
        max_tokens=max_tokens,
        seed=body.seed,
        stop=body.stop,
        stop_token_ids=body.stop_token_ids or (),
        logit_bias=_biases(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=structured_outputs(body),
        repetition_detection=_repetition_detection(body),
        **values,
    )


def _repetition_detection(body: SamplingFields) -> RepetitionDetectionParams | None:
    asked = body.repetition_detection
    return None if asked is None else RepetitionDetectionParams(**asked.model_dump())


def for_sample(params: SamplingParams, *, max_tokens: int, sample: int) -> SamplingParams:
    """The same for another sample, or a prompt of another length. Nothing is checked again but what differs: a request
    may be for a thousand samples, and its schema, biases and lists of tokens are the same for all.

    Args:
        params: of the first sample; shared wherever it fits.
        max_tokens: most tokens.
        sample: which of its prompt's samples, from 0: each gets a seed of its own.

    Raises:
        ValueError: min_tokens is more than max_tokens.
    """
    seed = None if params.seed is None else _seed(params.seed, sample)
    if (max_tokens, seed) == (params.max_tokens, params.seed):
        return params
    if params.min_tokens > max_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}, more than max_tokens {max_tokens}; lower it")
    variant = copy.copy(params)
    object.__setattr__(variant, "max_tokens", max_tokens)  # the object is frozen for everyone else
    object.__setattr__(variant, "seed", seed)
    return variant


def _seed(seed: int, sample: int) -> int | None:
    found = (seed + sample + _INT64 // 2) % _INT64 - _INT64 // 2  # the last one's successor is the first
    return None if found == -1 else found  # -1 means none, as for SamplingParams


def _biases(biases: Mapping[str, float] | None) -> dict[int, float] | None:
    if biases is None:
        return None
    for token_id in biases:
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) <= 10):
            raise ApiError(400, f"logit_bias: {shown(token_id)} is no token id; use integers", param="logit_bias")
    return {int(token_id): bias for token_id, bias in biases.items()}


# ------------------------------------------------------------------------------------------------- structured outputs


def structured_outputs(body: SamplingFields) -> StructuredOutputsParams | None:
    """What the text must look like, from either of the two fields that say it; None: like anything.

    Raises:
        ValueError, ApiError: both say it, or it cannot be had.
    """
    form, asked = body.response_format, body.structured_outputs
    if form is None or form.type == "text":
        return None if asked is None else StructuredOutputsParams(**asked.model_dump(by_alias=True, exclude_none=True))
    if asked is not None:
        raise ApiError(
            400,
            f"response_format of type {form.type} and structured_outputs are both given; leave one of them out",
            param="structured_outputs",
        )
    if form.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    assert form.json_schema is not None  # the model has checked it
    return StructuredOutputsParams(json=form.json_schema.schema_)
