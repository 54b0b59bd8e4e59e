"""The limit "target-itl": limits the prompt tokens of a step so that the step takes at most a target time, which is the
gap between output tokens.

`StepTimes` (`step_times.py`) learns how long a step takes; `TargetItl` is the limit that uses these predictions.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pointsman.core.policy.gate import Int64Array, Limit
from pointsman.core.policy.policy import Parameter, StepLoad
from pointsman.core.policy.step_times import StepTimes
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.events import Preempted
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import PreemptionCause, RequestStatus

KEPT = 16
"""Number of steps for which the decision to defer the head of the queue for step time is kept."""
KEPT_FOR_QUEUE = 0.5
"""Share of the time for prompt tokens that is kept, while requests wait, for prompts that fit into this time as a
whole."""
SCARCE_STEPS = 64
"""Number of steps with evenly spread prompt tokens after a step in which the queue waited for sequence slots or
blocks."""
SPREAD, MIN_SPREAD = 1.2, 0.35
"""While prompt tokens are spread, a step computes at most `SPREAD` times their mean number per step. The share
`MIN_SPREAD` of the time for prompt tokens is always available, so that a long prompt keeps a third of its speed."""


class TargetItl(Limit):
    """Limits the prompt tokens of each step so that it takes at most `seconds`, learned from step times.

    The rule: the time of a step is predicted (`StepTimes`). The step computes the prompt tokens that fit the target at
    the 99th percentile beside decode, but at most `max_num_batched_tokens`. Fewer fit beside many requests, beside long
    contexts, and late in a long prompt. Sarathi-Serve (Agrawal et al., 2024) finds one budget for a target with a
    profile beforehand; here the budget is learned, and follows the load. At first a step computes at most 256 prompt
    tokens, later at most twice the observed maximum.

    While requests wait, running prefills use half of the time for prompt tokens. The other half is for prompts that fit
    into it as a whole, so that a short prompt does not wait until a long prompt is computed. The long prompt loses at
    most half of its speed (a bounded form of shortest remaining processing time, Schrage 1968). If the prompt at the
    head of the queue does not fit, no time is kept until it has started.

    Where the queue waits for sequence slots or blocks, it waits for decode, not for prompt tokens. Then prompt tokens
    are spread: a step computes at most `SPREAD` times their mean number per step, or the number that can be computed
    during the memory reads of decode. As reads and computing overlap, equal steps take less time in total than short
    and long steps. `MIN_SPREAD` bounds the cost for a long prompt.

    If decode alone would take longer than the target with one more request, this request waits, with
    `Reason.STEP_TIME`. A target that even few requests exceed (`UNREACHABLE`) defers no request.

    Use it where outputs are streamed, and prompts differ much in length. Not for offline work, where gaps do not matter
    and larger steps are a little faster.

    Bounds: every running request advances at least one token. The oldest prefill advances at least `least` tokens a
    step, if `max_num_batched_tokens` suffices beside the tokens of other requests; so n tokens take at most n / least
    steps. The head of the queue waits for step time at most `patience` seconds in a row. Then it starts with `least`
    tokens, even if the target is missed.
    """

    name = "target-itl"
    version = 4
    is_shared = True
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("seconds", 0.05, 1e-4, 60.0, tried=(0.025, 0.05, 0.1), doc="target of a step, so of gaps (ITL)"),
        Parameter("least", 64, 1, MAX_INT, doc="prompt tokens that a step computes even if it takes longer"),
        Parameter("patience", 10.0, 0.0, MAX_INT, doc="seconds after which the head of the queue starts all the same"),
    )

    def __init__(self, seconds: float = 0.05, least: int = 64, patience: float = 10.0) -> None:
        self._target, self._least, self._patience = seconds, least, patience
        self._reset()

    def _reset(self) -> None:
        self.times = StepTimes(self._target)
        self._num_departures = 0
        self._key: tuple[int, int] | None = None
        self._tokens = self._max_running_tokens = 0
        self._left = self._left_at_first = 0.0
        self._kept_seconds = 0.0
        """Time of the step that is kept for waiting requests, in seconds."""
        self._is_cut = False
        """Whether a running prefill is cut, so that it continues after the step."""
        self._is_head_long = False
        """Whether the prompt at the head of the queue takes longer than the time kept for waiting requests."""
        self._had_queue = self._was_checked = False
        """Whether requests waited when the last step began, and whether `check` was called for one of them."""
        self._has_preempted = False
        """Whether requests were preempted for a request that has not started yet. This request is not deferred, or the
        preemption would be in vain."""
        self._num_spread_steps = 0
        """Number of remaining steps with spread prompt tokens."""
        self._is_open = False
        """Whether the step has the whole budget, since no request decodes in it."""
        self._limit = self._target
        self._is_full = self._is_decided = self._has_deferred = False
        self._num_kept = 0
        self._num_requests = self._num_future_tokens = 0

    def attach(self, view: View) -> None:
        self._view = view
        self._reset()

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        if not (self._is_open and load.num_prefill_tokens):  # such a step may take many times the target
            self.times.observe(load, seconds)

    def on_preempted(self, event: Preempted) -> None:
        self._has_preempted |= event.cause is PreemptionCause.DISPLACED

    def release(self, request: Request) -> None:
        self._num_departures += 1

    # ------------------------------------------------------------------ the step

    def step_budget(self, most: int, view: View) -> int:
        """Token budget of the step. It is kept while the queue is blocked and the running requests stay the same. So
        the head of the queue need not be checked again, and fast-forward is possible."""
        num_prefilling = view.num_prefilling
        self._is_open = num_prefilling == len(view.rows) and (num_prefilling > 0 or view.num_waiting > 0)
        if self._is_open:
            self._key, self._had_queue, self._num_spread_steps = None, False, 0
            return most
        if num_prefilling:
            self._key = None
        else:
            if not view.num_waiting:
                self._is_decided = False
                return most
            key = (self._num_departures, len(view.rows))
            self._num_kept += self._has_deferred
            if key == self._key and self._num_kept < KEPT:
                self._left, self._is_decided = self._left_at_first, True
                return self._tokens
            self._key = key
        return self._decide_budget(most, view)

    def _decide_budget(self, most: int, view: View) -> int:
        times = self.times
        times.refit()
        known, computed = view.num_tokens, view.num_computed_tokens
        num_requests = len(known)
        num_known = int(np.add.reduce(known))
        limit = times.limit
        num_context = int(np.add.reduce(computed)) + num_requests
        alone = times.decode_seconds(num_requests, num_context)
        beside = times.share * alone
        left = self._prompt_seconds(limit - beside, alone, view)
        is_spread = left < limit - beside
        num_prefilling = view.num_prefilling
        has_queue = view.num_waiting > 0
        self._had_queue, self._was_checked = has_queue, False
        self._left = self._left_at_first = left
        self._kept_seconds = KEPT_FOR_QUEUE * left if num_prefilling and has_queue and not self._is_head_long else 0.0
        running, self._is_cut = 0, False  # prompt tokens of running requests, beyond one for each
        if num_prefilling:
            left -= self._kept_seconds
            lacks = known - computed - 1
            for index in (lacks > 0).nonzero()[0].tolist():
                lack, start = int(lacks[index]), int(computed[index])
                fitting = times.fitting_tokens(left, start)
                if fitting < lack:
                    running += fitting
                    left = 0.0
                    self._is_cut = True
                    break
                running += lack
                left -= times.prefill_seconds(lack, start)
            left += self._kept_seconds
        tokens = running + times.fitting_tokens(left, 0)
        # The step is not full if few tokens fit only because larger steps were never observed, or because tokens are
        # spread.
        self._is_full = tokens < min(self._least, times.max_predicted_tokens) and not is_spread
        max_prefill = max(min(tokens, times.max_predicted_tokens), self._least)
        self._tokens = min(num_requests + max_prefill, most)
        if self._kept_seconds:
            running = min(running, int((1 - KEPT_FOR_QUEUE) * (self._tokens - num_requests)))
        self._max_running_tokens = max(running, self._least)
        self._limit = limit
        self._num_requests, self._num_future_tokens = num_requests, num_known
        self._is_decided, self._has_deferred, self._num_kept = True, False, 0
        self.revision += 1
        return self._tokens

    def _prompt_seconds(self, remaining: float, decode_seconds: float, view: View) -> float:
        """The part of the `remaining` seconds that prompt tokens may use; less than `remaining` if prompt tokens are
        spread over steps. Decode alone takes `decode_seconds`."""
        has_queue = view.num_waiting > 0
        if has_queue and self._had_queue and not (self._was_checked or self._is_head_long):
            self._num_spread_steps = SCARCE_STEPS
        elif self._num_spread_steps:
            self._num_spread_steps -= 1
        if not (has_queue and self._num_spread_steps and len(view.rows) > 2 * view.num_prefilling):
            return remaining
        hidden = (1 - self.times.share) * decode_seconds  # reading for decode overlaps with prompt tokens
        num_even = max(SPREAD * self.times.mean_tokens, self._least) + 0.5  # 0.5: rounding down loses no token
        return min(remaining, max(hidden, self.times.prefill_seconds(num_even, 0), MIN_SPREAD * remaining))

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if self._is_open or (batch.num_prefilling == 0 and not self._view.num_waiting):
            return
        # The budget is divided in admission order. A prompt must leave a token for each row behind it. Drafts must
        # leave `least` tokens for a running or waiting prompt.
        is_prefilling = (batch.flags[rows] & PREFILLING) != 0
        prefilling = is_prefilling.nonzero()[0]
        num_decoding = len(rows) - len(prefilling)
        num_others = int(np.add.reduce(want)) - int(np.add.reduce(want[prefilling]))
        if num_others > num_decoding:
            max_drafts = max(self._tokens - len(rows) - self._least, 0)
            if num_others - num_decoding > max_drafts:
                decoding = (~is_prefilling).nonzero()[0]
                want[decoding] = np.minimum(want[decoding], 1 + max_drafts // num_decoding)
                num_others = int(np.add.reduce(want[decoding]))
        left = min(self._max_running_tokens, max(self._tokens - num_others - len(prefilling), 0))
        for index in prefilling.tolist():
            more = want.item(index) - 1
            if more > left:
                want[index] = 1 + left
                left = 0
            elif more > 0:
                left -= more

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        if self._is_open:
            return want
        if not self._is_decided:  # the queue was empty when the step began, so this step preempted the request
            self._decide_budget(view.budget, view)
        self._was_checked = True
        fitting = self.times.fitting_tokens(self._left, start)
        if not view.num_running or self._has_preempted:
            return min(want, max(fitting, self._least))
        if self._is_full or self._would_be_full(request, self._num_requests, self._num_future_tokens):
            state = request._state
            waits = state.deferral is not None and state.deferral.reason is Reason.STEP_TIME
            if waits and view.now - state.deferred_since >= self._patience:
                return min(want, max(fitting, self._least))
            self._has_deferred = True
            return Deferral(Reason.STEP_TIME, 0)
        return self._num_fitting_tokens(request, start, min(want, fitting))

    def _num_fitting_tokens(self, request: Request, start: int, upper_bound: int) -> int | Deferral:
        """Returns `upper_bound`, the number of the request's tokens that fit the step, or a deferral of the request.
        Beside a running prefill that is cut, a request starts only if all its tokens fit."""
        lack = request._state.num_tokens - start if self._is_cut else 1
        if upper_bound >= lack:
            return upper_bound
        if self._kept_seconds and self.times.fitting_tokens(self._kept_seconds, start) < lack:
            self._is_head_long = True
        return Deferral(Reason.BUDGET, lack - upper_bound)

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        """Whether `check` would defer the request for step time if no running request were prefilling."""
        if not num_running:
            return False
        times = self.times
        left = self._limit - times.share * times.decode_seconds(num_running, num_tokens)
        is_full = times.fitting_tokens(left, 0) < min(self._least, times.max_predicted_tokens)
        return is_full or self._would_be_full(request, num_running, num_tokens)

    def _would_be_full(self, request: Request, num_requests: int, num_tokens: int) -> bool:
        """Whether decode alone would take longer than the target with `request` beside `num_requests` running requests,
        which have `num_tokens` known tokens together."""
        times = self.times
        if num_requests < times.max_observed_requests:  # beyond the observed number, admit one more to observe it
            num_requests, num_tokens = num_requests + 1, num_tokens + request._state.num_tokens
        return times.decode_seconds(num_requests, num_tokens) > self._limit

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        self._left -= self.times.prefill_seconds(num_tokens, start)
        if request.status is not RequestStatus.RUNNING:
            self._is_head_long = self._has_preempted = False
            self._num_requests += 1
            self._num_future_tokens += request._state.num_tokens

    def guaranteed_steps(self, num_steps: int) -> int:
        """All `num_steps` if the queue is empty, as the budget then does not matter. Otherwise all `num_steps` if the
        budget is kept, and the head of the queue does not wait for step time. Otherwise 0. A kept budget ends when a
        running request leaves or a request is admitted."""
        view = self._view
        if not view.num_waiting:
            return num_steps
        is_kept = self._key == (self._num_departures, len(view.rows)) and not self._has_deferred
        return num_steps if is_kept else 0
