"""`advance` leaves the state of single steps: two schedulers with the same calls, one stepping and one advancing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

from pointsman.core import Scheduler
from pointsman.core.presets import PRESETS, SYSTEMS
from tests.forms import seeds, short_of, short_or_long

from .operations import OPERATIONS, make_world, run_operation
from .test_state_machine import SchedulerMachine
from .twin import Twin
from .workload import DrawChooser, SeededChooser
from .world import World

CROWDED = 30
SEEDS = seeds(2, 16)
PRESET_SEEDS = seeds(1, 3)
RULES_PER_SEED = 70
RARE = dict.fromkeys(("abort", "finish", "park", "set_priority", "extend"), 1)
CALM = {"step": 70, "add": 9, "ready": 2, "resume": 3, **RARE}
"""Weights of operations that give many plain steps in a row."""
ONE_STEP = {"max_steps_in_flight": 1, "num_draft_tokens": 0, "draft_table": (), "connector": False}
NO_ENCODER = {"encoder_budget": 0, "encoder_cache_size": 0}
PLAIN: dict[str, Any] = {**ONE_STEP, **NO_ENCODER}
CACHING = {"enable_prefix_caching": True, "share_within_step": True}
SWAP: dict[str, Any] = {"connector": True, "preemption_mode": "swap"}
SWAP_OFTEN: dict[str, Any] = {
    **PLAIN,
    **CACHING,
    **SWAP,
    "policies": False,
    "block_size": 3,
    "num_blocks": 16,
    "num_reserved_blocks": 0,
    "max_model_len": 30,
    "max_num_seqs": 5,
    "full_sequence_must_fit": False,
    "reserves": (),
}
IN_TIME = {"token_limits": ("target-itl:seconds=3,least=2",)}
WINDOWS = (("full", 0), ("window", 5))
WINDOWED: dict[str, Any] = {
    **PLAIN,
    **CACHING,
    "policies": False,
    "block_size": 2,
    "num_blocks": 120,
    "max_model_len": 40,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 40,
}
"""Steps with windows are done at once only while no request waits."""
FCFS = {"order": "fcfs", "batching": "mixed", "displace": None}
FOCUS: dict[str, dict[str, Any]] = {
    "anything": {},
    "plain": PLAIN,
    "long outputs": {**PLAIN, "block_size": 1, "num_blocks": 60, "max_model_len": 48},
    "few blocks": {**PLAIN, **CACHING, "block_size": 2, "num_blocks": 9, "max_model_len": 18, "num_reserved_blocks": 0},
    "evictions": {**PLAIN, **CACHING, "block_size": 1, "num_blocks": 20, "full_sequence_must_fit": False},
    "swap": SWAP_OFTEN,
    "swap or compute": {**SWAP_OFTEN, "preemption_mode": "cheaper"},
    "watermark": {**PLAIN, "block_size": 2, "num_blocks": 12, "watermark": 0.35, "decode_reserve": 9},
    "mean reserve": {**PLAIN, "block_size": 2, "num_blocks": 12, "decode_reserve": "mean"},
    "growth": {
        **PLAIN,
        "block_size": 1,
        "num_blocks": 40,
        "reserves": ("growth:scale=8",),
        "victim": "least-cost",
        **FCFS,
    },
    "few seats": {**PLAIN, "max_num_seqs": 2, "max_num_active_seqs": None, "block_size": 1, "num_blocks": 60},
    "priority": {**PLAIN, "order": "priority", "displace": True, "batching": "mixed", "max_num_seqs": 2},
    "static": {**PLAIN, "batching": "static"},
    "prefill interval": {**PLAIN, "batching": "mixed", "prefill_interval": 4, "block_size": 2, "num_blocks": 40},
    "prefill-first": {**PLAIN, "batching": "prefill-first", "shortage": "look-ahead", "block_size": 1},
    "no chunks": {**PLAIN, "enable_chunked_prefill": False, "long_prefill_token_threshold": 0},
    "target step time": {**PLAIN, **IN_TIME, **FCFS, "block_size": 2, "num_blocks": 30, "reserves": ()},
    "drafts": {**NO_ENCODER, "connector": False, "max_steps_in_flight": 1, "num_draft_tokens": 2},
    "retention": {**PLAIN, **CACHING, "block_size": 1, "num_blocks": 24, "eviction": "retention:share=0.8"},
    "reuse": {**PLAIN, **CACHING, "block_size": 1, "num_blocks": 24, "eviction": "reuse:share=0.4"},
    "bypass": {**PLAIN, "block_size": 2, "num_blocks": 12, "reserves": ("bypass:bound=3",)},
    "windows": {**WINDOWED, "kv_groups": WINDOWS},
    "windows, few blocks": {**WINDOWED, "kv_groups": WINDOWS, "num_blocks": 18, "full_sequence_must_fit": False},
    "many windows": {**WINDOWED, "kv_groups": (*[("window", 6)] * 3, ("full", 0)), "block_size": 3},
    "windows alone": {**WINDOWED, "kv_groups": (("window", 7),), "num_blocks": 30},
    "two windows": {**WINDOWED, "kv_groups": (("full", 0), ("window", 4), ("window", 9))},
    "chunks": {**WINDOWED, "kv_groups": (("chunk", 6), ("full", 0)), "enable_prefix_caching": False},
    "adapters": {**PLAIN, "max_loras": 1},
    "shortest-prefill": {**PLAIN, "order": "shortest-prefill:ageing=2"},
    "longest-prefix": {**PLAIN, **CACHING, "order": "longest-prefix:ageing=2"},
    "earliest-ttft": {**PLAIN, "order": "earliest-ttft:default=3,every=3"},
    "fair": {**PLAIN, "order": "fair:weights=tenant 0/2"},
}
BIG = {"max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs"}  # from presets; here nothing is that large
SELDOM = {"anything", "drafts", "swap", "swap or compute"}
SHORT_FOCUS = (
    "few blocks",
    "evictions",
    "swap",
    "priority",
    "growth",
    "target step time",
    "earliest-ttft",
    "fair",
    "retention",
    "windows",
    "windows, few blocks",
)


def drive(
    seed: int,
    overrides: dict[str, Any],
    watch: Callable[[Scheduler], None] | None = None,
    watch_first: Callable[[Scheduler], None] | None = None,
) -> tuple[World, Twin]:
    """A random run of the first scheduler, which the second follows; `watch` gets the second one at its beginning."""
    choose, twin = SeededChooser(seed), Twin(seed, watch)
    world = make_world(choose, overrides, recording=twin)
    world.is_busy = True  # otherwise a policy that learns from step times would learn others from steps at once
    twin.first = world.scheduler
    if watch_first is not None:
        watch_first(world.scheduler)
    is_calm = seed % 4 > 0
    weights = {**CALM, "add": CROWDED} if seed % 4 == 3 else CALM
    wheel = [op for op in OPERATIONS for _ in range(weights.get(op.name, 0) if is_calm else op.weight)]
    for _ in range(RULES_PER_SEED * (3 if is_calm else 1)):
        run_operation(choose.choice(wheel), world, choose)
    world.drain()
    twin.release()
    return world, twin


@pytest.mark.parametrize("focus", short_of(FOCUS, SHORT_FOCUS))
def test_advance_equals_single_steps_in_seeded_runs(focus: str) -> None:
    advanced = stepped = 0
    for seed in range(short_or_long(2, 40)) if focus in SELDOM else SEEDS:
        try:
            _, twin = drive(seed, FOCUS[focus])
        except AssertionError as error:
            raise AssertionError(f"drive({seed}, {FOCUS[focus]}): {error}") from error
        advanced, stepped = advanced + twin.num_advanced, stepped + twin.num_stepped
    least = 0 if focus in SELDOM else 0.05
    assert advanced > least * (advanced + stepped), f"{advanced} of {advanced + stepped} steps were done at once"


@pytest.mark.parametrize("name", [*PRESETS, *SYSTEMS])
def test_advance_equals_single_steps_under_every_preset(name: str) -> None:
    """Every preset and every reproduced scheduler, with small limits."""
    knobs = {key: value for key, value in (PRESETS | SYSTEMS)[name].items() if key not in BIG}
    advanced = 0
    for seed in PRESET_SEEDS:
        advanced += drive(101 + seed, {**PLAIN, **CACHING, **knobs, "policies": False})[1].num_advanced
    assert advanced


class TwinMachine(SchedulerMachine):
    """The rules of the scheduler's machine, on two schedulers."""

    @initialize(data=st.data())
    def configure(self, data: st.DataObject) -> None:
        choose, twin = DrawChooser(data.draw), Twin()
        overrides = choose.choice((PLAIN,) * 3 + ({**PLAIN, **CACHING, **SWAP}, {"preemption_mode": "swap"}))
        self.world = make_world(choose, overrides, recording=twin)
        self.world.is_busy = True
        twin.first = self.world.scheduler


def test_advance_equals_single_steps_in_a_state_machine() -> None:
    """Every call, in any order, with shrinking."""
    run_state_machine_as_test(TwinMachine, settings=settings(max_examples=short_or_long(10, 50)))
