"""Divides a GPU's memory: measures the largest step, gives the KV pool the rest, and rewrites out-of-memory errors.

    total * utilization, at most the memory that other processes leave
        peak of the largest step      weights, activations, logits, the sampler's workspace
        budget                        the KV pool
        CUDA graphs
    the rest                          kernels' code, fragmentation; other processes

The peak is measured, not estimated: `measure_peak` runs the largest step once (`model/largest_step.py`). The arithmetic
reads a device through `DeviceMemory` alone, so it is tested without a GPU. `gpu_memory_utilization` is per engine, as
in vLLM: for two engines on one GPU, give each 0.45.
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
"""Share of a GPU's memory that CUDA graphs may take."""


class DeviceMemory(Protocol):
    """The memory of one device, and the memory that this process uses there, in bytes."""

    @property
    def total(self) -> int:
        """Whole memory of the device."""

    @property
    def free(self) -> int:
        """Memory of the device that no process has taken."""

    @property
    def reserved(self) -> int:
        """Memory that PyTorch's allocator in this process has taken from the device, used or not."""

    @property
    def peak(self) -> int:
        """Maximum memory that tensors of this process took at one time since `reset_peak`."""

    def reset_peak(self) -> None:
        """Reset `peak` to the memory that tensors of this process take now."""

    def release_unused(self) -> None:
        """Return to the device the reserved memory that no tensor uses."""


class CudaMemory:
    """`DeviceMemory` of a CUDA device, read from PyTorch's allocator and the driver.

    Args:
        device: a device of type "cuda"; without an index, the current CUDA device.
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
    """The memory of a GPU, which `gpu_memory_utilization` divides; None: the device is a CPU."""
    return CudaMemory(device) if device.type == "cuda" else None


def use_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current device. Triton and CUDA graphs launch on the current device, not on that
    of the tensors.

    Each thread has its own current device, which is "cuda:0" at first.
    """
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def measure_peak(run: Callable[[], object], memory: DeviceMemory) -> int:
    """Call `run`; return the maximum memory, in bytes, that tensors of this process took meanwhile, including tensors
    made before.

    Afterwards the allocator has released all unused memory.
    """
    gc.collect()  # reference cycles from loading are no part of a step
    memory.release_unused()
    memory.reset_peak()
    run()
    peak = memory.peak
    gc.collect()
    memory.release_unused()
    return peak


@dataclass(frozen=True, slots=True)
class DeviceBudget:
    """The memory of a GPU that an engine may take, and the part for the KV pool; in bytes, except `utilization`."""

    total: int
    """Whole memory of the device."""
    used_by_others: int
    """Memory taken by other processes, and by the CUDA context and the kernels of this process."""
    peak: int
    """Maximum memory of tensors during the largest step, weights included."""
    utilization: float
    """Share of the device that the engine may take: `gpu_memory_utilization`."""
    graphs: int = 0
    """Maximum memory that CUDA graphs may take."""

    @classmethod
    def measure(
        cls, run: Callable[[], object], memory: DeviceMemory, utilization: float, graphs: int = 0
    ) -> DeviceBudget:
        """Measure the largest step, and return the budget.

        Args:
            run: function that runs the largest step.
            memory: the memory of the GPU.
            utilization: share of the device's memory that the engine may take, above 0 and at most 1.
            graphs: maximum memory of CUDA graphs, in bytes.
        """
        peak = measure_peak(run, memory)
        total = memory.total
        return cls(total, max(0, total - memory.free - memory.reserved), peak, utilization, graphs)

    @property
    def kv_bytes(self) -> int:
        """Memory for the KV pool, in bytes; negative: the largest step alone exceeds the engine's share."""
        return kv_budget(self.total, self.used_by_others, self.peak + self.graphs, self.utilization)

    def __str__(self) -> str:
        return (
            f"gpu_memory_utilization is {self.utilization:g} of {self.total / GIB:,.2f} GiB, other processes and the "
            f"CUDA context have {self.used_by_others / GIB:,.2f} GiB, weights and the largest step take "
            f"{self.peak / GIB:,.2f} GiB, CUDA graphs at most {self.graphs / GIB:,.2f} GiB"
        )


def kv_budget(total: int, used_by_others: int, peak: int, utilization: float) -> int:
    """Bytes that the KV pool may take. The arguments are the fields of a `DeviceBudget`, with `graphs` added to
    `peak`."""
    return min(int(total * utilization), total - used_by_others) - peak


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error or any of its causes is PyTorch's out-of-memory error."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, torch.OutOfMemoryError):
        cause = cause.__cause__
    return cause is not None


@contextmanager
def explain_out_of_memory(action: str, remedy: str, error_class: type[Exception] = ValueError) -> Iterator[None]:
    """Replace an out-of-memory error of the device, raised in the block, by an error of one line with the remedy.

    Args:
        action: the action that needs the memory, such as "loading the model on cuda:0".
        remedy: the settings that the user can change.
        error_class: class of the error that is raised.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # PyTorch's advice on its own settings, after the figures, does not help here.
        figures = " ".join(str(error).split()).partition(" If reserved")[0].rstrip(".")
        raise error_class(f"{action} needs more memory than the device has free ({figures}); {remedy}") from error
