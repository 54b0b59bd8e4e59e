"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS |= {f"{_prefix}ib": 1024**_power, _prefix: 1024**_power, f"{_prefix}b": 1000**_power}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes that `text` means: "64MiB", "64M" (the same), "64MB" (64,000,000), "1.5GiB" or a plain number.

    Raises:
        ValueError: it means none, or less than one byte.
    """
    found = _SIZE.fullmatch(text)
    if found is None or found[2].lower() not in _UNITS:
        raise ValueError(f"{text!r} is no size; write for example 64MiB, 512KiB or 1.5GiB")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size < 1:
        raise ValueError(f"{text!r} is less than one byte; write for example 64MiB")
    return size
