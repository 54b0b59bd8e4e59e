"""Loads by time, and the hull of a log."""

from __future__ import annotations

import pytest

from pointsman.sim.hull import Hull, SeenLoads, WatchedStepTime
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import StepLoad
from pointsman.sim.workload import OpenLoop
from tests.sim.measured_logs import SETTINGS, SMALL, measured_log


def decodes(rows: int) -> StepLoad:
    return StepLoad(rows, rows, 100 * rows, 100 * rows, rows)


def seen(*steps: tuple[int, float]) -> SeenLoads:
    found = SeenLoads()
    for rows, seconds in steps:
        found.add_step(decodes(rows), seconds)
    return found


def test_a_moment_of_light_load_is_not_in_the_hull_of_a_full_run() -> None:
    assert seen((1, 0.05), (32, 9.95)).hull().ranges["num_rows"] == (32, 32)
    assert seen((1, 0.2), (32, 9.8)).hull().ranges["num_rows"] == (1, 32)


def test_a_moment_outside_the_hull_is_no_extrapolation() -> None:
    hull = seen((16, 5.0), (32, 5.0)).hull()
    assert hull.outside(seen((1, 0.1), (32, 9.9))) == []
    outside = hull.outside(seen((1, 0.5), (32, 9.0), (64, 0.5)))
    assert {(each.part, each.is_above) for each in outside} >= {("num_rows", False), ("num_rows", True)}
    assert all(each.share == pytest.approx(0.05) for each in outside)


def test_a_run_of_decodes_counts_like_its_steps() -> None:
    one, many = SeenLoads(), SeenLoads()
    many.add_decodes(8, 8000, 400, 4.0)
    for step in range(400):
        one.add_step(StepLoad(8, 8, 8000 + 8 * step, 8000 + 8 * step, 8), 0.01)
    assert many.seconds == pytest.approx(one.seconds)
    for part, (low, high) in one.hull().ranges.items():
        assert many.hull().ranges[part] == pytest.approx((low, high), rel=0.15)


def test_watched_steps_last_as_long_as_the_simulation_is_busy() -> None:
    """Decodes that a replica plans, but an arrival cuts off, do not count."""
    log = measured_log(40, 6.0, output=60)
    watched = WatchedStepTime(SMALL)
    config = SETTINGS.config(10_000, 40).replace(max_steps_in_flight=1)
    outcome = simulate(OpenLoop([each.request for each in log]), config, watched)
    busy = sum(event.end - event.begin for timeline in outcome.timelines for event in timeline.events)
    assert watched.seen.seconds == pytest.approx(busy, rel=1e-6)


def test_hulls_of_added_loads_are_those_of_all_loads() -> None:
    both = seen((4, 1.0))
    both.add(seen((9, 1.0)))
    assert both.hull() == seen((4, 1.0), (9, 1.0)).hull() == Hull.of_loads([decodes(4), decodes(9)])
