"""Linear layers whose weights are stored in the order that the CPU's matrix kernels read, or in 8 or 4 bits.

PyTorch uses oneDNN on CPUs, which multiplies fastest with weights in blocks of its own order. `F.linear` keeps weights
row by row and reorders a part of them in every call. Here the weights are reordered once: on the machine where this was
measured, a product of 8 to 64 rows takes half to two thirds of the time. The operators are private to PyTorch, so they
are tested before use. If an operator is missing or wrong, weights are stored row by row.

With `int8`, weights are rounded to 8 bits per output feature when the model is loaded. The weights then take a quarter
of the memory, and less is read for each token. Activations are split into two 8-bit rows: the second row holds the
rounding error of the first. One product computes both rows, so outputs have the precision of 16 bits. With activations
in 8 bits, the perplexity of a small model rose by 4 % instead of 0.3 %. Sums of 8-bit products are exact, and each row
has its own scales, so a row's output does not depend on the other rows.

With `int4`, weights that a file has in 4 bits (GGUF's Q4_0, Q4_1, Q4_K) are kept in 4 bits as well. Up to `SMALL_BATCH`
rows are computed with 4-bit weights and activations in bfloat16, which reads half as much memory as 8 bits. The time of
a 4-bit product grows with its rows, so more rows use the same numbers in 8 bits, or packed if the model is in bfloat16.
So a row's output depends a little on the number of rows in its step.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Sequence
from functools import cache
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from pointsman.engine.errors import first_line
from pointsman.engine.kernels import layers as kernels
from pointsman.engine.model import quantization as quantized

logger = logging.getLogger(__name__)

JOINED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PACKED_FOR_ROWS = 64
"""Number of rows for which the packed order of the weights is optimised; any number of rows can be computed."""
MIN_SIZE_PACKED = 1 << 18
"""Minimum number of elements of a weight for which packing is faster with any number of rows: a packed product has an
overhead of 14 us, a plain product of 2 us."""
MIN_SIZE_BOTH_FORMS = 1 << 16
"""Minimum number of elements of a weight for which packing is faster with many rows. Such a weight is stored packed and
plain, which takes a MiB at most."""
MIN_ROWS_PACKED = 8
"""Minimum number of rows for which a weight that is stored packed and plain is used in its packed form."""
SMALL_BATCH = 4
"""Maximum number of rows for which the 4-bit product is faster than the product in 8 bits."""


def rounded_up_rows(num_rows: int) -> int:
    """The number of rows to which `num_rows` rows are padded, so that products have few different sizes.

    oneDNN compiles a program for each number of rows, which takes half a millisecond and half a MiB, and caches many
    programs.
    """
    step = 1 if num_rows <= 8 else 8 if num_rows <= 64 else 32
    return -(-num_rows // step) * step


class JoinedLinear(nn.Module):
    """One matrix product for one or several linear layers with the same input.

    The product uses the layers' plain weights until `store` has converted these weights to their fastest form.

    Args:
        layers: the linear layers, whose outputs are concatenated; either all have a bias or none has.
    """

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        weight = layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers])
        biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
        if biases and len(biases) != len(layers):
            raise ValueError(
                f"{len(biases)} of {len(layers)} layers have a bias; join only layers that "
                "all have a bias or all have none"
            )
        self.in_features = layers[0].in_features
        self.out_features = weight.shape[0]
        self.bias = torch.cat(biases) if biases else None
        self.weight = weight.detach()
        self.form = "plain"
        self._stored: Any = None
        self._groups: quantized.Groups | None = None  # only for int4
        self._split = self._merge = np.empty(0, dtype=np.int64)  # arguments of kernels, only for int8

    def store(self, quantization: str | None = None) -> None:
        """Convert the weights, once, to the form that products will use.

        Args:
            quantization: "int8": 8 bits; "int4": 8 bits and, if the weights fit in 4 bits, also 4 bits; None: the
                packed order, if the layer is large enough.
        """
        if self.form != "plain":
            return
        weight = self.weight
        if quantization == "int4":
            self._groups, weight = quantized.quantize_in_groups(weight) or (None, weight)
        if quantization == "int8" or (quantization == "int4" and weight.dtype == torch.float32):
            self._stored = quantized.quantize_per_feature(weight.float())
            limit = quantized.activation_limit()
            bias = self.bias = None if self.bias is None else self.bias.float()
            self._split = np.array([0, 0, 0, 0, 0, self.in_features, limit], dtype=np.int64)
            address = 0 if bias is None else bias.data_ptr()
            self._merge = np.array([0, 0, 0, address, 0, self.out_features, limit], dtype=np.int64)
            self.form = "int8"
        elif weight.device.type == "cpu" and weight.numel() >= MIN_SIZE_BOTH_FORMS and packing_works(weight.dtype):
            self._stored = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS)
            self.form = "packed" if weight.numel() >= MIN_SIZE_PACKED else "both"
        if self.form not in ("packed", "int8"):
            self.weight = weight
            return
        # Some models read the dtype of a layer's weight. A model that computes with it gets NaN and fails its check.
        self.weight = self.weight.new_full((1, 1), torch.nan).expand_as(self.weight)

    @property
    def is_in_4_bits(self) -> bool:
        """Whether steps of at most `SMALL_BATCH` rows compute with 4-bit weights."""
        return self._groups is not None

    def forward(self, x: Tensor) -> Tensor:
        """Inputs [..., in_features] -> outputs [..., out_features]."""
        if self._groups is not None and x.numel() <= SMALL_BATCH * self.in_features:
            return self._in_int4(x)
        if self.form == "packed" or (self.form == "both" and x.numel() >= MIN_ROWS_PACKED * self.in_features):
            return torch.ops.mkldnn._linear_pointwise(x, self._stored, self.bias, "none", [], "")  # type: ignore[no-any-return]
        if self.form == "int8":
            return self._in_int8(x)
        return F.linear(x, self.weight, self.bias)

    def _in_int4(self, x: Tensor) -> Tensor:
        assert self._groups is not None  # the caller checks it
        out = self._groups.product(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def _in_int8(self, x: Tensor) -> Tensor:
        """The product of `x` with 8-bit weights. If an input row has a number that is not finite, its output row is
        NaN."""
        dtype = self.weight.dtype
        if x.dtype != dtype or x.shape[-1] != self.in_features:  # kernels read raw memory
            raise TypeError(f"inputs must be {dtype} [..., {self.in_features}], not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous().float()
        split, merge, limit = self._split, self._merge, quantized.activation_limit()
        num_rows = x.numel() // self.in_features
        num_threads = kernels.num_threads_for(num_rows)
        halves, scales = x.new_empty(2 * num_rows, self.in_features), x.new_empty(num_rows)
        split[1], split[2], split[4] = x.data_ptr(), halves.data_ptr(), num_rows
        split[3] = merge[2] = scales.data_ptr()
        kernels.split_kernel()(split, num_threads)
        out: Tensor = quantized.int8_product()(halves, 1.0, limit + 1, self._stored)
        merge[1], merge[4] = out.data_ptr(), num_rows
        kernels.merge_kernel()(merge, num_threads)
        return out[:num_rows].view(*x.shape[:-1], self.out_features).to(dtype)

    def plain_weights(self) -> dict[str, Tensor]:
        """Bias, weights (original or rounded) and scales, by name. The order of their elements does not depend on the
        processor. Weights that the layer stores in another form are copied."""
        found = {} if self.bias is None else {"bias": self.bias}
        if self._groups is not None:
            found["groups"] = self._groups.scales_and_zeros
        if self.form == "packed":
            return {**found, "weight": self._stored.to_dense()}
        if self.form == "int8":
            rounded, _ = torch.ops.quantized.linear_unpack(self._stored)
            return {**found, "weight": rounded.int_repr(), "scales": rounded.q_per_channel_scales()}
        return {**found, "weight": self.weight}

    def extra_repr(self) -> str:
        form = f"{self.form} and int4" if self.is_in_4_bits else self.form
        return f"in_features={self.in_features}, out_features={self.out_features}, {self.weight.dtype}, {form}"


def can_join(layer: nn.Module | None) -> TypeGuard[nn.Linear]:
    """Whether a layer is a linear layer of PyTorch (no subclass) with a supported dtype."""
    return type(layer) is nn.Linear and layer.weight.dtype in JOINED_DTYPES


def join_linear_layers(model: nn.Module, layers: Container[nn.Module]) -> int:
    """Replace the large linear layers of a model that are in `layers`, in place; returns the number of replaced layers.

    Only layers that are called can be replaced: some models use a layer's weight without calling the layer.
    """
    found = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in layers and can_join(child) and child.weight.numel() >= MIN_SIZE_PACKED:
                setattr(parent, name, JoinedLinear([child]))
                found += 1
    return found


def store_weights(model: nn.Module, quantization: str | None = None) -> None:
    """Convert the weights of all `JoinedLinear` layers of a model to the form that products will use.

    Raises:
        ValueError: a quantization is given, and no layer supports it. For "int4" all weights are stored nevertheless.
    """
    joined = [module for module in model.modules() if isinstance(module, JoinedLinear)]
    head = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if quantization is not None and not joined:
        raise ValueError(
            f"quantization is {quantization!r} and no linear layer of this model was fused; leave "
            "quantization out, or load the model with fuse=True and attention='numba'"
        )
    for layer in joined:  # the head stays in 8 bits: 4-bit products in bfloat16 would make different logits equal
        layer.store("int8" if layer is head and quantization == "int4" else quantization)
    if quantization == "int4" and not any(layer.is_in_4_bits for layer in joined):
        raise ValueError(
            "quantization is 'int4' and no layer of this model has weights in 4 bits; give a GGUF file with such "
            "weights (Q4_0, Q4_1, Q4_K), or quantization='int8'"
        )


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether this PyTorch can pack weights of a dtype on this processor, and multiplies correctly with packed
    weights."""
    weight = torch.linspace(-1, 1, 512 * 64).view(64, 512).to(dtype)
    x = torch.linspace(-1, 1, 3 * 512).view(1, 3, 512).to(dtype)
    try:
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR_ROWS)
            got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
            want = F.linear(x, weight)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        right = got.shape == want.shape and torch.allclose(got.float(), want.float(), rtol=tolerance, atol=tolerance)
    except (AttributeError, RuntimeError) as error:
        logger.info("linear layers in %s are not packed, which is slower: %s", dtype, first_line(error))
        return False
    return right
