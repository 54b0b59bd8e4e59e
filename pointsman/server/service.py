"""From a client's request to its answer: what completions and chat completions have in common.

    limits -> backlog -> prompts -> engine requests -> queued -> deltas -> JSON or events
    400       429        400        400               400       408, 500

Everything up to "queued" is decided before the first byte of the answer, so that a refusal has its own status. What the
two kinds do differently is their `Job`.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pointsman.engine.errors import GRAMMAR_TOO_SLOW, NOTHING_LEFT, EngineDeadError
from pointsman.server.backlog import Backlog, Ticket
from pointsman.server.engine_client import EngineStalledError
from pointsman.server.errors import ApiError, from_engine, not_found, shown
from pointsman.server.generation import Generation, Result, Sample, usage
from pointsman.server.names import RequestNames
from pointsman.server.prompts import Prompt, PromptReader
from pointsman.server.protocol import SamplingFields
from pointsman.server.sampling import check_priority, for_sample
from pointsman.server.streaming import EventStream, WatchedResponse, error_event, event, quote, send_json
from pointsman.server.wire import EngineRequest

if TYPE_CHECKING:
    from starlette.types import Send

    from pointsman.engine.params.sampling import SamplingParams
    from pointsman.server.config import ServerConfig
    from pointsman.server.engine_client import EngineClient
    from pointsman.server.gate import Gate
    from pointsman.server.metrics import ServerMetrics
    from pointsman.server.wire import Delta

logger = logging.getLogger(__name__)


class Service:
    """What answers completions, for all clients.

    Args:
        client: the engine.
        config: the operator's settings.
        metrics: what is observed.
        gate: every request is inside while it is answered; a closed one means that the server shuts down.
    """

    def __init__(self, client: EngineClient, config: ServerConfig, metrics: ServerMetrics, gate: Gate) -> None:
        self.client = client
        self.config = config
        self.metrics = metrics
        self.gate = gate
        self.prompts = PromptReader(client)
        max_requests = client.info.max_num_running + config.max_waiting_requests
        self.backlog = Backlog(max_requests, config.max_waiting_prompt_tokens)
        self.names = RequestNames()
        self.model_names = config.served_model_name or (client.info.model,)
        """What clients may call the model; the first is what answers say."""

    def check_model(self, name: str | None) -> None:
        """Refuse requests for other models.

        Raises:
            ApiError: 404.
        """
        if name and name not in self.model_names:
            served = ", ".join(map(shown, self.model_names))
            raise not_found(f"the model {shown(name)} does not exist; this server has {served}", "model")

    def check_open(self) -> None:
        """Refuse everything while the server ends.

        Raises:
            ApiError: 503 while the server shuts down; 500 when the engine is dead.
        """
        if self.gate.is_closed and self.client.death is None:
            raise self.closed()
        if not self.client.is_alive:
            raise ApiError(500, f"the engine has ended: {self.client.death or 'shut down'}", reason="engine_dead")

    def from_engine(self, error: Exception) -> ApiError:
        """What the client is told of an error of the engine. One that ended because the server does is no fault.

        Raises:
            Exception: `error` itself, if it is a fault of ours.
        """
        if isinstance(error, EngineDeadError) and self.gate.is_closed and self.client.death is None:
            return self.closed()
        return from_engine(error)

    def closed(self) -> ApiError:
        """What clients are told while the server shuts down."""
        seconds = max(1, round(self.config.drain_timeout))
        return ApiError(
            503,
            "the server is shutting down and takes no new requests; try another one, or again later",
            headers={"retry-after": str(seconds)},
        )

    def respond(self, job: Job) -> WatchedResponse:
        """The answer to a job; its work begins when it is sent."""
        return WatchedResponse(lambda send: self._answer(job, send))

    async def _answer(self, job: Job, send: Send) -> None:
        with self.inside():
            await self._answer_inside(job, send)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """While a client is answered: the server does not end before, unless it takes too long.

        Raises:
            ApiError: 503 while the server shuts down; 500 when the engine is dead.
        """
        self.check_open()
        self.gate.enter()
        try:
            yield
        finally:
            self.gate.leave()

    async def _answer_inside(self, job: Job, send: Send) -> None:
        self.check_model(job.body.model)
        check_priority(job.body.priority, self.client.info)
        with self.backlog.enter(job.count_samples()) as ticket:
            async with Generation(self.client, self.metrics, ticket, job.deadline) as generation:
                try:
                    await self._queue_and_send(job, generation, ticket, send)
                finally:
                    self.names.remove(sample.stream.request.request_id for sample in generation.samples)

    async def _queue_and_send(self, job: Job, generation: Generation, ticket: Ticket, send: Send) -> None:
        try:
            async with asyncio.timeout(generation.seconds_left):
                await self._start(job, generation, ticket)
        except TimeoutError:
            raise too_late() from None
        except (EngineDeadError, EngineStalledError, ValueError) as error:
            raise self.from_engine(error) from error
        headers = {"x-request-id": job.id}
        if job.body.stream:
            await self._stream(job, generation, EventStream(send, headers))
        else:
            await send_json(send, await self._whole(job, generation), headers)
        num_tokens = max(sample.num_tokens for sample in generation.samples)
        self.metrics.observe_request(job.num_samples_per_prompt, num_tokens)

    async def _start(self, job: Job, generation: Generation, ticket: Ticket) -> None:
        """Queue all that the job asks for.

        Raises:
            ValueError, ApiError, EngineDeadError: it can never run, not now, or not any more.
        """
        prompts = await job.read_prompts()
        params = self._sampling_params(job, prompts)
        for index, prompt in enumerate(prompts):
            ticket.add_prompt(index, len(prompt.token_ids))
        if self.config.log_requests:
            for prompt in prompts:
                text = await self.prompts.text_of(prompt) if self.client.tokenizer is not None else prompt.token_ids
                logger.info("%s: %d tokens: %a", job.id, len(prompt.token_ids), text)
        is_only = len(prompts) == job.num_samples_per_prompt == 1
        for index, prompt in enumerate(prompts):
            for number in range(job.num_samples_per_prompt):
                name = job.id if is_only else f"{job.id}-{len(generation.samples)}"
                own = params[index]
                if number:
                    own = for_sample(own, max_tokens=job.max_tokens(prompt), sample=number)
                generation.add(index, prompt, self._engine_request(job, name, prompt, own))
        await job.prepare(generation.samples)
        await generation.start()

    @staticmethod
    def _sampling_params(job: Job, prompts: list[Prompt]) -> list[SamplingParams]:
        """Those of each prompt's first sample: made and checked once, for what may be a thousand.

        Raises:
            ValueError, ApiError: they cannot be had.
        """
        max_tokens = [job.max_tokens(prompt) for prompt in prompts]
        params = job.sampling_params(max_tokens[0])
        return [for_sample(params, max_tokens=most, sample=0) for most in max_tokens]

    def _engine_request(self, job: Job, name: str, prompt: Prompt, params: SamplingParams) -> EngineRequest:
        return EngineRequest(
            request_id=self.names.add(job.id, name),
            prompt_token_ids=prompt.token_ids,
            params=params,
            priority=job.body.priority,
            cache_salt=job.body.cache_salt,
            arrival_time=job.arrival_time,
            deadline=job.deadline,
            user=job.body.user,
            stream=bool(job.body.stream),
        )

    async def _whole(self, job: Job, generation: Generation) -> dict[str, Any]:
        """The body of an answer that is not streamed.

        Raises:
            ApiError: 408, 500.
        """
        try:
            results = await generation.collect()
        except EngineDeadError as error:
            raise self.from_engine(error) from error
        for result in results:
            check_end(result.finish_reason, result.finish_detail)
        if not any(result.token_ids for result in results):
            reasons = {result.finish_reason for result in results}
            if "abort" in reasons:  # the server's end overtook it; another one may still answer
                raise self.closed()
            if reasons == {"deadline"}:
                raise too_late()
        return await job.whole(results)

    async def _stream(self, job: Job, generation: Generation, events: EventStream) -> None:
        """All events of a streamed answer; what goes wrong from now on is one of them."""

        async def pump(sample: Sample) -> None:
            async for delta in sample:
                check_end(delta.finish_reason, delta.finish_detail)
                chunk = job.chunk(sample, delta)
                if chunk:
                    await events.write(chunk)

        self.metrics.stream_opened()
        try:
            await events.open()
            try:
                await generation.each(pump)
                last = job.usage_event(generation.samples)
            except (EngineDeadError, ApiError) as error:
                last = error_event(self.from_engine(error))
            except Exception:
                logger.exception("%s: the stream broke off", job.id)
                last = error_event(ApiError(500, "the server failed on this request; its log says why"))
            await events.close(last)
        finally:
            self.metrics.stream_closed()


def too_late() -> ApiError:
    """What a client is told whose deadline passed before there was anything for it."""
    return ApiError(
        408,
        "the deadline passed before the first token; give it more time, or try when the server has less to do",
        param="deadline",
        headers={"x-should-retry": "false"},  # the official client would, and be late again
    )


def check_end(finish_reason: str | None, detail: str) -> None:
    """Whether a request ended well.

    Raises:
        ApiError: it failed on its own; 400 if what it asked for contradicts itself or takes too long, 500 otherwise.
    """
    if finish_reason == "error":
        is_own_fault = detail == NOTHING_LEFT or detail.startswith(GRAMMAR_TOO_SLOW)
        status = 400 if is_own_fault else 500
        raise ApiError(status, f"the request failed: {detail or 'the engine does not say why'}")


@dataclass(slots=True)
class Progress:
    """What a stream has told of a choice; in its sample's `extra`."""

    head: str
    """The beginning of a plain chunk, up to the text."""
    tail: str
    """Its end, from there on."""
    has_begun: bool = False


class Job(ABC):
    """One client's request. Its time begins when it is made.

    A stream's chunk between the first and the last is plain, as a rule: it differs from the one before it in its text
    alone, and is written from three pieces: its choice's head, the text, its tail.

    Args:
        service: whose client asks.
        body: what it sent.
        request_id: to be part of the answer's id, before the body's; None: the body's, or a random one.
        deadline: seconds until it ends in any case, beside the body's and the server's; the least of them counts.
    """

    id_prefix: str
    object_name: str
    """Of the events of a stream."""
    plain_head: str
    """What is between a choice's index and its text in a plain chunk."""
    plain_tail: str
    """What is behind its text."""

    def __init__(
        self, service: Service, body: SamplingFields, request_id: str | None = None, deadline: float | None = None
    ) -> None:
        self.service = service
        self.body = body
        self.arrival_time = time.monotonic()
        self.created = int(time.time())
        self.model = body.model or service.model_names[0]
        self.id = f"{self.id_prefix}-{request_id or body.request_id or uuid.uuid4().hex}"
        limits = [one for one in (deadline, body.deadline, service.config.max_deadline) if one is not None]
        self.deadline = self.arrival_time + min(limits) if limits else None
        options = body.stream_options
        self.includes_usage = bool(options and options.include_usage)
        self.continuous_usage = self.includes_usage and bool(options and options.continuous_usage_stats)
        self.is_plain = self.num_logprobs is None and not body.return_token_ids and not self.continuous_usage
        """Whether the chunks between the first and the last are plain."""

    # ------------------------------------------------------------------ what is asked for

    @property
    @abstractmethod
    def num_samples_per_prompt(self) -> int:
        """n."""

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Most likely tokens whose log probabilities come with each token; None: no log probabilities at all."""

    @abstractmethod
    def count_samples(self) -> int:
        """Requests of the engine that this will be, from what is known before tokenizing.

        Raises:
            ApiError: 400, more than the operator allows.
        """

    @abstractmethod
    async def read_prompts(self) -> list[Prompt]:
        """Tokenize.

        Raises:
            ValueError, ApiError: a prompt is none.
        """

    @abstractmethod
    def max_tokens(self, prompt: Prompt) -> int:
        """Most tokens of a prompt's samples.

        Raises:
            ApiError: 400, it has no room for so many, or the operator allows fewer.
        """

    @abstractmethod
    def sampling_params(self, max_tokens: int) -> SamplingParams:
        """Of a prompt's first sample. All others differ in their seeds and in max_tokens at most.

        Raises:
            ValueError, ApiError: they cannot be had.
        """

    # ------------------------------------------------------------------ what is answered

    @abstractmethod
    async def whole(self, results: list[Result]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    async def prepare(self, samples: list[Sample]) -> None:
        """Find out what has to be known before the first text, into the samples' `extra`.

        Raises:
            ValueError: a prompt that is to be echoed has no text.
        """
        start = event({**self.envelope(self.object_name), "choices": []}).decode("ascii").removesuffix("]}\n\n")
        for sample in samples:
            head = f'{start}{{"index":{sample.index},{self.plain_head}'
            sample.extra = await self.begin(sample, head, self.plain_tail)

    async def begin(self, sample: Sample, head: str, tail: str) -> Progress:
        """Of a choice of which nothing has been told.

        Raises:
            ValueError: as `prepare`.
        """
        return Progress(head, tail)

    def chunk(self, sample: Sample, delta: Delta) -> bytes:
        """The events that tell of a delta; none if there is nothing to tell."""
        progress: Progress = sample.extra
        if self.is_plain and progress.has_begun and delta.finish_reason is None:
            return f"{progress.head}{quote(delta.text)}{progress.tail}".encode("ascii")
        if not delta.token_ids and not delta.text and delta.finish_reason is None:
            return b""
        events = self.full_chunk(sample, delta)
        progress.has_begun = True
        return events

    @abstractmethod
    def full_chunk(self, sample: Sample, delta: Delta) -> bytes:
        """The same with all that the client asked for, and what comes once with the choice's first or last chunk."""

    def choice_event(
        self,
        choice: dict[str, Any],
        sample: Sample,
        more: dict[str, Any] | None = None,
        *,
        num_tokens: int | None = None,
    ) -> bytes:
        """The event of a choice.

        Args:
            choice: what is told of it.
            sample: whose choice it is.
            more: fields beside the choices.
            num_tokens: generated tokens in its usage; None: all so far.
        """
        data = {**self.envelope(self.object_name), "choices": [choice], **(more or {})}
        if self.continuous_usage:
            data["usage"] = self.usage([sample], num_tokens)
        return event(data)

    def usage_event(self, samples: list[Sample]) -> bytes:
        """The event behind the last chunk, if the client wants one."""
        if not self.includes_usage:
            return b""
        return event({**self.envelope(self.object_name), "choices": [], "usage": self.usage(samples)})

    def usage(self, samples: list[Sample], num_tokens: int | None = None) -> dict[str, Any]:
        """What the request used; `num_tokens` None: all tokens that were generated so far."""
        return usage(samples, num_tokens)

    def envelope(self, object_name: str) -> dict[str, Any]:
        """What all answers and all events of one begin with."""
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}
