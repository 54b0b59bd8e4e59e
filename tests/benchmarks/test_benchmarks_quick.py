"""Each benchmark runs in its quick form and ends with one JSON line of sensible figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run_quick(script: str, *options: str) -> dict[str, Any]:
    """The figures of the last line that `script --quick` prints."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=BENCHMARKS.parent)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    figures: dict[str, Any] = json.loads(finished.stdout.splitlines()[-1])
    assert figures["benchmark"] == Path(script).stem
    return figures


@pytest.mark.e2e
def test_scheduler_step() -> None:
    figures = run_quick("scheduler_step.py", "--sizes", "1,64")
    assert figures["sides"] == ["pointsman"]
    assert set(figures["pointsman_us"]) == {"1", "64"}
    assert all(0 < microseconds < 10_000 for microseconds in figures["pointsman_us"].values())
    assert set(figures["waiting_pointsman_us"]) == {"0", "10000", "100000"}


@pytest.mark.e2e
def test_prefix_scaling() -> None:
    figures = run_quick("prefix_scaling.py")
    assert set(figures["admit_ms"]) == {"1000", "10000", "100000"}
    assert figures["growth"] < 10  # searching the pool block by block would make it 100


@pytest.mark.e2e
def test_static_vs_continuous() -> None:
    pytest.importorskip("torch")
    figures = run_quick("static_vs_continuous.py")["experiment"]
    # Steps and slots do not depend on the machine's speed, so they are exact.
    assert 0.10 <= figures["static"]["utilisation"] <= 0.18
    assert figures["continuous"]["utilisation_while_queued"] >= 0.95
    assert figures["steps_ratio"] >= 6
