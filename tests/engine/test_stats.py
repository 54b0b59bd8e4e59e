"""The statistics line: its content, and when it is logged."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest

from pointsman.engine import LLM, Engine, SamplingParams
from pointsman.engine.counters import EngineCounters
from pointsman.engine.model.loader import wrap_model
from pointsman.engine.stats import EngineStats, StatsLogger, read_stats, stats_line
from tests.engine.tiny_models import FAMILIES, build

SIXTEEN = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


class Clock:
    """A clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine() -> Engine:
    return Engine(wrap_model(build(FAMILIES["qwen3"](), seed=1)), num_blocks=64, block_size=4, max_num_seqs=2)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines(engine: Engine, clock: Clock) -> tuple[list[str], StatsLogger]:
    told: list[str] = []
    return told, StatsLogger(engine, 10.0, clock=clock, emit=told.append)


def steps(engine: Engine, number: int | None = None) -> None:
    while engine.has_unfinished_requests() and number != 0:
        engine.step()
        number = None if number is None else number - 1


def number_in(line: str, name: str) -> float:
    found = re.search(rf"{name}: ([\d.,]+)", line)
    assert found is not None, f"no {name!r} in {line!r}"
    return float(found[1].replace(",", "").rstrip("."))


def test_stats_line_has_the_rates_between_two_readings(engine: Engine) -> None:
    before = read_stats(engine, 100.0)
    after = EngineStats(
        104.0,
        EngineCounters(num_steps=50, num_prompt_tokens=1000, num_generated_tokens=60, scheduler_time=0.002),
        replace(
            before.scheduler,
            num_running=3,
            num_waiting=7,
            kv_cache_usage=0.4567,
            num_preemptions=2,
            prefix_queries=4000,
            prefix_hits=3000,
            resumed_prefix_hits=16,
        ),
    )
    assert stats_line(before, after) == (
        "Avg prompt throughput: 250.0 tokens/s, Avg generation throughput: 15.0 tokens/s, Running: 3 reqs, "
        "Waiting: 7 reqs, KV cache usage: 45.7%, Prefix cache hit rate: 75.0%, Preemptions: 2, Scheduler: 40 us/step, "
        "Prefix cache saved: 3,016 tokens"
    )
    counters = replace(after.counters, num_external_queries=400, num_external_hits=100)
    outside = replace(after, counters=counters, has_external_kv=True)
    assert "75.0%, External prefix cache hit rate: 25.0%, Preemptions: 2" in stats_line(before, outside)
    later = replace(after, time=108.0)
    assert "hit rate: n/a, Preemptions: 0, Scheduler: n/a, Prefix cache saved: 0" in stats_line(after, later)
    with pytest.raises(ValueError, match="give the earlier reading first"):
        stats_line(later, later)


def test_a_stats_line_reports_the_work_of_its_interval(
    engine: Engine, clock: Clock, lines: tuple[list[str], StatsLogger]
) -> None:
    told, log = lines
    for name in "abc":
        engine.add_request(name, [5] * 20, SIXTEEN)
    steps(engine, 4)
    clock.now += 9.0
    assert not log.tick() and told == [], "too early"
    clock.now += 1.0
    assert log.tick()
    steps(engine)
    clock.now += 20.0
    assert log.tick() and not log.tick()
    first, second = told
    assert number_in(first, "Running") == 2 and number_in(first, "Waiting") == 1
    assert number_in(second, "Running") == number_in(second, "Waiting") == 0
    for name, total in (("Avg prompt throughput", 60), ("Avg generation throughput", 48)):
        assert number_in(first, name) * 10 + number_in(second, name) * 20 == pytest.approx(total, abs=1.5)
    assert number_in(first, "KV cache usage") > 0 and number_in(second, "KV cache usage") == 0
    stats = engine.scheduler.stats()
    saved = number_in(first, "Prefix cache saved") + number_in(second, "Prefix cache saved")
    assert saved == stats.prefix_hits > 0


def test_an_idle_engine_logs_no_more_than_one_last_stats_line(
    engine: Engine, clock: Clock, lines: tuple[list[str], StatsLogger]
) -> None:
    told, log = lines
    assert log.seconds_to_next_line() is None, "without activity no line is due"
    clock.now += 50.0
    assert not log.tick()
    engine.add_request("a", [5] * 8, SIXTEEN)
    steps(engine)
    clock.now += 4.0
    assert log.seconds_to_next_line() == pytest.approx(6.0)
    clock.now += 6.0
    assert log.seconds_to_next_line() == 0.0 and log.tick() and log.seconds_to_next_line() is None
    for _ in range(5):
        clock.now += 1000.0
        assert not log.tick()
    engine.add_request("b", [5] * 8, SIXTEEN)
    steps(engine)
    clock.now += 10.0
    assert log.tick()
    assert number_in(told[1], "Avg generation throughput") == 1.6, "the idle time counts in the rate"
    assert len(told) == 2


def test_waiting_requests_are_reported_even_without_steps(
    engine: Engine, clock: Clock, lines: tuple[list[str], StatsLogger]
) -> None:
    told, log = lines
    engine.add_request("a", [5] * 8, SIXTEEN)
    clock.now += 10.0
    assert log.tick() and number_in(told[0], "Waiting") == 1


def test_flush_logs_a_stats_line_before_it_is_due(
    engine: Engine, clock: Clock, lines: tuple[list[str], StatsLogger]
) -> None:
    told, log = lines
    engine.add_request("a", [5] * 8, SIXTEEN)
    steps(engine)
    clock.now += 2.0
    assert log.flush() and not log.flush()
    assert number_in(told[0], "Avg generation throughput") == 8.0


@pytest.mark.parametrize(("seconds", "lines"), [(0.9, 0), (1.1, 1)])
def test_finish_logs_a_stats_line_unless_the_run_was_short(
    engine: Engine, clock: Clock, lines: int, seconds: float
) -> None:
    told: list[str] = []
    log = StatsLogger(engine, 10.0, clock=clock, emit=told.append)
    engine.add_request("a", [5] * 8, SIXTEEN)
    steps(engine)
    clock.now += seconds
    assert log.finish() == bool(lines) and len(told) == lines


def test_llm_logs_statistics_of_a_run_shorter_than_the_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = LLM(wrap_model(build(FAMILIES["qwen3"](), seed=1)), num_blocks=64, block_size=4, log_stats_interval=1000.0)
    prompt = {"prompt_token_ids": [5] * 8}
    with caplog.at_level(logging.INFO, logger="pointsman.engine.stats"):
        llm.generate(prompt, SIXTEEN, use_tqdm=False)
        assert "throughput" not in caplog.text, "a short run was logged"
        monkeypatch.setattr("pointsman.engine.stats.SHORT_RUN", 0.0)
        llm.generate(prompt, SIXTEEN, use_tqdm=False)
    assert caplog.text.count("throughput: ") == 2  # of prompts and of generation, in one line


def test_stats_lines_go_to_the_log_by_default(engine: Engine, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    log = StatsLogger(engine, 10.0, clock=clock)
    engine.add_request("a", [5] * 8, SIXTEEN)
    clock.now += 10.0
    with caplog.at_level(logging.INFO, logger="pointsman.engine.stats"):
        log.tick()
    assert "Waiting: 1 reqs" in caplog.text


@pytest.mark.parametrize("interval", [0, -1.0, float("nan")])
def test_a_stats_interval_must_be_positive(engine: Engine, interval: float) -> None:
    with pytest.raises(ValueError, match="must be above 0 seconds"):
        StatsLogger(engine, interval)
