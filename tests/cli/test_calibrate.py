"""`pointsman calibrate`: tables, one line of JSON, a profile, a plot, and errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.sim import calibrate as calibration
from pointsman.sim import fit
from pointsman.sim.profile import load_profile
from pointsman.sim.step_time import LinearStepTime
from tests.sim.measured_logs import SMALL, measured_log, write_log
from tests.sim.observed_logs import write_observed

pytest.importorskip("scipy")
OPTIONS = ("--train", 15, "--max-num-seqs", 24, "--max-num-batched-tokens", 512)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", measured_log(30, output=20))


@pytest.fixture
def estimates() -> list[LinearStepTime | None]:
    """The estimates with which searches were called."""
    return []


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch, estimates: list[LinearStepTime | None]) -> list[fit.Problem]:
    """Replaces the search for step times: it returns the true ones. Yields the arguments of all its calls."""
    given: list[fit.Problem] = []

    def found(problem: fit.Problem, *, estimate: LinearStepTime | None, **_: Any) -> LinearStepTime:
        given.append(problem)
        estimates.append(estimate)
        return SMALL

    monkeypatch.setattr(calibration, "search_step_times", found)
    return given


def test_calibrate_prints_errors_coefficients_and_notes(
    pointsman: Callable[..., Any], log: Path, known: list[fit.Problem], tmp_path: Path
) -> None:
    ended = pointsman("calibrate", log, *OPTIONS, "--output", tmp_path / "profile.json")
    assert (ended.code, ended.err) == (0, "")
    lines = [line.rstrip() for line in ended.out.splitlines()]
    assert lines[0].startswith("fitted to 15 of 30 requests of log.jsonl in ")
    assert lines[0].endswith("the other 15 were held out")
    assert any(line.startswith("end to end, mean of absolute errors") and line.endswith(" %") for line in lines)
    assert ["per_step", "8", "ms"] in [line.split() for line in lines]
    assert "note: num_blocks was not given: KV blocks are never short in this fit" in lines
    profile = load_profile(tmp_path / "profile.json")
    assert (profile.step_time, profile.source, profile.num_train) == (SMALL, "log.jsonl", 15)
    assert len(known[0].train) == 15
    assert known[0].config.max_num_seqs == 24 and known[0].config.max_steps_in_flight == 2


def test_the_last_line_of_calibrate_is_json(pointsman: Callable[..., Any], log: Path, known: list[fit.Problem]) -> None:
    ended = pointsman("calibrate", log, *OPTIONS, "--json", "--no-async-scheduling", "--num-blocks", 5000)
    assert (ended.code, ended.err) == (0, "")
    found = json.loads(ended.out.splitlines()[-1])
    for name in ("e2e_mape", "ttft_mean_error", "ttft_p99_error", "tpot_mean_error"):
        assert isinstance(found[name], float)
    assert found["num_train"] == 15 and found["step_time"]["per_step"] == 8e-3
    assert not any("num_blocks" in note for note in found["notes"])
    assert known[0].config.max_steps_in_flight == 1 and known[0].config.num_blocks == 5000


def test_calibrate_writes_no_profile_for_a_file_that_is_not_a_log(
    pointsman: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "log.csv").write_text("when,how long\n1,2\n")
    for profile, before in ((tmp_path / "new.json", None), (tmp_path / "old.json", "{}")):
        if before is not None:
            profile.write_text(before)
        ended = pointsman("calibrate", tmp_path / "log.csv", "--output", profile)
        assert ended.code == 2 and "begins with 'when,how long'" in ended.err
        assert (profile.read_text() if profile.exists() else None) == before


def test_calibrate_reports_settings_that_it_ignores_with_a_recording(
    pointsman: Callable[..., Any], tmp_path: Path
) -> None:
    write_observed(tmp_path / "recording.jsonl")
    plain = pointsman("calibrate", tmp_path / "recording.jsonl", "--json").json_lines[-1]
    assert not any("has no effect" in note for note in plain["notes"])
    found = pointsman("calibrate", tmp_path / "recording.jsonl", "--json", "--max-num-seqs", 77).json_lines[-1]
    (note,) = [note for note in found["notes"] if "has no effect" in note]
    assert note.startswith("--max-num-seqs 77 has no effect: in the recording max_num_seqs is ")
    assert {**found, "notes": [], "seconds": 0} == {**plain, "notes": [], "seconds": 0}


def test_calibrate_estimates_pool_and_step_times_from_model_and_device(
    pointsman: Callable[..., Any], log: Path, known: list[fit.Problem], estimates: list[LinearStepTime | None]
) -> None:
    on = ("--model", "Llama-3.1-8B", "--device", "rtx-4090")
    found = json.loads(pointsman("calibrate", log, *OPTIONS, *on, "--json").out.splitlines()[-1])
    blocks = known[0].config.num_blocks
    assert 500 < blocks < 5000  # 24 GB, of which 16 are weights
    assert any(note.startswith(f"num_blocks {blocks:,} is estimated for ") for note in found["notes"])
    assert not any("never short" in note for note in found["notes"])
    assert estimates[0] is not None and 0.015 < estimates[0].per_step < 0.03  # 16 GB at 1 TB/s
    pointsman("calibrate", log, *OPTIONS, *on, "--num-blocks", 1234)
    assert known[1].config.num_blocks == 1234
    pointsman("calibrate", log, *OPTIONS)
    assert estimates[2] is None


@pytest.mark.long
def test_calibrate_draws_a_plot_of_the_errors(
    pointsman: Callable[..., Any], log: Path, known: list[fit.Problem], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert pointsman("calibrate", log, *OPTIONS, "--plot", tmp_path / "errors.svg").code == 0
    assert "<svg" in (tmp_path / "errors.svg").read_text()
    ended = pointsman("calibrate", log, *OPTIONS, "--plot", tmp_path / "errors.xyz")
    assert ended.code == 2 and "its name must end with one of" in ended.err


def test_calibrate_refuses_wrong_files_and_options_in_one_line(
    pointsman: Callable[..., Any], log: Path, tmp_path: Path
) -> None:
    for words, wrong in (
        (["calibrate", tmp_path / "none"], "cannot read the log"),
        (["calibrate", log, "--train", 30], "train is 30, but the log has 30 requests and some must remain"),
        (["calibrate", log, "--max-model-len", 10], "max_model_len 10; give the engine's max_model_len"),
        (["calibrate", log, "--block-size", 0], "block_size is 0"),
        (["calibrate", log, "--model", "Llama-3.1-8B"], "--model has no effect without --device; give both"),
        (["calibrate", log, "--device", "h100"], "--device has no effect without --model; give both"),
        (["calibrate", log, "--model", "Llama-3.1-70B", "--device", "h100"], "Llama-3.1-70B needs"),
        (["calibrate", log, "--tensor-parallel", 2], "--tensor-parallel has no effect without --model"),
        (["calibrate", log, "--gpu-memory-utilization", 0.5], "only serves to estimate --num-blocks"),
    ):
        ended = pointsman(*words)
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert line.startswith("pointsman: error: ") and wrong in line


# ---------------------------------------------------------------------- summaries of runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Three short runs on an L4."""
    lines = [
        {
            "device": "NVIDIA L4", "model": "Qwen/Qwen2.5-0.5B", "max_num_batched_tokens": budget, "max_num_seqs": 8,
            "prompt_tokens": 1500, "output_tokens": 4, "arrivals": [0.0, 0.1, 0.5], "avg_ttft": 0.09,
            "avg_tpot": 0.02, "avg_latency": 0.15,
        }
        for budget in (512, 512, 2048)
    ]  # fmt: skip
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_calibrate_fits_to_summaries_of_runs(
    pointsman: Callable[..., Any], runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    ended = pointsman("calibrate", runs, "--train-budget", 512, "--output", tmp_path / "profile.json")
    assert (ended.code, ended.err) == (0, "")
    lines = [line.split() for line in ended.out.splitlines()]
    assert ended.out.startswith("fitted to 2 of 3 runs of runs.jsonl in ")
    assert ["training,", "budget", "512", "2"] in [line[:4] for line in lines]
    assert ["held", "out,", "budget", "2,048", "1"] in [line[:5] for line in lines]
    assert any(line[:1] == ["request_overhead"] for line in lines)
    profile = load_profile(tmp_path / "profile.json")
    assert (profile.kind, profile.num_train, profile.settings.max_num_batched_tokens) == ("runs", 2, 512)
    ended = pointsman("calibrate", runs, "--json")
    found = json.loads(ended.out.splitlines()[-1])
    assert found["num_train"] == 2 and found["num_runs"] == 1
    assert found["efficiencies"]["linear"] > 0 and found["request_overhead"] > 0
    assert isinstance(found["latency_mape"], float)


def test_calibrate_refuses_options_that_runs_do_not_need(
    pointsman: Callable[..., Any], runs: Path, log: Path, tmp_path: Path
) -> None:
    for words, wrong in (
        ([runs, "--max-num-seqs", 8], "--max-num-seqs has no effect: each line of"),
        ([runs, "--no-async-scheduling"], "--async-scheduling has no effect"),
        ([runs, "--plot", tmp_path / "a.png"], "--plot has no effect with summaries of runs"),
        ([runs, "--train-budget", 1024], "no run has the budget 1024; the runs have 512, 2048"),
        ([runs, "--device", "h100"], "no run is left: 3 runs on other devices"),
        ([runs, "--device", "memory=1"], "has no bandwidth"),
        ([log, "--train-budget", 512], "--train-budget has no effect"),
    ):
        ended = pointsman("calibrate", *words)
        assert ended.code == 2
        (line,) = ended.err.splitlines()
        assert line.startswith("pointsman: error: ") and wrong in line


@pytest.mark.long
def test_two_processes_fit_the_same_step_times_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes find the same step times as one process."""
    monkeypatch.setattr(fit, "STARTS", dict(list(fit.STARTS.items())[:2]))
    monkeypatch.setattr(fit, "FIRST", fit.FIRST[:1])
    monkeypatch.setattr(fit, "MORE", fit.MORE[:1])
    measured = measured_log(20, 20.0, output=5)
    order = np.argsort([each.last_token for each in measured], kind="stable")
    problem = fit.Problem(measured, order[:10], calibration.EngineSettings().config(10_000, 20))
    reports: list[tuple[int, int]] = []
    one = fit.search_step_times(problem, num_processes=1)
    assert one.per_step > 0
    two = fit.search_step_times(problem, num_processes=2, progress=lambda done, most: reports.append((done, most)))
    assert one == two
    done, most = reports[-1]
    assert 0 < done <= most
