"""Which replica gets a request? Routing rules of a fleet.

round robin      in turns
least loaded     fewest unfinished requests
prefix affinity  where most of its prompt was sent before, unless that replica has more to do: the server's rule
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pointsman.core import SchedulerConfig
from pointsman.routing import Router
from pointsman.sim.request import VOCAB_SIZE, SimRequest, prompt_tokens


class Routed(Protocol):
    """What a rule may know of a replica."""

    @property
    def config(self) -> SchedulerConfig:
        """Of its scheduler; that of all replicas."""

    @property
    def num_unfinished(self) -> int:
        """Requests that it has and has not finished."""


class Routing(Protocol):
    """A rule."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        """The index of the replica that gets the request."""


class RoundRobin:
    """In turns."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests; of several, the first."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed]) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished, index))


class PrefixAffinity:
    """The rule of a server with several engines (`pointsman/routing.py`): the replica that computes least for the
    request, of what its pool can hold of the prompts that it was sent, within a bound on its load."""

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
"""The rules by name."""
