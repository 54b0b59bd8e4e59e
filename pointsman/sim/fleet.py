"""Which replica gets a request? Routing rules of a fleet.

round robin      in turns
least loaded     fewest unfinished requests
prefix affinity  where a request with the same first blocks went before, unless that replica is much fuller
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pointsman.sim.request import SimRequest


class Loaded(Protocol):
    """What a rule may know of a replica."""

    @property
    def num_unfinished(self) -> int:
        """Requests that it has and has not finished."""


class Routing(Protocol):
    """A rule."""

    def choose(self, request: SimRequest, replicas: Sequence[Loaded]) -> int:
        """The index of the replica that gets the request."""


class RoundRobin:
    """In turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, replicas: Sequence[Loaded]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests; of several, the first."""

    def choose(self, request: SimRequest, replicas: Sequence[Loaded]) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished, index))


class PrefixAffinity:
    """The replica that a request with the same prefix went to last.

    Of the blocks of a prompt, the longest known prefix counts. The least loaded replica gets the request if none is
    known, or if the known one has over `max_imbalance` times as many unfinished requests, and `max_imbalance` more.
    """

    def __init__(self, max_imbalance: float = 2.0) -> None:
        if max_imbalance < 1:
            raise ValueError(f"max_imbalance is {max_imbalance}; it must be at least 1")
        self._max_imbalance = max_imbalance
        self._last: dict[int, int] = {}  # by hash id, which stands for a block and all before it
        self._otherwise = LeastLoaded()

    def choose(self, request: SimRequest, replicas: Sequence[Loaded]) -> int:
        least = self._otherwise.choose(request, replicas)
        fewest = replicas[least].num_unfinished
        chosen = next((self._last[block] for block in reversed(request.block_hash_ids) if block in self._last), least)
        if replicas[chosen].num_unfinished > self._max_imbalance * (fewest + 1):
            chosen = least
        self._last.update(dict.fromkeys(request.block_hash_ids, chosen))
        return chosen


ROUTINGS: Mapping[str, Callable[[], Routing]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}
"""The rules by name."""
