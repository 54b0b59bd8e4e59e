"""Workloads of scenarios: streams of generated requests, several of them together.

A stream's `tenant` is its name: figures can be read for one stream (`Run.is_of_streams`). Short names of distributions
and arrival processes are those of `distributions.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from pointsman.sim.distributions import parse_arrivals, parse_distribution
from pointsman.sim.request import SimRequest
from pointsman.sim.workload import Arrival, Generated, Lengths, OpenLoop, Sessions, Workload

AT_ONCE = "constant:1e9"
"""Arrival process of a backlog: all requests arrive at one time."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Requests of one kind that begin at a given time."""

    name: str
    num_requests: int
    prompt: str
    output: str
    arrivals: str = AT_ONCE
    start: float = 0.0
    """Seconds until the first request."""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Streams:
    """Several streams combined into one open-loop workload."""

    streams: tuple[Stream, ...]
    seed: int = 0

    @property
    def num_requests(self) -> int:
        return sum(stream.num_requests for stream in self.streams)

    def first_arrivals(self) -> Iterator[Arrival]:
        indices = count()
        parts = [self._arrivals(stream, number) for number, stream in enumerate(self.streams)]
        for time, request in heapq.merge(*parts, key=lambda arrival: arrival[0]):
            index = next(indices)
            yield time, replace(request, index=index, request_id=f"{request.tenant}-{index}")

    def on_finished(self, request: SimRequest, now: float) -> None:
        return None

    def _arrivals(self, stream: Stream, number: int) -> Iterator[Arrival]:
        lengths = Lengths(
            parse_distribution(stream.prompt),
            parse_distribution(stream.output),
            priority=stream.priority,
            tenant=stream.name,
        )
        seed = self.seed * 64 + number  # each stream has its own draws
        generated = Generated(parse_arrivals(stream.arrivals), lengths, stream.num_requests, seed)
        for time, request in OpenLoop(generated).first_arrivals():
            yield stream.start + time, request


def backlog(num_requests: int, prompt: str, output: str, seed: int) -> Workload:
    """Requests that all arrive at the start."""
    return Streams((Stream("backlog", num_requests, prompt, output),), seed)


def arriving(num_requests: int, arrivals: str, prompt: str, output: str, seed: int) -> Workload:
    """Requests that arrive one after the other."""
    return Streams((Stream("arriving", num_requests, prompt, output, arrivals),), seed)


def conversations(
    num_sessions: int,
    arrivals: str,
    *,
    system_prompt: int,
    turns: str,
    first_prompt: str,
    new_text: str,
    output: str,
    think: str,
    seed: int,
) -> Workload:
    """Sessions whose prompts all begin with the same system prompt."""
    return Sessions(
        arrivals=parse_arrivals(arrivals),
        num_turns=parse_distribution(turns),
        first_prompt=parse_distribution(first_prompt),
        new_text=parse_distribution(new_text),
        output=parse_distribution(output),
        think=parse_distribution(think),
        system_prompt=system_prompt,
        num_sessions=num_sessions,
        seed=seed,
    )
