"""Receiver: reads frames from the engine process, and puts each delta into the stream of its request.

    socket -> Receiver.data_received -> ClientStream.put, put_tokens -> the stream's reader, or its shortcut

A stream is over after the delta with a finish_reason, after an error, or when it is closed:

    not sent -> sent -> accepted (queued, its grammar compiled) -> deltas -> over

Deltas that arrive before the reader has read the last one are merged into that delta, so an unread stream holds one
delta. While the reader waits, a shortcut may process tokens in its place: then no task is woken, and no delta is made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeAlias

from pointsman.engine.aio.mailbox import Waiter
from pointsman.engine.errors import EngineDeadError
from pointsman.engine.outputs.request_output import Resumed
from pointsman.server.service.heartbeat import Heartbeat
from pointsman.server.wire.messages import Delta, EngineOutputs, EngineRequest, StepNote, Unpacker

Shortcut: TypeAlias = Callable[[str, list[int], int], bool]
"""A function that may process a delta in place of the stream's reader. Its arguments are the delta's text, token ids
and number of cached tokens. It returns whether it has processed the delta."""


class Receiver(asyncio.Protocol):
    """The streams of unfinished requests, and the receiving end of the socket.

    Args:
        on_other: called with each message that is not an `EngineOutputs`.
        on_close: called when the socket is closed.
        heartbeat: the engine's heartbeat; all received data are signs of life.

    Attributes:
        streams: the streams of requests that were sent and have not finished, by their keys.
        last_words: the reason why the engine takes no more requests, if it has reported one.
        on_steps: called with the `StepNote`s of steps that ran, in order.
        on_end: called when a request has finished, with the request, its last delta (with metrics, unless the request
            was abandoned) and its number of output tokens.
    """

    def __init__(self, on_other: Callable[[Any], None], on_close: Callable[[], None], heartbeat: Heartbeat) -> None:
        self.streams: dict[int, ClientStream] = {}
        self.last_words = ""
        self.on_steps: Callable[[list[StepNote]], None] | None = None
        self.on_end: Callable[[EngineRequest, Delta, int], None] | None = None
        self._on_other = on_other
        self._on_close = on_close
        self._heartbeat = heartbeat
        self._unpacker = Unpacker()

    def data_received(self, data: bytes) -> None:
        """Process bytes from the engine process, in pieces of any length."""
        self._heartbeat.note_sign_of_life()
        for message in self._unpacker.feed(data):
            if isinstance(message, EngineOutputs):
                self._take(message)
            else:
                self._on_other(message)

    def connection_lost(self, error: Exception | None) -> None:
        """Called when the engine process has exited or is about to exit."""
        self._on_close()

    def _take(self, outputs: EngineOutputs) -> None:
        if outputs.steps and self.on_steps is not None:
            self.on_steps(outputs.steps)
        streams = self.streams
        for key in outputs.accepted:
            if (stream := streams.get(key)) is not None:
                stream.accept()
        for key, text, token_ids, num_cached_tokens in outputs.tokens:
            if (stream := streams.get(key)) is not None:
                stream.put_tokens(text, token_ids, num_cached_tokens)
        for key, delta in outputs.deltas:
            if (stream := streams.get(key)) is not None:
                stream.put(delta)
                if delta.finish_reason is not None:
                    del streams[key]
                    self.report_end(stream, delta)
        for key, error in outputs.errors:
            if isinstance(error, EngineDeadError):  # `EngineClient._mark_dead` decides about all streams of the process
                self.last_words = str(error)
                continue
            if (stream := streams.pop(key, None)) is not None:
                stream.fail(error)

    def report_end(self, stream: ClientStream, last: Delta) -> None:
        """Call `on_end` for a stream whose request has finished with `last`, or is abandoned."""
        if self.on_end is not None:
            self.on_end(stream.request, last, stream.num_output_tokens)

    def take_all(self) -> list[ClientStream]:
        """Remove and return the streams of unfinished requests, in the order of sending: nothing more will arrive for
        them."""
        streams = list(self.streams.values())
        self.streams.clear()
        return streams


class ClientStream(AsyncIterator[Delta]):
    """The deltas of one request, for one reader; it ends after the delta with a finish_reason.

    Closing the stream, or cancelling its reader, aborts the request, whose blocks are free at the next step boundary.
    Another task may close the stream; for the reader it then ends. Created by `generate` of a client or a fleet.

    Args:
        request: the request whose deltas arrive.
        submit: sends the requests of streams.
        abandon: aborts the request of a stream, if it was sent and has not finished.
    """

    def __init__(
        self,
        request: EngineRequest,
        submit: Callable[[Sequence[ClientStream]], None],
        abandon: Callable[[ClientStream], None],
    ) -> None:
        self.key = -1
        """Key by which `EngineClient` knows the request, once it is sent."""
        self.engine = 0
        """Number of the engine to which the request was sent last."""
        self.request = request
        self.output_token_ids: list[int] = []
        """All received tokens, read or unread."""
        self.num_deaths = 0
        """Number of engines that died after the request was sent to them and before it finished."""
        self.shortcut: Shortcut | None = None
        """Called with tokens that arrive while the reader waits. If it returns True, it has processed them, and the
        reader does not get them."""
        self._first_token_time = 0.0
        self._num_cached_tokens = 0
        self._submit = submit
        self._abandon = abandon
        self._is_sent = False
        self._is_accepted = False
        self._is_over = False
        self._next: Delta | None = None
        self._error: Exception | None = None
        self._waiter = Waiter(asyncio.get_running_loop())

    async def start(self) -> None:
        """Send the request, unless it has been sent, and return when it is queued (and its grammar compiled).

        Raises:
            ValueError: the request can never run, with the reason.
            EngineDeadError: the engine is shutting down, or has died and no other engine takes the request.
            EngineStalledError: the engine does not read its socket.
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
        """End the stream, and abort its request unless that has finished."""
        self._abort()
        self._waiter.wake()

    def _send(self) -> None:
        if not self._is_sent and not self._is_over:
            self._submit([self])

    async def _wait(self) -> None:
        """Wait until a delta, the acceptance or an error has arrived.

        Raises:
            The error that ended the request; the stream is then over.
        """
        if self._error is not None:
            self._is_over = True
            raise self._error
        try:
            await self._waiter.wait()
        except asyncio.CancelledError:
            self._abort()
            raise

    def _abort(self) -> None:
        self._is_over = True
        self._abandon(self)

    @property
    def num_output_tokens(self) -> int:
        """Number of received tokens, read or unread."""
        return len(self.output_token_ids)

    # ------------------------------------------------------------------ for the client and its receiver

    def prepare_to_resume(self) -> None:
        """After the death of the request's engine: let the request continue after the received tokens when it is
        resent."""
        if self.output_token_ids:
            known = list(self.output_token_ids)
            self.request.resumed = Resumed(known, self._first_token_time, self._num_cached_tokens)

    def note_sent(self, key: int = -1) -> None:
        """Mark the request as sent with `key` to an engine, or as waiting for an engine if `key` is -1."""
        self._is_sent = True
        self.key = key

    def accept(self) -> None:
        """Mark the request as queued by the engine."""
        self._is_accepted = True
        self._waiter.wake()

    def put_tokens(self, text: str, token_ids: list[int], num_cached_tokens: int) -> None:
        """Append a delta that has only tokens to the unread deltas, or give it to the shortcut."""
        self._note_received(token_ids, num_cached_tokens)
        if self._next is None and self.shortcut is not None and self._waiter.is_waiting:
            try:
                if self.shortcut(text, token_ids, num_cached_tokens):
                    return
            except Exception:  # the reader will fail with the same delta, and report the error to this client alone
                self.shortcut = None
        self._keep(Delta(text, token_ids, num_cached_tokens=num_cached_tokens))

    def put(self, delta: Delta) -> None:
        """Append a delta to the unread deltas."""
        self._note_received(delta.token_ids, delta.num_cached_tokens)
        self._keep(delta)

    def _note_received(self, token_ids: list[int], num_cached_tokens: int) -> None:
        self._is_accepted = True
        if token_ids:
            if not self.output_token_ids:
                self._first_token_time = time.monotonic()
                self._num_cached_tokens = num_cached_tokens
            self.output_token_ids += token_ids

    def _keep(self, delta: Delta) -> None:
        """Store a delta for the reader; if there is an unread delta, merge the new one into that."""
        if self._next is None:
            self._next = delta
        else:
            self._next.merge(delta)
        self._waiter.wake()

    def fail(self, error: Exception) -> None:
        """End the stream with an error, which the reader gets after the deltas that have arrived."""
        self._error = error
        self._waiter.wake()
