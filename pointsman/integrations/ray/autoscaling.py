"""How many replicas of engines are wanted: by the requests that wait.

The API, which has all requests, says it (`replicas_wanted`); each replica of engines reports that as a custom metric of
Serve's (`record_autoscaling_stats`), and Serve asks `policy`. The bounds, delays and factors of `autoscaling_config`
are Serve's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

METRIC = "pointsman_replicas_wanted"
POLICY = "pointsman.integrations.ray.autoscaling:policy"


class Load(NamedTuple):
    """Of one engine."""

    running: int
    waiting: int


def replicas_wanted(
    loads: list[Load], num_unsent: int, engines_per_replica: int, max_running: int, target: float | None
) -> int:
    """The number of replicas for the requests that are open.

    Args:
        loads: of the engines that live.
        num_unsent: requests that wait for an engine, as none lives.
        engines_per_replica: at least 1.
        max_running: requests that an engine runs at once, at most.
        target: open requests for each replica; None: as many as it can run at once.
    """
    waiting = num_unsent + sum(load.waiting for load in loads)
    running = sum(load.running for load in loads)
    wanted = math.ceil((running + waiting) / (target or max_running * engines_per_replica))
    if waiting and loads:
        # They wait though there may be free slots: for KV blocks, say. As many engines more as would run them.
        each = max(1.0, running / len(loads))
        wanted = max(wanted, math.ceil((len(loads) + waiting / each) / engines_per_replica))
    return max(1, wanted)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """The decision for a deployment of engines, by the mean over `look_back_period_s`: a request that waits for a step
    or two moves nothing.

    Args:
        context: Serve's `AutoscalingContext`.
    """
    reported: Mapping[Any, float] = (context.aggregated_metrics or {}).get(METRIC, {})
    if not reported:
        return context.target_num_replicas, {}
    return math.floor(max(reported.values()) + 0.5), {}
