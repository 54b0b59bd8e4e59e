"""Heartbeat: detects engines that give no sign of life. This is the one rule for slow, stalled and dead engines.

About once a second the API process asks the engine a question, which the engine's thread answers between two steps or
while idle. Everything that the engine sends is a sign of life: answers, tokens, and the beats of a long step
(`engine/pulse.py`). The engine's silence is the time without a sign of life while a question is unanswered:

    slow     silent for a second and several times its mean step: the router avoids it while others take requests
    stalled  silent for `STALLED_AFTER`: operators get an error at once
    late     silent for longer than the limit: the engine counts as dead, and its process is ended

The limit is the maximum of three times: the operator's timeout, ten times the longest silence within a step that
succeeded, and the silence that the engine has announced. An engine that is paused, idle or waiting for KV still
answers, so it is never slow, stalled or late.

Only time in which the API process's own loop ran counts: after the process was stopped or the machine suspended, the
answers have arrived but are not read yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from pointsman.engine.pulse import PulseReading

INTERVAL = 1.0
"""Seconds between questions, and maximum seconds that one measurement adds to a silence."""
DEFAULT_TIMEOUT = 30.0
MIN_TIMEOUT = 2 * INTERVAL
"""Minimum of the operator's timeout in seconds. With less, a short stop of the API process could make engines
late."""
STALLED_AFTER = 5.0
SLOW_AFTER = 1.0
MEAN_STEPS = 5
"""An engine is slow if its silence is longer than this number of mean steps takes, and longer than `SLOW_AFTER`."""
LONGEST_SILENCES = 10
"""An engine is late only if its silence is longer than this multiple of its longest silence within a step."""
SECONDS_TO_HALVE = 600.0
"""Seconds in which the recorded longest silence falls to half, so that an accidental silence is forgotten."""


class Heartbeat:
    """The heartbeat of one engine, in the API process.

    Args:
        timeout: seconds without a sign of life after which the engine is late; 0: never.
        clock: returns the time in seconds.
    """

    def __init__(self, timeout: float = DEFAULT_TIMEOUT, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout = timeout
        self._clock = clock
        self._is_asked = False
        self._silence = 0.0
        self._measured_at: float | None = None  # time of the last measurement; None: silence begins with the next one
        self._patience = 0.0
        self._longest = 0.0
        self._mean_step = 0.0

    def note_sign_of_life(self, patience: float = 0.0) -> None:
        """Set the silence to 0, because the engine has given a sign of life.

        Args:
            patience: seconds of silence that the engine announces.
        """
        self._silence, self._measured_at, self._patience = 0.0, None, patience

    def start_question(self) -> bool:
        """Returns whether to send a question now: False while an earlier question is unanswered. If True, the question
        counts as sent. To be called every `INTERVAL`."""
        if self._is_asked:
            self._measure()
            return False
        self._is_asked = True
        self._silence, self._measured_at = 0.0, self._clock()
        return True

    def note_answer(self, reading: PulseReading | None) -> None:
        """Process the engine's answer to the question, the times of its steps. None: the engine is ending."""
        self._is_asked = False
        if reading is not None:
            kept = self._longest * 0.5 ** (INTERVAL / SECONDS_TO_HALVE)
            self._longest = max(kept, reading.longest)
            self._mean_step = self._mean_step if reading.mean_step is None else reading.mean_step

    @property
    def seconds_of_silence(self) -> float:
        """Seconds without a sign of life while a question is unanswered."""
        return self._measure()

    def _measure(self) -> float:
        if not self._is_asked:
            return 0.0
        now = self._clock()
        if self._measured_at is not None:
            self._silence += min(now - self._measured_at, INTERVAL)
        self._measured_at = now
        return self._silence

    @property
    def limit(self) -> float:
        """Seconds of silence after which the engine is late."""
        return max(self._timeout, LONGEST_SILENCES * self._longest, self._patience)

    @property
    def is_slow(self) -> bool:
        """Whether the engine is slow, so that other engines should get new requests instead of it."""
        return self.seconds_of_silence > max(SLOW_AFTER, MEAN_STEPS * self._mean_step)

    @property
    def is_stalled(self) -> bool:
        """Whether the engine is stalled, so that callers should not wait for its answers."""
        return self.seconds_of_silence > STALLED_AFTER

    @property
    def is_late(self) -> bool:
        """Whether the engine is late, so that it counts as dead."""
        return self._timeout > 0 and self.seconds_of_silence > self.limit
