"""GrammarVocabulary: the bytes of text that each of a model's tokens stands for.

xgrammar reads them from the tokenizer, for the three ways in which vocabularies write bytes. An error there would
make texts that the grammar never allowed, so its reading is compared with the engine's own decoder: a token on
whose text the two disagree is never chosen under a grammar, and a tokenizer with many of them has no structured output.
Special tokens stand for no text, because texts leave them out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pointsman.engine.errors import GrammarError, first_line

if TYPE_CHECKING:
    import xgrammar

MOST_COMPARED = 2000
"""Tokens that are compared, evenly spread over the vocabulary. A comparison takes some microseconds."""
MOST_DIFFERENT = 0.1
"""Share of the compared tokens that may differ before the tokenizer is taken for one of an unknown kind."""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """The tokens of one model. Both processes make the same `TokenizerInfo` of it."""

    tokens: list[bytes]
    """[vocab_size] one per logit; empty: never part of a text."""
    stop_token_ids: tuple[int, ...]
    """What may follow a complete text: the model's EOS, ascending."""

    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        """What xgrammar compiles for and matches with."""
        import xgrammar

        return xgrammar.TokenizerInfo(
            self.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.tokens),
            stop_token_ids=list(self.stop_token_ids),
        )


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarVocabulary:
    """The vocabulary of a tokenizer, for logits of `vocab_size` tokens, which may be more or fewer than it has.

    Raises:
        GrammarError: the tokenizer is of a kind whose tokens cannot be read as bytes.
    """
    import xgrammar

    from pointsman.engine.text.detokenizer import TextDecoder

    stop_token_ids = sorted({token_id for token_id in eos_token_ids if token_id < vocab_size})
    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    except (ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise GrammarError(f"structured output cannot read this model's tokenizer: {first_line(error)}") from error
    tokens = list(info.decoded_vocab)[:vocab_size]
    tokens += [b""] * (vocab_size - len(tokens))
    decoder = TextDecoder(tokenizer)
    special = set(tokenizer.all_special_ids)
    for token_id, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        if token.special:
            special.add(token_id)
        elif token_id < vocab_size:  # written as it is, whatever way the vocabulary writes bytes
            text = decoder.token_text(token_id)
            tokens[token_id] = b"" if "\ufffd" in text else text.encode()  # bytes that are no character alone
    for token_id in special:
        if token_id < vocab_size:
            tokens[token_id] = b""
    _drop_different(tokens, decoder.token_text)
    return GrammarVocabulary(tokens, tuple(stop_token_ids))


def _drop_different(tokens: list[bytes], text_of: Any) -> None:
    """Empty those that are compared and differ from their text.

    Raises:
        GrammarError: too many do.
    """
    compared = _to_compare(tokens)
    different = [token_id for token_id, text in compared if text_of(token_id) != text]
    if len(different) > MOST_DIFFERENT * len(compared):
        example = different[0]
        raise GrammarError(
            f"structured output does not know this model's kind of tokenizer: it reads token {example} as "
            f"{tokens[example]!r}, which decodes as {text_of(example)!r}"
        )
    for token_id in different:
        tokens[token_id] = b""


def _to_compare(tokens: Sequence[bytes]) -> list[tuple[int, str]]:
    """Token ids and texts of those that are whole characters, some of all."""
    step = max(1, len(tokens) // MOST_COMPARED)
    found = []
    for token_id in range(0, len(tokens), step):
        try:
            text = tokens[token_id].decode()
        except UnicodeDecodeError:  # part of a character
            continue
        if text:
            found.append((token_id, text))
    return found
