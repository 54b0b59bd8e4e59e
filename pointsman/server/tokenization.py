"""POST /tokenize and /detokenize: what the model sees of a text."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pointsman.server.bodies import StrictRoute
from pointsman.server.descriptions import errors
from pointsman.server.errors import from_engine
from pointsman.server.protocol import DetokenizeRequest, TokenizeCompletionRequest, TokenizeRequest
from pointsman.server.responses import DetokenizeResponse, TokenizeResponse
from pointsman.server.service import Service


def tokenization_router(service: Service) -> APIRouter:
    """The two routes."""
    router = APIRouter(route_class=StrictRoute, tags=["tokens"])

    @router.post("/tokenize", response_model=TokenizeResponse, responses=errors(400, 404, 413))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The token ids of a text, or of what the chat template makes of a conversation."""
        service.check_model(body.model)
        try:
            token_ids = await _token_ids(service, body)
        except ValueError as error:
            raise from_engine(error) from error
        answer: dict[str, Any] = {
            "count": len(token_ids),
            "max_model_len": service.client.info.max_model_len,
            "tokens": token_ids,
            "token_strs": None,
        }
        if body.return_token_strs and service.client.tokenizer is not None:
            answer["token_strs"] = service.client.tokenizer.convert_ids_to_tokens(token_ids)
        return JSONResponse(answer)

    @router.post("/detokenize", response_model=DetokenizeResponse, responses=errors(400, 404, 413))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of token ids, special tokens included."""
        service.check_model(body.model)
        try:
            text = await service.client.decode(body.tokens)
        except ValueError as error:
            raise from_engine(error) from error
        return JSONResponse({"prompt": text})

    return router


async def _token_ids(service: Service, body: TokenizeRequest) -> list[int]:
    if isinstance(body, TokenizeCompletionRequest):
        service.prompts.check_length(body.prompt)
        return await service.client.encode(body.prompt, body.add_special_tokens)
    return (await service.prompts.of_chat(body)).token_ids
