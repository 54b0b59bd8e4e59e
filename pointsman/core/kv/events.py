"""KV events: report content that enters and leaves the prefix cache, to routers and caches of other machines.

Events name blocks by keys, which cover the whole prefix and mean the same in every process: see `digests.py`.

An event reports content, not blocks: content is reported as stored with its first block, and as removed with its last
block. So the content that was reported as stored and not as removed is always exactly the content that a prefix cache
lookup can find. A prompt is reported as stored when it is scheduled, and as removed if its step fails. A block is
reported as removed after every block that follows it in its sequence.

With several groups of layers, an event is about the blocks of one group. The blocks of each group are reported as
stored and removed separately; blocks of windows in any order. A lookup finds a prefix if every group has the blocks
that the next token attends to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.digests import Placed, block_keys, placed_inputs
from pointsman.core.kv.prefix_tree import Root, Run

if TYPE_CHECKING:
    from pointsman.core.state.request import Request

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]


class BlockStored(NamedTuple):
    """Consecutive full blocks entered the prefix cache."""

    block_hashes: tuple[bytes, ...]
    parent_block_hash: bytes | None
    """The hash of the block before the first of `block_hashes`; None: that first block begins its sequence."""
    token_ids: tuple[int, ...]
    """The tokens of all blocks in `block_hashes`."""
    root: Root
    """Cache salt and adapter of the sequence; only requests with an equal root can reuse the blocks."""
    inputs: Sequence[Sequence[Placed]] = ()
    """For each block, the encoder inputs in it; empty: no block contains an encoder input."""
    group: int = 0
    """Index of the group of layers whose KV the blocks hold."""

    @property
    def adapter_name(self) -> str | None:
        return self.root.adapter.name if self.root.adapter is not None else None

    def extra_keys(self) -> list[tuple[str | tuple[str, int], ...] | None]:
        """For each block, the identifiers of its content other than the tokens, as vLLM lists them: the adapter, each
        encoder input with its offset from the block's first token, and for the first block of a sequence the cache
        salt."""
        adapter = () if self.adapter_name is None else (self.adapter_name,)
        inputs = [tuple((item.key, item.offset) for item in items) for items in self.inputs]
        keys = [(*adapter, *of_block) for of_block in inputs or [()] * len(self.block_hashes)]
        if self.parent_block_hash is None and self.root.cache_salt is not None:
            keys[0] = (*keys[0], self.root.cache_salt)
        return [of_block or None for of_block in keys]


class BlockRemoved(NamedTuple):
    """Blocks of one sequence left the prefix cache; the last block comes first."""

    block_hashes: tuple[bytes, ...]
    group: int = 0
    """Index of the group of layers whose KV the blocks hold."""


class AllBlocksCleared(NamedTuple):
    """All blocks left the prefix cache."""


KVEvent: TypeAlias = "BlockStored | BlockRemoved | AllBlocksCleared"


class KVEvents:
    """Listens to a prefix cache, and keeps the events until `take_events` returns them.

    Args:
        groups: indices of the groups, in the order in which their content is reported as stored; removals are reported
            in reverse order. The anchor comes first (the group of full attention, see `prefix_tree.py`), so that a
            block of another group follows a stored block.
    """

    def __init__(self, block_size: int, groups: Sequence[int] = (0,)) -> None:
        self._block_size = block_size
        self._groups = groups
        self._hashes: dict[int, list[bytes]] = {}  # hashes of the nodes of each run, by run id
        self._has: dict[int, BoolArray] = {}  # by run id, [groups, nodes] whether the content is reported as stored
        self._events: list[KVEvent] = []

    def take_events(self) -> list[KVEvent]:
        """The events since the last call of `take_events`, in order."""
        events, self._events = self._events, []
        return events

    def on_run_added(self, run: Run, request: Request, first: int, has_block: BoolArray) -> None:
        """A request's blocks from `first` on entered the tree, as `run`. `has_block`: [groups, nodes] whether each
        group has the block of each node."""
        self._hashes[run.run_id] = list(block_keys(request, self._block_size)[first : first + run.length])
        self._has[run.run_id] = has_block
        for group in self._groups:
            self._report_stored(request, group, first + np.flatnonzero(has_block[group]))

    def on_cells_filled(self, run: Run, request: Request, offset: int, groups: Int64Array, indices: Int64Array) -> None:
        """Nodes of a run got their first block of a group: node `indices[k]` of group `groups[k]`. Node i is block
        `offset` + i of the request."""
        self._has[run.run_id][groups, indices] = True
        for group in self._groups:
            self._report_stored(request, group, offset + indices[groups == group])

    def _report_stored(self, request: Request, group: int, blocks: Int64Array) -> None:
        """Report ascending blocks of a request as stored, with one event for consecutive blocks."""
        if not len(blocks):
            return
        ends = [*(np.flatnonzero(blocks[1:] != blocks[:-1] + 1) + 1).tolist(), len(blocks)]
        start = 0
        for end in ends:
            self._events.append(self._stored_event(request, group, blocks.item(start), blocks.item(end - 1) + 1))
            start = end

    def _stored_event(self, request: Request, group: int, first: int, end: int) -> BlockStored:
        size, keys = self._block_size, block_keys(request, self._block_size)
        parent = keys[first - 1] if first else None
        token_ids = tuple(request.tokens(first * size, end * size).tolist())
        placed = placed_inputs(request, first, end, size)
        inputs = tuple([tuple(placed.get(block, ())) for block in range(first, end)]) if placed else ()
        return BlockStored(keys[first:end], parent, token_ids, Root.of(request), inputs, group)

    def on_cells_emptied(self, run: Run, cells: Int64Array) -> None:
        """The last block of each of these cells of a run was removed; the nodes remain. Cell c is node c // number of
        groups, in group c % number of groups."""
        indices, groups = np.divmod(cells, len(self._has[run.run_id]))
        for group in self._groups[::-1]:
            self._report_removed(run, group, np.sort(indices[groups == group]))

    def on_run_shortened(self, run: Run, length: int) -> None:
        """Only the first `length` nodes of a run remain in the tree."""
        hashes = self._hashes[run.run_id]
        for group in self._groups[::-1]:
            self._report_removed(run, group, np.arange(length, len(hashes)))
        del hashes[length:]
        if length == 0:
            del self._hashes[run.run_id], self._has[run.run_id]

    def _report_removed(self, run: Run, group: int, indices: Int64Array) -> None:
        """Report the stored content of ascending nodes of a run as removed."""
        hashes, has = self._hashes[run.run_id], self._has[run.run_id][group]
        indices = indices[indices < len(hashes)]
        indices = indices[has[indices]]
        has[indices] = False
        if len(indices):
            self._events.append(BlockRemoved(tuple([hashes[index] for index in indices[::-1].tolist()]), group))

    def on_tree_cleared(self) -> None:
        """All nodes were removed: the tree is empty."""
        self._hashes.clear()
        self._has.clear()
        self._events.append(AllBlocksCleared())
