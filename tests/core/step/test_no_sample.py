"""Requests that sample nothing: they finish when their prompt is computed; the host has the result."""

from __future__ import annotations

import pytest

from pointsman.core import FinishReason, RequestRefused, RequestStatus, SchedulerOutput, StepResult
from tests.core.helpers import Host, cached_of, names, reference_output, tokens_of


def completed(output: SchedulerOutput) -> list[str]:
    return [output.requests[index].request_id for index in output.completes.tolist()]


def test_a_request_without_samples_finishes_after_its_prefill() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=0)
    output = host.schedule()
    assert tokens_of(output) == {"a": 6} and completed(output) == ["a"] and not output.samples.any()
    update = host.update(output)
    assert list(update.finished) == [request] and update.counts.tolist() == [0] and len(update.token_ids) == 0
    assert request.status is RequestStatus.FINISHED_STOPPED and request.num_output_tokens == 0
    assert host.stats().num_free_blocks == host.stats().num_blocks
    assert host.stats().finished["stop"] == 1 and host.stats().num_generated_tokens == 0
    assert names(host.step().finished) == ["a"]


def test_a_request_without_samples_finishes_after_its_last_chunk() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 20, max_tokens=0)
    outputs = [host.step() for _ in range(3)]
    assert [tokens_of(output)["a"] for output in outputs] == [8, 8, 4]
    assert [completed(output) for output in outputs] == [[], [], ["a"]]


def test_a_request_without_samples_shares_steps_with_decodes() -> None:
    host = Host()
    other = host.add("a", 4, max_tokens=4)
    host.step()
    host.add("b", 6, max_tokens=0)
    output = host.step()
    assert names(output.requests) == ["a", "b"] and output.samples.tolist() == [True, False]
    assert completed(output) == ["b"]
    host.run_to_end()
    assert other.output_token_ids.tolist() == reference_output(other.prompt_token_ids, 4)


def test_a_request_without_samples_is_not_scheduled_twice_in_flight() -> None:
    host = Host(max_steps_in_flight=3)
    request = host.add("a", 6, max_tokens=0)
    other = host.add("b", 4, max_tokens=4)
    first = host.schedule()
    second, third = host.schedule(), host.schedule()
    assert completed(first) == ["a"] and names(second.requests) == names(third.requests) == ["b"]
    assert request.num_pending == 1
    for output in (first, second, third):
        host.update(output)
    host.run_to_end()
    assert other.num_output_tokens == 4


def test_a_prompt_without_samples_may_fill_max_model_len_and_the_pool() -> None:
    host = Host(max_model_len=16, num_blocks=4)
    with pytest.raises(RequestRefused, match="leaves no room"):
        host.add("a", 16, max_tokens=1)
    host.add("b", 16, max_tokens=0)
    with pytest.raises(RequestRefused, match="17 tokens and max_model_len is 16; shorten"):
        host.add("c", 17, max_tokens=0)
    with pytest.raises(RequestRefused, match="max_total_tokens is 7; raise"):
        host.add("d", 8, max_tokens=0, max_total_tokens=7)
    with pytest.raises(RequestRefused, match="min_tokens"):
        host.add("e", 8, max_tokens=0, min_tokens=1)
    host.run_to_end()
    assert host.stats().finished["stop"] == 1


def test_a_request_without_samples_reads_and_publishes_prefixes() -> None:
    host = Host()
    prompt = host.prompt(9)
    host.add("a", prompt, max_tokens=0)
    host.step()
    host.add("b", prompt, max_tokens=0)
    host.add("c", prompt, max_tokens=0, use_prefix_cache=False)
    output = host.step()
    assert cached_of(output) == {"b": 8, "c": 0} and completed(output) == ["b", "c"]


def test_a_request_preempted_in_flight_finishes_with_that_step() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 6, max_tokens=0)
    output = host.schedule()
    host.reset_prefix_cache(preempt_running=True)
    assert names(host.schedule().requests) == []
    assert list(host.update(output).finished) == [request]


def test_a_request_preempted_before_its_end_recomputes_its_prompt() -> None:
    host = Host(max_num_batched_tokens=4)
    host.add("a", 10, max_tokens=0)
    host.step()
    host.park("a")
    host.reset_prefix_cache()
    host.ready("a")
    outputs = host.run_to_end()
    assert [tokens_of(output)["a"] for output in outputs] == [4, 4, 2]
    assert completed(outputs[-1]) == ["a"]


def test_a_failed_step_is_rolled_back_and_the_prompt_recomputed() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 12, max_tokens=0)
    host.step()
    output = host.schedule()
    assert completed(output) == ["a"]
    host.fail(output)
    assert (request.num_computed_tokens, request.num_pending) == (8, 0)
    output = host.schedule()
    assert tokens_of(output) == {"a": 4} and completed(output) == ["a"]
    host.update(output)
    assert request.finish_reason is FinishReason.STOP


def test_a_row_error_finishes_a_request_without_samples() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=0)
    output = host.schedule()
    update = host.scheduler.update(output, StepResult([], errors={0: "not finite"}), host.now)
    assert list(update.finished) == [request] and request.finish_reason is FinishReason.ERROR


def test_an_abort_in_flight_finishes_a_request_without_samples() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=0)
    output = host.schedule()
    host.abort("a")
    assert not host.update(output).finished and request.finish_reason is FinishReason.ABORT


def test_a_request_without_samples_has_no_expected_output() -> None:
    """The decode reserve keeps no blocks for a request without samples."""
    host = Host(num_blocks=4, max_model_len=16, decode_reserve=4)
    host.add("a", 4, max_tokens=8)
    host.step()
    host.add("b", 8, max_tokens=0)
    assert names(host.step().requests) == ["a", "b"]
