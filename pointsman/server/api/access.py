"""Access: checks API keys, operator keys, addresses, Host and Origin headers.

    group       paths                                    accepted callers

    open        /health, /ready, /version, /metrics      every caller
                /live                                    every caller; this page contains no data
    clients     /v1/completions, /tokenize, /docs, ...   if clients have keys: callers with a client's key or an
                                                         operator's key;
                                                         otherwise: every caller
    operators   /pause, /resume, /live/film, ...         if operators have keys: callers with an operator's key;
                                                         if only clients have keys: no caller;
                                                         otherwise: programs on this machine that use no proxy
    own         /v1/requests, /v1/requests/ID            callers with a client's key, which see the client's requests;
                                                         the callers of the group operators, which see all requests

Requests to operators' endpoints are also refused, with any key, in two cases: a browser reports that a page of another
site sends the request, or the request calls the server by an unknown name. The owner of a page can make the page's name
resolve to this server (DNS rebinding); the browser then takes page and server for the same site. If clients need no
key, clients' endpoints refuse browsers' requests with unknown names too.

When all ordinary connections are in use, `RESERVED_PATHS` are still served.
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
"""Paths for load balancers, scrapers and browsers, which have no keys. Their responses show nothing about requests."""
OWN_PATHS = frozenset({"/v1/requests", "/v1/requests/{request_id}"})
"""Paths for operators, and for clients, which see only their own requests."""
RESERVED_PATHS = frozenset(
    {"/pause", "/resume", "/is_paused", "/reset_prefix_cache", "/max_num_active_seqs", "/v1/requests"}
).union(OPEN_PATHS)
"""Paths of health checks and operators; their responses take little time."""
FORWARDED = frozenset({"forwarded", "via", "x-real-ip"})
"""Names of headers that a proxy adds, in addition to those that begin with `FORWARDED_PREFIX`."""
FORWARDED_PREFIX = "x-forwarded-"


def is_reserved(path: str) -> bool:
    """Whether health checks or operators call this path."""
    return path in RESERVED_PATHS or path.startswith("/v1/requests/")


class ApiKeyMiddleware:
    """Refuses requests without a valid key. The comparison takes the same time for right and wrong keys.

    The index of the client's key is stored in the request's ASGI scope, as the owner of the request.

    Args:
        app: the app behind this middleware.
        keys: keys of clients; a request must send one of these or an operator's, as "Authorization: Bearer KEY".
        operator_keys: keys of operators.
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
                await self._answer(missing_key_error("a valid API key is missing", "KEY"))(scope, receive, send)
                return
            if found < self._num_clients:
                scope[OWNER] = found
        await self._app(scope, receive, send)


def find_key(scope: Scope, keys: list[bytes]) -> int | None:
    """The index of the request's key; None: the request has no valid key."""
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, key = given.partition(b" ")
    key = key.strip()
    # All keys are compared, even after a match.
    matches = [hmac.compare_digest(key, one) for one in keys]
    return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None


def missing_key_error(message: str, placeholder: str) -> ApiError:
    """The error 401 for a request without a valid key."""
    return ApiError(
        401,
        f'{message}; send the header "Authorization: Bearer {placeholder}"',
        headers={"www-authenticate": "Bearer"},
    )


class ServerNames:
    """The allowed host names, as sent in `Host`. Checking them protects against pages whose own name resolves to this
    server (DNS rebinding).

    Args:
        config: the operator's settings, with the host names of the server.
    """

    def __init__(self, config: ServerConfig) -> None:
        given = [found for host in config.allowed_host if (found := split_host(host)) is not None]
        self._names = {"localhost", "127.0.0.1", "::1", *(name for name, port in given if port is None)}
        self._names_with_port = {(name, port) for name, port in given if port is not None}
        if (name := _bound_name(config.host)) is not None:
            self._names.add(name)

    def refuse_unknown_names(self, request: Request, *, any_address: bool = False) -> None:
        """Refuse a request that calls the server by an unknown name.

        Args:
            request: the request of any caller.
            any_address: whether every IP address is allowed, as only the server's own pages can call it by one.

        Raises:
            ApiError: 403, the name is unknown.
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
    """Refuses browsers' requests to an unknown name of the server. It is used if no key is needed. Other clients, such
    as curl and OpenAI's, send neither `Origin` nor `Sec-Fetch-Site`, and may use any name.

    Args:
        app: the app behind this middleware.
        names: the allowed host names of the server.
        answer: makes the response to an error.
    """

    def __init__(self, app: ASGIApp, names: ServerNames, answer: Callable[[HTTPException], Response]) -> None:
        self._app = app
        self._names = names
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and _is_of_browser(scope):
            try:
                self._names.refuse_unknown_names(Request(scope), any_address=True)
            except ApiError as error:
                await self._answer(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _is_of_browser(scope: Scope) -> bool:
    return any(name in (b"origin", b"sec-fetch-site") for name, _ in scope["headers"])


class ReserveApp:
    """The app for reserve connections: refuses all requests except those of `RESERVED_PATHS`.

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
    """Checks requests to operators' endpoints. `require` and `viewer` are dependencies of routes.

    Args:
        config: the operator's settings, with the keys and the host names of the server.

    Attributes:
        names: the allowed host names of the server.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._keys = [key.encode() for key in config.operator_keys]
        self._clients_have_keys = bool(config.api_keys)
        self.names = ServerNames(config)

    async def require(self, request: Request) -> None:
        """Refuse callers that are not operators.

        Raises:
            ApiError: 403, the caller is no operator; 401, no valid key is sent.
        """
        refuse_foreign_pages(request.headers)
        self.names.refuse_unknown_names(request)
        if self._keys:
            self._refuse_other_keys(request)
        elif self._clients_have_keys:
            raise ApiError(
                403,
                "only operators may call this path, and the key is a client's; start the server with --operator-key, "
                "and send that key",
            )
        else:
            refuse_other_machines(request)

    async def viewer(self, request: Request) -> int | None:
        """The client whose requests the caller may see, as the index of its key; None: all requests.

        Raises:
            ApiError: as for `require`, if the caller has no client's key.
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
                403, "only operators may call this path, and the key is a client's; send a key given as --operator-key"
            )
        raise missing_key_error("a valid operator key (--operator-key) is missing", "OPERATOR-KEY")


def refuse_foreign_pages(headers: Headers) -> None:
    """Refuse requests that come from a page of another site, as the browser reports it.

    Such a page may send a POST to any address, but cannot read the response. If no key is needed, the POST takes
    effect. A page is this server's own if it was loaded under the name by which it calls the server.

    Raises:
        ApiError: 403.
    """
    for site in headers.getlist("sec-fetch-site"):
        if site not in ("same-origin", "none"):
            raise ApiError(
                403, f"Sec-Fetch-Site is {shown(site)}, and pages of other sites may not call this path; use curl"
            )
    host = headers.get("host", "").lower()
    for origin in headers.getlist("origin"):
        scheme, _, place = origin.partition("://")
        if scheme not in ("http", "https") or place.lower() != host:
            raise ApiError(403, f"Origin is {shown(origin)}, and pages of other sites may not call this path; use curl")


def refuse_other_machines(request: Request) -> None:
    """Refuse requests that do not come from a program on this machine, as far as the server can see.

    A proxy on this machine has a local address too. It is recognized by the headers that it adds or, if it forwards no
    headers, by a missing User-Agent: clients send one, proxies' HTTP libraries do not.

    Raises:
        ApiError: 403.
    """
    only = (
        "without an operator key only programs on this machine may call this path; start the server with --operator-key"
    )
    for name in request.headers:
        if name in FORWARDED or name.startswith(FORWARDED_PREFIX):
            raise ApiError(403, f"the header {shown(name)} shows that a proxy forwarded the request, and {only}")
    if not request.headers.get("user-agent"):
        raise ApiError(403, f"User-Agent is missing, as in requests through some routers; send one, as {only}")
    peer = request.client.host if request.client is not None else "unknown"
    address = _address_or_none(peer)
    if address is None or not ip_address(address).is_loopback:
        raise ApiError(403, f"the request comes from the address {shown(peer)}, and {only}")


def _bound_name(host: str) -> str | None:
    """The name or address that the server listens on. None: the server listens on all networks, which have no name that
    a client could send."""
    address = _address_or_none(host)
    if address is None:
        return host.lower()
    return None if ip_address(address).is_unspecified else address


def _address_or_none(text: str) -> str | None:
    try:
        return plain_address(text)
    except ValueError:
        return None
