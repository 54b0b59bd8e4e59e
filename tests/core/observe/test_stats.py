"""The counters and gauges."""

from __future__ import annotations

import pytest

from pointsman.core import ParkReason, Reason
from tests.core.helpers import EOS, Host


def test_counters_of_a_new_scheduler_are_0() -> None:
    stats = Host(num_reserved_blocks=2).stats()
    assert (stats.num_blocks, stats.num_free_blocks, stats.kv_cache_usage) == (14, 14, 0.0)
    assert (stats.num_running, stats.num_waiting, stats.num_parked) == (0, 0, {})
    assert set(stats.deferrals) == {reason.value for reason in Reason}
    assert not any(stats.deferrals.values())


def test_stats_has_the_gauges_of_requests_and_pool() -> None:
    host = Host(max_num_seqs=2)
    for request_id in "abc":
        host.add(request_id, 7)
    host.add("p", 4, park=ParkReason.GRAMMAR)
    host.add("q", 4, park=ParkReason.GRAMMAR)
    host.add("r", 4, park=ParkReason.REMOTE_KVS)
    host.step()
    stats = host.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 1)
    assert stats.num_parked == {"waiting_for_grammar": 2, "waiting_for_remote_kvs": 1}
    assert (stats.num_free_blocks, stats.kv_cache_usage) == (12, 0.25)


def test_cached_free_blocks_do_not_count_as_usage() -> None:
    host = Host()
    host.add("a", 9, max_tokens=1)
    host.run_to_end()
    stats = host.stats()
    assert (stats.num_free_blocks, stats.num_cached_free_blocks, stats.kv_cache_usage) == (16, 2, 0.0)


def test_tokens_are_counted_when_scheduled_and_when_generated() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 12, max_tokens=3)
    host.run_to_end()
    stats = host.stats()
    assert stats.num_scheduled_tokens == 12 + 2, "the last token is sampled and never computed"
    assert stats.num_generated_tokens == 3
    assert stats.num_steps == 4


def test_finished_requests_are_counted_by_reason() -> None:
    host = Host(max_num_seqs=8)
    host.add("stop", eos_token_ids=(EOS,))
    host.add("length", max_tokens=1)
    host.add("abort")
    host.step({"stop": EOS})
    host.abort("abort")
    counts = {"stop": 1, "length": 1, "abort": 1, "refused": 0, "error": 0, "deadline": 0, "repetition": 0}
    assert host.stats().finished == counts
    assert host.stats().num_added == 3


def test_evictions_are_counted_in_cached_blocks() -> None:
    host = Host(num_blocks=4, max_model_len=17)
    host.add("a", 12, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_evictions == 0
    host.add("b", 12, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_evictions == 2, "one block was blank"


def test_preemptions_are_counted_by_cause() -> None:
    host = Host(num_blocks=6, max_model_len=24, enable_prefix_caching=False)
    requests = [host.add("a", 10, max_tokens=12), host.add("b", 10, max_tokens=12)]
    while not host.stats().num_preemptions:
        host.step()
    host.park("a", ParkReason.GRAMMAR)
    host.park("b", ParkReason.GRAMMAR)
    host.ready("a")
    host.step()
    host.reset_prefix_cache(preempt_running=True)
    stats = host.stats()
    assert (stats.num_preempted_by_parking, stats.num_preempted_by_reset, stats.num_displaced) == (1, 1, 0)
    assert stats.num_preemptions == 3, "one for memory: parking a waiting request preempts nothing"
    causes = [cause for request in requests for cause in request.preemption_causes]
    assert sorted(cause.value for cause in causes) == ["memory", "parked", "reset"]


def test_a_snapshot_does_not_change_afterwards() -> None:
    host = Host(max_num_seqs=1)
    host.add("a", 4)
    host.add("b", 4)
    host.step()
    before = host.stats()
    deferrals = dict(before.deferrals)
    host.step()
    assert before.deferrals == deferrals
    assert host.stats().deferrals["sequence_limit"] == deferrals["sequence_limit"] + 1
    with pytest.raises(AttributeError):
        before.num_steps = 0  # type: ignore[misc]


def test_counters_show_growing_memory_pressure() -> None:
    """The same load in smaller and smaller pools: no waiting, then waiting, then preemption; evictions in between."""
    seen = {}
    for num_blocks in (64, 24, 8):
        host = Host(num_blocks=num_blocks, max_num_seqs=8, max_num_batched_tokens=64)
        for index in range(8):
            host.add(f"r{index}", 9, max_tokens=16, arrival_time=float(index))
        host.run_to_end()
        stats = host.stats()
        memory = stats.deferrals["full_sequence"] + stats.deferrals["blocks"] + stats.deferrals["watermark"]
        seen[num_blocks] = (memory > 0, stats.num_preemptions > 0, stats.num_recomputed_tokens > 0)
    assert seen[64] == (False, False, False)
    assert seen[8] == (True, True, True)
    assert seen[24][0], "with three blocks each all start, and as they grow the preempted ones wait"


def test_deferrals_are_counted_once_per_step_for_the_head() -> None:
    host = Host(max_num_seqs=1)
    for index in range(10):
        host.add(f"r{index}", 4)
    for _ in range(5):
        host.step()
    assert sum(host.stats().deferrals.values()) == 5
    assert host.stats().deferrals["behind"] == 0
