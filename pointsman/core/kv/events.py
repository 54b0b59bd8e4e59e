"""What enters and leaves the prefix cache? Events for routers and for caches of other machines.

Blocks are named by keys that include their whole prefix and mean the same in every process: see `content.py`.

An event reports content, not blocks: content is stored with its first block and removed with its last, so that what
was stored and not removed is, at any moment, exactly what a prefix cache lookup can find. A prompt is reported when it
is scheduled, and removed if its step fails. A block is removed after every block that follows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pointsman.core.kv.content import Placed, block_keys, placed_inputs
from pointsman.core.kv.prefix_tree import Root, Run

if TYPE_CHECKING:
    from pointsman.core.state.request import Request


class BlockStored(NamedTuple):
    """Consecutive full blocks entered the prefix cache."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    """Of the block before the first one; None: the first one begins its sequence."""
    token_ids: tuple[int, ...]
    """Of all these blocks."""
    root: Root
    """What else must be equal: cache salt and adapter."""
    inputs: Sequence[Sequence[Placed]] = ()
    """For each block, the encoder inputs in it; empty: no block has any."""

    @property
    def adapter_name(self) -> str | None:
        return self.root.adapter.name if self.root.adapter is not None else None

    def extra_keys(self) -> list[tuple[str | tuple[str, int], ...] | None]:
        """For each block, what identifies its content beside tokens, as vLLM lists it: the adapter, each encoder input
        with its offset from the block's first token, and for the first block of a sequence the salt."""
        adapter = () if self.adapter_name is None else (self.adapter_name,)
        inputs = [tuple((item.key, item.offset) for item in items) for items in self.inputs]
        keys = [(*adapter, *of_block) for of_block in inputs or [()] * len(self.block_hashes)]
        if self.parent_block_hash is None and self.root.cache_salt is not None:
            keys[0] = (*keys[0], self.root.cache_salt)
        return [of_block or None for of_block in keys]


class BlockRemoved(NamedTuple):
    """Blocks left the prefix cache; the last of a sequence comes first."""

    block_hashes: tuple[bytes, ...]


class AllBlocksCleared(NamedTuple):
    """All blocks left the prefix cache."""


KVEvent: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


class KVEvents:
    """Listens to a prefix cache and keeps its events until they are taken."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[int, list[bytes]] = {}  # of the blocks of each run, by its id
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        return events

    def added(self, run: Run, request: Request, first: int) -> None:
        """A request's blocks from `first` on entered the tree, as a run."""
        size, end = self._block_size, first + run.length
        keys = block_keys(request, size)
        hashes = keys[first:end]
        self._hashes[run.run_id] = list(hashes)
        parent = keys[first - 1] if first else None
        token_ids = tuple(request.tokens(first * size, end * size).tolist())
        placed = placed_inputs(request, first, end, size)
        inputs = tuple([tuple(placed.get(block, ())) for block in range(first, end)]) if placed else ()
        self._events.append(BlockStored(hashes, parent, token_ids, Root.of(request), inputs))

    def shrunk(self, run: Run, length: int) -> None:
        """Only the first `length` blocks of a run remain in the tree."""
        hashes = self._hashes[run.run_id]
        if length < len(hashes):
            self._events.append(BlockRemoved(tuple(hashes[length:][::-1])))
            del hashes[length:]
        if length == 0:
            del self._hashes[run.run_id]

    def cleared(self) -> None:
        """The tree is empty."""
        self._hashes.clear()
        self._events.append(AllBlocksCleared())
