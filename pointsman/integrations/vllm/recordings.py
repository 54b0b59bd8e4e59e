"""Recordings that are begun and ended while vLLM runs, in files that cannot harm it.

A replay begins with a scheduler that knows nothing, so a recording begins when nobody is here
(`Scheduler.start_recording`). That moment may be short: whoever wants one leaves the file here, and it begins with the
next request that finds the scheduler idle, or at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import FileIO

from pointsman.core import Recorder, Scheduler
from pointsman.integrations.vllm.control import ControlError

MAX_BYTES = 1 << 30
"""Most bytes of a recording; it ends there."""


class RecordingFile:
    """What a `Recorder` writes to. Each line is in the file at once, so that it is there after a crash.

    An error, or the limit, ends the recording (`on_end` is called, once) and never reaches the scheduler.
    """

    def __init__(self, file: FileIO, name: str, max_bytes: int = MAX_BYTES) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self.name = name
        self.num_bytes = self.num_steps = 0
        self.ended_by = ""
        """Why nothing is written any more; empty while all is well."""
        self.on_end: Callable[[], None] = lambda: None

    def write(self, line: str) -> int:
        """One line of a recording."""
        data = line.encode()
        if not self.ended_by:
            self._write(data)
            if self.ended_by:
                self.on_end()
            else:
                self.num_bytes += len(data)
                self.num_steps += line.startswith('{"call":"schedule"')
        return len(line)

    def _write(self, data: bytes) -> None:
        if self.num_bytes + len(data) > self._max_bytes:
            self.ended_by = f"it would be longer than {self._max_bytes} bytes"
            return
        try:
            if self._file.write(data) != len(data):
                self.ended_by = "the disk is full"
                self._file.truncate(self.num_bytes)  # no half line
        except OSError as error:
            self.ended_by = error.strerror or type(error).__name__

    def close(self) -> None:
        self._file.close()


def open_recording(path: str) -> RecordingFile:
    """A new file that its owner alone may read: a recording holds the prompts, as token ids.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return RecordingFile(FileIO(descriptor, "w"), path)


class Recordings:
    """The recording of one scheduler. Whoever calls this holds the lock of the adapter.

    Args:
        scheduler: whose.
        on_start: called when one begins, after which the scheduler knows nothing of earlier steps.
    """

    def __init__(self, scheduler: Scheduler, on_start: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_start = on_start
        self.waiting: RecordingFile | None = None
        """That of who waits for an idle moment."""
        self.current: RecordingFile | None = None

    def note(self, file: RecordingFile) -> None:
        """The scheduler was made with a recorder that writes to this file."""
        self.current = file
        file.on_end = self._scheduler.stop_recording

    def request(self, descriptor: int) -> RecordingFile:
        """A recording in an open file is wanted; it may have begun already when this returns.

        Raises:
            ControlError: there is one, or it is no regular file, which could make the scheduler wait.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ControlError("a recording can only be written to a regular file: a pipe could hold up the scheduler")
        other = self.current or self.waiting
        if other is not None:
            raise ControlError(f"a recording is {'under way' if self.current else 'waited for'} already: {other.name}")
        self.waiting = file = RecordingFile(FileIO(os.dup(descriptor), "w"), "of another client")
        self.try_to_begin()
        return file

    def try_to_begin(self) -> None:
        """Begin what is waited for, if nobody is here."""
        file = self.waiting
        if file is None or not self._scheduler.is_idle:
            return
        self.waiting, self.current = None, file
        file.on_end = self._scheduler.stop_recording
        self._scheduler.start_recording(Recorder(file))
        self._on_start()

    def end(self, file: RecordingFile) -> None:
        """End it, whether it has begun or not."""
        if file is self.current:
            self._scheduler.stop_recording()
            self.current = None
        elif file is self.waiting:
            self.waiting = None
        file.close()

    def close(self) -> None:
        """End whatever there is."""
        for file in (self.current, self.waiting):
            if file is not None:
                self.end(file)
