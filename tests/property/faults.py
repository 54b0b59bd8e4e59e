"""How the checks say that something is wrong."""

from __future__ import annotations


class ShadowFault(AssertionError):
    """The host was told something inconsistent, or a read found the wrong content."""


def require(condition: bool, message: str) -> None:
    """Raise `ShadowFault` unless `condition` holds (plain asserts vanish under -O)."""
    if not condition:
        raise ShadowFault(message)
