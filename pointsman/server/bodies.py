"""How a request's body becomes a Python object: strictly, so that nothing but JSON gets through.

The parser is pydantic's, not Python's: it refuses NaN and infinities, lone surrogates, nesting beyond 200 levels and
integers of thousands of digits, all with an error that says where.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pointsman.server.errors import ApiError, one_line, shown


class StrictRequest(Request):
    """A request whose body is JSON or an error."""

    async def json(self) -> Any:
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not valid JSON: {one_line(str(error))}") from None
        return self._json


class StrictRoute(APIRoute):
    """A route that takes application/json only, where it takes a body at all."""

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
            except ClientDisconnect:  # while it sent its body; nobody will read the answer
                return Response(status_code=400)

        return strict
