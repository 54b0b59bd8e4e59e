"""A grammar that cannot be compiled in time, and helpers to wait for its process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

HOPELESS = "root ::= " + "[^ ]*" * 12_500
"""A grammar that takes minutes to compile: the time grows with the cube of its length."""
PATIENCE = 60.0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)
