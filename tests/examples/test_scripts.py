"""The examples that are one file each: they run, are short, and show what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from vllm_env import python_of

from tests.integrations.vllm_process import DEMO, VLLM_INSTALLED, environment

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
MAX_LINES = 60


def run(name: str, *arguments: str, executable: str = sys.executable) -> str:
    command = [executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_examples_are_short() -> None:
    files = [*SCRIPTS, EXAMPLES / "pointsman-lottery" / "pointsman_lottery" / "policies.py"]
    lengths = {file.name: len(file.read_text().splitlines()) for file in files}
    assert len(lengths) == 5
    assert max(lengths.values()) <= MAX_LINES, lengths


def test_the_readme_links_every_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [name for name in [*(file.name for file in SCRIPTS), "pointsman-lottery"] if name not in readme] == []


def test_example_own_engine_generates_and_shares_prefixes() -> None:
    lines = run("own_engine.py").splitlines()
    assert sum("finished" in line for line in lines) == 6
    assert "r5 finished: [41, 82, 64, 28, 56]" in "\n".join(lines)
    assert lines[-1] == "40 prompt tokens were found in the prefix cache"


def test_example_replays_a_recording_and_explains_a_waiting_request() -> None:
    lines = run("replay_recording.py").splitlines()
    assert "r2 waits for 1 more KV block: too few KV blocks are free. Held by r0 (3), r1 (3)." in lines[0]
    assert lines[-1] == "12 steps replayed without a difference"


def test_example_simulates_a_trace_with_two_decode_reserves() -> None:
    plain, growth = run("simulate_trace.py").splitlines()
    preemptions = [int(line.split(" preemptions")[0].split()[-1]) for line in (plain, growth)]
    assert preemptions[1] < preemptions[0]


@pytest.mark.e2e
@pytest.mark.vllm
@VLLM_INSTALLED
def test_example_drop_in_gives_the_same_completions_as_vllm() -> None:
    found = run("vllm_drop_in.py", str(DEMO), "float32", executable=str(python_of()))
    assert found.splitlines()[-1] == "the same as with vLLM's own scheduler: True"
