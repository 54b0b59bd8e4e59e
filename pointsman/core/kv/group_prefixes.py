"""Which blocks hold the prefix of a sequence, where each group of layers has blocks of its own?

A node is one full block of tokens after a given prefix; it is found by (the node before it, its own token bytes), the
first by its `Root`. The key is the content itself, as in `prefix_tree.py`. At a node each kind of group may have
entries: one block for each group of the kind, all with that content. Unlike there, what is cached of a sequence need
not be its beginning: groups with a window give back blocks while their request runs.

    sequence    [b0] --- [b1] --- [b2] --- [b3]
    full         7        8        9        10
    window                         21       22         what lay behind the window was evicted

A node exists while a node after it does, an entry that names it, or a request that continues after it: those refer to
it, and the index of nodes does not keep it. So nothing has to be tidied up when blocks are evicted: an evicted block is
no longer marked as cached in the pool, which a lookup asks, and its entry is dropped when the block gets other content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.prefix_tree import TOKEN_BYTES, Root

Int64Array = npt.NDArray[np.int64]


class GroupNode:
    """A block of tokens after a prefix."""

    __slots__ = ("__weakref__", "entries", "number", "parent")

    def __init__(self, number: int, parent: GroupNode | None, num_kinds: int) -> None:
        self.number = number
        self.parent = parent
        """None: it is a root, before the first token."""
        self.entries: list[tuple[Entry, ...]] = [()] * num_kinds
        """By kind: several where requests computed the content in parallel, some of them maybe evicted."""


class Entry:
    """Blocks with the content of a node, one for each group of a kind."""

    __slots__ = ("blocks", "kind", "node")

    def __init__(self, node: GroupNode, kind: int, blocks: list[int]) -> None:
        self.node = node
        self.kind = kind
        self.blocks = blocks


class GroupPrefixes:
    """The nodes over the blocks of one pool, with entries of `num_kinds` kinds.

    Args:
        is_cached: [blocks] bool, of the pool: whether a block still has the content that it was entered with.
    """

    def __init__(self, block_size: int, num_kinds: int, is_cached: npt.NDArray[np.bool_]) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._num_kinds = num_kinds
        self._is_cached = is_cached
        self._roots: WeakValueDictionary[Root, GroupNode] = WeakValueDictionary()
        self._nodes: WeakValueDictionary[tuple[int, bytes], GroupNode] = WeakValueDictionary()
        self._entry_of: list[Entry | None] = [None] * len(is_cached)  # by block; of an evicted one the former
        self._next_number = 0
        self.epoch = 0
        """Incremented by `clear`: KV of another epoch is invalid."""
        self.has_duplicates = False
        """Whether there ever were several entries of a kind at a node."""

    # ------------------------------------------------------------------ nodes

    def root(self, root: Root) -> GroupNode:
        """The node before the first token."""
        node = self._roots.get(root)
        if node is None:
            node = self._roots[root] = self._new_node(None)
        return node

    def find(self, root: Root, token_bytes: bytes, max_blocks: int, kind: int | None) -> list[GroupNode]:
        """The nodes of a sequence, one after the other, of at most `max_blocks`; as far as all have entries of
        `kind`."""
        node, size, get = self._roots.get(root), self._block_bytes, self._nodes.get
        nodes: list[GroupNode] = []
        if node is None:
            return nodes
        for start in range(0, max_blocks * size, size):
            node = get((node.number, token_bytes[start : start + size]))
            if node is None or (kind is not None and not node.entries[kind]):
                break
            nodes.append(node)
        return nodes

    def extend(self, node: GroupNode, token_bytes: bytes, first: int, end: int) -> list[GroupNode]:
        """The nodes of blocks `first` to `end` - 1 of a sequence, after that of block `first` - 1; made if need be."""
        size, nodes = self._block_bytes, self._nodes
        found = []
        for start in range(first * size, end * size, size):
            key = (node.number, token_bytes[start : start + size])
            after = nodes.get(key)
            if after is None:
                after = nodes[key] = self._new_node(node)
            found.append(after)
            node = after
        return found

    def _new_node(self, parent: GroupNode | None) -> GroupNode:
        self._next_number += 1
        return GroupNode(self._next_number, parent, self._num_kinds)

    # ------------------------------------------------------------------ entries

    def blocks(self, nodes: list[GroupNode], kind: int, num_groups: int) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """[nodes, num_groups] the blocks of a kind at each node, and [nodes] whether it has any."""
        held = [node.entries[kind] for node in nodes]
        if self.has_duplicates:
            held = [self._first_valid(entries) for entries in held]
        nothing = [0] * num_groups
        blocks = np.array([entries[0].blocks if entries else nothing for entries in held], dtype=np.int64)
        blocks = blocks.reshape(len(nodes), num_groups)
        has = np.fromiter(map(bool, held), dtype=np.bool_, count=len(held))
        has &= self._is_cached[blocks].all(axis=1)
        return blocks, has

    def _first_valid(self, entries: tuple[Entry, ...]) -> tuple[Entry, ...]:
        if len(entries) < 2:
            return entries
        return tuple([entry for entry in entries if self.is_valid(entry)][:1])

    def is_valid(self, entry: Entry) -> bool:
        """Whether none of its blocks was evicted, or is other content now."""
        return all(self._entry_of[block] is entry and self._is_cached.item(block) for block in entry.blocks)

    def enter(self, node: GroupNode, kind: int, blocks: list[int]) -> Entry:
        """These blocks have the content of a node from now on."""
        entry = Entry(node, kind, blocks)
        for block in blocks:
            former = self._entry_of[block]
            if former is not None:
                self._drop(former)
            self._entry_of[block] = entry
        others = node.entries[kind]
        if others:
            others = tuple([other for other in others if self.is_valid(other)])
        node.entries[kind] = (*others, entry)
        self.has_duplicates |= len(others) > 0
        return entry

    def remove(self, entry: Entry) -> list[int]:
        """A lookup no longer finds these blocks. Returns those that it found until now."""
        self._drop(entry)
        mine = [block for block in entry.blocks if self._entry_of[block] is entry]
        for block in mine:
            self._entry_of[block] = None
        return [block for block in mine if self._is_cached.item(block)]

    def _drop(self, entry: Entry) -> None:
        """Take an entry from its node; of the blocks of its other groups nothing is found any more either."""
        entries = entry.node.entries
        entries[entry.kind] = tuple([other for other in entries[entry.kind] if other is not entry])

    def entries(self) -> Iterator[Entry]:
        """Every entry that a block names, evicted ones included; each once for each of its blocks."""
        return (entry for entry in self._entry_of if entry is not None)

    def clear(self) -> None:
        """Remove everything, and increment the epoch."""
        self._roots, self._nodes = WeakValueDictionary(), WeakValueDictionary()
        self._entry_of = [None] * len(self._entry_of)
        self.has_duplicates = False
        self.epoch += 1

    # ------------------------------------------------------------------ questions

    def entry_of(self, block: int) -> Entry | None:
        """What a cached block was entered as."""
        return self._entry_of[block]


class Descendants:
    """Which nodes are these, or after one of them? In time of the number of different nodes."""

    def __init__(self, nodes: Iterable[GroupNode]) -> None:
        self._known: dict[GroupNode, bool] = dict.fromkeys(nodes, True)

    def __contains__(self, node: GroupNode) -> bool:
        path: list[GroupNode] = []
        at: GroupNode | None = node
        while at is not None and at not in self._known:
            path.append(at)
            at = at.parent
        answer = at is not None and self._known[at]
        self._known.update(dict.fromkeys(path, answer))
        return answer
