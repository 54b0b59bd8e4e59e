"""A simulation as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing.

Each replica is a process with counters (running, waiting, KV use) and tracks of requests. A request is a slice from its
arrival to its last token, with slices within: queued, prefill (to the first token) and decode. Requests on a track do
not overlap, so the number of tracks is the maximum number of requests in the system at once.
"""

from __future__ import annotations

import heapq
import json
from pathlib import Path
from typing import Any

import numpy as np

from pointsman.sim.outcome import REASONS, UNFINISHED
from pointsman.sim.report.course import FloatArray, Int64Array, courses, downsample_levels, levels, time_span
from pointsman.sim.simulator import Outcome

MAX_REQUESTS = 2000
MAX_POINTS = 20_000
"""Maximum number of values of each counter; the extremes of each interval are kept."""


def write_trace(
    outcome: Outcome, path: Path | str, *, max_requests: int = MAX_REQUESTS, max_points: int = MAX_POINTS
) -> None:
    """Write the trace: the first `max_requests` requests, and at most `max_points` values of each counter."""
    timings, shown = outcome.timings, min(outcome.timings.count, max_requests)
    events = [process_name(index, f"replica {index}") for index in range(len(outcome.timelines))]
    events += _counters(outcome, max_points)
    events += _slices(outcome, shown)
    about: dict[str, object] = {
        "requests": timings.count,
        "requests_shown": shown,
        "max_points_per_counter": max_points,
    }
    if shown < timings.count:
        about["cut"] = f"only the first {shown} of {timings.count} requests are shown"
    write_events(path, about, events)


def write_events(path: Path | str, about: dict[str, object], events: list[dict[str, Any]]) -> None:
    """Write the trace file; `about` is metadata beside the events."""
    trace = {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}
    Path(path).write_text(json.dumps(trace, allow_nan=False, separators=(",", ":")), encoding="utf-8")


def process_name(process: int, name: str) -> dict[str, Any]:
    """The event that names a process."""
    return {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}}


def _counters(outcome: Outcome, max_points: int) -> list[dict[str, Any]]:
    begin, end = time_span(outcome)
    events = []
    for index, run in enumerate(courses(outcome)):
        usage: FloatArray = 100 * run.kv_cache_usage
        counters: dict[str, FloatArray | Int64Array] = {
            "running": run.num_rows,
            "waiting": run.num_waiting,
            "KV use, %": usage,
        }
        for name, values in counters.items():
            course = downsample_levels(levels(run, values, begin, end), max_points)
            events += [
                {"ph": "C", "pid": index, "name": name, "ts": _microseconds(time, begin), "args": {"value": value}}
                for time, value in zip(course.times.tolist(), course.values.round(2).tolist(), strict=True)
            ]
    return events


def _slices(outcome: Outcome, shown: int) -> list[dict[str, Any]]:
    timings = outcome.timings
    begin, end = time_span(outcome)
    tracks = Tracks()
    events: list[dict[str, Any]] = []
    for number in range(shown):
        process = int(timings.replica[number])
        stops = [timings.arrival[number], timings.scheduled[number], timings.first_token[number]]
        reason = int(timings.reason[number])
        last = float(timings.last_token[number])
        if reason == UNFINISHED:
            last = end
        elif np.isnan(last):  # the request was refused
            last = float(stops[0])
        ends = [_microseconds(last if np.isnan(stop) else float(stop), begin) for stop in (*stops, last)]
        track = tracks.assign_track(process, ends[0], ends[-1])
        common = {"ph": "X", "pid": process, "tid": track}
        about = {
            "prompt_tokens": int(timings.num_prompt_tokens[number]),
            "output_tokens": int(timings.num_output_tokens[number]),
            "cached_tokens": int(timings.num_cached_tokens[number]),
            "preemptions": int(timings.num_preemptions[number]),
            "finish_reason": None if reason == UNFINISHED else REASONS[reason].value,
        }
        events.append({**common, "name": f"request {number}", "ts": ends[0], "dur": ends[-1] - ends[0], "args": about})
        for name, start, stop in zip(("queued", "prefill", "decode"), ends, ends[1:], strict=False):
            if stop > start:
                events.append({**common, "name": name, "ts": start, "dur": stop - start})
    return events


class Tracks:
    """Tracks of a process, assigned so that slices on a track do not overlap."""

    def __init__(self) -> None:
        self._busy: dict[int, list[tuple[int, int]]] = {}  # by process, a heap of (end, track)

    def assign_track(self, process: int, start: int, end: int) -> int:
        """The track for a slice from `start` to `end`: the track that has been free for longest, or a new one. Calls
        must be in the order of `start`."""
        busy = self._busy.setdefault(process, [])
        if busy and busy[0][0] <= start:
            track = heapq.heappop(busy)[1]
        else:
            track = len(busy) + 1
        heapq.heappush(busy, (end, track))
        return track


def _microseconds(time: float, begin: float) -> int:
    """Whole microseconds from `begin` to `time`: integers, so that slices nest exactly."""
    return round((time - begin) * 1e6)
