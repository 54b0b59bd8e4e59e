"""The reserve "bypass": a bounded number of requests may bypass a request that waits for blocks. A share of the
released blocks is kept for the waiting request."""

from __future__ import annotations

import math
from typing import ClassVar

from pointsman.core.policy.policy import Parameter
from pointsman.core.policy.reserve import Demand, Reserve
from pointsman.core.state.events import Admitted
from pointsman.core.state.interfaces import View
from pointsman.core.state.numbers import MAX_INT
from pointsman.core.state.reason import Reason
from pointsman.core.state.request import Request


class Bypass(Reserve):
    """Requests may bypass one that waits for blocks, within a bound.

    A long prompt at the head of the queue waits until many blocks are free. Without bypass, free blocks stay idle
    meanwhile, and short requests behind the head wait without need (head-of-line blocking). With bypass, these requests
    may start, in the order of the queue, in blocks that were free when the head began to wait. Of the blocks released
    since then, the share `kept` is reserved for the head.

    Bound: at most `bound` requests bypass a waiting request; then the waiting request blocks the queue until it is
    admitted. Use this reserve where prompts differ much in length and blocks are scarce. Combine it with another
    reserve such as a watermark: idle blocks are headroom for running requests. If bypassing requests fill the only
    headroom, there are more preemptions.
    """

    name = "bypass"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("bound", 16, 1, MAX_INT, tried=(4, 16, 64), doc="requests that may bypass one that waits for blocks"),
        Parameter("kept", 0.5, 0.0, 1.0, tried=(0.0, 0.5, 1.0), doc="share of released blocks kept for it"),
    )
    reason = Reason.BYPASS

    def __init__(self, bound: int, kept: float) -> None:
        self.bound, self._kept = bound, kept
        self._reset()

    def _reset(self) -> None:
        self._head: Request | None = None
        self._num_free_before = 0
        self._asked: tuple[Request, int] | None = None
        self._is_first = True  # no request lacked blocks in this step yet

    def attach(self, view: View) -> None:
        self._view = view
        self._reset()

    def guaranteed_steps(self, num_steps: int) -> int:
        """0 while requests wait, as each step looks for requests that may bypass the head; otherwise all
        `num_steps`."""
        return 0 if self._view.num_waiting else num_steps

    def open_queue(self) -> None:
        """Called when a step begins to check the queue, at its head."""
        self._is_first = True

    def allows_bypass(self, request: Request, num_free: int) -> bool:
        """Whether requests behind `request`, which lacks blocks, may be admitted."""
        if self._is_first and request is not self._head:
            self._head, self._num_free_before = request, num_free
        self._is_first = False
        return request._state.num_bypassed < self.bound

    def num_open(self, num_free: int) -> int:
        """Number of the `num_free` free blocks that requests behind the head of the queue may take."""
        return num_free - self._num_kept(num_free)

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        self._asked = request, demand.first
        return 0 if self._is_first or request is self._head else self._num_kept(view.num_free_blocks)

    def _num_kept(self, num_free: int) -> int:
        if self._head is None or num_free <= self._num_free_before:
            return 0
        return math.ceil(self._kept * (num_free - self._num_free_before))

    def on_admitted(self, event: Admitted) -> None:
        if event.request is self._head:
            self._head = None
        elif self._asked is not None and self._asked[0] is event.request:
            self._num_free_before -= self._asked[1]

    def on_finished(self, request: Request, now: float) -> None:
        if request is self._head:
            self._head = None

    def on_parked(self, request: Request, now: float) -> None:
        if request is self._head:
            self._head = None
