"""The Mooncake scenarios: long prompts with shared prefixes, Llama 3.1 8B on 8 H200.

All distinct blocks of the trace, 43,924 of 512 tokens, would take 1.38 million blocks of 16: a pool of this size would
never evict a prefix. `mooncake` has a quarter of it. `mooncake-short` has a quarter of the blocks that running requests
hold at most above saturation in an unlimited pool, so that they compete for blocks.
"""

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

MOONCAKE_TRACE = AZURE_TRACE.with_name("mooncake_synthetic.jsonl")
BLOCK_SIZE = 16
SHAPE = model_shape("Llama-3.1-8B")


@cache
def requests() -> list[Arrival]:
    """The requests at the speed of the trace, without the ten that are longer than the model."""
    trace = read_trace(MOONCAKE_TRACE)
    fitting = [each for each in trace if each.num_prompt_tokens + each.num_output_tokens <= SHAPE.max_model_len]
    return list(OpenLoop(fitting).first_arrivals())


def arrivals(speed: float) -> list[Arrival]:
    """The requests at another speed."""
    return scaled(requests(), speed)


def num_distinct_blocks() -> int:
    """Blocks of 16 tokens that a pool needs to keep every shared prefix of the trace."""
    distinct = {block for _, request in requests() for block in request.block_hash_ids}
    return len(distinct) * requests()[0][1].hash_block_size // BLOCK_SIZE


CONFIG = SchedulerConfig(
    num_blocks=346_224,  # num_distinct_blocks() // 4
    max_model_len=SHAPE.max_model_len,
    block_size=BLOCK_SIZE,
    max_num_seqs=256,
    max_num_batched_tokens=8_192,
)
STEP_TIME = RooflineStepTime(shape=SHAPE, device=device("h200"), tensor_parallel=8)
MOONCAKE = Scenario(
    name="mooncake",
    about="Mooncake with its prefixes, a quarter of the blocks that keep all of them, Llama 3.1 8B on 8 H200",
    arrivals=arrivals,
    config=CONFIG,
    step_time=STEP_TIME,
    speeds={"below": 2.2, "at": 2.6, "above": 2.85},  # the queue grows above 2.65
)
MOONCAKE_SHORT = Scenario(
    name="mooncake-short",
    about="the same, a quarter of the blocks that running requests hold where they have all that they want",
    arrivals=arrivals,
    config=CONFIG.replace(num_blocks=26_533),  # of 106,134, at four times the speed of the trace
    step_time=STEP_TIME,
    speeds={"below": 1.4, "at": 1.7, "above": 1.9},  # the queue grows above 1.73
)
