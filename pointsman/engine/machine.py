"""The machine: its cores, how idle threads of the C libraries wait, and when freed memory returns to the system.

This module imports no PyTorch, because OpenMP reads the environment when PyTorch is loaded.

*Threads.* GNU's OpenMP lets a thread without work spin for milliseconds by default, see `wait_briefly`.

*Memory.* By default an allocation of more than a few hundred KiB gets pages of its own from the system, which are
returned when it is freed. The activations of a large step are such allocations, a few per layer and step, and each
time every page is mapped and zeroed again: 8 % of a prompt step where this was measured. Kept in the heap, the pages
of one layer serve the next, see `keep_freed_pages`.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

SPINS = "5000"
"""Turns of the loop in which GNU's OpenMP waits before it sleeps, about a tenth of a millisecond."""
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")
LARGEST_IN_HEAP = 32 << 20
"""Bytes; the maximum that the C library accepts."""
KEPT_AT_THE_TOP = 1 << 30
"""Bytes that may lie free at a heap's end before they go back to the system."""
CGROUP = Path("/sys/fs/cgroup")


def wait_briefly() -> None:
    """Let threads without work wait for as long as it is from one operator to the next, and then sleep.

    By default they spin for milliseconds, which on a machine with other work costs a factor of twenty. Threads that
    sleep at once have to be woken for every operator, which costs a quarter of the speed of a small model. What the
    user has set is left alone. To be called before PyTorch is imported; processes that are started inherit it.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)


@cache
def keep_freed_pages(*, one_heap: bool = False) -> bool:
    """Keep freed memory in the heap, in this process. False: the C library is not glibc, or the user has set it
    otherwise.

    Args:
        one_heap: let all threads share the process's heap. A thread's own is made of pieces of 64 MiB, each given back
            whenever it is empty, whatever is set here; a few threads that allocate seldom lose nothing by sharing.
            Only before those threads allocate for the first time.
    """
    mallopt = _of_the_c_library("mallopt")
    if mallopt is None or any(name in os.environ for name in ENVIRONMENT):
        return False
    if one_heap:
        mallopt(M_ARENA_MAX, 1)
    return bool(mallopt(M_MMAP_THRESHOLD, LARGEST_IN_HEAP)) and bool(mallopt(M_TRIM_THRESHOLD, KEPT_AT_THE_TOP))


def give_back_freed_pages() -> None:
    """Return to the system what lies free in the heap, for a time in which it is not needed; takes milliseconds."""
    trim = _of_the_c_library("malloc_trim")
    if trim is not None:
        trim(0)


def _of_the_c_library(name: str) -> Callable[..., int] | None:
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError, TypeError):  # not glibc, or Windows, where a library must be named
        return None


def own_cores() -> list[int]:
    """The processors that this process may run on, in ascending order."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return list(range(os.cpu_count() or 1)) if affinity is None else sorted(affinity(0))


@cache
def num_cores() -> int:
    """Processors that this process may use at a time, at least 1."""
    return max(1, math.ceil(min(len(own_cores()), cpu_quota(CGROUP))))


def cpu_quota(root: Path) -> float:
    """How many processors' worth of time the control group at `root` may use; infinity without a limit.

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
