"""Fit to summaries of runs: known numbers are found again, other budgets are predicted, wrong files are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.sim import summaries
from pointsman.sim.devices import device
from pointsman.sim.errors import CalibrationError, UnknownName
from pointsman.sim.profile import load_profile
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import KNOWN_CHECKS, RooflineStepTime
from pointsman.sim.summaries import (
    FIGURES,
    RunProblem,
    calibrate_runs,
    fit_summaries,
    linear_of,
    read_problem,
    run_config,
    simulated_means,
    typical_overhead,
)

pytest.importorskip("scipy")
SHARED_RUNS = Path(__file__).parents[3] / "shared" / "traces" / "vllm_0.22_budget_runs.jsonl"
MODEL, DEVICE = "Qwen2.5-3B", "rtx5090"
TRUE_CHANGES = {"linear": 0.85, "attention": 0.9, "per_step": 1.5}
"""The true efficiencies, in multiples of the typical ones."""
TRUE_OVERHEAD = 0.03


def truth() -> RooflineStepTime:
    typical = RooflineStepTime(shape=model_shape(MODEL), device=device(DEVICE))
    shares = typical.efficiencies
    changes = {name: getattr(shares, name) * factor for name, factor in TRUE_CHANGES.items()}
    return replace(typical, efficiencies=replace(shares, **changes))


def line(seed: int, budget: int, **changes: Any) -> dict[str, Any]:
    """A run of twelve requests, without what was measured."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(0.6, 12)).round(6).tolist()
    settings = {"device": "NVIDIA GeForce RTX 5090", "model": "Qwen/Qwen2.5-3B-Instruct", "seed": seed}
    lengths = {"prompt_tokens": 6000, "output_tokens": 16, "arrivals": arrivals}
    means = {"avg_ttft": 1.0, "avg_tpot": 1.0, "avg_latency": 1.0, "failed": 0}
    return settings | {"max_num_batched_tokens": budget, "max_num_seqs": 64} | lengths | means | changes


def write_runs(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two budgets with the means of simulations with the true step times."""
    path = tmp_path_factory.mktemp("runs") / "runs.jsonl"
    lines = [line(seed, budget) for seed in range(3) for budget in (1024, 8192)]
    problem, _ = read_problem(write_runs(path, lines))
    for each, run, settings in zip(lines, problem.runs, problem.settings, strict=True):
        means = simulated_means(run, run_config(run, settings), truth(), TRUE_OVERHEAD)
        each.update({f"avg_{name}": value for name, value in means.items()})
    return write_runs(path, lines)


@pytest.fixture(scope="module")
def problem(runs: Path) -> RunProblem:
    return read_problem(runs)[0]


# ---------------------------------------------------------------------- the fit


def test_a_fit_to_one_budget_predicts_another(problem: RunProblem) -> None:
    found = calibrate_runs(problem, train_budget=1024, num_processes=1)
    assert found.is_training.tolist() == [True, False] * 3
    held_out = found.profile.held_out_errors
    assert held_out["num_runs"] == 3
    for name in FIGURES:
        assert held_out[f"{name}_mape"] is not None and held_out[f"{name}_mape"] < 0.06
    uncalibrated = [
        simulated_means(run, run_config(run, settings), problem.estimate)["latency"] / run.mean["latency"] - 1
        for run, settings in zip(problem.runs, problem.settings, strict=True)
    ]
    assert np.abs(uncalibrated).mean() > 2 * held_out["latency_mape"]


def test_the_profile_of_a_fit_is_what_was_simulated(problem: RunProblem, tmp_path: Path) -> None:
    found = calibrate_runs(problem, train=3, num_processes=1)
    found.profile.save(tmp_path / "profile.json")
    profile = load_profile(tmp_path / "profile.json")
    assert profile == found.profile
    assert profile.kind == "runs"
    assert profile.request_overhead == found.fit.request_overhead > 0
    assert profile.settings.num_blocks == problem.settings[0].num_blocks
    run, settings = problem.runs[5], problem.settings[5]
    means = simulated_means(run, run_config(run, settings), profile.step_time, profile.request_overhead)
    for name, value in means.items():
        assert value / run.mean[name] - 1 == pytest.approx(found.errors[name][5], rel=1e-9)


def test_what_runs_do_not_show_stays_at_the_typical_value(problem: RunProblem) -> None:
    """Measured means that equal the prediction: the fit moves nothing."""
    typical = problem.estimate
    step_time, overhead = linear_of(typical, problem.runs), typical_overhead(problem.runs)
    exact = tuple(
        replace(run, mean=simulated_means(run, run_config(run, settings), step_time, overhead))
        for run, settings in zip(problem.runs, problem.settings, strict=True)
    )
    fit = fit_summaries(replace(problem, runs=exact), num_processes=1)
    assert fit.efficiencies.linear == pytest.approx(typical.efficiencies.linear, rel=1e-3)
    assert fit.request_overhead == pytest.approx(overhead, rel=1e-3)
    assert fit.step_time.per_token == pytest.approx(step_time.per_token, rel=1e-3)


@pytest.mark.long
def test_one_run_with_a_stall_moves_the_fit_little(problem: RunProblem) -> None:
    stalled = replace(problem.runs[0], mean={name: 3 * value for name, value in problem.runs[0].mean.items()})
    with_stall = fit_summaries(replace(problem, runs=(stalled, *problem.runs[1:])), num_processes=1)
    without = fit_summaries(problem, num_processes=1)
    assert with_stall.step_time.per_token == pytest.approx(without.step_time.per_token, rel=0.1)


def test_a_fit_takes_a_few_of_many_runs_and_reports_its_progress(
    problem: RunProblem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summaries, "MAX_TRAIN", 2)
    calls: list[tuple[int, int]] = []
    fit_summaries(problem, num_processes=1, progress=lambda done, maximum: calls.append((done, maximum)))
    assert calls[0][0] == 2
    assert all(0 < done <= maximum for done, maximum in calls)


@pytest.mark.long
def test_two_processes_find_what_one_finds(problem: RunProblem) -> None:
    assert fit_summaries(problem, num_processes=2) == fit_summaries(problem, num_processes=1)


# ---------------------------------------------------------------------- what is refused


def test_runs_of_other_models_devices_and_policies_are_left_out(tmp_path: Path) -> None:
    lines = [
        line(0, 1024), line(1, 1024, policy="ppas"), line(2, 1024, failed=1), line(3, 1024, model="Qwen/Qwen2.5-0.5B"),
        line(4, 1024, device="NVIDIA A100-SXM4-80GB"), line(5, 1024, model="a model that nobody knows"),
    ]  # fmt: skip
    found, notes = read_problem(write_runs(tmp_path / "runs", lines), MODEL, DEVICE)
    assert [run.seed for run in found.runs] == [0]
    assert notes == [
        "2 runs of other models are left out",
        "1 runs on other devices are left out",
        "1 runs with another policy than fcfs are left out",
        "1 runs with failed requests are left out",
    ]


@pytest.mark.parametrize(
    ("changes", "options", "match"),
    [
        ({"model": "Qwen/Qwen2.5-0.5B"}, {}, "several models: .*Qwen2.5-0.5B.*; give --model"),
        ({"device": "NVIDIA L4"}, {"model": MODEL}, "several devices: .*NVIDIA L4; give --device"),
        ({"policy": "ppas"}, {"model": "Qwen2.5-7B", "on_device": DEVICE}, "no run is left: 2 runs of other models"),
    ],
)
def test_error_says_which_runs_are_meant(
    changes: dict[str, Any], options: dict[str, str], match: str, tmp_path: Path
) -> None:
    path = write_runs(tmp_path / "runs", [line(0, 1024), line(1, 1024, **changes)])
    with pytest.raises(CalibrationError, match=match):
        read_problem(path, **options)


def test_runs_without_a_device_need_the_option(tmp_path: Path) -> None:
    lines = [{key: value for key, value in line(0, 1024).items() if key != "device"}]
    path = write_runs(tmp_path / "runs", lines)
    with pytest.raises(CalibrationError, match="the runs do not name their device; give --device"):
        read_problem(path)
    assert len(read_problem(path, on_device="rtx5090")[0].runs) == 1
    with pytest.raises(UnknownName, match="rtx5091"):
        read_problem(path, on_device="rtx5091")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"train": 1}, "1 of 6 runs would train; at least 2"),
        ({"train": 6}, "at least 1 must remain"),
        ({"train_budget": 512}, "no run has the budget 512; the runs have 1024, 8192"),
        ({"train": 2, "train_budget": 1024}, "both given"),
    ],
)
def test_error_says_why_runs_cannot_be_split(options: dict[str, int], match: str, problem: RunProblem) -> None:
    with pytest.raises(CalibrationError, match=match):
        calibrate_runs(problem, **options)


# ---------------------------------------------------------------------- measured runs


@pytest.mark.parametrize(
    "check",
    [check for check in KNOWN_CHECKS if check.num_runs == 20],
    ids=lambda check: f"{check.device}-{check.model}",
)
def test_errors_from_datasheets_match_the_known_checks(check: Any) -> None:
    if not SHARED_RUNS.exists():
        pytest.skip(f"{SHARED_RUNS.name} is not in {SHARED_RUNS.parent}")
    found, _ = read_problem(SHARED_RUNS, check.model, check.device)
    assert len(found.runs) == check.num_runs
    errors = [
        [means[name] / run.mean[name] - 1 for name in FIGURES]
        for run, settings in zip(found.runs, found.settings, strict=True)
        for means in [simulated_means(run, run_config(run, settings), found.estimate)]
    ]
    np.testing.assert_allclose(np.mean(errors, axis=0), [check.ttft, check.tpot, check.e2e], atol=0.006)


@pytest.mark.long
def test_a_fit_to_measured_runs_of_one_budget_predicts_another() -> None:
    if not SHARED_RUNS.exists():
        pytest.skip(f"{SHARED_RUNS.name} is not in {SHARED_RUNS.parent}")
    found, _ = read_problem(SHARED_RUNS, "SmolLM3-3B", "rtx5090")
    held_out = calibrate_runs(found, train_budget=2048, num_processes=1).profile.held_out_errors
    for name in FIGURES:
        assert held_out[f"{name}_mape"] is not None and held_out[f"{name}_mape"] < 0.1
