"""The figures of `vllm_engine.py` are per token, and medians of pairs."""

from __future__ import annotations

import pytest

from benchmarks.vllm_engine import Turn, figures_of


def turn(core: float, tokens: int = 1000) -> Turn:
    return {"core": core, "tokens": tokens, "steps": 100, "scheduler": core / 4, "seconds": 2 * core}


def test_a_ratio_is_of_cpu_time_per_token_and_its_median_of_the_pairs() -> None:
    ours = [turn(1.0), turn(2.0, tokens=2000), turn(3.0)]
    own = [turn(2.0), turn(2.0), turn(2.0)]
    figures = figures_of({"pointsman": ours, "vllm": own})
    assert figures["ratios"] == [0.5, 0.5, 1.5]
    assert figures["ratio"] == 0.5
    assert figures["seconds_ratio"] == 1.0  # by the clock, whatever came of it


def test_figures_of_a_side_are_per_token_and_per_step() -> None:
    figures = figures_of({"pointsman": [turn(1.0), turn(2.0), turn(3.0)], "vllm": [turn(4.0)] * 3})
    assert figures["pointsman"] == {
        "cpu_seconds_per_1000_tokens": 2.0,
        "step_us": pytest.approx(20_000),
        "scheduler_us": pytest.approx(5_000),
        "scheduler_share": 0.25,
        "seconds": 4.0,
    }
