"""Layout of a report: its figures, their order and their units, the same in the terminal and on the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from pointsman.sim.report.intervals import Distribution, Estimate
from pointsman.sim.report.summary import Counts, Goodput, ItlOf, Report, Targets

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
        Fact("duration", f"{_format_value(report.seconds)} s on {_count_with_noun(report.num_replicas, 'replica')}"),
        Fact("requests/s", _format_value(report.requests_per_second)),
        Fact(
            "tokens/s",
            f"{_format_value(report.output_tokens_per_second)} output, "
            f"{_format_value(report.total_tokens_per_second)} all",
        ),
    ]
    if report.goodput is not None:
        found += _goodput_facts(report.goodput, report.targets)
    found += [
        Fact(
            "KV use",
            f"{_format_percent(report.kv_cache_usage.mean)} mean, {_format_percent(report.kv_cache_usage.max)} max",
        ),
        Fact("running", f"{_format_value(report.running.mean)} mean, {_format_value(report.running.max)} max"),
        Fact("waiting", f"{_format_value(report.waiting.mean)} mean, {_format_value(report.waiting.max)} max"),
        Fact("steps", f"{counts.num_steps:,}, running {_format_percent(report.busy)} of the time"),
        Fact(
            "rows per step",
            f"{_format_value(report.rows_per_step.mean)} mean, {_format_value(report.rows_per_step.max)} max; "
            f"{_format_percent(report.slots_used)} of the sequence slots",
        ),
        Fact(
            "tokens per step",
            f"{_format_value(report.tokens_per_step.mean)} mean, {_format_value(report.tokens_per_step.max)} max; "
            f"{_format_percent(report.budget_used)} of the token budget",
        ),
        Fact("preemptions", _preemptions(report)),
        Fact(
            "recomputed",
            f"{counts.recomputed_tokens:,} tokens, {_format_percent(report.recomputed_share)} of all computed",
        ),
        *_swap_facts(counts),
        Fact("prefix hit rate", _format_percent(report.prefix_hit_rate)),
    ]
    if report.price_per_million_output_tokens.value is not None:
        found.append(
            Fact("price", f"{_format_value(report.price_per_million_output_tokens)} per million output tokens")
        )
    return found


def _goodput_facts(goodput: Goodput, targets: Targets) -> list[Fact]:
    found = []
    of_requests = targets if targets.pooled_itl is None else replace(targets, itl=None)
    if of_requests:
        share, rate = _format_percent(goodput.share), _format_value(goodput.requests_per_second)
        found.append(Fact("goodput", f"{share} of requests, {rate} requests/s, within {limits_text(of_requests)}"))
    if targets.pooled_itl is not None:
        share, limit = _format_percent(goodput.gaps_share), format_duration(targets.pooled_itl)
        found.append(Fact("ITL target", f"{share} of the gaps of all requests within {limit}"))
    return found


ITL_NAMES: Mapping[ItlOf, str] = {"pooled": "pooled ITL", "request": "TPOT", "gap": "every gap"}
"""Names of the figure that a target on the ITL holds for."""


def limits_text(targets: Targets) -> str:
    """The given targets as text, such as "TTFT ≤ 2 s, pooled ITL ≤ 50 ms"."""
    given = {"TTFT": targets.ttft, ITL_NAMES[targets.itl_of]: targets.itl, "end-to-end": targets.e2e}
    return ", ".join(f"{name} ≤ {format_duration(limit)}" for name, limit in given.items() if limit is not None)


def format_number(value: float | None) -> str:
    """The value as text with at least three digits."""
    if value is None:
        return NOTHING
    size = abs(value)
    if size >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}" if size >= 1 else f"{value:.3g}"


def format_duration(seconds: float) -> str:
    """The duration as text; in milliseconds below one second."""
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(seconds * 1e3)} ms"


def _latency_row(name: str, found: Distribution) -> LatencyRow:
    estimates = [getattr(found, column) for column in COLUMNS]
    in_seconds = max((each.value for each in estimates if each.value is not None), default=0.0) >= _IN_SECONDS_FROM
    unit, factor = ("s", 1.0) if in_seconds else ("ms", 1e3)
    return LatencyRow(f"{name}, {unit}", tuple(_make_cell(each, factor) for each in estimates))


def _make_cell(estimate: Estimate, factor: float) -> Cell:
    if estimate.value is None:
        return Cell(NOTHING)
    return Cell(format_number(estimate.value * factor), _format_interval(estimate, factor))


def _format_interval(estimate: Estimate, factor: float = 1.0) -> str:
    if estimate.low is None or estimate.high is None:
        return ""
    return f"{format_number(estimate.low * factor)}-{format_number(estimate.high * factor)}"


def _format_value(estimate: Estimate) -> str:
    interval = _format_interval(estimate)
    return format_number(estimate.value) + (f" ({interval})" if interval else "")


def _format_percent(estimate: Estimate) -> str:
    if estimate.value is None:
        return NOTHING
    interval = _format_interval(estimate, 100)
    return f"{format_number(estimate.value * 100)} %" + (f" ({interval})" if interval else "")


def _reasons(report: Report) -> str:
    reasons = report.counts.finish_reasons
    return f" ({', '.join(f'{count:,} {name}' for name, count in reasons.items())})" if reasons else ""


def _preemptions(report: Report) -> str:
    causes = {name: count for name, count in report.counts.preemptions.items() if count}
    if not causes:
        return "0"
    return f"{sum(causes.values()):,}: " + ", ".join(f"{name} {count:,}" for name, count in causes.items())


def _swap_facts(counts: Counts) -> list[Fact]:
    """Decisions on the KV of preempted requests, and copied blocks; empty without host memory."""
    found = []
    if counts.preemption_decisions:
        parts = (f"{name} {count:,}" for name, count in counts.preemption_decisions.items() if count)
        found.append(Fact("decided", ", ".join(parts)))
    if counts.copied_blocks:
        out, back = counts.copied_blocks["offloaded"], counts.copied_blocks["restored"]
        found.append(Fact("copied", f"{out:,} blocks to host memory, {back:,} back"))
    return found


def _count_with_noun(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
