"""The simulator's hit rate on the load of `scale.py`, with the same fleet: replicas, pools and rule of routing."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from _common import Targets, print_table
from _scale_load import BLOCK_SIZE, CLIENTS, NUM_PREFIXES, OWN_TOKENS, PREFIX_TOKENS, TOKENS

from pointsman.core import SchedulerConfig
from pointsman.sim.fleet import ROUTINGS
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime, StepTime
from pointsman.sim.workload import ClosedLoop
from pointsman.traces import TraceRequest

STEP_TIME = LinearStepTime(per_step=2e-3, per_token=5e-5)
"""About the demo model's step time on a core. The hit rate hardly depends on it."""
MAX_DIFFERENCE = 0.03


def requests_behind(prefixes: list[int]) -> list[TraceRequest]:
    """Requests of the load, one for each of these prefixes."""
    blocks = PREFIX_TOKENS // BLOCK_SIZE
    return [
        TraceRequest(
            0.0, PREFIX_TOKENS + OWN_TOKENS, TOKENS, tuple(range(number * blocks, (number + 1) * blocks)), BLOCK_SIZE
        )
        for number in prefixes
    ]


def simulated_hit_rate(
    num_replicas: int,
    pool: int,
    num_requests: int,
    routing: str = "prefix-affinity",
    step_time: StepTime = STEP_TIME,
    seed: int = 1,
) -> float:
    """Hit rate of prompt tokens, in a closed loop of `CLIENTS` users, after one request behind each prefix.

    Args:
        num_replicas: the number of engines.
        pool: KV blocks of each.
        num_requests: after the first ones.
        routing: a rule of `pointsman simulate`.
        step_time: of each replica.
        seed: of the order in which prefixes come.
    """
    generator = random.Random(seed)
    prefixes = [*range(NUM_PREFIXES), *(generator.randrange(NUM_PREFIXES) for _ in range(num_requests))]
    config = SchedulerConfig(num_blocks=pool, block_size=BLOCK_SIZE, max_model_len=1024)
    workload = ClosedLoop(CLIENTS, requests_behind(prefixes))
    outcome = simulate(workload, config, step_time, num_replicas=num_replicas, routing=ROUTINGS[routing]())
    looked_up = sum(stats.prefix_queries for stats in outcome.stats)
    first = NUM_PREFIXES * (PREFIX_TOKENS + OWN_TOKENS)  # the first requests find nothing
    return sum(stats.prefix_hits for stats in outcome.stats) / (looked_up - first)


@dataclass(frozen=True, slots=True)
class Measured:
    """A fleet with a measured hit rate on the load."""

    hit_rate: float
    num_requests: int
    num_engines: int
    pool: int
    """Number of KV blocks of each engine."""
    routing: str = "prefix-affinity"
    """The simulator's rule that is equal or equivalent to the measured one."""


def simulated_figures(targets: Targets, measured: Mapping[str, Measured]) -> dict[str, dict[str, float]]:
    """Simulate each fleet, and compare: both hit rates must be within `MAX_DIFFERENCE`."""
    figures = {}
    for name, fleet in measured.items():
        simulated = simulated_hit_rate(fleet.num_engines, fleet.pool, fleet.num_requests, fleet.routing)
        difference = abs(fleet.hit_rate - simulated)
        targets.at_most(f"difference of the simulated hit rate of {name}", difference, MAX_DIFFERENCE)
        figures[name] = {"measured": fleet.hit_rate, "simulated": simulated}
    rows = [(name, *one.values()) for name, one in figures.items()]
    print_table("Hit rates, measured and simulated", ("", "measured", "simulated"), rows)
    return figures
