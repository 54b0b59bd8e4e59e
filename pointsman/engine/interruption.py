"""Delays Ctrl-C to the end of a step.

Python raises KeyboardInterrupt wherever the main thread happens to be: in the middle of the scheduler's bookkeeping, or
between a lock and the `try` that would release it. A loop that steps an engine therefore records the signal, and calls
the original signal handler between steps, when the engine's state is consistent:

    with delayed_interrupts() as interruption:
        while engine.has_unfinished_requests():
            engine.step()
            interruption.call_delayed_handler()

Only the first Ctrl-C is delayed: a second one interrupts the step.

`exit_on_signals` is for the time before the first step, while a model is found and loaded.
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
    """Records whether Ctrl-C was pressed, and keeps the original signal handler. The record is a plain flag, because a
    signal handler must not wait for a lock."""

    __slots__ = ("_handler", "requested")

    def __init__(self, handler: Callable[[int, FrameType | None], Any] | int | None) -> None:
        self._handler = handler
        self.requested = False

    def call_delayed_handler(self) -> None:
        """Call the original handler if Ctrl-C was recorded since the last call of `call_delayed_handler`.

        Raises:
            KeyboardInterrupt: by default; the original handler may raise something else.
        """
        if self.requested:
            self.requested = False
            self._call_handler(signal.SIGINT, None)

    def record_signal(self, signal_number: int, frame: FrameType | None) -> None:
        """Record the first Ctrl-C, and call the original handler at a second Ctrl-C. This method is installed as signal
        handler."""
        if self.requested:
            self._call_handler(signal_number, frame)
        self.requested = True

    def _call_handler(self, signal_number: int, frame: FrameType | None) -> None:
        if callable(self._handler):
            self._handler(signal_number, frame)
        elif self._handler != signal.SIG_IGN:
            raise KeyboardInterrupt


@contextmanager
def delayed_interrupts() -> Iterator[Interruption]:
    """Record the first Ctrl-C within the block in an `Interruption`, instead of raising KeyboardInterrupt. No effect in
    a thread that gets no signals, or if the current handler was not installed from Python and so could not be restored.
    """
    previous = signal.getsignal(signal.SIGINT)
    interruption = Interruption(previous)
    if threading.current_thread() is not threading.main_thread() or previous is None:
        yield interruption
        return
    signal.signal(signal.SIGINT, interruption.record_signal)
    try:
        yield interruption
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def exit_on_signals(codes: Mapping[signal.Signals, int]) -> Iterator[None]:
    """Let signals raise SystemExit within the block, so that a download removes its incomplete file. Only the main
    thread may use this.

    Args:
        codes: signal -> exit code.
    """

    def raise_exit(number: int, frame: FrameType | None) -> None:
        sys.exit(codes[signal.Signals(number)])

    before = {number: signal.signal(number, raise_exit) for number in codes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
