"""Static against continuous batching, on the real engine with the demo model.

The experiment: one request for 500 tokens and seven for 10, repeated 40 times, all arriving at the start, 8 slots.
Static batching admits eight, and admits again when the last of the eight has ended, so seven slots idle for 490 of 500
steps. Continuous batching reuses a slot as soon as it is free. Then the same with lengths from the Azure conversation
trace, scaled down for a small model and a minute: the first 96 requests, prompts an eighth as long (at most 512
tokens),
outputs a quarter as long.

Both engines run in one process and alternate; the engine that is behind runs next, so that they see the same machine.
Each has a clock of its own that is stopped while the other works; latencies are read from it.

On a large model, where a step of eight rows costs little more than one of one, continuous batching must serve five
times the requests per second of static batching. The processor determines the cost of a row. If it puts five times out
of reach, the target is 0.9 of the gain of a step that only multiplies by the model's weights. These products are timed
alone, in the same run.

    python benchmarks/static_vs_continuous.py --check --plot docs/static_vs_continuous.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from _common import AZURE_TRACE, Targets, argument_parser, azure_lengths, finish, note, print_table, run
from _engine_model import FULL, model_directory

from pointsman.engine import Engine, SamplingParams
from pointsman.engine.model.linear import JoinedLinear

SLOTS = 8
REPETITIONS = 40
LARGE_THREADS = 2
LARGE_DIVISOR = 5  # the same proportions in a fifth of the steps: a step takes 40 ms
LARGE_TARGET = 5.0
SHARE_OF_PRODUCTS = 0.9
"""Minimum share of the gain of the matrix products alone that attention, sampling and scheduling must leave."""
LARGE_NAME = "requests per second on the large model, continuous / static"
PRODUCT_TOKENS = (*range(1, SLOTS + 1), 16, 32, 64, 512)
PRODUCT_ROUNDS = 15
LONG, SHORT = 500, 10
PROMPT_TOKENS = 8
AZURE_REQUESTS, AZURE_REQUESTS_QUICK = 96, 16
AZURE_PROMPT_DIVISOR, AZURE_MOST_PROMPT = 8, 512
AZURE_OUTPUT_DIVISOR = 4
STEPS_PER_TURN = 16
Batching: TypeAlias = Literal["static", "mixed"]
BATCHINGS: tuple[Batching, ...] = ("static", "mixed")
LABELS = {"static": "static", "mixed": "continuous"}
COLOURS = {"static": "#c2571a", "mixed": "#1f6f8b"}


@dataclass(frozen=True)
class Job:
    """One request of an experiment, in tokens."""

    prompt: int
    output: int


WARM_UP = Job(PROMPT_TOKENS, 8)


class Contestant:
    """An engine with a backlog, and its measurements."""

    def __init__(self, model: str, dtype: str, batching: Batching, jobs: Sequence[Job]) -> None:
        self.batching = batching
        self.num_jobs = len(jobs)
        self.seconds = 0.0
        self.cpu_seconds = 0.0
        self.rows: list[int] = []  # running requests of each step
        self.tokens: list[int] = []  # computed tokens of each step
        self.ends: list[float] = []  # seconds at which each step ended
        self.queued: list[bool] = []  # whether requests were still waiting after the decision of the step
        self.latency: dict[str, float] = {}
        self._turn_started: float | None = None
        longest = max(WARM_UP.prompt + WARM_UP.output, *(job.prompt + job.output for job in jobs))
        self.engine = Engine(
            model,
            dtype=dtype,
            num_threads=torch.get_num_threads(),
            max_model_len=longest,
            num_blocks=SLOTS * (longest // 16 + 2),
            max_num_seqs=SLOTS,
            max_num_batched_tokens=512,
            batching=batching,
            clock=self.clock,
        )
        self._warm_up()
        self._add(jobs)

    def clock(self) -> float:
        """Seconds for which this engine has run."""
        running = 0.0 if self._turn_started is None else perf_counter() - self._turn_started
        return self.seconds + running

    @property
    def progress(self) -> float:
        """Share of the requested tokens that are generated."""
        return self._num_rows / self._expected_rows

    @property
    def done(self) -> bool:
        return not self.engine.has_unfinished_requests()

    def take_turn(self) -> None:
        """Run a few steps, with the clock running."""
        cpu = process_time()
        self._turn_started = perf_counter()
        for _ in range(STEPS_PER_TURN):
            outputs = self.engine.step()
            now = self.clock()
            step = self.engine.last_output
            assert step is not None
            self.rows.append(step.num_rows)
            self.tokens.append(step.total_num_scheduled_tokens)
            self._num_rows += self.rows[-1]
            self.ends.append(now)
            self.queued.append(self.engine.scheduler.stats().num_waiting > 0)
            for output in outputs:
                if output.finished:
                    self.latency[output.request_id] = now
            if self.done:
                break
        self.seconds = self.clock()
        self._turn_started = None
        self.cpu_seconds += process_time() - cpu

    def utilisation(self, *, while_queued: bool = False) -> float:
        """Mean share of the slots in use per step; with `while_queued`, only of steps that left requests waiting."""
        rows = [r for r, queued in zip(self.rows, self.queued, strict=True) if queued or not while_queued]
        return sum(rows) / (SLOTS * len(rows)) if rows else 1.0

    def _warm_up(self) -> None:
        self.engine.add_request("warm-up", list(range(10, 10 + WARM_UP.prompt)), _exactly(WARM_UP.output))
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _add(self, jobs: Sequence[Job]) -> None:
        rng = np.random.default_rng(0)
        vocabulary = int(self.engine.model_config.vocab_size)
        self._num_rows = self._expected_rows = 0
        for i, job in enumerate(jobs):
            prompt = rng.integers(10, vocabulary, size=job.prompt).tolist()
            self.engine.add_request(f"r{i}", prompt, _exactly(job.output), arrival_time=0.0)
            self._expected_rows += job.output  # the prefill yields the first token


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def compete(model: str, dtype: str, jobs: Sequence[Job]) -> dict[str, Contestant]:
    """Serve the same backlog with both, alternating."""
    contestants = [Contestant(model, dtype, batching, jobs) for batching in BATCHINGS]
    while left := [contestant for contestant in contestants if not contestant.done]:
        min(left, key=lambda contestant: contestant.progress).take_turn()
    for contestant in contestants:
        if len(contestant.latency) != len(jobs):
            raise RuntimeError(f"{contestant.batching}: {len(contestant.latency)} of {len(jobs)} requests ended")
    return {contestant.batching: contestant for contestant in contestants}


def report(
    model: str, title: str, jobs: Sequence[Job], short: int, dtype: str = "float32"
) -> tuple[dict[str, Contestant], dict[str, Any]]:
    """Run, print the table, return the contestants and the figures; `short`: maximum tokens of a short request."""
    contestants = compete(model, dtype, jobs)
    rows = []
    figures: dict[str, Any] = {"requests": len(jobs)}
    short_ids = [f"r{i}" for i, job in enumerate(jobs) if job.output <= short]
    for batching, contestant in contestants.items():
        figures[LABELS[batching]] = entry = {
            "utilisation": round(contestant.utilisation(), 4),
            "utilisation_while_queued": round(contestant.utilisation(while_queued=True), 4),
            "steps": len(contestant.rows),
            "seconds": round(contestant.seconds, 3),
            "cpu_seconds": round(contestant.cpu_seconds, 3),
            "requests_per_second": round(len(jobs) / contestant.seconds, 3),
            "p50_short_seconds": round(median(contestant.latency[name] for name in short_ids), 4),
        }
        rows.append([LABELS[batching], *entry.values()])
    static, continuous = figures["static"], figures["continuous"]
    figures["steps_ratio"] = round(static["steps"] / continuous["steps"], 3)
    figures["requests_per_second_ratio"] = round(static["seconds"] / continuous["seconds"], 3)
    figures["p50_short_ratio"] = round(static["p50_short_seconds"] / continuous["p50_short_seconds"], 3)
    p50 = f"p50 s (<= {short} tokens)"
    header = ["", "utilisation", "while queued", "steps", "seconds", "CPU s", "requests/s", p50]
    print_table(f"{title}: {len(jobs)} requests, {SLOTS} slots", header, rows)
    note(
        f"  continuous: {figures['steps_ratio']:.2f} times fewer steps, "
        f"{figures['requests_per_second_ratio']:.2f} times the requests per second, "
        f"short requests {figures['p50_short_ratio']:.2f} times sooner; a step costs {step_cost(figures):.2f} times as "
        "much"
    )
    return contestants, figures


def products_alone(contestants: dict[str, Contestant]) -> tuple[float, dict[int, float]]:
    """The gain of continuous batching if a step were only the products of the model's linear layers.

    Returns:
        static / continuous, in seconds, for the tokens of the actual steps; milliseconds by number of tokens.
    """
    model = contestants["mixed"].engine.loaded.model
    layers = [module for module in model.modules() if isinstance(module, JoinedLinear)]
    inputs = [
        [torch.randn(count, layer.in_features).to(layer.weight.dtype) for layer in layers] for count in PRODUCT_TOKENS
    ]
    samples: list[list[float]] = [[] for _ in inputs]
    with torch.inference_mode():
        for _ in range(PRODUCT_ROUNDS):
            for seconds, given in zip(samples, inputs, strict=True):
                start = perf_counter()
                for layer, x in zip(layers, given, strict=True):
                    layer(x)
                seconds.append(perf_counter() - start)
    cost = [median(seconds) for seconds in samples]
    static, continuous = (np.interp(contestants[name].tokens, PRODUCT_TOKENS, cost).sum() for name in BATCHINGS)
    milliseconds = {count: round(1e3 * seconds, 2) for count, seconds in zip(PRODUCT_TOKENS, cost, strict=True)}
    return float(static / continuous), milliseconds


def check_large(contestants: dict[str, Contestant], figures: dict[str, Any], targets: Targets) -> None:
    """Check the large model's target, and report if the processor puts it out of reach."""
    figures["products_alone_ratio"], figures["products_milliseconds"] = products_alone(contestants)
    limit, cost = figures["products_alone_ratio"], figures["products_milliseconds"]
    note(
        f"  its matrix products alone take {cost[1]:.1f} ms for one token and {cost[SLOTS]:.1f} ms for {SLOTS}: they "
        f"would reach {limit:.2f} times the requests per second"
    )
    target = min(LARGE_TARGET, SHARE_OF_PRODUCTS * limit)
    targets.at_least(LARGE_NAME, figures["requests_per_second_ratio"], round(target, 3))


def experiment(long: int, short: int) -> list[Job]:
    """One long request and seven short ones, `REPETITIONS` times."""
    group = [Job(PROMPT_TOKENS, long), *[Job(PROMPT_TOKENS, short)] * (SLOTS - 1)]
    return group * REPETITIONS


def step_cost(figures: dict[str, Any]) -> float:
    """The cost of a continuous step, relative to a static one."""
    return float(figures["steps_ratio"] / figures["requests_per_second_ratio"])


def azure_jobs(trace: Path, count: int) -> list[Job] | None:
    """Lengths of the trace, scaled down as the text at the top says; None if there is no trace."""
    lengths = azure_lengths(trace, count)
    if lengths is None:
        return None
    return [
        Job(min(max(prompt // AZURE_PROMPT_DIVISOR, 1), AZURE_MOST_PROMPT), max(output // AZURE_OUTPUT_DIVISOR, 1))
        for prompt, output in lengths
    ]


def check_targets(figures: dict[str, Any], targets: Targets) -> None:
    """Check the project's targets of the experiment."""
    static = figures["static"]["utilisation"]
    targets.holds(f"static utilisation is {static:.1%}; expected: 10 % to 18 %", 0.10 <= static <= 0.18)
    targets.at_least("continuous utilisation while queued", figures["continuous"]["utilisation_while_queued"], 0.95)
    targets.at_least("steps, static / continuous", figures["steps_ratio"], 6.0)
    targets.at_least("requests per second, continuous / static", figures["requests_per_second_ratio"], 3.5)


def plot(contestants: dict[str, Contestant], title: str, path: Path) -> None:
    """Utilisation over time of both, and requests per second as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "pointsman", "font.size": 10})
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 3.6), width_ratios=[4, 1], layout="constrained")
    end = max(contestant.seconds for contestant in contestants.values())
    for batching, contestant in contestants.items():
        colour, name = COLOURS[batching], LABELS[batching]
        label = f"{name}: {contestant.utilisation():.0%} of the slots, done in {contestant.seconds:.1f} s"
        shares, edges = _steps(contestant)
        left.stairs(shares, edges, fill=True, color=colour, alpha=0.25)
        left.stairs(shares, edges, color=colour, linewidth=1.2, label=label)
        left.plot(contestant.seconds, 0, marker="v", color=colour, markersize=8, clip_on=False)
        rate = contestant.num_jobs / contestant.seconds
        right.bar(name, rate, color=colour, width=0.6)
        right.annotate(f"{rate:.1f}", (name, rate), xytext=(0, 3), textcoords="offset points", ha="center")
    left.set(xlabel="seconds", ylabel="slots in use", xlim=(0, end * 1.01), ylim=(0, 1.22), title=title)
    left.set_yticks(np.linspace(0.0, 1.0, 5))
    left.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    left.legend(loc="upper right", frameon=False, borderaxespad=0.0)
    right.set(ylabel="requests per second", ylim=(0, None))
    right.margins(y=0.12)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
    note(f"wrote {path}")


def _steps(contestant: Contestant) -> tuple[np.ndarray, np.ndarray]:
    """Slots in use over time, with runs of equal steps merged: shares [n], and the seconds between them [n + 1]."""
    rows, ends = np.array(contestant.rows), np.array(contestant.ends)
    last = np.append(rows[1:] != rows[:-1], True)
    return rows[last] / SLOTS, np.append(0.0, ends[last])


def large_dtype() -> str:
    """bfloat16, which takes half the time of float32 for the same comparison, if the processor multiplies it. Otherwise
    each product is converted first, and a step of eight rows takes five times as long as a step of one row."""
    return "bfloat16" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "float32"


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--model", default="demo", help="a model directory; the bundled demo model if not given")
    # A second thread gains nothing at this model's size, and costs a lot if other processes need the cores too.
    parser.add_argument("--threads", type=int, default=1, help="PyTorch's threads")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write the README's plot (.svg or .png)")
    parser.add_argument("--trace", type=Path, default=AZURE_TRACE, help="an Azure LLM inference trace, CSV")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    divisor = 10 if arguments.quick else 1  # the same proportions in a tenth of the steps
    long, short = LONG // divisor, SHORT // divisor
    title = f"one request of {long} tokens and seven of {short}, {REPETITIONS} times"
    targets = Targets()
    contestants, figures = report(arguments.model, title, experiment(long, short), short)
    check_targets(figures, targets)
    if arguments.plot:
        plot(contestants, title, arguments.plot)

    azure: dict[str, Any] | None = None
    jobs = azure_jobs(arguments.trace, AZURE_REQUESTS_QUICK if arguments.quick else AZURE_REQUESTS)
    if jobs is not None:
        scale = f"prompts / {AZURE_PROMPT_DIVISOR}, answers / {AZURE_OUTPUT_DIVISOR}"
        typical = int(median(job.output for job in jobs))
        _, azure = report(arguments.model, f"Azure trace, {scale}", jobs, typical)
    large: dict[str, Any] | None = None
    if not arguments.quick:
        torch.set_num_threads(LARGE_THREADS)
        long, short = LONG // LARGE_DIVISOR, SHORT // LARGE_DIVISOR
        title = f"{FULL.name} parameters, one request of {long} tokens and seven of {short}, {REPETITIONS} times"
        contestants, large = report(str(model_directory(FULL)), title, experiment(long, short), short, large_dtype())
        check_large(contestants, large, targets)
    else:
        targets.skip(LARGE_NAME, "--quick")
    result = {
        "quick": arguments.quick,
        "torch_threads": arguments.threads,
        "experiment": figures,
        "azure": azure,
        "large": large,
    }
    return finish("static_vs_continuous", result, targets, arguments.check)


if __name__ == "__main__":
    run(main)
