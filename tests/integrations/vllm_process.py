"""The environment with real vLLM, for tests that run it in a process of its own."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from vllm_env import FOLDERS, VLLM_VERSION, python_of

from tests.forking import ForkingParent
from tests.forms import Seeds

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "pointsman" / "engine" / "demo"

RUN = 25
"""Number of random workloads in one process; progress is reported after each process."""

VLLM_INSTALLED = pytest.mark.skipif(
    not python_of().exists(), reason="vLLM is not installed in .venv-vllm; benchmarks/vllm_env.py makes it"
)
NEEDS_VLLM = [pytest.mark.e2e, pytest.mark.vllm, VLLM_INSTALLED]
"""Marks of this folder's tests that run vLLM: on one version or on several (`conftest.py`)."""
SHORT_MODELS = ("gemma3, preempting", "lfm2, cached in parts, preempting")
"""Cases with real models in the short form: one with windows and one with states, both short of blocks."""


_version = VLLM_VERSION


@contextmanager
def version_in_use(version: str) -> Iterator[None]:
    """Processes started within the context use this version of vLLM."""
    global _version
    before, _version = _version, version
    yield
    _version = before


def environment(*packages: Path) -> dict[str, str]:
    """Variables of a process with the version of vLLM that is in use.

    Args:
        packages: folders with further packages.
    """
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [*packages, *vllm_folders(), ROOT, ROOT / "benchmarks"])),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TORCHDYNAMO_DISABLE": "1",  # compiling a few functions takes longer than all tests that need them
    }


def vllm_folders() -> list[Path]:
    """For PYTHONPATH: the folder of the vLLM version in use; none: it is installed."""
    return [FOLDERS[_version]] if _version in FOLDERS else []


def vllm_parent(packages: Path | None = None) -> ForkingParent:
    """A process that has imported vLLM; one for all tests of this process.

    Args:
        packages: as for `environment`. There it has our scheduler's imports alone.
    """
    return _parent(_version, packages)


@cache
def _parent(version: str, packages: Path | None) -> ForkingParent:
    if packages is None:
        return ForkingParent(python_of(), ["tests.integrations.vllm_imports"], environment())
    return ForkingParent(python_of(), ["pointsman.integrations.vllm.scheduler"], environment(packages))


def run_in_vllm(script: str, *arguments: object, packages: Path | None = None, timeout: float = 300) -> Any:
    """The last line that a script beside this file prints, as JSON; None: it prints nothing.

    Args:
        script: its name.
        arguments: of its command line.
        packages: a folder with further packages.
        timeout: seconds.
    """
    path = Path(__file__).with_name(script)
    done = vllm_parent(packages).run(path, *arguments, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def compared(script: str, seeds: Seeds, *arguments: object) -> Counter[str]:
    """Counts of events in random workloads, by a script beside this file that compares two schedulers.

    Args:
        script: its name. It gets the first seed and the number of workloads, and prints "tally" and "differences".
        seeds: of the workloads.
        arguments: of its command line, behind these two.
    """
    tally: Counter[str] = Counter()
    for run in seeds.runs(RUN):
        found = run_in_vllm(script, run.start, len(run), *arguments, timeout=600)
        assert not found["differences"], json.dumps(found["differences"][0], indent=1)
        tally.update(found["tally"])
    return tally


def decided_alike(seeds: Seeds, *kind: str, met_per_100: Mapping[str, int] = MappingProxyType({})) -> Counter[str]:
    """Run random workloads on which our decisions must equal those of vLLM's own scheduler; the counts of events.

    Args:
        seeds: of the workloads.
        kind: of them, see `vllm_decisions.py`.
        met_per_100: what so many of 100 workloads meet at least, so that they cannot pass by meeting nothing.
    """
    tally = compared("vllm_decisions.py", seeds, *kind)
    for what, least in met_per_100.items():
        assert tally[what] >= least * len(seeds) // 100, f"{what}: {tally[what]}"
    return tally
