"""`pointsman tune`: the report, its JSON, commands that both servers accept, and searches without a result."""

from __future__ import annotations

import json
import re
import shlex
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pointsman.cli.app import command_named
from pointsman.cli.knobs import engine_arguments
from pointsman.cli.options import KNOBS, given
from pointsman.cli.progress_bar import ProgressBar
from pointsman.cli.tune import _gain_text, _goodput_text
from pointsman.integrations.vllm.settings import read_settings
from pointsman.sim.report.intervals import NONE, Estimate
from tests.cli.conftest import Finished
from tests.cli.test_bad_input import check_refused
from tests.sim.observed_logs import observed_lines, write_observed

Run = Callable[..., Finished]
SMALL = ("--arrivals", "poisson:12", "--output-tokens", 20, "--requests", 16, "--trials", 10)
TIGHT = ("--ttft-p99", "1s", "--itl-p99", "30ms", "--itl-of", "gap")
"""Targets that the default token budget misses: a full step takes 0.2 s."""


def words(finished: Finished, code: int = 0) -> str:
    assert finished.code == code, finished.err
    return " ".join(finished.out.split())


def served(command: str) -> dict[str, Any]:
    """The engine arguments that `pointsman serve` reads from a command line."""
    program, name, *arguments = shlex.split(command)
    assert (program, name) == ("pointsman", "serve")
    context = command_named("serve").make_context("serve", arguments)
    return engine_arguments({name: value for name, value in given(context.params).items() if name in KNOBS})


def test_tune_compares_its_settings_with_vllms_defaults(pointsman: Run) -> None:
    finished = pointsman("tune", *SMALL, *TIGHT)
    printed = words(finished)
    lines = finished.out.splitlines()
    assert "KV blocks of 16 tokens" in lines[0]
    assert "calibrate with a log" in printed
    assert "TTFT at most 1 s, every gap between two tokens at most 30 ms" in printed
    assert "chosen on 16 requests in the first half" in printed
    (defaults,) = (line for line in lines if line.startswith("vLLM 0.32.0 on H100-SXM  "))
    (best,) = (line for line in lines if line.startswith("best found"))
    assert float(best.split("/s")[1]) > float(defaults.split("/s")[1])
    assert "max_num_batched_tokens 8192" in printed
    assert "Gain: a goodput of" in printed
    assert "Frontier" in printed and "One notch from the best" in printed
    assert [line.split()[0] for line in lines if " serve " in line] == ["vllm", "pointsman"]
    assert max(len(line) for line in lines if " serve " not in line) <= 100


def test_tune_json_has_commands_with_the_found_settings(pointsman: Run) -> None:
    finished = pointsman("tune", *SMALL, *TIGHT, "--json")
    assert finished.code == 0, finished.err
    (found,) = finished.json_lines
    assert found["is_complete"] is True and found["is_gain"] is True
    assert found["targets"] == {"ttft": 1.0, "itl": 0.03, "e2e": None, "itl_of": "gap"}
    assert found["defaults"]["settings"]["max_num_batched_tokens"] == 8192
    assert found["defaults"]["settings"]["max_num_seqs"] == 1024
    settings = found["recommended"]
    assert settings == found["chosen"]["settings"]
    assert found["gain"] > 0.03
    mine, theirs = (found[name]["held_out"]["goodput"] for name in ("chosen", "defaults"))
    assert found["gain"] == pytest.approx(mine / theirs - 1)
    budget = str(settings["max_num_batched_tokens"])
    vllm = shlex.split(found["commands"]["vllm"])
    assert vllm[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B"]
    assert vllm[vllm.index("--max-num-batched-tokens") + 1] == budget
    arguments = served(found["commands"]["pointsman"])
    for name in ("max_num_batched_tokens", "max_num_seqs"):
        assert arguments[name] == settings[name]
    assert arguments["num_blocks"] == found["chosen"]["num_blocks"]


def test_the_vllm_command_sets_policies_in_additional_config(pointsman: Run) -> None:
    knobs = ("--decode-reserve", "mean", "--watermark", 0.05, "--no-full-sequence-must-fit", "--victim", "latest")
    finished = pointsman("tune", *SMALL, *TIGHT, *knobs, "--max-model-len", 8000, "--tensor-parallel", 2, "--json")
    assert finished.code == 0, finished.err
    commands = finished.json_lines[0]["commands"]
    vllm = shlex.split(commands["vllm"])
    assert vllm[vllm.index("--watermark") + 1] == "0.05"
    assert "--no-scheduler-reserve-full-isl" in vllm
    assert vllm[vllm.index("--tensor-parallel-size") + 1] == "2"
    assert vllm[vllm.index("--max-model-len") + 1] == "8000"
    assert vllm[vllm.index("--scheduler-cls") + 1] == "pointsman.integrations.vllm.Scheduler"
    settings = read_settings(json.loads(vllm[vllm.index("--additional-config") + 1]))
    assert settings.knobs["decode_reserve"] == "mean"
    assert settings.knobs["victim"] == "latest"
    assert settings.knobs["order"] == "fcfs-front", "as vLLM's"
    arguments = served(commands["pointsman"])
    assert arguments["decode_reserve"] == "mean" and arguments["watermark"] == 0.05
    assert arguments["full_sequence_must_fit"] is False and arguments["max_model_len"] == 8000


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "/models/a model; echo"])
def test_the_commands_of_tune_name_the_model_of_the_recording(pointsman: Run, tmp_path: Path, model: str) -> None:
    pytest.importorskip("scipy")
    lines = observed_lines(40, rate=20.0)
    lines[0]["observed"]["model"] = model
    recording, profile = write_observed(tmp_path / "recording.jsonl", lines), tmp_path / "profile.json"
    assert pointsman("calibrate", recording, "--output", profile).code == 0
    tune = ("tune", "--trace", recording, "--profile", profile, "--trials", 4, "--json")
    commands = pointsman(*tune).json_lines[0]["commands"]
    assert shlex.split(commands["vllm"])[:3] == ["vllm", "serve", model]
    assert shlex.split(commands["pointsman"])[:4] == ["pointsman", "serve", "--model", model]

    without = json.loads(profile.read_text())
    del without["model"]  # as an older calibrate wrote it
    profile.write_text(json.dumps(without))
    commands = pointsman(*tune).json_lines[0]["commands"]
    assert shlex.split(commands["vllm"])[:3] == ["vllm", "serve", "MODEL"]


def test_tune_reports_no_gain_if_the_defaults_meet_the_targets(pointsman: Run) -> None:
    printed = words(pointsman("tune", *SMALL, "--ttft-p99", "10s"))
    assert "No gain: the defaults of vLLM 0.32.0 on H100-SXM have a goodput of" in printed
    assert "--max-num-batched-tokens 8192 --max-num-seqs 1024" in printed


def test_tune_reports_targets_that_no_settings_meet(pointsman: Run) -> None:
    finished = pointsman("tune", *SMALL, "--ttft-p99", "1ms")
    printed = words(finished, code=3)
    assert "Nothing meets the targets" in printed and "The lowest TTFT p99 of any is" in printed
    assert " serve " not in finished.out


def test_tune_speeds_up_limits_and_splits_a_trace(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = (f'{{"timestamp": {200 * n}, "input_length": {400 + n}, "output_length": 6}}\n' for n in range(90))
    path.write_text("".join(lines))
    finished = pointsman("tune", "--trace", path, "--rate-scale", 3, "--limit", 80, "--trials", 4, "--json")
    assert finished.code == 0, finished.err
    (found,) = finished.json_lines
    assert found["speed"] == 3
    for part in ("train", "held_out"):
        (stretch,) = found["parts"][part]
        assert stretch["num_requests"] == 40
        assert stretch["num_requests"] / stretch["seconds"] == pytest.approx(15)
    assert found["targets"]["ttft"] == 2.0, "without targets"


def test_ctrl_c_prints_the_best_settings_so_far(pointsman: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(bar: ProgressBar, num_finished: int, now: float) -> None:
        if num_finished == 6:
            raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupt)
    finished = pointsman("tune", *SMALL, *TIGHT)
    assert finished.code == 130
    assert "Interrupted after" in finished.out and "not judged" in finished.out
    assert " serve " not in finished.out
    assert finished.err == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--ttft-p99", "soon"], ["--ttft-p99 is 'soon'", "500ms"]),
        (["--trials", "0"], ["--trials is 0", "at least 1"]),
        (["--requests", "5"], ["--requests is 5", "at least 10"]),
        (["--workers", "0"], ["--workers is 0", "at least 1"]),
        (["--rate", "0"], ["--rate is 0", "above 0"]),
        (["--replicas", "3-2"], ["--replicas is '3-2'", "1-16"]),
        (["--routing", "least-loaded"], ["--routing", "--replicas 2"]),
        (["--trace", "/nowhere/at/all"], ["/nowhere/at/all", "No such file"]),
    ],
)
def test_bad_tune_options_are_refused(pointsman: Run, args: list[str], words: list[str]) -> None:
    check_refused(pointsman("tune", *args), *words)


def test_tune_refuses_a_trace_that_is_too_short_to_split(pointsman: Run, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"timestamp": {n}, "input_length": 20, "output_length": 6}}\n' for n in range(7)))
    check_refused(pointsman("tune", "--trace", path), "7 requests", "at least 20", "longer trace")


def test_tune_prints_intervals_and_says_that_targets_are_missed(pointsman: Run) -> None:
    """Twice the rate that the device can serve: at best a part of the requests is in time."""
    lengths = ("--prompt-tokens", 2000, "--output-tokens", 2, "--arrivals", "poisson:50")
    given = (*lengths, "--requests", 110, "--trials", 2, "--ttft-p99", "300ms", "--max-num-seqs", 64)
    printed = words(pointsman("tune", *given), code=3)
    assert re.search(r"The targets are missed: \d[\d.]* % are within them with these settings, not 99 %", printed)
    assert re.search(r"a goodput of [\d.]+/s \(95 %: [\d.]+ to [\d.]+\)", printed)
    assert "pointsman capacity finds the rate that meets them" in printed
    assert re.search(r"With 5 other plausible step times the goodput is [\d.]+ to [\d.]+/s", printed)


@pytest.mark.parametrize(
    ("value", "interval", "text"),
    [
        (10.0, Estimate(10.0, 8.2, 12.1), "10/s (95 %: 8 to 12)"),
        (10.0, Estimate(10.0), "10/s"),
        (0.5123, Estimate(0.5123, 0.49, 0.53), "0.51/s (95 %: 0.49 to 0.53)"),
    ],
)
def test_a_goodput_has_as_many_digits_as_its_interval(value: float, interval: Estimate, text: str) -> None:
    judged = types.SimpleNamespace(goodput=value, interval=interval)
    assert _goodput_text(judged) == text  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("gain", "interval", "text"),
    [
        (1.5, NONE, "2.5 times"),
        (0.123, NONE, "12.3 % more than"),
        (0.123, Estimate(0.123, 0.05, 0.2), "12 % (95 %: 5 to 20) more than"),
    ],
)
def test_a_gain_has_as_many_digits_as_its_interval(gain: float, interval: Estimate, text: str) -> None:
    assert _gain_text(gain, interval) == text
