"""Memory of a device: what the engine's KV pool may take of a GPU, and errors where there is too little.

    total * utilization, at most what other processes leave
        peak of the largest step      weights, activations, logits, the sampler's workspace
        budget                        the KV pool
        CUDA graphs
    the rest                          kernels' code, fragmentation; other processes

The peak is measured, not estimated: `measure_peak` runs the largest step once (`model/largest_step.py`). `DeviceMemory`
is all that is asked of a device, so the arithmetic is tested without one. The share is per engine, as in vLLM: two
engines on one GPU get 0.45 each.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

GIB = 1 << 30
GRAPH_SHARE = 0.02
"""Of a GPU's memory, what CUDA graphs may take."""


class DeviceMemory(Protocol):
    """Figures of one device, in bytes."""

    @property
    def total(self) -> int:
        """Memory of the device."""

    @property
    def free(self) -> int:
        """Memory that no process has taken from the device."""

    @property
    def reserved(self) -> int:
        """Memory that PyTorch's allocator in this process has taken from the device, used or not."""

    @property
    def peak(self) -> int:
        """The most that tensors of this process took at a time since `reset_peak`."""

    def reset_peak(self) -> None:
        """Begin to measure `peak` again, from what tensors take now."""

    def release_unused(self) -> None:
        """Give memory that the allocator reserves without use back to the device."""


class CudaMemory:
    """`DeviceMemory` of a CUDA device, by PyTorch's allocator and the driver.

    Args:
        device: of type "cuda"; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    @property
    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[0])

    @property
    def reserved(self) -> int:
        return int(torch.cuda.memory_reserved(self._device))

    @property
    def peak(self) -> int:
        return int(torch.cuda.max_memory_allocated(self._device))

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_unused(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory of a GPU that is measured and shared by `gpu_memory_utilization`; None: the device has no such."""
    return CudaMemory(device) if device.type == "cuda" else None


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device: Triton and CUDA graphs launch there, wherever tensors are.

    Each thread has a current device of its own, "cuda:0" at first.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def measure_peak(run: Callable[[], object], memory: DeviceMemory) -> int:
    """Bytes that tensors of this process take at most while `run` runs, those from before included.

    Afterwards the allocator keeps nothing that is not in use.
    """
    gc.collect()  # what loading left in circles is no part of a step
    memory.release_unused()
    memory.reset_peak()
    run()
    peak = memory.peak
    gc.collect()
    memory.release_unused()
    return peak


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """How much of a GPU an engine may take, and what of it is left for KV. All in bytes."""

    total: int
    """Of the device."""
    used_by_others: int
    """Taken from the device, but not by tensors of this process: by other processes, and by the CUDA context and the
    kernels of this one."""
    peak: int
    """Of the largest step, weights included."""
    utilization: float
    """`gpu_memory_utilization`."""
    graphs: int = 0
    """What CUDA graphs may take."""

    @classmethod
    def measure(
        cls, run: Callable[[], object], memory: DeviceMemory, utilization: float, graphs: int = 0
    ) -> DeviceBudget:
        """Measure the largest step.

        Args:
            run: runs it.
            memory: of the device.
            utilization: share of the device that the engine may take in all, above 0 and at most 1.
            graphs: bytes that CUDA graphs may take.
        """
        peak = measure_peak(run, memory)
        total = memory.total
        return cls(total, max(0, total - memory.free - memory.reserved), peak, utilization, graphs)

    @property
    def kv_bytes(self) -> int:
        """What the KV pool may take; negative: the largest step alone takes more than the engine may."""
        return kv_budget(self.total, self.used_by_others, self.peak + self.graphs, self.utilization)

    def __str__(self) -> str:
        return (
            f"gpu_memory_utilization is {self.utilization:g} of {self.total / GIB:,.2f} GiB, other processes and the "
            f"CUDA context have {self.used_by_others / GIB:,.2f} GiB, weights and the largest step take "
            f"{self.peak / GIB:,.2f} GiB, CUDA graphs at most {self.graphs / GIB:,.2f} GiB"
        )


def kv_budget(total: int, used_by_others: int, peak: int, utilization: float) -> int:
    """Bytes that the KV pool may take, of the four figures of a `DeviceBudget`."""
    return min(int(total * utilization), total - used_by_others) - peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device ran out of memory: the error itself, or what caused it."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__
    return cause is not None


@contextmanager
def naming_out_of_memory(doing: str, remedy: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """An out-of-memory error of the device meanwhile becomes an error of one line with the remedy.

    Args:
        doing: what needs the memory, such as "loading the model on cuda:0".
        remedy: what the user can change.
        kind: of the error that is raised.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # PyTorch's advice on its own settings, behind the figures, does not help here.
        figures = " ".join(str(error).split()).partition(" If reserved")[0].rstrip(".")
        raise kind(f"{doing} needs more memory than the device has free ({figures}); {remedy}") from error
