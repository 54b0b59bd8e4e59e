"""Limits of the tokens in a step, the end of a sequence, and requests that can never run."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import ParkReason, Reason, Request, RequestRefused, RequestStatus
from tests.core.helpers import Host, cached_of, names, tokens_of


def test_the_long_prefill_threshold_bounds_every_request() -> None:
    host = Host(long_prefill_token_threshold=6, max_num_batched_tokens=16)
    host.add("long", 14)
    host.add("b", 4)
    outputs = [tokens_of(host.step()) for _ in range(3)]
    assert outputs == [{"long": 6, "b": 4}, {"long": 6, "b": 1}, {"long": 2, "b": 1}]


def test_the_long_prefill_threshold_applies_only_with_other_requests() -> None:
    host = Host(long_prefill_token_threshold=2)
    host.add("a", 20)
    assert tokens_of(host.step()) == {"a": 16}, "no other request runs or waits"
    host.add("b", 20)
    assert tokens_of(host.step()) == {"a": 2, "b": 2}
    host.abort("a")
    assert tokens_of(host.step()) == {"b": 16}


def test_the_long_prefill_threshold_does_not_limit_decode() -> None:
    host = Host(long_prefill_token_threshold=1, max_num_seqs=1)
    host.add("a", 2, max_tokens=3)
    host.add("waiting")
    assert [tokens_of(host.step()) for _ in range(4)] == [{"a": 1}] * 4


def test_the_long_prefill_threshold_does_not_count_cached_tokens() -> None:
    host = Host(long_prefill_token_threshold=4)
    prompt = host.prompt(13)
    host.add("a", prompt, max_tokens=1)
    host.run_to_end()
    host.add("other", 2, max_tokens=9)
    host.step()
    host.add("b", [*prompt[:12], *host.prompt(6)], max_tokens=1)
    output = host.step()
    assert (cached_of(output), tokens_of(output)) == ({"b": 12}, {"other": 1, "b": 4})


def test_an_adaptive_threshold_is_at_least_an_even_share_of_the_budget() -> None:
    config = {"long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True}
    host = Host(num_blocks=30, max_num_batched_tokens=16, max_num_seqs=5, **config)
    host.add("long", 40, max_tokens=9)
    assert tokens_of(host.step()) == {"long": 16}, "alone: all of it"
    host.add("b", 20)
    assert tokens_of(host.step()) == {"long": 8, "b": 8}, "for two, half each"
    for request_id in "cdefg":
        host.add(request_id, 4, max_tokens=2)
    assert tokens_of(host.step()) == {"long": 3, "b": 3, "c": 3, "d": 3, "e": 3}, "16 // 7 is less than the threshold"


def test_parked_requests_get_no_share_of_the_budget() -> None:
    config = {"long_prefill_token_threshold": 3, "long_prefill_token_threshold_adaptive": True}
    host = Host(**config)
    host.add("parked", 40, park=ParkReason.GRAMMAR)
    host.add("long", 40)
    assert tokens_of(host.step()) == {"long": 16}


def test_a_head_whose_chunk_becomes_smaller_is_checked_again() -> None:
    """Without the full-sequence reserve a verdict depends on the chunk, and so on the number of requests."""
    config = {"long_prefill_token_threshold": 4, "long_prefill_token_threshold_adaptive": True}
    host = Host(num_blocks=6, max_num_batched_tokens=16, full_sequence_must_fit=False, **config)
    host.add("a", 18)
    host.step()
    host.step()
    host.add("b", 20)
    host.step()
    assert host.explain("b").reason is Reason.BLOCKS, "its share is 8 tokens: 2 blocks, and 1 is free"
    host.add("c", 4)
    host.add("d", 4)
    assert tokens_of(host.step()) == {"a": 1, "b": 4}, "now its share is 4 tokens"


# ---------------------------------------------------------------------- chunked prefill off


def test_without_chunking_a_prompt_is_computed_in_one_step() -> None:
    host = Host(enable_chunked_prefill=False)
    host.add("a", 4, max_tokens=3)
    host.step()
    host.add("b", 16, max_tokens=2)
    assert tokens_of(host.step()) == {"a": 1}
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.BUDGET, 1)
    assert tokens_of(host.step()) == {"a": 1}
    assert tokens_of(host.step()) == {"b": 16}, "a has ended"


def test_without_chunking_only_uncached_tokens_must_fit_the_budget() -> None:
    host = Host(enable_chunked_prefill=False)
    shared = host.prompt(8)
    host.add("a", [*shared, 1], max_tokens=4)
    host.step()
    host.add("b", [*shared, *host.prompt(8)], max_tokens=2)
    output = host.step()
    assert tokens_of(output) == {"a": 1, "b": 8}
    assert cached_of(output) == {"b": 8}


def test_without_chunking_a_prompt_over_the_budget_is_refused() -> None:
    host = Host(enable_chunked_prefill=False)
    message = (
        r"request 'a' refused: the prompt has 17 tokens, more than max_num_batched_tokens 16, and "
        "enable_chunked_prefill is off; raise max_num_batched_tokens, shorten the prompt or turn "
        "enable_chunked_prefill on"
    )
    with pytest.raises(RequestRefused, match=message):
        host.add("a", 17)


def test_without_chunking_a_resumed_request_is_chunked_anyway() -> None:
    host = Host(enable_chunked_prefill=False, enable_prefix_caching=False, max_num_batched_tokens=8)
    request = host.add("a", 8, max_tokens=8)
    for _ in range(4):
        host.step()
    assert request.num_tokens == 12, "more than the budget by now"
    host.park("a")
    host.ready("a")
    assert [tokens_of(host.step()) for _ in range(3)] == [{"a": 8}, {"a": 4}, {"a": 1}]


def test_without_chunking_a_waiting_prompt_blocks_the_queue() -> None:
    host = Host(enable_chunked_prefill=False)
    host.add("a", 6)
    host.add("b", 12)
    host.add("c", 1)
    assert names(host.step().requests) == ["a"]
    assert host.explain("c").reason is Reason.BEHIND


# ---------------------------------------------------------------------- the end of a sequence


@pytest.mark.parametrize(
    ("config", "fields", "generated", "detail"),
    [
        ({}, {"max_tokens": 5}, 5, "max_tokens"),
        ({"max_model_len": 12}, {"max_tokens": 50}, 4, "max_model_len"),
        ({}, {"max_tokens": 50, "max_total_tokens": 11}, 3, "max_total_tokens"),
        ({"num_blocks": 3}, {"max_tokens": 50}, 5, "kv_capacity"),
        ({}, {"max_tokens": 3, "max_total_tokens": 11}, 3, "max_tokens"),
    ],
)
def test_a_request_ends_at_its_first_length_limit_and_names_it(
    config: dict[str, Any], fields: dict[str, Any], generated: int, detail: str
) -> None:
    host = Host(**config)
    request = host.add("a", 8, **fields)
    host.run_to_end()
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert (request.num_output_tokens, request.finish_detail) == (generated, detail)


def test_the_last_output_token_of_a_request_needs_no_kv_slot() -> None:
    host = Host(num_blocks=1, max_num_seqs=1)
    request = host.add("a", 4, max_tokens=9)
    host.run_to_end()
    assert (request.num_tokens, request.finish_detail) == (5, "kv_capacity")


def test_a_request_that_outgrows_the_pool_ends_at_the_pool_s_capacity() -> None:
    host = Host(num_blocks=4, max_num_seqs=2)
    large = host.add("large", 8, max_tokens=50)
    small = host.add("small", 4, max_tokens=6)
    host.run_to_end()
    assert (large.num_output_tokens, large.finish_detail) == (9, "kv_capacity")
    assert (small.num_output_tokens, small.finish_detail) == (6, "max_tokens")


# ---------------------------------------------------------------------- refused when added


@pytest.mark.parametrize(
    ("config", "prompt", "fields", "message"),
    [
        (
            {"max_model_len": 12},
            12,
            {},
            "the prompt has 12 tokens and max_model_len is 12, which leaves no room for a generated token; shorten the "
            "prompt to 11 tokens",
        ),
        (
            {"num_blocks": 7, "num_reserved_blocks": 2},
            21,
            {},
            "the prompt has 21 tokens and needs 6 KV blocks of 4, and the pool has 5; shorten the prompt or give the "
            "pool at least 8 blocks",
        ),
        (
            {},
            8,
            {"max_total_tokens": 8},
            "the prompt has 8 tokens and max_total_tokens is 8, which leaves no room for a generated token; raise "
            "max_total_tokens",
        ),
    ],
)
def test_requests_that_can_never_run_are_refused_with_a_remedy(
    config: dict[str, Any], prompt: int, fields: dict[str, Any], message: str
) -> None:
    host = Host(**config)
    with pytest.raises(RequestRefused) as refusal:
        host.add("a", prompt, **fields)
    assert str(refusal.value) == f"request 'a' refused: {message}"


def test_the_remedy_named_in_a_refusal_works() -> None:
    host = Host(num_blocks=8, num_reserved_blocks=2)
    request = host.add("a", 21, max_tokens=1)
    host.run_to_end()
    assert request.status is RequestStatus.FINISHED_LENGTH


def test_the_longest_prompt_with_one_output_token_is_served() -> None:
    host = Host(max_model_len=12)
    request = host.add("a", 11, max_tokens=9)
    host.run_to_end()
    assert (request.num_output_tokens, request.finish_detail) == (1, "max_model_len")


def test_a_refused_request_leaves_nothing_behind_and_its_id_is_free() -> None:
    host = Host(max_model_len=12)
    request = Request("a", host.prompt(12), arrival_time=0.0, max_tokens=1)
    with pytest.raises(RequestRefused):
        host.scheduler.add(request, 0.0)
    assert request.status is RequestStatus.FINISHED_REFUSED
    assert request.finish_detail.startswith("the prompt has 12 tokens")
    assert not host.scheduler.has_unfinished_requests()
    assert host.step().finished == ()
    assert (host.stats().num_refused, host.stats().num_added, host.stats().finished["refused"]) == (1, 0, 0)
    host.add("a", 4)
