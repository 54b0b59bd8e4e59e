"""Blocks that enter and leave the prefix cache, on vLLM's own publisher, as vLLM's events.

Their hashes are vLLM's own, with the function and the seed of its configuration: a router may compute them from the
tokens of a prompt, and compare. The core's hashes identify the blocks.
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
        vllm_config: its `kv_events_config` says where to publish.
        block_size: tokens per block.
        anchor: the group of full attention: of every cached block, the others' included, it has the one before.
    """

    def __init__(self, vllm_config: VllmConfig, block_size: int, anchor: int = 0) -> None:
        rank = vllm_config.parallel_config.data_parallel_index
        self._publisher = of_vllm.EventPublisherFactory.create(vllm_config.kv_events_config, rank)
        self._block_size = block_size
        self._anchor = anchor
        self._hash = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
        self._hashes: dict[bytes, BlockHash] = {}
        """vLLM's hashes by the core's, of the cached blocks."""

    @property
    def config(self) -> KVEventsConfig:
        """The publisher's configuration, which vLLM passes on to its clients."""
        return self._publisher.get_publisher_config()

    def publish(self, events: list[KVEvent]) -> None:
        if events:
            converted = [self._convert(event) for event in events]
            self._publisher.publish(of_vllm.KVEventBatch(ts=time.time(), events=converted))

    def publish_as_they_are(self, events: list[of_vllm.KVCacheEvent]) -> None:
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
            if event.group == self._anchor:  # it is removed after the others
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
            extra_keys=[_as_told(each) for each in keys] if any(keys) else None,
            group_idx=event.group,
        )

    def _keys(self, event: BlockStored) -> list[tuple[Any, ...]]:
        """For each block, what identifies its content beside tokens, in vLLM's terms and order."""
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
        """vLLM's hashes of these blocks, the first of which follows `parent`."""
        found = []
        for at, name in enumerate(event.block_hashes):
            tokens = event.token_ids[at * self._block_size : (at + 1) * self._block_size]
            parent = self._hashes[name] = hash_block_tokens(self._hash, parent, tokens, keys[at] or None)
            found.append(parent)
        return found


def _as_told(keys: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Of one block, as events list them: the name of the adapter, inputs with their offsets, the salt, digests."""
    return tuple(key[1:] if key[0] == "mm" else key[1] for key in keys) or None
