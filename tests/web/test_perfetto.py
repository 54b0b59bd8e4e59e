"""A film as a trace for Perfetto."""

from __future__ import annotations

import json
from pathlib import Path

from pointsman.web.perfetto import write_trace
from pointsman.web.timeline import timeline_of
from tests.web.test_timeline import BUSY, film_of


def test_the_perfetto_trace_matches_the_film(tmp_path: Path) -> None:
    """Slices lie within their request's slice, slices of a track do not overlap, and counters equal the film's."""
    film, path = film_of(BUSY), tmp_path / "run.json"
    write_trace(film, path)
    trace = json.loads(path.read_text())
    timeline, spans = timeline_of(film)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    whole = [event for event in slices if "args" in event]
    assert [event["name"] for event in whole] == ["r0", "r1", "r2", "r3"]
    assert len(slices) == len(whole) + len(spans)
    for event in slices:
        around = [one for one in whole if one["tid"] == event["tid"]]
        assert any(one["ts"] <= event["ts"] <= event["ts"] + event["dur"] <= one["ts"] + one["dur"] for one in around)
    running = [
        event["args"]["value"] for event in trace["traceEvents"] if event["ph"] == "C" and event["name"] == "running"
    ]
    assert running == timeline.num_running.tolist()
    marks = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert len(marks) == timeline.num_preemptions.sum() > 0
    assert all(" is preempted: " in mark and "was the last one admitted" in mark for mark in marks)


def test_a_perfetto_trace_has_bounded_numbers_of_requests_and_points(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    write_trace(film_of(BUSY), path, max_requests=2, max_points=10)
    trace = json.loads(path.read_text())
    assert trace["otherData"] == {"requests": 4, "requests_shown": 2}
    events = trace["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X" and "args" in event} == {"r0", "r1"}
    assert 5 <= sum(event["ph"] == "C" and event["name"] == "waiting" for event in events) <= 10
