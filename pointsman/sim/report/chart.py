"""Parts of charts as inline SVG: axes, grids, lines. `COLOURS` and `MARKS` are their style sheet.

Every text from outside is escaped (`text`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np
import numpy.typing as npt

from pointsman.sim.report.layout import format_number

FloatArray = npt.NDArray[np.float64]

COLOURS = """
:root { color-scheme: light dark; --ink: #1c2024; --dim: #5b636b; --paper: #ffffff; --card: #f5f6f8; --rule: #d5d9de;
  --one: #0b63c5; --two: #b8510d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7eaee; --dim: #a3abb4; --paper: #14171a; --card: #1e2226;
  --rule: #3a4047; --one: #6db1ff; --two: #ffa45c; } }
"""
MARKS = """
svg { font: 11px system-ui, sans-serif; }
text { fill: var(--dim); } .grid { stroke: var(--rule); stroke-width: 1; }
.line { fill: none; stroke-width: 1.5; stroke-linejoin: round; }
.one { stroke: var(--one); } .two { stroke: var(--two); }
.faint { opacity: .3; stroke-width: 1; }
.target { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 4 3; }
.bar, .dot { fill: var(--one); } .bar.two { fill: var(--two); stroke: none; }
.name, .value { fill: var(--ink); } .head { fill: var(--ink); font-weight: 600; }
.key-one { color: var(--one); fill: var(--one); font-weight: 600; }
.key-two { color: var(--two); fill: var(--two); font-weight: 600; }
"""


def escape_text(value: str) -> str:
    """`value` escaped, without characters that control how text is displayed."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in value))


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values to positions in the picture."""

    low: float
    high: float
    start: int
    stop: int
    is_log: bool = False

    def positions(self, values: FloatArray | Sequence[float]) -> FloatArray:
        values = np.asarray(values, dtype=np.float64)
        low, high = self.low, self.high
        if self.is_log:
            values, low, high = np.log(values), math.log(low), math.log(high)
        return self.start + (values - low) / (high - low) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round values on the axis, at most about six."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for digits in ((1, 2, 5), (1,)):
                ticks = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
                ticks = [tick for tick in ticks if self.low <= tick <= self.high]
                if len(ticks) <= 7:
                    break
            return ticks
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step *= next(digit for digit in (1, 2, 5, 10) if (self.high - self.low) / (digit * step) <= 5)
        first = math.ceil(self.low / step - 1e-9)
        return [index * step for index in range(first, math.floor(self.high / step + 1e-9) + 1)]


def step_path(x: FloatArray, y: FloatArray, *, from_y: float) -> str:
    """The path of a line that is level until the next point, in tenths of a unit; points without a change are left
    out."""
    x, y = x.round(1), y.round(1)
    path, last = [f"M{x[0]:.1f} {from_y:.1f}"], (float(x[0]), float(from_y))
    for point in zip(x.tolist(), y.tolist(), strict=True):
        if point[0] != last[0]:
            path.append(f"H{point[0]:g}")
        if point[1] != last[1]:
            path.append(f"V{point[1]:g}")
        last = point
    return "".join(path)


def grid(x_axis: Axis, y_axis: Axis, x_unit: str, y_unit: str) -> str:
    """Lines and numbers at the ticks of both axes, and the unit of the horizontal axis."""
    left, right, top, bottom = x_axis.start, x_axis.stop, y_axis.stop, y_axis.start
    parts = []
    for tick, y in zip(y_axis.ticks(), y_axis.positions(y_axis.ticks()), strict=True):
        parts.append(f'<path class="grid" d="M{left} {y:.1f}H{right}"/>')
        label = f"{format_number(tick)}{y_unit and ' ' + y_unit}"
        parts.append(f'<text x="{left - 5}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick, x in zip(x_axis.ticks(), x_axis.positions(x_axis.ticks()), strict=True):
        parts.append(f'<path class="grid" d="M{x:.1f} {top}V{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle">{format_number(tick)}</text>')
    parts.append(f'<text x="{right}" y="{bottom + 28}" text-anchor="end">{x_unit}</text>')
    return "".join(parts)
