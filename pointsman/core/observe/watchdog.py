"""Finds requests without progress, in occasional checks outside the steps.

Each check compares every request with its state at the previous check: its status, its admission, and its numbers of
known and computed tokens. So a stall is detected when its duration reaches the given number of seconds, or one check
later. The start of a stall is known to within the time between two checks.
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
    """A request that makes no progress."""

    since: float
    """The time of the first check that found the request in its present state, on the caller's clock."""
    explanation: Explanation


class Watchdog:
    """Keeps the state of each request at the last check, to find requests without progress."""

    def __init__(self) -> None:
        self._seen: dict[Request, tuple[tuple[Any, ...], float]] = {}

    def stalled(self, parts: Parts, explain: Callable[[str], Explanation], now: float, seconds: float) -> list[Stall]:
        """Unfinished requests whose state has not changed for `seconds` or longer, the longest stall first. Requests
        that are paused, or wait for input of their caller, are left out; their time is counted from 0 again when their
        state changes."""
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
