"""Makes a tokenizer, with its chat template, from a GGUF file's metadata.

Two kinds are supported, with llama.cpp's names: "gpt2" is byte-level BPE, "llama" is SentencePiece's BPE. A file has
the tokens and their types. The file has only the name of the rule that splits a text before BPE (`tokenizer.ggml.pre`).
So a name that is not in `PRE_TOKENIZERS` is refused: another rule would make other tokens without an error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pointsman.engine.errors import ModelLoadError, UnsupportedModel, first_line
from pointsman.engine.gguf.config import CONTROL, architecture_of, token_id
from pointsman.engine.gguf.reader import GGUFFile
from pointsman.files import represented

logger = logging.getLogger(__name__)

USER_DEFINED, UNUSED = 4, 5
"""The numbers by which `tokenizer.ggml.token_type` marks user-defined and unused tokens, see `CONTROL`."""
SPACE = "▁"
"""The character that replaces a space in SentencePiece's tokens."""
NAMES: Mapping[str, str] = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
PHI3_KEEPS_SPACE_AFTER = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Phi-3's control tokens that do not absorb the space after them. The list is from llama.cpp, as GGUF files lack it."""

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = _REST.replace(r"[\r\n]*", r"[\r\n/]*", 1)
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORD_BY_CASE = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The rule that splits a text before byte-level BPE."""

    split: str | None
    """A regular expression of the pieces of a text; None: GPT-2's regular expression."""
    splits_digits: bool = False
    """Whether each digit becomes a piece of its own before the text between digits is split."""
    composes: bool = False
    """Whether the text is converted to Unicode's composed form (NFC) before it is split."""
    ignores_merges: bool = False
    """Whether a piece that is a token is used whole, without applying merges."""
    adds_bos: bool = False
    """Whether texts begin with BOS if the metadata has no field `add_bos_token`."""


_LLAMA3 = rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = PreTokenizer(rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}", composes=True)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(None),
    "smollm": PreTokenizer(None, splits_digits=True),
    "llama-bpe": PreTokenizer(_LLAMA3, ignores_merges=True, adds_bos=True),
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": PreTokenizer(
        "|".join(f"{word}{_ENDINGS}?" for word in _WORD_BY_CASE) + rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
    ),
    "tekken": PreTokenizer(
        "|".join(_WORD_BY_CASE) + rf"|\p{{N}}|{_REST_WITH_SLASH}", ignores_merges=True, adds_bos=True
    ),
}
"""Splitting rules by their names in llama.cpp, which has a name for every family of vocabularies."""


def make_tokenizer(gguf: GGUFFile) -> Any | None:
    """The fast transformers tokenizer of a model; None: the file has no tokenizer.

    Raises:
        ModelLoadError: the fields of the tokenizer are wrong or do not belong together.
        UnsupportedModel: the kind of the tokenizer, or the rule by which it splits texts, is not supported.
    """
    kind = gguf.text("tokenizer.ggml.model", "none")
    if kind in ("none", "no_vocab"):
        logger.warning("%s has no tokenizer; prompts must be token ids", gguf.path)
        return None
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(
            f"{gguf.path}: tokenizer.ggml.model is {represented(kind)}; supported are gpt2 and llama; give the model's "
            "directory in the Hugging Face format"
        )
    tokens, types = _read_tokens(gguf)
    try:
        build = _make_byte_level_bpe if kind == "gpt2" else _make_sentencepiece_bpe
        return _wrap_tokenizer(gguf, build(gguf, tokens, types), tokens, types)
    except ModelLoadError:
        raise
    except Exception as error:  # the tokenizers library raises plain exceptions
        raise ModelLoadError(
            f"{gguf.path}: no tokenizer can be made from tokenizer.ggml.*: {first_line(error)}; convert the model again"
        ) from error


def _read_tokens(gguf: GGUFFile) -> tuple[list[str], list[int]]:
    """The tokens in order of their ids, and their types, without the unused tokens at the end."""
    key = "tokenizer.ggml.tokens"
    tokens = [token or f"[EMPTY_{at}]" for at, token in enumerate(gguf.texts(key))]
    types = gguf.numbers("tokenizer.ggml.token_type").tolist()
    if len(types) != len(tokens):
        raise ModelLoadError(
            f"{gguf.path}: tokenizer.ggml.token_type has {len(types)} values, but {key} has {len(tokens)}; convert the "
            "model again"
        )
    while types and types[-1] == UNUSED:
        types.pop()
        tokens.pop()
    return tokens, types


def _make_byte_level_bpe(gguf: GGUFFile, tokens: Sequence[str], types: Sequence[int]) -> Tokenizer:
    pre = _pre_tokenizer(gguf)
    merges = []
    for at, merge in enumerate(gguf.texts("tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")
        if not right:
            raise ModelLoadError(
                f"{gguf.path}: tokenizer.ggml.merges[{at}] is {represented(merge)}; it must be two tokens with a space "
                "between them; convert the model again"
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(_vocabulary(gguf, tokens), merges, ignore_merges=pre.ignores_merges))
    if pre.composes:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if pre.splits_digits else []
    if pre.split is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(gguf: GGUFFile) -> PreTokenizer:
    name = gguf.text("tokenizer.ggml.pre", "not given")
    if name not in PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"{gguf.path}: tokenizer.ggml.pre is {represented(name)}; supported are {', '.join(PRE_TOKENIZERS)}; give "
            "the model's directory in the Hugging Face format"
        )
    return PRE_TOKENIZERS[name]


def _make_sentencepiece_bpe(gguf: GGUFFile, tokens: list[str], types: Sequence[int]) -> Tokenizer:
    known = set(tokens)
    for at, token in enumerate(tokens):
        # Converters write user-defined tokens with plain spaces; the vocabulary has SentencePiece's character.
        if types[at] == USER_DEFINED and not token.strip(" ") and SPACE * len(token) not in known:
            tokens[at] = SPACE * len(token)
    scores = gguf.numbers("tokenizer.ggml.scores").tolist()
    if len(scores) < len(tokens):
        raise ModelLoadError(
            f"{gguf.path}: tokenizer.ggml.scores has {len(scores)} values for {len(tokens)} tokens; convert the model "
            "again"
        )
    vocabulary = _vocabulary(gguf, tokens)
    unknown = token_id(gguf, NAMES["unk_token"])
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            [(left, right) for *_, left, right in sorted(_mergeable_pairs(vocabulary, types, scores), reverse=True)],
            byte_fallback=True,
            fuse_unk=True,
            unk_token=None if unknown is None else tokens[unknown],
        )
    )
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    if gguf.flag("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), tokenizer.normalizer])
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _mergeable_pairs(
    vocabulary: Mapping[str, int], types: Sequence[int], scores: Sequence[float]
) -> Iterator[tuple[float, int, int, str, str]]:
    """Pairs of tokens that merge into another token: the score of the merged token, the lengths of the two tokens, and
    the two tokens.

    In tuple order, the largest entry is the merge that is applied first. SentencePiece merges the pair whose merged
    token has the highest score, so its files have no list of merges. User-defined tokens have the score 0, because
    converters write no score for them.
    """
    for token, index in vocabulary.items():
        score = 0.0 if types[index] == USER_DEFINED else scores[index]
        for at in range(1, len(token)):
            left, right = token[:at], token[at:]
            if left in vocabulary and right in vocabulary:
                yield score, at, len(token) - at, left, right


def _vocabulary(gguf: GGUFFile, tokens: Sequence[str]) -> dict[str, int]:
    vocabulary = {token: at for at, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for at, token in enumerate(tokens) if vocabulary[token] != at)
        raise ModelLoadError(
            f"{gguf.path}: tokenizer.ggml.tokens has {represented(twice)} twice; convert the model again"
        )
    return vocabulary


def _wrap_tokenizer(gguf: GGUFFile, tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> Any:
    """The tokenizer for transformers, with control and added tokens, BOS and EOS around texts, and the chat
    template."""
    from transformers import PreTrainedTokenizerFast

    is_phi3 = architecture_of(gguf).model_type == "phi3" and gguf.text("tokenizer.ggml.model") == "llama"
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False, rstrip=is_phi3 and token not in PHI3_KEEPS_SPACE_AFTER)
            for token, kind in zip(tokens, types, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED]
    )
    names = {}
    for name, key in NAMES.items():
        if (index := token_id(gguf, key)) is not None:
            if index >= len(tokens):
                raise ModelLoadError(
                    f"{gguf.path}: {key} is {index}, but there are only {len(tokens)} tokens; convert the model again"
                )
            names[name] = tokens[index]
    steps: list[Any] = (
        [] if gguf.text("tokenizer.ggml.model") == "llama" else [processors.ByteLevel(trim_offsets=False)]
    )
    if around := _text_processor(gguf, names):
        steps.append(around)
    tokenizer.post_processor = processors.Sequence(steps)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=_chat_template(gguf),
        clean_up_tokenization_spaces=False,
        **names,
    )


def _text_processor(gguf: GGUFFile, names: Mapping[str, str]) -> Any | None:
    """A processor that adds BOS, EOS or both to the tokens of a text; None: neither is added."""
    is_byte_level = gguf.text("tokenizer.ggml.model") == "gpt2"
    adds_bos = _pre_tokenizer(gguf).adds_bos if is_byte_level else True
    bos = names.get("bos_token") if gguf.flag("tokenizer.ggml.add_bos_token", adds_bos) else None
    eos = names.get("eos_token") if gguf.flag("tokenizer.ggml.add_eos_token", False) else None
    if bos is None and eos is None:
        return None
    ids = [(token, token_id(gguf, NAMES[name])) for name, token in names.items() if token in (bos, eos)]
    one, other = ([*([bos] if bos else []), part, *([eos] if eos else [])] for part in ("$A", "$B"))
    return processors.TemplateProcessing(single=one, pair=[*one, *other], special_tokens=ids)


def _chat_template(gguf: GGUFFile) -> str | dict[str, str] | None:
    """The chat template, or chat templates by name: "default" is used unless a caller names another template."""
    key = "tokenizer.chat_template"
    if key not in gguf.metadata:
        return None
    named = gguf.texts(f"{key}s") if f"{key}s" in gguf.metadata else []
    if not named:
        return gguf.text(key)
    return {"default": gguf.text(key), **{name: gguf.text(f"{key}.{name}") for name in named}}
