"""What enters and leaves the prefix cache, on vLLM's own publisher, in vLLM's events.

The hashes are ours (`core/content_keys.py`): they name content across processes as vLLM's do, and are other numbers.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed import kv_events as of_vllm

from pointsman.core.kv_events import AllBlocksCleared, BlockStored, KVEvent


class KVEvents:
    """Publishes.

    Args:
        vllm_config: whose `kv_events_config` says where.
        block_size: tokens per block.
    """

    def __init__(self, vllm_config: Any, block_size: int) -> None:
        rank = vllm_config.parallel_config.data_parallel_index
        self._publisher = of_vllm.EventPublisherFactory.create(vllm_config.kv_events_config, rank)
        self._block_size = block_size

    @property
    def config(self) -> Any:
        """Where it publishes, as vLLM tells its clients."""
        return self._publisher.get_publisher_config()

    def publish(self, events: list[KVEvent]) -> None:
        if events:
            converted = [self._convert(event) for event in events]
            self._publisher.publish(of_vllm.KVEventBatch(ts=time.time(), events=converted))

    def close(self) -> None:
        self._publisher.shutdown()

    def _convert(self, event: KVEvent) -> Any:
        if isinstance(event, AllBlocksCleared):
            return of_vllm.AllBlocksCleared()
        if not isinstance(event, BlockStored):
            return of_vllm.BlockRemoved(block_hashes=event.block_hashes, medium=of_vllm.MEDIUM_GPU)
        adapter, extra_keys = event.root.adapter, event.extra_keys()
        return of_vllm.BlockStored(
            block_hashes=event.block_hashes,
            parent_block_hash=event.parent_block_hash,
            token_ids=event.token_ids,
            block_size=self._block_size,
            lora_id=adapter.version if adapter is not None else None,
            medium=of_vllm.MEDIUM_GPU,
            lora_name=event.adapter_name,
            extra_keys=extra_keys if any(extra_keys) else None,
            group_idx=0,
        )
