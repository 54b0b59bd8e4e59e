"""An order that reads everything a client may say of its urgency, for tests of how that reaches the scheduler."""

from __future__ import annotations

import math
from typing import Any

from pointsman.core import Request
from pointsman.core.policy.order import FirstComeFirstServed


class ByUrgency(FirstComeFirstServed):
    """By priority, then by TTFT target, then by arrival."""

    name = "by-urgency"

    def key(self, request: Request) -> tuple[Any, ...]:
        target = math.inf if request.ttft_target is None else request.ttft_target
        return (request.priority, target, request.arrival_time, request.sequence_number)


BY_URGENCY = ByUrgency()
"""Crosses into an engine process by name of its class."""
