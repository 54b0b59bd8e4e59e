"""The environment with real vLLM, for tests that run it in a process of its own."""

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

NEEDS_VLLM = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not python_of().exists(), reason="vLLM is not installed in .venv-vllm; benchmarks/vllm_env.py makes it"
    ),
]
"""Marks of tests that run it."""


def run_in_vllm(script: str, *arguments: object, sources: Path | None = None, timeout: float = 300) -> Any:
    """What a script beside this file prints in its last line, as JSON; None: it prints nothing.

    Args:
        script: its name.
        arguments: of its command line.
        sources: of another vLLM than the installed one.
        timeout: seconds.
    """
    path = [*([sources] if sources is not None else []), ROOT, ROOT / "benchmarks"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [str(python_of()), str(Path(__file__).with_name(script)), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
