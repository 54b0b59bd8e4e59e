"""Shows the result of a scenario (a `Finding`): as an SVG picture of charts (panels), or as an HTML page with the
figures, the checks and the picture."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from pointsman.sim.report.chart import COLOURS, MARKS, Axis, escape_text, grid, step_path
from pointsman.sim.report.course import average_levels, downsample_levels
from pointsman.sim.report.page import html_document
from pointsman.sim.scenarios.scenario import Bars, Course, Finding, Panel, Points, Row

_WIDTH, _GAP, _MARGIN = 440, 24, 12
"""Width of a chart (panel), gap between panels, and margin around all panels, in SVG units."""
_HEAD = 22  # height of a panel's caption
_CHART = _HEAD + 205  # height of a panel with axes
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, _WIDTH - 12, _HEAD + 6, _HEAD + 170  # borders of the plot within such a panel
_BAR, _BAR_GAP, _LOAD = 12, 6, 20  # heights of a bar, of the gap between bars, of a workload's name
_CHARACTER = 6.9  # width of a wide character
_LOG_FROM = 30.0
_MAX_POINTS, _STRETCHES = 400, 120
_STANDALONE = "svg { background: var(--paper); }"


def picture(finding: Finding) -> str:
    """The charts (panels) of the finding's scenario, two in a row, as an SVG element without a style sheet."""
    panels = [_panel(finding, panel) for panel in finding.scenario.panels]
    parts, y = [], _MARGIN
    for first in range(0, len(panels), 2):
        pair = panels[first : first + 2]
        for place, (drawing, _) in enumerate(pair):
            parts.append(f'<g transform="translate({_MARGIN + place * (_WIDTH + _GAP)} {y})">{drawing}</g>')
        y += max(height for _, height in pair) + _GAP
    width, height = 2 * (_MARGIN + _WIDTH) + _GAP, y - _GAP + _MARGIN
    label = escape_text(f"Figures of the scenario {finding.scenario.name}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
        f"{''.join(parts)}</svg>"
    )


def write_svg(finding: Finding, path: Path | str) -> None:
    """Write the picture as an SVG file with its style sheet."""
    drawing = picture(finding)
    end = drawing.index(">") + 1
    Path(path).write_text(
        f"{drawing[:end]}<style>{COLOURS}{MARKS}{_STANDALONE}</style>{drawing[end:]}\n", encoding="utf-8"
    )


def write_page(finding: Finding, path: Path | str, notes: tuple[str, ...] = ()) -> None:
    """Write the whole finding as one HTML file."""
    scenario = finding.scenario
    body = [
        f"<p>{escape_text(scenario.claim)}</p>",
        f'<p class="dim">Source: {escape_text(scenario.source)}. {escape_text(scenario.setting)}</p>',
        *(f'<p class="note">{escape_text(note)}</p>' for note in notes),
        "<h2>Figures</h2>",
        _table(finding),
        "<h2>The claim, part by part</h2>",
        "<dl>",
        *(
            f"<dt>{verdict(check.holds)}</dt><dd>{escape_text(check.claim)}: {escape_text(check.figures)}</dd>"
            for check in finding.checks
        ),
        "</dl>",
        "<h2>Picture</h2>",
        f"<figure>{picture(finding)}</figure>",
    ]
    Path(path).write_text(html_document(f"Scenario: {scenario.name}", body), encoding="utf-8", errors="replace")


def verdict(holds: bool) -> str:
    """The verdict of a check, as text."""
    return "holds" if holds else "does not hold"


def _table(finding: Finding) -> str:
    figures = finding.scenario.figures
    head = "".join(f'<th scope="col">{escape_text(figure.name)}</th>' for figure in figures)
    rows = [
        f'<tr><th scope="row">{escape_text(_name(row))}</th>'
        + "".join(
            f"<td>{escape_text(figure.text(each))}</td>" for figure, each in zip(figures, row.values, strict=True)
        )
        + "</tr>"
        for row in finding.rows
    ]
    table = f'<table><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll" role="region" aria-label="Figures" tabindex="0">{table}</div>'


def _name(row: Row) -> str:
    variant = row.variant
    return f"{variant.load}: {variant.name}" if variant.load else variant.name


# ---------------------------------------------------------------------- panels


def _panel(finding: Finding, panel: Panel) -> tuple[str, int]:
    """The drawing of a panel, which begins at (0, 0), and its height."""
    if isinstance(panel, Bars):
        return _bars(finding, panel)
    return _points(finding, panel) if isinstance(panel, Points) else _course(finding, panel)


def _caption_line(caption: str, y: int = 13) -> str:
    return f'<text class="head" x="0" y="{y}">{escape_text(caption)}</text>'


def _bars(finding: Finding, panel: Bars) -> tuple[str, int]:
    names = [figure.name for figure in finding.scenario.figures]
    place = names.index(panel.figure)
    figure = finding.scenario.figures[place]
    values = [row.values[place].value for row in finding.rows]
    labels = [figure.text(row.values[place]) for row in finding.rows]
    left = math.ceil(_CHARACTER * max(len(row.variant.name) for row in finding.rows)) + 6
    max_length = _WIDTH - left - math.ceil(_CHARACTER * max(map(len, labels))) - 6
    longest: dict[str, float] = {}
    for row, value in zip(finding.rows, values, strict=True):
        longest[row.variant.load] = max(longest.get(row.variant.load, 0.0), value or 0.0)
    caption = _caption_line(panel.figure)
    if figure.unit == "%":
        longest = dict.fromkeys(longest, max(longest.values()))
    elif len(longest) > 1:  # bars compare the variants of a workload
        caption += f'<text x="{_WIDTH}" y="13" text-anchor="end">each workload on its own scale</text>'
    parts, y, load = [caption], _HEAD, ""
    for row, value, label in zip(finding.rows, values, labels, strict=True):
        if row.variant.load != load:
            load = row.variant.load
            parts.append(f'<text x="0" y="{y + 14}">{escape_text(load)}</text>')
            y += _LOAD
        length = max_length * (value or 0.0) / (longest[load] or 1.0)
        parts.append(
            f'<text class="name" x="{left - 6}" y="{y + 10}" text-anchor="end">{escape_text(row.variant.name)}</text>'
            f'<rect class="bar" x="{left}" y="{y}" width="{length:.1f}" height="{_BAR}"/>'
            f'<text class="value" x="{left + length + 5:.1f}" y="{y + 10}">{escape_text(label)}</text>'
        )
        y += _BAR + _BAR_GAP
    return "".join(parts), y


def _points(finding: Finding, panel: Points) -> tuple[str, int]:
    across, x, x_unit = _axis(finding, panel, panel.across, _LEFT, _RIGHT - 60)
    up, y, y_unit = _axis(finding, panel, panel.up, _BOTTOM, _TOP)
    path = "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in zip(x, y, strict=True))
    parts = [
        _caption_line(f"{panel.up} over {panel.across}"),
        grid(across, up, f"{panel.across}, {x_unit}", y_unit),
        f'<path class="line one faint" d="{path}"/>',
    ]
    for place, (name, px, py) in enumerate(zip(panel.variants, x, y, strict=True)):
        label = py + 16 if place % 2 else py - 7  # neighbours' names do not touch
        parts.append(
            f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="3.5"/>'
            f'<text class="name" x="{px + 3:.1f}" y="{label:.1f}">{escape_text(name)}</text>'
        )
    return "".join(parts), _CHART


def _axis(finding: Finding, panel: Points, name: str, start: int, stop: int) -> tuple[Axis, list[float], str]:
    """The axis for the figure called `name`, each variant's position on this axis, and the figure's unit."""
    unit = next(figure.unit for figure in finding.scenario.figures if figure.name == name)
    values = np.array([finding.value(name, variant, panel.load) for variant in panel.variants])
    is_log = values.min() > 0 and values.max() / values.min() > _LOG_FROM
    shown: str = unit
    if unit == "s" and (is_log or values.max() < 1):
        values, shown = values * 1e3, "ms"
    elif unit == "%":
        values = values * 100
    low, high = (values.min() / 1.2, values.max() * 1.2) if is_log else (0.0, values.max() * 1.05)
    axis = Axis(float(low), float(high), start, stop, bool(is_log))
    return axis, axis.positions(values).tolist(), shown


def _course(finding: Finding, panel: Course) -> tuple[str, int]:
    rows = [row for row in finding.rows if row.variant.load == panel.load]
    lines = [(row, panel.read(row.outcome, row.variant.config)) for row in rows]
    begin, end = float(lines[0][1].times[0]), max(line.end for _, line in lines)
    across, up = Axis(0, end - begin, _LEFT, _RIGHT), Axis(0, 100, _BOTTOM, _TOP)
    parts, key = [_caption_line(panel.caption), grid(across, up, "s", "")], _LEFT
    for (row, line), style in zip(lines, ("one", "two"), strict=False):
        shown = [(f"line {style}", line)]
        if len(line.times) > 2 * _STRETCHES:
            shown = [
                (f"line faint {style}", downsample_levels(line, _MAX_POINTS)),
                (shown[0][0], average_levels(line, _STRETCHES)),
            ]
        for classes, course in shown:
            x = across.positions(np.append(course.times, course.end) - begin)
            y = up.positions(np.append(course.values, 0.0))
            parts.append(f'<path class="{classes}" d="{step_path(x, y, from_y=float(y[0]))}"/>')
        parts.append(f'<text class="key-{style}" x="{key}" y="{_BOTTOM + 28}">{escape_text(row.variant.name)}</text>')
        key += math.ceil(_CHARACTER * len(row.variant.name)) + 16
    return "".join(parts), _CHART
