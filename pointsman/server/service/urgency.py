"""Urgency: refuses `priority`, `ttft_target` and `retention` beyond the operator's limits, or if no policy reads them.
A client must not rely on a field without effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.core.policy.registry import fields_read
from pointsman.server.wire.errors import ApiError

if TYPE_CHECKING:
    from pointsman.server.config import ServerConfig
    from pointsman.server.wire.messages import EngineInfo

PRIORITY, TTFT_TARGET, RETENTION = "priority", "ttft_target", "retention"


def check_urgency(priority: int, ttft_target: float | None, info: EngineInfo, config: ServerConfig) -> None:
    """Refuse a priority or a target that would have no effect, or that is more urgent than the operator allows.

    Raises:
        ApiError: 400, with the value, the limit and the remedy.
    """
    if priority:
        check_priority_is_read(priority, info)
        minimum = config.min_request_priority
        if minimum is not None and priority < minimum:
            raise ApiError(
                400,
                f"priority is {priority}, and smaller is more urgent; this server takes {minimum} at least: raise it",
                param=PRIORITY,
            )
    if ttft_target is not None:
        if TTFT_TARGET not in fields_read(info.scheduler):
            raise ApiError(
                400,
                f"ttft_target is {ttft_target:g} s, and this server has the order {info.scheduler.get('order')}, which "
                "ignores targets; leave it out, or start the server with order earliest-ttft",
                param=TTFT_TARGET,
            )
        shortest = config.min_ttft_target
        if shortest is not None and ttft_target < shortest:
            raise ApiError(
                400,
                f"ttft_target is {ttft_target:g} s; this server takes {shortest:g} s at least: raise it",
                param=TTFT_TARGET,
            )


def check_retention(retention: float | None, info: EngineInfo, config: ServerConfig) -> None:
    """Refuse a retention that would have no effect, or that is longer than the operator allows.

    Raises:
        ApiError: 400, with the value, the limit and the remedy.
    """
    if retention is None:
        return
    if RETENTION not in fields_read(info.scheduler):
        raise ApiError(
            400,
            f"retention is {retention:g} s, and this server has the eviction policy {info.scheduler.get('eviction')}, "
            "which ignores it; leave it out, or start the server with eviction retention",
            param=RETENTION,
        )
    if retention > config.max_retention:
        raise ApiError(
            400,
            f"retention is {retention:g} s; this server takes {config.max_retention:g} s at most: lower it",
            param=RETENTION,
        )


def check_priority_is_read(priority: int, info: EngineInfo) -> None:
    """Refuse a priority that would have no effect.

    Raises:
        ApiError: 400, with the remedy.
    """
    if priority and PRIORITY not in fields_read(info.scheduler):
        raise ApiError(
            400,
            f"priority is {priority}, and this server has the order {info.scheduler.get('order')}, which ignores it; "
            "leave it 0, or start the server with order priority",
            param=PRIORITY,
        )
