"""Capacity: bisection finds the known rate, and reports if there is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.capacity import Capacity, Probe, Question, fewest_replicas, highest_rate, max_users
from pointsman.sim.errors import SimulationError
from pointsman.sim.report.summary import Targets
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import (
    Arrivals,
    ClosedLoop,
    Constant,
    ConstantArrivals,
    Empirical,
    Exponential,
    Generated,
    Lengths,
    OpenLoop,
    PoissonArrivals,
    Workload,
)
from tests.forms import short_of

ONE_AT_A_TIME = SchedulerConfig(num_blocks=8, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=32)
SECONDS = 0.1
"""Seconds of a request: one step. A replica serves ten a second, and evenly spaced requests never wait."""


def evenly(rate: float, count: int) -> Workload:
    return _requests(ConstantArrivals(rate), count)


def at_random(rate: float, count: int) -> Workload:
    return _requests(PoissonArrivals(rate), count)


def _requests(arrivals: Arrivals, count: int) -> Workload:
    return OpenLoop(Generated(arrivals, Lengths(Constant(16), Constant(1)), count, seed=5))


def question(
    ttft: float, *, arriving: Callable[[float, int], Workload] = evenly, count: int = 100, share: float = 0.99
) -> Question:
    return Question(
        workload=lambda rate: arriving(rate, count),
        config=ONE_AT_A_TIME,
        step_time=LinearStepTime(per_step=SECONDS),
        targets=Targets(ttft=ttft),
        share=share,
    )


def nested(found: Capacity) -> tuple[Probe, Probe]:
    """Check that no probe contradicts the bracket; returns its two probes (`meets`, `misses`)."""
    assert found.meets is not None and found.misses is not None
    assert found.meets.rate < found.misses.rate
    for probe in found.probes:
        assert probe.meets == (probe.share >= 0.99) == (probe.rate <= found.meets.rate)
        assert probe.meets or probe.rate >= found.misses.rate
    return found.meets, found.misses


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_the_highest_rate_is_proportional_to_the_number_of_replicas(num_replicas: int) -> None:
    meets, misses = nested(highest_rate(question(0.15), num_replicas, tolerance=0.01))
    assert meets.rate <= misses.rate <= meets.rate * 1.01
    # A queue that grows by less than half a request in 100 arrivals does not show.
    assert 10 * num_replicas * 0.99 <= meets.rate <= 10 * num_replicas * 1.02
    assert meets.num_replicas == num_replicas
    assert meets.ttft_p99 == pytest.approx(SECONDS, abs=0.05)


def test_a_highest_rate_far_below_the_throughput_is_found() -> None:
    """Random arrivals, and a target that leaves no time to wait: at most two of a hundred requests may meet."""
    found = highest_rate(question(0.1001, arriving=at_random))
    meets, _ = nested(found)
    assert 0.02 < meets.rate < 0.5
    assert len(found.probes) < 20


def test_equal_capacity_searches_have_equal_results() -> None:
    first, second = (highest_rate(question(0.3, arriving=at_random, count=50)) for _ in range(2))
    assert first.probes == second.probes


def test_meets_or_misses_is_none_if_no_probe_meets_or_misses_targets() -> None:
    nothing = highest_rate(question(SECONDS / 2))
    assert nothing.meets is None
    assert [probe.share for probe in nothing.probes] == [0]
    everything = highest_rate(question(1000.0))
    assert everything.misses is None
    assert [probe.share for probe in everything.probes] == [1, 1]
    assert everything.probes[-1].ttft_p99 == pytest.approx(10, rel=0.02)  # 100 requests, one after the other


def of_prompts(*lengths: float) -> Question:
    """Ten requests, each with one of these prompts."""
    return Question(
        workload=lambda rate: OpenLoop(
            Generated(ConstantArrivals(rate), Lengths(Empirical(lengths), Constant(1)), 10, seed=0)
        ),
        config=ONE_AT_A_TIME,
        step_time=LinearStepTime(per_step=SECONDS),
        targets=Targets(ttft=1),
    )


def test_refused_requests_count_as_missing_the_targets() -> None:
    found = highest_rate(of_prompts(10, 100))
    assert found.meets is None
    (probe,) = found.probes
    assert 0 < probe.num_refused < 10 and probe.share == 1 - probe.num_refused / 10


def test_an_error_says_why_all_requests_are_refused() -> None:
    with pytest.raises(SimulationError, match=r"all 10 requests are refused.* 100 tokens and max_model_len is 64"):
        highest_rate(of_prompts(100))


@pytest.mark.parametrize(("rate", "wanted"), [(8, 1), (35, 4), (45, 5), (72, 8)])
def test_the_fewest_replicas_for_a_rate_are_found(rate: float, wanted: int) -> None:
    found = fewest_replicas(question(0.15, count=200), rate, 1, 9)
    assert found.meets is not None and found.meets.num_replicas == wanted
    if wanted > 1:
        assert found.misses is not None and found.misses.num_replicas == wanted - 1
    assert len(found.probes) <= 6


def test_fewest_replicas_reports_a_range_that_is_too_low_or_too_high() -> None:
    too_few = fewest_replicas(question(0.15), 35, 1, 3)
    assert too_few.meets is None
    assert [probe.num_replicas for probe in too_few.probes] == [3]
    enough = fewest_replicas(question(0.15), 35, 6, 8)
    assert enough.misses is None and enough.meets is not None
    assert enough.meets.num_replicas == 6


def test_a_probe_too_short_to_show_a_growing_queue_counts_as_short() -> None:
    targets = Targets(ttft=0.15)
    assert not highest_rate(question(0.15)).is_short(targets)
    assert highest_rate(question(0.15, count=20)).is_short(targets)


@pytest.mark.parametrize(("e2e_mean", "is_short"), [(28.0, True), (5.0, False)])
def test_a_probe_shorter_than_its_request_latency_counts_as_short(e2e_mean: float, is_short: bool) -> None:
    """300 requests arrive in a minute."""
    best = Probe(5.0, 1, 1.0, 0.1, 0.02, e2e_mean, 0.05, 4.0, 300, 0, meets=True)
    assert Capacity(meets=best).is_short(Targets(ttft=0.5)) is is_short


def test_on_probe_is_called_after_each_probe() -> None:
    seen: list[Probe] = []
    asked = question(0.15, count=30)
    found = highest_rate(
        Question(
            workload=asked.workload,
            config=asked.config,
            step_time=asked.step_time,
            targets=asked.targets,
            on_probe=seen.append,
        )
    )
    assert seen == found.probes


def test_search_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(SimulationError, match="share of requests is 0"):
        question(1, share=0)
    with pytest.raises(SimulationError, match="no latency target"):
        Question(
            workload=lambda rate: evenly(rate, 5),
            config=ONE_AT_A_TIME,
            step_time=LinearStepTime(per_step=1),
            targets=Targets(),
        )
    with pytest.raises(SimulationError, match="tolerance is 0"):
        highest_rate(question(1), tolerance=0)
    with pytest.raises(SimulationError, match="range of replicas is 3 to 2"):
        fewest_replicas(question(1), 1, 3, 2)
    with pytest.raises(SimulationError, match="load is -1"):
        fewest_replicas(question(1), -1, 1, 2)


# ------------------------------------------------------------------------------------------------------------- users

THINKING = 0.9


def of_users(ttft: float, *, max_requests: int | None = None) -> Question:
    """Users who think for 0.9 s, on servers that take 0.1 s for each request."""

    def workload(users: float) -> Workload:
        count = 20 * int(users) if max_requests is None else max_requests
        lengths = Lengths(Constant(16), Constant(1))
        think = Exponential(THINKING)
        return ClosedLoop(int(users), lengths, think=think, num_requests=count, seed=3, is_spread=True)

    return Question(
        workload=workload,
        is_of_users=True,
        config=ONE_AT_A_TIME,
        step_time=LinearStepTime(per_step=SECONDS),
        targets=Targets(ttft=ttft),
    )


@pytest.mark.parametrize(("ttft", "num_replicas"), short_of([(0.35, 1), (0.8, 1), (0.35, 2)], [(0.35, 2)]))
def test_max_users_equals_the_result_of_a_linear_search(ttft: float, num_replicas: int) -> None:
    asked = of_users(ttft)
    found = max_users(asked, num_replicas, tolerance=0.001)
    assert found.meets is not None and found.misses is not None
    most, too_many = found.meets.num_users, found.misses.num_users
    assert most is not None and too_many == most + 1
    meets = [asked.probe(users, num_replicas).meets for users in range(1, most + 5)]
    assert meets[most - 1] and not meets[most]
    assert all(meets[: most - 2]) and not any(meets[most + 2 :]), "except for noise at the edge"


def test_request_rate_of_users_follows_from_think_time_and_latency() -> None:
    probe = of_users(10.0).probe(4, 1)
    cycle = THINKING + SECONDS + 0.03  # now and then a request waits for another
    assert probe.num_users == 4
    assert probe.rate == pytest.approx(4 / cycle, rel=0.25)


def test_max_users_searches_up_to_one_user_per_request() -> None:
    found = max_users(of_users(100.0, max_requests=40))
    assert found.misses is None and found.meets is not None
    assert found.meets.num_users == 64 and found.meets.num_requests == 40


def test_max_users_meets_is_none_if_one_user_misses_the_targets() -> None:
    found = max_users(of_users(0.01))
    assert found.meets is None and len(found.probes) == 1


def test_the_fewest_replicas_for_a_number_of_users_are_found() -> None:
    found = fewest_replicas(of_users(0.35), 16, 1, 8)
    assert found.meets is not None and found.misses is not None
    assert found.meets.num_replicas == found.misses.num_replicas + 1
    assert found.meets.num_users == found.misses.num_users == 16
