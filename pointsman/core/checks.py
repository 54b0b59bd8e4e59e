"""What is given as an integer is one, and in range."""

from __future__ import annotations

import numpy as np

from pointsman.core.config import MAX_INT


def checked_integer(name: str, value: object, least: int, most: int = MAX_INT) -> int:
    """The value as a Python int.

    Raises:
        ValueError: it is no integer, or not between `least` and `most`.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    if not least <= value <= most:
        raise ValueError(f"{name} is {value}; it must be between {least} and {most}")
    return int(value)


def checked_priority(value: object) -> int:
    """A priority, of any 64-bit value: callers like to use a time in nanoseconds, or what is left of one.

    Raises:
        ValueError: it is no such integer.
    """
    return checked_integer("priority", value, -(2**63), 2**63 - 1)
