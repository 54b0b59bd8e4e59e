"""Publishes the core's prefix-cache events (blocks stored and removed) as vLLM's events, through vLLM's own publisher.

The published hashes are vLLM's, with the function and the seed of its configuration, so a router can compute them from
the tokens of a prompt, and compare them with the published hashes. In the core's events, the core's own hashes identify
the blocks.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from vllm.distributed import kv_events as of_vllm
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, maybe_convert_block_hash

from pointsman.core.kv.events import AllBlocksCleared, BlockStored, KVEvent
from pointsman.integrations.vllm.encoder_inputs import GIVEN
from pointsman.integrations.vllm.requests import lora_number, lora_path

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_events import KVEventsConfig


class KVEvents:
    """Converts and publishes the core's events.

    Args:
        vllm_config: vLLM's configuration; its `kv_events_config` has the address to publish to.
        block_size: number of tokens in a block.
        anchor: index of the full-attention group, which caches the parent of every cached block of every group.
    """

    def __init__(self, vllm_config: VllmConfig, block_size: int, anchor: int = 0) -> None:
        rank = vllm_config.parallel_config.data_parallel_index
        self._publisher = of_vllm.EventPublisherFactory.create(vllm_config.kv_events_config, rank)
        self._block_size = block_size
        self._anchor = anchor
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hashes: dict[bytes, BlockHash] = {}
        """vLLM's hash of each cached block, by the core's hash."""

    @property
    def config(self) -> KVEventsConfig:
        """The publisher's configuration, which vLLM passes to its clients."""
        return self._publisher.get_publisher_config()

    def publish(self, events: list[KVEvent]) -> None:
        if events:
            converted = [self._convert(event) for event in events]
            self._publisher.publish(of_vllm.KVEventBatch(ts=time.time(), events=converted))

    def publish_unchanged(self, events: list[of_vllm.KVCacheEvent]) -> None:
        """Publish events of vLLM's own manager."""
        if events:
            self._publisher.publish(of_vllm.KVEventBatch(ts=time.time(), events=events))

    def close(self) -> None:
        self._publisher.shutdown()

    def _convert(self, event: KVEvent) -> of_vllm.KVCacheEvent:
        if isinstance(event, AllBlocksCleared):
            self._hashes.clear()
            return of_vllm.AllBlocksCleared()
        if not isinstance(event, BlockStored):
            hashes = [maybe_convert_block_hash(self._hashes[name]) for name in event.block_hashes]
            if event.group == self._anchor:  # the blocks of this group are removed after the blocks of the other groups
                for name in event.block_hashes:
                    del self._hashes[name]
            return of_vllm.BlockRemoved(block_hashes=hashes, medium=of_vllm.MEDIUM_GPU, group_idx=event.group)
        adapter, keys = event.root.adapter, self._keys(event)
        parent = self._hashes[event.parent_block_hash] if event.parent_block_hash is not None else None
        return of_vllm.BlockStored(
            block_hashes=[maybe_convert_block_hash(each) for each in self._of_vllm(event, parent, keys)],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(event.token_ids),
            block_size=self._block_size,
            lora_id=lora_number(adapter) if adapter is not None else None,
            medium=of_vllm.MEDIUM_GPU,
            lora_name=event.adapter_name,
            extra_keys=[_event_keys(each) for each in keys] if any(keys) else None,
            group_idx=event.group,
        )

    def _keys(self, event: BlockStored) -> list[tuple[Any, ...]]:
        """For each block of an event: the values besides the tokens that identify the block's content, in vLLM's form
        and order."""
        adapter, salt = event.root.adapter, event.root.cache_salt
        of_adapter = () if adapter is None else (("lora", adapter.name, lora_path(adapter)),)
        found = []
        for at in range(len(event.block_hashes)):
            inputs = event.inputs[at] if event.inputs else ()
            given = tuple(
                ("prompt_embeds", bytes.fromhex(item.key.removeprefix(GIVEN)))
                for item in inputs
                if item.key.startswith(GIVEN)
            )
            computed = tuple(("mm", item.key, item.offset) for item in inputs if not item.key.startswith(GIVEN))
            is_first = not at and event.parent_block_hash is None
            of_salt = (("cache_salt", salt),) if salt and is_first else ()
            found.append((*of_adapter, *computed, *of_salt, *given))
        return found

    def _of_vllm(self, event: BlockStored, parent: BlockHash | None, keys: list[tuple[Any, ...]]) -> list[BlockHash]:
        """vLLM's hashes of an event's blocks; the first block follows the block with the hash `parent`."""
        found = []
        for at, name in enumerate(event.block_hashes):
            tokens = event.token_ids[at * self._block_size : (at + 1) * self._block_size]
            parent = self._hashes[name] = hash_block_tokens(self._hash, parent, tokens, keys[at] or None)
            found.append(parent)
        return found


def _event_keys(keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The values that identify one block besides its tokens, as vLLM's events have them: the adapter's name, inputs
    with their offsets, the cache salt, digests of embeddings."""
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys) or None
