"""Ctrl-C between steps instead of within one.

Python raises KeyboardInterrupt wherever the main thread happens to be: in the middle of the scheduler's bookkeeping, or
between a lock and the `try` that would release it. A loop that steps an engine notes the signal and obeys it at its own
boundaries, so that whatever it leaves is whole:

    with noted_interrupts() as interruption:
        while engine.has_unfinished_requests():
            engine.step()
            interruption.obey()

Only the first one is noted: a second Ctrl-C means not to wait for the step.

While a model is found and loaded there are no steps: `ended_by_signals`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interruption:
    """Whether Ctrl-C was pressed, and what it would have done. A plain flag: a handler must not wait for a lock."""

    __slots__ = ("_handler", "requested")

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | int | None) -> None:
        self._handler = handler
        self.requested = False

    def obey(self) -> None:
        """Do now what the noted signal would have done then; nothing, if there was none.

        Raises:
            KeyboardInterrupt: as a rule; whatever else the handler before this one raises.
        """
        if self.requested:
            self.requested = False
            self._call(signal.SIGINT, None)

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """The signal's handler meanwhile."""
        if self.requested:
            self._call(signal_number, frame)
        self.requested = True

    def _call(self, signal_number: int, frame: FrameType | None) -> None:
        if callable(self._handler):
            self._handler(signal_number, frame)
        elif self._handler != signal.SIG_IGN:
            raise KeyboardInterrupt


@contextmanager
def noted_interrupts() -> Iterator[Interruption]:
    """Turns the first Ctrl-C within into a note. In a thread that gets no signals, and under a handler that was not
    installed from Python and so could not be restored, nothing changes.
    """
    previous = signal.getsignal(signal.SIGINT)
    interruption = Interruption(previous)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield interruption
        return
    signal.signal(signal.SIGINT, interruption.note)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ended_by_signals(codes: Mapping[signal.Signals, int]) -> Iterator[None]:
    """Signals raise SystemExit meanwhile, so that a download removes its incomplete file. For the main thread.

    Args:
        codes: the exit code for each signal.
    """

    def leave(number: int, frame: FrameType | None) -> None:
        sys.exit(codes[signal.Signals(number)])

    before = {number: signal.signal(number, leave) for number in codes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
