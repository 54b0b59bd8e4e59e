"""The example package of policies: built as a wheel, installed beside Pointsman, found by name in every host."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_env import python_of

from tests.integrations.vllm_process import VLLM_INSTALLED, environment

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "pointsman-lottery"
IN_VLLM = """
from pointsman.integrations.vllm.settings import read_settings
from pointsman.core import Scheduler, SchedulerConfig
knobs = read_settings({"pointsman": {"order": "lottery:seed=7", "victim": "newest-prompt"}}).knobs
print(sorted(Scheduler(SchedulerConfig(num_blocks=8, max_model_len=64, **knobs)).policies))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel installs."""
    folder = tmp_path_factory.mktemp("lottery")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    # From a copy: setuptools writes beside the sources.
    source = folder / "source"
    subprocess.run(["cp", "-r", str(EXAMPLE), str(source)], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(source)], check=True)
    (wheel,) = folder.glob("*.whl")
    target = folder / "installed"
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)], check=True)
    return target


def python(installed: Path, *arguments: str, executable: str = sys.executable) -> str:
    variables = environment(installed) | {"COLUMNS": "120"}
    done = subprocess.run([executable, *arguments], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.e2e
def test_engine_and_simulator_find_policies_of_a_package_by_name(installed: Path) -> None:
    listed = json.loads(python(installed, "-m", "pointsman", "policies", "--json"))
    assert "lottery" in [each["name"] for each in listed["order"]]
    assert "newest-prompt" in [each["name"] for each in listed["victim"]]

    policies = ["--order", "lottery:seed=7", "--victim", "newest-prompt"]
    pool = ["--num-blocks", "14", "--max-model-len", "256", "--max-tokens", "32", "--json"]
    generated = python(installed, "-m", "pointsman", "generate", *pool, *policies).splitlines()
    requests, totals = [json.loads(line) for line in generated[:-1]], json.loads(generated[-1])
    assert {request["finish_reason"] for request in requests} <= {"stop", "length"}
    assert totals["preemptions"] > 0

    trace = installed.parent / "trace.jsonl"
    lines = [{"timestamp": index, "input_length": 600, "output_length": 200, "hash_ids": []} for index in range(60)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    simulated = ["simulate", "--trace", str(trace), "--num-blocks", "300", "--max-model-len", "2048", "--json"]
    ours = json.loads(python(installed, "-m", "pointsman", *simulated, *policies).splitlines()[-1])
    plain = json.loads(python(installed, "-m", "pointsman", *simulated).splitlines()[-1])
    assert ours["ttft"] != plain["ttft"], "the order decides"


@pytest.mark.e2e
@VLLM_INSTALLED
def test_vllm_drop_in_finds_policies_of_a_package_by_name(installed: Path) -> None:
    found = python(installed, "-c", IN_VLLM, executable=str(python_of()))
    assert "'lottery', 'lru', 'newest-prompt'" in found


@pytest.mark.e2e
def test_policy_name_is_unknown_if_its_package_is_not_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pointsman", "simulate", "--order", "lottery"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2
    assert "no order policy is called 'lottery'; choose one of fcfs, priority" in done.stderr
