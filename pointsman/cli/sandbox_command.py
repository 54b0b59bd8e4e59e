"""`pointsman sandbox`: a scheduler to play with, in a page on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from pointsman.cli.local_page import serve_page
from pointsman.cli.sandbox import open_sandbox


def sandbox(
    file: Annotated[
        str | None,
        typer.Argument(metavar="FILE", help="A film or a recording, whose requests and settings are the start."),
    ] = None,
    port: Annotated[int, typer.Option(help="Port of the page.", show_default="a free one")] = 0,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = False,
) -> int:
    """Play with a scheduler in the browser: add requests, change settings, step and undo.

    The real scheduler decides. The command prints the address of the page, which only this machine can open; Ctrl-C
    ends it.
    """
    return serve_page(open_sandbox(file, port), open_page=open_page)
