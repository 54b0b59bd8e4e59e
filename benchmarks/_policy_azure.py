"""The Azure scenarios: chats of a production service on a device with a small pool.

Llama 3.1 8B on an RTX 4090, 2,588 blocks of 16 tokens. Policies are chosen on the first 6,000 requests of the Azure
hour, and judged on the first 6,000 of its second half. Prompts share nothing, so the prefix cache only finds blocks of
preempted requests.
"""

from __future__ import annotations

from functools import cache

from _common import AZURE_TRACE
from _policy_scenario import Load, Scenario, scaled, with_target

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import Arrival, OpenLoop
from pointsman.traces import read_trace

NUM_REQUESTS = 6_000
SECOND_HALF = 9_683
"""Index of the first request of the second half."""
TTFT_TARGET = 5.0
"""TTFT target of each request, in seconds, for policies that read it."""
SPEEDS: dict[Load, float] = {"below": 0.52, "at": 0.6, "above": 0.65}
"""0.52 is the speed that is published with the scenario. The queue grows above 0.6."""
LATE_SPEEDS: dict[Load, float] = {"below": 0.51, "at": 0.59, "above": 0.64}  # the queue grows above 0.6
CONFIG = SchedulerConfig(
    num_blocks=2_588,
    max_model_len=16_384,
    max_num_seqs=256,
    max_num_batched_tokens=2_048,
    enable_prefix_caching=False,
)
STEP_TIME = RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("rtx4090"))


@cache
def requests_from(first: int, count: int) -> list[Arrival]:
    """`count` requests of the Azure hour from index `first` on, at the speed of the trace."""
    trace = read_trace(AZURE_TRACE, limit=first + count)[first:]
    arrivals = list(OpenLoop(trace).first_arrivals())
    return with_target([(time - arrivals[0][0], request) for time, request in arrivals], TTFT_TARGET)


def requests() -> list[Arrival]:
    """The first requests of the hour."""
    return requests_from(0, NUM_REQUESTS)


def late_requests() -> list[Arrival]:
    """The first requests of the second half of the hour."""
    return requests_from(SECOND_HALF, NUM_REQUESTS)


AZURE = Scenario(
    name="azure",
    about="the first 6,000 requests of the Azure hour, 2,588 blocks, Llama 3.1 8B on an RTX 4090, no prefix cache",
    arrivals=lambda speed: scaled(requests(), speed),
    config=CONFIG,
    step_time=STEP_TIME,
    speeds=SPEEDS,
)
AZURE_CACHED = Scenario(
    name="azure-cached",
    about="the same with a prefix cache, which only resumed requests hit",
    arrivals=AZURE.arrivals,
    config=CONFIG.replace(enable_prefix_caching=True),
    step_time=STEP_TIME,
    speeds={**SPEEDS, "above": 0.68},
)
AZURE_LATE = Scenario(
    name="azure-late",
    about="6,000 requests of the second half of the Azure hour, otherwise as azure",
    arrivals=lambda speed: scaled(late_requests(), speed),
    config=CONFIG,
    step_time=STEP_TIME,
    speeds=LATE_SPEEDS,
)
AZURE_LATE_CACHED = Scenario(
    name="azure-late-cached",
    about="the same with a prefix cache, which only resumed requests hit",
    arrivals=AZURE_LATE.arrivals,
    config=AZURE_CACHED.config,
    step_time=STEP_TIME,
    speeds=LATE_SPEEDS,
)
