"""Texts generated under a grammar belong to its language, according to independent validators."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import lark
import pytest
import torch
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pointsman.engine import StructuredOutputsParams
from pointsman.engine.errors import GrammarError
from pointsman.engine.grammar.process import CompiledGrammar, GrammarLimits, GrammarProcess, Job
from pointsman.engine.grammar.vocabulary import GrammarVocabulary
from tests.engine import grammar_languages as languages
from tests.forms import short_or_long

pytestmark = pytest.mark.e2e

MAX_TOKENS = 80
TEXTS_PER_GRAMMAR = 3
MAX_PARSED = 40
"""Characters of a text that Lark parses: of an ambiguous grammar it makes every tree."""
EOS = 256
PIECES = (
    "é",
    "°C",
    "日本",
    "😀",
    '"',
    '":',
    '{"',
    "},",
    "\\u",
    '\\"',
    "00",
    "99",
    "e9",
    "x4",
    "abc",
    "\xc3".encode("latin-1"),
)
SETTINGS = settings(deadline=None, suppress_health_check=list(HealthCheck))


class Compiler:
    """Compiles for bytes and for some tokens of several bytes."""

    def __init__(self) -> None:
        tokens = [bytes([byte]) for byte in range(256)] + [b""]
        tokens += [one.encode() if isinstance(one, str) else one for one in PIECES]
        self.vocabulary = GrammarVocabulary(tokens, (EOS,))
        self.process = GrammarProcess(lambda: self.vocabulary, GrammarLimits())
        self.num_refused = self.num_ended = self.num_cut = 0

    def texts(self, rng: random.Random, **options: Any) -> list[str]:
        """Texts of random tokens under a grammar, without those that do not end; none if the grammar is refused."""
        try:
            spec = StructuredOutputsParams(**options).spec
            grammar = self.process.compile(Job(spec), 10.0)
        except (ValueError, GrammarError):
            self.num_refused += 1
            return []
        found = [self._text(grammar, rng) for _ in range(TEXTS_PER_GRAMMAR)]
        ended = [text for text in found if text is not None]
        self.num_ended += len(ended)
        self.num_cut += len(found) - len(ended)
        return ended

    def _text(self, grammar: CompiledGrammar, rng: random.Random) -> str | None:
        matcher = xgrammar.GrammarMatcher(grammar.compiled)
        tokens = self.vocabulary.tokens
        bitmask = xgrammar.allocate_token_bitmask(1, len(tokens))
        written = b""
        for step in range(MAX_TOKENS):
            matcher.fill_next_token_bitmask(bitmask)
            bits = bitmask.view(torch.uint8).numpy()
            allowed = [at for at in range(len(tokens)) if bits[0, at // 8] >> (at % 8) & 1]
            assert allowed, f"nothing may follow {written!r}"
            likes_end = EOS in allowed and (rng.random() < 0.3 or step > MAX_TOKENS // 2)
            token = EOS if likes_end else rng.choice(_weighted(allowed, tokens, rng))
            assert matcher.accept_token(token)
            if token == EOS:
                return written.decode()
            written += tokens[token]
        return None


def _weighted(allowed: list[int], tokens: list[bytes], rng: random.Random) -> list[int]:
    """Choose a token, preferring those that close open brackets and quotes, so that texts end."""
    ends = [one for one in allowed if tokens[one] in (b'"', b"}", b"]", b",", b":")]
    return ends if ends and rng.random() < 0.4 else allowed


@pytest.fixture(scope="module")
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.process.close()


def report(compiler: Compiler, what: str) -> None:
    print(f"{what}: {compiler.num_refused} refused, {compiler.num_ended} texts, {compiler.num_cut} cut")


@settings(SETTINGS, max_examples=short_or_long(60, 500))
@given(schema=languages.schemas(), seed=st.integers(0, 2**32))
def test_json_is_valid_under_its_schema(compiler: Compiler, schema: dict[str, Any], seed: int) -> None:
    for text in compiler.texts(random.Random(seed), json=schema):
        assert languages.is_valid(schema, json.loads(text)), text


@settings(SETTINGS, max_examples=short_or_long(60, 200))
@given(expression=languages.expressions, seed=st.integers(0, 2**32))
def test_texts_match_their_expression(compiler: Compiler, expression: str, seed: int) -> None:
    if expression:
        for text in compiler.texts(random.Random(seed), regex=expression):
            assert languages.is_match(expression, text), text


@settings(SETTINGS, max_examples=short_or_long(30, 100))
@given(grammar=languages.grammars(), seed=st.integers(0, 2**32))
def test_texts_are_derived_by_their_grammar(compiler: Compiler, grammar: languages.Grammar, seed: int) -> None:
    found = compiler.texts(random.Random(seed), grammar=grammar.gbnf)
    texts = [text for text in found if len(text) <= MAX_PARSED]
    if texts:
        parser = lark.Lark(grammar.lark, parser="earley", lexer="dynamic", ambiguity="resolve")
        for text in texts:
            parser.parse(text)  # raises if the text is not in the language


@settings(SETTINGS, max_examples=short_or_long(20, 100))
@given(
    choices=st.lists(st.text(languages.characters, min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
)
def test_generated_texts_are_among_the_choices(compiler: Compiler, choices: list[str], seed: int) -> None:
    assert set(compiler.texts(random.Random(seed), choice=choices)) <= set(choices)


@pytest.mark.parametrize(
    "options",
    [
        {"json": {"type": "string", "maxLength": 500}},
        {"json": {"type": "string", "pattern": "^[^a]{1,300}$"}},
        {"json": {"type": "object", "properties": {"é": {"type": "string", "minLength": 2, "maxLength": 600}}}},
        {"regex": r"[\S ]{1,80}x"},
        {"regex": "[6é]+[\U0001f900-\U0001f9ff]]"},
        {"regex": "([a-z]|[😀-😎])*[^a]"},
        {"json": {"type": "string", "pattern": ".+\\W\\n"}},
        {"json": {"type": "string", "pattern": "^[一-龥]+[a-e0-9]{2}$"}},
        {"regex": "(?:[a-e]|-)+[一-龥]x"},
        {"regex": "(?:[a-e]|-)+[一-龥]*x"},
        {"regex": "(?:[a-e]|-|é)+[é-ü]x"},
        {"grammar": 'root ::= "[" ([一-龥]+ ",")* [ぁ-ん] "]"'},
        {"regex": "[6\\\\]+[\u2010-\u2027\u2190-\u23ff]"},
        {"grammar": 'root ::= "[" [^\\x00-\\x1f]{0,400} "]"'},
    ],
    ids=str,
)
def test_allowed_tokens_are_accepted(options: dict[str, Any]) -> None:
    """For tokens of several characters: xgrammar sorts those of a vocabulary when it compiles a grammar."""
    choose = random.Random(0)
    letters = 'abx6 -"\\né{}:,=[]()%$日😀\u0301'
    words = ("".join(choose.choices(letters, k=choose.randint(2, 4))) for _ in range(3000))
    tokens = [bytes([byte]) for byte in range(256)] + [b""] + [word.encode() for word in words]
    tokens += [b"\xed\xa0", b"\xed\x9f\xbf", b"a\xed", b"\xa0\x80", b'"\xf0\x9f', b'\x98\x80"']
    vocabulary = GrammarVocabulary(tokens, (EOS,))
    process = GrammarProcess(lambda: vocabulary, GrammarLimits(token_time=0.01))
    try:
        matcher = xgrammar.GrammarMatcher(process.compile(Job(StructuredOutputsParams(**options).spec), 20.0).compiled)
    finally:
        process.close()
    bitmask = xgrammar.allocate_token_bitmask(1, len(tokens))
    for _ in range(6):
        matcher.fill_next_token_bitmask(bitmask)
        bits = int.from_bytes(bitmask.numpy().tobytes(), "little")
        allowed = [at for at in range(len(tokens)) if at != EOS and bits >> at & 1]
        for token in allowed:
            assert matcher.fork().accept_token(token), tokens[token]
        if not allowed:
            return
        assert matcher.accept_token(choose.choice(allowed))
