"""`pointsman simulate`: requests under the real scheduler and a virtual clock, and what they got."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_OK, CommandError, check_writable
from pointsman.cli.simulation import Arriving, Service, seconds, what_arrives, what_serves
from pointsman.sim.report import Report, figures
from pointsman.sim.report.page import write_html
from pointsman.sim.report.perfetto import write_trace
from pointsman.sim.report.table import print_report
from pointsman.sim.simulator import Outcome, simulate

MAX_NAMED = 3
"""Refused requests that are named with the reason."""
QUIET_SECONDS = 2.0
"""A progress bar is shown after that time."""
_REFRESH_SECONDS = 0.2


def run_simulation(
    options: Mapping[str, Any],
    *,
    preset: str | None,
    replicas: int,
    price_per_hour: float | None,
    as_json: bool,
    html: str | None,
    perfetto: str | None,
) -> int:
    """Simulate what the options describe, and print the report.

    Args:
        options: those of `simulator_options` that were given, by name.
        price_per_hour: of one replica.
        html, perfetto: files to write.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, with the report so far.

    Raises:
        CommandError: an option, a file or the model is wrong, or every request was refused.
    """
    ttft_target, itl_target = (seconds(name, options.get(name)) for name in ("ttft_target", "itl_target"))
    speed = options.get("rate", 1.0)
    if replicas < 1:
        raise CommandError(f"--replicas is {replicas}; it must be at least 1")
    if replicas == 1 and "routing" in options:
        raise CommandError("--routing has no effect with one replica; give --replicas 2 or more")
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise CommandError(f"--price-per-hour is {price_per_hour}; it must be 0 or more")
    for path in (html, perfetto):
        check_writable(path)
    service = what_serves(options, preset)
    arriving = what_arrives(options)
    if not 0 < speed < math.inf:
        raise CommandError(f"--rate is {speed}; it must be above 0: 2 is twice as fast as the source")
    workload = arriving.at_speed(speed)
    if not as_json:
        print_setting(service, arriving, replicas, speed)
    with ProgressBar("simulated", workload.num_requests) as bar:
        outcome = simulate(
            workload,
            service.config,
            service.step_time,
            num_replicas=replicas,
            routing=service.routing(),
            seed=options.get("seed", 0),
            progress=bar.update,
        )
    report = figures(
        outcome,
        service.config,
        ttft_target=ttft_target,
        itl_target=itl_target,
        price_per_hour=price_per_hour,
    )
    if report.counts.refused == report.counts.arrived > 0 and outcome.is_complete:
        raise CommandError(f"all {report.counts.refused:,} requests are refused. {outcome.refused[0][1]}")
    notes = (*_notes(service, arriving, outcome), *report.notes)
    report = replace(report, notes=notes)
    setting = (service.title, f"KV: {service.kv_text}", f"Workload: {arriving.title}{_at_speed(speed)}")
    _write(report, outcome, setting, html, perfetto)
    if as_json:
        print(json.dumps(_as_json(report, outcome, service, arriving, speed), allow_nan=False))
    else:
        print_report(report, stdout_console())
    return EXIT_OK if outcome.is_complete else EXIT_INTERRUPTED


def print_setting(service: Service, arriving: Arriving, replicas: int, speed: float = 1.0) -> None:
    """What is simulated. KV blocks come first: an error in their number spoils everything else."""
    console = stdout_console()
    several = f", {replicas} replicas" if replicas > 1 else ""
    console.print(Text.assemble(("KV    ", "bold"), service.kv_text), soft_wrap=False)
    console.print(Text.assemble(("on    ", "bold"), f"{service.title}{several}"))
    console.print(Text.assemble(("load  ", "bold"), f"{arriving.title}{_at_speed(speed)}"))
    console.print()


def stdout_console() -> Console:
    """Standard output, as wide as the terminal; 100 columns in a pipe or a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def _at_speed(speed: float) -> str:
    return "" if speed == 1 else f", {speed:g} times as fast"


def _notes(service: Service, arriving: Arriving, outcome: Outcome) -> tuple[str, ...]:
    notes = [service.about_times]
    notes += service.extrapolations()
    if arriving.num_skipped:
        notes.append(f"Requests of the trace without output, which are left out: {arriving.num_skipped:,}.")
    if outcome.refused:
        named = "; ".join(why for _, why in outcome.refused[:MAX_NAMED])
        more = len(outcome.refused) - MAX_NAMED
        notes.append(
            f"Requests that can never run: {len(outcome.refused):,} of {outcome.timings.count:,}. {named}"
            + (f"; and {more:,} more" if more > 0 else "")
        )
    return tuple(notes)


def _write(report: Report, outcome: Outcome, setting: tuple[str, ...], html: str | None, perfetto: str | None) -> None:
    try:
        if html is not None:
            write_html(
                replace(report, notes=(*setting, *report.notes)), outcome, html, title=f"Simulation: {setting[0]}"
            )
        if perfetto is not None:
            write_trace(outcome, perfetto)
    except OSError as error:
        raise CommandError(f"cannot write {error.filename}: {error.strerror}") from None


def setting_as_json(service: Service, arriving: Arriving) -> dict[str, Any]:
    """What is simulated, for JSON."""
    kv = service.kv
    memory = None if kv is None else {name: getattr(kv, name) for name in ("usable", "weights", "activations", "kv")}
    return {
        "kv_blocks": {"number": service.config.num_blocks, "text": service.kv_text, "bytes": memory},
        "service": service.title,
        "workload": arriving.title,
        "config": service.config.to_dict(),
    }


def _as_json(report: Report, outcome: Outcome, service: Service, arriving: Arriving, speed: float) -> dict[str, Any]:
    return {
        **setting_as_json(service, arriving),
        "speed": speed,
        **report.to_dict(),
        "refused": [{"request_id": name, "why": why} for name, why in outcome.refused],
    }


# ---------------------------------------------------------------------- progress


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar with the time that is left, on stderr if that is a terminal, of what takes over two seconds.

    Args:
        verb: what is done with requests.
        expected: how many there are; None: not known.
        console: where it is shown; None: on stderr.
        quiet: seconds before it is shown.
    """

    def __init__(
        self, verb: str, expected: int | None, console: Console | None = None, quiet: float = QUIET_SECONDS
    ) -> None:
        self._verb, self._expected = verb, expected
        self._shown = Console(stderr=True) if console is None else console
        self._next = time.monotonic() + quiet if self._shown.is_terminal else math.inf
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def update(self, num_finished: int, now: float) -> None:
        """Called often; redraws now and then."""
        if time.monotonic() < self._next:
            return
        if self._bar is None:
            text = TextColumn(
                "{task.completed:,.0f} requests " + self._verb + ", {task.fields[now]:,.0f} s of virtual time"
            )
            self._bar = Progress(
                text, BarColumn(), TimeRemainingColumn(), console=self._shown, auto_refresh=False, transient=True
            )
            self._task = self._bar.add_task("", total=self._expected, now=now)
            self._bar.start()
        self._bar.update(self._task, completed=num_finished, now=now, refresh=True)
        self._next = time.monotonic() + _REFRESH_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._bar is not None:
            with suppress(OSError):  # the terminal is gone
                self._bar.stop()
