"""GrammarVocabulary: the bytes of text that each of a model's tokens stands for.

xgrammar reads them from the tokenizer, for three ways in which vocabularies write bytes. An error there would make
texts that the grammar never allowed, so its reading is compared with the engine's own decoder. Where the two disagree,
or xgrammar does not know the tokenizer, the decoder is asked for each token, which takes some seconds for a large
vocabulary. Then pairs of tokens are tried. If the text of a pair is not that of its tokens, the model has no structured
output. Special tokens stand for no text, because texts leave them out.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pointsman.engine.errors import GrammarError

if TYPE_CHECKING:
    import xgrammar

    from pointsman.engine.text.detokenizer import TextDecoder

MAX_COMPARED = 2000
"""Tokens that are compared, evenly spread over the vocabulary. A comparison takes some microseconds."""
NUM_PAIRS = 300
"""Random pairs of tokens whose text is compared."""
_REPLACEMENT = "\ufffd".encode()


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
    from pointsman.engine.text.detokenizer import TextDecoder

    stop_token_ids = sorted({token_id for token_id in eos_token_ids if token_id < vocab_size})
    decoder = TextDecoder(tokenizer)
    tokens = _read_by_xgrammar(tokenizer, vocab_size, stop_token_ids)
    if not _agree(tokens, decoder):
        tokens = [decoder.token_bytes(token_id) for token_id in range(vocab_size)]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id in range(vocab_size):
        if decoder.is_special(token_id):
            tokens[token_id] = b""
        elif token_id in added:  # written as it is, whatever way the vocabulary writes bytes
            tokens[token_id] = decoder.token_text(token_id).encode()
        if _REPLACEMENT in tokens[token_id]:  # bytes that are no character alone
            tokens[token_id] = b""
    _check_pairs(tokens, decoder)
    return GrammarVocabulary(tokens, tuple(stop_token_ids))


def _read_by_xgrammar(tokenizer: Any, vocab_size: int, stop_token_ids: list[int]) -> list[bytes]:
    """What xgrammar takes the tokens for; nothing for all of them if it does not know the tokenizer."""
    import xgrammar

    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    except (ValueError, RuntimeError, AttributeError, TypeError):
        return [b""] * vocab_size
    tokens = list(info.decoded_vocab)[:vocab_size]
    return tokens + [b""] * (vocab_size - len(tokens))


def _agree(tokens: Sequence[bytes], decoder: TextDecoder) -> bool:
    """Whether the engine's decoder takes tokens for the same bytes: some of all, without special ones."""
    step = max(1, len(tokens) // MAX_COMPARED)
    others = (one for one in range(0, len(tokens), step) if not decoder.is_special(one))
    pairs = ((tokens[one], decoder.token_bytes(one)) for one in others)
    return all(theirs == ours or _REPLACEMENT in ours for theirs, ours in pairs)


def _check_pairs(tokens: Sequence[bytes], decoder: TextDecoder) -> None:
    """Compare the text of two tokens with their bytes.

    Raises:
        GrammarError: it is another text.
    """
    choose = random.Random(0)
    shown = [token_id for token_id, token in enumerate(tokens) if token]
    if not shown:
        raise GrammarError("structured output cannot read this model's tokenizer: none of its tokens has a text")
    for _ in range(NUM_PAIRS):
        pair = choose.choice(shown), choose.choice(shown)
        try:
            right = (tokens[pair[0]] + tokens[pair[1]]).decode()
        except UnicodeDecodeError:  # part of a character
            continue
        text = decoder.stream(is_verbatim=True).whole(pair)
        if text != right:
            raise GrammarError(
                f"structured output does not know this model's kind of tokenizer: tokens {pair[0]} and {pair[1]} are "
                f"{tokens[pair[0]]!r} and {tokens[pair[1]]!r}, and decode as {text!r}"
            )
