"""GET /v1/requests: the state of every request, why it waits, for which requests and for how long."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import JSONResponse, Response

from pointsman.core import Explanation
from pointsman.core.errors import UnknownRequest
from pointsman.server.api.guards import refuse_foreign_pages
from pointsman.server.api.openapi import MAX_PATH, errors
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import ApiError, not_found, shown
from pointsman.server.wire.messages import RequestExplanation
from pointsman.server.wire.responses import RequestList, RequestState


def requests_router(service: Service) -> APIRouter:
    """The two routes."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(refuse_foreign_pages)])

    @router.get("/v1/requests", response_model=RequestList, responses=errors(400, 403, 500, 503))
    async def list_requests(
        answer_id: Annotated[
            str | None, Query(alias="id", max_length=MAX_PATH, description="Only those of an answer with this id.")
        ] = None,
    ) -> Response:
        """Every unfinished request of the engine. Each of n samples is one."""
        found = None if answer_id is None else set(service.names.find(answer_id))
        explanations = await service.ask(service.client.explain_all())
        data = [describe(one, service) for one in explanations if found is None or one.explanation.request_id in found]
        return JSONResponse({"object": "list", "data": data})

    @router.get(
        "/v1/requests/{request_id:path}", response_model=RequestState, responses=errors(400, 403, 404, 500, 503)
    )
    async def show_request(request_id: Annotated[str, Path(max_length=MAX_PATH)]) -> Response:
        """One of them: by the id of an answer, with "-0", "-1", ... behind it where that has several choices."""
        found = service.names.find(request_id)
        if len(found) > 1:
            raise ApiError(
                400, f"{len(found)} requests are called {shown(request_id)}; GET /v1/requests?id=... has all"
            )
        try:
            explanation = await service.ask(service.client.explain(found[0] if found else request_id))
        except UnknownRequest as error:
            what = f"no request {shown(request_id)} is waiting, parked or running; it may have ended"
            raise not_found(what) from error
        return JSONResponse(describe(explanation, service))

    return router


def describe(known: RequestExplanation, service: Service) -> dict[str, Any]:
    """The JSON of a request, under the names that clients know, with times in Unix time."""
    explanation = known.explanation
    waiting_for = known.waiting_for
    began = time.time() - known.arrival_time - known.age  # the origin of the engine's clock, in Unix time
    return {
        "id": service.names.shown(explanation.request_id),
        "engine_id": explanation.request_id,
        "state": explanation.status.value,
        "phase": explanation.phase,
        "reason": None if explanation.reason is None else explanation.reason.value,
        "blocker": None if explanation.blocker is None else service.names.shown(explanation.blocker),
        "missing": explanation.missing,
        "resource": explanation.resource,
        "holders": [
            {
                "id": service.names.shown(holder.request_id),
                "amount": holder.amount,
                "what": holder.what,
                "transfer": holder.transfer,
            }
            for holder in explanation.holders
        ],
        "num_holders": explanation.num_holders,
        "explanation": _in_words(explanation, service),
        "since": None if waiting_for is None else round(time.time() - waiting_for, 3),
        "waiting_for": waiting_for,
        "transfer": explanation.transfer,
        "position": explanation.position,
        "num_prompt_tokens": known.num_prompt_tokens,
        "num_output_tokens": known.num_output_tokens,
        "max_tokens": known.max_tokens,
        "num_computed_tokens": explanation.num_computed_tokens,
        "num_cached_tokens": explanation.num_cached_tokens,
        "num_blocks": explanation.num_blocks,
        "num_preemptions": explanation.num_preemptions,
        "priority": known.priority,
        "user": known.user,
        "age": known.age,
        "deadline_in": known.deadline_in,
        "events": [
            {"event": event.type.name.lower(), "at": round(began + event.timestamp, 3), "detail": event.detail}
            for event in explanation.events
        ],
    }


def _in_words(explanation: Explanation, service: Service) -> str:
    """The sentence of an explanation, under the names that clients know."""
    sentence = explanation.sentence
    for engine_id in {explanation.request_id, *(holder.request_id for holder in explanation.holders)}:
        sentence = sentence.replace(engine_id, service.names.shown(engine_id))
    return sentence
