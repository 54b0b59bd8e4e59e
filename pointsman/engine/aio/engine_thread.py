"""The thread that owns an engine, and the inbox through which all others reach it.

    loop:  messages from the inbox -> schedule -> model -> update -> snapshots into mailboxes, one ring per port

Messages are handled between steps, in the order in which they were sent, so nothing here or in the scheduler needs a
lock. Without work the thread blocks on the inbox. It ends in one of two ways, and every waiting reader gets an
error or a last output:

- it was asked to stop: at once (what runs is aborted), or once what runs has finished (`drain`);
- it died: a step failed more often in a row than allowed, or anything else was raised. Then every stream and every
  call, waiting or still to come, gets an `EngineDeadError`.
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
from pointsman.engine.aio.readers import Readers
from pointsman.engine.errors import EngineDeadError, EngineStepError
from pointsman.engine.kv.worker import EXIT_PATIENCE  # its thread ends after the one here, which may wait for it
from pointsman.engine.machine import give_back_freed_pages
from pointsman.engine.memory import use_device
from pointsman.engine.pulse import Pulse
from pointsman.engine.stats import StatsLogger
from pointsman.engine.threads import release_helper_threads

if TYPE_CHECKING:
    from pointsman.core import Request, SchedulerOutput
    from pointsman.engine.engine import Engine

logger = logging.getLogger(__name__)

SECONDS_TO_IDLE = 1.0
"""Without work, after which freed memory goes back to the system."""
LOOP_CHECK_INTERVAL = 0.5
"""Seconds between checks for event loops that were closed while requests of theirs are unfinished."""


# ---------------------------------------------------------------------------------------- messages in the inbox


@dataclass(slots=True, eq=False)
class Expect:
    """Message: an `Add` with this mailbox will follow, or an `Abandon`; its prompt is being tokenized."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Add:
    """Message: queue a request."""

    request_id: str
    mailbox: Mailbox
    add: Callable[[Engine], Request]
    """Adds it to the engine, or raises why not."""


@dataclass(slots=True, eq=False)
class Call:
    """Message: call a function with the engine."""

    function: Callable[[Engine], Any]
    future: Future[Any]

    def run(self, engine: Engine) -> None:
        """Call it; what it returns or raises goes to the caller."""
        if self.future.set_running_or_notify_cancel():  # False: the caller has given up
            try:
                self.future.set_result(self.function(engine))
            except BaseException as error:  # whatever it is, it is the caller's
                self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class Abandon:
    """Message: this mailbox has no reader any more."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Stop:
    """Message: end the thread."""

    drain: bool


@dataclass(slots=True, eq=False)
class GrammarDone:
    """Message: a grammar has been compiled, or has failed."""


@dataclass(slots=True, eq=False)
class TransferDone:
    """Message: KV has been loaded or stored, or could not be."""


Message: TypeAlias = Expect | Add | Call | Abandon | Stop | GrammarDone | TransferDone


# ---------------------------------------------------------------------------------------------------- the thread


class EngineThread:
    """Steps an engine while it has work. Start it once; only its own thread touches the engine afterwards.

    Args:
        engine: only this thread may use it from now on.
        max_step_retries: how often in a row a failed step is tried again.
        log_stats_interval: seconds between lines of statistics; None: none.
        on_step: called in the thread after every step, with what ran in it.
        on_beat: called in the thread while a step goes on; see `Pulse`.
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
        self._readers = Readers(engine.abort)
        engine.on_output = self._readers.deliver
        engine.steps.on_report = self._note_report
        engine.on_ready = self._readers.accept
        engine.grammars.notify = self._note_grammar
        if engine.kv_connector is not None:
            engine.kv_connector.notify = self._note_transfer
        self._max_step_retries = max_step_retries
        self._on_step = on_step
        self.pulse = Pulse(on_beat)
        """What the thread's steps take."""
        self._stats_log = None if log_stats_interval is None else StatsLogger(engine, log_stats_interval)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._adding: Mailbox | None = None
        self._num_failures = 0  # in a row
        self._computed_at: float | None = None  # the last step, unless freed memory was given back since
        self._stop: Stop | None = None
        self._gate = threading.RLock()  # a message is sent, or the inbox is closed; held for no longer than that
        self._is_draining = False
        self._is_closed = False
        self.cause: BaseException | None = None
        """What killed the thread."""
        self.ended: Future[None] = Future()
        """Done when the thread has nothing left to do."""
        self.ended.set_running_or_notify_cancel()  # a caller that gives up waiting must not cancel it for all
        self._thread = threading.Thread(target=self._run, name="pointsman-engine", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Begin to handle messages. The calling thread is taken to have made the engine, and not to compute further."""
        release_helper_threads()
        self._thread.start()
        _live.add(self)

    @property
    def is_running(self) -> bool:
        """Whether messages will be handled."""
        return not self._is_closed and self._thread.is_alive()

    def dead_error(self) -> EngineDeadError:
        """Why no message will be handled; a new error for each caller."""
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
        """Put a message into the inbox.

        Raises:
            EngineDeadError: it would never be handled, or it is a request and the engine only finishes what it has.
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
        """Whether `ended` is or will be done. After a fork the thread exists in the other process only."""
        return self._thread.is_alive() or self.ended.done()

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort a request that has no reader any more. Safe in finalizers, at any moment, also when the thread has
        stopped."""
        mailbox.is_abandoned = True
        self._inbox.put(Abandon(request_id, mailbox))

    def ask_to_stop(self) -> None:
        """Stop at the end of the step in progress, whatever the state."""
        self._inbox.put(Stop(drain=False))

    def _note_grammar(self) -> None:
        self._inbox.put(GrammarDone())

    def _note_transfer(self) -> None:
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
            while not self._is_over():
                self._handle_messages()
                if self._has_work() and not self._is_over():
                    self._step()
            self._abort_all()
        except BaseException as error:  # every waiting caller must get this error
            self.cause = error
            logger.critical("the engine is dead", exc_info=error)
        finally:
            self._close()
            self.ended.set_result(None)

    def _has_work(self) -> bool:
        if self._has_unreported_ends or self._engine.has_runnable_requests():
            return True
        deadline = self._load_deadline
        return deadline is not None and deadline <= self._engine.clock()

    @property
    def _load_deadline(self) -> float | None:
        """When a step is due to give up a load."""
        return None if self._engine.kv_connector is None else self._engine.kv_connector.deadline

    @property
    def _has_unreported_ends(self) -> bool:
        """Whether ids of finished requests are free only with the next output."""
        return self._engine.scheduler.has_unreported_ends

    def _is_over(self) -> bool:
        if self._stop is None:
            return False
        if not self._stop.drain:
            return True
        engine = self._engine  # what a pause holds up will not end by itself
        ends = engine.has_runnable_requests() if engine.is_paused else engine.has_unfinished_requests()
        return not (ends or self._readers.are_expected)

    def _step(self) -> bool:
        """One step of the engine; whether it worked. A failed one is tried again by the next call, unless there were
        too many.
        """
        engine = self._engine
        self.pulse.begin()
        try:
            engine.steps.run()
        except EngineStepError as error:  # the scheduler is as it was before the step
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

    def _note_report(self, output: SchedulerOutput) -> None:
        """The outputs of a step were delivered; the next one may be executed just now."""
        if self._on_step is not None:
            self._on_step(output)
        self._readers.check_ports(LOOP_CHECK_INTERVAL)
        self._readers.ring()
        if self._stats_log is not None:
            self._stats_log.tick()

    # ------------------------------------------------------------------ messages

    def _handle_messages(self) -> None:
        """All that are there by now, and not those that come meanwhile, or a busy caller could keep off the next step;
        without work, wait for one.
        """
        message = self._next_message()
        num_more = self._inbox.qsize()
        while message is not None:
            self._handle(message)
            message = self._poll() if num_more > 0 else None
            num_more -= 1
        self._readers.ring()

    def _next_message(self) -> Message | None:
        if self._has_work():
            return self._poll()
        message: Message | None = None
        while message is None and not self._is_over() and not self._has_work():
            try:
                message = self._inbox.get(timeout=self._patience())
            except Empty:
                if self._seconds_to_idle == 0:
                    self._computed_at = None
                    give_back_freed_pages()
                self._readers.check_ports()
                self._engine.end_overdue()  # of those that are parked or paused
            if self._engine.watchdog is not None:
                self._engine.watchdog.tick()
            if self._stats_log is not None:
                # The last line before silence; or silence ends, and it is no part of the next interval.
                self._stats_log.tick()
        return message

    def _patience(self) -> float | None:
        """Seconds to wait for a message; None: without end."""
        wait = None if self._stats_log is None else self._stats_log.wait()
        if self._readers:
            wait = LOOP_CHECK_INTERVAL if wait is None else min(wait, LOOP_CHECK_INTERVAL)
        for deadline in (self._engine.deadlines.next(), self._load_deadline):
            if self._readers.are_following and deadline is not None:
                left = max(0.0, deadline - self._engine.clock())
                wait = left if wait is None else min(wait, left)
        if (idle := self._seconds_to_idle) is not None:
            wait = idle if wait is None else min(wait, idle)
        return None if wait is None else min(wait, threading.TIMEOUT_MAX)

    @property
    def _seconds_to_idle(self) -> float | None:
        """Until freed memory is to be given back; None: there is none."""
        if self._computed_at is None:
            return None
        return max(0.0, self._computed_at + SECONDS_TO_IDLE - time.monotonic())

    def _poll(self) -> Message | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _handle(self, message: Message) -> None:
        match message:
            case Expect(request_id, mailbox):
                self._readers.expect(request_id, mailbox)
            case Add():
                self._add(message)
            case Call():
                message.run(self._engine)
                self._report_finished()
            case Abandon(request_id, mailbox):
                self._readers.abandon(request_id, mailbox)
            case Stop(drain):
                if self._stop is None or not drain:
                    self._stop = message
            case GrammarDone():
                self._engine.take_grammars()  # accepts, or delivers ends
            case TransferDone():
                self._engine.take_transfers()  # delivers ends

    def _add(self, message: Add) -> None:
        request_id, mailbox, readers = message.request_id, message.mailbox, self._readers
        readers.stop_expecting(mailbox)
        if mailbox.is_abandoned:
            return
        self._adding = mailbox  # whatever happens below reaches it
        request = self._try_to_add(message)
        has_ends = self._has_unreported_ends
        if isinstance(request, DuplicateRequest) and has_ends and not readers.is_following(request_id):
            while self._has_unreported_ends:  # for its consumer the id's last request is over: an output must say so
                self._step()
            request = self._try_to_add(message)
        if isinstance(request, BaseException):
            readers.refuse(mailbox, request)
        else:
            readers.follow(request, mailbox)
            if mailbox.is_aborted:
                self._engine.abort(request_id)
        self._adding = None

    def _try_to_add(self, message: Add) -> Request | BaseException:
        """The request, or what was wrong with it: the caller's problem, whatever it is, and not the engine's."""
        try:
            return message.add(self._engine)
        except BaseException as error:
            return error

    def abort(self, request_id: str) -> bool:
        """This thread only: end a request; its mailbox gets the last snapshot. Whether there was one to end.

        A request whose prompt is still being tokenized is aborted as soon as it is queued.
        """
        if self._engine.abort(request_id) is not None:  # delivers
            return True
        return self._readers.abort_expected(request_id)

    def _report_finished(self) -> None:
        """A `Call` may do anything with the engine; also finish requests in the scheduler without the engine."""
        self._engine.outputs.hand_out(self._engine.outputs.end_all(self._readers.finished(), self._engine.clock()))

    # ------------------------------------------------------------------ the end

    def _abort_all(self) -> None:
        for request_id in self._readers.request_ids():
            self._engine.abort(request_id)
        with suppress(EngineStepError):  # its outputs have no reader any more
            self._engine.finish_steps()
        self._readers.ring()
        if self._stats_log is not None:
            self._stats_log.flush()

    def _close(self) -> None:
        """Close the inbox, and give every waiting caller an error."""
        with self._gate:
            self._is_closed = True
        self._engine.on_output = self._engine.steps.on_report = self._engine.on_ready = None
        self._engine.grammars.notify = None
        if self._engine.kv_connector is not None:
            self._engine.kv_connector.notify = None
        self._engine.grammars.close()
        self._engine.pausing.fail(self.dead_error())
        self._engine.close()
        self._readers.close(self.dead_error)
        if self._adding is not None:
            self._readers.refuse(self._adding, self.dead_error())
        while (message := self._poll()) is not None:
            if isinstance(message, Add):
                self._readers.refuse(message.mailbox, self.dead_error())
            elif isinstance(message, Call) and message.future.set_running_or_notify_cancel():
                message.future.set_exception(self.dead_error())
        self._readers.ring()


_live: WeakSet[EngineThread] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread inside a PyTorch kernel must not outlive the interpreter; one that hangs must not keep it alive."""
    threads = list(_live)
    for thread in threads:
        thread.ask_to_stop()
    for thread in threads:
        thread.join(EXIT_PATIENCE)
