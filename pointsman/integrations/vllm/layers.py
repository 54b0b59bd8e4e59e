"""Builds a model's layers without weights, to find the KV groups that vLLM forms from these layers.

vLLM knows the KV of layers only when it has built the layers. This module builds them on the device "meta", which holds
no data, and then reads the KV of the layers as vLLM's model runner does. Building takes seconds, and needs no GPU.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

_PLENTY = 1 << 60
"""Stand-in for the size of the GPU memory, in bytes: large enough for every model."""


class LayersUnknown(Exception):
    """The layers cannot be built here; the message has the reason."""


@dataclass(frozen=True)
class Groups:
    """The KV groups of a model."""

    groups: list[KVCacheGroupSpec]
    block_bytes: int
    """Size of a block of the pool, in bytes."""
    request_blocks: int
    """Maximum number of blocks that a request of `max_model_len` tokens holds."""

    def lines(self) -> list[str]:
        """Lines of text, one for each kind of group."""
        found: dict[str, int] = {}
        for group in self.groups:
            spec = group.kv_cache_spec
            count = len(group.layer_names)
            what = f"{count} layer{'s' * (count > 1)} of {_kind(spec)}, blocks of {spec.block_size:,} tokens"
            found[what] = found.get(what, 0) + 1
        return [f"{count} group{'s' * (count > 1)}: {'each ' * (count > 1)}{what}" for what, count in found.items()]


def groups_of(vllm_config: VllmConfig) -> Groups:
    """Build the layers of the model, and return their KV groups as vLLM forms them.

    Raises:
        LayersUnknown: the layers cannot be built here; the message has the reason.
    """
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1:
        raise LayersUnknown(f"the model's layers are split among {parallel.world_size} devices")
    try:
        return _form_groups(vllm_config, _layer_specs(vllm_config))
    except Exception as error:  # from the model's code, or a vLLM that builds models differently
        said = str(error).strip().splitlines() or [""]
        raise LayersUnknown(
            f"vLLM cannot build the model's layers without weights: {type(error).__name__}: {said[0]}"
        ) from error


def _layer_specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """vLLM's `KVCacheSpec` of each layer that stores KV."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    before = torch.get_default_dtype()
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as folder:
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/one", 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(vllm_config.model_config.dtype)
        try:
            with torch.device("meta"):
                initialize_model(vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)
            runner = SimpleNamespace(vllm_config=vllm_config, shared_kv_cache_layers={})
            specs: dict[str, KVCacheSpec] = GPUModelRunner.get_kv_cache_spec(runner)
        finally:
            torch.set_default_dtype(before)
    return specs


def _form_groups(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> Groups:
    from vllm.v1.attention.backends.utils import record_kv_cache_layout, resolve_kv_cache_layout
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
    from vllm.v1.worker.worker_base import WorkerBase

    register_all_kvcache_specs(vllm_config)
    if not specs:
        return Groups([], 0, 0)
    worker: Any = SimpleNamespace(vllm_config=vllm_config)
    layouts = WorkerBase.get_supported_kv_cache_layouts(worker)
    layout = resolve_kv_cache_layout(vllm_config, [layouts], specs.values()).name
    record_kv_cache_layout(vllm_config.cache_config, layout)
    cache = vllm_config.cache_config
    override, cache.num_gpu_blocks_override = cache.num_gpu_blocks_override, None
    try:
        config = _kv_cache_config(vllm_config, specs)
    finally:
        cache.num_gpu_blocks_override = override
    groups = config.kv_cache_groups
    return Groups(groups, _PLENTY // config.num_blocks, _num_request_blocks(vllm_config, groups))


def _num_request_blocks(vllm_config: VllmConfig, groups: Sequence[KVCacheGroupSpec]) -> int:
    """Maximum number of blocks that a request of `max_model_len` tokens holds."""
    from vllm.utils.math_utils import cdiv

    return sum(
        cdiv(group.kv_cache_spec.max_memory_usage_bytes(vllm_config), group.kv_cache_spec.page_size_bytes)
        for group in groups
    )


def longest_request(vllm_config: VllmConfig, groups: Groups, num_blocks: int) -> int:
    """Number of tokens of the longest request, up to `max_model_len`, that fits `num_blocks` blocks; 0: none fits."""
    model = vllm_config.model_config
    longest = model.max_model_len

    def needs_more(length: int) -> bool:
        model.max_model_len = length  # the number of blocks of some layers depends on it
        return _num_request_blocks(vllm_config, groups.groups) > num_blocks

    try:
        return bisect_left(range(1, longest + 1), True, key=needs_more)
    finally:
        model.max_model_len = longest


def _kv_cache_config(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    """vLLM's `KVCacheConfig` of the model, for a GPU memory that suffices for every model."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        (config,) = get_kv_cache_configs(vllm_config, [specs], [_PLENTY])
    else:
        groups = get_global_kv_cache_groups(vllm_config, [specs])
        (config,) = get_kv_cache_configs(vllm_config, [specs], [_PLENTY], groups)
    return config


def _kind(spec: KVCacheSpec) -> str:
    for name, unit in (("sliding_window", "windows"), ("attention_chunk_size", "chunks")):
        size = getattr(spec, name, None)
        if size is not None:
            return f"{type(spec).__name__} ({unit} of {size:,} tokens)"
    return type(spec).__name__
