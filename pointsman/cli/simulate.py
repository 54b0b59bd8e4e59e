"""`pointsman simulate`: simulates requests under the real scheduler and a virtual clock, and prints a report."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_OK, CommandError, check_writable
from pointsman.cli.features import features_text
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulation import (
    Arriving,
    Sampled,
    Service,
    check_routing,
    service_of_options,
    targets_of_options,
    workload_of_options,
)
from pointsman.core.observe.film import FilmRecorder
from pointsman.core.observe.side_file import SideFile
from pointsman.sim.report import Report, combine, figures
from pointsman.sim.report.engines import engines_as_json
from pointsman.sim.report.overload import overload_text
from pointsman.sim.report.page import write_html
from pointsman.sim.report.perfetto import write_trace
from pointsman.sim.report.summary import NUM_BOOTSTRAP
from pointsman.sim.report.table import print_engines, print_report
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.workload import OpenLoop

MAX_NAMED = 3
"""Maximum number of refused requests that are printed with the reason."""


def run_simulation(
    options: Mapping[str, Any],
    *,
    preset: str | None,
    replicas: int,
    seeds: int,
    price_per_hour: float | None,
    as_json: bool,
    html: str | None,
    perfetto: str | None,
    film: str | None,
) -> int:
    """Simulate what the options describe, and print the report.

    Args:
        options: the given options of `simulator_options`, by name.
        seeds: number of seeds of a generated workload, from `--seed` on.
        price_per_hour: price of one replica.
        html, perfetto, film: files to write; with several seeds, they show the first seed.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, which prints the report so far.

    Raises:
        CommandError: an option, a file or the model is wrong, or every request was refused.
    """
    targets = targets_of_options(options, "ttft_target", "itl_target")
    speed = options.get("rate", 1.0)
    if replicas < 1:
        raise CommandError(f"--replicas is {replicas}; it must be at least 1")
    check_routing(options, replicas)
    if price_per_hour is not None and not 0 <= price_per_hour < math.inf:
        raise CommandError(f"--price-per-hour is {price_per_hour}; it must be 0 or more")
    check_seeds(seeds, options)
    for path in (html, perfetto, film):
        check_writable(path)
    service = service_of_options(options, preset)
    if film is not None and (several := replicas * service.topology.num_engines) > 1:
        raise CommandError(
            f"--film records one scheduler, but {several} engines are simulated; give --replicas 1 alone"
        )
    first = options.get("seed", 0)
    arriving = [workload_of_options({**options, "seed": first + place}) for place in range(seeds)]
    title = arriving[0].title if seeds == 1 else f"{arriving[0].title}, seeds {first} to {first + seeds - 1}"
    if not 0 < speed < math.inf:
        raise CommandError(f"--rate is {speed}; it must be above 0, like 2 for twice the speed")
    if not as_json:
        print_setting(service, replace(arriving[0], title=title), replicas, speed)
    workloads = [each.at_speed(speed) for each in arriving]
    expected = workloads[0].num_requests
    found: list[_Found] = []
    with (
        _film_recorders(film) as films,
        ProgressBar("simulated", None if expected is None else seeds * expected) as bar,
    ):
        for place, workload in enumerate(workloads):
            outcome = simulate(
                workload,
                service.config,
                service.step_time,
                num_replicas=replicas,
                routing=service.routing(),
                seed=first + place,
                host_memory=service.host_memory,
                features=service.features,
                request_overhead=0.0 if service.profile is None else service.profile.request_overhead,
                topology=service.topology,
                progress=bar.update_after(sum(each.report.counts.arrived for each in found)),
                films=films if place == 0 else (),
            )
            if not outcome.is_complete and found:
                break
            report = figures(
                outcome,
                service.config,
                ttft_target=targets.ttft,
                itl_target=targets.itl,
                itl_of=targets.itl_of,
                price_per_hour=price_per_hour,
                num_bootstrap=NUM_BOOTSTRAP if seeds == 1 or not outcome.is_complete else 0,
                is_open=isinstance(workload, OpenLoop),
            )
            found.append(_Found(report, outcome.refused, service.extrapolations()))
            if place == 0:
                drawn = outcome
            if not outcome.is_complete:
                break
    report = combine([each.report for each in found])
    refused = [each for run in found for each in run.refused]
    if report.counts.refused == report.counts.arrived > 0 and report.is_complete:
        raise CommandError(f"all {report.counts.refused:,} requests are refused. {refused[0][1]}")
    is_complete = report.is_complete and len(found) == seeds
    notes = [service.about_times, *dict.fromkeys(warning for run in found for warning in run.warnings)]
    if report.is_complete and not is_complete:
        notes.append(f"The simulation was interrupted: these are the figures of {len(found)} of {seeds} seeds.")
    notes += _requests_text(arriving[0], refused, report.counts.arrived)
    if service.features.speculation is not None:
        notes.append(_drafts_text(drawn))
    report = replace(report, notes=(*notes, *report.notes), is_complete=is_complete)
    warnings = () if report.overload is None else (overload_text(report.overload),)
    setting = (service.title, f"KV: {service.kv_text}", f"Workload: {title}{_speed_text(speed)}")
    _write_files(replace(report, notes=(*report.notes, *warnings)), drawn, setting, html, perfetto)
    if as_json:
        values = {
            **setting_as_json(service, replace(arriving[0], title=title)),
            "speed": speed,
            **report.to_dict(),
            **engines_as_json(drawn),
            "refused": [{"request_id": name, "why": why} for name, why in refused],
        }
        print(json.dumps(values, allow_nan=False))
    else:
        print_report(report, stdout_console())
        if len(drawn.stats) > 1:
            print_engines(drawn, stdout_console(), "" if seeds == 1 else f", seed {first}")
        if report.overload is not None:
            print()
            stdout_console().print(Text(overload_text(report.overload), style="bold yellow"))
    return EXIT_OK if is_complete else EXIT_INTERRUPTED


@contextmanager
def _film_recorders(path: str | None) -> Iterator[Sequence[FilmRecorder]]:
    """Context with a list of recorders: one that writes the film of the first replica to `path`, or none if `path` is
    None."""
    if path is None:
        yield ()
        return
    try:
        with open(path, "wb") as file:
            recorder = FilmRecorder(SideFile(file, raises=True))
            yield (recorder,)
            recorder.close()
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None


class _Found(NamedTuple):
    """The result of one seed's simulation."""

    report: Report
    refused: list[tuple[str, str]]
    warnings: list[str]


def check_seeds(seeds: int, options: Mapping[str, Any]) -> None:
    """Check that several seeds make sense.

    Raises:
        CommandError: the number of seeds is out of range, or the workload is a trace.
    """
    if seeds < 1:
        raise CommandError(f"--seeds is {seeds}; it must be at least 1")
    if options.get("seed", 0) < 0:
        raise CommandError(f"--seed is {options['seed']}; it must be at least 0")
    if seeds > 1 and "trace" in options and "think" not in options:
        raise CommandError(
            f"--seeds is {seeds}, but --trace gives the same requests with every seed; leave --seeds out"
        )


def print_setting(
    service: Service,
    arriving: Arriving | Sampled,
    replicas: int,
    speed: float = 1.0,
    *,
    is_searched: bool = False,
) -> None:
    """Print the simulated service and workload. KV blocks come first, because a wrong number of blocks makes all
    results wrong.

    `is_searched`: a search sets the limits of a step, so they are not printed.
    """
    console = stdout_console()
    several = f", {replicas} replicas" if replicas > 1 else ""
    console.print(Text.assemble(("KV    ", "bold"), service.kv_text), soft_wrap=False)
    console.print(Text.assemble(("on    ", "bold"), f"{service.title}{several}"))
    config = service.config
    limits = f"at most {config.max_num_batched_tokens:,} tokens and {config.max_num_seqs:,} requests in a step"
    if not is_searched:
        console.print(Text.assemble(("with  ", "bold"), limits))
    if features := features_text(service.features, config):
        console.print(Text.assemble(("does  ", "bold"), features))
    console.print(Text.assemble(("load  ", "bold"), f"{arriving.title}{_speed_text(speed)}"))
    console.print()


def stdout_console() -> Console:
    """Standard output, as wide as the terminal; 100 columns in a pipe or a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else 100)


def _speed_text(speed: float) -> str:
    return "" if speed == 1 else f", {speed:g} times as fast"


def _requests_text(arriving: Arriving, refused: Sequence[tuple[str, str]], num_arrived: int) -> list[str]:
    notes = []
    if arriving.about_left_out:
        notes.append(arriving.about_left_out)
    if refused:
        named = "; ".join(why for _, why in refused[:MAX_NAMED])
        more = len(refused) - MAX_NAMED
        notes.append(
            f"Requests that can never run: {len(refused):,} of {num_arrived:,}. {named}"
            + (f"; and {more:,} more" if more > 0 else "")
        )
    return notes


def _drafts_text(outcome: Outcome) -> str:
    verified = sum(stats.num_draft_tokens for stats in outcome.stats)
    accepted = sum(stats.num_accepted_tokens for stats in outcome.stats)
    share = f" ({accepted / verified:.0%})" if verified else ""
    return (
        f"Drafts: {accepted:,} of {verified:,} verified drafts were accepted{share}. The tokens of a step arrive "
        "together, so an ITL is the time between two steps of a request that give it tokens."
    )


def _write_files(
    report: Report, outcome: Outcome, setting: tuple[str, ...], html: str | None, perfetto: str | None
) -> None:
    try:
        if html is not None:
            write_html(
                replace(report, notes=(*setting, *report.notes)), outcome, html, title=f"Simulation: {setting[0]}"
            )
        if perfetto is not None:
            write_trace(outcome, perfetto)
    except OSError as error:
        raise CommandError(f"cannot write {error.filename}: {error.strerror}") from None


def setting_as_json(service: Service, arriving: Arriving | Sampled) -> dict[str, Any]:
    """The simulated service and workload, for JSON."""
    kv = service.kv
    memory = None if kv is None else {name: getattr(kv, name) for name in ("usable", "weights", "activations", "kv")}
    return {
        "kv_blocks": {"number": service.config.num_blocks, "text": service.kv_text, "bytes": memory},
        "service": service.title,
        "workload": arriving.title,
        "config": service.config.to_dict(),
    }
