"""Gate: what every request of a client passes, so that a server that shuts down knows whom it still owes an answer."""

from __future__ import annotations

import asyncio


class Gate:
    """Counts requests from their first look at the gate to the last byte of their answers. One event loop owns it."""

    def __init__(self) -> None:
        self.is_closed = False
        """Whether new requests are turned away."""
        self.num_open = 0
        """Requests inside."""
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def close(self) -> None:
        """Let nobody in any more."""
        self.is_closed = True

    def enter(self) -> bool:
        """A request comes; whether it may. One that does must `leave`."""
        if self.is_closed:
            return False
        self.num_open += 1
        self._is_empty.clear()
        return True

    def leave(self) -> None:
        """A request has its whole answer, or its client is gone."""
        self.num_open -= 1
        if not self.num_open:
            self._is_empty.set()

    async def wait_empty(self) -> None:
        """Until nobody is inside."""
        await self._is_empty.wait()
