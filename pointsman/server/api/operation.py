"""Operators' commands: pause and resume the engine, empty its prefix cache, limit the number of running requests.

    POST /pause?mode=abort|wait|keep&clear_cache=true     responds when no step runs
    POST /resume
    GET  /is_paused
    POST /reset_prefix_cache?reset_running_requests=false
    POST /max_num_active_seqs?limit=4                     Pointsman's own

vLLM has the first four, in its development mode only. Here all routes are for operators alone (`access`).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import JSONResponse, Response

from pointsman.core import ConfigError
from pointsman.engine.pausing import PauseChoice, ResumedError
from pointsman.server.api.access import OperatorRules
from pointsman.server.api.openapi import errors
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.questions import IsPaused, Pause, ResetPrefixCache, Resume, SetMaxNumActiveSeqs
from pointsman.server.wire.responses import ActiveSeqsResponse, PausedResponse, ResetResponse, StatusResponse


def operation_router(service: Service, operators: OperatorRules) -> APIRouter:
    """A router with the routes of operators' commands."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(operators.require)])

    @router.post("/pause", response_model=StatusResponse, responses=errors(400, 403, 409, 500, 503))
    async def pause(
        mode: Annotated[
            PauseChoice,
            Query(description="Whether unfinished requests are aborted, run until they finish, or stop until /resume."),
        ] = "abort",
        clear_cache: Annotated[
            bool, Query(description="Whether cached prefixes are dropped; stopped requests are recomputed.")
        ] = True,
    ) -> Response:
        """Start no further request until /resume. The response comes when no step runs, so that the weights may be
        changed. With mode "wait" it takes as long as the running requests.
        """
        try:
            await service.ask(Pause(mode, clear_cache), has_timeout=mode != "wait")
        except ResumedError as error:
            raise ApiError(409, f"{error}; pause it again") from error
        return JSONResponse({"status": "paused"})

    @router.post("/resume", response_model=StatusResponse, responses=errors(403, 500, 503))
    async def resume() -> Response:
        """Continue after a pause. Without a pause, nothing happens."""
        await service.ask(Resume())
        return JSONResponse({"status": "resumed"})

    @router.get("/is_paused", response_model=PausedResponse, responses=errors(403, 500, 503))
    async def is_paused() -> Response:
        """Whether the engine was paused, and not resumed since."""
        return JSONResponse({"is_paused": await service.ask(IsPaused())})

    @router.post("/reset_prefix_cache", response_model=ResetResponse, responses=errors(400, 403, 500, 503))
    async def reset_prefix_cache(
        reset_running_requests: Annotated[
            bool,
            Query(description="Whether running requests recompute their KV. If not, they keep it, uncached."),
        ] = False,
    ) -> Response:
        """Drop all cached prefixes."""
        await service.ask(ResetPrefixCache(reset_running_requests))
        return JSONResponse({"success": True})

    @router.post("/max_num_active_seqs", response_model=ActiveSeqsResponse, responses=errors(400, 403, 500, 503))
    async def set_max_num_active_seqs(
        limit: Annotated[int | None, Query(description="From 1 to max_num_seqs, its default.")] = None,
    ) -> Response:
        """Change the maximum number of running requests. Running ones continue; none is admitted until fewer than that
        run."""
        try:
            in_force = await service.ask(SetMaxNumActiveSeqs(limit))
        except ConfigError as error:
            raise ApiError(400, str(error), param="limit") from error
        return JSONResponse({"max_num_active_seqs": in_force})

    return router
