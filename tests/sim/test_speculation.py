"""Drafts of the simulator: the real scheduler verifies them, and probabilities accept them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import Listener, Request, Scheduler, SchedulerOutput, StepResult, StepUpdate
from pointsman.core.presets import SYSTEMS
from pointsman.core.recording import Recorder
from pointsman.sim.accuracy import RequestErrors
from pointsman.sim.calibrate import calibrate, from_requests
from pointsman.sim.errors import SimulationError
from pointsman.sim.features import Features
from pointsman.sim.observed import replayed
from pointsman.sim.outcome import Timings
from pointsman.sim.profile import load_profile
from pointsman.sim.replica import Replica
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import simulate
from pointsman.sim.speculation import (
    Speculation,
    acceptance_of_length,
    acceptance_of_rates,
    mean_length,
    measured_speculation,
    parse_acceptance,
)
from pointsman.sim.step_log import observed_speculation, read_steps
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceError, read_observed
from tests.forms import seeds
from tests.sim.measured_logs import SETTINGS, measured_log
from tests.sim.observed_logs import observed_lines, write_observed
from tests.sim.test_simulator import STEP_TIME, Listed, config, same, workload

ACCEPTANCE = (0.8, 0.6, 0.4)
DRAFTS = Features(speculation=Speculation(acceptance=ACCEPTANCE, drafter_seconds=1e-3, drafter_share=0.05))
N_GRAM = Features(speculation=Speculation(acceptance=ACCEPTANCE, proposal=(0.4, 0.9, 0.9), seed=3))


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no caching": {"enable_prefix_caching": False},
    "priority": {"order": "priority", "num_blocks": 40},
    "few blocks": {"num_blocks": 33, "full_sequence_must_fit": False},
    "few drafts beside many requests": {"draft_table": ((3, 2), (5, 0)), "num_blocks": 40},
    "no drafts beside two requests": {"draft_table": ((2, 0),)},
    "small budget": {"max_num_batched_tokens": 14},
    "padded": {"pad_first_decodes": True, "num_blocks": 40},
    **{name: {**SYSTEMS[name], "max_num_seqs": 12, "max_num_batched_tokens": 300} for name in SYSTEMS},
}


@pytest.mark.parametrize("features", [DRAFTS, N_GRAM], ids=["all drafts", "n-gram"])
@pytest.mark.parametrize("name", CONFIGS)
def test_runs_of_decodes_and_single_steps_are_equal_with_drafts(name: str, features: Features) -> None:
    settings = config(num_draft_tokens=3, **CONFIGS[name])
    if settings.max_steps_in_flight > 1:
        settings = settings.replace(max_steps_in_flight=1)
    for seed in seeds(1, 10):
        fast = simulate(workload(seed), settings, STEP_TIME, features=features)
        same(fast, simulate(workload(seed), settings, STEP_TIME, features=features, is_stepping=True))
        assert fast.stats[0].num_draft_tokens > 0
        if name.startswith("no drafts beside"):
            assert len(fast.timelines[0].events) < fast.timelines[0].num_steps


def test_drafts_change_no_output_and_save_steps() -> None:
    plain = simulate(workload(5), config(), STEP_TIME)
    drafted = simulate(workload(5), config(num_draft_tokens=3), STEP_TIME, features=DRAFTS)
    np.testing.assert_array_equal(np.sort(plain.timings.num_output_tokens), np.sort(drafted.timings.num_output_tokens))
    assert drafted.timelines[0].num_steps < 0.7 * plain.timelines[0].num_steps


class Counts(Listener):
    """A listener that counts the tokens of each step of a request alone."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.drafts: list[int] = []

    def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
        self.tokens += update.counts.tolist()
        self.drafts += output.num_draft_tokens.tolist()


def _run_alone(length: int, features: Features, **overrides: Any) -> tuple[Counts, Timings]:
    timings, counts = Timings(), Counts()
    settings = config(num_draft_tokens=3, max_model_len=4096, num_blocks=600, **overrides)
    replica = Replica(settings, LinearStepTime(per_step=1.0), timings, features=features, listeners=[counts])
    replica.add(timings.add_request(0.0, 4), SimRequest("a", 4, length), 0.0)
    while replica.plan_event() is not None:
        replica.commit_event()
    timings.close()
    return counts, timings


def test_numbers_of_tokens_are_those_of_the_acceptance() -> None:
    counts, timings = _run_alone(3000, Features(speculation=Speculation(acceptance=ACCEPTANCE)))
    assert sum(counts.tokens) == 3000 == timings.num_output_tokens[0]
    assert counts.drafts[0] == 0 and set(counts.drafts[1:-3]) == {3}
    accepted = np.array(counts.tokens[1:-3]) - 1
    for number, expected in enumerate(np.cumprod(ACCEPTANCE), start=1):
        share = float(np.mean(accepted >= number))
        assert share == pytest.approx(expected, abs=4 * np.sqrt(expected * (1 - expected) / len(accepted)))


@pytest.mark.parametrize("acceptance, steps", [((1.0, 1.0, 1.0), 11), ((0.0, 0.0, 0.0), 41), ((1.0, 0.0, 1.0), 21)])
def test_certain_acceptances_take_as_many_steps_as_counted(acceptance: tuple[float, ...], steps: int) -> None:
    """41 tokens: one after the prompt, then 40 in runs of 4, 1 or 2."""
    counts, timings = _run_alone(41, Features(speculation=Speculation(acceptance=acceptance)))
    assert len(counts.tokens) == steps
    assert timings.last_token[0] == steps
    assert sum(counts.tokens) == 41


def test_a_run_of_accepted_drafts_ends_with_its_request() -> None:
    for length in range(1, 12):
        counts, timings = _run_alone(length, Features(speculation=Speculation(acceptance=(1.0, 1.0, 1.0))))
        assert sum(counts.tokens) == length == timings.num_output_tokens[0]


def test_the_drafter_takes_time_after_each_step_that_samples() -> None:
    drafter = Speculation(acceptance=(1.0, 1.0, 1.0), drafter_seconds=0.5, drafter_share=0.25)
    _, timings = _run_alone(41, Features(speculation=drafter))
    assert timings.last_token[0] == pytest.approx(11 * 1.75)


def test_proposals_are_cut_to_their_probabilities() -> None:
    counts, _ = _run_alone(3000, Features(speculation=Speculation(acceptance=ACCEPTANCE, proposal=(0.3, 0.5, 1.0))))
    drafts = np.array(counts.drafts[1:-3])
    assert np.mean(drafts >= 1) == pytest.approx(0.3, abs=0.04)
    assert np.mean(drafts >= 2) == pytest.approx(0.15, abs=0.03)
    assert not np.count_nonzero(drafts == 2)


def test_draws_depend_on_the_request_and_its_tokens_alone() -> None:
    """The budget delays steps and cuts no drafts; the run lengths of a request are then the same."""
    alone, _ = _run_alone(400, DRAFTS)
    timings, counts = Timings(), {}
    settings = config(num_draft_tokens=3, max_model_len=4096, num_blocks=600, max_num_batched_tokens=64)
    replica = Replica(settings, STEP_TIME, timings, features=DRAFTS)

    class ByRequest(Listener):
        def on_update(self, output: SchedulerOutput, update: StepUpdate, now: float) -> None:
            for request, count in zip(output.requests, update.counts.tolist(), strict=True):
                if count:
                    counts.setdefault(request.request_id, []).append(count)

    replica.scheduler.add_listener(ByRequest())
    for index in range(8):
        replica.add(timings.add_request(0.0, 4), SimRequest(f"r{index}", 4, 400, index=index), 0.0)
    while replica.plan_event() is not None:
        replica.commit_event()
    assert counts["r0"] == alone.tokens
    assert len({tuple(each) for each in counts.values()}) == 8


def test_a_step_with_drafts_has_their_tokens_and_choices_in_its_load() -> None:
    """Prefill of 4 tokens, then steps of 4 tokens at 4 positions each; none of them computes a prompt."""
    per_choice = LinearStepTime(per_token=1.0, per_sample=100.0, per_prefill=10_000.0)
    timings = Timings()
    sure = Features(speculation=Speculation(acceptance=(1.0, 1.0, 1.0)))
    replica = Replica(config(num_draft_tokens=3), per_choice, timings, features=sure)
    replica.add(timings.add_request(0.0, 4), SimRequest("a", 4, 9), 0.0)
    ends = []
    while (end := replica.plan_event()) is not None:
        ends.append(end)
        replica.commit_event()
    assert np.diff([0.0, *ends]).tolist() == [4 + 100 + 10_000, 404, 404]


def test_the_cost_of_adapters_is_added_to_steps_that_have_one() -> None:
    settings = config(max_loras=1, max_num_seqs=1)
    both = Listed([(0.0, SimRequest("a", 4, 5, adapter=7)), (0.0, SimRequest("b", 4, 5, index=1))], {})
    for is_stepping in (False, True):
        outcome = simulate(
            both, settings, LinearStepTime(per_step=1.0), features=Features(adapter_share=0.5), is_stepping=is_stepping
        )
        assert outcome.timings.last_token.tolist() == pytest.approx([7.5, 12.5])


def test_the_scheduler_limits_the_adapters_of_a_step() -> None:
    """Of two adapters one at a time: the second adapter waits, and a request without one does not."""
    settings = config(max_loras=1)
    three = [SimRequest(f"r{index}", 4, 5, adapter=adapter, index=index) for index, adapter in enumerate((1, 2, None))]
    outcome = simulate(Listed([(0.0, each) for each in three], {}), settings, LinearStepTime(per_step=1.0))
    assert outcome.timings.first_token.tolist() == [1.0, 6.0, 2.0]


# ---------------------------------------------------------------------- acceptances


def test_an_acceptance_of_a_mean_length_has_that_length() -> None:
    for length in (1.0, 1.7, 3.2, 4.0):
        assert mean_length(acceptance_of_length(length, 3)) == pytest.approx(length)
    assert Speculation(acceptance=(0.5, 0.5), proposal=(0.5, 1.0)).mean_length == pytest.approx(1 + 0.25 + 0.125)


def test_rates_of_a_log_become_conditional_probabilities() -> None:
    assert acceptance_of_rates([0.8, 0.4, 0.4]) == pytest.approx((0.8, 0.5, 1.0))
    assert acceptance_of_rates([0.0, 0.0]) == (0.0, 0.0)


def test_the_text_of_an_acceptance_has_four_forms() -> None:
    assert parse_acceptance("0.7,0.5", 2) == (0.7, 0.5)
    assert parse_acceptance("0.7", 3) == (0.7, 0.7, 0.7)
    assert parse_acceptance("rates:0.8,0.4", 2) == pytest.approx((0.8, 0.5))
    assert mean_length(parse_acceptance("length:2.5", 4)) == pytest.approx(2.5)


@pytest.mark.parametrize(
    "text, message",
    [
        ("1.5", "'1.5'; each probability must be from 0 to 1"),
        ("0.5,x", "'0.5,x'; give the probability"),
        ("nan", "'nan'; give the probability"),
        ("length:9", "length is 9; with 3 draft\\(s\\) it must be from 1 to 4"),
        ("length:1,2", "'length:1,2'; give"),
        ("rates:0.5,0.6", "rates are 0.5, 0.6; they must be from 0 to 1, and must not rise"),
    ],
)
def test_a_wrong_acceptance_is_refused_with_its_limits(text: str, message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        parse_acceptance(text, 3)


def test_measured_counts_give_back_the_probabilities() -> None:
    """Drafts of a known speculation, counted as a recording counts them."""
    truth = Speculation(acceptance=(0.7, 0.5, 0.2), proposal=(0.6, 0.9, 0.5), seed=5)
    keys = np.array([truth.request_key(index) for index in range(40_000)], dtype=np.uint64)
    known = np.arange(40_000)
    drafts = truth.num_proposed(keys, known, 3)
    accepted = truth.num_accepted(keys, known, drafts)
    pairs = zip(drafts.tolist(), accepted.tolist(), strict=True)
    found = measured_speculation(((each, passed, 1) for each, passed in pairs), 3)
    assert found.acceptance == pytest.approx(truth.acceptance, abs=0.02)
    assert found.proposal == pytest.approx(truth.proposal, abs=0.02)
    assert measured_speculation([], 2).acceptance == (0.0, 0.0)


@pytest.mark.parametrize(
    "features, overrides, message",
    [
        (Features(), {"num_draft_tokens": 2}, "num_draft_tokens is 2, and it is not known"),
        (DRAFTS, {}, "num_draft_tokens is 0, so there are no drafts"),
        (DRAFTS, {"num_draft_tokens": 4}, "num_draft_tokens is 4, but the acceptance is known for 3"),
        (DRAFTS, {"num_draft_tokens": 3, "max_steps_in_flight": 2}, "set max_steps_in_flight to 1"),
    ],
)
def test_features_that_do_not_fit_the_scheduler_are_refused(
    features: Features, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(SimulationError, match=message):
        simulate(workload(1), config(**overrides), STEP_TIME, features=features)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"acceptance": (1.2,)}, "acceptance is 1.2"),
        ({"acceptance": (0.5,), "proposal": (0.5, 0.5)}, "proposal has 2 positions and acceptance 1"),
        ({"acceptance": (0.5,) * 65}, "65 positions; at most 64"),
        ({"acceptance": (0.5,), "drafter_seconds": -1.0}, "drafter_seconds is -1.0"),
    ],
)
def test_impossible_speculation_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SimulationError, match=message):
        Speculation(**values)


def test_a_negative_cost_of_adapters_is_refused() -> None:
    with pytest.raises(SimulationError, match=r"adapter_share is -0\.1"):
        Features(adapter_share=-0.1)


# ---------------------------------------------------------------------- recordings

MEASURED = Speculation(acceptance=(0.7, 0.5), proposal=(0.8, 0.9))


def test_a_recording_shows_drafts_and_their_acceptance(tmp_path: Path) -> None:
    """Of recorded requests each step's drafts are known, so tokens and steps are those of the recording."""
    path = write_observed(tmp_path / "r.jsonl", observed_lines(120, drafts=MEASURED))
    observed = read_observed(path)
    assert all(0 <= each.num_runs_tokens - each.num_output_tokens <= 2 for each in observed.requests)
    happened = replayed(observed, "r.jsonl")
    found = happened.features.speculation
    assert found is not None
    assert found.acceptance == pytest.approx(MEASURED.acceptance, abs=0.07)
    assert found.proposal == pytest.approx(MEASURED.proposal, abs=0.05)
    stats = happened.outcome.stats[0]
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_profile_of_a_recording_has_its_drafts(tmp_path: Path) -> None:
    path = write_observed(tmp_path / "r.jsonl", observed_lines(120, drafts=MEASURED))
    profile = calibrate(path).profile
    assert profile.settings.num_draft_tokens == 2
    assert profile.speculation == observed_speculation(read_observed(path))
    assert any("tokens a step; step times include the drafter" in note for note in profile.notes)
    profile.save(tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def test_simulated_drafts_of_a_recording_take_its_end_to_end_times(tmp_path: Path) -> None:
    """The recording's own acceptance and step times predict the mean end-to-end time."""
    path = write_observed(tmp_path / "r.jsonl", observed_lines(200, drafts=MEASURED, rate=8.0))
    happened = replayed(read_observed(path), "r.jsonl")
    outcome = simulate(
        OpenLoop(happened.trace), happened.config, calibrate(path).profile.step_time, features=happened.features
    )
    measured, predicted = (
        float(np.mean(each.timings.last_token - each.timings.arrival)) for each in (happened.outcome, outcome)
    )
    assert predicted == pytest.approx(measured, rel=0.05)


def test_asynchronous_drafts_are_simulated_one_step_at_a_time(tmp_path: Path) -> None:
    lines = observed_lines(40, drafts=MEASURED)
    lines[0]["config"]["max_steps_in_flight"] = 2
    happened = replayed(read_observed(write_observed(tmp_path / "r.jsonl", lines)), "r.jsonl")
    assert happened.config.max_steps_in_flight == 1


@pytest.mark.parametrize(
    "drafts, message",
    [([[1, 2, 1]], "2 of 1 drafts were accepted"), ([[1, 1, 0]], "a number of steps"), ([[1, 1]], "not a recorded")],
)
def test_impossible_drafts_of_a_recording_are_refused(drafts: list[list[int]], message: str, tmp_path: Path) -> None:
    lines = observed_lines(10, drafts=MEASURED)
    next(line for line in lines if line.get("call") == "result")["drafts"] = drafts
    with pytest.raises(TraceError, match=message):
        read_observed(write_observed(tmp_path / "r.jsonl", lines))


def test_too_many_drafts_of_a_recording_are_refused(tmp_path: Path) -> None:
    lines = observed_lines(40, drafts=MEASURED)
    lines[0]["config"]["num_draft_tokens"] = 10**9
    with pytest.raises(SimulationError, match="num_draft_tokens is 1000000000; it must be a whole number from 0 to 64"):
        calibrate(write_observed(tmp_path / "r.jsonl", lines))


def test_own_recordings_show_drafts_too(tmp_path: Path) -> None:
    """A recording of the core with measured steps, as the engine writes it."""
    path = tmp_path / "own.jsonl"
    truth = Speculation(acceptance=(0.8, 0.4), proposal=(0.5, 1.0))
    settings = config(num_draft_tokens=2, max_model_len=1024, num_blocks=200)
    with path.open("w", encoding="utf-8") as file:
        scheduler = Scheduler(settings, recorder=Recorder(file))
        keys = {f"r{index}": truth.request_key(index) for index in range(12)}
        for name in keys:
            scheduler.add(Request(name, range(8), arrival_time=0.0, max_tokens=300), 0.0)
        now = 0.0
        while scheduler.has_unfinished_requests():
            output = scheduler.schedule(now)
            now += 0.01
            of_rows = np.array([keys[each.request_id] for each in output.requests], dtype=np.uint64)
            known = output.num_computed_tokens + output.num_scheduled_tokens - output.num_draft_tokens
            counts = 1 + truth.num_accepted(of_rows, known, output.num_draft_tokens)
            counts[~output.samples] = 0
            result = StepResult([7] * int(counts.sum()), counts, step_time=0.01)
            update = scheduler.update(output, result, now)
            proposed = truth.num_proposed(of_rows, known + update.counts, 2)
            scheduler.propose(output, [7] * int(proposed.sum()), proposed, now)
    found = read_steps(path).speculation
    assert found is not None
    assert found.acceptance == pytest.approx(truth.acceptance, abs=0.06)
    assert found.proposal == pytest.approx(truth.proposal, abs=0.05)


def test_the_cost_of_adapters_is_measured_where_steps_differ(tmp_path: Path) -> None:
    path = write_observed(tmp_path / "r.jsonl", observed_lines(80, num_adapters=3, adapter_share=0.3, rate=1.0))
    profile = calibrate(path).profile
    assert profile.adapter_share == pytest.approx(0.3, abs=0.02)
    assert profile.settings.max_loras == 3
    assert profile.step_time.per_step == pytest.approx(8e-3, rel=0.03)
    happened = replayed(read_observed(path), "r.jsonl")
    assert {each.adapter for each in happened.trace} == {None, 0, 1, 2}
    features = Features(adapter_share=profile.adapter_share)
    outcome = simulate(OpenLoop(happened.trace), happened.config, profile.step_time, features=features)
    np.testing.assert_allclose(outcome.timings.last_token, happened.outcome.timings.last_token, rtol=0.02)


def test_adapters_in_every_step_are_part_of_the_step_times(tmp_path: Path) -> None:
    lines = observed_lines(80, num_adapters=1, adapter_share=0.3, rate=50.0)
    for line in lines:
        if line.get("call") == "steps":
            line["num_adapters"] = [1] * len(line["num_rows"])
    profile = calibrate(write_observed(tmp_path / "r.jsonl", lines)).profile
    assert profile.adapter_share == 0
    assert "all steps have adapters, so step times include their time" in profile.notes


@pytest.mark.long
def test_the_fit_to_requests_knows_the_drafts_of_their_engine() -> None:
    settings = replace(SETTINGS, num_draft_tokens=3)
    speculation = Speculation(acceptance=ACCEPTANCE)
    measured = measured_log(60, settings=settings, speculation=speculation)
    found = from_requests(measured, settings, speculation=speculation, num_processes=1)
    assert isinstance(found.held_out, RequestErrors)
    assert found.held_out.e2e_mape < 0.06
    assert abs(found.held_out.e2e_bias) < 0.03
    assert found.profile.speculation == speculation
    with pytest.raises(SimulationError, match="it is not known"):
        from_requests(measured, settings, num_processes=1)
