"""Under "priority" a more urgent waiting request preempts less urgent running ones, if it can then be admitted."""

from __future__ import annotations

from typing import Any

import pytest

from pointsman.core import PreemptionCause, Reason, Request, RequestStatus, SchedulerOutput, StepResult
from tests.core.helpers import Host, names, reference_output, tokens_of


def priority_host(**config: Any) -> Host:
    return Host(**{"order": "priority", "max_num_batched_tokens": 32, **config})


def test_priority_preemption_frees_a_sequence_slot() -> None:
    host = priority_host(max_num_seqs=1)
    lazy = host.add("lazy", 4, priority=5, max_tokens=6)
    host.step()
    host.add("urgent", 4, priority=0, max_tokens=2)
    output = host.step()
    assert names(output.preempted) == ["lazy"]
    assert tokens_of(output) == {"urgent": 4}
    assert (host.stats().num_displaced, host.stats().num_preemptions) == (1, 1)
    assert lazy.preemption_causes == (PreemptionCause.DISPLACED,)
    host.run_to_end()
    assert lazy.output_token_ids.tolist() == reference_output(lazy.prompt_token_ids, 6)


def test_no_priority_preemption_while_too_many_run_for_a_lowered_limit() -> None:
    host = priority_host()
    for request_id in "abc":
        host.add(request_id, 2, priority=5, max_tokens=20)
    host.step()
    host.set_max_num_active_seqs(1)
    host.add("urgent", 4, priority=0)
    assert not host.step().preempted, "two would be preempted for one sequence slot"
    host.abort("a")
    host.abort("b")
    assert names(host.step().preempted) == ["c"]


def test_the_fewest_requests_are_preempted_for_blocks_newest_first() -> None:
    host = priority_host(num_blocks=4, max_model_len=16)
    host.add("a", 5, priority=5)
    host.add("b", 5, priority=5)
    host.step()
    host.add("urgent", 8, priority=0)
    output = host.step()
    assert names(output.preempted) == ["b"]
    assert tokens_of(output) == {"a": 1, "urgent": 8}


def test_the_least_urgent_request_is_preempted_first() -> None:
    host = priority_host(max_num_seqs=3)
    for request_id, priority in [("p2", 2), ("p9", 9), ("p5", 5)]:
        host.add(request_id, 4, priority=priority)
    host.step()
    host.add("urgent", 4, priority=0)
    assert names(host.step().preempted) == ["p9"]


def test_several_requests_are_preempted_if_one_is_not_enough() -> None:
    host = priority_host(num_blocks=6, max_model_len=24)
    for request_id in ("a", "b", "c"):
        host.add(request_id, 5, priority=5)
    host.step()
    host.add("urgent", 15, priority=0)
    output = host.step()
    assert names(output.preempted) == ["c", "b"]
    assert tokens_of(output) == {"a": 1, "urgent": 15}


def test_no_priority_preemption_if_the_head_would_still_not_fit() -> None:
    host = priority_host(num_blocks=8, max_model_len=32)
    host.add("equal", 17, priority=0)
    host.add("lazy", 5, priority=5)
    host.step()
    host.add("urgent", 16, priority=0)
    output = host.step()  # 3 blocks are not held by its equal, and it needs 4
    assert names(output.preempted) == []
    assert tokens_of(output) == {"equal": 1, "lazy": 1}
    assert host.explain("urgent").reason is Reason.BLOCKS


def test_no_preemption_if_the_head_fits_anyway() -> None:
    host = priority_host()
    host.add("lazy", 4, priority=5)
    host.step()
    host.add("urgent", 4, priority=0)
    output = host.step()
    assert names(output.preempted) == []
    assert tokens_of(output) == {"lazy": 1, "urgent": 4}
    assert host.stats().num_displaced == 0


def test_equal_priority_never_preempts() -> None:
    host = priority_host(max_num_seqs=1)
    host.add("a", 4, priority=3)
    host.step()
    host.add("b", 4, priority=3)
    assert tokens_of(host.step()) == {"a": 1}
    assert host.explain("b").reason is Reason.SEQUENCE_LIMIT


def test_shared_blocks_do_not_count_as_freed() -> None:
    host = priority_host(num_blocks=7, max_model_len=28)
    shared = host.prompt(8)
    host.add("equal", [*shared, 1], priority=0)
    host.add("lazy", [*shared, 2], priority=5)
    host.step()
    assert host.stats().num_free_blocks == 3
    host.add("too large", 18, priority=0)
    assert names(host.step().preempted) == [], "without lazy 4 blocks are free, not 6"
    host.abort("too large")
    host.add("just fits", 16, priority=0)
    assert names(host.step().preempted) == ["lazy"]


def test_blocks_that_others_need_in_the_step_do_not_count_as_free() -> None:
    host = priority_host(num_blocks=5, max_model_len=16)
    host.add("equal", 8, priority=0)
    host.add("lazy", 5, priority=5)
    host.step()
    host.add("urgent", 12, priority=0)
    output = host.step()  # lazy's two blocks and a free one are three, but the equal one takes a block in this step
    assert names(output.preempted) == []
    assert "urgent" not in tokens_of(output)


def test_budget_that_others_use_does_not_count_as_free() -> None:
    host = priority_host(max_num_batched_tokens=4, max_num_seqs=2)
    host.add("equal", 30, priority=0)
    host.step()
    host.add("urgent", 4, priority=0, arrival_time=100.0)
    host.step()
    assert host.stats().num_displaced == 0
    assert host.explain("urgent").reason is Reason.BUDGET


def test_blocks_owed_to_partial_prefills_do_not_count_as_free() -> None:
    host = priority_host(num_blocks=10, long_prefill_token_threshold=8)
    host.add("equal", 24, priority=0)
    host.add("lazy", 5, priority=5)
    host.step()
    host.add("urgent", 20, priority=0, arrival_time=100.0)
    # 6 blocks without lazy and without the equal one's share of this step; it still needs 2, urgent needs 5
    output = host.step()
    assert names(output.preempted) == []
    assert tokens_of(output) == {"equal": 8, "lazy": 1}


def test_cached_blocks_that_another_request_holds_need_no_free_blocks() -> None:
    host = priority_host(num_blocks=6, full_sequence_must_fit=False)
    shared = host.prompt(8)
    host.add("equal", [*shared, 1], priority=0)
    host.add("lazy", 5, priority=5)
    host.step()
    host.add("urgent", [*shared, *host.prompt(9)], priority=0)
    output = host.step()  # 5 blocks, 2 of which the equal one holds; one is free and lazy has two
    assert names(output.preempted) == ["lazy"]
    assert tokens_of(output) == {"equal": 1, "urgent": 9}


def test_no_preemption_for_a_request_that_waits_for_its_samples() -> None:
    host = priority_host(max_num_seqs=2, max_steps_in_flight=3)
    host.add("urgent", 4, priority=0)
    host.add("lazy", 4, priority=5)
    first = host.schedule()
    host.park("urgent")
    host.add("other", 4, priority=0)
    host.schedule()
    host.ready("urgent")
    third = (
        host.schedule()
    )  # it is the head and more urgent than lazy, but cannot be admitted before its sample is back
    assert names(third.preempted) == []
    assert tokens_of(third) == {"lazy": 1, "other": 1}
    assert host.explain("urgent").reason is Reason.SEQUENCE_LIMIT
    host.update(first)


def test_only_the_preemptor_is_admitted_in_the_step() -> None:
    host = priority_host(max_num_seqs=2)
    host.add("a", 4, priority=5)
    host.add("b", 4, priority=5)
    host.step()
    host.add("first", 4, priority=0)
    host.add("second", 4, priority=1)
    output = host.step()
    assert names(output.preempted) == ["b"]
    assert tokens_of(output) == {"a": 1, "first": 4}
    assert host.explain("second").reason is Reason.DISPLACEMENT
    assert host.stats().deferrals["displacement"] == 1
    output = host.step()
    assert names(output.preempted) == ["a"]
    assert tokens_of(output) == {"first": 1, "second": 4}


def test_victims_are_not_readmitted_in_the_same_step() -> None:
    host = priority_host(num_blocks=6, max_model_len=24, max_num_seqs=3)
    host.add("a", 5, priority=5)
    host.add("b", 13, priority=5)
    host.step()
    host.add("urgent", 4, priority=0)
    output = host.step()
    assert names(output.preempted) == ["b"], "it was admitted last"
    assert tokens_of(output) == {"a": 1, "urgent": 4}
    assert host.explain("b").reason is Reason.DISPLACEMENT


def test_displace_false_turns_priority_preemption_off() -> None:
    host = priority_host(max_num_seqs=1, displace=False)
    host.add("lazy", 4, priority=5, max_tokens=3)
    host.step()
    host.add("urgent", 4, priority=0)
    host.add("lazy too", 4, priority=5)
    outputs = host.run_to_end()
    assert host.stats().num_preemptions == 0
    assert [name for output in outputs for name in names(output.admitted)] == ["urgent", "lazy too"]


def test_under_fcfs_a_waiting_request_never_preempts() -> None:
    host = Host(max_num_seqs=1)
    host.add("lazy", 4, priority=5)
    host.step()
    host.add("urgent", 4, priority=-5, arrival_time=-5.0)
    assert tokens_of(host.step()) == {"lazy": 1}


def test_a_waiting_request_made_urgent_preempts_in_the_next_step() -> None:
    host = priority_host(max_num_seqs=1)
    host.add("a", 4, priority=5)
    host.step()
    host.add("b", 4, priority=5)
    assert tokens_of(host.step()) == {"a": 1}
    host.set_priority("b", 4)
    output = host.step()
    assert (names(output.preempted), names(output.admitted)) == (["a"], ["b"])


def test_a_preempted_request_made_urgent_preempts() -> None:
    host = priority_host(max_num_seqs=1)
    a = host.add("a", 4, priority=5, max_tokens=8)
    host.step()
    host.add("b", 4, priority=0, max_tokens=8)
    host.step()
    assert a.status is RequestStatus.PREEMPTED
    host.set_priority("a", -1)
    output = host.step()
    assert (names(output.preempted), names(output.resumed)) == (["b"], ["a"])


def test_without_chunking_no_preemption_for_a_prompt_beyond_the_step() -> None:
    host = priority_host(enable_chunked_prefill=False, max_num_batched_tokens=8, max_num_seqs=2)
    host.add("equal", 4, priority=0)
    host.add("lazy", 4, priority=5)
    host.step()
    host.add("urgent", 8, priority=0, arrival_time=100.0)
    output = host.step()  # without lazy: one token for the equal one, 7 left, and 8 are needed
    assert names(output.preempted) == []
    assert tokens_of(output) == {"equal": 1, "lazy": 1}


def test_blocks_published_by_victims_do_not_defer_the_preemptor() -> None:
    """The dry run counts the head's whole sequence: blocks that others publish may make its first chunk larger."""
    host = Host(
        num_blocks=5,
        block_size=2,
        max_num_seqs=4,
        max_num_batched_tokens=4,
        order="priority",
        full_sequence_must_fit=False,
    )

    def add(request_id: str, prompt: list[int], priority: int) -> None:
        host.scheduler.add(Request(request_id, prompt, arrival_time=0.0, max_tokens=16, priority=priority), host.now)

    def step() -> SchedulerOutput:
        output = host.schedule()
        host.scheduler.update(output, StepResult([7] * int(output.samples.sum())), host.now)
        return output

    add("low", [1, 2], 5)
    for _ in range(4):
        step()
    add("urgent", [60, 61, 62], -9)
    step()
    add("high", [1, 2, 7, 7, 7, 7, 9], -1)
    for _ in range(8):
        before = host.stats().num_displaced
        output = step()
        if host.stats().num_displaced > before:
            assert names(output.admitted), "a request was preempted, and none was admitted"


def test_no_preemption_for_the_budget_alone() -> None:
    host = Host(order="priority", max_num_seqs=4, max_num_batched_tokens=4)
    host.add("low", 20, priority=5)
    host.step()
    host.add("high", 2, priority=0)
    output = host.step()
    assert names(output.requests) == ["low"]
    assert host.stats().num_displaced == 0


@pytest.mark.parametrize("charge", ["uncached", "whole-fits", "whole"])
def test_a_chunked_prompt_needs_no_budget_for_all_its_tokens(charge: str) -> None:
    host = priority_host(max_num_seqs=1, max_num_batched_tokens=5, admission_charge=charge)
    host.add("lazy", 4, priority=5, max_tokens=6)
    host.step()
    host.add("urgent", 9, priority=0, max_tokens=2)
    output = host.step()
    assert names(output.preempted) == ["lazy"] and tokens_of(output) == {"urgent": 5}
