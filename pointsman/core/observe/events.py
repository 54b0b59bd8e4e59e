"""What happened to a request, and when: a log per request, for traces and for explanations. Off by default.

The scheduler notes an event where a request moves (`lifecycle.py`), so the log costs what the moves cost and nothing
per step or token. The first token is the one event that is no move: after an update, the requests that run and have
none yet are looked through.
"""

from __future__ import annotations

from pointsman.core.state.request import Request
from pointsman.core.state.status import RequestEvent, RequestEventType, RequestStatus


class RequestLog:
    """Notes events. `now` is the time of the call that is being served: the scheduler sets it first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._silent: dict[Request, None] = {}  # admitted once, and without a token so far

    def queued(self, request: Request) -> None:
        """It is queued, by `add` or by `ready`."""
        self._note(request, RequestEventType.QUEUED)

    def admitted(self, request: Request, previous: RequestStatus) -> None:
        """It got a row; `previous` is the status that it had."""
        resumed = previous is RequestStatus.PREEMPTED
        self._note(request, RequestEventType.RESUMED if resumed else RequestEventType.SCHEDULED)
        if not request.num_output_tokens:
            self._silent[request] = None

    def preempted(self, request: Request) -> None:
        """It lost its row to others."""
        self._note(request, RequestEventType.PREEMPTED)

    def parked(self, request: Request) -> None:
        """It left the queue or its row."""
        self._note(request, RequestEventType.PARKED, request.status.value)

    def rolled_back(self, request: Request) -> None:
        """Its admission was undone."""
        self._note(request, RequestEventType.ROLLED_BACK)

    def updated(self) -> None:
        """Tokens came back."""
        for request in [request for request in self._silent if request.num_output_tokens]:
            self._first_token(request)

    def finished(self, request: Request) -> None:
        """It ended; a first token that ended it comes first."""
        if request in self._silent:
            if request.num_output_tokens:
                self._first_token(request)
            else:
                del self._silent[request]
        assert request.finish_reason is not None
        self._note(request, RequestEventType.FINISHED, request.finish_reason.value)

    def _first_token(self, request: Request) -> None:
        del self._silent[request]
        self._note(request, RequestEventType.FIRST_TOKEN)

    def _note(self, request: Request, kind: RequestEventType, detail: str = "") -> None:
        request.events.append(RequestEvent(kind, self.now, detail))
