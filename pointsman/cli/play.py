"""`pointsman play`: makes a page that steps through a run."""

from __future__ import annotations

import io
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.film import broken_films, check_output_is_not_input, film_recording, is_film
from pointsman.web.film import Film
from pointsman.web.player import MAX_FILM, page_of, too_large


def play(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A film or a recording.")],
    beside: Annotated[str | None, typer.Argument(help="A second film or recording to compare with.")] = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", help="Page to write [default: FILE.html; for two runs FILE-BESIDE.html]."),
    ] = None,
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in a browser.")] = False,
) -> int:
    """Make a page that steps through a run, forward and back, with the reason of every decision.

    For two runs (such as policy A and policy B, or static and continuous batching), the page shows both side by side,
    steps them together, and reports how they differ.

    The page is one self-contained HTML file with the film, so it can be passed on. It has no prompts.
    """
    sources = [Path(name) for name in (file, beside) if name is not None]
    name = "-".join(source.stem for source in sources) + ".html"
    path = sources[0].with_name(name) if out is None else Path(out)
    for source in sources:
        check_output_is_not_input(source, path)
    films = [(_read_film_bytes(source), source.name) for source in sources]
    try:
        path.write_text(page_of(*films[0], beside=films[1] if beside is not None else None), encoding="utf-8")
    except ValueError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print(path)
    if open_page:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK


def _read_film_bytes(source: Path) -> bytes:
    """The bytes of the film in `source`, or of a film made from the recording in `source`."""
    if is_film(source):
        if (size := source.stat().st_size) > MAX_FILM:
            raise CommandError(too_large(source.name, size))
        data = source.read_bytes()
    else:
        made = io.BytesIO()
        film_recording(source, made)
        data = made.getvalue()
    with broken_films(source):  # refuse here, and not in the browser, what cannot be shown
        if not Film(io.BytesIO(data)).frames:
            raise CommandError(f"{source} has no step: nothing was scheduled")
    return data
