"""The JSON of log probabilities."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.engine.outputs.request_output import Logprob, Piece
from pointsman.engine.sampling.logprobs import TokenLogprobs
from pointsman.server.wire.logprobs import (
    PIECE,
    Logprobs,
    LogprobWriter,
    TextPlaces,
    UnplacedLogprobs,
    prompt_logprobs,
)
from pointsman.server.wire.pieces import Pieces, in_pieces

# As the engine gives them: the sampled token first, then the most likely ones.
SAMPLED_IS_LIKELY = {7: Logprob(-0.1, 1, " a"), 8: Logprob(-2.5, 2, "b")}
SAMPLED_IS_UNLIKELY = {9: Logprob(-7.0, 40, "é"), 7: Logprob(-0.2, 1, " a"), 8: Logprob(-1.5, 2, "b")}
IMPOSSIBLE = {9: Logprob(-math.inf, 40, "x"), 7: Logprob(math.nan, 1, " a")}


ResultT = TypeVar("ResultT")
Entries = Sequence[Mapping[int, Logprob] | None]


def columns_of(entries: Entries) -> Logprobs:
    """Log probabilities as the engine returns them."""
    texts = {token_id: one.decoded_token for entry in entries for token_id, one in (entry or {}).items()}
    pieces = {token_id: None if text is None else text.encode() for token_id, text in texts.items()}
    return Logprobs.from_entries([None if entry is None else _arrays(entry) for entry in entries], pieces.__getitem__)


def _arrays(entry: Mapping[int, Logprob]) -> TokenLogprobs:
    values: Any = np.array([one.logprob for one in entry.values()])
    return TokenLogprobs(np.array(list(entry)), values, next(iter(entry.values())).rank or 0)


def at_once(work: Pieces[ResultT]) -> ResultT:
    return asyncio.run(in_pieces(work))


def unplaced(token_ids: list[int], columns: Logprobs, *, first: bytes = b"", offset: int = 0) -> UnplacedLogprobs:
    """Log probabilities of a response whose text is that of the tokens; `first`: a token without a log probability."""
    pieces = [first if piece is None else piece for piece in columns.own_pieces()]
    places = TextPlaces(offset)
    places.add_text(b"".join(piece for piece in pieces if isinstance(piece, bytes)).decode(), is_last=True)
    return UnplacedLogprobs(places, token_ids, pieces, columns)


def completion(writer: LogprobWriter, token_ids: list[int], entries: Entries, **more: Any) -> Any:
    return json.loads(at_once(writer.completion(unplaced(token_ids, columns_of(entries), **more))))


def chat(writer: LogprobWriter, entries: Entries) -> Any:
    return json.loads(at_once(writer.chat(columns_of(entries))))


def prompt(entries: Entries | None) -> Any:
    return json.loads(at_once(prompt_logprobs(None if entries is None else columns_of(entries))))


def test_completion_logprobs_are_four_lists_of_equal_length() -> None:
    found = completion(LogprobWriter(2), [7, 9], [SAMPLED_IS_LIKELY, SAMPLED_IS_UNLIKELY])
    assert found == {
        "tokens": [" a", "é"],
        "token_logprobs": [-0.1, -7.0],
        "text_offset": [0, 2],
        "top_logprobs": [{" a": -0.1, "b": -2.5}, {"é": -7.0, " a": -0.2, "b": -1.5}],
    }


def test_first_prompt_token_has_no_log_probability() -> None:
    found = completion(LogprobWriter(1), [5, 7], [None, SAMPLED_IS_LIKELY], offset=3, first=b"The")
    assert found["tokens"] == ["The", " a"]
    assert found["token_logprobs"] == [None, -0.1]
    assert found["top_logprobs"][0] is None
    assert found["text_offset"] == [3, 6]


def test_zero_top_logprobs_still_return_the_sampled_token() -> None:
    assert completion(LogprobWriter(0), [9], [SAMPLED_IS_UNLIKELY])["top_logprobs"] == [{"é": -7.0}]


def test_chat_top_logprobs_are_the_most_likely_tokens() -> None:
    (found,) = chat(LogprobWriter(2), [SAMPLED_IS_UNLIKELY])["content"]
    assert (found["token"], found["logprob"], found["bytes"]) == ("é", -7.0, list("é".encode()))
    assert [one["token"] for one in found["top_logprobs"]] == [" a", "b"]
    (none,) = chat(LogprobWriter(0), [SAMPLED_IS_UNLIKELY])["content"]
    assert none["top_logprobs"] == []


def test_all_logprobs_are_valid_json() -> None:
    for found in (completion(LogprobWriter(2), [9], [IMPOSSIBLE]), chat(LogprobWriter(2), [IMPOSSIBLE])):
        assert "-9999.0" in json.dumps(found, allow_nan=False)


def test_tokens_are_written_as_ids_on_request_or_if_they_lack_text() -> None:
    assert completion(LogprobWriter(1, as_token_ids=True), [7], [SAMPLED_IS_LIKELY])["tokens"] == ["token_id:7"]
    no_text = {7: Logprob(-0.1, 1, None)}
    assert chat(LogprobWriter(1), [no_text])["content"][0]["token"] == "token_id:7"


def entry_of(pieces: Mapping[int, Piece]) -> Logprobs:
    """Log probabilities of one position; the first token is its own, and the others follow from likely to unlikely."""
    token_ids = list(pieces)
    values: list[float] = [-1.0 - index for index in range(len(token_ids))]
    return Logprobs([len(token_ids)], token_ids, values, [*range(1, len(token_ids) + 1)], list(pieces.values()))


def test_token_with_part_of_a_character_is_written_as_escaped_bytes() -> None:
    columns = entry_of({7: b" \xf0\x9f", 8: "é".encode(), 9: b"\xc3"})
    found = json.loads(at_once(LogprobWriter(2).completion(placed([7], columns, "\ufffd"))))
    assert found["tokens"] == [r"bytes: \xf0\x9f"]
    assert found["top_logprobs"] == [{r"bytes: \xf0\x9f": -1.0, "é": -2.0, r"bytes:\xc3": -3.0}]
    (one,) = json.loads(at_once(LogprobWriter(3).chat(columns)))["content"]
    assert (one["token"], one["bytes"]) == (r" \xf0\x9f", [0x20, 0xF0, 0x9F])
    assert [top["bytes"] for top in one["top_logprobs"]] == [[0x20, 0xF0, 0x9F], [0xC3, 0xA9], [0xC3]]


def test_tokens_with_the_same_text_have_different_json_keys() -> None:
    """Cases: a byte and its character, and tokens without text; the sampled token keeps its text as key."""
    columns = entry_of({65: b"A", 7: b"A", 900: b"", 901: b""})
    found = json.loads(at_once(LogprobWriter(3).completion(placed([65], columns, "A"))))
    assert found["tokens"] == ["A"]
    assert found["top_logprobs"] == [{"A": -1.0, "token_id:7": -2.0, "": -3.0, "token_id:901": -4.0}]


def test_special_token_without_text_has_a_name_and_null_bytes() -> None:
    columns = entry_of({2: "</s>", 7: b"A"})
    found = json.loads(at_once(LogprobWriter(1).completion(placed([2], columns, ""))))
    assert found["tokens"] == ["</s>"] and found["top_logprobs"] == [{"</s>": -1.0, "A": -2.0}]
    (one,) = json.loads(at_once(LogprobWriter(1).chat(columns)))["content"]
    assert (one["token"], one["bytes"]) == ("</s>", None)


def placed(token_ids: list[int], columns: Logprobs, text: str) -> UnplacedLogprobs:
    places = TextPlaces()
    places.add_text(text, is_last=True)
    unplaced = UnplacedLogprobs(places)
    unplaced.add(token_ids, columns.own_pieces(), columns)
    return unplaced


# ---------------------------------------------------------------------------------------------------- places


def offsets_of(places: TextPlaces, pieces: Sequence[Piece]) -> list[int]:
    return [places.place(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "text", "offsets"),
    [
        ([b"a", "é".encode(), b"b"], "aéb", [0, 1, 2]),
        ([b"a\xc3", b"\xa9b", b"c"], "aébc", [0, 1, 3]),  # the second begins within "é"
        ([*(bytes([byte]) for byte in "😀".encode()), b"x"], "😀x", [0, 0, 0, 0, 1]),
        (["<s>", b"a", "</s>", b"b"], "ab", [0, 0, 1, 1]),
        ([b" The", b" a"], "The a", [0, 3]),  # stripped
        ([b"do", b" n't", b" ."], "don't.", [0, 2, 5]),  # cleaned up
        ([b"ab", b"cd", b"ef"], "abc", [0, 2, 3]),  # cut at a stop string
        ([b"\xc3", b"\xa9", b"\xc3", b"b", b"c"], "\ufffd\ufffd\ufffdbc", [0, 0, 2, 3, 4]),  # a spoilt run
        ([b"\xc3", b"b"], "\ufffdb", [0, 1]),
        ([b"\xe2", b"\x82", b"b"], "\ufffd\ufffdb", [0, 0, 2]),
        ([b"a", b"\xff", b"b", b"c", b"b"], "\ufffd\ufffd\ufffdcb", [0, 1, 2, 3, 4]),
        (["\ufffd".encode(), b"b"], "\ufffdb", [0, 1]),
        ([b"a", "é".encode(), b"b", b"c"], "ae\u0301bc", [0, 1, 3, 4]),  # the tokenizer composes characters
        ([b" The", b" The"], "The The", [0, 3]),
        ([b"", b"a", b"", b"b"], "ab", [0, 0, 1, 1]),
    ],
)
def test_token_offset_is_the_start_of_its_character(pieces: list[Piece], text: str, offsets: list[int]) -> None:
    places = TextPlaces()
    places.add_text(text, is_last=True)
    assert offsets_of(places, pieces) == offsets


def test_tokens_of_one_character_share_its_offset() -> None:
    places = TextPlaces(5, "😀".encode()[:2])
    places.add_text("😀a", is_last=True)
    assert offsets_of(places, ["😀".encode()[2:3], "😀".encode()[3:], b"a"]) == [5, 5, 6]


def test_token_offset_is_unknown_until_the_text_before_it_arrives() -> None:
    places = TextPlaces()
    places.add_text("a", is_last=False)  # the rest of it may be a stop string
    assert places.is_place_known(b"abc") and places.place(b"abc") == 0
    assert not places.is_place_known(b"d")
    places.add_text("bc", is_last=False)
    assert places.is_place_known(b"d") and places.place(b"d") == 3
    assert not places.is_place_known(b"e")
    places.add_text("", is_last=True)
    assert places.is_place_known(b"e") and places.place(b"e") == 3


def test_offset_after_an_invalid_character_is_unknown_until_its_text() -> None:
    """The text of a run of byte tokens comes with its end."""
    places = TextPlaces()
    assert places.is_place_known(b"\xc3") and places.place(b"\xc3") == 0
    assert places.is_place_known(b"\xa9"), "it finishes the character"
    assert not places.is_place_known(b"b")
    places.add_text("\ufffdb", is_last=False)
    assert places.is_place_known(b"b") and places.place(b"b") == 1


@given(st.text(st.sampled_from("aé日😀 \u0301\u200d\n"), max_size=12), st.lists(st.integers(1, 5)))
def test_token_offsets_do_not_depend_on_the_pieces_of_a_text(text: str, sizes: list[int]) -> None:
    """The text arrives before all tokens, or in parts after them."""
    data, pieces = text.encode(), list[bytes]()
    for size in [*sizes, len(data)]:
        pieces.append(data[:size])
        data = data[size:]
    whole = TextPlaces()
    whole.add_text(text, is_last=True)
    expected, place = list[int](), 0
    for piece in pieces:
        expected.append(len(text.encode()[:place].decode("utf-8", "ignore")))
        place += len(piece)
    assert offsets_of(whole, pieces) == expected
    late, found = TextPlaces(), list[int]()
    waiting = list(pieces)
    for end in range(len(text) + 1):
        late.add_text(text[max(0, end - 1) : end], is_last=end == len(text))
        while waiting and late.is_place_known(waiting[0]):
            found.append(late.place(waiting.pop(0)))
    assert found == expected


# --------------------------------------------------------------------------------------------------- prompts


def test_prompt_logprobs_are_keyed_by_token_id() -> None:
    assert prompt(None) is None
    assert prompt([None, {7: Logprob(-0.1, 1, " a")}]) == [
        None,
        {"7": {"logprob": -0.1, "rank": 1, "decoded_token": " a"}},
    ]


def test_sampled_token_among_the_most_likely_is_listed_once() -> None:
    values = np.array([-0.5, -0.25, -0.5, -3.0], dtype=np.float32)
    entry = TokenLogprobs(np.array([7, 8, 7, 9]), values, 1)
    found = Logprobs.from_entries([entry, None], lambda token_id: b"%d" % token_id, [b"seven"])
    assert found == Logprobs([3, 0], [7, 8, 9], [-0.5, -0.25, -3.0], [2, 1, 3], [b"seven", b"8", b"9"])


def test_logprobs_extend_appends_later_positions() -> None:
    both = columns_of([None, SAMPLED_IS_LIKELY])
    both.extend(columns_of([SAMPLED_IS_UNLIKELY]))
    assert both == columns_of([None, SAMPLED_IS_LIKELY, SAMPLED_IS_UNLIKELY])
    assert len(both) == 3
    assert [list(place) for place in both.positions()] == [[], [0, 1], [2, 3, 4]]


@pytest.mark.parametrize("form", ["completion", "chat", "prompt"])
def test_the_json_of_many_log_probabilities_is_written_in_pieces(form: str) -> None:
    """The JSON is the same as if it were written in one piece."""
    entries = [SAMPLED_IS_LIKELY if place % 3 else SAMPLED_IS_UNLIKELY for place in range(5000)]
    ids = [next(iter(entry)) for entry in entries]
    make: dict[str, Callable[[], Any]] = {
        "completion": lambda: LogprobWriter(2).completion(unplaced(list(ids), columns_of(entries))),
        "chat": lambda: LogprobWriter(2).chat(columns_of(entries)),
        "prompt": lambda: prompt_logprobs(columns_of(entries)),
    }
    assert len(list(make[form]())) > 5000 * 2 / (PIECE + 4)
    found, one = json.loads(at_once(make[form]())), entries[1]
    if form == "completion":
        assert len(found["tokens"]) == 5000 and found["text_offset"][-1] == 3332 * 2 + 1667
        assert found == completion(LogprobWriter(2), ids, entries)
    elif form == "chat":
        assert found["content"][1::3] == chat(LogprobWriter(2), [one])["content"] * 1667
    else:
        assert found[1::3] == prompt([one]) * 1667


def test_prompt_character_is_written_with_the_token_that_completes_it() -> None:
    columns = Logprobs()
    for piece in ("é".encode()[:1], "é".encode()[1:], b"a"):
        columns.extend(entry_of({7: piece, 8: b"\xa9"}))
    found = json.loads(at_once(prompt_logprobs(columns)))
    assert [entry["7"]["decoded_token"] for entry in found] == ["", "é", "a"]
    assert found[1]["8"]["decoded_token"] == "é"  # in the same place
