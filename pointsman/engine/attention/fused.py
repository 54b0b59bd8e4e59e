"""Protocols of the kernels that fused layers (`model/fused_layers.py`) need, and of an attention backend with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.layout import LayerShape


class NormKernel(Protocol):
    """out = y / sqrt(mean(y**2) + epsilon) * (weight + offset), per row, where y = x or x + addend.

    If there is an addend, y is written to `total`. x, out, addend and total: [n, width], contiguous. weight: [width].
    """

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None: ...


class GateKernel(Protocol):
    """out [n, width] = activation(both[:, :width]) * both[:, width:]."""

    def __call__(self, both: Tensor, out: Tensor) -> None: ...


class LayerKernels(Protocol):
    """Makes kernels of a device. Each kernel object is for one layer."""

    def takes(self, weight: Tensor) -> bool:
        """Whether the kernels support weights of this type, on this device."""

    def norm(self, epsilon: float, offset: float) -> NormKernel:
        """Make an RMS norm."""

    def gate(self, width: int, activation: str) -> GateKernel:
        """Make a gate; `activation` is one of `ACTIVATIONS` (`kernels/layers.py`)."""


@dataclass(slots=True)
class HeadNorms:
    """The norms of each head's queries and keys. Only their weights [k_dim] differ."""

    query: Tensor
    key: Tensor
    epsilon: float
    offset: float


@dataclass(slots=True)
class Heads:
    """How the heads of one layer are processed between its projections and its attention."""

    shape: LayerShape
    norms: HeadNorms | None
    key_at: int
    """Index of the keys in a token's projections; the queries come before them."""
    value_at: int
    """Index of the values in a token's projections."""
    kept: Any = None
    """State that the backend keeps for the layer."""


class FusedAttentionBackend(AttentionBackend, Protocol):
    """A backend for fused layers. It also norms and rotates heads between the projections and the pool."""

    kernels: LayerKernels

    def write_heads(
        self, plan: Any, heads: Heads, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write keys and values of the projections `qkv` [T, features] to the pool, see `AttentionBackend.write`.

        Args:
            rotary: cos and sin [T, rotary_dim] of the rotation of queries and keys, contiguous and of the type of
                `qkv`; None: no rotation.

        Returns:
            [T, num_heads, k_dim] queries.
        """
