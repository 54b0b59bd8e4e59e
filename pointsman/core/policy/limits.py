"""Limits: lower the number of tokens that requests advance in a step.

A limit is a gate (`gate.py`) that also applies to running rows: one call on columns clips the tokens of all rows. A
limit with a method `step_budget` also sets the token budget of the step (`budget.py`). A limit can also forbid priority
preemption for a request that would make steps too long (`lacks_step_time`). The length limit of a request is not here:
it holds in every step, and the step itself applies it.

To add a limit, write a subclass of `Limit` (`gate.py`), and name it in `LIMITS` at the end of this file; or put it into
a package of its own (`registry.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.cache import KVCache
from pointsman.core.policy.budget import StepBudget
from pointsman.core.policy.decode_share import DecodeShare
from pointsman.core.policy.gate import Limit
from pointsman.core.policy.policy import Parameter
from pointsman.core.policy.prefill_gap import PrefillGap
from pointsman.core.policy.target_itl import TargetItl
from pointsman.core.policy.view import SchedulerView
from pointsman.core.state.batch import NOT_AHEAD, PREFILLING, Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request

Int64Array = npt.NDArray[np.int64]


class LongPrefillThreshold(Limit):
    """A request advances at most `tokens` tokens in a step with other requests, so that budget remains for these
    (vLLM's `long_prefill_token_threshold`)."""

    limits_drafts = True
    only_cuts = True

    name = "prefill-threshold"
    parameters = (Parameter("tokens", 512, 1, MAX_INT, tried=(256, 512, 1024, 2048), doc="per request and step"),)

    def __init__(self, tokens: int) -> None:
        self._least = self._threshold = tokens

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = self._least if num_requests > 1 else MAX_INT

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        np.minimum(want, self._threshold, out=want)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return min(want, self._threshold)


class FairLongPrefillThreshold(LongPrefillThreshold):
    """As `LongPrefillThreshold`, but never less than an even share of the budget, so that no budget remains unused
    (vLLM's adaptive threshold)."""

    name = ""

    def __init__(self, tokens: int, budget: int) -> None:
        super().__init__(tokens)
        self._budget = budget

    def open_step(self, num_requests: int) -> None:
        self._threshold = self.revision = max(self._least, self._budget // max(num_requests, 1))


class OneSampleInFlight(Limit):
    """A request without `runs_ahead` gets no token while one of its samples is in flight.

    `limits_decode` can stay False: steady decode is not used while such a request runs and steps are in flight.
    """

    only_cuts = True

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if batch.num_not_ahead:
            want[((batch.flags[rows] & NOT_AHEAD) != 0) & (batch.num_pending[rows] > 0)] = 0


class ChunkEnds(Limit):
    """A chunk of a prefill ends where the KV cache can keep the layers' states (`KVCache.cut`).

    The end of a chunk depends on the remaining budget of the step. So rows are cut in admission order, each to the
    budget that earlier rows leave. Decoding rows are not cut.
    """

    is_shared = True

    def __init__(self, kv: KVCache, budget: StepBudget, view: SchedulerView) -> None:
        self._kv = kv
        self._budget = budget
        self._view = view

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if not batch.num_prefilling:
            return
        requests = batch.members.requests
        for index in ((batch.flags[rows] & PREFILLING) != 0).nonzero()[0].tolist():
            asked, left = want.item(index), self._budget.tokens - int(want[:index].sum())
            if asked <= 0:
                continue
            if left <= 0:
                want[index] = 0
                continue
            row = rows.item(index)
            start = batch.num_computed_tokens.item(row)
            lacks = batch.num_tokens.item(row) + batch.num_pending.item(row) - start
            most = asked if asked < lacks else self._budget.tokens
            want[index] = self._kv.cut(requests[index], start, min(asked, left), most)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        if not self._kv.is_settled(self._view.match):
            return Deferral(Reason.STATE, 0)
        lacks = request._state.num_tokens - start
        most = want if want < min(lacks, self._view.budget) else self._budget.tokens
        allowed = self._kv.cut(request, start, want, most)
        return allowed or Deferral(Reason.BUDGET, self._kv.cut(request, start, lacks, most) - want)


LIMITS: dict[str, type[Limit]] = {
    limit.name: limit for limit in (LongPrefillThreshold, TargetItl, PrefillGap, DecodeShare)
}


def limits_of(config: SchedulerConfig, ends: Limit | None, encoder: Limit | None) -> list[Any]:
    """The limits of the configuration in the order in which they apply: limits set by knobs, `token_limits`, then
    `ends` (a `ChunkEnds`) and `encoder` (an `EncoderCache`) unless None."""
    limits: list[Any] = []
    threshold, budget = config.prefill_threshold, config.max_num_batched_tokens
    if threshold:
        fair = config.long_prefill_token_threshold_adaptive
        limits.append(FairLongPrefillThreshold(threshold, budget) if fair else LongPrefillThreshold(threshold))
    if config.max_steps_in_flight > 1:
        limits.append(OneSampleInFlight())
    limits += config.token_limits
    return limits + [limit for limit in (ends, encoder) if limit is not None]
