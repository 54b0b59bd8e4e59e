"""Selects the KV layouts that the core manages itself: full attention and attention within windows or chunks, in groups
that all have the same block size.

vLLM's own manager keeps every other layout (`kv_groups.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pointsman.core import KVGroup, SchedulerConfig
from pointsman.integrations.vllm.support import managers_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec


def core_groups(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: SchedulerConfig, hash_block_size: int
) -> tuple[KVGroup, ...] | None:
    """The KV groups, if the core can manage all of them itself; None: it cannot manage them."""
    if getattr(kv_cache_config, "needs_kv_cache_zeroing", False) or hash_block_size != config.block_size:
        return None
    if vllm_config.model_config.enable_prompt_embeds:  # the core's windows may miss prefixes that vLLM finds
        return None
    own = known_groups(kv_cache_config, config.block_size)
    if own is None:
        return None
    # vLLM's hash of a block includes the previous block's hash. Without full attention, that block may be released.
    return None if config.enable_kv_cache_events and not any(group.is_full for group in own) else own


def known_groups(kv_cache_config: KVCacheConfig, block_size: int) -> tuple[KVGroup, ...] | None:
    """vLLM's KV groups as groups of the core's; None: the core lacks the kind of a group, or there is no group."""
    groups = tuple(_core_group(group, block_size) for group in kv_cache_config.kv_cache_groups)
    own = tuple(group for group in groups if group is not None)
    return own if own and len(own) == len(groups) else None


def _core_group(group: KVCacheGroupSpec, block_size: int) -> KVGroup | None:
    """A group of vLLM's as a group of the core's; None: the core lacks this kind."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        SlidingWindowSpec,
        iter_layer_specs,
    )

    found: set[KVGroup | None] = set()
    kinds = managers_of(group)
    for spec in iter_layer_specs(group.kv_cache_spec):
        if spec.block_size != block_size:
            found.add(None)
        elif isinstance(spec, FullAttentionSpec) and kinds == {"FullAttentionManager"}:
            found.add(KVGroup("full"))
        elif isinstance(spec, SlidingWindowSpec) and kinds == {"SlidingWindowManager"}:
            found.add(None if spec.extra_retained_tokens else KVGroup("window", spec.sliding_window))
        elif isinstance(spec, ChunkedLocalAttentionSpec) and kinds == {"ChunkedLocalAttentionManager"}:
            found.add(KVGroup("chunk", spec.attention_chunk_size))
        else:
            found.add(None)
    return found.pop() if len(found) == 1 else None
