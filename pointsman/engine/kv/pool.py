"""KVPool: the memory of all KV blocks, a pair of tensors per layer, addressed by the scheduler's block ids.

Shapes, per layer:

    keys   [num_blocks, num_kv_heads, block_size, k_dim]
    values [num_blocks, num_kv_heads, block_size, v_dim]

Heads come before the tokens of a block, so one head's keys of one block are contiguous: a decode kernel reads them in
one piece, and gathering a request's blocks copies whole pieces. The pool may have another type than the model. For a
float32 model, a pool in bfloat16 takes half the memory, and its keys and values are rounded. Layers may differ in their
shapes (multi-head latent attention expands keys and values to different widths).

Layers of different groups (`layout.py`) share memory: their tensors are views of the same slot, and a block is in the
table of one group at a time. Where a slot has p parts, a layer in one part has tensors with p times as many blocks,
which begin at this part of the first block's slot: block b of the scheduler is block p * b of the layer.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pointsman.core import SchedulerConfig
from pointsman.core.state.layout import describe_groups
from pointsman.engine.kv.layout import KVLayout, LayerShape
from pointsman.engine.memory import GIB, DeviceBudget

logger = logging.getLogger(__name__)

KV_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DEFAULT_KV_CACHE_BYTES = 1 << 30
"""Maximum size of the pool, in bytes, if neither `num_blocks` nor `kv_cache_bytes` is given and no GPU is measured."""


class KVPool:
    """The memory of the KV blocks of every layer.

    Args:
        layers: the shape of each layer.
        layout: assigns layers to shared memory; None: no layers share memory.

    Attributes:
        keys, values: one tensor per layer, with the shapes in the module's docstring. On a CPU, blocks take no memory
            until their first use.

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
        layout: KVLayout | None = None,
    ) -> None:
        self.layers = tuple(layers)
        self.layout = KVLayout.without_groups(layers) if layout is None else layout
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.group_of = [place.group for place in self.layout.places]
        """[layers] the number of the group of each layer."""
        num_tokens = num_blocks * block_size
        try:
            self._slots = [
                (
                    _lazy_zeros(num_tokens * s.num_keys, dtype, device),
                    _lazy_zeros(num_tokens * s.num_values, dtype, device),
                )
                for s in self.layout.slots
            ]
        except (MemoryError, torch.OutOfMemoryError):
            share = "" if torch.device(device).type == "cpu" else ", or gpu_memory_utilization if neither is given"
            raise ValueError(
                f"a KV pool of {num_blocks} blocks needs {self.num_bytes / 2**30:,.1f} GiB, which is not available; "
                f"lower num_blocks or kv_cache_bytes{share}"
            ) from None
        self._view_slots()

    def _view_slots(self) -> None:
        """Make the layers' tensors, as views of the slots."""
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape, place in zip(self.layers, self.layout.places, strict=True):
            keys, values = self._slots[place.slot]
            num_blocks = self.num_blocks * place.num_parts - place.part
            heads, size = shape.num_kv_heads, self.block_size
            first = place.part * size
            self.keys.append(keys[first * shape.num_keys :].view(num_blocks, heads, size, shape.k_dim))
            self.values.append(values[first * shape.num_values :].view(num_blocks, heads, size, shape.v_dim))

    @property
    def device(self) -> torch.device:
        return self.keys[0].device

    @property
    def num_bytes(self) -> int:
        """Size of the pool, in bytes."""
        return self.num_blocks * bytes_per_block(self.layout.slots, self.block_size, self.dtype)

    def map_memory(self) -> None:
        """Write zeros to all blocks, so that the system maps their memory before the first step.

        Otherwise the system maps pages when a block is first written, which took a fifth of a measured step of 1,000
        prompt tokens.
        """
        for keys, values in self._slots:
            keys.zero_()
            values.zero_()

    def pin_memory(self) -> None:
        """Move this pool, which is on the CPU, into pinned memory, which a GPU can access directly."""
        self._slots = [(keys.pin_memory(), values.pin_memory()) for keys, values in self._slots]
        self._view_slots()

    def block(self, block_id: int) -> dict[str, Tensor]:
        """The keys and values of one block, by slot: "0.keys", "0.values", "1.keys", ... -> view of the pool's
        memory."""
        parts: dict[str, Tensor] = {}
        for index, (shape, (keys, values)) in enumerate(zip(self.layout.slots, self.slots(), strict=True)):
            parts[f"{index}.keys"] = keys[block_id].view(shape.num_kv_heads, self.block_size, shape.k_dim)
            parts[f"{index}.values"] = values[block_id].view(shape.num_kv_heads, self.block_size, shape.v_dim)
        return parts

    def slots(self) -> list[tuple[Tensor, Tensor]]:
        """The keys and values of each slot, [num_blocks, elements of a block], as views of the pool's memory."""
        return [(keys.view(self.num_blocks, -1), values.view(self.num_blocks, -1)) for keys, values in self._slots]

    def log_capacity(self, config: SchedulerConfig) -> None:
        """Log the pool's capacity in tokens and in requests of maximum length."""
        logger.info(
            "KV pool: %d blocks of %d tokens%s, %.1f MiB: enough for %d tokens, or %.1f requests of the full length %d",
            self.num_blocks,
            self.block_size,
            f" in {describe_groups(config.kv_groups)}" if config.has_kv_groups else "",
            self.num_bytes / 2**20,
            config.num_full_length_tokens,
            config.num_full_length,
            config.max_model_len,
        )
        if config.num_full_length < 1:
            logger.warning(
                "the KV pool holds %d tokens, less than one request of the full length %d; longer requests will be "
                "refused or truncated: raise num_blocks or kv_cache_bytes",
                config.num_usable_tokens,
                config.max_model_len,
            )


def _lazy_zeros(count: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Make a tensor of `count` zeros. On a CPU NumPy makes it, so that pages are mapped on first use; PyTorch would
    write all of them."""
    if torch.device(device).type != "cpu":
        return torch.zeros(count, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(count * dtype.itemsize, dtype=np.uint8)).view(dtype)


def choose_kv_dtype(name: str, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The element type of the KV pool for a value of `kv_cache_dtype`; "auto" is the model's element type.

    Raises:
        ValueError: the name is unknown, or the device does not support the type.
    """
    if name == "auto":
        return model_dtype
    if name not in KV_DTYPES:
        raise ValueError(f"kv_cache_dtype is {name!r}; choose one of auto, {', '.join(KV_DTYPES)}")
    check_float16("kv_cache_dtype", name, device)
    return KV_DTYPES[name]


def check_float16(argument: str, name: str, device: torch.device) -> None:
    """Refuse float16 without a GPU: a CPU computes it slowly, and the compiled kernels do not support it.

    Args:
        argument: name of the argument whose value is `name`, for the error.

    Raises:
        ValueError: the value is float16, on a CPU.
    """
    if name == "float16" and device.type == "cpu":
        raise ValueError(f"{argument} is 'float16', which needs a GPU, and device is cpu; use float32 or bfloat16")


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Number of blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def bytes_per_block(layers: Sequence[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, as the sum over the given layers or slots."""
    per_token = sum(shape.num_kv_heads * (shape.k_dim + shape.v_dim) for shape in layers)
    return per_token * block_size * dtype.itemsize


def choose_num_blocks(
    layout: KVLayout,
    config: SchedulerConfig,
    *,
    num_blocks: int | None,
    kv_cache_bytes: int | None,
    dtype: torch.dtype,
    device_budget: DeviceBudget | None = None,
) -> int:
    """Choose the pool's number of blocks: `num_blocks` if given, or as many as fit `kv_cache_bytes`, the GPU's measured
    budget or the default budget.

    With the default budget there are at most as many blocks as `max_num_seqs` requests of full length can use. A GPU's
    budget is used completely: blocks that no request needs hold cached prefixes.

    Args:
        config: the scheduler's configuration; its `num_blocks` is not read.
        device_budget: measured memory budget of a GPU; None: it was not measured, because there is no GPU or the size
            of the pool is given.

    Raises:
        ValueError: both `num_blocks` and `kv_cache_bytes` are given, `kv_cache_bytes` is smaller than one block, or the
            GPU's budget is smaller than one request of full length.
    """
    if num_blocks is not None:
        if kv_cache_bytes is not None:
            raise ValueError(
                f"num_blocks {num_blocks} and kv_cache_bytes {kv_cache_bytes} are both given; leave one out"
            )
        return num_blocks
    block_bytes = bytes_per_block(layout.slots, config.block_size, dtype)
    full_length = config.max_blocks(config.max_model_len)
    if kv_cache_bytes is None and device_budget is not None:
        if device_budget.kv_bytes < block_bytes * full_length:
            raise ValueError(_too_little(device_budget, config, block_bytes))
        return device_budget.kv_bytes // block_bytes
    if kv_cache_bytes is None:
        max_useful = full_length + (config.max_num_seqs - 1) * config.decode_blocks(config.max_model_len)
        return max(1, min(max_useful, DEFAULT_KV_CACHE_BYTES // block_bytes))
    if kv_cache_bytes < block_bytes:
        raise ValueError(
            f"kv_cache_bytes is {kv_cache_bytes}, less than one block of {block_bytes} bytes; raise it: a request of "
            f"max_model_len {config.max_model_len} tokens takes {block_bytes * full_length} bytes"
        )
    return kv_cache_bytes // block_bytes


def _too_little(budget: DeviceBudget, config: SchedulerConfig, block_bytes: int) -> str:
    """The message of the error for a GPU without enough memory for a request of full length, with remedies."""
    needed = block_bytes * config.max_blocks(config.max_model_len)
    num_blocks = max(0, budget.kv_bytes) // block_bytes
    fitting = bisect_right(range(1, config.max_model_len + 1), num_blocks, key=config.max_blocks)
    shorter = f"lower max_model_len to {fitting:,} at most, " if fitting else ""
    return (
        f"{budget}; that leaves {max(0, budget.kv_bytes) / GIB:,.2f} GiB for KV, and a request of max_model_len "
        f"{config.max_model_len:,} tokens takes {needed / GIB:,.2f} GiB: raise gpu_memory_utilization, {shorter}"
        "lower max_num_batched_tokens or max_num_seqs, or use a dtype of fewer bits for weights or KV"
    )


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's elements; without a copy if the tensor is contiguous in main memory."""
    plain = tensor.detach().cpu().contiguous().view(-1)
    return plain.view(torch.uint8).numpy().data
