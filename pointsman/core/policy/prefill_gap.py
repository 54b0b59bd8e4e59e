"""The limit "prefill-gap": cuts prompts so that the gaps between the tokens of decoding requests keep a target.

This limit is for engines that stream. It only cuts prompts; `TargetItl` also defers requests.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from pointsman.core.policy.gate import Int64Array
from pointsman.core.policy.policy import Parameter, StepLoad
from pointsman.core.policy.step_times import GROWTH, MIN_FITTED, UNREACHABLE
from pointsman.core.policy.target_itl import TargetItl
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request

FAST = 0.25
"""Maximum share of the target that a step of the whole budget takes on a fast device. On a fast device nothing is
learned or limited, since learning and limiting cost more than they gain. After two steps in a row that take more than
twice this share of the target, the device no longer counts as fast, and everything learned before is forgotten. A
single such step may be a stall of the machine."""
MIN_SECONDS = 1e-9
"""Minimum time for prompt tokens, used while the time of a prompt token is unknown."""


class PrefillGap(TargetItl):
    """Cuts prompts so that a step with decoding requests takes at most `seconds`, learned from step times.

    The number of prompt tokens that fit is computed as in `TargetItl`, and, as there, half of the time for prompt
    tokens is kept for short prompts. Three things differ. A step without decoding requests has the whole budget, since
    it delays no output token. Where a step of the whole budget fits the target, nothing is limited. No request waits
    for step time: where decode alone takes nearly the target or more, prompt tokens may add half of the decode time to
    the step, and at least `least` of them are computed.

    The time of decode is learned from steps without prompt tokens. Under load there may be no such step, and the whole
    time of a step would be attributed to its prompt tokens. So one step leaves out prompt tokens each time that the
    number of running requests doubles beyond the number for which the time of decode can be predicted.

    Use it where outputs are streamed on a device that may be slow. On a fast device (see `FAST`) it limits nothing.

    Bounds: every running request advances at least one token. The oldest prefill advances at least `least` tokens a
    step, or half of that while a short prompt waits, if `max_num_batched_tokens` suffices.
    """

    name = "prefill-gap"
    version = 1
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("seconds", 0.12, 1e-4, 60.0, doc="target of a step with decoding requests, so of gaps"),
        Parameter("least", 32, 1, MAX_INT, doc="prompt tokens that a step computes even if it takes longer"),
    )

    def __init__(self, seconds: float = 0.12, least: int = 32) -> None:
        super().__init__(seconds, least)

    def _reset(self) -> None:
        super()._reset()
        self._is_open = False
        """Whether the step has the whole budget, since no request decodes in it."""
        self._measures_decode = False
        """Whether the step leaves out prompt tokens (beyond one for each running request), to measure decode."""
        self._num_measured = 0
        """Number of requests in the last step that measured decode."""
        self._is_fast = False
        """Whether the device is fast, see `FAST`."""
        self._is_slow = False
        """Whether the last step, on a fast device, took more than twice the share `FAST` of the target."""

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        if self._is_fast:
            was_slow, self._is_slow = self._is_slow, seconds > 2 * FAST * self._target
            if not (was_slow and self._is_slow):
                return
            self._reset()
        self.times.observe(load, seconds)

    def step_budget(self, most: int, view: View) -> int:
        if self._is_fast:
            return most
        num_prefilling = view.num_prefilling
        self._measures_decode = False
        self._is_open = num_prefilling == len(view.rows) and (num_prefilling > 0 or view.num_waiting > 0)
        if self._is_open:
            self._key = None
            return most
        return super().step_budget(most, view)

    def _decide_budget(self, most: int, view: View) -> int:
        tokens = super()._decide_budget(most, view)
        num_requests = self._num_requests
        if tokens < most and num_requests > max(self.times.max_predicted_requests, GROWTH * self._num_measured):
            self._measures_decode, self._num_measured, self._key = True, num_requests, None
            return num_requests
        deepest = int(view.num_computed_tokens.max()) if num_requests else 0
        if tokens == most and self._is_known_fast(most, deepest):
            self._is_fast, self._is_open, self._key = True, True, None
            return most
        if not self._kept_seconds:
            return tokens
        rest = most - num_requests
        if tokens == most and self.times.fitting_tokens(self._left_at_first, deepest) >= rest:
            self._kept_seconds, self._is_cut, self._max_running_tokens = 0.0, False, rest
        elif self._max_running_tokens == self._least:
            self._max_running_tokens = (self._least + 1) // 2
        return tokens

    def _is_known_fast(self, num_tokens: int, deepest: int) -> bool:
        """Whether a step of the running requests and `num_tokens` prompt tokens from position `deepest` on is known to
        be fast."""
        times = self.times
        if (
            num_tokens > times.max_predicted_tokens
            or times.num_mixed < MIN_FITTED
            or self._num_requests > times.max_predicted_requests
        ):
            return False
        alone = times.decode_seconds(self._num_requests, self._num_future_tokens)
        return alone + times.prefill_seconds(num_tokens, deepest) <= FAST * self._target

    def _prompt_seconds(self, remaining: float, decode_seconds: float, view: View) -> float:
        least = self.times.prefill_seconds(self._least + 0.5, 0)
        return max(remaining, (UNREACHABLE - 1) * self.times.share * decode_seconds, least, MIN_SECONDS)

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if self._measures_decode:
            np.minimum(want, 1, out=want)
        elif not self._is_open:
            super().clip(batch, rows, want)

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        if self._is_open:
            return want
        if not self._is_decided:  # the queue was empty when the step began, so this step preempted the request
            self._decide_budget(view.budget, view)
        if self._measures_decode:
            return Deferral(Reason.BUDGET, 1)
        fitting = self.times.fitting_tokens(self._left, start)
        if self._left >= self._left_at_first:  # the step has no prompt tokens yet
            fitting = max(fitting, self._least)
        return self._num_fitting_tokens(request, start, min(want, fitting))

    def commit(self, request: Request, start: int, num_tokens: int) -> None:
        if not self._is_fast:
            super().commit(request, start, num_tokens)

    def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
        return False
