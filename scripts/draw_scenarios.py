"""Runs the scenarios of `pointsman simulate --scenario` and writes their results into the documentation.

    python scripts/draw_scenarios.py [NAME ...]

It writes each picture to docs/scenarios/NAME.svg, and the figures below the command in docs/how_it_works/claims.md.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console

from pointsman.cli.scenario import print_figures
from pointsman.cli.simulation import service_of_options
from pointsman.sim.scenarios import SCENARIOS, Finding, scenario
from pointsman.sim.scenarios.picture import write_svg

DOCS = Path(__file__).resolve().parent.parent / "docs"


def printed(found: Finding) -> str:
    """The figures, as the command prints them without a terminal."""
    shown = io.StringIO()
    print_figures(found, Console(file=shown, highlight=False, width=100))
    return "".join(f"{line.rstrip()}\n" for line in shown.getvalue().splitlines())


def main(names: list[str]) -> None:
    page = DOCS / "how_it_works" / "claims.md"
    step_time = service_of_options({}, None).step_time
    for name in names or SCENARIOS:
        found = scenario(name).run(step_time)
        if not found.is_complete:
            sys.exit(f"interrupted at {name}")
        write_svg(found, DOCS / "scenarios" / f"{name}.svg")
        command = f"$ pointsman simulate --scenario {name}\n"
        block = rf"({re.escape(command)}).*?(```\n)"
        text, count = re.subn(
            block, lambda parts, found=found: parts[1] + printed(found) + parts[2], page.read_text(), flags=re.S
        )
        if count != 1:
            sys.exit(f"{page} shows the command of {name} {count} times, not once")
        page.write_text(text)
        print(f"{name}: {sum(check.holds for check in found.checks)} of {len(found.checks)} parts of the claim hold")


if __name__ == "__main__":
    main(sys.argv[1:])
