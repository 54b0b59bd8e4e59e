"""The page that plays a film."""

from __future__ import annotations

from pointsman.web.page import assemble

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
    return assemble("player", title, data=None if film is None else {"film": film})
