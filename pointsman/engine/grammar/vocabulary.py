"""GrammarVocabulary: for each token of a model the bytes of its text.

xgrammar reads the bytes from the tokenizer; it knows three ways in which vocabularies write bytes. Wrong bytes would
allow texts that the grammar forbids, so the result is compared with the engine's own decoder. If xgrammar and the
decoder disagree, or xgrammar does not know the tokenizer, the decoder decodes each token. This takes some seconds for a
large vocabulary. Then pairs of tokens are decoded. If the text of a pair differs from the bytes of its tokens, the
model cannot have structured output. Special tokens have no bytes, because texts leave them out.
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
"""Maximum number of tokens that are compared with the decoder, evenly spread over the vocabulary. A comparison takes
some microseconds."""
NUM_PAIRS = 300
"""Number of random pairs of tokens whose text is compared."""
_REPLACEMENT = "\ufffd".encode()


@dataclass(frozen=True, slots=True, eq=False)
class GrammarVocabulary:
    """The tokens of one model. The engine and the process that compiles make the same `TokenizerInfo` from it."""

    tokens: list[bytes]
    """[vocab_size] the bytes of each token; b"": the token is never part of a text."""
    stop_token_ids: tuple[int, ...]
    """Ids of the model's EOS tokens, which may follow a complete text, in ascending order."""

    def tokenizer_info(self) -> xgrammar.TokenizerInfo:
        """Make xgrammar's form of the vocabulary, for its compiler and matcher."""
        import xgrammar

        return xgrammar.TokenizerInfo(
            self.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=len(self.tokens),
            stop_token_ids=list(self.stop_token_ids),
        )


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: Iterable[int]) -> GrammarVocabulary:
    """Read the vocabulary of a tokenizer. `vocab_size` is the model's number of logits; the tokenizer may have more or
    fewer tokens.

    Raises:
        GrammarError: the tokenizer is of a kind whose tokens cannot be read as bytes.
    """
    from pointsman.engine.text.detokenizer import TextDecoder

    stop_token_ids = sorted({token_id for token_id in eos_token_ids if token_id < vocab_size})
    decoder = TextDecoder(tokenizer)
    tokens = _read_by_xgrammar(tokenizer, vocab_size, stop_token_ids)
    if not _agrees_with_decoder(tokens, decoder):
        tokens = [decoder.token_bytes(token_id) for token_id in range(vocab_size)]
    added = getattr(tokenizer, "added_tokens_decoder", {})
    for token_id in range(vocab_size):
        if decoder.is_special(token_id):
            tokens[token_id] = b""
        elif token_id in added:  # stored as plain text in every kind of vocabulary
            tokens[token_id] = decoder.token_text(token_id).encode()
        if _REPLACEMENT in tokens[token_id]:  # the token is a part of a character
            tokens[token_id] = b""
    _check_pairs(tokens, decoder)
    return GrammarVocabulary(tokens, tuple(stop_token_ids))


def _read_by_xgrammar(tokenizer: Any, vocab_size: int, stop_token_ids: list[int]) -> list[bytes]:
    """The bytes of each token according to xgrammar; all b"" if xgrammar does not know the tokenizer."""
    import xgrammar

    try:
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    except (ValueError, RuntimeError, AttributeError, TypeError):
        return [b""] * vocab_size
    tokens = list(info.decoded_vocab)[:vocab_size]
    return tokens + [b""] * (vocab_size - len(tokens))


def _agrees_with_decoder(tokens: Sequence[bytes], decoder: TextDecoder) -> bool:
    """Whether the engine's decoder has the same bytes for a sample of the tokens, special tokens excepted."""
    step = max(1, len(tokens) // MAX_COMPARED)
    others = (one for one in range(0, len(tokens), step) if not decoder.is_special(one))
    pairs = ((tokens[one], decoder.token_bytes(one)) for one in others)
    return all(theirs == ours or _REPLACEMENT in ours for theirs, ours in pairs)


def _check_pairs(tokens: Sequence[bytes], decoder: TextDecoder) -> None:
    """Check that the text of random pairs of tokens equals their joined bytes.

    Raises:
        GrammarError: the text of a pair differs from its bytes.
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
        text = decoder.stream(is_verbatim=True).decode_rest(pair)
        if text != right:
            raise GrammarError(
                f"structured output does not support this model's tokenizer: tokens {pair[0]} and {pair[1]} have "
                f"the bytes {tokens[pair[0]]!r} and {tokens[pair[1]]!r}, but the text of both is {text!r}"
            )
