"""Samples: repeatable workloads that differ by chance, at a given load, of requests, users, sessions and traces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pointsman.sim.request import SimRequest
from pointsman.sim.samples import (
    MAX_OF_USERS,
    MAX_SHARED,
    REQUESTS_PER_USER,
    TRACE_BLOCKS,
    WARM_UP,
    WARM_UP_OF_TRACE,
    GeneratedSamples,
    Samples,
    SessionSamples,
    TraceSamples,
    TraceUserSamples,
    UserSamples,
    stretch_of,
)
from pointsman.sim.trial import Drawn, Part
from pointsman.sim.workload import Constant, Exponential, Lengths, LogNormal, PoissonArrivals, Sessions
from pointsman.traces import TraceRequest

LENGTHS = Lengths(LogNormal(100, 0.8), LogNormal(10, 0.8))
GENERATED = GeneratedSamples(PoissonArrivals(4), LENGTHS, seed=7)
USERS = UserSamples(LENGTHS, Exponential(5), seed=7)


def trace(count: int, block: tuple[int, ...] = ()) -> list[TraceRequest]:
    return [
        TraceRequest(arrival_time=2.0 * place, num_prompt_tokens=100 + place, num_output_tokens=5, block_hash_ids=block)
        for place in range(count)
    ]


def session_samples() -> SessionSamples:
    arrivals = PoissonArrivals(1)
    sessions = Sessions(
        arrivals=arrivals, num_turns=Constant(5), first_prompt=Constant(50), new_text=Constant(10), output=Constant(5)
    )
    return SessionSamples(sessions, arrivals)


TRACED = TraceSamples(trace(400), rate=0.5)
TRACED_USERS = TraceUserSamples(trace(400), Exponential(5), seed=7)


def first(drawn: Drawn) -> list[tuple[float, SimRequest]]:
    return list(drawn.workload.first_arrivals())


def lengths(requests: Sequence[tuple[float, SimRequest]]) -> list[tuple[float, int, int]]:
    return [(time, request.num_prompt_tokens, request.num_output_tokens) for time, request in requests]


def rate(requests: Sequence[tuple[float, SimRequest]]) -> float:
    return (len(requests) - 1) / (requests[-1][0] - requests[0][0])


@pytest.mark.parametrize(
    "samples", [GENERATED, USERS, TRACED, TRACED_USERS, session_samples()], ids=lambda it: type(it).__name__
)
def test_equal_parts_are_equal_and_others_differ(samples: Samples) -> None:
    one, same, other = (lengths(first(samples.draw(Part(number, 100), 3.0))) for number in (2, 2, 3))
    assert one == same != other


@pytest.mark.parametrize(("samples", "factor"), [(GENERATED, 1), (session_samples(), 5)], ids=["requests", "sessions"])
def test_requests_arrive_at_the_given_rate(samples: Samples, factor: int) -> None:
    """Of a session only the first of five requests arrives by itself."""
    arrivals = first(samples.draw(Part(0, 5000), 12.0))
    assert len(arrivals) == 5000 // factor
    assert rate(arrivals) * factor == pytest.approx(12.0, rel=0.1)
    slower = first(samples.draw(Part(0, 5000), 3.0))
    assert [time * 4 for time, _ in arrivals] == pytest.approx([time for time, _ in slower])


def test_a_stretch_of_a_trace_keeps_its_own_rate_relative_to_the_trace() -> None:
    """The first half of this trace has twice the rate of the second half."""
    times = [*range(100), *range(100, 300, 2)]
    requests = [TraceRequest(arrival_time=float(time), num_prompt_tokens=9, num_output_tokens=1) for time in times]
    samples = TraceSamples(requests, rate=(len(times) - 1) / 298)
    assert rate(first(samples.draw(Part(0, 50), samples.rate))) == pytest.approx(1.0)
    speeds = [rate(first(samples.draw(Part(number, 50), 10 * samples.rate))) for number in (0, 1, 2, 3)]
    assert max(speeds) == pytest.approx(10.0) and min(speeds) == pytest.approx(5.0)


def test_stretches_are_spread_evenly_and_more_of_them_keep_those_before() -> None:
    requests = trace(1100)
    starts = [int(stretch_of(requests, Part(number, 100))[0].arrival_time / 2) for number in range(8)]
    assert starts[:4] == [0, 500, 250, 750]
    assert sorted(starts) == [0, 125, 250, 375, 500, 625, 750, 875]
    assert all(len(stretch_of(requests, Part(number, 100))) == 100 for number in range(8))


@pytest.mark.parametrize(
    ("samples", "wanted", "length"),
    [
        (GENERATED, 700, 700),
        (USERS, 700, 700),
        (session_samples(), 700, 700),
        (TRACED, 20, 20),
        (TRACED, 100, 400),
        (TRACED_USERS, 100, 400),
        (TraceSamples(trace(400, (1, 2)), 0.5), 20, 400),
    ],
    ids=["generated", "users", "sessions", "long trace", "short trace", "users of a trace", "shared prefixes"],
)
def test_short_traces_and_shared_prefixes_are_simulated_whole(samples: Samples, wanted: int, length: int) -> None:
    assert samples.fit_length(wanted, num_samples=8) == length


def test_a_large_trace_with_shared_prefixes_is_cut_into_stretches() -> None:
    request = TraceRequest(arrival_time=0.0, num_prompt_tokens=9, num_output_tokens=1, block_hash_ids=(1,))
    assert TraceSamples([request] * (MAX_SHARED + 1), 1.0).fit_length(600, 8) == 600


def test_the_first_arrivals_do_not_count() -> None:
    assert GENERATED.draw(Part(0, 100), 4.0).begin == WARM_UP
    assert TRACED.draw(Part(0, 100), 4.0).begin == WARM_UP
    whole = TRACED.draw(Part(0, 400), 4.0)
    assert (whole.begin, whole.num_blocks) == (WARM_UP_OF_TRACE, TRACE_BLOCKS)
    assert USERS.draw(Part(0, 100), 4.0).end < 1 == GENERATED.draw(Part(0, 100), 4.0).end


@pytest.mark.parametrize("samples", [GENERATED, TRACED], ids=["generated", "trace"])
def test_a_backlog_arrives_first_and_does_not_count(samples: Samples) -> None:
    plain, after = samples.draw(Part(1, 60), 4.0), samples.draw(Part(1, 60, backlog=20), 4.0)
    before, counted = first(after)[:20], first(after)[20:]
    assert lengths(counted) == lengths(first(plain))
    assert {time for time, _ in before} == {counted[0][0]}
    assert len({request.index for _, request in first(after)}) == 80
    assert len({request.request_id for _, request in first(after)}) == 80
    assert after.workload.num_requests == 80
    assert after.begin * 80 == pytest.approx(20 + WARM_UP * 60)
    assert samples.has_backlog and not USERS.has_backlog


@pytest.mark.parametrize(("users", "count"), [(1, 100), (40, 40 * REQUESTS_PER_USER), (3000, MAX_OF_USERS)])
def test_each_user_sends_several_requests(users: int, count: int) -> None:
    drawn = USERS.draw(Part(0, 100), users)
    assert drawn.workload.num_requests == count
    arrivals = first(drawn)
    assert len(arrivals) == users
    assert all(time >= 0 for time, _ in arrivals)


def test_users_of_a_trace_send_the_requests_of_a_stretch() -> None:
    drawn = TRACED_USERS.draw(Part(1, 100), 8)
    assert drawn.workload.num_requests == 100
    sent = [request.num_prompt_tokens for _, request in first(drawn)]
    assert sent == [request.num_prompt_tokens for request in stretch_of(TRACED_USERS.trace, Part(1, 100))[:8]]
