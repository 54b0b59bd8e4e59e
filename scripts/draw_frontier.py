"""Draws the picture of a frontier in the README and in docs/guides/size_a_deployment.md.

    python scripts/draw_frontier.py

It runs the command that the guide shows, writes docs/frontier/budgets.svg, and prints what the command prints.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from pointsman.cli import main

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "frontier" / "budgets.svg"
COMMAND = (
    "pointsman frontier --device h100 --max-num-batched-tokens 8192 --variant 'budget 1024=--max-num-batched-tokens "
    "1024' --requests 600 --samples 4 --ttft-target 1s --itl-target 50ms"
)


def draw(path: Path, *others: str) -> None:
    """Run the command, with further options, and write the picture to `path`."""
    main([*shlex.split(COMMAND)[1:], "--svg", str(path), *others])


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    draw(PICTURE)
