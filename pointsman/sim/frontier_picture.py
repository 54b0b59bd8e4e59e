"""Draws a frontier as an SVG picture: a chart of TTFT and a chart of ITL over the request rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from pointsman.sim.crossing import Interval
from pointsman.sim.frontier import Curve, Percentiles, Point
from pointsman.sim.report.chart import COLOURS, MARKS, Axis, escape_text, grid
from pointsman.sim.report.layout import ITL_NAMES, format_duration
from pointsman.sim.report.summary import Targets

FloatArray = npt.NDArray[np.float64]

MAX_CURVES = 6
"""Maximum number of curves, each in a colour of its own."""
_WIDTH, _GAP, _MARGIN = 440, 24, 12
"""Width of a chart, gap between the charts, and margin around both, in SVG units."""
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, _WIDTH - 12, 30, 224  # borders of the plot within a chart
_LEGEND, _LINE = 272, 18  # top of the legend, and height of its lines
_CHARACTER = 6.2
"""Width of a character of the legend."""
_BEYOND = 1.15
"""The rate axis ends at this multiple of the highest throughput, or of the highest rate within it: beyond it, latencies
only depend on the length of the simulation."""
_STYLE = """
:root { --c0: #0b63c5; --c1: #b8510d; --c2: #08785a; --c3: #8a3a9a; --c4: #80650a; --c5: #5b636b; }
@media (prefers-color-scheme: dark) { :root { --c0: #6db1ff; --c1: #ffa45c; --c2: #4fd0a5; --c3: #dc9ae6; --c4: #e0c350;
  --c5: #b8bec5; } }
svg { background: var(--paper); }
.band { opacity: .13; } .median { stroke-dasharray: 5 3; } .beyond { stroke-dasharray: 1 3; }
"""


def frontier_svg(curves: Mapping[str, Curve], confidence: float, targets: Targets, percentile: str = "p99") -> str:
    """The picture as an SVG document with its own style sheet.

    Args:
        curves: at most `MAX_CURVES` by name, each with a point.
        confidence: of the intervals.
        targets: drawn as lines; the kind of ITL that is drawn is that of the target.
        percentile: drawn as a line with its interval, beside the median.
    """
    itl_name = ITL_NAMES[targets.itl_of]
    itl_name = "ITL" if targets.itl_of == "pooled" else f"ITL ({itl_name})"
    charts = [
        _chart(curves, f"TTFT, {percentile}", percentile, lambda point: point.ttft, targets.ttft),
        _chart(curves, f"{itl_name}, {percentile}", percentile, lambda point: point.itl[targets.itl_of], targets.itl),
    ]
    placed = "".join(
        f'<g transform="translate({_MARGIN + place * (_WIDTH + _GAP)} {_MARGIN})">{drawing}</g>'
        for place, drawing in enumerate(charts)
    )
    width = 2 * (_MARGIN + _WIDTH) + _GAP
    legend, height = _legend(list(curves), confidence, percentile, width - 2 * _MARGIN)
    style = f"<style>{COLOURS}{MARKS}{_STYLE}</style>"
    label = escape_text(f"TTFT and ITL over the request rate: {', '.join(curves)}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{style}{placed}{legend}</svg>\n"
    )


def _chart(
    curves: Mapping[str, Curve],
    caption: str,
    percentile: str,
    read: Callable[[Point], Percentiles],
    target: float | None,
) -> str:
    known = {name: [point for point in curve.points if read(point)] for name, curve in curves.items()}
    head = f'<text class="head" x="0" y="13">{escape_text(caption)}</text>'
    values = [
        read(point)[name].value
        for points in known.values()
        for point in points
        if not point.is_overloaded
        for name in ("p50", percentile)
    ] or [read(point)[percentile].value for points in known.values() for point in points]
    if not values:
        return f'{head}<text x="{_LEFT}" y="{_TOP + 20}">no values</text>'
    low, high = min(values) / 1.3, max(values) * 3
    if target is not None:
        low, high = min(low, target / 1.3), max(high, target * 1.3)
    factor, unit = (1e3, "ms") if high < 1 else (1.0, "s")
    up = Axis(low * factor, high * factor, _BOTTOM, _TOP, is_log=True)
    across = Axis(0, _highest_rate(curves.values()), _LEFT, _RIGHT)
    parts = [head, grid(across, up, "requests/s", unit)]
    if target is not None:
        y = float(up.positions([target * factor])[0])
        parts.append(f'<path class="target" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>')
        parts.append(f'<text x="{_LEFT + 4}" y="{y - 4:.1f}">target {format_duration(target)}</text>')
    for place, points in enumerate(known.values()):
        if points:
            main = [read(point)[percentile] for point in points]
            medians = [] if percentile == "p50" else [read(point)["p50"].value * factor for point in points]
            parts += _curve(points, main, medians, place, across, up, factor)
    return "".join(parts)


def _highest_rate(curves: Iterable[Curve]) -> float:
    ends = []
    for curve in curves:
        steady = [point.rate for point in curve.points if not point.is_overloaded]
        ends.append(_BEYOND * max(steady or [curve.points[-1].rate]))
    return max(ends)


def _curve(
    points: Sequence[Point],
    main: Sequence[Interval],
    medians: Sequence[float],
    place: int,
    across: Axis,
    up: Axis,
    factor: float,
) -> list[str]:
    """The band, the line and the median of a curve, up to the end of the axis."""
    rates = [point.rate for point in points]
    lows, values, highs = (
        [max(getattr(each, end) * factor, up.low / 2) for each in main] for end in ("low", "value", "high")
    )
    colour = f"var(--c{place})"
    parts = []
    upper, lower = (_within(rates, ends, across, up) for ends in (highs, lows))
    if len(upper) > 1:
        outline = [*upper, *reversed(lower)]
        parts.append(f'<path class="band" fill="{colour}" d="{_path(outline)}Z"/>')
    for ends, extra in ((medians, " median"), (values, "")):
        for is_beyond, first, last in _stretches(points) if ends else ():
            style = " beyond" if is_beyond else extra
            path = _path(_within(rates[first:last], ends[first:last], across, up))
            if path:
                parts.append(f'<path class="line{style}" stroke="{colour}" d="{path}"/>')
    if len(points) == 1 and rates[0] <= across.high:
        x, y = across.positions(rates)[0], np.clip(up.positions(values)[0], _TOP, _BOTTOM)
        parts.append(f'<circle fill="{colour}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
    return parts


def _stretches(points: Sequence[Point]) -> list[tuple[bool, int, int]]:
    """Whether the service is overloaded, first point and end, of each stretch; neighbours share a point."""
    first = next((place for place, point in enumerate(points) if point.is_overloaded), len(points))
    found = [(False, 0, first)]
    if first < len(points):
        found.append((True, max(0, first - 1), len(points)))
    return found


def _within(rates: Sequence[float], values: Sequence[float], across: Axis, up: Axis) -> list[tuple[float, float]]:
    """Positions of a line, cut off at the highest rate and at both ends of the upward axis."""
    logs = np.log(values)
    x, y = list(rates), logs.tolist()
    for ends in (math.log(up.low), math.log(up.high)):  # points where the line leaves the plot
        for (a, b), (first, second) in zip(pairwise(rates), pairwise(logs.tolist()), strict=True):
            if (first - ends) * (second - ends) < 0:
                x.append(a + (ends - first) / (second - first) * (b - a))
                y.append(ends)
    if len(rates) > 1 and rates[0] < across.high < rates[-1]:
        x.append(across.high)
        y.append(float(np.interp(across.high, rates, logs)))
    order = np.argsort(x, kind="stable")
    order = order[np.array(x)[order] <= across.high]
    xs = across.positions(np.array(x)[order])
    ys = np.clip(up.positions(np.exp(np.array(y)[order])), _TOP, _BOTTOM)
    return list(zip(xs.tolist(), ys.tolist(), strict=True))


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places) if len(places) > 1 else ""


def _legend(names: Sequence[str], confidence: float, percentile: str, width: float) -> tuple[str, int]:
    """The names of the curves in lines of a width, what the lines mean, and the height of the picture."""
    parts, x, y = [], 0.0, _LEGEND
    for place, name in enumerate(names):
        length = 26 + _CHARACTER * len(name) + 18
        if x and x + length > width:
            x, y = 0.0, y + _LINE
        parts.append(
            f'<path d="M{x:.0f} {y - 4}h18" stroke="var(--c{place})" stroke-width="3"/>'
            f'<text class="name" x="{x + 24:.0f}" y="{y}">{escape_text(name)}</text>'
        )
        x += length
    y += _LINE
    median = "" if percentile == "p50" else " Dashed: median."
    parts.append(
        f'<text x="0" y="{y}">Line: {percentile}, band: its {100 * confidence:g} % interval.{median} Dotted: the queue '
        "grows without end.</text>"
    )
    return f'<g transform="translate({_MARGIN} 0)">{"".join(parts)}</g>', y + _MARGIN
