"""Streams: each takes the tokens of one text in order and releases text as soon as no later token can change it.

Which kind a tokenizer needs is decided by `TextDecoder`, whose module says what has to wait in each.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

MAX_HELD = 16
"""Tokens that a stream of a tokenizer written in Python may hold back. An unfinished character has at most 3 bytes."""
SLOW_CONTEXT = 4
"""Settled tokens before new ones when a tokenizer written in Python decodes them."""
MAX_PEEKED = 256
"""Held tokens up to which a stream decodes them all for each `pending`; beyond, only so often that the cost per token
stays that of some such decodings."""
MAX_UNFINISHED = 3
"""Bytes of a character that lacks one."""

REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """Takes the tokens of one text in order."""

    def begin_behind(self, prompt: Sequence[int]) -> None:
        """The text continues that of a prompt. To be called before the first token, or never.

        What is released is the text that the tokens add to the prompt's. A character that the prompt leaves unfinished
        belongs to the tokens.
        """
        ...

    def whole(self, token_ids: Sequence[int]) -> str:
        """What `feed` and `flush` release if these tokens, and no others, are the remaining ones. Changes nothing."""
        ...

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
    """Tokens are bytes; the text is what UTF-8 makes of them.

    Args:
        bytes_of: of a token.
        skipped: tokens that the text leaves out.
        unfinished: the bytes of an unfinished character at the end of a prompt.
    """

    __slots__ = ("_bytes_of", "_decoder", "_skipped", "_unfinished")

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        skipped: frozenset[int],
        unfinished: Callable[[Sequence[int]], bytes],
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._unfinished = unfinished
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin_behind(self, prompt: Sequence[int]) -> None:
        self._decoder.decode(self._unfinished(prompt))

    def whole(self, token_ids: Sequence[int]) -> str:
        skipped, bytes_of = self._skipped, self._bytes_of
        pieces = [bytes_of(token_id) for token_id in token_ids if token_id not in skipped]
        return (self._decoder.getstate()[0] + b"".join(pieces)).decode("utf-8", "replace")

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

    Args:
        decode: several tokens, none of them left out.
        skipped: tokens that the text leaves out.
        byte_of: the byte of a byte token; empty for a token that the vocabulary lacks, None for all others. None: the
            decoder knows no byte tokens.
        unfinished: the bytes of an unfinished character at the end of a prompt.
        neutral: tokens with text, none of them a byte token.
    """

    __slots__ = ("_byte_of", "_context", "_context_text", "_decode", "_held", "_neutral", "_skipped", "_unfinished")

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        skipped: frozenset[int],
        byte_of: Callable[[int], bytes | None] | None,
        unfinished: Callable[[Sequence[int]], bytes],
        neutral: Callable[[], list[int]],
    ) -> None:
        self._decode = decode
        self._skipped = skipped
        self._byte_of = byte_of
        self._unfinished = unfinished
        self._neutral = neutral
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def begin_behind(self, prompt: Sequence[int]) -> None:
        """The last tokens with text become the context, and those of an unfinished character are held.

        Finished byte tokens are no context, because the run that they are in would go on behind it. So invalid bytes
        of a prompt spoil no characters behind it, and the other way round.
        """
        num_unfinished = len(self._unfinished(prompt))
        has_bytes = False
        context: list[int] = []  # backwards, as `held`
        held: list[int] = []
        for token_id in _backwards(prompt, self._skipped):
            byte = self._byte_of(token_id) if self._byte_of is not None else None
            if byte is None:
                context.append(token_id)
                is_power_of_two = len(context) & (len(context) - 1) == 0
                if is_power_of_two and self._decode(context[::-1]):
                    break
            elif byte:
                has_bytes = True
                if len(held) < num_unfinished:
                    held.append(token_id)
        self._context, self._held = context[::-1], held[::-1]
        self._context_text = self._decode(self._context) if context else ""
        if has_bytes and not self._context_text:
            self._context = self._neutral()
            self._context_text = self._decode(self._context)

    def whole(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._decode(self._context + self._held + shown)[len(self._context_text) :]

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        if self._byte_of is not None and self._byte_of(token_id) is not None:
            return ""
        return self._settle()

    def flush(self) -> str:
        return self._settle() if self._held else ""

    def pending(self) -> str:
        num_held = len(self._held)
        if not num_held or (num_held > MAX_PEEKED and num_held % (num_held // MAX_PEEKED)):
            return ""
        return self._decode(self._context + self._held)[len(self._context_text) :].rstrip(REPLACEMENT)

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

    def begin_behind(self, prompt: Sequence[int]) -> None:
        for size in (SLOW_CONTEXT, 2 * MAX_HELD):
            self._context = list(islice(_backwards(prompt, self._skipped), size))[::-1]
            text = self._decode(self._context) if self._context else ""
            self._num_released = len(text.removesuffix(REPLACEMENT))
            if text:
                break

    def whole(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._decode(self._context + self._held + shown)[self._num_released :]

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_whole = not text.endswith(REPLACEMENT)
        is_settled = (is_whole and len(text) > self._num_released) or len(self._held) >= MAX_HELD
        end = len(text) if is_whole or is_settled else len(text) - 1  # an unfinished character is one replacement
        new = text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        if is_settled:
            self._slide()
        return new

    def flush(self) -> str:
        return self.whole(())

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

    Behind a prompt, whose text is there already, spaces of that text stay: what goes is the tokens' own.

    Args:
        stream: of the text before it is cleaned.
        clean: the whole of a text.
        decode: several tokens, none of them left out, to a text that is not cleaned.
        skipped: tokens that the text leaves out.
    """

    __slots__ = ("_clean", "_decode", "_prompt", "_raw", "_skipped", "_stream")

    REACH = 3
    INSIDE = " 'nvr"
    """What all beginnings of replacements end with."""
    PROMPT_TOKENS = 32
    """At the end of a prompt, in whose text a replacement may begin."""

    def __init__(
        self,
        stream: TokenStream,
        clean: Callable[[str], str],
        decode: Callable[[list[int]], str],
        skipped: frozenset[int],
    ) -> None:
        self._stream = stream
        self._clean = clean
        self._decode = decode
        self._skipped = skipped
        self._raw = ""  # text that is not settled
        self._prompt = ""  # the beginning of it that is the prompt's

    def begin_behind(self, prompt: Sequence[int]) -> None:
        self._stream.begin_behind(prompt)
        end = list(islice(_backwards(prompt, self._skipped), self.PROMPT_TOKENS))[::-1]
        raw = self._decode(end).removesuffix(REPLACEMENT) if end else ""
        self._raw = self._prompt = raw[self._settled_end(raw) :]

    def whole(self, token_ids: Sequence[int]) -> str:
        return self._cleaned(self._raw + self._stream.whole(token_ids))

    def feed(self, token_id: int) -> str:
        self._raw += self._stream.feed(token_id)
        return self._take(self._settled_end(self._raw))

    def flush(self) -> str:
        self._raw += self._stream.flush()
        return self._take(len(self._raw))

    def pending(self) -> str:
        pending = self._stream.pending()
        held = self._raw + pending
        return self._cleaned(held[: self._settled_end(held)]) if pending else ""

    def _take(self, end: int) -> str:
        settled, self._raw = self._raw[:end], self._raw[end:]
        cleaned = self._cleaned(settled) if settled else ""
        self._prompt = self._prompt[end:]
        return cleaned

    def _cleaned(self, settled: str) -> str:
        """The beginning of the raw text, cleaned, and without the part that is the prompt's."""
        text = self._clean(settled)
        if not self._prompt:
            return text
        known = self._prompt[: len(settled)]
        num_solid, num_spaces = len(known) - known.count(" "), len(known) - len(known.rstrip(" "))
        start = 0
        while num_solid:  # cleaning takes nothing but spaces away
            num_solid -= text[start] != " "
            start += 1
        while num_spaces and text.startswith(" ", start):
            num_spaces -= 1
            start += 1
        return text[start:]

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


def _backwards(prompt: Sequence[int], skipped: frozenset[int]) -> Iterator[int]:
    """The tokens of a prompt that are part of a text, the last one first."""
    return (token_id for token_id in map(int, reversed(prompt)) if token_id not in skipped)


def split_text(text: bytes) -> tuple[str, bytes]:
    """The characters of a text in UTF-8, and the bytes of an unfinished one at its end: 3 at most."""
    try:
        return text.decode(), b""
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(text), decoder.getstate()[0]


def unfinished_end(text: bytes) -> bytes:
    """The bytes at the end of a text that begin a character and do not finish it: 3 at most."""
    end = split_text(text)[1]
    return end if len(end.decode("utf-8", "replace")) == 1 else b""  # Python waits for the end of a surrogate, too


def added_text(own: bytes, unfinished: bytes) -> tuple[str, bytes]:
    """What a token adds to a text, and the bytes that wait behind it for a character's end.

    Args:
        own: of the token.
        unfinished: those that wait before it.
    """
    try:
        return own.decode(), b"" if own else unfinished
    except UnicodeDecodeError:
        text, rest = split_text(unfinished + own)
        if rest:
            return "", unfinished + own
        return "" if text.endswith(REPLACEMENT) else text, b""
