"""Waiter: one task waits until others say that something has happened.

    while not is_done():
        await waiter.wait()      # and elsewhere: waiter.wake()

What has happened is not said: whoever was woken looks for itself. A `wake` while nobody waits is forgotten. No news is
missed all the same, because the loop runs nothing else between the look and the wait.
"""

from __future__ import annotations

import asyncio


class Waiter:
    """Where one task at a time waits. It is woken in its event loop's thread.

    Args:
        loop: of whoever waits; a task of another one gets a RuntimeError.
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

    def wake(self) -> None:
        """Let the waiting task, if there is one, look again."""
        if self._future is not None and not self._future.done():
            self._future.set_result(None)
