"""A mirror of the prefix cache, made from its events alone, as another process would keep it."""

from __future__ import annotations

import numpy as np

from pointsman.core import Scheduler
from pointsman.core.kv.digests import Placed, block_key, root_key, tokens_digest
from pointsman.core.kv.events import AllBlocksCleared, BlockRemoved, BlockStored
from pointsman.core.kv.prefix_tree import Root

from .shadow import require

Stored = tuple[int, bytes]
"""A group of layers, and the name of a block of it."""


class KVMirror:
    """Takes the events of a scheduler and compares the mirror with the cached blocks, in each group of layers."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._parents: dict[Stored, Stored | None] = {}  # of what can be found: the block before, in the anchor
        kv = scheduler._kv
        self._anchor = kv.anchor
        self._names: dict[tuple[Root, bytes], bytes] = {}  # of contents without encoder inputs, whose marks come and go

    def check(self) -> None:
        """Check that each event since the last call is consistent, and that the result is exactly the cached blocks."""
        size = self._scheduler.config.block_size
        for event in self._scheduler.take_kv_events():
            if isinstance(event, BlockStored):
                self._store(event, size)
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    stored = (event.group, name)
                    require(stored in self._parents, "a block is removed that was not stored")
                    del self._parents[stored]
                    require(stored not in self._parents.values(), "a block is removed before what is behind it")
            else:
                require(isinstance(event, AllBlocksCleared), f"no event: {event!r}")
                self._parents.clear()
        told, cached = set(self._parents), self._cached(size)
        require(told == cached, f"{len(told)} blocks reported, {len(cached)} cached, {len(told ^ cached)} differ")

    def _store(self, event: BlockStored, size: int) -> None:
        count, parent = len(event.block_hashes), event.parent_block_hash
        require(count > 0 and len(event.token_ids) == count * size, f"{event} has not {size} tokens a block")
        last = parent if parent is not None else root_key(event.root)
        for index, name in enumerate(event.block_hashes):
            tokens = np.array(event.token_ids[index * size : (index + 1) * size], dtype=np.int32).tobytes()
            last = block_key(last, tokens, event.inputs[index] if event.inputs else ())
            require(last == name, f"{event} does not say what the name of block {index} is made of")
            stored = (event.group, name)
            require(stored not in self._parents, "a block is stored twice")
            before = None if parent is None or self._anchor is None else (self._anchor, parent)
            require(before is None or before in self._parents, "a block is stored behind one that is not")
            self._parents[stored] = before
            parent = name

    def _cached(self, size: int) -> set[Stored]:
        """The groups and names of all cached blocks, each from its content."""
        prefix = self._scheduler._kv.prefix
        names = set()
        for block in prefix.blocks() if prefix is not None and self._scheduler.config.enable_kv_cache_events else ():
            content = prefix.content_of(block)
            names.add((prefix.group_of(block), self._names.get(content) or self._name(content, size)))
        return names

    def _name(self, content: tuple[Root, bytes], size: int) -> bytes:
        root, token_bytes = content
        name = root_key(root)
        numbers = np.frombuffer(token_bytes, dtype=np.int32).tolist()
        for start in range(0, len(numbers), size):
            tokens, inputs = self._read(numbers[start : start + size])
            name = block_key(name, np.array(tokens, dtype=np.int32).tobytes(), inputs)
        if min(numbers) >= 0:
            self._names[content] = name
        return name

    def _read(self, numbers: list[int]) -> tuple[list[int], list[Placed]]:
        """Decode numbers of the prefix tree: tokens, and the encoder inputs whose marks are among them."""
        tokens, inputs = [], list[Placed]()
        for place, number in enumerate(numbers):
            if number >= 0:
                tokens.append(number)
                continue
            (key, length, text, _), first = next(
                (content, first)
                for content, first in self._scheduler._kv._marks._first.items()
                if first <= -number < first + content[1]
            )
            own = [text] * length if isinstance(text, int) else np.frombuffer(text, dtype=np.int32).tolist()
            at = -number - first
            tokens.append(own[at])
            digest = tokens_digest(np.array(own, dtype=np.int32).tobytes())
            if place == 0 or at == 0:
                inputs.append(Placed(key, place - at, length, digest))
        return tokens, inputs
