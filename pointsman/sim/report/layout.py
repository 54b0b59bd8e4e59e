"""Layout of a report: its figures, their order and their units, the same in the terminal and on the page."""

from __future__ import annotations

from typing import NamedTuple

from pointsman.sim.report.intervals import Distribution, Estimate
from pointsman.sim.report.summary import Counts, Report

COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")
NOTHING = "-"
_IN_SECONDS_FROM = 10.0


class Cell(NamedTuple):
    """A figure and its interval, as text; the interval may be empty."""

    value: str
    interval: str = ""


class LatencyRow(NamedTuple):
    """One kind of latency: its name with the unit, and a cell for each of `COLUMNS`."""

    name: str
    cells: tuple[Cell, ...]


class Fact(NamedTuple):
    """A figure that is not a latency, with its name."""

    name: str
    text: str


def latency_rows(report: Report) -> list[LatencyRow]:
    """The rows of the latencies, each row in milliseconds or in seconds."""
    kinds = {
        "TTFT": report.ttft,
        "TPOT, per request": report.tpot,
        "ITL, per gap": report.itl,
        "end-to-end": report.e2e,
        "queue time": report.queue,
    }
    return [_latency_row(name, found) for name, found in kinds.items()]


def facts(report: Report) -> list[Fact]:
    """All figures except latencies."""
    counts = report.counts
    found = [
        Fact("requests", f"{counts.arrived:,} arrived, {counts.finished:,} finished{_reasons(report)}"),
        Fact("", f"{counts.refused:,} refused, {counts.unfinished:,} unfinished"),
        Fact("duration", f"{_text(report.seconds)} s on {_number_of(report.num_replicas, 'replica')}"),
        Fact("requests/s", _text(report.requests_per_second)),
        Fact(
            "tokens/s", f"{_text(report.output_tokens_per_second)} output, {_text(report.total_tokens_per_second)} all"
        ),
    ]
    if report.goodput is not None:
        targets = report.targets
        given = {"TTFT": targets.ttft, "every ITL": targets.itl, "end-to-end": targets.e2e}
        limits = ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in given.items() if limit is not None)
        share, rate = _percent(report.goodput.share), _text(report.goodput.requests_per_second)
        found.append(Fact("goodput", f"{share} of requests, {rate} requests/s, within {limits}"))
    found += [
        Fact("KV use", f"{_percent(report.kv_cache_usage.mean)} mean, {_percent(report.kv_cache_usage.max)} max"),
        Fact("running", f"{_text(report.running.mean)} mean, {_text(report.running.max)} max"),
        Fact("waiting", f"{_text(report.waiting.mean)} mean, {_text(report.waiting.max)} max"),
        Fact("steps", f"{counts.num_steps:,}, running {_percent(report.busy)} of the time"),
        Fact(
            "rows per step",
            f"{_text(report.rows_per_step.mean)} mean, {_text(report.rows_per_step.max)} max; "
            f"{_percent(report.slots_used)} of the sequence slots",
        ),
        Fact(
            "tokens per step",
            f"{_text(report.tokens_per_step.mean)} mean, {_text(report.tokens_per_step.max)} max; "
            f"{_percent(report.budget_used)} of the token budget",
        ),
        Fact("preemptions", _preemptions(report)),
        Fact("recomputed", f"{counts.recomputed_tokens:,} tokens, {_percent(report.recomputed_share)} of all computed"),
        *_swapped(counts),
        Fact("prefix hit rate", _percent(report.prefix_hit_rate)),
    ]
    if report.price_per_million_output_tokens.value is not None:
        found.append(Fact("price", f"{_text(report.price_per_million_output_tokens)} per million output tokens"))
    return found


def number(value: float | None) -> str:
    """The value as text with at least three digits."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """The duration as text; in milliseconds below one second."""
    return f"{number(seconds)} s" if seconds >= 1 else f"{number(seconds * 1e3)} ms"


def _latency_row(name: str, found: Distribution) -> LatencyRow:
    estimates = [getattr(found, column) for column in COLUMNS]
    in_seconds = max((each.value for each in estimates if each.value is not None), default=0.0) >= _IN_SECONDS_FROM
    unit, factor = ("s", 1.0) if in_seconds else ("ms", 1e3)
    return LatencyRow(f"{name}, {unit}", tuple(_cell(each, factor) for each in estimates))


def _cell(estimate: Estimate, factor: float) -> Cell:
    if estimate.value is None:
        return Cell(NOTHING)
    return Cell(number(estimate.value * factor), _interval(estimate, factor))


def _interval(estimate: Estimate, factor: float = 1.0) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{number(estimate.low * factor)}-{number(estimate.high * factor)}"


def _text(estimate: Estimate) -> str:
    interval = _interval(estimate)
    return number(estimate.value) + (f" ({interval})" if interval else "")


def _percent(estimate: Estimate) -> str:
    if estimate.value is None:
        return NOTHING
    interval = _interval(estimate, 100)
    return f"{number(estimate.value * 100)} %" + (f" ({interval})" if interval else "")


def _reasons(report: Report) -> str:
    reasons = report.counts.finish_reasons
    return f" ({', '.join(f'{count:,} {name}' for name, count in reasons.items())})" if reasons else ""


def _preemptions(report: Report) -> str:
    causes = {name: count for name, count in report.counts.preemptions.items() if count}
    if not causes:
        return "0"
    return f"{sum(causes.values()):,}: " + ", ".join(f"{name} {count:,}" for name, count in causes.items())


def _swapped(counts: Counts) -> list[Fact]:
    """Decisions on the KV of preempted requests, and copied blocks; empty without host memory."""
    found = []
    if counts.preemption_decisions:
        parts = (f"{name} {count:,}" for name, count in counts.preemption_decisions.items() if count)
        found.append(Fact("decided", ", ".join(parts)))
    if counts.copied_blocks:
        out, back = counts.copied_blocks["offloaded"], counts.copied_blocks["restored"]
        found.append(Fact("copied", f"{out:,} blocks to host memory, {back:,} back"))
    return found


def _number_of(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
