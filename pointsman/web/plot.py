"""Draws a film as one picture: each step's batch, the KV pool, the states of every request, and why the queue waited.

matplotlib draws it. It is imported only where it is used, so nothing else needs it.
"""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from pointsman.core.observe.film_format import FilmError
from pointsman.web.film import Film
from pointsman.web.timeline import DECODE, PARKED, PREFILL, WAITING, Span, Timeline, timeline_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FloatArray = npt.NDArray[np.float64]

# The palette of Okabe and Ito: its colours differ for people with any colour vision.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, YELLOW, GREY = (
    "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7", "#F0E442", "#999999",
)  # fmt: skip
COLOURS = {PREFILL: ORANGE, DECODE: BLUE, WAITING: "#DDDDDD", PARKED: PURPLE}
OF_REASONS = (VERMILION, SKY, ORANGE, PURPLE, GREEN, YELLOW, BLUE, GREY)
MAX_REQUESTS = 400
"""Maximum number of requests that are drawn, each on its own line. If the film has more requests, an evenly spaced
selection is drawn."""
MAX_POINTS = 2000
"""Maximum number of points of a curve. If the film has more frames, each point is the mean over an interval of time."""


def draw(film: Film, title: str) -> Figure:
    """Draw the picture of a film, 11 by 12 inches.

    Raises:
        FilmError: the film has no step, or contradicts itself.
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    timeline, spans = timeline_of(film)
    if not len(timeline.time):
        raise FilmError("the film has no step, so there is nothing to draw")
    figure = Figure(figsize=(11, 12), layout="constrained")
    batch, pool, requests, queue = figure.subplots(4, 1, sharex=True, height_ratios=(1, 1, 2.2, 1))
    figure.suptitle(_shorten(title, 80))
    edges = np.append(timeline.time, film.end)
    config = film.header["config"]
    _draw_batch(batch, timeline, edges, config["max_num_batched_tokens"])
    _draw_pool(pool, timeline, edges, config["num_blocks"] - config["num_reserved_blocks"])
    _draw_requests(requests, film, spans)
    _draw_queue(queue, timeline, edges)
    queue.set_xlabel("seconds")
    queue.set_xlim(0, max(film.end, 1e-6))
    return figure


def means(edges: FloatArray, values: npt.NDArray[Any], most: int = MAX_POINTS) -> tuple[FloatArray, FloatArray]:
    """Resample a step function, `values` [n] between `edges` [n + 1], to means over at most `most` intervals of time.

    Returns:
        The edges of the intervals, and the mean over each interval.
    """
    if len(values) <= most:
        return edges, values.astype(np.float64)
    grid = np.linspace(edges[0], edges[-1], most + 1)
    area = np.concatenate([[0.0], np.cumsum(values * np.diff(edges))])
    return grid, np.diff(np.interp(grid, edges, area)) / np.maximum(np.diff(grid), 1e-12)


def _draw_batch(axes: Any, timeline: Timeline, edges: FloatArray, budget: int) -> None:
    grid, decode = means(edges, timeline.num_decode_tokens)
    _, prefill = means(edges, timeline.num_prefill_tokens)
    axes.stairs(decode, grid, fill=True, color=COLOURS[DECODE], label="decode")
    axes.stairs(decode + prefill, grid, baseline=decode, fill=True, color=COLOURS[PREFILL], label="prefill")
    axes.axhline(budget, color="black", linewidth=0.8, linestyle="--", label=f"budget {budget:,}")
    axes.set_ylabel("tokens of a step")
    axes.set_yscale("symlog", linthresh=16)
    axes.legend(loc="upper right", ncols=3)


def _draw_pool(axes: Any, timeline: Timeline, edges: FloatArray, num_blocks: int) -> None:
    grid, used = means(edges, 100 * (1 - timeline.num_free_blocks / num_blocks))
    axes.stairs(used, grid, fill=True, color=SKY, label=f"KV blocks in use, of {num_blocks:,}")
    when = timeline.time[timeline.num_preemptions > 0]
    count = int(timeline.num_preemptions.sum())
    label = f"{count:,} preemption{'' if count == 1 else 's'}"
    axes.plot(when, np.full(len(when), 102.0), "v", color=VERMILION, markersize=5, label=label)
    axes.set_ylim(0, 108)
    axes.set_ylabel("% of the pool")
    axes.legend(loc="lower right", ncols=2)


def _draw_requests(axes: Any, film: Film, spans: list[Span]) -> None:
    count = len(film.requests)
    shown = np.unique(np.linspace(0, count - 1, min(count, MAX_REQUESTS)).round().astype(int)).tolist() if count else []
    place = {number: index for index, number in enumerate(shown)}
    for kind, colour in COLOURS.items():
        bars = [(place[span.number], span) for span in spans if span.kind == kind and span.number in place]
        if bars:
            axes.barh(
                [at for at, _ in bars],
                [span.end - span.begin for _, span in bars],
                left=[span.begin for _, span in bars],
                height=0.9 if kind != WAITING else 0.4,
                color=colour,
                label=kind,
                linewidth=0,
            )
    axes.set_ylim(len(shown) - 0.5, -0.5)
    few = 25
    if len(shown) <= few:
        axes.set_yticks(range(len(shown)), [_shorten(film.requests[number].request_id) for number in shown])
    axes.set_ylabel("requests" if len(shown) == count else f"{len(shown):,} of {count:,} requests")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", ncols=4)


def _draw_queue(axes: Any, timeline: Timeline, edges: FloatArray) -> None:
    """Draw the number of waiting requests, by what the head of the queue lacks."""
    seconds = np.diff(edges)
    reasons = {reason: float(seconds[np.array(timeline.blocked) == reason].sum()) for reason in set(timeline.blocked)}
    reasons.pop("", None)
    base: FloatArray | None = None
    for reason, colour in zip(sorted(reasons, key=lambda one: (-reasons[one], one)), cycle(OF_REASONS), strict=False):
        waits = np.where(np.array(timeline.blocked) == reason, timeline.num_waiting, 0)
        grid, values = means(edges, waits)
        base = np.zeros_like(values) if base is None else base
        label = f"{reason.replace('_', ' ')}, {reasons[reason]:,.1f} s"
        axes.stairs(base + values, grid, baseline=base, fill=True, color=colour, label=label)
        base = base + values
    axes.set_ylabel("waiting, by what the\nhead of the queue lacks")
    if reasons:
        axes.legend(loc="upper right")


def _shorten(text: str, most: int = 24) -> str:
    """An id as a label: on one line, shortened, and without a `$` that would begin a formula in matplotlib."""
    plain = "".join(letter if letter.isprintable() else " " for letter in text).replace("$", r"\$")
    return plain if len(plain) <= most else plain[: most - 1] + "…"
