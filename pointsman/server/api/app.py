"""The HTTP interface: `create_app` puts routes, limits and errors together.

    /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models     what OpenAI's clients call
    /tokenize, /detokenize, /version                      what vLLM's clients call
    /health, /ready, /metrics                             what supervisors, balancers and Prometheus call
    /v1/requests, /pause, /resume, /reset_prefix_cache    what operators call

An app serves one engine, which has loaded its model. When `app.state.gate` is closed, it refuses new requests.
"""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, FastAPI, Header, Path
from starlette.responses import JSONResponse, Response

import pointsman
from pointsman.server.api.chat import ChatJob
from pointsman.server.api.completions import CompletionJob
from pointsman.server.api.embeddings import embeddings_router
from pointsman.server.api.guards import ApiKeyMiddleware, BodyLimitMiddleware, StrictRoute
from pointsman.server.api.openapi import describe, errors, events
from pointsman.server.api.operation import operation_router
from pointsman.server.api.requests import MAX_PATH, requests_router
from pointsman.server.api.tokenization import tokenization_router
from pointsman.server.config import ServerConfig
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.gate import Gate
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import ApiError, ErrorAnswers, not_found, shown
from pointsman.server.wire.protocol import REQUEST_ID, ChatCompletionRequest, CompletionRequest
from pointsman.server.wire.responses import (
    ChatCompletionResponse,
    CompletionResponse,
    ModelCard,
    ModelList,
    VersionResponse,
)

DESCRIPTION = "Completions of one model, with the fields of OpenAI's API and of vLLM's."
GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)

RequestIdHeader = Annotated[
    str | None, Header(alias="X-Request-Id", pattern=REQUEST_ID, description="Part of the answer's id.")
]
DeadlineHeader = Annotated[
    float | None,
    Header(
        alias="X-Request-Deadline",
        gt=0,
        allow_inf_nan=False,
        description="Seconds from arrival after which the request is ended.",
    ),
]


def create_app(client: EngineClient, config: ServerConfig) -> FastAPI:
    """The server's ASGI app.

    Args:
        client: an engine that has loaded its model.
        config: the operator's settings.
    """
    metrics = ServerMetrics(client, (config.served_model_name or (client.info.model,))[0])
    metrics.attach()
    gate = Gate()
    service = Service(client, config, metrics, gate)
    answer = ErrorAnswers(metrics.count_refusal)
    app = FastAPI(title="Pointsman", version=pointsman.__version__, description=DESCRIPTION)
    app.state.gate = gate
    app.include_router(_generation_router(service))
    app.include_router(embeddings_router(service))
    app.include_router(_models_router(service))
    app.include_router(requests_router(service))
    app.include_router(operation_router(service))
    app.include_router(tokenization_router(service))
    app.include_router(_health_router(service))
    answer.install(app)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_request_bytes, answer=answer)
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_keys, answer=answer)  # the outermost: it looks first
    describe(app, has_keys=bool(config.api_keys))
    return app


def _generation_router(service: Service) -> APIRouter:
    router = APIRouter(route_class=StrictRoute, tags=["completions"])

    @router.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses={200: events(), **errors(*GENERATION_ERRORS)},
    )
    async def create_completion(
        body: CompletionRequest, request_id: RequestIdHeader = None, deadline: DeadlineHeader = None
    ) -> Response:
        """Complete one or more prompts."""
        return service.respond(CompletionJob(service, body, request_id, deadline))

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletionResponse,
        responses={200: events(), **errors(*GENERATION_ERRORS)},
    )
    async def create_chat_completion(
        body: ChatCompletionRequest, request_id: RequestIdHeader = None, deadline: DeadlineHeader = None
    ) -> Response:
        """Answer a conversation."""
        return service.respond(ChatJob(service, body, request_id, deadline))

    return router


def _models_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def card(name: str) -> ModelCard:
        info = service.client.info
        return ModelCard(id=name, created=created, root=info.model, max_model_len=info.max_model_len)

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """The names under which clients may ask for the model."""
        return JSONResponse(ModelList(data=[card(name) for name in service.model_names]).model_dump())

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(400, 404))
    async def show_model(model: Annotated[str, Path(max_length=MAX_PATH)]) -> Response:
        """One of them."""
        if model not in service.model_names:
            raise not_found(f"the model {shown(model)} does not exist; /v1/models lists what there is", "model")
        return JSONResponse(card(model).model_dump())

    return router


def _health_router(service: Service) -> APIRouter:
    router = APIRouter(tags=["health"])
    client = service.client

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response, responses={200: {"content": {}}, **errors(503)})
    async def health() -> Response:
        """200 with an empty body while the engine lives: restart the server if it does not."""
        if not client.is_alive:
            raise ApiError(503, f"the engine has ended: {client.death or 'shut down'}", reason="engine_dead")
        return Response()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response, responses={200: {"content": {}}, **errors(503)})
    async def ready() -> Response:
        """200 with an empty body while new requests are taken: send them elsewhere if they are not."""
        try:
            service.check_open()
        except ApiError as error:
            raise ApiError(503, error.detail, headers=error.headers, reason=error.reason) from None
        return Response()

    @router.get("/version", response_model=VersionResponse)
    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": pointsman.__version__})

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """What Prometheus reads."""
        body, content_type = await service.metrics.render()
        return Response(body, headers={"content-type": content_type})

    return router
