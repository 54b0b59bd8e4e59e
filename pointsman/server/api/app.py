"""The HTTP interface: `create_app` assembles routes, middleware and error handlers.

    /v1/completions, /v1/chat/completions, /v1/embeddings, /v1/models     for OpenAI's clients
    /tokenize, /detokenize, /version                      for vLLM's clients
    /health, /ready, /metrics                             for supervisors, load balancers and Prometheus
    /v1/requests, /pause, /resume, /reset_prefix_cache    for operators; /v1/requests shows a client its own requests
    /live                                                 a page for operators

An app serves engines that have loaded the same model. While its `state.gate` is closed, the app refuses new requests.
"""

from __future__ import annotations

from fastapi import FastAPI

import pointsman
from pointsman.server.api.access import ApiKeyMiddleware, OperatorRules, PageMiddleware, ReserveApp
from pointsman.server.api.arrivals import ArrivalMiddleware
from pointsman.server.api.bodies import BodyBudget, BodyLimitMiddleware
from pointsman.server.api.chat import chat_router
from pointsman.server.api.completions import completions_router
from pointsman.server.api.embeddings import embeddings_router
from pointsman.server.api.health import health_router
from pointsman.server.api.live import live_router
from pointsman.server.api.models import models_router
from pointsman.server.api.openapi import describe
from pointsman.server.api.operation import operation_router
from pointsman.server.api.requests import requests_router
from pointsman.server.api.tokenization import tokenization_router
from pointsman.server.config import ServerConfig
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.service.gate import Gate
from pointsman.server.service.service import Service
from pointsman.server.stages import StageLimits
from pointsman.server.wire.connections import Connections
from pointsman.server.wire.errors import ErrorAnswers

DESCRIPTION = "Completions of one model, with the fields of OpenAI's API and of vLLM's."


def create_app(client: EngineFleet, config: ServerConfig, connections: Connections | None = None) -> FastAPI:
    """The server's ASGI app. Its `state.reserve_app` handles requests on reserve connections.

    Args:
        client: the engines, which have loaded their model.
        config: the operator's settings.
        connections: the clients' connections; None: another server counts them.
    """
    limits = StageLimits(config, client.max_num_running)
    model_name = (config.served_model_name or (client.info.model,))[0]
    metrics = ServerMetrics(client, model_name, config.tenants, limits.all(), connections)
    gate = Gate(client, config.drain_timeout)
    service = Service(client, config, metrics.observations, gate, limits)
    operators = OperatorRules(config)
    answer = ErrorAnswers(metrics.observations.refusal)
    app = FastAPI(title="Pointsman", version=pointsman.__version__, description=DESCRIPTION)
    app.state.gate = gate
    app.include_router(completions_router(service))
    app.include_router(chat_router(service))
    app.include_router(embeddings_router(service))
    app.include_router(models_router(service))
    app.include_router(requests_router(service, operators))
    app.include_router(operation_router(service, operators))
    app.include_router(live_router(service, operators))
    app.include_router(tokenization_router(service))
    app.include_router(health_router(client, gate, metrics))
    answer.install(app)
    app.add_middleware(
        BodyLimitMiddleware,
        max_bytes=config.max_request_bytes,
        max_prompt_tokens=client.info.max_model_len,
        budget=BodyBudget(limits.bodies),
        tenant_of=service.tenants.find_tenant,
        answer=answer,
    )
    app.add_middleware(ArrivalMiddleware, tenant_of=service.tenants.find_tenant)
    # The outermost middleware: it checks before all others.
    if config.api_keys:
        app.add_middleware(ApiKeyMiddleware, keys=config.api_keys, operator_keys=config.operator_keys, answer=answer)
    else:
        app.add_middleware(PageMiddleware, names=operators.names, answer=answer)
    app.state.reserve_app = ReserveApp(app, answer)
    describe(app, config)
    return app
