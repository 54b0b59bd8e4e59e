"""The paged KV pool: one pair of tensors per layer, addressed by the block ids that the scheduler hands out.

Layout, per layer:

    keys   [num_blocks, num_kv_heads, block_size, k_dim]
    values [num_blocks, num_kv_heads, block_size, v_dim]

Heads come before the slots of a block, so one head's keys of one block lie together: a decode kernel reads
them as one run, and a gather of a request's blocks is a copy of whole runs. The pool may be of another type than the
model: bfloat16 under a float32 model halves its memory, and costs the rounding of keys and values. Layers may differ
in their shapes (multi-head latent attention expands keys and values to different widths).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

logger = logging.getLogger(__name__)

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEFAULT_KV_CACHE_BYTES = 1 << 30
"""What the pool may take when neither a byte budget nor a block count is given."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one attention layer keeps per token, as seen when the model was probed."""

    num_kv_heads: int
    k_dim: int
    v_dim: int
    num_heads: int
    """Query heads; a multiple of `num_kv_heads`."""


class KVPool:
    """Physical KV blocks of every layer.

    Attributes:
        keys, values: one tensor per layer, shapes above. On a CPU, blocks that were never used take no memory.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        try:
            self.keys = [_lazy_zeros((num_blocks, s.num_kv_heads, block_size, s.k_dim), dtype, device) for s in layers]
            self.values = [
                _lazy_zeros((num_blocks, s.num_kv_heads, block_size, s.v_dim), dtype, device) for s in layers
            ]
        except (MemoryError, torch.OutOfMemoryError):
            raise ValueError(
                f"a KV pool of {num_blocks} blocks needs {self.num_bytes / 2**30:,.1f} GiB, which cannot be had; lower "
                "num_blocks or kv_cache_bytes"
            ) from None

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_bytes(self) -> int:
        """Bytes of all layers' tensors."""
        return self.num_blocks * bytes_per_block(self.layers, self.block_size, self.dtype)

    @property
    def num_tokens(self) -> int:
        """Tokens whose KV the pool holds."""
        return self.num_blocks * self.block_size

    def take_memory(self) -> None:
        """Have the system give the memory of all blocks now, before the first step; all KV is zero afterwards.

        Otherwise pages are given when a block is first written, which cost a step of 1,000 prompt tokens a fifth of its
        time where this was measured.
        """
        for tensor in (*self.keys, *self.values):
            tensor.zero_()

    def pin_memory(self) -> None:
        """Of a pool on the CPU: move it into memory that a GPU can read and write by itself."""
        self.keys = [tensor.pin_memory() for tensor in self.keys]
        self.values = [tensor.pin_memory() for tensor in self.values]

    def block(self, block_id: int) -> dict[str, Tensor]:
        """One block, by names of its parts: "0.keys", "0.values", "1.keys", ... for the layers. Views, not copies."""
        parts: dict[str, Tensor] = {}
        for index, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            parts[f"{index}.keys"], parts[f"{index}.values"] = keys[block_id], values[block_id]
        return parts

    def log_capacity(self, max_model_len: int) -> None:
        """Log what fits, in tokens and in requests of `max_model_len` tokens."""
        full_length = self.num_blocks / blocks_for(max_model_len, self.block_size)
        logger.info(
            "KV pool: %d blocks of %d tokens, %.1f MiB: room for %d tokens, or %.1f requests of the full length %d",
            self.num_blocks,
            self.block_size,
            self.num_bytes / 2**20,
            self.num_tokens,
            full_length,
            max_model_len,
        )
        if full_length < 1:
            logger.warning(
                "the KV pool holds %d tokens, less than one request of the full length %d; longer requests will be "
                "refused or cut: give num_blocks or kv_cache_bytes a larger value",
                self.num_tokens,
                max_model_len,
            )


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Zeros. On a CPU they come from NumPy, whose pages are mapped when first touched; torch would write them all."""
    if torch.device(device).type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    raw = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(shape)


def choose_kv_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """The element type of the pool; "auto" is the model's own.

    Raises:
        ValueError: an unknown name.
    """
    if name == "auto":
        return model_dtype
    if name not in KV_DTYPES:
        raise ValueError(f"kv_cache_dtype is {name!r}; choose one of auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[name]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers."""
    per_token = sum(shape.num_kv_heads * (shape.k_dim + shape.v_dim) for shape in layers)
    return per_token * block_size * dtype.itemsize


def choose_num_blocks(
    layers: Sequence[LayerShape],
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    block_size: int,
    dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
) -> int:
    """The block count: as given, or what the byte budget holds, or the default budget.

    The default takes no more than `max_num_seqs` requests of full length could ever use.

    Raises:
        ValueError: both a count and a budget are given, the budget is smaller than one block, or what it depends on is
            out of range.
    """
    # `SchedulerConfig` checks these two, but only together with the pool's size, which depends on them.
    for name, value in (("block_size", block_size), ("max_num_seqs", max_num_seqs)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}; it must be an integer of at least 1")
    if num_blocks is not None:
        if kv_cache_bytes is not None:
            raise ValueError(
                f"num_blocks {num_blocks} and kv_cache_bytes {kv_cache_bytes} are both given; leave one out"
            )
        return num_blocks
    block_bytes = bytes_per_block(layers, block_size, dtype)
    if kv_cache_bytes is None:
        most_useful = max_num_seqs * blocks_for(max_model_len, block_size)
        return max(1, min(most_useful, DEFAULT_KV_CACHE_BYTES // block_bytes))
    if kv_cache_bytes < block_bytes:
        raise ValueError(
            f"kv_cache_bytes is {kv_cache_bytes}, less than one block of {block_bytes} bytes; a request of the full "
            f"length {max_model_len} takes {block_bytes * blocks_for(max_model_len, block_size)}"
        )
    return kv_cache_bytes // block_bytes


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor; without a copy, where it lies in one piece in the main memory."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().data
