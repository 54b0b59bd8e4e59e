"""Assembles pages. Each page is one self-contained HTML file, which needs neither the network nor Python.

The parts of pages are in `page/`: `film.js` reads films, `counts.js` counts their events, `story.js` puts events into
words, `line.js` and `diagram.js` draw, `view.html` and `view.js` show one film, `frame.html` is the frame of all pages,
and each page has a body and a script of its own. Each page also contains the words of `words.py`, and uses them also
for films that other versions have recorded. A page's Content-Security-Policy allows only its scripts and its style
sheet, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files

from pointsman.web.words import page_words

VIEW = ("film.js", "counts.js", "story.js", "line.js", "diagram.js", "view.js")
"""The scripts of a page that shows films; the page's own script follows."""
PAGE_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""HTTP headers with which a server sends a page. The page itself contains the rest of its Content-Security-Policy, but
cannot contain the rule about frames."""


def assemble(
    name: str,
    title: str,
    *,
    scripts: Sequence[str] = (),
    data: Mapping[str, bytes] | None = None,
    connects: bool = False,
    has_view: bool = True,
) -> str:
    """The page made of `page/NAME.html` and `page/NAME.js`.

    Args:
        title: title of the page, as plain text.
        scripts: names of further scripts, which run before the page's own.
        data: data to embed, by the id of the HTML element that holds it.
        connects: whether the page's script may send requests to the server that the page came from.
        has_view: whether the page shows films.
    """
    folder = files("pointsman.web").joinpath("page")

    def read(file: str) -> str:
        return folder.joinpath(file).read_text(encoding="utf-8")

    style = read("page.css")
    of_films = [words_script(), *map(read, VIEW)] if has_view else ['"use strict";']
    script = "\n".join([*of_films, *(read(file) for file in (*scripts, f"{name}.js"))])
    connect = "connect-src 'self'; " if connects else ""
    policy = (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)} 'unsafe-hashes'; {connect}"
        "base-uri 'none'; form-action 'none'"
    )
    carried = "\n".join(
        f'<script type="application/octet-stream" id="{key}">{base64.b64encode(value).decode()}</script>'
        for key, value in (data or {}).items()
    )
    parts = {
        "title": html.escape(title),
        "policy": policy,
        "style": style,
        "view": read("view.html") if has_view else "",
        "data": carried,
        "script": script,
    }
    text = read("frame.html").replace("{body}", read(f"{name}.html"))
    # All placeholders in one pass, so that a title may contain the name of a placeholder.
    return re.sub(rf"\{{({'|'.join(parts)})\}}", lambda found: parts[found[1]], text)


def words_script() -> str:
    """The first script of a page: it defines `WORDS`, and makes all scripts strict."""
    words = json.dumps(page_words()).replace("<", "\\u003c")  # so no text closes the script element
    return f'"use strict";\nconst WORDS = {words};'


def _csp_hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
