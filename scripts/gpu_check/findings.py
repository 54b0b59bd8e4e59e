"""Findings: the results of a part, as JSON lines in a file, which survive if the part is killed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Found:
    """All findings of a part."""

    figures: dict[str, Any] = field(default_factory=dict)
    """Numbers and short texts, by name."""
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Title of a table -> its rows; a row has a value for each column."""
    goals: list[dict[str, Any]] = field(default_factory=list)
    """`name`, `value`, `target`, `is_least` (the target is a minimum, not a maximum), `is_met`."""
    skipped: list[str] = field(default_factory=list)
    """Measurements that were skipped, with the reason."""
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    """Checks that failed."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as data for JSON."""
        return asdict(self)


class Findings:
    """Writes the findings of one part.

    Args:
        path: the file, which is created.
        is_judged: whether goals apply to this run. Otherwise they are written as skipped.
    """

    def __init__(self, path: Path, *, is_judged: bool) -> None:
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._is_judged = is_judged
        self.num_wrong = 0

    def figure(self, name: str, value: object) -> None:
        """Add a number or a short text."""
        self._write("figure", name, value)

    def row(self, table: str, **cells: object) -> None:
        """Add a row of a table."""
        self._write("row", table, cells)

    def goal(self, name: str, value: float, *, at_least: float | None = None, at_most: float | None = None) -> None:
        """Add a goal of the project, met or missed. Give one of the two limits.

        Raises:
            ValueError: neither limit is given, or both are.
        """
        if (at_least is None) == (at_most is None):
            raise ValueError(f"goal {name!r} has at_least {at_least} and at_most {at_most}; give one of them")
        if not self._is_judged:
            self.skip(name, "goals are for full sizes on a GPU")
            return
        target = at_most if at_least is None else at_least
        is_met = value >= target if at_most is None else value <= target
        goal = {"value": value, "target": target, "is_least": at_most is None, "is_met": bool(is_met)}
        self._write("goal", name, goal)

    def skip(self, name: str, why: str) -> None:
        """Add a measurement that is skipped in this run."""
        self._write("skip", name, why)

    def note(self, text: str) -> None:
        """Add a sentence about the measurements."""
        self._write("note", "", text)

    def wrong(self, text: str) -> None:
        """Add a failed check; the part fails at its end."""
        self.num_wrong += 1
        self._write("wrong", "", text)

    def check(self, is_right: bool, text: str) -> None:
        """Add the failed check `text` unless `is_right`."""
        if not is_right:
            self.wrong(text)

    def _write(self, kind: str, name: str, value: object) -> None:
        self._file.write(json.dumps([kind, name, value], default=_plain) + "\n")


def read_findings(path: Path) -> Found:
    """The findings in a file. A truncated last line is ignored."""
    found = Found()
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            kind, name, value = json.loads(line)
        except ValueError:
            break
        if kind == "figure":
            found.figures[name] = value
        elif kind == "row":
            found.tables.setdefault(name, []).append(value)
        elif kind == "goal":
            found.goals.append({"name": name, **value})
        elif kind == "skip":
            found.skipped.append(f"{name} ({value})")
        elif kind == "note":
            found.notes.append(value)
        else:
            found.wrong.append(value)
    return found


def _plain(value: Any) -> Any:
    """Numbers of NumPy and PyTorch as Python numbers, other values as text."""
    return value.item() if hasattr(value, "item") else str(value)
