"""Repetition detection: compared with the definition by brute force, and in the life of a request."""

from __future__ import annotations

import io
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.core import (
    FinishReason,
    Recorder,
    RepetitionDetectionParams,
    Request,
    RequestRefused,
    RequestStatus,
    replay,
)
from pointsman.core.state.repetition import RepetitionWatch
from tests.core.helpers import EOS, Host


def shortest_pattern(output: Sequence[int], params: RepetitionDetectionParams) -> int | None:
    """The definition: copies of a pattern, compared one by one, at the end of the output."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        length = size * params.min_count
        if length <= len(output) and list(output[-length:]) == list(output[-size:]) * params.min_count:
            return size
    return None


@st.composite
def params_and_output(draw: st.DrawFn) -> tuple[RepetitionDetectionParams, list[int]]:
    longest = draw(st.integers(1, 9))
    params = RepetitionDetectionParams(
        max_pattern_size=longest, min_pattern_size=draw(st.integers(0, longest)), min_count=draw(st.integers(2, 5))
    )
    pattern = draw(st.lists(st.integers(0, 2), min_size=1, max_size=9))
    output = draw(st.lists(st.integers(0, 2), max_size=12)) + pattern * draw(st.integers(1, 6))
    return params, output + draw(st.lists(st.integers(0, 2), max_size=6))


@given(params_and_output(), st.integers(0, 80))
def test_repetition_watch_agrees_with_the_definition_after_every_token(
    case: tuple[RepetitionDetectionParams, list[int]], spare: int
) -> None:
    params, output = case
    watch = RepetitionWatch(params, max_tokens=len(output) + spare)
    for length, token in enumerate(output, start=1):
        assert watch.observe(token) == shortest_pattern(output[:length], params)


def test_a_repetition_watch_is_no_larger_than_the_longest_output() -> None:
    watch = RepetitionWatch(RepetitionDetectionParams(max_pattern_size=2**31 - 1, min_count=2), max_tokens=7)
    assert [watch.observe(token) for token in (1, 2, 3, 1, 2, 3)] == [None] * 5 + [3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_pattern_size": -1}, "max_pattern_size is -1"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size is 2.0"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size is 3, more than"),
        ({"max_pattern_size": 2}, "min_count is 0; it must be at least 2"),
        ({"max_pattern_size": 2, "min_count": True}, "min_count is True"),
    ],
)
def test_impossible_repetition_parameters_are_refused(values: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RepetitionDetectionParams(**values)
    with pytest.raises(RequestRefused, match=message):
        Request("a", [1], arrival_time=0.0, max_tokens=1, repetition_detection=values)


@pytest.mark.parametrize("given", [[3, 1, 2], {"max_pattern": 3}])
def test_repetition_parameters_of_another_type_are_refused(given: object) -> None:
    with pytest.raises(RequestRefused):
        Request("a", [1], arrival_time=0.0, max_tokens=1, repetition_detection=given)  # type: ignore[arg-type]


TWICE = RepetitionDetectionParams(max_pattern_size=3, min_pattern_size=2, min_count=2)


def sample_tokens(host: Host, request: Request, tokens: list[int]) -> None:
    for token in tokens:
        if not request.is_finished:
            host.step({request.request_id: token})


def test_a_request_with_a_repetitive_output_finishes() -> None:
    host = Host()
    request = host.add("a", repetition_detection=TWICE)
    other = host.add("b")
    sample_tokens(host, request, [7, 7, 7, 1, 2, 1, 2, 9])
    assert request.output_token_ids.tolist() == [7, 7, 7, 1, 2, 1, 2], "7 7 7 is a pattern of one token, too short"
    assert (request.status, request.finish_reason) == (RequestStatus.FINISHED_REPETITION, FinishReason.REPETITION)
    assert (request.stop_reason, request.finish_detail) == (
        "repetition_detected",
        "a pattern of 2 token(s) is repeated",
    )
    assert not other.is_finished
    assert host.stats().finished["repetition"] == 1


def test_repetition_detection_ignores_the_prompt() -> None:
    host = Host()
    request = host.add("a", [1, 2, 3, 1, 2, 3], repetition_detection=TWICE)
    sample_tokens(host, request, [1, 2, 3])
    assert request.status is RequestStatus.RUNNING


def test_a_repetition_finishes_its_request_only_after_min_tokens() -> None:
    host = Host()
    request = host.add("a", repetition_detection=TWICE, min_tokens=6)
    sample_tokens(host, request, [1, 2, 1, 2, 1])
    assert request.status is RequestStatus.RUNNING
    sample_tokens(host, request, [2])
    assert request.status is RequestStatus.FINISHED_REPETITION


def test_a_stop_token_and_the_length_take_precedence_over_repetition() -> None:
    host = Host()
    stopped = host.add("a", repetition_detection=TWICE, eos_token_ids=(EOS,))
    sample_tokens(host, stopped, [1, EOS, 1, EOS])
    assert (stopped.status, stopped.num_output_tokens) == (RequestStatus.FINISHED_STOPPED, 2)
    long = host.add("b", repetition_detection=TWICE, max_tokens=4)
    sample_tokens(host, long, [1, 2, 1, 2])
    assert long.status is RequestStatus.FINISHED_LENGTH


def test_a_repetition_is_found_across_a_preemption_with_samples_in_flight() -> None:
    host = Host(max_steps_in_flight=2)
    request = host.add("a", repetition_detection=TWICE)
    sample_tokens(host, request, [1, 2])
    first = host.schedule()
    host.park("a")
    host.update(first, {"a": 1})
    assert request.num_output_tokens == 3, "the sample in flight is delivered"
    host.ready("a")
    sample_tokens(host, request, [2])
    assert (request.status, request.num_preemptions) == (RequestStatus.FINISHED_REPETITION, 1)


def test_default_repetition_parameters_create_no_repetition_watch() -> None:
    host = Host()
    request = host.add("a", repetition_detection=RepetitionDetectionParams())
    assert request.repetition_detection is None and request._state.repetition_watch is None


def test_repetition_detection_is_recorded_and_replayed() -> None:
    file = io.StringIO()
    host = Host(recorder=Recorder(file))
    sample_tokens(host, host.add("a", repetition_detection=TWICE), [1, 2, 1, 2])
    host.step()
    assert '"repetition_detection":{"max_pattern_size":3,"min_pattern_size":2,"min_count":2}' in file.getvalue()
    assert replay(file.getvalue().splitlines()).num_requests == 1
