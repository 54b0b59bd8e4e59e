"""Heartbeat: whether an engine still gives signs of life. The one rule for a part that is late or dead.

About once a second the engine is asked a question that its own thread answers, between two steps or while idle. All
that it sends is a sign of life: answers, tokens, and the beats of a long step (`engine/pulse.py`). While a question is
unanswered, the seconds without a sign are its silence:

    slow     silent for a second and several times its usual step: the router avoids it while others take requests
    stalled  silent for `STALLED_AFTER`: operators get an error at once
    late     silent for longer than the limit: it counts as dead, and its process is ended

The limit is the operator's, or ten times the longest silence within a step that ended well, if that is more; longer
where the engine has announced it. An engine that is paused, idle, or waits for KV answers, so it is none of these.

Only time in which the API process's own loop ran counts: after it was stopped, or the machine suspended, the answers
are there and have not been read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pointsman.engine.pulse import PulseReading

INTERVAL = 1.0
"""Seconds from question to question, and the most that one look adds to a silence."""
DEFAULT_TIMEOUT = 30.0
MIN_TIMEOUT = 2 * INTERVAL
"""Seconds: with less, an API process that was stopped for a moment could take its engines for late."""
STALLED_AFTER = 5.0
SLOW_AFTER = 1.0
MEAN_STEPS = 5
"""An engine that is silent for so many of its mean steps, and for `SLOW_AFTER`, is slow."""
LONGEST_SILENCES = 10
"""An engine is late after so many of its longest silences, at the earliest."""
SECONDS_TO_HALVE = 600.0
"""In which the longest silence loses half its weight: one that was an accident is forgotten."""


class Heartbeat:
    """Of one engine, in the API process.

    Args:
        timeout: seconds without a sign of life after which the engine is late; 0: never.
        clock: seconds.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._is_asked = False
        self._silence = 0.0
        self._looked_at: float | None = None  # None: silence begins with the next look
        self._patience = 0.0
        self._longest = 0.0
        self._mean_step = 0.0

    def hear(self, patience: float = 0.0) -> None:
        """A sign of life came.

        Args:
            patience: seconds for which the engine says that it may be silent now.
        """
        self._silence, self._looked_at, self._patience = 0.0, None, patience

    def ask(self) -> bool:
        """Whether a question is to be sent now: none is unanswered. It counts as sent. Call it every `INTERVAL`."""
        if self._is_asked:
            self._look()
            return False
        self._is_asked = True
        self._silence, self._looked_at = 0.0, self._clock()
        return True

    def note_answer(self, reading: PulseReading | None) -> None:
        """The question was answered; None: by an engine that ends."""
        self._is_asked = False
        if reading is not None:
            kept = self._longest * 0.5 ** (INTERVAL / SECONDS_TO_HALVE)
            self._longest = max(kept, reading.longest)
            self._mean_step = self._mean_step if reading.mean_step is None else reading.mean_step

    @property
    def silence(self) -> float:
        """Seconds without a sign of life while a question is unanswered."""
        return self._look()

    def _look(self) -> float:
        if not self._is_asked:
            return 0.0
        now = self._clock()
        if self._looked_at is not None:
            self._silence += min(now - self._looked_at, INTERVAL)
        self._looked_at = now
        return self._silence

    @property
    def limit(self) -> float:
        """Seconds of silence after which the engine is late."""
        return max(self._timeout, LONGEST_SILENCES * self._longest, self._patience)

    @property
    def is_slow(self) -> bool:
        """Whether other engines should get the requests."""
        return self.silence > max(SLOW_AFTER, MEAN_STEPS * self._mean_step)

    @property
    def is_stalled(self) -> bool:
        """Whether a question to the engine is not worth waiting for."""
        return self.silence > STALLED_AFTER

    @property
    def is_late(self) -> bool:
        """Whether the engine counts as dead."""
        return self._timeout > 0 and self.silence > self.limit
