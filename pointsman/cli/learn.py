"""`pointsman learn`: a course on what a scheduler does, in the browser."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError

PAGE = "pointsman-course.html"


def learn(
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help=f"Page to write, or a folder for it (as index.html), which is made if missing [default: {PAGE}].",
        ),
    ] = None,
    open_page: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the page in a browser [default: unless --out is given]."),
    ] = None,
) -> int:
    """Make the course on what a scheduler does: lessons with films of the real scheduler, settings to try, questions.

    The course is one HTML file that needs neither Python nor a network, so any web server can serve it.
    """
    # The lessons run the simulator's parts, which the other commands do without.
    from pointsman.web.course.build import course_page, perform_all

    path = Path(PAGE if out is None else out)
    if out is not None and (path.is_dir() or out.endswith("/")):
        path = path / "index.html"
    try:
        is_new = not path.parent.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_new:
            print(f"pointsman: made the folder {path.parent}", file=sys.stderr)
        path.write_text(course_page(perform_all()), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print(path)
    if out is None if open_page is None else open_page:
        webbrowser.open(path.resolve().as_uri())
    return EXIT_OK
