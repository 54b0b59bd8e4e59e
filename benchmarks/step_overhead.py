"""Overhead of a decode step beside arithmetic: Python, scheduling, sampling's bookkeeping, output processing.

32 requests decode. The time inside PyTorch's operators and compiled kernels on the engine's thread counts as
arithmetic;
the rest of a step's wall time is overhead. Two kinds of steps alternate:

- plain steps give the wall time and, with a stopwatch around some calls, the cost of the parts of a step;
- profiled steps give the operators' time, from torch.profiler: the inclusive time of each operator that no other
  operator called. The share is taken within these steps, so that a slow moment of the machine hits both sides of it.

A profiler slows the program. The time that it adds to a step is known (profiled less plain wall time), and its place
can
be estimated: an operator within another adds to that one's time, and of an outermost operator's added time about half
falls inside its own interval. That much is subtracted from the operators' time, and all of it from the step's. The two
extremes, that none or all of the added time fell inside operators, are printed as bounds.

    python benchmarks/step_overhead.py --check
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, finish, note, print_table, run
from _engine_model import FULL, QUICK, Shape, model_directory
from _pointsman_engine import (
    KERNELS,
    PARTS,
    Stopwatch,
    exactly,
    kernel_seconds,
    last_step,
    open_engine,
    scheduler_seconds,
    vocabulary_size,
)
from torch.profiler import ProfilerActivity, profile, record_function

ROWS = 32
PROMPT_TOKENS, PROMPT_TOKENS_QUICK = 256, 64
WARM_UP_STEPS = 5
PLAIN_STEPS, PROFILED_STEPS = 10, 4  # of one block
BLOCKS, BLOCKS_QUICK = 8, 3
MAX_OVERHEAD = 0.10
TOP = 10
STEP = "pointsman step"
US = 1e-6


@dataclass
class Operators:
    """The profiler's measurements in some steps, in seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Inclusive time of the outermost operators, by name."""
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    num_outermost: int = 0
    num_nested: int = 0

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def share_inside(self) -> float:
        """Estimated share of the profiler's own cost that fell inside outermost operators."""
        events = self.num_outermost + self.num_nested
        return (self.num_nested + 0.5 * self.num_outermost) / events if events else 0.0

    def add(self, events: Iterable[Any]) -> None:
        """Add a profile's events: operators of the thread that the steps ran on."""
        events = list(events)
        threads = {event.thread for event in events if event.name == STEP}
        for event in events:
            if not _is_operator(event) or event.thread not in threads:
                continue
            if _is_nested(event):
                self.num_nested += 1
                continue
            self.num_outermost += 1
            self.seconds[event.name] += event.time_range.elapsed_us() * US
            self.calls[event.name] += 1


@dataclass(frozen=True)
class Block:
    """One turn of profiled steps: seconds per step."""

    wall: float
    operators: float  # as the profiler has them
    kernels: float
    share_inside: float

    def overhead(self, added: float, share_inside: float | None = None) -> float:
        """Share of the wall time outside operators and kernels.

        Args:
            added: seconds that the profiler cost a step.
            share_inside: share of that time inside operators; None: as estimated.
        """
        inside = self.share_inside if share_inside is None else share_inside
        return 1.0 - (self.operators + self.kernels - inside * added) / (self.wall - added)


class Decoding:
    """An engine in which `ROWS` requests decode, one token each per step."""

    def __init__(self, shape: Shape, dtype: str, prompt_tokens: int, num_steps: int) -> None:
        longest = prompt_tokens + num_steps + ROWS
        self.engine = open_engine(
            str(model_directory(shape)),
            dtype=dtype,
            max_model_len=longest,
            max_num_seqs=ROWS,
            num_blocks=ROWS * (longest // 16 + 2),
        )
        rng = np.random.default_rng(0)
        for i in range(ROWS):
            prompt = rng.integers(0, vocabulary_size(self.engine), size=prompt_tokens).tolist()
            self.engine.add_request(f"r{i}", prompt, exactly(longest - prompt_tokens))
        while last_step(self.engine) != (ROWS, ROWS):
            self.engine.step()

    def step(self) -> float:
        """Wall seconds of one step.

        Raises:
            RuntimeError: it was not a step in which all requests decode one token.
        """
        start = perf_counter()
        self.engine.step()
        seconds = perf_counter() - start
        if last_step(self.engine) != (ROWS, ROWS):
            raise RuntimeError(f"a step had {last_step(self.engine)} rows and tokens, not {ROWS} of both")
        return seconds


@dataclass
class Measurement:
    """Everything about one number of threads. Times are seconds."""

    plain: list[float] = field(default_factory=list)
    """Wall time of each plain step."""
    profiled: list[float] = field(default_factory=list)
    """Wall time of each profiled step."""
    blocks: list[Block] = field(default_factory=list)
    parts: Stopwatch = field(default_factory=Stopwatch)
    """Over all plain steps."""
    operators: Operators = field(default_factory=Operators)
    """Over all profiled steps."""
    scheduler: float = 0.0
    """By the engine's own count, over all plain steps."""

    @property
    def added(self) -> float:
        """The profiler's cost in a step."""
        return max(0.0, median(self.profiled) - median(self.plain))

    def overhead(self, share_inside: float | None = None) -> float:
        """The median of the blocks; see `Block.overhead`."""
        return median(block.overhead(self.added, share_inside) for block in self.blocks)


def measure(decoding: Decoding, num_blocks: int) -> Measurement:
    """Run plain and profiled steps alternately."""
    for _ in range(WARM_UP_STEPS):
        decoding.step()
    measured = Measurement()
    for _ in range(num_blocks):
        scheduler_before = scheduler_seconds(decoding.engine)
        with measured.parts.around([*PARTS, *KERNELS]):
            measured.plain += [decoding.step() for _ in range(PLAIN_STEPS)]
        measured.scheduler += scheduler_seconds(decoding.engine) - scheduler_before
        measured.blocks.append(profiled_block(decoding, measured))
    return measured


def profiled_block(decoding: Decoding, measured: Measurement) -> Block:
    """A turn of profiled steps; its measurements are also added to `measured`."""
    kernels, operators = Stopwatch(), Operators()
    with kernels.around(KERNELS):
        events, seconds = profiled_steps(decoding)
    measured.profiled += seconds
    operators.add(events)
    measured.operators.add(events)
    count = len(seconds)
    return Block(sum(seconds) / count, operators.total / count, kernel_seconds(kernels) / count, operators.share_inside)


def profiled_steps(decoding: Decoding) -> tuple[list[Any], list[float]]:
    """A profile's events, and the wall seconds of its steps."""
    seconds = []
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(PROFILED_STEPS):
            with record_function(STEP):
                seconds.append(decoding.step())
    return list(profiler.events() or ()), seconds


def report(threads: int, measured: Measurement) -> dict[str, Any]:
    """The profile as tables; the figures of this number of threads."""
    num_plain, num_profiled = len(measured.plain), len(measured.profiled)
    # Shares of means: a slow moment of the machine is in both, and in neither median.
    plain_wall, profiled_wall = sum(measured.plain) / num_plain, sum(measured.profiled) / num_profiled
    kernels = kernel_seconds(measured.parts) / num_plain
    scheduler = measured.scheduler / num_plain

    rows: list[list[object]] = []
    for part in PARTS:
        calls = measured.parts.calls.get(part.label, 0)
        per_step = measured.parts.seconds[part.label] / num_plain if calls else None
        rows.append([part.label, *_time_and_share(per_step, plain_wall), calls / num_plain])
    rows.append(["scheduler, by the engine's count", *_time_and_share(scheduler, plain_wall), None])
    rows.append(["compiled kernels", *_time_and_share(kernels, plain_wall), None])
    title = f"a step of {ROWS} decodes, {threads} thread(s): {median(measured.plain) * 1e3:.2f} ms"
    print_table(f"{title}; parts, mean of {num_plain} plain steps", ["", "ms", "share", "calls"], rows)

    operators, rows = measured.operators, []
    for name in sorted(operators.seconds, key=lambda name: -operators.seconds[name])[:TOP]:
        per_step = operators.seconds[name] / num_profiled
        rows.append([name, *_time_and_share(per_step, profiled_wall), operators.calls[name] / num_profiled])
    rows.append(["all operators", *_time_and_share(operators.total / num_profiled, profiled_wall), None])
    print_table(f"outermost operators, mean of {num_profiled} profiled steps", ["", "ms", "share", "calls"], rows)

    overhead, least, most = measured.overhead(), measured.overhead(0.0), measured.overhead(1.0)
    note(f"  the profiler adds {measured.added * 1e3:.2f} ms to a step")
    note(f"  outside operators and kernels: {overhead:.1%} of a step (between {least:.1%} and {most:.1%})")
    return {
        "step_ms": round(median(measured.plain) * 1e3, 3),
        "profiled_step_ms": round(median(measured.profiled) * 1e3, 3),
        "operators_ms": round(operators.total / num_profiled * 1e3, 3),
        "kernels_ms": round(kernels * 1e3, 3),
        "scheduler_ms": round(scheduler * 1e3, 4),
        "outputs_ms": round(measured.parts.seconds["report: outputs"] / num_plain * 1e3, 4),
        "overhead": round(overhead, 4),
        "overhead_bounds": [round(least, 4), round(most, 4)],
    }


def thread_counts(text: str) -> list[int]:
    """The numbers in "1,2"."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of threads; give a list such as 1,2")
    return counts


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--threads", type=thread_counts, help="PyTorch's threads, one number or several (1,2; quick: 1)"
    )
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--blocks", type=int, help=f"of {PLAIN_STEPS} plain and {PROFILED_STEPS} profiled steps")
    arguments = parser.parse_args()
    quick = arguments.quick
    counts = arguments.threads or ([1] if quick else [1, 2])
    num_blocks = arguments.blocks or (BLOCKS_QUICK if quick else BLOCKS)
    shape, prompt_tokens = (QUICK, PROMPT_TOKENS_QUICK) if quick else (FULL, PROMPT_TOKENS)

    targets = Targets()
    figures: dict[str, Any] = {}
    for threads in counts:
        torch.set_num_threads(threads)
        steps = WARM_UP_STEPS + num_blocks * (PLAIN_STEPS + PROFILED_STEPS)
        measured = measure(Decoding(shape, arguments.dtype, prompt_tokens, steps), num_blocks)
        figures[str(threads)] = entry = report(threads, measured)
        name = f"overhead share at {threads} thread(s)"
        if quick:
            targets.skip(name, "--quick: a small model's steps are mostly overhead, whatever the engine does")
        else:
            targets.at_most(name, entry["overhead"], MAX_OVERHEAD)
    setting = {
        "quick": quick,
        "dtype": arguments.dtype,
        "parameters": shape.num_parameters,
        "running": ROWS,
        "prompt_tokens": prompt_tokens,
    }
    return finish("step_overhead", {**setting, "threads": figures}, targets, arguments.check)


def _is_operator(event: Any) -> bool:
    """Operators are named with their namespace: aten::linear, mkldnn::_linear_pointwise."""
    return "::" in event.name


def _is_nested(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if _is_operator(parent):
            return True
        parent = parent.cpu_parent
    return False


def _time_and_share(seconds: float | None, wall: float) -> tuple[float | None, str | None]:
    """Milliseconds, and the share of a step's wall time."""
    return (None, None) if seconds is None else (seconds * 1e3, f"{seconds / wall:.1%}")


if __name__ == "__main__":
    run(main)
