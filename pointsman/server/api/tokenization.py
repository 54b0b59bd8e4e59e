"""POST /tokenize and /detokenize: from text to token ids and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pointsman.server.api.bodies import StrictRoute
from pointsman.server.api.openapi import errors
from pointsman.server.service.gate import from_engine
from pointsman.server.service.prompts import ChatPrompt, TextPrompts
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import ApiError
from pointsman.server.wire.protocol import DetokenizeRequest, TokenizeCompletionRequest, TokenizeRequest
from pointsman.server.wire.responses import DetokenizeResponse, TokenizeResponse

TOKEN_ERRORS = (400, 404, 413, 429, 500, 503)
MAX_AT_ONCE = 2
"""Requests in progress at once: prompts of completions use the same thread, and should not wait behind these."""
MAX_OPEN = 64
"""Maximum number of open requests; further ones get 429."""


class _Queue:
    """The queue of requests for tokens."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_open = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A block in which a request is in progress.

        Raises:
            ApiError: 429, too many wait; 503 while the server shuts down; 500 when the engine is dead.
        """
        with self._service.gate.inside():
            if self._num_open >= MAX_OPEN:
                raise ApiError(
                    429,
                    f"{self._num_open} requests for tokens are open, and at most {MAX_OPEN} may be; try again in 1 s",
                    headers={"retry-after": "1"},
                    reason="queue_requests",
                )
            self._num_open += 1
            try:
                async with self._turns:
                    yield
            except ValueError as error:
                raise from_engine(error) from error
            finally:
                self._num_open -= 1


def tokenization_router(service: Service) -> APIRouter:
    """The two routes."""
    router = APIRouter(route_class=StrictRoute, tags=["tokens"])
    queue = _Queue(service)

    @router.post("/tokenize", response_model=TokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of what the chat template makes of a conversation."""
        service.check_model(body.model)
        async with queue.turn():
            token_ids = await _token_ids(service, body)
            names = await service.prompts.names(token_ids) if body.return_token_strs else None
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": service.client.info.max_model_len,
            "tokens": token_ids,
            "token_strs": names,
        }
        return JSONResponse(answer)

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        async with queue.turn():
            text = await service.prompts.decode(body.tokens)
        return JSONResponse({"prompt": text})

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    source: TextPrompts | ChatPrompt
    if isinstance(body, TokenizeCompletionRequest):
        source = TextPrompts("prompt", body.prompt, body.add_special_tokens)
    else:
        source = ChatPrompt(body)
    (prompt,) = await service.prompts.read(source)
    return prompt.token_ids
