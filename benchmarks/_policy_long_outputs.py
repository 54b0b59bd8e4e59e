"""Short and long outputs together in a small pool: the later needs of an admission are not known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from _policy_scenario import Scenario, scaled

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import (
    Arrival,
    Generated,
    Lengths,
    OpenLoop,
    PoissonArrivals,
    parse_distribution,
)

SHAPE, DEVICE = model_shape("Llama-3.1-8B"), device("rtx4090")
HOST_BYTES = 64 * 2**30
NUM_REQUESTS = 6_000


@cache
def drawn(prompt: str, output: str, seed: int) -> list[Arrival]:
    """One request a second, with lengths of these distributions."""
    lengths = Lengths(parse_distribution(prompt), parse_distribution(output))
    return list(OpenLoop(Generated(PoissonArrivals(1.0), lengths, NUM_REQUESTS, seed)).first_arrivals())


def requests() -> list[Arrival]:
    return drawn("lognormal:300,0.6", "mix:0.7*lognormal:150,0.6+0.3*lognormal:3000,0.3", 3)


def other_requests() -> list[Arrival]:
    return drawn("lognormal:600,0.9", "mix:0.5*lognormal:250,0.8+0.5*lognormal:1500,0.5", 103)


LONG_OUTPUTS = Scenario(
    name="long-outputs",
    about="70 % of the outputs lognormal around 150 tokens, 30 % around 3,000; 2,588 blocks, Llama 3.1 8B on an RTX "
    "4090; a speed is requests a second",
    arrivals=lambda speed: scaled(requests(), speed),
    config=SchedulerConfig(
        num_blocks=2_588,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=False,
    ),
    step_time=RooflineStepTime(shape=SHAPE, device=DEVICE),
    speeds={"below": 0.59, "at": 0.68, "above": 0.72},  # the queue grows above 0.68
)

_HOST_MEMORY = HostMemory.of(HOST_BYTES, SHAPE, DEVICE)
LONG_OUTPUTS_CACHED = replace(
    LONG_OUTPUTS,
    name="long-outputs-cached",
    about=f"{LONG_OUTPUTS.about}; with a prefix cache, and 64 GiB of host memory over PCIe 4.0 x16",
    config=LONG_OUTPUTS.config.replace(enable_prefix_caching=True),
    host_memory=_HOST_MEMORY,
)
LONG_OUTPUTS_SLOW_LINK = replace(
    LONG_OUTPUTS_CACHED,
    name="long-outputs-slow-link",
    about=f"{LONG_OUTPUTS_CACHED.about}, at a hundredth of its bandwidth",
    host_memory=_HOST_MEMORY._replace(bandwidth=_HOST_MEMORY.bandwidth / 100),
)

_OTHER: dict[str, Any] = {
    "arrivals": lambda speed: scaled(other_requests(), speed),
    "speeds": {"below": 0.6, "at": 0.7, "above": 0.75},  # the queue grows above 0.71
}
LONG_OUTPUTS_OTHER = replace(
    LONG_OUTPUTS,
    name="long-outputs-other",
    about="half of the outputs lognormal around 250 tokens, half around 1,500, prompts around 600; otherwise as "
    "long-outputs",
    **_OTHER,
)
LONG_OUTPUTS_OTHER_CACHED = replace(LONG_OUTPUTS_CACHED, name="long-outputs-other-cached", about="", **_OTHER)
LONG_OUTPUTS_OTHER_SLOW_LINK = replace(LONG_OUTPUTS_SLOW_LINK, name="long-outputs-other-slow-link", about="", **_OTHER)
