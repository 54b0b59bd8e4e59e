"""Durations in options: times like 500ms, and shares of a step like 10%."""

from __future__ import annotations

import re

from pointsman.cli.errors import CommandError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds(option: str, text: str | None) -> float | None:
    """Seconds of "500ms", "2s" or "1m"; None stays None.

    Raises:
        CommandError: `text` is not a duration above 0, or lacks a unit: vLLM's and guidellm's targets are milliseconds,
            so a number alone would be understood as both.
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([a-z]*)\s*", text.lower())
    if found is not None and not found[2] and float(found[1]) > 0:
        number = found[1]
        raise CommandError(f"{_flag(option)} is {number}, which has no unit; write {number}ms or {number}s")
    if found is None or found[2] not in _UNITS or float(found[1]) == 0:
        raise CommandError(f"{_flag(option)} is {text!r}; give a time above 0, like 500ms, 2s or 1m")
    return float(found[1]) * _UNITS[found[2]]


def time_or_share(option: str, text: str) -> tuple[float, float]:
    """(seconds, share) of a time like "2ms", or of a share of a step like "10%"; the other one is 0.

    Raises:
        CommandError: the text is neither.
    """
    if text.endswith("%"):
        try:
            share = float(text[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share <= 100:
            raise CommandError(f"{_flag(option)} is {text!r}; as a share of a step it must be from 0% to 10000%")
        return 0.0, share
    found = seconds(option, text)
    assert found is not None
    return found, 0.0


def share(option: str, text: str) -> float:
    """The share of "10%" or "0.1".

    Raises:
        CommandError: the text is no finite number above 0.
    """
    number, is_percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        found = float(number) / (100 if is_percent else 1)
    except ValueError:
        found = 0.0
    if not 0 < found < float("inf"):
        raise CommandError(f"{_flag(option)} is {text!r}; give a share above 0, like 10% or 0.1")
    return found


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
