"""POST /tokenize and /detokenize: what the model sees of a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pointsman.server.api.guards import StrictRoute
from pointsman.server.api.openapi import errors
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import ApiError, from_engine
from pointsman.server.wire.protocol import DetokenizeRequest, TokenizeCompletionRequest, TokenizeRequest
from pointsman.server.wire.responses import DetokenizeResponse, TokenizeResponse

TOKEN_ERRORS = (400, 404, 413, 429, 500, 503)
MAX_AT_ONCE = 2
"""Requests that are worked on at once: prompts that are to be completed use the same thread, and should not wait."""
MAX_OPEN = 64
"""Requests beyond which more are answered with 429."""


class _Line:
    """Where requests wait for their turn."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._num_open = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """While a request is worked on.

        Raises:
            ApiError: 429, too many wait; 503 while the server shuts down; 500 when the engine is dead.
        """
        with self._service.inside():
            if self._num_open >= MAX_OPEN:
                raise ApiError(
                    429,
                    f"{self._num_open} requests for tokens are open, the most there may be; try again in 1 s",
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
    line = _Line(service)

    @router.post("/tokenize", response_model=TokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of what the chat template makes of a conversation."""
        service.check_model(body.model)
        async with line.turn():
            token_ids = await _token_ids(service, body)
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": service.client.info.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs and service.client.tokenizer is not None:
            answer["token_strs"] = service.client.tokenizer.convert_ids_to_tokens(token_ids)
        return JSONResponse(answer)

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=errors(*TOKEN_ERRORS))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        async with line.turn():
            text = await service.client.decode(body.tokens)
        return JSONResponse({"prompt": text})

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if isinstance(body, TokenizeCompletionRequest):
        service.prompts.check_length(body.prompt)
        return await service.client.encode(body.prompt, body.add_special_tokens)
    return (await service.prompts.of_chat(body)).token_ids
