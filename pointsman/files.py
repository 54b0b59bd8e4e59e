"""Opens and reads files that a user names: within memory limits, and without waiting silently for a pipe.

A file that is refused raises an `OSError` whose `strerror` names the limit and the remedy. Callers report the error
like that of a missing file.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import pathlib
import reprlib
import select
import stat
from collections.abc import Callable, Iterator
from os import PathLike
from typing import BinaryIO

logger = logging.getLogger(__name__)

_GZIP = b"\x1f\x8b"
"""First bytes of a file that gzip has compressed."""
MAX_LINE = 2**24
"""Maximum bytes of a line, or of one JSON value. The Python objects of a value can take 24 times its bytes:
`[[],[],[]]`."""
MAX_SETTINGS = 2**24
"""Maximum bytes of a JSON file of settings, or of a file of keys."""
MAX_WRITTEN = 2**16
"""Maximum bytes of a handwritten file in a language that takes many seconds per MiB to read: YAML, a template."""
MAX_MESSAGE = 800
"""Maximum characters of an error about the content of a file."""
SILENT = 2.0
"""Seconds without data after which `open_input` logs that it waits for a pipe."""
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)
"""Flag to open a file without waiting; 0 on Windows, which has neither this flag nor named pipes in directories."""
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISBLK, "a block device"),
    (stat.S_ISCHR, "a device"),
)

Path = str | PathLike[str]


def open_regular(path: Path) -> io.FileIO:
    """Open a regular file for reading. Links are followed.

    Raises:
        OSError: the file cannot be opened, or is not a regular file; opening a named pipe would wait for its writer.
    """
    file, kind = _open(path)
    if kind is None:
        return file
    file.close()
    raise OSError(errno.EINVAL, f"it is {kind}; give a regular file", os.fspath(path))


def open_input(path: Path) -> io.FileIO:
    """Open a regular file, a pipe or a terminal for reading once from its start. If a pipe has no data for `SILENT`
    seconds, a warning is logged, and the wait continues.

    Raises:
        OSError: the file cannot be opened, or is a directory, a socket or a block device.
    """
    file, kind = _open(path)
    if kind in ("a directory", "a socket", "a block device"):
        file.close()
        raise OSError(errno.EINVAL, f"it is {kind}; give a file or a pipe", os.fspath(path))
    if kind is not None and _NO_WAITING:
        if kind == "a named pipe":
            _wait_for_data(file, path)
        os.set_blocking(file.fileno(), True)
    return file


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file of at most `max_bytes` bytes.

    Raises:
        OSError: the file cannot be opened or read, is not a regular file, or is larger than `max_bytes`.
    """
    return _read_at_most(open_regular(path), path, max_bytes)


def read_input(path: Path, max_bytes: int = MAX_SETTINGS) -> bytes:
    """The content of a file or of a pipe, of at most `max_bytes` bytes.

    Raises:
        OSError: as in `open_input`, or the content is larger than `max_bytes`.
    """
    return _read_at_most(open_input(path), path, max_bytes)


def check_writable(path: Path) -> None:
    """Check that a file can be written. The content of an existing file stays, and no new file is left behind.

    Raises:
        OSError: the file cannot be opened for writing.
    """
    target = os.path.realpath(path)  # so that a link to a missing file stays
    is_new = not os.path.exists(target)
    with open(target, "ab"):
        pass
    if is_new:
        os.unlink(target)


def cache_home() -> pathlib.Path:
    """The user's cache folder: `XDG_CACHE_HOME`, or `~/.cache`.

    Raises:
        RuntimeError: the user has no home folder.
    """
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def read_text_lines(file: BinaryIO) -> Iterator[str]:
    """The lines of a file of UTF-8 text, with their line ends; a byte-order mark is left out.

    Raises:
        ValueError: a line is not UTF-8 text, or longer than `MAX_LINE`, or the file is compressed; the message has the
            line number.
    """
    for number, raw in enumerate(iter(lambda: file.readline(MAX_LINE + 1), b""), start=1):
        if number == 1 and raw.startswith(_GZIP):
            raise ValueError("line 1: the file is compressed with gzip; unpack it with gunzip")
        if len(raw) > MAX_LINE:
            raise ValueError(f"line {number}: longer than {MAX_LINE:,} bytes; give another file")
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"line {number}: not UTF-8 text ({error.reason} at byte {error.start}); give another file"
            ) from None
        yield line


def shown(text: str, length: int = 80) -> str:
    """Convert a text to one line of at most `length` characters, for messages."""
    text = " ".join(text[: 20 * length].split())
    return text if len(text) <= length else text[: length - 3] + "..."


def represented(value: object, length: int = 80) -> str:
    """The `repr` of a value as one line of about `length` characters. Only the beginning of a large value is read."""
    brief = reprlib.Repr()
    brief.maxlevel = 3
    brief.maxlist = brief.maxdict = brief.maxtuple = brief.maxset = length
    brief.maxstring = brief.maxother = brief.maxlong = length
    return shown(brief.repr(value), length)


def _open(path: Path) -> tuple[io.FileIO, str | None]:
    """Open a file without blocking; returns the file, and its kind in words (None: a regular file)."""
    mode = os.stat(path).st_mode
    if stat.S_ISSOCK(mode) or stat.S_ISDIR(mode):  # neither can be opened as a file
        kind = "a socket" if stat.S_ISSOCK(mode) else "a directory"
        raise OSError(errno.EINVAL, f"it is {kind}; give a regular file", os.fspath(path))
    descriptor = os.open(path, os.O_RDONLY | _NO_WAITING | getattr(os, "O_BINARY", 0))
    mode = os.fstat(descriptor).st_mode
    other = None if stat.S_ISREG(mode) else next((name for is_kind, name in _KINDS if is_kind(mode)), "no file")
    return io.FileIO(descriptor), other


def _wait_for_data(file: io.FileIO, path: Path) -> None:
    poll = select.poll()
    poll.register(file, select.POLLIN | select.POLLHUP)
    if not poll.poll(1e3 * SILENT):
        logger.warning("%s is a pipe without data; waiting for a program that writes into it", os.fspath(path))
        poll.poll()


def _read_at_most(file: io.FileIO, path: Path, max_bytes: int) -> bytes:
    with file:
        pieces, left = [], max_bytes + 1
        while left and (piece := file.read(min(left, 2**20))):
            pieces.append(piece)
            left -= len(piece)
    if not left:
        raise OSError(errno.EFBIG, f"the file has more than {max_bytes:,} bytes; give another file", os.fspath(path))
    return b"".join(pieces)
