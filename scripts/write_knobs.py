"""Write the scheduler's table in docs/reference/configuration.md, from the declarations in pointsman/core/config.py.

    python scripts/write_knobs.py

A row has the option, its default with `pointsman serve`, and the docstring of the field. The table stands between two
markers; the rest of the page stays as it is.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from pointsman.cli.scheduler_options import OPTIONS, flag, served_default
from pointsman.core.config import SchedulerConfig
from pointsman.core.state.documented import field_docstrings

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "reference" / "configuration.md"
BEGIN = "<!-- The scheduler's knobs, written by scripts/write_knobs.py: change pointsman/core/config.py instead. -->\n"
END = "<!-- End of the scheduler's knobs. -->\n"


def table() -> str:
    """The table, a row for each knob with an option, in the order of the declarations."""
    texts = field_docstrings(SchedulerConfig)
    rows = [(f"`{flag(name)}`", _code(served_default(name)) or "none", _linked(texts[name])) for name in OPTIONS]
    lines = [("option", "default", "what it does, and when to change it"), ("---", "---", "---"), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |\n" for line in lines)


def with_table(page: str) -> str:
    """The page with the table of today between its markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(
            f"the page lacks the lines {BEGIN.strip()} and {END.strip()}, between which the table is replaced"
        )
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _code(words: str) -> str:
    """The words with options as code."""
    return re.sub(r"--[a-z-]*[a-z]", r"`\g<0>`", words)


def _linked(docstring: str) -> str:
    """The docstring in one line, with a link for each page that it names as `docs/*/*.md#section`."""

    def link(found: re.Match[str]) -> str:
        page, section = found[1], found[2] or ""
        name = section.removeprefix("#").replace("-", " ") or Path(page).stem.replace("_", " ")
        return f"[{name.capitalize()}]({os.path.relpath(DOCS / page, PAGE.parent)}{section})"

    return re.sub(r"`docs/([\w./]+)(#[\w-]+)?`", link, " ".join(docstring.split()))


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
