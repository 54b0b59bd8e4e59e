"""Workloads: generate requests from a trace, an arrival process, users that wait, or conversations.

    OpenLoop     requests arrive from a trace or by an arrival process, independent of the server
    ClosedLoop   N users, each with at most one request: the next one comes after the last one finished and a think time
    Sessions     conversations: the next prompt is the last prompt, its output and new text

Requests are made lazily. `first_arrivals` restarts the workload, and the same seed gives the same requests. Each
purpose has its own generator, made of (seed, purpose, user or session). Another draw for one purpose therefore changes
no other purpose, and a user's requests do not depend on when the server finishes other users' requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice, repeat
from typing import Protocol, TypeAlias

import numpy as np

from pointsman.sim.distributions import (
    Adapters,
    Arrivals,
    BurstArrivals,
    Constant,
    ConstantArrivals,
    Distribution,
    Empirical,
    Exponential,
    GammaArrivals,
    LogNormal,
    Mixture,
    PoissonArrivals,
    Uniform,
    WorkloadError,
    parse_adapters,
    parse_arrivals,
    parse_distribution,
    sample_lengths,
)
from pointsman.sim.request import EOS_TOKEN, SimRequest, Turn, blank_prompt, filler_token, prompt_tokens
from pointsman.traces import TraceRequest

__all__ = [
    "EOS_TOKEN",
    "Adapters",
    "Arrivals",
    "BurstArrivals",
    "ClosedLoop",
    "Constant",
    "ConstantArrivals",
    "Distribution",
    "Empirical",
    "Exponential",
    "GammaArrivals",
    "Generated",
    "Lengths",
    "LogNormal",
    "Mixture",
    "OpenLoop",
    "PoissonArrivals",
    "Sessions",
    "SimRequest",
    "Turn",
    "Uniform",
    "Workload",
    "WorkloadError",
    "blank_prompt",
    "filler_token",
    "parse_adapters",
    "parse_arrivals",
    "parse_distribution",
    "prompt_tokens",
    "with_adapters",
]

Arrival: TypeAlias = tuple[float, SimRequest]
"""A time in seconds on the virtual clock, and the request that arrives at this time."""

CHUNK = 1024
"""Number of values drawn in one call. Another size gives other workloads for the same seed."""

_ARRIVALS, _PROMPTS, _OUTPUTS, _THINKING, _TURNS, _STARTS, _ADAPTERS = range(7)
"""Numbers of the generators' purposes. A new purpose gets a new number, so that no other generator changes."""


class Workload(Protocol):
    """A source of requests and of their arrival times."""

    @property
    def num_requests(self) -> int | None:
        """The total number of requests; None: not known."""

    def first_arrivals(self) -> Iterator[Arrival]:
        """The arrivals from the beginning that depend on no other request, in order of time."""

    def on_finished(self, request: SimRequest, now: float) -> Arrival | None:
        """The arrival that follows a finished request, at `now` or later; None: no request follows. Called once for
        each request."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distributions of the numbers of prompt and output tokens, and the fields that all requests share."""

    prompt: Distribution
    output: Distribution
    max_tokens: int | None = None
    """The clients' `max_tokens`; longer drawn outputs are shortened to this length."""
    priority: int = 0
    tenant: str = ""
    adapters: Adapters | None = None
    """Popularity of the adapters (LoRA) of requests; None: no request has an adapter."""

    def requests(self, seed: int) -> Iterator[SimRequest]:
        """An endless iterator of requests, numbered from 0."""
        prompts, outputs = _generator(seed, _PROMPTS), _generator(seed, _OUTPUTS)
        adapters = _drawn_adapters(self.adapters, seed)
        index = 0
        while True:
            prompt_lens = sample_lengths(self.prompt, prompts, CHUNK).tolist()
            output_lens = sample_lengths(self.output, outputs, CHUNK).tolist()
            for prompt_len, output_len in zip(prompt_lens, output_lens, strict=True):
                yield SimRequest(
                    request_id=f"request-{index}",
                    num_prompt_tokens=prompt_len,
                    num_output_tokens=output_len,
                    max_tokens=self.max_tokens,
                    priority=self.priority,
                    tenant=self.tenant,
                    adapter=next(adapters),
                    index=index,
                )
                index += 1


@dataclass(frozen=True, slots=True)
class Generated:
    """Requests of drawn lengths, whose arrival times follow an arrival process; the first request arrives at 0
    seconds."""

    arrivals: Arrivals
    lengths: Lengths
    num_requests: int | None = None
    """Number of requests; None: endless, the simulation determines when to stop."""
    seed: int = 0

    def __post_init__(self) -> None:
        _check_count("num_requests", self.num_requests)


class OpenLoop:
    """Arrivals that do not depend on the server."""

    def __init__(self, source: Sequence[TraceRequest] | Generated, *, rate: float = 1.0) -> None:
        """
        Args:
            source: a trace, whose requests without output are left out (they failed), or generated requests.
            rate: factor by which requests arrive faster than in the source.

        Raises:
            WorkloadError: `rate` is not above 0.
        """
        if not 0 < rate < float("inf"):
            raise WorkloadError(f"rate is {rate}; it must be finite and above 0; 2 is twice as fast as the source")
        self._source = source
        self._rate = rate
        self.num_skipped = 0
        """Number of requests of the trace without output."""
        if not isinstance(source, Generated):
            self.num_skipped = sum(not request.num_output_tokens for request in source)

    @property
    def num_requests(self) -> int | None:
        if isinstance(self._source, Generated):
            return self._source.num_requests
        return len(self._source) - self.num_skipped

    def first_arrivals(self) -> Iterator[Arrival]:
        if isinstance(self._source, Generated):
            times = _arrival_times(self._source.arrivals, self._source.seed)
            requests = self._source.lengths.requests(self._source.seed)
            pairs = zip(times, requests, strict=False)  # both are endless
            for time, request in islice(pairs, self._source.num_requests):
                yield time / self._rate, request
            return
        for index, traced in _requests_with_output(self._source):
            yield traced.arrival_time / self._rate, _from_trace(traced, index)

    def on_finished(self, request: SimRequest, now: float) -> None:
        return None


class ClosedLoop:
    """Users with at most one request each. They begin at 0 seconds, or within their first thinking time.

    The requests are the same, in the same order, for any assignment to users; thinking times are each user's own.
    """

    def __init__(
        self,
        users: int,
        source: Sequence[TraceRequest] | Lengths,
        *,
        think: Distribution = Constant(0.0),  # noqa: B008  it is frozen
        num_requests: int | None = None,
        seed: int = 0,
        is_spread: bool = False,
    ) -> None:
        """
        Args:
            users: the number of users, so the maximum number of requests at a time.
            source: lengths to draw, or a trace; its arrival times and requests without output are ignored.
            think: seconds between the end of a request and the next one of its user.
            num_requests: number of requests after which to stop; None: stop at the end of the trace, or never.
            seed: seed of lengths and thinking times.
            is_spread: each user begins at a random time within its first thinking time, as in a steady state;
                otherwise all users begin at 0 seconds.

        Raises:
            WorkloadError: there are no users or no requests.
        """
        _check_count("users", users)
        _check_count("num_requests", num_requests)
        self._num_users = users
        self._source = source
        self._think = think
        self._seed = seed
        self._is_spread = is_spread
        self.num_requests = num_requests
        if not isinstance(source, Lengths):
            available = sum(request.num_output_tokens > 0 for request in source)
            self.num_requests = available if num_requests is None else min(num_requests, available)
        self._start_requests()

    def first_arrivals(self) -> Iterator[Arrival]:
        self._start_requests()
        for user, time in self._user_start_times():
            request = next(self._requests, None)
            if request is None:
                return
            self._users[request.index] = user
            yield time, request

    def _user_start_times(self) -> list[tuple[int, float]]:
        """(user, time in seconds at which the user begins) of all users, in order of time."""
        users = range(self._num_users)
        if not self._is_spread:
            return [(user, 0.0) for user in users]
        moments = _generator(self._seed, _STARTS).random(self._num_users)
        times = [
            moment * next(self._thinking_times(user)) for user, moment in zip(users, moments.tolist(), strict=True)
        ]
        return sorted(zip(users, times, strict=True), key=lambda start: start[1])

    def on_finished(self, request: SimRequest, now: float) -> Arrival | None:
        user = self._users.pop(request.index)
        following = next(self._requests, None)
        if following is None:
            return None
        self._users[following.index] = user
        return now + next(self._thinking_times(user)), following

    def _thinking_times(self, user: int) -> Iterator[float]:
        if user not in self._thinking:
            self._thinking[user] = _drawn_values(self._think, _generator(self._seed, _THINKING, user))
        return self._thinking[user]

    def _start_requests(self) -> None:
        self._requests = islice(self._all_requests(), self.num_requests)
        self._users: dict[int, int] = {}  # users by their unfinished request
        self._thinking: dict[int, Iterator[float]] = {}

    def _all_requests(self) -> Iterator[SimRequest]:
        if isinstance(self._source, Lengths):
            yield from self._source.requests(self._seed)
        else:
            for index, traced in _requests_with_output(self._source):
                yield _from_trace(traced, index)


@dataclass(slots=True)
class _Session:
    """A conversation in progress: its planned turns, and the current one."""

    name: str
    new_lens: list[int]
    """Number of new prompt tokens of each turn."""
    output_lens: list[int]
    think_times: list[float]
    """Seconds before each turn but the first."""
    adapter: int | None = None
    turns: tuple[Turn, ...] = ()


@dataclass(slots=True, kw_only=True)
class Sessions:
    """Conversations. A prompt is the session's last prompt, the output that it got, and new text."""

    arrivals: Arrivals
    """Arrivals of sessions; the first one is at 0 seconds."""
    num_turns: Distribution
    """Number of requests of a session: rounded, at least 1."""
    first_prompt: Distribution
    """Number of tokens of the first prompt after the system prompt."""
    new_text: Distribution
    """Number of tokens that each later prompt adds."""
    output: Distribution
    think: Distribution = field(default_factory=lambda: Constant(0.0))
    """Seconds from the end of an output to the next request."""
    system_prompt: int = 0
    """Length of the common prefix of all prompts, in tokens."""
    num_sessions: int | None = None
    """Number of sessions; None: endless, the simulation determines when to stop."""
    max_tokens: int | None = None
    max_total_tokens: int | None = None
    """Maximum tokens of a prompt and its output: a session ends before a request that would exceed it; None: no
    limit."""
    priority: int = 0
    tenant: str = ""
    retention: float | None = None
    """Retention of every request except the last one of a session, see `SimRequest.retention`."""
    adapters: Adapters | None = None
    """Popularity of the adapters (LoRA) of sessions; None: no session has an adapter."""
    seed: int = 0
    _sessions: dict[int, _Session] = field(default_factory=dict, init=False, repr=False)
    """Sessions by the index of their last request."""
    _indices: Iterator[int] = field(default_factory=count, init=False, repr=False)

    def __post_init__(self) -> None:
        _check_count("num_sessions", self.num_sessions)
        if self.system_prompt < 0:
            raise WorkloadError(f"system_prompt is {self.system_prompt}; it must be at least 0 tokens")

    @property
    def num_requests(self) -> int | None:
        """The total number of requests. None: there is no `num_sessions`, or `max_total_tokens` may end a session
        early."""
        if self.num_sessions is None or self.max_total_tokens is not None:
            return None
        return sum(self._draw_turns(number) for number in range(self.num_sessions))

    def first_arrivals(self) -> Iterator[Arrival]:
        self._sessions, self._indices = {}, count()
        times = _arrival_times(self.arrivals, self.seed)
        for number, time in enumerate(islice(times, self.num_sessions)):
            request = self._next_request(self._make_session(number))
            if request is not None:
                yield time, request

    def on_finished(self, request: SimRequest, now: float) -> Arrival | None:
        session = self._sessions.pop(request.index)
        known = sum(turn.num_new_tokens + turn.num_output_tokens for turn in session.turns)
        new_tokens = request.num_prompt_tokens - self.system_prompt - known
        session.turns = (*session.turns, Turn(request.index, new_tokens, request.num_generated_tokens))
        following = self._next_request(session)
        return None if following is None else (now + session.think_times[len(session.turns) - 1], following)

    def _next_request(self, session: _Session) -> SimRequest | None:
        turn = len(session.turns)
        if turn == len(session.new_lens):
            return None
        known = sum(each.num_new_tokens + each.num_output_tokens for each in session.turns)
        prompt_len, output_len = self.system_prompt + known + session.new_lens[turn], session.output_lens[turn]
        if self.max_total_tokens is not None and prompt_len + output_len > self.max_total_tokens:
            return None
        index = next(self._indices)
        self._sessions[index] = session
        return SimRequest(
            request_id=f"{session.name}-turn-{turn}",
            num_prompt_tokens=prompt_len,
            num_output_tokens=output_len,
            block_hash_ids=(0,) if self.system_prompt else (),
            hash_block_size=self.system_prompt or 512,
            max_tokens=self.max_tokens,
            priority=self.priority,
            tenant=self.tenant,
            retention=self.retention if turn + 1 < len(session.new_lens) else None,
            session=session.name,
            adapter=session.adapter,
            index=index,
            turns=session.turns,
        )

    def _draw_turns(self, session_number: int) -> int:
        return int(sample_lengths(self.num_turns, _generator(self.seed, _TURNS, session_number), 1)[0])

    def _make_session(self, session_number: int) -> _Session:
        turns = self._draw_turns(session_number)
        prompts = _generator(self.seed, _PROMPTS, session_number)
        first = sample_lengths(self.first_prompt, prompts, 1).tolist()
        return _Session(
            name=f"session-{session_number}",
            new_lens=first + sample_lengths(self.new_text, prompts, turns - 1).tolist(),
            output_lens=sample_lengths(self.output, _generator(self.seed, _OUTPUTS, session_number), turns).tolist(),
            think_times=self.think.sample(_generator(self.seed, _THINKING, session_number), turns - 1).tolist(),
            adapter=next(_drawn_adapters(self.adapters, self.seed, session_number)),
        )


# ---------------------------------------------------------------------- draws


def _generator(seed: int, *purpose: int) -> np.random.Generator:
    """The random generator of one purpose, independent of all other generators."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=purpose)))


def with_adapters(trace: Sequence[TraceRequest], adapters: Adapters, seed: int) -> list[TraceRequest]:
    """The requests of a trace, each with an adapter that is drawn by its popularity."""
    drawn = _drawn_adapters(adapters, seed)
    return [replace(request, adapter=next(drawn)) for request in trace]


def _drawn_adapters(adapters: Adapters | None, seed: int, *purpose: int) -> Iterator[int | None]:
    """An endless iterator of adapters; of None if there are none."""
    if adapters is None:
        yield from repeat(None)
    else:
        rng = _generator(seed, _ADAPTERS, *purpose)
        while True:
            yield from adapters.sample(rng, CHUNK if not purpose else 1).tolist()


def _drawn_values(distribution: Distribution, rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from distribution.sample(rng, 64).tolist()


def _arrival_times(arrivals: Arrivals, seed: int) -> Iterator[float]:
    """An endless iterator of arrival times in seconds; the first one is 0."""
    rng = _generator(seed, _ARRIVALS)
    size = CHUNK
    if isinstance(arrivals, BurstArrivals):  # a chunk holds whole bursts
        size = -(-CHUNK // int(arrivals.size)) * int(arrivals.size)
    start = 0.0
    is_first = True
    while True:
        gaps = arrivals.gaps(rng, size)
        if is_first:
            gaps[0], is_first = 0.0, False
        times = start + np.cumsum(gaps)
        start = float(times[-1])
        yield from times.tolist()


def _requests_with_output(trace: Sequence[TraceRequest]) -> Iterator[tuple[int, TraceRequest]]:
    """(index, request) of each request of the trace that has output."""
    return enumerate(request for request in trace if request.num_output_tokens)


def _from_trace(traced: TraceRequest, index: int) -> SimRequest:
    return SimRequest(
        request_id=f"request-{index}",
        num_prompt_tokens=traced.num_prompt_tokens,
        num_output_tokens=traced.num_output_tokens,
        block_hash_ids=traced.block_hash_ids,
        hash_block_size=traced.hash_block_size,
        max_tokens=traced.max_tokens,
        priority=traced.priority,
        retention=traced.retention,
        adapter=traced.adapter,
        index=index,
    )


def _check_count(name: str, value: int | None) -> None:
    if value is not None and value < 1:
        raise WorkloadError(f"{name} is {value}; it must be at least 1")
