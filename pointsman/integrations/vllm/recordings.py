"""Recordings that begin and end while vLLM runs, in files that cannot fail or stall the scheduler.

A replay starts with an empty scheduler, so a recording begins when there are no requests (`Scheduler.start_recording`).
A requested recording begins immediately if the scheduler is idle. Otherwise this module keeps it until a request
arrives at an idle scheduler, and begins it before that request is added, because idle moments may be short.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable
from io import FileIO

from pointsman.core import BackgroundFile, InvalidTransition, Recorder, Scheduler
from pointsman.integrations.vllm.control import ControlError

logger = logging.getLogger("vllm.pointsman")  # vLLM's log configuration applies to it

MAX_BYTES = 1 << 30
"""Maximum size of a recording, in bytes; the recording ends there."""


class RecordingFile(BackgroundFile):
    """The file of a recording. An error, or the maximum size, ends the recording and never reaches the scheduler."""

    def __init__(self, file: FileIO, name: str, max_bytes: int | None = None) -> None:
        self.num_steps = 0
        """Number of steps in the file."""
        super().__init__(file, name, max_bytes=MAX_BYTES if max_bytes is None else max_bytes)

    def _count_written(self, pieces: list[bytes]) -> None:
        super()._count_written(pieces)
        self.num_steps += sum(piece.startswith(b'{"call":"schedule"') for piece in pieces)

    def _report(self, why: str) -> None:
        logger.warning(
            "Pointsman stopped recording: %s; vLLM continues, and the steps recorded before can be read", why
        )


class Recordings:
    """The current and the requested recording of one scheduler. Callers hold the lock of the adapter.

    Args:
        scheduler: the scheduler to record.
        on_start: called when a recording begins; the scheduler then has no state of earlier steps.
    """

    def __init__(self, scheduler: Scheduler, on_start: Callable[[], None]) -> None:
        self._scheduler = scheduler
        self._on_start = on_start
        self.waiting: RecordingFile | None = None
        """The requested recording that waits for a moment without requests."""
        self.current: RecordingFile | None = None

    def set_current(self, file: RecordingFile) -> None:
        """Set the current recording to one that began when vLLM started: the scheduler's recorder already writes to
        `file`."""
        self.current = file
        file.on_end = self._scheduler.stop_recording

    def request_recording(self, descriptor: int) -> RecordingFile:
        """Request a recording in an open file; the recording may have begun when this returns.

        Raises:
            ControlError: there is a recording already; the scheduler cannot begin a recording; or the file is not a
                regular file, so that it could block the scheduler.
        """
        try:
            self._scheduler.check_recordable()
        except InvalidTransition as error:
            raise ControlError(
                f"no recording can begin while vLLM runs: {error}; start vLLM with record in --additional-config, or, "
                "if vLLM rejects that key, watch the run with pointsman live --socket"
            ) from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ControlError("a recording can only be written to a regular file: a pipe could block the scheduler")
        other = self.current or self.waiting
        if other is not None:
            raise ControlError(
                f"another recording is already {'under way' if self.current else 'waiting'}: {other.name}; end it first"
            )
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
        """End a recording, whether it has begun or not. The caller closes the recording's file: closing waits for the
        disk."""
        if file is self.current:
            self._scheduler.stop_recording()
            self.current = None
        elif file is self.waiting:
            self.waiting = None

    def close(self) -> None:
        """End all recordings, and close their files."""
        for file in (self.current, self.waiting):
            if file is not None:
                self.end(file)
                file.close()
