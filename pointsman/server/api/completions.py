"""POST /v1/completions: continues text or tokens."""

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
from pointsman.server.service.prompts import TextPrompts
from pointsman.server.service.sampling import SamplingPlan
from pointsman.server.service.service import Job, Service
from pointsman.server.wire.answers import CompletionWriter
from pointsman.server.wire.protocol import CompletionRequest
from pointsman.server.wire.responses import CompletionResponse

DEFAULT_MAX_TOKENS = 16


def completions_router(service: Service) -> APIRouter:
    """A router with the route POST /v1/completions."""
    router = APIRouter(route_class=StrictRoute, tags=["completions"])

    @router.post(
        "/v1/completions",
        response_model=CompletionResponse,
        responses={200: events(), **errors(*GENERATION_ERRORS)},
    )
    async def create_completion(
        body: CompletionRequest,
        request_id: RequestIdHeader = None,
        deadline: DeadlineHeader = None,
        ttft_target: TTFTTargetHeader = None,
    ) -> Response:
        """Complete one or more prompts."""
        has_logprobs, echoes = body.logprobs is not None, bool(body.echo)
        asked = body.max_tokens if "max_tokens" in body.model_fields_set else None
        job = Job(
            body=body,
            prompts=TextPrompts(
                "prompt",
                body.prompt,
                body.add_special_tokens,
                needs_text=echoes,
                has_logprobs=has_logprobs,
            ),
            plan=SamplingPlan(
                body=body,
                n=body.n,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.prompt_logprobs is None and echoes else body.prompt_logprobs,
                max_tokens=1 if asked == 0 else asked,  # without a step, the prompt has no log probabilities
                default_max_tokens=DEFAULT_MAX_TOKENS,
            ),
            writer=CompletionWriter(body, body.model or service.model_names[0], request_id),
            stream=bool(body.stream),
            timeout=deadline,
            ttft_header=ttft_target,
        )
        return service.respond(job)

    return router
