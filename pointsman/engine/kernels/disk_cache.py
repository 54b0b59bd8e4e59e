"""Caches compiled functions on disk, if possible. Otherwise the functions are compiled at each start.

Numba reads and writes its cache when a function is compiled, at its first call, and raises all errors of the cache. A
full disk would then stop the start, or fail a step. Here errors of the cache are logged as warnings. Broken files are
replaced.
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
    """Let a function of numba use the disk cache when it is compiled.

    Args:
        function: numba's dispatcher or C function, not compiled yet and without a cache.
        body: Python function from which `function` is compiled.
    """
    try:
        function._cache = DiskCache(body)
    except RuntimeError as error:
        if "cannot cache" not in str(error):
            raise
        _warn("compiled kernels are not kept on disk: no folder can be written; NUMBA_CACHE_DIR can name one")


class DiskCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Stores the compiled code of one function in files, one for each signature."""

    def load_overload(self, signature: Any, target: Any) -> Any:
        """The compiled code for a signature, from disk; None: there is no file, or it cannot be read."""
        try:
            return super().load_overload(signature, target)
        except Exception as error:  # a truncated file can raise any exception
            _warn(
                "compiled kernels in %s cannot be read (%s); they are compiled again and replaced",
                self.cache_path,
                f"{type(error).__name__}: {first_line(error)}",
            )
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Write the compiled code for a signature to disk, if possible."""
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
    """Log a warning, once for each message with the same arguments."""
    logger.warning(message, *arguments)
