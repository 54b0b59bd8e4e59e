"""Placeholder: no model has a name yet."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

NAMED: Mapping[str, object] = {}


def installed(name: str) -> Path | None:
    """The GGUF file of a named model; None: it is not installed."""
    raise KeyError(name)
