"""Errors for clients: bodies, type names and statuses, equal to those of vLLM's server.

    {"error": {"message": "...", "type": "BadRequestError", "param": "temperature", "code": 400}}

Code that refuses a request raises an `ApiError`; `ErrorAnswers` turns every other exception into one. A message is one
line: the value, the limit, the remedy. It quotes at most `SHOWN_CHARACTERS` characters of a client's value.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

logger = logging.getLogger(__name__)

PROBES = frozenset({"/health", "/ready"})
"""Paths that probes call every few seconds; their errors do not count as refused requests."""
SHOWN_CHARACTERS = 60
"""Maximum number of characters of a value that a message quotes."""
SHOWN_FIELDS = 3
"""Maximum number of fields that one message names."""
_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "DeadlineExceededError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
_REASONS = {
    400: "invalid",
    401: "unauthorized",
    403: "unauthorized",
    404: "not_found",
    405: "invalid",
    408: "deadline",
    413: "too_large",
    503: "draining",
}
"""Reasons by HTTP status, for refusals whose `ApiError` has no reason."""


class ApiError(HTTPException):
    """The error response to a request.

    Args:
        status: HTTP status.
        message: one line for the client.
        param: name of the invalid field of the request; None: the error is not about one field.
        headers: further headers of the response.
        reason: one of `metrics.table.REFUSALS`, for the metrics; None: the reason follows from the status.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
        reason: str | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers) if headers else None)
        self.param = param
        self.reason = reason or _REASONS.get(status, "other")

    def body(self) -> dict[str, Any]:
        """The body of the response."""
        return error_body(self.status_code, self.detail, self.param)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def not_found(message: str, param: str | None = None) -> ApiError:
    """The error 404: there is no such model, request or path."""
    return ApiError(404, message, param=param)


def one_line(message: str) -> str:
    """A message without line breaks."""
    return " ".join(message.split())


class ErrorAnswers:
    """Makes the response to an error, and counts it.

    Args:
        count: called with the reason of each refusal.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count

    def __call__(self, error: HTTPException, *, is_refusal: bool = True) -> Response:
        """Returns the response to `error`, in ASCII with escapes, so that no text of a message can make the response
        invalid.

        Args:
            error: the error for the client.
            is_refusal: whether the error counts as a refused request.
        """
        if not isinstance(error, ApiError):
            error = ApiError(error.status_code, one_line(str(error.detail)), headers=error.headers)
        if is_refusal:
            self._count(error.reason)
        body = json.dumps(error.body()).encode("ascii")
        return Response(body, error.status_code, error.headers, media_type="application/json")

    def install(self, app: FastAPI) -> None:
        """Register the handlers of all errors with the app."""

        async def on_http_error(request: Request, error: Exception) -> Response:
            assert isinstance(error, HTTPException)
            if not isinstance(error, ApiError) and error.status_code == 404:
                error = not_found(f"there is no {shown(request.url.path)} here; see /openapi.json for what there is")
            elif not isinstance(error, ApiError) and error.status_code == 405:
                allowed = (error.headers or {}).get("Allow", "another method")
                error = ApiError(
                    405, f"{request.method} is not allowed for this path; use {allowed}", headers=error.headers
                )
            return self(error, is_refusal=request.url.path not in PROBES)

        async def on_invalid(_: Request, error: Exception) -> Response:
            assert isinstance(error, RequestValidationError)
            return self(validation_error(error.errors()))

        async def on_fault(request: Request, error: Exception) -> Response:
            # The trace is in the log; the client gets no internal details.
            logger.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
            return self(ApiError(500, "the server failed on this request; its log says why", reason="other"))

        app.add_exception_handler(HTTPException, on_http_error)
        app.add_exception_handler(RequestValidationError, on_invalid)
        app.add_exception_handler(Exception, on_fault)


# ------------------------------------------------------------------------------------------------- validation


def validation_error(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """The error 400 for a body that the pydantic model refuses; the message names the first wrong fields."""
    fields: dict[str, list[Mapping[str, Any]]] = {}
    for error in errors:
        fields.setdefault(_field(error), []).append(error)
    parts = [_field_message(field, found) for field, found in list(fields.items())[:SHOWN_FIELDS]]
    if len(fields) > SHOWN_FIELDS:
        parts.append(f"and {len(fields) - SHOWN_FIELDS} more fields")
    param = next(iter(fields), None)
    return ApiError(400, "; ".join(parts) or "the request is not valid", param=param or None)


def _field(error: Mapping[str, Any]) -> str:
    """The name of the field that an error of pydantic is about; "" for the body as a whole."""
    given = error.get("ctx", {}).get("param")
    if given is not None:
        return str(given)
    where, *path = error["loc"]
    if where != "body":
        return str(path[0])
    # If a field accepts several types, the path also names classes and types.
    names = [part for part in path if isinstance(part, str) and part.isidentifier() and part[0].islower()]
    return names[0] if names else ""


def _field_message(field: str, errors: list[Mapping[str, Any]]) -> str:
    """The message about one invalid field, from pydantic's errors for it: a field that accepts several types has an
    error for each type."""
    messages = list(dict.fromkeys(str(error["msg"]) for error in errors))[:4]
    text = ", or ".join([messages[0], *(message[:1].lower() + message[1:] for message in messages[1:])])
    # Messages of this server's validators begin with the field's name already.
    said = text if field and text.startswith(f"{field}: ") else f"{field or 'the body'}: {text}"
    first = errors[0]
    if first["type"] in ("missing", "unsupported", "bounded"):
        return said
    return f"{said} (got {shown(first.get('input'))})"


def shown(value: object) -> str:
    """A value as a message quotes it: short and on one line."""
    if isinstance(value, (list, tuple)):
        return f"a list of {len(value)}"
    if isinstance(value, Mapping):
        return f"an object with {len(value)} keys"
    if isinstance(value, (bytes, bytearray)):
        return f"{len(value)} bytes"
    if isinstance(value, str):
        return ascii(value) if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]!a}..."
    if isinstance(value, int) and value.bit_length() > 3 * SHOWN_CHARACTERS:
        return "an integer of very many digits"  # Python refuses to format integers of more than 4,300 digits
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return repr(value)[:SHOWN_CHARACTERS]
