"""Orders for tests: one reads all urgency fields of clients, one blocks the engine's thread."""

from __future__ import annotations

import math
import time
from typing import Any

from pointsman.core import Request
from pointsman.core.policy.order import FirstComeFirstServed
from pointsman.engine.pulse import beat


class ByUrgency(FirstComeFirstServed):
    """Orders requests by priority, then by TTFT target, then by arrival."""

    name = "by-urgency"

    def key(self, request: Request) -> tuple[Any, ...]:
        target = math.inf if request.ttft_target is None else request.ttft_target
        return (request.priority, target, request.arrival_time, request.sequence_number)


BY_URGENCY = ByUrgency()
"""Pickled into an engine process by the name of its class."""


class HeldUp(FirstComeFirstServed):
    """Blocks the engine's thread once for each request, by its id: "hang" for a minute, "long" for 6 s with beats,
    "announced" for 5 s that are announced."""

    name = "held-up"

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def key(self, request: Request) -> tuple[Any, ...]:
        if request.request_id not in self._seen:
            self._seen.add(request.request_id)
            kind = request.request_id.partition("-")[0]
            if kind == "hang":
                time.sleep(60)
            elif kind == "long":
                for _ in range(60):
                    beat()
                    time.sleep(0.1)
            elif kind == "announced":
                beat(60.0)
                time.sleep(5)
        return super().key(request)
