"""EngineWatchdog: reports requests without progress, in the log (a line per stall) and in the metrics (the number of
such requests).

The watchdog checks the scheduler four times in `watchdog_seconds`, between steps or while the engine has nothing to
run. It cannot check while a step hangs; then the server notices that the engine gives no sign of life (`pulse.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from pointsman.core import Scheduler

logger = logging.getLogger(__name__)

CHECKS_PER_PERIOD = 4
"""Number of checks in `watchdog_seconds`."""
MAX_LINES = 10
"""Maximum number of log lines about requests per check; one more line counts further requests."""


class EngineWatchdog:
    """Watches the requests of one scheduler, in the thread that owns it.

    Args:
        seconds: seconds without progress after which a request is reported.
        clock: function that returns the time, in seconds; the scheduler's calls get the time of this clock.

    Raises:
        ValueError: the seconds are not a number above 0.
    """

    def __init__(self, scheduler: Scheduler, seconds: float, clock: Callable[[], float]) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
            raise ValueError(
                f"watchdog_seconds is {seconds!r}; give the seconds without progress after which a request is "
                "reported, or 0 for none"
            )
        self._scheduler = scheduler
        self._seconds = float(seconds)
        self._clock = clock
        self._next_check = -math.inf
        self._reported: dict[str, float] = {}  # request id -> time of its last progress
        self.num_stalled = 0
        """Number of requests without progress at the last check."""

    def tick(self) -> None:
        """Check the scheduler's requests, if a check is due."""
        now = self._clock()
        if now < self._next_check:
            return
        self._next_check = now + self._seconds / CHECKS_PER_PERIOD
        stalls = self._scheduler.stalled(now, self._seconds)
        new = [stall for stall in stalls if self._reported.get(stall.explanation.request_id) != stall.since]
        for stall in new[:MAX_LINES]:
            logger.warning("no progress for %.1f s: %s", now - stall.since, stall.explanation.sentence)
        if len(new) > MAX_LINES:
            logger.warning("no progress for %g s or more: %d further requests", self._seconds, len(new) - MAX_LINES)
        self._reported = {stall.explanation.request_id: stall.since for stall in stalls}
        self.num_stalled = len(stalls)


def make_watchdog(scheduler: Scheduler, seconds: float, clock: Callable[[], float]) -> EngineWatchdog | None:
    """Make a watchdog; None if `seconds` is 0.

    Raises:
        ValueError: the seconds are not a number of 0 or more.
    """
    is_off = not isinstance(seconds, bool) and isinstance(seconds, (int, float)) and seconds == 0
    return None if is_off else EngineWatchdog(scheduler, seconds, clock)
