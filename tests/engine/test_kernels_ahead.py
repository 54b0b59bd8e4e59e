"""Kernels are compiled ahead in a process; two processes that need the same kernel compile it once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pointsman.engine import kernels_ahead as ahead
from pointsman.engine.kernels_ahead import kernels_compiled_ahead

ON_CPU = {"device": "cpu"}
COMPILE = """
import sys, time
from pathlib import Path
import numpy as np
from numba import njit
from pointsman.engine.kernels import disk_cache
sys.path.insert(0, sys.argv[1])
from bodies import twice
folder = Path(sys.argv[1])
dispatcher = njit(twice)
disk_cache.keep_on_disk(dispatcher, twice)
with disk_cache.one_process(dispatcher):
    (folder / sys.argv[2]).touch()
    while sys.argv[2] == "first" and not (folder / "go").exists():
        time.sleep(0.01)
    dispatcher(4)
print(sum(dispatcher.stats.cache_hits.values()))
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder for kernels and for markers, which is empty."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(ahead, "num_cores", lambda: 2)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The processes that are started to compile kernels."""
    found: list[Any] = []
    start = subprocess.Popen

    def noting(command: list[str], **options: Any) -> Any:
        process = start(command, **options)
        if ahead.__name__ in command:
            found.append(process)
        return process

    monkeypatch.setattr(ahead.subprocess, "Popen", noting)
    return found


def _compiles(folder: Path, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", COMPILE, str(folder), name]
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder / "cache")}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, f"{path.name} does not appear"
        time.sleep(0.01)


@pytest.mark.e2e
@pytest.mark.parametrize("ending", ["ends", "is killed"])
def test_a_second_process_waits_for_the_first(tmp_path: Path, ending: str) -> None:
    (tmp_path / "bodies.py").write_text("def twice(x):\n    return 2 * x\n")
    first = _compiles(tmp_path, "first")
    _wait_for(tmp_path / "first")
    second = _compiles(tmp_path, "second")
    time.sleep(3 if ending == "ends" else 0)
    assert not (tmp_path / "second").exists(), "only one process compiles"
    if ending == "ends":
        (tmp_path / "go").touch()
    else:
        first.send_signal(signal.SIGKILL)
    hits = second.communicate(timeout=120)[0].strip()
    first.communicate(timeout=120)
    assert hits == ("1" if ending == "ends" else "0")


@pytest.mark.e2e
def test_all_kernels_of_the_engine_are_compiled_ahead(folders: Path, started: list[Any]) -> None:
    with kernels_compiled_ahead(ON_CPU):
        assert started[0].wait(timeout=300) == 0
    files = sorted((folders / "numba").rglob("*.nbc"))
    load = (
        "from pointsman.engine import Engine\nfrom pointsman.engine.warming import warm_up\n"
        "warm_up(Engine('demo', num_blocks=64, device='cpu'))\n"
    )
    subprocess.run([sys.executable, "-c", load], check=True, timeout=300)
    assert files and sorted((folders / "numba").rglob("*.nbc")) == files

    with kernels_compiled_ahead(ON_CPU):
        assert len(started) == 1, "the kernels are on disk"
    with kernels_compiled_ahead({**ON_CPU, "dtype": "bfloat16"}):
        assert len(started) == 2, "kernels for another type are not"


@pytest.mark.e2e
def test_the_process_ends_with_the_block(folders: Path, started: list[Any]) -> None:
    with kernels_compiled_ahead(ON_CPU):
        assert started[0].poll() is None
    started[0].wait(timeout=30)
    assert not list((folders / "home").rglob("*")), "kernels that were not compiled are not marked"


@pytest.mark.parametrize(
    "arguments",
    [{"device": "cuda"}, {"attention": "torch"}, {"dtype": "float16"}, {"dtype": "float32", "kv_cache_dtype": "fp8"}],
    ids=str,
)
def test_no_process_for_engines_without_these_kernels(
    folders: Path, started: list[Any], arguments: dict[str, str]
) -> None:
    with kernels_compiled_ahead(ON_CPU | arguments):
        assert not started


def test_one_core_compiles_no_faster_in_two_processes(
    folders: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "num_cores", lambda: 1)
    with kernels_compiled_ahead(ON_CPU):
        assert not started


def test_an_engine_starts_without_the_process(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(ahead.subprocess, "Popen", refuse)
    with kernels_compiled_ahead(ON_CPU):
        pass
