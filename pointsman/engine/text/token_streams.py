"""Streams: each takes the tokens of one text in order and releases text as soon as no later token can change it.

Which kind a tokenizer needs is decided by `TextDecoder`, whose module says what has to wait in each.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable
from typing import Protocol

MAX_HELD = 16
"""Tokens that a stream of a tokenizer written in Python may hold back. An unfinished character has at most 3 bytes."""
SLOW_CONTEXT = 4
"""Settled tokens before new ones when a tokenizer written in Python decodes them."""
MAX_PEEKED = 256
"""Held tokens up to which a stream decodes them all for each `pending`; beyond, only so often that the cost per token
stays that of some such decodings."""

_REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """Takes the tokens of one text in order."""

    def feed(self, token_id: int) -> str:
        """Take one token; the text that is settled now and was not before."""
        ...

    def flush(self) -> str:
        """No token will follow: the remaining text."""
        ...

    def pending(self) -> str:
        """Text behind the settled one that is there if no token follows, and stays unless invalid bytes follow.

        Replacement characters at its end are left out: they may be unfinished characters. Changes nothing.
        """
        ...


class ByteStream:
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


class WindowStream:
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


class CautiousWindowStream:
    """As `WindowStream`, for a decoder that one knows nothing about.

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


class CleanUpStream:
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
