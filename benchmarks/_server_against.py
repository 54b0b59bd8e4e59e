"""Comparison of two checkouts of this repository under the same client: the cost of both servers for equal requests.

Both servers run in this interpreter, each with the `pointsman` of its checkout. The model is so small that the server's
own work is most of the cost. The servers alternate, in an order that changes from round to round, and each is stopped
while the other runs. A round gives a ratio: the processor time of this checkout's processes, API and engine, divided by
that of the other's. Rounds are short, so that both servers find the machine in the same state.

A process may be some percent slower than its twin for as long as it lives. So the servers are started several times, in
both orders, and strings have the same hashes in both. A start gives the median of its rounds, and the mean of the
starts counts. The target is judged by the 95 % interval of that mean. If the limit is within the interval, the run was
too noisy or too short to decide, and reports that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from _common import REPOSITORY, Targets, note, print_table
from _engine_model import Job, Shape, make_prompts
from _server_driver import drive
from _server_probe import run_async
from _server_process import processor_seconds
from _server_sides import SERVED_MODEL_NAME, VOCABULARY, Knobs, PointsmanSide

TINY = Shape("tiny", 64, 1, 2, 1, 32, 128, VOCABULARY, 1024)
MAX_RATIO = 1.03
TARGET = "CPU of a streamed request, relative to the other checkout"
PROCESSES = ("engine process", "API process")
WARM_UPS = 10
"""Rounds after a start that do not count: kernels are compiled or loaded, and the interpreter specialises its code."""


@dataclass(frozen=True, slots=True)
class Round:
    """The cost of the same requests for both servers: processor seconds of each of `PROCESSES`."""

    ours: tuple[float, ...]
    theirs: tuple[float, ...]
    num_complete: int
    """Number of complete requests, on the server with fewer of them."""

    @property
    def ratio(self) -> float:
        return sum(self.ours) / sum(self.theirs)


def measure_against(
    checkout: Path, knobs: Knobs, jobs: Sequence[Job], num_streams: int, rounds: int, starts: int
) -> list[list[Round]]:
    """Start the servers of both checkouts `starts` times, and run them alternately for `rounds`.

    Raises:
        RuntimeError: `checkout` is not a checkout, or a server did not start.
    """
    found = []
    for start in range(starts):
        seeds = range(start * rounds, (start + 1) * rounds)
        found.append(list(_rounds(checkout, knobs, jobs, num_streams, seeds, ours_first=start % 2 == 0)))
        note(f"  start {start + 1}: {_ratio(found[-1]):.3f} of the other checkout's CPU, median of {rounds} rounds")
    return found


def _ratio(rounds: Sequence[Round]) -> float:
    return median(each.ratio for each in rounds)


def _rounds(
    checkout: Path, knobs: Knobs, jobs: Sequence[Job], num_streams: int, seeds: Sequence[int], *, ours_first: bool
) -> Iterator[Round]:
    """A round for each seed, between a start and an end of both servers."""
    sides: dict[str, PointsmanSide] = {}
    places = {"ours": REPOSITORY, "theirs": checkout}
    with ExitStack() as stack:
        for name in places if ours_first else reversed(places):
            sides[name] = PointsmanSide(knobs, checkout=places[name])
            stack.callback(sides[name].stop)
            sides[name].pause()
        for number in range(-WARM_UPS, len(seeds)):
            seed = seeds[number] if number >= 0 else 1_000_000 - number
            names = list(sides) if number % 2 == 0 else list(reversed(sides))
            cpu = {name: _serve(sides[name], jobs, num_streams, seed) for name in names}
            if number >= 0:
                (ours, complete), (theirs, others) = cpu["ours"], cpu["theirs"]
                yield Round(ours, theirs, min(complete, others))


def _serve(side: PointsmanSide, jobs: Sequence[Job], num_streams: int, seed: int) -> tuple[tuple[float, ...], int]:
    """Processor seconds for the requests of one seed, and the number of complete ones; then the server is stopped."""
    prompts, outputs = make_prompts(jobs, VOCABULARY, seed), [job.output for job in jobs]
    side.resume()
    before = [processor_seconds(pid) for pid in side.pids()]
    driven = run_async(drive(side.address, SERVED_MODEL_NAME, prompts, outputs, num_streams=num_streams))
    after = [processor_seconds(pid) for pid in side.pids()]
    side.pause()
    return tuple(end - start for start, end in zip(before, after, strict=True)), driven.num_complete


def _margin(values: Sequence[float]) -> float:
    """The 95 % margin of the mean of `values`; infinity for one value."""
    from scipy import stats  # the other forms of the script run without it

    if len(values) < 2:
        return inf
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / sqrt(len(values))


def report_against(
    checkout: Path, starts: Sequence[Sequence[Round]], jobs: Sequence[Job], num_streams: int, targets: Targets
) -> dict[str, Any]:
    """Table, target, figures."""
    rounds = [each for start in starts for each in start]
    tokens = sum(job.output for job in jobs)
    per_thousand = {
        name: {process: median(cpu[at] for cpu in costs) * 1000 / tokens for at, process in enumerate(PROCESSES)}
        for name, costs in (
            ("this checkout", [each.ours for each in rounds]),
            ("the other", [each.theirs for each in rounds]),
        )
    }
    print_table(
        f"processor seconds per 1,000 tokens, {len(jobs)} requests in {num_streams} streams, {len(rounds)} rounds",
        ["", *PROCESSES, "both"],
        [[name, *cpu.values(), sum(cpu.values())] for name, cpu in per_thousand.items()],
    )
    ratios = [_ratio(start) for start in starts]
    ratio, margin = fmean(ratios), _margin(ratios)
    found = f"{ratio:.3f}, {f'give or take {margin:.3f} (95 %)' if isfinite(margin) else 'from one start'}"
    note(f"  this checkout's CPU by the other's: {found}")
    complete = min(each.num_complete for each in rounds)
    if complete < len(jobs):
        targets.holds(f"{complete} of {len(jobs)} requests are complete; target: all", False)
    elif abs(ratio - MAX_RATIO) < margin:
        why = f"{found}, does not tell whether it is at most {MAX_RATIO}"
        targets.skip(TARGET, f"{why}; raise --starts, or stop what else runs on this machine")
    else:
        targets.at_most(TARGET, ratio, MAX_RATIO)
    return {
        "against": str(checkout),
        "output_tokens": tokens,
        "cpu_ratio": round(ratio, 4),
        "cpu_ratio_margin": round(margin, 4) if isfinite(margin) else None,
        "cpu_ratios": [round(each, 4) for each in ratios],
        "cpu_seconds_per_1000_tokens": {
            name: {process: round(value, 4) for process, value in cpu.items()} for name, cpu in per_thousand.items()
        },
        "complete": complete,
    }
