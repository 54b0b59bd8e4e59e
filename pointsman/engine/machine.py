"""Counts cores and GPUs, and sets how the C libraries' idle threads wait and when freed memory is returned.

This module imports no PyTorch, because OpenMP reads the environment when PyTorch is loaded.

*Threads.* GNU's OpenMP lets an idle thread spin for milliseconds by default, see `wait_briefly`.

*Memory.* By default an allocation of more than a few hundred KiB gets pages of its own from the system, and returns
them when it is freed. The activations of a large step are such allocations, a few per layer. Mapping and zeroing their
pages each time took 8 % of a measured prompt step. `keep_freed_pages` keeps the pages in the heap for the next layer.
"""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

SPINS = "5000"
"""Number of iterations for which an idle thread of GNU's OpenMP spins before it sleeps, about a tenth of a
millisecond."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
LARGEST_IN_HEAP = 32 << 20
"""Maximum size, in bytes, of allocations that come from the heap: the largest threshold that the C library accepts."""
KEPT_AT_THE_TOP = 1 << 30
"""Free memory at the end of a heap, in bytes, above which the C library returns it to the system."""
CGROUP = Path("/sys/fs/cgroup")
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Device files of NVIDIA's driver, of NVIDIA's driver within WSL, and of AMD's driver; PyTorch calls the GPUs of all
these drivers "cuda"."""
SECONDS_TO_COUNT = 120.0
"""Maximum seconds for a child process to import PyTorch and count GPUs."""


def wait_briefly() -> None:
    """Let OpenMP's idle threads spin for about the time between two operators, and then sleep.

    By default they spin for milliseconds, which makes steps twenty times slower on a machine with other work. Threads
    that sleep without spinning have to be woken for every operator, which costs a quarter of the speed of a small
    model. A setting by the user is kept. Call this before PyTorch is imported; child processes inherit the setting.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@cache
def keep_freed_pages(*, one_heap: bool = False) -> bool:
    """Keep freed memory in the heap of this process. Returns False, without an effect, if the C library is not glibc or
    the user has set glibc's thresholds for memory.

    Args:
        one_heap: whether all threads share one heap; call this before they first allocate. A thread's own heap consists
            of pieces of 64 MiB, and an empty piece is always returned to the system. Sharing costs nothing if only a
            few threads allocate memory, and seldom.
    """
    mallopt = _c_function("mallopt")
    if mallopt is None or any(name in os.environ for name in ENVIRONMENT):
        return False
    if one_heap:
        mallopt(M_ARENA_MAX, 1)
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_TOP))


def return_freed_pages() -> None:
    """Return free memory of the heap to the system, before an idle time. The call takes milliseconds."""
    trim = _c_function("malloc_trim")
    if trim is not None:
        trim(0)


def _c_function(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):  # not glibc, or Windows, where a library must be named
        return None


def usable_cores() -> list[int]:
    """Numbers of the processors that this process may run on, in ascending order."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return list(range(os.cpu_count() or 1)) if affinity is None else sorted(affinity(0))


@cache
def num_cores() -> int:
    """Number of processors that this process may use at the same time, at least 1."""
    return max(1, math.ceil(min(len(usable_cores()), cpu_quota(CGROUP))))


def cpu_quota(root: Path) -> float:
    """The CPU limit of the control group at `root`, in processors; infinity without a limit.

    Both interfaces of Linux's control groups are read: `cpu.max` ("quota period" or "max period"), and the older pair
    `cpu.cfs_quota_us` and `cpu.cfs_period_us`.
    """
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu" / "cpu.cfs_quota_us").read_text()
            period = (root / "cpu" / "cpu.cfs_period_us").read_text()
        share = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
        return math.inf
    return share if share > 0 else math.inf


def has_gpu_driver() -> bool:
    """Whether this machine may have a GPU that PyTorch can use. This check is cheap; if it fails, PyTorch need not be
    imported."""
    return any(path.exists() for path in GPU_DRIVERS)


@cache
def visible_gpus() -> tuple[str, ...]:
    """The GPUs that PyTorch sees: "cuda:0", "cuda:1", ... `CUDA_VISIBLE_DEVICES` limits them and sets their order.

    A child process counts the GPUs, so that the caller need not import PyTorch.

    Raises:
        ValueError: the GPUs cannot be counted.
    """
    if not has_gpu_driver():
        return ()
    program = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
    try:
        run = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_COUNT,
            check=True,
        )
        count = int(run.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise ValueError(
            f"the GPUs of this machine cannot be counted ({type(error).__name__}); give --device cpu, or check that "
            "PyTorch can be imported"
        ) from error
    return tuple(f"cuda:{index}" for index in range(count))
