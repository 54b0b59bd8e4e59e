"""ResponseSender: reads the samples of a client's request, and sends the client one body or events.

    receiver -> Sample (counts, times) -> answer writer -> sse

Reading and sending alternate: the next delta of a sample is read when the transport has accepted the sample's last
event. A shortcut (`_shortcut_for`) writes a delta of plain text without waking the sample's task, while the task waits
and the transport can be written. That halves the cost of a token here. The shortcut never writes a sample's first
token: it returns False while `choice.plain_head` is "". This field is set when the task writes an event. Leaving a
sender in any way aborts its unfinished requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING

from pointsman.engine.errors import EngineDeadError
from pointsman.engine.params.sampling import SamplingParams
from pointsman.server.service.gate import check_finish, too_late
from pointsman.server.wire.answers import Choice, Prompt, TextWriter, error_event
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.messages import Delta
from pointsman.server.wire.pieces import in_pieces
from pointsman.server.wire.sse import EventStream, send_json

if TYPE_CHECKING:
    from starlette.types import Scope, Send

    from pointsman.server.metrics.observations import Observations
    from pointsman.server.service.backlog import Ticket
    from pointsman.server.service.gate import Gate
    from pointsman.server.service.receiver import ClientStream, Shortcut
    from pointsman.server.wire.answers import AnswerWriter
    from pointsman.server.wire.logprobs import Logprobs

logger = logging.getLogger(__name__)

DEADLINE_GRACE = 1.0
"""Seconds after a deadline in which the engine must end the request; it does so between steps, and a step may be
long."""


class Sample:
    """One sample of one prompt. Reading it yields deltas, counts tokens and observes times.

    Args:
        choice: the response's choice for this sample; holds the counts.
        stream: the deltas of the engine.
        ticket: the request's ticket in the backlog; at the sample's first token its prompt no longer counts as waiting.
        observations: the observed times and counts of the server.
        seconds_left: seconds after which the sample finishes as "deadline" at the latest; None: no limit.
        shared: the log probabilities of the prompt, which the prompt's first sample computes and its other samples
            repeat; None: the client did not ask for them.
        is_first: whether this is the prompt's first sample.
    """

    __slots__ = ("_is_first", "_last_time", "_limit", "_observations", "_shared", "_tenant", "_ticket", "choice",
                 "has_started", "stream")  # fmt: skip

    def __init__(
        self,
        choice: Choice,
        stream: ClientStream,
        ticket: Ticket,
        observations: Observations,
        seconds_left: float | None = None,
        *,
        shared: asyncio.Future[Logprobs | None] | None = None,
        is_first: bool = True,
    ) -> None:
        self._shared = shared
        self._is_first = is_first
        self.choice = choice
        self.stream = stream
        self._ticket = ticket
        self._observations = observations
        self._limit = None if seconds_left is None else asyncio.get_running_loop().time() + seconds_left
        self._last_time = stream.request.arrival_time or time.monotonic()
        self._tenant = observations.tenants.open(stream.request.tenant)
        self.has_started = False
        """Whether the sample's first token or vector has arrived."""

    def __aiter__(self) -> Sample:
        return self

    async def __anext__(self) -> Delta:
        delta = await (self.stream.__anext__() if self._limit is None else self._next_in_time(self._limit))
        self.note_delta(delta)
        if self._shared is not None:
            await self._share_logprobs(self._shared, delta)
        return delta

    async def _share_logprobs(self, shared: asyncio.Future[Logprobs | None], delta: Delta) -> None:
        """Give the log probabilities of the prompt, which are in the first delta, to the other samples of the prompt.

        The other samples wait for the log probabilities, which are None if the first sample ends without them.
        """
        self._shared = None
        if not self._is_first:
            delta.prompt_logprobs = await asyncio.shield(shared)
        elif not shared.done():
            shared.set_result(delta.prompt_logprobs)

    def note_delta(self, delta: Delta) -> None:
        """Count the tokens of a delta that was read, and observe the time of reading."""
        self.choice.num_cached_tokens = delta.num_cached_tokens
        if delta.token_ids:
            self.note_tokens(len(delta.token_ids))
        elif delta.embedding is not None:
            self._note_start()

    def note_tokens(self, num_new: int) -> None:
        """Count new tokens, at least one, and observe the time between tokens."""
        choice, now = self.choice, time.monotonic()
        observations = self._observations.engines[self.stream.engine]
        if choice.num_tokens:
            observations.inter_token(now - self._last_time, num_new)
        else:
            observations.first_token(now - self._last_time)
            self._ticket.note_first_token(choice.prompt_index)
            self._note_start()
        self._last_time = now
        choice.num_tokens += num_new
        self._tenant.num_generated_tokens += num_new

    def _note_start(self) -> None:
        self.has_started = True
        self._tenant.num_unstarted -= 1
        self._tenant.num_prompt_tokens += len(self.stream.request.prompt_token_ids)

    async def aclose(self) -> None:
        """Abort the sample's request, unless it has finished. To be called once."""
        self._observations.tenants.close(self._tenant, is_started=self.has_started)
        await self.stream.aclose()

    async def _next_in_time(self, limit: float) -> Delta:
        """The next delta; if no delta arrives until `limit`, a last delta with finish reason "deadline".

        A delta that has arrived is returned in any case, even after the limit.
        """
        try:
            async with asyncio.timeout_at(limit):
                return await self.stream.__anext__()
        except TimeoutError:
            return Delta(finish_reason="deadline", num_cached_tokens=self.choice.num_cached_tokens)


class ResponseSender:
    """The samples of a client's request. A context manager: its exit aborts unfinished requests.

    Args:
        gate: distinguishes a death of the engine from a shutdown of the server.
        observations: the observed times and counts of the server.
        ticket: the request's place in the backlog.
        deadline: the time at which all samples finish at the latest, by `time.monotonic`; None: no limit.
    """

    def __init__(self, gate: Gate, observations: Observations, ticket: Ticket, deadline: float | None = None) -> None:
        self.samples: list[Sample] = []
        self._shared: asyncio.Future[Logprobs | None] | None = None
        self._gate = gate
        self._observations = observations
        self._ticket = ticket
        self.deadline = deadline

    async def __aenter__(self) -> ResponseSender:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sample in self.samples:
            await sample.aclose()

    def add(self, prompt_index: int, prompt: Prompt, stream: ClientStream) -> None:
        """Add a sample. Samples of one prompt are added one after the other."""
        choice = Choice(len(self.samples), prompt_index, prompt)
        is_first = not self.samples or self.samples[-1].choice.prompt_index != prompt_index
        if is_first:
            params = stream.request.params
            has_logprobs = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
            self._shared = asyncio.get_running_loop().create_future() if has_logprobs else None
        ticket, observations = self._ticket, self._observations
        sample = Sample(choice, stream, ticket, observations, self.seconds_left, shared=self._shared, is_first=is_first)
        self.samples.append(sample)

    @property
    def streams(self) -> list[ClientStream]:
        """The streams of all samples, in order."""
        return [sample.stream for sample in self.samples]

    @property
    def choices(self) -> list[Choice]:
        """The choices of all samples, in order."""
        return [sample.choice for sample in self.samples]

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the deadline and `DEADLINE_GRACE` have passed; None: no limit."""
        return None if self.deadline is None else max(0.0, self.deadline + DEADLINE_GRACE - time.monotonic())

    # ------------------------------------------------------------------ whole

    async def send_whole(self, writer: AnswerWriter, send: Send) -> None:
        """Send the response once all samples have finished.

        Raises:
            ApiError: 408, 500 or 503; nothing has been sent.
        """
        try:
            outputs = await self.collect()
        except EngineDeadError as error:
            raise self._gate.from_engine(error) from error
        self._check(outputs)
        body = await in_pieces(writer.whole(self.choices, outputs))
        outputs.clear()  # a slow client should not keep the outputs in memory twice
        await send_json(send, [body.encode()], self._headers(writer))

    async def collect(self) -> list[Delta]:
        """The merged deltas of each sample, once all samples have finished.

        Raises:
            EngineDeadError: the engine has died.
        """
        outputs = [Delta() for _ in self.samples]

        async def read(sample: Sample) -> None:
            async for delta in sample:
                outputs[sample.choice.index].merge(delta)

        await self._for_each_sample(read)
        return outputs

    def _check(self, outputs: list[Delta]) -> None:
        """Refuse a response that would be empty, or lack a vector.

        Raises:
            ApiError: 400 or 500, a sample failed; 408, the deadline passed; 503, the server shuts down.
        """
        for output in outputs:
            check_finish(output.finish_reason, output.finish_detail)
        empty = [output.finish_reason for output in outputs if not output.token_ids and output.embedding is None]
        if len(empty) == len(outputs) or any(output.embedding is not None for output in outputs):
            if "abort" in empty:  # by the server's shutdown; another server may take the request
                raise self._gate.shutdown_error()
            if set(empty) == {"deadline"}:
                raise too_late()

    # ------------------------------------------------------------------ events

    async def send_events(self, writer: TextWriter, scope: Scope, send: Send) -> None:
        """Send events as deltas arrive. An error after the first byte is the last event."""
        events = EventStream(send, self._headers(writer), scope)
        num_running, last_chunk = len(self.samples), b""

        async def pump(sample: Sample) -> None:
            nonlocal num_running, last_chunk
            sample.stream.shortcut = _shortcut_for(sample, writer, events)
            async for delta in sample:
                check_finish(delta.finish_reason, delta.finish_detail)
                chunk = writer.plain_chunk(sample.choice, delta.text) if delta.finish_reason is None else None
                if chunk is None:
                    chunk = await in_pieces(writer.chunk(sample.choice, delta))
                if delta.finish_reason is not None:
                    num_running -= 1
                    if not num_running:  # the last chunk is sent with the end, in one write
                        last_chunk = chunk
                        return
                if chunk and events.can_write_now():
                    events.write_now(chunk)
                elif chunk:
                    await events.write(chunk)

        self._observations.open_streams += 1
        try:
            await events.open()
            try:
                await self._for_each_sample(pump)
                last = writer.usage_event(self.choices)
            except (EngineDeadError, ApiError) as error:
                last = error_event(self._gate.from_engine(error))
            except Exception:
                logger.exception("%s: the stream broke off", writer.id)
                last = error_event(ApiError(500, "the server failed on this request; its log says why"))
            await events.close(last_chunk + last)
        finally:
            self._observations.open_streams -= 1

    def _headers(self, writer: AnswerWriter) -> dict[str, str]:
        """Headers with the response's id and, if there are several engines, the engines of the samples."""
        headers = {"x-request-id": writer.id}
        if len(self._observations.engines) > 1:
            headers["x-engine"] = ", ".join(map(str, sorted({stream.engine for stream in self.streams})))
        return headers

    async def _for_each_sample(self, work: Callable[[Sample], Awaitable[None]]) -> None:
        """Run `work` for all samples concurrently; an exception for one sample stops the others.

        Raises:
            Exception: the first exception of `work`.
        """
        if len(self.samples) == 1:  # no task for the usual case
            await work(self.samples[0])
            return
        tasks: list[asyncio.Future[None]] = []
        try:
            for sample in self.samples:
                tasks.append(asyncio.ensure_future(work(sample)))
                await asyncio.sleep(0)  # there may be a thousand; other clients are served meanwhile
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _shortcut_for(sample: Sample, writer: TextWriter, events: EventStream) -> Shortcut:
    """Returns a function that writes plain tokens of a sample without a task, and returns whether it has written them.
    The function writes after all its other work: writing wakes the client, which may run on this processor, and code
    after that would find cold caches.

    The function returns False for the first token: `plain_chunk` returns None until the task has written a chunk.
    """
    choice, plain_chunk, can_write_now, write_now = (
        sample.choice,
        writer.plain_chunk,
        events.can_write_now,
        events.write_now,
    )
    note_tokens = sample.note_tokens

    def send_now(text: str, token_ids: list[int], num_cached_tokens: int) -> bool:
        if not can_write_now() or (chunk := plain_chunk(choice, text)) is None:
            return False
        choice.num_cached_tokens = num_cached_tokens
        if token_ids:
            note_tokens(len(token_ids))
        write_now(chunk)
        return True

    return send_now
