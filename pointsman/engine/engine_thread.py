"""The thread that owns an engine, and the inbox through which all others reach it.

    loop:  messages from the inbox -> schedule -> execute -> update -> snapshots into mailboxes, one ring per port

Messages are handled between steps, in the order in which they were sent, so nothing here or in the scheduler needs a
lock. Without work the thread blocks on the inbox. It ends in one of two ways, and either way whoever waits is told:

- it was asked to stop: at once (what runs is aborted), or once what runs has ended (`drain`);
- it died: a step failed more often in a row than allowed, or anything else was raised. Then every stream and every
  call, waiting or still to come, gets an `EngineDeadError`.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakSet

from pointsman.core.errors import DuplicateRequest
from pointsman.engine.errors import EngineDeadError, EngineStepError
from pointsman.engine.mailbox import Mailbox, Port
from pointsman.engine.output import RequestOutput
from pointsman.engine.stats_log import StatsLogger

if TYPE_CHECKING:
    from pointsman.engine.engine import Engine

logger = logging.getLogger(__name__)

EXIT_PATIENCE = 10.0
"""Seconds that the interpreter's exit waits for a step in progress."""


@dataclass(slots=True, eq=False)
class Add:
    """Message: queue a request."""

    request_id: str
    mailbox: Mailbox
    add: Callable[[Engine], None]
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
    """Message: nobody reads this mailbox any more."""

    request_id: str
    mailbox: Mailbox


@dataclass(slots=True, eq=False)
class Stop:
    """Message: end the thread."""

    drain: bool


Message: TypeAlias = Add | Call | Abandon | Stop


class EngineThread:
    """Steps an engine while it has work. Start it once; only its own thread touches the engine afterwards.

    Args:
        engine: nobody else may use it from now on.
        max_step_retries: how often in a row a failed step is tried again.
        log_stats_interval: seconds between lines of statistics; None: none.
    """

    def __init__(self, engine: Engine, *, max_step_retries: int, log_stats_interval: float | None) -> None:
        self._engine = engine
        self._max_step_retries = max_step_retries
        self._stats_log = None if log_stats_interval is None else StatsLogger(engine, log_stats_interval)
        self._inbox: SimpleQueue[Message] = SimpleQueue()
        self._mailboxes: dict[str, Mailbox] = {}
        self._ports_to_ring: dict[Port, None] = {}
        self._num_failures = 0  # in a row
        self._has_unreported_ends = False  # ids of requests that ended are free only with the next step
        self._stop: Stop | None = None
        self._gate = threading.RLock()  # a message is sent, or the inbox is closed; held for no longer than that
        self._is_draining = False
        self._is_closed = False
        self.cause: BaseException | None = None
        """What killed the thread."""
        self.ended: Future[None] = Future()
        """Done when the thread has nothing left to do."""
        self.ended.set_running_or_notify_cancel()  # one who waits for it and gives up must not cancel it for all
        self._thread = threading.Thread(target=self._run, name="pointsman-engine", daemon=True)

    # ------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Begin to handle messages."""
        self._thread.start()
        _live.add(self)

    @property
    def is_running(self) -> bool:
        """Whether messages will be handled."""
        return not self._is_closed and self._thread.is_alive()

    def dead_error(self) -> EngineDeadError:
        """Why nothing will be handled; a new one for each who must hear it."""
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
            if not self.is_running or (self._is_draining and isinstance(message, Add)):
                raise self.dead_error()
            if isinstance(message, Stop):
                self._is_draining = True
            self._inbox.put(message)

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort a request that nobody reads. Safe in finalizers, at any moment, also when the thread has ended."""
        mailbox.is_abandoned = True
        self._inbox.put(Abandon(request_id, mailbox))

    def ask_to_stop(self) -> None:
        """Stop at the end of the step in progress, whatever the state."""
        self._inbox.put(Stop(drain=False))

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._handle_messages()
                if self._has_work() and not self._is_over():
                    self._step()
            self._abort_all()
        except BaseException as error:  # the thread's last words must reach all who wait
            self.cause = error
            logger.critical("the engine is dead", exc_info=error)
        finally:
            self._close()
            self.ended.set_result(None)

    def _has_work(self) -> bool:
        return self._has_unreported_ends or self._engine.has_unfinished_requests()

    def _is_over(self) -> bool:
        return self._stop is not None and not (self._stop.drain and self._engine.has_unfinished_requests())

    def _step(self) -> None:
        """One step of the engine. A failed one is tried again by the next call, unless there were too many."""
        engine = self._engine
        try:
            output = engine.schedule()
            execution = engine.execute(output)
        except EngineStepError as error:
            self._num_failures += 1
            if self._num_failures > self._max_step_retries:
                raise
            logger.warning("%s; retry %d of %d", error, self._num_failures, self._max_step_retries)
            return
        self._num_failures = 0
        self._has_unreported_ends = False  # this output told of them
        for snapshot in engine.update(output, execution):
            self._deliver(snapshot)
        self._ring()
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
        self._ring()

    def _next_message(self) -> Message | None:
        if self._has_work():
            return self._poll()
        while True:
            try:
                message = self._inbox.get(timeout=None if self._stats_log is None else self._stats_log.wait())
            except Empty:
                pass
            else:
                break
            if self._stats_log is not None:
                self._stats_log.tick()  # the last line before silence
        if self._stats_log is not None:
            self._stats_log.tick()  # silence ends: it is no part of the next interval
        return message

    def _poll(self) -> Message | None:
        try:
            return self._inbox.get_nowait()
        except Empty:
            return None

    def _handle(self, message: Message) -> None:
        match message:
            case Add():
                self._add(message)
            case Call():
                message.run(self._engine)
            case Abandon(request_id, mailbox):
                if self._mailboxes.get(request_id) is mailbox:
                    self.abort(request_id)
            case Stop(drain):
                if self._stop is None or not drain:
                    self._stop = message

    def _add(self, message: Add) -> None:
        request_id, mailbox = message.request_id, message.mailbox
        if mailbox.is_abandoned:
            return
        is_ours = request_id not in self._mailboxes
        if is_ours:
            self._mailboxes[request_id] = mailbox  # now, so that whatever happens below reaches it
        error = self._try_to_add(message)
        if isinstance(error, DuplicateRequest) and is_ours and self._has_unreported_ends:
            self._step()  # for its consumer the id's last request is over: let the scheduler's next output tell of it
            error = self._try_to_add(message)
        if error is None:
            mailbox.accept()
        else:
            mailbox.fail(error)
            if is_ours:
                del self._mailboxes[request_id]
        self._ports_to_ring[mailbox.port] = None

    def _try_to_add(self, message: Add) -> BaseException | None:
        """What was wrong with it: the caller's problem, whatever it is, and not the engine's."""
        try:
            message.add(self._engine)
        except BaseException as error:
            return error
        return None

    def abort(self, request_id: str) -> bool:
        """This thread only: end a request; its mailbox gets the last snapshot. Whether there was one to end."""
        output = self._engine.abort(request_id)
        if output is None:
            return False
        self._deliver(output)
        return True

    # ------------------------------------------------------------------ outputs

    def _deliver(self, output: RequestOutput) -> None:
        if output.finished:
            self._has_unreported_ends = True
            mailbox = self._mailboxes.pop(output.request_id, None)
        else:
            mailbox = self._mailboxes.get(output.request_id)
        if mailbox is None or mailbox.is_abandoned:
            return
        if output.finished or not mailbox.finished_only:
            mailbox.put(output)
            self._ports_to_ring[mailbox.port] = None

    def _ring(self) -> None:
        """Wake the loops that have news; forget the requests of those that are closed."""
        while self._ports_to_ring:
            port, _ = self._ports_to_ring.popitem()
            if not port.ring():
                for request_id in [key for key, mailbox in self._mailboxes.items() if mailbox.port is port]:
                    del self._mailboxes[request_id]
                    self.abort(request_id)

    # ------------------------------------------------------------------ the end

    def _abort_all(self) -> None:
        for request_id in list(self._mailboxes):
            self.abort(request_id)
        self._ring()
        if self._stats_log is not None:
            self._stats_log.flush()

    def _close(self) -> None:
        """Close the inbox and tell everybody who still waits."""
        with self._gate:
            self._is_closed = True
        for mailbox in self._mailboxes.values():
            self._fail(mailbox)
        self._mailboxes.clear()
        while (message := self._poll()) is not None:
            if isinstance(message, Add):
                self._fail(message.mailbox)
            elif isinstance(message, Call) and message.future.set_running_or_notify_cancel():
                message.future.set_exception(self.dead_error())
        for port in self._ports_to_ring:
            port.ring()
        self._ports_to_ring.clear()

    def _fail(self, mailbox: Mailbox) -> None:
        mailbox.fail(self.dead_error())
        self._ports_to_ring[mailbox.port] = None


_live: WeakSet[EngineThread] = WeakSet()


@atexit.register
def _stop_all() -> None:
    """A thread inside a PyTorch kernel must not outlive the interpreter; one that hangs must not keep it alive."""
    threads = list(_live)
    for thread in threads:
        thread.ask_to_stop()
    for thread in threads:
        thread.join(EXIT_PATIENCE)
