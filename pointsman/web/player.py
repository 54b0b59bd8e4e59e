"""The player: a page that plays a film, or compares two films."""

from __future__ import annotations

import json

from pointsman.web.page import assemble

MAX_FILM = 256 << 20
"""Maximum size of an embedded film, in bytes: a browser holds all of the film in memory."""


def page_of(film: bytes | None, title: str, beside: tuple[bytes, str] | None = None) -> str:
    """The HTML of the player's page.

    Args:
        film: film to embed; None: the user opens a file in the browser.
        title: title of the film, or of the page without a film.
        beside: another film to compare with, and its title.

    Raises:
        ValueError: a film is too large to embed.
    """
    films = [] if film is None else [(film, title)] if beside is None else [(film, title), beside]
    for each, name in films:
        if len(each) > MAX_FILM:
            raise ValueError(too_large(name, len(each)))
    names = [name for _, name in films]
    data = dict(zip(("film", "film2"), (each for each, _ in films), strict=False))
    if films:
        data["names"] = json.dumps(names).encode()
    return assemble("player", " and ".join(names) or title, scripts=("figures.js",), data=data)


def too_large(name: str, size: int) -> str:
    """Message for a film of `size` bytes that is too large to embed."""
    return (
        f"{name} has {size:,} bytes as a film, and a page holds at most {MAX_FILM:,}; leave out its blocks "
        "(pointsman film --no-blocks), or record a shorter run"
    )
