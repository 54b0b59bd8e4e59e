"""How outputs leave the engine's thread: a mailbox per request, and a port for all mailboxes that one reader reads.

    engine's thread                                    reader
    mailbox.put(output)  ->  port.mark, port.ring  ->  gets all marked mailboxes

A mailbox holds one snapshot, the newest. Snapshots are cumulative, so a consumer that comes late finds in it all that
it missed, and what a slow consumer costs does not grow.

The engine's thread sees `Port` and `Mailbox`. For event loops they are `LoopPort` and `LoopMailbox`:
the port wakes the tasks that wait at its mailboxes. It schedules one callback per ring, for all of them, and none while
the one before has not run: a loop that is blocked finds one callback, not one per step.

No locks: every flag is set by one side and cleared by the other, and the side that clears it does so *before* it reads
what the flag announces. So the writer either sees the flag cleared and sets it again, or its value is still to be read.
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
    """The reader of any number of mailboxes, as the engine's thread sees it."""

    __slots__ = ("_marked",)

    def __init__(self) -> None:
        self._marked: deque[OwnMailbox] = deque()  # its append and popleft are atomic

    @property
    @abstractmethod
    def is_closed(self) -> bool:
        """Whether it has no reader any more."""

    @abstractmethod
    def ring(self) -> bool:
        """Wake the reader for all marked mailboxes. False: it is gone."""

    def mark(self, mailbox: OwnMailbox) -> None:
        """This mailbox has news for the next `ring`."""
        if not mailbox.is_marked:
            mailbox.is_marked = True
            self._marked.append(mailbox)

    def _take_marked(self) -> Iterator[OwnMailbox]:
        """The marked mailboxes, for their reader; each is unmarked before it is returned."""
        while self._marked:
            mailbox = self._marked.popleft()
            mailbox.is_marked = False
            yield mailbox


class Mailbox:
    """The newest snapshot of one request, as the engine's thread sees it."""

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
        """Whether the consumer wants nothing but the last snapshot."""
        self.is_abandoned = False
        """Set by the consumer: it will not read again."""
        self.is_expected = False
        """Set by the sender: the engine's thread knows of the request since before its prompt was tokenized."""
        self.is_aborted = False
        """Set by the engine's thread: the request is to end as soon as it is queued."""
        self.is_marked = False
        self._accepted = False
        self._latest: RequestOutput | None = None
        self._error: BaseException | None = None

    def accept(self) -> None:
        """The request is queued."""
        self._accepted = True
        self.port.mark(self)

    def put(self, output: RequestOutput) -> None:
        """A newer snapshot, in place of the last."""
        self._latest = output
        self.port.mark(self)

    def fail(self, error: BaseException) -> None:
        """There will be no more snapshots; the consumer gets this error once it has read the last one."""
        self._error = error
        self.port.mark(self)


# ------------------------------------------------------------------------------------------------- event loops


class Waiter:
    """One task waits here until others say that something has happened, in its event loop's thread.

        while not is_done():
            await waiter.wait()      # and elsewhere: waiter.wake()

    What has happened is not said: the task that was woken looks for itself. A `wake` while no task waits is forgotten.
    No news is missed all the same, because the loop runs nothing else between the look and the wait.

    Args:
        loop: of the task that waits; a task of another loop gets a RuntimeError.
    """

    __slots__ = ("_future", "_loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._future: asyncio.Future[None] | None = None

    async def wait(self) -> None:
        """Until the next `wake`."""
        self._future = self._loop.create_future()
        try:
            await self._future
        finally:
            self._future = None

    @property
    def is_waiting(self) -> bool:
        """Whether a task waits, and was not woken yet."""
        return self._future is not None and not self._future.done()

    def wake(self) -> None:
        """Let the waiting task, if there is one, look again."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)


class LoopPort(Port["LoopMailbox"]):
    """One event loop.

    Args:
        loop: its tasks wait at the mailboxes.
    """

    __slots__ = ("_is_scheduled", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._is_scheduled = False

    @property
    def is_closed(self) -> bool:
        """Whether the loop is."""
        return self.loop.is_closed()

    def ring(self) -> bool:
        """Wake the loop for all marked mailboxes. False: it is closed."""
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
        for mailbox in self._take_marked():
            mailbox.wake()


class LoopMailbox(Mailbox):
    """A mailbox at which one task of an event loop waits."""

    __slots__ = ("_waiter",)

    def __init__(self, port: LoopPort, *, finished_only: bool = False) -> None:
        super().__init__(port, finished_only=finished_only)
        self._waiter = Waiter(port.loop)

    async def wait_accepted(self) -> None:
        """Until the request is queued, or its stream is closed.

        Raises:
            What the engine said instead.
        """
        while not (self._accepted or self.is_abandoned):
            await self._wait()

    async def newer_than(self, seen: RequestOutput | None) -> RequestOutput | None:
        """The newest snapshot, once there is one other than `seen`; None once the stream is closed.

        Raises:
            The error that finished the request instead.
        """
        while self._latest is seen and not self.is_abandoned:
            await self._wait()
        return None if self.is_abandoned else self._latest

    def wake(self) -> None:
        """Let the waiting task look again."""
        self._waiter.wake()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        await self._waiter.wait()
