"""The bytes of tokens for grammars, compared with decoded texts."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from pointsman.engine import GrammarError
from pointsman.engine.grammar.vocabulary import read_vocabulary
from pointsman.engine.text.detokenizer import TextDecoder
from pointsman.engine.text.tokenizer import model_directory
from tests.engine.text_tokenizers import KINDS

READABLE = ("byte-level", "byte-fallback", "metaspace", "metaspace-first", "wordpiece", "wordpiece-cleanup")


@pytest.mark.parametrize("kind", READABLE)
def test_vocabulary_tokens_are_the_bytes_of_their_texts(kind: str) -> None:
    tokenizer = KINDS[kind]()
    size = len(tokenizer)
    vocabulary = read_vocabulary(tokenizer, size, [tokenizer.eos_token_id])
    assert vocabulary.stop_token_ids == (tokenizer.eos_token_id,)
    decoder, special, whole = TextDecoder(tokenizer), set(tokenizer.all_special_ids), 0
    for token_id, token in enumerate(vocabulary.tokens):
        if token_id in special:
            assert token == b""
        elif token:
            try:
                text = token.decode()
            except UnicodeDecodeError:
                continue
            whole += 1
            assert decoder.token_text(token_id) == text
    assert whole > 10


@pytest.mark.parametrize("kind", sorted(set(KINDS) - set(READABLE)))
def test_unknown_tokenizers_are_refused_or_read_correctly(kind: str) -> None:
    """In both cases no token may have bytes other than its decoded text."""
    tokenizer = KINDS[kind]()
    try:
        vocabulary = read_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    except GrammarError as error:
        assert "tokenizer" in str(error) and "\n" not in str(error)
        return
    decoder = TextDecoder(tokenizer)
    for token_id, token in enumerate(vocabulary.tokens):
        assert token == b"" or decoder.token_text(token_id).encode() == token


def test_added_tokens_have_the_bytes_of_their_own_text() -> None:
    """One of them would be decoded differently, because its letter stands for a byte in this vocabulary."""
    tokenizer = KINDS["byte-level"]()
    tokens = read_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id]).tokens
    assert tokens[tokenizer.convert_tokens_to_ids("<tool>")] == b"<tool>"
    for text in ("<s>", "</s>", "éx"):
        assert tokens[tokenizer.convert_tokens_to_ids(text)] == b""


@pytest.mark.parametrize("difference", [-300, 0, 333])
def test_the_vocabulary_has_a_token_for_each_logit(difference: int) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model_directory("demo"))
    size = len(tokenizer) + difference
    vocabulary = read_vocabulary(tokenizer, size, [0, 1, size + 5])
    assert len(vocabulary.tokens) == size
    assert vocabulary.stop_token_ids == (0, 1)
    assert vocabulary.tokens[len(tokenizer) :] == [b""] * max(0, difference)
    info = vocabulary.tokenizer_info()
    assert info.vocab_size == size and list(info.stop_token_ids) == [0, 1]
