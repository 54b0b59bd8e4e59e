"""A trace, simulated with two preemption policies: which one serves it better, on hardware that you do not have?

    python examples/simulate_trace.py [TRACE]

The real scheduler runs under a virtual clock, with step times from the datasheet of a GPU. TRACE is a CSV with
TIMESTAMP, ContextTokens and GeneratedTokens, as Azure publishes them; without it requests are drawn at random.
"""

from __future__ import annotations

import sys

import numpy as np

from pointsman import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.memory import num_kv_blocks
from pointsman.sim.shapes import model_shape
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces.read import read_trace
from pointsman.traces.requests import TraceRequest


def drawn(count: int = 300) -> list[TraceRequest]:
    rng = np.random.default_rng(0)
    arrivals = rng.exponential(0.3, count).cumsum() - 0.1
    lengths = rng.lognormal([6.5, 5.5], 0.7, (count, 2)).astype(int) + 1
    return [TraceRequest(float(max(0, at)), int(p), int(o)) for at, (p, o) in zip(arrivals, lengths, strict=True)]


def main() -> None:
    trace = list(read_trace(sys.argv[1], limit=2_000)) if len(sys.argv) > 1 else drawn()
    shape, gpu = model_shape("meta-llama/Llama-3.1-8B"), device("RTX 4090")
    num_blocks = num_kv_blocks(shape, gpu).num_blocks
    for reserves in ((), ("growth",)):
        config = SchedulerConfig(num_blocks=num_blocks, max_model_len=16_384, reserves=reserves)
        outcome = simulate(OpenLoop(trace), config, RooflineStepTime(shape=shape, device=gpu))
        timings = outcome.timings
        ttft = timings.first_token[: timings.count] - timings.arrival[: timings.count]
        print(
            f"reserves {reserves or 'none'}: TTFT mean {np.nanmean(ttft):.2f} s, "
            f"p99 {np.nanpercentile(ttft, 99):.2f} s, "
            f"{outcome.stats[0].num_preemptions} preemptions in {outcome.seconds:.0f} s"
        )


if __name__ == "__main__":
    main()
