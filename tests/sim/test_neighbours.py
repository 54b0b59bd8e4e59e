"""Neighbours: the target that limits a capacity, and other limits of a step that raise it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.capacity import Capacity, Question, find_capacity
from pointsman.sim.errors import ModelTooLarge
from pointsman.sim.neighbours import BUDGET, MIN_GAIN, SEQUENCES, Neighbour, best_neighbour, limiting_target
from pointsman.sim.report.summary import Targets
from pointsman.sim.samples import GeneratedSamples
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.trial import Judge
from pointsman.sim.workers import workers
from pointsman.sim.workload import Constant, ConstantArrivals, Lengths

PREFILL = LinearStepTime(per_step=0.005, per_token=1e-4)
"""A step with a prompt of 2,000 tokens takes 205 ms, one with a chunk of 256 tokens 31 ms."""
LONG_PROMPTS = GeneratedSamples(ConstantArrivals(1), Lengths(Constant(2000), Constant(6)))
SHORT_PROMPTS = GeneratedSamples(ConstantArrivals(1), Lengths(Constant(16), Constant(10)))
CONFIG = SchedulerConfig(num_blocks=2000, max_model_len=4096, max_num_seqs=32, max_num_batched_tokens=2048)
BOTH = {BUDGET, SEQUENCES}


def question(targets: Targets, config: SchedulerConfig = CONFIG, **values: Any) -> Question:
    given = {"samples": LONG_PROMPTS, "num_requests": 30, "max_samples": 2, "within": 0.5, "share": 0.9, **values}
    return Question(config=config, targets=targets, **given)


def neighbour_of(
    asked: Question, free: Collection[str] = frozenset(BOTH), sized: Any = lambda config: config
) -> tuple[Capacity, Neighbour | None]:
    judge = Judge(source=asked.samples, step_times=(PREFILL,), targets=asked.targets)  # type: ignore[arg-type]
    with workers(judge) as runner:
        found = find_capacity(asked, runner)
        return found, best_neighbour(asked, found, runner, free, sized)


def test_a_smaller_budget_is_found_if_whole_prompts_make_gaps_too_long() -> None:
    asked = question(Targets(ttft=5.0, itl=0.06, itl_of="gap"))
    found, best = neighbour_of(asked)
    assert limiting_target(found, asked.targets) == "itl"
    assert best is not None and best.setting == BUDGET
    assert best.value == 512  # a step of 512 tokens takes 56 ms
    assert best.config == CONFIG.replace(max_num_batched_tokens=best.value)
    assert best.rough.interval is not None and found.interval is not None
    assert best.rough.interval.value > (1 + MIN_GAIN) * found.interval.value


def test_limits_that_are_given_stay_as_they_are() -> None:
    targets = Targets(ttft=5.0, itl=0.06, itl_of="gap")
    assert neighbour_of(question(targets), free=())[1] is None
    _, best = neighbour_of(question(targets), free={SEQUENCES})
    assert best is None or best.setting == SEQUENCES


def test_neighbours_that_do_not_fit_the_device_are_passed_over() -> None:
    def sized(config: SchedulerConfig) -> SchedulerConfig:
        if config.max_num_batched_tokens < 1024:
            raise ModelTooLarge("no room")
        return config

    _, best = neighbour_of(question(Targets(ttft=5.0, itl=0.06, itl_of="gap")), {BUDGET}, sized)
    assert best is None


@pytest.mark.long
def test_more_sequences_are_found_if_all_of_a_step_are_taken() -> None:
    """Ten requests at a time keep the others waiting, though a step takes hardly longer with more of them."""
    asked = question(Targets(ttft=0.1), CONFIG.replace(max_num_seqs=4), samples=SHORT_PROMPTS, num_requests=60)
    found, best = neighbour_of(asked)
    assert limiting_target(found, asked.targets) == "ttft"
    assert best is not None and best.setting == SEQUENCES and best.value in (8, 16)


def test_ttft_alone_needs_no_neighbour_while_steps_have_room() -> None:
    asked = question(Targets(ttft=0.5))
    found, best = neighbour_of(asked)
    assert limiting_target(found, asked.targets) == "ttft"
    assert best is None


def test_a_search_for_replicas_has_no_neighbours() -> None:
    asked = question(Targets(ttft=5.0, itl=0.06, itl_of="gap"), unit="replicas", num_replicas=2, load=1.0)
    assert neighbour_of(asked)[1] is None


@pytest.mark.parametrize("ttft", [0.1, 50.0])
def test_the_limiting_target_is_the_one_that_is_exceeded_most(ttft: float) -> None:
    targets = Targets(ttft=ttft, e2e=1.0)
    found, _ = neighbour_of(question(targets), free=())
    assert found.beyond is not None
    figures = found.beyond.figures
    assert figures.ttft_p99 is not None and figures.e2e_p99 is not None
    expected = "ttft" if figures.ttft_p99 / ttft > figures.e2e_p99 else "e2e"
    assert limiting_target(found, targets) == expected
    assert limiting_target(replace(found, loads=[]), targets) is None
