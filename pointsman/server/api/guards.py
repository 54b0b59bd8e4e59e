"""What a request passes before its route: the size of its body, strict JSON. Its key is in `access`.

JSON is parsed by pydantic, not by Python: it refuses NaN and infinities, lone surrogates, nesting beyond 200 levels and
integers of thousands of digits, all with an error that names the place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pointsman.server.wire.errors import ApiError, one_line, shown


class BodyLimitMiddleware:
    """Reads at most `max_bytes` of a body, whether or not a header gives its length.

    Args:
        app: the app behind it.
        max_bytes: of a body.
        answer: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, answer: Callable[[HTTPException], Response]) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"content-length"), b"")
        if given.isdigit() and int(given[:20]) > self._max_bytes:
            await self._answer(self._too_large())(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._too_large()  # where the app reads the body; it answers the error
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the body has more than {self._max_bytes} bytes, the maximum of this server; send less",
            headers={"connection": "close"},  # or the rest of the body would still be read
        )


class StrictRequest(Request):
    """A request that parses its body strictly."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            # A million small lists would set off the collector again and again, for a second in all.
            gc.disable()
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not valid JSON: {one_line(str(error))}") from None
            finally:
                gc.enable()
        return self._json


class StrictRoute(APIRoute):
    """A route whose body, if it has one, must be application/json."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        has_body = self.body_field is not None

        async def strict(request: Request) -> Response:
            if has_body:
                given = request.headers.get("content-type", "")
                if given.partition(";")[0].strip().lower() != "application/json":
                    raise ApiError(400, f"the content type is {shown(given)}; send application/json")
            try:
                return await handle(StrictRequest(request.scope, request.receive))
            except ClientDisconnect:  # while it sent its body; nothing reads the response
                return Response(status_code=400)

        return strict
