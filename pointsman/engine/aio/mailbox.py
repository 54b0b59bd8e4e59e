"""Mailboxes and ports: pass outputs from the engine's thread to consumers in event loops or another process.

    engine's thread                                    event loop, or API process
    mailbox.put(output)  ->  port.mark, port.ring  ->  takes all marked mailboxes

Each request has a mailbox, which holds the newest snapshot of its output for one consumer. Snapshots are cumulative, so
a slow consumer misses nothing, and needs no more memory than a fast one. A port groups the mailboxes of one event loop
or one process, and wakes it once per step for all of them.

The engine's thread uses `Port` and `Mailbox`. Their subclasses for event loops are `LoopPort` and `LoopMailbox`. A
`LoopPort` wakes the tasks that wait at its mailboxes. `ring` schedules one callback in the loop, unless the last one
has not run yet: a blocked loop has one callback to run, not one per step.

There are no locks. The writer sets a flag after it has written a value, and the reader clears the flag *before* it
reads the value. So the writer either sees the flag cleared and sets it again, or the reader has yet to read the new
value.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from pointsman.engine.outputs.request_output import RequestOutput

OwnMailbox = TypeVar("OwnMailbox", bound="Mailbox")


class Port(ABC, Generic[OwnMailbox]):
    """Groups the mailboxes of one event loop or process, so that one `ring` wakes it for all of them; the engine's
    thread uses this class."""

    __slots__ = ("_marked",)

    def __init__(self) -> None:
        self._marked: deque[OwnMailbox] = deque()  # append and popleft of a deque are atomic

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether the event loop is closed, or the process has ended."""

    @abstractmethod
    def ring(self) -> bool:
        """Wake the event loop or process for all marked mailboxes. Returns False if the loop is closed or the process
        has ended."""

    def mark(self, mailbox: OwnMailbox) -> None:
        """Mark a mailbox, so that the next `ring` announces it."""
        if not mailbox.is_marked:
            mailbox.is_marked = True
            self._marked.append(mailbox)

    def _pop_marked_mailboxes(self) -> Iterator[OwnMailbox]:
        """Yield the marked mailboxes, in the consumer's thread; each mailbox is unmarked before it is yielded."""
        while self._marked:
            mailbox = self._marked.popleft()
            mailbox.is_marked = False
            yield mailbox


class Mailbox:
    """Holds the newest snapshot of one request's output, for the request's consumer; the engine's thread uses this
    class."""

    __slots__ = (
        "_accepted",
        "_error",
        "_latest",
        "finished_only",
        "is_abandoned",
        "is_aborted",
        "is_expected",
        "is_marked",
        "port",
    )

    def __init__(self, port: Port[Any], *, finished_only: bool = False) -> None:
        self.port = port
        self.finished_only = finished_only
        """Whether the consumer reads only the snapshot of the finished request."""
        self.is_abandoned = False
        """Whether the consumer will not read this mailbox again; set by the consumer."""
        self.is_expected = False
        """Whether the request was announced before its prompt was tokenized; set by the sender of an `Expect`."""
        self.is_aborted = False
        """Whether the request is to be aborted as soon as it is queued; set by the engine's thread."""
        self.is_marked = False
        self._accepted = False
        self._latest: RequestOutput | None = None
        self._error: BaseException | None = None

    def accept(self) -> None:
        """Mark the request as queued."""
        self._accepted = True
        self.port.mark(self)

    def put(self, output: RequestOutput) -> None:
        """Replace the snapshot by a newer output."""
        self._latest = output
        self.port.mark(self)

    def fail(self, error: BaseException) -> None:
        """End the snapshots with an error, which the consumer gets after the last snapshot."""
        self._error = error
        self.port.mark(self)


# ------------------------------------------------------------------------------------------------- event loops


class Waiter:
    """Lets one task wait until other code in its event loop's thread wakes it.

        while not is_done():
            await waiter.wait()      # and elsewhere: waiter.wake()

    `wake` passes no information: the woken task checks its condition. A `wake` while no task waits has no effect. No
    event is missed, because the loop runs nothing else between the check and the wait.

    Args:
        loop: event loop of the waiting task; a task of another loop gets a RuntimeError.
    """

    __slots__ = ("_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Wait until `wake` is called."""
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits and was not woken yet."""
        return self._future is not None and not self._future.done()

    def wake(self) -> None:
        """Wake the waiting task, if there is one, to check its condition."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class LoopPort(Port["LoopMailbox"]):
    """The port of one event loop.

    Args:
        loop: the event loop whose tasks wait at the mailboxes.
    """

    __slots__ = ("_is_scheduled", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._is_scheduled = False

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed."""
        return self.loop.is_closed()

    def ring(self) -> bool:
        """Wake the loop for all marked mailboxes. Returns False if the loop is closed."""
        if self.loop.is_closed():
            return False
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self.loop.call_soon_threadsafe(self._wake_consumers)
            except RuntimeError:  # closed since the check above
                return False
        return True

    def _wake_consumers(self) -> None:
        self._is_scheduled = False
        for mailbox in self._pop_marked_mailboxes():
            mailbox.wake()


class LoopMailbox(Mailbox):
    """A mailbox at which one task of an event loop waits."""

    __slots__ = ("_waiter",)

    def __init__(self, port: LoopPort, *, finished_only: bool = False) -> None:
        super().__init__(port, finished_only=finished_only)
        self._waiter = Waiter(port.loop)

    async def wait_accepted(self) -> None:
        """Wait until the request is queued, or the consumer has abandoned the mailbox.

        Raises:
            The error with which the engine refused the request.
        """
        while not (self._accepted or self.is_abandoned):
            await self._wait()

    async def wait_newer_than(self, seen: RequestOutput | None) -> RequestOutput | None:
        """Wait for a snapshot other than `seen`, and return it; None: the consumer has abandoned the mailbox.

        Raises:
            The error that ended the request.
        """
        while self._latest is seen and not self.is_abandoned:
            await self._wait()
        return None if self.is_abandoned else self._latest

    def wake(self) -> None:
        """Wake the waiting task to check its condition."""
        self._waiter.wake()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        await self._waiter.wait()
