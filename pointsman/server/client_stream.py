"""ClientStream: the deltas of one request, as the API process reads them. Made by `EngineClient.generate`.

    not sent -> sent -> accepted (queued, its grammar compiled) -> deltas -> over

It is over after the delta with a finish_reason, after an error, and when it is closed. What the engine tells meanwhile
is kept until it is read: deltas come together in one, so a stream that nobody reads holds one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from pointsman.engine.aio.mailbox import Waiter
from pointsman.server.wire import Delta, EngineRequest

if TYPE_CHECKING:
    from pointsman.server.engine_client import EngineClient


class ClientStream(AsyncIterator[Delta]):
    """The deltas of one request, for one reader; it ends after the one with a finish_reason.

    Closing it, or cancelling its reader, aborts the request: its blocks are free at the next step boundary. Another
    task than the reader may close it; for the reader it then simply ends.

    Args:
        client: sends the request, and is told when it is to be aborted.
        key: the client's name for the request.
        request: what is asked for.
    """

    def __init__(self, client: EngineClient, key: int, request: EngineRequest) -> None:
        self.key = key
        self.request = request
        self.num_output_tokens = 0
        """Tokens received, read or not."""
        self._client = client
        self._is_sent = False
        self._is_accepted = False
        self._is_over = False
        self._next: Delta | None = None
        self._error: Exception | None = None
        self._waiter = Waiter(asyncio.get_running_loop())

    async def start(self) -> None:
        """Send the request, unless that has been done, and return when it is queued (and its grammar compiled).

        Raises:
            ValueError: it can never run, with the reason.
            EngineDeadError: the engine has died or is shutting down.
            EngineStalledError: it does not read what it is sent.
        """
        self._send()
        while not (self._is_accepted or self._is_over):
            await self._wait()

    def __aiter__(self) -> ClientStream:
        return self

    async def __anext__(self) -> Delta:
        self._send()
        while self._next is None and not self._is_over:
            await self._wait()
        if self._is_over or self._next is None:
            raise StopAsyncIteration
        delta, self._next = self._next, None
        self._is_over = delta.finish_reason is not None
        return delta

    async def aclose(self) -> None:
        """End the stream; its request is aborted if it has not ended."""
        self._let_go()
        self._waiter.wake()

    def _send(self) -> None:
        if not self._is_sent and not self._is_over:
            self._client.submit([self])

    async def _wait(self) -> None:
        """Until something has happened.

        Raises:
            What ended the request; from then on it is over.
        """
        if self._error is not None:
            self._is_over = True
            raise self._error
        try:
            await self._waiter.wait()
        except asyncio.CancelledError:
            self._let_go()
            raise

    def _let_go(self) -> None:
        self._is_over = True
        self._client.abandon(self)

    # ------------------------------------------------------------------ for the client

    def note_sent(self) -> None:
        """The request is on its way."""
        self._is_sent = True

    def accept(self) -> None:
        """The request is queued."""
        self._is_accepted = True
        self._waiter.wake()

    def put(self, delta: Delta) -> None:
        """What is new, behind what has not been read."""
        self._is_accepted = True
        self.num_output_tokens += len(delta.token_ids)
        if self._next is None:
            self._next = delta
        else:
            self._next.merge(delta)
        self._waiter.wake()

    def fail(self, error: Exception) -> None:
        """There will be no more deltas; the reader gets this error once it has read what there is."""
        self._error = error
        self._waiter.wake()
