"""Workloads: arrival times, lengths, and the tokens of prompts."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from pointsman.core.state.tokens import shared_prompt
from pointsman.sim.request import MAX_INDEX
from pointsman.sim.workload import (
    EOS_TOKEN,
    Arrivals,
    BurstArrivals,
    ClosedLoop,
    Constant,
    ConstantArrivals,
    Distribution,
    Empirical,
    Exponential,
    GammaArrivals,
    Generated,
    Lengths,
    LogNormal,
    Mixture,
    OpenLoop,
    PoissonArrivals,
    Sessions,
    SimRequest,
    Turn,
    Uniform,
    Workload,
    WorkloadError,
    blank_prompt,
    filler_token,
    parse_arrivals,
    parse_distribution,
    prompt_tokens,
)
from pointsman.traces import TraceRequest, read_trace

TRACES = Path(__file__).parents[3] / "shared" / "traces"
LENGTHS = Lengths(LogNormal(200, 0.5), Uniform(1, 50))
VOCABULARY = 32_000


def run(
    workload: Workload, latency: Callable[[SimRequest], float], limit: int = 10_000
) -> list[tuple[float, float, SimRequest]]:
    """(arrival, finish, request) by arrival, from a server that takes `latency(request)` seconds for each."""
    events: list[tuple[float, int, bool, SimRequest]] = []
    order = count()
    first = iter(workload.first_arrivals())
    done: list[tuple[float, float, SimRequest]] = []
    pending = next(first, None)
    while (pending or events) and len(done) < limit:
        if pending and (not events or pending[0] <= events[0][0]):
            heapq.heappush(events, (pending[0], next(order), True, pending[1]))
            pending = next(first, None)
            continue
        now, _, arrives, request = heapq.heappop(events)
        if arrives:
            finish = now + latency(request)
            done.append((now, finish, request))
            heapq.heappush(events, (finish, next(order), False, request))
        elif (following := workload.on_finished(request, now)) is not None:
            assert following[0] >= now
            heapq.heappush(events, (following[0], next(order), True, following[1]))
    return done


def max_at_once(done: list[tuple[float, float, SimRequest]]) -> int:
    changes = sorted([(finish, -1) for _, finish, _ in done] + [(arrival, 1) for arrival, _, _ in done])
    return int(np.cumsum([change for _, change in changes]).max())


def by_length(request: SimRequest) -> float:
    return 0.5 + 0.01 * request.num_output_tokens


# ---------------------------------------------------------------------- distributions


@pytest.mark.parametrize(
    ("text", "expected", "mean"),
    [
        ("7", Constant(7), 7),
        ("constant:7", Constant(7), 7),
        (" Uniform:10,30", Uniform(10, 30), 20),
        ("exponential:5", Exponential(5), 5),
        ("lognormal:150,0.8", LogNormal(150, 0.8), 150 * math.exp(0.32)),
        ("values:1,2,6", Empirical((1, 2, 6)), 3),
        (
            "mix:0.7*lognormal:150,0.6+3e-1*constant:3e+3",
            Mixture(((0.7, LogNormal(150, 0.6)), (0.3, Constant(3000)))),
            0.7 * 150 * math.exp(0.18) + 900,
        ),
    ],
)
def test_parse_distribution_reads_every_short_name(text: str, expected: Distribution, mean: float) -> None:
    distribution = parse_distribution(text)
    assert distribution == expected
    assert distribution.mean() == pytest.approx(mean)
    drawn = distribution.sample(np.random.default_rng(1), 50_000)
    assert drawn.shape == (50_000,) and drawn.dtype == np.float64 and drawn.min() >= 0
    assert drawn.mean() == pytest.approx(mean, rel=0.03)


def test_samples_have_lognormal_quantiles_and_mixture_shares() -> None:
    drawn = LogNormal(150, 0.8).sample(np.random.default_rng(2), 50_000)
    assert np.median(drawn) == pytest.approx(150, rel=0.02)
    assert np.log(drawn).std() == pytest.approx(0.8, rel=0.02)
    mixed = parse_distribution("mix:0.25*1+0.75*constant:2").sample(np.random.default_rng(3), 100_000)
    assert np.mean(mixed == 1) == pytest.approx(0.25, abs=0.01)
    assert set(mixed) == {1.0, 2.0}


@pytest.mark.parametrize(
    ("text", "expected", "cv"),
    [
        ("constant:4", ConstantArrivals(4), 0),
        ("poisson:4", PoissonArrivals(4), 1),
        ("gamma:4,2", GammaArrivals(4, 2), 2),
        ("gamma:4,0.5", GammaArrivals(4, 0.5), 0.5),
        ("bursts:4,10", BurstArrivals(4, 10), math.sqrt(19)),  # gaps: one exponential of mean 10/4, then nine of 0
    ],
)
def test_parse_arrivals_reads_every_short_name(text: str, expected: Arrivals, cv: float) -> None:
    assert parse_arrivals(text) == expected
    generated = Generated(expected, Lengths(Constant(1), Constant(1)), num_requests=10_000, seed=5)
    times = np.array([time for time, _ in OpenLoop(generated).first_arrivals()])
    gaps = np.diff(times)
    assert times[0] == 0.0 and gaps.min() >= 0
    assert gaps.mean() == pytest.approx(0.25, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_requests_of_a_burst_arrive_at_one_time() -> None:
    generated = Generated(BurstArrivals(5, 7), LENGTHS, num_requests=7 * 300)
    times = [time for time, _ in OpenLoop(generated).first_arrivals()]
    assert len(set(times)) == 300
    assert all(len(set(times[at : at + 7])) == 1 for at in range(0, len(times), 7))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("lognorml:1,2", "unknown form 'lognorml'; did you mean lognormal? known forms are constant, uniform"),
        ("lognormal:150", "has 1 values, but needs 2; write lognormal:median,sigma"),
        ("lognormal:150,x", "'x' is not a number"),
        ("lognormal:0,1", "median is 0; it must be finite and above 0"),
        ("uniform:9,3", "high is 3; it must be finite and at least 9"),
        ("constant:-1", "value is -1; it must be finite and at least 0"),
        ("constant:inf", "inf is not finite"),
        ("long", "'long' is not a number"),
        ("mix:0.7*constant:1+0.2*constant:3", "must be positive and add up to 1"),
        ("mix:constant:1", "is not PROBABILITY*DISTRIBUTION"),
        ("values:", "values needs one or more numbers"),
    ],
)
def test_invalid_distributions_are_refused(text: str, wrong: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_distribution(text)
    assert wrong in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("poison:3", "unknown form 'poison'; did you mean poisson? known forms are constant, poisson, gamma, bursts"),
        ("poisson:0", "rate is 0"),
        ("gamma:3", "write gamma:rate,cv"),
        ("bursts:3,2.5", "size is 2.5; it must be a whole number"),
    ],
)
def test_invalid_arrival_processes_are_refused(text: str, wrong: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        parse_arrivals(text)
    assert wrong in str(caught.value)


# ---------------------------------------------------------------------- open loop


def test_a_trace_is_sped_up_and_failed_requests_are_left_out() -> None:
    trace = [TraceRequest(0.0, 5, 2), TraceRequest(1.0, 6, 0), TraceRequest(4.0, 7, 3, (1,), 16, 9, -1)]
    workload = OpenLoop(trace, rate=2)
    (_, first), (time, second) = workload.first_arrivals()
    assert (workload.num_requests, workload.num_skipped) == (2, 1)
    assert (first.num_prompt_tokens, first.index, time) == (5, 0, 2.0)
    assert second == SimRequest("request-1", 7, 3, (1,), 16, max_tokens=9, priority=-1, index=1)
    assert workload.on_finished(first, 1.0) is None


def test_generated_requests_are_lazy_and_reproducible() -> None:
    endless = OpenLoop(Generated(PoissonArrivals(3), LENGTHS, seed=8))
    assert endless.num_requests is None
    first = list(islice(endless.first_arrivals(), 3000))
    assert first == list(islice(endless.first_arrivals(), 3000))
    lengths = np.array([[r.num_prompt_tokens, r.num_output_tokens] for _, r in first])
    assert np.median(lengths[:, 0]) == pytest.approx(200, rel=0.05)
    assert lengths[:, 1].min() >= 1 and lengths[:, 1].max() <= 50
    other = list(islice(OpenLoop(Generated(PoissonArrivals(3), LENGTHS, seed=9)).first_arrivals(), 3000))
    assert [time for time, _ in other] != [time for time, _ in first]


def test_changed_arrivals_keep_prompts_and_changed_prompts_keep_arrivals() -> None:
    """With other prompt lengths, arrivals and outputs stay the same; with other arrivals, all requests stay the
    same."""
    base = Generated(PoissonArrivals(3), LENGTHS, num_requests=2000)
    changed = replace(base, lengths=replace(LENGTHS, prompt=parse_distribution("mix:0.5*10+0.5*lognormal:9,1")))
    slower = replace(base, arrivals=GammaArrivals(1, 3))
    one, two, three = (list(OpenLoop(source).first_arrivals()) for source in (base, changed, slower))
    assert [(time, r.num_output_tokens) for time, r in one] == [(time, r.num_output_tokens) for time, r in two]
    assert [r for _, r in one] == [r for _, r in three]
    assert [r.num_prompt_tokens for _, r in one] != [r.num_prompt_tokens for _, r in two]


@pytest.mark.parametrize("make", [
    lambda: OpenLoop([], rate=0),
    lambda: Generated(PoissonArrivals(1), LENGTHS, num_requests=0),
    lambda: ClosedLoop(0, LENGTHS),
    lambda: Sessions(arrivals=PoissonArrivals(1), num_turns=Constant(2), first_prompt=Constant(1), new_text=Constant(1),
                     output=Constant(1), system_prompt=-1),
])  # fmt: skip
def test_invalid_workloads_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(WorkloadError, match="it must be"):
        make()


# ---------------------------------------------------------------------- closed loop


@pytest.mark.parametrize("think", [Constant(0), Exponential(2)])
def test_a_closed_loop_of_n_users_has_at_most_n_requests_in_flight(think: Distribution) -> None:
    workload = ClosedLoop(8, LENGTHS, think=think, num_requests=500, seed=3)
    done = run(workload, by_length)
    assert len(done) == workload.num_requests == 500
    assert [r.index for _, _, r in done[:8]] == list(range(8))
    assert sorted(r.index for _, _, r in done) == list(range(500))
    assert max_at_once(done) == 8
    assert done == run(workload, by_length), "the workload is reproducible"


def test_thinking_times_delay_the_requests_of_users() -> None:
    busy, idle = (run(ClosedLoop(4, LENGTHS, think=Constant(t), num_requests=200), by_length) for t in (0, 10))
    assert idle[-1][0] == pytest.approx(busy[-1][0] + 490, abs=20)  # 49 pauses of each of four users


def test_a_closed_loop_over_a_trace_ends_after_its_last_request() -> None:
    trace = [TraceRequest(float(i), 10 + i, i % 3) for i in range(30)]
    workload = ClosedLoop(3, trace)
    done = run(workload, by_length)
    assert workload.num_requests == len(done) == 20
    assert [r.num_prompt_tokens for _, _, r in sorted(done, key=lambda each: each[2].index)] == [
        r.num_prompt_tokens for r in trace if r.num_output_tokens
    ]
    assert len(run(ClosedLoop(50, trace), by_length)) == 20
    assert len(run(ClosedLoop(2, trace, num_requests=7), by_length)) == 7


# ---------------------------------------------------------------------- sessions


def sessions(**changes: object) -> Sessions:
    fields: dict[str, object] = {
        "arrivals": PoissonArrivals(2),
        "num_turns": Uniform(1, 6),
        "first_prompt": LogNormal(60, 0.5),
        "new_text": Uniform(5, 40),
        "output": Uniform(1, 30),
        "think": Exponential(3),
        "system_prompt": 33,
        "num_sessions": 40,
        "seed": 4,
    }
    return Sessions(**(fields | changes))  # type: ignore[arg-type]


def test_a_session_prompt_extends_the_last_prompt_and_output() -> None:
    workload = sessions(max_tokens=20)
    done = run(workload, by_length)
    assert len(done) == workload.num_requests
    assert {r.index for _, _, r in done} == set(range(len(done)))
    by_session: dict[str | None, list[tuple[float, float, SimRequest]]] = {}
    for each in done:
        by_session.setdefault(each[2].session, []).append(each)
    assert len(by_session) == 40 and max(map(len, by_session.values())) > 3
    system = set()
    for turns in by_session.values():
        tokens = [prompt_tokens(r, r.index, VOCABULARY) for _, _, r in turns]
        system.add(tokens[0][:33].tobytes())
        for (_, finish, last), (arrival, _, following), old, new in zip(
            turns, turns[1:], tokens, tokens[1:], strict=False
        ):
            assert arrival >= finish
            output = np.full(min(last.num_output_tokens, 20), filler_token(last.index), dtype=np.int32)
            known = np.concatenate([old, output])
            assert np.array_equal(new[: len(known)], known)
            assert len(new) == following.num_prompt_tokens > len(known)
            assert new.max() < EOS_TOKEN and new[len(known) :].max() < VOCABULARY
    assert len(system) == 1


def test_requests_of_sessions_do_not_depend_on_latency() -> None:
    def requests(latency: Callable[[SimRequest], float]) -> list[tuple[str, int, int]]:
        return sorted((r.request_id, r.num_prompt_tokens, r.num_output_tokens) for _, _, r in run(sessions(), latency))

    assert requests(by_length) == requests(lambda request: 0.001) == requests(lambda request: 60.0)


def test_a_session_ends_before_it_exceeds_max_total_tokens() -> None:
    workload = sessions(num_turns=Constant(50), max_total_tokens=500)
    done = run(workload, by_length)
    assert workload.num_requests is None
    assert 40 * 5 < len(done) < 40 * 50
    assert max(r.num_prompt_tokens + r.num_output_tokens for _, _, r in done) <= 500


def test_endless_sessions_are_generated_lazily() -> None:
    workload = sessions(num_sessions=None)
    assert workload.num_requests is None
    assert len(run(workload, by_length, limit=300)) == 300


# ---------------------------------------------------------------------- tokens


def test_a_scheduler_request_uses_a_prompt_without_a_copy() -> None:
    shared = SimRequest("s", 1000, 1, block_hash_ids=(3, 4), turns=(Turn(7, 10, 5),))
    for prompt in (prompt_tokens(shared, 0, VOCABULARY), prompt_tokens(SimRequest("a", 70, 1), 1, 50), blank_prompt(9)):
        assert prompt.dtype == np.int32 and not prompt.flags.writeable
        assert shared_prompt("a", prompt)[0] is prompt
    assert blank_prompt(9).tolist() == [0] * 9
    assert len(prompt_tokens(shared, 0, VOCABULARY)) == 1000


@pytest.mark.parametrize("vocab_size", [2, 50, VOCABULARY, 128_256])
def test_different_requests_have_different_prompts(vocab_size: int) -> None:
    prompts = [
        prompt_tokens(SimRequest("r", 64, 1, ids, size), index, vocab_size)
        for index in (0, 1, 24, 25, 15_999, 16_000, 70_000)
        for ids, size in [((), 512), ((index,), 64), ((index,), 3)]
    ]
    assert len({prompt.tobytes() for prompt in prompts}) == len(prompts)
    assert all(prompt.min() >= 0 and prompt.max() < vocab_size for prompt in prompts)


@pytest.mark.parametrize("size", [2, 16, 512])
def test_only_equal_block_hash_ids_give_equal_tokens(size: int) -> None:
    a = SimRequest("a", 3 * size - 1, 1, (5, 2**62 - 1, 7), size)
    b = SimRequest("b", 4 * size, 1, (5, 2**62 - 1, 8), size)
    first, second = prompt_tokens(a, 0, VOCABULARY), prompt_tokens(b, 1, VOCABULARY)
    assert (len(first), len(second)) == (3 * size - 1, 4 * size)
    assert np.array_equal(first[: 2 * size], second[: 2 * size])
    assert not np.array_equal(first[2 * size :], second[2 * size : 3 * size - 1])
    third = prompt_tokens(replace(b, request_id="c"), 2, VOCABULARY)
    assert np.array_equal(second[: 3 * size], third[: 3 * size])
    assert not np.array_equal(second, third), "no id, no sharing"
    assert not np.array_equal(second[: 2 * size], prompt_tokens(b, 1, VOCABULARY, seed=1)[: 2 * size])


def test_filler_tokens_are_distinct_and_outside_the_vocabulary() -> None:
    fillers = [filler_token(index) for index in (0, 1, 2, 99_999, MAX_INDEX - 2)]
    assert len(set(fillers)) == len(fillers)
    assert min(fillers) >= MAX_INDEX and max(fillers) < EOS_TOKEN == 2**31 - 1
    for index in (-1, MAX_INDEX - 1):
        with pytest.raises(ValueError, match="it must be between 0 and"):
            filler_token(index)
    with pytest.raises(ValueError, match="vocab_size is 1"):
        prompt_tokens(SimRequest("a", 3, 1), 0, 1)


# ---------------------------------------------------------------------- the real files, where they are


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("azure_llm_2023_conversation.csv", 1000),
        ("mooncake_synthetic.jsonl", 300),
        ("vllm_0.19_rtxpro6000_llama31_8b.jsonl", None),
    ],
)
def test_published_traces_can_be_read_and_sent(name: str, limit: int | None) -> None:
    path = TRACES / name
    if not path.exists():
        pytest.skip(f"{name} is not in {TRACES}")
    trace = read_trace(path, limit=limit)
    workload = OpenLoop(trace, rate=4)
    done = run(workload, by_length)
    assert len(done) == workload.num_requests == len(trace) - workload.num_skipped
    assert done[-1][0] == pytest.approx(trace[-1].arrival_time / 4)
    assert max_at_once(run(ClosedLoop(16, trace), by_length)) == 16


def test_mooncake_prompts_share_prefixes_as_their_hash_ids_do() -> None:
    path = TRACES / "mooncake_synthetic.jsonl"
    if not path.exists():
        pytest.skip(f"{path.name} is not in {TRACES}")
    seen: set[bytes] = set()
    ids: set[int] = set()
    num_blocks = found = 0
    for _, request in OpenLoop(read_trace(path, limit=60)).first_arrivals():
        tokens = prompt_tokens(request, request.index, 128_256)
        for at in range(0, len(tokens), 512):
            content = tokens[: at + 512].tobytes()
            num_blocks, found = num_blocks + 1, found + (content in seen)
            seen.add(content)
        ids.update(request.block_hash_ids)
    assert found == num_blocks - len(ids) > 0
