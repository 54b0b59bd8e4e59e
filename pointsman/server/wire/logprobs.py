"""Log probabilities: columns for messages between the processes, and the JSON of both APIs.

The engine gives arrays for each position (`TokenLogprobs`): the position's own token first, then the most likely tokens
in order. If the own token is among the most likely ones, it is kept once here. A request may have hundreds of thousands
of entries. Columns cross between the processes in a tenth of the time of that many objects. The JSON is written in
pieces (`wire/pieces.py`).

Tokens are bytes here, as a token may be a part of a character. Clients read text: bytes that are not a whole character
are written `\\xNN`, as OpenAI does. The text that a token adds, and its offset, depend on the bytes of the tokens
before it.

JSON has no infinities, so an impossible token has -9999.0, as vLLM writes it.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pointsman.engine.text.token_streams import REPLACEMENT, added_text, split_incomplete_end
from pointsman.server.wire.pieces import Pieces

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import Piece
    from pointsman.engine.sampling.logprobs import TokenLogprobs

MIN_LOGPROB = -9999.0
MAX_UNKNOWN = 8
"""Maximum number of consecutive characters in a text that belong to no token."""
PIECE = 256
"""Minimum number of tokens whose log probabilities are written in one piece, which takes a millisecond."""


def finite(logprob: float) -> float:
    """A log probability as a finite number, which JSON can represent; also for NaN."""
    return logprob if logprob > MIN_LOGPROB else MIN_LOGPROB


@dataclass(slots=True)
class Logprobs:
    """Log probabilities of consecutive positions: `counts[i]` elements of each of the other lists are of position i."""

    counts: list[int] = field(default_factory=list)
    """Number of elements that each position has in the other lists; 0: no log probabilities, as for the first position
    of a prompt."""
    token_ids: list[int] = field(default_factory=list)
    """Token ids; for each position first the token at this position, then the most likely tokens."""
    values: list[float] = field(default_factory=list)
    """Log probabilities, as natural logarithms."""
    ranks: list[int | None] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """Texts of the tokens."""

    @classmethod
    def from_entries(
        cls,
        entries: Iterable[TokenLogprobs | None],
        piece_of: Callable[[int], Piece],
        token_pieces: Iterable[Piece] = (),
    ) -> Logprobs:
        """The columns of the engine's log probabilities.

        Args:
            entries: the engine's arrays, one entry per position.
            piece_of: returns the text of a token that follows other text.
            token_pieces: the text of each position's own token, as it continues the text before it.
        """
        made = cls()
        for entry in entries:
            if entry is None:
                made.counts.append(0)
                continue
            token_ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
            ranks: list[int | None] = [entry.rank, *range(1, len(token_ids))]
            if token_ids.count(token_ids[0]) > 1:  # the token is among the most likely ones
                again = token_ids.index(token_ids[0], 1)
                ranks[0] = again
                del token_ids[again], values[again], ranks[again]
            made.counts.append(len(token_ids))
            made.token_ids += token_ids
            made.values += values
            made.ranks += ranks
        made.pieces = list(map(piece_of, made.token_ids))
        for place, piece in zip(made.positions(), token_pieces, strict=False):
            made.pieces[place.start] = piece
        return made

    def __len__(self) -> int:
        return len(self.counts)

    def extend(self, later: Logprobs) -> None:
        """Append the log probabilities of the following positions."""
        self.counts += later.counts
        self.token_ids += later.token_ids
        self.values += later.values
        self.ranks += later.ranks
        self.pieces += later.pieces

    def drop(self, num_positions: int) -> None:
        """Remove the log probabilities of the first `num_positions` positions."""
        end = sum(self.counts[:num_positions])
        del self.counts[:num_positions], self.token_ids[:end], self.values[:end], self.ranks[:end], self.pieces[:end]

    def own_pieces(self) -> list[Piece]:
        """The text of the token at each position, without the other likely tokens; None if the position has no log
        probabilities."""
        return [self.pieces[place.start] if place else None for place in self.positions()]

    def positions(self) -> Iterator[range]:
        """The range of each position's elements in the lists."""
        start = 0
        for count in self.counts:
            yield range(start, start + count)
            start += count


class TextPlaces:
    """Finds the offsets of tokens in the text of a response; parts of the text may arrive after their tokens.

    The text is that of the tokens' bytes, with these exceptions. It may end early, at a stop string. A leading space
    may be missing, because it was stripped or cleaned up. Each byte of an invalid character may become a replacement
    character. A tokenizer may have replaced characters of a prompt. So the end of a token is looked up in the
    text, once the text has arrived.

    Args:
        offset: number of characters before the text.
        unfinished: first bytes of a character that begins before the first token and belongs to the text.
    """

    def __init__(self, offset: int = 0, unfinished: bytes = b"") -> None:
        self._text = ""
        self._num_before = offset  # number of characters before `_text`
        self._at = 0  # index in `_text` where `_added` begins
        self._added = ""  # the text that the last token adds at `_at`
        self._num_bytes = 0  # number of bytes of `_added`
        self._unfinished = unfinished  # first bytes of an unfinished character, after `_added`
        self._is_complete = False

    def add_text(self, text: str, *, is_last: bool) -> None:
        """Append text. If it is the last text, all remaining tokens have their places within it."""
        self._text = self._text[self._at :] + text
        self._num_before += self._at
        self._at = 0
        self._is_complete = is_last

    def is_place_known(self, piece: Piece) -> bool:
        """Whether enough text has arrived to know the offset of the next token, which is `piece`."""
        num_needed = self._at + len(self._added) + self._breaks_off(piece)
        return self._is_complete or num_needed <= len(self._text)

    def place(self, piece: Piece) -> int:
        """The next token's offset in characters: the beginning of the character that contains its first byte."""
        self._pass_added()
        if isinstance(piece, bytes) and piece:
            if self._breaks_off(piece):
                self._added, self._num_bytes, self._unfinished = REPLACEMENT, len(self._unfinished), b""
                self._pass_added()
            self._num_bytes = len(self._unfinished) + len(piece)
            self._added, self._unfinished = split_incomplete_end(self._unfinished + piece)
            if not self._text.startswith(self._added, self._at):
                self._pass_unknown()
        return self._num_before + self._at

    def _breaks_off(self, piece: Piece) -> bool:
        """Whether the token `piece` does not continue the unfinished character before it, which then stays
        unfinished."""
        return (
            isinstance(piece, bytes)
            and len(self._unfinished) > 0 < len(piece)
            and not _is_valid_start(self._unfinished + piece[:1])
        )

    def _pass_added(self) -> None:
        """Advance the place in the text past the text that the last token added."""
        text, at, added = self._text, self._at, self._added
        if not text.startswith(added, at):
            if added.startswith(" ") and text.startswith(added[1:], at):
                added = added[1:]
            elif text.startswith(REPLACEMENT, at):
                added = REPLACEMENT * self._num_bytes
        self._at = min(len(text), at + len(added))
        self._added = ""

    def _pass_unknown(self) -> None:
        """Advance the place in the text to the text of the new token, past a few characters that belong to no token."""
        at, added = self._at, self._added
        is_shorter = added.startswith(" ") and self._text.startswith(added[1:], at)
        if is_shorter or added.startswith(self._text[at : at + len(added)]):  # or the rest of the text has not arrived
            return
        found = self._text.find(added, at, at + len(added) + MAX_UNKNOWN)
        unknown = self._text[at:found]
        is_replaced = unknown.startswith(REPLACEMENT) and unknown.strip(REPLACEMENT) != ""  # by the first character
        self._at = at if found < 0 or is_replaced else found


def _is_valid_start(text: bytes) -> bool:
    """Whether bytes are a valid beginning of UTF-8 text."""
    try:
        codecs.getincrementaldecoder("utf-8")("strict").decode(text)
    except UnicodeDecodeError:
        return False
    return True


@dataclass(slots=True)
class UnplacedLogprobs:
    """Log probabilities of consecutive tokens of a completion that are not written yet."""

    places: TextPlaces
    """Places of the tokens in the generated text."""
    token_ids: list[int] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    """Texts of the tokens in their actual places."""
    entries: Logprobs = field(default_factory=Logprobs)
    offsets: list[int] = field(default_factory=list)
    """Offsets of the first tokens in the text, known already because these are prompt tokens; empty if there are
    none."""

    def add(
        self, token_ids: Sequence[int], pieces: Sequence[Piece], entries: Logprobs, offsets: Sequence[int] = ()
    ) -> None:
        """Append further tokens, with their log probabilities."""
        self.token_ids += token_ids
        self.pieces += pieces
        self.entries.extend(entries)
        self.offsets += offsets

    def drop(self, num_tokens: int) -> None:
        """Remove the first `num_tokens` tokens and their log probabilities."""
        del self.token_ids[:num_tokens], self.pieces[:num_tokens], self.offsets[:num_tokens]
        self.entries.drop(num_tokens)


class LogprobWriter:
    """Writes the log probabilities of one request as JSON.

    Args:
        num_top: number of most likely tokens per position.
        as_token_ids: whether tokens are written as "token_id:17", as several tokens may have the same text.
    """

    def __init__(self, num_top: int, *, as_token_ids: bool = False) -> None:
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def _token(self, token_id: int, piece: Piece, prefix: str = "") -> str:
        """A token as text, or as "token_id:17" if the client asked for that; `prefix` precedes the text if the token's
        bytes are not whole characters."""
        if self._as_token_ids or piece is None:
            return f"token_id:{token_id}"
        if isinstance(piece, str):
            return piece
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return prefix + piece.decode("utf-8", "backslashreplace")

    # ------------------------------------------------------------------ completions

    def completion(self, unplaced: UnplacedLogprobs) -> Pieces[str]:
        """The JSON of an object of four lists, with one element for each token whose place in the text is known. These
        tokens are removed from `unplaced`."""
        written = _Lists("text_offset", "token_logprobs", "tokens", "top_logprobs")
        logprobs, places, known = unplaced.entries, unplaced.places, iter(unplaced.offsets)
        num_written = num_pending = 0
        for token_id, piece, place in zip(unplaced.token_ids, unplaced.pieces, logprobs.positions(), strict=True):
            offset = next(known, None)
            if offset is None:
                if not places.is_place_known(piece):
                    break
                offset = places.place(piece)
            num_written += 1
            value, top = None, None
            token = self._token(token_id, piece, "bytes:")
            if place:
                value = finite(logprobs.values[place.start])
                # OpenAI's rule: the sampled token is always included, so there may be one more than asked for.
                top = {token: value}
                for one in place[1 : self._num_top + 1]:
                    other = self._token(logprobs.token_ids[one], logprobs.pieces[one], "bytes:")
                    if other in top:  # such as a second token without text
                        other = f"token_id:{logprobs.token_ids[one]}"
                    top[other] = finite(logprobs.values[one])
            written.append(offset, value, token, top)
            num_pending += 1 + len(place)
            if num_pending > PIECE:
                written.write()
                num_pending = 0
                yield
        unplaced.drop(num_written)
        return written.text()

    # ------------------------------------------------------------------ chat

    def chat(self, logprobs: Logprobs) -> Pieces[str]:
        """One object per token, with the most likely tokens at the token's position."""
        written = _Lists("content")
        num_pending = 0
        for place in logprobs.positions():
            likely = sorted(place, key=lambda one: -finite(logprobs.values[one]))[: self._num_top]
            top = [self._chat_token(logprobs, one) for one in likely]
            written.append({**self._chat_token(logprobs, place.start), "top_logprobs": top})
            num_pending += 1 + len(place)
            if num_pending > PIECE:
                written.write()
                num_pending = 0
                yield
        return written.text()

    def _chat_token(self, logprobs: Logprobs, one: int) -> dict[str, Any]:
        piece = logprobs.pieces[one]
        return {
            "token": self._token(logprobs.token_ids[one], piece),
            "logprob": finite(logprobs.values[one]),
            "bytes": list(piece) if isinstance(piece, bytes) else None,
        }


def prompt_logprobs(logprobs: Logprobs | None) -> Pieces[str]:
    """A prompt's log probabilities as vLLM writes them: per token a mapping from token id to log probability, rank and
    text."""
    if logprobs is None:
        return "null"
    texts: list[str] = []
    pending: list[dict[str, Any] | None] = []
    num_pending = 0
    unfinished = b""
    for place in logprobs.positions():
        pending.append({str(logprobs.token_ids[one]): _ranked(logprobs, one, unfinished) for one in place} or None)
        own = logprobs.pieces[place.start] if place else None
        unfinished = added_text(own, unfinished)[1] if isinstance(own, bytes) else b""
        num_pending += 1 + len(place)
        if num_pending > PIECE:
            texts.append(_elements(pending))
            pending.clear()
            num_pending = 0
            yield
    if pending:
        texts.append(_elements(pending))
    return f"[{','.join(texts)}]"


def _elements(values: list[Any]) -> str:
    """The elements of a JSON list in ASCII, without brackets."""
    return json.dumps(values, allow_nan=False, separators=(",", ":"))[1:-1]


def _ranked(logprobs: Logprobs, one: int, unfinished: bytes) -> dict[str, Any]:
    value, rank, piece = logprobs.values[one], logprobs.ranks[one], logprobs.pieces[one]
    text = added_text(piece, unfinished)[0] if isinstance(piece, bytes) else piece
    return {"logprob": finite(value), "rank": rank, "decoded_token": text}


class _Lists:
    """A JSON object of lists of equal length, which are written in pieces."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._pending: list[list[Any]] = [[] for _ in names]
        self._texts: list[list[str]] = [[] for _ in names]

    def append(self, *values: Any) -> None:
        """Append one value to each list."""
        for pending, value in zip(self._pending, values, strict=True):
            pending.append(value)

    def write(self) -> None:
        """Convert the values that were appended since the last call to JSON text."""
        for pending, texts in zip(self._pending, self._texts, strict=True):
            if pending:
                texts.append(_elements(pending))
                pending.clear()

    def text(self) -> str:
        """The JSON of the object."""
        self.write()
        lists = [f'"{name}":[{",".join(texts)}]' for name, texts in zip(self._names, self._texts, strict=True)]
        return f"{{{','.join(lists)}}}"
