"""POST /tokenize and /detokenize: convert text to token ids and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from starlette.responses import Response
from starlette.types import Scope, Send

from pointsman.server.api.bodies import StrictRoute
from pointsman.server.api.openapi import errors
from pointsman.server.service.gate import from_engine
from pointsman.server.service.prompts import ChatPrompt, TextPrompts
from pointsman.server.service.service import Service, WatchedResponse
from pointsman.server.wire.protocol import DetokenizeRequest, TokenizeCompletionRequest, TokenizeRequest
from pointsman.server.wire.responses import DetokenizeResponse, TokenizeResponse
from pointsman.server.wire.sse import send_json

TOKEN_ERRORS = (400, 404, 413, 429, 500, 503)


def tokenization_router(service: Service) -> APIRouter:
    """A router with /tokenize and /detokenize. Both run in the threads that tokenize prompts, which serve tenants in
    turn."""
    router = APIRouter(route_class=StrictRoute, tags=["tokens"])

    def respond(make: Callable[[str], Awaitable[list[bytes]]]) -> WatchedResponse:
        """A response whose JSON `make` returns for the tenant; the work is cancelled when the client disconnects."""

        async def work(scope: Scope, send: Send) -> None:
            with service.gate.admit_request():
                try:
                    pieces = await make(service.tenants.find_tenant(scope))
                except ValueError as error:
                    raise from_engine(error) from error
                await send_json(send, pieces)

        return WatchedResponse(work)

    @router.post("/tokenize", response_model=TokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of a conversation rendered by the chat template."""
        service.check_model(body.model)
        source: TextPrompts | ChatPrompt
        if isinstance(body, TokenizeCompletionRequest):
            source = TextPrompts("prompt", body.prompt, body.add_special_tokens)
        else:
            source = ChatPrompt(body)
        facts = {"max_model_len": service.client.info.max_model_len}
        has_names = bool(body.return_token_strs)
        return respond(lambda tenant: service.prompts.tokens_as_json(source, facts, tenant, has_names=has_names))

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        return respond(lambda tenant: service.prompts.text_as_json(body.tokens, tenant))

    return router
