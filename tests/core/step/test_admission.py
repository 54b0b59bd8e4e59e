"""Admission: each reason for which a request waits, and the cost of waiting."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from pointsman.core import ConfigError, ParkReason, Reason, Request
from pointsman.core.kv.prefix_tree import PrefixCache
from tests.core.helpers import Host, names, tokens_of
from tests.forms import short_or_long


def test_waiting_requests_are_admitted_in_order_until_one_blocks_the_queue() -> None:
    host = Host(num_blocks=6, max_model_len=24)
    host.add("a", 8)
    host.add("large", 20)
    host.add("small", 1)
    output = host.step()
    assert tokens_of(output) == {"a": 8}
    assert host.explain("large").reason is Reason.FULL_SEQUENCE
    small = host.explain("small")
    assert (small.reason, small.blocker, small.position) == (Reason.BEHIND, "large", 1)


def test_without_a_free_slot_the_deferral_reason_is_sequence_limit() -> None:
    host = Host(max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 2)
    assert names(host.step().requests) == ["a", "b"]
    head = host.explain("c")
    assert (head.reason, head.missing) == (Reason.SEQUENCE_LIMIT, 1)
    assert host.stats().deferrals["sequence_limit"] == 1


def test_max_num_active_seqs_limits_running_requests() -> None:
    host = Host(max_num_active_seqs=2)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 2)
    assert names(host.step().requests) == ["a", "b"]
    assert host.explain("c").reason is Reason.SEQUENCE_LIMIT


def test_max_num_active_seqs_changes_while_requests_run() -> None:
    host = Host()
    for request_id in "abcdef":
        host.add(request_id, 2, max_tokens=20)
    host.step()
    host.set_max_num_active_seqs(2)
    assert host.scheduler.config.max_num_active_seqs == 2
    output = host.step()
    assert names(output.requests) == ["a", "b", "c", "d"], "running requests continue"
    assert not output.preempted
    assert (host.explain("e").reason, host.explain("e").missing) == (Reason.SEQUENCE_LIMIT, 3)
    for request_id in "abc":
        host.abort(request_id)
    assert names(host.step().requests) == ["d", "e"]
    host.set_max_num_active_seqs(4)
    assert names(host.step().requests) == ["d", "e", "f"]


@pytest.mark.parametrize("limit", [0, 5, 1.5])
def test_invalid_max_num_active_seqs_is_refused(limit: object) -> None:
    host = Host()
    host.set_max_num_active_seqs(3)
    with pytest.raises(ConfigError, match="max_num_active_seqs"):
        host.scheduler.set_max_num_active_seqs(limit, 1.0)  # type: ignore[arg-type]
    assert host.scheduler.config.num_sequence_slots == 3
    host.set_max_num_active_seqs(None)
    assert host.scheduler.config.num_sequence_slots == 4


def test_without_remaining_budget_the_deferral_reason_is_budget() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 8)
    host.add("b", 2)
    assert tokens_of(host.step()) == {"a": 8}
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.BUDGET, 1)
    assert host.stats().deferrals["budget"] == 1
    assert tokens_of(host.step()) == {"a": 1, "b": 2}


def test_the_last_admission_of_a_step_gets_the_remaining_budget() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 5)
    host.add("b", 9)
    output = host.step()
    assert tokens_of(output) == {"a": 5, "b": 3}
    assert output.samples.tolist() == [True, False]


def test_without_blocks_for_one_chunk_the_deferral_reason_is_blocks() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    host.add("a", 11, max_tokens=5)
    host.step()
    host.add("b", 5)
    host.step()
    head = host.explain("b")
    assert (head.reason, head.missing, head.blocker) == (Reason.BLOCKS, 1, "a")


def test_an_admitted_request_counts_against_later_ones_in_the_step() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    host.add("a", 9)
    host.add("b", 5)
    assert tokens_of(host.step()) == {"a": 9}
    assert host.explain("b").reason is Reason.BLOCKS


@pytest.fixture
def look_ups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets an entry at each lookup in the prefix tree: the cost of a check."""
    calls: list[int] = []
    original = PrefixCache.look_up

    def counted(self: PrefixCache, *args: object) -> object:
        calls.append(1)
        return original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixCache, "look_up", counted)
    return calls


def test_a_blocked_head_is_looked_up_only_once(look_ups: list[int]) -> None:
    host = Host(num_blocks=8, max_model_len=32)
    host.add("a", 12, max_tokens=20)
    host.step()
    host.add("b", 24)
    before = len(look_ups)
    for _ in range(10):
        host.step()
    assert len(look_ups) - before == 1
    assert host.stats().deferrals["full_sequence"] + host.stats().deferrals["blocks"] == 10


def test_a_blocked_head_is_checked_again_when_enough_blocks_are_free(look_ups: list[int]) -> None:
    host = Host(num_blocks=8, max_model_len=32)
    host.add("a", 12, max_tokens=3, use_prefix_cache=False)
    host.step()
    host.add("b", 24, max_tokens=1)
    host.step()
    before = len(look_ups)
    host.step()
    assert len(look_ups) == before, "a still runs"
    output = host.step()
    assert names(output.admitted) == ["b"]
    assert len(look_ups) > before


def test_a_blocked_head_is_checked_again_when_its_hit_may_be_longer() -> None:
    host = Host(num_blocks=8, max_model_len=32, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    prompt = host.prompt(17)
    host.add("a", prompt)
    host.add("b", prompt)
    host.step()
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.FULL_SEQUENCE, 1), "b needs 4 blocks, a still needs 4, and 7 are free"
    output = host.step()  # a's second block is published: b needs one block less, and so does a
    assert names(output.admitted) == ["b"]
    assert output.num_cached_tokens.tolist() == [8]


def test_a_blocked_head_is_checked_again_when_a_block_is_published() -> None:
    host = Host(num_blocks=8, max_model_len=32, long_prefill_token_threshold=2)
    prompt = host.prompt(17)
    host.add("a", prompt)
    host.add("b", prompt)
    host.step()
    assert host.explain("b").missing == 2, "a holds half a block: b needs 5 blocks, a still needs 4, and 7 are free"
    host.step()
    assert host.explain("b").missing == 1, "b can share the completed block"


def test_a_blocked_head_is_checked_again_when_others_need_fewer_blocks() -> None:
    host = Host(num_blocks=9, max_model_len=32, long_prefill_token_threshold=2)
    host.add("small", 2)
    host.add("a", 17)
    host.add("b", 17)
    host.step()
    assert host.explain("b").missing == 2, "b needs 5 blocks, a still needs 4, and 7 are free"
    host.abort("a")
    assert names(host.step().admitted) == ["b"], "8 are free and a needs no more"


def test_a_head_blocked_by_the_watermark_is_checked_when_nothing_runs() -> None:
    host = Host(num_blocks=10, max_num_batched_tokens=32, watermark=0.5)
    host.add("small", 2, max_tokens=2)
    host.step()
    host.add("large", 24, max_tokens=1)
    host.step()
    assert (host.explain("large").reason, host.explain("large").missing) == (Reason.WATERMARK, 2)
    assert names(host.step().admitted) == ["large"], "6 blocks and a watermark of 5 exceed the pool"


def test_a_head_without_a_sequence_slot_costs_no_lookup(look_ups: list[int]) -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 4, max_tokens=12)
    host.step()
    host.add("b", 12)
    before = len(look_ups)
    for _ in range(5):
        host.step()
    assert len(look_ups) == before


def test_requests_behind_a_blocked_head_are_not_looked_up(look_ups: list[int]) -> None:
    host = Host(num_blocks=8, max_model_len=32)
    host.add("a", 12, max_tokens=10)
    host.step()
    for index in range(50):
        host.add(f"w{index}", 24)
    before = len(look_ups)
    for _ in range(5):
        host.step()
    assert len(look_ups) - before == 1


def test_parked_requests_cost_a_step_nothing(look_ups: list[int]) -> None:
    host = Host()
    for index in range(50):
        host.add(f"p{index}", 8, park=ParkReason.REMOTE_KVS)
    for _ in range(5):
        assert host.step().num_rows == 0
    assert look_ups == []


def test_a_new_head_is_checked_when_the_blocked_one_leaves() -> None:
    host = Host(num_blocks=6, max_model_len=24)
    host.add("a", 8, max_tokens=10)
    host.step()
    host.add("large", 20)
    host.add("small", 1)
    assert names(host.step().admitted) == []
    host.abort("large")
    assert names(host.step().admitted) == ["small"]


def test_a_blocked_head_is_checked_again_when_it_becomes_head_again() -> None:
    host = Host(num_blocks=6, max_model_len=24)
    host.add("a", 8, max_tokens=2)
    host.step()
    host.add("large", 20, max_tokens=1)
    host.step()  # blocked, verdict kept; a finishes here
    host.park("large")
    host.ready("large")
    assert names(host.step().admitted) == ["large"]


def test_a_head_is_rechecked_when_a_bypassing_request_shares_its_prefix() -> None:
    host = Host(
        num_blocks=20, block_size=2, max_num_seqs=4, max_num_batched_tokens=32, order="priority", displace=False
    )
    shared = list(range(100, 116))

    def add(request_id: str, prompt: list[int], priority: int, max_tokens: int) -> None:
        request = Request(request_id, prompt, arrival_time=0.0, max_tokens=max_tokens, priority=priority)
        host.scheduler.add(request, host.now)

    add("seed", shared, 0, 1)
    host.step()
    host.add("other", 19, max_tokens=4, use_prefix_cache=False)
    host.step()
    add("head", [*shared, *range(300, 307)], 5, 2)  # 8 free cached blocks and 4 more; the pool has 10
    assert names(host.step().admitted) == []
    add("overtakes", [*shared, 1], 1, 10)
    assert names(host.step().admitted) == ["overtakes"]
    for _ in range(4):
        host.step()
    # "other" has finished; the head needs no blocks for the part of the prefix that "overtakes" holds.
    assert host.scheduler.get_request("head") is None or host.explain("head").status.name == "RUNNING"


def test_explain_gives_the_deferral_reason_of_the_newest_step() -> None:
    host = Host(num_blocks=16, watermark=0.2, max_num_batched_tokens=32)
    host.add("a", 20, max_tokens=40)
    host.step()
    host.add("b", 32)
    host.step()
    assert host.explain("b").reason is Reason.WATERMARK
    for _ in range(16):
        host.step()
    assert host.explain("b").reason is Reason.BLOCKS, "it would not fit any more even without the watermark"
    deferrals = host.stats().deferrals
    assert deferrals["watermark"] > 0
    assert deferrals["blocks"] > 0


def _decisions(seed: int, config: dict[str, Any], forgets: bool) -> list[object]:
    """The decisions of each step for many requests with common prefixes in a small pool. `forgets`: verdicts are not
    kept, and evictions leave the tree at once.
    """
    random, host, told = Random(seed), Host(num_blocks=16, max_model_len=40, max_num_seqs=6, **config), list[object]()
    scheduler, present = host.scheduler, list[str]()
    beginnings = [host.prompt(12) for _ in range(3)]
    for step in range(250):
        if random.random() < 0.4:
            tokens = random.choice(beginnings)[: random.randint(1, 12)] + host.prompt(random.randint(1, 12))
            options = {"max_tokens": random.randint(1, 14), "priority": random.randint(0, 2)}
            scheduler.add(Request(f"r{step}", tokens, arrival_time=float(step), **options), float(step))
            present.append(f"r{step}")
        if present and random.random() < 0.03:
            scheduler.abort(random.choice(present), float(step))
        if forgets:
            scheduler._admission._kept = None
            scheduler.check_invariants()
        output = scheduler.schedule(float(step))
        present = [name for name in present if scheduler.get_request(name) is not None]
        told.append((tokens_of(output), output.block_ids.tolist(), names(output.preempted)))
        scheduler.update(output, host.result(output), float(step))
    stats = scheduler.stats()
    lacked_blocks = sum(stats.deferrals[reason] for reason in ("blocks", "full_sequence", "watermark"))
    assert stats.num_evictions > 20 and stats.prefix_hits > 20 and lacked_blocks > 20
    return told


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"watermark": 0.1},
        {"long_prefill_token_threshold": 3},
        {"full_sequence_must_fit": False},
        {"decode_reserve": "mean"},
        {"order": "priority"},
    ],
    ids=str,
)
def test_stored_admission_verdicts_decide_like_new_checks(config: dict[str, Any]) -> None:
    for seed in range(short_or_long(2, 24)):
        assert _decisions(seed, config, forgets=False) == _decisions(seed, config, forgets=True)


def test_a_finished_request_costs_a_blocked_head_no_lookup(look_ups: list[int]) -> None:
    host = Host(num_blocks=12, max_model_len=48)
    host.add("long", 8, max_tokens=30)
    host.add("short", 4, max_tokens=6)
    host.add("head", 40)
    host.step()
    before = len(look_ups)
    while host.scheduler.num_running == 2:
        host.step()
    host.step()
    assert len(look_ups) == before, "the cached blocks of the finished request are among the free blocks"
