"""POST /v1/embeddings: one vector per input, made of the model's last hidden states (see `engine/pooling.py`)."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from starlette.responses import Response

from pointsman.engine.errors import EngineDeadError
from pointsman.engine.params.pooling import PoolingParams
from pointsman.server.bodies import StrictRoute
from pointsman.server.descriptions import errors
from pointsman.server.engine_client import EngineStalledError
from pointsman.server.generation import Generation, Result
from pointsman.server.prompts import Prompt, count_prompts
from pointsman.server.protocol import EmbeddingRequest
from pointsman.server.responses import EmbeddingResponse
from pointsman.server.sampling import check_priority
from pointsman.server.service import Service, check_end, too_late
from pointsman.server.streaming import WatchedResponse, send_json
from pointsman.server.wire import EngineRequest

if TYPE_CHECKING:
    from starlette.types import Send

    from pointsman.server.backlog import Ticket


def embeddings_router(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter(route_class=StrictRoute, tags=["embeddings"])

    @router.post(
        "/v1/embeddings",
        response_model=EmbeddingResponse,
        responses=errors(400, 404, 408, 413, 429, 500, 503),
    )
    async def create_embeddings(body: EmbeddingRequest) -> Response:
        """A vector for each input."""
        job = EmbeddingJob(service, body)
        return WatchedResponse(job.answer)

    return router


class EmbeddingJob:
    """One client's request. Its time begins when it is made."""

    def __init__(self, service: Service, body: EmbeddingRequest) -> None:
        self.service = service
        self.body = body
        self.id = f"embd-{body.request_id or uuid.uuid4().hex}"
        self.created = int(time.time())
        self.arrival_time = time.monotonic()
        limits = [one for one in (body.deadline, service.config.max_deadline) if one is not None]
        self.deadline = self.arrival_time + min(limits) if limits else None

    async def answer(self, send: Send) -> None:
        """Do all of it.

        Raises:
            ApiError: before anything is sent.
        """
        service, body = self.service, self.body
        with service.inside():
            service.check_model(body.model)
            check_priority(body.priority, service.client.info)
            with service.backlog.enter(count_prompts(body.input, "input")) as ticket:
                async with Generation(service.client, service.metrics, ticket, self.deadline) as generation:
                    try:
                        results = await self._run(generation, ticket)
                    finally:
                        service.names.remove(sample.stream.request.request_id for sample in generation.samples)
                    await send_json(send, self._whole(results), {"x-request-id": self.id})

    async def _run(self, generation: Generation, ticket: Ticket) -> list[Result]:
        try:
            async with asyncio.timeout(generation.seconds_left):
                await self._start(generation, ticket)
            results = await generation.collect()
        except TimeoutError:
            raise too_late() from None
        except (EngineDeadError, EngineStalledError, ValueError) as error:
            raise self.service.from_engine(error) from error
        for result in results:
            check_end(result.finish_reason, result.finish_detail)
            if result.finish_reason == "deadline":
                raise too_late()
            if result.embedding is None:  # aborted: the server's end overtook it
                raise self.service.closed()
        return results

    async def _start(self, generation: Generation, ticket: Ticket) -> None:
        service, body = self.service, self.body
        prompts = await service.prompts.of_field("input", body.input, body.add_special_tokens)
        params = PoolingParams(body.pooling, body.use_activation is not False)
        for index, prompt in enumerate(prompts):
            ticket.add_prompt(index, len(prompt.token_ids))
        for index, prompt in enumerate(prompts):
            name = self.id if len(prompts) == 1 else f"{self.id}-{index}"
            generation.add(index, prompt, self._engine_request(name, prompt, params))
        await generation.start()

    def _engine_request(self, name: str, prompt: Prompt, params: PoolingParams) -> EngineRequest:
        body = self.body
        return EngineRequest(
            request_id=self.service.names.add(self.id, name),
            prompt_token_ids=prompt.token_ids,
            params=params,
            priority=body.priority,
            cache_salt=body.cache_salt,
            arrival_time=self.arrival_time,
            deadline=self.deadline,
            user=body.user,
            stream=False,
        )

    def _whole(self, results: list[Result]) -> dict[str, Any]:
        num_tokens = sum(len(result.sample.prompt.token_ids) for result in results)
        data = [
            {"object": "embedding", "index": index, "embedding": self._encoded(result.embedding)}
            for index, result in enumerate(results)
        ]
        return {
            "id": self.id,
            "object": "list",
            "created": self.created,
            "model": self.body.model or self.service.model_names[0],
            "data": data,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "completion_tokens": 0,
                "prompt_tokens_details": {"cached_tokens": sum(one.sample.num_cached_tokens for one in results)},
            },
        }

    def _encoded(self, vector: Any) -> list[float] | str:
        """As JSON numbers, or as little-endian float32 in base64, which is a quarter as long."""
        if self.body.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
        numbers: list[float] = vector.tolist()
        return numbers
