"""Two schedulers with the same calls, one stepping and one doing at once all that is sure, openings and finishes
included, are equal over random workloads, configurations and calls from outside; and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core.presets import PRESETS, SYSTEMS
from pointsman.core.state import batch
from tests.by_name import find, replace
from tests.core.step.test_past_finishes import CASES, OPENED, Pair
from tests.forms import short_or_long

BIG = {"max_num_seqs", "max_num_batched_tokens", "max_num_active_seqs"}  # of presets: here nothing is that large
FEW_BLOCKS = {"num_blocks": 60, "full_sequence_must_fit": False}
VARIANTS: dict[str, dict[str, Any]] = {
    **CASES,
    **OPENED,
    **{f"as {name}": {k: v for k, v in knobs.items() if k not in BIG} for name, knobs in (PRESETS | SYSTEMS).items()},
    "few blocks": FEW_BLOCKS,
    "fair": {"order": "fair:weights=t0/2"},
    "shortest-prefill": {"order": "shortest-prefill:ageing=2"},
    "static": {"batching": "static"},
    "no chunks": {"enable_chunked_prefill": False},
    "long prompts in parts": {"long_prefill_token_threshold": 3},
    "one partial prefill": {"max_num_partial_prefills": 1, "max_num_batched_tokens": 11},
    "mean reserve": {**FEW_BLOCKS, "decode_reserve": "mean"},
    "growth": {**FEW_BLOCKS, "reserves": ("growth:scale=4",)},
    "bypass": {**FEW_BLOCKS, "reserves": ("bypass:bound=3",)},
    "least cost": {**FEW_BLOCKS, "victim": "least-cost"},
    "reuse": {**FEW_BLOCKS, "eviction": "reuse:share=0.4"},
    "steps within a target": {"token_limits": ("target-itl:seconds=3,least=2",)},
    "prompts within a gap": {"token_limits": ("prefill-gap:seconds=3,least=2",)},
    "prompts within a gap, few blocks": {**FEW_BLOCKS, "token_limits": ("prefill-gap:seconds=3,least=2",)},
    "drafts": {"num_draft_tokens": 2},
    "logged": {"log_request_events": True},
}
BASE = {"max_num_batched_tokens": 24}
Fault = Callable[[pytest.MonkeyPatch], None]


def drive(seed: int, variant: dict[str, Any], num_rounds: int = 15, *, disturbs: bool = True) -> Pair:
    """A random run of both."""
    pair = Pair(seed, **{**BASE, **variant})
    rng = pair.rng
    for _ in range(num_rounds):
        pair.opens = rng.random() < 0.8
        for _ in range(int(rng.integers(4))):
            pair.add()
        for _ in range(int(rng.integers(1, 4))):
            pair.run()
        if disturbs and rng.random() < 0.3:
            pair.disturb()
        pair.compare()
    pair.settle()
    while pair.advancing.has_unfinished_requests():
        pair.run()
    pair.compare()
    return pair


@settings(max_examples=short_or_long(40, 200))
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(VARIANTS)))
def test_as_single_steps(seed: int, name: str) -> None:
    drive(seed, VARIANTS[name])


# ------------------------------------------------------------------ planted faults


def what_is_published_in_the_step_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "Openings._may_find_more", lambda *args: False)


def requests_finish_in_another_order(patch: pytest.MonkeyPatch) -> None:
    release = find("RequestTable.release_in_turn")
    replace(patch, "RequestTable.release_in_turn", lambda table, requests: release(table, requests[::-1]))


def spent_budget_is_not_noted(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "Admission.stand_still_for_budget", lambda admission, now: None)


def filled_places_are_trusted_for_ever(patch: pytest.MonkeyPatch) -> None:
    check = find("PastFinishes._check_tokens")

    def check_tokens(past_finishes: Any, requests: Any, rows: Any, tokens: Any, num_old: int) -> list[int]:
        return [index for index in check(past_finishes, requests, rows, tokens, num_old) if index >= num_old]

    replace(patch, "PastFinishes._check_tokens", check_tokens)


def token_limits_are_ignored(patch: pytest.MonkeyPatch) -> None:
    replace(patch, "PastFinishes._limited", lambda *args: [])


def a_chunk_gets_a_token_too_many(patch: pytest.MonkeyPatch) -> None:
    chunk = find("Openings._chunk")
    replace(patch, "Openings._chunk", lambda self, kv, row, budget: chunk(self, kv, row, budget + 1))


def blocks_of_later_steps_are_allocated_before_a_finish(patch: pytest.MonkeyPatch) -> None:
    grow_in_turn = find("KVCacheManager.grow_in_turn")

    def early(kv: Any, *args: Any) -> Callable[[int], None]:
        grow = grow_in_turn(kv, *args)
        return lambda before, more=0: grow(10**6, more)

    replace(patch, "KVCacheManager.grow_in_turn", early)


FAULTS: tuple[tuple[Fault, str], ...] = (
    (what_is_published_in_the_step_is_forgotten, "small budget, cached within a step"),
    (requests_finish_in_another_order, "blank"),
    (spent_budget_is_not_noted, "small budget"),
    (filled_places_are_trusted_for_ever, "blank"),
    (token_limits_are_ignored, "blank"),
    (a_chunk_gets_a_token_too_many, "small budget"),
    (blocks_of_later_steps_are_allocated_before_a_finish, "blank"),
)


@pytest.mark.parametrize(("plant", "variant"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_planted_fault_is_found(plant: Fault, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(40):
        try:
            drive(seed, VARIANTS[variant], disturbs=False)
        except AssertionError:
            return
    pytest.fail("nothing was noticed")


def test_tokens_of_rows_that_are_flushed_between_runs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "RECENT", 12)
    for seed in range(8):
        drive(seed, VARIANTS["blank"], disturbs=False)
