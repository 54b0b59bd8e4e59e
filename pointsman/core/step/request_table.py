"""Where each request is: queued, parked or running, and the moves between these places.

A request is in exactly one place. Ends and preemptions are noted here until the next output tells the workers of
them; an ended request keeps its id until then.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from pointsman.core.errors import DuplicateRequest, InvalidTransition, UnknownRequest
from pointsman.core.kv.manager import KVCacheManager
from pointsman.core.kv.transfers import Transfers
from pointsman.core.observe.events import RequestLog
from pointsman.core.observe.left_out import LeftOut
from pointsman.core.observe.stats import Counters
from pointsman.core.policy.adapters import AdapterSlots
from pointsman.core.policy.encoder_budget import EncoderCache
from pointsman.core.state.batch import Batch
from pointsman.core.state.interfaces import Order
from pointsman.core.state.output import SchedulerOutput
from pointsman.core.state.reason import Deferral, Reason
from pointsman.core.state.request import Request
from pointsman.core.state.status import FinishReason, ParkReason, Pause, RequestStatus
from pointsman.core.step.admission import Admission
from pointsman.core.step.in_flight import AdmittedRequest, StepRecord


class End(NamedTuple):
    """How a request ends."""

    request: Request
    reason: FinishReason
    detail: str = ""
    stop_reason: int | str | None = None


class Lifecycle:
    """The requests of one scheduler."""

    def __init__(
        self,
        batch: Batch,
        kv: KVCacheManager,
        queue: Order,
        adapters: AdapterSlots,
        encoder: EncoderCache | None,
        admission: Admission,
        counters: Counters,
        log: RequestLog | None = None,
        transfers: Transfers | None = None,
    ) -> None:
        self._batch = batch
        self._kv = kv
        self._admission = admission
        self._counters = counters
        self.log = log
        """Where each request's events go; None: nobody keeps them."""
        self.transfers = transfers
        """Blocks that are held without a row; None: without a connector there are none."""
        self.queue = queue
        self.adapters = adapters
        self.encoder = encoder
        """Where the embeddings of encoder inputs are; None: none are accepted."""
        self.passed: list[Request] = []
        """Who was passed over in the newest step and still waits at its place, in order."""
        self.wall: Request | None = None
        """Who held back all behind it in the newest step, and still waits at its place."""
        self.parked: dict[str, Request] = {}
        self.requests: dict[str, Request] = {}
        """Every request whose id is in use: those that have not ended, and ends that no output has told of."""
        self.last_output: SchedulerOutput | None = None
        """The newest output, for explanations, if it left somebody waiting: it names requests that have ended."""
        self.in_flight: deque[StepRecord] = deque()
        """Steps scheduled and not yet updated, oldest first."""
        self.left_out = LeftOut(batch)
        """Since when running requests get nothing."""
        self.pause: Pause | None = None
        """What holds everybody up, if something does."""
        self.now = 0.0
        """When the present moves happen."""
        self.preempted: list[Request] = []
        self.finished: list[Request] = []
        self._next_sequence_number = 1
        self.next_serial = 1
        """Of the next admission."""
        self._num_losses = 0  # of rows, by requests that had not ended

    # ------------------------------------------------------------------ looking up

    def get(self, request_id: str) -> Request | None:
        """The request called so that has not ended, or None."""
        request = self.requests.get(request_id)
        return None if request is None or request.is_finished else request

    def require(self, request_id: str) -> Request:
        """The request called so that has not ended.

        Raises:
            UnknownRequest: there is none.
        """
        request = self.get(request_id)
        if request is None:
            raise UnknownRequest(f"no request {request_id!r} is waiting, parked or running; it may have ended")
        return request

    def require_parked(self, request_id: str) -> Request:
        """The request called so, which `ready` may be said of.

        Raises:
            UnknownRequest: there is none.
            InvalidTransition: it is not parked, or a transfer brings it back.
        """
        request = self.require(request_id)
        if not request.status.is_parked:
            raise InvalidTransition(
                f"request {request_id!r} is {request.status.name}, not parked; ready() does not apply"
            )
        if request.holding is not None:
            raise InvalidTransition(
                f"request {request_id!r} waits for transfer {request.holding.transfer_id}; end it with transfer_done()"
            )
        return request

    def require_free_id(self, request_id: str) -> None:
        """Raises DuplicateRequest if the id is in use."""
        if request_id in self.requests:
            state = self.requests[request_id].status.name
            raise DuplicateRequest(
                f"request id {request_id!r} is in use ({state}); an id is free once an output has reported its end"
            )

    @property
    def newest_step_id(self) -> int | None:
        """The newest step in flight."""
        return self.in_flight[-1].step_id if self.in_flight else None

    def holders(self) -> list[Request]:
        """Requests that hold blocks without a row."""
        return [] if self.transfers is None else self.transfers.holders()

    # ------------------------------------------------------------------ moves

    def tell_time(self, now: float) -> None:
        """When the moves that follow happen."""
        self.now = now
        if self.log is not None:
            self.log.now = now

    def add(self, request: Request, now: float, park: ParkReason | None) -> None:
        request.sequence_number = self._next_sequence_number
        self._next_sequence_number += 1
        self.requests[request.request_id] = request
        if park is None:
            self._enqueue(request)
        else:
            self._park_idle(request, park, now)

    def place(self, request: Request, num_computed_tokens: int, num_slots: int) -> int:
        """From the head of the queue to a row of its own; returns the row."""
        self.queue.pop()
        self._admission.forget()
        request.serial = self.next_serial
        self.next_serial += 1
        if self.log is not None:
            self.log.admitted(request, request.status)
        request.transition(RequestStatus.RUNNING)
        request.deferral = None
        request.num_admitted_tokens = request.num_tokens
        if request.adapter is not None:
            self.adapters.take(request.adapter)
        request.may_load = True
        return self._batch.place(request, num_computed_tokens, num_slots)

    def preempt(self, request: Request) -> None:
        """From its row to the front of its class in the queue."""
        self._lose_rows([request])
        self._queue_again(request)

    def preempt_all(self) -> None:
        """Everybody that runs, without publishing what they computed; they come back in the order in which they ran."""
        requests = list(self._batch.members.requests)
        self._lose_rows(requests, publish=False)
        self._counters.num_preempted_by_reset += len(requests)
        for request in reversed(requests):
            self._queue_again(request)

    def set_priority(self, request: Request, priority: int) -> None:
        """Another urgency; a queued request changes its place."""
        queued = request in self.queue
        if queued:
            self.leave_queue(request)
        request.priority = priority
        if queued:
            self.queue.push(request)
        if request.row is not None:
            self._batch.priority[request.row] = priority

    def park(self, request: Request, reason: ParkReason, now: float, *, is_done: bool = False) -> None:
        """Out of the queue, or off its row, until `ready`. Parked already: only the reason changes.

        `is_done`: its row had nothing more to do, so that this is no preemption.
        """
        self._let_go(request)
        if request.status is RequestStatus.RUNNING:
            self._lose_rows([request], is_done=is_done)
            self._counters.num_preempted_by_parking += not is_done
        elif request.status.is_parked:
            del self.parked[request.request_id]
            self._return(request)
        else:
            self.leave_queue(request)
        self._park_idle(request, reason, now)

    def disown_steps_in_flight(self, request: Request) -> None:
        """What steps in flight still compute for a request without a row is of no use."""
        request.serial = self.next_serial
        self.next_serial += 1
        request.settle_pending(request.num_pending)

    def ready(self, request: Request) -> None:
        """From parked back to its place in the queue."""
        del self.parked[request.request_id]
        request.deferral = None
        self._return(request)
        self._enqueue(request)

    def end(self, ends: list[End]) -> None:
        """From wherever they are to their end; their blocks are free at once, but for those that a device uses."""
        running = [end for end in ends if end.request.status is RequestStatus.RUNNING]
        sound = [end.request for end in running if end.reason is not FinishReason.ERROR]
        if self.transfers is not None:
            self._hold_what_is_sent(sound)
        self.release_rows(sound)
        if len(sound) < len(running):
            self.release_rows([end.request for end in running if end.reason is FinishReason.ERROR], publish=False)
        for end in ends:
            request = end.request
            if request.status is not RequestStatus.RUNNING:
                self._leave_place(request)
            request.transition(end.reason.status)
            request.finish_reason, request.finish_detail, request.stop_reason = end.reason, end.detail, end.stop_reason
            request.deferral = None
            self.finished.append(request)
            self._counters.finished[end.reason] += 1
            self._admission.note_end(request)
            if self.log is not None:
                self.log.finished(request)

    def release_rows(self, requests: list[Request], publish: bool = True) -> None:
        """Take running requests off their rows and free their blocks. What they are next is the caller's to say."""
        if not requests:
            return
        batch = self._batch
        for request in requests:
            valid = int(min(batch.num_computed_tokens[request.row], batch.num_tokens[request.row]))
            self._kv.release(batch, request, num_valid_tokens=valid, publish=publish)
            if request.adapter is not None:
                self.adapters.give_back(request.adapter)
            if self.encoder is not None:
                self.encoder.release(request)
        batch.leave(requests, self.newest_step_id)

    def roll_back(self, admitted: AdmittedRequest) -> None:
        """Undo an admission of a failed step, if it still stands: back to its place in the queue."""
        request = admitted.request
        if request.serial != admitted.serial or request.status is not RequestStatus.RUNNING:
            return
        self.release_rows([request], publish=False)
        request.leave_row(0, 0)
        request.transition(admitted.previous_status)
        request.serial = admitted.previous_serial
        self.queue.push(request)
        if self.log is not None:
            self.log.rolled_back(request)

    # ------------------------------------------------------------------ reports

    def take_reports(self) -> tuple[list[Request], list[Request]]:
        """(preempted, finished), for an output; the ids of the finished are free from now on."""
        preempted, finished = self.preempted, self.finished
        self.preempted, self.finished = [], []
        for request in finished:
            if self.requests.get(request.request_id) is request:
                del self.requests[request.request_id]
        return preempted, finished

    def repeat_reports(self, void: list[StepRecord]) -> None:
        """The outputs of these steps are void, newest first: the next one tells again of whom they told."""
        outputs = [record.output for record in reversed(void) if record.output is not None]
        preempted = [request for output in outputs for request in output.preempted]
        finished = [request for output in outputs for request in output.finished]
        self.preempted = list(dict.fromkeys([*preempted, *self.preempted]))
        self.finished = list(dict.fromkeys([*finished, *self.finished]))

    # ------------------------------------------------------------------ parts of moves

    def _lose_rows(self, requests: list[Request], *, publish: bool = True, is_done: bool = False) -> None:
        self.release_rows(requests, publish)
        self._num_losses += len(requests)
        self._counters.num_preemptions += 0 if is_done else len(requests)
        for index, request in enumerate(requests):
            request.loss_number = self._num_losses - index  # of several, the first comes back first
            request.lost_tokens = min(request.num_computed_tokens, request.num_tokens)
            request.leave_row(0, request.num_pending)
            request.num_preemptions += not is_done
            request.num_overtaken = 0
        self.preempted += requests

    def _enqueue(self, request: Request) -> None:
        request.queued_at = self.now
        self.queue.push(request)
        if self.log is not None:
            self.log.queued(request)

    def _queue_again(self, request: Request) -> None:
        request.transition(RequestStatus.PREEMPTED)
        request.queued_at = self.now
        self.queue.push(request)
        if self.log is not None:
            self.log.preempted(request)

    def _leave_place(self, request: Request) -> None:
        """Out of the queue, or from where it is parked."""
        self._let_go(request)
        if request.status.is_parked:
            del self.parked[request.request_id]
        elif request in self.queue:
            self.leave_queue(request)

    def _let_go(self, request: Request) -> None:
        """It gives up what it holds without a row."""
        if request.holding is not None:
            assert self.transfers is not None
            self.transfers.let_go(request)

    def _hold_what_is_sent(self, requests: list[Request]) -> None:
        """Before their rows are released: blocks that are still being sent stay as they are."""
        assert self.transfers is not None
        for request in requests:
            assert request.row is not None
            valid = self._num_sound(request)
            table = self._kv.table(self._batch, request.row)
            self.transfers.hold_if_sending(request, table[: self._kv.blocks_for(valid)], valid)

    def _num_sound(self, request: Request) -> int:
        """Tokens of a running request whose KV is there for good: steps that are not over may yet fail, and with them
        what they load, or share with an admission."""
        count = request.num_computed_tokens
        for record in self.in_flight:
            output = record.output
            if output is None or record.is_over:
                continue
            if any(entry.serial == request.serial for entry in record.admitted):
                return 0
            own = (output.rows == request.row) & (output.serials == request.serial)
            count -= int(output.num_scheduled_tokens[own].sum())
        return count

    def leave_queue(self, request: Request) -> None:
        """Take a request out of the queue; why it waited in the newest step is of no use any longer."""
        self.queue.remove(request)
        self._admission.forget()
        if request is self.wall:
            self.wall = None
        elif request in self.passed:
            self.passed.remove(request)

    def _park_idle(self, request: Request, reason: ParkReason, now: float) -> None:
        request.transition(reason.status)
        request.deferral = Deferral(Reason.PARKED, 0, now)
        self.parked[request.request_id] = request
        if self.log is not None:
            self.log.parked(request)

    def _return(self, request: Request) -> None:
        """A parked request is again what it was: new, or preempted if it ever ran."""
        request.transition(RequestStatus.PREEMPTED if request.serial else RequestStatus.WAITING)
