"""GET /v1/models: lists the names of the model that is served."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import JSONResponse, Response

from pointsman.server.api.openapi import MAX_PATH, errors
from pointsman.server.service.service import Service
from pointsman.server.wire.errors import not_found, shown
from pointsman.server.wire.responses import ModelCard, ModelList


def models_router(service: Service) -> APIRouter:
    """A router with the two routes that list the names of the model."""
    router = APIRouter(tags=["models"])
    created = int(time.time())

    def card(name: str) -> ModelCard:
        info = service.client.info
        return ModelCard(id=name, created=created, root=info.model, max_model_len=info.max_model_len)

    @router.get("/v1/models", response_model=ModelList)
    async def list_models() -> Response:
        """The names of the model."""
        return JSONResponse(ModelList(data=[card(name) for name in service.model_names]).model_dump())

    @router.get("/v1/models/{model:path}", response_model=ModelCard, responses=errors(400, 404))
    async def show_model(model: Annotated[str, Path(max_length=MAX_PATH)]) -> Response:
        """One name of the model."""
        if model not in service.model_names:
            raise not_found(
                f"the model {shown(model)} does not exist; GET /v1/models lists the names of this server's model",
                "model",
            )
        return JSONResponse(card(model).model_dump())

    return router
