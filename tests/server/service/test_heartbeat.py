"""Heartbeat: when an engine is slow, stalled or late, by a clock that the tests advance."""

from __future__ import annotations

import pytest

from pointsman.engine.pulse import PulseReading
from pointsman.server.service.heartbeat import INTERVAL, SECONDS_TO_HALVE, STALLED_AFTER, Heartbeat


class Watched:
    """An engine that is asked every second, as `EngineClient` does it, by a clock of its own."""

    def __init__(self, timeout: float = 30.0) -> None:
        self.now = 1000.0
        self.heartbeat = Heartbeat(timeout, lambda: self.now)
        self.is_asked = False

    def answer(self, longest: float = 0.0, mean: float | None = None) -> None:
        self.heartbeat.note_sign_of_life()
        self.heartbeat.note_answer(PulseReading(longest, mean))
        self.is_asked = False

    def tick(self, seconds: int = 1) -> None:
        """Let seconds pass in which the API process runs."""
        for _ in range(seconds):
            self.now += INTERVAL
            self.is_asked = self.heartbeat.start_question() or self.is_asked

    def tick_and_answer(self, seconds: int) -> None:
        for _ in range(seconds):
            self.tick()
            self.answer()

    @property
    def state(self) -> str:
        one = self.heartbeat
        return "late" if one.is_late else "stalled" if one.is_stalled else "slow" if one.is_slow else "well"


def test_an_engine_is_slow_then_stalled_then_late() -> None:
    engine = Watched()
    engine.tick_and_answer(5)
    assert engine.state == "well"
    states = []
    for _ in range(33):
        engine.tick()
        states.append(engine.state)
    assert states[:3] == ["well", "well", "slow"]
    assert states.index("stalled") == STALLED_AFTER + 1
    assert states.index("late") == 31


def test_idle_engine_is_never_late() -> None:
    engine = Watched(2.0)
    for _ in range(3600):
        engine.tick()
        assert engine.state == "well"
        engine.answer()


def test_any_sign_of_life_resets_the_silence() -> None:
    engine = Watched(5.0)
    engine.tick(5)
    assert engine.state == "slow"
    for _ in range(100):  # steps of a busy engine, or beats of a long step
        engine.heartbeat.note_sign_of_life()
        engine.tick()
        assert engine.state == "well"
    engine.tick(6)
    assert engine.state == "late"


def test_limit_is_at_least_ten_times_the_longest_silence_in_a_step() -> None:
    engine = Watched()
    engine.tick()
    engine.answer(longest=8.0, mean=2.0)
    assert engine.heartbeat.limit == 80.0
    engine.tick(9)
    assert engine.heartbeat.seconds_of_silence == 8.0 and not engine.heartbeat.is_slow, "five steps of two seconds"
    engine.tick(70)
    assert not engine.heartbeat.is_late
    engine.tick(4)
    assert engine.heartbeat.is_late


def test_accidental_long_silence_is_forgotten() -> None:
    """A process that was stopped for 29 s and continued has measured a step of 29 s."""
    engine = Watched()
    engine.tick()
    engine.answer(longest=29.0)
    assert engine.heartbeat.limit == 290.0
    engine.tick_and_answer(int(SECONDS_TO_HALVE))
    assert engine.heartbeat.limit == pytest.approx(145.0)
    engine.tick_and_answer(int(3 * SECONDS_TO_HALVE))
    assert engine.heartbeat.limit == 30.0


def test_an_announced_silence_is_allowed_until_the_next_sign() -> None:
    engine = Watched(3.0)
    engine.tick()
    engine.heartbeat.note_sign_of_life(600.0)
    engine.tick(500)
    assert not engine.heartbeat.is_late and engine.heartbeat.is_slow, "other engines should get the requests"
    engine.heartbeat.note_sign_of_life()
    engine.tick(5)
    assert engine.heartbeat.is_late


def test_time_while_the_api_process_is_stopped_is_not_silence() -> None:
    engine = Watched(2.0)
    engine.tick()
    engine.now += 3600.0
    assert engine.heartbeat.seconds_of_silence == INTERVAL and not engine.heartbeat.is_late
    engine.answer()
    engine.now += 3600.0
    engine.tick_and_answer(3)
    assert engine.state == "well"


def test_with_a_timeout_of_0_no_engine_is_late() -> None:
    engine = Watched(0.0)
    engine.tick(100_000)
    assert engine.state == "stalled"


def test_answer_of_an_ending_engine_has_no_step_times() -> None:
    engine = Watched()
    engine.tick()
    engine.heartbeat.note_answer(None)
    assert engine.heartbeat.limit == 30.0 and engine.state == "well"
