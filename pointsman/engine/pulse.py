"""Pulse: reports signs of life (beats) of an engine's thread, also within a step, and measures the time between beats.

A watcher outside the engine must distinguish a long step from a step that hangs. So the thread reports a beat between
the layers of a model, and announces a long time without beats (a silence), such as the compilation of kernels:

    pulse.begin()                       the engine's thread, around every step
    beat()                              any code in the step, on the same thread
    beat(SECONDS_TO_COMPILE)            before a long silence; the next beat ends it
    pulse.end()

`beat` finds the pulse of its thread by itself, and costs next to nothing in a thread without a pulse.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import NamedTuple

SECONDS_BETWEEN_BEATS = 0.5
"""Minimum seconds from one reported beat to the next."""
SECONDS_TO_COMPILE = 600.0
"""Maximum seconds to compile a kernel, on a slow machine with other work."""


class PulseReading(NamedTuple):
    """A thread's measurements since its previous reading, in seconds."""

    longest: float
    """The longest time between two beats within a step; announced silences are left out."""
    mean_step: float | None
    """Mean time of a step; None: no step has ended."""


class Pulse:
    """The pulse of one thread.

    Args:
        on_beat: function that is called in the thread at a beat, at most every `SECONDS_BETWEEN_BEATS` and at every
            announced silence, with the seconds of the silence (0: none is announced). None: beats are not reported.
    """

    __slots__ = ("_began", "_last", "_longest", "_next_report", "_num_steps", "_on_beat", "_patience", "_step_seconds")

    def __init__(self, on_beat: Callable[[float], None] | None = None) -> None:
        self._on_beat = on_beat
        self._began = self._next_report = self._patience = 0.0
        self._last: float | None = None  # None: no step is in progress
        self._longest = self._step_seconds = 0.0
        self._num_steps = 0

    def install(self) -> None:
        """Make this object the pulse of the calling thread, which `beat` finds."""
        _of_this_thread.set(self)

    def begin(self) -> None:
        """Start the measurement of a step."""
        self._began = self._last = time.perf_counter()

    def beat(self, patience: float = 0.0) -> None:
        """Report a sign of life.

        Args:
            patience: seconds of the silence that this beat announces; 0: it announces none.
        """
        now = self._measure()
        if self._on_beat is not None and (patience or self._patience or now >= self._next_report):
            self._next_report = now + SECONDS_BETWEEN_BEATS
            self._on_beat(patience)
        self._patience = patience

    def end(self) -> None:
        """End the measurement of the step."""
        self._step_seconds += self._measure() - self._began
        self._num_steps += 1
        self._last, self._patience = None, 0.0

    def _measure(self) -> float:
        now = time.perf_counter()
        if self._last is None:
            return now
        if not self._patience:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        return now

    def take_reading(self) -> PulseReading:
        """Return the measurements since the last call of `take_reading`, and reset them."""
        mean = self._step_seconds / self._num_steps if self._num_steps else None
        reading = PulseReading(self._longest, mean)
        self._longest = self._step_seconds = 0.0
        self._num_steps = 0
        return reading


_of_this_thread: ContextVar[Pulse | None] = ContextVar("pointsman-pulse", default=None)


def beat(patience: float = 0.0) -> None:
    """Report a sign of life of the calling thread, if it has a pulse; `patience` as for `Pulse.beat`."""
    if (pulse := _of_this_thread.get()) is not None:
        pulse.beat(patience)
