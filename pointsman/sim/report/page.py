"""A report as one self-contained HTML file: no network, no script, charts as inline SVG.

Every text from outside is escaped, and the page's policy allows only its own style sheet.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pointsman.sim.report.chart import COLOURS, MARKS, Axis, escape_text, grid, step_path
from pointsman.sim.report.course import (
    Levels,
    average_levels,
    courses,
    downsample_levels,
    levels,
    scale_levels,
    sum_levels,
    time_span,
)
from pointsman.sim.report.layout import COLUMNS, facts, format_duration, latency_rows
from pointsman.sim.report.summary import DEFINITIONS, Report
from pointsman.sim.simulator import Outcome

FloatArray = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

MAX_POINTS = 2000
"""Maximum number of points of each line over time; the extremes of each interval are kept."""
MAX_REFUSED = 20
"""Maximum number of refused requests in the list."""
_CDF_POINTS = 800
_STRETCHES = 150
"""Number of intervals: a line with more than twice this number of points is drawn as its mean in each interval, above
its extremes."""
_WIDTH, _HEIGHT = 340, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 332, 10, 180  # borders of the plot within the picture
_LOG_FROM = 30.0  # an axis is logarithmic from this ratio of its largest to its smallest value

_TEXT = """
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0; }
.note { border-left: 4px solid var(--two); background: var(--card); padding: .5rem .75rem; margin: .5rem 0; }
.dim, small { color: var(--dim); }
dl { display: grid; grid-template-columns: minmax(7rem, max-content) 1fr; gap: .15rem 1rem; margin: 0; }
dt { font-weight: 600; } dd { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap;
  vertical-align: top; }
th:first-child { text-align: left; padding-left: 0; } td small { display: block; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .4rem; }
figcaption { font-size: .85rem; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
"""
STYLE = COLOURS + _TEXT + MARKS


def write_html(report: Report, outcome: Outcome, path: Path | str, *, title: str = "Simulation") -> None:
    """Write the page: the figures of `report`, and charts of `outcome` (for combined reports, of one seed)."""
    Path(path).write_text(_report_page(report, outcome, title), encoding="utf-8", errors="replace")


def html_document(title: str, parts: Iterable[str]) -> str:
    """An HTML page of the given parts, with the style sheet and a content policy that allows only this style sheet."""
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>",
            f"<h1>{escape_text(title)}</h1>",
            *parts,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _report_page(report: Report, outcome: Outcome, title: str) -> str:
    notes = [*report.notes, "Charts show one of the seeds."] if report.num_seeds > 1 else report.notes
    return html_document(
        title,
        [
            *(f'<p class="note">{escape_text(note)}</p>' for note in notes),
            "<h2>Latency</h2>",
            _latency_table(report),
            "<h2>Throughput, load and cost</h2>",
            _facts(report),
            "<h2>Charts</h2>",
            '<div class="charts">',
            *_charts(report, outcome),
            "</div>",
            _refused_list(outcome),
            "<h2>What the figures mean</h2>",
            "<dl>",
            *(f"<dt>{escape_text(name)}</dt><dd>{escape_text(meaning)}</dd>" for name, meaning in DEFINITIONS.items()),
            "</dl>",
            f'<p class="dim">{escape_text(report.method)}</p>',
        ],
    )


def _latency_table(report: Report) -> str:
    head = "".join(f'<th scope="col">{column}</th>' for column in COLUMNS)
    rows = [
        f'<tr><th scope="row">{escape_text(row.name)}</th>'
        + "".join(f"<td>{cell.value}<small>{cell.interval}</small></td>" for cell in row.cells)
        + "</tr>"
        for row in latency_rows(report)
    ]
    table = f'<table><thead><tr><th scope="col"></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    return f'<div class="scroll" role="region" aria-label="Latency" tabindex="0">{table}</div>'


def _facts(report: Report) -> str:
    rows = "".join(f"<dt>{escape_text(fact.name)}</dt><dd>{escape_text(fact.text)}</dd>" for fact in facts(report))
    return f"<dl>{rows}</dl>"


def _refused_list(outcome: Outcome) -> str:
    refused = outcome.refused
    if not refused:
        return ""
    rows = "".join(
        f"<dt><bdi>{escape_text(name)}</bdi></dt><dd><bdi>{escape_text(why)}</bdi></dd>"
        for name, why in refused[:MAX_REFUSED]
    )
    rest = len(refused) - MAX_REFUSED
    more = f'<p class="dim">and {rest} more</p>' if rest > 0 else ""
    return f"<h2>Refused requests</h2><dl>{rows}</dl>{more}"


# ---------------------------------------------------------------------- charts


def _charts(report: Report, outcome: Outcome) -> list[str]:
    timings, (begin, end) = outcome.timings, time_span(outcome)
    ttft = timings.first_token[: timings.count] - timings.arrival[: timings.count]
    ttft = ttft[~np.isnan(ttft)]
    runs = courses(outcome)
    running = sum_levels([levels(run, run.num_rows, begin, end) for run in runs])
    waiting = sum_levels([levels(run, run.num_waiting, begin, end) for run in runs])
    usage = scale_levels(sum_levels([levels(run, run.kv_cache_usage, begin, end) for run in runs]), 100 / len(runs))
    tokens = sum_levels([levels(run, run.num_tokens / run.num_steps, begin, end) for run in runs])
    tokens = scale_levels(tokens, 1 / len(runs))
    of_all = "" if len(runs) == 1 else ", all replicas"
    mean = "" if len(runs) == 1 else ", mean of the replicas"
    return [
        _cdf_chart("TTFT", ttft, np.ones(len(ttft), dtype=np.int64), report.targets.ttft),
        _cdf_chart("ITL, per gap", *timings.gaps(), report.targets.itl),
        _time_chart(f"Running and waiting requests{of_all}", [("running", running), ("waiting", waiting)], begin),
        _time_chart(f"KV use, %{mean}", [("", usage)], begin, highest=100.0),
        _time_chart(f"Tokens per step{mean}", [("", tokens)], begin),
    ]


def _cdf_chart(name: str, values: FloatArray, counts: Int64Array, target: float | None) -> str:
    """A chart of the share of values that are at most as large as each value."""
    caption = f"{name}: share of values up to a duration"
    if not len(values):
        return _figure(caption, "", "nothing to show")
    order = values.argsort()
    values, below = values[order], counts[order].cumsum()
    kept = np.unique(below.searchsorted(np.linspace(1, below[-1], _CDF_POINTS)))
    values, shares = values[kept], 100 * below[kept] / below[-1]
    low, high = float(values[0]), float(values[-1])
    if target is not None:
        low, high = min(low, target), max(high, target)
    is_log = low > 0 and high / low > _LOG_FROM
    in_seconds = high >= 10
    factor = 1.0 if in_seconds else 1e3
    low = low if is_log else 0.0
    across = Axis(low * factor, max(high * factor, 1e-9), _LEFT, _RIGHT, is_log)
    up = Axis(0, 100, _BOTTOM, _TOP)
    path = step_path(across.positions(values * factor), up.positions(shares), from_y=_BOTTOM)
    parts = [grid(across, up, "s" if in_seconds else "ms", "%"), f'<path class="line one" d="{path}"/>']
    legend = ""
    if target is not None:
        x = float(across.positions([target * factor])[0])
        parts.append(f'<path class="target" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>')
        legend = f"dashed: the target, {format_duration(target)}"
    return _figure(caption, "".join(parts), legend)


def _time_chart(caption: str, lines: list[tuple[str, Levels]], begin: float, *, highest: float = 0.0) -> str:
    end = lines[0][1].end
    if end <= begin:
        return _figure(caption, "", "nothing to show")
    unit, divisor = ("s", 1) if end - begin < 600 else ("min", 60) if end - begin < 36_000 else ("h", 3600)
    top = max(highest, *(float(line.values.max()) for _, line in lines), 1e-9)
    across = Axis(0, (end - begin) / divisor, _LEFT, _RIGHT)
    up = Axis(0, top, _BOTTOM, _TOP)
    parts, keys = [grid(across, up, unit, "")], []
    for (name, line), style in zip(lines, ("one", "two"), strict=False):
        shown = [(f"line {style}", line)]
        if len(line.times) > 2 * _STRETCHES:
            shown = [(f"line faint {style}", downsample_levels(line, MAX_POINTS))]
            shown.append((f"line {style}", average_levels(line, _STRETCHES)))
        for classes, course in shown:
            x = across.positions((np.append(course.times, end) - begin) / divisor)
            y = up.positions(np.append(course.values, course.values[-1]))
            parts.append(f'<path class="{classes}" d="{step_path(x, y, from_y=y[0])}"/>')
        if name:
            keys.append(f'<span class="key-{style}">{name}</span>')
    if any(len(line.times) > 2 * _STRETCHES for _, line in lines):
        keys.append(f"faint: every value; line: mean over each {format_duration((end - begin) / _STRETCHES)}")
    return _figure(caption, "".join(parts), ", ".join(keys))


def _figure(caption: str, drawing: str, legend: str) -> str:
    picture = (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape_text(caption)}">{drawing}</svg>'
        if drawing
        else ""
    )
    return f'<figure><h3>{escape_text(caption)}</h3>{picture}<figcaption class="dim">{legend}</figcaption></figure>'
