"""Copies arrays to the model's device before a step, and the step's results back to the host.

A copy to a GPU does not make the host wait if its source is pinned memory. Arrays are copied together, in one buffer,
because each copy costs the host some microseconds. Their offsets in the buffer depend on their sizes alone. So arrays
of the same sizes can be copied over the arrays of an earlier step, and a CUDA graph that reads these addresses gets the
new values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNED = 16  # alignment of each array, in bytes, which kernels may assume
_TYPES = {
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}

Arrays = Mapping[str, npt.NDArray[Any]]


def to_device(arrays: Arrays, device: torch.device, buffer: Tensor | None = None) -> dict[str, Tensor]:
    """Copy host arrays to the device in one copy that the host does not wait for; return name -> tensor.

    Args:
        buffer: memory on the device for the copy, [bytes] uint8; the returned tensors are views of it. None: new
            memory.

    Raises:
        ValueError: `buffer` is too small.
    """
    places, size = _offsets(arrays)
    if buffer is not None and len(buffer) < size:
        raise ValueError(f"the arrays of a step take {size} bytes, but `buffer` has only {len(buffer)}")
    is_cuda = device.type == "cuda"
    host = torch.empty(size, dtype=torch.uint8, pin_memory=is_cuda)
    content = host.numpy()
    for name, array in arrays.items():
        at = places[name]
        content[at : at + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if buffer is not None:
        memory = buffer[:size]
        memory.copy_(host, non_blocking=True)
    else:
        memory = host.to(device, non_blocking=True)
    return {
        name: memory[places[name] : places[name] + array.nbytes].view(_TYPES[array.dtype]).view(array.shape)
        for name, array in arrays.items()
    }


def size_on_device(arrays: Arrays) -> int:
    """Size, in bytes, of the buffer that `to_device` needs for arrays of these shapes and types."""
    return _offsets(arrays)[1]


def _offsets(arrays: Arrays) -> tuple[dict[str, int], int]:
    """Compute name -> offset of each array in the buffer, and the buffer's size, in bytes."""
    places: dict[str, int] = {}
    size = 0
    for name, array in arrays.items():
        places[name] = size
        size += -(-array.nbytes // _ALIGNED) * _ALIGNED
    return places, size


class FromDevice:
    """A copy of tensors from the device to the host, which starts with this object; the device need not wait for it.

    Args:
        tensors: small tensors by name, all on one device; later writes to them do not change the copy.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not any(tensor.is_cuda for tensor in tensors.values()):
            self._tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            return
        self._tensors = {}
        for name, tensor in tensors.items():
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensors[name] = host.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> dict[str, npt.NDArray[Any]]:
        """Wait until the device has computed and copied the tensors; return name -> array."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return {name: tensor.numpy() for name, tensor in self._tensors.items()}
