"""A report in the terminal, at most 100 columns wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.sim.report.engines import engine_loads, transfers_text
from pointsman.sim.report.layout import COLUMNS, facts, format_number, latency_rows
from pointsman.sim.report.summary import DEFINITIONS, Report
from pointsman.sim.simulator import Outcome

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


def print_engines(outcome: Outcome, console: Console, suffix: str = "") -> None:
    """Print a table with a row for each engine, and the transfers of KV. `suffix`: text after the title."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(f"engine{suffix}", style="bold", no_wrap=True)
    for column in ("requests", "tokens", "busy", "running", "waiting", "KV use", "KV max", "preemptions"):
        table.add_column(column, justify="right", no_wrap=True)
    for load in engine_loads(outcome):
        shares = [f"{format_number(100 * each)} %" for each in (load.kv_cache_usage, load.max_kv_cache_usage)]
        table.add_row(
            Text(load.name),
            f"{load.num_requests:,}",
            f"{load.num_tokens:,}",
            f"{format_number(100 * load.busy)} %",
            format_number(load.running),
            format_number(load.waiting),
            *shares,
            f"{load.num_preemptions:,}",
        )
    width = min(WIDTH, console.width)
    console.print()
    console.print(table, width=width)
    if outcome.transfers:
        console.print(Text(transfers_text(outcome.transfers)), width=width)
