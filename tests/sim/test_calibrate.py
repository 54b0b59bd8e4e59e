"""Calibration: the fit finds the step times of a log, and predicts requests that it has not seen."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import KVGroup
from pointsman.core.recording import Recorder
from pointsman.sim import fit
from pointsman.sim.accuracy import RequestErrors, StepErrors, Times
from pointsman.sim.calibrate import Calibration, calibrate, calibrate_steps, from_requests
from pointsman.sim.devices import device
from pointsman.sim.errors import CalibrationError
from pointsman.sim.fit import Objective, Problem
from pointsman.sim.profile import EngineSettings, Hull, Profile, WatchedStepTime, load_profile, warn_outside
from pointsman.sim.shapes import SHAPES, model_shape
from pointsman.sim.simulator import simulate
from pointsman.sim.step_log import StepLog, fit_steps, predict_steps
from pointsman.sim.step_time import KNOWN_CHECKS, LinearStepTime, RooflineStepTime, StepLoad
from pointsman.sim.workload import OpenLoop
from pointsman.traces import MeasuredRequest, TraceError, read_measurements
from tests.core.helpers import Host, small_config
from tests.sim.measured_logs import SETTINGS, SMALL, measured_log, write_log

SHARED_LOG = Path(__file__).parents[3] / "shared" / "traces" / "vllm_0.19_rtxpro6000_llama31_8b.jsonl"
H100 = RooflineStepTime(shape=SHAPES["meta-llama/Llama-3.1-8B"], device=device("h100"))


@pytest.fixture(scope="module")
def small() -> Calibration:
    """The fit that most tests of the short form use, from one start."""
    return short_fit(measured_log(40, 6.0, output=20), SETTINGS)


def short_fit(log: Sequence[MeasuredRequest], settings: EngineSettings) -> Calibration:
    pytest.importorskip("scipy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "STARTS", {"sum": fit.STARTS["sum"]})
        patch.setattr(fit, "FIRST", fit.FIRST[:3])
        patch.setattr(fit, "MORE", fit.MORE[:1])
        return from_requests(log, settings, train=20, num_processes=1)


def held_out(found: Calibration) -> RequestErrors:
    assert isinstance(found.held_out, RequestErrors)
    return found.held_out


# ---------------------------------------------------------------------- timings of requests


def test_a_fit_predicts_held_out_requests_of_a_small_log(small: Calibration) -> None:
    errors = held_out(small)
    assert errors.num_requests == 20
    assert errors.e2e_mape < 0.03
    assert abs(errors.ttft_mean_error) < 0.06
    assert errors.tpot_mean_error is not None and abs(errors.tpot_mean_error) < 0.02
    assert small.is_training.sum() == small.profile.num_train == 20
    assert small.profile.training_errors["num_requests"] == 20


def test_a_poor_fit_notes_that_settings_may_be_wrong(small: Calibration) -> None:
    assert not any("the fit misses" in note for note in small.profile.notes)
    log = measured_log(40, np.inf, settings=replace(SETTINGS, max_num_seqs=4), output=20)
    found = short_fit(log, replace(SETTINGS, max_num_seqs=64))
    (note,) = [note for note in found.profile.notes if "the fit misses" in note]
    assert "max_num_seqs 64" in note


@pytest.mark.long
@pytest.mark.parametrize(
    ("rate", "step_time", "settings", "options"),
    [
        (0.5, LinearStepTime(per_step=6e-3, per_row=2e-5, per_token=2e-5), EngineSettings(), {}),
        (15.0, H100, EngineSettings(), {"output": 150}),
        (np.inf, LinearStepTime(per_step=1e-2, per_row=1e-4, per_token=5e-5, per_context_token=5e-8), SETTINGS, {}),
        (6.0, LinearStepTime(per_step=4e-3, per_row=1e-4, per_token=3e-5, per_context_token=2e-7),
         EngineSettings(async_scheduling=False), {"output": 150}),
        (0.3, LinearStepTime(per_step=2e-2, per_row=1e-3, per_token=2e-3), EngineSettings(max_num_seqs=32), {}),
    ],
    ids=["low", "roofline", "burst", "sync", "cpu"],
)  # fmt: skip
def test_a_fit_predicts_logs_of_different_engines(
    rate: float, step_time: Any, settings: EngineSettings, options: dict[str, Any]
) -> None:
    log = measured_log(160, rate, step_time, settings, **options)
    errors = held_out(from_requests(log, settings))
    assert errors.e2e_mape < 0.03
    assert abs(errors.ttft_mean_error) < 0.06
    assert errors.tpot_mean_error is not None and abs(errors.tpot_mean_error) < 0.02


def roofline(model: str, on: str, tensor_parallel: int = 1) -> RooflineStepTime:
    return RooflineStepTime(shape=model_shape(model), device=device(on), tensor_parallel=tensor_parallel)


DEVICES: dict[str, tuple[RooflineStepTime, float, EngineSettings, dict[str, Any]]] = {
    "low": (roofline("Llama-3.1-8B", "h100"), 3.0, EngineSettings(), {}),
    "medium": (roofline("Llama-3.1-8B", "h100"), 15.0, EngineSettings(), {}),
    "saturated": (roofline("Llama-3.1-8B", "h100"), 40.0, EngineSettings(max_num_seqs=64), {}),
    "saturated, synchronous": (
        roofline("Qwen3-8B", "rtx-4090"), 12.0, EngineSettings(max_num_seqs=48, async_scheduling=False), {},
    ),
    "experts": (roofline("Qwen3-30B-A3B", "h200"), 15.0, EngineSettings(), {}),
    "four devices": (
        roofline("Llama-3.1-70B", "h100", 4), 6.0, EngineSettings(max_num_batched_tokens=8192), {"prompt": 1000},
    ),
    "windows, synchronous": (
        roofline("gpt-oss-20b", "a100"), 5.0, EngineSettings(async_scheduling=False), {"output": 200, "prompt": 800},
    ),
    "a small pool": (roofline("Llama-3.1-8B", "l40s"), 8.0, EngineSettings(num_blocks=900), {"output": 250}),
}  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("name", DEVICES)
def test_a_fit_predicts_different_models_devices_and_rates(name: str) -> None:
    """Step times in the log have 2.5 % noise, so a prediction by the true step times would hardly have smaller
    errors."""
    truth, rate, settings, options = DEVICES[name]
    log = measured_log(300, rate, truth, settings, noise=0.025, **{"output": 150, **options})
    found = from_requests(log, settings, train=105)
    errors, times, everything = held_out(found), Times.of(log), np.arange(len(log))
    longest = max(each.request.num_prompt_tokens + each.request.num_output_tokens for each in log)
    timings = fit.simulate_log(log, settings.config(longest, len(log)), truth)
    by_truth = fit.simulated_times(timings, everything, times.num_output_tokens, np.inf)
    others = everything[~found.is_training]
    least = RequestErrors.between(by_truth[others], times[others])
    assert errors.e2e_mape < 0.01 + least.e2e_mape
    assert abs(errors.ttft_p99_error) < 0.06 + abs(least.ttft_p99_error)
    assert errors.tpot_mean_error is not None and abs(errors.tpot_mean_error) < 0.015


@pytest.mark.long
def test_a_fit_predicts_the_shared_log_of_vllm(tmp_path: Path) -> None:
    if not SHARED_LOG.exists():
        pytest.skip(f"{SHARED_LOG.name} is not in {SHARED_LOG.parent}")
    settings = EngineSettings(max_num_seqs=128, max_num_batched_tokens=2048)
    errors = held_out(calibrate(SHARED_LOG, settings, train=105))
    assert errors.num_requests == 195
    assert errors.e2e_mape <= 0.015
    assert abs(errors.ttft_p99_error) <= 0.04
    assert errors.tpot_mean_error is not None and abs(errors.tpot_mean_error) <= 0.015


def test_errors_of_the_roofline_on_the_shared_log_match_the_known_check() -> None:
    if not SHARED_LOG.exists():
        pytest.skip(f"{SHARED_LOG.name} is not in {SHARED_LOG.parent}")
    log = read_measurements(SHARED_LOG)
    settings = EngineSettings(max_num_seqs=128, max_num_batched_tokens=2048)
    times, everything = Times.of(log), np.arange(len(log))
    longest = max(each.request.num_prompt_tokens + each.request.num_output_tokens for each in log)
    timings = fit.simulate_log(log, settings.config(longest, len(log)), roofline("Llama-3.1-8B", "rtx-pro-6000"))
    errors = RequestErrors.between(fit.simulated_times(timings, everything, times.num_output_tokens, np.inf), times)
    (check,) = (check for check in KNOWN_CHECKS if check.model == "Llama-3.1-8B")
    assert errors.ttft_mean_error == pytest.approx(check.ttft, abs=0.006)
    assert errors.tpot_mean_error == pytest.approx(check.tpot, abs=0.006)
    assert errors.e2e_bias == pytest.approx(check.e2e, abs=0.006)


def test_times_of_held_out_requests_do_not_affect_the_fit() -> None:
    """Held-out times are changed, with the order of finishing kept: the objective stays the same."""
    log = measured_log(40, 6.0, output=20)
    order = np.argsort([each.last_token for each in log], kind="stable")
    train = order[:20]
    end = log[train[-1]].last_token
    spoilt = list(log)
    for index in order[20:].tolist():
        late = max(end, log[index].queued) + 50.0 + index
        spoilt[index] = replace(log[index], first_token=late, last_token=late + 1)
    config = SETTINGS.config(max(r.request.num_prompt_tokens + r.request.num_output_tokens for r in log), 40)
    candidate = LinearStepTime(per_step=1e-2, per_row=1e-4, per_token=5e-5, per_context_token=5e-8)
    one, other = (Objective(Problem(requests, train, config), 20) for requests in (log, spoilt))
    assert (one.seconds, one.typical) == (other.seconds, other.typical)
    np.testing.assert_array_equal(one.errors(candidate), other.errors(candidate))


def test_errors_are_0_if_predicted_and_measured_times_are_equal() -> None:
    log = measured_log(30)
    times = Times.of(log)
    errors = RequestErrors.between(times, times)
    assert set(errors.to_dict().values()) == {0.0, 30}
    longer = Times(times.queued, times.queued + 2 * times.ttft, times.queued + 2 * times.e2e, times.num_output_tokens)
    errors = RequestErrors.between(longer, times)
    assert errors.e2e_mape == pytest.approx(1) and errors.tpot_mean_error == pytest.approx(1)
    assert errors.ttft_p99_error == pytest.approx(1)


def test_outputs_of_one_token_have_no_tpot() -> None:
    log = measured_log(30, single=1.0)
    assert RequestErrors.between(Times.of(log), Times.of(log)).tpot_mean_error is None
    config = SETTINGS.config(10_000, 30)
    objective = Objective(Problem(log, np.arange(20), config), 20)
    errors = objective.errors(SMALL)
    assert np.isfinite(errors).all() and not errors[20:40].any()


# ---------------------------------------------------------------------- what is wrong with a log


@pytest.mark.parametrize(
    ("count", "train", "wrong"),
    [
        (15, None, "the log has 15 requests; a fit needs at least 20, half to judge it by"),
        (30, 30, "train is 30, but the log has 30 requests and some must remain to judge the fit by: use at most 29"),
        (30, 3, "train is 3; a fit needs at least 10 requests"),
    ],
)
def test_logs_with_too_few_requests_are_refused(count: int, train: int | None, wrong: str) -> None:
    with pytest.raises(CalibrationError, match=wrong):
        from_requests(measured_log(count), SETTINGS, train=train)


def test_contradictory_times_are_refused() -> None:
    log = measured_log(30)
    early = [*log[:-1], replace(log[-1], first_token=log[-1].queued)]
    with pytest.raises(
        CalibrationError, match=r"log, request r29: the first token came 0 s after the request was queued"
    ):
        from_requests(early, SETTINGS)
    single = next(each for each in log if each.request.num_output_tokens == 1)
    late = [replace(each, last_token=each.last_token + 2) if each is single else each for each in log]
    with pytest.raises(
        CalibrationError, match=rf"request {single.request_id}: the request has 1 output token, but its last"
    ):
        from_requests(late, SETTINGS)
    with pytest.raises(CalibrationError, match="outputs were not streamed"):
        from_requests([replace(each, first_token=each.last_token) for each in log], SETTINGS)


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"max_model_len": 100}, r"tokens, more than max_model_len 100; give the engine's"),
        ({"num_blocks": 4}, r"num_blocks 4 with block_size 16 hold only 64; give the engine's"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ],
)
def test_settings_that_contradict_the_log_are_refused(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(CalibrationError, match=wrong):
        from_requests(measured_log(30), replace(SETTINGS, **changes))


# ---------------------------------------------------------------------- steps


def test_fit_steps_finds_the_step_times_of_mixed_steps() -> None:
    pytest.importorskip("scipy")
    rng = np.random.default_rng(3)
    truth = LinearStepTime(per_step=5e-3, per_row=1e-4, per_token=5e-5, per_context_token=3e-8)
    loads = []
    for _ in range(300):
        rows = [(int(rng.integers(2000)), 1) for _ in range(int(rng.integers(1, 30)))]
        if rng.random() < 0.5:
            rows.append((0, int(rng.integers(1, 1000))))
        loads.append(StepLoad.of_rows(rows))
    array = np.array(loads, dtype=float)
    seconds = np.array([truth.of_step(load) for load in loads]) * np.exp(0.02 * rng.standard_normal(300))
    found = fit_steps(array[:150], seconds[:150])
    errors = StepErrors.between(predict_steps(found, array[150:]), seconds[150:])
    assert errors.step_mape < 0.025 and abs(errors.total_error) < 0.01
    assert found.per_step == pytest.approx(truth.per_step, rel=0.2)


def test_prompts_longer_than_those_of_the_log_are_predicted() -> None:
    """Engines run plain decodes with other kernels than steps with a prefill. A fit without that difference would
    attribute it to the tokens of short prompts, and predict long prompts 30 % too slow."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(4)
    truth = LinearStepTime(per_step=5e-3, per_row=2e-4, per_token=1e-4, per_prefill=2e-3)

    def steps(count: int, prompt: int) -> tuple[Any, Any]:
        loads = []
        for _ in range(count):
            rows = [(int(rng.integers(200)), 1) for _ in range(int(rng.integers(1, 8)))]
            if rng.random() < 0.1:
                rows.append((0, int(rng.integers(prompt // 2, 2 * prompt))))
            loads.append(StepLoad.of_rows(rows))
        seconds = np.array([truth.of_step(load) for load in loads]) * np.exp(0.03 * rng.standard_normal(count))
        return np.array(loads, dtype=float), seconds

    found = fit_steps(*steps(1000, 30))
    loads, seconds = steps(1000, 150)
    has_prefill = loads[:, 0] > loads[:, 1]
    errors = StepErrors.between(predict_steps(found, loads[has_prefill]), seconds[has_prefill])
    assert errors.total_error == pytest.approx(0, abs=0.05)


def attention_steps(truth: LinearStepTime, count: int, prompt: int, seed: int, scatter: float) -> tuple[Any, Any]:
    """Loads and seconds of steps in which one request prefills beside a few that decode."""
    rng = np.random.default_rng(seed)
    loads = [
        StepLoad.of_rows([(100, 1)] * int(rng.integers(1, 6)) + [(0, int(rng.integers(prompt // 2, 2 * prompt)))])
        for _ in range(count)
    ]
    seconds = np.array([truth.of_step(load) for load in loads])
    return np.array(loads, dtype=float), seconds * np.exp(scatter * rng.standard_normal(count))


def test_scatter_of_short_prompts_does_not_slow_predicted_long_prompts() -> None:
    """Coefficients cannot be negative, so a square term that is fitted to noise can only slow long prompts down."""
    pytest.importorskip("scipy")
    truth = LinearStepTime(per_step=5e-3, per_row=2e-4, per_token=1e-4, per_attended=1e-8)
    errors = []
    for seed in range(20):
        found = fit_steps(*attention_steps(truth, 60, 30, seed, 0.15))
        loads, seconds = attention_steps(truth, 100, 400, seed, 0.0)
        errors.append(StepErrors.between(predict_steps(found, loads), seconds).total_error or 0.0)
    assert abs(np.mean(errors)) < 0.1 and np.std(errors) < 0.25


def test_attention_time_in_a_log_overrides_the_prior() -> None:
    """The fitted `per_attended` follows the log, however far it is from the ratio that is typical of models."""
    pytest.importorskip("scipy")
    truth = LinearStepTime(per_step=5e-3, per_row=2e-4, per_token=1e-5, per_attended=5e-8)
    found = fit_steps(*attention_steps(truth, 200, 500, 1, 0.1))
    assert found.per_attended == pytest.approx(truth.per_attended, rel=0.2)


def test_predicted_times_of_noisy_steps_are_right_on_average() -> None:
    """Steps vary by a third. A fit relative to measured times would be 10 % too short."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(5)
    loads = np.array([StepLoad.of_rows([(100, 1)] * int(rows)) for rows in rng.integers(1, 30, 2000)], dtype=float)
    mean = np.array([SMALL.of_step(StepLoad(*map(int, load))) for load in loads])
    seconds = mean * rng.gamma(9, 1 / 9, len(mean))
    assert StepErrors.between(predict_steps(fit_steps(loads, seconds), loads), mean).total_error == pytest.approx(
        0, abs=0.02
    )


def recording(tmp_path: Path, *, is_timed: bool, **knobs: Any) -> Path:
    file = io.StringIO()
    host = Host(recorder=Recorder(file), **{"num_blocks": 40, "max_model_len": 64, "block_size": 4, **knobs})
    for index in range(4):
        host.add(f"r{index}", list(range(10 * index, 10 * index + 9)), max_tokens=40)
        host.step()
    host.run_to_end()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    for line in lines:
        if line.get("call") == "update" and is_timed:
            line["step_time"] = 1e-3 + 1e-4 * len(line["token_ids"])
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_a_recording_with_step_times_is_fitted(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    found = calibrate(recording(tmp_path, is_timed=True))
    assert found.profile.kind == "steps" and found.profile.num_requests == 4
    assert isinstance(found.held_out, StepErrors) and found.held_out.step_mape < 0.05
    assert found.profile.settings.num_blocks == 40 and not found.profile.settings.async_scheduling
    assert found.profile.hull.ranges["num_rows"][1] == 4


def test_a_profile_keeps_the_kv_groups_of_its_recording(tmp_path: Path) -> None:
    """Its blocks are those of groups. A request of 49 tokens takes 13 blocks; at most 3 of them are the window's."""
    pytest.importorskip("scipy")
    groups = (KVGroup(), KVGroup("window", 5))
    profile = calibrate(recording(tmp_path, is_timed=True, kv_groups=groups)).profile
    profile.save(tmp_path / "profile.json")
    settings = load_profile(tmp_path / "profile.json").settings
    assert settings == profile.settings and settings.kv_groups == groups
    config = settings.config(longest=49, num_requests=4)
    assert config.kv_groups == groups and config.num_blocks == 40
    values = json.loads((tmp_path / "profile.json").read_text())
    values["settings"]["kv_groups"] = [["half", 3]]
    (tmp_path / "profile.json").write_text(json.dumps(values))
    with pytest.raises(CalibrationError, match="a group in kv_groups is of kind 'half'; choose one of"):
        load_profile(tmp_path / "profile.json")


def test_calibration_notes_that_held_out_steps_are_slower(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    path = recording(tmp_path, is_timed=True)
    assert not any("held-out" in note for note in calibrate(path).profile.notes)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    updates = [line for line in lines if line.get("call") == "update"]
    for line in updates[len(updates) // 2 :]:
        line["step_time"] *= 3
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    (note,) = (note for note in calibrate(path).profile.notes if "held-out" in note)
    assert "together by -6" in note and "Record longer" in note


def test_a_profile_is_also_fitted_to_late_steps_of_its_recording(tmp_path: Path) -> None:
    """A server is measured from idle to busy; a profile of the first half alone would lack the busy steps."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(5)

    def seconds_of(load: StepLoad) -> float:
        """Each row beyond 40 costs four times as much, which no linear fit to small batches predicts."""
        return 5e-3 + 1e-4 * load.num_tokens + 4e-4 * max(0, load.num_rows - 40)

    counts = [int(rng.integers(1, 9)) for _ in range(400)] + [int(rng.integers(41, 90)) for _ in range(400)]
    loads = [StepLoad.of_rows([(100, 1)] * count) for count in counts]
    log = StepLog(
        np.array(loads, dtype=float),
        np.array([seconds_of(load) for load in loads]),
        small_config().to_dict(),
        10,
        "as given",
    )
    found = calibrate_steps(log, tmp_path / "steps.jsonl")
    busy = StepLoad.of_rows([(100, 1)] * 80)
    assert found.profile.step_time.of_step(busy) == pytest.approx(seconds_of(busy), rel=0.2)
    assert found.held_out.total_error < -0.2, "the halves differ nevertheless"  # type: ignore[union-attr]
    assert any("fitted to all steps" in note for note in found.profile.notes)
    assert warn_outside(found.profile, Hull.of_loads(log.loads)) == []
    first_half = calibrate_steps(log, tmp_path / "steps.jsonl", train=400)
    assert first_half.profile.step_time.of_step(busy) < 0.6 * seconds_of(busy)


def test_host_time_between_steps_is_part_of_the_step_time(tmp_path: Path) -> None:
    """The host is busy for a fifth of each step here. A pause between two steps does not count."""
    pytest.importorskip("scipy")
    plain = calibrate(recording(tmp_path, is_timed=True))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    taken = {line["step"]: line["step_time"] for line in lines if line.get("call") == "update"}
    now = 0.0
    for line in lines[1:]:
        line["now"] = now
        if line["call"] == "schedule":
            now += 1.2 * taken[line["step"]]
            now += 5.0 * (line["step"] % 10 == 0)
    path = tmp_path / "busy.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    busy = calibrate(path)
    np.testing.assert_allclose(busy.measured[1:], 1.2 * plain.measured[1:], rtol=0.05)
    assert "step times include what the host does between steps" in busy.profile.notes
    assert any(note.startswith("times between steps are not in step times") for note in plain.profile.notes)


def test_a_recording_without_step_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"none of its \d+ steps has a step_time; record with a host that sets"):
        calibrate(recording(tmp_path, is_timed=False))


def test_calibration_error_names_the_broken_line_of_a_recording(tmp_path: Path) -> None:
    path = recording(tmp_path, is_timed=True)
    lines = path.read_text().splitlines()
    lines[5] = lines[5][:20]
    path.write_text("\n".join(lines))
    with pytest.raises(CalibrationError, match=rf"{path}, line 6: not a recorded call"):
        calibrate(path)


# ---------------------------------------------------------------------- profiles


def test_a_saved_profile_is_loaded_unchanged(small: Calibration, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    small.profile.save(path)
    again = load_profile(path)
    assert again.to_dict() == small.profile.to_dict()
    assert again.step_time == small.profile.step_time and again.settings == SETTINGS


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"format": "other"}, "format is 'other', not 'pointsman-profile'; use a file of pointsman calibrate"),
        ({"format_version": 9}, "format_version is 9; this library reads version 1: calibrate again"),
        ({"step_time": {"per_step": -1}}, "coefficient per_step is -1; it must be finite and at least 0"),
        ({"step_time": {"per_stop": 1}}, "no coefficient is called 'per_stop'"),
        ({"step_time": 3}, "calibrate again"),
        ({"settings": {"max_num_seqs": 0}}, "max_num_seqs is 0; it must be a whole number, at least 1"),
        ({"settings": {"seats": 1}}, "no setting is called 'seats'"),
        ({"request_overhead": -1}, "request_overhead is -1; it must be a finite number of seconds"),
        ({"hull": {}}, "the field 'num_tokens' is missing"),
        ({"hull": {part: [5, 2] for part in StepLoad._fields}}, "field hull.num_tokens is"),
    ],
)
def test_calibration_error_names_the_wrong_field_of_a_profile(
    tmp_path: Path, changes: dict[str, Any], wrong: str
) -> None:
    values = profile().to_dict() | changes
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(values))
    with pytest.raises(CalibrationError) as caught:
        load_profile(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert wrong in str(caught.value)


def test_calibration_error_names_a_file_that_is_not_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ("[1]", "{", ""):
        path.write_text(text)
        with pytest.raises(CalibrationError, match="pointsman calibrate writes profiles"):
            load_profile(path)


def profile() -> Profile:
    hull = Hull()
    hull.add_load(StepLoad(10, 1, 10, 10, 1))
    hull.add_load(StepLoad(512, 8, 4000, 9000, 8))
    return Profile(
        step_time=LinearStepTime(per_step=1e-3),
        settings=SETTINGS,
        hull=hull,
        source="log.jsonl",
        kind="requests",
        num_requests=30,
        num_train=15,
    )


def test_loads_outside_the_fitted_range_give_a_warning() -> None:
    def warnings(*load: int) -> list[str]:
        hull = Hull()
        hull.add_load(StepLoad(*load))
        return warn_outside(profile(), hull)

    assert warnings(100, 5, 400, 800, 5) == []
    assert warnings(10, 1, 9, 9, 1) == []  # a position less than the log's smallest step
    (warning,) = warnings(100, 9, 400, 800, 5)
    assert warning.startswith("requests in a step go up to 9, and the part of log.jsonl that was fitted has at most 8")
    (warning,) = warnings(0, 1, 10, 10, 1)
    assert warning.startswith(
        "tokens in a step go down to 0, and the part of log.jsonl that was fitted has at least 10"
    )
    log = measured_log(40, np.inf, output=20)
    config = SETTINGS.config(10_000, 40)
    watched = WatchedStepTime(LinearStepTime(per_step=1e-2))
    simulate(OpenLoop([each.request for each in log]), config, watched)
    assert any(warning.startswith("positions read") for warning in warn_outside(profile(), watched.hull))


def test_a_written_log_is_read_unchanged(tmp_path: Path) -> None:
    log = measured_log(12)
    read = read_measurements(write_log(tmp_path / "log.jsonl", log))
    np.testing.assert_allclose(Times.of(read).e2e, Times.of(log).e2e, atol=1e-9)


def test_trace_error_names_the_broken_line_of_a_log(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", measured_log(12))
    path.write_text(path.read_text() + "\nnonsense")
    with pytest.raises(TraceError, match="line 13: not JSON"):
        calibrate(path)
