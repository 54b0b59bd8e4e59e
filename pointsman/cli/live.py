"""`pointsman live --socket`: shows the decisions of a running vLLM in a page on this machine."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import partial
from typing import Any

from pointsman.cli.local_page import listening_on
from pointsman.cli.vllm import scheduler_connection
from pointsman.integrations.vllm import client
from pointsman.web import local
from pointsman.web.page import assemble


def live_server(socket: str, port: int = 0) -> local.LocalServer:
    """The server of the live page, on loopback.

    Args:
        socket: path of the control socket of a vLLM.
        port: port of the server; 0: a free port.

    Raises:
        CommandError: no scheduler answers on the socket, or the port is taken.
    """
    with scheduler_connection(socket) as connection:
        model = connection.ask("explain", limit=1)["model"]
    page = assemble("live", f"Live: {model}", connects=True)
    with listening_on(port):
        return local.LocalServer(page, {("GET", "/live/film"): partial(_open_film, socket)}, port=port)


def _open_film(socket: str, _: local.Ask) -> Iterator[bytes]:
    """The film that arrives from the socket.

    Raises:
        Refused: the socket sends no film.
    """
    try:
        connection = client.Connection(socket)
        first = connection.ask("film")
    except client.ControlUnavailable as error:
        raise local.Refused(503, str(error)) from None
    except client.Refused as error:
        raise local.Refused(502, str(error)) from None
    return _relay_records(connection, first)


def _relay_records(connection: client.Connection, line: dict[str, Any]) -> Iterator[bytes]:
    try:
        while True:
            yield base64.b64decode(line["records"])
            line = connection.next_line(client.ANSWER_SECONDS)  # the socket sends one each second
    except (client.ControlUnavailable, client.Refused):  # the page tries again
        return
    finally:
        connection.close()
