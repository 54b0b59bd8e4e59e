"""Sets the number of threads with which PyTorch computes.

By default PyTorch uses every core that it sees. That is slow in two cases. In a container with a CPU quota, threads
above the quota only wait for each other. For a very small model, passing work to another thread takes longer than the
work. A setting by the user, in the environment or with `torch.set_num_threads`, is kept.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from pointsman.engine import machine

logger = logging.getLogger(__name__)

ENVIRONMENT = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
SMALL_MODEL = 8_000_000
"""Number of model parameters below which one thread is fastest: a step takes a few milliseconds, and with several
threads each would wait for the others at every operation."""
_PAUSE_SOFT = 1  # `omp_pause_soft`

_at_start = torch.get_num_threads()
_last_set = _at_start


def set_num_threads(num_threads: int | None, num_parameters: int) -> int:
    """Set the number of threads with which PyTorch computes in this process, and return it.

    Args:
        num_threads: the number to set; None: the user's setting, or the best number for a model of `num_parameters`.

    Raises:
        ValueError: the number is below 1.
    """
    global _last_set
    if num_threads is not None:
        if not isinstance(num_threads, int) or num_threads < 1:
            raise ValueError(f"num_threads is {num_threads!r}; it must be an integer of at least 1")
        chosen = num_threads
    elif any(name in os.environ for name in ENVIRONMENT) or torch.get_num_threads() != _last_set:
        return torch.get_num_threads()
    elif num_parameters < SMALL_MODEL:
        chosen = 1
    else:
        chosen = max(1, math.ceil(min(_at_start, machine.cpu_quota(machine.CGROUP))))
    if chosen != torch.get_num_threads():
        logger.info(
            "PyTorch computes with %d thread(s); --threads, num_threads or OMP_NUM_THREADS changes that", chosen
        )
        torch.set_num_threads(chosen)
    _last_set = chosen
    return chosen


@cache
def openmp_library() -> ctypes.CDLL | None:
    """GNU's OpenMP library; None: PyTorch does not use it."""
    for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            library.GOMP_parallel  # noqa: B018 - raises if the symbol is missing
            return library
    return None


def release_helper_threads() -> None:
    """End the helper threads that OpenMP keeps for the calling thread. If the calling thread computes again, it gets
    new helper threads.

    OpenMP keeps helper threads for each thread that has computed: the thread that loaded the model, and the thread that
    steps. Together they are more than the cores, so OpenMP lets all of them sleep between operators. That made a decode
    step of a small model take 1.5 times as long.
    """
    library = openmp_library()
    pause = getattr(library, "omp_pause_resource_all", None)
    if pause is not None:  # OpenMP 5.0
        pause(_PAUSE_SOFT)
