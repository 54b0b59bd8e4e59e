"""Sampling: a client's fields become sampling parameters."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.engine.params.sampling import RepetitionDetectionParams, SamplingParams
from pointsman.server.config import ServerConfig
from pointsman.server.service.sampling import (
    SamplingPlan,
    choose_max_tokens,
    for_sample,
    sampling_params,
    structured_outputs,
)
from pointsman.server.service.service import check_limits
from pointsman.server.wire.answers import Prompt
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.protocol import ChatCompletionRequest, CompletionRequest
from tests.server.engine_info import engine_info

INFO = engine_info(max_model_len=100)


def params(sample: int = 0, defaults: dict[str, Any] | None = None, **fields: Any) -> SamplingParams:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    first = sampling_params(body, max_tokens=8, logprobs=body.logprobs, prompt_logprobs=None, defaults=defaults or {})
    return for_sample(first, max_tokens=8, sample=sample)


def test_request_without_fields_gets_the_engines_defaults() -> None:
    assert params() == SamplingParams(max_tokens=8)


def test_every_client_field_reaches_sampling_params() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": -0.4,
        "seed": 5,
        "min_tokens": 2,
        "ignore_eos": True,
        "stop_token_ids": [3],
        "stop": ["x", "yz"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "bad_words": ["b"],
        "allowed_token_ids": [1, 2],
        "logprobs": 3,
    }
    found = params(**given, logit_bias={"5": 2.0})
    for name, value in given.items():
        assert getattr(found, name) == (tuple(value) if isinstance(value, list) else value), name
    assert found.logit_bias == {5: 2.0}


def test_client_values_override_model_defaults() -> None:
    defaults = {"temperature": 0.6, "top_k": 20}
    assert (params(defaults=defaults).temperature, params(defaults=defaults).top_k) == (0.6, 20)
    assert params(defaults=defaults, temperature=0).temperature == 0


@pytest.mark.parametrize(
    ("seed", "seeds"),
    [(5, [5, 6, 7]), (None, [None] * 3), (-1, [None] * 3), (2**63 - 1, [2**63 - 1, -(2**63), -(2**63) + 1])],
)
def test_every_sample_has_a_seed_of_its_own(seed: int | None, seeds: list[int | None]) -> None:
    assert [params(sample, seed=seed).seed for sample in range(3)] == seeds


@pytest.mark.parametrize("token", ["x", "-1", "1.0", "", "1_0", "²", "9" * 30])
def test_logit_bias_for_another_key_than_a_token_id_is_refused(token: str) -> None:
    with pytest.raises(ApiError) as caught:
        params(logit_bias={token: 1})
    assert caught.value.status_code == 400 and caught.value.param == "logit_bias"


def test_repetition_detection_has_vllms_field_names() -> None:
    given = {"max_pattern_size": 9, "min_pattern_size": 2, "min_count": 3}
    assert params(repetition_detection=given).repetition_detection == RepetitionDetectionParams(**given)
    assert params(repetition_detection=None).repetition_detection is None
    with pytest.raises(ValueError, match="min_count is 1; it must be at least 2"):
        params(repetition_detection={**given, "min_count": 1})


def test_values_invalid_for_sampling_params_are_refused() -> None:
    for fields in ({"min_tokens": 9}, {"stop": ""}, {"logit_bias": {"1": 101}}, {"allowed_token_ids": []}):
        with pytest.raises(ValueError, match=r"; |must"):
            params(**fields)


# ------------------------------------------------------------------------------------------------- limits


def test_remaining_length_is_default_and_maximum() -> None:
    config = ServerConfig()
    assert choose_max_tokens(None, 40, 16, "max_tokens", INFO, config) == 16
    assert choose_max_tokens(None, 95, 16, "max_tokens", INFO, config) == 5
    assert choose_max_tokens(None, 40, None, "max_tokens", INFO, config) == 60
    assert choose_max_tokens(60, 40, 16, "max_tokens", INFO, config) == 60
    assert choose_max_tokens(61, 40, 16, "max_tokens", INFO, config) == 60
    assert choose_max_tokens(2**31 - 1, 99, 16, "max_completion_tokens", INFO, config) == 1
    for asked, prompt in ((1, 100), (None, 100), (1, 101)):
        with pytest.raises(ApiError, match="leaves no room for a generated token") as caught:
            choose_max_tokens(asked, prompt, 16, "max_tokens", INFO, config)
        assert caught.value.status_code == 400


def plan(max_tokens: int | None = None, default_max_tokens: int | None = None, **fields: Any) -> SamplingPlan:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    return SamplingPlan(
        body=body,
        n=body.n,
        logprobs=None,
        prompt_logprobs=None,
        max_tokens=max_tokens,
        default_max_tokens=default_max_tokens,
    )


def test_each_prompt_is_clamped_to_its_remaining_length() -> None:
    prompts = [Prompt([1] * length) for length in (10, 60, 99)]
    found = plan(50, n=2).params(prompts, INFO, ServerConfig())
    assert [[one.max_tokens for one in samples] for samples in found] == [[50, 50], [40, 40], [1, 1]]
    with pytest.raises(ApiError, match="the prompt has 100 tokens"):
        plan(50).params([*prompts, Prompt([1] * 100)], INFO, ServerConfig())


def test_model_max_tokens_applies_without_client_or_api_maximum() -> None:
    info = engine_info(max_model_len=100, generation_defaults={"max_tokens": 30, "top_k": 5})
    prompts = [Prompt([1] * 10), Prompt([1] * 80)]
    for chosen, expected in ((plan(), [30, 20]), (plan(50), [50, 20]), (plan(default_max_tokens=16), [16, 16])):
        found = chosen.params(prompts, info, ServerConfig())
        assert [(one.max_tokens, one.top_k) for (one,) in found] == [(limit, 5) for limit in expected]
    assert plan().params(prompts[:1], info, ServerConfig(max_tokens_limit=9))[0][0].max_tokens == 9


@pytest.mark.parametrize("lengths", [(60,), (10, 60), (60, 10)])
def test_min_tokens_beyond_the_remaining_length_are_refused(lengths: tuple[int, ...]) -> None:
    prompts = [Prompt([1] * length) for length in lengths]
    assert plan(50, min_tokens=40).params(prompts, INFO, ServerConfig())
    with pytest.raises(ValueError, match="min_tokens is 41, more than max_tokens 40; lower it"):
        plan(50, min_tokens=41).params(prompts, INFO, ServerConfig())


def test_operator_limit_applies_to_given_and_default_max_tokens() -> None:
    config = ServerConfig(max_tokens_limit=10)
    assert choose_max_tokens(None, 40, None, "max_tokens", INFO, config) == 10
    assert choose_max_tokens(10, 40, None, "max_tokens", INFO, config) == 10
    assert choose_max_tokens(10, 95, None, "max_tokens", INFO, config) == 5
    for num_prompt_tokens in (40, 95):  # whether it fits or not
        with pytest.raises(ApiError, match=r"max_completion_tokens is 11.*10"):
            choose_max_tokens(11, num_prompt_tokens, None, "max_completion_tokens", INFO, config)


def test_too_many_samples_or_log_probabilities_are_refused() -> None:
    config = ServerConfig(max_n=2, max_logprobs=5)
    body = CompletionRequest.model_validate({"prompt": "a", "prompt_logprobs": 6})
    plain = CompletionRequest.model_validate({"prompt": "a"})
    check_limits(plain, 2, 5, config)
    for checked, n, logprobs, param in (
        (plain, 3, None, "n"),
        (plain, 1, 6, "logprobs"),
        (body, 1, 0, "prompt_logprobs"),
    ):
        with pytest.raises(ApiError) as caught:
            check_limits(checked, n, logprobs, config)
        assert caught.value.param == param


# ------------------------------------------------------------------------------------------------- structured outputs


def structure(**fields: Any) -> Any:
    return structured_outputs(
        ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "a"}], **fields})
    )


def test_response_format_and_structured_outputs_give_equal_constraints() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    ours = structure(structured_outputs={"json": schema})
    openai = structure(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    assert ours.json == openai.json == schema
    assert structure(response_format={"type": "json_object"}).json_object is True
    assert structure(response_format={"type": "text"}) is None and structure() is None


def test_all_constraints_reach_structured_outputs_params() -> None:
    assert structure(structured_outputs={"regex": "a+"}).regex == "a+"
    assert structure(structured_outputs={"choice": ["a", "b"]}).choice == ("a", "b")
    assert structure(structured_outputs={"grammar": 'root ::= "a"'}).grammar == 'root ::= "a"'
    assert structure(structured_outputs={"json": "{}", "disable_any_whitespace": True}).disable_any_whitespace
    beside_text = structure(structured_outputs={"regex": "a+"}, response_format={"type": "text"})
    assert beside_text.regex == "a+"


@pytest.mark.parametrize("asked", [{}, {"json": "no JSON"}])
def test_invalid_constraints_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"give|must"):
        structure(structured_outputs=asked)


def test_response_format_with_structured_outputs_is_refused() -> None:
    with pytest.raises(ApiError, match="leave one of them out"):
        structure(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})


def test_samples_share_equal_parameter_objects() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "min_tokens": 4, "structured_outputs": {"regex": "a+"}})
    first = sampling_params(body, max_tokens=8, logprobs=None, prompt_logprobs=None, defaults={})
    assert for_sample(first, max_tokens=8, sample=3) is first
    shorter = for_sample(first, max_tokens=5, sample=0)
    assert shorter.max_tokens == 5 and first.max_tokens == 8
    assert shorter.structured_outputs is first.structured_outputs
    assert shorter == sampling_params(body, max_tokens=5, logprobs=None, prompt_logprobs=None, defaults={})
    with pytest.raises(ValueError, match="min_tokens is 4, more than max_tokens 3"):
        for_sample(first, max_tokens=3, sample=0)


def test_a_thousand_samples_are_validated_once() -> None:
    fields = {"prompt": "a", "seed": 1, "stop_token_ids": [5] * 1024, "logit_bias": {str(i): 1 for i in range(1024)}}
    body = CompletionRequest.model_validate(fields)
    first = sampling_params(body, max_tokens=8, logprobs=None, prompt_logprobs=None, defaults={})
    for sample in range(1000):
        one = for_sample(first, max_tokens=8, sample=sample)
        assert one.seed == 1 + sample
        assert one.stop_token_ids is first.stop_token_ids and one.logit_bias is first.logit_bias


def test_only_the_first_sample_computes_prompt_logprobs() -> None:
    body = CompletionRequest.model_validate({"prompt": "a", "n": 3, "prompt_logprobs": 2})
    asked = SamplingPlan(body=body, n=3, logprobs=1, prompt_logprobs=2, max_tokens=4)
    found = asked.params([Prompt([1]), Prompt([2, 3])], INFO, ServerConfig())
    assert [[one.prompt_logprobs for one in samples] for samples in found] == [[2, None, None]] * 2
    assert all(one.logprobs == 1 and one.max_tokens == 4 for samples in found for one in samples)
