"""The page that plays a film, as one HTML file that needs nothing else: no network, and no Python once it is made.

Its parts are in `page/`: `film.js` reads films, `story.js` puts them into words, `player.js` draws. The page's policy
(Content-Security-Policy) allows these scripts and this style sheet, by their hashes, and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import html
from importlib.resources import files

SCRIPTS = ("film.js", "story.js", "player.js")
MAX_FILM = 256 << 20
"""Bytes of a film that a page carries: a browser holds all of it."""


def page_of(film: bytes | None, title: str) -> str:
    """The page.

    Args:
        film: that it carries; None: it is opened in the browser, from a file.

    Raises:
        ValueError: the film is larger than a page may carry.
    """
    if film is not None and len(film) > MAX_FILM:
        raise ValueError(
            f"the film has {len(film):,} bytes, and a page carries {MAX_FILM:,} at most; leave out its blocks "
            "(pointsman film --no-blocks), or record a shorter run"
        )
    folder = files("pointsman.web").joinpath("page")
    style = folder.joinpath("player.css").read_text(encoding="utf-8")
    script = "\n".join(folder.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)} 'unsafe-hashes'; "
        "base-uri 'none'; form-action 'none'"
    )
    carried = ""
    if film is not None:
        data = base64.b64encode(film).decode()
        carried = f'<script type="application/octet-stream" id="film">{data}</script>'
    text = folder.joinpath("player.html").read_text(encoding="utf-8")
    parts = {"policy": policy, "title": html.escape(title), "style": style, "film": carried, "script": script}
    for name, part in parts.items():
        before, _, after = text.partition(f"{{{name}}}")
        text = before + part + after if name != "title" else text.replace("{title}", part)
    return text


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
