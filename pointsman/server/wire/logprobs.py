"""Log probabilities: as columns between the processes, and as JSON of the two APIs.

The engine gives arrays for each position (`TokenLogprobs`): the token itself first, then the most likely ones in their
order (which may have the token itself among them; here it is once). A request may have hundreds of thousands of them.
As columns they cross in a tenth of the time that so many objects take, and their JSON is written in pieces
(`wire/pieces.py`).

JSON has no infinities, so an impossible token has -9999.0, as vLLM writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pointsman.server.wire.pieces import Pieces

if TYPE_CHECKING:
    from pointsman.engine.sampling.logprobs import TokenLogprobs

LEAST_LOGPROB = -9999.0
PIECE = 256
"""Tokens whose log probabilities are written in one piece, at least: a millisecond."""


def finite(logprob: float) -> float:
    """A log probability that JSON can hold; also of NaN."""
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB


@dataclass(slots=True)
class Logprobs:
    """Those of consecutive positions: for position i, `counts[i]` elements of each of the other lists."""

    counts: list[int] = field(default_factory=list)
    """0: the position has none, being the first of a prompt."""
    token_ids: list[int] = field(default_factory=list)
    """Of a position: the token itself first."""
    values: list[float] = field(default_factory=list)
    """Natural logarithms."""
    ranks: list[int | None] = field(default_factory=list)
    texts: list[str | None] = field(default_factory=list)

    @classmethod
    def of(cls, entries: Iterable[TokenLogprobs | None], text_of: Callable[[int], str | None]) -> Logprobs:
        """Those that the engine gives, one per position, and the texts of their tokens."""
        made = cls()
        for entry in entries:
            if entry is None:
                made.counts.append(0)
                continue
            token_ids, values = entry.token_ids.tolist(), entry.logprobs.tolist()
            ranks: list[int | None] = [entry.rank, *range(1, len(token_ids))]
            if token_ids.count(token_ids[0]) > 1:  # it is among the most likely ones
                again = token_ids.index(token_ids[0], 1)
                ranks[0] = again
                del token_ids[again], values[again], ranks[again]
            made.counts.append(len(token_ids))
            made.token_ids += token_ids
            made.values += values
            made.ranks += ranks
        made.texts = list(map(text_of, made.token_ids))
        return made

    def __len__(self) -> int:
        return len(self.counts)

    def extend(self, later: Logprobs) -> None:
        """Append those of the positions behind these."""
        self.counts += later.counts
        self.token_ids += later.token_ids
        self.values += later.values
        self.ranks += later.ranks
        self.texts += later.texts

    def positions(self) -> Iterator[range]:
        """Of each position: where its elements are."""
        start = 0
        for count in self.counts:
            yield range(start, start + count)
            start += count


class LogprobWriter:
    """Writes the log probabilities of one request as JSON.

    Args:
        num_top: most likely tokens per position.
        as_token_ids: whether tokens are written as "token_id:17", because several may have the same text.
    """

    def __init__(self, num_top: int, *, as_token_ids: bool = False) -> None:
        self._num_top = num_top
        self._as_token_ids = as_token_ids

    def _tokens(self, logprobs: Logprobs, place: range) -> list[str]:
        """Those of a position, in the form that the client asked for."""
        ids, texts = logprobs.token_ids[place.start : place.stop], logprobs.texts[place.start : place.stop]
        return [self._token(token_id, text) for token_id, text in zip(ids, texts, strict=True)]

    def _token(self, token_id: int, text: str | None) -> str:
        return f"token_id:{token_id}" if self._as_token_ids or text is None else text

    # ------------------------------------------------------------------ completions

    def completion(
        self, token_ids: Sequence[int], logprobs: Logprobs, *, offset: int = 0, first_text: str | None = None
    ) -> Pieces[tuple[str, int]]:
        """An object of four lists, one element per token; and the characters of these tokens.

        Args:
            token_ids: the tokens.
            logprobs: of as many positions.
            offset: characters of the text before the first token.
            first_text: the text of a token without log probabilities.
        """
        written = _Lists("text_offset", "token_logprobs", "tokens", "top_logprobs")
        end, num_pending = offset, 0
        for token_id, place in zip(token_ids, logprobs.positions(), strict=True):
            value, top = None, None
            text = self._token(token_id, first_text)
            if place:
                values = [finite(one) for one in logprobs.values[place.start : place.stop]]
                tokens = self._tokens(logprobs, place)
                text, value = tokens[0], values[0]
                # OpenAI's rule: the sampled token is always included, so there may be one more than asked for.
                top = dict(zip(tokens[: self._num_top + 1], values, strict=False))
            written.append(end, value, text, top)
            end += len(text)
            num_pending += 1 + len(place)
            if num_pending > PIECE:
                written.write()
                num_pending = 0
                yield
        return written.text(), end - offset

    # ------------------------------------------------------------------ chat

    def chat(self, logprobs: Logprobs) -> Pieces[str]:
        """One object per token, with the most likely ones in its place."""
        written = _Lists("content")
        num_pending = 0
        for place in logprobs.positions():
            values = [finite(one) for one in logprobs.values[place.start : place.stop]]
            tokens = self._tokens(logprobs, place)
            likely = sorted(range(len(values)), key=lambda one: -values[one])[: self._num_top]
            top = [_chat_token(tokens[one], values[one]) for one in likely]
            written.append({**_chat_token(tokens[0], values[0]), "top_logprobs": top})
            num_pending += 1 + len(place)
            if num_pending > PIECE:
                written.write()
                num_pending = 0
                yield
        return written.text()


def _chat_token(text: str, value: float) -> dict[str, Any]:
    return {"token": text, "logprob": value, "bytes": list(text.encode())}


def prompt_logprobs(logprobs: Logprobs | None) -> Pieces[str]:
    """Those of a prompt as vLLM writes them: a list of token id -> its log probability, rank and text."""
    if logprobs is None:
        return "null"
    texts: list[str] = []
    pending: list[dict[str, Any] | None] = []
    num_pending = 0
    for place in logprobs.positions():
        pending.append({str(logprobs.token_ids[one]): _ranked(logprobs, one) for one in place} or None)
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
    """As in a JSON list. All of it is ASCII, as in events."""
    return json.dumps(values, allow_nan=False, separators=(",", ":"))[1:-1]


def _ranked(logprobs: Logprobs, one: int) -> dict[str, Any]:
    value, rank, text = logprobs.values[one], logprobs.ranks[one], logprobs.texts[one]
    return {"logprob": finite(value), "rank": rank, "decoded_token": text}


class _Lists:
    """A JSON object of lists of equal length, which are written in pieces."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._pending: list[list[Any]] = [[] for _ in names]
        self._texts: list[list[str]] = [[] for _ in names]

    def append(self, *values: Any) -> None:
        """One element of each list."""
        for pending, value in zip(self._pending, values, strict=True):
            pending.append(value)

    def write(self) -> None:
        """Turn what was appended into text."""
        for pending, texts in zip(self._pending, self._texts, strict=True):
            if pending:
                texts.append(_elements(pending))
                pending.clear()

    def text(self) -> str:
        """The object."""
        self.write()
        lists = [f'"{name}":[{",".join(texts)}]' for name, texts in zip(self._names, self._texts, strict=True)]
        return f"{{{','.join(lists)}}}"
