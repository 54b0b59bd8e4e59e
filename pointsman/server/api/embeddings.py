"""POST /v1/embeddings: returns one vector per input, computed from the model's last hidden states."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pointsman.engine.params.pooling import PoolingParams
from pointsman.server.api.bodies import StrictRoute
from pointsman.server.api.openapi import GENERATION_ERRORS, TTFTTargetHeader, errors
from pointsman.server.service.prompts import TextPrompts
from pointsman.server.service.sampling import PoolingPlan
from pointsman.server.service.service import Job, Service
from pointsman.server.wire.answers import EmbeddingWriter
from pointsman.server.wire.protocol import EmbeddingRequest
from pointsman.server.wire.responses import EmbeddingResponse


def embeddings_router(service: Service) -> APIRouter:
    """A router with the route POST /v1/embeddings."""
    router = APIRouter(route_class=StrictRoute, tags=["embeddings"])

    @router.post("/v1/embeddings", response_model=EmbeddingResponse, responses=errors(*GENERATION_ERRORS))
    async def create_embeddings(body: EmbeddingRequest, ttft_target: TTFTTargetHeader = None) -> Response:
        """A vector for each input."""
        job = Job(
            body=body,
            prompts=TextPrompts("input", body.input, body.add_special_tokens),
            plan=PoolingPlan(PoolingParams(body.pooling, body.use_activation is not False)),
            writer=EmbeddingWriter(body, body.model or service.model_names[0]),
            ttft_header=ttft_target,
        )
        return service.respond(job)

    return router
