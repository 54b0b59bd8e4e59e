"""TextDecoder and Detokenizer: make text from tokens, one token at a time, and find stop strings.

Decoding all tokens again at every step would take time quadratic in the length, and decoding each token alone would be
wrong: a character may be spread over several tokens, and some decoders treat the first token of a text differently. So
a stream takes tokens one by one and releases text as soon as it is *settled*: no later token can change it. The
released pieces, joined, equal the result of one call of `tokenizer.decode` for all tokens, and a text only grows.

`TextDecoder` inspects the tokenizer's decoder once, and makes streams of the matching kind:

| decoder | stream | text that may have to wait |
| --- | --- | --- |
| byte-level BPE (GPT-2, Llama 3, Qwen) | tokens are bytes, joined as UTF-8 | an unfinished character |
| Metaspace, WordPiece, others | new tokens decoded after a settled one | nothing |
| with byte fallback (Llama 2, Gemma) | the same | a run of byte tokens, until it ends |
| tokenizers written in Python | the same, after several | a replacement character at the end, `MAX_HELD` tokens |

Byte fallback decides for a whole run of byte tokens: if its bytes are not all valid UTF-8, each of them becomes a
replacement character, even those that formed a character before. The `DecodeStream` of the tokenizers library is not
used: it raises on some invalid bytes, holds back all text after others, and does not clean up spaces.

An output's text is the text that its tokens add to the prompt's text. A decoder that strips the first space of a text
does not strip the space before the first word of an output, and an output may complete a character that the prompt
begins. With structured output the text is exactly the text that the grammar matched: tokens are decoded as after other
text, independent of the prompt, and spaces are not cleaned up.

    prompt text + output text == the text of all tokens, decoded in one call

A token that the tokenizer cannot decode (models often have more logits than their tokenizer has tokens, and tokenizers
written in Python may raise then) has no text.

`Detokenizer` adds stop strings: it holds back text that may begin a stop string. It also searches text that the stream
holds back until the end of a run of byte tokens, as if no token followed. So a request ends with the token that
completes its stop string, even if that token is the byte of a newline.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from pointsman.engine.text.token_streams import (
    MAX_UNFINISHED,
    REPLACEMENT,
    ByteStream,
    CautiousWindowStream,
    CleanUpStream,
    TokenStream,
    WindowStream,
    added_text,
    incomplete_end,
)

logger = logging.getLogger(__name__)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


MAX_CHANGED = 8
"""Maximum number of bytes of a prompt's text that lie between two tokens and belong to neither token, because the
tokenizer has replaced characters, for example by accented ones."""


class TextDecoder:
    """Decodes the tokens of one tokenizer. All requests share one object; several threads may use it.

    Args:
        tokenizer: a tokenizer of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special_ids = _special_ids(tokenizer)
        self._backend = _own_backend(tokenizer)
        kinds = _decoder_kinds(self._backend.decoder) if self._backend is not None else []
        self._is_byte_level = kinds == ["ByteLevel"]
        # Other combinations with ByteLevel are unknown: use windows that wait for complete characters.
        self._is_known = self._is_byte_level or (self._backend is not None and "ByteLevel" not in kinds)
        self._falls_back = "ByteFallback" in kinds
        self._cleans_up = _cleans_up(tokenizer, self._backend)
        self._token_bytes: dict[int, bytes] = {}
        self._fallback_bytes: dict[int, bytes | None] = {}
        self._token_texts: dict[int, str] = {}
        self._neutral_ids: list[int] | None = None
        self._unreadable: frozenset[int] = frozenset()

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode all tokens in one call of the tokenizer.

        Raises:
            Exception: the tokenizer fails on the tokens together, although it decodes each of them alone.
        """
        return self._decode_readable(
            lambda ids: self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens), list(token_ids)
        )

    def stream(self, skip_special_tokens: bool = True, *, is_verbatim: bool = False) -> TokenStream:
        """Make a stream for a new text.

        Args:
            skip_special_tokens: whether the text leaves special tokens out.
            is_verbatim: whether each token is decoded as after other text, independent of the prompt; nothing is
                stripped or cleaned up.
        """
        skipped = self._special_ids if skip_special_tokens else frozenset()
        stream: TokenStream
        if self._is_byte_level:
            stream = ByteStream(self._bytes_of, skipped, self.incomplete_bytes)
        elif self._is_known:
            byte_of = self._fallback_byte if self._falls_back else None
            stream = WindowStream(self._decode_raw, skipped, byte_of, self.incomplete_bytes, self._neutral_tokens)
        else:
            stream = CautiousWindowStream(self._decode_raw, skipped)
        if is_verbatim:
            stream.continue_prompt(self._neutral_tokens())
        elif self._cleans_up:
            return CleanUpStream(stream, self._tokenizer.clean_up_tokenization, self._decode_raw, skipped)
        return stream

    def is_special(self, token_id: int) -> bool:
        """Whether a token is special, such as EOS; texts may leave special tokens out."""
        return token_id in self._special_ids

    def token_text(self, token_id: int) -> str:
        """The text of a token after other text, also of special tokens: " the", not "the"."""
        text = self._token_texts.get(token_id)
        if text is None:
            if self._is_byte_level:
                text = self._bytes_of(token_id).decode("utf-8", "replace")
            else:  # decoded after itself: a decoder treats at most the first token of a text differently
                text = self._decode_raw([token_id, token_id])[len(self._decode_raw([token_id])) :]
            self._token_texts[token_id] = text
        return text

    def token_name(self, token_id: int) -> str:
        """The text of a token that is decoded alone, also of special tokens."""
        return self._decode_raw([token_id])

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token's text after other text; they may be part of a character."""
        if self._is_byte_level:
            return self._bytes_of(token_id)
        byte = self._fallback_byte(token_id) if self._falls_back else None
        return self.token_text(token_id).encode() if byte is None else byte

    def first_token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of a token's text at the beginning of a text, where a decoder may strip spaces."""
        alone = REPLACEMENT if self._is_byte_level else self._decode_raw([token_id])
        return self.token_bytes(token_id) if REPLACEMENT in alone else alone.encode()

    def added_text(self, token_id: int, before: Sequence[int]) -> str:
        """A token's text as from `token_text`, but without incomplete characters; "" if the token ends within a
        character.

        The whole character belongs to the token that completes it.

        Args:
            token_id: the token.
            before: the tokens before `token_id`, at least as many as one character may have.
        """
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text
        if not self._is_known:
            stream = self.stream(skip_special_tokens=False, is_verbatim=True)
            stream.continue_prompt(before)
            return stream.feed(token_id)
        unfinished = b""
        for earlier in before:
            unfinished = added_text(self.token_bytes(earlier), unfinished)[1]
        return added_text(self.token_bytes(token_id), unfinished)[0]

    def incomplete_bytes(self, prompt: Sequence[int]) -> bytes:
        """The bytes of an incomplete character at the end of a prompt: 3 at most. These bytes belong to the text after
        the prompt. After a special token, earlier bytes cannot be completed."""
        if not (self._is_byte_level or self._falls_back):
            return b""
        byte_of = self._bytes_of if self._is_byte_level else self._fallback_byte
        end = b""
        for token_id in map(int, reversed(prompt)):
            piece = None if token_id in self._special_ids else byte_of(token_id)
            if piece is None or len(end) >= MAX_UNFINISHED:
                break
            end = piece + end
        return incomplete_end(end)

    def prompt_text(self, token_ids: Sequence[int]) -> str:
        """The text of a prompt, including special tokens, without an incomplete character at its end.

        Raises:
            Exception: the tokenizer fails on the tokens together, although it decodes each of them alone.
        """
        unfinished = self.incomplete_bytes(token_ids)
        if self._falls_back and unfinished:  # each byte of the run would become a replacement character
            end = len(token_ids)
            for _ in unfinished:
                end -= 1
                while not self._fallback_byte(token_ids[end]):
                    end -= 1
            return self.decode(token_ids[:end], skip_special_tokens=False)
        text = self.decode(token_ids, skip_special_tokens=False)
        return text.removesuffix(REPLACEMENT) if unfinished or not self._is_known else text

    def prompt_pieces(self, token_ids: Sequence[int], text: str) -> list[bytes | str]:
        """Divide a prompt's text among its tokens.

        Args:
            token_ids: the prompt's token ids.
            text: the prompt's text, as returned by `prompt_text` or as it was tokenized.

        Returns:
            For each token the UTF-8 bytes of its part of the text; for a special token that the text lacks, its name as
            str.
        """
        whole = text.encode("utf-8", "replace")
        pieces: list[bytes | str] = []
        place = 0
        for token_id in token_ids:
            piece = self.token_bytes(token_id)
            if not whole.startswith(piece, place):
                shorter = piece.removeprefix(b" ")  # the first token of a text, or a token after a special one
                is_added = token_id in self._special_ids
                if whole.startswith(shorter, place):
                    piece = shorter
                elif (place or not is_added) and (
                    found := whole.find(piece, place, place + len(piece) + MAX_CHANGED)
                ) >= 0:
                    place = found
                elif is_added:  # the tokenizer added the token
                    pieces.append(self.token_name(token_id))
                    continue
            pieces.append(piece)
            place += len(piece)
        return pieces

    def _neutral_tokens(self) -> list[int]:
        """A token whose text is letters, in a list; [] if there is none. Tokens after it are not at the beginning of a
        text."""
        if self._neutral_ids is None:
            others = (token_id for token_id in range(len(self._tokenizer)) if token_id not in self._special_ids)
            words = ([token_id] for token_id in others if not (self._falls_back and self._fallback_byte(token_id)))
            self._neutral_ids = next((word for word in words if self._decode_raw(word).isalpha()), [])
        return self._neutral_ids

    def _decode_raw(self, token_ids: list[int]) -> str:
        """The text of all tokens, special tokens included, without cleaning up spaces; raises the exceptions of
        `decode`."""
        return self._decode_readable(self._decode_without_cleanup, token_ids)

    def _decode_without_cleanup(self, token_ids: list[int]) -> str:
        text: str
        if self._backend is not None:
            text = self._backend.decode(token_ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _decode_readable(self, decode: Callable[[list[int]], str], token_ids: list[int]) -> str:
        """Call `decode` for the tokens except those that the tokenizer cannot decode, which are determined when it
        raises."""
        if self._unreadable:
            token_ids = [token_id for token_id in token_ids if token_id not in self._unreadable]
        try:
            return decode(token_ids)
        except Exception as error:
            unreadable = {token_id for token_id in token_ids if not _can_decode(decode, token_id)}
            if not unreadable:
                raise
            logger.warning(
                "the tokenizer cannot decode token %d, so this token adds no text: %s", min(unreadable), error
            )
            self._unreadable |= unreadable
            return decode([token_id for token_id in token_ids if token_id not in unreadable])

    def _token(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it; None if the vocabulary lacks the token."""
        token: str | None = self._backend.id_to_token(token_id)  # type: ignore[union-attr]  # set for known kinds
        return token

    def _bytes_of(self, token_id: int) -> bytes:
        """The bytes of a token of a byte-level vocabulary; b"" if the vocabulary lacks the token."""
        known = self._token_bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            known = b"" if token is None else _bytes_of_token(token)
            self._token_bytes[token_id] = known
        return known

    def _fallback_byte(self, token_id: int) -> bytes | None:
        """The byte of a byte token; b"" if the vocabulary lacks the token, None if the token is text."""
        try:
            return self._fallback_bytes[token_id]
        except KeyError:
            token = self._token(token_id)
            # A token that the vocabulary lacks is left out, so it does not end a run of bytes.
            match = _BYTE_TOKEN.fullmatch(token or "")
            known = bytes.fromhex(match[1]) if match else b"" if token is None else None
            self._fallback_bytes[token_id] = known
            return known


class Detokenizer:
    """Makes the text of one request, and ends it at a stop string.

    The text ends at the stop string whose end comes first in the text; of several with the same end, the longest
    counts. This rule does not depend on the division of the text into tokens. After each token both the settled text
    and the stream's `pending` are searched, even though `pending` may not be settled.

    Args:
        stream: makes the text of the tokens.
        stop: stop strings, none of them empty.
        include_stop: whether the text includes the stop string.
        min_tokens: number of first tokens in whose text a stop string may not end.
    """

    __slots__ = ("_buffer", "_floor", "_include_stop", "_initials", "_longest", "_min_tokens", "_num_released",
                 "_num_tokens", "_stop", "_stream", "feed", "stop_reason")  # fmt: skip

    def __init__(
        self, stream: TokenStream, stop: Sequence[str] = (), *, include_stop: bool = False, min_tokens: int = 0
    ) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self.feed: Callable[[int], str] = self._search_stop_string if self._stop else stream.feed
        """Takes one token; returns newly settled text, without an end that may begin a stop string (unless
        `include_stop`)."""
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._initials = frozenset(one[0] for one in self._stop)
        self._longest = max(map(len, self._stop), default=0)
        self._num_tokens = 0
        self._buffer = ""
        """The end of the settled text that may begin a stop string."""
        self._num_released = 0  # number of characters of the buffer that were released
        self._floor = 0  # number of characters of the buffer in which no stop string may end, because of min_tokens
        self.stop_reason: str | None = None
        """The stop string that has ended the text; no further token may be fed then. None: no stop string was found."""

    def continue_prompt(self, prompt: Sequence[int]) -> None:
        """Continue the text of a prompt: release only the text that tokens add to it. Call this before the first token,
        or never."""
        self._stream.continue_prompt(prompt)

    def decode_rest(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens if they are the next and last ones. Call this only without stop strings."""
        return self._stream.decode_rest(token_ids)

    def _search_stop_string(self, token_id: int) -> str:
        """Take one token, and search stop strings; return newly settled text. If there are stop strings, `feed` is this
        method."""
        text = self._stream.feed(token_id)
        self._num_tokens += 1
        if text and (self._buffer or self._floor or not self._initials.isdisjoint(text)):
            text = self._append_and_search(text)
        if self.stop_reason is None and (pending := self._stream.pending()):
            text += self._search_pending(pending)
        return text

    def finish(self) -> str:
        """End the text, because no token follows; return the remaining text, up to a stop string in it."""
        if self.stop_reason is not None:
            return ""
        piece = self._stream.flush()
        if not self._stop:
            return piece
        self._num_tokens += 1  # the last text depends on the end of the tokens, too
        text = self._append_and_search(piece)
        if self.stop_reason is None:
            text += self._buffer[self._num_released :]
            self._num_released = len(self._buffer)
        return text

    def _append_and_search(self, piece: str) -> str:
        """Append `piece` to the buffer and search the buffer; return the text that cannot be part of a stop string."""
        text = self._buffer + piece
        if (last := self._end_at_stop(text)) is not None:
            return last
        keep = self._find_candidate_start(text)
        release = len(text) if self._include_stop else keep
        released = text[self._num_released : release]
        self._buffer = text[keep:]
        self._num_released = release - keep
        self._floor = max(0, self._floor - keep)
        return released

    def _search_pending(self, pending: str) -> str:
        """Search the buffer followed by `pending`; if a stop string is found, return the last text to release,
        otherwise ""."""
        return self._end_at_stop(self._buffer + pending) or ""

    def _end_at_stop(self, text: str) -> str | None:
        """End the text at a stop string in `text`, and return the text still to be released; None: there is no stop
        string."""
        if self._num_tokens <= self._min_tokens:
            self._floor = len(text)
        elif (found := self._find_stop(text)) is not None:
            start, end, self.stop_reason = found
            self._buffer = ""
            return text[self._num_released : end if self._include_stop else start]
        return None

    def _find_stop(self, text: str) -> tuple[int, int, str] | None:
        """Find the occurrence of a stop string that ends first: (start, end, stop string); None: there is none."""
        best: tuple[int, int, str] | None = None
        for one in self._stop:
            start = text.find(one, max(0, self._floor - len(one) + 1))
            end = start + len(one)
            if start >= 0 and (best is None or (end, start) < (best[1], best[0])):
                best = (start, end, one)
        return best

    def _find_candidate_start(self, text: str) -> int:
        """Start of the longest suffix of `text` that begins a stop string; the length of `text` if there is none."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials:
                rest = text[start:]
                if any(len(one) > len(rest) and one.startswith(rest) for one in self._stop):
                    return start
        return len(text)


# ------------------------------------------------------------------------------------------- kinds of tokenizers


def _own_backend(tokenizer: Any) -> Any | None:
    """The tokenizers library's tokenizer inside a transformers tokenizer;
    None: there is none, or the transformers tokenizer has its own code for decoding."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    from transformers import PreTrainedTokenizerFast

    owner = type(tokenizer)
    plain = PreTrainedTokenizerFast
    is_plain = isinstance(tokenizer, plain) and owner._decode is plain._decode and owner.decode is plain.decode
    return backend if is_plain else None


def _decoder_kinds(decoder: Any | None) -> list[str]:
    """The types of a decoder of the tokenizers library: the type of the decoder, or of each decoder in a sequence."""
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
    """Whether `tokenizer.decode` cleans up spaces by default; transformers does not for BPE."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    if backend is None or type(backend.model).__name__ != "BPE":
        return True
    return bool(getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))


def _byte_alphabet() -> dict[str, int]:
    """The alphabet of GPT-2's vocabulary: character -> byte. Printable bytes stand for themselves, other bytes map in
    order to the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_ALPHABET = _byte_alphabet()


def _bytes_of_token(token: str) -> bytes:
    """The bytes of a token of a byte-level vocabulary. A token with a character outside the byte alphabet, such as an
    added token, is plain text."""
    try:
        return bytes([_BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()
