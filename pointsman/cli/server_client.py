"""GET requests to a running `pointsman serve`, with the standard library alone, for commands without `[server]`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

from pointsman.cli.errors import EXIT_FAILED, CommandError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("POINTSMAN_OPERATOR_KEY", "POINTSMAN_API_KEY")
"""Environment variables with the key of a server; the first that is set counts."""
TIMEOUT = 30.0
"""Seconds to wait for an answer."""


def get_text(
    url: str | None, path: str, query: Mapping[str, str], key: str | None, *, only_address: bool = False
) -> str:
    """Get a page of the server as text.

    Args:
        url: URL of the server, with or without /v1; None: `DEFAULT_URL`.
        path: path of the page.
        query: parameters of the query.
        key: key to send; None: that of an environment variable, if any.
        only_address: whether to return the address of the page, which exists, instead of its text.

    Raises:
        CommandError: the server cannot be reached, or refuses the request.
    """
    base = (url or DEFAULT_URL).rstrip("/").removesuffix("/v1")
    if not base.startswith(("http://", "https://")):
        raise CommandError(f"--url is {url!r}; it must begin with http:// or https://")
    address = base + quote(path) + (f"?{urlencode(query)}" if query else "")
    key = key or next(filter(None, (os.environ.get(name, "").strip() for name in KEY_VARIABLES)), None)
    request = Request(address, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urlopen(request, timeout=TIMEOUT) as response:
            text: str = response.read().decode("utf-8", "replace")
    except HTTPError as error:
        raise CommandError(f"{address} answers {error.code}: {_message_of(error)}", EXIT_FAILED) from None
    except (URLError, HTTPException, OSError) as error:
        reason = getattr(error, "reason", None) or error
        raise CommandError(
            f"no server answers at {base} ({reason}); start one with pointsman serve, or give its --url", EXIT_FAILED
        ) from None
    return address if only_address else text


def get_json(url: str | None, path: str, query: Mapping[str, str], key: str | None) -> dict[str, Any]:
    """Get a JSON object from the server. Arguments and errors as for `get_text`."""
    text = get_text(url, path, query, key)
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise CommandError(f"the server at {url or DEFAULT_URL} is no pointsman serve: {path} is not JSON", EXIT_FAILED)
    return answer


def _message_of(error: HTTPError) -> str:
    """The message of an error response, or its status line."""
    try:
        message = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError, OSError):
        return error.reason
    return str(message)
