"""Requests without progress are reported: once per stall in the log, and as a number."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest

from pointsman.core import ParkReason, PauseMode, Scheduler
from pointsman.engine import AsyncEngine, Engine, SamplingParams
from pointsman.engine.model.loaded import LoadedModel
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.stats import read_stats
from pointsman.engine.watchdog import MAX_LINES, EngineWatchdog
from tests.core.helpers import Host
from tests.engine.tiny_models import FAMILIES, build


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return wrap_model(build(FAMILIES["qwen3"](), seed=1))


class Watched:
    """A scheduler with a watchdog, and a clock that tests set."""

    def __init__(self, seconds: float, **config: Any) -> None:
        self.host = Host(**config)
        self.dog = EngineWatchdog(self.host.scheduler, seconds, lambda: self.host.now)

    def look(self, later: float) -> None:
        self.host.now += later
        self.dog.tick()


def test_a_stall_is_logged_once_and_counted_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(8.0, max_num_seqs=1)
    watched.host.add("runs", 4)
    watched.host.add("waits", 4)
    watched.host.step()
    for _ in range(12):
        watched.host.step()
        watched.dog.tick()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1 and told[0].startswith("no progress for ") and "waits for 1 more sequence slot" in told[0]
    assert "Held by runs" in told[0]
    assert watched.dog.num_stalled == 1
    watched.host.abort("runs")
    watched.host.step()
    watched.look(2.0)
    assert watched.dog.num_stalled == 0
    watched.look(4.0)
    watched.look(8.0)
    assert watched.dog.num_stalled == 1
    assert len(caplog.records) == 2, "a separate stall, for another reason"


def test_the_watchdog_checks_four_times_per_period(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(8.0)
    asked: list[float] = []
    monkeypatch.setattr(Scheduler, "stalled", lambda _, now, seconds: asked.append(now) or [])
    for _ in range(17):
        watched.look(0.5)
    assert asked == [0.5, 2.5, 4.5, 6.5, 8.5]


def test_many_stalls_write_a_bounded_number_of_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(1.0)
    for index in range(MAX_LINES + 5):
        watched.host.add(f"r{index}", 1)
    watched.dog.tick()
    watched.look(1.0)
    assert len(caplog.records) == MAX_LINES + 1
    assert "5 further requests" in caplog.records[-1].getMessage()
    assert watched.dog.num_stalled == MAX_LINES + 5


def test_a_paused_request_is_not_stalled(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(1.0)
    watched.host.add("a", 1)
    watched.host.scheduler.pause(watched.host.now, PauseMode.ALL)
    for _ in range(4):
        watched.look(1.0)
    assert not caplog.records and watched.dog.num_stalled == 0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), "1", True, None])
def test_invalid_watchdog_seconds_are_refused(loaded: LoadedModel, seconds: Any) -> None:
    with pytest.raises(ValueError, match="watchdog_seconds is"):
        Engine(
            loaded,
            num_blocks=8,
            block_size=4,
            watchdog_seconds=seconds,
        )


def test_an_engine_logs_a_stalled_waiting_request(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="pointsman.engine.watchdog")
    now = 0.0
    engine = Engine(loaded, num_blocks=64, block_size=4, max_num_seqs=1, watchdog_seconds=3.0, clock=lambda: now)
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    for request_id in ("first", "second"):
        engine.add_request(request_id, [1, 2, 3], params)
    for _ in range(8):
        engine.step()
        now += 1.0
    assert [record.getMessage().split(":")[1].split()[0] for record in caplog.records] == ["second"]
    assert read_stats(engine, now).num_stalled == 1
    while engine.has_unfinished_requests():
        engine.step()
        now += 1.0
    assert read_stats(engine, now).num_stalled == 0


def test_an_idle_engine_is_watched_too(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """The only request is parked: no step is scheduled, and the thread waits for messages."""
    inner = Engine(loaded, num_blocks=64, block_size=4, watchdog_seconds=0.2)

    async def check() -> None:
        async with AsyncEngine.from_engine(inner, log_stats_interval=None) as engine:
            params = SamplingParams(max_tokens=50, temperature=0.0, ignore_eos=True)
            outputs = engine.generate([1, 2, 3], params, request_id="a")
            await anext(outputs)
            await engine._call(lambda e: e.scheduler.park("a", ParkReason.GRAMMAR, e.clock()))
            deadline = time.monotonic() + 20.0
            while "its grammar is being compiled" not in caplog.text and time.monotonic() < deadline:
                await asyncio.sleep(0.05)

    asyncio.run(check())
    assert "its grammar is being compiled" in caplog.text
