"""May requests pass one that waits for blocks? Within a bound, and with room kept for it."""

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
    """Requests behind one that waits for blocks may pass it, within a bound.

    A long prompt at the head of the queue waits until many blocks are free; meanwhile these stay idle, and short
    requests behind it wait for nothing. Here they may start, in the order of the queue, in blocks that were free when
    the head began to wait; of what is released since then, the share `kept` is the head's.

    Bound: at most `bound` requests pass one before it is admitted; then it blocks the queue. Use it where prompts
    differ much in length and blocks are short, together with a reserve such as a watermark: idle blocks are headroom
    for what runs, and where there is no other, filling them makes for more preemptions.
    """

    name = "bypass"
    parameters: ClassVar[tuple[Parameter, ...]] = (
        Parameter("bound", 16, 1, MAX_INT, tried=(4, 16, 64), doc="requests that may pass one that waits for blocks"),
        Parameter("kept", 0.5, 0.0, 1.0, tried=(0.0, 0.5, 1.0), doc="of the blocks released while it waits"),
    )
    reason = Reason.BYPASS

    def __init__(self, bound: int, kept: float) -> None:
        self.bound, self._kept = bound, kept
        self._forget()

    def _forget(self) -> None:
        self._head: Request | None = None
        self._room = 0
        self._asked: tuple[Request, int] | None = None
        self._is_first = True  # nobody was found in this step yet who lacks blocks

    def attach(self, view: View) -> None:
        self._view = view
        self._forget()

    def guaranteed_steps(self, num_steps: int) -> int:
        """While requests wait, each step looks for some that may pass."""
        return 0 if self._view.num_waiting else num_steps

    def open_queue(self) -> None:
        """The queue is checked from its head on."""
        self._is_first = True

    def lets_pass(self, request: Request, num_free: int) -> bool:
        """The request lacks blocks: whether those behind it may be admitted."""
        if self._is_first and request is not self._head:
            self._head, self._room = request, num_free
        self._is_first = False
        return request._state.num_bypassed < self.bound

    def num_open(self, num_free: int) -> int:
        """Blocks that those behind the head may take."""
        return num_free - self._num_kept(num_free)

    def blocks(self, request: Request, demand: Demand, view: View) -> int:
        self._asked = request, demand.first
        return 0 if self._is_first or request is self._head else self._num_kept(view.num_free_blocks)

    def _num_kept(self, num_free: int) -> int:
        if self._head is None or num_free <= self._room:
            return 0
        return math.ceil(self._kept * (num_free - self._room))

    def on_admitted(self, event: Admitted) -> None:
        if event.request is self._head:
            self._head = None
        elif self._asked is not None and self._asked[0] is event.request:
            self._room -= self._asked[1]

    def on_finished(self, request: Request, now: float) -> None:
        if request is self._head:
            self._head = None

    def on_parked(self, request: Request, now: float) -> None:
        if request is self._head:
            self._head = None
