"""`pointsman frontier`: draws TTFT and ITL over the request rate, for one or several settings, devices or policies."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text
from typer.main import get_command

from pointsman.cli import options as cli_options
from pointsman.cli import simulator_options as sim
from pointsman.cli.durations import share
from pointsman.cli.errors import EXIT_INTERRUPTED, EXIT_OK, CommandError, check_writable
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.simulate import print_setting, setting_as_json, stdout_console
from pointsman.cli.simulation import (
    Sampled,
    Service,
    check_routing,
    device_names,
    device_prices,
    samples_of_options,
    service_of_options,
    targets_of_options,
)
from pointsman.cli.typer_app import plain_typer
from pointsman.sim.cost import JOULES_PER_KWH, POWER_NOTE, Cost
from pointsman.sim.crossing import Interval
from pointsman.sim.errors import SimulationError
from pointsman.sim.frontier import (
    MAX_RATES,
    PERCENTILES,
    Curve,
    Point,
    Reading,
    Sweep,
    at_rate,
    highest_rate,
    measure_curve,
)
from pointsman.sim.frontier_picture import MAX_CURVES, frontier_svg
from pointsman.sim.hull import SeenLoads
from pointsman.sim.report.layout import ITL_NAMES, limits_text
from pointsman.sim.report.summary import ITL_OF, Targets
from pointsman.sim.workers import available_cores, workers
from pointsman.web.frontier import frontier_page

DEFAULT_TARGETS = Targets(ttft=2.0)
AS_GIVEN = "as given"
"""Name of the service that the options describe, beside variants of it."""
_COSTS = (
    "price_per_million_prompt_tokens",
    "price_per_million_output_tokens",
    "watts",
    "joules_per_million_tokens",
)
"""Figures of a `Cost` that are printed."""


@dataclass(slots=True)
class Line:
    """A service whose latencies are drawn, and its curve."""

    name: str
    service: Service
    num_replicas: int
    price_per_hour: float | None
    """Price of one replica."""
    curve: Curve = field(default_factory=Curve)

    def costs(self) -> list[Cost]:
        """Price and energy at each point."""
        return [self._cost(point) for point in self.curve.points]

    def _cost(self, point: Point) -> Cost:
        return self.service.cost(
            rate=point.rate,
            prompt_tokens_per_second=point.prompt_tokens_per_second,
            output_tokens_per_second=point.output_tokens_per_second,
            busy=point.busy,
            num_running=point.num_running,
            num_replicas=self.num_replicas,
            price_per_hour=self.price_per_hour,
        )

    def cost_at(self, name: str, rate: float) -> float | None:
        """A figure of the costs at a rate; None: not known."""
        values = [getattr(cost, name) for cost in self.costs()]
        if not values or any(value is None for value in values):
            return None
        return at_rate(self.curve.points, [max(value, 1e-300) for value in values], rate)

    def warnings(self) -> list[str]:
        """Warnings about rates up to the throughput, at which the loads exceed those of the profile's log."""
        within = (point.seen for point in self.curve.points if not point.is_overloaded)
        return self.service.extrapolations(SeenLoads.of_parts(within))


def run_frontier(
    options: Mapping[str, Any],
    *,
    variants: Sequence[str],
    replicas: int,
    preset: str | None,
    percentile: str,
    rates: str | None,
    num_samples: int,
    num_requests: int | None,
    confidence: str,
    prices: str | None,
    num_workers: int | None,
    as_json: bool,
    svg: str | None,
    html: str | None,
) -> int:
    """Measure the curves, print them, and write the files.

    Args:
        options: the given options of `simulator_options`, by name; `device` may be a list of devices.
        variants: further services, each as "NAME=OPTIONS" or "OPTIONS".
        prices: price of one replica per hour, or one for each device, separated by commas.

    Returns:
        The exit code: 0, or 130 after Ctrl-C, which prints the points so far.

    Raises:
        CommandError: an option, a file or the model is wrong.
    """
    targets = targets_of_options(options, "ttft_target", "itl_target") or replace(
        DEFAULT_TARGETS, itl_of=options.get("itl_of", DEFAULT_TARGETS.itl_of)
    )
    if percentile not in PERCENTILES:
        raise CommandError(f"--percentile is {percentile!r}; give one of {', '.join(PERCENTILES)}")
    for name, value, least in (
        ("--samples", num_samples, 2),
        ("--requests", num_requests, 2),
        ("--workers", num_workers, 1),
    ):
        if value is not None and value < least:
            raise CommandError(f"{name} is {value}; it must be at least {least}")
    if "users" in options or ("think" in options and "sessions" not in options):
        raise CommandError(
            "--users and --think make the rate depend on the service, so it cannot be chosen; leave them out, or find "
            "the number of users with pointsman capacity"
        )
    asked = _Asked(
        targets, percentile, share("confidence", confidence), num_samples, _rates(rates), num_requests, num_workers
    )
    for path in (svg, html):
        check_writable(path)
    lines = _make_lines(options, variants, replicas, preset, prices)
    sampled = samples_of_options(options, num_requests, finds_num_users=False)
    if not as_json:
        _print_setting(lines, sampled)
    try:
        _measure(lines, sampled, asked, options.get("seed", 0))
    except SimulationError as error:
        raise CommandError(str(error)) from None
    shown = [line for line in lines if line.curve.points]
    values = _as_json(shown, sampled, asked)
    try:
        if svg is not None and shown:
            curves = {line.name: line.curve for line in shown}
            Path(svg).write_text(frontier_svg(curves, asked.confidence, targets, percentile), encoding="utf-8")
        if html is not None and shown:
            Path(html).write_text(frontier_page(values), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {error.filename}: {error.strerror}") from None
    if as_json:
        print(json.dumps(values, allow_nan=False))
    else:
        _print_result(shown, sampled, asked)
    return EXIT_OK if all(line.curve.is_complete for line in lines) else EXIT_INTERRUPTED


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked of each service."""

    targets: Targets
    percentile: str
    confidence: float
    num_samples: int
    rates: tuple[float, ...] | None
    num_requests: int | None
    num_workers: int | None


def _rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not 1 <= len(found) <= MAX_RATES or not all(0 < rate < math.inf for rate in found):
        raise CommandError(
            f"--rates is {text!r}; give 1 to {MAX_RATES} numbers of requests a second above 0, like 1,2,4,8"
        )
    return found


# ---------------------------------------------------------------------- the services


def _make_lines(
    options: Mapping[str, Any], variants: Sequence[str], replicas: int, preset: str | None, prices: str | None
) -> list[Line]:
    """The services: for each device, that of the options, and its variants."""
    devices = device_names(options)
    by_device = device_prices(prices, len(devices))
    given: list[tuple[str, dict[str, Any]]] = [("", {}), *(_parse_variant(text) for text in variants)]
    if (count := len(devices) * len(given)) > MAX_CURVES:
        raise CommandError(
            f"{len(devices)} devices with {len(given)} settings each are {count} curves; give at most {MAX_CURVES} in "
            "all"
        )
    lines = []
    for device, price in zip(devices, by_device, strict=True):
        for name, changes in given:
            own = {**options, **({} if device is None else {"device": device}), **changes}
            num_replicas, base = own.pop("replicas", replicas), own.pop("preset", preset)
            cost = own.pop("price_per_hour", price)
            if num_replicas < 1:
                raise CommandError(f"--replicas is {num_replicas}; it must be at least 1")
            if cost is not None and not 0 <= cost < math.inf:
                raise CommandError(f"--price-per-hour is {cost}; it must be 0 or more")
            check_routing(own, num_replicas)
            try:
                service = service_of_options(own, base)
            except CommandError as error:
                raise CommandError(f"{f'--variant {name}: ' if name else ''}{error}") from None
            parts = [service.device.name if service.device is not None and len(devices) > 1 else "", name]
            title = ", ".join(part for part in parts if part) or AS_GIVEN
            lines.append(Line(title, service, num_replicas, cost))
    names = [line.name for line in lines]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise CommandError(f"two curves are called {repeated[0]!r}; name each device once, and each --variant too")
    return lines


def _parse_variant(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the options of "NAME=--option value ..." or of "--option value ..."."""
    name, _, rest = ("", "", text) if text.lstrip().startswith("-") else text.partition("=")
    try:
        context = _VARIANT.make_context("--variant", shlex.split(rest))
    except Exception as error:  # a usage error of Typer or Click, or a ValueError: an open quotation mark
        phrase = getattr(error, "format_message", None)
        if phrase is None and not isinstance(error, ValueError):
            raise
        raise CommandError(f"--variant {text!r}: {error if phrase is None else phrase()}") from None
    # A repeatable option is a tuple before its command runs, and empty if it was not given.
    found = {name: [*value] if isinstance(value, tuple) else value for name, value in context.params.items()}
    found = cli_options.given(found)
    if not found:
        raise CommandError(
            f"--variant is {text!r}; give a name and the options that differ, like 'small "
            "steps=--max-num-batched-tokens 512'"
        )
    return name.strip() or rest.strip(), found


def _make_parser() -> Any:
    made = plain_typer()

    @made.command()
    @cli_options.takes(sim.SERVED_BY, sim.SCHEDULER, sim.SPECULATION_AND_ADAPTERS)
    def variant(
        preset: sim.SimulatedPreset = None,
        replicas: sim.VariantReplicas = None,
        price_per_hour: sim.PricePerHour = None,
        **values: Any,
    ) -> int:
        """The options of a variant: those of the service."""
        return EXIT_OK

    return get_command(made)


_VARIANT = _make_parser()

# ---------------------------------------------------------------------- the curves


def _measure(lines: Sequence[Line], sampled: Sampled, asked: _Asked, seed: int) -> None:
    """Measure the curve of each line; Ctrl-C leaves those that are measured."""
    num_workers = available_cores() if asked.num_workers is None else asked.num_workers
    with ProgressBar("done", None, noun="simulations", figure="{task.fields[now]:.0f} requests") as bar:
        done = 0
        for place, line in enumerate(lines):

            def progress(num_done: int, expected: int, before: int = done, place: int = place) -> None:
                bar.expect(before + expected * (len(lines) - place))
                bar.update(before + num_done, line.curve.num_simulated)  # noqa: B023  called within this turn

            service = line.service
            judge = service.judge(sampled.samples, asked.targets, seed)
            sweep = Sweep(
                samples=sampled.samples,
                config=service.config,
                num_replicas=line.num_replicas,
                rates=asked.rates,
                num_samples=asked.num_samples,
                num_requests=asked.num_requests,
                confidence=asked.confidence,
                num_models=len(judge.step_times),
                is_watched=service.profile is not None,
                progress=progress,
            )
            with workers(judge, num_workers) as runner:
                line.curve = measure_curve(sweep, runner)
            if not line.curve.is_complete:
                return
            done += line.curve.num_simulations


# ---------------------------------------------------------------------- in words


def _print_setting(lines: Sequence[Line], sampled: Sampled) -> None:
    console = stdout_console()
    for line in lines:
        if len(lines) > 1:
            console.print(Text(line.name, style="bold"))
        print_setting(line.service, sampled, line.num_replicas)
    for text in dict.fromkeys(line.service.about_times for line in lines):
        console.print(Text(text, style="yellow"))
    if sampled.about_trace or sampled.about_left_out:
        console.print(f"{sampled.about_trace} {sampled.about_left_out}".strip())
    console.print()


def _print_result(lines: Sequence[Line], sampled: Sampled, asked: _Asked) -> None:
    console = stdout_console()
    if not lines:
        console.print("Interrupted before the first rate.")
        return
    for line in lines:
        console.print(Text(line.name, style="bold"))
        console.print(_curve_table(line, asked.targets))
        console.print()
    for line in lines:
        first, *others = _reading_lines(line, asked)
        console.print(Text(first, style="bold"))
        for text in others:
            console.print(Text(text))
    for note in _notes(lines, asked):
        console.print(Text(note, style="yellow"))


def _curve_table(line: Line, targets: Targets) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    itl = {"pooled": "ITL", "request": "TPOT", "gap": "gap"}[targets.itl_of]
    for column in ("requests/s", "TTFT p50", "TTFT p99", f"{itl} p50", f"{itl} p99", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in line.curve.points:
        latencies = (point.ttft, point.itl[targets.itl_of])
        table.add_row(
            f"{point.rate:.3g}{' *' if point.is_overloaded else ''}",
            *(_band_text(each.get(name)) for each in latencies for name in ("p50", "p99")),
            f"{point.output_tokens_per_second:,.0f}",
        )
    return table


def _band_text(interval: Interval | None) -> str:
    """A latency and its interval, with two digits each."""
    if interval is None:
        return "-"
    unit, factor = ("s", 1.0) if interval.value >= 1 else ("ms", 1e3)
    value, low, high = (_two_digits(factor * each) for each in (interval.value, interval.low, interval.high))
    return f"{value} {unit} ({low}-{high})"


def _two_digits(value: float) -> str:
    if value <= 0:
        return "0"
    place = math.floor(math.log10(value)) - 1  # of the second digit
    return f"{round(value, -place):,.{max(0, -place)}f}"


def _reading_lines(line: Line, asked: _Asked) -> list[str]:
    reading = highest_rate(line.curve, asked.percentile, asked.targets)
    what = f"with {asked.percentile} of {limits_text(asked.targets)}"
    rate, points = reading.rate, line.curve.points
    if rate.value == 0:
        return [f"{line.name}: even {points[0].rate:.3g} requests/s miss the targets, {what}."]
    if rate.value == math.inf:
        return [f"{line.name}: even {points[-1].rate:.3g} requests/s meet the targets, {what}; set shorter ones."]
    value, low, high = rate.text()
    low = low if rate.low > 0 else f"below {points[0].rate:.3g}"
    high = high if rate.high < math.inf else f"above {points[-1].rate:.3g}"
    limits = {
        "ttft": "TTFT",
        "itl": ITL_NAMES[asked.targets.itl_of],
        "queue": "the queue, which then grows without end",
    }
    lines = [
        f"{line.name}: {value} requests/s ({100 * asked.confidence:g} %: {low} to {high}), {what}; limited "
        f"by {limits[reading.limit]}."
    ]
    price_in, price_out, watts, joules = (line.cost_at(name, rate.value) for name in _COSTS)
    if price_in is not None and price_out is not None:
        lines.append(f"  A million prompt tokens cost {price_in:.3g} there, a million output tokens {price_out:.3g}.")
    if watts is not None and joules is not None:
        lines.append(f"  Power: {watts:,.0f} W, {joules / JOULES_PER_KWH:.2g} kWh per million tokens.")
    return lines


def _notes(lines: Sequence[Line], asked: _Asked) -> list[str]:
    notes = []
    if any(point.is_overloaded for line in lines for point in line.curve.points):
        notes.append("* The queue grows without end: these latencies depend on the length of the simulation.")
    for line in lines:
        if line.curve.is_short and asked.num_requests is None:
            notes.append(
                f"{line.name}: the samples of {line.curve.num_requests:,} requests are short beside the time of a "
                "request, so latencies near the throughput are too low; raise --requests."
            )
        refused = sum(point.num_refused for point in line.curve.points)
        if refused:
            total = sum(point.num_requests for point in line.curve.points)
            notes.append(f"{line.name}: {refused:,} of {total:,} requests can never run, and are in no percentile.")
        notes += [f"{line.name}: {warning}" for warning in line.warnings()]
        if not line.curve.is_complete:
            notes.append(f"{line.name}: interrupted, these are the rates so far.")
    if any(cost.watts is not None for line in lines for cost in line.costs()):
        notes.append(POWER_NOTE)
    return notes


# ---------------------------------------------------------------------- JSON


def _as_json(lines: Sequence[Line], sampled: Sampled, asked: _Asked) -> dict[str, Any]:
    """The curves and what is read from them, for JSON and for the page."""
    return {
        "workload": sampled.title,
        "confidence": asked.confidence,
        "targets": {"ttft": asked.targets.ttft, "itl": asked.targets.itl, "itl_of": asked.targets.itl_of},
        "percentile": asked.percentile,
        "is_complete": all(line.curve.is_complete for line in lines),
        "notes": [*dict.fromkeys(line.service.about_times for line in lines), *_notes(lines, asked)],
        "curves": [_line_as_json(line, sampled, asked) for line in lines],
    }


def _line_as_json(line: Line, sampled: Sampled, asked: _Asked) -> dict[str, Any]:
    reading = highest_rate(line.curve, asked.percentile, asked.targets)
    return {
        "name": line.name,
        **setting_as_json(line.service, sampled),
        "num_replicas": line.num_replicas,
        "price_per_hour": None if line.price_per_hour is None else line.price_per_hour * line.num_replicas,
        "throughput": _finite(line.curve.throughput),
        "saturation": None if line.curve.saturation is None else _ends(line.curve.saturation),
        "num_requests": line.curve.num_requests,
        "reading": _reading_as_json(reading),
        "points": [
            {
                "rate": point.rate,
                "ttft": _percentiles_as_json(point.ttft),
                "itl": {kind: _percentiles_as_json(point.itl[kind]) for kind in ITL_OF},
                "prompt_tokens_per_second": point.prompt_tokens_per_second,
                "output_tokens_per_second": point.output_tokens_per_second,
                "busy": point.busy,
                "num_refused": point.num_refused,
                "is_overloaded": point.is_overloaded,
                "cost": asdict(cost),
            }
            for point, cost in zip(line.curve.points, line.costs(), strict=True)
        ],
    }


def _reading_as_json(reading: Reading) -> dict[str, Any]:
    """None: there is no limit."""
    rate = reading.rate
    return {
        "rate": _finite(rate.value),
        "low": _finite(rate.low),
        "high": _finite(rate.high),
        "limit": reading.limit or None,
    }


def _percentiles_as_json(percentiles: Mapping[str, Interval]) -> dict[str, list[float]]:
    return {name: _ends(each) for name, each in percentiles.items()}


def _ends(interval: Interval) -> list[float]:
    return [interval.value, interval.low, interval.high]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
