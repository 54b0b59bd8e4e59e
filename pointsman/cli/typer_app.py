"""The settings that every Typer app of the command line shares."""

from __future__ import annotations

from typing import Any

import typer


def plain_typer(*, add_completion: bool = False, **settings: Any) -> typer.Typer:
    """A Typer app with plain help pages: Typer's framed help cuts off long option names at 80 columns.

    Args:
        add_completion: whether the app has the options that install shell completion.
        settings: further arguments of `typer.Typer`.
    """
    return typer.Typer(
        add_completion=add_completion,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"max_content_width": 120},
        **settings,
    )
