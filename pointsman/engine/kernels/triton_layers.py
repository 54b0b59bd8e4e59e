"""GPU kernels in Triton for norms, gates and heads, as in `layers.py`: each kernel makes one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pointsman.engine.kernels.triton_attention import jit

GATE_TILE = 1024
"""Number of elements of a row that one program of `gate_kernel` computes."""


@jit
def rms_norm_kernel(
    x,
    weight,
    out,
    addend,
    total,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    width: tl.constexpr,
    padded_width: tl.constexpr,
    adds: tl.constexpr,
):
    """Compute one row of out = y / sqrt(mean(y**2) + epsilon) * (weight + offset); y = x, or y = total = x + addend."""
    row = tl.program_id(0).to(tl.int64) * width
    d = tl.arange(0, padded_width)
    inside = d < width
    y = tl.load(x + row + d, mask=inside, other=0.0).to(tl.float32)
    if adds:
        y += tl.load(addend + row + d, mask=inside, other=0.0).to(tl.float32)
        rounded = y.to(total.dtype.element_ty)
        tl.store(total + row + d, rounded, mask=inside)
        y = rounded.to(tl.float32)
    factor = 1.0 / tl.sqrt(tl.sum(y * y, 0) / width + epsilon)
    scale = tl.load(weight + d, mask=inside, other=0.0).to(tl.float32) + offset
    tl.store(out + row + d, (y * factor * scale).to(out.dtype.element_ty), mask=inside)


@jit
def gate_kernel(
    both,
    out,
    width: tl.constexpr,
    is_silu: tl.constexpr,
    tile: tl.constexpr,
):
    """Compute `tile` elements of one row of out = activation(both[:, :width]) * both[:, width:]."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile + tl.arange(0, tile)
    inside = d < width
    x = tl.load(both + row * 2 * width + d, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + row * 2 * width + width + d, mask=inside, other=0.0).to(tl.float32)
    if is_silu:
        bent = x / (1.0 + tl.exp(-x))
    else:  # Hendrycks and Gimpel 2016, the form with tanh: (1 + tanh(y)) / 2 = 1 / (1 + exp(-2y))
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bent = x / (1.0 + tl.exp(-2.0 * inner))
    tl.store(out + row * width + d, (bent * up).to(out.dtype.element_ty), mask=inside)


@jit
def _load_heads(
    source,
    norm,
    cos,
    sin,
    angles,
    d,
    inside,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    has_norm: tl.constexpr,
    dim: tl.constexpr,
    rotary_dim: tl.constexpr,
):
    """Load heads [M, padded_dim] as float32 from their addresses `source` [M, 1]. Optionally norm the heads, and rotate
    them by the angles that begin at index `angles` of cos and sin.

    Elements i and i + rotary_dim / 2 are a pair (Su et al. 2021).
    """
    x = tl.load(source + d[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if has_norm:
        factor = (1.0 / tl.sqrt(tl.sum(x * x, 1) / dim + epsilon))[:, None]
        scale = tl.load(norm + d, mask=d < dim, other=0.0).to(tl.float32) + offset
        x = x * factor * scale[None, :]
    if rotary_dim > 0:
        half: tl.constexpr = rotary_dim // 2
        turns = d < rotary_dim
        is_low = d < half
        partner = tl.where(is_low, d + half, d - half)
        other = tl.load(source + partner[None, :], mask=inside & turns[None, :], other=0.0).to(tl.float32)
        if has_norm:
            scale = tl.load(norm + partner, mask=turns, other=0.0).to(tl.float32) + offset
            other = other * factor * scale[None, :]
        c = tl.load(cos + angles + d, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angles + d, mask=turns, other=0.0).to(tl.float32)
        x = x * c[None, :] + other * tl.where(is_low, -s, s)[None, :]
    return x


@jit
def heads_kernel(
    query,
    key,
    value,
    query_out,
    keys,
    values,
    cos,
    sin,
    query_norm,
    key_norm,
    slots,
    tails,
    query_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    epsilon: tl.constexpr,
    offset: tl.constexpr,
    has_query: tl.constexpr,
    has_norms: tl.constexpr,
    num_kv_heads: tl.constexpr,
    group: tl.constexpr,
    k_dim: tl.constexpr,
    v_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    block_size: tl.constexpr,
    padded_group: tl.constexpr,
    padded_k: tl.constexpr,
    padded_v: tl.constexpr,
):
    """For one token and KV head: norm and rotate its query heads to `query_out`, and write key and value to their slot.

    Args:
        query, key, value: projections, with strides in elements. Query heads are contiguous.
        query_out: [T, heads, k_dim] output.
        slots: [T] int32 slot of each token: block * block_size + offset; negative: no key and value are written.
        tails: [T] int32: number of slots after each token's slot, in the same block, to set to zero.
        cos, sin: [T, rotary_dim] angles of the rotation.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d, e = tl.arange(0, padded_k), tl.arange(0, padded_v)
    if has_query:
        m = tl.arange(0, padded_group)
        inside = (m < group)[:, None] & (d < k_dim)[None, :]
        heads = head * group + m
        source = query + token * query_stride + heads[:, None] * k_dim
        turned = _load_heads(
            source, query_norm, cos, sin, token * rotary_dim, d, inside, epsilon, offset,
            has_norms, k_dim, rotary_dim,
        )  # fmt: skip
        target = query_out + (token * (num_kv_heads * group) + heads[:, None]) * k_dim + d[None, :]
        tl.store(target, turned.to(query_out.dtype.element_ty), mask=inside)
    slot = tl.load(slots + token)
    if slot >= 0:
        one = tl.zeros([1, 1], tl.int64)
        is_key = (one == 0) & (d < k_dim)[None, :]
        key_at = key + token * key_stride + head * key_head_stride + one
        turned_key = _load_heads(
            key_at, key_norm, cos, sin, token * rotary_dim, d, is_key, epsilon, offset,
            has_norms, k_dim, rotary_dim,
        )  # fmt: skip
        block, place = (slot // block_size).to(tl.int64), slot % block_size
        to = (block * num_kv_heads + head) * block_size + place
        tl.store(keys + to * k_dim + d[None, :], turned_key.to(keys.dtype.element_ty), mask=is_key)
        v = tl.load(value + token * value_stride + head * value_head_stride + e, mask=e < v_dim, other=0.0)
        tl.store(values + to * v_dim + e, v.to(values.dtype.element_ty), mask=e < v_dim)
        tail = tl.load(tails + token)
        for behind in range(1, tail + 1):
            tl.store(keys + (to + behind) * k_dim + d, tl.zeros([padded_k], keys.dtype.element_ty), mask=d < k_dim)
            tl.store(values + (to + behind) * v_dim + e, tl.zeros([padded_v], values.dtype.element_ty), mask=e < v_dim)


def padded_size(size: int, minimum: int = 16) -> int:
    """The size of a kernel's tile for `size` elements: the smallest power of two that is at least `size` and at least
    `minimum`."""
    return max(minimum, int(triton.next_power_of_2(size)))


class TritonNorm:
    """The kernel of an RMS norm on a GPU; see `NormKernel`."""

    def __init__(self, epsilon: float, offset: float) -> None:
        self._epsilon, self._offset = epsilon, offset

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None:
        width = weight.shape[0]
        block = padded_size(width)
        rms_norm_kernel[(x.numel() // width,)](
            x,
            weight,
            out,
            addend,
            total,
            epsilon=self._epsilon,
            offset=self._offset,
            width=width,
            padded_width=block,
            adds=addend is not None,
            num_warps=min(16, max(1, block // 512)),
        )


class TritonGate:
    """The kernel of a gate on a GPU; see `GateKernel`."""

    def __init__(self, width: int, activation: str) -> None:
        self._width, self._is_silu = width, activation == "silu"
        self._tile = min(GATE_TILE, padded_size(width))

    def __call__(self, both: Tensor, out: Tensor) -> None:
        grid = (both.numel() // (2 * self._width), triton.cdiv(self._width, self._tile))
        gate_kernel[grid](both, out, width=self._width, is_silu=self._is_silu, tile=self._tile, num_warps=4)


class TritonLayers:
    """Makes the kernels of fused layers on a GPU; see `LayerKernels`."""

    def supports(self, weight: Tensor) -> bool:
        """Whether the GPU kernels support the type and the device of `weight`."""
        return weight.dtype in (torch.float32, torch.bfloat16, torch.float16)

    def norm(self, epsilon: float, offset: float) -> TritonNorm:
        """Make the GPU kernel of an RMS norm."""
        return TritonNorm(epsilon, offset)

    def gate(self, width: int, activation: str) -> TritonGate:
        """Make the GPU kernel of an MLP's gate; `activation` is a name in `ACTIVATIONS` (`layers.py`)."""
        return TritonGate(width, activation)
