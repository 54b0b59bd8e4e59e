"""Trail: a request's tokens, and what is expected next because it followed the same tokens before.

What a request generates often occurs in its tokens already: in a passage that it quotes, in code that it edits, in the
turn before. So the longest suffix of `min_ngram` to `max_ngram` tokens that occurred earlier is looked
up, and what followed it there is expected (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method "ngram"). Of several
places the last is taken. As long as the tokens that come are those expected, the place moves on with them and nothing
is looked up: the longer that goes on, the surer is what follows (as in SuffixDecoding, Oliaro et al. 2024).

Most tokens of a text that does not repeat itself end no n-gram that was there before. A filter knows that: a byte for
each hash of an n-gram, several times as many as there are tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FILTER_FACTOR = 4
"""Bytes of the filter for each token, at least; twice as many when it is made."""
MULTIPLIER = 0x9E3779B1
MASK_64 = (1 << 64) - 1


class Trail:
    """The tokens of one request.

    Args:
        token_ids: [n] int32, all that are known.
        min_ngram: tokens of the shortest suffix from which drafts are taken.
        max_ngram: of the longest that is looked for.
    """

    __slots__ = (
        "_filter", "_key", "_mask", "_max_ngram", "_min_ngram", "_place", "_power", "_tokens", "length",
    )  # fmt: skip

    def __init__(self, token_ids: npt.NDArray[np.int32], min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._tokens = array("i")
        self._tokens.frombytes(np.zeros(min_ngram, dtype=np.int32).tobytes())  # so that there always is an n-gram
        self._tokens.frombytes(token_ids.astype(np.int32).tobytes())
        self._power = pow(MULTIPLIER, min_ngram, MASK_64 + 1)
        self._key, self._mask, self._filter = self._make_filter()
        self._place = 0
        """Of the token that is expected next, if `length` is not 0."""
        self.length = 0
        """How many of the newest tokens stand before that place, too, as far as is known; 0: nothing is expected."""
        self._look_up()

    def __len__(self) -> int:
        return len(self._tokens) - self._min_ngram

    def tolist(self) -> list[int]:
        """All tokens."""
        return self._tokens[self._min_ngram :].tolist()

    def go_on(self, token_ids: Sequence[int]) -> list[int]:
        """Append tokens.

        Returns:
            For each position where a token was expected: the length of the match, negative if another token came.
        """
        tokens, judged = self._tokens, []
        was_there = 0
        for token_id in token_ids:
            if self.length:
                if tokens[self._place] == token_id:
                    judged.append(self.length)
                    self._place += 1
                    self.length += 1
                else:
                    judged.append(-self.length)
                    self.length = 0
            oldest = tokens[-self._min_ngram]
            tokens.append(token_id)
            self._key = key = (self._key * MULTIPLIER + token_id - oldest * self._power) & MASK_64
            key &= self._mask
            was_there = self._filter[key]
            self._filter[key] = 1
        if was_there and not self.length:
            self._look_up()
        if len(tokens) * FILTER_FACTOR > len(self._filter):
            self._key, self._mask, self._filter = self._make_filter()
        return judged

    def expected(self, count: int) -> array[int]:
        """The next `count` tokens, if it goes on as before; `length` is not 0.

        Where the place is so near the end that less is known, the text repeats itself from there on.
        """
        known = self._tokens[self._place : self._place + count]
        return known if len(known) == count else (known * (count // len(known) + 1))[:count]

    def _look_up(self) -> None:
        tokens = np.frombuffer(self._tokens, dtype=np.int32)[self._min_ngram :]
        place, self.length = look_up(tokens, self._min_ngram, self._max_ngram)
        self._place = self._min_ngram + place

    def _make_filter(self) -> tuple[int, int, bytearray]:
        """A filter with all n-grams so far, large enough for a while: the newest n-gram's key, the mask of keys, the
        filter.

        The key of an n-gram is a polynomial of its tokens, so that the next follows from the one before.
        """
        size = 1 << (2 * FILTER_FACTOR * len(self._tokens) + 511).bit_length()
        mask = size - 1
        tokens = np.frombuffer(self._tokens, dtype=np.int32).astype(np.uint64)
        num_places = len(tokens) - self._min_ngram + 1
        keys = np.zeros(num_places, dtype=np.uint64)
        for place in range(self._min_ngram):
            keys = keys * np.uint64(MULTIPLIER) + tokens[place : place + num_places]
        made = bytearray(size)
        np.frombuffer(made, dtype=np.uint8)[(keys & np.uint64(mask)).astype(np.int64)] = 1
        return int(keys[-1]), mask, made


def look_up(token_ids: npt.NDArray[np.int32], min_ngram: int, max_ngram: int) -> tuple[int, int]:
    """Where the longest suffix of `min_ngram` to `max_ngram` tokens occurred before.

    Args:
        token_ids: [n].

    Returns:
        The place behind the last such occurrence, and the suffix's length; 0 and 0 if there is none.
    """
    last = len(token_ids) - 1
    if last < min_ngram:
        return 0, 0
    ends = (token_ids[:last] == token_ids[last]).nonzero()[0]
    place, length = 0, 0
    for size in range(1, min(max_ngram, last) + 1):
        if size > 1:
            ends = ends[ends >= size - 1]
            ends = ends[token_ids[ends - (size - 1)] == token_ids[last - (size - 1)]]
        if not len(ends):
            break
        if size >= min_ngram:
            place, length = int(ends[-1]) + 1, size
    return place, length
