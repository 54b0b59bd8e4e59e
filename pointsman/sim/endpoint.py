"""Endpoints: what a router sends requests to. An endpoint is one engine, or several that serve one request together.

endpoint.add(number, request, now)   a request arrives
endpoint.plan_event(until)           plan the next event of any of its engines; returns its end
endpoint.commit_event()              the event has happened; returns the requests that it finished

Replica         one engine                                                    replica.py
Pool            several endpoints; a routing rule chooses one of them         here
Lockstep        data parallel engines that step together                      lockstep.py
PrefillDecode   engines that compute prompts, and engines that decode         disaggregation.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from pointsman.core import SchedulerConfig
from pointsman.sim.fleet import Observing, Routed, Routing
from pointsman.sim.replica import Replica
from pointsman.sim.request import SimRequest


class Endpoint(Routed, Protocol):
    """One or several engines that serve requests."""

    refused: list[tuple[int, str]]
    """(number, reason) of each request that can never run, since the list was last cleared."""

    @property
    def engines(self) -> Sequence[Replica]:
        """The engines of the endpoint."""

    @property
    def now(self) -> float:
        """End of the last event, in seconds."""

    @property
    def is_between_events(self) -> bool:
        """Whether no event is planned, so that the engines have every request that has arrived."""

    def add(self, number: int, request: SimRequest, now: float) -> None:
        """Add a request that arrives at `now` (seconds), during the planned event if there is one."""

    def plan_event(self, until: float = math.inf) -> float | None:
        """Plan the next event. Returns its end in seconds; None: there is no event until a request arrives.

        `until`: a run of decodes may end at this time.
        """

    def commit_event(self) -> list[int]:
        """Complete the planned event. Returns the numbers of the requests that finished in it."""


class Several:
    """Several members behind one endpoint: their loads together."""

    def __init__(self, members: Sequence[Endpoint]) -> None:
        self.members = members
        self.refused: list[tuple[int, str]] = []
        for member in members:
            share_refusals(member, self.refused)
        self._engines = tuple(engine for member in members for engine in member.engines)

    @property
    def engines(self) -> Sequence[Replica]:
        return self._engines

    @property
    def config(self) -> SchedulerConfig:
        return self._engines[0].config

    @property
    def num_unfinished(self) -> int:
        return sum(member.num_unfinished for member in self.members)

    @property
    def num_waiting(self) -> int:
        return sum(member.num_waiting for member in self.members)

    @property
    def num_running(self) -> int:
        return sum(member.num_running for member in self.members)

    @property
    def kv_cache_usage(self) -> float:
        """The mean of the members."""
        return sum(member.kv_cache_usage for member in self.members) / len(self.members)


class Pool(Several):
    """Independent endpoints. A routing rule chooses one for each request; the event that ends first happens first."""

    def __init__(self, members: Sequence[Endpoint], routing: Routing) -> None:
        super().__init__(members)
        self.now = 0.0
        self._router = Router(members, routing)
        self._first: Endpoint | None = None

    @property
    def is_between_events(self) -> bool:
        return all(member.is_between_events for member in self.members)

    def add(self, number: int, request: SimRequest, now: float) -> None:
        self._router.add(number, request, now)

    def plan_event(self, until: float = math.inf) -> float | None:
        """Plan the event that ends first; of several such events, that of the first member."""
        self._first, first = None, math.inf
        for member in self.members:
            end = member.plan_event()
            if end is not None and end < first:
                self._first, first = member, end
        return None if self._first is None else first

    def commit_event(self) -> list[int]:
        member = self._first
        assert member is not None
        finished = member.commit_event()
        self.now = member.now
        self._router.observe(member)
        return finished


class Router:
    """Sends requests to members by a routing rule, and reports the members' steps to the rule."""

    def __init__(self, members: Sequence[Endpoint], routing: Routing) -> None:
        self._members, self._routing = members, routing
        self._observing = routing if isinstance(routing, Observing) else None

    def add(self, number: int, request: SimRequest, now: float) -> None:
        """Send a request that arrives at `now` (seconds) to a member."""
        chosen = self._routing.choose(request, self._members, now)
        member = self._members[chosen]
        member.add(number, request, now)
        if self._observing is not None and member.is_between_events:
            self._observing.observe(chosen, member, now)

    def observe(self, member: Endpoint) -> None:
        """A member has completed an event."""
        if self._observing is not None:
            self._observing.observe(self._members.index(member), member, member.now)


def share_refusals(member: Endpoint, refused: list[tuple[int, str]]) -> None:
    """Let a member and its engines report refused requests in the list `refused`."""
    member.refused = refused
    for engine in member.engines:
        engine.refused = refused
