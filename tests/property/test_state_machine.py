"""Hypothesis tries to break the scheduler with every call of its interface, and shrinks what breaks it.

After every rule the scheduler checks itself and is compared with the ledger; every step is executed over the shadow
KV; at the end of each run everything must finish. The long form has more runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from pointsman.core import KVGroup, Reason
from tests.forms import seeds, short_of, short_or_long

from .operations import EXECUTED, OPERATIONS, Operation, drive, make_world, run_operation
from .workload import DrawChooser
from .world import World

MIN_RULES = short_or_long(4_000, 15_000)
"""Rules that the state machine must have executed; a run cut short by Hypothesis may not pass for a full one."""
SEEDS = seeds(16, 30)
RULES_PER_SEED = 60
NUM_LIMIT_SEEDS = 48
MIN_OF_A_LIMIT = 4
CACHING = {"enable_prefix_caching": True, "share_within_step": True}
GROUPS = {**CACHING, "connector": False, "preemption_mode": "recompute", "num_blocks": 24}
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
    "swap": {**CACHING, "connector": True, "preemption_mode": "swap", "full_sequence_must_fit": False},
    "swap in flight": {**CACHING, "connector": True, "preemption_mode": "cheaper", "max_steps_in_flight": 3},
    "transfers of images": {**CACHING, "connector": True, "encoder_budget": 5, "encoder_cache_size": 6},
    "fair": {"connector": False, "order": "fair", "max_steps_in_flight": 2},
    "earliest-ttft": {"connector": False, "order": "earliest-ttft:default=3,every=3", "max_steps_in_flight": 2},
    "retention": {**CACHING, "eviction": "retention:share=1", "batching": "mixed", "num_blocks": 14},
    "two groups": {**GROUPS, "kv_groups": (KVGroup(), KVGroup("window", 5))},
    "six groups": {**GROUPS, "kv_groups": (*[KVGroup("window", 6)] * 5, KVGroup()), "num_blocks": 40, "block_size": 3},
    "chunks": {**GROUPS, "kv_groups": (KVGroup("chunk", 6), KVGroup()), "block_size": 3, "max_steps_in_flight": 2},
    "windows alone": {**GROUPS, "kv_groups": (KVGroup("window", 7),), "num_blocks": 9},
    "windows and chunks": {
        **GROUPS,
        "kv_groups": (KVGroup("window", 4), KVGroup(), KVGroup("chunk", 8), KVGroup("window", 9)),
        "num_blocks": 36,
        "max_steps_in_flight": 3,
    },
    "groups, speculation": {
        **GROUPS,
        "kv_groups": (KVGroup(), KVGroup("window", 4)),
        "num_draft_tokens": 3,
        "draft_table": (),
        "block_size": 2,
        "num_blocks": 26,
    },
    "groups, retention": {
        **GROUPS,
        "kv_groups": (KVGroup("window", 5), KVGroup()),
        "eviction": "retention:share=1",
        "enable_kv_cache_events": True,
        "batching": "mixed",
        "num_blocks": 20,
    },
    "windows alone, retention": {
        **GROUPS,
        "kv_groups": (KVGroup("window", 5), KVGroup("window", 8)),
        "eviction": "retention:share=1",
        "enable_kv_cache_events": True,
    },
    "groups, transfers": {
        **GROUPS,
        "connector": True,
        "kv_groups": (KVGroup(), KVGroup("window", 5)),
        "enable_kv_cache_events": True,
        "num_blocks": 40,
        "max_model_len": 20,
    },
    "groups, transfers in flight": {
        **GROUPS,
        "connector": True,
        "kv_groups": (KVGroup("window", 4), KVGroup(), KVGroup("chunk", 6)),
        "max_steps_in_flight": 3,
        "num_blocks": 60,
        "max_model_len": 20,
    },
    "groups, swap": {
        **GROUPS,
        "connector": True,
        "kv_groups": (KVGroup("window", 4), KVGroup()),
        "preemption_mode": "swap",
        "full_sequence_must_fit": False,
        "num_blocks": 30,
        "max_model_len": 24,
    },
    "windows alone, swap": {
        **GROUPS,
        "connector": True,
        "kv_groups": (KVGroup("window", 4), KVGroup("window", 7)),
        "preemption_mode": "cheaper",
        "full_sequence_must_fit": False,
        "num_blocks": 24,
        "max_model_len": 24,
    },
    "full attention in groups": {**GROUPS, "kv_groups": (KVGroup(), KVGroup()), "eviction": "reuse:share=0.5"},
    "no chunks": {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0, "order": "priority"},
}
"""Knobs that are fixed in some seeded runs, for cases that are rare otherwise."""

NEEDS_REQUESTS = {"abort", "finish", "park", "ready", "set_priority", "misuse"}
NEEDS_TRANSFERS = {"write_blocks", "end_transfer"}
NEEDS_STEPS = {"update", "fail", "update_malformed", "update_out_of_order"}


def _useful(operation: Operation) -> Callable[[SchedulerMachine], bool]:
    """Whether an operation has an effect now, so that rules are not wasted."""

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


def test_any_sequence_of_scheduler_calls_keeps_the_invariants() -> None:
    """Every call, in any order, with shrinking."""
    before = EXECUTED.total()
    run_state_machine_as_test(SchedulerMachine)
    executed = EXECUTED.total() - before
    assert executed >= MIN_RULES, f"only {executed} rules were executed"


LONG_ONLY = {"windows alone", "windows and chunks", "chunks", "groups, speculation"}


@pytest.mark.parametrize("focus", short_of(list(FOCUS), FOCUS.keys() - LONG_ONLY))
def test_seeded_scheduler_runs_keep_the_invariants(focus: str) -> None:
    """A seeded generator chooses the operations, so that many more runs fit into the time than with Hypothesis."""
    for seed in SEEDS:
        try:
            drive(seed, RULES_PER_SEED, **FOCUS[focus])
        except AssertionError as error:
            raise AssertionError(f"drive({seed}, {RULES_PER_SEED}, **{FOCUS[focus]}): {error}") from error


PLENTY = {
    "order": "fcfs",
    "victim": None,
    "token_limits": (),
    "batching": "mixed",
    "block_size": 1,
    "num_blocks": 80,
    "max_model_len": 48,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "num_draft_tokens": 0,
    "max_loras": 0,
    "encoder_budget": 0,
    "encoder_cache_size": 0,
    "watermark": 0.0,
    "decode_reserve": 0,
    "reserves": (),
    "connector": False,
    "enable_chunked_prefill": True,
    "long_prefill_token_threshold": 0,
    "full_sequence_must_fit": True,
}
"""Knobs without shortages, except those that are added."""
TIGHT = {**PLENTY, "block_size": 2, "num_reserved_blocks": 0, "num_blocks": 9, "max_model_len": 18}
LONG_PROMPTS = {**PLENTY, "num_blocks": 20, "max_model_len": 20}
URGENT = {**PLENTY, "order": "priority", "displace": True, "max_num_seqs": 1}
LOADS = {**PLENTY, **CACHING, "connector": True, "num_blocks": 30, "max_model_len": 12, "kv_load_timeout": 1.5}
SWAPS = {**LOADS, "preemption_mode": "swap", "num_blocks": 16, "max_model_len": 14, "full_sequence_must_fit": False}


def _told(reason: Reason) -> Callable[[World], int]:
    return lambda world: world.reasons_told[reason]


def _of_stats(name: str) -> Callable[[World], int]:
    return lambda world: int(getattr(world.scheduler.stats(), name))


def _num_swapped(world: World) -> int:
    """Number of saved blocks, if only those of preempted requests are saved."""
    device = world.host.device
    assert device is not None
    return 0 if device.saves_evicted else world.scheduler.stats().num_saved_blocks


def _num_rejected(world: World) -> int:
    stats = world.scheduler.stats()
    return stats.num_draft_tokens - stats.num_accepted_tokens


LIMITS: dict[str, tuple[dict[str, Any], Callable[[World], int]]] = {
    "watermark": ({**TIGHT, "watermark": 0.35}, _told(Reason.WATERMARK)),
    "full sequence": ({**LONG_PROMPTS, "long_prefill_token_threshold": 2}, _told(Reason.FULL_SEQUENCE)),
    "decode reserve": ({**TIGHT, "decode_reserve": 9}, _told(Reason.DECODE_RESERVE)),
    "bypass": ({**TIGHT, "num_blocks": 12, "reserves": ("bypass:bound=3,kept=1",)}, _told(Reason.BYPASS)),
    "blocks": ({**TIGHT, "full_sequence_must_fit": False}, _told(Reason.BLOCKS)),
    "seats": ({**PLENTY, "max_num_seqs": 2}, _told(Reason.SEQUENCE_LIMIT)),
    "adapter slots": ({**PLENTY, "max_loras": 1}, _told(Reason.ADAPTER_SLOTS)),
    "half done": (
        {**PLENTY, "max_num_partial_prefills": 1, "long_prefill_token_threshold": 2},
        _told(Reason.PARTIAL_PREFILLS),
    ),
    "budget": ({**PLENTY, "max_num_batched_tokens": 6}, _told(Reason.BUDGET)),
    "preemption": ({**TIGHT, "full_sequence_must_fit": False}, _told(Reason.PREEMPTION)),
    "displacement": (URGENT, _told(Reason.DISPLACEMENT)),
    "prompts before decoding": ({**PLENTY, "batching": "prefill-first"}, _told(Reason.PREFILL_FIRST)),
    "prefill interval": (
        {**PLENTY, "batching": "mixed", "prefill_interval": 4, "max_num_batched_tokens": 20},
        _told(Reason.PREFILL_INTERVAL),
    ),
    "static batch": ({**PLENTY, "batching": "static"}, _told(Reason.STATIC_BATCH)),
    "encoder budget": ({**PLENTY, "encoder_budget": 4, "encoder_cache_size": 8}, _told(Reason.ENCODER_BUDGET)),
    "encoder cache": (
        {**PLENTY, "encoder_budget": 9, "encoder_cache_size": 5, "long_prefill_token_threshold": 1},
        _told(Reason.ENCODER_CACHE),
    ),
    "room for loads": ({**LOADS, "num_blocks": 22}, _told(Reason.KV_ROOM)),
    "the connector's answer": (LOADS, _told(Reason.KV_CONNECTOR)),
    "rows that give way": (TIGHT, _of_stats("num_preemptions")),
    "rows that are displaced": (URGENT, _of_stats("num_displaced")),
    "evictions": ({**TIGHT, **CACHING}, _of_stats("num_evictions")),
    "failed steps": (PLENTY, _of_stats("num_failed_steps")),
    "proposed drafts": (FOCUS["speculation"], _of_stats("num_proposed_tokens")),
    "accepted drafts": (FOCUS["speculation"], _of_stats("num_accepted_tokens")),
    "rejected drafts": (FOCUS["speculation"], _num_rejected),
    "refusals": (PLENTY, _of_stats("num_refused")),
    "ends for want of blocks": ({**TIGHT, "num_blocks": 4, "max_model_len": 48}, lambda w: w.num_capacity_ends),
    "ends by repetition": (PLENTY, lambda world: world.scheduler.stats().finished["repetition"]),
    "completed parts": (PLENTY, lambda world: world.num_completed_parts),
    "recordings that begin in the middle": (PLENTY, lambda world: world.num_recordings),
    "prompts without output": (PLENTY, lambda world: world.num_completions),
    "cached tokens": ({**PLENTY, **CACHING}, lambda world: world.num_cached_tokens),
    "computed embeddings": (
        {**PLENTY, "encoder_budget": 9, "encoder_cache_size": 9},
        _of_stats("num_encoder_computed"),
    ),
    "embeddings found": ({**PLENTY, "encoder_budget": 9, "encoder_cache_size": 9}, _of_stats("num_encoder_reused")),
    "loads": (LOADS, _of_stats("num_loads")),
    "failed loads": (LOADS, _of_stats("num_failed_loads")),
    "loaded tokens": (LOADS, _of_stats("num_loaded_tokens")),
    "saved blocks": (LOADS, _of_stats("num_saved_blocks")),
    "swapped blocks": (SWAPS, _num_swapped),
}
"""Events of runs, the knobs under which each is likely, and how to count it."""


@pytest.mark.long
@pytest.mark.parametrize("limit", LIMITS)
def test_seeded_scheduler_runs_reach_every_limit(limit: str) -> None:
    """The runs reach every limit (such as full memory) often; otherwise they would prove little."""
    knobs, count = LIMITS[limit]
    total = 0
    for seed in range(1_000_000, 1_000_000 + NUM_LIMIT_SEEDS):
        total += count(drive(seed, 2 * RULES_PER_SEED, **knobs))
        if total >= MIN_OF_A_LIMIT:
            break
    assert total >= MIN_OF_A_LIMIT
