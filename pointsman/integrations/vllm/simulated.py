"""The parts of vLLM's configuration that Pointsman's simulator lacks. Importable without vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.core import KVGroup
from pointsman.integrations.vllm.layouts import known_groups
from pointsman.integrations.vllm.support import is_one_full_group, kv_cache_problems

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_MERGED_BY_VLLM = {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"}
"""Kinds of KV that vLLM merges into one group of full attention with `--disable-hybrid-kv-cache-manager`."""


def simulated_groups(kv_cache_config: KVCacheConfig, block_size: int) -> tuple[KVGroup, ...] | None:
    """The value of `SchedulerConfig.kv_groups` for the simulation of this configuration: () for one group of full
    attention; None: the simulator lacks a kind of KV."""
    return () if is_one_full_group(kv_cache_config) else known_groups(kv_cache_config, block_size)


def lacking_in_simulator(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, block_size: int) -> list[str]:
    """Names of the parts of this configuration that Pointsman's simulator lacks; empty: it lacks none."""
    model, parallel, speculation = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    groups = kv_cache_config.kv_cache_groups
    kinds = [type(group.kv_cache_spec).__name__ for group in groups]
    lacking = []
    if not groups:
        lacking.append("a model without a KV cache")
    elif simulated_groups(kv_cache_config, block_size) is None:
        if len(groups) > 1:
            how = " (as one group: --disable-hybrid-kv-cache-manager)" if set(kinds) <= _MERGED_BY_VLLM else ""
            lacking.append(f"{len(groups)} KV groups ({', '.join(kinds)}){how}")
        elif problems := kv_cache_problems(kv_cache_config):
            lacking.append(problems[0].partition(":")[0])
        else:
            lacking.append(f"KV of the kind {kinds[0]}")
    if getattr(model, "runner_type", "generate") != "generate":
        lacking.append(f"a {model.runner_type} model")
    if model.is_encoder_decoder:
        lacking.append("an encoder")
    elif model.supports_multimodal_inputs:
        lacking.append("multimodal inputs (a text part alone: --language-model-only)")
    names = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    lacking += [f"{name} {getattr(parallel, name)}" for name in names if getattr(parallel, name, 1) > 1]
    if speculation is not None and getattr(speculation, "num_speculative_tokens_per_batch_size", None):
        lacking.append("num_speculative_tokens_per_batch_size")
    if vllm_config.kv_transfer_config is not None:
        lacking.append("a KV connector")
    if vllm_config.ec_transfer_config is not None:
        lacking.append("an encoder-cache connector")
    return lacking
