"""Capacity: the search finds known capacities with its interval, and reports if there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.capacity import Capacity, Measured, Question, find_capacity
from pointsman.sim.crossing import Interval, Misses, crossing, digits_text, mix
from pointsman.sim.errors import SimulationError
from pointsman.sim.report.summary import Targets
from pointsman.sim.samples import GeneratedSamples, Samples, TraceSamples, UserSamples
from pointsman.sim.step_time import LinearStepTime, StepTime
from pointsman.sim.trial import Judge
from pointsman.sim.workers import workers
from pointsman.sim.workload import Constant, ConstantArrivals, Empirical, Exponential, Lengths, PoissonArrivals
from pointsman.traces import TraceRequest
from tests.forms import seeds, short_of

ONE_AT_A_TIME = SchedulerConfig(num_blocks=8, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=32)
SECONDS = 0.1
"""Seconds of a request: one step. A replica serves ten a second, and evenly spaced requests never wait."""
FIRST = LinearStepTime(per_step=SECONDS)
FIXED = Lengths(Constant(16), Constant(1))
EVENLY, AT_RANDOM = GeneratedSamples(ConstantArrivals(1), FIXED), GeneratedSamples(PoissonArrivals(1), FIXED)


def search(
    samples: Samples,
    ttft: float,
    *,
    step_times: Sequence[StepTime] = (FIRST,),
    config: SchedulerConfig = ONE_AT_A_TIME,
    **values: Any,
) -> Capacity:
    targets = Targets(ttft=ttft)
    judge = Judge(source=samples, step_times=tuple(step_times), targets=targets)
    given = {"num_requests": 60, "within": 0.5, "max_samples": 4, **values}
    question = Question(samples=samples, config=config, targets=targets, num_models=len(step_times), **given)
    with workers(judge) as runner:
        return find_capacity(question, runner)


def interval_of(found: Capacity) -> Interval:
    assert found.is_complete and found.interval is not None
    assert found.interval.low <= found.interval.value <= found.interval.high
    return found.interval


# ---------------------------------------------------------------------- requests a second


@pytest.mark.parametrize("num_replicas", short_of([1, 3], [3]))
def test_the_capacity_is_proportional_to_the_number_of_replicas(num_replicas: int) -> None:
    found = search(EVENLY, 0.15, num_replicas=num_replicas, num_requests=100 * num_replicas)
    # A queue that grows by less than half a request in 100 arrivals does not show.
    assert interval_of(found).value == pytest.approx(10 * num_replicas, rel=0.06)
    assert found.at is not None and found.beyond is not None
    assert found.at.load <= 10.7 * num_replicas <= 1.1 * found.beyond.load
    assert found.at.num_replicas == num_replicas
    assert found.at.figures.ttft_p99 == pytest.approx(SECONDS, abs=0.05)


def md1_capacity(ttft: float, share: float) -> float:
    """The capacity of a server that takes `SECONDS` for each of requests that arrive at random (M/D/1), by Erlang's
    formula of the waiting time."""

    def met(rate: float) -> float:
        load, wait = rate * SECONDS, ttft - SECONDS
        terms = range(int(wait / SECONDS + 1e-9) + 1)
        series = (
            math.exp(rate * (wait - n * SECONDS)) * (-rate * (wait - n * SECONDS)) ** n / math.factorial(n)
            for n in terms
        )
        return (1 - load) * math.fsum(series)

    low, high = 0.0, 1 / SECONDS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if met(middle) >= share else (low, middle)
    return low


@pytest.mark.parametrize("seed", seeds(1, 20))
def test_intervals_hold_the_capacity_that_queueing_theory_gives(seed: int) -> None:
    """Nine of ten should; benchmarks/planner.py counts them. A missed one must be near."""
    rng = np.random.default_rng(seed)
    ttft, share = float(rng.uniform(0.3, 1.2)), float(rng.choice([0.9, 0.95, 0.99]))
    samples = replace(AT_RANDOM, seed=1000 * seed)
    found = search(samples, ttft, share=share, num_requests=None, within=0.2, max_samples=32, max_simulated=6_000)
    interval, truth = interval_of(found), md1_capacity(ttft, share)
    assert interval.low * 0.96 <= truth <= interval.high * 1.04
    assert interval.excess < 0.5


def test_a_capacity_far_below_the_throughput_is_found() -> None:
    """Random arrivals, and a target that leaves no time to wait: at most one of a hundred requests may find another."""
    interval = interval_of(search(AT_RANDOM, 0.1001, num_requests=100, within=1.0, max_samples=8))
    assert interval.low <= 0.1 <= interval.high  # 1 - exp(-0.1 rate) of them wait
    assert interval.high < 0.5


def test_equal_searches_have_equal_results() -> None:
    first, second = (search(AT_RANDOM, 0.3, num_requests=50) for _ in range(2))
    assert first == second


def test_more_samples_are_taken_until_the_interval_is_as_narrow_as_asked() -> None:
    found = [search(AT_RANDOM, 0.5, within=within, max_samples=10) for within in (1.0, 0.01)]
    assert [each.is_narrow for each in found] == [True, False]
    assert [each.num_samples for each in found] == [8, 10]


def test_a_result_of_0_or_without_limit_has_an_interval_too() -> None:
    nothing = search(EVENLY, SECONDS / 2)
    assert interval_of(nothing) == Interval(0, 0, 0)
    assert nothing.at is None and nothing.beyond is not None and nothing.beyond.share.value == 0
    everything = search(EVENLY, 1000.0)
    assert interval_of(everything).value == math.inf
    assert everything.beyond is None


def test_other_step_times_widen_the_interval() -> None:
    plain = search(AT_RANDOM, 0.5, max_samples=8)
    others = (LinearStepTime(per_step=1.3 * SECONDS), LinearStepTime(per_step=0.8 * SECONDS))
    spread = search(AT_RANDOM, 0.5, max_samples=8, step_times=(FIRST, *others))
    assert spread.sampling == plain.interval
    slower, faster = spread.alternatives
    assert slower < interval_of(plain).value < faster
    assert interval_of(spread).low < interval_of(plain).low
    assert interval_of(spread).high > interval_of(plain).high
    assert interval_of(spread).value == interval_of(plain).value


# ---------------------------------------------------------------------- refused requests, bad questions


def test_refused_requests_count_as_missing_the_targets() -> None:
    found = search(GeneratedSamples(ConstantArrivals(1), Lengths(Empirical((10, 100)), Constant(1))), 1.0)
    assert interval_of(found).value == 0
    assert all(0.3 < each.share.value < 0.7 and each.figures.num_refused for each in found.loads)


def test_an_error_says_why_all_requests_are_refused() -> None:
    with pytest.raises(SimulationError, match=r"all 45 requests of a sample are refused.*100 tokens and max_model_len"):
        search(GeneratedSamples(ConstantArrivals(1), Lengths(Constant(100), Constant(1))), 1.0)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0}, "share of requests is 0"),
        ({"confidence": 1}, "confidence is 1"),
        ({"within": 0}, "within is 0"),
        ({"targets": Targets()}, "no latency target"),
        ({"max_samples": 1}, "number of samples is 1"),
        ({"unit": "replicas", "load": 1, "num_replicas": 2, "min_replicas": 3}, "range of replicas is 3 to 2"),
        ({"unit": "replicas", "load": -1}, "load is -1"),
    ],
)
def test_search_arguments_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        Question(**{"samples": EVENLY, "config": ONE_AT_A_TIME, "targets": Targets(ttft=1), **values})


def test_an_interrupted_search_keeps_its_estimate() -> None:
    def interrupt(num_simulated: int, excess: float) -> None:
        if excess < math.inf:
            raise KeyboardInterrupt

    found = search(AT_RANDOM, 0.5, within=0.001, max_samples=8, progress=interrupt)
    assert not found.is_complete and found.interval is not None and found.loads


def test_each_load_is_reported() -> None:
    seen: list[Measured] = []
    found = search(EVENLY, 0.15, on_load=seen.append)
    assert {each.load for each in found.loads} <= {each.load for each in seen}


# ---------------------------------------------------------------------- users and replicas

THINKING = 0.9
USERS = UserSamples(FIXED, Exponential(THINKING), seed=3)


def test_the_number_of_users_within_the_targets_is_found() -> None:
    """Users who think for 0.9 s on a server of ten a second: the throughput bounds them at ten and a few."""
    found = search(USERS, 0.35, unit="users", num_requests=150)
    interval = interval_of(found)
    assert 3 <= interval.value <= 11 and interval.value == int(interval.value)
    assert found.at is not None and found.at.load <= interval.value
    cycle = THINKING + SECONDS + 0.03  # now and then a request waits for another
    assert found.at.rate == pytest.approx(found.at.load / cycle, rel=0.25)


def test_no_user_meets_an_impossible_target() -> None:
    assert interval_of(search(USERS, 0.01, unit="users")) == Interval(0, 0, 0)


@pytest.mark.parametrize(("rate", "wanted"), short_of([(8, 1), (35, 4), (72, 8)], [(35, 4)]))
def test_the_fewest_replicas_for_a_rate_are_found(rate: float, wanted: int) -> None:
    found = search(EVENLY, 0.15, unit="replicas", num_replicas=9, load=rate, num_requests=100 * wanted)
    assert interval_of(found).value == wanted
    assert found.at is not None and found.at.num_replicas == wanted


def test_a_range_of_replicas_may_be_too_low_or_too_high() -> None:
    too_few = search(EVENLY, 0.15, unit="replicas", num_replicas=3, load=35)
    assert interval_of(too_few).value == math.inf
    enough = search(EVENLY, 0.15, unit="replicas", num_replicas=8, min_replicas=6, load=35)
    assert interval_of(enough).value == 6


def test_the_fewest_replicas_for_a_number_of_users_are_found() -> None:
    found = search(USERS, 0.35, unit="replicas", num_replicas=8, load=16, num_requests=150)
    assert 2 <= interval_of(found).value <= 4


# ---------------------------------------------------------------------- traces


def trace(count: int, *, quiet: float = 1.0) -> list[TraceRequest]:
    """Evenly spaced requests; the second half comes `quiet` times as slowly."""
    gaps = [1.0] * (count // 2) + [quiet] * (count - count // 2)
    times = np.cumsum(gaps)
    return [TraceRequest(arrival_time=float(time), num_prompt_tokens=16, num_output_tokens=1) for time in times]


def test_a_trace_with_busy_parts_has_a_wider_interval() -> None:
    even, uneven = trace(1000), trace(1000, quiet=3.0)
    steady, varying = (
        search(TraceSamples(each, (len(each) - 1) / (each[-1].arrival_time - each[0].arrival_time)), 0.15, share=0.9)
        for each in (even, uneven)
    )
    assert interval_of(steady).value == pytest.approx(10, rel=0.08)
    # The busy half has twice the mean rate of the trace: it fails from five a second on.
    assert interval_of(varying).value == pytest.approx(5, rel=0.15)
    assert steady.num_samples > 1


def test_a_short_trace_is_simulated_as_a_whole() -> None:
    found = search(TraceSamples(trace(200), 1.0), 0.15, num_requests=None)
    assert (found.num_samples, found.num_requests) == (1, 200)
    assert found.num_groups > 1


# ---------------------------------------------------------------------- the estimate


def test_the_estimate_is_where_the_share_of_misses_crosses_what_is_allowed() -> None:
    rng, total = np.random.default_rng(1), np.full(10, 1000.0)
    loads = np.geomspace(1, 4, 12)
    odds = -6 + 5 * np.log(loads)
    shares = 1 / (1 + np.exp(-odds))
    misses = [
        Misses(load, rng.binomial(1000, share, 10).astype(float), total)
        for load, share in zip(loads, shares, strict=True)
    ]
    truth = math.exp((6 + math.log(0.05 / 0.95)) / 5)
    found = crossing(misses, 0.05, 0.9)
    assert found.low <= truth <= found.high and found.excess < 0.1
    wider = crossing(misses, 0.05, 0.99)
    assert wider.low < found.low and wider.high > found.high
    assert crossing(misses[:2], 0.5, 0.9).value == math.inf
    assert crossing(misses[-2:], 1e-4, 0.9).value == 0


def test_few_requests_without_a_miss_are_within_the_targets() -> None:
    """Ten requests cannot show that one in a hundred misses: the estimate says yes, the interval begins at 0."""
    total = np.full(2, 5.0)
    misses = [Misses(1.0, np.zeros(2), total), Misses(2.0, np.array([2.0, 1.0]), total)]
    found = crossing(misses, 0.01, 0.9)
    assert 1 <= found.value < 1.1 and found.low == 0


def test_equally_plausible_models_have_an_interval_over_all_of_them() -> None:
    one = Interval(10, 9, 11)
    assert mix(one, [], 8, 0.9) == one
    assert mix(one, [0.0, 0.0], 8, 0.9).low == pytest.approx(9, rel=0.01)
    both = mix(one, [math.log(1.5), math.log(0.5)], 8, 0.9)
    assert 4.5 < both.low < 5.5 and 14 < both.high < 17
    assert mix(one, [-math.inf], 8, 0.9).low == 0


@pytest.mark.parametrize(
    ("figures", "text"),
    [
        ((1.3512, 1.21, 1.62), ("1.4", "1.2", "1.6")),
        ((14.6, 12.9, 16.6), ("15", "13", "17")),
        ((1234, 1100, 1400), ("1,200", "1,100", "1,400")),
        ((0.0034, 0.0031, 0.0036), ("0.0034", "0.0031", "0.0036")),
        ((10, 3, 28), ("10", "3", "28")),
        ((5, 2, math.inf), ("5", "2", "no limit")),
        ((math.inf, 3.5, math.inf), ("no limit", "4", "no limit")),
        ((math.inf, 0, math.inf), ("no limit", "0", "no limit")),
        ((0, 0, 0), ("0", "0", "0")),
    ],
)
def test_a_figure_has_as_many_digits_as_its_interval_supports(
    figures: tuple[float, float, float], text: tuple[str, str, str]
) -> None:
    assert digits_text(*figures) == text


def test_ends_about_which_few_samples_say_nothing_are_no_numbers() -> None:
    assert Interval(10.0, 0.01, 1e280).text() == ("10", "0", "no limit")
    assert Interval(10.0, 0.2, 900.0).figures == (10.0, 0.2, 900.0)
    assert Interval(0.0, 0.0, 3.0).figures == (0.0, 0.0, 3.0)
