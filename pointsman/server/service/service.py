"""Service: the steps of a client's request, from its route to the engine process and back.

    gate -> limits -> backlog -> prompts -> parameters -> queued in the engine -> response
    500, 503  400     429        400, 429   400           400, 408, 429           408, 500

Everything up to "queued" happens before the first byte of the response, so that a refusal has its own status.
`stages.py` has the limit of each stage and its shares for tenants. The parts of a `Job` hold the differences between
kinds of requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.responses import Response

from pointsman.engine.errors import EngineDeadError, EngineStalledError
from pointsman.server.service.backlog import Backlog, Ticket
from pointsman.server.service.gate import too_late
from pointsman.server.service.names import OWNER, RequestNames
from pointsman.server.service.prompts import PromptReader
from pointsman.server.service.response_sender import ResponseSender
from pointsman.server.service.sampling import SamplingPlan
from pointsman.server.service.sending import Sending
from pointsman.server.service.tenants import TenantRule, isolated_salt
from pointsman.server.service.text_work import TextWork
from pointsman.server.service.urgency import check_retention, check_urgency
from pointsman.server.stages import StageLimits, has_tenants
from pointsman.server.wire.answers import TextWriter
from pointsman.server.wire.errors import ApiError, not_found, shown
from pointsman.server.wire.messages import EngineRequest
from pointsman.server.wire.questions import AnswerT, Question

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from pointsman.server.config import ServerConfig
    from pointsman.server.metrics.observations import Observations
    from pointsman.server.service.fleet import EngineFleet
    from pointsman.server.service.gate import Gate
    from pointsman.server.service.prompts import ChatPrompt, TextPrompts
    from pointsman.server.service.sampling import PoolingPlan
    from pointsman.server.wire.answers import AnswerWriter
    from pointsman.server.wire.protocol import EmbeddingRequest, SamplingFields

logger = logging.getLogger(__name__)

ENGINE_TIMEOUT = 5.0
"""Seconds that the engine has to answer a question; it answers between two steps, and a step may be long."""


@dataclass(slots=True, kw_only=True)
class Job:
    """A client's request, in the parts that the service needs. The arrival time is that of the object's creation."""

    body: SamplingFields | EmbeddingRequest
    prompts: TextPrompts | ChatPrompt
    plan: SamplingPlan | PoolingPlan
    writer: AnswerWriter
    stream: bool = False
    """Whether the response is sent as events."""
    timeout: float | None = None
    """Seconds of the header X-Request-Deadline; None: no header. The minimum of header, body and server applies."""
    ttft_header: float | None = None
    """Seconds of the header X-Request-TTFT-Target; None: no header. The minimum of header and body applies."""
    arrival_time: float = field(default_factory=time.monotonic)

    @property
    def ttft_target(self) -> float | None:
        """Seconds from the request's arrival until the first token should be generated; None: no target."""
        return min((one for one in (self.ttft_header, self.body.ttft_target) if one is not None), default=None)

    def deadline(self, config: ServerConfig) -> float | None:
        """The time at which the request finishes at the latest, by `time.monotonic`; None: no limit."""
        limits = [one for one in (self.timeout, self.body.deadline, config.max_deadline) if one is not None]
        return self.arrival_time + min(limits) if limits else None


class Client(NamedTuple):
    """The sender of a request."""

    owner: int | None
    """Index of the client's key; None: the client sent no key, or an operator's."""
    tenant: str


class Service:
    """The state that all clients' requests share.

    Args:
        client: the engines.
        config: the operator's settings.
        observations: the observed times and counts of the server.
        gate: the gate, which every request is inside until its response is complete; closed when the server shuts down.
        limits: the limits of the stages.
    """

    def __init__(
        self, client: EngineFleet, config: ServerConfig, observations: Observations, gate: Gate, limits: StageLimits
    ) -> None:
        self.client = client
        self.config = config
        self.gate = gate
        self.prompts = PromptReader(client.tokenizer, client.info, TextWork(limits.texts), config.chat_template)
        self.backlog = Backlog(limits.requests, limits.prompt_tokens)
        self.sending = Sending(client, limits.grammars, is_shared=has_tenants(config))
        self.names = RequestNames()
        self.tenants = TenantRule(config)
        self.model_names = config.served_model_name or (client.info.model,)
        """Names of the model in requests; responses have the first, unless the request names another."""
        self._observations = observations

    def check_model(self, name: str | None) -> None:
        """Refuse a request for another model.

        Raises:
            ApiError: 404, the server has no model of this name.
        """
        if name and name not in self.model_names:
            served = ", ".join(map(shown, self.model_names))
            raise not_found(f"the model {shown(name)} does not exist; this server has {served}", "model")

    # ------------------------------------------------------------------ completions and embeddings

    def respond(self, job: Job) -> WatchedResponse:
        """The response to a job. The job runs when the response is sent, while the client is connected."""
        return WatchedResponse(lambda scope, send: self._run(job, scope, send))

    async def _run(self, job: Job, scope: Scope, send: Send) -> None:
        with self.gate.admit_request():
            self.check_model(job.body.model)
            check_urgency(job.body.priority, job.ttft_target, self.client.info, self.config)
            check_retention(job.body.retention, self.client.info, self.config)
            if isinstance(job.plan, SamplingPlan):
                check_limits(job.plan.body, job.plan.n, job.plan.logprobs, self.config)
            client = Client(scope.get(OWNER), self.tenants.find_tenant(scope, job.body.user))
            num_samples = job.prompts.count() * job.plan.n
            with self.backlog.enter(client.tenant, num_samples) as ticket:
                async with ResponseSender(self.gate, self._observations, ticket, job.deadline(self.config)) as sender:
                    try:
                        await self._queue_in_time(job, client, sender, ticket)
                        await self._send_response(job, sender, scope, send)
                    finally:
                        self.names.remove(stream.request.request_id for stream in sender.streams)

    async def _queue_in_time(self, job: Job, client: Client, sender: ResponseSender, ticket: Ticket) -> None:
        try:
            async with asyncio.timeout(sender.seconds_left):
                await self._queue(job, client, sender, ticket)
        except TimeoutError:
            raise too_late() from None
        except (EngineDeadError, EngineStalledError, ValueError) as error:
            raise self.gate.from_engine(error) from error

    async def _queue(self, job: Job, client: Client, sender: ResponseSender, ticket: Ticket) -> None:
        """Queue a request of the engine for each sample.

        Raises:
            ValueError, ApiError, EngineDeadError, EngineStalledError: a request can never run, or cannot run now.
        """
        body, answer_id, ttft_target, tenant = job.body, job.writer.id, job.ttft_target, client.tenant
        prompts = await self.prompts.read(job.prompts, tenant)
        params = job.plan.params(prompts, self.client.info, self.config)
        ticket.add_prompts([len(prompt.token_ids) for prompt in prompts])
        await self.prompts.add_texts(job.prompts, prompts, tenant)
        if self.config.log_requests and isinstance(job.plan, SamplingPlan):
            for prompt in prompts:
                logger.info("%s: %d tokens: %s", answer_id, len(prompt.token_ids), self.prompts.shown(prompt))
        cache_salt = isolated_salt(tenant, body.cache_salt) if self.config.isolate_prefixes else body.cache_salt
        is_only = len(prompts) == job.plan.n == 1
        for index, (prompt, samples) in enumerate(zip(prompts, params, strict=True)):
            for own in samples:
                name = answer_id if is_only else f"{answer_id}-{len(sender.samples)}"
                request = EngineRequest(
                    request_id=self.names.add(answer_id, name, client.owner),
                    prompt_token_ids=prompt.token_ids,
                    params=own,
                    priority=body.priority,
                    tenant=tenant,
                    ttft_target=ttft_target,
                    retention=body.retention,
                    cache_salt=cache_salt,
                    arrival_time=job.arrival_time,
                    deadline=sender.deadline,
                    user=body.user,
                    stream=job.stream,
                )
                sender.add(index, prompt, self.client.generate(request))
        await self.sending.queue(tenant, sender.streams)

    async def _send_response(self, job: Job, sender: ResponseSender, scope: Scope, send: Send) -> None:
        if isinstance(job.writer, TextWriter) and job.stream:
            await sender.send_events(job.writer, scope, send)
        else:
            await sender.send_whole(job.writer, send)
        if isinstance(job.plan, SamplingPlan):
            engine = self._observations.engines[sender.streams[0].engine]
            engine.client_request(job.plan.n, max(choice.num_tokens for choice in sender.choices))

    # ------------------------------------------------------------------ questions of operators

    async def ask(self, question: Question[AnswerT], *, engine: int = 0, has_timeout: bool = True) -> AnswerT:
        """The engines' answer to a question; `engine` as for `EngineFleet.ask`.

        Raises:
            ApiError: 500, all engines are dead; 503, no engine lives now, or an engine has not answered in time.
            Exception: as the question's class documents.
        """
        timeout = ENGINE_TIMEOUT if has_timeout else None
        try:
            return await asyncio.wait_for(self.client.ask(question, engine), timeout)
        except TimeoutError:
            raise ApiError(
                503,
                f"the engine has not answered for {ENGINE_TIMEOUT:g} s: it is in a long step, or stuck; "
                "try again later",
                headers={"retry-after": str(round(ENGINE_TIMEOUT))},
                reason="other",
            ) from None
        except (EngineDeadError, EngineStalledError) as error:
            raise self.gate.from_engine(error) from error


# ------------------------------------------------------------------------------------------------- limits


def check_limits(body: SamplingFields, num_samples: int, logprobs: int | None, config: ServerConfig) -> None:
    """Refuse requests beyond the operator's limits. The check is cheap, so it comes before the prompt is read.

    Args:
        body: the request.
        num_samples: number of samples per prompt.
        logprobs: number of log probabilities per position of the output; None: no log probabilities.
        config: the operator's settings, with the limits.

    Raises:
        ApiError: 400, with the exceeded limit.
    """
    if num_samples > config.max_n:
        raise ApiError(400, f"n is {num_samples}; this server gives at most {config.max_n}: lower it", param="n")
    for name, value in (("logprobs", logprobs), ("prompt_logprobs", body.prompt_logprobs)):
        if value is not None and value > config.max_logprobs:
            raise ApiError(
                400, f"{name} is {value}; this server gives at most {config.max_logprobs}: lower it", param=name
            )


# ------------------------------------------------------------------------------------------------- hang-ups


class WatchedResponse(Response):
    """A response whose work is cancelled when the client hangs up.

    Cancelling closes the engine's streams, which aborts their requests at the next step boundary. Watching the client
    costs one task per request, and nothing per token.

    Args:
        work: the work, which sends the whole response to the request of `scope` by `send`; an exception before the
            first message becomes an error response.
    """

    def __init__(self, work: Callable[[Scope, Send], Coroutine[Any, Any, None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._work(scope, send))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the client hangs up.

    Args:
        receive: ASGI's `receive`; the request's body has been read.
        work: the work that sends the response.

    Raises:
        The exceptions of `work`.
    """
    task = asyncio.current_task()
    assert task is not None
    is_over = has_left = False

    def stop(_: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not is_over:
            has_left = True
            task.cancel()

    watcher = asyncio.ensure_future(_until_disconnected(receive))
    watcher.add_done_callback(stop)
    try:
        await work
    except asyncio.CancelledError:
        if task.cancelling() > has_left:  # the response was cancelled for another reason
            raise
        logger.debug("a client hung up before its answer was complete")
    finally:
        is_over = True
        watcher.cancel()
        if has_left:
            task.uncancel()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass  # drop further pieces of the body
