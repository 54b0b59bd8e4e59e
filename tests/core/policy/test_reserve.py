"""How much must stay free when a request is admitted, and which rung of the ladder stopped it."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import FinishReason, Reason, Request
from pointsman.core.policy.reserve import MEAN_OVER, MeanDecodeReserve
from tests.core.helpers import Host, cached_of, names, tokens_of


def with_a_running(prompt_tokens: int, **config: Any) -> Host:
    """A host on which "a" runs with a prompt of that many tokens, all computed."""
    host = Host(**{"max_num_batched_tokens": 64, **config})
    host.add("a", prompt_tokens, max_tokens=20)
    host.step()
    return host


# ---------------------------------------------------------------------- full sequence


def test_a_prompt_whose_first_chunk_fits_waits_until_all_of_it_does() -> None:
    host = with_a_running(13, num_blocks=8, max_num_batched_tokens=16)
    host.add("b", 20)
    assert tokens_of(host.step()) == {"a": 1}, "4 blocks are free: enough for 15 tokens, not for 20"
    head = host.explain("b")
    assert (head.reason, head.missing, head.blocker) == (Reason.FULL_SEQUENCE, 1, "a")


def test_without_the_full_sequence_rule_the_first_chunk_is_enough() -> None:
    host = with_a_running(13, num_blocks=8, max_num_batched_tokens=16, full_sequence_must_fit=False)
    host.add("b", 20)
    assert tokens_of(host.step()) == {"a": 1, "b": 15}


def test_cached_blocks_that_somebody_holds_cost_nothing() -> None:
    host = Host(num_blocks=8)
    shared = host.prompt(13)
    host.add("a", shared, max_tokens=20)
    host.step()
    host.add("b", [*shared[:12], *host.prompt(8)])
    output = host.step()
    assert cached_of(output) == {"b": 12}, "5 blocks, of which a holds 3: the 4 free ones suffice"


def test_cached_blocks_that_nobody_holds_are_free_blocks_and_cost_one_each() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=32)
    shared = host.prompt(13)
    host.add("a", shared, max_tokens=1)
    host.run_to_end()
    host.add("c", 13, max_tokens=20)
    host.step()
    host.add("b", [*shared[:12], *host.prompt(8)])
    assert names(host.step().admitted) == [], "4 free blocks, 3 of them b's own prefix; b needs 5 in all"
    assert host.explain("b").missing == 1


def test_what_partly_computed_prompts_are_owed_is_kept_for_them() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    host.add("a", 24)
    host.add("b", 12)
    assert tokens_of(host.step()) == {"a": 4}, "7 blocks are free, 5 of them owed to a, and b needs 3"
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.FULL_SEQUENCE, 1)
    assert tokens_of(host.step()) == {"a": 4}, "and in the next step as well: 6 are free, 4 of them owed"
    assert host.explain("b").missing == 1


def test_what_is_left_beside_the_owed_blocks_may_be_taken() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    host.add("a", 24)
    host.add("b", 8)
    assert tokens_of(host.step()) == {"a": 4, "b": 4}


def test_a_prompt_admitted_in_this_step_is_owed_its_rest_too() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 12)
    assert tokens_of(host.step()) == {"a": 4, "b": 4}, "3 + 3 blocks are spoken for, so c would lack one"
    assert host.explain("c").missing == 1


# ---------------------------------------------------------------------- watermark


def test_the_watermark_keeps_a_share_of_the_pool_free_while_something_runs() -> None:
    host = with_a_running(13, num_blocks=10, watermark=0.2)
    host.add("b", 20)
    assert names(host.step().admitted) == [], "6 blocks are free; 5 and the watermark of 2 are 7"
    head = host.explain("b")
    assert (head.reason, head.missing, head.blocker) == (Reason.WATERMARK, 1, "a")


def test_an_admission_may_go_down_to_the_watermark() -> None:
    host = with_a_running(13, num_blocks=10, watermark=0.2)
    host.add("b", 16)
    assert names(host.step().admitted) == ["b"]
    assert host.stats().num_free_blocks == 2


def test_the_watermark_does_not_hold_when_nothing_runs_or_a_large_request_could_never_start() -> None:
    host = Host(num_blocks=10, max_num_batched_tokens=64, watermark=0.9)
    host.add("a", 39, max_tokens=1)
    assert names(host.step().admitted) == ["a"]


def test_the_watermark_holds_for_the_second_admission_of_a_step() -> None:
    host = Host(num_blocks=10, max_num_batched_tokens=64, watermark=0.2)
    host.add("a", 16)
    host.add("b", 20)
    assert names(host.step().admitted) == ["a"]
    assert host.explain("b").reason is Reason.WATERMARK


def test_running_requests_grow_into_the_watermark() -> None:
    host = with_a_running(8, num_blocks=4, max_model_len=16, watermark=0.5)
    for _ in range(6):
        host.step()
    assert (host.stats().num_free_blocks, host.stats().num_preemptions) == (0, 0)


def test_the_watermark_holds_for_a_preempted_request_too() -> None:
    host = with_a_running(13, num_blocks=10, watermark=0.3)
    host.add("b", 12, max_tokens=20)
    assert names(host.step().admitted) == ["b"]
    host.park("b")
    host.ready("b")
    for _ in range(4):
        assert names(host.step().admitted) == [], "b has 13 tokens by now: 4 blocks and the watermark of 3"
    assert host.explain("b").reason is Reason.WATERMARK
    host.abort("a")
    assert names(host.step().admitted) == ["b"]


# ---------------------------------------------------------------------- the rungs


@pytest.mark.parametrize(
    ("prompt", "config", "rung", "missing"),
    [
        (5, {"watermark": 0.25}, Reason.WATERMARK, 1),
        (24, {"max_num_batched_tokens": 8}, Reason.FULL_SEQUENCE, 3),
        (13, {"max_num_batched_tokens": 32}, Reason.BLOCKS, 1),
        (5, {"max_num_seqs": 1}, Reason.SEQUENCE_LIMIT, 1),
        (5, {"max_num_seqs": 1, "watermark": 0.25}, Reason.SEQUENCE_LIMIT, 1),
    ],
    ids=["watermark", "full sequence", "blocks", "sequence limit", "sequence limit before memory"],
)
def test_the_rung_counted_is_the_one_whose_removal_alone_would_let_the_request_in(
    prompt: int, config: dict[str, Any], rung: Reason, missing: int
) -> None:
    host = with_a_running(17, **{"num_blocks": 8, "max_model_len": 32, **config})
    while host.explain("a").phase == "prefill":
        host.step()
    host.add("b", prompt)
    before = host.stats().deferrals
    host.step()
    after = host.stats().deferrals
    assert {name for name in after if after[name] != before[name]} == {rung.value}
    head = host.explain("b")
    assert (head.reason, head.missing) == (rung, missing)


def test_when_two_reserves_stand_in_the_way_together_the_fuller_one_is_named() -> None:
    host = with_a_running(13, num_blocks=10, max_num_batched_tokens=16, watermark=0.2)
    host.add("b", 28)
    host.step()  # 6 free; the first chunk of 15 needs 4, the whole 7, with the watermark 9
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.FULL_SEQUENCE, 3)


# ---------------------------------------------------------------------- expected output


def finish(host: Host, request_id: str, num_tokens: int) -> None:
    """A request that ends by itself after so many tokens."""
    host.add(request_id, 1, max_tokens=num_tokens)
    while host.scheduler.get_request(request_id) is not None:
        host.step()


def test_the_mean_of_what_ended_is_kept_free_for_the_next() -> None:
    host = Host(num_blocks=8, decode_reserve="mean")
    finish(host, "short", 3)
    finish(host, "long", 8)  # 5.5 on average: 6 tokens, 2 blocks
    host.add("a", 16, max_tokens=4)
    host.step()
    host.add("b", 12, max_tokens=20)
    assert names(host.step().admitted) == [], "b needs 3 blocks and 2 for its output; a holds 5 of the 8"
    assert (host.explain("b").reason, host.explain("b").missing) == (Reason.DECODE_RESERVE, 2)
    host.step()
    host.step()
    assert names(host.step().admitted) == ["b"], "a has ended"


def test_nothing_is_expected_before_anything_has_ended_by_itself() -> None:
    host = Host(num_blocks=8, decode_reserve="mean")
    host.add("aborted", 1, max_tokens=30)
    for _ in range(9):
        host.step()
    host.abort("aborted")
    host.add("a", 12, max_tokens=4)
    host.step()
    host.add("b", 16, max_tokens=20)
    assert names(host.step().admitted) == ["b"], "the 9 tokens of the aborted one do not count"


def test_the_mean_follows_the_last_ends() -> None:
    reserve = MeanDecodeReserve()
    means = []
    for length in [1000] * 3 + [10] * (MEAN_OVER - 1) + [10]:
        request = Request("a", [1], arrival_time=0.0, max_tokens=2000)
        request._state.append_output([7] * length)
        request._state.finish_reason = FinishReason.STOP
        before, changes = reserve.num_tokens, reserve.num_changes
        reserve.on_finished(request, 0.0)
        assert reserve.num_changes - changes == (reserve.num_tokens != before)
        means.append(reserve.num_tokens)
    assert means[:4] == [1000, 1000, 1000, 753]
    assert means[-2:] == [18, 10], "the first 3 have left: (1000 + 127 * 10) / 128, rounded up, and then 10"


def test_a_blocked_head_is_looked_at_again_when_less_is_expected() -> None:
    """The verdict on a head is remembered; nothing but the mean changes here."""
    host = Host(num_blocks=8, decode_reserve="mean", enable_prefix_caching=False)
    finish(host, "long", 16)
    short = host.add("short", 1, max_tokens=2, arrival_time=0.0)
    host.add("a", 10, max_tokens=9, arrival_time=1.0)
    host.step()
    host.park("short")
    host.add("b", 8, max_tokens=20, arrival_time=2.0)
    host.step()
    assert host.explain("b").reason is Reason.DECODE_RESERVE, "2 blocks and 4; 5 are free"
    assert short.num_output_tokens == 1
    host.finish("short", FinishReason.STOP)  # (16 + 1) / 2: 9 tokens, 3 blocks
    assert names(host.step().admitted) == ["b"]
