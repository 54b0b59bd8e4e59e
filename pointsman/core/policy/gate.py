"""Gates: may this waiting request start now, and with how many tokens; if not, why, and does it block the queue?

Every condition of an admission answers this one question: the token budget, the limits (`limits.py`), the embeddings
of encoder inputs (`encoder_budget.py`), the caps on partial prefills (`partial_prefills.py`), the adapter slots
(`adapters.py`), and the blocks that must stay free (`reserve.py`). `step/admission.py` asks them in a fixed order.
Each lowers the number of tokens or defers the request; the first deferral is the reason that is reported.

A limit on running rows answers the same question for all of them at once, on columns: see `Limit` in `limits.py`.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from pointsman.core.config import SchedulerConfig
from pointsman.core.kv.block_pool import BlockPool
from pointsman.core.state.batch import Batch
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus

Int64Array = npt.NDArray[np.int64]


class View(Protocol):
    """What a gate may read: the step so far, the running requests, and what is free.

    Columns have a row for each running request, in admission order, and are copies.
    """

    @property
    def now(self) -> float:
        """Time of the step, in seconds on the caller's clock."""

    @property
    def budget(self) -> int:
        """Remaining token budget of the step."""

    @property
    def num_running(self) -> int:
        """Requests that hold a row, those admitted in this step included."""

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no request holds, cached ones included."""

    @property
    def num_owed_blocks(self) -> int:
        """Blocks that running requests still need for tokens that they already have (partial prefills)."""

    @property
    def num_shared_blocks(self) -> int:
        """Blocks of the cached prefix of the checked request that other requests hold, which cost nothing."""

    @property
    def num_tokens(self) -> Int64Array:
        """[running] int64: known tokens of each running request: its prompt and its output so far."""

    @property
    def num_computed_tokens(self) -> Int64Array:
        """[running] int64: computed tokens of each running request: the maximum that a preemption would cost."""

    @property
    def num_blocks(self) -> Int64Array:
        """[running] int64: blocks in the table of each running request, shared ones included."""

    @property
    def priority(self) -> Int64Array:
        """[running] int64: smaller is more urgent."""


class AdmissionView:
    """The `View` that an admission keeps up to date."""

    __slots__ = ("_batch", "_pool", "budget", "now", "num_owed_blocks", "num_running", "num_shared_blocks")

    def __init__(self, batch: Batch, pool: BlockPool) -> None:
        self._batch = batch
        self._pool = pool
        self.now = 0.0
        self.budget = 0
        self.num_running = 0
        self.num_owed_blocks = 0
        self.num_shared_blocks = 0

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_tokens(self) -> Int64Array:
        return self._batch.num_tokens[self._batch.members.rows]

    @property
    def num_computed_tokens(self) -> Int64Array:
        return self._batch.num_computed_tokens[self._batch.members.rows]

    @property
    def num_blocks(self) -> Int64Array:
        return self._batch.num_slots[self._batch.members.rows] // self._batch.block_size

    @property
    def priority(self) -> Int64Array:
        return self._batch.priority[self._batch.members.rows]


class Gate:
    """One condition of an admission. The base admits everything and has no state."""

    revision = 0
    """Changes whenever `check` may answer otherwise for the same request, tokens and free blocks. The verdict on a
    blocked head is kept until a revision changes."""

    def open_step(self, num_requests: int) -> None:
        """A step begins, with `num_requests` requests queued or running; the step does not change the number."""

    def open_queue(self) -> None:
        """The step begins to check the queue, from its head on and in order."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        """How many of `want` tokens from position `start` on the request may compute in this step, at least 1 if `want`
        is; or why it is deferred. Any state it changes lasts for the step only."""
        return want

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        """The request computes these known tokens: it was admitted, or it is a running row with a partial prefill. At
        most what `check` or `clip` allowed."""

    def release(self, request: Request) -> None:
        """The request has lost its row."""

    def horizon(self, num_steps: int) -> int:
        """For how many of the next `num_steps` steps, in which every running request decodes one token and nothing
        else happens, a deferral of this gate stays a deferral."""
        return num_steps


class TokenBudget(Gate):
    """The remaining token budget. A request that may not be cut to it waits for a step with enough."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._full = config.max_num_batched_tokens
        self._chunked = config.enable_chunked_prefill
        self._first_chunk_only = config.first_chunk_only
        self.asks_whole = config.admission_charge != "uncached"
        self.required = 0
        """After a deferral: tokens that a step must have left for the request."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        budget = view.budget
        if want <= budget and not self.asks_whole:
            return want
        whole = request._state.num_tokens if self.asks_whole else want
        if whole > budget and self._must_fit(request, budget):
            self.required = min(whole, self._full)
            return Deferral(Reason.BUDGET, whole - budget)
        return min(want, budget)

    def must_start_whole(self, request: Request) -> bool:
        """Whether all its uncached tokens must fit one step. A resumed request may always be chunked."""
        return not self._chunked and request._state.status is not RequestStatus.PREEMPTED

    def may_have_to_fit(self, request: Request) -> bool:
        """Whether it may have to fit the remaining budget, as if nothing were cached."""
        return self.must_start_whole(request) or self._first_chunk_only or self.asks_whole

    def _must_fit(self, request: Request, budget: int) -> bool:
        """Whether it may not be cut to the remaining `budget`."""
        taken = budget < self._full
        return self.must_start_whole(request) or (taken and self._first_chunk_only)
