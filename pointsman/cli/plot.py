"""`pointsman plot`: a film or a recording as one picture."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Annotated

import typer

from pointsman.cli.errors import EXIT_OK, CommandError, check_writable
from pointsman.cli.film import film_recording, is_film, read_film
from pointsman.web.film import Film
from pointsman.web.plot import draw


def plot(
    file: Annotated[str, typer.Argument(help="A film or a recording.")],
    out: Annotated[
        str | None, typer.Option("--out", "-o", help="The picture, .png, .svg or .pdf; by default FILE with .png.")
    ] = None,
) -> int:
    """Draw a run: each step's batch, the KV pool, what every request did, why the queue waited.

    It needs matplotlib.
    """
    path = Path(file).with_suffix(".png") if out is None else Path(out)
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ModuleNotFoundError:
        raise CommandError("pointsman plot needs matplotlib; install it with: pip install matplotlib") from None
    known = FigureCanvasAgg.get_supported_filetypes()
    if (kind := path.suffix[1:].lower()) not in known:
        raise CommandError(f"--out is {path}; its name must end with one of {', '.join(sorted(known))}, not {kind!r}")
    check_writable(str(path))
    source = Path(file)
    if is_film(source):
        found = read_film(source)
    else:
        made = io.BytesIO()
        film_recording(source, made, with_blocks=False)
        made.seek(0)
        found = Film(made)
    figure = draw(found, source.name)
    figure.savefig(path, dpi=120)
    print(path)
    return EXIT_OK
