"""What is behind one client's request: one request of the engine per sample, started, read and closed together."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pointsman.server.wire import Delta

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pointsman.engine.outputs.request_output import Logprob
    from pointsman.server.backlog import Ticket
    from pointsman.server.client_stream import ClientStream
    from pointsman.server.engine_client import EngineClient
    from pointsman.server.metrics import ServerMetrics
    from pointsman.server.prompts import Prompt
    from pointsman.server.wire import EngineRequest


class Sample(AsyncIterator["Delta"]):
    """One sample of one prompt: a choice of the answer. Reading it yields deltas and keeps the counts.

    Args:
        index: of the choice in the answer.
        prompt_index: of its prompt in the request.
        prompt: what is completed.
        stream: of the engine.
        ticket: is told of the first token.
        metrics: are told of all.
        seconds_left: until it is waited for no longer, and ends as late; None: for ever.
    """

    __slots__ = ("_last_time", "_limit", "_metrics", "_ticket", "extra", "index", "num_cached_tokens", "num_tokens",
                 "prompt", "prompt_index", "stream")  # fmt: skip

    def __init__(
        self,
        index: int,
        prompt_index: int,
        prompt: Prompt,
        stream: ClientStream,
        ticket: Ticket,
        metrics: ServerMetrics,
        seconds_left: float | None = None,
    ) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0
        """Tokens read so far."""
        self.num_cached_tokens = 0
        """Of the prompt, found in the prefix cache."""
        self.extra: Any = None
        """What whoever writes the answer keeps about it."""
        self._ticket = ticket
        self._metrics = metrics
        self._limit = None if seconds_left is None else asyncio.get_running_loop().time() + seconds_left
        self._last_time = stream.request.arrival_time or time.monotonic()

    def __aiter__(self) -> Sample:
        return self

    async def __anext__(self) -> Delta:
        delta = await (self.stream.__anext__() if self._limit is None else self._next_in_time(self._limit))
        num_new = len(delta.token_ids)
        self.num_cached_tokens = delta.num_cached_tokens
        if num_new:
            now = time.monotonic()
            if self.num_tokens:
                self._metrics.observe_inter_token(now - self._last_time, num_new)
            else:
                self._metrics.observe_first_token(now - self._last_time)
                self._ticket.first_token(self.prompt_index)
            self._last_time = now
            self.num_tokens += num_new
        return delta

    async def _next_in_time(self, limit: float) -> Delta:
        """The next delta, or the end if the engine, which should have ended it, says nothing.

        What has come before is read in any case, however late its reader.
        """
        try:
            async with asyncio.timeout_at(limit):
                return await self.stream.__anext__()
        except TimeoutError:
            return Delta(finish_reason="deadline", num_cached_tokens=self.num_cached_tokens)


@dataclass(slots=True)
class Result:
    """All of a sample."""

    sample: Sample
    text: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finish_reason: str | None = None
    finish_detail: str = ""
    stop_reason: int | str | None = None
    embedding: npt.NDArray[np.float32] | None = None


DEADLINE_GRACE = 1.0
"""Seconds beyond a deadline that the engine gets to end a request; it does so between steps, and one may be long."""


STARTED_AT_ONCE = 64
"""Samples that are sent in one message; the next ones follow when these are queued. Queuing a long prompt takes 0.2 ms,
between two steps, so that a thousand samples at once would hold up the tokens and the requests of all others."""


class Generation:
    """The samples of a client's request. A context: leaving it aborts what has not ended.

    Args:
        client: the engine.
        metrics: what is observed.
        ticket: the request's place in the backlog.
        deadline: when all of them end in any case, by `time.monotonic`; None: never.
    """

    def __init__(
        self, client: EngineClient, metrics: ServerMetrics, ticket: Ticket, deadline: float | None = None
    ) -> None:
        self.samples: list[Sample] = []
        self._client = client
        self._metrics = metrics
        self._ticket = ticket
        self._deadline = deadline

    def add(self, prompt_index: int, prompt: Prompt, request: EngineRequest) -> None:
        """One more sample; samples of one prompt come one after the other."""
        stream = self._client.generate(request)
        index, left = len(self.samples), self.seconds_left
        self.samples.append(Sample(index, prompt_index, prompt, stream, self._ticket, self._metrics, left))

    async def start(self) -> None:
        """Queue all of them, in order.

        Raises:
            ValueError: one can never run; the others will be aborted when the context is left.
            EngineDeadError: there is no engine.
            EngineStalledError: it takes nothing in.
        """
        streams = [sample.stream for sample in self.samples]
        for first in range(0, len(streams), STARTED_AT_ONCE):
            together = streams[first : first + STARTED_AT_ONCE]
            self._client.submit(together)
            for stream in together:
                await stream.start()

    @property
    def seconds_left(self) -> float | None:
        """Until the engine has had its time to end all of it; None: for ever."""
        return None if self._deadline is None else max(0.0, self._deadline + DEADLINE_GRACE - time.monotonic())

    async def collect(self) -> list[Result]:
        """All samples, once all have ended.

        Raises:
            EngineDeadError: there is no engine any more.
        """
        results: dict[int, Result] = {}

        async def read(sample: Sample) -> None:
            results[sample.index] = await _read_all(sample)

        await self.each(read)
        return [results[index] for index in range(len(self.samples))]

    async def each(self, work: Callable[[Sample], Awaitable[None]]) -> None:
        """Do something for all samples at once; what one of them raises stops the others.

        Raises:
            Exception: the first that was raised.
        """
        if len(self.samples) == 1:  # the usual case costs no task
            await work(self.samples[0])
            return
        tasks: list[asyncio.Future[None]] = []
        try:
            for sample in self.samples:
                tasks.append(asyncio.ensure_future(work(sample)))
                await asyncio.sleep(0)  # there may be a thousand, and others to be served meanwhile
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for sample in self.samples:
            await sample.stream.aclose()


async def _read_all(sample: Sample) -> Result:
    texts: list[str] = []
    result = Result(sample, "")
    async for delta in sample:
        texts.append(delta.text)
        result.token_ids += delta.token_ids
        if delta.logprobs is not None:
            result.logprobs = (result.logprobs or []) + delta.logprobs
        result.prompt_logprobs = result.prompt_logprobs or delta.prompt_logprobs
        result.finish_reason = delta.finish_reason
        result.embedding = delta.embedding
        result.finish_detail, result.stop_reason = delta.finish_detail, delta.stop_reason
    result.text = "".join(texts)
    return result


def usage(samples: Sequence[Sample], num_completion_tokens: int | None = None) -> dict[str, Any]:
    """What a request used: each prompt once, however many samples there are of it.

    Args:
        samples: all or some of the request's.
        num_completion_tokens: None: all that were generated so far.
    """
    prompts = {sample.prompt_index: sample for sample in reversed(samples)}  # the first sample of each
    num_prompt = sum(len(sample.prompt.token_ids) for sample in prompts.values())
    num_cached = sum(sample.num_cached_tokens for sample in prompts.values())
    if num_completion_tokens is None:
        num_completion_tokens = sum(sample.num_tokens for sample in samples)
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_completion_tokens,
        "completion_tokens": num_completion_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
