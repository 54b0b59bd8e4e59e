"""Measures the limits of a device, and computes a step's minimum time from them.

| step | is bound by | minimum time |
| --- | --- | --- |
| decode | memory | read weights and KV once, at the rate of a device copy (bytes read and written) |
| prompt | arithmetic | compute products and attention, at the rate of a large bfloat16 product |

The counts are those of the simulator (`pointsman.sim.model`). Not counted: rows of the input embedding, activations,
norms, the KV that is written.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

from pointsman.sim.model import ModelShape

PRODUCT_SIZE, TINY_PRODUCT_SIZE = 8192, 256
COPY_BYTES, TINY_COPY_BYTES = 4 << 30, 16 << 20
"""Bytes of the copy that measures the bandwidth: much larger than the caches."""


def decode_bytes(shape: ModelShape, num_context_tokens: float) -> float:
    """Minimum number of bytes that a decode step reads: weights of all layers, the output head, KV of the context.

    Args:
        num_context_tokens: positions attended to, over all requests.
    """
    full, windowed = shape.kv_bytes_per_token(shape.dtype_bytes)
    return shape.common_bytes + shape.head_bytes + (full + windowed) * num_context_tokens


def prompt_flops(shape: ModelShape, num_tokens: int) -> float:
    """FLOPs of a prompt in one step that samples one token. A token attends to itself and all earlier tokens."""
    attended = num_tokens * (num_tokens + 1) / 2
    attention = shape.num_layers * shape.attention_flops * attended
    return shape.linear_flops * num_tokens + attention + shape.head_flops


def decode_share(shape: ModelShape, num_context_tokens: float, seconds: float, bandwidth: float) -> float:
    """The minimum time of a decode step at a bandwidth in bytes/s, as a share of its measured time."""
    return decode_bytes(shape, num_context_tokens) / bandwidth / seconds


def prompt_share(shape: ModelShape, num_tokens: int, seconds: float, product_rate: float) -> float:
    """FLOP/s of a prompt, as a share of a matrix product's."""
    return prompt_flops(shape, num_tokens) / seconds / product_rate


# ------------------------------------------------------------------------------------------------------- measurement


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(work: Callable[[], object], device: str, *, repeats: int = 10, warmups: int = 3) -> float:
    """The median time of a call; on a GPU between events, so without the launch time."""
    for _ in range(warmups):
        work()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            begun = perf_counter()
            work()
            times.append(perf_counter() - begun)
        else:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
    return median(times)


def measure_bandwidth(device: str, *, tiny: bool) -> float:
    """Bytes/s, read and written, of a copy within device memory."""
    num_bytes = TINY_COPY_BYTES if tiny else COPY_BYTES
    if device != "cpu":
        num_bytes = min(num_bytes, torch.cuda.mem_get_info()[0] // 4)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def measure_product(device: str, *, tiny: bool) -> float:
    """FLOP/s of a product of two square bfloat16 matrices of random numbers."""
    size = TINY_PRODUCT_SIZE if tiny else PRODUCT_SIZE
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    return 2 * size**3 / seconds_of(lambda: left @ right, device)
