"""Writes the table of the scheduler's knobs in docs/operating.md, from their declarations in pointsman/core/config.py.

    python scripts/write_knobs.py

A row has the option, its default with `pointsman serve`, and the docstring of the field. The table is between two
markers; the rest of the page is unchanged.
"""

from __future__ import annotations

import ast
import inspect
import re
from itertools import pairwise
from pathlib import Path

import pointsman.core.config
from pointsman.cli.scheduler_options import OPTIONS, flag, served_default

PAGE = Path(__file__).resolve().parent.parent / "docs" / "operating.md"
BEGIN = "<!-- The scheduler's knobs, written by scripts/write_knobs.py: change pointsman/core/config.py instead. -->\n"
END = "<!-- End of the scheduler's knobs. -->\n"


def docstrings() -> dict[str, str]:
    """The docstring of each field of `SchedulerConfig`, read from the source, because Python does not keep it."""
    tree = ast.parse(inspect.getsource(pointsman.core.config))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SchedulerConfig")
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(ast.literal_eval(text.value))
    return found


def table() -> str:
    """The table, a row for each knob with an option, in the order of the declarations."""
    texts = docstrings()
    rows = [(f"`{flag(name)}`", _code(served_default(name)) or "none", _linked(texts[name])) for name in OPTIONS]
    lines = [("option", "default", "what it does, and when to move it"), ("---", "---", "---"), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def with_table(page: str) -> str:
    """The page with the current table between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no table to replace; put it between {BEGIN.strip()} and {END.strip()}")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _code(words: str) -> str:
    """The words, with options formatted as code."""
    return re.sub(r"--[a-z-]*[a-z]", r"`\g<0>`", words)


def _linked(docstring: str) -> str:
    """The docstring in one line, with a link for each `docs/PAGE.md#section` in it."""

    def link(found: re.Match[str]) -> str:
        page, section = found[1], found[2] or ""
        title = section.removeprefix("#").replace("-", " ").capitalize() or page
        return f"[{title}]({page}{section})"

    return re.sub(r"`docs/([\w.]+)(#[\w-]+)?`", link, " ".join(docstring.split()))


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
