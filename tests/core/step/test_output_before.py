"""Requests that arrive with tokens of another scheduler: they continue as if they had not moved."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import FinishReason, Recorder, RepetitionDetectionParams, Request, RequestRefused, replay
from tests.core.helpers import EOS, Host

REPETITION = RepetitionDetectionParams(max_pattern_size=4, min_pattern_size=1, min_count=3)


def ending(host: Host, request: Request) -> tuple[Any, ...]:
    host.run_to_end()
    return request.output_token_ids.tolist(), request.finish_reason, request.finish_detail, request.stop_reason


@settings(max_examples=60, deadline=None)
@given(
    prompt=st.integers(1, 20),
    max_tokens=st.integers(2, 30),
    min_tokens=st.integers(0, 2),
    cut=st.floats(0, 1),
    chunked=st.booleans(),
    others=st.integers(0, 3),
    num_blocks=st.integers(16, 40),
    stop=st.lists(st.integers(0, 996), max_size=300, unique=True),
)
def test_a_request_moved_to_another_scheduler_gets_the_same_tokens(
    prompt: int, max_tokens: int, min_tokens: int, cut: float, chunked: bool, others: int, num_blocks: int,
    stop: list[int],
) -> None:  # fmt: skip
    fields: dict[str, Any] = {
        "max_tokens": max_tokens,
        "min_tokens": min_tokens,
        "stop_token_ids": stop,
        "repetition_detection": REPETITION,
    }
    tokens = list(range(1000, 1000 + min(prompt, 16)))
    config = {"num_blocks": num_blocks, "max_model_len": 60, "enable_chunked_prefill": chunked}
    alone = Host(**config)
    expected = ending(alone, alone.add("a", tokens, **fields))
    known = expected[0][: int(cut * (len(expected[0]) - 1))]
    file = io.StringIO()
    host = Host(recorder=Recorder(file), **config)
    for number in range(others):
        host.add(f"other-{number}", 5, max_tokens=10)
    moved = host.add("a", tokens, output_token_ids=known, **fields)
    assert (moved.num_output_tokens, moved.num_prompt_tokens) == (len(known), len(tokens))
    assert ending(host, moved) == expected
    assert moved.num_tokens == len(tokens) + len(expected[0])
    assert host.stats().num_free_blocks == host.stats().num_blocks
    replay(io.StringIO(file.getvalue()))


def test_repetitions_before_and_after_a_move_are_counted_together() -> None:
    host = Host()
    request = host.add("a", 3, max_tokens=20, output_token_ids=[7, 7], repetition_detection=REPETITION)
    host.step({"a": 7})
    assert (request.finish_reason, request.num_output_tokens) == (FinishReason.REPETITION, 3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"output_token_ids": [1, 2], "max_tokens": 2},
            "2 output_token_ids are given and max_tokens is 2, .* raise max_tokens",
        ),
        ({"output_token_ids": [1], "more_input": True}, "output_token_ids are given and more_input is True"),
        ({"output_token_ids": [-1]}, "-1"),
        ({"output_token_ids": [1] * 5, "max_total_tokens": 8}, "max_total_tokens ends it at 8 tokens, so no"),
    ],
)
def test_a_request_with_nothing_to_generate_is_refused(fields: dict[str, Any], message: str) -> None:
    host = Host()
    with pytest.raises(RequestRefused, match=message):
        host.add("a", 3, **{"max_tokens": 10, **fields})
    host.add("a", 3, max_tokens=4, eos_token_ids=(EOS,))
    host.run_to_end()
