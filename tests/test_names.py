"""Names in the code: short test names, and the field's words for bounds."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("pointsman", "tests", "benchmarks", "scripts", "examples")
MAX_LENGTH = 70
WORDS = r"\b_?(?:" + "|".join(("MOST", "LEAST", "FEW")) + r")_[A-Z]\w*"


def texts(suffix: str) -> dict[Path, str]:
    return {file: file.read_text() for folder in FOLDERS for file in (ROOT / folder).rglob(f"*{suffix}")}


def test_test_names_have_at_most_70_characters() -> None:
    names = [name for text in texts(".py").values() for name in re.findall(r"def (test_\w+)", text)]
    assert len(names) > 3000
    assert [name for name in names if len(name) > MAX_LENGTH] == []


def test_bounds_are_named_max_and_min() -> None:
    found = {**texts(".py"), **texts(".js")}
    assert {file.name: names for file, text in found.items() if (names := re.findall(WORDS, text))} == {}
