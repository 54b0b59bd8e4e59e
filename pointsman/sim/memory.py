"""KV memory: estimates the number of KV blocks that a device has beside a model's weights.

An engine measures this number when it starts; if the engine's log has the number, use the measured one. The estimate,
without an engine:

    usable = memory * gpu_memory_utilization
    KV     = usable - weights - activations of the largest step - context and libraries

Layers with a sliding window keep less KV than others. Groups of layers therefore have block tables of their own, over
one pool, and a block holds the KV of one group's layers (`layer_groups`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pointsman.core import KVGroup
from pointsman.core.state.layout import describe_groups
from pointsman.sim.devices import GIB, Device
from pointsman.sim.errors import ModelTooLarge, SimulationError
from pointsman.sim.model import ModelShape
from pointsman.sim.step_time import check_parallel

CONTEXT_BYTES = int(0.6 * GIB)
"""Memory of a process on a GPU before it allocates anything: context, kernels, buffers of libraries. A round figure."""


class LayerGroups(NamedTuple):
    """Groups of a model's layers that have a block table each."""

    kv_groups: tuple[KVGroup, ...]
    """Value of `SchedulerConfig.kv_groups`; (): one group of full attention."""
    num_layers: int
    """Number of layers whose KV a block has memory for. The last group of a kind may have fewer layers."""


def layer_groups(shape: ModelShape, *, has_hybrid_manager: bool = True) -> LayerGroups:
    """The groups in which vLLM's hybrid KV cache manager keeps a model's layers
    (`_get_kv_cache_groups_uniform_page_size` of vLLM 0.32).

    All groups have the number of layers of the rarer kind. If the other kind has fewer than 1.5 times as many layers,
    there is one group of each kind.

    Args:
        shape: the model; its layers have KV of equal size.
        has_hybrid_manager: False: every layer keeps all positions, as with vLLM's option
            `--disable-hybrid-kv-cache-manager`. A model in which every layer has a window keeps windows even then.
    """
    full, windowed = shape.num_full_layers, shape.num_windowed_layers
    window = KVGroup("window", shape.sliding_window)
    if not windowed or (full and not has_hybrid_manager):
        return LayerGroups((), shape.num_layers)
    if not full:
        return LayerGroups((window,), windowed)
    size, largest = sorted((full, windowed))
    if 2 * largest < 3 * size:
        size = largest
    return LayerGroups((window,) * -(-windowed // size) + (KVGroup(),) * -(-full // size), size)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """The use of one device's memory, in bytes."""

    memory: int
    usable: int
    weights: int
    activations: int
    context: int
    kv: int
    """Bytes for KV blocks."""
    block_bytes: int
    """Bytes of one block: in all layers, or in the layers of one group."""
    block_size: int
    """Number of tokens in one block."""
    num_blocks: int
    groups: LayerGroups
    """The groups of layers whose blocks `num_blocks` counts."""
    note: str
    """The assumption about windowed layers."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose KV the blocks hold, in one group of layers."""
        return self.num_blocks * self.block_size

    def __str__(self) -> str:
        parts = (
            f"{name} {value / GIB:.2f} GiB"
            for name, value in (
                ("weights", self.weights),
                ("activations", self.activations),
                ("context", self.context),
                ("KV", self.kv),
            )
        )
        held = f"{self.num_tokens:,} tokens"
        if self.groups.kv_groups:
            held = f"each in {self.groups.num_layers} layers"
        return (
            f"{self.num_blocks:,} KV blocks of {self.block_size} tokens ({held}): of "
            f"{self.memory / GIB:.2f} GiB {self.usable / GIB:.2f} usable: {', '.join(parts)}. {self.note}"
        )


def num_kv_blocks(
    shape: ModelShape,
    device: Device,
    block_size: int = 16,
    gpu_memory_utilization: float = 0.9,
    tensor_parallel: int = 1,
    *,
    kv_dtype_bytes: float = 2,
    max_num_batched_tokens: int = 8192,
    max_num_seqs: int = 256,
    has_hybrid_manager: bool = True,
    data_parallel: int = 1,
) -> KvMemory:
    """The number of KV blocks on one device, with the breakdown of the device's memory.

    Activations are those of a step of `max_num_batched_tokens`: hidden states four times; the MLP's two inner
    activations (with experts, once for each expert that a token uses); float32 logits of `max_num_seqs` rows twice.

    Args:
        shape: the model.
        device: one of `tensor_parallel` equal devices.
        block_size: number of tokens in a block.
        gpu_memory_utilization: share of the memory that the engine may use, as vLLM's option of that name.
        tensor_parallel: number of devices that share the model.
        kv_dtype_bytes: bytes of a KV element: 2, or 1 for an fp8 cache.
        max_num_batched_tokens: number of tokens in the largest step.
        max_num_seqs: number of rows in the largest step.
        has_hybrid_manager: whether layers with windows keep the KV of their window alone, see `layer_groups`.
        data_parallel: number of ranks, of `tensor_parallel` devices each, over which routed experts are divided.

    Raises:
        ModelTooLarge: there is no memory for a single block.
        SimulationError: an argument is out of range.
    """
    check_parallel(shape, device, tensor_parallel)
    if not 0 < gpu_memory_utilization <= 1:
        raise SimulationError(f"gpu_memory_utilization is {gpu_memory_utilization}; it must be above 0 and at most 1")
    if block_size < 1:
        raise SimulationError(f"block_size is {block_size}; it must be at least 1")
    groups, note = layer_groups(shape, has_hybrid_manager=has_hybrid_manager), ""
    if groups.kv_groups:
        note = f"KV in groups of layers: {describe_groups(groups.kv_groups)}."
    elif shape.num_windowed_layers:
        note = f"All layers keep all positions, the {shape.num_windowed_layers} with a window, too."
    block_bytes = round(block_size * groups.num_layers * shape.kv_bytes_per_layer(kv_dtype_bytes, tensor_parallel))
    usable = int(device.memory * gpu_memory_utilization)
    routed = shape.num_expert_layers * shape.num_experts * shape.expert_bytes
    weights = round(shape.weight_bytes - routed + routed / data_parallel) // tensor_parallel
    activations = _activation_bytes(shape, max_num_batched_tokens, max_num_seqs, tensor_parallel)
    context = CONTEXT_BYTES if device.name != "cpu" else 0
    kv = usable - weights - activations - context
    if kv < block_bytes:
        needed = weights + activations + context + block_bytes
        raise ModelTooLarge(
            f"{shape.name} needs {needed / GIB:.2f} GiB on each of {tensor_parallel} {device.name}, "
            f"{weights / GIB:.2f} GiB of it for weights, but only {usable / GIB:.2f} of the {device.memory / GIB:.2f} "
            "GiB are usable: use more tensor parallelism, quantised weights, a device with more memory, or a "
            f"max_num_batched_tokens below {max_num_batched_tokens}"
        )
    return KvMemory(
        memory=device.memory,
        usable=usable,
        weights=weights,
        activations=activations,
        context=context,
        kv=kv,
        block_bytes=block_bytes,
        block_size=block_size,
        num_blocks=kv // block_bytes,
        groups=groups,
        note=note,
    )


def _activation_bytes(shape: ModelShape, num_tokens: int, num_rows: int, tensor_parallel: int) -> int:
    dense = shape.intermediate_size
    experts = (shape.experts_per_token + shape.num_shared_experts) * shape.expert_intermediate_size
    inner = 2 * max(dense, experts) // tensor_parallel
    logits = 2 * 4 * num_rows * shape.vocab_size // tensor_parallel
    return num_tokens * (4 * shape.hidden_size + inner) * shape.dtype_bytes + logits
