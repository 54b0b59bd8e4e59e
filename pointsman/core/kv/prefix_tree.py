"""Which blocks hold the longest cached prefix of a sequence? An exact prefix tree over full KV blocks.

A node is one full block of tokens after a given prefix. It is found by (node before it, its own token bytes); the
first node of a sequence by (`Root`, its token bytes), where a root is a tuple of everything else that must be equal
for KV to be shared. The key is the content itself, never a digest, so no collision can give a request another's KV.

Nodes are kept in runs: the consecutive blocks of one publication. Inside a run a node's successor is the next one;
every other successor starts a run of its own, listed under the node it follows. So publishing, finding and evicting a
prompt cost a few operations per run and a comparison of bytes, whatever its number of blocks.

    Run 1  [b0 b1 b2 b3]            a prompt of four blocks
                |
    Run 2       +-- [c0 c1]         another prompt that shares its first two blocks

A run only shrinks, from its end, and is never refilled, so a stale node cannot be mistaken for a new one. Several
blocks may hold the content of one node (requests that computed it in parallel): the run lists one of them, its
`duplicates` the others, and the node is removed with the last.

    _run_of, _index_of   int64 [B]   for each cached block its run's id (0: not cached) and its index in the run

An evicted block leaves `_run_of` at once, but runs are shortened later, in batches: at the latest when something is
published after a node that may be gone. Until then the tree holds nodes that no lookup returns.

Children are removed before their parents. A request that holds a block of a node holds a block of every node before
it, and releases its table from the end, so of the free blocks those of a child are always less recently used; a failed
step removes its blocks newest first; and `prune` removes a node with everything after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.block_pool import NO_BLOCKS
from pointsman.core.state.inputs import Adapter
from pointsman.core.state.numbers import ZERO

if TYPE_CHECKING:
    from pointsman.core.state.request import Request
from pointsman.core.state.sealed import new_tuple

Int64Array = npt.NDArray[np.int64]
_MAX_EVICTED = 4096  # blocks whose runs are shortened together, which bounds how long that takes
TOKEN_BYTES = np.dtype(np.int32).itemsize


class Root(NamedTuple):
    """What must be equal, apart from the tokens, for two requests to share KV."""

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
    """Consecutive blocks of one publication."""

    __slots__ = ("blocks", "children", "duplicates", "length", "parent", "run_id", "token_bytes")

    def __init__(self, run_id: int, parent: Node, token_bytes: bytes, blocks: Int64Array) -> None:
        self.run_id = run_id
        self.parent = parent
        self.token_bytes = token_bytes
        self.blocks = blocks  # maybe in the publisher's own memory, so it is never written to
        self.length = len(blocks)
        """Remaining nodes; 0: the run is gone."""
        self.children: dict[tuple[int, bytes], Run] = {}
        """Runs that start after one of its nodes, by (that node's index, their first block's token bytes)."""
        self.duplicates: dict[int, list[int]] = {}
        """Further blocks with the content of a node, by its index."""


class Place(NamedTuple):
    """A node: its run, and its index in the run."""

    run: Run
    at: int

    @property
    def is_alive(self) -> bool:
        return self.at < self.run.length


Node: TypeAlias = "Place | Root"


class Span(NamedTuple):
    """Consecutive nodes of a run."""

    run: Run
    first: int
    length: int


class RunListener(Protocol):
    """Is called when runs enter and leave the tree."""

    def added(self, run: Run, request: Request, first: int) -> None:
        """A request's blocks from `first` on entered the tree, as a run."""

    def shrunk(self, run: Run, length: int) -> None:
        """Only the first `length` blocks of a run remain in the tree."""

    def cleared(self) -> None:
        """The tree is empty."""


class PrefixCache:
    """The tree over the blocks of one pool of `num_blocks` blocks of `block_size` tokens."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._roots: dict[tuple[Root, bytes], Run] = {}
        self._runs: dict[int, Run] = {}
        self._run_of: Int64Array = np.zeros(num_blocks, dtype=np.int64)
        self._index_of: Int64Array = np.zeros(num_blocks, dtype=np.int64)
        self._counting: Int64Array = np.arange(num_blocks, dtype=np.int64)
        self._next_run_id = 1
        self.epoch = 0
        """Incremented by `clear`: KV of another epoch is invalid."""
        self.num_publications = 0
        """Changes whenever a lookup may find more than before."""
        self.num_replacements = 0
        """Changes whenever a lookup finds another block with the same content in place of one that is gone."""
        self.listener: RunListener | None = None
        self._evicted: list[tuple[Int64Array, Int64Array]] = []  # blocks, and their runs, not shortened yet
        self._num_evicted = 0
        self.num_duplicates = 0
        """Cached blocks beyond the first with the same content."""

    def __len__(self) -> int:
        """Nodes in the tree."""
        self._settle()
        return sum(run.length for run in self._runs.values())

    # ------------------------------------------------------------------ finding

    def look_up(self, root: Root, token_bytes: bytes, max_blocks: int) -> tuple[Int64Array, Node]:
        """The longest cached prefix of a sequence, at most `max_blocks` blocks.

        Returns its blocks, in order, and the node of the last one (`root` if there is none).
        """
        parts: list[Int64Array] = []
        num_found = 0
        node: Node = root
        while num_found < max_blocks:
            span = self._successors(node, token_bytes, num_found, max_blocks)
            if span is None:
                break
            run, first, count = span
            blocks = run.blocks[first : first + count]
            if self._evicted:  # no other block holds the content of an evicted one
                count = int(np.count_nonzero(self._run_of[blocks] == run.run_id))
                if count == 0:
                    break
                blocks = blocks[:count]
            parts.append(blocks)
            num_found += count
            node = Place(run, first + count - 1)
        if not parts:
            return NO_BLOCKS, root
        return parts[0] if len(parts) == 1 else np.concatenate(parts), node

    def _successors(self, node: Node, token_bytes: bytes, start: int, end: int) -> Span | None:
        """The nodes after `node` that hold blocks `start` to at most `end` - 1 of a sequence, within one run."""
        size = self._block_bytes
        if isinstance(node, Root):
            child = self._roots.get((node, token_bytes[start * size : (start + 1) * size]))
        else:
            run, index = node
            if index + 1 < run.length:
                count = self._num_equal(run, index + 1, token_bytes, start, end)
                if count:
                    return Span(run, index + 1, count)
            if not run.children:
                return None
            child = run.children.get((index, token_bytes[start * size : (start + 1) * size]))
        return None if child is None else Span(child, 0, self._num_equal(child, 0, token_bytes, start, end))

    def _num_equal(self, run: Run, first: int, token_bytes: bytes, start: int, end: int) -> int:
        """Number of nodes of `run` from `first` on that hold the blocks of a sequence from `start` on."""
        size = self._block_bytes
        count = min(run.length - first, end - start)
        held = run.token_bytes[first * size : (first + count) * size]
        wanted = token_bytes[start * size : (start + count) * size]
        if held == wanted:
            return count
        differs = np.frombuffer(held, dtype=np.int32) != np.frombuffer(wanted, dtype=np.int32)
        return int(differs.argmax()) * TOKEN_BYTES // size

    # ------------------------------------------------------------------ publishing

    def publish(self, node: Node, token_bytes: bytes, first: int, blocks: Int64Array, request: Request) -> list[Span]:
        """Add blocks `first`, `first` + 1, ... of a sequence after `node`, that of block `first` - 1.

        They are reported to the listener as blocks of `request`.

        Returns their nodes; the next publication continues after the last one. Nodes that exist already get these
        blocks as duplicates, the remaining blocks become a run.
        """
        spans: list[Span] = []
        start, end = first, first + len(blocks)
        self.num_publications += 1
        while start < end:
            span = self._successors(node, token_bytes, start, end)
            if span is not None and self._evicted:
                self._settle()
                span = self._successors(node, token_bytes, start, end)
            if span is None:
                spans.append(self._add_run(node, token_bytes, start, end, blocks[start - first :], request))
                break
            self._add_duplicates(span, blocks[start - first : start - first + span.length])
            spans.append(span)
            node = Place(span.run, span.first + span.length - 1)
            start += span.length
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
        self._run_of[blocks] = run_id
        self._index_of[blocks] = self._counting[:length]
        if self.listener is not None:
            self.listener.added(run, request, start)
        return new_tuple(Span, (run, 0, length))

    def _add_duplicates(self, span: Span, blocks: Int64Array) -> None:
        run, first, count = span
        for index, block in enumerate(blocks.tolist(), start=first):
            run.duplicates.setdefault(index, []).append(block)
        self.num_duplicates += count
        self._run_of[blocks] = run.run_id
        self._index_of[blocks] = self._counting[first : first + count]

    # ------------------------------------------------------------------ forgetting

    def evict(self, blocks: Int64Array) -> None:
        """Remove blocks whose content is evicted, least recently used first."""
        self._evicted.append((blocks, self._run_of[blocks]))
        self._run_of[blocks] = ZERO
        self._num_evicted += len(blocks)
        # A listener is called at once; and a lookup may find another block in place of a duplicate.
        if self.num_duplicates or self.listener is not None or self._num_evicted > _MAX_EVICTED:
            self._settle()

    def _settle(self) -> None:
        """Shorten the runs of evicted blocks."""
        if not self._evicted:
            return
        blocks, runs = self._evicted[0]
        if len(self._evicted) > 1:
            blocks = np.concatenate([blocks for blocks, _ in self._evicted])
            runs = np.concatenate([runs for _, runs in self._evicted])
        self._clear_evicted()
        lasts = [*(runs[1:] != runs[:-1]).nonzero()[0].tolist(), len(blocks) - 1]  # another run begins after each
        start = 0
        for last, run_id, block in zip(lasts, runs[lasts].tolist(), blocks[lasts].tolist(), strict=True):
            run = self._runs[run_id]
            if run.duplicates:
                for each in blocks[start : last + 1].tolist():
                    self._leave(run, int(self._index_of[each]), each)
            else:
                length = run.length - (last + 1 - start)
                assert run.blocks[length] == block, "a block is evicted before what follows it"
                self._shrink(run, length)
            start = last + 1

    def _clear_evicted(self) -> None:
        self._evicted.clear()
        self._num_evicted = 0

    def forget(self, block: int) -> None:
        """Remove one block. If no other block holds its content, so is the node: it must be the last of its run."""
        run, index = self.place_of(block)
        self._run_of[block] = 0
        self._leave(run, index, block)

    def _leave(self, run: Run, index: int, block: int) -> None:
        if index in run.duplicates:
            self._drop_one(run, index, block)
        else:
            assert index == run.length - 1, f"block {block} leaves the prefix tree before what follows it"
            self._shrink(run, index)

    def prune(self, block: int) -> list[int]:
        """Remove the node of a block, with all its duplicates, and everything after it.

        Returns the removed blocks. Requests that continue after a removed node must publish no more.
        """
        run, index = self.place_of(block)
        gone = list(self._blocks_behind(run, index))
        self._run_of[gone] = 0
        self._shrink(run, index)
        return gone

    def clear(self) -> None:
        """Remove everything, and increment the epoch."""
        self._clear_evicted()
        self.num_duplicates = 0
        for run in self._runs.values():
            run.length = 0
        self._runs.clear()
        self._roots.clear()
        self._run_of[:] = 0
        self.epoch += 1
        if self.listener is not None:
            self.listener.cleared()
        self.num_publications += 1

    def _drop_one(self, run: Run, index: int, block: int) -> None:
        """Remove one of several blocks of a node. A lookup may then find one that is referenced."""
        others = run.duplicates[index]
        self.num_duplicates -= 1
        if run.blocks[index] == block:
            run.blocks = run.blocks.copy()
            run.blocks[index] = others.pop(0)
            self.num_replacements += 1
        else:
            others.remove(block)
        if not others:
            del run.duplicates[index]
        self.num_publications += 1

    def _shrink(self, run: Run, length: int) -> None:
        if self.listener is not None:
            self.listener.shrunk(run, length)
        run.length = length
        if length == 0:
            head = run.token_bytes[: self._block_bytes]
            if isinstance(run.parent, Root):
                del self._roots[run.parent, head]
            else:
                del run.parent.run.children[run.parent.at, head]
            del self._runs[run.run_id]
            run.blocks, run.token_bytes = NO_BLOCKS, head  # a reference to it should not keep a long prompt in memory
        elif length < len(run.blocks) // 2:  # nor should a short remainder
            run.blocks = run.blocks[:length].copy()
            run.token_bytes = run.token_bytes[: length * self._block_bytes]

    def _blocks_behind(self, run: Run, index: int) -> Iterator[int]:
        """All blocks of a run from a node on, and of the runs after those nodes, which are marked as gone."""
        yield from run.blocks[index : run.length].tolist()
        for at in [at for at in run.duplicates if at >= index]:
            others = run.duplicates.pop(at)
            self.num_duplicates -= len(others)
            yield from others
        for key in [key for key in run.children if key[0] >= index]:
            child = run.children.pop(key)
            yield from self._blocks_behind(child, 0)
            if self.listener is not None:
                self.listener.shrunk(child, 0)
            child.length = 0
            del self._runs[child.run_id]

    # ------------------------------------------------------------------ questions

    def is_cached(self, block: int) -> bool:
        """Whether a lookup can find the block."""
        return bool(self._run_of[block])

    def place_of(self, block: int) -> Place:
        """The node whose content a cached block holds."""
        self._settle()
        return Place(self._runs[int(self._run_of[block])], int(self._index_of[block]))

    def holds(self, block: int, run: Run, index: int) -> bool:
        """Whether a block (still) belongs to a node."""
        return bool(self._run_of[block] == run.run_id and self._index_of[block] == index)

    def blocks(self) -> list[int]:
        """For checks: all blocks that are reachable from the roots, each as often as it is reached."""
        self._settle()
        found: list[int] = []
        runs = list(self._roots.values())
        while runs:
            run = runs.pop()
            found += run.blocks[: run.length].tolist()
            for index, others in run.duplicates.items():
                found += others if index < run.length else [-1]
            runs += [child for (index, _), child in run.children.items() if index < run.length]
        return found

    def content(self, block: int) -> tuple[Root, bytes]:
        """For checks: the root of a cached block and all tokens up to its end, as bytes."""
        run, index = self.place_of(block)
        parts = [run.token_bytes[: (index + 1) * self._block_bytes]]
        while not isinstance(run.parent, Root):
            run, index = run.parent
            parts.append(run.token_bytes[: (index + 1) * self._block_bytes])
        return run.parent, b"".join(reversed(parts))
