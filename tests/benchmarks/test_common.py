"""The verdict of every benchmark: which targets are met, missed or not measured, and the exit code of `--check`."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from _common import Targets, finish

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def verdict(
    capsys: pytest.CaptureFixture[str], targets: Targets, check: bool = True
) -> tuple[int, str, dict[str, Any]]:
    """The exit code, what is printed for people, and the JSON line."""
    code = finish("name", {"figure": 1}, targets, check)
    *lines, last = capsys.readouterr().out.splitlines()
    return code, "\n".join(lines), json.loads(last)


def test_targets_that_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    targets = Targets()
    targets.at_least("ratio", 3.0, 2.0)
    targets.at_most("share", 0.1, 0.1)
    code, printed, figures = verdict(capsys, targets)
    assert (code, printed) == (0, "all 2 targets that this run measured are met")
    assert (figures["figure"], figures["missed"], figures["not_measured"]) == (1, [], [])


def test_a_missed_target_is_named_and_fails_only_a_check(capsys: pytest.CaptureFixture[str]) -> None:
    targets = Targets()
    targets.at_least("ratio", 1.5, 2.0)
    targets.holds("all complete", True)
    assert verdict(capsys, targets, check=False)[0] == 0
    code, printed, figures = verdict(capsys, targets)
    assert (code, printed) == (1, "missed: ratio is 1.5; target: at least 2")
    assert figures["missed"] == ["ratio is 1.5; target: at least 2"]


def test_a_check_that_measured_no_target_fails_and_says_which(capsys: pytest.CaptureFixture[str]) -> None:
    targets = Targets()
    assert verdict(capsys, targets)[0] == 1
    targets.skip("vLLM / Pointsman", "no environment for vLLM")
    assert verdict(capsys, targets, check=False)[0] == 0
    code, printed, figures = verdict(capsys, targets)
    assert code == 1
    assert printed.splitlines()[0] == "not measured: vLLM / Pointsman (no environment for vLLM)"
    assert "measured no target" in printed
    assert figures["not_measured"] == ["vLLM / Pointsman (no environment for vLLM)"]


def test_a_check_that_measured_some_targets_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    targets = Targets()
    targets.skip("backlog", "no trace")
    targets.at_least("ratio", 3.0, 2.0)
    code, printed, _ = verdict(capsys, targets)
    assert (code, printed.splitlines()) == (
        0,
        ["not measured: backlog (no trace)", "all 1 targets that this run measured are met"],
    )


def test_every_script_with_a_check_ends_with_this_verdict() -> None:
    scripts = [path for path in BENCHMARKS.glob("[!_]*.py") if "argument_parser(" in path.read_text()]
    assert len(scripts) >= 15
    for path in scripts:
        text = path.read_text()
        assert re.search(r"^    return finish\(.*arguments\.check\)$", text, re.MULTILINE), path.name
        assert text.count("arguments.check") == len(re.findall(r"return finish\(", text)), path.name


@pytest.mark.e2e
@pytest.mark.parametrize("script", ["vllm_scheduler.py", "vllm_engine.py"])
def test_a_check_without_the_peer_fails(tmp_path: Path, script: str) -> None:
    """Environments lie beside the benchmarks, so a copy of the benchmarks alone has none."""
    for source in BENCHMARKS.glob("*.py"):
        shutil.copy(source, tmp_path)
    command = [sys.executable, str(tmp_path / script), "--check"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=BENCHMARKS.parent)
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "not measured: " in finished.stdout and "no environment for vLLM" in finished.stdout
    assert json.loads(finished.stdout.splitlines()[-1])["not_measured"]
