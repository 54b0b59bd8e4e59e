"""Compare the simulator's rule among data parallel engines with vLLM's own client, on random reports.

Arguments: the first seed and the number of workloads. Prints "tally" and "differences" as JSON.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
from vllm.v1.engine.core_client import DPLBAsyncMPClient

from pointsman.core import SchedulerConfig
from pointsman.sim.fleet import VllmRouting
from pointsman.sim.request import SimRequest


class Engine:
    """An engine with the numbers that a workload gives it."""

    def __init__(self) -> None:
        self.num_waiting, self.num_running, self.kv_cache_usage, self.num_unfinished = 0, 0, 0.0, 0
        self.config = SchedulerConfig(num_blocks=8, max_model_len=64)

    def change(self, rng: np.random.Generator) -> None:
        """Get random numbers: other counts than before, as vLLM reports no other change."""
        self.num_waiting = int(rng.choice([number for number in range(8) if number != self.num_waiting]))
        self.num_running, self.kv_cache_usage = int(rng.integers(12)), float(rng.random())


def client_of(num_engines: int) -> DPLBAsyncMPClient:
    """vLLM's client without its sockets and processes."""
    client = DPLBAsyncMPClient.__new__(DPLBAsyncMPClient)
    client.client_count, client.client_index, client.eng_start_index = 1, 0, 0
    client.core_engines = [bytes([index]) for index in range(num_engines)]
    client.reqs_in_flight, client.engine_inflight = {}, Counter()
    client.lb_engines = [[0, 0, 0.0] for _ in range(num_engines)]
    return client


def compare(seed: int, tally: Counter[str]) -> str | None:
    """The first difference in one workload."""
    rng = np.random.default_rng(seed)
    engines = [Engine() for _ in range(rng.integers(2, 6))]
    client, rule, now = client_of(len(engines)), VllmRouting(), 0.0
    engine_of: dict[str, int] = {}
    for number in range(200):
        if rng.random() < 0.3:
            now += 1.0  # all earlier reports are published
            rule.choose(SimRequest("unused", 1, 1), engines, now)
            client.eng_start_index = (client.eng_start_index + 1) % len(engines)
            for index, engine in enumerate(engines):
                engine.change(rng)
                rule.observe(index, engine, now)
            client.lb_engines = [[each.num_waiting, each.num_running, each.kv_cache_usage] for each in engines]
            tally["published"] += 1
        for name in [name for name in engine_of if rng.random() < 0.2]:
            engines[engine_of.pop(name)].num_unfinished -= 1
            client.engine_inflight[client.reqs_in_flight.pop(name)] -= 1
        now += 1e-4
        request = SimpleNamespace(request_id=f"r{number}", data_parallel_rank=None, pooling_params=None)
        theirs = client.core_engines.index(client.get_core_engine_for_request(request))
        ours = rule.choose(SimRequest(request.request_id, 1, 1), engines, now)
        if ours != theirs:
            return f"seed {seed}, request {number}: engine {ours}, in vLLM {theirs}"
        engine_of[request.request_id] = ours
        engines[ours].num_unfinished += 1
        tally["chosen"] += 1
        tally["engines chosen again"] += number and ours == engine_of.get(f"r{number - 1}")
    return None


def main() -> None:
    first, number = map(int, sys.argv[1:3])
    tally: Counter[str] = Counter()
    found = [compare(seed, tally) for seed in range(first, first + number)]
    print(json.dumps({"tally": tally, "differences": [each for each in found if each]}))


main()
