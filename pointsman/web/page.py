"""Pages, each as one HTML file that needs nothing else: no network, and no Python once it is made.

Their parts are in `page/`: `film.js` reads films, `counts.js` counts what happened, `story.js` puts it into words,
`line.js` and `diagram.js` draw it, `view.html` and `view.js` show one film, `frame.html` is what all pages have, and
each has a body and a script of its own. Each page also has the words of `words.py`, so films of other versions are told
in them as well. A page's policy (Content-Security-Policy) allows its scripts and its style sheet, by their hashes, and
nothing else.
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
"""The scripts of a page that shows films, before its own."""
PAGE_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Of a page that a server sends; what else its policy has is in the page. A policy in a page cannot say who may frame
it."""


def assemble(
    name: str,
    title: str,
    *,
    scripts: Sequence[str] = (),
    data: Mapping[str, bytes] | None = None,
    connects: bool = False,
) -> str:
    """The page of `page/NAME.html` and `page/NAME.js`.

    Args:
        title: plain text.
        scripts: further ones, before the page's own.
        data: what the page carries, by the id of its element.
        connects: whether its script may ask the server that it came from.
    """
    folder = files("pointsman.web").joinpath("page")

    def read(file: str) -> str:
        return folder.joinpath(file).read_text(encoding="utf-8")

    style = read("page.css")
    script = "\n".join([words_script(), *(read(file) for file in (*VIEW, *scripts, f"{name}.js"))])
    connect = "connect-src 'self'; " if connects else ""
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)} 'unsafe-hashes'; {connect}"
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
        "view": read("view.html"),
        "data": carried,
        "script": script,
    }
    text = read("frame.html").replace("{body}", read(f"{name}.html"))
    # In one pass, so that a title may be called like a part.
    return re.sub(rf"\{{({'|'.join(parts)})\}}", lambda found: parts[found[1]], text)


def words_script() -> str:
    """The script before all others: it defines `WORDS`, and makes them strict."""
    words = json.dumps(page_words()).replace("<", "\\u003c")  # no text ends the element of the script
    return f'"use strict";\nconst WORDS = {words};'


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
