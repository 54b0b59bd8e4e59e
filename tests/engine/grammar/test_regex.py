"""Regular expressions have the meaning of every dialect, or are refused."""

from __future__ import annotations

import re
import time

import pytest

from pointsman.engine.grammar.nodes import MAX_NESTING, MAX_REPETITIONS, Unreadable
from pointsman.engine.grammar.regex import _SYMBOLS, read_regex
from pointsman.engine.params.structured_outputs import MAX_GRAMMAR_BYTES
from tests.engine.grammar_texts import Language

TEXTS = (
    "Ab", "A1", "A", "b", "Л", "é", "é1", "ñ", "\x01", "\x00", "]", "-", "^", "\\", '"', "a", "", "ab", "aa", "aaa",
    "5", "\n", "\r", "\u2028", "\t", " ", "\xa0", "😀", "\ud800", "?", "٣", "_", "°", "a]", "[b]", "ba", "\x07",
    "\x1b", "\x08",
)  # fmt: skip


@pytest.mark.parametrize(
    ("expression", "allowed"),
    [
        (r"\x41b", ["Ab"]),
        (r"\x411", ["A1"]),
        (r"[\x30-\x39a]", ["a", "5"]),
        (r"\xe9" + "1", ["é1"]),
        (r"[\xe9a]", ["é", "a"]),
        (r"\u0041b", ["Ab"]),
        (r"\u{41}b", ["Ab"]),
        (r"\U00000041b", ["Ab"]),
        (r"\ud83d\ude00", ["😀"]),
        (r"[\u{1f600}b]", ["b", "😀"]),
        ("[^\\u0000-\\uffff]", ["😀"]),
        (".", [one for one in TEXTS if len(one) == 1 and one not in "\n\r\u2028\ud800"]),
        (r"\s", ["\n", "\r", "\t", " "]),
        (r"\d", ["5"]),
        (r"\w", ["A", "b", "a", "5", "_"]),
        (r"[^\S]", ["\n", "\r", "\t", " "]),
        (r"[^\D]", ["5"]),
        (r"[^\W\d]", ["A", "b", "a", "_"]),
        (
            r"\W",
            ["\x01", "\x00", "]", "-", "^", "\\", '"', "\n", "\r", "\t", " ", "?", "°", "\x07", "\x1b", "\x08"],
        ),
        (r"[\]\-^\\]", ["]", "-", "^", "\\"]),
        (r"[a-]", ["-", "a"]),
        (r"[\b]", ["\x08"]),
        (r"\a|\e|\cA", ["\x01", "\x07", "\x1b"]),
        (r"[\d-]", ["-", "5"]),
        ("a{2}", ["aa"]),
        ("a{0,2}?", ["a", "", "aa"]),
        ("(?P<name>a|)b", ["b", "ab"]),
        ("(?<name>a)(?:b)", ["ab"]),
        ("^a$|^b$", ["b", "a"]),
        ("(^a|b)$", ["b", "a"]),
        ("a]|]", ["]", "a]"]),
        (r"\[b]", ["[b]"]),
        (r"a+|\é", ["é", "a", "aa", "aaa"]),
    ],
)
def test_an_expression_allows_its_matches(expression: str, allowed: list[str]) -> None:
    assert Language(regex=expression).allows(*TEXTS) == allowed


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("a(?=b)", "a lookahead at character 2"),
        ("(?<!a)b", "a lookbehind"),
        (r"(a)\1", r"'\1', a back reference or octal escape,"),
        (r"\07", r"'\0', a back reference or octal escape,"),
        (r"\ba", r"'\b', a word boundary,"),
        (r"\<a", r"'\<'"),
        (r"\p{L}", r"'\p', a Unicode class,"),
        (r"\Za", r"'\Z', which dialects read differently"),
        ("(?i)a", "a flag, or an unknown group,"),
        ("(?>a)b", "an atomic group"),
        ("a++", "a possessive quantifier"),
        ("a{,2}", "begins no {m}, {m,} or {m,n}"),
        ("a{2", "begins no {m}, {m,} or {m,n}"),
        ("{", "a '{' with nothing to repeat"),
        ("*a", "a '*' with nothing to repeat"),
        ("a**", "a quantifier after a quantifier"),
        ("^*a", "a quantifier after '^'"),
        ("a{3,2}", "its minimum is above its maximum"),
        (f"a{{{MAX_REPETITIONS + 1}}}", f"the maximum is {MAX_REPETITIONS:,}"),
        ("a^b", "a '^' after the start of the text"),
        ("(a$)b", "a '$' before the end of the text"),
        ("(a$)*", "a '$' before the end of the text"),
        ("a$b", "a '$' before the end of the text"),
        ("(a", "a '(' without ')' at character 1"),
        ("a)", "a ')' without '(' at character 2"),
        ("[a", "a '[' without ']' at character 1"),
        ("[]a]", "a class that begins with ']'"),
        ("[^]", "a class that begins with ']'"),
        ("[[:alpha:]]", "a POSIX class"),
        ("[a&&b]", "'&&' in a class"),
        ("[z-a]", "a range whose last character is before its first"),
        (r"[a-\d]", "a range with a class at one end"),
        ("a\\", "a backslash at its end"),
        (r"\x4", r"'\x' without its hexadecimal digits"),
        (r"\ud83d", "no valid character"),
        (r"\U00110000", "no valid character"),
        ("(" * (MAX_NESTING + 2), f"groups nested more than {MAX_NESTING} levels deep"),
    ],
)  # fmt: skip
def test_constructs_that_dialects_read_differently_are_refused(expression: str, words: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_regex(expression)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


@pytest.mark.parametrize("expression", [r"a[^\s\S]", r"[^\d\D]+", r"(?:a|b)[^\w\W]", "[^\\u0000-\\U0010ffff]"])
def test_an_expression_without_a_match_allows_no_text(expression: str) -> None:
    with pytest.raises(ValueError, match="it allows no text"):
        Language(regex=expression)


def test_an_option_of_a_regex_without_a_match_is_left_out() -> None:
    assert Language(regex=r"a|b[^\s\S]").allows("a", "b") == ["a"]
    assert Language(regex=r"a(b[^\s\S])*").allows("a", "ab") == ["a"]


def test_symbols_are_not_word_characters() -> None:
    for first, last in _SYMBOLS.ranges:
        for code in range(first, last + 1):
            assert not re.match(r"[\w\d\s]", chr(code)), hex(code)


@pytest.mark.parametrize(
    "unit", ["a", "[", "(", "(a)", r"[\w\W]", r"\S", "a|", "a{2}", "[a-zé]", "(?:a|b)*", r"\u{1f600}", "]", "^", "$"]
)
def test_the_longest_expressions_are_read_in_a_second(unit: str) -> None:
    expression = (unit * MAX_GRAMMAR_BYTES)[:MAX_GRAMMAR_BYTES]
    started = time.thread_time()
    try:
        read_regex(expression)
    except Unreadable as error:
        assert len(str(error)) < 200
    assert time.thread_time() - started < 3.0  # takes a fifth of that here; quadratic time would be minutes
