"""SamplingParams: vLLM's defaults, and a one-line error for each invalid value."""

from __future__ import annotations

import math

import pytest

from pointsman.engine.params.sampling import RequestOutputKind, SamplingParams


def test_sampling_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop_token_ids, params.ignore_eos) == ((), False)
    assert (params.min_p, params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (0, 1, 0, 0)
    assert (params.logprobs, params.prompt_logprobs, params.logit_bias, params.allowed_token_ids) == (None,) * 4
    assert (params.bad_words, params.stop, params.include_stop_str_in_output, params.detokenize) == (
        (),
        (),
        False,
        True,
    )
    assert params.skip_special_tokens and params.spaces_between_special_tokens
    assert params.output_kind is RequestOutputKind.CUMULATIVE
    assert not params.is_greedy and SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("temperature", -0.5),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("max_tokens", 2.0),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("seed", 0.5),
        ("stop_token_ids", [3, -1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", 5),
        ("stop_token_ids", 0),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", None),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 1e300),
        ("presence_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("frequency_penalty", -2.5),
        ("logprobs", -2),
        ("logprobs", True),
        ("prompt_logprobs", 1.5),
        ("logit_bias", {5: 100.5}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {-5: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", [5]),
        ("allowed_token_ids", [3, -4]),
        ("allowed_token_ids", 5),
        ("bad_words", ["ok", ""]),
        ("bad_words", [7]),
        ("bad_words", 3),
        ("stop", ""),
        ("stop", ["a", 5]),
        ("stop", 5),
        ("stop", 0),
        ("ignore_eos", "yes"),
        ("detokenize", None),
        ("stream_interval", 0),
        ("stream_interval", 1.5),
        ("repetition_detection", (3, 1, 2)),
        ("output_kind", "delta"),
    ],
)
def test_an_invalid_sampling_parameter_is_refused_in_one_line(field: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert "\n" not in message
    bad = value[-1] if isinstance(value, list) else value
    numbers = [*bad, *bad.values()] if isinstance(bad, dict) else [bad]
    assert any(str(number) in message for number in numbers)
    assert field.split("_token_ids")[0].replace("_", " ").split()[0] in message


def test_a_number_of_hundreds_of_digits_is_not_in_the_error() -> None:
    with pytest.raises(ValueError, match="temperature is too large a number; it must be") as error:
        SamplingParams(temperature=10**400)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [2**31, 2**63, 10**30, 10**5000], ids=["2^31", "2^63", "10^30", "10^5000"])
def test_more_logprobs_than_any_vocabulary_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"^{field} is above 2147483647; use -1 for the whole vocabulary$"):
        SamplingParams(**{field: value})
    assert getattr(SamplingParams(**{field: 2**31 - 1}), field) == 2**31 - 1


@pytest.mark.parametrize("field", ["stop", "stop_token_ids", "bad_words", "allowed_token_ids"])
def test_none_turns_a_sampling_parameter_off(field: str) -> None:
    assert not getattr(SamplingParams(**{field: None}), field)


def test_a_seed_of_minus_one_is_no_seed() -> None:
    assert SamplingParams(seed=-1) == SamplingParams(seed=None)
    assert SamplingParams(seed=-2).seed == -2


@pytest.mark.parametrize("top_k", [0, -1])
def test_top_k_is_off_with_0_and_minus_1(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


def test_max_tokens_may_be_none() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=500).max_tokens is None


def test_sampling_params_copy_sequences_to_tuples() -> None:
    words, biases = ["a", "b"], {3: -1.5}
    params = SamplingParams(stop="end", bad_words=words, allowed_token_ids=[4, 5], logit_bias=biases)
    words.append("c")
    biases[4] = 1.0
    assert (params.stop, params.bad_words, params.allowed_token_ids) == (("end",), ("a", "b"), (4, 5))
    assert params.logit_bias == {3: -1.5}
    assert SamplingParams(stop=["x", "y"]).stop == ("x", "y") and SamplingParams(stop=None).stop == ()
    assert hash(params) == hash(SamplingParams(stop="end", bad_words=["a", "b"], allowed_token_ids=[4, 5]))


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match="stop is 'x' and detokenize is False"):
        SamplingParams(stop="x", detokenize=False)


def test_empty_allowed_token_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="allowed_token_ids is empty"):
        SamplingParams(allowed_token_ids=[])


@pytest.mark.parametrize(("field", "value"), [("logit_bias", {3: 1, 50: 2}), ("allowed_token_ids", [50, 49])])
def test_token_ids_outside_the_vocabulary_are_refused(field: str, value: object) -> None:
    params = SamplingParams(**{field: value})
    params.check_token_ids(51)
    with pytest.raises(ValueError, match=f"{field} names token 50, and the model's vocabulary has 50"):
        params.check_token_ids(50)
