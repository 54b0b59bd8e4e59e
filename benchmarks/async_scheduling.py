"""Gain of scheduling the next step while the model executes one: two steps in flight beside one.

32 requests decode, on two engines that share a model and alternate every few steps. The text of every token is made, as
a server makes it. Measured are tokens per second, and the time of a step in which nothing is computed: the pause from
the end of one pass to the start of the next and, within a pass, the time for starting other threads. With one step in
flight the pause is everything that a step does beside arithmetic: taking in tokens, making text, scheduling, preparing
inputs. With two, this work happens within a pass, while other threads compute (`pointsman/engine/step_loop.py`).

This is a gain only if the passes do not grow by the same time, because two threads at once are slower than one. So the
length of a pass is shown too, and the share of the pause that a step really saves.

PyTorch computes with one thread, so that a second core, if any, is free for the other thread.

    python benchmarks/async_scheduling.py --check
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from _common import Targets, argument_parser, finish, note, paired_ratio, parse_positive_int, print_table, run
from _engine_model import FULL, QUICK, model_directory
from _pointsman_engine import exactly, open_engine, vocabulary_size, watch_begins, watch_passes

from pointsman.engine import Engine
from pointsman.engine.model.loader import load_model

ROWS = 32
PROMPT_TOKENS = 32
WARM_UP_STEPS = 8
STEPS = 6
"""Steps of a turn: few, so that both turns of a pair find the machine in the same state."""
TURNS = 18
ROUNDS, ROUNDS_LARGE, ROUNDS_QUICK = 5, 2, 1
MIN_THROUGHPUT = 0.97
MAX_PAUSE = 0.5


@dataclass
class Side:
    """One engine, and the measurements of its turns."""

    engine: Engine
    passes: list[tuple[float, float]]
    begins: list[float]
    """Seconds for starting other threads, each time; also those of other sides."""
    tokens_per_second: list[float] = field(default_factory=list)
    pause: list[float] = field(default_factory=list)
    """Seconds of a step in which nothing is computed: the median time between two passes of each turn, and the mean
    time for starting other threads."""
    length: list[float] = field(default_factory=list)
    """Seconds of a pass, the median of each turn."""

    def begin(self, number: int, prompts: list[list[int]]) -> None:
        """Start all requests; the first steps are not measured."""
        for index, prompt in enumerate(prompts):
            params = exactly(WARM_UP_STEPS + TURNS * (STEPS + 1) + 4)
            self.engine.add_request(f"{number}-{index}", prompt, params, eager_text=True)
        for _ in range(WARM_UP_STEPS):
            self.engine.step()

    def take_turn(self) -> None:
        """Run a few steps. The first one is not measured: the other side has just had the processor."""
        engine = self.engine
        engine.step()
        self.passes.clear()
        self.begins.clear()
        before, start = engine.counters.num_generated_tokens, perf_counter()
        for _ in range(STEPS):
            engine.step()
        seconds = perf_counter() - start
        self.tokens_per_second.append((engine.counters.num_generated_tokens - before) / seconds)
        between = median(later - end for (_, end), (later, _) in pairwise(self.passes))
        self.pause.append(between + sum(self.begins) / STEPS)
        self.length.append(median(end - start for start, end in self.passes))

    def end(self) -> None:
        """Run until no request remains."""
        for request in self.engine.outputs.requests:
            self.engine.abort(request.request_id)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        self.engine.step()  # reports the finished requests


def measure(model: str | Path, num_rounds: int) -> dict[int, Side]:
    """Measure both sides, by steps in flight."""
    loaded = load_model(model, "float32")
    torch.set_num_threads(1)
    sides: dict[int, Side] = {}
    begins = watch_begins()
    for in_flight in (1, 2):
        engine = open_engine(
            loaded, num_threads=1, max_num_seqs=ROWS, num_blocks=ROWS * 8, max_steps_in_flight=in_flight
        )
        sides[in_flight] = Side(engine, watch_passes(engine), begins)
    rng = np.random.default_rng(0)
    vocabulary = vocabulary_size(sides[1].engine)
    prompts = [rng.integers(3, vocabulary, size=PROMPT_TOKENS).tolist() for _ in range(ROWS)]
    for number in range(num_rounds):
        for side in sides.values():
            side.begin(number, prompts)
        for turn in range(TURNS):
            for side in sides.values() if turn % 2 else reversed(sides.values()):
                side.take_turn()
        for side in sides.values():
            side.end()
    for side in sides.values():
        side.engine.close()
    return sides


def report(name: str, sides: dict[int, Side], targets: Targets) -> dict[str, Any]:
    """The table, the targets and the figures of one model."""
    one, two = sides[1], sides[2]
    rows = [
        [in_flight, median(s.tokens_per_second), median(s.pause) * 1e6, median(s.length) * 1e6]
        for in_flight, s in sides.items()
    ]
    print_table(f"{name}: {ROWS} decodes", ["in flight", "tokens/s", "idle us", "pass us"], rows)
    throughput = paired_ratio(two.tokens_per_second, one.tokens_per_second)
    pause = paired_ratio(two.pause, one.pause)
    steps = [
        (1 / first - 1 / second) * ROWS
        for first, second in zip(one.tokens_per_second, two.tokens_per_second, strict=True)
    ]
    saved = median(step / pause for step, pause in zip(steps, one.pause, strict=True))
    note(f"  tokens per second {throughput:.3f} times, idle {pause:.2f} times; a step is shorter by {saved:.0%} of it")
    targets.at_least(f"{name}: tokens per second, two in flight / one", throughput, MIN_THROUGHPUT)
    targets.at_most(f"{name}: time in which nothing is computed, two in flight / one", pause, MAX_PAUSE)
    return {
        "throughput_ratio": round(throughput, 4),
        "pause_ratio": round(pause, 4),
        "pause_saved": round(saved, 4),
        "pause_us": {str(n): round(median(side.pause) * 1e6, 1) for n, side in sides.items()},
        "pass_us": {str(n): round(median(side.length) * 1e6, 1) for n, side in sides.items()},
        "tokens_per_second": {str(n): round(median(side.tokens_per_second), 1) for n, side in sides.items()},
    }


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument(
        "--rounds",
        type=parse_positive_int,
        help=f"rounds of {TURNS} turns of each side (default {ROUNDS}, {ROUNDS_LARGE} of the large)",
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    num_rounds, num_rounds_large = (arguments.rounds or (ROUNDS_QUICK if quick else n) for n in (ROUNDS, ROUNDS_LARGE))
    shape = QUICK if quick else FULL

    targets = Targets()
    models = {"demo": report("demo", measure("demo", num_rounds), targets)}
    models[shape.name] = report(shape.name, measure(model_directory(shape), num_rounds_large), targets)
    figures = {"quick": quick, "running": ROWS, "models": models}
    return finish("async_scheduling", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
