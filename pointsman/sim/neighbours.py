"""Neighbours: other limits of a step, tried where the given ones are why a service misses its targets.

A step takes as long as its tokens need, and each request in it waits for it. So the token budget and the number of
sequences of a step bound the time between two tokens, and their defaults are chosen for throughput.

    ITL limits the capacity    smaller token budgets are tried, then fewer sequences
    TTFT does, and the sequences of all steps are full    more sequences are tried

Each is a short search for the capacity, of limits that are a factor of four apart, then of two beside the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from pointsman.core import ConfigError, SchedulerConfig
from pointsman.sim.capacity import Capacity, Question, find_capacity
from pointsman.sim.errors import ModelTooLarge
from pointsman.sim.report.summary import Targets
from pointsman.sim.trial import itl_p99
from pointsman.sim.workers import Runner

BUDGET, SEQUENCES = "max_num_batched_tokens", "max_num_seqs"
MIN_BUDGET, MIN_SEQUENCES, MAX_SEQUENCES = 256, 8, 4096
MIN_GAIN = 0.1
"""Relative gain below which a neighbour is not worth a change: about the error of a short search."""
_NUM_SAMPLES, _MAX_SIMULATED, _WITHIN = 4, 10_000, 0.3
"""Of a short search: number of samples, requests after which it takes no more, and wanted accuracy."""
_FULL = 0.8
"""Share of all sequences from which steps count as full."""


Limiting = Literal["ttft", "itl", "e2e"]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A configuration that differs in one limit of a step."""

    setting: str
    value: int
    config: SchedulerConfig
    rough: Capacity
    """The result of the short search."""


def limiting_target(found: Capacity, targets: Targets) -> Limiting | None:
    """The target that limits a capacity: at the lowest load that misses the targets, the one whose figure exceeds it
    most. None: no load misses them."""
    at = found.beyond
    if at is None:
        return None
    if targets.pooled_itl is not None and found.is_of_gaps:
        return "itl"
    figures = at.figures
    itl = None if targets.pooled_itl is not None else targets.itl
    values: list[tuple[Limiting, float | None, float | None]] = [
        ("ttft", targets.ttft, figures.ttft_p99),
        ("itl", itl, itl_p99(figures, targets)),
        ("e2e", targets.e2e, figures.e2e_p99),
    ]
    ratios = [((value or 0.0) / target, name) for name, target, value in values if target is not None]
    return max(ratios)[1] if ratios else None


def best_neighbour(
    question: Question,
    found: Capacity,
    runner: Runner,
    free: Collection[str],
    sized: Callable[[SchedulerConfig], SchedulerConfig] = lambda config: config,
) -> Neighbour | None:
    """The neighbour with the highest capacity, if it exceeds that of the question's configuration by `MIN_GAIN`.

    Args:
        question: as asked, for requests a second or users.
        found: its result, or that of `short_search`.
        free: names of the limits that may be changed.
        sized: function that adds the number of blocks to a configuration; may raise `ModelTooLarge`.
    """
    if found.interval is None or question.unit == "replicas":
        return None
    least = found.interval.value * (1 + MIN_GAIN)
    for setting, coarse in _candidates(question.config, found, question.targets, free):
        tried: dict[int, Neighbour] = {}
        for value in coarse:
            _try(question, found, runner, sized, Change(setting, value), tried)
        if not tried:
            continue
        best = max(tried.values(), key=_capacity)
        for value in (2 * best.value, best.value // 2):
            if value not in tried and coarse[-1] <= value < getattr(question.config, setting):
                _try(question, found, runner, sized, Change(setting, value), tried)
        best = max(tried.values(), key=_capacity)
        if _capacity(best) > least:
            return best
    return None


def short_search(question: Question) -> Question:
    """The same question for a search that only compares settings: with few samples and one model of step times."""
    return replace(
        question,
        max_samples=min(question.max_samples, _NUM_SAMPLES),
        max_simulated=min(question.max_simulated, _MAX_SIMULATED),
        within=max(question.within, _WITHIN),
        num_models=1,
        on_load=None,
    )


class Change(NamedTuple):
    """Another value of a limit of a step."""

    setting: str
    value: int


def _capacity(neighbour: Neighbour) -> float:
    assert neighbour.rough.interval is not None
    return neighbour.rough.interval.value


def _try(
    question: Question,
    found: Capacity,
    runner: Runner,
    sized: Callable[[SchedulerConfig], SchedulerConfig],
    change: Change,
    tried: dict[int, Neighbour],
) -> None:
    """Add the neighbour with a change to `tried`, unless it fits no device or contradicts the other settings."""
    try:
        config = sized(question.config.replace(**{change.setting: change.value}))
    except (ConfigError, ModelTooLarge):
        return
    rough = find_capacity(short_search(replace(question, config=config, progress=None)), runner)
    found.num_simulated += rough.num_simulated
    if rough.interval is None or not rough.is_complete:
        raise KeyboardInterrupt
    tried[change.value] = Neighbour(change.setting, change.value, config, rough)


def _candidates(
    config: SchedulerConfig, found: Capacity, targets: Targets, free: Collection[str]
) -> Iterator[tuple[str, list[int]]]:
    """The limits to try, each with values a factor of four apart, the farthest one last."""
    limiting = limiting_target(found, targets)
    if limiting == "itl":
        if BUDGET in free:
            yield BUDGET, _quarters(config.max_num_batched_tokens, max(MIN_BUDGET, config.max_num_seqs))
        if SEQUENCES in free:
            yield SEQUENCES, _quarters(config.max_num_seqs, MIN_SEQUENCES)
    elif limiting == "ttft" and SEQUENCES in free and _has_full_steps(config, found):
        most = min(config.max_num_batched_tokens, MAX_SEQUENCES)
        values = [config.max_num_seqs << place for place in (1, 2) if config.max_num_seqs << place <= most]
        yield SEQUENCES, values


def _quarters(value: int, least: int) -> list[int]:
    """A quarter of `value`, a quarter of that, and so on, as powers of two, down to `least`."""
    exponents = range(math.ceil(math.log2(value)) - 2, -1, -2)
    return [2**exponent for exponent in exponents if 2**exponent >= least]


def _has_full_steps(config: SchedulerConfig, found: Capacity) -> bool:
    """Whether as many requests run as steps have sequences, by Little's law, at the lowest load that misses."""
    at = found.beyond
    if at is None or at.e2e_mean is None:
        return False
    return at.rate * at.e2e_mean / at.num_replicas >= _FULL * config.max_num_seqs
