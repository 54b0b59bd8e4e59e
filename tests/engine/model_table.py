"""The tables of docs/reference/models.md, made from the lists that the tests run.

`python -m tests.engine.model_table` writes them.
Each table stands between a pair of comments in the document; the text around them is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.tiny_models import FAMILIES, REFUSED, THOROUGH

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def exact_table() -> str:
    """The table of configurations whose tokens are tested, with the number of engine settings for each."""
    lines = ["| configuration | `model_type` | what is special about it | verdict |", "| --- | --- | --- | --- |"]
    for name, family in FAMILIES.items():
        tested = "exact, in every setting" if name in THOROUGH else "exact"
        lines.append(f"| {name} | `{family.model_type}` | {family.features or 'plain'} | {tested} |")
    return "\n".join(lines)


def refused_table() -> str:
    """The table of configurations that are tested to be refused, with the reasons."""
    lines = ["| configuration | `model_type` | what it has | refused because |", "| --- | --- | --- | --- |"]
    for name, refusal in REFUSED.items():
        family = refusal.family
        lines.append(f"| {name} | `{family.model_type}` | {family.features} | {refusal.reason} |")
    return "\n".join(lines)


def with_tables(document: str) -> str:
    """The document with both tables as the lists are now.

    Raises:
        ValueError: the document lacks a pair of comments.
    """
    for name, table in (("exact", exact_table()), ("refused", refused_table())):
        start, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        block = f"{start}\n{table}\n{end}"
        document, count = re.subn(f"{start}.*?{end}", lambda _, block=block: block, document, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"the document has {count} places for the table {name!r}; it needs one")
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
