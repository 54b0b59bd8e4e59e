"""GET /v1/requests: where every request stands, why it waits, for whom and for how long."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Path
from starlette.responses import JSONResponse, Response

from pointsman.core.errors import UnknownRequest
from pointsman.engine.errors import EngineDeadError
from pointsman.server.descriptions import errors
from pointsman.server.errors import from_engine, not_found, shown
from pointsman.server.responses import RequestList, RequestState, ResetResponse
from pointsman.server.service import Service
from pointsman.server.wire import RequestExplanation

MAX_PATH = 1024
"""Characters of a name in a path."""


def requests_router(service: Service) -> APIRouter:
    """The routes for operators."""
    router = APIRouter(tags=["operation"])

    @router.get("/v1/requests", response_model=RequestList, responses=errors(500))
    async def list_requests() -> Response:
        """Every request of the engine that has not ended. Each of n samples is one."""
        try:
            explanations = await service.client.explain_all()
        except EngineDeadError as error:
            raise from_engine(error) from error
        return JSONResponse({"object": "list", "data": [describe(one) for one in explanations]})

    @router.get("/v1/requests/{request_id:path}", response_model=RequestState, responses=errors(400, 404, 500))
    async def show_request(request_id: Annotated[str, Path(max_length=MAX_PATH)]) -> Response:
        """One of them: by the id of an answer, with "-0", "-1", ... behind it where that has several choices."""
        try:
            explanation = await service.client.explain(request_id)
        except UnknownRequest as error:
            what = f"no request {shown(request_id)} is waiting, parked or running; it may have ended"
            raise not_found(what) from error
        except EngineDeadError as error:
            raise from_engine(error) from error
        return JSONResponse(describe(explanation))

    @router.post("/reset_prefix_cache", response_model=ResetResponse, responses=errors(500))
    async def reset_prefix_cache() -> Response:
        """Forget every cached prefix. What runs goes on, and will not be found by others."""
        try:
            await service.client.reset_prefix_cache()
        except EngineDeadError as error:
            raise from_engine(error) from error
        return JSONResponse({"success": True})

    return router


def describe(known: RequestExplanation) -> dict[str, Any]:
    """What a client reads about a request; times of the engine's own clock would mean nothing to it."""
    of_scheduler = known.explanation
    waiting_for = known.waiting_for
    return {
        "id": of_scheduler.request_id,
        "state": of_scheduler.status.value,
        "phase": of_scheduler.phase,
        "reason": None if of_scheduler.reason is None else of_scheduler.reason.value,
        "blocker": of_scheduler.blocker,
        "missing": of_scheduler.missing,
        "since": None if waiting_for is None else round(time.time() - waiting_for, 3),
        "waiting_for": waiting_for,
        "position": of_scheduler.position,
        "num_prompt_tokens": known.num_prompt_tokens,
        "num_output_tokens": known.num_output_tokens,
        "max_tokens": known.max_tokens,
        "num_computed_tokens": of_scheduler.num_computed_tokens,
        "num_cached_tokens": of_scheduler.num_cached_tokens,
        "num_blocks": of_scheduler.num_blocks,
        "num_preemptions": of_scheduler.num_preemptions,
        "priority": known.priority,
        "user": known.user,
        "age": known.age,
        "deadline_in": known.deadline_in,
    }
