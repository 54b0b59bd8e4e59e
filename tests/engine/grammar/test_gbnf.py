"""Grammars in llama.cpp's format: each escape has a fixed length, and endless rules are left out."""

from __future__ import annotations

import time

import pytest

from pointsman.engine.grammar.gbnf import read_grammar
from pointsman.engine.grammar.nodes import Unreadable
from pointsman.engine.params.structured_outputs import MAX_GRAMMAR_BYTES
from tests.engine.grammar_texts import Language

TEXTS = (
    "Ab", "A1", "A", "b", "Л", "é", "éa", "ñ", "\x01", "]", "-", "^", "\\", '"', "'", "a", "", "ab", "aa", "aaa", "5",
    "d", "\n", "\t", " ", "😀", "\ud800", "?", "never",
)  # fmt: skip


@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        (r'root ::= "\x41b"', ["Ab"]),
        (r'root ::= "\xe9a"', ["éa"]),
        (r"root ::= [\x30-\x39a]", ["a", "5"]),
        (r'root ::= "\u0041b" | "\U00000041" "1"', ["Ab", "A1"]),
        (r'root ::= "\u{1f600}"', ["😀"]),
        (r'root ::= "\"" | "\\" | "\'" | "\n" | "\t"', ["\\", '"', "'", "\n", "\t"]),
        (r"root ::= [\]\-^\\]", ["]", "-", "^", "\\"]),
        ("root ::= [^\\x00-\\uffff]", ["😀"]),
        ("root ::= [é-ü]", ["é", "ñ"]),
        ("root ::= .", [one for one in TEXTS if len(one) == 1 and one != "\ud800"]),
        ("root ::= [^a]", [one for one in TEXTS if len(one) == 1 and one not in "a\ud800"]),
        ('root ::= "a"{2} # {3}\n\nother ::= "b"', ["aa"]),
        ('root ::= "a"{2,} | ("b" | other)?\nother ::=\n  "d"', ["b", "", "aa", "aaa", "d"]),
        ('never ::= "never"\nroot ::= never | [^\\u0000-\\U0010ffff]', ["never"]),
        ('root ::= "a" "" tail\ntail ::= "b" |', ["a", "ab"]),
        ('root ::= x "b" | "a"\nx ::= x "b" | "a"', ["a", "ab"]),
    ],
)
def test_a_grammar_allows_the_texts_it_derives(grammar: str, allowed: list[str]) -> None:
    assert Language(grammar=grammar).allows(*TEXTS) == allowed


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= "a" x\nx ::= x "b"',
        "root ::= root",
        "root ::= a\na ::= b | a\nb ::= a b",
        'root ::= "a" [^\\u0000-\\U0010ffff]',
        'root ::= "a" ("b" root | root)',
    ],
)
def test_a_grammar_whose_texts_never_end_allows_none(grammar: str) -> None:
    with pytest.raises(ValueError, match="it allows no text"):
        Language(grammar=grammar)


def test_options_whose_texts_never_end_are_left_out() -> None:
    grammar = 'root ::= "a" | "b" loop | "d" loop* | "e" loop{0,2} tail\nloop ::= loop "c"\ntail ::= "f" | "g" loop'
    assert Language(grammar=grammar).allows("a", "b", "d", "dc", "ef", "eg", "e") == ["a", "d", "ef"]


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('start ::= "a"', "the grammar has no rule 'root'"),
        ("root ::= missing", "a reference to the undefined rule 'missing' at line 1, column 10"),
        ('root ::= "a"\nroot ::= "b"', "a second rule 'root' at line 2, column 1"),
        ('root ::= "a', "an unexpected '\"' at line 1, column 10"),
        ('root ::= "a" ?? "b"', "a quantifier after a quantifier"),
        ("root ::= *", "'*' with nothing before it"),
        ('root ::= ("a"', "a '(' without ')'"),
        ('root ::= "a")', "a ')' without '('"),
        ('"a" root ::= "b"', "where a rule must begin"),
        (r'root ::= "\q"', r"the unknown escape '\\q'"),
        (r'root ::= "\x4"', r"the unknown escape '\\x'"),
        (r'root ::= "\ud800"', "no valid character"),
        ("root ::= [z-a]", "a range whose last character is before its first"),
        ('root ::= "a"{3,2}', "its minimum is above its maximum"),
        ('root ::= "a"{99999}', "the maximum is 65,536"),
        ('root ::= "a" (= "b")', "an unexpected '='"),
        ("root ::= 'a'", 'an unexpected "\'"'),
        ("root ::= " + "(" * 70, "groups nested more than 64 levels deep"),
    ],
)
def test_malformed_grammars_are_refused_with_the_position(grammar: str, words: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read_grammar(grammar)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("unit", ['"a" ', "(", "a ", "| ", "[a-z]", "r ::= ", "# a\n", '"\\x41"{2}', "a ::= a\n"])
def test_the_longest_grammars_are_read_in_a_second(unit: str) -> None:
    grammar = ("root ::= " + unit * MAX_GRAMMAR_BYTES)[:MAX_GRAMMAR_BYTES]
    started = time.thread_time()
    try:
        read_grammar(grammar)
    except Unreadable as error:
        assert len(str(error)) < 200
    assert time.thread_time() - started < 3.0
