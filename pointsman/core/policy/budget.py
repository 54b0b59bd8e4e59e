"""The token budget: the maximum number of tokens that a step computes.

The budget is `max_num_batched_tokens`, unless a policy with a `step_budget` lowers it (`limits.py`). The budget is
never less than one token for each running request, so that no decode waits for a prefill.
"""

from __future__ import annotations

from typing import Protocol

from pointsman.core.config import SchedulerConfig
from pointsman.core.policy.gate import Gate
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus


class SetsBudget(Protocol):
    """A policy that lowers the token budget of a step."""

    name: str

    def step_budget(self, most: int, view: View) -> int:
        """Number of tokens that the next step may compute; `most` is the configured budget."""

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        """Whether steps would take too long if the request started, see `Limit.lacks_step_time`."""


class StepBudget:
    """Holds the token budget of the step that is being scheduled."""

    __slots__ = ("full", "policies", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self.full = config.max_num_batched_tokens
        """The configured budget of every step, in tokens."""
        self.tokens = self.full
        """The budget of the step that is being scheduled, in tokens."""
        self.policies: tuple[SetsBudget, ...] = ()

    def set_policies(self, policies: tuple[SetsBudget, ...]) -> None:
        """Set the policies that determine the budget of each step."""
        self.policies = policies

    def open_step(self, view: View) -> None:
        """Set the budget of the step from the policies. Called once in each step, and again after priority
        preemption."""
        full = tokens = self.full
        for policy in self.policies:
            wanted = policy.step_budget(full, view)
            if wanted < tokens:
                tokens = wanted
        self.tokens = full if tokens == full else min(max(tokens, len(view.rows), 1), full)


class TokenBudget(Gate):
    """Gate: cuts a request to the remaining token budget. A request that may not be cut waits for enough budget."""

    def __init__(self, config: SchedulerConfig, step: StepBudget) -> None:
        self._step = step
        self._chunked = config.enable_chunked_prefill
        self._first_chunk_only = config.first_chunk_only
        self.asks_whole = config.admission_charge != "uncached"
        self.required = 0
        """After a deferral: the token budget that the deferred request needs."""

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        budget = view.budget
        if want <= budget and not self.asks_whole:
            return want
        whole = request._state.num_tokens if self.asks_whole else want
        if whole > budget and self._must_fit(request, budget):
            self.required = min(whole, self._step.full)
            return Deferral(Reason.BUDGET, whole - budget)
        return min(want, budget)

    def must_start_whole(self, request: Request) -> bool:
        """Whether all uncached tokens of the request must fit one step. A request that ran before may always be
        chunked."""
        if self._chunked:
            return False
        state = request._state
        return state.status is not RequestStatus.PREEMPTED and not state.num_output_tokens

    def may_have_to_fit(self, request: Request) -> bool:
        """Whether the request may have to fit the remaining budget as a whole; cache hits are not considered."""
        return self.must_start_whole(request) or self._first_chunk_only

    def _must_fit(self, request: Request, budget: int) -> bool:
        """Whether the request may not be cut to the remaining `budget`."""
        taken = budget < self._step.tokens
        return self.must_start_whole(request) or (taken and self._first_chunk_only)
