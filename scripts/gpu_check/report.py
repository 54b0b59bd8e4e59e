"""Report: writes the results to a JSON file after each part, and prints them as tables."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from _common import note, print_table

from gpu_check.running import Result


@dataclass(slots=True)
class Report:
    """The results of a run."""

    about: dict[str, Any]
    """The machine and the run."""
    planned: Sequence[str]
    """Letters of the selected parts."""
    out: Path | None = None
    """The JSON file; None: no file is written."""
    results: list[Result] = field(default_factory=list)

    def add(self, result: Result) -> None:
        """Add the result of a part that has ended."""
        self.results.append(result)
        self.write()

    @property
    def failed(self) -> list[str]:
        """Parts that did not pass."""
        return [f"{each.part.letter} {each.part.name}: {each.status}" for each in self.results if not each.is_passed]

    @property
    def missed(self) -> list[str]:
        """Goals that were missed."""
        return [goal_text(each) for result in self.results for each in result.found.goals if not each["is_met"]]

    def to_dict(self) -> dict[str, Any]:
        """The fields as data for JSON."""
        return {
            "gpu_check": self.about,
            "planned": list(self.planned),
            "failed": self.failed,
            "missed": self.missed,
            "parts": {each.part.letter: each.to_dict() for each in self.results},
        }

    def write(self) -> None:
        """Write the JSON file, and move it into place, so that a reader never finds half of it."""
        if self.out is None:
            return
        part = self.out.with_name(self.out.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, self.out)

    def show(self) -> None:
        """Print every table, failed checks, the goals, and last the JSON in one line."""
        for result in self.results:
            _show_part(result)
        rows = [
            [each.part.letter, each.part.name, each.status, each.seconds, len(each.found.wrong)]
            for each in self.results
        ]
        print_table("Parts", ["", "part", "status", "seconds", "failed checks"], rows)
        for text in self.failed:
            note(f"failed: {text}")
        for text in self.missed:
            note(f"missed: {text}")
        print(json.dumps(self.to_dict(), separators=(",", ":")), flush=True)


def goal_text(goal: dict[str, Any]) -> str:
    """A goal in one line."""
    limit = "at least" if goal["is_least"] else "at most"
    return f"{goal['name']} is {goal['value']:.3g}; goal: {limit} {goal['target']:g}"


def result_line(result: Result) -> str:
    """The result of a part in one line."""
    what = f" ({len(result.found.wrong)} failed checks)" if result.found.wrong else ""
    return f"{result.part.letter} {result.part.name}: {result.status}{what}, {result.seconds:.1f} s"


def _show_part(result: Result) -> None:
    found = result.found
    for title, rows in found.tables.items():
        columns = list(dict.fromkeys(name for row in rows for name in row))
        print_table(f"{result.part.letter} {title}", columns, [[row.get(name) for name in columns] for row in rows])
    if found.figures:
        print_table(f"{result.part.letter} {result.part.title}", ["figure", "value"], list(found.figures.items()))
    for goal in found.goals:
        note(f"{'met' if goal['is_met'] else 'missed'}: {goal_text(goal)}")
    for text in found.notes:
        note(text)
    for text in found.skipped:
        note(f"not measured: {text}")
    for text in found.wrong:
        note(f"wrong: {text}")
    if result.log:
        note(f"the end of what part {result.part.letter} printed:\n{result.log}")
