"""Chooses the device and the attention backend.

| device | attention |
| --- | --- |
| CPU | `numba_backend.py`, compiled |
| GPU | `triton_backend.py`, Triton kernels |
| a layer or a type without kernels, or a missing package | `torch_backend.py`, plain PyTorch |

To add a backend, write a class with the methods of `AttentionBackend` and add a line to `choose_attention`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.attention.torch_backend import TorchAttention
from pointsman.engine.errors import first_line
from pointsman.engine.kv.layout import LayerShape

logger = logging.getLogger(__name__)

BackendFactory: TypeAlias = Callable[[Sequence[LayerShape], torch.device], AttentionBackend]
"""Function that makes an attention backend from the shapes of a model's layers and the model's device. Backend classes
are such functions."""
AttentionChoice: TypeAlias = str | BackendFactory
ATTENTION_NAMES = ("auto", "numba", "torch", "triton")


def choose_device(name: str) -> torch.device:
    """The device with this name; "auto" is a GPU if PyTorch finds a GPU, otherwise the CPU.

    Raises:
        ValueError: this machine has no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ValueError) as error:
        raise ValueError(
            f"device is {name!r}, which cannot be used here ({first_line(error)}); use cpu or auto"
        ) from None
    return device


def choose_attention(
    choice: AttentionChoice, layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype
) -> AttentionBackend:
    """Make the attention backend with the name `choice`; "auto" is the fastest backend that can run the model on this
    device.

    Raises:
        ValueError: an unknown name, or a backend that cannot run on this device.
    """
    if not isinstance(choice, str):
        return choice(layers, device)
    if choice not in ATTENTION_NAMES:
        raise ValueError(
            f"attention is {choice!r}; choose one of {', '.join(ATTENTION_NAMES)}, or give a backend class"
        )
    if choice == "torch":
        return TorchAttention(layers, device)
    if choice == "triton" or (choice == "auto" and device.type == "cuda"):
        return _make_triton_attention(layers, device, dtype, is_asked_for=choice == "triton")
    if device.type != "cpu" and choice == "auto":
        return TorchAttention(layers, device)
    return _make_numba_attention(layers, device, dtype, is_asked_for=choice == "numba")


def _make_triton_attention(
    layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype, *, is_asked_for: bool
) -> AttentionBackend:
    try:
        from pointsman.engine.attention.triton_backend import TritonAttention

        return TritonAttention(layers, device, dtype)
    except (ImportError, ValueError) as error:
        if is_asked_for:
            raise ValueError(f"attention is 'triton', which cannot run here: {first_line(error)}") from error
        logger.warning(
            "attention uses plain PyTorch, which is slower, because Triton cannot be used: %s", first_line(error)
        )
        return TorchAttention(layers, device)


def _make_numba_attention(
    layers: Sequence[LayerShape], device: torch.device, dtype: torch.dtype, *, is_asked_for: bool
) -> AttentionBackend:
    try:
        from pointsman.engine.attention.numba_backend import NumbaAttention
        from pointsman.engine.kernels.runtime import STORAGE
    except ImportError as error:
        if is_asked_for:
            raise ValueError(f"attention is 'numba', which cannot be imported ({error}); pip install numba") from error
        logger.warning("numba cannot be imported (%s); attention uses plain PyTorch, which is slower", error)
        return TorchAttention(layers, device)
    if dtype not in STORAGE:
        if is_asked_for:
            raise ValueError(f"attention is 'numba', which has no kernels for {dtype}; use float32 or bfloat16")
        return TorchAttention(layers, device)
    return NumbaAttention(layers, device)
