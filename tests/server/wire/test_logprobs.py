"""Log probabilities as clients get them."""

from __future__ import annotations

import json
import math

from pointsman.engine.outputs.request_output import Logprob
from pointsman.server.wire.logprobs import LogprobWriter, prompt_logprobs

# As the engine gives them: the sampled token first, then the most likely ones.
SAMPLED_IS_LIKELY = {7: Logprob(-0.1, 1, " a"), 8: Logprob(-2.5, 2, "b")}
SAMPLED_IS_UNLIKELY = {9: Logprob(-7.0, 40, "é"), 7: Logprob(-0.2, 1, " a"), 8: Logprob(-1.5, 2, "b")}
IMPOSSIBLE = {9: Logprob(-math.inf, 40, "x"), 7: Logprob(math.nan, 1, " a")}


def test_completions_have_four_lists() -> None:
    found = LogprobWriter(2).completion([7, 9], [SAMPLED_IS_LIKELY, SAMPLED_IS_UNLIKELY])
    assert found == {
        "tokens": [" a", "é"],
        "token_logprobs": [-0.1, -7.0],
        "text_offset": [0, 2],
        "top_logprobs": [{" a": -0.1, "b": -2.5}, {"é": -7.0, " a": -0.2, "b": -1.5}],
    }


def test_a_prompts_first_token_has_none() -> None:
    found = LogprobWriter(1).completion([5, 7], [None, SAMPLED_IS_LIKELY], offset=3, first_text="The")
    assert found["tokens"] == ["The", " a"]
    assert found["token_logprobs"] == [None, -0.1]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [3, 6]


def test_no_top_ones_leave_the_sampled_one() -> None:
    assert LogprobWriter(0).completion([9], [SAMPLED_IS_UNLIKELY])["top_logprobs"] == [{"é": -7.0}]


def test_chat_has_the_most_likely_ones_whether_sampled_or_not() -> None:
    (found,) = LogprobWriter(2).chat([9], [SAMPLED_IS_UNLIKELY])["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("é", -7.0, list("é".encode()))
    assert [one["token"] for one in found["top_logprobs"]] == [" a", "b"]
    (none,) = LogprobWriter(0).chat([9], [SAMPLED_IS_UNLIKELY])["content"]
    assert none["top_logprobs"] == []


def test_json_can_hold_all_of_them() -> None:
    for found in (LogprobWriter(2).completion([9], [IMPOSSIBLE]), LogprobWriter(2).chat([9], [IMPOSSIBLE])):
        assert "-9999.0" in json.dumps(found, allow_nan=False)


def test_tokens_without_text_or_by_wish_are_written_by_their_ids() -> None:
    assert LogprobWriter(1, as_token_ids=True).completion([7], [SAMPLED_IS_LIKELY])["tokens"] == ["token_id:7"]
    no_text = {7: Logprob(-0.1, 1, None)}
    assert LogprobWriter(1).chat([7], [no_text])["content"][0]["token"] == "token_id:7"


def test_those_of_a_prompt_are_by_token_id() -> None:
    assert prompt_logprobs(None) is None
    assert prompt_logprobs([None, {7: Logprob(-0.1, 1, " a")}]) == [
        None,
        {"7": {"logprob": -0.1, "rank": 1, "decoded_token": " a"}},
    ]
