"""Access: keys of clients and operators, and the origin of operators' requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pointsman.server.api.access import ApiKeyMiddleware
from pointsman.server.api.app import create_app
from pointsman.server.config import ServerConfig
from pointsman.server.service.engine_client import EngineClient
from pointsman.server.service.fleet import EngineFleet
from pointsman.server.service.names import HIDDEN
from pointsman.server.wire.questions import ExplainAll, IsPaused
from tests.forked_engines import start_server
from tests.server.api.test_bodies import ANSWER, App, call, reads_all
from tests.server.engine_pool import engine_pool

ENDPOINTS = [
    ("GET", "/health", "open"),
    ("HEAD", "/health", "open"),
    ("GET", "/ready", "open"),
    ("HEAD", "/ready", "open"),
    ("GET", "/version", "open"),
    ("GET", "/metrics", "open"),
    ("GET", "/live", "open"),
    ("HEAD", "/live", "open"),
    ("POST", "/v1/completions", "client"),
    ("POST", "/v1/chat/completions", "client"),
    ("POST", "/v1/embeddings", "client"),
    ("GET", "/v1/models", "client"),
    ("GET", "/v1/models/{model}", "client"),
    ("POST", "/tokenize", "client"),
    ("POST", "/detokenize", "client"),
    ("GET", "/openapi.json", "client"),
    ("HEAD", "/openapi.json", "client"),
    ("GET", "/docs", "client"),
    ("HEAD", "/docs", "client"),
    ("GET", "/docs/oauth2-redirect", "client"),
    ("HEAD", "/docs/oauth2-redirect", "client"),
    ("GET", "/redoc", "client"),
    ("HEAD", "/redoc", "client"),
    ("GET", "/v1/requests", "own"),
    ("GET", "/v1/requests/{request_id}", "own"),
    ("POST", "/pause", "operator"),
    ("GET", "/is_paused", "operator"),
    ("GET", "/live/film", "operator"),
    ("POST", "/resume", "operator"),
    ("POST", "/reset_prefix_cache", "operator"),
    ("POST", "/max_num_active_seqs", "operator"),
    ("POST", "/v1/requests/{request_id}/priority", "operator"),
]
"""Every endpoint and its callers: all; clients; operators; operators, and clients for their own requests."""
FOR_OPERATORS = [(method, path) for method, path, who in ENDPOINTS if who in ("operator", "own")]
DESCRIBED = {path for _, path, _ in ENDPOINTS} - {
    *("/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc", "/live", "/live/film")
}

PAGE = (Path(__file__).parents[3] / "docs" / "guides" / "secure_a_server.md").read_text(encoding="utf-8")

CLIENT, OPERATOR = "sesame-of-a-client", "sesame-of-an-operator"
CONFIGS: dict[str, dict[str, Any]] = {
    "no keys": {},
    "client keys": {"api_keys": ("other-key", CLIENT)},
    "operator keys": {"operator_keys": (OPERATOR, "other-operator-key")},
    "both": {"api_keys": (CLIENT,), "operator_keys": ("other-operator-key", OPERATOR)},
}
LONG = {"prompt": "The import statement", "max_tokens": 400, "ignore_eos": True, "temperature": 0}

Test = Callable[[httpx.AsyncClient, EngineClient], Awaitable[None]]


def with_server(test: Test, *, peer: str = "127.0.0.1", **config: Any) -> None:
    """An app in this process, in front of a real engine process; requests come from the address `peer`."""

    async def run(client: EngineClient) -> None:
        app = create_app(EngineFleet([client]), ServerConfig(**config))
        transport = httpx.ASGITransport(ends_soon(app), raise_app_exceptions=False, client=(peer, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", timeout=60) as http:
            await test(http, client)

    engine_pool().run(run, model="demo", num_blocks=512, num_threads=1)


def ends_soon(app: FastAPI) -> ASGIApp:
    """An app whose endless stream ends with its first part: the client here waits for the end of every body."""

    async def shorter(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_first(message: Message) -> None:
            is_part = message["type"] == "http.response.body" and message.get("more_body", False)
            await send({**message, "more_body": False} if is_part else message)
            if is_part:
                await asyncio.sleep(60)  # until the client is seen to leave

        await app(scope, receive, send_first if scope["path"] == "/live/film" else send)

    return shorter


def bearer_of(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def ask(http: httpx.AsyncClient, method: str, path: str, headers: Mapping[str, str] | None = None) -> Any:
    """The response to a request without lasting effect; the body of completions is not valid."""
    path = path.replace("{model}", "demo").replace("{request_id}", "cmpl-nothing")
    content: dict[str, Any] = {"content": b"{}"} if method == "POST" else {}
    if path.endswith("/priority"):
        content["params"] = {"priority": 0}
    return await http.request(method, path, headers={"content-type": "application/json", **(headers or {})}, **content)


def message_of(answer: Any) -> str:
    message: str = answer.json()["error"]["message"]
    return message


# ------------------------------------------------------------------------------------------------- one list


def flat(routes: Iterable[Any]) -> Iterator[Any]:
    """All routes, including those of nested routers."""
    for route in routes:
        inner = getattr(route, "original_router", None)
        yield from [route] if inner is None else flat(inner.routes)


@pytest.mark.e2e
def test_access_table_lists_every_route() -> None:
    async def run(client: EngineClient) -> None:
        app: FastAPI = create_app(EngineFleet([client]), ServerConfig())
        found = {(method, route.path.replace(":path}", "}")) for route in flat(app.routes) for method in route.methods}
        assert found == {(method, path) for method, path, _ in ENDPOINTS}
        described = app.openapi()["paths"]
        assert {(method.upper(), path) for path, methods in described.items() for method in methods} == {
            (method, path) for method, path, _ in ENDPOINTS if path in DESCRIBED and method != "HEAD"
        }

    engine_pool().run(run, model="demo", num_blocks=512, num_threads=1)


def status_of(who: str, keys: str, key: str | None) -> int | None:
    """The expected HTTP status of a refusal; None: the request is not refused."""
    has_client_keys, has_operator_keys = keys in ("client keys", "both"), keys in ("operator keys", "both")
    is_client, is_operator = has_client_keys and key == CLIENT, has_operator_keys and key == OPERATOR
    if who == "open":
        return None
    if has_client_keys and not (is_client or is_operator):
        return 401
    if who == "client" or (who == "own" and is_client):
        return None
    if has_operator_keys:
        return None if is_operator else 403 if is_client else 401
    return 403 if has_client_keys else None


@pytest.mark.e2e
@pytest.mark.parametrize("keys", CONFIGS)
def test_each_endpoint_requires_the_kind_of_key_in_the_access_table(keys: str) -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for key, (method, path, who) in itertools.product([None, "wrong-key", CLIENT, OPERATOR], ENDPOINTS):
            answer = await ask(http, method, path, bearer_of(key))
            expected = status_of(who, keys, key)
            found = answer.status_code if answer.status_code in (401, 403) else None
            assert found == expected, (key, method, path, answer.status_code)
            assert answer.status_code < 500
            if expected == 401:
                assert answer.headers["www-authenticate"] == "Bearer"
                assert method == "HEAD" or "Authorization: Bearer" in message_of(answer)
            if expected == 403:
                assert "--operator-key" in message_of(answer)
                assert answer.json()["error"]["type"] == "PermissionDeniedError"
            if expected:
                assert not any(one in answer.text for one in (CLIENT, OPERATOR, "wrong-key"))
        assert await client.ask(IsPaused()) is False

    with_server(test, **CONFIGS[keys])


@pytest.mark.e2e
@pytest.mark.parametrize("keys", CONFIGS)
def test_openapi_description_states_the_key_of_each_endpoint(keys: str) -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        key = {"client keys": CLIENT, "both": OPERATOR}.get(keys)
        description = (await http.get("/openapi.json", headers=bearer_of(key))).json()
        schemes = description.get("components", {}).get("securitySchemes", {})
        expected = {"client keys": {"apiKey"}, "operator keys": {"operatorKey"}, "both": {"apiKey", "operatorKey"}}
        assert schemes.keys() == expected.get(keys, set())
        for method, path, who in ENDPOINTS:
            if path not in DESCRIBED or method == "HEAD":
                continue
            operation = description["paths"][path][method.lower()]
            kinds = {kind for one in operation.get("security", []) for kind in one}
            opens = {
                kind
                for kind, one in (("apiKey", CLIENT), ("operatorKey", OPERATOR))
                if kind in schemes and status_of(who, keys, one) is None and status_of(who, keys, None) is not None
            }
            assert opens <= kinds, (method, path)
            assert ("401" in operation["responses"]) is (status_of(who, keys, None) == 401), (method, path)
            assert ("403" in operation["responses"]) is (who in ("own", "operator")), (method, path)

    with_server(test, **CONFIGS[keys])


# ------------------------------------------------------------------------------------------------- what is written


def in_words(who: str, keys: str) -> str:
    """The documentation's words for the weakest credential that the endpoint accepts."""
    if status_of(who, keys, None) is None:
        return "open" if who in ("open", "client") else "this machine"
    if status_of(who, keys, CLIENT) is None:
        return "client"
    return "operator" if status_of(who, keys, OPERATOR) is None else "nobody"


def test_access_table_in_the_docs_matches_the_code() -> None:
    told: dict[tuple[str, str], list[list[str]]] = {}
    for line in PAGE.splitlines():
        if not line.startswith(("| `GET /", "| `POST /")):
            continue
        endpoints, *cells = (cell.strip() for cell in line.split("|")[1:-1])
        method = ""
        for given in re.findall(r"`([^`]+)`", endpoints):
            method, _, path = given.rpartition(" ") if " " in given else (method, "", given)
            path = path.replace("NAME", "{model}").replace("ID", "{request_id}")
            told.setdefault((method, path), []).append(cells)
    left_out = {"HEAD", "/docs/oauth2-redirect"}
    assert told.keys() == {(method, path) for method, path, _ in ENDPOINTS if not left_out & {method, path}}
    for method, path, who in ENDPOINTS:
        if who == "own":
            own, everybody = told[method, path]
            assert own == ["client" if in_words(who, keys) == "client" else "as below" for keys in CONFIGS], path
            assert everybody == [in_words("operator", keys) for keys in CONFIGS], path
        elif (method, path) in told:
            assert told[method, path] == [[in_words(who, keys) for keys in CONFIGS]], path


def test_nginx_example_exposes_only_client_paths() -> None:
    (pattern,) = re.findall(r"^location ~ (\S+) \{$", PAGE, re.MULTILINE)
    for _, path, who in ENDPOINTS:
        is_forwarded = who == "client" and path in DESCRIBED
        assert bool(re.search(pattern, path)) is is_forwarded, path
    assert re.search(r"^location / \{\n +return 403;", PAGE, re.MULTILINE)


# ------------------------------------------------------------------------------------------------- comparing keys


def guarded(*keys: str) -> App:
    return ApiKeyMiddleware(reads_all, keys, ANSWER)


def bearer(value: bytes) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", value)]


@pytest.mark.parametrize("value", [b"Bearer first", b"Bearer second", b"bearer second", b"Bearer  first "])
def test_every_valid_key_is_accepted(value: bytes) -> None:
    assert call(guarded("first", "second"), headers=bearer(value))[0]["status"] == 200


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"first",
        b"Bearer",
        b"Bearer ",
        b"Bearer firs",
        b"Bearer first2",
        b"Basic first",
        b"Bearer \xff\xfe",
        b"Bearer FIRST",
    ],
)
def test_invalid_keys_are_refused(value: bytes) -> None:
    sent = call(guarded("first", "second"), headers=bearer(value))
    assert sent[0]["status"] == 401
    assert (b"www-authenticate", b"Bearer") in sent[0]["headers"]


def test_request_without_authorization_header_is_refused() -> None:
    assert call(guarded("first"))[0]["status"] == 401


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/live"])
def test_probes_need_no_key(path: str) -> None:
    assert call(guarded("first"), path=path)[0]["status"] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/completions",
        "/tokenize",
        "/v1/requests",
        "/docs",
        "/openapi.json",
        "/health/",
        "//health",
        "/HEALTH",
        "/health/../v1/models",
        "/reset_prefix_cache",
        "/pause",
        "/resume",
        "/is_paused",
        "/live/film",
        "/live/",
        "/max_num_active_seqs",
    ],
)
def test_all_other_paths_need_a_key(path: str) -> None:
    assert call(guarded("first"), path=path)[0]["status"] == 401


def test_operator_key_is_valid_for_client_paths() -> None:
    app = ApiKeyMiddleware(reads_all, ["client"], ANSWER, ["operator"])
    for key in (b"client", b"operator"):
        assert call(app, headers=bearer(b"Bearer " + key))[0]["status"] == 200


def test_asgi_scope_has_the_index_of_the_api_key_but_not_the_key() -> None:
    scopes: list[Any] = []

    async def notes(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await reads_all(scope, receive, send)

    app = ApiKeyMiddleware(notes, ["first", "second", "second"], ANSWER, ["operator"])
    for key in (b"first", b"second", b"operator"):
        call(app, headers=bearer(b"Bearer " + key))
    assert [scope.get("pointsman.owner") for scope in scopes] == [0, 1, None]


# ------------------------------------------------------------------------------------------------- pages and names


@pytest.mark.e2e
@pytest.mark.parametrize("keys", ["no keys", "operator keys", "both"])
def test_pages_of_other_sites_cannot_call_operator_endpoints(keys: str) -> None:
    foreign = [
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:8001", "host": "127.0.0.1:8000"},
        {"origin": "http://evil.example:8000", "host": "evil.example:8000"},  # a name that resolves to this server
        {"sec-fetch-site": "same-origin", "origin": "http://evil.example:8000", "host": "evil.example:8000"},
        {"origin": "http://localhost.evil.example", "host": "localhost.evil.example"},
        {"origin": "file://127.0.0.1", "host": "127.0.0.1"},
        {"origin": "http://[::1", "host": "[::1"},
        {"sec-fetch-site": "cross-site", "origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
    ]
    own: list[dict[str, str]] = [
        {},
        {"sec-fetch-site": "none"},
        {"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:8000", "host": "127.0.0.1:8000"},
        {"origin": "https://LOCALHOST:8000", "host": "localhost:8000"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
    ]
    key = bearer_of(None if keys == "no keys" else OPERATOR)

    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for method, path in FOR_OPERATORS:
            for headers in foreign:
                answer = await ask(http, method, path, key | headers)
                assert answer.status_code == 403, (path, headers)
                assert answer.json()["error"]["type"] == "PermissionDeniedError"
        assert await client.ask(IsPaused()) is False
        for headers in own:
            for method, path in FOR_OPERATORS:
                answer = await ask(http, method, path, key | headers)
                assert answer.status_code == (404 if "{" in path else 200), (path, headers, answer.text)
        metrics = (await http.get("/metrics")).text
        (line,) = [
            line for line in metrics.splitlines() if "requests_refused_total{" in line and "unauthorized" in line
        ]
        assert float(line.split()[-1]) == len(FOR_OPERATORS) * len(foreign)

    with_server(test, **CONFIGS[keys])


HOSTS: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (  # (settings, names of the server, others)
        {},
        ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:9000", "[::1]:8000", "[0:0:0:0:0:0:0:1]"],
        [
            "evil.example",
            "evil.example:8000",
            "localhost.evil.example",
            "0.0.0.0:8000",
            "10.0.0.5",
            "127.0.0.1.evil.example",
            "2130706433",
            "",
            "localhost:8000:8000",
            "[::1",
            "[localhost]",
            "user@localhost",
            "localhost/",
            "lokal\u00efsch",
        ],
    ),
    ({"host": "0.0.0.0"}, ["localhost", "127.0.0.1"], ["0.0.0.0", "0.0.0.0:8000", "[::]", "gpu1"]),
    ({"host": "::"}, ["localhost", "[::1]"], ["[::]", "0.0.0.0"]),
    ({"host": "10.0.0.5"}, ["10.0.0.5", "10.0.0.5:8000", "[::ffff:10.0.0.5]"], ["10.0.0.6"]),
    ({"host": "GPU1"}, ["gpu1", "gpu1:8000", "Gpu1"], ["gpu2"]),
    (
        {"allowed_host": ("gpu1", "LLM.example.com:443", "10.0.0.7", "[fd00::1]:8000")},
        ["gpu1", "gpu1:1", "llm.example.com:443", "10.0.0.7:99", "[fd00:0::1]:8000", "localhost"],
        ["llm.example.com", "llm.example.com:444", "gpu1.evil.example", "[fd00::1]", "10.0.0.8"],
    ),
]


@pytest.mark.e2e
@pytest.mark.parametrize("keys", ["no keys", "operator keys"])
@pytest.mark.parametrize(("settings", "names", "others"), HOSTS, ids=[str(case[0]) for case in HOSTS])
def test_operator_requests_need_a_known_host_name(
    settings: dict[str, Any], names: list[str], others: list[str], keys: str
) -> None:
    key = bearer_of(None if keys == "no keys" else OPERATOR)

    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for host in names:
            answer = await ask(http, "GET", "/is_paused", key | {"host": host})
            assert answer.status_code == 200, (host, answer.text)
            page = key | {"host": host, "origin": f"http://{host}", "sec-fetch-site": "same-origin"}
            assert (await ask(http, "GET", "/is_paused", page)).status_code == 200
        for host in others:
            encoded = [(b"host", host.encode("latin-1")), *((k.encode(), v.encode()) for k, v in key.items())]
            answer = await http.get("/is_paused", headers=encoded)
            assert answer.status_code == 403, host
            message = message_of(answer)
            assert "--allowed-host" in message and message.startswith("Host is ")
        answer = await ask(http, "GET", "/v1/models", {"host": "evil.example"})
        assert answer.status_code == 200  # clients may call it as they like

    with_server(test, **CONFIGS[keys], **settings)


BROWSERS = [
    {"origin": "http://{host}"},
    {"origin": "null"},
    {"sec-fetch-site": "same-origin"},
    {"sec-fetch-site": "none"},
]
FOR_CLIENTS = [(method, path) for method, path, who in ENDPOINTS if who == "client"]
OPEN = [(method, path) for method, path, who in ENDPOINTS if who == "open"]


@pytest.mark.e2e
@pytest.mark.parametrize("keys", CONFIGS)
@pytest.mark.parametrize(("settings", "names", "others"), HOSTS, ids=[str(case[0]) for case in HOSTS])
def test_without_keys_browser_requests_need_a_known_host_name(
    settings: dict[str, Any], names: list[str], others: list[str], keys: str
) -> None:
    """A page's own name may resolve to this server (DNS rebinding); to the browser the server is then the same site."""
    key = bearer_of({"client keys": CLIENT, "both": CLIENT}.get(keys))
    addresses = ["10.9.8.7", "10.9.8.7:8000", "[fd00::9]:80", "[::ffff:10.0.0.6]", "0.0.0.0", "[::]"]

    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        others_by_name = [host for host in others if not re.fullmatch(r"[\d.:]+|\[[\d:a-f.]+\](:\d+)?", host)]
        for known, hosts in ((True, [*names, *addresses]), (False, others_by_name)):
            for host, browser in itertools.product(hosts, BROWSERS):
                page = {name: value.replace("{host}", host) for name, value in browser.items()}
                sent = [(k.encode(), v.encode("latin-1")) for k, v in (key | page | {"host": host}).items()]
                answer = await http.get("/v1/models", headers=sent)
                is_refused = not known and not key
                assert answer.status_code == (403 if is_refused else 200), (host, page)
                if is_refused:
                    assert message_of(answer).startswith("Host is ") and "--allowed-host NAME" in message_of(answer)
            for host in hosts:  # curl and SDKs
                answer = await http.get("/v1/models", headers=[(b"host", host.encode("latin-1")), *bytes_of(key)])
                assert answer.status_code == 200, host

    with_server(test, **CONFIGS[keys], **settings)


def bytes_of(headers: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.encode(), value.encode()) for name, value in headers.items()]


@pytest.mark.e2e
def test_page_with_unknown_host_reaches_only_open_paths() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        page = {"host": "evil.example:8000", "origin": "http://evil.example:8000"}
        for method, path in FOR_CLIENTS + FOR_OPERATORS:
            assert (await ask(http, method, path, page)).status_code == 403, path
        for method, path in OPEN:
            assert (await ask(http, method, path, page)).status_code == 200, path
        for hosts in (["localhost", "evil.example"], ["evil.example", "localhost"], []):
            headers = [(b"origin", b"http://localhost"), *((b"host", host.encode()) for host in hosts)]
            answer = await http.request("GET", "/v1/models", headers=headers)
            assert answer.status_code == (403 if hosts else 200), hosts  # without one, httpx gives its own

    with_server(test)


@pytest.mark.e2e
def test_server_on_all_networks_accepts_the_called_address_as_host() -> None:
    async def run(client: EngineClient) -> None:
        app = create_app(EngineFleet([client]), ServerConfig(host="0.0.0.0"))
        for address, host, status in (
            ("192.168.1.5", "192.168.1.5:8000", 200),
            ("192.168.1.5", "192.168.1.6:8000", 403),
            ("::ffff:192.168.1.5", "192.168.1.5:8000", 200),
            ("fd00::5%eth0", "[fd00::5]:8000", 200),
        ):

            async def called(scope: Any, receive: Any, send: Any, address: str = address) -> None:
                await app({**scope, "server": (address, 8000)}, receive, send)

            transport = httpx.ASGITransport(called)
            async with httpx.AsyncClient(transport=transport, base_url="http://any") as http:
                answer = await http.get("/is_paused", headers={"host": host})
                assert answer.status_code == status, (address, host)

    engine_pool().run(run, model="demo", num_blocks=512, num_threads=1)


@pytest.mark.e2e
def test_every_host_header_must_be_a_known_name() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for hosts in (["localhost", "evil.example"], ["evil.example", "localhost"]):
            headers = [(b"host", host.encode()) for host in hosts]
            assert (await http.get("/is_paused", headers=headers)).status_code == 403

    with_server(test)


# ------------------------------------------------------------------------------------------------- other machines

PASSED_ON = [
    {"forwarded": "for=192.0.2.1"},
    {"x-forwarded-for": "127.0.0.1"},
    {"X-Forwarded-Proto": "https"},
    {"x-forwarded-anything": ""},
    {"x-real-ip": "127.0.0.1"},
    {"via": "1.1 proxy"},
    {"user-agent": ""},
]


@pytest.mark.e2e
def test_without_keys_proxied_requests_are_not_operators() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for headers, (method, path) in itertools.product(PASSED_ON, FOR_OPERATORS):
            answer = await ask(http, method, path, headers)
            assert answer.status_code == 403, (path, headers)
            assert "--operator-key" in message_of(answer)
            assert next(iter(headers)).lower() in message_of(answer).lower()
        assert await client.ask(IsPaused()) is False
        for headers in PASSED_ON:
            assert (await ask(http, "GET", "/v1/models", headers)).status_code == 200

    with_server(test)


@pytest.mark.e2e
@pytest.mark.parametrize("peer", ["192.0.2.7", "10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1", "0.0.0.0", "unknown"])
def test_without_keys_other_machines_are_not_operators(peer: str) -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for method, path in FOR_OPERATORS:
            answer = await ask(http, method, path)
            assert answer.status_code == 403, path
            assert "--operator-key" in message_of(answer) and repr(peer) in message_of(answer)
        assert await client.ask(IsPaused()) is False
        assert (await ask(http, "GET", "/v1/models")).status_code == 200

    with_server(test, peer=peer, host="0.0.0.0")


@pytest.mark.e2e
@pytest.mark.parametrize("peer", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_without_keys_this_machine_is_an_operator(peer: str) -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        assert (await ask(http, "GET", "/is_paused")).status_code == 200

    with_server(test, peer=peer)


@pytest.mark.e2e
@pytest.mark.parametrize("keys", ["operator keys", "both"])
def test_operator_key_works_remotely_and_through_a_proxy(keys: str) -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        for headers, (method, path) in itertools.product([{}, *PASSED_ON], FOR_OPERATORS):
            answer = await ask(http, method, path, {**headers, **bearer_of(OPERATOR)})
            assert answer.status_code == (404 if "{" in path else 200), (path, headers)
        answer = await ask(http, "POST", "/pause")
        assert answer.status_code == 401

    with_server(test, peer="192.0.2.7", **CONFIGS[keys])


# ------------------------------------------------------------------------------------------------- own requests


@pytest.mark.e2e
def test_client_sees_only_its_own_requests_and_operator_sees_all() -> None:
    keys = {"api_keys": ("key-a", "key-b"), "operator_keys": (OPERATOR,)}
    a, b, operator = bearer_of("key-a"), bearer_of("key-b"), bearer_of(OPERATOR)

    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        async def listed(headers: Mapping[str, str], **params: str) -> list[dict[str, Any]]:
            data: list[dict[str, Any]] = (await http.get("/v1/requests", headers=headers, params=params)).json()["data"]
            return data

        await http.post("/max_num_active_seqs", params={"limit": 1}, headers=operator)
        sent = []
        for name, headers in (("secret-of-a", a), ("of-b", b), ("twin", a), ("twin", b), ("of-operator", operator)):
            body = {**LONG, "request_id": name, "user": f"user of {name}"}
            sent.append(asyncio.ensure_future(http.post("/v1/completions", json=body, headers=headers)))
            while len(await client.ask(ExplainAll())) < len(sent):
                await asyncio.sleep(0.002)
        everything = await listed(operator)
        assert [one["id"] for one in everything] == [
            "cmpl-" + n for n in ("secret-of-a", "of-b", "twin", "twin", "of-operator")
        ]
        assert everything[1]["blocker"] == "cmpl-secret-of-a"
        assert [one["id"] for one in await listed(a)] == ["cmpl-secret-of-a", "cmpl-twin"]
        of_b = await listed(b)
        assert [one["id"] for one in of_b] == ["cmpl-of-b", "cmpl-twin"]
        # It shows the reason to wait, but not the name of another client's request.
        assert of_b[0]["blocker"] == HIDDEN and {one["id"] for one in of_b[0]["holders"]} == {HIDDEN}
        assert of_b[0]["resource"] == "sequence slots" and HIDDEN in of_b[0]["explanation"]
        assert "secret-of-a" not in json.dumps(of_b)
        (own,) = await listed(b, id="cmpl-twin")
        assert own["engine_id"] == of_b[1]["engine_id"]
        assert await listed(b, id="cmpl-secret-of-a") == []
        for other in ("cmpl-secret-of-a", everything[0]["engine_id"], everything[2]["engine_id"], "cmpl-of-operator"):
            refused = await http.get(f"/v1/requests/{other}", headers=b)
            assert refused.status_code == 404, other
            missing = await http.get("/v1/requests/cmpl-nothing", headers=b)
            assert message_of(refused).replace(other, "") == message_of(missing).replace("cmpl-nothing", "")
        assert (await http.get("/v1/requests/cmpl-twin", headers=b)).json()["engine_id"] == own["engine_id"]
        assert (await http.get("/v1/requests/cmpl-twin", headers=operator)).status_code == 400  # two have that name
        assert (await http.get("/v1/requests", headers=bearer_of("key-c"))).status_code == 401
        await http.post("/pause", headers=operator)
        await http.post("/resume", headers=operator)
        await http.post("/max_num_active_seqs", headers=operator)
        await asyncio.gather(*sent)
        assert await listed(operator) == [] and await listed(a) == []

    with_server(test, **keys)


@pytest.mark.e2e
def test_without_operator_key_clients_see_their_own_requests_remotely() -> None:
    async def test(http: httpx.AsyncClient, client: EngineClient) -> None:
        answer = await http.get(
            "/v1/requests", headers={**bearer_of(CLIENT), **PASSED_ON[0], "host": "llm.example.com"}
        )
        assert answer.json()["data"] == []
        refused = await http.post("/pause", headers=bearer_of(CLIENT))
        assert refused.status_code == 403 and "--operator-key" in message_of(refused)

    with_server(test, peer="192.0.2.7", **CONFIGS["client keys"])


# ------------------------------------------------------------------------------------------------- a real connection


def own_address() -> str | None:
    """An address of this machine that is not loopback, as long as it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        address: str = sock.getsockname()[0]
        return None if address.startswith("127.") else address


@pytest.mark.e2e
@pytest.mark.parametrize("keys", [(), ("--operator-key", OPERATOR)])
def test_server_on_all_networks_checks_host_name_and_caller_address(keys: tuple[str, ...]) -> None:
    with start_server("--model", "demo", "--num-blocks", "64", "--host", "0.0.0.0", *keys) as server:

        def status(place: str, **headers: str) -> int:
            url = f"http://{place}:{server.port}/is_paused"
            answered: int = httpx.get(url, headers=headers | bearer_of(OPERATOR if keys else None)).status_code
            return answered

        assert status("127.0.0.1") == status("localhost") == 200
        assert status("0.0.0.0") == status("127.0.0.1", host="evil.example") == 403
        assert status("127.0.0.1", **{"x-forwarded-for": "127.0.0.1"}) == (200 if keys else 403)
        if (address := own_address()) is not None:  # the caller has it, too, and is not on loopback
            assert status(address) == (200 if keys else 403)
            assert httpx.get(f"http://{address}:{server.port}/v1/models").status_code == 200
        assert "can be reached from other machines" in server.log()
