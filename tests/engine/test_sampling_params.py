"""SamplingParams: vLLM's defaults, and one clear line for each value that cannot be."""

from __future__ import annotations

import math

import pytest

from pointsman.engine.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k) == (1, 1.0, 1.0, 0)
    assert (params.max_tokens, params.min_tokens, params.seed) == (16, 0, None)
    assert (params.stop_token_ids, params.ignore_eos) == ((), False)
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
    ],
)
def test_an_impossible_value_is_named_in_one_line(field: str, value: object) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert "\n" not in message
    bad = value[-1] if isinstance(value, list) else value
    assert str(bad) in message
    assert field.split("_token_ids")[0].replace("_", " ").split()[0] in message


def test_a_number_of_hundreds_of_digits_is_not_repeated() -> None:
    with pytest.raises(ValueError, match="temperature is too large a number; it must be") as error:
        SamplingParams(temperature=10**400)
    assert len(str(error.value)) < 120


@pytest.mark.parametrize("top_k", [0, -1])
def test_both_ways_to_turn_top_k_off(top_k: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == top_k


def test_no_limit_of_its_own() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=500).max_tokens is None
