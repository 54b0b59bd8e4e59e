"""Every output is what the model runners of vLLM rely on, with the dataclasses of each supported version."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import vllm_env

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.e2e
@pytest.mark.skipif(
    not vllm_env.python_of().exists(), reason="vLLM is not installed in .venv-vllm; benchmarks/vllm_env.py makes it"
)
@pytest.mark.parametrize("version", ["0.32.0", vllm_env.NEXT_VERSION])
def test_outputs_keep_what_the_runners_rely_on(version: str) -> None:
    sources = [] if version == vllm_env.VLLM_VERSION else [str(vllm_env.NEXT_SOURCES)]
    if sources and not vllm_env.NEXT_SOURCES.exists():
        pytest.skip(f"the sources of vLLM {version} are not in .venv-vllm; benchmarks/vllm_env.py fetches them")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*sources, str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [vllm_env.python_of(), ROOT / "tests" / "integrations" / "vllm_fields.py"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen.pop("version") == version
    assert min(seen[what] for what in ("preempted", "resumed", "aborted", "skipped")) > 100
