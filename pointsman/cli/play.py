"""`pointsman play`: a page in which a run can be stepped through."""

from __future__ import annotations

import io
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError, check_writable
from pointsman.cli.film import film_recording, is_film, read_film
from pointsman.web.player import page_of


def play(
    file: Annotated[str, typer.Argument(help="A film or a recording.")],
    out: Annotated[str | None, typer.Option("--out", "-o", help="The page; by default FILE with .html.")] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = False,
) -> int:
    """Make a page in which a run can be stepped through, forth and back, with the reason of every decision.

    It is one HTML file that carries the film and needs nothing else, so it can be handed on. It has no prompts.
    """
    source = Path(file)
    path = source.with_suffix(".html") if out is None else Path(out)
    check_writable(str(path))
    if is_film(source):
        read_film(source)  # what cannot be shown is refused here
        data = source.read_bytes()
    else:
        made = io.BytesIO()
        film_recording(source, made)
        data = made.getvalue()
    try:
        page = page_of(data, source.name)
    except ValueError as error:
        raise CommandError(str(error)) from None
    path.write_text(page, encoding="utf-8")
    print(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK
