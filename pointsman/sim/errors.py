"""Errors of the simulator. Each message names the value, the limit and the remedy."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pointsman.core.errors import PointsmanError

MAX_LISTED = 20
"""Maximum number of names that an error lists."""


class SimulationError(PointsmanError):
    """Base of every error that the simulator raises on purpose."""


class UnknownName(SimulationError, ValueError):
    """A model, device or scenario that is in no table, folder or cache."""

    @classmethod
    def nearest_to(cls, name: str, kind: str, known: Iterable[str]) -> UnknownName:
        """The error for `name`, with the most similar names in `known`, or all of them if none is similar and they are
        not too many for a line.

        Args:
            name: the requested name.
            kind: what `name` should be: "model", "device" or "scenario".
            known: the existing names.
        """
        by_key = {other.lower(): other for other in known}
        cutoff = 0.5 if len(by_key) <= MAX_LISTED else 0.0
        near = [by_key[key] for key in get_close_matches(name[:200].lower(), by_key, n=3, cutoff=cutoff)]
        choice = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(by_key.values())}"
        return cls(f"no {kind} is called {name!r}; {choice}. `pointsman simulate --list` shows all")


class UnsupportedModel(SimulationError, ValueError):
    """A model whose configuration lacks a field, or has a feature that the step-time model does not know."""


class ModelTooLarge(SimulationError, ValueError):
    """A model whose weights leave no memory for KV blocks on the device."""


class CalibrationError(SimulationError, ValueError):
    """A log that step times cannot be fitted to, or a profile that cannot be read."""
