"""Recordings that begin and end while vLLM runs, in files that cannot fail or stall the scheduler.

A replay starts with an empty scheduler, so a recording begins when there are no requests (`Scheduler.start_recording`).
That moment may be short, so a requested recording waits here, and begins with the next request that finds the scheduler
idle, or at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from io import FileIO

from pointsman.core import Recorder, Scheduler
from pointsman.integrations.vllm.control import ControlError

MAX_BYTES = 1 << 30
"""Maximum bytes of a recording; it ends there."""


class RecordingFile:
    """The file of a `Recorder`. Each line is written at once, so that it survives a crash.

    An error, or the limit, ends the recording (`on_end` is called, once) and never reaches the scheduler.
    """

    def __init__(self, file: FileIO, name: str, max_bytes: int = MAX_BYTES) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self.name = name
        self.num_bytes = self.num_steps = 0
        self.ended_by = ""
        """Why the recording ended early; empty while it has not."""
        self.on_end: Callable[[], None] = lambda: None

    def write(self, line: str) -> int:
        """One line of a recording."""
        if self.ended_by:
            return len(line)
        data = line.encode()
        self.ended_by = self._write(data)
        if self.ended_by:
            self.on_end()
        else:
            self.num_bytes += len(data)
            self.num_steps += line.startswith('{"call":"schedule"')
        return len(line)

    def _write(self, data: bytes) -> str:
        """Why it cannot be written; empty if it was."""
        if self.num_bytes + len(data) > self._max_bytes:
            return f"it would be longer than {self._max_bytes} bytes"
        try:
            if self._file.write(data) != len(data):
                self._file.truncate(self.num_bytes)  # no partial line
                return "the disk is full"
        except OSError as error:
            return error.strerror or type(error).__name__
        return ""

    def close(self) -> None:
        self._file.close()


def open_recording(path: str) -> RecordingFile:
    """A new file that only its owner may read: a recording contains prompts, as token ids.

    Raises:
        OSError: it cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    return RecordingFile(FileIO(descriptor, "w"), path)


class Recordings:
    """The recording of one scheduler. Callers hold the lock of the adapter.

    Args:
        scheduler: the one that is recorded.
        on_start: called when a recording begins; the scheduler knows nothing of earlier steps from then on.
    """

    def __init__(self, scheduler: Scheduler, on_start: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_start = on_start
        self.waiting: RecordingFile | None = None
        """The requested recording that waits for a moment without requests."""
        self.current: RecordingFile | None = None

    def note(self, file: RecordingFile) -> None:
        """The scheduler was constructed with a recorder that writes to this file."""
        self.current = file
        file.on_end = self._scheduler.stop_recording

    def request(self, descriptor: int) -> RecordingFile:
        """Request a recording in an open file; it may have begun when this returns.

        Raises:
            ControlError: there is a recording already, or it is not a regular file, which could block the scheduler.
        """
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ControlError("a recording can only be written to a regular file: a pipe could block the scheduler")
        other = self.current or self.waiting
        if other is not None:
            raise ControlError(f"a recording is {'under way' if self.current else 'waited for'} already: {other.name}")
        self.waiting = file = RecordingFile(FileIO(os.dup(descriptor), "w"), "of another client")
        self.try_to_begin()
        return file

    def try_to_begin(self) -> None:
        """Begin the waiting recording, if there are no requests."""
        file = self.waiting
        if file is None or not self._scheduler.is_idle:
            return
        self.waiting, self.current = None, file
        file.on_end = self._scheduler.stop_recording
        self._scheduler.start_recording(Recorder(file))
        self._on_start()

    def end(self, file: RecordingFile) -> None:
        """End a recording, whether it has begun or not."""
        if file is self.current:
            self._scheduler.stop_recording()
            self.current = None
        elif file is self.waiting:
            self.waiting = None
        file.close()

    def close(self) -> None:
        """End all recordings."""
        for file in (self.current, self.waiting):
            if file is not None:
                self.end(file)
