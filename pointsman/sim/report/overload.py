"""Overload: detects that requests arrive faster than they are served, so that the queue grows without end.

The figures of such a simulation depend on its length: with twice as many requests, the last ones wait twice as long.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pointsman.core import FinishReason
from pointsman.sim.outcome import REASONS, UNFINISHED, Timings
from pointsman.sim.report.intervals import Estimate

NUM_INTERVALS = 8
"""Number of intervals in the second half of the arrivals; the growth of the queue is tested over these intervals."""
MIN_FINISHED = 20
"""Minimum number of requests that finish in this half: with fewer, all arrivals are one burst that is served later."""
MIN_GROWTH = 0.05
"""Minimum growth of the queue in this half, as a share of its arrivals."""
MIN_T = 4.0
"""Minimum mean growth in an interval, in standard errors. A queue that only fluctuates, or follows bursts of arrivals,
stays below: Student's t with seven degrees of freedom exceeds 4 with a probability of 0.3 %."""


@dataclass(frozen=True, slots=True)
class Overload:
    """Requests that arrive faster than they are served."""

    arriving_per_second: Estimate
    served_per_second: Estimate
    """Finished requests a second in the whole simulation, as in the report."""


def overload(timings: Timings, served: Estimate) -> Overload | None:
    """The overload of a simulation whose arrivals do not depend on the service; None: the queue does not grow without
    end, or the simulation is too short to show it.

    The number of requests that wait for their first admission must rise steadily in the second half of the arrivals,
    while requests finish. In the first half the batch fills.

    Args:
        served: finished requests a second in the whole simulation.
    """
    count = timings.count
    arrival, scheduled = timings.arrival[:count], timings.scheduled[:count]
    reason, last = timings.reason[:count], timings.last_token[:count]
    begin, end = (float(arrival[0]), float(arrival[-1])) if count else (0.0, 0.0)
    if end <= begin:
        return None
    edges = np.linspace((begin + end) / 2, end, NUM_INTERVALS + 1)
    is_refused = reason == REASONS.index(FinishReason.REFUSED)
    arrived, admitted = _counts(arrival[~is_refused], edges), _counts(scheduled, edges)
    finished = _counts(last[(reason != UNFINISHED) & ~is_refused], edges)
    num_arrived, num_finished = int(arrived[-1] - arrived[0]), int(finished[-1] - finished[0])
    growth = np.diff(arrived - admitted)
    mean, error = float(growth.mean()), float(growth.std(ddof=1)) / math.sqrt(NUM_INTERVALS)
    is_growing = mean * NUM_INTERVALS >= MIN_GROWTH * max(1, num_arrived) and mean > MIN_T * error
    if not is_growing or num_finished < MIN_FINISHED or num_finished >= num_arrived:
        return None
    arriving = (count - 1) / (end - begin)
    return Overload(Estimate(arriving), served) if arriving > (served.value or 0.0) else None


def overload_text(found: Overload) -> str:
    """The overload in words."""
    arriving, served = found.arriving_per_second.value, found.served_per_second.value
    return (
        f"The queue grows without end: {arriving:.3g} requests a second arrive, {served:.3g} are served; these figures "
        "depend on the length of the run."
    )


def _counts(times: npt.NDArray[np.float64], edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Number of the events at or before each of `edges`; a time of NaN has not happened."""
    found: npt.NDArray[np.int64] = np.sort(times).searchsorted(edges, side="right")  # NaN comes last
    return found
