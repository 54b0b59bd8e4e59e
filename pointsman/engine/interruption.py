"""Delays Ctrl-C to the end of a step.

Python raises KeyboardInterrupt wherever the main thread happens to be: in the middle of the scheduler's bookkeeping, or
between a lock and the `try` that would release it. A loop that steps an engine therefore notes the signal, and obeys it
between steps, when the engine's state is consistent:

    with noted_interrupts() as interruption:
        while engine.has_unfinished_requests():
            engine.step()
            interruption.obey()

Only the first Ctrl-C is noted: a second one interrupts the step.

While a model is found and loaded there are no steps; `ended_by_signals` is for that time.
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
    """A noted Ctrl-C, and the handler that it would have called. A plain flag: a handler must not wait for a lock."""

    __slots__ = ("_handler", "requested")

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | int | None) -> None:
        self._handler = handler
        self.requested = False

    def obey(self) -> None:
        """Call the original handler if a signal was noted.

        Raises:
            KeyboardInterrupt: by default; the original handler may raise something else.
        """
        if self.requested:
            self.requested = False
            self._call(signal.SIGINT, None)

    def note(self, signal_number: int, frame: FrameType | None) -> None:
        """The signal handler that replaces the original one."""
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
    """Note the first Ctrl-C within the block. Nothing changes in a thread that gets no signals, or under a handler that
    was not installed from Python and so could not be restored.
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
    """Within the block signals raise SystemExit, so that a download removes its incomplete file. For the main thread.

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
