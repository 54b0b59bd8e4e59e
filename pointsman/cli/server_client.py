"""The address and the key of a running `pointsman serve`, and GET requests to it with the standard library alone."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from pointsman.cli.errors import EXIT_FAILED, CommandError

API_KEY_VARIABLE = "POINTSMAN_API_KEY"
OPERATOR_KEY_VARIABLE = "POINTSMAN_OPERATOR_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT = 30.0
"""Seconds to wait for an answer."""
LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Hosts that a proxy from the environment could not reach."""


def server_url(url: str | None) -> str:
    """The URL of a server without /v1 and without a slash at the end; None: `DEFAULT_URL`.

    Raises:
        CommandError: it is not an HTTP address.
    """
    base = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(base)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port or an IPv6 address that is none
        is_address = False
    if not is_address or not base.isprintable() or " " in base:
        raise CommandError(f"--url is {url!r}, not an HTTP address; write for example {DEFAULT_URL}")
    return base


def key_headers(key: str | None) -> dict[str, str]:
    """The headers that send a key.

    Raises:
        CommandError: the key has characters that a header cannot have.
    """
    if not key:
        return {}
    if not (key.isascii() and key.isprintable()):
        raise CommandError("the key has characters other than printable ASCII; check the key")
    return {"Authorization": f"Bearer {key}"}


def page_url(url: str | None, path: str, query: Mapping[str, str] | None = None) -> str:
    """The URL of a page of the server. Raises CommandError as `server_url`."""
    return server_url(url) + quote(path) + (f"?{urlencode(query)}" if query else "")


def get_text(page: str, key: str | None = None) -> str:
    """Get the text of a page.

    Args:
        page: the URL, of `page_url`.
        key: key to send; None: that of an environment variable, an operator's before a client's.

    Raises:
        CommandError: the server cannot be reached, or refuses the request.
    """
    variables = (os.environ.get(name, "").strip() for name in (OPERATOR_KEY_VARIABLE, API_KEY_VARIABLE))
    request = Request(page, headers=key_headers(key or next(filter(None, variables), None)))
    host = urlsplit(page).hostname
    opener = build_opener(ProxyHandler({})) if host in LOOPBACK else build_opener()
    try:
        with opener.open(request, timeout=TIMEOUT) as response:
            text: str = response.read().decode("utf-8", "replace")
    except HTTPError as error:
        raise CommandError(f"{page} answers {error.code}: {_message_of(error)}", EXIT_FAILED) from None
    except (URLError, HTTPException, OSError) as error:
        server = "{0.scheme}://{0.netloc}".format(urlsplit(page))
        raise CommandError(
            f"no server answers at {server} ({getattr(error, 'reason', None) or error}); start one with pointsman "
            "serve, or give its --url, or --socket for a vLLM",
            EXIT_FAILED,
        ) from None
    return text


def get_object(page: str, field: str, key: str | None = None) -> dict[str, Any]:
    """Get the JSON object of a page. Arguments and errors as for `get_text`.

    Raises:
        CommandError: also if the page has no JSON object with this field, and so is another server's.
    """
    text = get_text(page, key)
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or field not in answer:
        raise CommandError(f"{page} is no page of pointsman serve; check --url", EXIT_FAILED)
    return answer


def _message_of(error: HTTPError) -> str:
    """The message of an error response, or its status line."""
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
    return str(message)
