"""The limit "decode-share": gives decode a share of the time that steps with prompt tokens take.

The other limits of this kind make each step short (`target_itl.py`, `prefill_gap.py`), which costs throughput where a
step with prompt tokens has a fixed cost. This one leaves steps with prompt tokens as long as they are, and puts steps
without prompt tokens between them.
"""

from __future__ import annotations

from typing import ClassVar

from pointsman.core.policy.gate import Int64Array, Limit
from pointsman.core.policy.policy import Parameter, StepLoad
from pointsman.core.state.batch import PREFILLING, Batch
from pointsman.core.state.interfaces import View
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request

SHORT = 2.0
"""A step with prompt tokens is short if it takes at most this multiple of the time of decode alone."""
MEAN_STEPS = 32
"""Time constant, in steps, of the exponential mean of the time of steps without prompt tokens."""


class DecodeShare(Limit):
    """Holds prompts back after long steps, so that decode has a share of the time.

    The rule: steps with prompt tokens, beside requests that decode, take longer than decode alone. Of the time by which
    a step exceeds `SHORT` times that of decode alone, decode gets the share `share` afterwards, in steps without prompt
    tokens. Prompts wait meanwhile. The time of decode alone is the mean of recent steps without prompt tokens.

    With a large budget, a request beside a long queue of prompts gets one output token in each long step. It then
    decodes until the queue is empty, however short its output is. Here it decodes on its own between two steps, and
    finishes while the next prompts are computed. So the mean latency is lower than with any fixed budget, and large
    steps remain possible, which compute prompts in less time in total. Only the mean gap between tokens is bounded, not
    the longest gap, which is the longest step: use `target-itl` where each gap counts.

    Bounds: after a step with prompt tokens that took T seconds, prompts wait at most `share` times T, and one step.
    """

    name = "decode-share"
    is_shared = True
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("share", 0.25, 0.0, 16.0, tried=(0.05, 0.1, 0.25), doc="seconds of decode for a second with prompts"),
    )

    def __init__(self, share: float = 0.25) -> None:
        self._share = share
        self._reset()

    def _reset(self) -> None:
        self._owed = 0.0
        """Seconds of decode alone that come before the next prompt tokens; negative: decode had more than its share."""
        self._mean_decode = 0.0
        """Mean time of recent steps without prompt tokens, in seconds; 0: there was none."""
        self._has_decode = False
        """Whether a request decodes in the step that was decided last."""
        self._holds = False
        """Whether the step holds prompts back."""

    def attach(self, view: View) -> None:
        self._view = view
        self._reset()

    def on_step_time(self, load: StepLoad, seconds: float) -> None:
        if load.num_prefill_tokens:
            if self._has_decode and self._mean_decode:
                self._owed += self._share * max(0.0, seconds - SHORT * self._mean_decode)
            return
        self._mean_decode += (seconds - self._mean_decode) / (MEAN_STEPS if self._mean_decode else 1)
        self._owed = max(self._owed - seconds, -seconds if self._holds else 0.0)

    # ------------------------------------------------------------------ the step

    def step_budget(self, most: int, view: View) -> int:
        num_prefilling = view.num_prefilling
        self._has_decode = len(view.rows) > num_prefilling
        if not self._has_decode:
            self._owed = 0.0
        holds = self._owed > 0 and (num_prefilling > 0 or view.num_waiting > 0)
        if holds != self._holds:
            self._holds = holds
            self.revision += 1
        return len(view.rows) if holds else most

    def clip(self, batch: Batch, rows: Int64Array, want: Int64Array) -> None:
        if self._holds and batch.num_prefilling:
            want[(batch.flags[rows] & PREFILLING) != 0] = 0

    def check(self, request: Request, start: int, want: int, view: View) -> int | Deferral:
        return Deferral(Reason.BUDGET, 1) if self._holds else want

    def guaranteed_steps(self, num_steps: int) -> int:
        """All `num_steps` if the last step held no prompt back, and the next ones will not; otherwise 0."""
        may_hold = self._holds or (self._owed > 0 and self._view.num_waiting > 0)
        return 0 if may_hold else num_steps
