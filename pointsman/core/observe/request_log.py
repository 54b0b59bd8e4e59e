"""Logs the events of each request with their times, for traces and explanations. Off by default.

The log listens to the scheduler's events, so it costs time for each change of state of a request, not for each step or
token. Only the first token is logged without a change of state: after each update, the running requests without a token
so far are checked.
"""

from __future__ import annotations

from pointsman.core.state.events import (
    Admitted,
    Listener,
    Preempted,
    StepRun,
)
from pointsman.core.state.output import SchedulerOutput, StepUpdate
from pointsman.core.state.request import Request
from pointsman.core.state.status import PreemptionCause, RequestEvent, RequestEventType


class RequestLog(Listener):
    """Appends the events of each request to `Request.events`."""

    def __init__(self) -> None:
        self._without_token: dict[Request, None] = {}  # requests that were admitted, and have no token so far

    def on_queued(self, request: Request, now: float) -> None:
        self._log_event(request, RequestEventType.QUEUED, now)

    def on_admitted(self, event: Admitted) -> None:
        kind = RequestEventType.RESUMED if event.resumed else RequestEventType.SCHEDULED
        self._log_event(event.request, kind, event.now)
        if not event.request.num_output_tokens:
            self._without_token[event.request] = None

    def on_preempted(self, event: Preempted) -> None:
        if event.cause is not PreemptionCause.PARKED:  # `on_parked` logs these
            recovery = event.recovery
            decision = "" if recovery is None else "swap" if recovery.swaps else "recompute"
            self._log_event(event.request, RequestEventType.PREEMPTED, event.now, decision)

    def on_parked(self, request: Request, now: float) -> None:
        """Log that the request is parked. Before that, log its first token, if the request got this token in the update
        that completed its prompt part."""
        if request in self._without_token and request.num_output_tokens:
            self._log_first_token(request, now)
        self._log_event(request, RequestEventType.PARKED, now, request.status.value)

    def on_rolled_back(self, request: Request, now: float) -> None:
        self._log_event(request, RequestEventType.ROLLED_BACK, now)

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        begun = [request for request in self._without_token if request.num_output_tokens]
        if update.completed_parts:  # the output of a parked request may have become a part of its prompt
            sampled = {output.requests[index] for index in update.counts.nonzero()[0].tolist()}
            taken = [request for request in update.completed_parts if not request.num_output_tokens]
            begun += [request for request in taken if request in self._without_token and request in sampled]
        for request in begun:
            self._log_first_token(request, now)

    def on_steps(self, run: StepRun) -> None:
        """Does nothing: every request in a fast-forward already has its first token."""

    def on_finished(self, request: Request, now: float) -> None:
        """Log that the request finished. Before that, log its first token, if this token finished the request."""
        if request in self._without_token:
            if request.num_output_tokens:
                self._log_first_token(request, now)
            else:
                del self._without_token[request]
        assert request.finish_reason is not None
        self._log_event(request, RequestEventType.FINISHED, now, request.finish_reason.value)

    def _log_first_token(self, request: Request, now: float) -> None:
        del self._without_token[request]
        self._log_event(request, RequestEventType.FIRST_TOKEN, now)

    def _log_event(self, request: Request, kind: RequestEventType, now: float, detail: str = "") -> None:
        request._state.events.append(RequestEvent(kind, now, detail))
