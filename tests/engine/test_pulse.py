"""The pulse of an engine's thread: measurements and reports during long steps."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pointsman.engine import Engine, SamplingParams, pulse
from pointsman.engine.kernels import runtime
from pointsman.engine.pulse import SECONDS_BETWEEN_BEATS, SECONDS_TO_COMPILE, Pulse, PulseReading, beat


@pytest.fixture
def wait(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Advance the fake clock."""
    now = 100.0

    def add(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(pulse.time, "perf_counter", lambda: now)
    return add


def with_pulse(measured: Pulse, work: Callable[[], Any]) -> None:
    """Run a function in a context that has a pulse."""

    def run() -> None:
        measured.install()
        work()

    contextvars.copy_context().run(run)


def test_the_longest_time_between_beats_is_measured_within_steps(wait: Callable[[float], None]) -> None:
    measured = Pulse()
    assert measured.take_reading() == PulseReading(0.0, None)
    for silence in (0.5, 2.0, 0.25):
        wait(1000.0)  # idle
        measured.begin()
        wait(0.125)
        measured.beat()
        wait(silence)
        measured.end()
    assert measured.take_reading() == PulseReading(2.0, pytest.approx((2.75 + 3 * 0.125) / 3))
    assert measured.take_reading() == PulseReading(0.0, None), "each reading resets the measurements"
    wait(1000.0)
    measured.beat()  # outside of a step
    assert measured.take_reading().longest == 0.0


def test_an_announced_time_without_beats_does_not_count(wait: Callable[[float], None]) -> None:
    reported: list[float] = []
    measured = Pulse(reported.append)
    measured.begin()
    measured.beat(60.0)
    wait(50.0)
    measured.beat()
    wait(3.0)
    measured.end()
    assert reported == [60.0, 0.0]
    assert measured.take_reading().longest == 3.0
    measured.begin()
    measured.beat(60.0)
    wait(50.0)
    measured.end()
    measured.begin()
    wait(1.0)
    measured.end()
    assert measured.take_reading().longest == 1.0, "the end of a step also ends a silence"


def test_beats_are_not_reported_more_often_than_needed(wait: Callable[[float], None]) -> None:
    reported: list[float] = []
    measured = Pulse(reported.append)
    measured.begin()
    for _ in range(1000):
        wait(SECONDS_BETWEEN_BEATS / 100)
        measured.beat()
    assert 9 <= len(reported) <= 11


def test_a_beat_in_a_thread_without_a_pulse_does_nothing() -> None:
    beat()
    beat(60.0)


def test_every_layer_of_a_step_reports_a_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    monkeypatch.setattr(pulse, "SECONDS_BETWEEN_BEATS", -1.0)
    engine = Engine("demo", num_blocks=16, max_model_len=64, num_threads=1)
    engine.add_request("a", [5, 6, 7], SamplingParams(max_tokens=2))
    measured = Pulse(beats.append)
    measured.begin()
    with_pulse(measured, engine.step)
    assert beats.count(0.0) >= engine.model_config.num_hidden_layers


def test_compiling_a_kernel_announces_a_time_without_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[float] = []
    monkeypatch.setattr(runtime, "_compile", partial(compiled, beats))
    with_pulse(Pulse(beats.append), lambda: runtime.Kernel(test_compiling_a_kernel_announces_a_time_without_beats))
    assert beats == [SECONDS_TO_COMPILE, -1.0, 0.0]


def compiled(beats: list[float], _: object) -> Any:
    class Compiled:
        address = 0

    beats.append(-1.0)
    return Compiled
