"""What a request passes before its route: the API key; and, for what operators call, whether a page of another site has
sent it. Its body: `bodies.py`.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pointsman.server.wire.errors import ApiError, shown

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
