"""Common parts of all benchmarks: a small table, a JSON line of named figures at the end, and a check.

A script measures ratios against a peer in the same run, alternates with it, and keeps medians of CPU time, because a
shared machine changes speed from one minute to the next. `--check` compares the figures with the project's
targets and exits with 1 if one is missed, or if the run measured none. A target that a run does not measure (no peer,
no trace, `--quick`) is named with the reason, in the text and in the JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from pointsman.traces import read_trace

REPOSITORY = Path(__file__).resolve().parent.parent
AZURE_TRACE = REPOSITORY.parent / "shared" / "traces" / "azure_llm_2023_conversation.csv"


@dataclass
class Targets:
    """The project's targets: those that a run has met, missed and not measured."""

    missed: list[str] = field(default_factory=list)
    met: list[str] = field(default_factory=list)
    not_measured: list[str] = field(default_factory=list)

    def at_least(self, name: str, value: float, target: float) -> None:
        """Record whether `value` reaches a target: it must be `target` or more."""
        self._note(value >= target, f"{name} is {value:.3g}; target: at least {target:g}")

    def at_most(self, name: str, value: float, target: float) -> None:
        """Record whether `value` reaches a target: it must be `target` or less."""
        self._note(value <= target, f"{name} is {value:.3g}; target: at most {target:g}")

    def holds(self, text: str, met: bool) -> None:
        """Record whether a target without a number was met; `text` states the measurement and the target."""
        self._note(met, text)

    def skip(self, name: str, why: str) -> None:
        """Record a target of the script that this run does not measure, and the reason."""
        self.not_measured.append(f"{name} ({why})")

    def _note(self, met: bool, text: str) -> None:
        (self.met if met else self.missed).append(text)


def argument_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; `--help` shows the first line of the description."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute; fewer rounds, and it may skip the peer")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed, or none was measured")
    return parser


def parse_positive_int(text: str) -> int:
    """Parse the value of an option that must be an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1; give at least 1")
    return value


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A title, a header and rows, in aligned columns."""
    cells = [list(header), *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for row in cells:
        print("  " + "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)).rstrip(), flush=True)


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the ratios of each pair; both values of a pair were measured shortly after each other."""
    return median(a / b for a, b in zip(numerators, denominators, strict=True))


def note(text: str) -> None:
    """Print a line about the run, such as its progress or a skipped part."""
    print(text, flush=True)


def finish(benchmark: str, figures: dict[str, Any], targets: Targets, check: bool) -> int:
    """Print the verdict and, last, the JSON line.

    Returns:
        The exit code: 1 if `check` and a target was missed, or none was measured; else 0.
    """
    for text in targets.missed:
        print(f"missed: {text}")
    for text in targets.not_measured:
        print(f"not measured: {text}")
    measured_none = not targets.missed and not targets.met
    if check and measured_none:
        print("this run measured no target, so --check fails; see what it lacks above, or leave --check out")
    elif check and not targets.missed:
        print(f"all {len(targets.met)} targets that this run measured are met")
    machine = {"python": platform.python_version(), "machine": platform.machine(), "cores": os.cpu_count()}
    verdict = {"missed": targets.missed, "not_measured": targets.not_measured}
    print(json.dumps({"benchmark": benchmark, **machine, **figures, **verdict}), flush=True)
    return 1 if check and (targets.missed or measured_none) else 0


def azure_lengths(path: Path, count: int | None = None) -> list[tuple[int, int]] | None:
    """(prompt tokens, output tokens) of the first `count` requests of a trace; None, after a printed note, if the trace
    is missing."""
    if not path.exists():
        note(f"skipped: no trace at {path} (Azure Public Dataset, AzureLLMInferenceTrace_conv)")
        return None
    requests = read_trace(path, limit=count)
    return [(request.num_prompt_tokens, request.num_output_tokens) for request in requests if request.num_output_tokens]


def run(main: Callable[[], int]) -> None:
    """Exit with what `main` returns; with 130, and no traceback, on Ctrl-C."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return str(value)
