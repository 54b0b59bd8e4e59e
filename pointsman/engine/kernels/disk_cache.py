"""Compiled functions are kept on disk where that works. Where it does not, they are compiled at each start.

Numba reads and writes its cache while a function is compiled, which is when it is first called, and raises what goes
wrong there: a full disk would end the start, or fail a step. Here it is a warning. Broken files are replaced.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

from numba.core.caching import FunctionCache

from pointsman.engine.errors import first_line

logger = logging.getLogger(__name__)


def keep_on_disk(function: Any, body: Callable[..., Any]) -> None:
    """Take a function of numba's from disk, or keep it there, when it is compiled.

    Args:
        function: a dispatcher or a C function that is not compiled yet, with no cache of its own.
        body: what it is compiled from.
    """
    try:
        function._cache = DiskCache(body)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn("compiled kernels are not kept on disk: no folder can be written; NUMBA_CACHE_DIR can name one")


class DiskCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """The compiled forms of one function, by signature, in files."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        """What was compiled before; None: nothing that can be read."""
        try:
            return super().load_overload(signature, target)
        except Exception as error:  # a file that was cut short raises anything
            _warn(
                "compiled kernels in %s cannot be read (%s); they are compiled again and replaced",
                self.cache_path,
                f"{type(error).__name__}: {first_line(error)}",
            )
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a form, if the folder takes it."""
        try:
            super().save_overload(signature, compiled)
        except Exception as error:
            _warn(
                "compiled kernels are not kept in %s (%s), so each start compiles them again; free it, or name another "
                "folder with NUMBA_CACHE_DIR",
                self.cache_path,
                first_line(error),
            )


@cache
def _warn(message: str, *arguments: str) -> None:
    """Log it once."""
    logger.warning(message, *arguments)
