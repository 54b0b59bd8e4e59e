"""Cost: price and energy of the tokens of a load."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import pytest

from pointsman.sim.cost import Cost, cost_of, prompt_share_of
from pointsman.sim.devices import device
from pointsman.sim.errors import SimulationError
from pointsman.sim.step_time import LinearStepTime

LOAD: dict[str, Any] = {
    "prompt_tokens_per_second": 3000.0,
    "output_tokens_per_second": 1000.0,
    "busy": 0.5,
    "num_devices": 2,
    "price_per_hour": 7.2,
    "watts": device("h100").watts,
    "prompt_share": 0.25,
}


def test_price_and_energy_of_a_million_tokens() -> None:
    # 7.2 an hour are 0.002 a second: for 4,000 tokens, a quarter of it for 3,000 and the rest for 1,000.
    found = cost_of(**LOAD)
    assert found.price_per_million_tokens == pytest.approx(0.5)
    assert found.price_per_million_prompt_tokens == pytest.approx(0.25 * 0.002 / 3000 * 1e6)
    assert found.price_per_million_output_tokens == pytest.approx(0.75 * 0.002 / 1000 * 1e6)
    # An H100 has 700 W, and a fifth of it when idle: 420 W at half load.
    assert found.watts == pytest.approx(840.0)
    assert found.joules_per_million_tokens == pytest.approx(840 / 4000 * 1e6)
    assert found.joules_per_million_prompt_tokens == pytest.approx(0.25 * 840 / 3000 * 1e6)
    assert found.joules_per_million_output_tokens == pytest.approx(0.75 * 840 / 1000 * 1e6)


def test_parts_of_prompts_and_outputs_add_up_to_the_price() -> None:
    found = cost_of(**LOAD)
    assert found.price_per_million_prompt_tokens is not None
    assert found.price_per_million_output_tokens is not None
    total = (3 * found.price_per_million_prompt_tokens + found.price_per_million_output_tokens) / 4
    assert total == pytest.approx(found.price_per_million_tokens)


def test_what_is_not_known_has_no_figure() -> None:
    found = cost_of(**{**LOAD, "price_per_hour": None, "watts": None})
    assert found == Cost()
    found = cost_of(**{**LOAD, "prompt_share": None})
    assert found.price_per_million_tokens == pytest.approx(0.5)
    assert found.price_per_million_output_tokens is None
    idle = cost_of(**{**LOAD, "prompt_tokens_per_second": 0.0, "output_tokens_per_second": 0.0, "busy": 0.0})
    assert idle.watts == pytest.approx(280.0)
    assert [each for each in astuple(idle) if each is not None] == [idle.watts]


def test_a_price_of_nothing_is_a_price() -> None:
    assert cost_of(**{**LOAD, "price_per_hour": 0.0}).price_per_million_tokens == 0.0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("prompt_tokens_per_second", -1.0, "prompt tokens a second is -1.0"),
        ("output_tokens_per_second", float("inf"), "output tokens a second is inf"),
        ("busy", 1.5, "busy is 1.5"),
        ("prompt_share", -0.1, "prompt_share is -0.1"),
        ("num_devices", 0, "number of devices is 0"),
        ("price_per_hour", float("nan"), "price per hour is nan"),
    ],
)
def test_values_out_of_range_are_refused(name: str, value: float, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        cost_of(**{**LOAD, name: value})


def test_prompts_take_the_share_of_their_seconds() -> None:
    # A prompt of 300 tokens in chunks of 200: two steps and 300 tokens. 11 outputs: 10 steps, a quarter of each.
    step_time = LinearStepTime(per_step=0.01, per_token=1e-4)
    prompt, output = 2 * 0.01 + 300 * 1e-4, 10 * (0.01 + 4 * 1e-4) / 4
    share = prompt_share_of(step_time, prompt_tokens=300, output_tokens=11, num_running=4, max_num_batched_tokens=200)
    assert share == pytest.approx(prompt / (prompt + output))


def test_an_output_of_one_token_belongs_to_the_prompt() -> None:
    step_time = LinearStepTime(per_step=0.01, per_token=1e-4)
    assert prompt_share_of(step_time, prompt_tokens=9, output_tokens=1, num_running=0, max_num_batched_tokens=8) == 1
