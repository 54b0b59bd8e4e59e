"""Repetition detection: a stop condition for models that repeat a phrase until their tokens run out.

The definition is vLLM's: the output ends in `min_count` copies, one after the other, of some pattern of
`min_pattern_size` to `max_pattern_size` tokens. This holds for a pattern of p tokens if each of the last p x (min_count
- 1) tokens equals the token p positions before it. So it is enough to count, for every p, the consecutive newest tokens
that equal the token p positions before. A new token costs three array operations over p, for any output and pattern.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

REPETITION_DETECTED = "repetition_detected"
"""The `stop_reason` of a request that finished because of a repetition, as in vLLM."""
_MAX_INT = 2**31 - 1
_NO_TOKEN = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetectionParams:
    """Defines the repetitions that finish a request; the names and their meaning are those of vLLM.

    Raises:
        ValueError: a field is out of range, or the three fields contradict each other.
    """

    max_pattern_size: int = 0
    """Number of tokens of the longest pattern to detect; 0: no pattern is detected."""
    min_pattern_size: int = 0
    """Number of tokens of the shortest pattern to detect; 0 means 1."""
    min_count: int = 0
    """Number of consecutive occurrences of a pattern at the end of the output that finish the request, at least 2."""

    def __post_init__(self) -> None:
        for name in ("max_pattern_size", "min_pattern_size", "min_count"):
            value: object = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_INT:
                raise ValueError(f"repetition_detection: {name} is {value!r}; it must be an integer of 0 or more")
        if self.min_pattern_size > self.max_pattern_size:
            raise ValueError(
                f"repetition_detection: min_pattern_size is {self.min_pattern_size}, more than max_pattern_size "
                f"{self.max_pattern_size}; lower min_pattern_size, or set both to 0 to turn the detection off"
            )
        if self.max_pattern_size and self.min_count < 2:
            raise ValueError(
                f"repetition_detection: min_count is {self.min_count}; it must be at least 2 (or set max_pattern_size "
                "to 0 to turn the detection off)"
            )


class RepetitionWatch:
    """Watches one output of at most `max_tokens` tokens for repetitions. A pattern that cannot occur `min_count` times
    in these tokens has no counter."""

    __slots__ = ("_end", "_first", "_max_size", "_needed", "_runs", "_tokens", "num_seen")

    def __init__(self, params: RepetitionDetectionParams, max_tokens: int) -> None:
        self._max_size = min(params.max_pattern_size, max_tokens // params.min_count)
        self._first = max(params.min_pattern_size, 1)
        sizes = np.arange(1, self._max_size + 1, dtype=np.int64)
        self._needed: npt.NDArray[np.int64] = sizes * (params.min_count - 1)
        self._runs: npt.NDArray[np.int64] = np.zeros(self._max_size, dtype=np.int64)
        # The newest `_max_size` tokens end at `_end`, so that the tokens 1, 2, ... positions back are one slice.
        self._tokens: npt.NDArray[np.int64] = np.full(max(2 * self._max_size, 1), _NO_TOKEN, dtype=np.int64)
        self._end = self._max_size
        self.num_seen = 0

    def observe(self, token_id: int) -> int | None:
        """Append a token to the watched output. Returns the size of the shortest pattern that is repeated often enough
        at the output's end; None: no pattern is."""
        self.num_seen += 1
        size = self._max_size
        if size == 0:
            return None
        if self._end == len(self._tokens):
            self._tokens[:size] = self._tokens[size:]
            self._end = size
        back = self._tokens[self._end - size : self._end][::-1]
        self._runs += 1
        self._runs *= back == token_id
        self._tokens[self._end] = token_id
        self._end += 1
        found = (self._runs >= self._needed)[self._first - 1 :].nonzero()[0]
        return int(found[0]) + self._first if len(found) else None
