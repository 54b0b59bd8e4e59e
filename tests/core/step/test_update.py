"""The update: tokens, stop conditions, errors of single rows, and results that do not fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from pointsman.core import (
    FinishReason,
    PreemptionCause,
    Reason,
    Request,
    RequestStatus,
    SchedulerOutput,
    StepOrderError,
    StepResult,
    StepResultError,
    StepUpdate,
)
from tests.core.helpers import EOS, Host, cached_of, names, reference_output, tokens_of


def run_with(host: Host, request_id: str, tokens: list[int]) -> None:
    """Sample the given tokens for one request, in this order, while the request runs."""
    for token in tokens:
        if host.scheduler.get_request(request_id) is None:
            return
        host.step({request_id: token})


# ---------------------------------------------------------------------- stop conditions


def test_eos_ends_a_request_and_is_part_of_its_output() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,))
    run_with(host, "a", [1, 2, EOS, 3])
    assert request.status is RequestStatus.FINISHED_STOPPED
    assert request.finish_reason is FinishReason.STOP
    assert request.stop_reason is None, "as in the OpenAI API: EOS is no stop token of the caller's"
    assert request.output_token_ids.tolist() == [1, 2, EOS]


@pytest.mark.parametrize("token", [7, 8, 9])
def test_any_of_several_eos_tokens_ends_a_request(token: int) -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(7, 8, 9))
    run_with(host, "a", [1, token, 2])
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, None)
    assert request.output_token_ids.tolist() == [1, token]


def test_a_stop_token_ends_a_request_and_is_the_stop_reason() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,), stop_token_ids=(41, 42))
    run_with(host, "a", [1, 42, 2])
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, 42)
    assert request.output_token_ids.tolist() == [1, 42]


def test_token_id_0_can_be_an_eos_token() -> None:
    host = Host()
    with_eos = host.add("a", eos_token_ids=(0,))
    without = host.add("b")
    host.step({"a": 0, "b": 0})
    assert with_eos.is_finished
    assert not without.is_finished, "and where there is no EOS, none is assumed"


def test_ignore_eos_continues_to_the_limit() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS, 7), ignore_eos=True, max_tokens=4)
    run_with(host, "a", [EOS, 7, EOS, EOS, EOS])
    assert (request.status, request.num_output_tokens) == (RequestStatus.FINISHED_LENGTH, 4)


def test_ignore_eos_does_not_ignore_an_eos_token_given_as_stop_token() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,), ignore_eos=True, stop_token_ids=(EOS, 42))
    run_with(host, "a", [1, EOS])
    assert (request.status, request.stop_reason) == (RequestStatus.FINISHED_STOPPED, EOS)


def test_before_min_tokens_neither_eos_nor_a_stop_token_ends_a_request() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,), stop_token_ids=(42,), min_tokens=3)
    run_with(host, "a", [EOS, 42])
    assert request.status is RequestStatus.RUNNING
    run_with(host, "a", [5, EOS])
    assert (request.status, request.num_output_tokens) == (RequestStatus.FINISHED_STOPPED, 4)


def test_the_token_that_reaches_min_tokens_may_end_the_request() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,), min_tokens=3)
    run_with(host, "a", [1, EOS, EOS, 4])
    assert request.output_token_ids.tolist() == [1, EOS, EOS]
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_min_tokens_counts_output_across_a_preemption() -> None:
    host = Host()
    request = host.add("a", eos_token_ids=(EOS,), min_tokens=3)
    run_with(host, "a", [1, 2])
    host.park("a")
    host.ready("a")
    run_with(host, "a", [EOS])
    assert (request.status, request.num_output_tokens) == (RequestStatus.FINISHED_STOPPED, 3)


def test_max_tokens_ends_a_request() -> None:
    host = Host()
    request = host.add("a", max_tokens=3)
    run_with(host, "a", [1, 2, 3, 4])
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED_LENGTH, FinishReason.LENGTH)
    assert (request.output_token_ids.tolist(), request.finish_detail) == ([1, 2, 3], "max_tokens")


def test_a_stop_token_at_the_length_limit_is_a_stop() -> None:
    host = Host()
    request = host.add("a", max_tokens=2, eos_token_ids=(EOS,))
    run_with(host, "a", [1, EOS])
    assert request.status is RequestStatus.FINISHED_STOPPED


def test_max_total_tokens_counts_prompt_and_output() -> None:
    host = Host()
    request = host.add("a", 5, max_tokens=50, max_total_tokens=7)
    run_with(host, "a", [1, 2, 3])
    assert (request.num_tokens, request.finish_detail) == (7, "max_total_tokens")


def test_each_request_of_a_batch_has_its_own_stop_conditions() -> None:
    host = Host(max_num_batched_tokens=32)
    host.add("eos", eos_token_ids=(EOS,))
    host.add("other eos", eos_token_ids=(5,))
    host.add("stop", stop_token_ids=(EOS,))
    host.add("none")
    output = host.schedule()
    update = host.update(output, dict.fromkeys(["eos", "other eos", "stop", "none"], EOS))
    assert names(update.finished) == ["eos", "stop"]
    output = host.schedule()
    update = host.update(output, {"other eos": 5, "none": 5})
    assert names(update.finished) == ["other eos"]


# ---------------------------------------------------------------------- what the update says


def test_an_update_reports_appended_tokens_and_finished_requests() -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 4, eos_token_ids=(EOS,))
    host.add("b", 3, max_tokens=1)
    host.add("long", 9)
    output = host.schedule()
    assert tokens_of(output) == {"a": 4, "b": 3, "long": 1}
    update = host.update(output, {"a": EOS, "b": 6})
    assert update.counts.tolist() == [1, 1, 0], "the chunk of the long prompt samples nothing"
    assert update.token_ids.tolist() == [EOS, 6]
    assert names(update.finished) == ["a", "b"]


def test_blocks_of_a_finished_request_are_freed_by_the_update() -> None:
    host = Host()
    host.add("a", 9, max_tokens=1)
    host.step()
    assert host.stats().num_free_blocks == 16


def test_a_result_without_drafts_may_have_counts_if_they_are_correct() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 4)
    host.add("long", 9)
    output = host.schedule()
    update = host.scheduler.update(output, StepResult([5], counts=[1, 0]), host.now)
    assert update.counts.tolist() == [1, 0]
    assert request.output_token_ids.tolist() == [5]


def test_a_row_with_an_error_finishes_and_the_others_continue() -> None:
    host = Host()
    a, b, c = (host.add(request_id, 4, max_tokens=3) for request_id in "abc")
    host.step()
    output = host.schedule()
    update = host.scheduler.update(output, StepResult([1, 3], errors={1: "logits are not finite"}), host.now)
    host.scheduler.check_invariants()
    assert update.counts.tolist() == [1, 0, 1]
    assert (b.status, b.finish_reason) == (RequestStatus.FINISHED_ERROR, FinishReason.ERROR)
    assert b.finish_detail == "logits are not finite"
    assert (b.num_output_tokens, a.num_output_tokens, c.num_output_tokens) == (1, 2, 2)
    assert names(update.finished) == ["b"]
    host.run_to_end()
    assert {reason: count for reason, count in host.stats().finished.items() if count} == {"length": 2, "error": 1}


def test_kv_of_a_failed_row_is_not_found_in_the_prefix_cache() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 12)
    host.step()
    output = host.schedule()  # the last four tokens of the prompt
    host.scheduler.update(output, StepResult([], errors={0: "out of memory"}), host.now)
    host.scheduler.check_invariants()
    host.add("b", [*request.prompt_token_ids, 1])
    assert host.step().num_cached_tokens.tolist() == [8], "the first chunk was written well"


def test_cached_blocks_computed_after_a_failed_row_are_removed_too() -> None:
    host = Host(max_num_batched_tokens=32)
    failing = host.add("a", 5)
    sharing = host.add("b", [*failing.prompt_token_ids[:4], *host.prompt(6)], max_tokens=10)
    output = host.schedule()
    assert output.num_cached_tokens.tolist() == [0, 4], "b reads what a writes in this very step"
    host.scheduler.update(output, StepResult([1], errors={0: "out of memory"}), host.now)
    host.scheduler.check_invariants()
    host.run_to_end()
    assert sharing.num_output_tokens == 10, "the host must report reads of invalid blocks as a separate error"
    host.add("c", sharing.all_token_ids)
    assert host.step().num_cached_tokens.tolist() == [0]


# ---------------------------------------------------------------------- rows without a token


def update_without(host: Host, output: SchedulerOutput, *missing: str) -> StepUpdate:
    """Update with the model's samples, without tokens for the named requests."""
    rows = [index for index, name in enumerate(names(output.requests)) if name in missing]
    result, runs = host.result(output), []
    at = 0
    counts = output.samples.astype(int).tolist() if result.counts is None else result.counts
    for index, count in enumerate(counts):
        runs.append([] if index in rows else list(result.token_ids[at : at + count]))
        at += count
    lengths = None if result.counts is None else [len(run) for run in runs]
    flat = [token for run in runs for token in run]
    update = host.scheduler.update(output, StepResult(flat, lengths, unsampled=rows), host.now)
    host.scheduler.check_invariants()
    return update


def check_outputs(requests: Iterable[Request]) -> None:
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, request.max_tokens)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 3])
def test_a_row_without_a_token_samples_again(max_steps_in_flight: int) -> None:
    host = Host(max_num_batched_tokens=32, max_steps_in_flight=max_steps_in_flight)
    requests = [host.add(request_id, 4, max_tokens=6) for request_id in "abc"]
    host.step()
    in_flight = [host.schedule() for _ in range(max_steps_in_flight)]
    update = update_without(host, in_flight.pop(0), "b")
    assert (update.counts.tolist(), update.finished) == ([1, 0, 1], ())
    b = requests[1]
    assert (b.status, b.num_output_tokens, b.num_pending) == (RequestStatus.PREEMPTED, 1, 0)
    assert b.preemption_causes == (PreemptionCause.UNSAMPLED,)
    for output in in_flight:
        assert host.update(output).counts.tolist() == [1, 0, 1], "what came after the missing token is dropped"
    output = host.step()
    assert (names(output.preempted), names(output.resumed)) == (["b"], ["b"])
    assert cached_of(output) == {"b": 4}, "what it computed is still cached"
    host.run_to_end()
    check_outputs(requests)
    assert host.stats().num_preempted_unsampled == host.stats().num_preemptions == 1


def test_several_rows_without_a_token_resume_in_order_before_new_requests() -> None:
    host = Host(max_num_batched_tokens=32, max_num_seqs=3)
    requests = [host.add(request_id, 4, max_tokens=6) for request_id in "abcd"]
    host.step()
    update_without(host, host.schedule(), "a", "b", "c")
    assert names(host.step().requests) == ["a", "b", "c"]
    host.run_to_end()
    check_outputs(requests)


def test_a_row_whose_prompt_ends_in_the_step_may_have_no_token() -> None:
    host = Host(max_num_batched_tokens=8)
    requests = [host.add("a", 12, max_tokens=3), host.add("b", 12, max_tokens=3)]
    host.step()
    output = host.schedule()
    assert output.samples.tolist() == [True, False]
    update_without(host, output, "a")
    host.run_to_end()
    check_outputs(requests)


def test_a_row_that_verified_drafts_may_have_no_token() -> None:
    host = Host(max_num_batched_tokens=32, num_draft_tokens=3)
    requests = [host.add(request_id, 4, max_tokens=8) for request_id in "ab"]
    output = host.step()
    host.propose(output, {"a": [1, 2, 3], "b": reference_output(requests[1].all_token_ids, 3)})
    output = host.schedule()
    assert output.num_draft_tokens.tolist() == [3, 3]
    assert update_without(host, output, "b").counts.tolist() == [1, 0]
    assert requests[1].num_draft_tokens == 0, "drafts without a result do not count as verified"
    host.run_to_end()
    check_outputs(requests)


@pytest.mark.parametrize("later_step", [True, False])
def test_a_preempted_request_without_a_token_does_not_wait_for_it(later_step: bool) -> None:
    host = Host(max_num_batched_tokens=32, max_steps_in_flight=3)
    requests = [host.add(request_id, 4, max_tokens=6) for request_id in "ab"]
    host.step()
    in_flight = [host.schedule() for _ in range(1 + later_step)]
    host.park("b")
    host.ready("b")
    update_without(host, in_flight[0], "b")
    assert requests[1].num_pending == 0
    for output in in_flight[1:]:
        assert host.update(output).counts.tolist() == [1, 0]
    assert names(host.step().resumed) == ["b"]
    host.run_to_end()
    check_outputs(requests)


def test_a_missing_token_of_a_request_that_has_finished_changes_nothing() -> None:
    host = Host(max_steps_in_flight=2)
    host.add("a", 4)
    first = host.schedule()
    host.abort("a")
    assert update_without(host, first, "a").finished == ()
    assert not host.scheduler.has_unfinished_requests()


# ---------------------------------------------------------------------- results that do not fit

BAD_TOKENS: list[tuple[dict[str, Any], str]] = [
    ({"token_ids": [1]}, r"token_ids has shape \(1,\) and 2 row\(s\) sample in this step; give one token for each"),
    ({"token_ids": [1, 2, 3]}, r"token_ids has shape \(3,\) and 2 row\(s\)"),
    ({"token_ids": [[1, 2]]}, r"token_ids has shape \(1, 2\)"),
    ({"token_ids": ["x", 2]}, "token_ids must be a flat sequence of integers"),
    ({"token_ids": [[1], [2, 3]]}, "token_ids must be a flat sequence of integers"),
    ({"token_ids": [1.5, 2]}, "token_ids must be a flat sequence of integers"),
    ({"token_ids": np.array([1.0, 2.0])}, "token_ids must be a flat sequence of integers"),
    ({"token_ids": [1, -1]}, "token id -1 was sampled; ids must be between 0 and 2147483647"),
    ({"token_ids": [1, 2**31]}, "token id 2147483648 was sampled; ids must be between 0 and 2147483647"),
    ({"token_ids": np.array([1, 2**63], dtype=np.uint64)}, "token id 9223372036854775808 was sampled"),
    ({"token_ids": [1, 2**70]}, "token_ids must be|token id"),
    ({"token_ids": np.array([1, -7], dtype=np.int32)}, "token id -7 was sampled"),
    ({"token_ids": np.array([1, 2**31], dtype=np.uint32)}, "token id 2147483648 was sampled"),
    ({"token_ids": np.array([[1, 2]], dtype=np.uint32)}, r"token_ids has shape \(1, 2\)"),
    ({"token_ids": [1, 2], "errors": {0: "x"}}, r"token_ids has shape \(2,\) and 1 row\(s\)"),
]
BAD_RESULTS = [
    *BAD_TOKENS,
    ({"token_ids": [1, 2], "counts": [1, 1]}, r"counts is \[1, 1\], but must be \[1, 1, 0\]"),
    ({"token_ids": [1, 2], "counts": [1, 0, 1]}, r"counts is \[1, 0, 1\], but must be \[1, 1, 0\]"),
    ({"token_ids": [1, 2, 3], "counts": [2, 1, 0]}, r"counts is \[2, 1, 0\], but must be \[1, 1, 0\]"),
    ({"token_ids": [1, 2], "unsampled": [0]}, r"token_ids has shape \(2,\) and 1 row\(s\)"),
    ({"token_ids": [1, 2], "unsampled": [3]}, "unsampled has row 3, but the output has only rows 0 to 2"),
    ({"token_ids": [1, 2], "unsampled": [2]}, "unsampled has row 2, which is listed twice or samples nothing"),
    ({"token_ids": [1], "unsampled": [0, 0]}, "unsampled has row 0, which is listed twice or samples nothing"),
    ({"token_ids": [1], "errors": {0: "x"}, "unsampled": [0]}, "unsampled has row 0, which has an error"),
    ({"token_ids": [1, 2], "errors": {3: "x"}}, "errors has row 3, but the output has only rows 0 to 2"),
    ({"token_ids": [1, 2], "errors": {-1: "x"}}, "errors has row -1, but the output has only rows 0 to 2"),
]


def refuses(host: Host, fields: dict[str, Any], message: str) -> None:
    """An invalid result of the next step is refused, no part of it is applied, and a valid result is accepted
    afterwards."""
    output = host.schedule()
    before = (host.stats(), [request.num_tokens for request in output.requests])
    with pytest.raises(StepResultError, match=message):
        host.scheduler.update(output, StepResult(**fields), host.now)
    host.scheduler.check_invariants()
    assert (host.stats(), [request.num_tokens for request in output.requests]) == before
    assert host.scheduler.num_steps_in_flight == 1
    assert host.update(output).counts.sum() == 2
    host.run_to_end()


@pytest.mark.parametrize(("fields", "message"), BAD_RESULTS, ids=lambda value: repr(value)[:40])
def test_an_invalid_result_is_refused_whole_and_can_be_corrected(fields: dict[str, Any], message: str) -> None:
    host = Host(max_num_batched_tokens=8)
    host.add("a", 3)
    host.add("b", 3)
    host.add("long", 9)  # the third row, a chunk that samples nothing
    refuses(host, fields, message)


@pytest.mark.parametrize(("fields", "message"), BAD_TOKENS, ids=lambda value: repr(value)[:40])
def test_an_invalid_result_in_steady_decoding_is_refused(fields: dict[str, Any], message: str) -> None:
    host = Host()
    host.add("a", 3)
    host.add("b", 3)
    host.step()
    refuses(host, fields, message)


def test_tokens_for_an_empty_step_are_refused() -> None:
    host = Host()
    output = host.schedule()
    with pytest.raises(StepResultError, match=r"token_ids has shape \(1,\) and 0 row\(s\)"):
        host.scheduler.update(output, StepResult([1]), host.now)
    host.scheduler.update(output, StepResult([]), host.now)


def test_the_result_is_copied_so_the_host_may_reuse_its_buffer() -> None:
    host = Host()
    request = host.add("a", 4)
    buffer = np.array([5], dtype=np.int64)
    update = host.scheduler.update(host.schedule(), StepResult(buffer), host.now)
    buffer[:] = 6
    assert update.token_ids.tolist() == [5]
    assert request.output_token_ids.tolist() == [5]


# ---------------------------------------------------------------------- the order of steps


def test_steps_are_updated_in_the_order_in_which_they_were_scheduled() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    before = host.stats()
    with pytest.raises(StepOrderError, match="step 1 cannot be updated now: step 0 is the oldest in flight"):
        host.scheduler.update(second, StepResult([5]), host.now)
    assert host.stats() == before
    assert request.num_output_tokens == 0
    host.update(first)
    host.update(second)
    assert request.num_output_tokens == 2


def test_a_second_update_of_a_step_is_refused() -> None:
    host = Host()
    host.add("a", 4)
    output = host.step()
    with pytest.raises(StepOrderError, match="step 0 cannot be updated now: no step is in flight"):
        host.scheduler.update(output, StepResult([5]), host.now)


def test_scheduling_beyond_max_steps_in_flight_changes_nothing() -> None:
    host = Host(max_steps_in_flight=2)
    host.add("a", 4)
    first = host.schedule()
    host.schedule()
    before = host.stats()
    message = r"2 step\(s\) in flight, and max_steps_in_flight is 2; update step 0 first"
    with pytest.raises(StepOrderError, match=message):
        host.scheduler.schedule(host.now)
    assert host.stats() == before
    host.update(first)
    assert host.schedule().step_id == 2, "the failed call used no step id"


# ---------------------------------------------------------------------- ends and preemptions with samples in flight


def test_a_sample_in_flight_of_a_request_that_stopped_is_dropped() -> None:
    host = Host(max_steps_in_flight=3)
    request = host.add("a", 4, eos_token_ids=(EOS,))
    other = host.add("b", 4)
    first, second, third = (host.schedule() for _ in range(3))
    assert host.update(first, {"a": EOS}).counts.tolist() == [1, 1]
    for output in (second, third):
        update = host.update(output, {"a": 7})
        assert update.counts.tolist() == [0, 1]
        assert len(update.token_ids) == 1
    assert request.output_token_ids.tolist() == [EOS]
    assert other.output_token_ids.tolist() == reference_output(other.prompt_token_ids, 3)


def test_a_sample_in_flight_of_an_aborted_request_is_dropped() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    first, second = host.schedule(), host.schedule()
    host.update(first)
    host.abort("a")
    assert host.stats().num_free_blocks == 16
    assert host.update(second).counts.tolist() == [0]
    assert request.num_output_tokens == 1


def preempted_in_flight() -> Host:
    """ "b" was preempted by the second step while its sample of the first is in flight."""
    host = Host(num_blocks=4, max_model_len=16, max_steps_in_flight=3)
    host.add("a", 8, max_tokens=6)
    host.add("b", 8, max_tokens=6, eos_token_ids=(EOS,))
    return host


def test_a_sample_in_flight_of_a_preempted_request_is_delivered() -> None:
    host = preempted_in_flight()
    b = host.scheduler.get_request("b")
    first, second = host.schedule(), host.schedule()
    assert b is not None
    assert (names(second.preempted), b.num_pending) == (["b"], 1)
    update = host.update(first)
    assert update.counts.tolist() == [1, 1]
    assert (b.status, b.num_output_tokens, b.num_pending) == (RequestStatus.PREEMPTED, 1, 0)
    host.update(second)
    host.run_to_end()
    assert b.output_token_ids.tolist() == reference_output(b.prompt_token_ids, 6)


def test_a_preempted_request_waits_for_its_samples_in_flight() -> None:
    host = preempted_in_flight()
    first, second = host.schedule(), host.schedule()
    host.abort("a")
    third = host.schedule()
    assert third.num_rows == 0, "there are free slots and blocks, but b's next token is unknown"
    head = host.explain("b")
    assert (head.reason, head.missing) == (Reason.IN_FLIGHT, 1)
    assert host.stats().deferrals["in_flight"] == 1
    for output in (first, second, third):
        host.update(output)
    output = host.schedule()
    assert names(output.resumed) == ["b"]
    assert int(output.num_computed_tokens[0] + output.num_scheduled_tokens[0]) == 9


def test_a_delivered_sample_can_end_a_preempted_request() -> None:
    host = preempted_in_flight()
    b = host.scheduler.get_request("b")
    first, second = host.schedule(), host.schedule()
    update = host.update(first, {"b": EOS})
    assert names(update.finished) == ["b"]
    assert b is not None
    assert b.status is RequestStatus.FINISHED_STOPPED
    host.update(second)
    assert names(host.step().finished) == ["b"]
    assert host.stats().num_waiting == 0


def test_a_sample_in_flight_of_a_parked_request_can_end_it() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4, max_tokens=2)
    first, second = host.schedule(), host.schedule()
    host.park("a")
    host.update(first)
    assert (request.num_output_tokens, request.status.is_parked) == (1, True)
    update = host.update(second)
    assert names(update.finished) == ["a"]
    assert request.status is RequestStatus.FINISHED_LENGTH
    assert not host.scheduler.has_unfinished_requests()


def test_an_error_for_a_finished_row_changes_nothing() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", 4)
    first = host.schedule()
    host.abort("a")
    update = host.scheduler.update(first, StepResult([], errors={0: "late"}), host.now)
    assert update.finished == () and request.status is RequestStatus.FINISHED_ABORTED


def test_an_error_for_a_row_that_was_readmitted_since_finishes_it() -> None:
    host = Host(max_steps_in_flight=3, max_num_batched_tokens=8)
    request = host.add("a", 20)
    first = host.schedule()  # a chunk that samples nothing, so the request may come back at once
    host.park("a")
    host.ready("a")
    second = host.schedule()
    assert names(second.resumed) == ["a"]
    update = host.scheduler.update(first, StepResult([], errors={0: "out of memory"}), host.now)
    host.scheduler.check_invariants()
    assert names(update.finished) == ["a"]
    assert (request.status, request.finish_detail) == (RequestStatus.FINISHED_ERROR, "out of memory")
    host.update(second)
    assert host.stats().num_free_blocks == 16
    host.add("b", request.prompt_token_ids)
    assert host.step().num_cached_tokens.tolist() == [0], "nothing that the failed step wrote is found"


# ---------------------------------------------------------------------- a row's error and the prefix cache


def three_that_share() -> tuple[Host, SchedulerOutput]:
    """ "b" publishes two blocks; "d" computes the first one too, "e" reads the first and computes the second too."""
    host = Host(num_blocks=12, max_num_seqs=6, max_num_batched_tokens=64)
    first, second = [1, 2, 3, 4], [5, 6, 7, 8]
    host.scheduler.add(Request("b", first + second, arrival_time=0.0, max_tokens=16), host.now)
    host.scheduler.add(Request("d", first, arrival_time=0.0, max_tokens=1), host.now)
    host.scheduler.add(Request("e", first + second, arrival_time=0.0, max_tokens=16), host.now)
    return host, host.schedule()


def test_a_failed_row_s_blocks_are_uncached_even_if_computed_twice() -> None:
    host, output = three_that_share()
    host.scheduler.update(output, StepResult([7, 7], errors={0: "broken"}), host.now)
    host.scheduler.check_invariants()
    host.add("f", 36, max_tokens=4)  # takes every free block
    host.step()
    host.scheduler.abort("e", host.now)
    host.scheduler.check_invariants()
    host.scheduler.add(Request("g", [1, 2, 3, 4, 9], arrival_time=9.0, max_tokens=2), host.now)
    while host.scheduler.get_request("g") is not None:
        output = host.step()
        if "g" in names(output.admitted):
            assert cached_of(output)["g"] == 0, "the cached blocks were computed after a failed row"


def test_blocks_read_from_a_failed_row_are_not_published() -> None:
    host, output = three_that_share()
    host.scheduler.update(output, StepResult([7, 7], errors={0: "broken"}), host.now)
    host.scheduler.abort("e", host.now)  # "e" read a block that "b" wrote
    host.scheduler.add(Request("g", [1, 2, 3, 4, 5, 6, 7, 8, 9], arrival_time=9.0, max_tokens=2), host.now)
    assert cached_of(host.step())["g"] == 0
