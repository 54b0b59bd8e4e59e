"""How far to trust an interval of `pointsman capacity`: random workloads whose capacity is known.

A server that runs one request at a time is a queue whose waiting times follow from Lindley's recursion: the wait of a
request is that of the one before, plus its service, minus the time between the two arrivals, and at least 0. So the
capacity is known from millions of requests, without the simulator. `find_capacity` searches it with the real scheduler,
on few requests. The share of its 90 % intervals that contain the known capacity should be about 90 %.

    python benchmarks/planner.py --check

Times between arrivals are gamma distributed, services lognormal; rate, spread, target and share are random.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from _common import Targets as Checks
from _common import argument_parser, finish, print_table, run

from pointsman.core import SchedulerConfig
from pointsman.sim.capacity import Capacity, Question, find_capacity
from pointsman.sim.report.summary import Targets
from pointsman.sim.samples import GeneratedSamples
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.trial import Judge
from pointsman.sim.workers import workers
from pointsman.sim.workload import Constant, GammaArrivals, Lengths, LogNormal

FloatArray = npt.NDArray[np.float64]

CONFIDENCE = 0.9
NUM_WORKLOADS, NUM_QUICK = 20, 3
MAX_SIMULATED, MAX_QUICK = 50_000, 10_000
"""Simulated requests of a search."""
TRUTH, QUICK_TRUTH = 2_000_000, 500_000
"""Requests from which the known capacity is computed."""
MIN_COVERED = 16
"""Of `NUM_WORKLOADS`; the other number of workloads in proportion."""
MEDIAN_TOKENS = 1000
LONGEST = 200_000
ONE_AT_A_TIME = SchedulerConfig(
    num_blocks=LONGEST // 16 + 2,
    max_model_len=LONGEST,
    max_num_seqs=1,
    max_num_batched_tokens=LONGEST,
    enable_prefix_caching=False,
)


@dataclass(frozen=True, slots=True)
class Queue:
    """A workload on a server that runs one request at a time."""

    median_seconds: float
    """Median seconds of a service."""
    sigma: float
    """Spread of the services: the standard deviation of their logarithm."""
    variation: float
    """Coefficient of variation of the times between arrivals; 1: Poisson."""
    ttft: float
    """Target in seconds."""
    share: float
    seed: int

    @property
    def mean_seconds(self) -> float:
        return self.median_seconds * math.exp(self.sigma**2 / 2)


def random_queue(seed: int) -> Queue:
    """A random workload. Its target is 8 to 60 mean services."""
    rng = np.random.default_rng((seed, 5))
    median, sigma = float(np.exp(rng.uniform(math.log(0.02), math.log(1)))), float(rng.uniform(0.2, 1.1))
    ttft = median * math.exp(sigma**2 / 2) * float(np.exp(rng.uniform(math.log(8), math.log(60))))
    share = float(rng.choice([0.9, 0.95, 0.99]))
    return Queue(median, sigma, float(rng.uniform(0.5, 1.8)), ttft, share, seed)


def true_capacity(queue: Queue, num_requests: int) -> float:
    """Requests a second at which the share of requests within the target falls to that of the queue."""
    rng = np.random.default_rng((queue.seed, 6))
    tokens = np.maximum(1, np.round(MEDIAN_TOKENS * np.exp(rng.normal(0, queue.sigma, num_requests))))
    service = tokens * queue.median_seconds / MEDIAN_TOKENS
    shape = 1 / queue.variation**2
    between = rng.gamma(shape, 1 / shape, num_requests)
    low, high = 0.01 / queue.mean_seconds, 1 / queue.mean_seconds
    for _ in range(18):
        rate = math.sqrt(low * high)
        met = float((sojourns(service, between / rate) <= queue.ttft)[num_requests // 50 :].mean())
        low, high = (rate, high) if met >= queue.share else (low, rate)
    return math.sqrt(low * high)


def sojourns(service: FloatArray, between: FloatArray) -> FloatArray:
    """Seconds from each arrival to the end of its service (Lindley's recursion, as a running minimum).

    Args:
        service: seconds of each service, [requests].
        between: seconds before each arrival; the first one has no effect.
    """
    walk = np.concatenate([[0.0], np.cumsum(service[:-1] - between[1:])])
    found: FloatArray = walk - np.minimum.accumulate(walk) + service
    return found


def search(queue: Queue, max_simulated: int) -> Capacity:
    """The capacity as `pointsman capacity` finds it."""
    samples = GeneratedSamples(
        GammaArrivals(1.0, queue.variation), Lengths(LogNormal(MEDIAN_TOKENS, queue.sigma), Constant(1)), queue.seed
    )
    targets = Targets(ttft=queue.ttft)
    judge = Judge(
        source=samples,
        step_times=(LinearStepTime(per_step=0.0, per_token=queue.median_seconds / MEDIAN_TOKENS),),
        targets=targets,
    )
    question = Question(
        samples=samples,
        config=ONE_AT_A_TIME,
        targets=targets,
        share=queue.share,
        confidence=CONFIDENCE,
        max_simulated=max_simulated,
    )
    with workers(judge) as runner:
        return find_capacity(question, runner)


def main() -> int:
    args = argument_parser(__doc__ or "").parse_args()
    targets = Checks()
    figures = measure(args.quick, targets)
    return finish("planner", figures, targets, args.check)


def measure(is_quick: bool, targets: Checks) -> dict[str, Any]:
    """Search the capacity of all workloads; print a table."""
    count = NUM_QUICK if is_quick else NUM_WORKLOADS
    rows: list[tuple[object, ...]] = []
    widths, errors, seconds, num_covered = [], [], [], 0
    for seed in range(count):
        queue = random_queue(seed)
        truth = true_capacity(queue, QUICK_TRUTH if is_quick else TRUTH)
        start = time.process_time()
        found = search(queue, MAX_QUICK if is_quick else MAX_SIMULATED)
        seconds.append(time.process_time() - start)
        interval = found.interval
        assert interval is not None
        is_covered = interval.low <= truth <= interval.high
        num_covered += is_covered
        widths.append(interval.excess)
        errors.append(abs(interval.value / truth - 1))
        figures = (queue.ttft, queue.share, truth, interval.value, interval.low, interval.high)
        rows.append((*(f"{figure:.4g}" for figure in figures), found.num_simulated, "" if is_covered else "missed"))
    print_table(
        f"Capacity with its {CONFIDENCE:.0%} interval, and the known capacity, in requests a second",
        ("target in s", "share", "known", "found", "low", "high", "simulated", ""),
        rows,
    )
    targets.at_least("intervals that hold the known capacity", num_covered, MIN_COVERED * count // NUM_WORKLOADS)
    return {
        "num_workloads": count,
        "num_covered": num_covered,
        "median_excess": round(float(np.median(widths)), 4),
        "median_error": round(float(np.median(errors)), 4),
        "mean_cpu_seconds": round(float(np.mean(seconds)), 2),
    }


if __name__ == "__main__":
    run(main)
