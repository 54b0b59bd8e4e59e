"""Routing rules of a simulated fleet: choose the replica that gets a request.

round robin      each replica in turn
least loaded     the replica with the fewest unfinished requests
prefix affinity  the replica that got most of the prompt in earlier requests, unless the replica's load is too high
vllm             the rule of vLLM 0.32 among data parallel engines, by what the engines reported last
vllm-0.26        the same of vLLM up to 0.26 for mixtures of experts: four times the waiting plus the running requests
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

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

    @property
    def num_waiting(self) -> int:
        """Number of requests in the queue of the replica's scheduler."""

    @property
    def num_running(self) -> int:
        """Number of running requests."""

    @property
    def kv_cache_usage(self) -> float:
        """Share of the KV blocks that requests hold, 0 to 1."""


class Routing(Protocol):
    """A routing rule."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        """The index of the replica that gets the request, which arrives at `now` (seconds)."""


@runtime_checkable
class Observing(Protocol):
    """A routing rule that follows the replicas' reports between the requests."""

    def observe(self, index: int, replica: Routed, now: float) -> None:
        """Replica `index` has ended a step at `now` (seconds), or got a request while it was idle."""


class RoundRobin:
    """Each replica in turn."""

    def __init__(self) -> None:
        self._next = 0

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class LeastLoaded:
    """The replica with the fewest unfinished requests; of several such replicas, the first."""

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        return min(range(len(replicas)), key=lambda index: (replicas[index].num_unfinished, index))


class PrefixAffinity:
    """The rule of a server with several engines (`pointsman/routing.py`): among the replicas whose load is not too
    high, the replica that must compute the fewest prompt tokens. A replica is assumed to still hold as many of its
    latest prompts as fit its pool."""

    def __init__(self) -> None:
        self._router: Router | None = None

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        if self._router is None:
            config = replicas[0].config
            num_blocks = max(1, config.num_full_length_tokens // config.block_size)
            self._router = Router(len(replicas), config.block_size, num_blocks)
        prompt = prompt_tokens(request, request.index, VOCAB_SIZE)
        return self._router.choose(prompt, "", [replica.num_unfinished for replica in replicas])


class VllmRouting:
    """The rule by which vLLM's client balances data parallel engines (`DPLBAsyncMPClient` of vLLM 0.32).

    An engine reports its numbers of waiting and running requests and its KV cache usage when one of the numbers has
    changed after a step. A coordinator publishes the latest reports at most every `INTERVAL`. The client chooses the
    engine with the lowest score, and counts one more waiting request there until the next publication:

        score = max(requests of the client, waiting + running) + 6 * waiting * max(0, usage - 0.5)

    The first of equal engines is a different one for each request. The rule is that of one API server; several have
    separate counts of their own requests. Messages take no time.
    """

    INTERVAL = 0.1
    """Minimum seconds between two publications."""

    def __init__(self) -> None:
        self._reports: dict[int, tuple[int, int, float]] = {}
        self._counts: dict[int, tuple[int, int, float]] = {}  # the client's, by engine
        self._last_published = -math.inf
        self._changed = math.inf  # time of the first report that is not published
        self._start = 0

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        self._publish(now)
        counts, number = self._counts, len(replicas)
        in_turn = ((self._start + step) % number for step in range(number))
        chosen = min(in_turn, key=lambda index: self._score(replicas[index], *counts.get(index, (0, 0, 0.0))))
        waiting, running, usage = counts.get(chosen, (0, 0, 0.0))
        counts[chosen] = waiting + 1, running, usage
        self._start = self._next_start(number)
        return chosen

    def observe(self, index: int, replica: Routed, now: float) -> None:
        numbers = replica.num_waiting, replica.num_running
        if self._reports.get(index, (0, 0))[:2] == numbers:
            return
        if self._next_publication() < now:
            self._publish(now)
        self._reports[index] = *numbers, replica.kv_cache_usage
        self._changed = min(self._changed, now)

    def _score(self, replica: Routed, waiting: int, running: int, usage: float) -> float:
        return max(replica.num_unfinished, waiting + running) + waiting * 6.0 * max(0.0, usage - 0.5)

    def _next_start(self, num_replicas: int) -> int:
        return (self._start + 1) % num_replicas

    def _next_publication(self) -> float:
        return max(self._last_published + self.INTERVAL, self._changed)

    def _publish(self, now: float) -> None:
        """Publish the reports, if that is due by `now`."""
        if (due := self._next_publication()) <= now:
            self._counts = dict(self._reports)
            self._last_published, self._changed = due, math.inf


class VllmQueueRouting(VllmRouting):
    """The rule of vLLM up to 0.26 for mixtures of experts: the lowest `4 * waiting + running` as published, of several
    such engines the first. These versions publish no reports for other models, whose requests go round robin."""

    def _score(self, replica: Routed, waiting: int, running: int, usage: float) -> float:
        return 4 * waiting + running

    def _next_start(self, num_replicas: int) -> int:
        return 0


ROUTINGS: Mapping[str, Callable[[], Routing]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-affinity": PrefixAffinity,
    "vllm": VllmRouting,
    "vllm-0.26": VllmQueueRouting,
}
"""The routing rules by name."""
