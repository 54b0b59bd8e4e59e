"""Prompts in parts: when parts are computed, the output between parts, and requests that wait for input."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pointsman.core import (
    EncoderInput,
    FinishReason,
    InvalidTransition,
    ParkReason,
    Reason,
    RequestRefused,
    RequestStatus,
    UnknownRequest,
)
from tests.core.helpers import EOS, Host, blocks_of, cached_of, names, reference_output, tokens_of

AWAITS = RequestStatus.WAITING_FOR_STREAMING_REQ


def test_prompt_parts_are_computed_on_arrival_and_only_the_last_samples() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=0, more_input=True)
    assert tokens_of(host.step()) == {"a": 6}
    told = host.explain("a")
    assert request.status is AWAITS and told.reason is Reason.PARKED and told.resource is None
    assert told.sentence == "a waits: its caller has more input to send."
    assert host.stats().num_free_blocks == host.stats().num_blocks, "it holds no block while it waits"
    host.extend("a", 5, more=True, max_tokens=0)
    output = host.step()
    assert cached_of(output) == {"a": 4} and tokens_of(output) == {"a": 7}
    host.extend("a", 2, max_tokens=3)
    host.run_to_end()
    assert request.num_prompt_tokens == 13 and request.finish_reason is FinishReason.LENGTH
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 3)


def test_prompt_parts_that_arrive_early_are_computed_together() -> None:
    host = Host()
    request = host.add("a", 4, max_tokens=0, more_input=True)
    host.extend("a", 4, more=True, max_tokens=0)
    host.extend("a", 4, more=True, max_tokens=0)
    output = host.schedule()
    host.extend("a", 4, max_tokens=2)
    update = host.update(output)
    assert list(update.completed_parts) == [request] and not update.finished
    assert request.num_prompt_tokens == 16
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_a_part_s_output_without_its_last_token_joins_the_prompt() -> None:
    host = Host()
    request = host.add("a", 5, max_tokens=3, more_input=True)
    prompt = request.prompt_token_ids.tolist()
    while request.status is not AWAITS:
        host.step()
    said = request.output_token_ids.tolist()
    assert said == reference_output(prompt, 3)
    host.extend("a", [7, 8], max_tokens=2)
    assert request.prompt_token_ids.tolist() == [*prompt, *said[:-1], 7, 8]
    assert request.num_output_tokens == 0
    output = host.step()
    assert cached_of(output) == {"a": 4}, "the tokens in full blocks, of seven computed ones"
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_a_stop_token_ends_a_part_and_not_the_request() -> None:
    host = Host()
    request = host.add("a", 4, max_tokens=9, eos_token_ids=(EOS,), more_input=True)
    host.step()
    update = host.update(host.schedule(), {"a": EOS})
    assert list(update.completed_parts) == [request] and request.status is AWAITS
    host.extend("a", 2, max_tokens=9)
    host.step({"a": EOS})
    assert request.finish_reason is FinishReason.STOP and request.num_output_tokens == 1


def test_samples_in_flight_after_the_end_of_a_part_are_dropped() -> None:
    host = Host(max_steps_in_flight=3)
    request = host.add("a", 4, max_tokens=9, eos_token_ids=(EOS,), more_input=True)
    first, second, third = host.schedule(), host.schedule(), host.schedule()
    host.update(first, {"a": EOS})
    assert request.status is AWAITS and request.num_pending == 0
    host.extend("a", 3, max_tokens=2)
    for output in (second, third):
        assert host.scheduler.update(output, host.result(output), host.now).counts.tolist() == [0]
    assert request.num_output_tokens == 0 and request.num_prompt_tokens == 7
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_an_empty_last_part_ends_the_input() -> None:
    host = Host()
    answers = host.add("a", 4, max_tokens=0, more_input=True)
    ends = host.add("b", 4, max_tokens=0, more_input=True)
    host.step()
    host.extend("a", [], max_tokens=2)
    host.extend("b", [], max_tokens=0)
    host.run_to_end()
    assert answers.output_token_ids.tolist() == reference_output(answers.prompt_token_ids, 2)
    assert ends.finish_reason is FinishReason.STOP and ends.num_output_tokens == 0


def test_requests_that_wait_for_input_block_no_others() -> None:
    host = Host(num_blocks=4, max_model_len=16, max_num_seqs=2)
    for number in range(6):
        host.add(f"part-{number}", 8, max_tokens=0, more_input=True)
    while host.stats().num_parked.get("waiting_for_streaming_req", 0) < 6:
        host.step()
    other = host.add("other", 12, max_tokens=4)
    for _ in range(6):
        host.step()
    assert other.num_output_tokens == 4
    for number in range(6):
        host.extend(f"part-{number}", 2, max_tokens=3)
    host.run_to_end()
    assert host.stats().finished["length"] == 7


def test_an_evicted_prompt_part_is_recomputed() -> None:
    host = Host(enable_prefix_caching=False)
    request = host.add("a", 6, max_tokens=0, more_input=True)
    host.step()
    host.extend("a", 2, max_tokens=2)
    assert tokens_of(host.step()) == {"a": 8}
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_a_complete_part_does_not_count_as_preempted() -> None:
    host = Host(num_blocks=4, max_model_len=16)
    request = host.add("a", 6, max_tokens=0, more_input=True)
    output = host.step()
    host.extend("a", 2, max_tokens=0, more=True)
    output = host.step()
    assert names(output.preempted) == ["a"], "but the output reports to the workers that it lost its row"
    assert request.num_preemptions == host.stats().num_preemptions == 0


def test_a_part_after_images_hits_only_equal_images() -> None:
    """The cache key of the longer prompt includes the images at its placeholders."""
    host = Host(num_blocks=64, max_num_batched_tokens=64, encoder_budget=8, encoder_cache_size=16)
    prompt = [1, 0, 0, 0, 2, 3]
    for name in ("cat", "dog"):
        host.add(name, prompt, max_tokens=0, more_input=True, encoder_inputs=[EncoderInput(name, 1, 3)])
        host.step()
    for name in ("cat", "dog"):
        host.extend(name, [4, 5, 6], max_tokens=1)
    output = host.schedule()
    assert cached_of(output) == {"cat": 4, "dog": 4}
    assert not set(blocks_of(output, "cat")) & set(blocks_of(output, "dog"))


def test_a_part_may_have_its_own_encoder_inputs() -> None:
    host = Host(num_blocks=64, max_num_batched_tokens=64, encoder_budget=8, encoder_cache_size=16)
    request = host.add("a", 6, max_tokens=3, more_input=True, encoder_inputs=[("cat", 1, 3)])
    while request.status is not AWAITS:
        host.step()
    part = [0, 0, 0, 0, 7]
    host.extend("a", part, more=True, max_tokens=0, encoder_inputs=[("dog", 0, 4)])
    host.extend("a", [8, 0], max_tokens=1, encoder_inputs=[("cow", 1, 1, 2)])
    output = host.schedule()
    assert request.encoder_inputs == (EncoderInput("cat", 1, 3, 3), EncoderInput("dog", 8, 4, 4)), (
        "behind six tokens and two of three sampled"
    )
    assert [request.encoder_inputs[index].key for _, index in output.encoder_inputs] == ["dog"]
    host.update(output)
    host.step()
    assert request.encoder_inputs[2] == EncoderInput("cow", 14, 1, 2) and request.is_finished


@pytest.mark.parametrize(
    ("inputs", "why"),
    [
        ([("dog", 0, 9)], "'a' not extended: its encoder input 'dog' has 9 embeddings, more than encoder_budget 8"),
        ([("dog", 8, 3)], "'a' not extended: encoder input 'dog' ends at 11, but the part has only 10 tokens"),
        (["dog"], "'a' not extended: an encoder input is 'dog'; give"),
    ],
)
def test_a_part_with_invalid_encoder_inputs_is_refused(inputs: list[Any], why: str) -> None:
    host = Host(encoder_budget=8, encoder_cache_size=16)
    request = host.add("a", 6, max_tokens=0, more_input=True)
    with pytest.raises(RequestRefused, match=re.escape(why)):
        host.extend("a", 10, encoder_inputs=inputs)
    assert request.more_input and not request.parts


def test_speculation_continues_in_the_next_prompt_part() -> None:
    host = Host(num_draft_tokens=3)
    request = host.add("a", 5, max_tokens=6, more_input=True)
    for tokens in ([], [7, 8]):
        if tokens:
            host.extend("a", tokens, max_tokens=6)
        expected = reference_output(request.prompt_token_ids, 6)
        output = host.step()
        host.propose(output, {"a": [*expected[1:3], 0]})
        output = host.step()
        assert output.num_draft_tokens.tolist() == [3] and request.output_token_ids.tolist() == expected[:4]
        while request.status is RequestStatus.RUNNING:
            host.step()
        assert request.is_finished == bool(tokens)
        assert request.is_finished or request.output_token_ids.tolist() == expected
    assert (request.num_draft_tokens, request.num_accepted_tokens) == (6, 4)
    assert request.output_token_ids.tolist() == expected


def test_an_adapter_s_slot_is_free_while_its_request_waits_for_input() -> None:
    host = Host(max_loras=1)
    request = host.add("a", 4, max_tokens=0, more_input=True, adapter=("one", 0))
    host.step()
    other = host.add("b", 4, max_tokens=2, adapter=("two", 0))
    host.step()
    host.step()
    assert other.num_output_tokens == 2
    host.extend("a", 4, max_tokens=2)
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_a_part_added_after_a_pause_and_a_reset_recomputes_the_prompt() -> None:
    host = Host()
    request = host.add("a", 8, max_tokens=0, more_input=True)
    host.step()
    host.pause()
    host.reset_prefix_cache()
    host.extend("a", 4, max_tokens=2)
    assert host.step().num_rows == 0
    host.resume()
    output = host.step()
    assert cached_of(output) == {"a": 0} and tokens_of(output) == {"a": 12}
    host.run_to_end()
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_the_event_log_reports_every_prompt_part() -> None:
    host = Host(log_request_events=True)
    request = host.add("a", 4, max_tokens=2, more_input=True)
    host.step()
    host.step()
    host.extend("a", 4, max_tokens=2)
    host.run_to_end()
    told = [event.type.name for event in request.events]
    assert told == [
        "QUEUED", "SCHEDULED", "FIRST_TOKEN", "PARKED", "QUEUED", "RESUMED", "FIRST_TOKEN", "FINISHED",
    ]  # fmt: skip


def test_a_failed_step_s_part_is_recomputed() -> None:
    host = Host()
    request = host.add("a", 6, max_tokens=0, more_input=True)
    host.fail(host.schedule())
    host.extend("a", 2, max_tokens=2)
    host.run_to_end()
    assert request.num_prompt_tokens == 8
    assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 2)


def test_a_part_that_does_not_fit_is_refused_and_the_request_continues() -> None:
    host = Host(max_model_len=16)
    request = host.add("a", 6, max_tokens=0, more_input=True)
    host.step()
    with pytest.raises(RequestRefused, match=r"'a' not extended: the prompt has 17 tokens and max_model_len is 16"):
        host.extend("a", 11, more=True, max_tokens=0)
    with pytest.raises(RequestRefused, match="leaves no room"):
        host.extend("a", 10, max_tokens=1)
    with pytest.raises(RequestRefused, match="the part has no tokens"):
        host.extend("a", [], more=True, max_tokens=0)
    with pytest.raises(RequestRefused, match="token id -1"):
        host.extend("a", [-1])
    with pytest.raises(RequestRefused, match="max_tokens is -1"):
        host.extend("a", [1], max_tokens=-1)
    assert request.status is AWAITS and request.num_prompt_tokens == 6
    host.extend("a", 10, max_tokens=0)
    host.run_to_end()
    assert request.finish_reason is FinishReason.STOP


def test_a_next_part_that_no_longer_fits_ends_the_request() -> None:
    host = Host(max_model_len=16)
    request = host.add("a", 6, max_tokens=9, more_input=True)
    host.extend("a", 6, max_tokens=2)
    host.run_to_end()
    assert request.finish_reason is FinishReason.LENGTH and "max_model_len is 16" in request.finish_detail


def test_max_model_len_ends_a_request_that_expects_input() -> None:
    host = Host(max_model_len=16)
    request = host.add("a", 6, max_tokens=99, more_input=True)
    host.run_to_end()
    assert (request.finish_reason, request.finish_detail) == (FinishReason.LENGTH, "max_model_len")
    with pytest.raises(UnknownRequest):
        host.extend("a", 1)


def test_a_part_without_more_input_is_refused() -> None:
    host = Host()
    host.add("a", 4)
    host.add("b", 4, max_tokens=0, more_input=True)
    host.extend("b", 4)
    for name in "ab":
        with pytest.raises(InvalidTransition, match="expects no more input"):
            host.extend(name, 4)


def test_ready_does_not_end_the_wait_for_input() -> None:
    host = Host()
    request = host.add("a", 4, max_tokens=0, more_input=True)
    host.step()
    with pytest.raises(InvalidTransition, match="waits for the next part of its prompt; call extend"):
        host.ready("a")
    host.park("a", ParkReason.GRAMMAR)
    host.ready("a")
    assert request.status is AWAITS
    host.park("a", ParkReason.GRAMMAR)
    host.extend("a", 4, max_tokens=1)
    assert request.status is RequestStatus.WAITING_FOR_GRAMMAR
    host.ready("a")
    host.run_to_end()
    assert request.num_output_tokens == 1


def test_a_request_that_waits_for_input_can_be_aborted() -> None:
    host = Host()
    host.add("a", 4, max_tokens=0, more_input=True)
    host.step()
    host.abort("a")
    assert not host.scheduler.has_unfinished_requests() and names(host.step().finished) == ["a"]


def test_requests_that_wait_for_input_are_not_runnable() -> None:
    host = Host()
    host.add("a", 4, max_tokens=0, more_input=True)
    assert host.scheduler.has_runnable_requests()
    host.step()
    assert host.scheduler.has_unfinished_requests() and not host.scheduler.has_runnable_requests()
    host.extend("a", 1)
    assert host.scheduler.has_runnable_requests()
