"""Every command that reads requests from a file reports how many rows it read, how many it left out, and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Finished
from tests.sim.measured_logs import measured_log, write_log
from tests.sim.observed_logs import observed_lines, write_observed

Run = Callable[..., Finished]
LEFT_OUT = "Of 61 rows read, 13 are left out: 1 without prompt tokens, 12 without output tokens."
COMMANDS = {
    "simulate": ("simulate", "--trace"),
    "simulate --users": ("simulate", "--users", 3, "--trace"),
    "capacity": ("capacity", "--ttft-target", "1s", "--samples", 2, "--trace"),
    "capacity --think": ("capacity", "--ttft-target", "1s", "--samples", 2, "--think", "1", "--trace"),
    "tune": ("tune", "--trials", 1, "--workers", 1, "--trace"),
}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """61 rows of BurstGPT: 12 requests failed, and one row is not a request."""
    path = tmp_path / "trace.csv"
    rows = [f"{30 * at},ChatGPT,{100 if at else 0},{10 if at % 5 else 0},110,API log" for at in range(61)]
    path.write_text("\n".join(["Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type", *rows]))
    return path


@pytest.mark.parametrize("name", COMMANDS)
def test_simulating_commands_report_rows_left_out_of_a_trace(pointsman: Run, trace: Path, name: str) -> None:
    finished = pointsman(*COMMANDS[name], trace)
    assert finished.code == 0, finished.err
    assert " ".join(finished.out.split()).count(LEFT_OUT) == 1
    (found,) = pointsman(*COMMANDS[name], trace, "--json").json_lines
    assert LEFT_OUT in found["notes"]
    assert found["workload"].startswith("48 requests")


def test_generate_reports_rows_left_out_of_a_trace(pointsman: Run, model: str, trace: Path) -> None:
    given = ("generate", "--model", model, "--trace", trace, "--speed", 0, "--max-tokens", 1)
    finished = pointsman(*given)
    assert finished.code == 0, finished.err
    assert LEFT_OUT in finished.out and "48: 48 length" in finished.out
    summary = pointsman(*given, "--json").summary
    assert (summary["left_out"], summary["requests"], summary["finished"]["refused"]) == (LEFT_OUT, 48, 0)


def test_calibrate_reports_rows_left_out_of_a_log(pointsman: Run, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", measured_log(40, output=20))
    row = json.loads(log.read_text().splitlines()[0])
    with log.open("a") as file:
        file.writelines("\n" + json.dumps({**row, **odd}) for odd in ({"input_toks": 0}, {"output_toks": 0}))
    (found,) = pointsman("calibrate", log, "--no-async-scheduling", "--json").json_lines
    assert "Of 42 rows read, 2 are left out: 1 without prompt tokens, 1 without output tokens." in found["notes"]
    assert found["num_requests"] == 40


def test_compare_reports_requests_left_out_of_a_recording(pointsman: Run, tmp_path: Path) -> None:
    lines = observed_lines(60, num_blocks=90, rate=30.0)
    last = max(at for at, line in enumerate(lines) if line.get("call") == "result")
    recording = write_observed(tmp_path / "recording.jsonl", [*lines[:last], *lines[last + 1 :]])
    finished = pointsman("vllm", "compare", recording)
    assert finished.code == 0, finished.err
    assert "Of 60 rows read, 1 is left out: 1 unfinished." in " ".join(finished.out.split())
