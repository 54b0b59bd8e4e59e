"""GET /health, /ready, /version and /metrics: probes for supervisors and load balancers, metrics for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import pointsman
from pointsman.server.api.openapi import errors
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.service.gate import Gate
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.responses import VersionResponse


def health_router(client: EngineFleet, gate: Gate, metrics: ServerMetrics) -> APIRouter:
    """A router with the routes /health, /ready, /version and /metrics."""
    router = APIRouter(tags=["health"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_class=Response, responses={200: {"content": {}}, **errors(503)})
    async def health() -> Response:
        """200 with an empty body while an engine lives or is being started. Restart the server on any other status."""
        if not client.is_alive:
            raise ApiError(503, f"the engine has ended: {client.death or 'shut down'}", reason="engine_dead")
        return Response()

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_class=Response, responses={200: {"content": {}}, **errors(503)})
    async def ready() -> Response:
        """200 with an empty body while new requests should be sent here. Send them elsewhere on any other status."""
        gate.check_ready()
        return Response()

    @router.get("/version", response_model=VersionResponse)
    async def version() -> Response:
        """The server's version."""
        return JSONResponse({"version": pointsman.__version__})

    @router.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def show_metrics() -> Response:
        """The metrics in Prometheus' format."""
        body, content_type = await metrics.render()
        return Response(body, headers={"content-type": content_type})

    return router
