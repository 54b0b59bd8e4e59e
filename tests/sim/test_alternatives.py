"""Step times that explain a log about as well as the fit: their ranges hold the truth, and the log decides how wide."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pointsman.sim.accuracy import Times
from pointsman.sim.advice import Lengths, advised_load, questions_of
from pointsman.sim.alternatives import MAX_ALTERNATIVES, Prior, Question, find_alternatives, ranges
from pointsman.sim.bounded import BoundedStepTime, bounded
from pointsman.sim.calibrate import Calibration, from_requests
from pointsman.sim.contradictions import contradictions
from pointsman.sim.devices import device
from pointsman.sim.fit import SCALED, STARTS, Objective, Problem, simulate_log, simulated_times, steps_of_log
from pointsman.sim.hull import WatchedStepTime, warn_outside
from pointsman.sim.profile import EngineSettings, Profile
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import LinearStepTime, RooflineStepTime, StepLoad, StepTime
from pointsman.traces import MeasuredRequest, TraceRequest
from tests.sim.measured_logs import SETTINGS, SMALL, measured_log

ONE = Question("one request decodes", StepLoad(1, 1, 400, 400, 1))
MANY = Question("24 requests decode", StepLoad(24, 24, 9600, 9600, 24))
SECONDS = 0.012


def cost(step_time: LinearStepTime) -> float:
    """How badly step times explain a log whose steps all have the load of `MANY` and take `SECONDS`, to 2 %."""
    return float((np.log(step_time.of_step(MANY.load) / SECONDS) / 0.02) ** 2)


SCALE = SECONDS / STARTS["sum"].of_step(MANY.load)
FIT = replace(STARTS["sum"], **{name: SCALE * getattr(STARTS["sum"], name) for name in SCALED})
PRIOR = Prior(FIT, {"per_step": 2.0, "per_row": 2.0, "per_token": 2.0})


def test_alternatives_span_a_load_that_the_log_does_not_show() -> None:
    pytest.importorskip("scipy")
    found = find_alternatives(FIT, [ONE, MANY], [PRIOR], cost)
    assert 0 < len(found) <= MAX_ALTERNATIVES and FIT not in found
    assert all(cost(each) < 10 for each in found)
    unseen, seen = ranges(FIT, found, [ONE, MANY])
    assert unseen.is_open and unseen.high > 1.5 * unseen.low
    assert not seen.is_open and seen.low < SECONDS < seen.high


def test_alternatives_are_not_below_the_floor() -> None:
    pytest.importorskip("scipy")
    floor = LinearStepTime(per_step=0.008)
    found = find_alternatives(FIT, [ONE], [PRIOR], cost, floor=floor)
    (allowed,) = ranges(FIT, found, [ONE], floor)
    assert allowed.low >= 0.008
    assert min(each.of_step(ONE.load) for each in find_alternatives(FIT, [ONE], [PRIOR], cost)) < 0.008


def test_rejected_alternatives_are_replaced_by_nearer_ones() -> None:
    pytest.importorskip("scipy")
    (wide,) = ranges(FIT, find_alternatives(FIT, [ONE], [PRIOR], cost), [ONE])
    near = find_alternatives(
        FIT,
        [ONE],
        [PRIOR],
        cost,
        are_good=lambda proposals: [each.of_step(ONE.load) > 0.9 * wide.seconds for each in proposals],
    )
    (narrow,) = ranges(FIT, near, [ONE])
    assert narrow.low > 0.9 * wide.seconds > wide.low
    assert narrow.high == pytest.approx(wide.high)


def test_bounded_step_times_are_the_longer_of_two() -> None:
    roofline = RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("h100"))
    floor = roofline.bound()
    assert floor is not None
    fast = LinearStepTime(per_step=1e-3, per_token=1e-4)
    both = bounded(fast, floor)
    assert isinstance(both, BoundedStepTime) and bounded(fast, None) is fast
    for load in (StepLoad(1, 1, 400, 400, 1), StepLoad(512, 2, 512, 90_000, 1)):
        assert both.of_step(load) == max(fast.of_step(load), floor.of_step(load))
    steps = both.of_decodes(4, 2000, 30)
    assert steps[0] == pytest.approx(both.of_step(StepLoad(4, 4, 2000, 2000, 4)))
    assert (steps >= floor.of_decodes(4, 2000, 30)).all()


# ---------------------------------------------------------------------- fixed steps


@pytest.mark.parametrize("num_engines", [1, 2])
def test_fixed_steps_repeat_the_times_of_their_simulation(num_engines: int) -> None:
    settings = replace(SETTINGS, data_parallel_size=num_engines)
    log = measured_log(40, 8.0 * num_engines, settings=settings)
    order = np.argsort(Times.of(log).last_token, kind="stable")
    problem = Problem(log, order[:30], settings.config(10_000, 40), topology=settings.topology)
    steps = steps_of_log(problem, SMALL)
    timings = simulate_log(log, problem.config, SMALL, topology=settings.topology).timings
    lengths = Times.of([log[index] for index in problem.train.tolist()]).num_output_tokens
    simulated = simulated_times(timings, problem.train, lengths, np.inf)
    again = steps.times(SMALL)
    np.testing.assert_allclose(again.first_token, simulated.first_token, rtol=2e-3, atol=1e-3)
    np.testing.assert_allclose(again.last_token, simulated.last_token, rtol=2e-3, atol=1e-3)
    slower = steps.times(replace(SMALL, per_step=1.1 * SMALL.per_step))
    objective = Objective(problem, 30)
    by_simulation = objective.simulate_times(replace(SMALL, per_step=1.1 * SMALL.per_step))
    assert slower.e2e.mean() == pytest.approx(by_simulation.e2e.mean(), rel=0.05)
    assert slower.e2e.mean() > again.e2e.mean()


# ---------------------------------------------------------------------- a log that is always full

QWEN = RooflineStepTime(shape=model_shape("Qwen3-32B"), device=device("h100"), tensor_parallel=2)
ROWS = LinearStepTime(per_step=4e-3, per_row=4e-4, per_token=4e-5, per_context_token=2e-7)
FULL = EngineSettings(max_num_seqs=32)


def full_log(truth: StepTime, seed: int, settings: EngineSettings = FULL) -> tuple[MeasuredRequest, ...]:
    return measured_log(140, np.inf, truth, settings, noise=0.025, prompt=400, output=120, seed=seed)


def light_load(profile: Profile, step_time: StepTime) -> tuple[float, list[str]]:
    """TPOT of requests that run alone, and warnings."""
    sent = [
        MeasuredRequest(TraceRequest(100.0 * index, 400, 120), f"r{index}", 100.0 * index, 0, 0) for index in range(5)
    ]
    watched = WatchedStepTime(step_time)
    timings = simulate_log(sent, profile.settings.config(520, 5), watched).timings
    tpot = (timings.last_token - timings.first_token) / 119
    return float(tpot.mean()), warn_outside(profile, watched.seen)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("truth", [QWEN, ROWS], ids=["roofline", "rows"])
def test_light_load_after_a_full_log_is_right_or_warned_about(truth: StepTime, seed: int) -> None:
    pytest.importorskip("scipy")
    found = from_requests(full_log(truth, seed), FULL)
    profile = found.profile
    right, _ = light_load(profile, truth)
    predicted, warnings = light_load(profile, profile.step_time)
    assert abs(predicted / right - 1) < 0.15 or warnings
    others = [light_load(profile, each)[0] for each in profile.alternatives]
    assert min(predicted, *others) < 1.15 * right and max(predicted, *others) > 0.85 * right
    assert any("the log leaves open how long these steps take: one request decodes" in note for note in profile.notes)
    assert any("vllm bench serve --model MODEL" in note for note in profile.notes)


@pytest.mark.long
def test_a_full_log_with_its_model_and_device_is_not_below_the_bound() -> None:
    pytest.importorskip("scipy")
    profile = from_requests(full_log(QWEN, 1), FULL, estimate=QWEN).profile
    floor = QWEN.bound()
    assert floor is not None and profile.floor == floor
    for each in (profile.step_time, *profile.alternatives):
        for question in questions_of(Lengths(400, 120), FULL):
            assert profile.bounded(each).of_step(question.load) >= floor.of_step(question.load)
    right, _ = light_load(profile, QWEN)
    assert light_load(profile, profile.bounded(profile.step_time))[0] == pytest.approx(right, rel=0.15)


def bursts(found: Calibration, truth: StepTime, num_requests: int) -> tuple[MeasuredRequest, ...]:
    """The first requests of the load that is advised after a fit."""
    load = advised_load(found.profile, Lengths(400, 120))
    rng = np.random.default_rng(3)
    gaps = rng.gamma(load.burstiness, 1 / (load.burstiness * load.rate), num_requests)
    sizes = [
        rng.integers(round(0.1 * mean), round(1.9 * mean) + 1, num_requests).tolist()
        for mean in (load.num_prompt_tokens, load.num_output_tokens)
    ]
    sent = [
        MeasuredRequest(TraceRequest(at, prompt, max(1, output)), f"r{index}", at, 0, 0)
        for index, (at, prompt, output) in enumerate(zip(np.cumsum(gaps).tolist(), *sizes, strict=True))
    ]
    longest = max(each.request.num_prompt_tokens + each.request.num_output_tokens for each in sent)
    timings = simulate_log(sent, FULL.config(longest, num_requests), truth).timings
    times = zip(sent, timings.first_token.tolist(), timings.last_token.tolist(), strict=True)
    return tuple(replace(each, first_token=first, last_token=last) for each, first, last in times)


@pytest.mark.long
def test_the_advised_load_shows_what_a_full_log_leaves_open() -> None:
    pytest.importorskip("scipy")
    full = from_requests(full_log(ROWS, 1), FULL)
    told = from_requests(bursts(full, ROWS, 300), FULL)
    right, _ = light_load(told.profile, ROWS)
    predicted, warnings = light_load(told.profile, told.profile.step_time)
    assert predicted == pytest.approx(right, rel=0.05) and not warnings
    wide, narrow = (each.allowed[0].high / each.allowed[0].low for each in (full, told))
    assert narrow < 0.6 * wide


@pytest.mark.long
@pytest.mark.parametrize("is_lockstep", [False, True], ids=["alone", "together"])
def test_a_fit_predicts_the_log_of_data_parallel_engines(is_lockstep: bool) -> None:
    pytest.importorskip("scipy")
    experts = LinearStepTime(per_step=3e-3, per_row=2e-5, per_token=4e-6, expert_weights=8e-3, expert_share=0.06, r=4)
    settings = EngineSettings(max_num_seqs=24, data_parallel_size=2, is_lockstep=is_lockstep)
    log = measured_log(120, np.inf, experts if is_lockstep else SMALL, settings, output=80)
    assert from_requests(log, settings).profile.held_out_errors["e2e_mape"] < 0.03  # type: ignore[operator]
    (wrong,) = contradictions(Times.of(log), replace(settings, data_parallel_size=1, is_lockstep=False))
    assert "more engines (--data-parallel-size)" in wrong
