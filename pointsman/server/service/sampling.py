"""Sampling: converts a client's fields to `SamplingParams`, with the defaults of model and server, within the
operator's limits.

A route creates a `SamplingPlan`, or a `PoolingPlan` for vectors. The plan derives the parameters of each sample once
the prompts are known.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from pointsman.core import RepetitionDetectionParams
from pointsman.engine.params.sampling import SamplingParams
from pointsman.engine.params.structured_outputs import StructuredOutputsParams
from pointsman.server.wire.errors import ApiError, shown

if TYPE_CHECKING:
    from pointsman.engine.params.pooling import PoolingParams
    from pointsman.server.config import ServerConfig
    from pointsman.server.wire.answers import Prompt
    from pointsman.server.wire.messages import EngineInfo
    from pointsman.server.wire.protocol import SamplingFields

EngineParams: TypeAlias = "SamplingParams | PoolingParams"

DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields for which a model may recommend values; a client's own value has priority."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingPlan:
    """The sampling settings of a request that are known before the prompts are read."""

    body: SamplingFields
    n: int
    """Number of samples per prompt."""
    logprobs: int | None
    """Number of most likely tokens with log probabilities per position of the output; None: no log probabilities."""
    prompt_logprobs: int | None
    """Number of most likely tokens with log probabilities per position of the prompt; None: no log probabilities."""
    max_tokens: int | None
    """The client's value; None: the client left the field out."""
    max_tokens_field: str = "max_tokens"
    """Name of the client's field for `max_tokens`, for errors."""
    default_max_tokens: int | None = None
    """Value if the client left the field out; None: the model's own default, or the maximum that fits."""

    def params(self, prompts: list[Prompt], info: EngineInfo, config: ServerConfig) -> list[list[EngineParams]]:
        """The parameters of each sample of each prompt. They are checked in full for the first sample only, as there
        may be a thousand.

        Raises:
            ValueError, ApiError: a value, or a combination of values, is invalid.
        """
        default = self.default_max_tokens
        if default is None:
            default = info.generation_defaults.get("max_tokens")
        limits = [
            choose_max_tokens(self.max_tokens, len(prompt.token_ids), default, self.max_tokens_field, info, config)
            for prompt in prompts
        ]
        first = sampling_params(
            self.body,
            max_tokens=limits[0],
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            defaults=info.generation_defaults,
        )
        return [self._samples(for_sample(first, max_tokens=limit, sample=0)) for limit in limits]

    def _samples(self, first: SamplingParams) -> list[EngineParams]:
        assert first.max_tokens is not None
        limit = first.max_tokens
        return [first, *(for_sample(first, max_tokens=limit, sample=number) for number in range(1, self.n))]


@dataclass(frozen=True, slots=True)
class PoolingPlan:
    """The pooling settings of a request: one vector per prompt, all with equal parameters."""

    pooling: PoolingParams
    n: int = 1

    def params(self, prompts: list[Prompt], info: EngineInfo, config: ServerConfig) -> list[list[EngineParams]]:
        """The parameters of each prompt."""
        return [[self.pooling] for _ in prompts]


def choose_max_tokens(
    asked: int | None, num_prompt_tokens: int, default: int | None, name: str, info: EngineInfo, config: ServerConfig
) -> int:
    """The maximum number of tokens that a request may generate: prompt and output together fit into `max_model_len`.

    Args:
        asked: the client's value; None: the client left the field out.
        num_prompt_tokens: number of tokens of the prompt.
        default: value if the client left the field out; None: the maximum that fits.
        name: name of the client's field, for errors.
        info: description of the engine, with `max_model_len`.
        config: the operator's settings, with the limit.

    Raises:
        ApiError: 400, the client asks for more than the operator allows, or no token fits.
    """
    max_fitting = info.max_model_len - num_prompt_tokens
    if max_fitting < 1:
        raise ApiError(
            400,
            f"the prompt has {num_prompt_tokens} tokens and max_model_len is {info.max_model_len}, which leaves no "
            f"room for a generated token; shorten the prompt to {info.max_model_len - 1} tokens",
        )
    limit = config.max_tokens_limit
    if asked is None:
        return min(one for one in (default, max_fitting, limit) if one is not None)
    if limit is not None and asked > limit:
        raise ApiError(400, f"{name} is {asked}; this server gives at most {limit}: lower it", param=name)
    return min(asked, max_fitting)


def sampling_params(
    body: SamplingFields,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    defaults: Mapping[str, Any],
) -> SamplingParams:
    """The parameters of a prompt's first sample; `for_sample` derives the parameters of the other samples.

    Args:
        body: the request.
        max_tokens: maximum number of tokens.
        logprobs: number of log probabilities per position of the output; None: no log probabilities.
        prompt_logprobs: number of log probabilities per position of the prompt; None: no log probabilities.
        defaults: the model's recommended values.

    Raises:
        ValueError, ApiError: a value, or a combination of values, is invalid.
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
    """The parameters of another sample, or of a prompt of another length. Only the differing values are checked
    again, as a request may have a thousand samples, all with the same schema, biases and lists of tokens.

    The first sample computes the log probabilities of the prompt; the other samples repeat them (`ResponseSender`).

    Args:
        params: parameters of the first sample; returned unchanged if no value differs.
        max_tokens: maximum number of tokens.
        sample: the number of the sample within its prompt, from 0: each gets its own seed.

    Raises:
        ValueError: min_tokens is more than max_tokens.
    """
    seed = None if params.seed is None else _seed(params.seed, sample)
    prompt_logprobs = params.prompt_logprobs if sample == 0 else None
    if (max_tokens, seed, prompt_logprobs) == (params.max_tokens, params.seed, params.prompt_logprobs):
        return params
    if params.min_tokens > max_tokens:
        raise ValueError(f"min_tokens is {params.min_tokens}, more than max_tokens {max_tokens}; lower it")
    variant = copy.copy(params)
    object.__setattr__(variant, "max_tokens", max_tokens)  # the object is frozen for all other code
    object.__setattr__(variant, "seed", seed)
    object.__setattr__(variant, "prompt_logprobs", prompt_logprobs)
    return variant


def _seed(seed: int, sample: int) -> int | None:
    found = (seed + sample + _INT64 // 2) % _INT64 - _INT64 // 2  # the maximum wraps around to the minimum
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
    """The constraints on the text, from `response_format` or `structured_outputs`; None: no constraint.

    Raises:
        ValueError, ApiError: both fields are given, or the constraint is invalid.
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
    assert form.json_schema is not None  # `ResponseFormat` has checked that
    return StructuredOutputsParams(json=form.json_schema.schema_)
