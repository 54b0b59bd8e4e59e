"""Small real tokenizers, one per kind of decoding, with vocabularies of difficult cases.

Built with the tokenizers library: nothing is downloaded or trained, so every token has a purpose.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from tests.engine.tiny_models import VOCAB_SIZE

HARD_TEXTS = ("é", "€", "日本", "\U0001f40d", "e\u0301", "\u200d")


def _finished(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """The tokenizer with special tokens, which texts leave out, and added tokens, which texts keep; one of these has a
    character of two bytes."""
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("éx"), AddedToken("<tool>")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", **options)


def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with every byte, and with tokens that end or begin inside a character."""
    vocab = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("Ġthe", "Ã©", "âĤ", "ĠÃ", "the", "ab", "aÃ", "©b"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer)


def metaspace(prepend_scheme: str = "always") -> PreTrainedTokenizerFast:
    """A Metaspace tokenizer, whose decoder strips the space of a text's first token; one token is a single space, one
    is empty."""
    pieces = ["▁", "▁a", "b", "▁the", "é", "日", "▁▁", "\U0001f40d", ".", "▁'", "'", "s", ""]
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((piece, -1.0) for piece in pieces)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return _finished(tokenizer)


def wordpiece(*, cleanup: bool, clean_up_tokenization_spaces: bool) -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with contractions and punctuation, whose spaces either the decoder or transformers
    removes."""
    pieces = "a ##b the ##é ' s n ##' ##t n't 's 've t . , 日 ##本 do not ve re m ? !"
    vocab = {piece: i for i, piece in enumerate(["[UNK]", *pieces.split()])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=cleanup)
    return _finished(tokenizer, clean_up_tokenization_spaces=clean_up_tokenization_spaces)


def byte_fallback() -> PreTrainedTokenizerFast:
    """A tokenizer with Llama 2's decoder: byte tokens for characters outside the vocabulary; one space at the beginning
    is stripped."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "▁a", "b", "▁the", "é", "日", "▁▁", ".", ""):
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


HARD_TEXT = "The naïve 😀x  fiancé,\n\n日本語のtext e\u0301 👩\u200d👩\u200d👧 ok\u00a0\tend. "
"""Latin letters with diacritics, combining marks, CJK, emoji of several characters, newlines and several spaces."""


def sentencepiece(*, falls_back: bool) -> PreTrainedTokenizerFast:
    """A tokenizer with Llama 2's decoder and the characters of `HARD_TEXT`, or only its ASCII characters and byte
    tokens for the others."""
    characters = sorted({"▁" if one == " " else one for one in HARD_TEXT})
    vocab = {"<unk>": 0}
    for piece in characters:
        if not falls_back or (piece.isascii() and piece > " ") or piece in "▁é本":
            vocab[piece] = len(vocab)
    for piece in ("▁The", "▁te", "▁▁"):
        vocab[piece] = len(vocab)
    steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    if falls_back:
        vocab |= {f"<0x{byte:02X}>": len(vocab) + byte for byte in range(256)}
        steps.insert(1, decoders.ByteFallback())
    merges = [("▁", "▁"), ("▁", "t"), ("▁t", "e"), ("▁", "T"), ("▁T", "h"), ("▁Th", "e")]
    for pair in merges:
        vocab.setdefault("".join(pair), len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=falls_back, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(steps)
    return _finished(tokenizer)


def unigram() -> PreTrainedTokenizerFast:
    """A tokenizer with T5's decoder and the characters of `HARD_TEXT`."""
    pieces = sorted({"▁" if one == " " else one for one in HARD_TEXT})
    scored = [("<unk>", 0.0), *((piece, -3.0) for piece in pieces), ("▁The", -1.0), ("▁te", -1.0), ("xt", -1.0)]
    tokenizer = Tokenizer(models.Unigram(scored, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _finished(tokenizer)


def hard_wordpiece() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer with the characters of `HARD_TEXT`, each at the beginning of words and inside them; it
    loses white space."""
    pieces = sorted(set("".join(HARD_TEXT.split())))
    vocab = {"[UNK]": 0}
    for piece in [*pieces, *(f"##{piece}" for piece in pieces), "The", "##xt"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _finished(tokenizer)


def bpe_with_suffix() -> PreTrainedTokenizerFast:
    """A BPE tokenizer in which a word's last token has a mark, which the decoder replaces by a space, except at the end
    of the text."""
    vocab = {piece: i for i, piece in enumerate(["a", "b</w>", "the</w>", "é", "é</w>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.BPEDecoder()
    return _finished(tokenizer)


def words_without_decoder() -> PreTrainedTokenizerFast:
    """A tokenizer without a decoder: tokens are joined by spaces."""
    return _finished(Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")))


class ReplacingByT5Tokenizer(ByT5Tokenizer):
    """A ByT5 tokenizer that decodes invalid bytes to replacement characters, as most tokenizers written in Python do,
    instead of leaving them out."""

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """Decode tokens: tokens of one character are bytes, other tokens are plain text."""
        parts = [bytes([ord(token)]) if len(token) == 1 else token.encode() for token in tokens]
        return b"".join(parts).decode("utf-8", "replace")


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level,
    "metaspace": metaspace,
    "metaspace-first": lambda: metaspace("first"),
    "wordpiece": lambda: wordpiece(cleanup=False, clean_up_tokenization_spaces=False),
    "wordpiece-cleanup": lambda: wordpiece(cleanup=True, clean_up_tokenization_spaces=False),
    "wordpiece-transformers-cleanup": lambda: wordpiece(cleanup=False, clean_up_tokenization_spaces=True),
    "byte-fallback": byte_fallback,
    "suffix": bpe_with_suffix,
    "no-decoder": words_without_decoder,
    "python": ByT5Tokenizer,
    "python-replacing": ReplacingByT5Tokenizer,
}

HARD_KINDS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte-level": byte_level,
    "sentencepiece-bytes": lambda: sentencepiece(falls_back=True),
    "sentencepiece": lambda: sentencepiece(falls_back=False),
    "unigram": unigram,
    "wordpiece": hard_wordpiece,
}
"""Tokenizers that encode `HARD_TEXT` without a loss, except that WordPiece loses white space."""


def byte_token(kind: str, tokenizer: Any, byte: int) -> int | None:
    """The token of one byte, if the vocabulary has such tokens."""
    if kind == "byte-fallback":
        return int(tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>"))
    if kind == "byte-level":  # an ASCII byte is its own character, the others follow GPT-2's alphabet
        return int(tokenizer.backend_tokenizer.token_to_id(_gpt2_character(byte)))
    return byte + 3 if kind.startswith("python") else None


def _gpt2_character(byte: int) -> str:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(byte) if byte in printable else chr(256 + sum(other not in printable for other in range(byte)))


def random_tokens(kind: str, tokenizer: Any, rng: random.Random, most: int = 12) -> list[int]:
    """Random tokens: ids that the vocabulary lacks, special tokens, single bytes, and the bytes of complete and
    incomplete characters."""
    size = len(tokenizer) + (0 if kind.startswith("python") else 2)
    pieces_from = 257 if kind == "byte-fallback" else 0  # half of the tokens; otherwise bytes would dominate
    token_ids = [rng.randrange(rng.choice([0, pieces_from]), size) for _ in range(rng.randrange(most + 1))]
    for _ in range(rng.randrange(3)):
        text = rng.choice(HARD_TEXTS).encode()
        spelled = [byte_token(kind, tokenizer, byte) for byte in text[: rng.randrange(1, len(text) + 1)]]
        at = rng.randrange(len(token_ids) + 1)
        token_ids[at:at] = [token_id for token_id in spelled if token_id is not None]
    return token_ids


def byte_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per byte, so that characters outside ASCII have several tokens; a small vocabulary
    lacks some bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda c: (c != "\u0120", c))  # the space comes first
    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{c: i + 3 for i, c in enumerate(alphabet[: vocab_size - 3])}}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>")


class PickyTokenizer:
    """Decodes like another tokenizer, but raises on some ids, and on one pair of ids."""

    def __init__(self, tokenizer: Any, unknown: frozenset[int], clash: tuple[int, int] = (-1, -1)) -> None:
        self.inner, self.unknown, self.clash = tokenizer, unknown, clash
        self.all_special_ids = tokenizer.all_special_ids

    def decode(self, token_ids: list[int], **options: Any) -> str:
        if not self.unknown.isdisjoint(token_ids):
            raise IndexError("piece id is out of range.")
        if self.clash in itertools.pairwise(token_ids):
            raise TypeError("can only join\nstrings")
        return str(self.inner.decode(token_ids, **options))
