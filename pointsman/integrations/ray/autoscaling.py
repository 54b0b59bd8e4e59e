"""Autoscaling: the number of replicas of engines, from the number of waiting requests.

The API knows all requests and computes the number (`num_replicas_needed`). Each replica of engines reports this number
as a custom metric of Serve's (`record_autoscaling_stats`), and Serve calls `policy` with the metric. Serve itself
applies the bounds, delays and factors of `autoscaling_config`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

METRIC = "pointsman_replicas_wanted"
POLICY = "pointsman.integrations.ray.autoscaling:policy"


class Load(NamedTuple):
    """The load of one engine."""

    running: int
    waiting: int


def num_replicas_needed(
    loads: list[Load], num_unsent: int, engines_per_replica: int, max_running: int, target: float | None
) -> int:
    """The number of replicas that the open requests need.

    Args:
        loads: load of each engine that runs.
        num_unsent: number of requests that wait because no engine runs.
        engines_per_replica: number of engines in each replica, at least 1.
        max_running: maximum number of requests that an engine runs at the same time.
        target: target number of open requests for each replica; None: the number that a replica can run at the same
            time.
    """
    waiting = num_unsent + sum(load.waiting for load in loads)
    running = sum(load.running for load in loads)
    wanted = math.ceil((running + waiting) / (target or max_running * engines_per_replica))
    if waiting and loads:
        # Requests wait although slots may be free: for KV blocks, say. Add the engines that would run them.
        each = max(1.0, running / len(loads))
        wanted = max(wanted, math.ceil((len(loads) + waiting / each) / engines_per_replica))
    return max(1, wanted)


def policy(context: Any) -> tuple[int, dict[str, Any]]:
    """The number of replicas of engines, for Serve: the rounded mean of the reported numbers over
    `look_back_period_s`. A request that waits for only a step or two changes nothing.

    Args:
        context: Serve's `AutoscalingContext`.
    """
    reported: Mapping[Any, float] = (context.aggregated_metrics or {}).get(METRIC, {})
    if not reported:
        return context.target_num_replicas, {}
    return math.floor(max(reported.values()) + 0.5), {}
