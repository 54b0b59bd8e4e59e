"""The 300 ShareGPT requests of a log of vLLM, on its device and with its settings."""

from __future__ import annotations

from functools import cache

from _common import AZURE_TRACE
from _policy_scenario import Scenario, scaled

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import Arrival, OpenLoop
from pointsman.traces import read_trace

LOG = AZURE_TRACE.with_name("vllm_0.19_rtxpro6000_llama31_8b.jsonl")


@cache
def requests() -> list[Arrival]:
    return list(OpenLoop(read_trace(LOG)).first_arrivals())


SHARED_GPT = Scenario(
    name="sharegpt",
    about="300 ShareGPT requests of a log, 128 sequence slots, Llama 3.1 8B on an RTX PRO 6000",
    arrivals=lambda speed: scaled(requests(), speed),
    config=SchedulerConfig(
        num_blocks=30_000,
        max_model_len=131_072,
        max_num_seqs=128,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=False,
    ),
    step_time=RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("rtx-pro-6000")),
    speeds={"below": 0.48, "at": 0.56, "above": 0.65},  # the queue grows above 0.56
)
