"""The environment with real vLLM, for tests that run it in a process of its own."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import tempfile
from functools import cache
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


def environment(*sources: Path) -> dict[str, str]:
    """Variables of a process with vLLM.

    Args:
        sources: of another vLLM than the installed one.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*sources, ROOT, ROOT / "benchmarks"])),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }


class VllmParent:
    """A process that has imported vLLM, and forks. One is shared by all tests of a process, see `vllm_parent`."""

    def __init__(self) -> None:
        command = [str(python_of()), str(Path(__file__).with_name("vllm_parent.py"))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
        )
        atexit.register(self.close)

    def run(self, *arguments: object, timeout: float, **variables: str) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([python, *arguments])`, with further variables in its environment.

        Raises:
            TimeoutExpired: it took more than `timeout` seconds.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        command = [str(argument) for argument in arguments]
        with tempfile.TemporaryDirectory() as folder:
            out, err = Path(folder, "out"), Path(folder, "err")
            job = {"arguments": command, "environment": variables, "timeout": timeout}
            self._process.stdin.write(json.dumps({**job, "stdout": str(out), "stderr": str(err)}) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())["code"]
            if code is None:
                raise subprocess.TimeoutExpired(command, timeout, out.read_text(), err.read_text())
            return subprocess.CompletedProcess(command, code, out.read_text(), err.read_text())

    def close(self) -> None:
        """End it."""
        self._process.communicate()


@cache
def vllm_parent() -> VllmParent:
    """The one of this process, which lives as long."""
    return VllmParent()


def run_in_vllm(script: str, *arguments: object, sources: Path | None = None, timeout: float = 300) -> Any:
    """What a script beside this file prints in its last line, as JSON; None: it prints nothing.

    Args:
        script: its name.
        arguments: of its command line.
        sources: of another vLLM than the installed one.
        timeout: seconds.
    """
    path = Path(__file__).with_name(script)
    if sources is None:
        done = vllm_parent().run(path, *arguments, timeout=timeout)
    else:
        command = [str(python_of()), str(path), *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(sources), timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None
