"""How many tokens may this request advance now, and if none, why?

A limit clips what running rows want, for all of them at once, and what a request to be admitted wants. The token budget
and the length limit are not here: they belong to every step and are applied by the step itself.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.state.batch import NOT_AHEAD, Batch
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Blocked
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class Limit(Protocol):
    """One bound on the tokens that a request advances in a step."""

    limits_decode: bool
    """Whether steady decoding, where every row wants a single token, must ask it."""
    limits_drafts: bool
    """Whether it must be asked where rows that decode want their drafts verified beside that token."""
    is_shared: bool
    """Whether what one row takes is lacking to others."""
    revision: int
    """Changes whenever `admit` may answer otherwise than before for the same arguments."""

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` (int64, parallel to `rows`) in place."""

    def admit(self, request: Request, start: int, want: int) -> int | Blocked:
        """What remains of `want` tokens from `start` on for a request to be admitted, at least 1; or why it waits."""

    def take(self, request: Request, start: int, num_tokens: int) -> None:
        """A row that computes known tokens gets these, no more than `clip` or `admit` left of what it wanted."""


@runtime_checkable
class FollowsLoad(Protocol):
    """A limit that depends on how many requests share a step."""

    def open_step(self, num_requests: int) -> None:
        """A step begins, with so many requests queued or running; what they do in it does not change the number."""


class LongPrefillThreshold:
    """No request advances more than `threshold` tokens in a step that others are there for, so that it leaves them
    room (vLLM's `long_prefill_token_threshold`)."""

    limits_decode = False
    limits_drafts = True
    is_shared = False
    revision = 0

    def __init__(self, threshold: int) -> None:
        self._least = self._threshold = threshold

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = self._least if num_requests > 1 else MAX_INT

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, self._threshold, out=want)

    def admit(self, request: Request, start: int, want: int) -> int | Blocked:
        return min(want, self._threshold)

    def take(self, request: Request, start: int, num_tokens: int) -> None:
        """It keeps no account."""


class FairLongPrefillThreshold(LongPrefillThreshold):
    """As `LongPrefillThreshold`, but never less than a fair share of the budget (vLLM's adaptive threshold): tokens
    that nobody else is there to use would be left over."""

    def __init__(self, threshold: int, budget: int) -> None:
        super().__init__(threshold)
        self._budget = budget

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = max(self._least, self._budget // max(num_requests, 1))


class OneSampleInFlight:
    """A request that does not run ahead waits for the sample of it that is in flight.

    Steady decoding need not ask: with steps in flight it is not taken where such a request runs.
    """

    limits_decode = False
    limits_drafts = False
    is_shared = False
    revision = 0

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if batch.num_not_ahead:
            want[((batch.flags[rows] & NOT_AHEAD) != 0) & (batch.num_pending[rows] > 0)] = 0

    def admit(self, request: Request, start: int, want: int) -> int | Blocked:
        return want

    def take(self, request: Request, start: int, num_tokens: int) -> None:
        """It keeps no account."""


def make_limits(config: SchedulerConfig, encoder: EncoderCache | None) -> list[Limit]:
    """The limits that the configuration asks for, in the order in which they apply."""
    limits: list[Limit] = []
    threshold, budget = config.prefill_threshold, config.max_num_batched_tokens
    if threshold:
        fair = config.long_prefill_token_threshold_adaptive
        limits.append(FairLongPrefillThreshold(threshold, budget) if fair else LongPrefillThreshold(threshold))
    if config.max_steps_in_flight > 1:
        limits.append(OneSampleInFlight())
    if encoder is not None:
        limits.append(encoder)
    return limits
