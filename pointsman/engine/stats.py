"""Statistics of an engine: a log line every few seconds, with vLLM's wording.

    Avg prompt throughput: 512.0 tokens/s, Avg generation throughput: 96.4 tokens/s, Running: 8 reqs, Waiting: 2 reqs,
    KV cache usage: 41.7%, Prefix cache hit rate: 63.1%, Preemptions: 0, Scheduler: 31 us/step,
    Prefix cache saved: 3,230 tokens

(one line, here wrapped). Rates, the hit rate, preemptions and saved tokens cover the interval since the line before;
running, waiting and cache usage are current values. An idle engine logs nothing: its last line covers the interval in
which the last request finished.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pointsman.core.observe.stats import SchedulerStats

if TYPE_CHECKING:
    from pointsman.core.recording import RecordingState
    from pointsman.engine.counters import EngineCounters
    from pointsman.engine.engine import Engine

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL = 10.0
"""Default seconds from one log line to the next."""

SHORT_RUN = 1.0
"""Seconds below which a run logs no line at its end: rates of short runs mean little, and scripts make many short
runs."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine's totals and state at one moment. The difference between two objects describes an interval."""

    time: float
    """Time of the reading, in seconds on the clock of the code that calls `read_stats`."""
    counters: EngineCounters
    """Totals of tokens, steps and times since the engine was made."""
    scheduler: SchedulerStats
    num_stalled: int = 0
    """Number of requests without progress at the watchdog's last check; see `watchdog.py`."""
    has_external_kv: bool = False
    """Whether the engine keeps KV outside the pool; see `kv/connector.py`."""
    num_grammar_restarts: int = 0
    """Number of restarts of the process that compiles grammars; see `grammar/process.py`."""
    recording: RecordingState | None = None
    """State of the recording of the scheduler's calls; None: nothing is recorded."""


def read_stats(engine: Engine, now: float) -> EngineStats:
    """Read an engine's totals and state. `now` is the time of the reading, in seconds. Only the thread that owns the
    engine may call this."""
    num_stalled = engine.watchdog.num_stalled if engine.watchdog is not None else 0
    return EngineStats(
        now,
        copy.copy(engine.counters),
        engine.scheduler.stats(),
        num_stalled,
        has_external_kv=engine.kv_connector is not None,
        num_grammar_restarts=engine.grammars.num_restarts,
        recording=engine.scheduler.recording,
    )


def stats_line(before: EngineStats, after: EngineStats) -> str:
    """The log line for the interval between two readings.

    Raises:
        ValueError: `after` is not later than `before`, so there are no rates.
    """
    seconds = after.time - before.time
    if seconds <= 0:
        raise ValueError(f"the second reading is {seconds} s after the first; give the earlier reading first")
    was, now = before.scheduler, after.scheduler
    num_prompt_tokens = after.counters.num_prompt_tokens - before.counters.num_prompt_tokens
    num_generated_tokens = after.counters.num_generated_tokens - before.counters.num_generated_tokens
    num_steps = after.counters.num_steps - before.counters.num_steps
    scheduler_time = after.counters.scheduler_time - before.counters.scheduler_time
    queries = now.prefix_queries - was.prefix_queries
    hits = now.prefix_hits - was.prefix_hits
    saved = hits + now.resumed_prefix_hits - was.resumed_prefix_hits
    parts = [
        f"Avg prompt throughput: {num_prompt_tokens / seconds:.1f} tokens/s",
        f"Avg generation throughput: {num_generated_tokens / seconds:.1f} tokens/s",
        f"Running: {now.num_running} reqs",
        f"Waiting: {now.num_waiting} reqs",
        f"KV cache usage: {now.kv_cache_usage:.1%}",
        # Without prefix cache lookups there is no rate: 0 % would look bad.
        f"Prefix cache hit rate: {f'{hits / queries:.1%}' if queries else 'n/a'}",
        *_external_hit_rate(before, after),
        f"Preemptions: {now.num_preemptions - was.num_preemptions}",
        f"Scheduler: {f'{scheduler_time / num_steps * 1e6:.0f} us/step' if num_steps else 'n/a'}",
        f"Prefix cache saved: {saved:,} tokens",
    ]
    return ", ".join(parts)


def _external_hit_rate(before: EngineStats, after: EngineStats) -> list[str]:
    """The part of the log line with the hit rate of KV outside the pool, for tokens that the prefix cache did not have;
    [] if the engine keeps no such KV."""
    if not after.has_external_kv:
        return []
    queries = after.counters.num_external_queries - before.counters.num_external_queries
    hits = after.counters.num_external_hits - before.counters.num_external_hits
    return [f"External prefix cache hit rate: {f'{hits / queries:.1%}' if queries else 'n/a'}"]


class StatsLogger:
    """Logs a line with statistics every `interval` seconds. The loop that steps the engine calls `tick` between steps;
    usually `tick` only compares times.

    Args:
        engine: the engine to report.
        interval: seconds between two lines.
        clock: function that returns real time in seconds; it may differ from the engine's clock.
        emit: function that is called with each line; None: the line goes to this module's logger, at level INFO.

    Raises:
        ValueError: the interval is not a positive number.
    """

    def __init__(
        self,
        engine: Engine,
        interval: float = DEFAULT_INTERVAL,
        *,
        clock: Callable[[], float] = time.monotonic,
        emit: Callable[[str], None] | None = None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"the interval of the statistics is {interval!r}; it must be above 0 seconds")
        self._engine = engine
        self._interval = interval
        self._clock = clock
        self._emit = emit or logger.info
        self._before = read_stats(engine, clock())
        self._started = self._before.time

    def tick(self) -> bool:
        """Log a line if one is due and the engine was not idle since the last line; return whether a line was
        logged."""
        now = self._clock()
        return now - self._before.time >= self._interval and self._log(now)

    def flush(self) -> bool:
        """Log a line for the time since the last line, even if none is due; return whether a line was logged. Call this
        when the engine stops."""
        now = self._clock()
        return now > self._before.time and self._log(now)

    def finish(self) -> bool:
        """Call `flush` at the end of a run, unless the run was shorter than `SHORT_RUN`; return whether a line was
        logged."""
        return self._clock() - self._started >= SHORT_RUN and self.flush()

    def seconds_to_next_line(self) -> float | None:
        """Seconds until the next line is due if the engine stays idle from now on; None: no line will be due."""
        if self._engine.counters.num_steps == self._before.counters.num_steps:
            return None
        return max(0.0, self._before.time + self._interval - self._clock())

    def _log(self, now: float) -> bool:
        after = read_stats(self._engine, now)
        before, self._before = self._before, after  # also without a line: intervals have no idle time
        stuck = after.scheduler.num_running or after.scheduler.num_waiting or after.scheduler.num_parked
        if after.counters.num_steps == before.counters.num_steps and not stuck:
            return False
        self._emit(stats_line(before, after))
        return True
