"""The number of threads: the user's setting is kept, quotas are respected, small models get one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pointsman.engine import machine, threads

LARGE = threads.SMALL_MODEL


@pytest.fixture(autouse=True)
def eight_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A machine on which PyTorch began with eight threads, without a quota."""
    before = torch.get_num_threads()
    for name in threads.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(threads, "_at_start", 8)
    monkeypatch.setattr(threads, "_last_set", 8)
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    torch.set_num_threads(8)
    yield
    torch.set_num_threads(before)


def test_large_models_use_all_threads_and_small_models_one() -> None:
    assert threads.set_num_threads(None, LARGE) == 8
    assert threads.set_num_threads(None, LARGE - 1) == torch.get_num_threads() == 1
    assert threads.set_num_threads(None, LARGE) == torch.get_num_threads() == 8, (
        "a small model does not limit a later one"
    )


def test_a_given_number_of_threads_is_used() -> None:
    assert threads.set_num_threads(3, 10) == torch.get_num_threads() == 3
    for bad in (0, -1, "2"):
        with pytest.raises(ValueError, match=r"num_threads is .* at least 1"):
            threads.set_num_threads(bad, 10)  # type: ignore[arg-type]


def test_the_users_own_thread_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(5)
    assert threads.set_num_threads(None, 10) == torch.get_num_threads() == 5
    monkeypatch.setattr(threads, "_last_set", 5)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert threads.set_num_threads(None, 10) == torch.get_num_threads() == 5


@pytest.mark.parametrize(("content", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", math.inf), ("", math.inf)])
def test_cgroup_v2_cpu_quota_limits_the_threads(tmp_path: Path, content: str, quota: float) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert machine.cpu_quota(tmp_path) == quota
    assert threads.set_num_threads(None, LARGE) == (2 if quota == 1.5 else 8)


@pytest.mark.parametrize(("microseconds", "quota"), [("300000", 3.0), ("-1", math.inf)])
def test_cgroup_v1_cpu_quota_is_read(tmp_path: Path, microseconds: str, quota: float) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(microseconds)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert machine.cpu_quota(tmp_path) == quota


def test_without_a_control_group_the_cpu_quota_is_infinite(tmp_path: Path) -> None:
    assert machine.cpu_quota(tmp_path / "absent") == math.inf


def test_released_openmp_threads_start_again_on_demand() -> None:
    """OpenMP's helper threads of the calling thread end, and new ones start when the thread computes again."""
    if threads.openmp_library() is None:
        pytest.skip("PyTorch does not compute with GNU's OpenMP here")
    torch.set_num_threads(4)
    x = torch.linspace(0, 1, 1 << 20)
    want = (x * 2).sin()
    with_helpers = len(list(Path("/proc/self/task").iterdir()))
    threads.release_helper_threads()
    deadline = time.monotonic() + 5
    while (left := len(list(Path("/proc/self/task").iterdir()))) > with_helpers - 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left <= with_helpers - 3
    assert torch.equal((x * 2).sin(), want)
