"""What a request passes before its route: the API key, the size of its body, strict JSON; and, for what operators call,
whether a page of another site has sent it.

JSON is parsed by pydantic, not by Python: it refuses NaN and infinities, lone surrogates, nesting beyond 200 levels and
integers of thousands of digits, all with an error that names the place.
"""

from __future__ import annotations

import gc
import hmac
from collections.abc import Callable, Coroutine, Iterable
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pointsman.server.wire.errors import ApiError, one_line, shown

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics"})
"""For load balancers and scrapers, which hold no keys; nothing there is about a request."""


class ApiKeyMiddleware:
    """Refuses requests without a valid key. Comparing takes as long for a wrong key as for a right one.

    Args:
        app: the app behind it.
        keys: of which one must be sent, as "Authorization: Bearer KEY".
        answer: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], answer: Callable[[HTTPException], Response]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            'a valid API key is missing; send the header "Authorization: Bearer KEY"',
            headers={"www-authenticate": "Bearer"},
        )
        await self._answer(error)(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        key = key.strip()
        # All keys are compared, whether one has matched or not.
        matches = sum(hmac.compare_digest(key, one) for one in self._keys)
        return scheme.lower() == b"bearer" and matches > 0


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


def refuse_foreign_pages(request: Request) -> None:
    """A dependency of routes that operators call: 403 where a browser says that a page of another site asks.

    Such a page may send a POST to any address, without a key where none is needed, though it cannot read the response.
    A page counts as this server's own only if it was loaded from "localhost" or an IP address: other names may be made
    to lead here (DNS rebinding).

    Raises:
        ApiError: 403.
    """
    site = request.headers.get("sec-fetch-site", "none")
    if site not in ("same-origin", "none"):
        raise ApiError(403, f"Sec-Fetch-Site is {shown(site)}, and pages of other sites may not do this; use curl")
    origin = request.headers.get("origin")
    if origin is not None and not _is_own(origin, request.headers.get("host", "")):
        raise ApiError(403, f"Origin is {shown(origin)}, and pages of other sites may not do this; use curl")


def _is_own(origin: str, host: str) -> bool:
    scheme, _, place = origin.partition("://")
    if scheme not in ("http", "https") or place.lower() != host.lower():
        return False
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ip_address(name))
    except ValueError:
        return False


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
