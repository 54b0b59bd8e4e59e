"""Features of real vLLM give the same results with our scheduler as with its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from vllm_env import python_of

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "pointsman" / "engine" / "demo"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not python_of().exists(), reason="vLLM is not installed in .venv-vllm; benchmarks/vllm_env.py makes it"
    ),
]


def run_feature(feature: str, whose: str, folder: Path) -> Any:
    command = [python_of(), ROOT / "tests" / "integrations" / "vllm_features.py", feature, whose, DEMO, folder]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


@pytest.mark.parametrize("feature", ["offline", "online", "pooling", "lora"])
def test_features_are_as_with_vllms_own_scheduler(tmp_path: Path, feature: str) -> None:
    if feature == "lora":
        run_feature("adapters", "-", tmp_path)
    theirs = run_feature(feature, "theirs", tmp_path)
    assert theirs
    assert run_feature(feature, "ours", tmp_path) == theirs
