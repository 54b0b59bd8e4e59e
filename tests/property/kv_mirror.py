"""A picture of the prefix cache made of its events alone, as another process would keep it."""

from __future__ import annotations

from pointsman.core import Scheduler
from pointsman.core.content_keys import block_key, root_key
from pointsman.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman.core.prefix_cache import TOKEN_BYTES

from .shadow import require


class KVMirror:
    """Takes the events of a scheduler and compares the picture with what is cached."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._parents: dict[bytes, bytes | None] = {}  # of what can be found

    def check(self) -> None:
        """The events since the last call make sense one by one, and what they leave is exactly what is cached."""
        size = self._scheduler.config.block_size
        for event in self._scheduler.take_kv_events():
            if isinstance(event, BlockStored):
                self._store(event, size)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    require(name in self._parents, "a block is removed that was not stored")
                    del self._parents[name]
                    require(name not in self._parents.values(), "a block is removed before what is behind it")
            else:
                require(isinstance(event, AllBlocksCleared), f"no event: {event!r}")
                self._parents.clear()
        told, cached = set(self._parents), self._cached(size)
        require(told == cached, f"{len(told)} blocks are told of and {len(cached)} cached, {len(told ^ cached)} differ")

    def _store(self, event: BlockStored, size: int) -> None:
        count, parent = len(event.block_hashes), event.parent_block_hash
        require(count > 0 and len(event.token_ids) == count * size, f"{event} has not {size} tokens a block")
        require(parent is None or parent in self._parents, "a block is stored behind one that is not")
        for name in event.block_hashes:
            require(name not in self._parents, "a block is stored twice")
            self._parents[name] = parent
            parent = name

    def _cached(self, size: int) -> set[bytes]:
        """The names of all cached blocks, each from its content."""
        prefix = self._scheduler._kv.prefix
        names = set()
        for block in prefix.blocks() if prefix is not None and self._scheduler.config.enable_kv_cache_events else ():
            root, token_bytes = prefix.content(block)
            name = root_key(root)
            for start in range(0, len(token_bytes), size * TOKEN_BYTES):
                name = block_key(name, token_bytes[start : start + size * TOKEN_BYTES])
            names.add(name)
        return names
