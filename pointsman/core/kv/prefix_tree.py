"""The prefix cache: an exact tree over full KV blocks, which finds the longest cached prefix of a sequence.

A node is one full block of tokens after a given prefix. A lookup finds it by (node before it, token bytes of the
block), and the first node of a sequence by (`Root`, token bytes of the block). A root has the other conditions for
sharing KV: equal salt and adapter. Placeholders of encoder inputs are replaced by marks of the inputs' contents
(`content_marks.py`).

A cache hit never returns KV of other tokens, for these reasons:

- The key is the content itself, never a digest, so no two prefixes can collide.
- A cached block leaves the tree (`evict`) before it can be written again: `KVCacheManager.allocate` does both. An
  admission acquires the blocks of its hit before it allocates new ones, so it cannot evict them.
- Only full blocks are published, and a request writes only to blocks after its cache hit: no request writes to a shared
  block.
- Prompts are published before they are computed. With `share_within_step` the host writes the KV of all rows before any
  row reads it; without it, other requests find the blocks from the next step on (`publish_deferred`).
- Only valid tokens stay published: a release publishes no rejected drafts, and the publications of a failed step or a
  failed row are removed (`KVCacheManager.undo`, `retract`).

Nodes are kept in runs: the consecutive blocks of one publication. Inside a run a node's successor is the next node;
every other successor starts a run of its own, listed under the node that it follows. So publishing, finding and
evicting a prompt cost a few operations per run and a comparison of bytes, whatever its number of blocks.

    Run 1  [b0 b1 b2 b3]            a prompt of four blocks, in group 0: full attention
           [ -  - d2 d3]            in group 1, a window: blocks behind it were given back
                |
    Run 2       +-- [c0 c1]         another prompt that shares its first two blocks
                    [e0 e1]

A cell of a run is one node in one group of layers. It has a block or none. Several blocks may hold the content of one
cell (requests computed it in parallel): `blocks` of the run lists one of them, `duplicates` lists the others.

A run only shrinks, from its end, and gets no new nodes, so a stale node cannot be mistaken for a new one.

    _run_of   int64 [B + 1]   for each cached block the id of its run (0: not cached)
    _cell_of  int64 [B + 1]   and its cell in that run: index of the node times the number of groups, plus the group

Block B does not exist: it stands for a cell without a block. A block that a run lists belongs to that cell only if both
columns agree. So an eviction need not search for its block: `_run_of` of the block is cleared immediately, and runs are
shortened later, in batches, at the latest before a block is published after a node that may be removed. Until then the
tree holds nodes that no lookup returns.

With a group of full attention (the `anchor`), a node stays as long as that group has a block there. Children are
removed before their parents, for these reasons:

- A request that holds an anchor block of a node holds the anchor blocks of all nodes before it, and releases its table
  from the end. So the free anchor blocks of a child are less recently used than those of its parents.
- A failed step removes its blocks newest first.
- `remove_subtree` removes a node with all nodes after it.

Blocks of other groups may be evicted in any order. Once a node is removed, lookups no longer find its blocks of other
groups; these leave the pool's queue like other blocks. If every group has a window, a node stays while any group has a
block there, or a run continues after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.state.inputs import Adapter
from pointsman.core.state.numbers import ZERO

if TYPE_CHECKING:
    from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple

BoolArray = npt.NDArray[np.bool_]
Int64Array = npt.NDArray[np.int64]
_MAX_EVICTED = 4096  # maximum number of blocks whose runs are shortened together
TOKEN_BYTES = np.dtype(np.int32).itemsize


class Root(NamedTuple):
    """The salt and adapter of a request. Two requests share KV only if their roots are equal."""

    cache_salt: str | None = None
    adapter: Adapter | None = None

    @classmethod
    def of(cls, request: Request) -> Root:
        """The root of a request's blocks."""
        if request.cache_salt is None and request.adapter is None:
            return _PLAIN
        return cls(request.cache_salt, request.adapter)


_PLAIN = Root()


class Run:
    """Consecutive nodes that one publication added to the tree."""

    __slots__ = ("blocks", "children", "duplicates", "length", "parent", "run_id", "token_bytes")

    def __init__(self, run_id: int, parent: Node, token_bytes: bytes, blocks: Int64Array) -> None:
        self.run_id = run_id
        self.parent = parent
        self.token_bytes = token_bytes
        self.blocks = blocks
        """[groups, nodes] the block of each cell; shared with the publisher's journal, so the array is never written
        to."""
        self.length = blocks.shape[1]
        """Number of remaining nodes; 0: the run is removed."""
        self.children: dict[tuple[int, bytes], Run] = {}
        """Runs that start after a node of this run, by (index of that node, token bytes of the child's first block)."""
        self.duplicates: dict[int, list[int]] = {}
        """For each cell with several blocks, the blocks with its content other than the block in `blocks`."""


class RunNode(NamedTuple):
    """A node of the tree, given as a run and an index in this run."""

    run: Run
    at: int

    @property
    def is_alive(self) -> bool:
        return bool(self.at < self.run.length)


Node: TypeAlias = "RunNode | Root"


class Span(NamedTuple):
    """A range of consecutive nodes of a run."""

    run: Run
    first: int
    length: int


class Found(NamedTuple):
    """The result of a lookup: the nodes of the cached prefix of a sequence."""

    spans: list[Span]
    blocks: Int64Array
    """[groups, nodes] the block of each node in each group."""
    has: BoolArray | None
    """[groups, nodes] whether each group has the block of each node; None: all groups have all blocks."""

    @property
    def last(self) -> RunNode:
        """The last node of the prefix; defined only if at least one node was found."""
        run, first, count = self.spans[-1]
        return new_tuple(RunNode, (run, first + count - 1))

    def node_after(self, num_nodes: int, root: Root) -> Node:
        """The last of the first `num_nodes` nodes; `root` if `num_nodes` is 0."""
        end = 0
        for run, first, count in self.spans:
            if num_nodes <= end + count:
                return root if not num_nodes else RunNode(run, first + num_nodes - end - 1)
            end += count
        return root


class RunListener(Protocol):
    """An object whose methods the tree calls when content enters and leaves it."""

    def on_run_added(self, run: Run, request: Request, first: int, has_block: BoolArray) -> None:
        """A request's blocks from `first` on entered the tree, as `run`. `has_block`: [groups, nodes] whether each
        group has the block of each node."""

    def on_cells_filled(self, run: Run, request: Request, offset: int, groups: Int64Array, indices: Int64Array) -> None:
        """Existing nodes of `run` got their first block of a group: node `indices[k]` of group `groups[k]`. Node i is
        block `offset` + i of the request."""

    def on_cells_emptied(self, run: Run, cells: Int64Array) -> None:
        """The last block of each of these cells of `run` was removed; the nodes remain. Cell c is node c // number of
        groups, in group c % number of groups."""

    def on_run_shortened(self, run: Run, length: int) -> None:
        """Only the first `length` nodes of a run remain in the tree."""

    def on_tree_cleared(self) -> None:
        """All nodes were removed: the tree is empty."""


class PrefixCache:
    """The prefix tree over a pool of `num_blocks` blocks of `block_size` tokens.

    Args:
        num_groups: number of groups of layers, each with blocks of its own.
        anchor: index of a group of full attention; None: every group has a window.
    """

    def __init__(self, num_blocks: int, block_size: int, num_groups: int = 1, anchor: int | None = 0) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self.num_groups = num_groups
        self.anchor = anchor
        self.no_block = num_blocks
        """The block id that stands for a cell without a block."""
        self._roots: dict[tuple[Root, bytes], Run] = {}
        self._runs: dict[int, Run] = {}
        self._run_of: Int64Array = np.zeros(num_blocks + 1, dtype=np.int64)
        self._cell_of: Int64Array = np.zeros(num_blocks + 1, dtype=np.int64)
        self._cells = self._make_cells(1024)
        self._nothing = Found([], np.zeros((num_groups, 0), dtype=np.int64), None)
        self._next_run_id = 1
        self.epoch = 0
        """Number of calls of `clear`: KV that was published in an earlier epoch is invalid."""
        self.num_publications = 0
        """Counter that changes whenever a lookup may find more blocks than before."""
        self.num_replacements = 0
        """Counter that changes whenever a removed block is replaced by a duplicate with the same content, which lookups
        then find."""
        self.listener: RunListener | None = None
        # Evicted blocks whose runs are not shortened yet: (blocks, their runs, their cells) of each call of `evict`.
        self._evicted: list[tuple[Int64Array, Int64Array, Int64Array]] = []
        self._num_evicted = 0
        self.num_duplicates = 0
        """Number of duplicates: for each content, its cached blocks beyond the first."""

    def __len__(self) -> int:
        """Number of nodes in the tree."""
        self._shorten_evicted_runs()
        return sum(run.length for run in self._runs.values())

    def _make_cells(self, count: int) -> Int64Array:
        """[groups, count] the cells of the first `count` nodes of any run; a cell is one node in one group of
        layers."""
        cells: Int64Array = np.arange(count) * self.num_groups + np.arange(self.num_groups)[:, None]
        return cells

    def _cells_of_nodes(self, first: int, count: int) -> Int64Array:
        """[groups, count] the cells of nodes `first` to `first + count` - 1 of any run."""
        if first + count > self._cells.shape[1]:
            self._cells = self._make_cells(2 * (first + count))
        return self._cells[:, first : first + count]

    # ------------------------------------------------------------------ finding

    def look_up(self, root: Root, token_bytes: bytes, max_blocks: int) -> Found:
        """The nodes of the longest cached prefix of a sequence, at most `max_blocks`, up to the first node without an
        anchor block. If the anchor is the only group, all of these nodes can be reused."""
        if self.anchor is None:
            self._shorten_evicted_runs()
        spans: list[Span] = []
        parts: list[Int64Array] = []
        has_parts: list[BoolArray] = []
        num_found = 0
        node: Node = root
        is_tested = self.num_groups > 1 or self.anchor is None or len(self._evicted) > 0
        while num_found < max_blocks:
            span = self._successors(node, token_bytes, num_found, max_blocks)
            if span is None:
                break
            run, first, count = span
            blocks = run.blocks[:, first : first + count]
            if is_tested:
                has = self._has_blocks(run, first, count)
                if self.anchor is not None:  # nodes from a missing anchor block on are removed, too
                    count = int(np.count_nonzero(has[self.anchor]))
                    if count == 0:
                        break
                    blocks, has, span = blocks[:, :count], has[:, :count], new_tuple(Span, (run, first, count))
                has_parts.append(has)
            spans.append(span)
            parts.append(blocks)
            num_found += count
            node = new_tuple(RunNode, (run, first + count - 1))
        if not parts:
            return self._nothing
        blocks = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        return new_tuple(Found, (spans, blocks, np.concatenate(has_parts, axis=1) if is_tested else None))

    def _has_blocks(self, run: Run, first: int, count: int) -> BoolArray:
        """[groups, count] whether each group still has the block that the run lists at nodes `first` to `first + count`
        - 1."""
        blocks = run.blocks[:, first : first + count]
        has: BoolArray = self._run_of[blocks] == run.run_id
        has &= self._cell_of[blocks] == self._cells_of_nodes(first, count)
        return has

    def _successors(self, node: Node, token_bytes: bytes, start: int, end: int) -> Span | None:
        """The nodes after `node`, within one run, that hold blocks `start` to at most `end` - 1 of a sequence; None:
        there is no such node."""
        size = self._block_bytes
        if isinstance(node, Root):
            child = self._roots.get((node, token_bytes[start * size : (start + 1) * size]))
        else:
            run, index = node
            if index + 1 < run.length:
                count = self._num_equal_nodes(run, index + 1, token_bytes, start, end)
                if count:
                    return Span(run, index + 1, count)
            if not run.children:
                return None
            child = run.children.get((index, token_bytes[start * size : (start + 1) * size]))
        return None if child is None else Span(child, 0, self._num_equal_nodes(child, 0, token_bytes, start, end))

    def _num_equal_nodes(self, run: Run, first: int, token_bytes: bytes, start: int, end: int) -> int:
        """Number of nodes of `run` from `first` on that hold the blocks of a sequence from `start` on."""
        size = self._block_bytes
        count: int = min(run.length - first, end - start)
        held = run.token_bytes[first * size : (first + count) * size]
        wanted = token_bytes[start * size : (start + count) * size]
        if held == wanted:
            return count
        differs = np.frombuffer(held, dtype=np.int32) != np.frombuffer(wanted, dtype=np.int32)
        return int(differs.argmax()) * TOKEN_BYTES // size

    # ------------------------------------------------------------------ publishing

    def publish(self, node: Node, token_bytes: bytes, first: int, blocks: Int64Array, request: Request) -> list[Span]:
        """Add blocks `first`, `first` + 1, ... of a sequence after `node`, which is the node of block `first` - 1, or
        the root if `first` is 0.

        The listener gets these blocks as blocks of `request`. `blocks`: [groups, nodes], `no_block` where a group has
        no block; the tree keeps the array.

        Returns the nodes of the blocks; the next publication of the sequence continues after the last node. Nodes that
        exist already get these blocks, as duplicates where the group has a block; the remaining blocks become a new
        run.
        """
        spans: list[Span] = []
        start, end = first, first + blocks.shape[1]
        self.num_publications += 1
        while start < end:
            span = self._successors(node, token_bytes, start, end)
            if span is not None and self._evicted:
                self._shorten_evicted_runs()
                span = self._successors(node, token_bytes, start, end)
            if span is None:
                rest = blocks if start == first else blocks[:, start - first :]
                spans.append(self._add_run(node, token_bytes, start, end, rest, request))
                break
            self._add_blocks_to_nodes(span, blocks[:, start - first : start - first + span.length], request, start)
            spans.append(span)
            node = RunNode(span.run, span.first + span.length - 1)
            start += span.length
        if self.anchor is None:  # the publisher may have given back all blocks of the last nodes
            self._remove_empty_end(spans[-1].run)
        return spans

    def _add_run(
        self, node: Node, token_bytes: bytes, start: int, end: int, blocks: Int64Array, request: Request
    ) -> Span:
        size, run_id, length = self._block_bytes, self._next_run_id, end - start
        tokens = token_bytes[start * size : end * size]
        self._runs[run_id] = run = Run(run_id, node, tokens, blocks)
        self._next_run_id = run_id + 1
        if isinstance(node, Root):
            self._roots[node, tokens[:size]] = run
        else:
            parent, at = node
            parent.children[at, tokens[:size]] = run
        self._record_blocks(run, 0, blocks)
        if self.listener is not None:
            self.listener.on_run_added(run, request, start, blocks != self.no_block)
        return new_tuple(Span, (run, 0, length))

    def _record_blocks(self, run: Run, first: int, blocks: Int64Array) -> None:
        """Record for these blocks that they belong to the nodes of a run from `first` on."""
        end = first + blocks.shape[1]
        cells = self._cells[:, first:end] if end <= self._cells.shape[1] else self._cells_of_nodes(first, end - first)
        if self.num_groups == 1:  # an index of one dimension takes less time
            blocks, cells = blocks[0], cells[0]
        self._run_of[blocks] = run.run_id
        self._cell_of[blocks] = cells
        self._run_of[self.no_block] = ZERO

    def _add_blocks_to_nodes(self, span: Span, blocks: Int64Array, request: Request, start: int) -> None:
        """Add blocks of a request, from its block `start` on, to existing nodes. Blocks that these nodes already have
        (cache hits beside loaded blocks) are replaced by `no_block` in `blocks`."""
        run, first, count = span
        cells = self._cells_of_nodes(first, count)
        blocks[(self._run_of[blocks] == run.run_id) & (self._cell_of[blocks] == cells)] = self.no_block
        given, has = blocks != self.no_block, self._has_blocks(run, first, count)
        for group, at in zip(*(where.tolist() for where in (given & has).nonzero()), strict=True):
            cell = (first + at) * self.num_groups + group
            run.duplicates.setdefault(cell, []).append(int(blocks[group, at]))
            self.num_duplicates += 1
        fills = given & ~has
        if np.count_nonzero(fills):
            run.blocks = run.blocks.copy()
            run.blocks[:, first : first + count][fills] = blocks[fills]
        self._record_blocks(run, first, blocks)
        if self.listener is not None and np.count_nonzero(fills):
            groups, at = fills.nonzero()
            self.listener.on_cells_filled(run, request, start - first, groups, first + at)

    # ------------------------------------------------------------------ removing

    def evict(self, blocks: Int64Array) -> None:
        """Remove blocks whose content is evicted, least recently used first."""
        self._evicted.append((blocks, self._run_of[blocks], self._cell_of[blocks]))
        self._run_of[blocks] = ZERO
        self._num_evicted += len(blocks)
        # A listener must be called immediately, and a duplicate must be replaced before the next lookup.
        if self.num_duplicates or self.listener is not None or self._num_evicted > _MAX_EVICTED:
            self._shorten_evicted_runs()

    def _shorten_evicted_runs(self) -> None:
        """Remove the blocks evicted since the last call from their runs, and shorten the runs."""
        if not self._evicted:
            return
        blocks, runs, cells = self._evicted[0]
        if len(self._evicted) > 1:
            blocks, runs, cells = (np.concatenate(column) for column in zip(*self._evicted, strict=True))
        self._clear_evicted()
        ends = [*((runs[1:] != runs[:-1]).nonzero()[0] + 1).tolist(), len(blocks)]  # another run begins at each end
        start = 0
        for end, run_id in zip(ends, runs[[end - 1 for end in ends]].tolist(), strict=True):
            run = self._runs.get(run_id)
            if run is not None:  # None: the run's last anchor block was evicted before these
                self._remove_evicted(run, blocks[start:end], cells[start:end])
            start = end

    def _remove_evicted(self, run: Run, blocks: Int64Array, cells: Int64Array) -> None:
        """Remove evicted blocks, all of one run, from this run."""
        if run.duplicates:
            for block, cell in zip(blocks.tolist(), cells.tolist(), strict=True):
                self._remove_block_of_cell(run, cell, block)
            return
        if self.anchor is None:
            if self.listener is not None:
                self.listener.on_cells_emptied(run, cells)
            self._remove_empty_end(run)
            return
        if self.num_groups > 1:
            is_anchor = cells % self.num_groups == self.anchor
            if self.listener is not None:
                self.listener.on_cells_emptied(run, cells[~is_anchor])
            blocks = blocks[is_anchor]
        if len(blocks):
            length = run.length - len(blocks)
            assert run.blocks[self.anchor, length] == blocks[-1], "a block is evicted before the blocks behind it"
            self._shorten_run(run, length)

    def _clear_evicted(self) -> None:
        self._evicted.clear()
        self._num_evicted = 0

    def remove_block(self, block: int) -> None:
        """Remove one block. If it is the only anchor block of its node, the node is removed, too; the node must then be
        the last one of its run."""
        self._shorten_evicted_runs()
        run, cell = self._runs.get(int(self._run_of[block])), int(self._cell_of[block])
        self._run_of[block] = 0
        if run is not None:
            self._remove_block_of_cell(run, cell, block)

    def _remove_block_of_cell(self, run: Run, cell: int, block: int) -> None:
        index, group = divmod(cell, self.num_groups)
        if index >= run.length:  # the block's node is already removed
            return
        if cell in run.duplicates:
            self._drop_duplicate_block(run, cell, block)
            return
        if group == self.anchor:
            assert index == run.length - 1, f"block {block} leaves the prefix tree before the blocks behind it"
            self._shorten_run(run, index)
            return
        if self.listener is not None:
            self.listener.on_cells_emptied(run, np.array([cell]))
        if self.anchor is None:
            self._remove_empty_end(run)

    def remove_subtree(self, node: RunNode) -> list[int]:
        """Remove a node, and all nodes after it. Requests that continue after a removed node must publish no further
        blocks.

        Returns the removed blocks.
        """
        self._shorten_evicted_runs()
        run, index = node
        gone = list(self._collect_blocks_from(run, index))
        self._run_of[gone] = 0
        self._shorten_run(run, index)
        if self.anchor is None:
            self._remove_empty_end(run)
        return gone

    def clear(self) -> None:
        """Remove all nodes, and increment the epoch."""
        self._clear_evicted()
        self.num_duplicates = 0
        for run in self._runs.values():
            run.length = 0
        self._runs.clear()
        self._roots.clear()
        self._run_of[:] = 0
        self.epoch += 1
        if self.listener is not None:
            self.listener.on_tree_cleared()
        self.num_publications += 1

    def _drop_duplicate_block(self, run: Run, cell: int, block: int) -> None:
        """Remove one of several blocks with the content of one cell. A lookup may then find another of these blocks,
        which is referenced."""
        index, group = divmod(cell, self.num_groups)
        others = run.duplicates[cell]
        self.num_duplicates -= 1
        if run.blocks[group, index] == block:
            run.blocks = run.blocks.copy()
            run.blocks[group, index] = others.pop(0)
            self.num_replacements += 1
        else:
            others.remove(block)
        if not others:
            del run.duplicates[cell]
        self.num_publications += 1

    def _remove_empty_end(self, run: Run) -> None:
        """Without an anchor: remove the nodes at the end of a run that have no block and no child."""
        while True:
            held: Int64Array = np.flatnonzero(self._has_blocks(run, 0, run.length).any(axis=0))
            last = [held.item(-1) if len(held) else -1, *(index for index, _ in run.children)]
            if run.duplicates:  # the block in `run.blocks` may be evicted, and not replaced yet
                last += [cell // self.num_groups for cell in run.duplicates]
            length = max(last) + 1
            parent = run.parent
            self._shorten_run(run, length)
            if length or isinstance(parent, Root):
                return
            run = parent.run

    def _shorten_run(self, run: Run, length: int) -> None:
        if length >= run.length:
            return
        if self.listener is not None:
            self.listener.on_run_shortened(run, length)
        run.length = length
        if run.duplicates:  # duplicates in other groups, at nodes whose last anchor block is removed
            self._drop_duplicates(run, length)
        if length == 0:
            head = run.token_bytes[: self._block_bytes]
            if isinstance(run.parent, Root):
                del self._roots[run.parent, head]
            else:
                del run.parent.run.children[run.parent.at, head]
            del self._runs[run.run_id]
            run.blocks = run.blocks[:, :0].copy()
            run.token_bytes = head  # a reference to the run should not keep a long prompt in memory
        elif length < run.blocks.shape[1] // 2:  # nor should the short remainder of a run
            run.blocks = run.blocks[:, :length].copy()
            run.token_bytes = run.token_bytes[: length * self._block_bytes]

    def _drop_duplicates(self, run: Run, length: int) -> list[int]:
        """Remove a run's duplicates at nodes from `length` on, and return them."""
        dropped: list[int] = []
        for cell in [cell for cell in run.duplicates if cell >= length * self.num_groups]:
            dropped += run.duplicates.pop(cell)
        self.num_duplicates -= len(dropped)
        return dropped

    def _collect_blocks_from(self, run: Run, index: int) -> Iterator[int]:
        """All blocks of a run from node `index` on, and of all runs that follow these nodes; the runs that follow are
        removed."""
        count = run.length - index
        yield from run.blocks[:, index : run.length][self._has_blocks(run, index, count)].tolist()
        yield from self._drop_duplicates(run, index)
        for key in [key for key in run.children if key[0] >= index]:
            child = run.children.pop(key)
            yield from self._collect_blocks_from(child, 0)
            if self.listener is not None:
                self.listener.on_run_shortened(child, 0)
            child.length = 0
            del self._runs[child.run_id]

    # ------------------------------------------------------------------ reading

    def num_remaining_nodes(self, found: Found, is_held: BoolArray, is_referenced: BoolArray) -> int:
        """Number of leading nodes of `found` that would stay in the tree if only the blocks selected by two masks
        stayed cached. `is_held` [groups, nodes] selects blocks of the nodes of `found`; `is_referenced` [blocks]
        selects blocks of all other nodes."""
        if self.anchor is not None:
            return int(np.count_nonzero(is_held[self.anchor]))
        last = np.flatnonzero(is_held.any(axis=0))
        num_remaining, end = last.item(-1) + 1 if len(last) else 0, 0
        for number, (run, first, length) in enumerate(found.spans):
            on_path = found.spans[number + 1].run if number + 1 < len(found.spans) else None
            if self._has_referenced_block(run, first + length, is_referenced):
                num_remaining = max(num_remaining, end + length)
            for (index, _), child in run.children.items():
                if (
                    first <= index < first + length
                    and child is not on_path
                    and self._has_referenced_block(child, 0, is_referenced)
                ):
                    num_remaining = max(num_remaining, end + index - first + 1)
            end += length
        return num_remaining

    def _has_referenced_block(self, run: Run, start: int, is_referenced: BoolArray) -> bool:
        """Whether a run has a referenced block at a node from `start` on, or a run that follows these nodes has one."""
        blocks = run.blocks[:, start : run.length][self._has_blocks(run, start, run.length - start)].tolist()
        others = [other for cell, other in run.duplicates.items() if cell >= start * self.num_groups]
        if np.count_nonzero(is_referenced[[*blocks, *chain(*others)]]):
            return True
        children = [child for (index, _), child in run.children.items() if index >= start]
        return any(self._has_referenced_block(child, 0, is_referenced) for child in children)

    def is_alive(self, node: Node) -> bool:
        """Whether a node is still in the tree, so that blocks may be published after it."""
        self._shorten_evicted_runs()
        return isinstance(node, Root) or node.is_alive

    def is_cached(self, block: int) -> bool:
        """Whether a lookup can find the block."""
        self._shorten_evicted_runs()
        run = self._runs.get(int(self._run_of[block]))
        return run is not None and int(self._cell_of[block]) < run.length * self.num_groups

    def node_of(self, block: int) -> tuple[RunNode, int]:
        """(node, group) of a cached block."""
        self._shorten_evicted_runs()
        index, group = divmod(int(self._cell_of[block]), self.num_groups)
        return RunNode(self._runs[int(self._run_of[block])], index), group

    def group_of(self, block: int) -> int:
        """The group of a cached block; for a block that is not cached, the group in which it was last published."""
        return int(self._cell_of[block]) % self.num_groups

    def is_in_cell(self, block: int, run: Run, cell: int) -> bool:
        """Whether a block still belongs to the cell `cell` of `run`."""
        return bool(self._run_of[block] == run.run_id and self._cell_of[block] == cell)

    def blocks(self) -> list[int]:
        """For checks: all blocks that are reachable from the roots; a block that is reached several times occurs
        several times."""
        self._shorten_evicted_runs()
        found: list[int] = []
        runs = list(self._roots.values())
        while runs:
            run = runs.pop()
            found += run.blocks[:, : run.length][self._has_blocks(run, 0, run.length)].tolist()
            for cell, others in run.duplicates.items():
                found += others if cell < run.length * self.num_groups else [-1]
            runs += [child for (index, _), child in run.children.items() if index < run.length]
        return found

    def content_of(self, block: int) -> tuple[Root, bytes]:
        """For checks: the root of a cached block, and all tokens of its sequence up to the block's end, as bytes."""
        (run, index), _ = self.node_of(block)
        parts = [run.token_bytes[: (index + 1) * self._block_bytes]]
        while not isinstance(run.parent, Root):
            run, index = run.parent
            parts.append(run.token_bytes[: (index + 1) * self._block_bytes])
        return run.parent, b"".join(reversed(parts))
