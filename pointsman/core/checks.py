"""What is given as an integer is one, and in range."""

from __future__ import annotations

import numpy as np

from pointsman.core.config import MAX_INT


def checked_integer(name: str, value: object, least: int) -> int:
    """The value as a Python int.

    Raises:
        ValueError: it is no integer, or not between `least` and 2**31 - 1.
    """
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}; it must be an integer")
    if not least <= value <= MAX_INT:
        raise ValueError(f"{name} is {value}; it must be between {least} and {MAX_INT}")
    return int(value)
