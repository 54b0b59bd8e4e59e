"""EngineThread: runs an engine in a thread of its own, which other threads reach through an inbox of messages.

    loop:  messages from the inbox -> schedule -> model -> update -> snapshots to mailboxes -> ring each port once

Messages are handled between steps, in the order in which they were sent, so nothing here or in the scheduler needs a
lock. Without work the thread blocks on the inbox. It ends in one of two ways, and every waiting consumer gets an error
or a last output:

- It was asked to stop: after the step in progress (requests are aborted), or when all requests have finished
  (`drain`).
- It died: more consecutive steps failed than allowed, or another exception was raised. Then every stream and every
  call, waiting or later, gets an `EngineDeadError`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from pointsman.core.errors import DuplicateRequest
from pointsman.engine.aio.mailbox import Mailbox
from pointsman.engine.aio.output_router import OutputRouter
from pointsman.engine.errors import EngineDeadError, EngineStepError
from pointsman.engine.kv.worker import EXIT_PATIENCE  # the KV worker ends after this thread, which may wait for it
from pointsman.engine.machine import return_freed_pages
from pointsman.engine.memory import use_device
from pointsman.engine.pulse import Pulse
from pointsman.engine.stats import StatsLogger
from pointsman.engine.threads import release_helper_threads

if TYPE_CHECKING:
    from pointsman.core import Request, SchedulerOutput
    from pointsman.engine.engine import Engine

logger = logging.getLogger(__name__)

SECONDS_TO_IDLE = 1.0
"""Seconds without work after which the thread returns freed memory to the system."""
LOOP_CHECK_INTERVAL = 0.5
"""Seconds between two checks whether event loops with unfinished requests are closed."""


# ---------------------------------------------------------------------------------------- messages in the inbox


@dataclass(slots=True, eq=False)
class Expect:
    """Message: a prompt is being tokenized; an `Add` or an `Abandon` with this mailbox will follow."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Add:
    """Message: queue a request."""

    request_id: str
    mailbox: Mailbox
    add: Callable[[Engine], Request]
    """Function that adds the request to the engine, or raises the reason why the request cannot run."""


@dataclass(slots=True, eq=False)
class Call:
    """Message: call a function with the engine."""

    function: Callable[[Engine], Any]
    future: Future[Any]

    def run(self, engine: Engine) -> None:
        """Call the function, and store its result or exception in the future."""
        if self.future.set_running_or_notify_cancel():  # False: the caller has given up
            try:
                self.future.set_result(self.function(engine))
            except BaseException as error:  # belongs to the caller, not to the engine
                self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Abandon:
    """Message: the consumer of this mailbox no longer reads it."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Stop:
    """Message: end the thread; `drain`: only when all requests have finished."""

    drain: bool


@dataclass(slots=True, eq=False)
class GrammarDone:
    """Message: the compilation of a grammar has succeeded or failed."""


@dataclass(slots=True, eq=False)
class TransferDone:
    """Message: a transfer of KV between the pool and the KV store has ended or failed."""


Message: TypeAlias = Expect | Add | Call | Abandon | Stop | GrammarDone | TransferDone


# ---------------------------------------------------------------------------------------------------- the thread


class EngineThread:
    """Steps an engine while it has work. Start it once; afterwards only its own thread uses the engine.

    Args:
        engine: the engine to run; only this thread may use it from now on.
        max_step_retries: maximum number of consecutive retries of a failed step.
        log_stats_interval: seconds between two log lines with statistics; None: no such lines.
        on_step: function that is called in the thread when the outputs of a step have been delivered, with the
            scheduler's output of this step.
        on_beat: function that is called in the thread during a step as a sign of life; see `Pulse`.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_step_retries: int,
        log_stats_interval: float | None,
        on_step: Callable[[SchedulerOutput], None] | None = None,
        on_beat: Callable[[float], None] | None = None,
    ) -> None:
        self._engine = engine
        self._router = OutputRouter(engine.abort)
        engine.on_output = self._router.deliver
        engine.steps.on_report = self._ring_after_step
        engine.on_ready = self._router.accept
        engine.grammars.notify = self._send_grammar_done
        if engine.kv_connector is not None:
            engine.kv_connector.notify = self._send_transfer_done
        self._max_step_retries = max_step_retries
        self._on_step = on_step
        self.pulse = Pulse(on_beat)
        """Signs of life and step times of the thread."""
        self._stats_log = None if log_stats_interval is None else StatsLogger(engine, log_stats_interval)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._adding: Mailbox | None = None
        self._num_failures = 0  # consecutive failed steps
        self._computed_at: float | None = None  # time of the last step; None: freed memory was returned since
        self._stop: Stop | None = None
        self._gate = threading.RLock()  # held only while a message is sent or the inbox is closed
        self._is_draining = False
        self._is_closed = False
        self.cause: BaseException | None = None
        """The exception that ended the thread; None: the thread runs, or was asked to stop."""
        self.ended: Future[None] = Future()
        """Future that is done when the thread has completed its last work."""
        self.ended.set_running_or_notify_cancel()  # a caller that gives up must not cancel the future for others
        self._thread = threading.Thread(target=self._run, name="pointsman-engine", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Start the thread. Call this in the thread that made the engine, which should not compute afterwards."""
        release_helper_threads()
        self._thread.start()
        _live.add(self)

    @property
    def is_running(self) -> bool:
        """Whether the thread runs and will handle messages."""
        return not self._is_closed and self._thread.is_alive()

    def dead_error(self) -> EngineDeadError:
        """Make an error with the reason why no message will be handled; each caller needs a new error."""
        if self.cause is not None:
            kind = type(self.cause).__name__
            what = " ".join(str(self.cause).split())  # one line
            error = EngineDeadError(f"the engine is dead, make a new one; it died of {kind}: {what}")
            error.__cause__ = self.cause
            return error
        if self._is_closed or self._is_draining:
            return EngineDeadError("the engine has been shut down; make a new one")
        return EngineDeadError("the engine's thread does not run in this process (after a fork?); make a new engine")

    def send(self, message: Message) -> None:
        """Put a message into the thread's inbox.

        Raises:
            EngineDeadError: the thread does not run, or it is draining and the message is a new request.
        """
        with self._gate:
            if not self.is_running or (self._is_draining and self._is_new_request(message)):
                raise self.dead_error()
            if isinstance(message, Stop):
                self._is_draining = True
            elif isinstance(message, Expect):
                message.mailbox.is_expected = True
            self._inbox.put(message)

    @staticmethod
    def _is_new_request(message: Message) -> bool:
        return isinstance(message, Expect) or (isinstance(message, Add) and not message.mailbox.is_expected)

    @property
    def will_end(self) -> bool:
        """Whether the future `ended` is done or will be done. False after a fork: the thread exists in the parent
        process only."""
        return self._thread.is_alive() or self.ended.done()

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort a request whose consumer no longer reads its mailbox. Safe in finalizers, at any time, also after the
        thread's end."""
        mailbox.is_abandoned = True
        self._inbox.put(Abandon(request_id, mailbox))

    def ask_to_stop(self) -> None:
        """Ask the thread to stop at the end of the step in progress. Unlike `send`, this raises no error if the thread
        has ended."""
        self._inbox.put(Stop(drain=False))

    def _send_grammar_done(self) -> None:
        self._inbox.put(GrammarDone())

    def _send_transfer_done(self) -> None:
        self._inbox.put(TransferDone())

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        self.pulse.install()
        try:
            use_device(self._engine.loaded.model.device)
            while not self._should_end():
                self._handle_messages()
                if self._has_work() and not self._should_end():
                    self._step()
            self._abort_all_requests()
        except BaseException as error:  # every waiting caller must get this error
            self.cause = error
            logger.critical("the engine is dead", exc_info=error)
        finally:
            self._close()
            self.ended.set_result(None)

    def _has_work(self) -> bool:
        if self._has_unreported_finishes or self._engine.has_runnable_requests():
            return True
        deadline = self._kv_load_deadline
        return deadline is not None and deadline <= self._engine.clock()

    @property
    def _kv_load_deadline(self) -> float | None:
        """Time on the engine's clock at which the next load of KV times out, so that a step is due; None: no load can
        time out."""
        return None if self._engine.kv_connector is None else self._engine.kv_connector.deadline

    @property
    def _has_unreported_finishes(self) -> bool:
        """Whether the scheduler has yet to report finished requests; their ids may be used again after the scheduler's
        next output."""
        return self._engine.scheduler.has_unreported_ends

    def _should_end(self) -> bool:
        if self._stop is None:
            return False
        if not self._stop.drain:
            return True
        engine = self._engine  # paused requests will not finish by themselves
        ends = engine.has_runnable_requests() if engine.is_paused else engine.has_unfinished_requests()
        return not (ends or self._router.has_expected_requests)

    def _step(self) -> bool:
        """Run one step; return whether it succeeded. The next call retries a failed step, up to `max_step_retries`
        consecutive times.
        """
        engine = self._engine
        self.pulse.begin()
        try:
            engine.steps.run()
        except EngineStepError as error:  # the scheduler is in its state before the step
            self._num_failures += 1
            if self._num_failures > self._max_step_retries:
                raise
            logger.warning("%s; retry %d of %d", error, self._num_failures, self._max_step_retries)
            return False
        finally:
            self.pulse.end()
            self._computed_at = time.monotonic()
        self._num_failures = 0
        return True

    def _ring_after_step(self, output: SchedulerOutput) -> None:
        """Ring the ports after the outputs of a step were delivered; the next step may already be executing."""
        if self._on_step is not None:
            self._on_step(output)
        self._router.check_ports(LOOP_CHECK_INTERVAL)
        self._router.ring()
        if self._stats_log is not None:
            self._stats_log.tick()

    # ------------------------------------------------------------------ messages

    def _handle_messages(self) -> None:
        """Handle the messages that are in the inbox now; if the engine has no work, wait for a message first. Messages
        that arrive meanwhile wait for the next call, so that a busy caller cannot delay the next step without end.
        """
        message = self._next_message()
        num_more = self._inbox.qsize()
        while message is not None:
            self._handle(message)
            message = self._poll_inbox() if num_more > 0 else None
            num_more -= 1
        self._router.ring()

    def _next_message(self) -> Message | None:
        if self._has_work():
            return self._poll_inbox()
        message: Message | None = None
        while message is None and not self._should_end() and not self._has_work():
            try:
                message = self._inbox.get(timeout=self._max_wait())
            except Empty:
                if self._seconds_to_memory_release == 0:
                    self._computed_at = None
                    return_freed_pages()
                self._router.check_ports()
                self._engine.end_overdue()  # requests that are parked or paused
            if self._engine.watchdog is not None:
                self._engine.watchdog.tick()
            if self._stats_log is not None:
                # Log the last line before an idle time, and begin a new interval after it.
                self._stats_log.tick()
        return message

    def _max_wait(self) -> float | None:
        """Maximum seconds to wait for a message before other work is due; None: no limit."""
        wait = None if self._stats_log is None else self._stats_log.seconds_to_next_line()
        if self._router:
            wait = LOOP_CHECK_INTERVAL if wait is None else min(wait, LOOP_CHECK_INTERVAL)
        for deadline in (self._engine.deadlines.earliest(), self._kv_load_deadline):
            if self._router.has_followed_requests and deadline is not None:
                left = max(0.0, deadline - self._engine.clock())
                wait = left if wait is None else min(wait, left)
        if (idle := self._seconds_to_memory_release) is not None:
            wait = idle if wait is None else min(wait, idle)
        return None if wait is None else min(wait, threading.TIMEOUT_MAX)

    @property
    def _seconds_to_memory_release(self) -> float | None:
        """Seconds until freed memory is to be returned to the system; None: no step has run since it was returned."""
        if self._computed_at is None:
            return None
        return max(0.0, self._computed_at + SECONDS_TO_IDLE - time.monotonic())

    def _poll_inbox(self) -> Message | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _handle(self, message: Message) -> None:
        match message:
            case Expect(request_id, mailbox):
                self._router.expect(request_id, mailbox)
            case Add():
                self._add_request(message)
            case Call():
                message.run(self._engine)
                self._report_finished()
            case Abandon(request_id, mailbox):
                self._router.abandon(request_id, mailbox)
            case Stop(drain):
                if self._stop is None or not drain:
                    self._stop = message
            case GrammarDone():
                self._engine.take_grammars()  # accepts requests, or delivers last outputs
            case TransferDone():
                self._engine.take_transfers()  # delivers last outputs

    def _add_request(self, message: Add) -> None:
        request_id, mailbox, router = message.request_id, message.mailbox, self._router
        router.stop_expecting(mailbox)
        if mailbox.is_abandoned:
            return
        self._adding = mailbox  # the mailbox that gets the error if the thread dies below
        request = self._try_to_add(message)
        has_ends = self._has_unreported_finishes
        if isinstance(request, DuplicateRequest) and has_ends and not router.is_following(request_id):
            # The caller may reuse the id, but the scheduler has not released it yet.
            while self._has_unreported_finishes:
                self._step()
            request = self._try_to_add(message)
        if isinstance(request, BaseException):
            router.refuse(mailbox, request)
        else:
            router.follow(request, mailbox)
            if mailbox.is_aborted:
                self._engine.abort(request_id)
        self._adding = None

    def _try_to_add(self, message: Add) -> Request | BaseException:
        """Add a request; return the request, or the exception that `Add.add` raised. The exception is for the sender of
        the message, and must not end the engine."""
        try:
            return message.add(self._engine)
        except BaseException as error:
            return error

    def abort(self, request_id: str) -> bool:
        """Abort a request; its mailbox gets the last snapshot. Return whether there was such a request. Only the
        engine's thread may call this.

        A request whose prompt is still being tokenized is aborted as soon as it is queued.
        """
        if self._engine.abort(request_id) is not None:  # also delivers the output
            return True
        return self._router.abort_expected(request_id)

    def _report_finished(self) -> None:
        """Report requests that the function of a `Call` has finished in the scheduler, bypassing the engine."""
        self._engine.outputs.deliver_outputs(
            self._engine.outputs.make_last_outputs(self._router.finished(), self._engine.clock())
        )

    # ------------------------------------------------------------------ the end

    def _abort_all_requests(self) -> None:
        for request_id in self._router.request_ids():
            self._engine.abort(request_id)
        with suppress(EngineStepError):  # the outputs are no longer read
            self._engine.finish_steps()
        self._router.ring()
        if self._stats_log is not None:
            self._stats_log.flush()

    def _close(self) -> None:
        """Close the inbox and the engine, and send every waiting caller an error."""
        with self._gate:
            self._is_closed = True
        self._engine.on_output = self._engine.steps.on_report = self._engine.on_ready = None
        self._engine.grammars.notify = None
        if self._engine.kv_connector is not None:
            self._engine.kv_connector.notify = None
        self._engine.grammars.close()
        self._engine.pausing.fail(self.dead_error())
        self._engine.close()
        self._router.close(self.dead_error)
        if self._adding is not None:
            self._router.refuse(self._adding, self.dead_error())
        while (message := self._poll_inbox()) is not None:
            if isinstance(message, Add):
                self._router.refuse(message.mailbox, self.dead_error())
            elif isinstance(message, Call) and message.future.set_running_or_notify_cancel():
                message.future.set_exception(self.dead_error())
        self._router.ring()


_live: WeakSet[EngineThread] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """Stop all engine threads when Python exits: a thread in a PyTorch kernel must not outlive the interpreter, and a
    hanging thread must not keep the interpreter alive."""
    threads = list(_live)
    for thread in threads:
        thread.ask_to_stop()
    for thread in threads:
        thread.join(EXIT_PATIENCE)
