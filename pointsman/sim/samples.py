"""Samples: workloads of one kind that differ by chance, so that a result over them has an interval.

    GeneratedSamples   requests of other seeds, at a rate
    SessionSamples     conversations of other seeds, at a rate of requests
    UserSamples        users who think between requests, of other seeds
    TraceSamples       stretches of a trace, at a rate; a short trace is one sample of several blocks
    TraceUserSamples   users who send the requests of a stretch of a trace

A service starts empty, so the first arrivals of a sample do not count. Users have no more requests at the end of a
sample, so their last arrivals do not count either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import ClassVar, Protocol

from pointsman.sim.distributions import Arrivals, Distribution
from pointsman.sim.request import MAX_INDEX, SimRequest
from pointsman.sim.trial import Drawn, Part
from pointsman.sim.workload import Arrival, ClosedLoop, Generated, Lengths, OpenLoop, Sessions
from pointsman.traces import TraceRequest

WARM_UP = 0.25
"""Share of the arrivals of a sample, from the first on, that do not count."""
WARM_UP_OF_TRACE = 0.05
"""The same for a whole trace, which has no other sample."""
END_OF_USERS = 0.8
"""Share of the arrivals of users after which none counts."""
NUM_HALVES = 2
"""Blocks of a sample, to compare the beginning of the counted part with its end."""
TRACE_BLOCKS = 10
"""Blocks of a trace that is one sample."""
_OTHER_SEEDS = 500_000
"""Difference between the seeds of a sample and of its backlog."""
MAX_SHARED = 25_000
"""Maximum number of requests of a trace with shared prefixes that is simulated as a whole."""
REQUESTS_PER_USER, MAX_OF_USERS = 10, 20_000
"""Number of generated requests for each user, and the maximum of all requests that are generated for this reason. With
more users, each sends fewer."""


class Samples(Protocol):
    """A source whose parts are samples. The load is a number of requests a second, or a number of users."""

    @property
    def num_available(self) -> int | None:
        """Number of different requests of all samples together; None: no limit."""

    @property
    def has_backlog(self) -> bool:
        """Whether a sample can begin with a backlog, `Part.backlog`."""

    def fit_length(self, num_requests: int, num_samples: int) -> int:
        """The number of requests of a sample, if `num_requests` are wanted. Of a trace: all, if so many samples would
        need all of them, or if its prompts share prefixes, which a stretch of it would not find in the cache."""

    def draw(self, part: Part, load: float) -> Drawn:
        """The workload of a sample. `part.num_requests` is its number of requests, those that do not count included."""


class _Endless:
    """Samples of any number and length."""

    __slots__ = ()
    num_available: ClassVar[None] = None

    def fit_length(self, num_requests: int, num_samples: int) -> int:
        return num_requests


@dataclass(frozen=True, slots=True)
class GeneratedSamples(_Endless):
    """Requests of drawn lengths, whose arrival times follow an arrival process."""

    arrivals: Arrivals
    lengths: Lengths
    seed: int = 0
    """Seed of the first sample."""
    has_backlog: ClassVar[bool] = True

    def draw(self, part: Part, load: float) -> Drawn:
        generated = Generated(self.arrivals, self.lengths, part.num_requests, self.seed + part.number)
        others = islice(self.lengths.requests(self.seed + part.number + _OTHER_SEEDS), part.backlog)
        return _after_backlog(OpenLoop(generated, rate=load / self.arrivals.rate), part, list(others))


@dataclass(frozen=True, slots=True)
class SessionSamples(_Endless):
    """Conversations. The load is the mean number of requests a second, of all turns."""

    sessions: Sessions
    arrivals: Arrivals
    """Arrivals of sessions."""
    has_backlog: ClassVar[bool] = False

    def draw(self, part: Part, load: float) -> Drawn:
        turns = max(1.0, self.sessions.num_turns.mean())
        sessions = replace(
            self.sessions,
            arrivals=replace(self.arrivals, rate=load / turns),  # type: ignore[type-var]  # all have a rate
            num_sessions=max(1, round(part.num_requests / turns)),
            seed=self.sessions.seed + part.number,
        )
        return Drawn(sessions, WARM_UP, num_blocks=NUM_HALVES)


@dataclass(frozen=True, slots=True)
class UserSamples(_Endless):
    """Users who think between requests. The load is the number of users."""

    lengths: Lengths
    think: Distribution
    seed: int = 0
    has_backlog: ClassVar[bool] = False

    def draw(self, part: Part, load: float) -> Drawn:
        users = max(1, round(load))
        count = max(part.num_requests, min(REQUESTS_PER_USER * users, MAX_OF_USERS))
        seed = self.seed + part.number
        loop = ClosedLoop(users, self.lengths, think=self.think, num_requests=count, seed=seed, is_spread=True)
        return Drawn(loop, WARM_UP, END_OF_USERS, NUM_HALVES)


@dataclass(frozen=True, slots=True)
class TraceSamples:
    """Stretches of a trace, sped up or slowed down. The load is the mean rate of the whole trace: a stretch with more
    arrivals than others has a higher rate."""

    trace: Sequence[TraceRequest]
    rate: float
    """Mean requests a second of the trace."""
    has_backlog: ClassVar[bool] = True

    @property
    def num_available(self) -> int:
        return len(self.trace)

    def fit_length(self, num_requests: int, num_samples: int) -> int:
        return _fit_trace(self.trace, num_requests, num_samples)

    def draw(self, part: Part, load: float) -> Drawn:
        speed = load / self.rate
        if part.num_requests >= len(self.trace):
            return Drawn(OpenLoop(self.trace, rate=speed), WARM_UP_OF_TRACE, num_blocks=TRACE_BLOCKS)
        others = [request for _, request in islice(OpenLoop(self.trace[::-1]).first_arrivals(), part.backlog)]
        return _after_backlog(OpenLoop(stretch_of(self.trace, part), rate=speed), part, others)


@dataclass(frozen=True, slots=True)
class TraceUserSamples:
    """Users who send the requests of a stretch of a trace. The load is the number of users."""

    trace: Sequence[TraceRequest]
    think: Distribution
    seed: int = 0
    has_backlog: ClassVar[bool] = False

    @property
    def num_available(self) -> int:
        return len(self.trace)

    def fit_length(self, num_requests: int, num_samples: int) -> int:
        return _fit_trace(self.trace, num_requests, num_samples)

    def draw(self, part: Part, load: float) -> Drawn:
        is_whole = part.num_requests >= len(self.trace)
        source = self.trace if is_whole else stretch_of(self.trace, part)
        seed = self.seed + part.number
        loop = ClosedLoop(max(1, round(load)), source, think=self.think, seed=seed, is_spread=True)
        return Drawn(loop, WARM_UP, END_OF_USERS, TRACE_BLOCKS if is_whole else NUM_HALVES)


class _AfterBacklog:
    """Arrivals that find a backlog: other requests arrive together with the first of them."""

    def __init__(self, workload: OpenLoop, backlog: Sequence[SimRequest]) -> None:
        self._workload, self._backlog = workload, backlog
        count = workload.num_requests
        self.num_requests = None if count is None else count + len(backlog)

    def first_arrivals(self) -> Iterator[Arrival]:
        arrivals = self._workload.first_arrivals()
        first = next(arrivals)
        for request in self._backlog:  # other indices than those of the workload: its prompts have other tokens
            yield first[0], replace(request, request_id=f"before-{request.index}", index=request.index + MAX_INDEX // 2)
        yield first
        yield from arrivals

    def on_finished(self, request: SimRequest, now: float) -> None:
        return None


def _after_backlog(workload: OpenLoop, part: Part, backlog: Sequence[SimRequest]) -> Drawn:
    if not backlog:
        return Drawn(workload, WARM_UP, num_blocks=NUM_HALVES)
    before = len(backlog) + WARM_UP * part.num_requests
    begin = before / (len(backlog) + part.num_requests)
    return Drawn(_AfterBacklog(workload, backlog), begin, num_blocks=NUM_HALVES)


def _fit_trace(trace: Sequence[TraceRequest], num_requests: int, num_samples: int) -> int:
    if len(trace) <= num_samples * num_requests * (1 - WARM_UP):
        return len(trace)
    if len(trace) <= MAX_SHARED and any(request.block_hash_ids for request in trace):
        return len(trace)
    return num_requests


def stretch_of(trace: Sequence[TraceRequest], part: Part) -> Sequence[TraceRequest]:
    """Consecutive requests of a trace. The starts of the parts 0, 1, 2, ... follow van der Corput's sequence: any
    number of parts is spread evenly over the trace, and more parts keep those before."""
    place, scale, number = 0.0, 0.5, part.number
    while number:
        place += scale * (number & 1)
        number >>= 1
        scale /= 2
    start = int(place * (len(trace) - part.num_requests))
    return trace[start : start + part.num_requests]
