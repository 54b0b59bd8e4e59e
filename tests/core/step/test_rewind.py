"""Failed steps: `fail` undoes a step that could not be executed, and every later one."""

from __future__ import annotations

import pytest

from pointsman.core import ParkReason, RequestStatus, StepOrderError, StepResult
from tests.core.helpers import EOS, Host, blocks_of, cached_of, names, reference_output, tokens_of


def test_an_admission_of_a_failed_step_returns_to_its_place() -> None:
    host = Host(max_num_seqs=1)
    request = host.add("a", 8)
    host.add("b", 4)
    output = host.schedule()
    host.fail(output)
    assert (request.status, request.row, request.num_computed_tokens) == (RequestStatus.WAITING, None, 0)
    assert host.stats().num_free_blocks == 16
    assert (host.explain("a").position, host.explain("b").position) == (0, 1)
    again = host.schedule()
    assert names(again.new) == ["a"], "as new as before"
    assert tokens_of(again) == tokens_of(output)


def test_a_resumed_request_returns_to_the_front_of_its_class() -> None:
    host = Host(max_num_seqs=1)
    request = host.add("a", 4)
    host.step()
    host.add("b", 4, arrival_time=-1.0)
    host.park("a")
    host.ready("a")
    host.fail(host.schedule())
    assert request.status is RequestStatus.PREEMPTED
    assert names(host.schedule().resumed) == ["a"]


def test_resumed_requests_keep_their_order_among_themselves() -> None:
    host = Host()
    host.add("second", 4, park=ParkReason.GRAMMAR)
    host.add("first", 4)
    host.step()
    host.ready("second")
    host.step()
    for request_id in ("first", "second"):
        host.park(request_id)
        host.ready(request_id)
    failed = host.schedule()
    assert names(failed.resumed) == ["first", "second"], "as they were admitted"
    host.fail(failed)
    assert names(host.schedule().resumed) == ["first", "second"]


def test_a_void_step_does_not_delay_the_reuse_of_a_row() -> None:
    host = Host(max_steps_in_flight=2)
    host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    row = int(first.rows[0])
    host.abort("a")
    host.fail(second)
    host.update(first)
    host.add("b", 4)
    assert host.schedule().rows.tolist() == [row], "only the first step had to end before the row was reused"


def test_a_continued_row_is_rewound_and_keeps_its_blocks() -> None:
    host = Host()
    request = host.add("a", 8, max_tokens=4)
    first = host.step()
    output = host.schedule()
    assert len(output.block_ids) == 1
    host.fail(output)
    assert (request.status, request.num_computed_tokens, request.num_pending) == (RequestStatus.RUNNING, 8, 0)
    assert host.stats().num_free_blocks == 13
    again = host.schedule()
    assert tokens_of(again) == {"a": 1}
    assert again.num_computed_tokens.tolist() == [8]
    assert blocks_of(again, "a") == [*blocks_of(first, "a"), *output.block_ids.tolist()]
    host.update(again)
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 4)


def test_a_chunk_of_a_prompt_is_rewound_to_where_it_began() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 20, max_tokens=3)
    host.step()
    host.fail(host.schedule())
    assert (request.num_computed_tokens, request.phase) == (8, "prefill")
    assert [tokens_of(host.step()) for _ in range(3)] == [{"a": 8}, {"a": 4}, {"a": 1}]
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_later_steps_in_flight_are_void_too() -> None:
    host = Host(max_steps_in_flight=3)
    request = host.add("a", 4, max_tokens=6)
    host.step()
    first, second, third = (host.schedule() for _ in range(3))
    host.update(first)
    host.fail(second)
    assert host.scheduler.num_steps_in_flight == 0
    for output in (second, third):
        with pytest.raises(StepOrderError, match="no step is in flight"):
            host.scheduler.update(output, StepResult([1]), host.now)
        with pytest.raises(StepOrderError, match=f"step {output.step_id} is not in flight: it was updated or failed"):
            host.scheduler.fail(output, host.now)
    assert host.stats().num_failed_steps == 2
    assert (request.num_tokens, request.num_computed_tokens, request.num_pending) == (6, 5, 0)
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 6)


def test_earlier_steps_in_flight_remain_valid() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    host.fail(second)
    assert request.num_pending == 1
    host.update(first)
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 1)


def test_step_ids_continue_after_a_failure() -> None:
    host = Host()
    host.add("a", 4)
    host.fail(host.schedule())
    assert host.schedule().step_id == 1


def test_blocks_published_by_the_failed_step_leave_the_cache() -> None:
    host = Host()
    request = host.add("a", 9)
    host.fail(host.schedule())
    host.abort("a")
    assert host.stats().num_cached_free_blocks == 0
    host.add("b", request.prompt_token_ids)
    assert cached_of(host.step()) == {"b": 0}


def test_blocks_published_before_the_failed_step_stay_cached() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 17)
    host.step()
    host.fail(host.schedule())
    host.abort("a")
    host.add("b", request.prompt_token_ids)
    assert cached_of(host.step()) == {"b": 8}


def test_recomputed_blocks_are_published_again() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 16, max_tokens=1)
    host.step()
    host.fail(host.schedule())
    host.run_to_end()
    host.add("b", [*request.prompt_token_ids, 1])
    assert cached_of(host.step()) == {"b": 16}


def test_a_shared_block_of_a_failed_step_is_recomputed() -> None:
    host = Host()
    prompt = host.prompt(9)
    a, b = host.add("a", prompt, max_tokens=2), host.add("b", prompt, max_tokens=2)
    failed = host.schedule()
    assert cached_of(failed) == {"a": 0, "b": 8}
    host.fail(failed)
    host.abort("a")
    assert cached_of(host.step()) == {"b": 0}
    host.run_to_end()
    assert b.output_token_ids.tolist() == reference_output(prompt, 2)
    assert a.num_output_tokens == 0


def test_a_finish_in_a_failed_output_is_reported_again() -> None:
    host = Host()
    host.add("a", 4)
    host.add("b", 4, max_tokens=8)
    host.step()
    host.abort("a")
    output = host.schedule()
    assert names(output.finished) == ["a"]
    host.fail(output)
    assert names(host.step().finished) == ["a"]
    assert names(host.step().finished) == []


def test_a_preemption_in_a_failed_output_is_reported_again() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    host.add("a", 8)
    host.add("b", 8)
    host.step()
    output = host.schedule()
    assert names(output.preempted) == ["b"]
    host.fail(output)
    b = host.scheduler.get_request("b")
    assert b is not None
    assert b.status is RequestStatus.PREEMPTED
    again = host.schedule()
    assert names(again.preempted) == ["b"]
    assert tokens_of(again) == {"a": 1}


def test_an_abort_during_the_failed_step_stays_valid() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    host.step()
    output = host.schedule()
    host.abort("a")
    host.fail(output)
    assert request.status is RequestStatus.FINISHED_ABORTED
    assert host.stats().num_free_blocks == 16
    assert names(host.step().finished) == ["a"]


def test_a_preempted_request_does_not_wait_for_a_failed_sample() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4, max_tokens=3)
    first = host.schedule()
    host.park("a")
    assert request.num_pending == 1
    host.fail(first)
    assert request.num_pending == 0
    host.ready("a")
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


def test_counters_count_repeated_admissions_again() -> None:
    host = Host()
    host.add("a", 9)
    output = host.schedule()
    assert host.stats().prefix_queries == 9
    host.fail(output)
    assert host.stats().prefix_queries == 9
    host.step()
    assert host.stats().prefix_queries == 18


def test_a_request_may_stop_after_a_repeated_step() -> None:
    host = Host()
    request = host.add("a", 4, eos_token_ids=(EOS,))
    host.step()
    host.fail(host.schedule())
    host.step({"a": EOS})
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.num_output_tokens == 2


# ---------------------------------------------------------------------- resync


def test_the_output_after_a_failure_has_all_full_block_tables() -> None:
    host = Host()
    host.add("a", 6)
    host.add("b", 4)
    host.step()
    host.fail(host.schedule())
    host.add("c", 5)
    output = host.schedule()
    assert output.resync
    for index, row in enumerate(output.rows.tolist()):
        blocks = output.blocks(index).tolist()
        assert len(blocks) == 2
        assert host.scheduler.block_table[row, :2].tolist() == blocks
    host.update(output)
    following = host.step()
    assert not following.resync
    assert len(following.block_ids) == 0


def test_resync_is_set_until_each_running_request_was_in_an_output() -> None:
    host = Host(max_steps_in_flight=3)
    host.add("a", 4, max_tokens=2)
    host.add("b", 4, max_tokens=20)
    host.step()
    second = host.schedule()  # brings a to its limit
    third = host.schedule()
    assert tokens_of(third) == {"b": 1}
    host.fail(third)
    fourth = host.schedule()
    assert (tokens_of(fourth), fourth.resync) == ({"b": 1}, True)
    host.update(second)  # a ends
    assert host.schedule().resync
    host.update(fourth)
    assert not host.schedule().resync


def test_an_empty_step_can_be_failed() -> None:
    host = Host()
    host.fail(host.schedule())
    host.add("a", 4)
    assert tokens_of(host.step()) == {"a": 4}


def test_repeated_failures_change_only_the_step_ids() -> None:
    host = Host(num_blocks=8, max_model_len=32)
    requests = [host.add(f"r{index}", 6, max_tokens=10) for index in range(5)]
    while host.scheduler.has_unfinished_requests():
        seen = None
        for _ in range(3):
            output = host.schedule()
            decision = (tokens_of(output), output.num_computed_tokens.tolist(), output.samples.tolist())
            if output.preempted:
                seen = None  # preemptions remain valid, so the next attempt may admit a request
            assert seen is None or decision == seen
            seen = decision
            host.fail(output)
        host.step()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 10)
