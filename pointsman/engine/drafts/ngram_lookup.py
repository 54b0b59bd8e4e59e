"""NgramLookup: finds an earlier occurrence of a request's newest tokens, and expects the same continuation.

A request often generates text that its tokens already contain: a quoted passage, edited code, the turn before. The
lookup finds the longest suffix of `min_ngram` to `max_ngram` tokens that occurred earlier, and expects the tokens that
followed the occurrence (Saxena 2023, "Prompt Lookup Decoding"; vLLM's method "ngram"). Of several occurrences the last
one is used. While each new token is the expected one, the expected position advances and nothing is looked up. The
longer the match, the more likely is its continuation (as in SuffixDecoding, Oliaro et al. 2024).

In a text that does not repeat itself, most tokens complete an n-gram that has not occurred before. A filter recognizes
new n-grams without a search: it has a byte for each hash of an n-gram, and several times as many bytes as there are
tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FILTER_FACTOR = 4
"""Minimum number of bytes of the filter per token; a new filter has at least twice as many bytes."""
MULTIPLIER = 0x9E3779B1
MASK_64 = (1 << 64) - 1


class NgramLookup:
    """Looks up the continuation of one request's tokens among these tokens.

    Args:
        token_ids: [n] int32, all tokens of the request so far.
        min_ngram: number of tokens of the shortest suffix that is looked up.
        max_ngram: number of tokens of the longest suffix that is looked up.
    """

    __slots__ = (
        "_filter", "_key", "_mask", "_max_ngram", "_min_ngram", "_place", "_power", "_tokens", "length",
    )  # fmt: skip

    def __init__(self, token_ids: npt.NDArray[np.int32], min_ngram: int, max_ngram: int) -> None:
        self._min_ngram = min_ngram
        self._max_ngram = max_ngram
        self._tokens = array("i")
        self._tokens.frombytes(np.zeros(min_ngram, dtype=np.int32).tobytes())  # so that the first token ends an n-gram
        self._tokens.frombytes(token_ids.astype(np.int32).tobytes())
        self._power = pow(MULTIPLIER, min_ngram, MASK_64 + 1)
        self._key, self._mask, self._filter = self._make_filter()
        self._place = 0
        """Index of the token that is expected next, if `length` is not 0."""
        self.length = 0
        """Length of the match: number of newest tokens that equal the tokens before `_place`. 0: no token is
        expected."""
        self._look_up()

    def __len__(self) -> int:
        return len(self._tokens) - self._min_ngram

    def tolist(self) -> list[int]:
        """All tokens of the request."""
        return self._tokens[self._min_ngram :].tolist()

    def append(self, token_ids: Sequence[int]) -> list[int]:
        """Append new tokens of the request, and compare them with the expected tokens.

        Returns:
            For each position where a token was expected: the length of the match, negative if another token followed.
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

    def expected_tokens(self, count: int) -> array[int]:
        """The next `count` tokens if the match continues; call this only if there is a match (`length` is not 0).

        If fewer tokens follow the earlier occurrence, because it is near the end, they are repeated.
        """
        known = self._tokens[self._place : self._place + count]
        return known if len(known) == count else (known * (count // len(known) + 1))[:count]

    def _look_up(self) -> None:
        tokens = np.frombuffer(self._tokens, dtype=np.int32)[self._min_ngram :]
        place, self.length = look_up(tokens, self._min_ngram, self._max_ngram)
        self._place = self._min_ngram + place

    def _make_filter(self) -> tuple[int, int, bytearray]:
        """Make a filter of all n-grams so far, with space for more. Returns the newest n-gram's key, the bit mask that
        turns a key into an index of the filter, and the filter.

        The key of an n-gram is a polynomial of its tokens, so that each key is computed from the preceding n-gram's
        key.
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
    """Find the last earlier occurrence of the longest suffix of `min_ngram` to `max_ngram` tokens.

    Args:
        token_ids: [n] the tokens to search.

    Returns:
        The index of the token after the occurrence, and the length of the suffix; 0 and 0 if there is no occurrence.
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
