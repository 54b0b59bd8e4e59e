"""Serves a page on this machine until Ctrl-C; for `sandbox` and `live`."""

from __future__ import annotations

import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import typer

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.web.local import LocalServer

PagePort: TypeAlias = Annotated[int, typer.Option(help="Port of the page.", show_default="a free one")]
"""The option --port; 0: any free port."""


@contextmanager
def listening_on(port: int) -> Iterator[None]:
    """Context in which a `LocalServer` is constructed that listens on `port`.

    Raises:
        CommandError: there is no such port, or it is taken.
    """
    if not 0 <= port < 1 << 16:
        raise CommandError(f"--port is {port}; it must be between 0 (any free port) and 65535")
    try:
        yield
    except OSError as error:
        raise CommandError(f"cannot listen on port {port}: {error.strerror}; choose another --port") from None


def serve_page(server: LocalServer, *, open_page: bool) -> int:
    """Serve the page until Ctrl-C; returns the exit code."""
    forwarded = f"{server.port}:127.0.0.1:{server.port}"
    print(
        f"{server.url}\nOpen it in a browser on this machine; Ctrl-C ends it. If this machine has no browser, run "
        f"`ssh -L {forwarded} HOST` on one that has, with this machine as HOST, and open the same address there.",
        flush=True,
    )
    if open_page:
        webbrowser.open(server.url)
    try:
        server.serve()
    except KeyboardInterrupt:
        print()
    return EXIT_OK
