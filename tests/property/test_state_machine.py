"""Hypothesis tries to break the scheduler with every call of its interface, and shrinks what breaks it.

After every rule the scheduler checks itself and is compared with the ledger; every step is executed over the shadow
KV; at the end of each run everything must finish. `POINTSMAN_SOAK=1` runs the long form.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from .operations import EXECUTED, OPERATIONS, Operation, drive, make_world, run_operation
from .workload import DrawChooser
from .world import World

SOAK = os.environ.get("POINTSMAN_SOAK") == "1"
LEAST_RULES = 50_000 if SOAK else 5_000
"""Rules that the state machine must have executed; a run cut short by Hypothesis may not pass for a full one."""
NUM_SEEDS = 400 if SOAK else 20
RULES_PER_SEED = 60
CACHING = {"enable_prefix_caching": True, "share_within_step": True}
FOCUS: dict[str, dict[str, Any]] = {
    "anything": {},
    "displacement": {**CACHING, "order": "priority", "displace": True, "batching": "mixed"},
    "steps in flight": {**CACHING, "max_steps_in_flight": 3, "batching": "mixed"},
    "slow prefill": {**CACHING, "block_size": 3, "enable_chunked_prefill": True, "long_prefill_token_threshold": 2},
    "adapters": {**CACHING, "max_loras": 2, "batching": "mixed", "max_num_seqs": 5, "max_num_batched_tokens": 15},
    "speculation": {
        **CACHING,
        "num_draft_tokens": 3,
        "draft_table": (),
        "max_steps_in_flight": 2,
        "num_blocks": 14,
        "block_size": 3,
        "max_num_seqs": 5,
        "max_model_len": 48,
    },
    "images": {**CACHING, "encoder_budget": 5, "encoder_cache_size": 6},
    "transfers": {"connector": True, "enable_prefix_caching": True},
    "transfers in flight": {"connector": True, "max_steps_in_flight": 3},
    "transfers of images": {**CACHING, "connector": True, "encoder_budget": 5, "encoder_cache_size": 6},
    "no chunks": {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0, "order": "priority"},
}
"""Knobs that are fixed in some of the seeded runs, where what they reach is rare otherwise."""

NEEDS_REQUESTS = {"abort", "finish", "park", "ready", "set_priority", "misuse"}
NEEDS_TRANSFERS = {"write_blocks", "end_transfer"}
NEEDS_STEPS = {"update", "fail", "update_malformed", "update_out_of_order"}


def _useful(operation: Operation) -> Callable[[SchedulerMachine], bool]:
    """Whether an operation has anything to act on, so that rules are not wasted."""

    def check(machine: SchedulerMachine) -> bool:
        if operation.name in NEEDS_REQUESTS:
            return bool(machine.world.live)
        if operation.name in NEEDS_STEPS:
            return bool(machine.world.host.in_flight)
        if operation.name in NEEDS_TRANSFERS:
            return machine.world.host.device is not None and bool(machine.world.host.device.transfers)
        return True

    return check


def _as_rule(operation: Operation) -> Any:
    def act(self: SchedulerMachine, data: st.DataObject) -> None:
        run_operation(operation, self.world, DrawChooser(data.draw))

    act.__name__ = operation.name
    return rule(data=st.data())(precondition(_useful(operation))(act))


class SchedulerMachine(RuleBasedStateMachine):
    """One rule for each operation; the frequent ones have two or three, as Hypothesis picks rules evenly."""

    world: World

    @initialize(data=st.data())
    def configure(self, data: st.DataObject) -> None:
        self.world = make_world(DrawChooser(data.draw), {})

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


for _operation in OPERATIONS:
    for _copy in range(1 + _operation.weight // 9):
        setattr(SchedulerMachine, f"{_operation.name}_{_copy}", _as_rule(_operation))


def test_state_machine() -> None:
    """Every call, in any order, with shrinking."""
    before = EXECUTED.total()
    run_state_machine_as_test(SchedulerMachine)
    executed = EXECUTED.total() - before
    assert executed >= LEAST_RULES, f"only {executed} rules were executed"


@pytest.mark.parametrize("focus", FOCUS)
def test_seeded_runs(focus: str) -> None:
    """The same operations from a seeded generator: many more runs than Hypothesis does in the same time."""
    for seed in range(NUM_SEEDS):
        try:
            drive(seed, RULES_PER_SEED, **FOCUS[focus])
        except AssertionError as error:
            raise AssertionError(f"drive({seed}, {RULES_PER_SEED}, **{FOCUS[focus]}): {error}") from error


def test_runs_meet_every_limit() -> None:
    """The runs would prove little if memory never ran out: count what happened in them."""
    worlds = [drive(seed, RULES_PER_SEED) for seed in range(1_000_000, 1_000_160)]
    worlds += [drive(seed, RULES_PER_SEED, **FOCUS["displacement"]) for seed in range(1_000_000, 1_000_020)]
    stats = [world.scheduler.stats() for world in worlds]
    deferrals = Counter(reason for stat in stats for reason, count in stat.deferrals.items() if count)
    rungs = {
        "watermark",
        "full_sequence",
        "decode_reserve",
        "blocks",
        "sequence_limit",
        "adapter_slots",
        "partial_prefills",
        "budget",
        "preemption",
        "displacement",
    }
    assert rungs <= set(deferrals), deferrals
    assert sum(stat.num_preemptions for stat in stats) >= 50
    assert sum(stat.num_displaced for stat in stats) >= 5
    assert sum(stat.num_evictions for stat in stats) >= 100
    assert sum(stat.num_failed_steps for stat in stats) >= 50
    assert sum(stat.num_proposed_tokens for stat in stats) >= 150
    assert sum(stat.num_draft_tokens - stat.num_accepted_tokens for stat in stats) >= 25
    assert sum(stat.num_accepted_tokens for stat in stats) >= 30
    assert sum(stat.num_refused for stat in stats) >= 5
    assert sum(world.num_capacity_ends for world in worlds) >= 5
    assert sum(stat.finished["repetition"] for stat in stats) >= 5
    assert sum(world.num_completed_parts for world in worlds) >= 10
    assert sum(world.num_recordings for world in worlds) >= 20
    assert sum(world.num_completions for world in worlds) >= 5
    assert sum(world.num_cached_tokens for world in worlds) >= 50


def test_runs_with_images_meet_their_limits() -> None:
    """As above: both bounds hold somebody back, entries are shared, and make room for others."""
    crowded = {**FOCUS["images"], "connector": False, "encoder_cache_size": 5, "max_num_seqs": 5}
    crowded |= {"max_num_batched_tokens": 20, "num_blocks": 30, "block_size": 2, "batching": "mixed"}
    crowded |= {"full_sequence_must_fit": False, "decode_reserve": 0, "max_num_partial_prefills": None}
    crowded |= {"enable_chunked_prefill": True, "long_prefill_token_threshold": 2}
    worlds = [drive(seed, RULES_PER_SEED, **crowded) for seed in range(2_000_000, 2_000_080)]
    stats = [world.scheduler.stats() for world in worlds]
    waits = Counter({name: sum(stat.deferrals[name] for stat in stats) for name in ("encoder_budget", "encoder_cache")})
    assert waits.total() >= 5, waits
    assert sum(stat.num_encoder_computed for stat in stats) >= 200
    assert sum(stat.num_encoder_reused for stat in stats) >= 50
