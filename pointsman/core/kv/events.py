"""What enters and leaves the prefix cache, for whoever keeps a picture of it: routers, caches of other machines.

Blocks have names here that say all that is before them, and mean the same in every process: see `content_keys.py`.

An event tells of content, not of blocks: it is stored with the first block that holds it and removed with the last, so
that what was stored and not removed is, at any moment, just what a look-up could find. A prompt is told of when it is
scheduled, and taken back if its step fails. A removed block comes after everything behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pointsman.core.kv.content import Placed, block_keys, placed_inputs
from pointsman.core.kv.prefix_tree import Root, Run

if TYPE_CHECKING:
    from pointsman.core.state.request import Request


class BlockStored(NamedTuple):
    """Consecutive full blocks can be found from now on."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    """Of the block before the first; None: it is the first of its sequence."""
    token_ids: tuple[int, ...]
    """Of all these blocks."""
    root: Root
    """What else must be equal: cache salt and adapter."""
    inputs: Sequence[Sequence[Placed]] = ()
    """Of each block, the encoder inputs that stand in it; empty: none has any."""

    @property
    def adapter_name(self) -> str | None:
        return self.root.adapter.name if self.root.adapter is not None else None

    def extra_keys(self) -> list[tuple[str | tuple[str, int], ...] | None]:
        """For each block, what names its content beside tokens, as vLLM lists it: the adapter, each encoder input with
        its offset from the block's first token, and with the first of a sequence the salt."""
        adapter = () if self.adapter_name is None else (self.adapter_name,)
        inputs = [tuple((item.key, item.offset) for item in items) for items in self.inputs]
        keys = [(*adapter, *of_block) for of_block in inputs or [()] * len(self.block_hashes)]
        if self.parent_block_hash is None and self.root.cache_salt is not None:
            keys[0] = (*keys[0], self.root.cache_salt)
        return [of_block or None for of_block in keys]


class BlockRemoved(NamedTuple):
    """Blocks cannot be found any longer; the last of a sequence comes first."""

    block_hashes: tuple[bytes, ...]


class AllBlocksCleared(NamedTuple):
    """No block can be found any longer."""


KVEvent: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


class KVEvents:
    """Listens to a prefix cache and keeps what happened until somebody takes it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[int, list[bytes]] = {}  # by the id of a run: those of its blocks
        self._events: list[KVEvent] = []

    def take(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
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
        """Only the first `length` blocks of a run are left in the tree."""
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
