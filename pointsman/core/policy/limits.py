"""How many tokens may a request advance in this step?

A limit is a gate (`gate.py`) that also applies to running rows: it clips what they want, for all of them at once, on
columns. The length limit is not here: it holds in every step and is applied by the step itself.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Gate, View
from pointsman.core.state.batch import NOT_AHEAD, Batch
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class Limit(Gate):
    """One bound on the tokens that a request advances in a step."""

    limits_decode = False
    """Whether steady decoding, where every row wants a single token, must ask it."""
    limits_drafts = False
    """Whether it must be asked where decoding rows want drafts verified beside that token."""
    is_shared = False
    """Whether what one row takes is unavailable to others."""

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        """Lower `want` [rows] int64 in place."""


class LongPrefillThreshold(Limit):
    """No request advances more than `threshold` tokens in a step that it shares with others, so that it leaves them
    budget (vLLM's `long_prefill_token_threshold`)."""

    limits_drafts = True

    def __init__(self, threshold: int) -> None:
        self._least = self._threshold = threshold

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = self._least if num_requests > 1 else MAX_INT

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, self._threshold, out=want)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return min(want, self._threshold)


class FairLongPrefillThreshold(LongPrefillThreshold):
    """As `LongPrefillThreshold`, but never less than a fair share of the budget (vLLM's adaptive threshold): tokens
    that no other request can use would be left over."""

    def __init__(self, threshold: int, budget: int) -> None:
        super().__init__(threshold)
        self._budget = budget

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = max(self._least, self._budget // max(num_requests, 1))


class OneSampleInFlight(Limit):
    """A request that does not run ahead waits for its sample in flight.

    Steady decoding need not ask: with steps in flight it is not used where such a request runs.
    """

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if batch.num_not_ahead:
            want[((batch.flags[rows] & NOT_AHEAD) != 0) & (batch.num_pending[rows] > 0)] = 0


def make_limits(config: SchedulerConfig, encoder: Limit | None) -> list[Limit]:
    """The limits that the configuration asks for, in the order in which they apply; `encoder` is the last one."""
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
