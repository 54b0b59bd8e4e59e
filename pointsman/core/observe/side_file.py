"""Writes recordings and films, so that a failure to write the file does not stop serving.

    SideFile         writes to any file object, in the caller's thread
    BackgroundFile   writes to a file at a path, in a thread of its own, so that a slow disk delays no request

Each call of `write` gets one piece of the file: a line of a recording, or a chunk of a film. After a failure nothing
more is written, so that the file has no gap. If the file can be truncated, it ends with its last whole piece; otherwise
readers skip the partial piece at its end. The failure is logged once.
"""

from __future__ import annotations

import atexit
import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias

WhenFull: TypeAlias = Literal["stop", "wait"]
"""Behaviour on a full disk: the file ends ("stop"), or further pieces wait in memory for free space ("wait")."""
MAX_WAITING_BYTES = 64 << 20
"""Maximum number of bytes that wait in memory for the disk. If more would wait, the file ends."""
SECONDS_BETWEEN_WRITES = 0.05
"""Time between two writes of waiting pieces. If the process is killed, the waiting pieces are lost."""
SECONDS_BETWEEN_TRIES = 0.5
"""Time between two attempts to write to a full disk, with "wait"."""
SECONDS_TO_CLOSE = 5.0
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class Writable(Protocol):
    """A text file for pieces of type `str`, or a binary file for pieces of type `bytes`."""

    def write(self, data: Any, /) -> object: ...


class SideFile:
    """A file object to which pieces are written until a write fails.

    Args:
        file: the file object that gets the pieces.
        name: the name of the file in log lines.
        raises: whether `write` raises errors of the file, for a program that only writes the file.
    """

    def __init__(self, file: Writable, name: str = "", *, raises: bool = False) -> None:
        self._file = file
        self._raises = raises
        self.name = name or str(getattr(file, "name", "of the caller"))
        self.ended_by = ""
        """Why the file ended early; empty: it has not ended early."""
        self.on_end: Callable[[], None] = lambda: None
        """Function that is called once after the file has ended early, by the thread that calls `write` next."""
        self._has_reported = False

    @property
    def num_waiting_bytes(self) -> int:
        """Number of bytes that wait for the disk."""
        return 0

    def write(self, data: str | bytes) -> int:
        """Write a piece, unless the file has ended. Returns the length of the piece."""
        if not self.has_ended():
            self._accept_piece(data)
            self.has_ended()
        return len(data)

    def has_ended(self) -> bool:
        """Whether the file has ended early. The first call after the end also calls `on_end`. Only the thread that
        calls `write` may call this method."""
        if not self.ended_by:
            return False
        if not self._has_reported:
            self._has_reported = True
            self.on_end()
        return True

    def _accept_piece(self, data: str | bytes) -> None:
        try:
            written = self._file.write(data)
            if isinstance(written, int) and written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))  # an unbuffered file wrote only a part
        except Exception as error:  # the caller's file may raise anything
            if self._raises:
                raise
            self.end_early(reason_of(error))

    def end_early(self, why: str) -> None:
        """End the file early, for the reason `why`. Only the first call has an effect, and logs the reason."""
        if not self.ended_by:
            self.ended_by = why
            self._report(why)

    def _report(self, why: str) -> None:
        """Log that the file ended early: its name, the reason and the remedy."""
        _log(
            "%s is written no further: %s. Requests are served as before, and the file can be read up to there; "
            "free space or name another file, and start again for a new one",
            self.name,
            why,
        )


class BackgroundFile(SideFile):
    """A file that a thread of its own writes.

    Args:
        file: an unbuffered file; this object closes it.
        when_full: the behaviour on a full disk, see `WhenFull`. Any other failure ends the file.
        max_bytes: the maximum length of the file; a piece that would exceed it ends the file. None: no limit.
        max_waiting_bytes: the maximum number of bytes that wait in memory, see `MAX_WAITING_BYTES`.
    """

    def __init__(
        self,
        file: FileIO,
        name: str = "",
        *,
        when_full: WhenFull = "stop",
        max_bytes: int | None = None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        super().__init__(file, name)
        self._raw = file
        self._when_full = when_full
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting_bytes
        self.num_bytes = 0
        """Number of bytes in the file that belong to whole pieces."""
        found = os.fstat(file.fileno())
        self._is_watched = stat.S_ISREG(found.st_mode) and found.st_nlink > 0  # a pipe has neither length nor name
        self._start = file.tell() if self._is_watched else 0
        self._lock = threading.Lock()
        self._pieces: deque[bytes] = deque()
        self._num_put = self._num_waiting = 0  # total bytes of all pieces, and bytes not yet in the file
        self._has_pieces, self._is_closing, self._is_closed = threading.Event(), threading.Event(), threading.Event()
        self._is_full = False
        self._thread = threading.Thread(target=self._run, name="pointsman-side-file", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @classmethod
    def create(cls, path: str | Path, **options: Any) -> Self:
        """Create a file at `path`, or replace an existing file. Only its owner may read it, as a recording has prompts.

        Raises:
            OSError: the file cannot be created.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        return cls(FileIO(descriptor, "w"), str(path), **options)

    @property
    def num_waiting_bytes(self) -> int:
        """Number of bytes that wait for the disk."""
        return self._num_waiting

    def close(self, timeout: float = SECONDS_TO_CLOSE) -> None:
        """Write the waiting pieces, and close the file. The call waits at most `timeout` seconds for the disk."""
        atexit.unregister(self.close)
        self._is_closing.set()
        self._has_pieces.set()
        self._is_closed.wait(timeout)
        if not self._is_closed.is_set():
            self.end_early(f"{self._num_waiting:,} bytes were not written within {timeout:g} s of its end")

    # ------------------------------------------------------------------ the caller's thread

    def _accept_piece(self, data: str | bytes) -> None:
        piece = data.encode() if isinstance(data, str) else bytes(data)
        size = len(piece)
        if self._is_closing.is_set():
            self.ended_by = "it is closed"
        elif self._max_bytes is not None and self._num_put + size > self._max_bytes:
            self._end_after_waiting(f"it would be longer than {self._max_bytes} bytes")
        elif self._num_waiting + size > self._max_waiting:
            what = "the disk is full" if self._is_full else "the disk is too slow"
            self._end_after_waiting(f"{what}, and more than {self._max_waiting:,} bytes would wait in memory")
        else:
            with self._lock:
                self._pieces.append(piece)
                self._num_put += size
                self._num_waiting += size
            if not self._has_pieces.is_set():
                self._has_pieces.set()

    def _end_after_waiting(self, why: str) -> None:
        """End the file, for the reason `why`, after the waiting pieces, which are still written if possible."""
        self.end_early(why)
        self._has_pieces.set()

    # ------------------------------------------------------------------ the file's thread

    def _run(self) -> None:
        try:
            while self._pieces or not (self._is_closing.is_set() or self.ended_by):
                self._has_pieces.wait()
                self._is_closing.wait(SECONDS_BETWEEN_WRITES)
                self._has_pieces.clear()
                with self._lock:
                    pieces = list(self._pieces)
                    self._pieces.clear()
                if self._is_closing.is_set():
                    self._has_pieces.set()  # the next wait returns immediately
                if not self._write(pieces):
                    break
        except Exception as error:
            self.end_early(reason_of(error))
        finally:
            with self._lock:
                self._pieces.clear()
                self._num_waiting = 0
            try:
                self._raw.close()
            except OSError as error:  # some file systems report failed writes only here
                self.end_early(f"{reason_of(error)} when it was closed; its end may be missing")
            self._is_closed.set()

    def _write(self, pieces: list[bytes]) -> bool:
        """Write as many pieces as possible. Returns whether all pieces were written."""
        left = memoryview(b"".join(pieces))
        total = len(left)
        while len(left):
            try:
                self._check_end_of_file()
                left = left[self._raw.write(left) or 0 :]
                self._is_full = False
            except OSError as error:
                is_last_try = self._is_closing.is_set()
                if error.errno in _DISK_FULL and self._when_full == "wait" and not is_last_try:
                    self._wait_for_space()
                    continue
                self._truncate_after_whole_pieces(pieces, total - len(left))
                self.end_early(reason_of(error))
                return False
        self._count_written(pieces)
        return True

    def _wait_for_space(self) -> None:
        if not self._is_full:
            self._is_full = True
            _log(
                "%s waits, because the disk is full; free space before more than %s bytes wait in memory, or it ends",
                self.name,
                f"{self._max_waiting:,}",
            )
        self._is_closing.wait(SECONDS_BETWEEN_TRIES)

    def _check_end_of_file(self) -> None:
        """Raise OSError if the file was deleted or shortened, so that the next piece would not follow the last one."""
        if not self._is_watched:
            return
        found = os.fstat(self._raw.fileno())
        if not found.st_nlink:
            raise OSError(errno.ENOENT, "the file was deleted")
        if found.st_size < self._start + self.num_bytes:
            raise OSError(errno.EIO, "another program has shortened the file")

    def _count_written(self, pieces: list[bytes]) -> None:
        """Count `pieces` that are now in the file as whole pieces."""
        size = sum(map(len, pieces))
        self.num_bytes += size
        with self._lock:
            self._num_waiting -= size

    def _truncate_after_whole_pieces(self, pieces: list[bytes], num_written: int) -> None:
        """Truncate the file after its last whole piece; `num_written` bytes of `pieces` were written."""
        ends = accumulate(map(len, pieces))
        num_whole = sum(end <= num_written for end in ends)
        self._count_written(pieces[:num_whole])
        end = self._start + self.num_bytes
        with suppress(OSError):  # otherwise the file ends with a partial piece, which readers skip
            if self._is_watched and os.fstat(self._raw.fileno()).st_size > end:
                self._raw.truncate(end)


def _log(message: str, *arguments: object) -> None:
    import logging  # imported here: it takes a tenth of the core's import time

    logging.getLogger(__name__).error(message, *arguments)


def reason_of(error: Exception) -> str:
    """The text of an error, without the name of the file."""
    return (isinstance(error, OSError) and error.strerror) or f"{type(error).__name__}: {error}"
