"""Prefix caching as a request sees it: hits, misses, evictions, and counts."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import EncoderInput, Reason
from tests.core.helpers import Host, blocks_of, cached_of, names, reference_output, tokens_of


def test_a_later_request_reuses_the_full_blocks_of_a_common_prefix() -> None:
    host = Host()
    first = host.add("a", 10, max_tokens=1)
    host.run_to_end()
    host.add("b", [*first.prompt_token_ids, 1, 2], max_tokens=1)
    output = host.step()
    assert cached_of(output) == {"b": 8}
    assert tokens_of(output) == {"b": 4}
    assert blocks_of(output, "b")[:2] == [0, 1], "the very blocks that the first one wrote"


def test_requests_of_one_step_share_a_prefix() -> None:
    host = Host()
    prompt = host.prompt(9)
    host.add("a", prompt)
    host.add("b", prompt)
    output = host.step()
    assert tokens_of(output) == {"a": 9, "b": 1}
    assert cached_of(output) == {"a": 0, "b": 8}
    assert blocks_of(output, "a")[:2] == blocks_of(output, "b")[:2]
    assert blocks_of(output, "a")[2] != blocks_of(output, "b")[2]


def test_a_continued_prompt_is_shared_in_the_step_that_computes_it() -> None:
    host = Host(max_num_batched_tokens=8, max_num_seqs=2)
    prompt = host.prompt(13)
    host.add("a", prompt)
    host.step()
    host.add("b", prompt)
    output = host.step()
    assert tokens_of(output) == {"a": 5, "b": 1}
    assert cached_of(output) == {"b": 12}, "8 tokens of the step before, 4 of this one"


def test_without_share_within_step_blocks_are_found_from_the_next_step() -> None:
    host = Host(share_within_step=False)
    prompt = host.prompt(6)
    host.add("a", prompt)
    host.add("b", prompt)
    output = host.step()
    assert tokens_of(output) == {"a": 6, "b": 6}
    host.add("c", prompt)
    assert cached_of(host.step()) == {"c": 4}


def test_a_resumed_request_finds_its_own_prompt_and_output_blocks() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=12)
    for _ in range(4):
        host.step()
    assert (request.num_tokens, request.num_computed_tokens) == (10, 9)
    host.park("a")
    host.ready("a")
    output = host.step()
    assert names(output.resumed) == ["a"]
    assert cached_of(output) == {"a": 8}
    assert tokens_of(output) == {"a": 2}
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 12)


def test_the_next_turn_of_a_conversation_finds_generated_blocks() -> None:
    host = Host()
    first = host.add("a", 4, max_tokens=9)
    host.run_to_end()
    assert first.num_tokens == 13
    host.add("b", [*first.all_token_ids, 7])
    assert cached_of(host.step()) == {"b": 12}


def test_a_block_is_not_published_before_its_last_token_is_computed() -> None:
    host = Host()
    first = host.add("a", 4, max_tokens=4)
    host.run_to_end()
    assert first.num_tokens == 8, "two full blocks of tokens, but the KV of the last token does not exist"
    host.add("b", [*first.all_token_ids, 7])
    assert cached_of(host.step()) == {"b": 4}


def test_generated_blocks_are_published_when_the_request_finishes() -> None:
    host = Host()
    first = host.add("a", 4, max_tokens=12)
    for _ in range(8):
        host.step()
    so_far = first.all_token_ids.tolist()
    assert len(so_far) == 12
    host.add("b", so_far, max_tokens=1)
    assert cached_of(host.step()) == {"b": 4}, "only the prompt"
    host.abort("a")
    host.add("c", so_far, max_tokens=1)
    assert cached_of(host.step()) == {"c": 8}


def test_a_cache_hit_leaves_at_least_one_token_to_compute() -> None:
    host = Host()
    prompt = host.prompt(8)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.add("b", prompt, max_tokens=1)
    output = host.step()
    assert cached_of(output) == {"b": 4}, "both blocks are cached; the second is computed again for its last token"
    assert tokens_of(output) == {"b": 4}
    assert output.samples.tolist() == [True]


def test_only_requests_with_an_equal_salt_share_blocks() -> None:
    host = Host(max_num_batched_tokens=64, max_num_seqs=8)
    prompt = host.prompt(5)
    for request_id, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", ""), ("e", "x"), ("f", None)]:
        host.add(request_id, prompt, cache_salt=salt)
    assert cached_of(host.step()) == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 4, "f": 4}


def test_a_request_without_prefix_cache_neither_looks_up_nor_publishes() -> None:
    host = Host()
    prompt = host.prompt(5)
    host.add("quiet", prompt, use_prefix_cache=False, max_tokens=2)
    host.add("a", prompt, max_tokens=2)
    host.add("silent", prompt, use_prefix_cache=False, max_tokens=2)
    assert cached_of(host.step()) == {"quiet": 0, "a": 0, "silent": 0}
    host.run_to_end()
    assert host.stats().prefix_queries == 5, "only the request that looked up is counted"


@pytest.mark.parametrize("groups", [{}, {"kv_groups": [("full", 0), ("window", 4)]}], ids=["one group", "two groups"])
def test_a_request_that_looks_up_no_blocks_publishes_its_own(groups: dict[str, Any]) -> None:
    host = Host(**groups)
    prompt = host.prompt(9)
    host.add("whole", prompt, skip_reading_prefix_cache=True, max_tokens=2)
    host.add("a", prompt, max_tokens=2)
    assert cached_of(host.step()) == {"whole": 0, "a": 8}
    host.run_to_end()
    host.add("again", prompt, skip_reading_prefix_cache=True, max_tokens=2)
    host.add("b", prompt, max_tokens=2)
    assert cached_of(host.step()) == {"again": 0, "b": 8}
    host.run_to_end()
    assert host.stats().prefix_queries == 18, "of the requests that looked up"


@pytest.mark.parametrize("groups", [{}, {"kv_groups": [("full", 0), ("window", 4)]}], ids=["one group", "two groups"])
def test_a_request_that_looks_up_no_blocks_publishes_its_image_blocks(groups: dict[str, Any]) -> None:
    """Its blocks are found with the same image, and neither with another one nor as text with the same token ids."""
    host = Host(encoder_budget=8, encoder_cache_size=64, **groups)
    prompt, cat, dog = [7, 7, 0, 0, 0, 7, 7, 7, 7], EncoderInput("cat", 2, 3), EncoderInput("dog", 2, 3)
    host.add("whole", prompt, encoder_inputs=[cat], skip_reading_prefix_cache=True, max_tokens=2)
    host.run_to_end()
    for name, inputs, cached in (("text", [], 0), ("dog", [dog], 0), ("cat", [cat], 8)):
        host.add(name, prompt, encoder_inputs=inputs, max_tokens=2)
        assert cached_of(host.step()) == {name: cached}
        host.run_to_end()


def test_without_prefix_caching_no_block_is_found_kept_or_counted() -> None:
    host = Host(enable_prefix_caching=False)
    prompt = host.prompt(9)
    host.add("a", prompt, max_tokens=2)
    host.run_to_end()
    host.add("b", prompt, max_tokens=2)
    assert cached_of(host.step()) == {"b": 0}
    stats = host.stats()
    assert (stats.prefix_queries, stats.prefix_hits, stats.num_cached_free_blocks) == (0, 0, 0)


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    host = Host(num_blocks=6, max_num_batched_tokens=32)
    old, recent = host.prompt(9), host.prompt(9)
    host.add("old", old, max_tokens=1)
    host.run_to_end()
    host.add("recent", recent, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_cached_free_blocks == 4
    host.add("filler", 12, max_tokens=1, use_prefix_cache=False)  # two blank blocks and one cached
    host.run_to_end()
    assert host.stats().num_evictions == 1
    host.add("old again", old, max_tokens=1)
    assert cached_of(host.step()) == {"old again": 4}, "its second block was evicted, its first stayed"
    host.run_to_end()
    host.add("recent again", recent, max_tokens=1)
    assert cached_of(host.step()) == {"recent again": 8}


def test_a_reused_prefix_is_evicted_after_older_prefixes() -> None:
    host = Host(num_blocks=4, max_num_batched_tokens=32)
    first, second = host.prompt(5), host.prompt(5)
    for request_id, prompt in [("a", first), ("b", second), ("c", first)]:
        host.add(request_id, prompt, max_tokens=1)
        host.run_to_end()
    host.add("filler", 12, max_tokens=1, use_prefix_cache=False)
    host.run_to_end()
    assert host.stats().num_evictions == 1
    host.add("first again", first, max_tokens=1)
    host.add("second again", second, max_tokens=1)
    assert cached_of(host.step()) == {"first again": 4, "second again": 0}


def test_a_referenced_prefix_is_never_evicted() -> None:
    host = Host(num_blocks=4, max_model_len=16, max_num_seqs=2)
    holder = host.add("holder", 6, max_tokens=2)
    host.step()
    host.add("filler", 8, max_tokens=1)
    output = host.step()
    assert set(blocks_of(output, "filler")) == {2, 3}
    host.add("b", holder.prompt_token_ids, max_tokens=1)
    assert cached_of(host.step()) == {"b": 4}


def test_a_reset_removes_old_content_and_new_content_is_cached() -> None:
    host = Host()
    prompt = host.prompt(9)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.reset_prefix_cache()
    assert host.stats().num_cached_free_blocks == 0
    host.add("b", prompt, max_tokens=1)
    assert cached_of(host.step()) == {"b": 0}
    host.add("c", prompt, max_tokens=1)
    assert cached_of(host.step()) == {"c": 8}


def test_a_row_that_runs_during_a_reset_publishes_no_further_blocks() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 16, max_tokens=6)
    host.step()
    host.reset_prefix_cache()  # half of its prompt was computed before it, half is computed after it
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)
    assert host.stats().num_cached_free_blocks == 0
    host.add("b", request.prompt_token_ids)
    assert cached_of(host.step()) == {"b": 0}


def test_a_request_resumed_after_a_reset_publishes_again() -> None:
    host = Host()
    request = host.add("a", 9, max_tokens=3)
    host.step()
    host.reset_prefix_cache()
    host.park("a")
    host.ready("a")
    host.run_to_end()
    host.add("b", request.prompt_token_ids)
    assert cached_of(host.step()) == {"b": 8}


def test_a_reset_that_preempts_recomputes_and_republishes_requests() -> None:
    host = Host(max_num_seqs=2)
    first, second = host.add("a", 9, max_tokens=6), host.add("b", 9, max_tokens=6)
    host.add("c")
    host.step()
    host.step()
    host.reset_prefix_cache(preempt_running=True)
    assert host.stats().num_free_blocks == host.stats().num_blocks and host.stats().num_cached_free_blocks == 0
    assert [host.explain(name).position for name in "abc"] == [0, 1, 2]
    output = host.step()
    assert names(output.preempted) == names(output.resumed) == ["a", "b"]
    assert cached_of(output) == {"a": 0, "b": 0} and tokens_of(output) == {"a": 11, "b": 5}
    host.run_to_end()
    for request in (first, second):
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)
        assert request.num_preemptions == 1
    host.add("d", first.prompt_token_ids)
    assert cached_of(host.step()) == {"d": 8}


def test_samples_in_flight_at_a_preempting_reset_are_kept() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 8, max_tokens=6)
    first, second = host.schedule(), host.schedule()
    host.reset_prefix_cache(preempt_running=True)
    host.update(first)
    assert names(host.schedule().requests) == [], "its second sample has not returned"
    assert request.num_pending == 1 and host.explain("a").reason is Reason.IN_FLIGHT
    host.update(second)
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)
    assert tokens_of(host.schedule()) == {"a": 10}


def test_a_step_that_fails_after_a_preempting_reset_caches_nothing() -> None:
    host = Host()
    request = host.add("a", 8, max_tokens=4)
    output = host.schedule()
    host.reset_prefix_cache(preempt_running=True)
    host.fail(output)
    assert request.num_pending == 0 and host.stats().num_cached_free_blocks == 0
    output = host.step()
    assert cached_of(output) == {"a": 0} and tokens_of(output) == {"a": 8}
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 4)


@pytest.mark.parametrize("order", ["fcfs", "fcfs-front", "priority", "priority-by-arrival"])
def test_after_a_preempting_reset_requests_resume_in_running_order(order: str) -> None:
    host = Host(order=order, max_num_seqs=3, max_num_batched_tokens=32)
    for name in "abcd":
        host.add(name)
    host.step()
    host.reset_prefix_cache(preempt_running=True)
    assert names(host.step().admitted) == ["a", "b", "c"]


def test_cache_queries_and_hits_count_tokens_of_new_and_resumed_requests() -> None:
    host = Host(max_num_batched_tokens=32)
    prompt = host.prompt(9)
    host.add("a", prompt, max_tokens=4)
    host.add("b", prompt, max_tokens=4)
    host.step()
    stats = host.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert (stats.resumed_prefix_queries, stats.resumed_prefix_hits) == (0, 0)
    host.park("b")
    host.ready("b")
    host.step()
    stats = host.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (18, 8)
    assert (stats.resumed_prefix_queries, stats.resumed_prefix_hits) == (10, 8)


@pytest.mark.parametrize("num_reserved_blocks", [1, 5])
def test_reserved_block_ids_never_appear_in_a_table(num_reserved_blocks: int) -> None:
    host = Host(num_blocks=num_reserved_blocks + 6, num_reserved_blocks=num_reserved_blocks, max_model_len=24)
    for index in range(6):
        host.add(f"r{index}", 7, max_tokens=8)
    reported: set[int] = set()
    for output in host.run_to_end():
        reported.update(output.block_ids.tolist())
    assert reported == set(range(num_reserved_blocks, num_reserved_blocks + 6)), "all other blocks are used"
    assert host.stats().num_preemptions > 0, "even under pressure"


def test_duplicate_content_is_found_until_its_last_block_is_evicted() -> None:
    host = Host(share_within_step=False, num_blocks=6, max_num_batched_tokens=32)
    prompt = host.prompt(5)
    for request_id in ("a", "b", "c"):
        host.add(request_id, prompt, max_tokens=1)
    host.run_to_end()
    assert host.stats().num_cached_free_blocks == 3, "the same content in three blocks"
    for num_evictions, prompt_tokens in [(1, 16), (2, 20)]:
        host.add(f"filler {num_evictions}", prompt_tokens, max_tokens=1, use_prefix_cache=False)
        host.run_to_end()
        assert host.stats().num_evictions == num_evictions
        host.add(f"reader {num_evictions}", prompt, max_tokens=1)
        assert cached_of(host.step()) == {f"reader {num_evictions}": 4}


def test_a_block_of_prompt_and_output_tokens_is_found_by_a_prompt() -> None:
    host = Host()
    first = host.add("a", 3, max_tokens=4)
    host.run_to_end()
    host.add("b", [*first.all_token_ids[:4], 5])
    assert cached_of(host.step()) == {"b": 4}
