"""Reserves: the blocks that must stay free at an admission, and the reported reason."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import FinishReason, Reason, Request
from pointsman.core.policy.reserve import LEARNED_OVER, MEAN_OVER, Demand, GrowthReserve, MeanDecodeReserve
from pointsman.core.state.events import Admitted
from pointsman.core.state.interfaces import View
from tests.core.helpers import Host, cached_of, names, tokens_of
from tests.forms import short_or_long


def with_a_running(prompt_tokens: int, **config: Any) -> Host:
    """A host on which "a" runs, with a computed prompt of this number of tokens."""
    host = Host(**{"max_num_batched_tokens": 64, **config})
    host.add("a", prompt_tokens, max_tokens=20)
    host.step()
    return host


# ---------------------------------------------------------------------- full sequence


def test_a_prompt_waits_until_blocks_for_all_its_tokens_are_free() -> None:
    host = with_a_running(13, num_blocks=8, max_num_batched_tokens=16)
    host.add("b", 20)
    assert tokens_of(host.step()) == {"a": 1}, "4 blocks are free: enough for 15 tokens, not for 20"
    head = host.explain("b")
    assert (head.reason, head.missing, head.blocker) == (Reason.FULL_SEQUENCE, 1, "a")


def test_without_full_sequence_must_fit_blocks_for_one_chunk_suffice() -> None:
    host = with_a_running(13, num_blocks=8, max_num_batched_tokens=16, full_sequence_must_fit=False)
    host.add("b", 20)
    assert tokens_of(host.step()) == {"a": 1, "b": 15}


def test_cached_blocks_of_running_requests_need_no_free_blocks() -> None:
    host = Host(num_blocks=8)
    shared = host.prompt(13)
    host.add("a", shared, max_tokens=20)
    host.step()
    host.add("b", [*shared[:12], *host.prompt(8)])
    output = host.step()
    assert cached_of(output) == {"b": 12}, "b needs 5 blocks; a holds 3 of them, and 4 are free"


def test_each_cache_hit_on_a_free_block_uses_a_free_block() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=32)
    shared = host.prompt(13)
    host.add("a", shared, max_tokens=1)
    host.run_to_end()
    host.add("c", 13, max_tokens=20)
    host.step()
    host.add("b", [*shared[:12], *host.prompt(8)])
    assert names(host.step().admitted) == [], "4 free blocks, 3 of them b's own prefix; b needs 5 in all"
    assert host.explain("b").missing == 1


def test_blocks_that_partial_prefills_still_need_are_kept_free() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    host.add("a", 24)
    host.add("b", 12)
    assert tokens_of(host.step()) == {"a": 4}, "7 blocks are free, 5 of them owed to a, and b needs 3"
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.FULL_SEQUENCE, 1)
    assert tokens_of(host.step()) == {"a": 4}, "and in the next step as well: 6 are free, 4 of them owed"
    assert host.explain("b").missing == 1


def test_blocks_that_no_partial_prefill_needs_may_be_allocated() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=8, long_prefill_token_threshold=4)
    host.add("a", 24)
    host.add("b", 8)
    assert tokens_of(host.step()) == {"a": 4, "b": 4}


def test_blocks_for_the_rest_of_a_prompt_admitted_in_the_step_are_kept() -> None:
    host = Host(num_blocks=8, max_num_batched_tokens=16, long_prefill_token_threshold=4)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 12)
    assert tokens_of(host.step()) == {"a": 4, "b": 4}, "3 + 3 blocks are reserved, so c lacks one"
    assert host.explain("c").missing == 1


# ---------------------------------------------------------------------- watermark


def test_the_watermark_keeps_blocks_free_while_requests_run() -> None:
    host = with_a_running(13, num_blocks=10, watermark=0.2)
    host.add("b", 20)
    assert names(host.step().admitted) == [], "6 blocks are free; 5 and the watermark of 2 are 7"
    head = host.explain("b")
    assert (head.reason, head.missing, head.blocker) == (Reason.WATERMARK, 1, "a")


def test_an_admission_may_use_the_blocks_above_the_watermark() -> None:
    host = with_a_running(13, num_blocks=10, watermark=0.2)
    host.add("b", 16)
    assert names(host.step().admitted) == ["b"]
    assert host.stats().num_free_blocks == 2


def test_the_watermark_does_not_apply_when_nothing_runs() -> None:
    host = Host(num_blocks=10, max_num_batched_tokens=64, watermark=0.9)
    host.add("a", 39, max_tokens=1)
    assert names(host.step().admitted) == ["a"]


def test_the_watermark_applies_to_the_second_admission_of_a_step() -> None:
    host = Host(num_blocks=10, max_num_batched_tokens=64, watermark=0.2)
    host.add("a", 16)
    host.add("b", 20)
    assert names(host.step().admitted) == ["a"]
    assert host.explain("b").reason is Reason.WATERMARK


def test_running_requests_may_use_the_blocks_below_the_watermark() -> None:
    host = with_a_running(8, num_blocks=4, max_model_len=16, watermark=0.5)
    for _ in range(6):
        host.step()
    assert (host.stats().num_free_blocks, host.stats().num_preemptions) == (0, 0)


def test_the_watermark_applies_to_a_preempted_request() -> None:
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
def test_the_deferral_reason_is_the_reserve_without_which_it_would_fit(
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


def test_of_reserves_that_defer_only_together_the_largest_is_the_reason() -> None:
    host = with_a_running(13, num_blocks=10, max_num_batched_tokens=16, watermark=0.2)
    host.add("b", 28)
    host.step()  # 6 free; the first chunk of 15 needs 4, the whole 7, with the watermark 9
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.FULL_SEQUENCE, 3)


# ---------------------------------------------------------------------- expected output


def finish(host: Host, request_id: str, num_tokens: int) -> None:
    """Run a request that finishes by itself after this number of tokens."""
    host.add(request_id, 1, max_tokens=num_tokens)
    while host.scheduler.get_request(request_id) is not None:
        host.step()


def test_decode_reserve_mean_keeps_blocks_for_the_mean_output_free() -> None:
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


def test_decode_reserve_mean_is_0_until_a_stop_condition_ends_a_request() -> None:
    host = Host(num_blocks=8, decode_reserve="mean")
    host.add("aborted", 1, max_tokens=30)
    for _ in range(9):
        host.step()
    host.abort("aborted")
    host.add("a", 12, max_tokens=4)
    host.step()
    host.add("b", 16, max_tokens=20)
    assert names(host.step().admitted) == ["b"], "the 9 tokens of the aborted one do not count"


def test_decode_reserve_mean_follows_the_last_finished_requests() -> None:
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
    assert means[-2:] == [18, 10], "the first 3 no longer count: (1000 + 127 * 10) / 128, rounded up, and then 10"


def test_a_blocked_head_is_checked_again_when_the_mean_output_falls() -> None:
    """The verdict on a head is kept; only the mean changes here."""
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


# ---------------------------------------------------------------------- growth


class _View:
    """A view with everything that a reserve reads."""

    block_size, num_usable_blocks, has_prefix_cache, num_waiting = 16, 2_588, False, 100
    rows = num_tokens = np.array([], dtype=np.int64)

    def num_slots_for(self, num_tokens: Any) -> Any:
        return num_tokens


def growth_after(lengths: list[tuple[int, int]], scale: float = 1.0, **view: Any) -> GrowthReserve:
    """The reserve after requests with these prompts and outputs have finished."""
    reserve, seen = GrowthReserve(scale), _View()
    for name, value in view.items():
        setattr(seen, name, value)
    reserve.attach(cast(View, seen))
    for prompt, output in lengths:
        request = Request("a", [1] * prompt, arrival_time=0.0, max_tokens=5000)
        request._state.append_output([7] * output)
        request._state.finish_reason = FinishReason.STOP
        reserve.on_finished(request, 0.0)
    return reserve


def kept(reserve: GrowthReserve, num_waiting: int = 100, others_run: bool = True) -> int:
    demand = Demand(1, 1, 0, others_run, num_waiting)
    return reserve.blocks(Request("b", [1], arrival_time=0.0, max_tokens=9), demand, reserve._view)


def test_growth_reserve_follows_the_documented_formula() -> None:
    """960 and 240 tokens: D = 15, S = 60, W = 1,680, c = 1,080: 15 ln(1080 / 1680 * 2588 / 60 * (1 - e^-4)) = 49.6."""
    assert kept(growth_after([(960, 240)])) == 49
    assert kept(growth_after([(900, 200), (1020, 280)])) == 49, "means"
    assert kept(growth_after([(960, 240)], 2.0)) == 99, "scaled"
    # With a cache 248 tokens are lost: 15 ln(248 / 1680 * 2588 / 60 * (1 - e^-4)) = 27.5.
    assert kept(growth_after([(960, 240)], has_prefix_cache=True)) == 27
    assert kept(growth_after([(300, 3000)], 8.0)) == 2_588 // 8, "capped"
    assert kept(growth_after([(960, 240)], num_usable_blocks=60)) == 0, "a block costs more than it saves"


def slots_of(*sizes: int) -> Any:
    """`num_slots_for` of a view with groups of these windows; 0: full attention."""
    return lambda tokens: sum(np.minimum(tokens, size) if size else tokens for size in sizes)


def test_growth_reserve_counts_the_blocks_of_every_kv_group() -> None:
    """As above, with everything doubled for two groups; with a window that the prompt fills, D = 15 and S = 92."""
    both = growth_after([(960, 240)], num_slots_for=slots_of(0, 0), num_usable_blocks=2 * 2_588)
    assert kept(both) == 99
    # 15 ln(1080 / 1680 * 2588 / 92 * (1 - e^-6.13)) = 43.4
    assert kept(growth_after([(960, 240)], num_slots_for=slots_of(0, 512))) == 43
    assert kept(growth_after([(960, 240)], num_slots_for=slots_of(512))) == 0, "a window that is full grows no more"
    assert kept(growth_after([(100, 240)], num_slots_for=slots_of(512))) == kept(growth_after([(100, 240)])) > 0
    # Each running request has filled its windows: it grows in one group of six, and releases what all six hold.
    prompts, windows = [(960, 240)] * 8, slots_of(0, *[512] * 5)
    old, young = running(*[(9_000, 200)] * 9), running(*[(960, 200)] * 9)
    assert kept(growth_after(prompts, num_slots_for=windows, **old)) < kept(
        growth_after(prompts, num_slots_for=windows, **young)
    )


def test_growth_reserve_is_smaller_when_few_requests_wait() -> None:
    reserve = growth_after([(300, 1000)])  # 2 W / c = 6,600 / 800: 8 requests
    full = kept(reserve)
    assert [kept(reserve, waiting) for waiting in (2, 4, 6, 8, 9)] == [full // 4, full // 2, full * 3 // 4, full, full]


def test_growth_reserve_is_0_when_no_request_runs_or_has_finished() -> None:
    assert kept(growth_after([(960, 240)]), others_run=False) == 0
    assert kept(growth_after([])) == kept(growth_after([(960, 0)])) == 0
    host = Host(num_blocks=8, reserves=("growth:scale=8",), enable_prefix_caching=False)
    finish(host, "first", 12)
    host.add("whole", 26, max_tokens=6)
    host.add("next", 1, max_tokens=1)
    assert names(host.step().admitted) == ["whole"], "all 8 blocks are for it"


def test_growth_reserve_keeps_blocks_free_and_is_the_deferral_reason() -> None:
    host = Host(num_blocks=24, reserves=("growth:scale=8",), enable_prefix_caching=False, max_num_batched_tokens=99)
    finish(host, "first", 12)
    host.add("a", 60, max_tokens=40)
    host.step()
    for index in range(12):
        host.add(f"b{index}", 23, max_tokens=9)
    assert names(host.step().admitted) == [], "it needs 6 blocks, and 8 are free"
    assert (host.explain("b0").reason, host.explain("b0").missing) == (Reason.RESERVE, 1)
    assert kept(host.scheduler._parts.gates.reserves.policies[-1], 12) == 24 // 8


def test_growth_reserve_follows_the_last_requests_and_counts_changes() -> None:
    reserve = growth_after([(50, 10)] + [(960, 240)] * (LEARNED_OVER - 1))
    before = (kept(reserve), reserve.num_changes)
    request = Request("a", [1] * 960, arrival_time=0.0, max_tokens=500)
    request._state.append_output([7] * 240)
    request._state.finish_reason = FinishReason.ABORT
    reserve.on_finished(request, 0.0)
    assert (kept(reserve), reserve.num_changes) == before, "the host ended it"
    request._state.finish_reason = FinishReason.STOP
    reserve.on_finished(request, 0.0)
    assert kept(reserve) == kept(growth_after([(960, 240)])) == 49
    reserve.attach(reserve._view)
    assert kept(reserve) == 0, "a recording begins without learned values"


def running(*rows: tuple[int, int]) -> dict[str, Any]:
    """The columns of a view for running requests with these prompt and output tokens."""
    return {"rows": np.arange(len(rows)), "num_tokens": np.array([sum(each) for each in rows], dtype=np.int64)}


def paced(outputs: list[int], *rows: tuple[int, int]) -> int:
    """The reserve beside these running requests, after requests with prompts of 320 and these outputs have finished."""
    reserve = GrowthReserve()
    seen = _View()
    for name, value in running(*rows).items():
        setattr(seen, name, value)
    reserve.attach(cast(View, seen))
    for row, (prompt, _) in enumerate(rows):
        request = Request("a", [1] * prompt, arrival_time=0.0, max_tokens=5000)
        request._state.row = row
        reserve.on_admitted(Admitted(request, False, 0, 0, False, 0.0))
        request._state.row = None
    for output in outputs:
        request = Request("b", [1] * 320, arrival_time=0.0, max_tokens=5000)
        request._state.append_output([7] * output)
        request._state.finish_reason = FinishReason.STOP
        reserve.on_finished(request, 0.0)
    return kept(reserve)


def test_growth_reserve_is_smaller_when_running_requests_near_their_end() -> None:
    outputs = list(range(100, 1_650, 50))
    usual = paced(outputs)
    assert paced(outputs, (320, 1_350), (320, 1_400)) < usual < paced(outputs, (320, 50), (320, 100))
    assert paced(outputs, (1_370, 0), (1_420, 0)) > usual, "their outputs count, not their length"
    assert paced(outputs, (600, 1_100), (200, 50)) < paced(outputs, (200, 1_100), (600, 50)), (
        "and the blocks they release"
    )
    assert paced(outputs, *[(320, 9_000)] * 200) >= usual // 3, "within a factor"


@settings(max_examples=short_or_long(100, 600), deadline=None)
@given(
    ends=st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 3000)), min_size=1, max_size=6),
    pool=st.integers(1, 5000),
    has_cache=st.booleans(),
    rows=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9000)), max_size=4),
    waiting=st.lists(st.integers(1, 12), min_size=2, max_size=2),
)
def test_growth_reserve_is_bounded_and_deterministic(
    ends: list[tuple[int, int]], pool: int, has_cache: bool, rows: list[tuple[int, int]], waiting: list[int]
) -> None:
    """At most an eighth of the pool; not less with more waiting requests; the same while `num_changes` is the same."""
    reserve = growth_after(ends, num_usable_blocks=pool, has_prefix_cache=has_cache, **running(*rows))
    found = {}
    for number in sorted(waiting):
        reserve._view.num_waiting = number  # type: ignore[misc]
        found[number] = (reserve.num_changes, kept(reserve, number))
    (few, less), (many, more) = found[min(waiting)], found[max(waiting)]
    assert 0 <= less <= more <= pool / 8
    assert few != many or less == more


def test_a_blocked_head_is_checked_again_when_fewer_requests_wait() -> None:
    """The verdict on a head is kept; only the number of requests behind it changes here."""
    host = Host(num_blocks=24, reserves=("growth:scale=8",), enable_prefix_caching=False, max_num_batched_tokens=99)
    finish(host, "first", 12)
    assert host.scheduler._parts.gates.reserves.policies[-1]._enough > 1
    host.add("a", 60, max_tokens=40)
    host.step()
    for index in range(12):
        host.add(f"b{index}", 23, max_tokens=9)
    assert names(host.step().admitted) == []
    for index in range(1, 12):
        host.abort(f"b{index}")
    assert names(host.step().admitted) == ["b0"]
