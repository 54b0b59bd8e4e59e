"""A local server for pages: it listens on loopback, and answers only requests with its token.

    server = LocalServer(page, {("POST", "/step"): step})
    print(server.url)                  http://127.0.0.1:40123/#token=...
    server.serve()                     until `close`, from another thread, or Ctrl-C

The page itself has no data and needs no token. Every other request needs the header "Authorization: Bearer TOKEN". The
page finds the token in its URL's fragment, which a browser sends to no server. Any web page may send a request to an
address of this machine, or to a host name that resolves to such an address (DNS rebinding). So Host must be one of this
server's names, and Origin, if a browser sends one, must be this server.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from pointsman.web.page import PAGE_HEADERS
from pointsman.web.places import Places

MAX_CONNECTIONS = 64
"""Maximum number of open connections; a newer connection replaces the connection that has sent no request for the
longest time."""
MAX_BODY = 1 << 20
"""Maximum size of a request's body, in bytes."""
SECONDS_TO_SEND = 60.0
"""Time for a client to send its request, or to accept a part of the response."""


class Refused(Exception):
    """A request is refused; has the HTTP status, and a sentence with the reason."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Ask:
    """A request that the page has sent to a route."""

    query: Mapping[str, str]
    """Parameters of the URL, by name; for a repeated name, the last value."""
    body: bytes

    def json(self) -> Any:
        """The body of the request, parsed as JSON.

        Raises:
            Refused: the body is not JSON.
        """
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            raise Refused(400, "the body is not JSON") from None


Stream: TypeAlias = Iterator[bytes]
"""Parts of a response. An empty part only checks that the client is still connected: a waiting stream yields an empty
part at least each second. The stream is closed when the client disconnects."""
Route: TypeAlias = Callable[[Ask], "bytes | dict[str, Any] | list[Any] | Stream"]
"""Computes the response to a request, in the thread of the request's connection. Bytes and streams are sent unchanged,
other results as JSON. Raises `Refused`."""


class LocalServer:
    """A server of one page. It accepts connections as soon as it is constructed, and responds while `serve` runs.

    Args:
        page: HTML of the page at "/".
        routes: routes by method and path, such as ("POST", "/step").
        port: port to listen on; 0: any free port.

    Raises:
        OSError: the port is in use.
    """

    def __init__(self, page: str, routes: Mapping[tuple[str, str], Route], *, port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        own = {"page": page.encode(), "routes": dict(routes), "token": self.token}
        handler: type[_Handler] = type("Handler", (_Handler,), own)
        self._server = _Server(("127.0.0.1", port), handler)
        self.port = self._server.server_port
        names = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        handler.names = frozenset(names | ({"127.0.0.1", "localhost"} if self.port == 80 else set()))
        self._serves = False

    @property
    def url(self) -> str:
        """The URL of the page, with its token."""
        return f"http://127.0.0.1:{self.port}/#token={self.token}"

    def serve(self) -> None:
        """Respond to requests until another thread calls `close`; Ctrl-C raises KeyboardInterrupt in the caller."""
        self._serves = True
        self._server.serve_forever(poll_interval=0.1)

    def close(self) -> None:
        """End `serve`, if it runs in another thread, and stop listening. Open streams continue until the process
        exits."""
        if self._serves:  # without `serve`, `shutdown` would wait forever
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.places = Places(MAX_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Process the requests of a new connection, if `places` has a place for it."""
        if self.places.acquire(request):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Free the place of a connection whose thread has ended."""
        self.places.release(request)
        super().shutdown_request(request)

    def handle_error(self, *_: Any) -> None:
        """Do nothing: the error was sent to the client, or the client has disconnected."""


class _Handler(BaseHTTPRequestHandler):
    page: bytes
    routes: Mapping[tuple[str, str], Route]
    token: str
    names: frozenset[str]
    server: _Server
    timeout = SECONDS_TO_SEND
    server_version, sys_version = "pointsman", ""

    def log_message(self, *_: Any) -> None:
        """Log nothing: a log would fill a terminal, and contain the data of URLs."""

    def do_GET(self) -> None:
        self._respond()

    do_HEAD = do_POST = do_GET

    def _respond(self) -> None:
        self.server.places.mark_used(self.connection)
        try:
            self._check_host_and_origin()
            place = urlsplit(self.path)
            if place.path == "/":
                self._send_page()
            else:
                self._call_route(place.path, dict(parse_qsl(place.query)))
        except Refused as error:
            self._send(error.status, json.dumps({"error": str(error)}).encode(), "application/json")

    def _check_host_and_origin(self) -> None:
        """Refuse requests that were sent by other pages or under another host name.

        Raises:
            Refused: a header names another server or page (status 403).
        """
        hosts = self.headers.get_all("host") or []
        if len(hosts) != 1 or hosts[0].lower() not in self.names:
            raise Refused(403, "Host is not this server; open the address that was printed")
        for origin in self.headers.get_all("origin") or []:
            if origin.lower() != f"http://{hosts[0].lower()}":
                raise Refused(403, "Origin is another page, which may not use this server")
        for site in self.headers.get_all("sec-fetch-site") or []:
            if site not in ("same-origin", "none"):
                raise Refused(403, "Sec-Fetch-Site is another page, which may not use this server")

    def _send_page(self) -> None:
        if self.command == "POST":
            raise Refused(405, "the page is served with GET only")
        self._send(200, self.page, "text/html; charset=utf-8")

    def _call_route(self, path: str, query: dict[str, str]) -> None:
        scheme, _, given = self.headers.get("authorization", "").partition(" ")
        is_known = hmac.compare_digest(given.strip().encode(), self.token.encode())
        if scheme.lower() != "bearer" or not is_known:
            raise Refused(401, "the token is missing or wrong; open the address that was printed")
        route = self.routes.get((self.command, path))
        if route is None:
            raise Refused(404, "there is no such address here")
        found = route(Ask(query, self._read_body()))
        if isinstance(found, bytes):
            self._send(200, found, "application/octet-stream")
        elif isinstance(found, (dict, list)):
            self._send(200, json.dumps(found, separators=(",", ":")).encode(), "application/json")
        else:
            self._send_stream(found)

    def _read_body(self) -> bytes:
        length = self.headers.get("content-length", "0")
        if self.headers.get("transfer-encoding") is not None or not length.isdecimal():
            raise Refused(411, "a body needs its Content-Length")
        if int(length) > MAX_BODY:
            raise Refused(413, f"the body has {length} bytes; the maximum is {MAX_BODY}")
        return self.rfile.read(int(length))

    def _send_head(self, status: int, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        for name, value in PAGE_HEADERS.items():
            self.send_header(name, value)
        self.send_header("connection", "close")

    def _send(self, status: int, body: bytes, content_type: str) -> None:
        self._send_head(status, content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_stream(self, parts: Stream) -> None:
        with closing(parts) as open_parts:  # type: ignore[type-var]  # a generator, or another object with close
            self._send_head(200, "application/octet-stream")
            self.end_headers()
            with suppress(OSError):  # the client has disconnected
                for part in open_parts:
                    if part:
                        self.wfile.write(part)
                    elif self._has_disconnected():
                        return

    def _has_disconnected(self) -> bool:
        """Whether the client has closed the connection. A connected client sends nothing while it reads a stream."""
        readable, _, _ = select.select([self.connection], [], [], 0)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)
