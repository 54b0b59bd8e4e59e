"""How outputs cross from the engine's thread to event loops: a mailbox per request, a port per loop.

    engine's thread                                        event loop
    mailbox.put(output)  ->  port.mark, port.ring  ->  port wakes the tasks that wait at its mailboxes

A mailbox holds one snapshot, the newest. Snapshots are cumulative, so a consumer that comes late finds in it all that
it missed, and what a slow consumer costs does not grow. A port schedules one callback per ring, for all its mailboxes,
and none while the one before has not run: a loop that is blocked finds one callback, not one per step.

No locks: every flag is set by one side and cleared by the other, and the side that clears it does so *before* it reads
what the flag announces. So the writer either sees the flag cleared and sets it again, or its value is still to be read.
"""

from __future__ import annotations

import asyncio
from collections import deque

from pointsman.engine.output import RequestOutput


class Port:
    """One event loop, as the engine's thread sees it."""

    __slots__ = ("_is_scheduled", "_marked", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._marked: deque[Mailbox] = deque()  # its append and popleft are atomic
        self._is_scheduled = False

    @property
    def is_closed(self) -> bool:
        """Whether nobody can read any more."""
        return self.loop.is_closed()

    def mark(self, mailbox: Mailbox) -> None:
        """Engine's thread: this mailbox has news, to be told with the next `ring`."""
        if not mailbox.is_marked:
            mailbox.is_marked = True
            self._marked.append(mailbox)

    def ring(self) -> bool:
        """Engine's thread: wake the loop for all marked mailboxes. False: the loop is closed, nobody will read."""
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
        while self._marked:
            mailbox = self._marked.popleft()
            mailbox.is_marked = False
            mailbox.wake()


class Mailbox:
    """The newest snapshot of one request, and whoever waits for the next."""

    __slots__ = (
        "_accepted",
        "_error",
        "_latest",
        "_waiter",
        "finished_only",
        "is_abandoned",
        "is_aborted",
        "is_expected",
        "is_marked",
        "port",
    )

    def __init__(self, port: Port, *, finished_only: bool = False) -> None:
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
        self._waiter: asyncio.Future[None] | None = None

    # ------------------------------------------------------------------ engine's thread

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

    # ------------------------------------------------------------------ event loop

    async def wait_accepted(self) -> None:
        """Until the request is queued, or its stream is closed.

        Raises:
            What the engine said instead.
        """
        while not (self._accepted or self.is_abandoned):
            if self._error is not None:
                raise self._error
            await self._wait()

    async def newer_than(self, seen: RequestOutput | None) -> RequestOutput | None:
        """The newest snapshot, once there is one other than `seen`; None once the stream is closed.

        Raises:
            What ended the request instead.
        """
        while self._latest is seen and not self.is_abandoned:
            if self._error is not None:
                raise self._error
            await self._wait()
        return None if self.is_abandoned else self._latest

    def wake(self) -> None:
        """Let the waiting task look again."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = self.port.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
