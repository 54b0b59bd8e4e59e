"""Writes a film as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: each request's states, and the load.

The trace is like the trace of a simulation (`sim/report/perfetto.py`), but also has each wait and each preemption of
the film.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pointsman.core.observe.film_format import Op
from pointsman.sim.report.perfetto import MAX_POINTS, MAX_REQUESTS, Tracks, process_name, write_events
from pointsman.web.film import Film
from pointsman.web.story import Teller
from pointsman.web.timeline import Span, Timeline, timeline_of


def write_trace(
    film: Film, path: Path | str, *, max_requests: int = MAX_REQUESTS, max_points: int = MAX_POINTS
) -> None:
    """Write the trace: the first `max_requests` requests, and counters at up to `max_points` evenly spaced frames."""
    timeline, spans = timeline_of(film)
    shown = min(len(film.requests), max_requests)
    events = [process_name(0, "scheduler"), *_counter_events(timeline, film, max_points)]
    events += _slice_events(film, [span for span in spans if span.number < shown])
    events += _preemption_events(film)
    about: dict[str, object] = {"requests": len(film.requests), "requests_shown": shown}
    write_events(path, about, events)


def _counter_events(timeline: Timeline, film: Film, max_points: int) -> list[dict[str, Any]]:
    config = film.header["config"]
    num_blocks = config["num_blocks"] - config["num_reserved_blocks"]
    counters = {
        "running": timeline.num_running,
        "waiting": timeline.num_waiting,
        "KV use, %": (100 * (1 - timeline.num_free_blocks / num_blocks)).round(2),
        "prefill tokens of a step": timeline.num_prefill_tokens,
    }
    chosen = np.arange(0, len(timeline.time), max(1, -(-len(timeline.time) // max_points)))
    times = np.rint(timeline.time[chosen] * 1e6).astype(np.int64).tolist()
    return [
        {"ph": "C", "pid": 0, "name": name, "ts": time, "args": {"value": value}}
        for name, values in counters.items()
        for time, value in zip(times, values[chosen].tolist(), strict=True)
    ]


def _slice_events(film: Film, spans: list[Span]) -> list[dict[str, Any]]:
    of_request: dict[int, list[Span]] = {}
    for span in spans:
        of_request.setdefault(span.number, []).append(span)
    tracks, events = Tracks(), list[dict[str, Any]]()
    for number, mine in sorted(of_request.items(), key=lambda item: (min(span.begin for span in item[1]), item[0])):
        begin, end = round(min(span.begin for span in mine) * 1e6), round(max(span.end for span in mine) * 1e6)
        common = {"ph": "X", "pid": 0, "tid": tracks.assign_track(0, begin, end)}
        one = film.requests[number]
        about = {"prompt_tokens": one.num_prompt_tokens, "max_tokens": one.max_tokens, "priority": one.priority}
        about |= {} if one.tenant is None else {"tenant": one.tenant}  # type: ignore[dict-item]
        events.append({**common, "name": one.request_id, "ts": begin, "dur": end - begin, "args": about})
        for span in mine:
            start = round(span.begin * 1e6)
            events.append({**common, "name": span.kind, "ts": start, "dur": round(span.end * 1e6) - start})
    return events


def _preemption_events(film: Film) -> list[dict[str, Any]]:
    """An event of the trace for each preemption, drawn across all rows of the process."""
    teller = Teller(film)
    return [
        {"ph": "i", "s": "p", "pid": 0, "tid": 0, "name": teller.sentence(event), "ts": round(event.time * 1e6)}
        for event in film.events(0, None)
        if event.op is Op.PREEMPTED
    ]
