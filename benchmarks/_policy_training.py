"""Training workloads of preset `auto`: other requests than those on which the policies are judged.

They are another part of the Azure hour, and generated workloads with other lengths, seeds and devices than the
scenarios of `benchmarks/policies.py`. Each one is limited by something else: blocks, step time, sequence slots, or ITL.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from _common import AZURE_TRACE
from _policy_scenario import Scenario, scaled

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.scenarios.workloads import Stream, Streams
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.vllm_defaults import vllm_defaults
from pointsman.sim.workload import Arrival, Generated, Lengths, OpenLoop, PoissonArrivals, parse_distribution
from pointsman.traces import read_trace

NUM_REQUESTS = 1_500
FIRST_OF_AZURE = 9_000
"""Index of the first request; the scenarios have the first 6,000."""
MODEL = "Llama-3.1-8B"
BELOW, ABOVE = 0.9, 1.05
"""Loads as multiples of the speed above which the queue grows under the default policies."""


@dataclass(frozen=True)
class _Generated:
    """Requests of drawn lengths, one a second."""

    prompt: str
    output: str
    seed: int

    def arrivals(self, speed: float) -> list[Arrival]:
        """The requests at a speed."""
        return scaled(_drawn(self), speed)


@cache
def _drawn(source: _Generated) -> list[Arrival]:
    lengths = Lengths(parse_distribution(source.prompt), parse_distribution(source.output))
    return list(OpenLoop(Generated(PoissonArrivals(1.0), lengths, NUM_REQUESTS, source.seed)).first_arrivals())


@cache
def _late_in_the_hour() -> list[Arrival]:
    trace = read_trace(AZURE_TRACE, limit=FIRST_OF_AZURE + NUM_REQUESTS)[FIRST_OF_AZURE:]
    arrivals = list(OpenLoop(trace).first_arrivals())
    return [(time - arrivals[0][0], request) for time, request in arrivals]


def _azure(speed: float) -> list[Arrival]:
    return scaled(_late_in_the_hour(), speed)


@lru_cache(maxsize=4)
def _reports(speed: float) -> list[Arrival]:
    """`speed` chats a second beside a prompt of 20,000 tokens every seven seconds."""
    chats = Stream("chats", NUM_REQUESTS, "lognormal:400,0.7", "lognormal:150,0.6", f"poisson:{speed}")
    reports = Stream("reports", int(NUM_REQUESTS / speed / 7) + 1, "20000", "150", f"constant:{1 / 7}", start=3.0)
    return list(Streams((chats, reports), 8).first_arrivals())


def _scenario(
    name: str,
    about: str,
    arrivals: Callable[[float], Sequence[Arrival]],
    on: str,
    *,
    saturation: float,
    num_blocks: int,
    max_model_len: int = 32_768,
    model: str = MODEL,
    tensor_parallel: int = 1,
) -> Scenario:
    config: dict[str, Any] = {
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "enable_prefix_caching": False,  # prompts share nothing
        **vllm_defaults(device(on), max_model_len, tensor_parallel)._asdict(),
    }
    return Scenario(
        name=name,
        about=about,
        arrivals=arrivals,
        config=SchedulerConfig(**config),
        step_time=RooflineStepTime(shape=model_shape(model), device=device(on), tensor_parallel=tensor_parallel),
        speeds={"below": BELOW * saturation, "at": saturation, "above": ABOVE * saturation},
    )


TRAINING = (
    _scenario(
        "late in the hour",
        "requests 9,001 to 10,500 of the Azure hour, a short pool, an RTX 4090",
        _azure,
        "rtx4090",
        saturation=0.576,
        num_blocks=2_588,
    ),
    _scenario(
        "assistants",
        "prompts around 900 tokens, outputs around 200, a short pool, an L40S",
        _Generated("lognormal:900,0.7", "lognormal:200,0.8", seed=11).arrivals,
        "l40s",
        saturation=2.41,
        num_blocks=3_000,
    ),
    _scenario(
        "reasoning",
        "a fifth of the outputs around 2,500 tokens, the others around 200, a short pool, an RTX 4090",
        _Generated("lognormal:400,0.6", "mix:0.8*lognormal:200,0.6+0.2*lognormal:2500,0.3", seed=12).arrivals,
        "rtx4090",
        saturation=1.195,
        num_blocks=2_588,
    ),
    _scenario(
        "reports",
        "chats beside a prompt of 20,000 tokens every seven seconds, an H100",
        _reports,
        "h100",
        saturation=34.3,
        num_blocks=28_048,
        max_model_len=131_072,
    ),
    _scenario(
        "short requests",
        "prompts around 80 tokens, outputs around 100, an A100",
        _Generated("lognormal:80,0.6", "lognormal:100,0.6", seed=13).arrivals,
        "a100",
        saturation=54.1,
        num_blocks=20_000,
    ),
    _scenario(
        "long prompts",
        "prompts around 6,000 tokens, outputs around 200, an H100",
        _Generated("lognormal:6000,0.7", "lognormal:200,0.6", seed=14).arrivals,
        "h100",
        saturation=2.57,
        num_blocks=25_000,
        max_model_len=131_072,
    ),
    _scenario(
        "a large model",
        "the assistants' requests, Llama 3.1 70B on 2 A100, a short pool: decoding alone takes 42 ms",
        _Generated("lognormal:900,0.7", "lognormal:200,0.8", seed=15).arrivals,
        "a100",
        saturation=1.19,
        num_blocks=3_000,
        model="Llama-3.1-70B",
        tensor_parallel=2,
    ),
)
