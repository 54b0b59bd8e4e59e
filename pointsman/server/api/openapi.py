"""Completes the description at /openapi.json: headers, errors, events and keys."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Header
from fastapi.openapi.utils import get_openapi

from pointsman.server.api.access import OPEN_PATHS, OWN_PATHS
from pointsman.server.config import ServerConfig
from pointsman.server.wire.protocol import REQUEST_ID
from pointsman.server.wire.responses import ErrorResponse

MAX_PATH = 1024
"""Maximum number of characters of a model's name or a request's id in a path."""
GENERATION_ERRORS = (400, 404, 408, 413, 429, 500, 503)

RequestIdHeader = Annotated[
    str | None, Header(alias="X-Request-Id", pattern=REQUEST_ID, description="Part of the response's id.")
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
TTFTTargetHeader = Annotated[
    float | None,
    Header(
        alias="X-Request-TTFT-Target",
        gt=0,
        allow_inf_nan=False,
        description="Seconds from arrival until the first token should come; the server's order must read it.",
    ),
]

_MEANINGS = {
    400: "The request is malformed, or a value is not possible.",
    401: "No valid key.",
    403: "The caller may not do this; the message has the reason and the remedy.",
    404: "There is no such model or request.",
    408: "The deadline passed before the first token.",
    409: "A later call has replaced this one.",
    413: "The body is too large.",
    429: "The server is overloaded; Retry-After says when to try again.",
    500: "The engine has ended, or the request failed.",
    503: "The server is shutting down, or not ready yet.",
}
_SECONDS: dict[str, Any] = {"description": "Seconds.", "schema": {"type": "integer"}}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The OpenAPI descriptions of a route's possible errors, for the route's argument `responses`."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"model": ErrorResponse, "description": _MEANINGS[status]}
        if status in (429, 503):
            described[status]["headers"] = {"Retry-After": _SECONDS}
    return described


def events() -> dict[str, Any]:
    """The description of a route's 200 response that may also be a stream of events."""
    item = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {
        "description": "The response; with stream true, as events: parts of it in JSON, then [DONE].",
        "content": {"text/event-stream": {"itemSchema": item}},
    }


def describe(app: FastAPI, config: ServerConfig) -> None:
    """Make the app describe its own errors: FastAPI describes a wrong body as 422, which this server never sends.

    Args:
        app: the app with all its routes.
        config: the operator's settings; the description shows only which operations need a key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _description(app, config)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # how FastAPI is extended


def _description(app: FastAPI, config: ServerConfig) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["responses"].pop("422", None)
            if kinds := _keys_for(path, operation, config):
                operation["security"] = [{kind: []} for kind in kinds]
                operation["responses"]["401"] = {
                    "description": _MEANINGS[401],
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorResponse"}}},
                }
    components = schema.get("components", {})
    for name in ("HTTPValidationError", "ValidationError"):
        components.get("schemas", {}).pop(name, None)
    has_keys = {"apiKey": config.api_keys, "operatorKey": config.operator_keys}
    if schemes := {kind: {"type": "http", "scheme": "bearer"} for kind, keys in has_keys.items() if keys}:
        components["securitySchemes"] = schemes
    return schema


def _keys_for(path: str, operation: dict[str, Any], config: ServerConfig) -> list[str]:
    """The OpenAPI security schemes of an operation: the kinds of keys that it accepts. Empty: it needs no key."""
    if path in OPEN_PATHS:
        return []
    is_for_operators = "operation" in operation.get("tags", ())
    is_for_clients = not is_for_operators or path in OWN_PATHS
    kinds = []
    # If operators have no keys, a request without a client's key gets 401 before 403.
    if config.api_keys and (is_for_clients or not config.operator_keys):
        kinds.append("apiKey")
    if config.operator_keys and (config.api_keys or is_for_operators):
        kinds.append("operatorKey")
    return kinds
