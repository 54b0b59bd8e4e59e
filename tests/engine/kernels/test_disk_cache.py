"""Kernels run without a working disk cache: on a full disk, in a folder that cannot be written, with broken files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMPILED = """
import logging, resource, sys
from pathlib import Path
logging.basicConfig(format="%(message)s", stream=sys.stdout)
if sys.argv[1] == "full":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
import numpy as np
from numba import njit
from pointsman.engine.kernels import disk_cache
from pointsman.engine.kernels.runtime import Kernel
sys.path.insert(0, sys.argv[2])
from bodies import nothing, twice
dispatcher = njit(twice)
disk_cache.keep_on_disk(dispatcher, twice)
called = np.zeros(1, dtype=np.int64)
Kernel(nothing)(called)
print(called[0], dispatcher(4), sum(dispatcher.stats.cache_hits.values()))
"""
BODIES = "def nothing(arguments):\n    arguments[0] = 5\n\ndef twice(x):\n    return 2 * x\n"


@pytest.fixture
def compiled(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Runs a process that compiles two functions, or loads them from disk; returns its output."""
    (tmp_path / "bodies.py").write_text(BODIES)

    def run(disk: str = "", folder: Path | str = tmp_path / "cache") -> list[str]:
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder)}
        finished = subprocess.run(
            [sys.executable, "-c", COMPILED, disk, tmp_path],
            env=environment, capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert finished.returncode == 0, finished.stderr
        return finished.stdout.splitlines()

    return run


@pytest.mark.e2e
def test_a_full_disk_is_logged_as_a_warning_with_a_remedy(compiled, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    *warnings, values = compiled("full")
    assert values == "5 8 0"
    assert warnings and all("NUMBA_CACHE_DIR" in line and str(tmp_path / "cache") in line for line in warnings)
    assert compiled()[-1] == "5 8 0", "incomplete files do no harm"


@pytest.mark.e2e
def test_broken_files_of_the_kernel_cache_are_replaced(compiled, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert compiled() == ["5 8 0"]
    for number, file in enumerate(sorted((tmp_path / "cache").rglob("*.nb[ic]"))):
        file.write_bytes((b"", file.read_bytes()[:50], b"\x00" * 500, b"\xff" * 9)[number % 4])
    *warnings, values = compiled()
    assert values == "5 8 0" and any("cannot be read" in line for line in warnings)
    assert compiled() == ["5 8 1"]


@pytest.mark.e2e
def test_kernels_run_if_the_cache_folder_cannot_be_made(compiled, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").touch()
    assert compiled(folder=tmp_path / "file" / "cache")[-1].startswith("5 8")
