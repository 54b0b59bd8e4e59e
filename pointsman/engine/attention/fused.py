"""What fused layers (`model/fused_layers.py`) need of a device: an attention backend with kernels for all between
products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from pointsman.engine.attention.paged import AttentionBackend
from pointsman.engine.kv.layout import LayerShape


class NormKernel(Protocol):
    """out = y / sqrt(mean(y**2) + epsilon) * (weight + offset), per row, where y = x or x + addend.

    x, out, addend and `total`, where y goes if there is an addend: [n, width], contiguous; weight: [width].
    """

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None: ...


class GateKernel(Protocol):
    """out [n, width] = activation(both[:, :width]) * both[:, width:]."""

    def __call__(self, both: Tensor, out: Tensor) -> None: ...


class LayerKernels(Protocol):
    """Kernels of a device; each object that is made is for one layer."""

    def takes(self, weight: Tensor) -> bool:
        """Whether they compute with weights of this type, on this device."""

    def norm(self, epsilon: float, offset: float) -> NormKernel:
        """An RMS norm."""

    def gate(self, width: int, activation: str) -> GateKernel:
        """A gate; `activation` is one of `ACTIVATIONS` (`kernels/layers.py`)."""


@dataclass(slots=True)
class HeadNorms:
    """The norms of each head's queries and keys, alike but for their weights [k_dim]."""

    query: Tensor
    key: Tensor
    epsilon: float
    offset: float


@dataclass(slots=True)
class Heads:
    """What happens to the heads of one layer between its projections and its attention."""

    shape: LayerShape
    norms: HeadNorms | None
    key_at: int
    """Where in a token's projections the keys begin; the queries are before them,"""
    value_at: int
    """and the values behind them."""
    kept: Any = None
    """What the backend keeps for the layer."""


class FusedAttentionBackend(AttentionBackend, Protocol):
    """A backend for fused layers: it also norms and rotates heads on their way from the projections to the pool."""

    kernels: LayerKernels

    def write_heads(
        self, plan: Any, heads: Heads, qkv: Tensor, rotary: tuple[Tensor, Tensor] | None, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Write keys and values of the projections `qkv` [T, features] to the pool, see `AttentionBackend.write`.

        Args:
            rotary: cos and sin [T, rotary_dim] by which queries and keys are rotated, of the type of `qkv` and
                contiguous; None: they are not.

        Returns:
            [T, num_heads, k_dim] queries.
        """
