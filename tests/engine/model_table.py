"""The tables of docs/reference/models.md, made from the lists that the tests run.

`python -m tests.engine.model_table` writes them.
Each table stands between a pair of comments in the document; the text around them is written by hand.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.tiny_models import FAMILIES, REFUSED

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "models.md"


def exact_table() -> str:
    """The table of configurations whose tokens are tested: the model types by the features of their attention."""
    types: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        types.setdefault(family.features or "plain", []).append(f"`{family.model_type}`")
    lines = ["| attention, and other features | `model_type` |", "| --- | --- |"]
    return "\n".join(lines + [f"| {features} | {', '.join(names)} |" for features, names in types.items()])


def refused_table() -> str:
    """The table of configurations that are tested to be refused: the model types by the reason."""
    types: dict[str, list[str]] = {}
    for refusal in REFUSED.values():
        family = refusal.family
        types.setdefault(refusal.reason, []).append(f"`{family.model_type}` ({family.features})")
    lines = ["| refused because the model | `model_type` |", "| --- | --- |"]
    return "\n".join(lines + [f"| {reason} | {', '.join(names)} |" for reason, names in types.items()])


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
