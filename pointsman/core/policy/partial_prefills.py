"""Caps on concurrent partial prefills (the knobs have vLLM V0's names).

A prefill is partial while its request runs, and some of the tokens that it had at its admission are not scheduled yet.
A prefill that fits the step that admits it is never partial. So a request that must wait for a cap is skipped, and
short prompts bypass it. The skipped request is checked before them, so it starts as soon as a partial prefill finishes.
After `max_overtakes` admissions of requests behind the skipped request, this request blocks the queue.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Gate
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request


class PartialPrefills(Gate):
    """Gate: defers a request if its prefill would be partial and a cap on partial prefills is reached."""

    def __init__(self, config: SchedulerConfig, batch: Batch) -> None:
        self._batch = batch
        self._max = config.max_num_partial_prefills or MAX_INT
        self._max_long = config.max_long_partial_prefills or MAX_INT
        self._long_beyond = config.prefill_threshold
        self._max_bypasses = config.max_overtakes

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        if start + want >= request.num_tokens:
            return want
        missing = self._num_that_must_finish(request, (self._batch.flags & PREFILLING) != 0)
        if missing <= 0:
            return want
        return Deferral(Reason.PARTIAL_PREFILLS, missing, request.num_bypassed >= self._max_bypasses)

    def may_begin_prefill(self, request: Request, preempted_rows: npt.NDArray[np.int64]) -> bool:
        """Whether the request could begin a partial prefill if the requests in `preempted_rows` ([n] int64) were
        preempted."""
        partial = (self._batch.flags & PREFILLING) != 0
        partial[preempted_rows] = False
        return self._num_that_must_finish(request, partial) <= 0

    def _num_that_must_finish(self, request: Request, partial: npt.NDArray[np.bool_]) -> int:
        """Number of partial prefills that must finish before the request may begin one, by the cap on all and, for a
        long prompt, the cap on long ones; 0 or less: the request may begin. `partial` ([rows] bool) is True for rows
        with a partial prefill."""
        missing = int(np.count_nonzero(partial)) + 1 - self._max
        if request.num_tokens > self._long_beyond:
            num_long = int(np.count_nonzero(self._batch.num_tokens[partial] > self._long_beyond))
            missing = max(missing, num_long + 1 - self._max_long)
        return missing


def make_partial_prefills(config: SchedulerConfig, batch: Batch) -> PartialPrefills | None:
    """The gate of the configured caps on partial prefills; None: no cap is configured."""
    capped = config.max_num_partial_prefills is not None or config.max_long_partial_prefills is not None
    return PartialPrefills(config, batch) if capped else None
