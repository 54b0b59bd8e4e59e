"""Agents between calls of their tools, beside a flood of prompts that are sent once.

An agent's next prompt is the last one, its output and the result of a tool, and comes 20 to 60 seconds later. Meanwhile
the flood uses every block of the pool, so the agent's cached blocks are evicted unless they are retained. Agents
announce with `retention` that they come back. In `agents-and-greed` each prompt of the flood does so too, for an hour.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from _policy_scenario import Scenario

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.request import SimRequest, Turn
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import Arrival

AGENTS, FLOOD = "agents", "flood"
SEED = 11
SECONDS = 300
NUM_AGENTS = 20
"""Number of agents; each begins another task when its task is done."""
NUM_TURNS = 8
FIRST_PROMPT, TOOL_RESULT, OUTPUT = 3_000, 400, 60
THINK = (20.0, 60.0)
WORK = 1.0
"""Expected seconds from a prompt to the end of its output."""
AGENTS_RETENTION, GREEDY_RETENTION = 75.0, 3_600.0
FLOOD_PROMPT, FLOOD_OUTPUT = (2_000, 6_000), 100


@lru_cache(maxsize=8)
def arrivals(speed: float, flood_retention: float | None = None) -> list[Arrival]:
    """`speed` prompts of the flood a second, at random; agents do not depend on the speed."""
    rng = np.random.default_rng(SEED)
    found: list[Arrival] = []
    for agent in range(NUM_AGENTS):
        time = float(rng.uniform(*THINK))
        turns: tuple[Turn, ...] = ()
        while time < SECONDS:
            index = len(found)
            new = TOOL_RESULT if turns else FIRST_PROMPT
            known = sum(turn.num_new_tokens + turn.num_output_tokens for turn in turns)
            is_last = len(turns) == NUM_TURNS - 1
            request = SimRequest(
                request_id=f"agent-{agent}-{index}",
                num_prompt_tokens=known + new,
                num_output_tokens=OUTPUT,
                tenant=AGENTS,
                retention=None if is_last else AGENTS_RETENTION,
                index=index,
                turns=turns,
            )
            found.append((time, request))
            turns = () if is_last else (*turns, Turn(index, new, OUTPUT))
            time += WORK + float(rng.uniform(*THINK))
    num_flood = int(speed * SECONDS)
    times = np.sort(rng.uniform(0, SECONDS, num_flood)).tolist()
    lengths = rng.integers(*FLOOD_PROMPT, num_flood).tolist()
    for time, length in zip(times, lengths, strict=True):
        index = len(found)
        request = SimRequest(
            request_id=f"flood-{index}",
            num_prompt_tokens=length,
            num_output_tokens=FLOOD_OUTPUT,
            tenant=FLOOD,
            retention=flood_retention,
            index=index,
        )
        found.append((time, request))
    return sorted(found, key=lambda arrival: arrival[0])


AGENTS_BESIDE_FLOOD = Scenario(
    name="agents",
    about="20 agents with prompts of 3,000 to 6,200 tokens beside prompts that are sent once, 40,000 blocks, Llama 3.1 "
    "8B on an H200; a speed is prompts sent once a second",
    arrivals=arrivals,
    config=SchedulerConfig(num_blocks=40_000, max_model_len=131_072, max_num_seqs=64, max_num_batched_tokens=8_192),
    step_time=RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("h200")),
    speeds={"below": 5.0, "at": 7.2, "above": 7.8},  # the queue grows above 7.3
)
AGENTS_AND_GREED = Scenario(
    name="agents-and-greed",
    about="agents, where what is sent once asks to be retained for an hour",
    arrivals=lambda speed: arrivals(speed, GREEDY_RETENTION),
    config=AGENTS_BESIDE_FLOOD.config,
    step_time=AGENTS_BESIDE_FLOOD.step_time,
    speeds=AGENTS_BESIDE_FLOOD.speeds,
)
