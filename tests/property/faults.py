"""The error of the checks."""

from __future__ import annotations


class ShadowFault(AssertionError):
    """The host got inconsistent data, or a read found wrong content."""


def require(condition: bool, message: str) -> None:
    """Raise `ShadowFault` unless `condition` holds (plain asserts vanish under -O)."""
    if not condition:
        raise ShadowFault(message)
