"""Caches compiled functions on disk, if possible. Otherwise the functions are compiled at each start.

Numba reads and writes its cache when a function is compiled, at its first call, and raises all errors of the cache. A
full disk would then stop the start, or fail a step. Here errors of the cache are logged as warnings. Broken files are
replaced. If several processes need the same function, one compiles it and the others load it from disk.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

from numba.core.caching import FunctionCache

from pointsman.engine.errors import first_line

logger = logging.getLogger(__name__)

SECONDS_TO_WAIT = 120.0
"""Maximum seconds to wait for another process that compiles the same function; then it is compiled here too."""
SECONDS_BETWEEN_TRIES = 0.02


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


@contextmanager
def one_process(function: Any) -> Iterator[None]:
    """Compile a function inside the `with` block while no other process compiles it. The other process's code is on
    disk afterwards, so that it is only loaded here.

    Args:
        function: numba's dispatcher or C function, after `keep_on_disk`.
    """
    file = _lock_file(function._cache)
    if file is None:
        yield
        return
    with file:  # closing the file ends the lock, and so does the death of this process
        _lock(file)
        yield


def _lock_file(kept: Any) -> IO[bytes] | None:
    """The open file whose lock a process holds while it compiles; None: no lock can be held."""
    if not isinstance(kept, DiskCache):
        return None
    try:
        return kept.lock_path().open("ab")
    except OSError:  # a folder that cannot be written; reported when the compiled code is written
        return None


def _lock(file: IO[bytes]) -> None:
    """Lock a file for this process, unless that takes longer than `SECONDS_TO_WAIT` or the system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    end = time.monotonic() + SECONDS_TO_WAIT
    while time.monotonic() < end:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(SECONDS_BETWEEN_TRIES)
        except OSError:  # a file system without locks
            return


class DiskCache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """Stores the compiled code of one function in files, one for each signature."""

    def lock_path(self) -> Path:
        """Path of a file beside the function's files, in a folder that is made if it is missing.

        Raises:
            OSError: the folder cannot be made.
        """
        self._impl.locator.ensure_cache_path()
        return Path(self.cache_path, f"{self._impl.filename_base}.lock")

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
