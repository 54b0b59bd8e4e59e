"""CPU kernels for norms, gates and heads: each operation between matrix products is one pass over memory.

PyTorch computes a norm as six small operations and a rotary embedding as ten, and each operation reads and writes all
elements. For a step of a few dozen tokens, most of their time is call overhead.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from pointsman.engine.kernels.runtime import (
    FAST,
    STORAGE,
    Kernel,
    bits_as_float,
    exponential,
    float_as_bits,
    hyperbolic_tangent,
    load,
    next_item,
    pointer,
    round_to,
    source_version,
)

ROWS_PER_ITEM = 8
"""Number of rows (tokens) of one work item. A thread computes one work item after the other."""

ROWS_PER_THREAD = 16
"""A kernel call uses one thread for this many rows (tokens), up to PyTorch's number of threads."""

NORM_ARGUMENTS = 9
GATE_ARGUMENTS = 6
SPLIT_ARGUMENTS = 7
MERGE_ARGUMENTS = 7
HEADS_ARGUMENTS = 29
ACTIVATIONS = ("silu", "gelu_tanh")
"""Names of the activations of a gate; an argument of `gate_kernel` is the index in this tuple."""


def num_threads_for(num_rows: int) -> int:
    """Number of threads that compute `num_rows` rows."""
    return min(torch.get_num_threads(), -(-num_rows // ROWS_PER_THREAD))


@cache
def norm_kernel(activations: torch.dtype) -> Kernel:
    """Make the kernel that computes out = y / sqrt(mean(y**2) + epsilon) * (weight + offset) for each row, where y = x
    or x + addend.

    Arguments: counter, x [n, width], weight [width], out [n, width], scalars (epsilon, offset), n, width, addend [n,
    width] or 0, total: the output [n, width] for y if there is an addend.
    """
    element_type = STORAGE[activations]

    version = source_version()

    def rms_norm(arguments: Any) -> None:
        a = carray(arguments, (NORM_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_rows, width = a[5], a[6]
        x = carray(pointer(a[1]), (num_rows, width), element_type)
        weight = carray(pointer(a[2]), (width,), element_type)
        out = carray(pointer(a[3]), (num_rows, width), element_type)
        scalars = carray(pointer(a[4]), (2,), np.float32)
        addend = carray(pointer(a[7]), (num_rows, width), element_type)
        total = carray(pointer(a[8]), (num_rows, width), element_type)
        epsilon, offset = scalars[0], scalars[1]
        while True:
            first = next_item(arguments) * ROWS_PER_ITEM
            if first >= num_rows:
                break
            for row in range(first, min(first + ROWS_PER_ITEM, num_rows)):
                values, target = x[row], out[row]
                if a[7] != 0:
                    more, both = addend[row], total[row]
                    for i in range(width):
                        both[i] = round_to(total, load(values[i]) + load(more[i]))
                    values = both
                squares = np.float32(0)
                for i in range(width):
                    value = load(values[i])
                    squares += value * value
                factor = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
                for i in range(width):
                    target[i] = round_to(out, load(values[i]) * factor * (load(weight[i]) + offset))

    return Kernel(rms_norm)


@cache
def gate_kernel(activations: torch.dtype) -> Kernel:
    """Make the kernel that computes out = activation(x[:, :width]) * x[:, width:], the gate of a gated MLP.

    Arguments: counter, x [n, 2 * width], out [n, width], n, width, index of the activation.
    """
    element_type = STORAGE[activations]

    version = source_version()

    def gate(arguments: Any) -> None:
        a = carray(arguments, (GATE_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_rows, width = a[3], a[4]
        x = carray(pointer(a[1]), (num_rows, 2 * width), element_type)
        out = carray(pointer(a[2]), (num_rows, width), element_type)
        while True:
            row = next_item(arguments)
            if row >= num_rows:
                break
            gated, up, target = x[row, :width], x[row, width:], out[row]
            if a[5] == 0:
                for i in range(width):
                    value = load(gated[i])
                    target[i] = round_to(out, value / (np.float32(1) + exponential(-value)) * load(up[i]))
            else:  # Hendrycks and Gimpel 2016, the form with tanh
                for i in range(width):
                    value = load(gated[i])
                    inner = np.float32(0.7978845608028654) * (value + np.float32(0.044715) * value * value * value)
                    bend = np.float32(0.5) * value * (np.float32(1) + hyperbolic_tangent(inner))
                    target[i] = round_to(out, bend * load(up[i]))

    return Kernel(gate)


class CompiledNorm:
    """The kernel of an RMS norm on a CPU; see `NormKernel`."""

    def __init__(self, epsilon: float, offset: float) -> None:
        self._scalars = np.array([epsilon, offset], dtype=np.float32)
        self._arguments = np.zeros(NORM_ARGUMENTS, dtype=np.int64)
        self._arguments[4] = self._scalars.ctypes.data

    def __call__(self, x: Tensor, weight: Tensor, out: Tensor, addend: Tensor | None, total: Tensor | None) -> None:
        arguments, width = self._arguments, weight.shape[0]
        num_rows = x.numel() // width
        arguments[1], arguments[2], arguments[3] = x.data_ptr(), weight.data_ptr(), out.data_ptr()
        arguments[5], arguments[6] = num_rows, width
        if addend is None or total is None:
            arguments[7] = arguments[8] = 0
        else:
            arguments[7], arguments[8] = addend.data_ptr(), total.data_ptr()
        norm_kernel(x.dtype)(arguments, num_threads_for(num_rows))


class CompiledGate:
    """The kernel of a gate on a CPU; see `GateKernel`."""

    def __init__(self, width: int, activation: str) -> None:
        self._arguments = np.zeros(GATE_ARGUMENTS, dtype=np.int64)
        self._arguments[4], self._arguments[5] = width, ACTIVATIONS.index(activation)

    def __call__(self, both: Tensor, out: Tensor) -> None:
        arguments = self._arguments
        num_rows = both.numel() // both.shape[-1]
        arguments[1], arguments[2], arguments[3] = both.data_ptr(), out.data_ptr(), num_rows
        gate_kernel(both.dtype)(arguments, num_threads_for(num_rows))


class CompiledLayers:
    """Makes the kernels of fused layers on a CPU; see `LayerKernels`."""

    def supports(self, weight: Tensor) -> bool:
        """Whether the CPU kernels support the type and the device of `weight`."""
        return weight.dtype in STORAGE and weight.device.type == "cpu"

    def norm(self, epsilon: float, offset: float) -> CompiledNorm:
        """Make the CPU kernel of an RMS norm."""
        return CompiledNorm(epsilon, offset)

    def gate(self, width: int, activation: str) -> CompiledGate:
        """Make the CPU kernel of an MLP's gate; `activation` is a name in `ACTIVATIONS`."""
        return CompiledGate(width, activation)


@cache
def split_kernel() -> Kernel:
    """Make the kernel that splits each float32 row x into two rows of integers from -limit to limit, `high` and `low`:
    x = (high + low / (2 * limit)) * scale.

    Each row's scale is its largest absolute value / limit. A row that is not finite gets the scale NaN, and zeros. A
    row without a number above 1e-30 gets the scale 1, and zeros.

    Arguments: counter, x [n, width], out [2n, width] (the high rows first), scales [n], n, width, limit.
    """
    version = source_version()

    def split_rows(arguments: Any) -> None:
        a = carray(arguments, (SPLIT_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_rows, width = a[4], a[5]
        x = carray(pointer(a[1]), (num_rows, width), np.float32)
        out = carray(pointer(a[2]), (2, num_rows, width), np.float32)
        scales = carray(pointer(a[3]), (num_rows,), np.float32)
        limit = np.float32(a[6])
        while True:
            row = next_item(arguments)
            if row >= num_rows:
                break
            values, high, low = x[row], out[0, row], out[1, row]
            # Absolute values have the same order as their bits, and numbers that are not finite come last.
            bits = np.int32(0)
            for i in range(width):
                bits = max(bits, float_as_bits(values[i]) & np.int32(0x7FFFFFFF))
            largest = bits_as_float(bits)
            scales[row] = np.float32(np.nan) if bits >= np.int32(0x7F800000) else np.float32(1)
            if bits >= np.int32(0x7F800000) or largest < np.float32(1e-30):
                for i in range(width):
                    high[i] = low[i] = np.float32(0)
                continue
            scales[row] = largest / limit
            factor = limit / largest
            for i in range(width):
                value = values[i] * factor
                whole = np.rint(value)
                high[i] = whole
                low[i] = np.rint((value - whole) * (limit + limit))

    return Kernel(split_rows)


@cache
def merge_kernel() -> Kernel:
    """Make the kernel that merges the products of the two rows of `split_kernel`, in place: high = (high + low / (2 *
    limit)) * scale + bias.

    Arguments: counter, rows [2n, width] (the high rows first), scales [n], bias [width] or 0, n, width, limit.
    """
    version = source_version()

    def merge_rows(arguments: Any) -> None:
        a = carray(arguments, (MERGE_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_rows, width = a[4], a[5]
        rows = carray(pointer(a[1]), (2, num_rows, width), np.float32)
        scales = carray(pointer(a[2]), (num_rows,), np.float32)
        bias = carray(pointer(a[3]), (width,), np.float32)
        share = np.float32(1) / np.float32(2 * a[6])
        while True:
            row = next_item(arguments)
            if row >= num_rows:
                break
            high, low, scale = rows[0, row], rows[1, row], scales[row]
            if a[3] == 0:
                for i in range(width):
                    high[i] = (high[i] + low[i] * share) * scale
            else:
                for i in range(width):
                    high[i] = (high[i] + low[i] * share) * scale + bias[i]

    return Kernel(merge_rows)


# Indices of the arguments of `heads_kernel`; index 0 is the counter.
(
    QUERY,
    KEY,
    VALUE,
    QUERY_OUT,
    KEYS,
    VALUES,
    COS,
    SIN,
    QUERY_NORM,
    KEY_NORM,
    SCALARS,
    SLOT_BLOCKS,
    SLOT_OFFSETS,
    TAILS,
    NUM_TOKENS,
    NUM_HEADS,
    NUM_KV_HEADS,
    K_DIM,
    V_DIM,
    NUM_BLOCKS,
    BLOCK_SIZE,
    ROTARY_DIM,
    QUERY_STRIDE,
    QUERY_HEAD_STRIDE,
    KEY_STRIDE,
    KEY_HEAD_STRIDE,
    VALUE_STRIDE,
    VALUE_HEAD_STRIDE,
) = range(1, 29)


@njit(fastmath=FAST)
def _norm_head(head: Any, weight: Any, width: int, epsilon: Any, offset: Any) -> None:
    """Apply an RMS norm to one head [width] in place."""
    squares = np.float32(0)
    for i in range(width):
        squares += head[i] * head[i]
    factor = np.float32(1) / np.sqrt(squares / np.float32(width) + epsilon)
    for i in range(width):
        head[i] = head[i] * factor * (load(weight[i]) + offset)


@njit(fastmath=FAST)
def _rotate(head: Any, cos: Any, sin: Any, rotary_dim: int) -> None:
    """Rotate one head in place (rotary embedding). Elements i and i + rotary_dim / 2 are a pair (Su et al. 2021)."""
    half = rotary_dim // 2
    # Slices, because the compiler cannot exclude that an index `half + i` is negative, and would not vectorise.
    low, high = head[:half], head[half:rotary_dim]
    low_cos, high_cos, low_sin, high_sin = cos[:half], cos[half:], sin[:half], sin[half:]
    for i in range(half):
        a, b = low[i], high[i]
        low[i] = a * load(low_cos[i]) - b * load(low_sin[i])
        high[i] = b * load(high_cos[i]) + a * load(high_sin[i])


@njit(fastmath=FAST)
def _prepare_head(
    head: Any, source: Any, width: int, normed: bool, norm: Any, epsilon: Any, offset: Any, cos: Any, sin: Any
) -> None:
    """Load one head from `source` [width], norm it if `normed`, and rotate it by cos and sin [rotary_dim]."""
    for d in range(width):
        head[d] = load(source[d])
    if normed:
        _norm_head(head, norm, width, epsilon, offset)
    if len(cos) > 0:
        _rotate(head, cos, sin, len(cos))


@cache
def heads_kernel(activations: torch.dtype, cache_dtype: torch.dtype) -> Kernel:
    """Make the kernel that norms and rotates queries and keys, and writes keys and values to their slots in the pool.

    With the address 0 for queries or norms, the kernel skips them; with a `rotary_dim` of 0 it skips the rotation. When
    a row begins a block, the slots after the row's last token are set to zero, because a weight of 0 does not hide a
    NaN of an earlier request.
    """
    activation_type, cache_type = STORAGE[activations], STORAGE[cache_dtype]

    version = source_version()

    def heads_to_pool(arguments: Any) -> None:
        a = carray(arguments, (HEADS_ARGUMENTS,), np.int64)
        if version == 0:  # never true; it makes the version part of the kernel's key in the disk cache
            return
        num_tokens, num_heads, num_kv_heads = a[NUM_TOKENS], a[NUM_HEADS], a[NUM_KV_HEADS]
        k_dim, v_dim, size, rotary_dim = a[K_DIM], a[V_DIM], a[BLOCK_SIZE], a[ROTARY_DIM]
        # Upper bounds for all slices, with either stride the larger one: a slice is cut at the array's length.
        query_length = num_tokens * a[QUERY_STRIDE] + num_heads * a[QUERY_HEAD_STRIDE]
        key_length = num_tokens * a[KEY_STRIDE] + num_kv_heads * a[KEY_HEAD_STRIDE]
        value_length = num_tokens * a[VALUE_STRIDE] + num_kv_heads * a[VALUE_HEAD_STRIDE]
        query = carray(pointer(a[QUERY]), (query_length,), activation_type)
        key = carray(pointer(a[KEY]), (key_length,), activation_type)
        value = carray(pointer(a[VALUE]), (value_length,), activation_type)
        query_out = carray(pointer(a[QUERY_OUT]), (num_tokens, num_heads, k_dim), activation_type)
        keys = carray(pointer(a[KEYS]), (a[NUM_BLOCKS], num_kv_heads, size, k_dim), cache_type)
        values = carray(pointer(a[VALUES]), (a[NUM_BLOCKS], num_kv_heads, size, v_dim), cache_type)
        cos = carray(pointer(a[COS]), (num_tokens, rotary_dim), activation_type)
        sin = carray(pointer(a[SIN]), (num_tokens, rotary_dim), activation_type)
        query_norm = carray(pointer(a[QUERY_NORM]), (k_dim,), activation_type)
        key_norm = carray(pointer(a[KEY_NORM]), (k_dim,), activation_type)
        scalars = carray(pointer(a[SCALARS]), (2,), np.float32)
        blocks = carray(pointer(a[SLOT_BLOCKS]), (num_tokens,), np.int64)
        offsets = carray(pointer(a[SLOT_OFFSETS]), (num_tokens,), np.int64)
        tails = carray(pointer(a[TAILS]), (num_tokens,), np.int64)
        epsilon, offset = scalars[0], scalars[1]
        head = np.empty(max(k_dim, v_dim), np.float32)

        while True:
            first = next_item(arguments) * ROWS_PER_ITEM
            if first >= num_tokens:
                break
            for t in range(first, min(first + ROWS_PER_ITEM, num_tokens)):
                if a[QUERY] != 0:
                    for h in range(num_heads):
                        at = t * a[QUERY_STRIDE] + h * a[QUERY_HEAD_STRIDE]
                        normed = a[QUERY_NORM] != 0
                        one = query[at : at + k_dim]
                        _prepare_head(head, one, k_dim, normed, query_norm, epsilon, offset, cos[t], sin[t])
                        target = query_out[t, h]
                        for d in range(k_dim):
                            target[d] = round_to(query_out, head[d])
                block, slot, tail = blocks[t], offsets[t], tails[t]
                for h in range(num_kv_heads):
                    at = t * a[KEY_STRIDE] + h * a[KEY_HEAD_STRIDE]
                    normed = a[KEY_NORM] != 0
                    one = key[at : at + k_dim]
                    _prepare_head(head, one, k_dim, normed, key_norm, epsilon, offset, cos[t], sin[t])
                    place = keys[block, h]
                    target = place[slot]
                    for d in range(k_dim):
                        target[d] = round_to(keys, head[d])
                    at = t * a[VALUE_STRIDE] + h * a[VALUE_HEAD_STRIDE]
                    one = value[at : at + v_dim]
                    other = values[block, h]
                    target = other[slot]
                    for d in range(v_dim):
                        target[d] = round_to(values, load(one[d]))
                    for after in range(slot + 1, slot + 1 + tail):
                        for d in range(k_dim):
                            place[after, d] = round_to(keys, np.float32(0))
                        for d in range(v_dim):
                            other[after, d] = round_to(values, np.float32(0))

    return Kernel(heads_to_pool)
