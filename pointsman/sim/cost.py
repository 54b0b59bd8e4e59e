"""Cost: price and energy of the tokens of a measured load.

Both follow from figures that a simulation measures: tokens a second, and the share of the time in which steps run. The
price of a machine does not depend on its load, so a token of a service that is rarely busy is expensive. Power is
estimated from the datasheet (`Device.watts`), of the devices alone: hosts, cooling and conversion losses are left out.

Prompt and output tokens come from the same machine. Its price and its energy, idle time included, are divided in
proportion to the seconds of steps that each of the two takes (`prompt_share_of`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pointsman.sim.errors import SimulationError
from pointsman.sim.step_time import StepLoad, StepTime

POWER_NOTE = (
    "Power is estimated from the datasheet: the idle power of the devices, and more in proportion to the share of time "
    "in which they run steps, up to the board power; hosts and cooling are not included."
)
JOULES_PER_KWH = 3.6e6
_MILLION = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Price and energy of a load. Prices are in the currency of the given price. None: there is no such figure."""

    price_per_million_tokens: float | None = None
    """Price of a million tokens, prompts and outputs together; None: no price, or no token."""
    price_per_million_prompt_tokens: float | None = None
    """Price of a million prompt tokens, with the prompts' part of the price alone; None: as above, or the part is not
    known."""
    price_per_million_output_tokens: float | None = None
    """Price of a million output tokens, with the outputs' part of the price alone; None: as above, or the part is not
    known."""
    watts: float | None = None
    """Mean power of all devices, in watts; None: not known."""
    joules_per_million_tokens: float | None = None
    """Energy of a million tokens, prompts and outputs together, in joules; None: the power is not known, or no
    token."""
    joules_per_million_prompt_tokens: float | None = None
    joules_per_million_output_tokens: float | None = None


def cost_of(
    *,
    prompt_tokens_per_second: float,
    output_tokens_per_second: float,
    busy: float,
    num_devices: int,
    price_per_hour: float | None,
    watts: Callable[[float], float] | None,
    prompt_share: float | None = None,
) -> Cost:
    """The price and the energy of a load.

    Args:
        prompt_tokens_per_second, output_tokens_per_second: tokens of all devices together; cached prompt tokens
            included.
        busy: share of the time in which the devices run steps, mean over them, 0 to 1.
        num_devices: number of devices.
        price_per_hour: price of all devices together; None: not known.
        watts: function from the busy share to the mean power of one device, in watts, as `Device.watts`; None: not
            known.
        prompt_share: share of the step seconds that prompts take, see `prompt_share_of`; None: not known.

    Raises:
        SimulationError: a value is out of range.
    """
    for name, rate in (("prompt", prompt_tokens_per_second), ("output", output_tokens_per_second)):
        if not 0 <= rate < math.inf:
            raise SimulationError(f"the number of {name} tokens a second is {rate}; it must be finite and at least 0")
    for name, share in (("busy", busy), ("prompt_share", prompt_share)):
        if share is not None and not 0 <= share <= 1:
            raise SimulationError(f"{name} is {share}; it must be a share from 0 to 1")
    if num_devices < 1:
        raise SimulationError(f"the number of devices is {num_devices}; it must be at least 1")
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise SimulationError(f"the price per hour is {price_per_hour}; it must be finite and at least 0")
    power = None if watts is None else num_devices * watts(busy)
    price = None if price_per_hour is None else price_per_hour / 3600
    rates = (prompt_tokens_per_second + output_tokens_per_second, prompt_tokens_per_second, output_tokens_per_second)
    parts = (1.0, prompt_share, None if prompt_share is None else 1 - prompt_share)

    def per_million(each_second: float | None) -> list[float | None]:
        """Of all, prompt and output tokens."""
        return [
            None if each_second is None or part is None or not rate else each_second * part / rate * _MILLION
            for rate, part in zip(rates, parts, strict=True)
        ]

    prices, joules = per_million(price), per_million(power)
    return Cost(
        price_per_million_tokens=prices[0],
        price_per_million_prompt_tokens=prices[1],
        price_per_million_output_tokens=prices[2],
        watts=power,
        joules_per_million_tokens=joules[0],
        joules_per_million_prompt_tokens=joules[1],
        joules_per_million_output_tokens=joules[2],
    )


def prompt_share_of(
    step_time: StepTime, *, prompt_tokens: float, output_tokens: float, num_running: float, max_num_batched_tokens: int
) -> float:
    """An estimate of the share of the step seconds that prompts take, from the seconds of a mean request.

    Its prompt is computed alone, in chunks of the token budget; its output in steps that decode `num_running` requests,
    each of which takes its part of the step. The first output token belongs to the prompt.

    Args:
        prompt_tokens, output_tokens: mean tokens of a request; of prompts, those that are not found in the cache.
        num_running: mean number of requests that decode together; less than 1 counts as 1.
        max_num_batched_tokens: token budget of a step.
    """
    tokens, before, prompt = max(1, round(prompt_tokens)), 0, 0.0
    while before < tokens:
        new = min(max_num_batched_tokens, tokens - before)
        prompt += step_time.of_step(StepLoad.of_rows([(before, new)]))
        before += new
    rows = max(1, round(num_running))
    context = round(rows * (prompt_tokens + output_tokens / 2))
    output = max(0.0, output_tokens - 1) * float(step_time.of_decodes(rows, context, 1)[0]) / rows
    return prompt / (prompt + output)
