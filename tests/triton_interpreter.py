"""Speeds up Triton's interpreter, which runs kernels on a CPU, for tests of many small launches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from triton.runtime import interpreter


@contextmanager
def quick_calls() -> Iterator[None]:
    """A context in which calls between kernel functions cost microseconds.

    The interpreter replaces the functions of `triton.language` at the launch of a kernel, and again in each call within
    it, which takes a millisecond. Here this happens once a launch for each module that defines functions.
    """
    done: set[int] = set()
    launch, prepare = interpreter.GridExecutor.__call__, interpreter._patch_lang

    def launch_anew(self: Any, *args: Any, **kwargs: Any) -> Any:
        done.clear()
        return launch(self, *args, **kwargs)

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module in done:
            return None
        done.add(module)
        return prepare(function)

    with (
        patch.object(interpreter.GridExecutor, "__call__", launch_anew),
        patch.object(interpreter, "_patch_lang", prepare_once),
    ):
        yield
