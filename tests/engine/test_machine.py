"""Settings of C libraries for waiting threads and freed memory, unless the user has set them; and the list of GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pointsman.engine import machine
from pointsman.engine.machine import SPINS, visible_gpus, wait_briefly

PAGE_FAULTS = """
import resource, sys
import torch
from pointsman.engine.machine import keep_freed_pages
told = keep_freed_pages() if sys.argv[1] == "keep" else None
for _ in range(10):  # the C library sets aside up to seven cuttings of each size between the pieces
    torch.zeros(4 << 20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.zeros(4 << 20)  # 16 MiB
print(told, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
NUM_PAGES = 8 * (16 << 20) // os.sysconf("SC_PAGE_SIZE")


def run(mode: str, **environment: str) -> tuple[str, int]:
    command = [sys.executable, "-c", PAGE_FAULTS, mode]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    told, faults = done.stdout.split()
    return told, int(faults)


def test_freed_pages_are_reused() -> None:
    told, faults = run("keep", MALLOC_ARENA_MAX="1")
    assert told == "True" and faults < NUM_PAGES / 4


def test_the_users_own_memory_settings_are_kept() -> None:
    told, faults = run("keep", MALLOC_MMAP_THRESHOLD_="1048576")
    assert told == "False" and faults > 8, "every piece is mapped again"


def test_idle_engines_return_freed_pages() -> None:
    """A small allocation keeps the end of the heap in place; the free pages below it are returned nevertheless."""
    code = """
import sys
import torch
from pointsman.engine.machine import return_freed_pages, keep_freed_pages
from pathlib import Path
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
keep_freed_pages(one_heap=True)
large = [torch.ones(4 << 20) for _ in range(8)]
small = torch.ones(1 << 12)
del large
before = resident()
return_freed_pages()
print(before - resident() >> 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 100


OPENMP_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


@pytest.mark.parametrize(
    ("set_before", "after"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
    ids=["nothing", "spins", "policy"],
)
def test_the_wait_policy_of_threads_is_set_once(
    monkeypatch: pytest.MonkeyPatch, set_before: dict[str, str], after: dict[str, str]
) -> None:
    for name in OPENMP_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    got = {name: os.environ.pop(name) for name in OPENMP_VARIABLES if name in os.environ}
    assert got == after


@pytest.fixture
def uncounted() -> Iterator[None]:
    """Clear the cached list of GPUs before and after the test."""
    visible_gpus.cache_clear()
    yield
    visible_gpus.cache_clear()


def test_without_a_driver_pytorch_is_not_asked_for_gpus(uncounted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GPU_DRIVERS", (Path("/nowhere"),))
    monkeypatch.setattr(machine.sys, "executable", "/nowhere/python")
    assert visible_gpus() == ()


def test_gpus_are_those_that_pytorch_counts(uncounted: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake package stands for PyTorch on a machine with three GPUs, two of them visible."""
    code = "import os\nclass cuda:\n    is_available = lambda: True\n"
    code += "    device_count = lambda: len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))\n"
    (tmp_path / "torch.py").write_text(code)
    monkeypatch.setattr(machine, "GPU_DRIVERS", (tmp_path,))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert visible_gpus() == ("cuda:0", "cuda:1")


def test_gpus_that_cannot_be_counted_are_an_error(uncounted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "GPU_DRIVERS", (Path("/"),))
    monkeypatch.setattr(machine.sys, "executable", "/nowhere/python")
    with pytest.raises(ValueError, match=r"cannot be counted .*; give --device cpu, or check that PyTorch"):
        visible_gpus()
