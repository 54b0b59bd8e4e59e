"""`pointsman plot`: draws a film or a recording as one picture, or converts it to a trace for Perfetto."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError
from pointsman.cli.film import broken_films, check_output_is_not_input, film_recording, is_film, read_film
from pointsman.web.film import Film
from pointsman.web.perfetto import write_trace
from pointsman.web.plot import draw


def plot(
    file: Annotated[str, typer.Argument(help="A film or a recording.")],
    out: Annotated[
        str | None,
        typer.Option(
            "--out",
            "-o",
            help="File to write: a picture (.png, .svg or .pdf), or a trace for Perfetto (.json) [default: FILE.png].",
        ),
    ] = None,
) -> int:
    """Draw a run: each step's batch, the KV pool, what every request did, and why the queue waited.

    A picture needs matplotlib. A trace can be opened in ui.perfetto.dev or chrome://tracing.
    """
    path = Path(file).with_suffix(".png") if out is None else Path(out)
    kind = path.suffix[1:].lower()
    if kind != "json":
        _check_picture(path, kind)
    source = Path(file)
    check_output_is_not_input(source, path)
    if is_film(source):
        found = read_film(source)
    else:
        made = io.BytesIO()
        film_recording(source, made, with_blocks=False)
        made.seek(0)
        found = Film(made)
    try:
        with broken_films(source):
            if kind == "json":
                write_trace(found, path)
            else:
                draw(found, source.name).savefig(path, dpi=120)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
    print(path)
    return EXIT_OK


def _check_picture(path: Path, kind: str) -> None:
    """Check that the picture can be drawn, before the recording is replayed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError:
        raise CommandError(
            "a picture needs matplotlib; install it with: pip install matplotlib, or give --out FILE.json"
        ) from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if kind not in known:
        names = ", ".join(sorted([*known, "json"]))
        raise CommandError(f"--out is {path}; its name must end with one of {names}, not {kind!r}")
