"""How much must stay free when a request is admitted?

A reserve names blocks that must be free beyond the first chunk's own. They add up: a request is admitted if its first
chunk and every reserve fit into the free blocks together. Running requests are never held to a reserve, so the
gap between "stop admitting" and "nothing left" is headroom for their growth.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from pointsman.core.config import SchedulerConfig
from pointsman.core.reason import Reason
from pointsman.core.request import Request


class Demand(NamedTuple):
    """What admitting a request takes from the free blocks; a cached block that somebody else holds costs nothing."""

    first: int
    """Blocks for the tokens of this step, cached free blocks that it would reuse included."""
    full: int
    """Blocks for all its known tokens."""
    owed: int
    """Blocks that running requests still need for tokens they already have (partly computed prompts)."""


class Reserve(Protocol):
    """One reason to keep blocks free."""

    reason: Reason

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        """Blocks that must be free beyond `demand.first`."""


class Watermark:
    """A share of the pool, only while something runs (vLLM's `watermark`)."""

    reason = Reason.WATERMARK

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        return self._num_blocks if something_runs else 0


class FullSequence:
    """The rest of the known sequence, and of every prompt that is partly computed."""

    reason = Reason.FULL_SEQUENCE

    def blocks(self, request: Request, demand: Demand, something_runs: bool) -> int:
        return max(0, demand.full + demand.owed - demand.first)


def make_reserves(config: SchedulerConfig) -> list[Reserve]:
    """The reserves that the configuration asks for, cheapest remedy first."""
    reserves: list[Reserve] = []
    if config.watermark > 0.0:
        reserves.append(Watermark(max(1, int(config.watermark * config.num_usable_blocks))))
    if config.full_sequence_must_fit:
        reserves.append(FullSequence())
    return reserves
