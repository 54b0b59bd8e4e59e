"""`pointsman simulate --scenario NAME`: tests a claim about schedulers, and prints its figures and verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_OK, CommandError, check_writable
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import check_seeds, stdout_console
from pointsman.cli.simulation import service_of_options
from pointsman.sim.errors import UnknownName
from pointsman.sim.report.intervals import Estimate
from pointsman.sim.scenarios import Figure, Finding, scenario
from pointsman.sim.scenarios.picture import verdict, write_page

TAKES = ("model", "device", "profile", "tensor_parallel", "seed")
"""Options that may be given with a scenario; the scenario itself sets all other options."""


def run_scenario(
    name: str, options: Mapping[str, Any], *, seeds: int, others: Sequence[str], as_json: bool, html: str | None
) -> int:
    """Run a scenario and print its result.

    Args:
        options: the given options of `simulator_options`, by name.
        seeds: number of consecutive seeds, from `--seed` on.
        others: names of further given options, which no scenario takes.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, which prints the rows so far.

    Raises:
        CommandError: no scenario has that name, or an option is wrong.
    """
    try:
        chosen = scenario(name)
    except UnknownName as error:
        raise CommandError(str(error)) from None
    if unused := [*(option for option in options if option not in TAKES), *others]:
        raise CommandError(
            f"--{unused[0].replace('_', '-')} has no effect beside --scenario, which has its own workloads and "
            "settings; leave it out, or run pointsman simulate without --scenario"
        )
    check_seeds(seeds, options)
    check_writable(html)
    service = service_of_options({option: value for option, value in options.items() if option != "seed"}, None)
    first = options.get("seed", 0)
    num_requests = chosen.num_requests
    with ProgressBar("simulated", None if num_requests is None else seeds * num_requests) as bar:
        found = chosen.run(service.step_time, seeds=range(first, first + seeds), progress=bar.update)
    notes = (f"Simulated on {service.title}. {service.about_times}", *_seeds_text(found))
    if html is not None:
        try:
            write_page(found, html, notes)
        except OSError as error:
            raise CommandError(f"cannot write {error.filename}: {error.strerror}") from None
    if as_json:
        print(json.dumps({**found.to_dict(), "service": service.title, "notes": list(notes)}, allow_nan=False))
    else:
        print_finding(found, notes, stdout_console())
    return EXIT_OK if found.is_complete else EXIT_INTERRUPTED


def print_finding(found: Finding, notes: Sequence[str], console: Console) -> None:
    """Print the claim, its figures, and notes."""
    chosen = found.scenario
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(no_wrap=True, style="bold")
    for name, said in (("claim", chosen.claim), ("source", chosen.source), ("setting", chosen.setting)):
        facts.add_row(name, Text(said))
    console.print(facts)
    console.print()
    print_figures(found, console)
    console.print()
    for note in notes:
        console.print(Text(note, style="dim"))


def print_figures(found: Finding, console: Console) -> None:
    """Print the figures of each variant, and the verdicts."""
    console.print(_figure_table(found))
    if not found.checks:
        return
    console.print()
    checks = Table(box=None, show_header=False, pad_edge=False)
    checks.add_column(no_wrap=True)
    for check in found.checks:
        style = "bold green" if check.holds else "bold yellow"
        checks.add_row(Text(verdict(check.holds), style=style), Text(f"{check.claim}: {check.figures}"))
    console.print(checks)


def _figure_table(found: Finding) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    loads = {row.variant.load for row in found.rows}
    if loads != {""}:
        table.add_column("workload", no_wrap=True)
    table.add_column("variant", no_wrap=True)
    for figure in found.scenario.figures:
        table.add_column(figure.name, justify="right", min_width=max(map(len, figure.name.split())))
    last = None
    for row in found.rows:
        load = row.variant.load
        names = [load if load != last else "", row.variant.name] if loads != {""} else [row.variant.name]
        figures = zip(found.scenario.figures, row.values, strict=True)
        table.add_row(*names, *(_figure_cell(figure, each) for figure, each in figures))
        last = load
    return table


def _figure_cell(figure: Figure, estimate: Estimate) -> Text:
    """The text of a table cell: a figure, and its interval on a separate line."""
    value, interval = figure.text(replace(estimate, low=None, high=None)), figure.interval(estimate)
    return Text.assemble(value, (f"\n{interval}" if interval else "", "dim"))


def _seeds_text(found: Finding) -> list[str]:
    if not found.is_complete:
        return ["Interrupted: these are the rows so far."]
    if len(found.seeds) == 1:
        return []
    return [
        f"Means over {len(found.seeds)} seeds, with 95 % intervals (Student's t over them); lines over time are of "
        "the first."
    ]
