"""Methods that have the scheduler to themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class HasLock(Protocol):
    lock: threading.Lock


Self = TypeVar("Self", bound=HasLock)


def alone(method: Callable[Concatenate[Self, Given], Answer]) -> Callable[Concatenate[Self, Given], Answer]:
    """The method holds `lock` while it runs."""

    @wraps(method)
    def locked(self: Any, *args: Given.args, **kwargs: Given.kwargs) -> Answer:
        with self.lock:
            return method(self, *args, **kwargs)

    return locked
