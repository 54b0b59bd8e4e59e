"""How many prompts may be half done? Caps on concurrent partial prefills (vLLM V0's names).

A prefill is partial while its request runs and not all tokens that it was admitted with are scheduled. Whoever can be
computed in the step that admits it never is, so short prompts overtake one that must wait for a cap: it is passed over.
It starts as soon as a partial prefill ends, being asked first, and after `max_overtakes` admissions of requests behind
it, it lets nobody pass any longer.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Blocked, Reason
from pointsman.core.state.request import Request


class PartialPrefills:
    """Who may begin a prefill that this step does not finish."""

    def __init__(self, config: SchedulerConfig, batch: Batch) -> None:
        self._batch = batch
        self._most = config.max_num_partial_prefills or MAX_INT
        self._most_long = config.max_long_partial_prefills or MAX_INT
        self._long_beyond = config.prefill_threshold
        self._patience = config.max_overtakes

    def ask(self, request: Request) -> Blocked | None:
        """Why a request may not begin beside those that have begun, or None."""
        missing = self._missing(request, (self._batch.flags & PREFILLING) != 0)
        if missing <= 0:
            return None
        return Blocked(Reason.PARTIAL_PREFILLS, missing, passes=request.num_overtaken < self._patience)

    def has_place(self, request: Request, gone: npt.NDArray[np.int64]) -> bool:
        """Whether it may begin, if the requests in the rows `gone` were no more."""
        partial = (self._batch.flags & PREFILLING) != 0
        partial[gone] = False
        return self._missing(request, partial) <= 0

    def _missing(self, request: Request, partial: npt.NDArray[np.bool_]) -> int:
        """How many partial prefills must end first; `partial` says which rows are."""
        missing = int(np.count_nonzero(partial)) + 1 - self._most
        if request.num_tokens > self._long_beyond:
            num_long = int(np.count_nonzero(self._batch.num_tokens[partial] > self._long_beyond))
            missing = max(missing, num_long + 1 - self._most_long)
        return missing


def make_partial_prefills(config: SchedulerConfig, batch: Batch) -> PartialPrefills | None:
    """The caps, if the configuration has any."""
    capped = config.max_num_partial_prefills is not None or config.max_long_partial_prefills is not None
    return PartialPrefills(config, batch) if capped else None
