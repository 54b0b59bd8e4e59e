"""`pointsman tune` beside an exhaustive grid, on workloads whose best settings differ.

Three workloads: a small KV pool, long prompts beside chats, and short requests at a high rate. For each, tune chooses
on one part of it, and its recommendation is compared on the held-out part with the best point of a grid of more than
200 (budget, sequence limit, threshold of long prompts, watermark) and with the defaults of vLLM on the device.

    python benchmarks/tune.py --check
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from time import process_time
from typing import Any

from _common import Targets, argument_parser, finish, note, parse_positive_int, print_table, run

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.memory import num_kv_blocks
from pointsman.sim.report.summary import Targets as Limits
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.stretches import Parts, Stretches, split
from pointsman.sim.trial import Job, Judge, Part, combine_samples
from pointsman.sim.tunables import Point, Space
from pointsman.sim.tune import MIN_GAIN, Search, tune
from pointsman.sim.vllm_defaults import vllm_defaults
from pointsman.sim.workers import Runner, workers
from pointsman.sim.workload import (
    Distribution,
    Generated,
    Lengths,
    LogNormal,
    Mixture,
    OpenLoop,
    PoissonArrivals,
)

OF_THE_GRID = 0.95
WORTHWHILE = 0.10
"""A gain of the grid over the defaults that tune must have too."""
NUM_QUICK = 100
GRID: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (256, 512, 1024, 2048, 4096, 8192, 16384),
    "max_num_seqs": (16, 32, 64, 128, 256, 512, 1024),
    "long_prefill_token_threshold": (0, 512, 2048),
    "watermark": (0.0, 0.05),
}
QUICK_GRID = {"max_num_batched_tokens": (512, 1024, 2048, 8192), "max_num_seqs": (32, 128, 512)}


@dataclass(frozen=True)
class Case:
    """A workload and its service."""

    name: str
    model: str
    device: str
    rate: float
    """Arrivals, in requests a second."""
    prompt: Distribution
    output: Distribution
    limits: Limits
    num_blocks: int | None = None
    """Number of blocks; None: as estimated for the device."""
    num_requests: int = 400
    """Requests of each part."""


CASES = (
    Case(
        "a small pool",
        "Llama-3.1-8B",
        "a100",
        rate=9,
        prompt=LogNormal(400, 0.6),
        output=LogNormal(300, 0.6),
        limits=Limits(ttft=3.0, itl=0.15, itl_of="gap"),
        num_blocks=2000,
    ),
    Case(
        "long prompts beside chats",
        "Llama-3.1-8B",
        "h100",
        rate=11,
        prompt=Mixture(((0.93, LogNormal(400, 0.5)), (0.07, LogNormal(14_000, 0.2)))),
        output=LogNormal(150, 0.5),
        limits=Limits(ttft=1.0, itl=0.06, itl_of="gap"),
    ),
    Case(
        "short requests at a high rate",
        "Qwen3-0.6B",
        "a100",
        rate=700,
        prompt=LogNormal(50, 0.5),
        output=LogNormal(90, 0.5),
        limits=Limits(ttft=0.1),
        num_requests=900,
    ),
)


def question(case: Case, num_requests: int) -> tuple[Search, Judge]:
    """The search, and the judge that simulates it."""
    shape, on = model_shape(case.model), device(case.device)
    defaults = vllm_defaults(on, shape.max_model_len)
    base = SchedulerConfig.preset(
        "vllm",
        num_blocks=case.num_blocks or 1,
        max_model_len=shape.max_model_len,
        enable_prefix_caching=False,  # prompts share nothing
        **defaults._asdict(),
    )

    def sized(config: SchedulerConfig) -> SchedulerConfig:
        if case.num_blocks is not None:
            return config
        sizes = {"max_num_batched_tokens": config.max_num_batched_tokens, "max_num_seqs": config.max_num_seqs}
        return config.replace(num_blocks=num_kv_blocks(shape, on, config.block_size, **sizes).num_blocks)

    generated = Generated(PoissonArrivals(case.rate), Lengths(case.prompt, case.output), 2 * num_requests, seed=1)
    parts: Parts = split(list(OpenLoop(generated).first_arrivals()), num_requests)
    judge = Judge(
        source=Stretches((*parts.train, *parts.held_out)),
        step_times=(RooflineStepTime(shape=shape, device=on),),
        targets=case.limits,
    )
    return Search(space=Space(base), parts=parts, targets=case.limits, sized=sized), judge


def best_of_grid(search: Search, runner: Runner, grid: dict[str, tuple[Any, ...]]) -> tuple[float, Point, int]:
    """The highest goodput of any point on the held-out part, that point, and the number of points."""
    space, parts = search.space, search.parts
    points = list(
        dict.fromkeys(space.make_point(dict(zip(grid, values, strict=True))) for values in product(*grid.values()))
    )
    held_out = range(len(parts.train), len(parts.train) + len(parts.held_out))
    configs = [search.sized(space.config(point)) for point in points]
    samples = runner.run([Job(config, 1, Part(stretch)) for config in configs for stretch in held_out])
    goodputs = [combine_samples([next(samples) for _ in held_out]).goodput for _ in points]
    best = max(goodputs)
    return best, points[goodputs.index(best)], len(points)


def compare(case: Case, num_workers: int, quick: bool) -> dict[str, Any]:
    """Compare tune with the grid, on one workload."""
    search, judge = question(case, NUM_QUICK if quick else case.num_requests)
    if quick:
        search = replace(search, num_trials=24)
    with workers(judge, num_workers) as runner:
        start = process_time()
        found = tune(search, runner)
        seconds = process_time() - start
        grid, point, num_points = best_of_grid(search, runner, QUICK_GRID if quick else GRID)
    assert found.judged_defaults is not None and found.recommended is not None
    settings, space = found.recommended.trial.settings, search.space
    changed = space.changed_settings(space.make_point(settings))
    return {
        "defaults": found.judged_defaults.goodput,
        "grid": grid,
        "tuned": found.recommended.goodput,
        "is_gain": found.is_gain,
        "settings": {name: settings[name] for name in changed},
        "grid_settings": {name: space.settings(point)[name] for name in space.changed_settings(point)},
        "num_points": num_points,
        "num_trials": len(found.trials),
        "cpu_seconds": round(seconds, 1),
    }


def check(name: str, found: dict[str, Any], targets: Targets) -> None:
    """The targets on one workload."""
    defaults, grid, tuned = found["defaults"], found["grid"], found["tuned"]
    targets.at_least(f"{name}: goodput, of the grid's best", tuned / grid, OF_THE_GRID)
    gain = grid / defaults - 1 if defaults else math.inf
    if gain >= WORTHWHILE:
        targets.at_least(f"{name}: goodput, of the defaults'", tuned / max(defaults, 1e-9), 1 + WORTHWHILE)
    targets.holds(
        f"{name}: {'a gain' if found['is_gain'] else 'no gain'} is said, and the grid has {100 * gain:.1f} % more than "
        "the defaults",
        found["is_gain"] or gain <= MIN_GAIN,
    )
    targets.holds(f"{name}: what is recommended is no worse than the defaults", tuned >= defaults)


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--only", help="the workloads with this in their name")
    parser.add_argument("--workers", type=parse_positive_int, default=1, help="processes that simulate")
    arguments = parser.parse_args()
    targets = Targets()
    figures: dict[str, Any] = {"quick": arguments.quick, "workloads": {}}
    rows = []
    for case in CASES[1:2] if arguments.quick else CASES:
        if (arguments.only or "") not in case.name:
            continue
        found = figures["workloads"][case.name] = compare(case, arguments.workers, arguments.quick)
        check(case.name, found, targets)
        rows.append([case.name, *(found[key] for key in ("defaults", "grid", "tuned", "num_points", "num_trials"))])
        note(f"  {case.name}: tuned {found['settings']}; the grid's best {found['grid_settings']}")
    header = ["requests/s within the targets, held out", "defaults", "grid", "tuned", "points", "trials"]
    print_table("Settings by tune, and by an exhaustive grid", header, rows)
    if arguments.quick:
        targets.skip("the other workloads, and a grid of 200 points", "--quick")
    return finish("tune", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
