"""Text that is released token by token equals the text of all tokens decoded in one call; stop strings are found where
`str.find` finds them."""

from __future__ import annotations

import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pointsman.engine.text.detokenizer import Detokenizer, TextDecoder
from pointsman.engine.text.token_streams import CleanUpStream
from tests.engine.text_tokenizers import (
    HARD_TEXTS,
    KINDS,
    PickyTokenizer,
    byte_level,
    byte_token,
    metaspace,
    random_tokens,
)
from tests.forms import short_or_long

NUM_STRINGS = short_or_long(500, 10_000)  # per kind of tokenizer


@pytest.fixture(scope="module", params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def tokenizer(kind: str) -> Any:
    return KINDS[kind]()


def pieces_of(decoder: TextDecoder, token_ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    stream = decoder.stream(skip_special_tokens)
    return [*(stream.feed(token_id) for token_id in token_ids), stream.flush()]


# -------------------------------------------------------------------------------------------------------- streams


def test_streamed_text_equals_text_decoded_in_one_call(kind: str, tokenizer: Any) -> None:
    decoder, rng = TextDecoder(tokenizer), random.Random(kind)
    num_strings = NUM_STRINGS // 4 if kind.startswith("python") else NUM_STRINGS
    num_grown = 0
    for index in range(num_strings):
        token_ids = random_tokens(kind, tokenizer, rng)
        skip = index % 2 == 0
        pieces = pieces_of(decoder, token_ids, skip)
        assert "".join(pieces) == tokenizer.decode(token_ids, skip_special_tokens=skip), token_ids
        num_grown += sum(map(bool, pieces[:-1]))
    assert num_grown > num_strings, "text must not wait for the end"


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback", "python", "python-replacing"])
def test_released_text_has_only_whole_characters(name: str) -> None:
    """The tokens of the texts are single bytes; all characters are released, and none in parts."""
    tokenizer = KINDS[name]()
    decoder, rng = TextDecoder(tokenizer), random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice([*HARD_TEXTS, "a", " "]) for _ in range(rng.randrange(1, 9)))
        token_ids = [byte_token(name, tokenizer, byte) for byte in text.encode()]
        pieces = pieces_of(decoder, token_ids)  # type: ignore[arg-type]
        assert all("\ufffd" not in piece for piece in pieces)
        assert "".join(pieces) == (text.removeprefix(" ") if name == "byte-fallback" else text)


def test_a_character_comes_with_its_last_byte() -> None:
    tokenizer = byte_level()
    text = "naïve façade, öäü, 日本, \U0001f40d"
    token_ids = [byte_token("byte-level", tokenizer, byte) for byte in text.encode()]
    pieces = pieces_of(TextDecoder(tokenizer), token_ids)  # type: ignore[arg-type]
    assert [piece for piece in pieces if piece] == list(text)
    lengths = [len(character.encode()) for character in text]
    assert [index + 1 for index, piece in enumerate(pieces) if piece] == list(itertools.accumulate(lengths))


@pytest.mark.parametrize("name", ["byte-level", "python"])
def test_invalid_bytes_do_not_hold_back_later_text(name: str) -> None:
    tokenizer = KINDS[name]()
    for junk in (b"\xff", b"\x80" * 40, b"\xe2\x82" * 20, b"\xc3"):
        token_ids = [byte_token(name, tokenizer, byte) for byte in junk + b"ok"]
        stream = TextDecoder(tokenizer).stream()
        text = "".join(stream.feed(token_id) for token_id in token_ids)  # type: ignore[arg-type]
        assert text.endswith("ok") and stream.flush() == ""


def test_a_run_of_fallback_bytes_is_decoded_as_a_whole() -> None:
    """A run of byte tokens is held back until it ends, because one invalid byte changes the decoder's text of the valid
    bytes before it."""
    tokenizer = KINDS["byte-fallback"]()
    good = [byte_token("byte-fallback", tokenizer, byte) for byte in "é".encode()]
    b = tokenizer.convert_tokens_to_ids("b")
    decoder = TextDecoder(tokenizer)
    assert pieces_of(decoder, [*good, b]) == ["", "", "éb", ""]  # type: ignore[list-item]
    assert pieces_of(decoder, [*good, good[0], b]) == ["", "", "", "\ufffd\ufffd\ufffdb", ""]  # type: ignore[list-item]


WORDS = (
    "a",
    " ",
    " '",
    "' ",
    ".",
    " n't",
    "n",
    "'t",
    " 've",
    "re",
    " ,",
    "s",
    "mm",
    "!",
    "'",
    " 'v",
    "e",
    " n",
    " ' ",
    "t",
)


class _Parts:
    """A token stream in which the text of token i is the i-th of some texts."""

    def __init__(self, parts: list[str]) -> None:
        self.parts = parts

    def feed(self, token_id: int) -> str:
        return self.parts[token_id]

    def flush(self) -> str:
        return ""

    def pending(self) -> str:
        return ""


@given(st.lists(st.sampled_from(WORDS), max_size=12))
@example([" n", " ' ", "t"])  # joined twice
@example([" '", " '", " '", " n", " '", "t", " '", " '", "s"])
def test_streamed_clean_up_equals_that_of_transformers(words: list[str]) -> None:
    """The expected text is transformers' clean-up of the whole text."""
    clean = metaspace().clean_up_tokenization
    stream = CleanUpStream(_Parts(words), clean, str, frozenset())
    pieces = [*(stream.feed(index) for index in range(len(words))), stream.flush()]
    assert "".join(pieces) == clean("".join(words))


@pytest.mark.parametrize("chain", ["'", "n", "n '", "' ' n"])
def test_a_chain_of_removable_spaces_is_released(chain: str) -> None:
    """Each quote might belong to the next word; text is released nevertheless, at a constant cost per token."""
    clean = metaspace().clean_up_tokenization
    words = [" " + word for word in chain.split()] * 8000
    stream = CleanUpStream(_Parts(words), clean, str, frozenset())
    started = time.process_time()
    pieces = [stream.feed(index) for index in range(len(words))]
    assert time.process_time() - started < 5
    settled = "".join(pieces)
    assert settled + stream.flush() == clean("".join(words))
    assert len(settled) > len(words) - 20


def test_a_token_that_the_tokenizer_cannot_decode_has_no_text() -> None:
    inner = KINDS["python-replacing"]()
    good = [byte_token("python", inner, byte) for byte in "aé b".encode()]
    decoder = TextDecoder(PickyTokenizer(inner, frozenset({300, 301})))
    token_ids = [300, good[0], 301, *good[1:3], 300, *good[3:], 301]
    assert "".join(pieces_of(decoder, token_ids)) == decoder.decode(token_ids) == "aé b"  # type: ignore[arg-type]
    assert decoder.token_text(301) == ""
    with pytest.raises(TypeError, match="can only join"):  # each of the two alone can be decoded
        TextDecoder(PickyTokenizer(inner, frozenset(), (70, 71))).decode([69, 70, 71])


def test_token_text_is_the_text_after_other_text() -> None:
    decoder = TextDecoder(metaspace())
    the, s = (metaspace().convert_tokens_to_ids(token) for token in ("▁the", "</s>"))
    assert (decoder.token_text(the), decoder.token_text(s)) == (" the", "</s>")
    tokenizer = byte_level()
    assert TextDecoder(tokenizer).token_text(tokenizer.convert_tokens_to_ids("Ġthe")) == " the"
    assert TextDecoder(tokenizer).token_text(tokenizer.convert_tokens_to_ids("Ã")) == "\ufffd"


@pytest.mark.parametrize("name", list(KINDS))
def test_detokenizing_has_constant_cost_per_token(name: str) -> None:
    """A text 16 times as long takes about 16 times as long; if every step decoded all tokens, it would take 256 times
    as long."""
    tokenizer = KINDS[name]()
    decoder, rng = TextDecoder(tokenizer), random.Random(2)
    token_ids = random_tokens(name, tokenizer, rng, most=100) * 2
    worst_case = token_ids if name != "byte-fallback" else [5, 200] * len(token_ids)  # one endless run

    def seconds(times: int) -> float:
        started = time.process_time()
        pieces_of(decoder, worst_case * times)
        return time.process_time() - started

    seconds(1)
    short, long = min(seconds(4) for _ in range(3)), min(seconds(64) for _ in range(2))
    assert long < 16 * 4 * short + 0.01


# --------------------------------------------------------------------------------------------------- stop strings


def first_stop(text: str, stop: list[str], floor: int = 0) -> tuple[int, int, str] | None:
    """(start, end, stop string) of the match that ends first after position `floor`; of several matches with the same
    end, the longest."""
    found = []
    for one in stop:
        start = text.find(one)
        while start >= 0 and start + len(one) <= floor:
            start = text.find(one, start + 1)
        if start >= 0:
            found.append((start + len(one), start, one))
    if not found:
        return None
    end, start, one = min(found)
    return start, end, one


def test_random_stop_strings_end_the_text_where_find_does(kind: str, tokenizer: Any) -> None:
    decoder, rng = TextDecoder(tokenizer), random.Random(kind)
    num_found = num_strings = 0
    for _ in range(NUM_STRINGS // 2):
        token_ids = random_tokens(kind, tokenizer, rng)
        whole = tokenizer.decode(token_ids, skip_special_tokens=True)
        stop = [_random_stop(whole, rng) for _ in range(rng.randrange(1, 4))]
        include = rng.random() < 0.5
        detokenizer = Detokenizer(decoder.stream(), stop, include_stop=include)
        text, num_strings = "", num_strings + 1
        settled, plain = "", decoder.stream()
        found = None
        for num_fed, token_id in enumerate(token_ids, start=1):
            text += detokenizer.feed(token_id)
            settled += plain.feed(token_id)
            seen = settled
            if kind == "byte-fallback":  # a byte counts before it is known what follows it
                now = tokenizer.decode(token_ids[:num_fed], skip_special_tokens=True)
                seen += now[len(settled) :].rstrip("\ufffd")
            found = first_stop(seen, stop)
            assert (found is None) == (detokenizer.stop_reason is None)
            if found is not None:
                whole = seen
                break
            assert text == (settled if include else without_half_a_stop(settled, stop))
        text += detokenizer.finish()
        found = found or first_stop(whole, stop)
        if found is None:
            assert (text, detokenizer.stop_reason) == (whole, None)
        else:
            start, end, one = found
            assert (text, detokenizer.stop_reason) == (whole[: end if include else start], one)
            num_found += 1
    assert 0.2 * num_strings < num_found < num_strings


def without_half_a_stop(text: str, stop: list[str]) -> str:
    halves = [start for start in range(len(text)) if any(one.startswith(text[start:]) for one in stop)]
    return text[: min(halves, default=len(text))]


def _random_stop(text: str, rng: random.Random) -> str:
    """A part of the text as stop string, sometimes with a change, so that only a beginning of it is in the text."""
    if len(text) < 2 or rng.random() < 0.1:
        return rng.choice(["zz", " a", "."])
    start = rng.randrange(len(text))
    stop = text[start : start + rng.randrange(1, 6)]
    return stop if rng.random() < 0.6 else stop + rng.choice(["z", " a", "b"])


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 12),
    st.booleans(),
)
def test_stop_strings_end_the_text_only_after_min_tokens(
    parts: list[str], stop: list[str], min_tokens: int, include: bool
) -> None:
    """The texts have two letters only, so that stop strings overlap with themselves, with each other and with the end
    of the first `min_tokens` tokens."""
    detokenizer = Detokenizer(_Parts(parts), stop, include_stop=include, min_tokens=min_tokens)
    text, num_fed = "", 0
    while num_fed < len(parts) and detokenizer.stop_reason is None:
        text += detokenizer.feed(num_fed)
        num_fed += 1
    text += detokenizer.finish()
    whole = "".join(parts)
    found = first_stop(whole, stop, len("".join(parts[:min_tokens])))
    if found is None:
        assert (text, detokenizer.stop_reason) == (whole, None)
        return
    start, end, one = found
    assert (text, detokenizer.stop_reason) == (whole[: end if include else start], one)
    assert len("".join(parts[: num_fed - 1])) < end <= len("".join(parts[:num_fed])), (
        "found with the token that ends it"
    )


@pytest.mark.parametrize(("stop", "num_tokens"), [("\n", 3), ("\n\n", 4), (" a\n", 3), ("日", 7), ("\ufffd", 9)])
def test_a_stop_string_in_byte_tokens_ends_the_text_immediately(stop: str, num_tokens: int) -> None:
    """The stop string ends the text in the middle of a run of byte tokens; an incomplete character at its end is not
    yet a replacement character."""
    tokenizer = KINDS["byte-fallback"]()
    tokens = ["b", "▁a", "<0x0A>", "<0x0A>", "<0xE6>", "<0x97>", "<0xA5>", "<0xFF>", "▁a"]
    token_ids = [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    for include in (False, True):
        detokenizer = Detokenizer(TextDecoder(tokenizer).stream(), [stop], include_stop=include)
        text, num_fed = "", 0
        while detokenizer.stop_reason is None:
            text += detokenizer.feed(token_ids[num_fed])
            num_fed += 1
        assert (num_fed, detokenizer.stop_reason, detokenizer.finish()) == (num_tokens, stop, "")
        whole = tokenizer.decode(token_ids[:num_tokens])
        assert text == whole[: whole.index(stop) + (len(stop) if include else 0)]


def test_min_tokens_counts_byte_tokens_that_are_held_back() -> None:
    tokenizer = KINDS["byte-fallback"]()
    newline, b = (tokenizer.convert_tokens_to_ids(token) for token in ("<0x0A>", "b"))
    detokenizer = Detokenizer(TextDecoder(tokenizer).stream(), ["\n"], min_tokens=2)
    assert [detokenizer.feed(token_id) for token_id in (newline, newline, b)] == ["", "", "\n\nb"]
    assert (detokenizer.feed(newline), detokenizer.stop_reason) == ("", "\n")
    detokenizer = Detokenizer(TextDecoder(tokenizer).stream(), ["\n"], min_tokens=1)
    assert [detokenizer.feed(newline), detokenizer.stop_reason] == ["", None]
    assert [detokenizer.feed(newline), detokenizer.stop_reason] == ["\n", "\n"]


def test_searching_a_long_run_of_bytes_has_constant_cost_per_token() -> None:
    tokenizer = KINDS["byte-fallback"]()
    decoder = TextDecoder(tokenizer)
    byte = byte_token("byte-fallback", tokenizer, 0x41)
    assert byte is not None

    def seconds(num_tokens: int) -> float:
        detokenizer = Detokenizer(decoder.stream(), ["zz"])
        started = time.process_time()
        for _ in range(num_tokens):
            detokenizer.feed(byte)
        return time.process_time() - started

    short, long = min(seconds(1000) for _ in range(3)), seconds(16_000)
    assert long < 16 * 4 * short + 0.01


def test_the_end_of_the_tokens_may_complete_a_stop_string() -> None:
    """A byte of an incomplete character becomes a replacement character when no token follows."""
    tokenizer = byte_level()
    token_ids = [byte_token("byte-level", tokenizer, byte) for byte in b"a\xc3"]
    detokenizer = Detokenizer(TextDecoder(tokenizer).stream(), ["\ufffd"])
    assert [detokenizer.feed(token_id) for token_id in token_ids] == ["a", ""]  # type: ignore[arg-type]
    assert (detokenizer.finish(), detokenizer.stop_reason) == ("", "\ufffd")
