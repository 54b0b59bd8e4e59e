"""How many tokens may this request advance now, and if none, why?

A limit clips what running rows want, for all of them at once, and what a request to be admitted wants. The token budget
and the length limit are not here: they belong to every step and are applied by the step itself.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.batch import Batch
from pointsman.core.config import SchedulerConfig
from pointsman.core.reason import Blocked
from pointsman.core.request import Request

Int64Array = npt.NDArray[np.int64]


class Limit(Protocol):
    """One bound on the tokens that a request advances in a step."""

    limits_decode: bool
    """Whether it may hold back a row that wants a single token; if not, steady decoding need not ask it."""

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` (int64, parallel to `rows`) in place."""

    def admit(self, request: Request, want: int) -> int | Blocked:
        """What remains of `want` for a request to be admitted, at least 1, or why it must wait."""


class LongPrefillThreshold:
    """No request advances more than `threshold` tokens in a step (vLLM's `long_prefill_token_threshold`)."""

    limits_decode = False

    def __init__(self, threshold: int) -> None:
        self._threshold = threshold

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, self._threshold, out=want)

    def admit(self, request: Request, want: int) -> int | Blocked:
        return min(want, self._threshold)


def make_limits(config: SchedulerConfig) -> list[Limit]:
    """The limits that the configuration asks for, in the order in which they apply."""
    limits: list[Limit] = []
    if config.long_prefill_token_threshold:
        limits.append(LongPrefillThreshold(config.long_prefill_token_threshold))
    return limits
