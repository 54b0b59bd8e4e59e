"""With the preset "vllm", our scheduler decides like vLLM's own: step by step, on random workloads.

The long form compares more workloads. vllm_decisions.py lists the exceptions.
"""

from __future__ import annotations

import pytest

from tests.forms import seeds
from tests.integrations.vllm_process import NEEDS_VLLM, decided_alike

WORKLOADS = seeds(20, 330)
SESSIONS = seeds(6, 200)
GRAMMARS = seeds(10, 200)
INTERVALS = seeds(10, 300)
MET_PER_100 = {
    "steps": 5_000,
    "preemptions": 150,
    "hits": 150,
    "chunks": 2_000,
    "stopped": 500,
    "aborts": 100,
    "asynchronous": 25,
    "with adapters": 10,
    "with drafts": 20,
    "drafts": 1_500,
    "reads": 100_000,
    "with work": 500,
    "told without blocks": 4,
}
"""Minimum number of each event in these workloads, so that the test cannot pass without them."""

pytestmark = [*NEEDS_VLLM, pytest.mark.next_vllm]


def test_every_scheduling_decision_equals_vllms() -> None:
    tally = decided_alike(WORKLOADS, met_per_100=MET_PER_100)
    for what in ("resumed in chunks", "gave up drafts", "resumed a block later"):
        assert tally.get(what, 0) <= len(WORKLOADS) // 10, "the comparison of these workloads ends there"


def test_parts_of_streaming_prompts_run_in_the_same_steps_as_in_vllm() -> None:
    decided_alike(SESSIONS, "sessions", met_per_100={"steps": 3_000, "sessions": 700, "stopped": 300, "aborts": 30})


def test_scheduling_decisions_with_grammars_equal_vllms() -> None:
    met = {"steps": 5_000, "grammars": 800, "refused": 100, "hits": 100, "drafts": 500, "asynchronous": 20}
    decided_alike(GRAMMARS, "grammars", met_per_100=met)


def test_prompts_at_intervals_are_computed_in_the_same_steps_as_in_vllm() -> None:
    met = {"steps": 5_000, "held": 700, "held back": 100, "hits": 100, "preemptions": 50, "asynchronous": 20}
    decided_alike(INTERVALS, "intervals", met_per_100=met)
