"""Frontier: latencies over the rate against queues with a known law, the chosen rates, and readings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.crossing import Interval
from pointsman.sim.errors import SimulationError
from pointsman.sim.frontier import PERCENTILES, Curve, Point, Sweep, at_rate, highest_rate, measure_curve
from pointsman.sim.frontier_picture import frontier_svg
from pointsman.sim.report.summary import ITL_OF, Targets
from pointsman.sim.samples import GeneratedSamples, Samples, TraceSamples
from pointsman.sim.step_time import LinearStepTime, StepTime
from pointsman.sim.trial import Job, Judge, Sample
from pointsman.sim.workers import workers
from pointsman.sim.workload import Constant, Lengths, PoissonArrivals
from pointsman.traces import TraceRequest
from tests.forms import short_or_long

SECONDS = 0.1
"""Seconds of a request: one step. A replica serves ten a second."""
ONE_AT_A_TIME = SchedulerConfig(num_blocks=8, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=32)
QUEUE = GeneratedSamples(PoissonArrivals(1.0), Lengths(Constant(16), Constant(1)), seed=3)
STEP_TIME = LinearStepTime(per_step=SECONDS)


def measure(samples: Samples = QUEUE, step_times: tuple[StepTime, ...] = (STEP_TIME,), **values: Any) -> Curve:
    settings = {"samples": samples, "config": ONE_AT_A_TIME, "num_models": len(step_times), **values}
    judge = Judge(source=samples, step_times=step_times, targets=Targets())
    with workers(judge) as runner:
        return measure_curve(Sweep(**settings), runner)


def ttft_of_queue(rate: float, share: float) -> float:
    """The percentile of the TTFT of a queue with random arrivals and constant service (M/D/1, Erlang 1909)."""

    def share_within(wait: float) -> float:
        terms = (
            (-rate * (wait - k * SECONDS)) ** k / math.factorial(k) * math.exp(rate * (wait - k * SECONDS))
            for k in range(math.floor(wait / SECONDS) + 1)
        )
        return (1 - rate * SECONDS) * sum(terms)

    low, high = 0.0, 2.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if share_within(middle) < share else (low, middle)
    return SECONDS + high


# ------------------------------------------------------------------ the points


def test_intervals_hold_the_percentiles_of_a_queue_of_known_law() -> None:
    """90 % intervals of percentiles that are not independent."""
    num_seeds, held, count = short_or_long(2, 20), 0, 0
    for seed in range(num_seeds):
        curve = measure(replace(QUEUE, seed=1000 * seed), rates=(5.0, 7.0), num_requests=600)
        for point in curve.points:
            for name, share in PERCENTILES.items():
                truth, found = ttft_of_queue(point.rate, share), point.ttft[name]
                held += found.low - 1e-6 <= truth <= found.high + 1e-6
                count += 1
                assert found.value == pytest.approx(truth, rel=0.5)
    assert held >= 0.8 * count


def test_a_point_has_the_load_of_its_rate() -> None:
    (point,) = measure(rates=(5.0,), num_requests=400).points
    assert point.busy == pytest.approx(0.5, rel=0.1)
    assert point.prompt_tokens_per_second == pytest.approx(5 * 16, rel=0.1)
    assert point.output_tokens_per_second == pytest.approx(5, rel=0.1)
    # Little's law: the mean TTFT of the queue is 0.15 s, half of a service to wait at half load.
    assert point.num_running == pytest.approx(5 * 0.15, rel=0.2)
    assert point.num_requests == 6 * 300
    assert not any(point.itl.values()), "requests of one token have no gaps"


@pytest.fixture(scope="module")
def curve() -> Curve:
    return measure(num_requests=400)


def test_rates_go_from_light_load_to_beyond_saturation(curve: Curve) -> None:
    rates = [point.rate for point in curve.points]
    assert rates == sorted(rates) and rates[0] < 1 and rates[-1] > 12
    assert curve.throughput == pytest.approx(10, rel=0.02)
    assert curve.points[-1].is_overloaded and not any(point.is_overloaded for point in curve.points if point.rate < 9)
    assert curve.saturation is not None and curve.saturation.low <= 10.5 and curve.saturation.high >= 9.5
    steps = [after / before for before, after in pairwise(rates) if before > 6 and after < 13.6]
    assert max(steps) < 1.25, "points are close where the curve bends"
    assert curve.is_complete and curve.num_simulations >= 6 * len(rates)


def test_more_replicas_have_the_same_latencies_at_a_higher_rate() -> None:
    one, three = (measure(num_replicas=count, rates=(4.0 * count,), num_requests=150 * count) for count in (1, 3))
    assert three.points[0].busy == pytest.approx(one.points[0].busy, rel=0.15)
    assert three.throughput == pytest.approx(3 * one.throughput, rel=0.05)


def test_other_models_of_step_times_widen_the_intervals() -> None:
    others = tuple(LinearStepTime(per_step=SECONDS * factor) for factor in (0.7, 1.3))
    alone, all_models = (
        measure(step_times=(STEP_TIME, *more), rates=(2.0, 4.0, 13.0), num_requests=200) for more in ((), others)
    )
    for one, more in zip(alone.points[:2], all_models.points[:2], strict=True):
        assert more.ttft["p50"].value == one.ttft["p50"].value
        assert more.ttft["p50"].low < 0.8 * one.ttft["p50"].low
        assert more.ttft["p50"].high > 1.25 * one.ttft["p50"].high
    assert alone.saturation is not None and all_models.saturation is not None
    assert all_models.saturation.low < 0.95 * alone.saturation.low


def test_a_trace_is_one_sample_whose_blocks_give_the_intervals() -> None:
    trace = [TraceRequest(0.3 * place + 0.2 * (place % 7 == 0), 16, 1) for place in range(300)]
    curve = measure(TraceSamples(trace, 300 / 90), rates=(3.0, 6.0, 9.5))
    assert curve.num_requests == 300 and curve.num_simulations == 3 + 2
    assert all(point.ttft["p50"].low <= point.ttft["p50"].value <= point.ttft["p50"].high for point in curve.points)
    assert curve.points[1].ttft["p99"].high > curve.points[1].ttft["p99"].low


def test_equal_sweeps_have_equal_curves() -> None:
    first, second = (measure(rates=(3.0, 8.0), num_requests=100) for _ in range(2))
    assert first.points == second.points


# ------------------------------------------------------------------ what ends a sweep


class Interrupted:
    """Runs some jobs, then is interrupted as by Ctrl-C."""

    def __init__(self, judge: Judge, count: int) -> None:
        self._judge, self._count = judge, count

    def run(self, jobs: Sequence[Job]) -> Iterator[Sample]:
        for job in jobs:
            if not self._count:
                raise KeyboardInterrupt
            self._count -= 1
            yield self._judge.measure(job)


def test_an_interrupted_sweep_keeps_the_points_so_far() -> None:
    judge = Judge(source=QUEUE, step_times=(STEP_TIME,), targets=Targets())
    seen: list[Point] = []
    sweep = Sweep(samples=QUEUE, config=ONE_AT_A_TIME, num_requests=100, on_point=seen.append)
    curve = measure_curve(sweep, Interrupted(judge, 2 + 6 + 6 + 3))
    assert not curve.is_complete and curve.points == seen and len(seen) == 2


def test_progress_reaches_the_expected_number_of_simulations() -> None:
    told: list[tuple[int, int]] = []
    measure(rates=(2.0, 4.0), num_requests=100, progress=lambda done, expected: told.append((done, expected)))
    assert [done for done, _ in told] == list(range(1, len(told) + 1))
    assert all(done <= expected for done, expected in told) and told[-1][1] - told[-1][0] <= 1


def test_requests_that_can_never_run_end_the_sweep_with_the_reason() -> None:
    long = replace(QUEUE, lengths=Lengths(Constant(100), Constant(1)))
    with pytest.raises(SimulationError, match=r"requests of a sample are refused.* 100 tokens and max_model_len is 64"):
        measure(long)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"confidence": 1.0}, r"confidence is 1\.0"),
        ({"num_samples": 1}, "number of samples is 1"),
        ({"rates": ()}, "number of rates is 0"),
        ({"rates": (1.0, 1e9)}, r"a rate is 1000000000\.0"),
    ],
)
def test_values_of_a_sweep_out_of_range_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        measure(**values)


# ------------------------------------------------------------------ readings


def point(rate: float, ttft: float, itl: float | None = None, *, is_overloaded: bool = False) -> Point:
    def around(value: float | None) -> dict[str, Interval]:
        return {} if value is None else dict.fromkeys(PERCENTILES, Interval(value, value / 2, value * 2))

    return Point(rate, around(ttft), {kind: around(itl) for kind in ITL_OF}, 1, 0, rate, rate, 0.5, 1.0, is_overloaded)


RISING = Curve([point(1, 0.1, 0.01), point(2, 0.2, 0.04), point(4, 0.4, 0.02)])


def test_a_reading_is_interpolated_on_logarithmic_scales() -> None:
    found = highest_rate(RISING, "p99", Targets(ttft=0.2 * math.sqrt(2)))
    assert found.limit == "ttft"
    assert found.rate.value == pytest.approx(2 * math.sqrt(2))
    assert found.rate.low == pytest.approx(math.sqrt(2))
    assert found.rate.high == math.inf
    both = highest_rate(RISING, "p99", Targets(ttft=0.3, itl=0.02))
    assert both.limit == "itl" and both.rate.value == pytest.approx(math.sqrt(2))


def test_a_latency_that_falls_again_does_not_raise_the_reading() -> None:
    assert highest_rate(RISING, "p99", Targets(itl=0.03)).rate.value < 2


def test_targets_that_all_or_no_rates_meet_have_no_limit() -> None:
    assert highest_rate(RISING, "p50", Targets(ttft=0.05)).rate == Interval(0, 0, 1)
    all_meet = highest_rate(RISING, "p50", Targets(ttft=5))
    assert all_meet.rate.value == math.inf and all_meet.limit == ""
    no_gaps = Curve([point(1, 0.1), point(2, 0.2)])
    assert highest_rate(no_gaps, "p50", Targets(itl=0.001)).limit == ""


def test_a_queue_without_end_limits_what_no_latency_does() -> None:
    curve = replace(RISING, saturation=Interval(3.0, 2.5, 3.5))
    found = highest_rate(curve, "p99", Targets(itl=1.0))
    assert found.limit == "queue" and found.rate == Interval(3.0, 2.5, 3.5)
    assert highest_rate(curve, "p99", Targets(ttft=0.2)).limit == "ttft"


def test_a_reading_agrees_with_the_law_of_the_queue(curve: Curve) -> None:
    """At 7 requests/s the p99 of TTFT is known; the reading for that target is about 7."""
    found = highest_rate(curve, "p99", Targets(ttft=ttft_of_queue(7.0, 0.99))).rate
    assert found.low <= 7.0 <= found.high and found.value == pytest.approx(7.0, rel=0.2)


def test_figures_between_points_are_interpolated_and_those_beyond_are_kept() -> None:
    assert at_rate(RISING.points, [1.0, 4.0, 16.0], math.sqrt(2)) == pytest.approx(2.0)
    assert at_rate(RISING.points, [1.0, 4.0, 16.0], 100.0) == pytest.approx(16.0)


# ------------------------------------------------------------------ the picture


@pytest.mark.parametrize("percentile", ["p50", "p99"])
def test_the_picture_has_a_line_and_a_band_for_each_curve(percentile: str) -> None:
    beyond = Curve([*RISING.points, point(8, 9.0, 0.5, is_overloaded=True)])
    curves = {"one": RISING, "a < b": beyond, "single": Curve([point(3, 0.2, 0.02)])}
    drawn = frontier_svg(curves, 0.9, Targets(ttft=0.3, itl=0.05, itl_of="request"), percentile)
    root = ElementTree.fromstring(drawn)
    of_class = [each.get("class") for each in root.iter()]
    assert of_class.count("band") == 4 and of_class.count("target") == 2
    assert of_class.count("line median") == (0 if percentile == "p50" else 4)
    assert of_class.count("line") == 4 and of_class.count("line beyond") >= 2
    texts = [each.text for each in root.iter() if each.text]
    assert "a < b" in texts and "target 300 ms" in texts and f"ITL (TPOT), {percentile}" in texts


def test_lines_of_the_picture_stay_within_the_charts() -> None:
    steep = Curve([point(1, 0.01), point(2, 0.02), point(2.1, 500.0, is_overloaded=True)])
    drawn = frontier_svg({"steep": steep}, 0.9, Targets(ttft=0.05))
    assert "no values" in drawn, "no ITL"
    for path in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}path"):
        if "line" in (path.get("class") or ""):
            places = [part.split() for part in path.get("d", "").replace("M", "L").split("L")[1:]]
            assert all(0 <= float(x) <= 440 and 29 <= float(y) <= 225 for x, y in places)
