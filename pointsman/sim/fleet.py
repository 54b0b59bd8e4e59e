"""Routing rules of a simulated fleet: choose the replica that gets a request.

round robin      each replica in turn
least loaded     the replica with the fewest unfinished requests
prefix affinity  the replica that got most of the prompt in earlier requests, unless the replica's load is too high
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pointsman.core import SchedulerConfig
from pointsman.routing import Router
from pointsman.sim.request import VOCAB_SIZE, SimRequest, prompt_tokens


class Routed(Protocol):
    """The attributes of a replica that a routing rule may read."""

    @property
    def config(self) -> SchedulerConfig:
        """The configuration of the replica's scheduler, equal on all replicas."""

    @property
    def num_unfinished(self) -> int:
        """Number of unfinished requests on the replica."""


class Routing(Protocol):
    """A routing rule."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        """The index of the replica that gets the request."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests; of several such replicas, the first."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished, index))


class PrefixAffinity:
    """The rule of a server with several engines (`pointsman/routing.py`): among the replicas whose load is not too
    high, the replica that must compute the fewest prompt tokens. A replica is assumed to still hold as many of its
    latest prompts as fit its pool."""

    def __init__(self) -> None:
        self._router: Router | None = None

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        if self._router is None:
            config = replicas[0].config
            num_blocks = max(1, config.num_full_length_tokens // config.block_size)
            self._router = Router(len(replicas), config.block_size, num_blocks)
        prompt = prompt_tokens(request, request.index, VOCAB_SIZE)
        return self._router.choose(prompt, "", [replica.num_unfinished for replica in replicas])


ROUTINGS: Mapping[str, Callable[[], Routing]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
}
"""The routing rules by name."""
