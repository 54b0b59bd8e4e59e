"""`pointsman play`: a page in which a run can be stepped through."""

from __future__ import annotations

import io
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.film import broken_films, check_is_other, film_recording, is_film
from pointsman.web.film import Film
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
    check_is_other(source, path)
    if is_film(source):
        data = source.read_bytes()
    else:
        made = io.BytesIO()
        film_recording(source, made)
        data = made.getvalue()
    with broken_films(source):  # what cannot be shown is refused here, and not in the browser
        if not Film(io.BytesIO(data)).frames:
            raise CommandError(f"{source} has no step: nothing was scheduled")
    try:
        path.write_text(page_of(data, source.name), encoding="utf-8")
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK
