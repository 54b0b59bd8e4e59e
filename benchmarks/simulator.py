"""How long a simulation takes, and whether decodes that are done at once give what single steps give.

The unit is the CPU time of 1,000 plain steps (`schedule` and `update`) of the same scheduler with 16 running requests,
measured before and after each simulation. Simulated are an hour of the Azure conversation trace, without and with
prefix cache, and the Mooncake trace with its shared prefixes; the first requests of both also step by step, and
compared. A step costs 6 ms, 80 us for each token and 40 ns for each token of context, so about ten requests run at
once.

Work grows with events, not with steps: 2,000 requests whose outputs, and the time between whose arrivals, are ten
times as long, in a pool that never fills, must cost little more.

    python benchmarks/simulator.py --check
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import numpy as np
from _common import AZURE_TRACE, REPOSITORY, Targets, argument_parser, finish, note, print_table, run

from pointsman.core import Request, Scheduler, SchedulerConfig, StepResult
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_trace

MOONCAKE_TRACE = AZURE_TRACE.with_name("mooncake_synthetic.jsonl")
STEP_TIME = LinearStepTime(per_step=6e-3, per_token=8e-5, per_context_token=4e-8)
AZURE_UNITS = {False: 250.0, True: 330.0}  # at most, without and with prefix cache
MOONCAKE_SECONDS = 10.0
GROWTH = 1.5
MEMORY_MIB = 1024
NUM_QUICK = 2_000
NUM_GROWTH = 2_000
TOLERANCE = 1e-9


def azure_config(caching: bool, num_blocks: int = 20_000) -> SchedulerConfig:
    """A pool that is seldom short."""
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=16_384,
        max_num_seqs=256,
        max_num_batched_tokens=2_048,
        enable_prefix_caching=caching,
    )


def mooncake_config() -> SchedulerConfig:
    """4 million tokens of KV."""
    return SchedulerConfig(
        num_blocks=250_000, max_model_len=131_072, max_num_seqs=256, max_num_batched_tokens=8_192, block_size=16
    )


class Unit:
    """1,000 plain steps with 16 running requests."""

    def __init__(self) -> None:
        config = azure_config(False).replace(num_blocks=17_000)
        self._scheduler = Scheduler(config)
        for index in range(16):
            self._scheduler.add(Request(f"r{index}", range(20), arrival_time=0.0, max_tokens=16_000), 0.0)
        self._result = StepResult(np.full(16, 7, dtype=np.int32))
        self.seconds()

    def seconds(self) -> float:
        """CPU seconds, the median of three."""
        samples = []
        for _ in range(3):
            start = process_time()
            for _ in range(250):
                self._scheduler.update(self._scheduler.schedule(0.0), self._result, 0.0)
            samples.append(4 * (process_time() - start))
        return median(samples)
