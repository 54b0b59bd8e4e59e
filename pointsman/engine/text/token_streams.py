"""Token streams: take the tokens of one text in order, and release text as soon as no later token can change it.

`TextDecoder` chooses the kind of stream for a tokenizer; `detokenizer.py` describes the kinds.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Protocol

MAX_HELD = 16
"""Maximum number of tokens that the stream for a tokenizer written in Python holds back. An incomplete character has at
most 3 bytes."""
SLOW_CONTEXT = 4
"""Number of settled tokens that are decoded before new tokens, as context, with a tokenizer written in Python."""
MAX_PEEKED = 256
"""Number of held-back tokens up to which each call of `pending` decodes all of them. With more, only few calls decode,
so that the cost per token stays bounded."""
MAX_UNFINISHED = 3
"""Maximum number of bytes of an incomplete character."""

REPLACEMENT = "\ufffd"


class TokenStream(Protocol):
    """Takes the tokens of one text in order, and releases settled text."""

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        """Continue the text of a prompt. Call this before the first token, or never.

        The stream then releases the text that its tokens add to the prompt's text. A character that the prompt leaves
        incomplete belongs to the stream's text.
        """
        ...

    def decode_rest(self, token_ids: Sequence[int]) -> str:
        """The text that `feed` and `flush` would release if these tokens were the next and last ones. Does not change
        the stream."""
        ...

    def feed(self, token_id: int) -> str:
        """Take one token; return the text that this token settles."""
        ...

    def flush(self) -> str:
        """End the text, because no token follows; return the remaining text."""
        ...

    def pending(self) -> str:
        """The text that would follow the settled text if no token followed. Later tokens change this text only if they
        have invalid bytes.

        Replacement characters at its end are left out, because they may be incomplete characters. Does not change the
        stream.
        """
        ...


class ByteStream:
    """The stream for vocabularies whose tokens are bytes: decodes the bytes as UTF-8.

    Args:
        bytes_of: function that returns the bytes of a token.
        skipped: ids of tokens that the text leaves out.
        unfinished: function that returns the bytes of an incomplete character at the end of a prompt.
    """

    __slots__ = ("_bytes_of", "_decoder", "_incomplete_bytes", "_skipped")

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        skipped: frozenset[int],
        unfinished: Callable[[Sequence[int]], bytes],
    ) -> None:
        self._bytes_of = bytes_of
        self._skipped = skipped
        self._incomplete_bytes = unfinished
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        self._decoder.decode(self._incomplete_bytes(prompt))

    def decode_rest(self, token_ids: Sequence[int]) -> str:
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
        return ""  # only an incomplete character can be held back


class WindowStream:
    """The stream that decodes new tokens after a context of settled tokens, and removes the context's text.

    It is for decoders with which the text of a token depends on the token, on whether it is the first of the text, and
    on the run of byte tokens that contains it. The context ends with a token that is not a byte, so no run reaches into
    the context. The context has text, so a decoder that strips the beginning of a text strips only the context.

    Args:
        decode: function that decodes several tokens, special tokens included.
        skipped: ids of tokens that the text leaves out.
        byte_of: function that returns the byte of a byte token, b"" for a token that the vocabulary lacks, None for
            other tokens. None: the decoder has no byte tokens.
        unfinished: function that returns the bytes of an incomplete character at the end of a prompt.
        neutral: function that returns tokens that have text and are not byte tokens, to serve as context.
    """

    __slots__ = (
        "_byte_of",
        "_context",
        "_context_text",
        "_decode",
        "_held",
        "_incomplete_bytes",
        "_neutral",
        "_skipped",
    )

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
        self._incomplete_bytes = unfinished
        self._neutral = neutral
        self._context: list[int] = []
        self._context_text = ""
        self._held: list[int] = []

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        """Use the prompt's last tokens with text as context, and hold back the tokens of an incomplete character.

        Byte tokens of complete characters are not used as context, because their run would continue after the context.
        So invalid bytes of a prompt damage no characters after the prompt, and vice versa.
        """
        num_unfinished = len(self._incomplete_bytes(prompt))
        has_bytes = False
        context: list[int] = []  # in reverse order, like `held`
        held: list[int] = []
        for token_id in _reversed_text_tokens(prompt, self._skipped):
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

    def decode_rest(self, token_ids: Sequence[int]) -> str:
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
    """The stream for an unknown decoder: like `WindowStream`, but it waits for complete characters.

    Held-back tokens settle when they have added text that does not end with a replacement character, which may be an
    incomplete character, or when there are `MAX_HELD` of them.
    """

    __slots__ = ("_context", "_decode", "_held", "_num_released", "_skipped")

    def __init__(self, decode: Callable[[list[int]], str], skipped: frozenset[int]) -> None:
        self._decode = decode
        self._skipped = skipped
        self._context: list[int] = []
        self._held: list[int] = []
        self._num_released = 0  # number of characters of the window's text

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        for size in (SLOW_CONTEXT, 2 * MAX_HELD):
            self._context = list(islice(_reversed_text_tokens(prompt, self._skipped), size))[::-1]
            text = self._decode(self._context) if self._context else ""
            self._num_released = len(text.removesuffix(REPLACEMENT))
            if text:
                break

    def decode_rest(self, token_ids: Sequence[int]) -> str:
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        return self._decode(self._context + self._held + shown)[self._num_released :]

    def feed(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        is_whole = not text.endswith(REPLACEMENT)
        is_settled = (is_whole and len(text) > self._num_released) or len(self._held) >= MAX_HELD
        end = len(text) if is_whole or is_settled else len(text) - 1  # an incomplete character is one replacement
        new = text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        if is_settled:
            self._move_context()
        return new

    def flush(self) -> str:
        return self.decode_rest(())

    def pending(self) -> str:
        return ""  # `feed` releases all text, except a replacement character at the end

    def _move_context(self) -> None:
        window = self._context + self._held
        self._held = []
        self._context = window[-SLOW_CONTEXT:]
        context_text = self._decode(self._context)
        if not context_text:
            self._context = window[-2 * MAX_HELD :]
            context_text = self._decode(self._context)
        self._num_released = len(context_text)


_SETTLED_MARK = re.compile(r" ' (?:(?= )|[^ .?!,mrstv])|n(?= +n)|( ' )(?=[mrstv])")
"""Pattern of the positions at which a text may be cut although spaces before them may still be removed. A cut is
allowed after a " ' " (searched from the left, like `str.replace`) whose next character makes no contraction, and after
an "n" whose next word begins with another "n". After a match with the group no cut is allowed."""


class CleanUpStream:
    """The stream that cleans up the spaces of another stream's text like transformers' `clean_up_tokenization_spaces`:
    " n't" becomes "n't".

    Every replacement starts with a space and covers at most three more characters. These are not spaces, except in " '
    ", which ends with a space and may turn " n ' t" into " n't". So a text is settled when three characters follow its
    last space, or a character with which no replacement continues. Otherwise it is settled up to its last run of
    spaces, unless a " '" or " n" precedes the run. Of a chain of " '" and " n", only the end is held back.

    After a prompt, spaces of the prompt's text stay, because that text is fixed; only spaces of the stream's tokens are
    removed.

    Args:
        stream: the stream that makes the text before the cleaning.
        clean: function that cleans up the spaces of a whole text.
        decode: function that decodes several tokens, special tokens included, without cleaning up spaces.
        skipped: ids of tokens that the text leaves out.
    """

    __slots__ = ("_clean", "_decode", "_prompt", "_raw", "_skipped", "_stream")

    REACH = 3
    INSIDE = " 'nvr"
    """Characters with which an incomplete replacement may end."""
    PROMPT_TOKENS = 32
    """Number of tokens at the end of a prompt in whose text a replacement may begin."""

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
        self._raw = ""  # uncleaned text that is not settled
        self._prompt = ""  # the beginning of `_raw` that is prompt text

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        self._stream.continue_prompt(prompt)
        end = list(islice(_reversed_text_tokens(prompt, self._skipped), self.PROMPT_TOKENS))[::-1]
        raw = self._decode(end).removesuffix(REPLACEMENT) if end else ""
        self._raw = self._prompt = raw[self._settled_end(raw) :]

    def decode_rest(self, token_ids: Sequence[int]) -> str:
        return self._cleaned(self._raw + self._stream.decode_rest(token_ids))

    def feed(self, token_id: int) -> str:
        self._raw += self._stream.feed(token_id)
        return self._release_up_to(self._settled_end(self._raw))

    def flush(self) -> str:
        self._raw += self._stream.flush()
        return self._release_up_to(len(self._raw))

    def pending(self) -> str:
        pending = self._stream.pending()
        held = self._raw + pending
        return self._cleaned(held[: self._settled_end(held)]) if pending else ""

    def _release_up_to(self, end: int) -> str:
        settled, self._raw = self._raw[:end], self._raw[end:]
        cleaned = self._cleaned(settled) if settled else ""
        self._prompt = self._prompt[end:]
        return cleaned

    def _cleaned(self, settled: str) -> str:
        """Clean up the spaces of `settled`, a beginning of the other stream's text, and remove the part that is prompt
        text."""
        text = self._clean(settled)
        if not self._prompt:
            return text
        known = self._prompt[: len(settled)]
        num_solid, num_spaces = len(known) - known.count(" "), len(known) - len(known.rstrip(" "))
        start = 0
        while num_solid:  # cleaning removes only spaces
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


def _reversed_text_tokens(prompt: Sequence[int], skipped: frozenset[int]) -> Iterator[int]:
    """The tokens of a prompt that are part of the prompt's text, in reverse order."""
    return (token_id for token_id in map(int, reversed(prompt)) if token_id not in skipped)


def split_incomplete_end(text: bytes) -> tuple[str, bytes]:
    """The complete characters of a text in UTF-8, and the bytes of an incomplete character at its end: 3 at most."""
    try:
        return text.decode(), b""
    except UnicodeDecodeError:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(text), decoder.getstate()[0]


def incomplete_end(text: bytes) -> bytes:
    """The bytes of an incomplete character at the end of a text: 3 at most."""
    end = split_incomplete_end(text)[1]
    return end if len(end.decode("utf-8", "replace")) == 1 else b""  # Python also holds back an incomplete surrogate


def added_text(own: bytes, unfinished: bytes) -> tuple[str, bytes]:
    """The text that a token adds to the tokens before it, and the bytes of an incomplete character after the token.

    Args:
        own: the token's bytes.
        unfinished: the bytes of an incomplete character before the token.
    """
    try:
        return own.decode(), b"" if own else unfinished
    except UnicodeDecodeError:
        text, rest = split_incomplete_end(unfinished + own)
        if rest:
            return "", unfinished + own
        return "" if text.endswith(REPLACEMENT) else text, b""
