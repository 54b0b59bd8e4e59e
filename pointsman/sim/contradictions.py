"""Contradictions: settings that a log of requests shows to be wrong.

A request that has its first token and not yet its last one runs. The numbers of requests that run and that wait at a
time therefore show the limit of running requests, whatever the step times are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pointsman.sim.accuracy import Times
from pointsman.sim.profile import EngineSettings

FloatArray = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

MIN_EXCESS = 1.02
"""Requests at a time that contradict `max_num_seqs`, as a multiple of it: a client sees tokens a moment after the
engine, and a preempted request does not run."""
MIN_LIMITED = 0.25
"""Share of the time with waiting requests in which as many run as ever, from which their number seems limited."""
NEARLY = 0.97
"""Share of the most requests at a time from which as many run as ever. One less also counts, as a request whose prompt
is computed runs, but has no token yet."""
MIN_QUEUED = 0.05
"""Share of the log's time in which requests must wait, so that a limit shows."""


class Running(NamedTuple):
    """What a log shows about the number of running requests."""

    most: int
    """Most requests that ran at a time."""
    limited: float
    """Share of the time with waiting requests in which nearly as many ran."""

    @classmethod
    def of(cls, times: Times) -> Running:
        """What the times of requests show."""
        at = np.sort(np.concatenate([times.queued, times.first_token, times.last_token]))
        middle, seconds = (at[1:] + at[:-1]) / 2, np.diff(at)

        def number_before(moments: FloatArray) -> Indices:
            found: Indices = np.searchsorted(np.sort(moments), middle, side="right")
            return found

        running = number_before(times.first_token) - number_before(times.last_token)
        waiting = number_before(times.queued) - number_before(times.first_token)
        most = int(running[seconds > 0].max(initial=0))
        # The request whose prompt is computed waits for its first token, but does not wait for the limit.
        has_queue = (waiting > 1) & (seconds > 0)
        total = float(seconds[has_queue].sum())
        limited = float(seconds[has_queue & (running >= min(NEARLY * most, most - 1))].sum())
        return cls(most, limited / total if total > MIN_QUEUED * float(seconds.sum()) else 0.0)


def contradictions(times: Times, settings: EngineSettings) -> list[str]:
    """Sentences on settings that the log contradicts, with the settings that would agree; none: it contradicts none."""
    running, engines = Running.of(times), settings.data_parallel_size
    allowed = settings.max_num_seqs * engines
    if running.most > MIN_EXCESS * allowed:
        each = -(-running.most // engines)
        return [
            f"max_num_seqs is {settings.max_num_seqs}{_of_engines(engines)}, but {running.most:,} requests ran at a "
            f"time: it was at least {each:,}, or there were more engines (--data-parallel-size)"
        ]
    if running.limited >= MIN_LIMITED and running.most < NEARLY * allowed:
        each = -(-running.most // engines)
        return [
            f"max_num_seqs is {settings.max_num_seqs}{_of_engines(engines)}, but at most {running.most:,} requests ran "
            f"at a time while others waited: it was {each:,}, or the KV blocks were fewer than those given "
            "(--num-blocks)"
        ]
    return []


def _of_engines(engines: int) -> str:
    return f" on each of {engines} engines" if engines > 1 else ""
