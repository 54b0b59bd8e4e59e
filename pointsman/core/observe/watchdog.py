"""Which requests make no progress? Found by occasional checks, at no cost for a step.

Each check compares every request with its state at the previous check: its status, its admission, its tokens and how
many of them are computed. A stall is therefore detected when it reaches the given age, or one check later, and its
beginning is known to within one check.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pointsman.core.observe.explain import Explanation
from pointsman.core.state.reason import Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestStatus
from pointsman.core.step.assembly import Parts


class Stall(NamedTuple):
    """A request that made no progress."""

    since: float
    """When it was first seen in its present state, on the caller's clock."""
    explanation: Explanation


class Watchdog:
    """Remembers the states of requests."""

    def __init__(self) -> None:
        self._seen: dict[Request, tuple[tuple[Any, ...], float]] = {}

    def stalled(self, parts: Parts, explain: Callable[[str], Explanation], now: float, seconds: float) -> list[Stall]:
        """Unfinished requests whose state has not changed for `seconds` or longer, longest first; not those that a
        pause holds up, or that wait for their caller: their time starts again when that is over."""
        seen: dict[Request, tuple[tuple[Any, ...], float]] = {}
        is_paused = parts.admission.pause is not None
        for request in parts.table.requests.values():
            if request.is_finished:
                continue
            stands = (request.status, request.serial, request.num_tokens, request.num_computed_tokens, is_paused)
            before = self._seen.get(request)
            seen[request] = before if before is not None and before[0] == stands else (stands, now)
        self._seen = seen
        late = [
            (since, request)
            for request, (_, since) in seen.items()
            if now - since >= seconds and request.status is not RequestStatus.WAITING_FOR_STREAMING_REQ
        ]
        late.sort(key=lambda entry: (entry[0], entry[1].sequence_number))
        stalls = [Stall(since, explain(request.request_id)) for since, request in late]
        return [stall for stall in stalls if stall.explanation.reason is not Reason.PAUSED]
