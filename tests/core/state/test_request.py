"""Requests: their arguments, their fields, and the transitions of their states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.core import FinishReason, InvalidTransition, ParkReason, Request, RequestRefused, RequestStatus
from pointsman.core.state.numbers import MAX_INT
from tests.core.helpers import Host, next_token

S = RequestStatus
PARKED = [reason.status for reason in ParkReason]
FINISHED = [reason.status for reason in FinishReason]


def make_request(prompt: Any = (1, 2, 3), **fields: Any) -> Request:
    return Request("r", prompt, **{"arrival_time": 0.0, "max_tokens": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "the prompt is empty; give at least one token"),
        ({"prompt": [5, -1]}, f"token id -1 in the prompt; ids must be between 0 and {MAX_INT}"),
        ({"prompt": [2**31]}, f"token id 2147483648 in the prompt; ids must be between 0 and {MAX_INT}"),
        ({"prompt": [1.5]}, "prompt_token_ids must be a flat sequence of integers, not float64"),
        ({"prompt": [5, 1.5]}, "prompt_token_ids must be a flat sequence of integers, not float64"),
        ({"prompt": [True, False]}, "prompt_token_ids must be a flat sequence of integers, not bool"),
        ({"prompt": [5, 2**31]}, f"token id 2147483648 in the prompt; ids must be between 0 and {MAX_INT}"),
        ({"prompt": [[1, 2], [3, 4]]}, r"must be a flat sequence of integers, not int64 of shape \(2, 2\)"),
        ({"prompt": [[1], [2, 3]]}, "must be a flat sequence of integers"),
        ({"prompt": "hello"}, "must be a flat sequence of integers"),
        ({"prompt": [2**70]}, "must be a flat sequence of integers|token id"),
        ({"max_tokens": -3}, f"max_tokens is -3; it must be between 0 and {MAX_INT}"),
        ({"max_tokens": 2**31}, f"max_tokens is 2147483648; it must be between 0 and {MAX_INT}"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be an integer"),
        ({"max_tokens": True}, "max_tokens is True; it must be an integer"),
        ({"max_total_tokens": 0}, f"max_total_tokens is 0; it must be between 1 and {MAX_INT}"),
        ({"min_tokens": -1}, f"min_tokens is -1; it must be between 0 and {MAX_INT}"),
        ({"min_tokens": 5}, "min_tokens is 5, more than max_tokens 4; lower it"),
        ({"priority": 2**63}, f"priority is {2**63}; it must be between {-(2**63)} and {2**63 - 1}"),
        ({"priority": "high"}, "priority is 'high'; it must be an integer"),
        ({"eos_token_ids": (-1,)}, f"an EOS or stop token id is -1; it must be between 0 and {MAX_INT}"),
        ({"stop_token_ids": (3, 2**31)}, "an EOS or stop token id is 2147483648"),
        ({"arrival_time": float("nan")}, "arrival_time is nan; give seconds on the caller's clock"),
        ({"arrival_time": float("inf")}, "arrival_time is inf"),
        ({"arrival_time": 10**400}, "arrival_time is 1000"),
        ({"ttft_target": 10**400}, "ttft_target is 1000"),
    ],
    ids=str,
)
def test_invalid_request_arguments_are_refused_with_value_and_limit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestRefused, match=f"request 'r' refused: .*({message})"):
        make_request(**fields)


def test_a_prompt_may_be_a_list_a_tuple_or_an_array_of_any_integer_type() -> None:
    for prompt in ([1, 2, 3], (1, 2, 3), np.array([1, 2, 3], dtype=np.uint8), np.array([1, 2, 3], dtype=np.int64)):
        request = make_request(prompt)
        assert request.prompt_token_ids.dtype == np.int32
        assert request.prompt_token_ids.tolist() == [1, 2, 3]


def test_the_largest_token_id_is_kept_as_it_is() -> None:
    assert make_request([MAX_INT, 0]).prompt_token_ids.tolist() == [MAX_INT, 0]


def test_changing_the_callers_array_afterwards_does_not_change_the_prompt() -> None:
    tokens = np.array([1, 2, 3], dtype=np.int32)
    request = make_request(tokens)
    tokens[:] = 9
    assert request.prompt_token_ids.tolist() == [1, 2, 3]
    assert not request.prompt_token_ids.flags.writeable


def test_requests_with_the_same_prompt_array_share_its_memory() -> None:
    first = make_request(list(range(1000)))
    second = make_request(first.prompt_token_ids)
    assert np.shares_memory(first.prompt_token_ids, second.prompt_token_ids)
    assert second._state.prompt_bytes is first._state.prompt_bytes


def test_a_slice_of_another_prompt_has_its_own_length() -> None:
    first = make_request(list(range(8)))
    second = make_request(first.prompt_token_ids[2:5])
    assert second.prompt_token_ids.tolist() == [2, 3, 4]
    assert second._state.prompt_bytes == np.array([2, 3, 4], dtype=np.int32).tobytes()


def test_request_metadata_is_kept_unchanged() -> None:
    marker = object()
    assert make_request(metadata=marker).metadata is marker


ALLOWED = {
    S.WAITING: {S.RUNNING, *PARKED, *FINISHED},
    S.RUNNING: {S.WAITING, S.PREEMPTED, *PARKED, *FINISHED} - {S.FINISHED_REFUSED},
    S.PREEMPTED: {S.RUNNING, *PARKED, *FINISHED} - {S.FINISHED_REFUSED},
    **{parked: {S.WAITING, S.PREEMPTED, *FINISHED} - {S.FINISHED_REFUSED} for parked in PARKED},
    **{finished: set() for finished in FINISHED},
}


@pytest.mark.parametrize("status", list(S), ids=lambda status: status.name)
def test_a_request_allows_only_the_listed_status_transitions(status: RequestStatus) -> None:
    for following in S:
        request = make_request()
        request._state.status = status
        if following in ALLOWED[status]:
            request._state.change_status(following)
            assert request.status is following
        else:
            with pytest.raises(
                InvalidTransition, match=f"'r' cannot change from status {status.name} to {following.name}"
            ):
                request._state.change_status(following)
            assert request.status is status


def test_a_status_says_whether_it_is_parked_or_finished() -> None:
    assert [status for status in S if status.is_parked] == PARKED
    assert {status for status in S if status.is_finished} == set(FINISHED)


def test_phase_is_prefill_until_the_first_sample_since_admission() -> None:
    host = Host(max_num_batched_tokens=8)
    request = host.add("a", 12, max_tokens=6)
    phases = [request.phase]
    for _ in range(3):
        host.step()
        phases.append(request.phase)
    assert phases == ["waiting", "prefill", "decoding", "decoding"]
    host.park("a")
    assert request.phase == "waiting"
    host.ready("a")
    output = host.schedule()
    assert request.phase == "prefill", "it recomputes its lost tokens"
    host.update(output)
    assert request.phase == "decoding"
    host.run_to_end()
    assert request.phase == "finished"


def test_request_properties_are_equal_with_and_without_a_row() -> None:
    host = Host()
    request = host.add("a", 4, max_tokens=6)
    host.step()
    host.step()
    running = (request.num_tokens, request.output_token_ids.tolist(), request.all_token_ids.tolist())
    assert request.num_output_tokens == 2
    assert request.num_computed_tokens == 5, "the newest token is not computed yet"
    host.park("a")
    assert (request.num_tokens, request.output_token_ids.tolist(), request.all_token_ids.tolist()) == running
    assert request.num_computed_tokens == 0
    assert request.tokens(3, 6).tolist() == running[2][3:6]
    assert request._state.last_token_id == running[1][-1]


def test_a_long_output_keeps_all_its_tokens() -> None:
    host = Host(num_blocks=200, max_model_len=800)
    request = host.add("a", 3, max_tokens=700)
    host.run_to_end(max_steps=800)
    tokens = request.all_token_ids
    assert len(tokens) == 703
    sample = [4, 255, 256, 257, 258, 259, 260, 300, 511, 512, 513, 515, 516, 702]
    assert [int(tokens[index]) for index in sample] == [next_token(tokens[:index]) for index in sample]


@pytest.mark.parametrize("name", ["eos_token_ids", "stop_token_ids"])
def test_a_single_stop_token_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(RequestRefused, match=r"are 7; give a list of token ids, such as \[7\]"):
        Request("a", [1], arrival_time=0.0, max_tokens=1, **{name: 7})


def test_an_id_that_is_no_string_is_refused() -> None:
    with pytest.raises(RequestRefused, match="request 5 refused: its id is of type int; give a string"):
        Request(5, [1, 2], arrival_time=0.0, max_tokens=1)  # type: ignore[arg-type]
