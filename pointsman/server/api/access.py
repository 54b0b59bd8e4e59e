"""Who may call what.

    open        /health, /ready, /version, /metrics      every caller
                /live                                    likewise: the page alone, which holds nothing
    clients     /v1/completions, /tokenize, /docs, ...   where clients have keys: a client's key, or an operator's
    operators   /pause, /resume, /live/film, ...         where operators have keys: one of them;
                                                         where only clients have keys: no caller;
                                                         otherwise: a program on this machine, not through a proxy
    own         /v1/requests, /v1/requests/ID            with a client's key: the client's requests;
                                                         otherwise as for operators: all requests

Whatever key it has, a request to an operators' endpoint is refused where a browser says that a page of another site
sends it, and where it calls the server by an unknown name: a page's own name may be made to lead here (DNS rebinding),
and is then the same site to the browser. Where clients need no key, the latter holds for their endpoints, too, if a
browser sends the request.

When all ordinary connections are in use, `RESERVED_PATHS` are still answered.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pointsman.server.config import ServerConfig, plain_address, split_host
from pointsman.server.service.names import OWNER
from pointsman.server.stages import CONNECTIONS
from pointsman.server.wire.errors import ApiError, shown

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/live"})
"""For load balancers, scrapers and browsers, which hold no keys; nothing there is about a request."""
OWN_PATHS = frozenset({"/v1/requests", "/v1/requests/{request_id}"})
"""For operators, and for clients as far as the requests are their own."""
RESERVED_PATHS = frozenset(
    {"/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/max_num_active_seqs", "/v1/requests"}
).union(OPEN_PATHS)
"""What health checks and operators call, and what is answered soon."""
FORWARDED = frozenset({"forwarded", "via", "x-real-ip"})
"""Headers that a proxy adds, beside all that begin with `FORWARDED_PREFIX`."""
FORWARDED_PREFIX = "x-forwarded-"


def is_reserved(path: str) -> bool:
    """Whether health checks or operators call this path."""
    return path in RESERVED_PATHS or path.startswith("/v1/requests/")


class ApiKeyMiddleware:
    """Refuses requests without a valid key. Comparing takes as long for a wrong key as for a right one.

    The index of a client's key becomes the owner of the request, in its scope.

    Args:
        app: the app behind it.
        keys: of clients; one of these or an operator's must be sent, as "Authorization: Bearer KEY".
        operator_keys: of operators.
        answer: makes the response to an error.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[str],
        answer: Callable[[HTTPException], Response],
        operator_keys: Iterable[str] = (),
    ) -> None:
        self._app = app
        client_keys = [key.encode() for key in keys]
        self._num_clients = len(client_keys)
        self._keys = client_keys + [key.encode() for key in operator_keys]
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            found = find_key(scope, self._keys)
            if found is None:
                await self._answer(missing_key("a valid API key is missing", "KEY"))(scope, receive, send)
                return
            if found < self._num_clients:
                scope[OWNER] = found
        await self._app(scope, receive, send)


def find_key(scope: Scope, keys: list[bytes]) -> int | None:
    """The index of the key that a request sends; None: it is none of them."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    key = key.strip()
    # All keys are compared, whether one has matched or not.
    matches = [hmac.compare_digest(key, one) for one in keys]
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


def missing_key(what: str, placeholder: str) -> ApiError:
    """401."""
    return ApiError(
        401,
        f'{what}; send the header "Authorization: Bearer {placeholder}"',
        headers={"www-authenticate": "Bearer"},
    )


class ServerNames:
    """What `Host` may be: a page's own name may be made to lead to the server (DNS rebinding).

    Args:
        config: the names of the server.
    """

    def __init__(self, config: ServerConfig) -> None:
        given = [found for host in config.allowed_host if (found := split_host(host)) is not None]
        self._names = {"localhost", "127.0.0.1", "::1", *(name for name, port in given if port is None)}
        self._names_with_port = {(name, port) for name, port in given if port is not None}
        if (name := _bound_name(config.host)) is not None:
            self._names.add(name)

    def refuse_others(self, request: Request, *, any_address: bool = False) -> None:
        """Refuse a request that calls the server by an unknown name.

        Args:
            request: from whomever.
            any_address: whether each IP address counts as known: no page has one that is not the server's own.

        Raises:
            ApiError: 403.
        """
        server = request.scope.get("server")
        own = None if server is None else _address_or_none(server[0])
        for host in request.headers.getlist("host") or [""]:
            split = split_host(host)
            if split is not None:
                is_own = split[0] in self._names or split in self._names_with_port or split[0] == own
                if is_own or (any_address and _address_or_none(split[0]) is not None):
                    continue
            raise ApiError(
                403,
                f"Host is {shown(host)}, which is no known name of this server; call localhost or the server's IP "
                "address, or start it with --allowed-host NAME",
            )


class PageMiddleware:
    """Refuses what a browser sends to an unknown name of the server, where no key is needed. Other clients, such as
    curl and OpenAI's, send neither `Origin` nor `Sec-Fetch-Site`, and may call the server as they like.

    Args:
        app: the app behind it.
        names: of the server.
        answer: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, names: ServerNames, answer: Callable[[HTTPException], Response]) -> None:
        self._app = app
        self._names = names
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and _is_of_browser(scope):
            try:
                self._names.refuse_others(Request(scope), any_address=True)
            except ApiError as error:
                await self._answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_of_browser(scope: Scope) -> bool:
    return any(name in (b"origin", b"sec-fetch-site") for name, _ in scope["headers"])


class ReserveApp:
    """The app for connections of the reserve: other requests than those of `RESERVED_PATHS` are refused.

    Args:
        app: the whole app.
        answer: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, answer: Callable[[HTTPException], Response]) -> None:
        self._app = app
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if is_reserved(scope["path"]):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            503,
            "all connections of the server are in use (max_connections), and the last ones are for health checks and "
            "operators; try again in 1 s",
            headers={"retry-after": "1", "connection": "close"},
            reason=CONNECTIONS.reason,
        )
        await self._answer(error)(scope, receive, send)


class OperatorRules:
    """What a request to an operators' endpoint has to fulfil. `require` and `viewer` are dependencies of routes.

    Args:
        config: keys, and the names of the server.

    Attributes:
        names: by which the server may be called.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [key.encode() for key in config.operator_keys]
        self._clients_have_keys = bool(config.api_keys)
        self.names = ServerNames(config)

    async def require(self, request: Request) -> None:
        """Refuse all but operators.

        Raises:
            ApiError: 403; 401 where no valid key is sent.
        """
        refuse_foreign_pages(request.headers)
        self.names.refuse_others(request)
        if self._keys:
            self._refuse_other_keys(request)
        elif self._clients_have_keys:
            raise ApiError(
                403,
                "this is for operators, and a client's key is not enough; start the server with --operator-key, and "
                "send that key",
            )
        else:
            refuse_other_machines(request)

    async def viewer(self, request: Request) -> int | None:
        """Whose requests the caller may see: those of a client, by the index of its key, or every one (None).

        Raises:
            ApiError: as `require` has it, for all but clients with a key.
        """
        owner: int | None = request.scope.get(OWNER)
        if owner is None:
            await self.require(request)
        return owner

    def _refuse_other_keys(self, request: Request) -> None:
        if find_key(request.scope, self._keys) is not None:
            return
        if request.scope.get(OWNER) is not None:
            raise ApiError(
                403, "this is for operators, and a client's key is not enough; send a key given as --operator-key"
            )
        raise missing_key("a valid operator key (--operator-key) is missing", "OPERATOR-KEY")


def refuse_foreign_pages(headers: Headers) -> None:
    """403 where a browser says that a page of another site asks.

    Such a page may send a POST to any address, without a key where none is needed, though it cannot read the response.
    A page is this server's own if it was loaded under the name by which it calls the server.

    Raises:
        ApiError: 403.
    """
    for site in headers.getlist("sec-fetch-site"):
        if site not in ("same-origin", "none"):
            raise ApiError(403, f"Sec-Fetch-Site is {shown(site)}, and pages of other sites may not do this; use curl")
    host = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or place.lower() != host:
            raise ApiError(403, f"Origin is {shown(origin)}, and pages of other sites may not do this; use curl")


def refuse_other_machines(request: Request) -> None:
    """403 for what does not come from a program on this machine, as far as that can be seen.

    A proxy on this machine looks like a program on it. It shows by the headers that it adds, or, where it passes no
    header on, by the one that is not there: clients name themselves (User-Agent), HTTP libraries of proxies do not.

    Raises:
        ApiError: 403.
    """
    only = "without an operator key only programs on this machine may do this; start the server with --operator-key"
    for name in request.headers:
        if name in FORWARDED or name.startswith(FORWARDED_PREFIX):
            raise ApiError(403, f"the header {shown(name)} shows that a proxy has passed this on, and {only}")
    if not request.headers.get("user-agent"):
        raise ApiError(403, f"User-Agent is missing, as in what a router passes on; send one, as {only}")
    peer = request.client.host if request.client is not None else "unknown"
    address = _address_or_none(peer)
    if address is None or not ip_address(address).is_loopback:
        raise ApiError(403, f"this comes from the address {shown(peer)}, and {only}")


def _bound_name(host: str) -> str | None:
    """The name or address that the server was told to listen on; None for all networks, which is no name to call."""
    address = _address_or_none(host)
    if address is None:
        return host.lower()
    return None if ip_address(address).is_unspecified else address


def _address_or_none(text: str) -> str | None:
    try:
        return plain_address(text)
    except ValueError:
        return None
