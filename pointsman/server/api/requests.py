"""GET /v1/requests: shows each request's state, the reason and the duration of its wait, and the requests that it waits
for. Operators can change the priority of a request.

A client with a key sees its own requests, an operator all. Clients and operators see the same reasons, but clients see
neither the names of other clients' requests nor the order policy's text about tenants.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import compress
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from starlette.responses import JSONResponse, Response

from pointsman.core import Explanation
from pointsman.core.errors import UnknownRequest
from pointsman.server.api.access import OperatorRules
from pointsman.server.api.openapi import MAX_PATH, errors
from pointsman.server.service.service import Service
from pointsman.server.service.urgency import check_priority_is_read
from pointsman.server.wire.errors import ApiError, not_found, shown
from pointsman.server.wire.questions import Explain, ExplainAll, RequestExplanation, SetPriority
from pointsman.server.wire.responses import PriorityResponse, RequestList, RequestState


def requests_router(service: Service, operators: OperatorRules) -> APIRouter:
    """A router with the three routes that show requests and change their priority."""
    router = APIRouter(tags=["operation"])
    names = service.names

    @router.get("/v1/requests", response_model=RequestList, responses=errors(400, 403, 500, 503))
    async def list_requests(
        answer_id: Annotated[
            str | None, Query(alias="id", max_length=MAX_PATH, description="Only requests of this response.")
        ] = None,
        viewer: int | None = Depends(operators.viewer),
    ) -> Response:
        """Every unfinished request of the engine, or of the client whose key was sent. Each of n samples is one."""
        found = None if answer_id is None else set(names.find(answer_id, viewer))
        explanations = await service.ask(ExplainAll())
        ids = (one.explanation.request_id for one in explanations)
        chosen = [names.is_visible(one, viewer) and (found is None or one in found) for one in ids]
        shown_to = partial(names.visible_name, viewer=viewer)
        return JSONResponse(
            {
                "object": "list",
                "data": [
                    describe(one, shown_to, sees_tenants=viewer is None) for one in compress(explanations, chosen)
                ],
            }
        )

    @router.get(
        "/v1/requests/{request_id:path}", response_model=RequestState, responses=errors(400, 403, 404, 500, 503)
    )
    async def show_request(
        request_id: Annotated[str, Path(max_length=MAX_PATH)], viewer: int | None = Depends(operators.viewer)
    ) -> Response:
        """One unfinished request: by the id of its response, followed by "-0", "-1", ... if that has several
        choices."""
        found = names.find(request_id, viewer)
        if len(found) > 1:
            raise ApiError(
                400, f"{len(found)} requests have the id {shown(request_id)}; GET /v1/requests?id=... lists them"
            )
        unknown = not_found(f"no request {shown(request_id)} is waiting, parked or running; it may have ended")
        if not found and viewer is not None:  # the engine's explanation would include other clients' requests
            raise unknown
        try:
            explanation = await service.ask(Explain(found[0] if found else request_id))
        except UnknownRequest as error:
            raise unknown from error
        shown_to = partial(names.visible_name, viewer=viewer)
        return JSONResponse(describe(explanation, shown_to, sees_tenants=viewer is None))

    @router.post(
        "/v1/requests/{request_id:path}/priority",
        response_model=PriorityResponse,
        responses=errors(400, 403, 404, 500, 503),
        dependencies=[Depends(operators.require)],
    )
    async def set_priority(
        request_id: Annotated[str, Path(max_length=MAX_PATH)],
        priority: Annotated[int, Query(ge=-(2**63), le=2**63 - 1, description="Smaller is more urgent.")],
    ) -> Response:
        """Change the priority of a request, or of every sample of a response; the limits for clients do not apply. A
        queued request changes its place at once.
        """
        check_priority_is_read(priority, service.client.info)
        found = names.find(request_id) or [request_id]
        changed = await service.ask(SetPriority(tuple(found), priority))
        if not changed:
            raise not_found(f"no request {shown(request_id)} is waiting, parked or running; it may have ended")
        return JSONResponse({"priority": priority, "requests": [names.visible_name(one) for one in changed]})

    return router


def describe(known: RequestExplanation, name_of: Callable[[str], str], *, sees_tenants: bool = True) -> dict[str, Any]:
    """The JSON object that describes a request, with times in Unix time.

    Args:
        known: the engine's explanation.
        name_of: returns the name that the viewer knows for the engine's id of a request.
        sees_tenants: whether the viewer may see the policies' texts, which may name other tenants.
    """
    explanation = known.explanation
    waiting_for = known.waiting_for
    began = time.time() - known.arrival_time - known.age  # the origin of the engine's clock, in Unix time
    return {
        "id": name_of(explanation.request_id),
        "engine_id": explanation.request_id,
        "engine": known.engine,
        "state": explanation.status.value,
        "phase": explanation.phase,
        "reason": None if explanation.reason is None else explanation.reason.value,
        "blocker": None if explanation.blocker is None else name_of(explanation.blocker),
        "missing": explanation.missing,
        "resource": explanation.resource,
        "holders": [
            {
                "id": name_of(holder.request_id),
                "amount": holder.amount,
                "what": holder.what,
                "transfer": holder.transfer,
            }
            for holder in explanation.holders
        ],
        "num_holders": explanation.num_holders,
        "explanation": _sentence(explanation, name_of, sees_tenants),
        "replaced_policies": [each._asdict() for each in explanation.replaced_policies] if sees_tenants else [],
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
        "ttft_target": known.ttft_target,
        "retention": known.retention,
        "tenant": known.tenant,
        "user": known.user,
        "age": known.age,
        "deadline_in": known.deadline_in,
        "events": [
            {"event": event.type.name.lower(), "at": round(began + event.timestamp, 3), "detail": event.detail}
            for event in explanation.events
        ],
    }


def _sentence(explanation: Explanation, name_of: Callable[[str], str], sees_tenants: bool) -> str:
    """The explanation of a request's state as one sentence, with the names of requests that the viewer knows."""
    sentence = explanation.sentence
    if not sees_tenants:
        sentence = sentence.removesuffix(explanation.policy_words)
    for engine_id in {explanation.request_id, *(holder.request_id for holder in explanation.holders)}:
        sentence = sentence.replace(engine_id, name_of(engine_id))
    return sentence
