"""The figures of `vllm_engine.py` are per token, and medians of pairs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.vllm_engine import IDLE_SECONDS, Side, Turn, check_same_tokens, figures_of


def turn(core: float, tokens: int = 1000) -> Turn:
    return {"core": core, "tokens": tokens, "steps": 100, "scheduler": 0.0, "seconds": 2 * core}


def side(turns: list[Turn]) -> Side:
    no_worker: Any = None
    timed = [turn(4.0) | {"scheduler": 1.0}]
    return Side(no_worker, "", turns, timed, idle=[0.3, 0.01 * IDLE_SECONDS, 0.0])


def test_a_ratio_is_of_cpu_time_per_token_and_its_median_of_the_pairs() -> None:
    ours = side([turn(1.0), turn(2.0, tokens=2000), turn(3.0)])
    figures = figures_of({"pointsman": ours, "vllm": side([turn(2.0)] * 3)})
    assert figures["ratios"] == [0.5, 0.5, 1.5]
    assert figures["ratio"] == 0.5
    assert figures["seconds_ratio"] == 1.0  # by the clock, whatever came of it


def test_figures_of_a_side_are_per_token_and_per_step() -> None:
    figures = figures_of({"pointsman": side([turn(1.0), turn(2.0), turn(3.0)]), "vllm": side([turn(4.0)] * 3)})
    assert figures["pointsman"] == {
        "cpu_seconds_per_1000_tokens": 2.0,
        "step_us": pytest.approx(20_000),
        "scheduler_us": pytest.approx(10_000),
        "scheduler_share": 0.25,
        "seconds": 4.0,
        "idle_ms": 10.0,
    }


def test_other_tokens_end_the_benchmark() -> None:
    check_same_tokens({"pointsman": {"digest": "a"}, "vllm": {"digest": "a"}})
    with pytest.raises(RuntimeError, match="other tokens"):
        check_same_tokens({"pointsman": {"digest": "a"}, "vllm": {"digest": "b"}})
