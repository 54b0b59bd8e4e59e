"""The request table: moves each request between the places queued, parked, running and finished.

    add ----> queued --admit--> running --finish--> finished
      \\        ^  ^               |
       \\       |  +---preempt-----+
        +--> parked <----park-----+

A request is in exactly one place. Finished and preempted requests are kept until the next output reports them to the
workers. Until this report the id of a finished request stays in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pointsman.core.errors import DuplicateRequest, InvalidTransition, UnknownRequest
from pointsman.core.kv.cache import KVCache
from pointsman.core.kv.transfers import Transfers
from pointsman.core.policy.swap import Swap
from pointsman.core.state.batch import Batch
from pointsman.core.state.events import (
    Admitted,
    Events,
    Need,
    Preempted,
    send,
)
from pointsman.core.state.interfaces import Order
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple
from pointsman.core.state.status import FinishReason, ParkReason, PreemptionCause, RequestStatus
from pointsman.core.step.in_flight import AdmittedRequest, Grant, StepRecord, StepsInFlight

PARKED = Deferral(Reason.PARKED, 0)


class End(NamedTuple):
    """The end of a request: its reason and details."""

    request: Request
    reason: FinishReason
    detail: str = ""
    stop_reason: int | str | None = None


class RequestTable:
    """The requests of one scheduler, and the place of each request."""

    def __init__(
        self,
        batch: Batch,
        kv: KVCache,
        queue: Order,
        releases: Sequence[Callable[[Request], None]],
        steps: StepsInFlight,
        events: Events,
        transfers: Transfers | None,
        swap: Swap | None,
        next_serial: int,
    ) -> None:
        self._swap = swap
        self._batch = batch
        self._kv = kv
        self._steps = steps
        self._events = events
        self._transfers = transfers
        self._releases = releases
        self.queue = queue
        self.parked: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        """All requests whose id is in use: those that have not finished, and finished requests that no output has
        reported yet."""
        self.preempted: list[Request] = []
        self.finished: list[Request] = []
        self.skipped: list[Request] = []
        """Requests that were skipped in the newest step and have not left the queue since, in order."""
        self.blocker: Request | None = None
        """Request that blocked the queue in the newest step and has not left the queue since; None: there is none."""
        self.num_departures = 0
        """Counter that changes whenever a request leaves the queue (not when a request is skipped)."""
        self.num_arrivals = 0
        """Counter that changes whenever a request enters the queue."""
        self.next_serial = next_serial
        """Serial number of the next admission."""
        self._next_sequence_number = 1
        self._num_losses = 0  # number of times that an unfinished request lost its row

    # ------------------------------------------------------------------ looking up

    def get(self, request_id: str) -> Request | None:
        """The request with this id that has not finished, or None."""
        request = self.requests.get(request_id)
        return None if request is None or request._state.status.is_finished else request

    def require(self, request_id: str) -> Request:
        """The request with this id that has not finished.

        Raises:
            UnknownRequest: no unfinished request has this id.
        """
        request = self.get(request_id)
        if request is None:
            raise UnknownRequest(f"no request {request_id!r} is waiting, parked or running; it may have ended")
        return request

    def require_parked(self, request_id: str) -> Request:
        """The parked request with this id, after a check that `ready` may be called for it.

        Raises:
            UnknownRequest: no unfinished request has this id.
            InvalidTransition: the request is not parked, or it waits for a transfer.
        """
        request = self.require(request_id)
        state = request._state
        if not state.status.is_parked:
            raise InvalidTransition(
                f"request {request_id!r} is {state.status.name}, not parked; ready() does not apply"
            )
        if state.holding is not None:
            raise InvalidTransition(
                f"request {request_id!r} waits for transfer {state.holding.transfer_id}; report the end of this "
                "transfer with transfer_done(), instead of ready()"
            )
        return request

    def require_free_id(self, request_id: str) -> None:
        """Raise DuplicateRequest if the id is in use."""
        if request_id in self.requests:
            name = self.requests[request_id].status.name
            raise DuplicateRequest(
                f"request id {request_id!r} is in use ({name}); an id is free once an output has reported it finished: "
                "schedule and update once more, or give another id"
            )

    # ------------------------------------------------------------------ into the queue, and parked

    def add(self, request: Request, park: ParkReason | None, now: float) -> None:
        """Queue or park a new request."""
        request._state.record_added(self._next_sequence_number)
        self._next_sequence_number += 1
        self.requests[request.request_id] = request
        for method in self._events.added:
            method(request, now)
        if park is None:
            self._enqueue(request, now)
        else:
            self._park_idle(request, park, now)

    def ready(self, request: Request, now: float) -> None:
        """Move a parked request back to its place in the queue."""
        del self.parked[request.request_id]
        request._state.clear_deferral()
        self._unpark(request)
        self._enqueue(request, now)

    def park(self, request: Request, reason: ParkReason, now: float, *, is_done: bool = False) -> None:
        """Move a request out of the queue, or off its row, until `ready` is called. If the request is already parked,
        only the reason changes.

        `is_done`: whether the row had no more tokens to compute, so that parking is not a preemption.
        """
        self._release_blocks(request)
        if request.status is RequestStatus.RUNNING:
            self._take_rows_from([request], None if is_done else PreemptionCause.PARKED, now)
        elif request.status.is_parked:
            del self.parked[request.request_id]
            self._unpark(request)
        else:
            self.leave_queue(request)
        self._park_idle(request, reason, now)

    def set_priority(self, request: Request, priority: int) -> None:
        """Change a request's priority; a queued request moves to its new place in the queue."""
        queued = request in self.queue
        if queued:
            self.leave_queue(request)
        state = request._state
        state.set_priority(priority)
        if queued:
            self.num_arrivals += 1
            self.queue.push(request)
        if state.row is not None:
            self._batch.priority[state.row] = priority

    def note_blocked(self, skipped: list[Request], blocker: Request | None) -> None:
        """Set the requests that the newest step skipped, in order, and the request behind them that blocked the
        queue."""
        self.skipped, self.blocker = skipped, blocker

    def leave_queue(self, request: Request) -> None:
        """Remove a request from the queue, and from `skipped` and `blocker`."""
        self.queue.remove(request)
        self.num_departures += 1
        if request is self.blocker:
            self.blocker = None
        elif request in self.skipped:
            self.skipped.remove(request)

    # ------------------------------------------------------------------ onto a row, and off it

    def admit(self, request: Request, grant: Grant, num_slots: int, now: float) -> int:
        """Move the former head of the queue to a new row; returns the row."""
        self.num_departures += 1
        resumed = request._state.status is RequestStatus.PREEMPTED
        request._state.record_admitted(self.next_serial, grant.num_cached_tokens)
        self.next_serial += 1
        if self._swap is not None:
            self._swap.stop_watching(request)
        row = self._batch.place(request, grant.end, num_slots)
        if self._events.admitted:
            looked_up = self._kv.caches and request.reads_prefix_cache
            cached, external = grant.num_cached_tokens, grant.num_external_tokens
            event = new_tuple(Admitted, (request, resumed, cached, external, looked_up, now))
            for method in self._events.admitted:
                method(event)
        return row

    def preempt(self, request: Request, cause: PreemptionCause, need: Need, now: float) -> None:
        """Move a request from its row to the front of the queued requests of its class (see `policy/order.py`)."""
        self._take_rows_from([request], cause, now, need=need)
        self._queue_again(request, now)

    def preempt_all(self, now: float) -> None:
        """Preempt every running request without publishing its blocks; the requests resume in admission order."""
        requests = list(self._batch.members.requests)
        self._take_rows_from(requests, PreemptionCause.RESET, now, publish=False)
        for request in reversed(requests):
            self._queue_again(request, now)

    def sample_again(self, requests: list[Request], now: float) -> None:
        """Restart requests at their known tokens, because the oldest step in flight has no sample for them.

        A later step in flight computes the token after the missing one, so the sample of that step is dropped. Running
        requests lose their rows, so that hosts and KV blocks need no special case.
        """
        running = [request for request in requests if request.row is not None]
        self._take_rows_from(running, PreemptionCause.UNSAMPLED, now)
        for request in requests:
            is_queued = request in self.queue
            if is_queued:
                self.leave_queue(request)
            request._state.subtract_pending(1)
            if request.num_pending:
                self.disown_steps_in_flight(request)
            if is_queued:
                self.num_arrivals += 1
                self.queue.push(request)
        for request in reversed(running):
            self._queue_again(request, now)

    def roll_back(self, admitted: AdmittedRequest, now: float) -> None:
        """Undo an admission of a failed step: if the request still runs under this admission, it returns to its place
        in the queue."""
        request = admitted.request
        state = request._state
        if state.serial != admitted.serial or state.status is not RequestStatus.RUNNING:
            return
        self._release_rows([request], now, publish=False)
        state.undo_admission(admitted.previous_status, admitted.previous_serial)
        self.num_arrivals += 1
        self.queue.push(request)
        if self._swap is not None and admitted.previous_status is RequestStatus.PREEMPTED:
            self._swap.watch_evictions_again(request)
        for method in self._events.rolled_back:
            method(request, now)

    def _release_rows(
        self, requests: list[Request], now: float, *, publish: bool = True, is_finished: bool = False
    ) -> None:
        """Remove running requests from their rows, and free their blocks. The caller then moves each request to its
        next place."""
        if not requests:
            return
        batch, kv = self._batch, self._kv
        may_not_be_final = kv.saves is not None and len(self._steps.records) > 0
        for request in requests:
            row = request._state.row
            assert row is not None
            valid = min(batch.num_computed_tokens.item(row), batch.num_tokens.item(row))
            final = self._steps.num_final_tokens(request) if may_not_be_final else valid
            kv.release(
                batch,
                request,
                now,
                num_valid_tokens=valid,
                publish=publish,
                num_final_tokens=final,
                is_finished=is_finished,
            )
            for release in self._releases:
                release(request)
        batch.release_rows(requests, self._steps.newest_step_id)

    def disown_steps_in_flight(self, request: Request) -> None:
        """Drop the samples of steps in flight for a request without a row."""
        request._state.drop_results_in_flight(self.next_serial)
        self.next_serial += 1

    # ------------------------------------------------------------------ finished, and reported

    def finish(self, ends: list[End], now: float) -> None:
        """Finish requests in any place; their blocks are freed immediately, except blocks that a device is sending."""
        running = [end for end in ends if end.request._state.status is RequestStatus.RUNNING]
        sound = [end.request for end in running if end.reason is not FinishReason.ERROR]
        if self._transfers is not None:
            self._hold_blocks_being_sent(sound, self._transfers)
        self._release_rows(sound, now, is_finished=True)
        if len(sound) < len(running):
            failed = [end.request for end in running if end.reason is FinishReason.ERROR]
            self._release_rows(failed, now, publish=False)
        swap, methods = self._swap, self._events.finished
        for request, reason, detail, stop_reason in ends:
            state = request._state
            if state.status is not RequestStatus.RUNNING:
                self._remove_from_place(request)
            state.record_finished(reason, detail, stop_reason)
            if swap is not None:
                swap.stop_watching(request)
            self.finished.append(request)
            for method in methods:
                method(request, now)

    @property
    def has_reports(self) -> bool:
        """Whether the next output reports preempted or finished requests, which a connector's host needs."""
        return bool(self.preempted or self.finished)

    def take_reports(self) -> tuple[Sequence[Request], Sequence[Request]]:
        """Return the (preempted, finished) requests to report in an output; the ids of these finished requests are then
        free."""
        preempted, finished = self.preempted, self.finished
        if not preempted and not finished:
            return (), ()
        self.preempted, self.finished = [], []
        for request in finished:
            if self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]
        return preempted, finished

    def repeat_reports(self, void: list[StepRecord]) -> None:
        """Report again, in the next output, all preempted and finished requests that the outputs of void steps (newest
        first) reported."""
        outputs = [record.output for record in reversed(void) if record.output is not None]
        self.preempted = _distinct([*(request for output in outputs for request in output.preempted), *self.preempted])
        self.finished = _distinct([*(request for output in outputs for request in output.finished), *self.finished])

    # ------------------------------------------------------------------ parts of moves

    def _take_rows_from(
        self,
        requests: list[Request],
        cause: PreemptionCause | None,
        now: float,
        *,
        publish: bool = True,
        need: Need | None = None,
    ) -> None:
        """Remove requests from their rows. `cause`: why they are preempted; None: they had no more tokens to
        compute."""
        self._release_rows(requests, now, publish=publish)
        self._num_losses += len(requests)
        for index, request in enumerate(requests):
            request._state.record_row_loss(
                self._num_losses - index, cause
            )  # of several requests, the first one resumes first
            if cause is not None:
                self._report_preempted(request, cause, need, now)
        self.preempted += requests

    def _report_preempted(self, request: Request, cause: PreemptionCause, need: Need | None, now: float) -> None:
        """Decide how a request that lost its row recovers its KV, and report the preemption."""
        state = request._state
        cached = min(state.lost_tokens, self._kv.num_findable_tokens(request))
        swaps = self._swap is not None and cause is not PreemptionCause.RESET
        state.set_recovery(self._swap.decide_recovery(request, cached) if self._swap is not None and swaps else None)
        if self._events.preempted:
            event = Preempted(request, cause, state.lost_tokens, cached, now, state.recovery, need)
            send(self._events.preempted, event)

    def _enqueue(self, request: Request, now: float) -> None:
        self.num_arrivals += 1
        request._state.record_queued(now)
        self.queue.push(request)
        for method in self._events.queued:
            method(request, now)

    def _queue_again(self, request: Request, now: float) -> None:
        self.num_arrivals += 1
        request._state.change_status(RequestStatus.PREEMPTED)
        request._state.record_queued(now)
        self.queue.push(request)

    def _park_idle(self, request: Request, reason: ParkReason, now: float) -> None:
        request._state.change_status(reason.status)
        request._state.clear_deferral()
        request._state.set_deferral(PARKED, now)
        self.parked[request.request_id] = request
        for method in self._events.parked:
            method(request, now)

    def _unpark(self, request: Request) -> None:
        """Give a parked request its former status: waiting, or preempted if the request has ever run."""
        state = request._state
        state.change_status(RequestStatus.PREEMPTED if state.serial else RequestStatus.WAITING)

    def _remove_from_place(self, request: Request) -> None:
        """Remove a request from the queue, or from the parked requests."""
        self._release_blocks(request)
        if request._state.status.is_parked:
            del self.parked[request.request_id]
        elif request in self.queue:
            self.leave_queue(request)

    def _release_blocks(self, request: Request) -> None:
        """Release the blocks that the request holds without a row."""
        if request._state.holding is not None:
            assert self._transfers is not None
            self._transfers.release_holding(request)

    def _hold_blocks_being_sent(self, requests: list[Request], transfers: Transfers) -> None:
        """Hold the blocks of requests that the device is still sending, before the requests' rows are released."""
        for request in requests:
            row = request._state.row
            assert row is not None
            valid = self._steps.num_final_tokens(request)
            table = self._kv.first_blocks(self._batch, row, -(-valid // self._kv.block_size))
            transfers.hold_if_sending(request, table, valid)


def _distinct(requests: Iterable[Request]) -> list[Request]:
    """The requests without repetitions, in order of first occurrence."""
    return list(dict.fromkeys(requests))
