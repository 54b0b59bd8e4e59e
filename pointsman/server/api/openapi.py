"""What the description at /openapi.json says about headers, errors, events and keys."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.openapi.utils import get_openapi

from pointsman.server.api.guards import OPEN_PATHS
from pointsman.server.wire.protocol import REQUEST_ID
from pointsman.server.wire.responses import ErrorResponse

MAX_PATH = 1024
"""Characters of a name in a path."""
GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)

RequestIdHeader = Annotated[
    str | None, Header(alias="X-Request-Id", pattern=REQUEST_ID, description="Part of the answer's id.")
]
DeadlineHeader = Annotated[
    float | None,
    Header(
        alias="X-Request-Deadline",
        gt=0,
        allow_inf_nan=False,
        description="Seconds from arrival after which the request is ended.",
    ),
]

_MEANINGS = {
    400: "The request is malformed, or asks for what cannot be had.",
    401: "No valid API key.",
    403: "A page of another site may not do this.",
    404: "There is no such model or request.",
    408: "The deadline passed before the first token.",
    409: "Another call has overtaken it.",
    413: "The body is too large.",
    429: "The server is overloaded; Retry-After says when to try again.",
    500: "The engine has ended, or the request failed on its own.",
    503: "The server is shutting down, or not ready yet.",
}
_SECONDS: dict[str, Any] = {"description": "Seconds.", "schema": {"type": "integer"}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For a route's `responses`: the errors that it may answer with."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"model": ErrorResponse, "description": _MEANINGS[status]}
        if status in (429, 503):
            described[status]["headers"] = {"Retry-After": _SECONDS}
    return described


def events() -> dict[str, Any]:
    """For a route's 200: the answer may be a stream of events as well."""
    item = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {
        "description": "The answer; with stream true, as events: pieces of it in JSON, and [DONE] as the last.",
        "content": {"text/event-stream": {"itemSchema": item}},
    }


def describe(app: FastAPI, *, has_keys: bool) -> None:
    """Make the app describe its own errors: FastAPI describes a wrong body as 422, which this server never sends.

    Args:
        app: with all its routes.
        has_keys: whether clients need an API key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app, has_keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI is extended


def _description(app: FastAPI, has_keys: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if has_keys and path not in OPEN_PATHS:
                operation["security"] = [{"apiKey": []}]
                operation["responses"]["401"] = {
                    "description": _MEANINGS[401],
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
                }
    components = schema.get("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    if has_keys:
        components["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
    return schema
