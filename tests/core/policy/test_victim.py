"""Victim policies: the request that is preempted when blocks run out, its place in the queue, and its unchanged
tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Reason, RequestStatus
from pointsman.core.policy.victim import LeastCost
from pointsman.core.state.interfaces import View
from tests.core.helpers import Host, names, reference_output, tokens_of
from tests.forms import short_or_long


def two_that_outgrow_the_pool(**config: Any) -> Host:
    """A pool of four blocks, all held: "a" and "b" each need a third one in the next step."""
    host = Host(**{"num_blocks": 4, "max_model_len": 16, **config})
    host.add("a", 8, max_tokens=6)
    host.add("b", 8, max_tokens=6)
    host.step()
    assert host.stats().num_free_blocks == 0
    return host


def test_the_request_admitted_last_is_preempted() -> None:
    host = two_that_outgrow_the_pool()
    output = host.step()
    assert tokens_of(output) == {"a": 1}
    assert names(output.preempted) == ["b"]
    b = host.scheduler.get_request("b")
    assert b is not None
    assert (b.status, b.num_preemptions, b.num_computed_tokens, b.row) == (RequestStatus.PREEMPTED, 1, 0, None)


def test_a_step_that_preempts_for_memory_admits_no_request() -> None:
    host = two_that_outgrow_the_pool()
    host.add("tiny", 1, max_tokens=1)
    output = host.step()
    assert names(output.preempted) == ["b"]
    assert names(output.admitted) == []
    assert host.stats().num_free_blocks == 1, "it would have fitted"
    assert host.stats().deferrals["preemption"] == 1
    assert host.explain("b").reason is Reason.PREEMPTION
    assert host.explain("tiny").reason is Reason.BEHIND


def test_the_preempted_request_goes_to_the_front_and_keeps_its_tokens() -> None:
    host = two_that_outgrow_the_pool()
    host.add("c", 1, max_tokens=1, arrival_time=-1.0)
    b = host.scheduler.get_request("b")
    assert b is not None
    before = b.output_token_ids.tolist()
    host.step()
    assert b.output_token_ids.tolist() == before
    assert (host.explain("b").position, host.explain("c").position) == (0, 1)
    outputs = host.run_to_end()
    assert b.output_token_ids.tolist() == reference_output(b.prompt_token_ids, 6)
    assert [name for output in outputs for name in names(output.admitted)] == ["b", "c"]


def test_a_request_that_lacks_blocks_may_be_its_own_victim() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    host.add("a", 5)
    host.add("b", 8)
    host.step()
    output = host.step()  # a has a free slot in its second block, b needs a third
    assert tokens_of(output) == {"a": 1}
    assert names(output.preempted) == ["b"]


def test_the_request_admitted_first_is_never_preempted() -> None:
    host = Host(num_blocks=6, max_model_len=24)
    requests = [host.add(f"r{index}", 5, max_tokens=15) for index in range(5)]
    running: list[str] = []
    for output in host.run_to_end():
        lost = names(output.preempted)
        seniors = [name for name in running if name not in lost]
        assert running[: len(seniors)] == seniors, "each victim was admitted after all remaining requests"
        running = [r.request_id for r in output.requests if not r.is_finished]
    assert requests[0].num_preemptions == 0
    assert sum(request.num_preemptions for request in requests) == host.stats().num_preemptions > 0


def test_after_a_victim_with_shared_blocks_another_is_preempted() -> None:
    host = Host(num_blocks=4, max_model_len=16, max_num_seqs=3)
    prompt = host.prompt(8)
    host.add("a", 4, max_tokens=12)
    host.add("b", prompt, max_tokens=4)
    host.add("c", [*prompt, 1], max_tokens=4)
    output = host.step()
    assert tokens_of(output) == {"a": 4, "b": 8, "c": 1}
    assert host.stats().num_free_blocks == 0
    output = host.step()  # a takes c's own block, then b wants one: b itself is the latest
    assert names(output.preempted) == ["c", "b"]
    assert tokens_of(output) == {"a": 1}


def test_requests_preempted_in_one_step_resume_in_admission_order() -> None:
    host = Host(num_blocks=4, long_prefill_token_threshold=8, full_sequence_must_fit=False)
    host.add("a", 15, max_tokens=1)
    host.add("b", 4, max_tokens=4)
    host.add("c", 4, max_tokens=4)
    assert tokens_of(host.step()) == {"a": 8, "b": 4, "c": 4}
    output = host.step()  # a's second chunk needs two blocks
    assert names(output.preempted) == ["c", "b"]
    assert tokens_of(output) == {"a": 7}
    assert names(host.step().resumed) == ["b", "c"]


@pytest.mark.parametrize(("enable_prefix_caching", "recomputed"), [(True, 2), (False, 10)])
def test_lost_tokens_exclude_tokens_that_stay_cached(enable_prefix_caching: bool, recomputed: int) -> None:
    host = Host(enable_prefix_caching=enable_prefix_caching)
    request = host.add("a", 8)
    for _ in range(3):
        host.step()
    assert (request.num_tokens, request.num_computed_tokens) == (11, 10)
    host.park("a")
    host.ready("a")
    host.step()
    assert (host.stats().num_preemptions, host.stats().num_recomputed_tokens) == (1, recomputed)


# ---------------------------------------------------------------------- lowest priority


def test_under_priority_the_least_urgent_request_is_preempted() -> None:
    host = Host(order="priority", num_blocks=4, max_model_len=16)
    host.add("lazy", 8, priority=5)
    host.step()
    host.add("urgent", 8, priority=0, arrival_time=100.0)
    output = host.step()
    assert names(output.preempted) == ["lazy"]


def test_a_victim_loses_its_scheduled_tokens_of_the_step() -> None:
    host = Host(victim="lowest-priority", num_blocks=4, max_model_len=16)
    host.add("lazy", 5, priority=5)
    host.add("urgent", 8, priority=0)
    host.step()
    output = host.step()  # lazy is first in the step and was granted its token before urgent asked for a block
    assert names(output.preempted) == ["lazy"]
    assert tokens_of(output) == {"urgent": 1}
    assert output.total_num_scheduled_tokens == 1


def test_the_token_budget_of_a_victim_goes_to_requests_behind_it() -> None:
    host = Host(
        victim="lowest-priority",
        num_blocks=7,
        max_model_len=28,
        max_num_batched_tokens=9,
        long_prefill_token_threshold=6,
        full_sequence_must_fit=False,
    )
    host.add("lazy", 20, priority=5)
    host.add("urgent", 3)
    host.add("third", 20)
    assert tokens_of(host.step()) == {"lazy": 6, "urgent": 3}
    assert tokens_of(host.step()) == {"lazy": 6, "urgent": 1, "third": 2}
    output = host.step()  # lazy is granted 6 tokens and the last blocks; then urgent asks for one
    assert names(output.preempted) == ["lazy"]
    assert tokens_of(output) == {"urgent": 1, "third": 6}


def test_among_equal_priorities_the_last_arrival_is_preempted() -> None:
    host = Host(victim="lowest-priority", num_blocks=4, max_model_len=16)
    host.add("late", 5, arrival_time=5.0)
    host.step()
    host.add("early", 8, arrival_time=1.0)
    host.step()
    output = host.step()
    assert names(output.preempted) == ["late"]
    assert tokens_of(output) == {"early": 1}


def test_the_victim_policy_can_be_set_independently_of_the_order() -> None:
    host = Host(order="priority", victim="latest", displace=False, num_blocks=4, max_model_len=16)
    host.add("lazy", 4, priority=5, max_tokens=12)
    host.step()
    host.add("urgent", 8, priority=0)
    host.step()
    outputs = [host.step() for _ in range(2)]
    assert [name for output in outputs for name in names(output.preempted)] == ["urgent"]


def test_a_changed_priority_affects_the_next_choice_of_a_victim() -> None:
    host = two_that_outgrow_the_pool(victim="lowest-priority")
    host.set_priority("a", 9)
    output = host.step()
    assert names(output.preempted) == ["a"]
    assert tokens_of(output) == {"b": 1}


def test_a_victim_policy_may_be_an_object() -> None:
    class First:
        name = "first"

        def choose(self, view: View, asking: int) -> int:
            return 0

    host = two_that_outgrow_the_pool(victim=First())
    output = host.step()
    assert names(output.preempted) == ["a"]
    assert tokens_of(output) == {"b": 1}


# ---------------------------------------------------------------------- invisible


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("enable_chunked_prefill", [True, False])
def test_preemption_does_not_change_output_tokens(
    order: str, enable_prefix_caching: bool, enable_chunked_prefill: bool
) -> None:
    host = Host(
        num_blocks=8,
        max_model_len=32,
        order=order,
        enable_prefix_caching=enable_prefix_caching,
        enable_chunked_prefill=enable_chunked_prefill,
    )
    requests = [host.add(f"r{index}", 5 + index, max_tokens=14, priority=index % 3) for index in range(8)]
    host.run_to_end()
    assert sum(request.num_preemptions > 0 for request in requests) > 1
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 14)
    stats = host.stats()
    assert stats.num_free_blocks == 8
    assert stats.num_generated_tokens == 8 * 14


# ---------------------------------------------------------------------- least cost


def three_in_a_full_pool(first: int, second: int, third: int, **config: Any) -> Host:
    """The requests "a", "b" and "c" with prompts of these numbers of tokens hold all blocks of 4 tokens."""
    num_blocks = sum(-(-length // 4) for length in (first, second, third))
    host = Host(**{"victim": "least-cost", "num_blocks": num_blocks, "enable_prefix_caching": False, **config})
    for name, length in (("a", first), ("b", second), ("c", third)):
        host.add(name, length, max_tokens=30 - length)
    host.step()
    assert host.stats().num_free_blocks == 0
    return host


CAN_HOLD = {"max_model_len": 32, "max_num_batched_tokens": 64}


def test_least_cost_without_prefix_cache_loses_fewest_computed_tokens() -> None:
    host = three_in_a_full_pool(12, 5, 14, **CAN_HOLD)
    output = host.step()  # a lacks one block
    assert names(output.preempted) == ["b"]
    assert tokens_of(output) == {"a": 1, "c": 1}


def test_least_cost_chooses_a_victim_that_frees_all_missing_blocks() -> None:
    host = three_in_a_full_pool(12, 3, 12, **CAN_HOLD)
    output = host.step()  # a and c lack a block each, and b has but one
    assert names(output.preempted) == ["c"], "of two with equal cost, the one admitted last"
    assert tokens_of(output) == {"a": 1, "b": 1}


def test_least_cost_first_preempts_the_largest_if_none_frees_enough() -> None:
    host = Host(
        victim="least-cost",
        num_blocks=8,
        enable_prefix_caching=False,
        full_sequence_must_fit=False,
        long_prefill_token_threshold=20,
        **CAN_HOLD,
    )
    host.add("b", 4, max_tokens=8)
    host.add("c", 8, max_tokens=8)
    host.add("a", 31, max_tokens=1)
    assert tokens_of(host.step()) == {"b": 4, "c": 8, "a": 20}
    output = host.step()  # b and c need a block, a three: none frees five, and a itself has most
    assert names(output.preempted) == ["a"]


def test_least_cost_with_prefix_cache_preempts_the_last_admitted() -> None:
    host = three_in_a_full_pool(12, 5, 14, enable_prefix_caching=True, **CAN_HOLD)
    assert names(host.step().preempted) == ["c"]


def test_least_cost_does_not_count_shared_blocks_as_freed() -> None:
    host = Host(victim="least-cost", num_blocks=16, max_model_len=32, max_num_batched_tokens=64)
    shared = host.prompt(8)
    host.add("a", 4)
    host.add("b", [*shared, 1, 2, 3, 4, 5])
    host.add("c", [*shared, 1])
    host.step()
    view = host.scheduler._view
    assert [view.own_blocks(index) for index in range(3)] == view.num_own_blocks.tolist() == [1, 2, 1]
    for missing, chosen in ((1, 2), (2, 1), (3, 1)):
        view.num_missing_blocks = missing
        assert LeastCost().choose(view, 0) == chosen


@pytest.mark.parametrize("option", [{"use_prefix_cache": False}, {"skip_reading_prefix_cache": True}], ids=str)
def test_a_request_outside_the_prefix_cache_is_not_the_first_victim(option: dict[str, bool]) -> None:
    host = Host(victim="least-cost", num_blocks=7, **CAN_HOLD)
    host.add("a", 12, max_tokens=9)
    host.add("b", 8, max_tokens=9)
    host.add("c", 5, max_tokens=9, **option)
    host.step()
    assert names(host.step().preempted)[0] == "b", "all computed tokens of c would be lost"


def test_least_cost_exempts_a_request_preempted_max_preemptions_times() -> None:
    host = three_in_a_full_pool(12, 5, 14, victim="least-cost:max_preemptions=1", **CAN_HOLD)
    host.park("b")
    host.ready("b")
    assert names(host.step().resumed) == []
    host.abort("c")
    host.step()
    assert host.scheduler._view.num_preemptions.tolist() == [0, 1]
    for _ in range(20):
        preempted = names(host.step().preempted)
        assert "b" not in preempted
        if preempted:
            break
    assert preempted == ["a"], "b has fewer tokens, but a was never preempted"


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5"])
def test_an_invalid_max_preemptions_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="max_preemptions"):
        Host(victim=f"least-cost:max_preemptions={value}")


@settings(max_examples=short_or_long(25, 300), deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=2, max_size=9),
    num_blocks=st.integers(10, 16),
    most=st.integers(1, 3),
    knobs=st.sampled_from(
        [
            {},
            {"enable_prefix_caching": True},
            {"full_sequence_must_fit": False, "max_num_batched_tokens": 12},
            {"shortage": "in-order", "admit_after_preemption": True},
            {"reserves": ("growth",)},
        ]
    ),
)
@example([(1, 17), (6, 17)], 10, 1, {"shortage": "in-order", "admit_after_preemption": True})
def test_max_preemptions_exempts_requests_and_all_requests_finish(
    lengths: list[tuple[int, int]], num_blocks: int, most: int, knobs: dict[str, Any]
) -> None:
    """Exempt requests are preempted only if all are exempt, and then not the one admitted first. Every step runs
    something, and all requests finish. (With "in-order" shortage, rows behind one that preempts itself wait for the
    next step.)"""
    victim = Watched(most)
    host = Host(
        **{"num_blocks": num_blocks, "max_model_len": 40, "enable_prefix_caching": False, **knobs}, victim=victim
    )
    requests = [host.add(f"r{i}", prompt, max_tokens=output) for i, (prompt, output) in enumerate(lengths)]
    outputs = host.run_to_end(5_000)
    runs = [output.total_num_scheduled_tokens > 0 for output in outputs]
    if host.config.shortage == "in-order":
        runs = [one or other for one, other in pairwise(runs)]
    assert all(runs)
    assert all(request.is_finished for request in requests)
    total = sum(request.num_preemptions for request in requests)
    assert total == len(victim.chosen) <= most * len(requests) + victim.num_among_exempt


class Watched(LeastCost):
    """Checks the bound at every choice."""

    name = "watched"

    def __init__(self, max_preemptions: int) -> None:
        super().__init__(max_preemptions)
        self.most = max_preemptions
        self.chosen: list[int] = []
        self.num_among_exempt = 0

    def choose(self, view: View, asking: int) -> int:
        index = super().choose(view, asking)
        before = view.num_preemptions.tolist()
        self.chosen.append(index)
        if min(before) >= self.most:
            self.num_among_exempt += 1
            assert index == len(before) - 1 > 0, "the first one is never preempted, nor a request that runs alone"
        else:
            assert before[index] < self.most
        return index
