"""Linear layers with their weights stored the way the matrix kernels of the CPU read them.

oneDNN, which PyTorch computes with on CPUs, multiplies fastest with weights in blocks of its own order. `F.linear`
keeps them row by row and reorders them, in part, in every call; here they are reordered once. On the machine where this
was measured a product of 8 to 64 rows takes half to two thirds of the time. The operators are private to PyTorch, so
they are tried before they are used, and where they are missing or wrong `nn.Linear` stays.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

logger = logging.getLogger(__name__)

PACKED_DTYPES = (torch.float32, torch.bfloat16)
PACKED_FOR_ROWS = 64
"""The number of rows that the order is chosen for; any number can be multiplied."""
PACKED_FROM = 1 << 18
"""Elements of a weight from which packing pays: a packed product costs 14 us before it begins, a plain one 2."""


class JoinedLinear(nn.Module):
    """One or several linear layers of the same input as one product, with packed weights where that is faster.

    Args:
        layers: their outputs lie behind each other; all with a bias or none.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        weight = weight.detach()
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) != len(layers):
            raise ValueError(f"{len(biases)} of {len(layers)} layers have a bias; join all with one or all without")
        self.in_features = layers[0].in_features
        self.out_features = weight.shape[0]
        self.bias = torch.cat(biases) if biases else None
        self.packed: Tensor | None = None
        self.weight = weight
        if weight.numel() >= PACKED_FROM:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
            # Some models ask for the type of a layer's weight. One that computed with it would get NaN, and be refused.
            self.weight = weight.new_full((1, 1), torch.nan).expand_as(weight)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        how = "row by row" if self.packed is None else "packed"
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight.dtype}, {how}"


def can_join(layer: nn.Module | None) -> bool:
    """Whether a layer is a plain linear layer on a CPU that packing supports."""
    return (
        type(layer) is nn.Linear
        and layer.weight.device.type == "cpu"
        and layer.weight.dtype in PACKED_DTYPES
        and packing_works(layer.weight.dtype)
    )


def pack_linear_layers(model: nn.Module, layers: Container[nn.Module]) -> int:
    """Replace those of `layers` that are still in a model, and large, by packed ones, in place; how many there were.

    Only layers that are called can be replaced: some models use a layer's weight without calling it.
    """
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in layers and can_join(child) and child.weight.numel() >= PACKED_FROM:  # type: ignore[union-attr]
                setattr(parent, name, JoinedLinear([child]))  # type: ignore[list-item]
                found += 1
    return found


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this PyTorch on this processor packs weights of a dtype, and multiplies rightly with them."""
    layer = nn.Linear(512, PACKED_FROM // 512, bias=True, dtype=dtype)
    x = torch.linspace(-1, 1, 3 * 512).view(1, 3, 512).to(dtype)
    try:
        with torch.inference_mode():
            got, want = JoinedLinear([layer])(x), layer(x)
        right = got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=2e-2, atol=2e-2)
    except (AttributeError, RuntimeError) as error:
        logger.info("linear layers are not packed in %s: %s", dtype, str(error).splitlines()[0])
        return False
    return right
