"""A report in the terminal, at most 100 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.sim.report.layout import COLUMNS, facts, latency_rows
from pointsman.sim.report.summary import DEFINITIONS, Report

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 100
_DEFINED = ("TTFT", "TPOT", "ITL")


def print_report(report: Report, console: Console) -> None:
    """Print the report as two tables and definitions."""
    from rich.table import Table
    from rich.text import Text

    width = min(WIDTH, console.width)
    for note in report.notes:
        console.print(Text(note, style="yellow"), width=width)
    listed = Table(box=None, show_header=False, pad_edge=False)
    listed.add_column(no_wrap=True, style="bold")
    listed.add_column()
    for fact in facts(report):
        listed.add_row(Text(fact.name), Text(fact.text))
    latencies = Table(box=None, pad_edge=False, header_style="bold")
    latencies.add_column("latency", style="bold")
    for column in COLUMNS:
        latencies.add_column(column, justify="right", no_wrap=True)
    for row in latency_rows(report):
        cells = [
            Text.assemble(cell.value, ("\n" + cell.interval if cell.interval else "", "dim")) for cell in row.cells
        ]
        latencies.add_row(Text(row.name), *cells)
    console.print(listed, width=width)
    console.print()
    console.print(latencies, width=width)
    console.print()
    for name in _DEFINED:
        console.print(Text.assemble((name, "bold"), ": ", DEFINITIONS[name]), style="dim", width=width)
    console.print(Text(report.method), style="dim", width=width)
