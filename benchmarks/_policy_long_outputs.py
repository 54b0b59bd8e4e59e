"""Short and long outputs together in a small pool: the later needs of an admission are not known."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

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
SEED = 3
PROMPT, OUTPUT = "lognormal:300,0.6", "mix:0.7*lognormal:150,0.6+0.3*lognormal:3000,0.3"


@cache
def requests() -> list[Arrival]:
    """One request a second."""
    lengths = Lengths(parse_distribution(PROMPT), parse_distribution(OUTPUT))
    return list(OpenLoop(Generated(PoissonArrivals(1.0), lengths, NUM_REQUESTS, SEED)).first_arrivals())


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
    speeds={"below": 0.62, "at": 0.7, "above": 0.75},  # the queue grows above 0.72
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
