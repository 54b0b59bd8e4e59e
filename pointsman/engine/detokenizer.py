"""From tokens to text, one token at a time.

Decoding all tokens anew at every step would cost time quadratic in the length, and decoding each token alone would be
wrong: a character may be spread over several tokens, and some decoders treat the first token of a text differently.
So a stream takes tokens one by one and releases text as soon as it is *settled*: no later token can change it. What
it released, joined, is what `tokenizer.decode` makes of all tokens at once, and a text only ever grows.

`TextDecoder` looks once at how a tokenizer decodes, and makes streams of the kind that fits:

| decoder | stream | what may have to wait |
| --- | --- | --- |
| byte-level BPE (GPT-2, Llama 3, Qwen) | tokens are bytes, joined as UTF-8 | an unfinished character |
| Metaspace, WordPiece, others | new tokens decoded behind a settled one | nothing |
| with byte fallback (Llama 2, Gemma) | the same | a run of byte tokens, until it ends |
| tokenizers written in Python | the same, behind several | a replacement character at the end, `MAX_HELD` tokens |

Byte fallback decides over a whole run of byte tokens: if its bytes are not all valid UTF-8, every one of them becomes a
replacement character, also those that looked like a character before. The `DecodeStream` of the tokenizers library is
not used: it raises on some invalid bytes, holds back everything behind others, and does not clean up spaces.

A token that the tokenizer cannot decode (models often have more logits than their tokenizer has tokens, and tokenizers
written in Python may raise then) has no text.

`Detokenizer` adds stop strings: it holds back text that may be the beginning of one. It also looks for them in text
that has to wait for the end of a run of byte tokens, as if no token followed: a request ends with the token that
completes its stop string, also if that is the byte of a newline.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

MAX_HELD = 16
"""Tokens that a stream of a tokenizer written in Python may hold back. An unfinished character has at most 3 bytes."""
SLOW_CONTEXT = 4
"""Settled tokens before new ones when a tokenizer written in Python decodes them."""
MAX_PEEKED = 256
"""Held tokens up to which a stream decodes them all for each `pending`; beyond, only so often that the cost per token
stays that of some such decodings."""

logger = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class TokenStream(Protocol):
    """Takes the tokens of one text in order."""

    def feed(self, token_id: int) -> str:
        """Take one token; the text that is settled now and was not before."""
        ...

    def flush(self) -> str:
        """No token will follow: the rest of the text."""
        ...

    def pending(self) -> str:
        """Text behind the settled one that is there if no token follows, and stays unless invalid bytes follow.

        Replacement characters at its end are left out: they may be unfinished characters. Changes nothing.
        """
        ...


class TextDecoder:
    """How one tokenizer decodes. Shared by all requests; safe to use from several threads.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self._backend = _own_backend(tokenizer)
        kinds = _decoder_kinds(self._backend.decoder) if self._backend is not None else []
        self._is_byte_level = kinds == ["ByteLevel"]
        # Any other mixture with ByteLevel is unknown ground: decode by windows that wait for whole characters.
        self._is_exact = self._backend is not None and "ByteLevel" not in kinds
        self._falls_back = "ByteFallback" in kinds
        self._cleans_up = _cleans_up(tokenizer, self._backend)
        self._token_bytes: dict[int, bytes] = {}
        self._is_byte_token: dict[int, bool] = {}
        self._token_texts: dict[int, str] = {}
        self._unreadable: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all tokens at once.

        Raises:
            Exception: the tokenizer's own, although it decodes each of the tokens alone.
        """
        return self._decode_readable(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), list(token_ids)
        )

    def stream(self, skip_special_tokens: bool = True) -> TokenStream:
        """A stream for a new text."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        stream: TokenStream
        if self._is_byte_level:
            stream = _ByteStream(self._bytes_of, skipped)
        elif self._is_exact:
            stream = _WindowStream(self._decode_raw, skipped, self._is_byte if self._falls_back else None)
        else:
            stream = _CautiousWindowStream(self._decode_raw, skipped)
        return _CleanUpStream(stream, self._tokenizer.clean_up_tokenization) if self._cleans_up else stream

    def token_text(self, token_id: int) -> str:
        """A token's text as it is behind other text, special tokens included: " the", not "the"."""
        text = self._token_texts.get(token_id)
        if text is None:
            if self._is_byte_level:
                text = self._bytes_of(token_id).decode("utf-8", "replace")
            else:  # behind itself: a decoder treats at most the first token of a text differently
                text = self._decode_raw([token_id, token_id])[len(self._decode_raw([token_id])) :]
            self._token_texts[token_id] = text
        return text

    def _decode_raw(self, token_ids: list[int]) -> str:
        """The text of tokens, none of them skipped, with all its spaces; errors as of `decode`."""
        return self._decode_readable(self._decode_with_spaces, token_ids)

    def _decode_with_spaces(self, token_ids: list[int]) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(token_ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _decode_readable(self, decode: Callable[[list[int]], str], token_ids: list[int]) -> str:
        """`decode` without the tokens that the tokenizer raises on, which are found out when it first does."""
        if self._unreadable:
            token_ids = [token_id for token_id in token_ids if token_id not in self._unreadable]
        try:
            return decode(token_ids)
        except Exception as error:
            unreadable = {token_id for token_id in token_ids if not _can_decode(decode, token_id)}
            if not unreadable:
                raise
            logger.warning("the tokenizer cannot decode token %d, which has no text then: %s", min(unreadable), error)
            self._unreadable |= unreadable
            return decode([token_id for token_id in token_ids if token_id not in unreadable])

    def _token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None if the vocabulary lacks it."""
        token: str | None = self._backend.id_to_token(token_id)  # type: ignore[union-attr]  # kinds come from it
        return token

    def _bytes_of(self, token_id: int) -> bytes:
        """What a token of a byte-level vocabulary stands for; nothing if the vocabulary lacks it."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            known = b"" if token is None else _bytes_of_token(token)
            self._token_bytes[token_id] = known
        return known

    def _is_byte(self, token_id: int) -> bool:
        known = self._is_byte_token.get(token_id)
        if known is None:
            token = self._token(token_id)
            # A token that the vocabulary lacks is left out, so a run of bytes goes on behind it.
            known = token is None or _BYTE_TOKEN.fullmatch(token) is not None
            self._is_byte_token[token_id] = known
        return known


class Detokenizer:
    """The text of one request, cut at a stop string.

    The stop string whose last character comes first in the text ends it, and of several that end there the longest: a
    rule that does not depend on how the text was cut into tokens. What is searched after each token is the settled text
    and the stream's `pending`, without waiting to see whether that is settled.

    Args:
        stream: for the tokens' text.
        stop: stop strings, none of them empty.
        include_stop: whether the text keeps the stop string.
        min_tokens: a stop string counts only if it ends in text that came after this many tokens.
    """

    __slots__ = ("_buffer", "_floor", "_include_stop", "_initials", "_longest", "_min_tokens", "_num_released",
                 "_num_tokens", "_stop", "_stream", "feed", "stop_reason")  # fmt: skip

    def __init__(
        self, stream: TokenStream, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self.feed: Callable[[int], str] = self._search if self._stop else stream.feed
        """Takes one token; the text that is settled now, which never has half a stop string at its end."""
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._initials = frozenset(one[0] for one in self._stop)
        self._longest = max(map(len, self._stop), default=0)
        self._num_tokens = 0
        self._buffer = ""
        """The end of the text, as far as it may begin a stop string."""
        self._num_released = 0  # characters of the buffer that were returned
        self._floor = 0  # characters of the buffer in which no stop string may end, because of min_tokens
        self.stop_reason: str | None = None
        """The stop string that was found; nothing more is to be fed then."""

    def _search(self, token_id: int) -> str:
        """`feed`, with stop strings."""
        text = self._stream.feed(token_id)
        self._num_tokens += 1
        if text and (self._buffer or self._floor or not self._initials.isdisjoint(text)):
            text = self._take(text)
        if self.stop_reason is None and (pending := self._stream.pending()):
            text += self._peek(pending)
        return text

    def finish(self) -> str:
        """No token follows: the rest of the text. It, too, may complete a stop string."""
        if self.stop_reason is not None:
            return ""
        piece = self._stream.flush()
        if not self._stop:
            return piece
        self._num_tokens += 1  # what comes now is not the text of the tokens so far alone
        text = self._take(piece)
        if self.stop_reason is None:
            text += self._buffer[self._num_released :]
            self._num_released = len(self._buffer)
        return text

    def _take(self, piece: str) -> str:
        """Search the buffer with `piece` behind it, and release what cannot be part of a stop string."""
        text = self._buffer + piece
        if self._num_tokens <= self._min_tokens:
            self._floor = len(text)
        elif (found := self._find(text)) is not None:
            start, end, self.stop_reason = found
            self._buffer = ""
            return text[self._num_released : end if self._include_stop else start]
        keep = self._start_of_candidate(text)
        release = len(text) if self._include_stop else keep
        released = text[self._num_released : release]
        self._buffer = text[keep:]
        self._num_released = release - keep
        self._floor = max(0, self._floor - keep)
        return released

    def _peek(self, pending: str) -> str:
        """Search the buffer with text behind it that has to wait; what ends the text if that has a stop string."""
        text = self._buffer + pending
        if self._num_tokens <= self._min_tokens:
            self._floor = len(text)
        elif (found := self._find(text)) is not None:
            start, end, self.stop_reason = found
            self._buffer = ""
            return text[self._num_released : end if self._include_stop else start]
        return ""

    def _find(self, text: str) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for one in self._stop:
            start = text.find(one, max(0, self._floor - len(one) + 1))
            end = start + len(one)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = (start, end, one)
        return best

    def _start_of_candidate(self, text: str) -> int:
        """Where the longest end of `text` starts that a stop string begins with; its length if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials:
                rest = text[start:]
                if any(len(one) > len(rest) and one.startswith(rest) for one in self._stop):
                    return start
        return len(text)


# -------------------------------------------------------------------------------------------------------- streams


class _ByteStream:
    """Tokens are bytes; the text is what UTF-8 makes of them."""

    __slots__ = ("_bytes_of", "_decoder", "_skipped")

    def __init__(self, bytes_of: Callable[[int], bytes], skipped: frozenset[int]) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._decoder.decode(self._bytes_of(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", True)

    def pending(self) -> str:
        return ""  # only an unfinished character ever waits


class _WindowStream:
    """New tokens are decoded behind a context of settled ones, whose own text is then cut off.

    Decoders of this kind look at a token, at whether it is the first, and at the run of byte tokens that it is in. The
    context ends with a token that is no byte, so no run reaches into it; and it has text, so that whatever a decoder
    strips from the beginning of a text is stripped from the context.
    """

    __slots__ = ("_context", "_context_text", "_decode", "_held", "_is_byte", "_skipped")

    def __init__(
        self, decode: Callable[[list[int]], str], skipped: frozenset[int], is_byte: Callable[[int], bool] | None
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._is_byte = is_byte
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        if self._is_byte is not None and self._is_byte(token_id):
            return ""
        return self._settle()

    def flush(self) -> str:
        return self._settle() if self._held else ""

    def pending(self) -> str:
        num_held = len(self._held)
        if not num_held or (num_held > MAX_PEEKED and num_held % (num_held // MAX_PEEKED)):
            return ""
        return self._decode(self._context + self._held)[len(self._context_text) :].rstrip(_REPLACEMENT)

    def _settle(self) -> str:
        window = self._context + self._held
        text = self._decode(window)
        new = text[len(self._context_text) :]
        self._held = []
        for size in (1, 2):
            context_text = self._decode(window[-size:])
            if context_text:
                self._context, self._context_text = window[-size:], context_text
                return new
        self._context, self._context_text = window, text
        return new


class _CautiousWindowStream:
    """As `_WindowStream`, for a decoder that one knows nothing about.

    Tokens settle when they added text and it does not end with a replacement character, which may be an unfinished
    character; or when too many wait.
    """

    __slots__ = ("_context", "_decode", "_held", "_num_released", "_skipped")

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        self._held: list[int] = []
        self._num_released = 0  # characters of the window's text

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_whole = not text.endswith(_REPLACEMENT)
        is_settled = (is_whole and len(text) > self._num_released) or len(self._held) >= MAX_HELD
        end = len(text) if is_whole or is_settled else len(text) - 1  # an unfinished character is one replacement
        new = text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        if is_settled:
            self._slide()
        return new

    def flush(self) -> str:
        return self._decode(self._context + self._held)[self._num_released :] if self._held else ""

    def pending(self) -> str:
        return ""  # all but a replacement character at the end is released at once

    def _slide(self) -> None:
        window = self._context + self._held
        self._held = []
        self._context = window[-SLOW_CONTEXT:]
        context_text = self._decode(self._context)
        if not context_text:
            self._context = window[-2 * MAX_HELD :]
            context_text = self._decode(self._context)
        self._num_released = len(context_text)


_SETTLED_MARK = re.compile(r" ' (?:(?= )|[^ .?!,mrstv])|n(?= +n)|( ' )(?=[mrstv])")
"""Where a text may be cut between spaces that may yet go: behind a " ' " (found from the left, as `str.replace` does)
with a character that cannot make a contraction of it, and behind an "n" whose next word begins with another; not behind
a match with the group."""


class _CleanUpStream:
    """What transformers calls `clean_up_tokenization_spaces`, for a text that grows: " n't" becomes "n't", and so on.

    Every replacement starts with a space and reaches at most three characters beyond it, none of them a space, except
    " ' ", which ends with one and may make an " n't" of " n ' t". So text is settled once three characters follow its
    last space, or one that no replacement goes on from; and otherwise up to a run of spaces, unless a " '" or " n" is
    before it. Of a chain of these, only the end has to wait.
    """

    __slots__ = ("_clean", "_raw", "_stream")

    REACH = 3
    INSIDE = " 'nvr"
    """What all beginnings of replacements end with."""

    def __init__(self, stream: TokenStream, clean: Callable[[str], str]) -> None:
        self._stream = stream
        self._clean = clean
        self._raw = ""  # text that is not settled

    def feed(self, token_id: int) -> str:
        self._raw += self._stream.feed(token_id)
        return self._take(self._settled_end(self._raw))

    def flush(self) -> str:
        self._raw += self._stream.flush()
        return self._take(len(self._raw))

    def pending(self) -> str:
        pending = self._stream.pending()
        held = self._raw + pending
        return self._clean(held[: self._settled_end(held)]) if pending else ""

    def _take(self, end: int) -> str:
        settled, self._raw = self._raw[:end], self._raw[end:]
        return self._clean(settled) if settled else ""

    def _settled_end(self, raw: str) -> int:
        last_space = raw.rfind(" ")
        if last_space < 0 or len(raw) - last_space > self.REACH or raw[-1] not in self.INSIDE:
            return len(raw)
        end = len(raw[: last_space + 1].rstrip(" "))
        if not raw.endswith((" '", " n"), 0, end):
            return end
        while raw.endswith((" '", " n"), 0, end):
            end = len(raw[: end - 1].rstrip(" "))
        marks = (mark.end() for mark in _SETTLED_MARK.finditer(raw) if mark[1] is None)
        return max(end, max(marks, default=0))


# ------------------------------------------------------------------------------------------- how a tokenizer decodes


def _own_backend(tokenizer: Any) -> Any | None:
    """The tokenizer of the tokenizers library inside, if decoding is left to it alone."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast

    owner = type(tokenizer)
    plain = PreTrainedTokenizerFast
    is_plain = isinstance(tokenizer, plain) and owner._decode is plain._decode and owner.decode is plain.decode
    return backend if is_plain else None


def _decoder_kinds(decoder: Any | None) -> list[str]:
    """The types of a decoder of the tokenizers library and of those in its sequence."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [state["type"]] if state["type"] != "Sequence" else [one["type"] for one in state["decoders"]]


def _can_decode(decode: Callable[[list[int]], str], token_id: int) -> bool:
    try:
        decode([token_id])
    except Exception:
        return False
    return True


def _special_ids(tokenizer: Any) -> frozenset[int]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token_id for token_id, token in added.items() if token.special}


def _cleans_up(tokenizer: Any, backend: Any | None) -> bool:
    """Whether `tokenizer.decode` cleans up spaces by default; transformers refuses to for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    if backend is None or type(backend.model).__name__ != "BPE":
        return True
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))


def _byte_alphabet() -> dict[str, int]:
    """The character that GPT-2's vocabulary writes for each byte: printable ones stand for themselves, and the others,
    in order, are the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _bytes_of_token(token: str) -> bytes:
    """A token with a character outside the alphabet (an added token may have one) stands for itself."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
