"""Protocols of the kernels for fused layers (`model/fused_layers.py`), and of an attention backend for such layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.layout import LayerShape


class NormKernel(Protocol):
    """out = y / sqrt(mean(y**2) + epsilon) * (weight + offset), per row, where y = x or x + addend.

    With an addend, y is also written to `total`. x, out, addend and total: [n, width], contiguous. weight: [width].
    """

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None: ...


class GateKernel(Protocol):
    """out [n, width] = activation(both[:, :width]) * both[:, width:], where a row of `both` [n, 2 * width] has gate,
    then up."""

    def __call__(self, both: Tensor, out: Tensor) -> None: ...


class LayerKernels(Protocol):
    """Makes the kernels of fused layers for a device. Each kernel object is for one layer."""

    def supports(self, weight: Tensor) -> bool:
        """Whether the kernels support the type and the device of `weight`."""

    def norm(self, epsilon: float, offset: float) -> NormKernel:
        """Make the kernel of an RMS norm."""

    def gate(self, width: int, activation: str) -> GateKernel:
        """Make the kernel of an MLP's gate; `activation` is a name in `ACTIVATIONS` (`kernels/layers.py`)."""


@dataclass(slots=True)
class HeadNorms:
    """The RMS norms of each head's queries and keys. The two norms differ only in their weights, `query` and `key`
    [k_dim]."""

    query: Tensor
    key: Tensor
    epsilon: float
    offset: float


@dataclass(slots=True)
class Heads:
    """Describes how the heads of one layer are processed between the layer's projections and its attention."""

    shape: LayerShape
    norms: HeadNorms | None
    key_at: int
    """Index of the first element of the keys in a token's row of projections (queries, then keys, then values)."""
    value_at: int
    """Index of the first element of the values in a token's row of projections."""
    kept: Any = None
    """Data that the attention backend caches for this layer."""


class FusedAttentionBackend(AttentionBackend, Protocol):
    """An attention backend for fused layers. It also norms and rotates heads, between the projections and the pool."""

    kernels: LayerKernels

    def write_heads(
        self, plan: Any, heads: Heads, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Norm and rotate the heads in the projections `qkv` [T, features], and write keys and values as in
        `AttentionBackend.write`.

        Args:
            rotary: cos and sin [T, rotary_dim] of the rotation of queries and keys, contiguous and of the type of
                `qkv`; None: no rotation.

        Returns:
            [T, num_heads, k_dim] queries.
        """
