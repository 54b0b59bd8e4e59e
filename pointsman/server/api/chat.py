"""POST /v1/chat/completions: continues a conversation."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from pointsman.server.api.bodies import StrictRoute
from pointsman.server.api.openapi import (
    GENERATION_ERRORS,
    DeadlineHeader,
    RequestIdHeader,
    TTFTTargetHeader,
    errors,
    events,
)
from pointsman.server.service.prompts import ChatPrompt
from pointsman.server.service.sampling import SamplingPlan
from pointsman.server.service.service import Job, Service
from pointsman.server.wire.answers import ChatWriter
from pointsman.server.wire.protocol import ChatCompletionRequest
from pointsman.server.wire.responses import ChatCompletionResponse


def chat_router(service: Service) -> APIRouter:
    """A router with the route POST /v1/chat/completions."""
    router = APIRouter(route_class=StrictRoute, tags=["completions"])

    @router.post(
        "/v1/chat/completions",
        response_model=ChatCompletionResponse,
        responses={200: events(), **errors(*GENERATION_ERRORS)},
    )
    async def create_chat_completion(
        body: ChatCompletionRequest,
        request_id: RequestIdHeader = None,
        deadline: DeadlineHeader = None,
        ttft_target: TTFTTargetHeader = None,
    ) -> Response:
        """Answer a conversation."""
        asked, asked_field = body.max_completion_tokens, "max_completion_tokens"
        if asked is None:
            asked, asked_field = body.max_tokens, "max_tokens"
        model, role = body.model or service.model_names[0], service.config.response_role
        job = Job(
            body=body,
            prompts=ChatPrompt(body, {"reasoning_effort": body.reasoning_effort}),
            plan=SamplingPlan(
                body=body,
                n=body.n,
                logprobs=body.top_logprobs if body.logprobs else None,
                prompt_logprobs=body.prompt_logprobs,
                max_tokens=asked,
                max_tokens_field=asked_field,
            ),
            writer=ChatWriter(body, model, request_id, response_role=role),
            stream=bool(body.stream),
            timeout=deadline,
            ttft_header=ttft_target,
        )
        return service.respond(job)

    return router
