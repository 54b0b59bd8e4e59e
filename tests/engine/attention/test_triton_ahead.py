"""The kernels of attention and layers compile for GPUs without having one, and hardly spill registers."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from pointsman.engine.attention.triton_backend import MIN_ROWS, decode_options, max_tile_rows, prefill_options
from pointsman.engine.kernels import triton_attention as attention
from pointsman.engine.kernels import triton_layers as layers
from tests.triton_ahead import Kernel, compile_all, kernel_of

pytestmark = pytest.mark.long

INTS = {"tables", "table_width", "kv_lens", "rows", "tokens", "tiles", "slots", "tails"}
NUMBERS = {"query_stride", "first_table", "key_stride", "key_head_stride", "value_stride", "value_head_stride"}


def kernel(function: Any, dtype: str, constants: dict[str, Any], **options: int) -> Kernel:
    """A kernel to compile. Tensors have `dtype`; the compiler knows the values of `constants`, also None."""
    signature = {}
    for name in inspect.signature(function.fn).parameters:
        if name in constants:
            signature[name] = "constexpr"
        elif name.startswith("part_"):
            signature[name] = "*fp32"
        else:
            signature[name] = "i32" if name in NUMBERS else "*i32" if name in INTS else f"*{dtype}"
    divisible = [name for name, kind in signature.items() if kind.startswith("*") or name.endswith("stride")]
    return kernel_of(function, signature, constants, options=options, divisible=divisible)


def attention_kernels(dtype: str, group: int, dim: int, **features: Any) -> list[Kernel]:
    """The kernels of decodes in one part and in several, and of prefill, with the options for 8 KV heads."""
    constants = {
        "scale": dim**-0.5,
        "softcap": 0.0,
        "window": 0,
        "has_sinks": False,
        "sinks": None,
        "num_kv_heads": 8,
        "group": group,
        "k_dim": dim,
        "v_dim": dim,
        "block_size": 32,
        "padded_k": layers.padded_size(dim),
        "padded_v": layers.padded_size(dim),
        **features,
    }
    if features.get("has_sinks"):
        del constants["sinks"]
    size = 4 if dtype == "fp32" else 2
    options = decode_options(dim * size)
    parts = {"padded_group": layers.padded_size(group), "tile": options.pop("tile")}
    kernels = [
        kernel(attention.decode_kernel, dtype, {**constants, **parts, "num_parts": count}, **options)
        for count in (1, 16)
    ]
    for rows in sorted({MIN_ROWS, max_tile_rows(dim * size)}):
        options = prefill_options(dim * size, size, rows)
        tiles = {"tile_rows": rows, "tile": options.pop("tile")}
        kernels.append(kernel(attention.prefill_kernel, dtype, {**constants, **tiles}, **options))
    return kernels


@pytest.mark.parametrize("arch", [80, 90])
def test_triton_kernels_compile_and_spill_few_registers(arch: int) -> None:
    heads = {
        "epsilon": 1e-6,
        "offset": 0.0,
        "has_query": True,
        "has_norms": True,
        "num_kv_heads": 8,
        "group": 4,
        "k_dim": 128,
        "v_dim": 128,
        "rotary_dim": 128,
        "block_size": 32,
        "padded_group": 4,
        "padded_k": 128,
        "padded_v": 128,
    }
    norm = {"epsilon": 1e-6, "offset": 0.0, "width": 4096, "padded_width": 4096, "adds": True}
    merge = {"sinks": None, "has_sinks": False, "num_heads": 32, "v_dim": 128, "num_parts": 16}
    kernels = [
        *attention_kernels("bf16", 4, 128),
        *attention_kernels("fp16", 8, 64, window=1024, softcap=30.0, has_sinks=True),
        *attention_kernels("bf16", 2, 256),
        *attention_kernels("bf16", 7, 96),
        *attention_kernels("fp32", 4, 128),
        kernel(attention.merge_kernel, "bf16", {**merge, "padded_parts": 16, "padded_v": 128}, num_warps=4),
        kernel(layers.heads_kernel, "bf16", heads, num_warps=1),
        kernel(layers.rms_norm_kernel, "bf16", norm, num_warps=8),
        kernel(layers.gate_kernel, "bf16", {"width": 12288, "is_silu": True, "tile": 1024}, num_warps=4),
    ]
    for one, resources in zip(kernels, compile_all(kernels, arch), strict=True):
        print(f"sm_{arch}", one.name, one.constexprs.get("k_dim", ""), resources)
        is_fast = "*fp32" not in one.signature.values() or one.name != "prefill_kernel"
        assert not is_fast or resources.spill_stores <= (0 if arch == 90 else 128), one
        assert resources.shared_bytes <= 160 << 10
