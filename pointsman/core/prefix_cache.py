"""An exact prefix tree over full KV blocks.

A full block is found by (parent node, the block's own token bytes). The parent of a first block is a `Root`, a tuple
of whatever must be equal for KV to be shared. Because the key is the content itself, never a digest of it, no
collision can hand one request another's KV.

A node is an identity, not a block: ids count up and are never reused, so a stale parent cannot be mistaken for a new
one. Several blocks may hold the content of one node (requests that computed it in parallel): the dictionary names
one of them, `_duplicates` the others, and the node leaves with its last block.

    _block_of   (parent, bytes) -> block     one resident block of each node
    _key_of     [B] key of each cached block, None otherwise
    _node_of    [B] node id of each cached block, 0 otherwise

Children leave before their parents: tables are released from the end, blocks are evicted least recently used first, and
a failed step takes its blocks out newest first. Look-up, publication and eviction cost O(1) per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

TOKEN_BYTES = np.dtype(np.int32).itemsize


class Root(NamedTuple):
    """What must be equal, apart from the tokens, for two requests to share KV."""

    cache_salt: str | None = None


Parent: TypeAlias = "int | Root"
Key: TypeAlias = "tuple[Parent, bytes]"


class PrefixCache:
    """The tree over the blocks of one pool of `num_blocks` blocks of `block_size` tokens."""

    __slots__ = (
        "_block_bytes",
        "_block_of",
        "_duplicates",
        "_key_of",
        "_next_node",
        "_node_of",
        "epoch",
        "num_publications",
    )

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._block_of: dict[Key, int] = {}
        self._duplicates: dict[int, list[int]] = {}
        self._key_of: list[Key | None] = [None] * num_blocks
        self._node_of = [0] * num_blocks
        self._next_node = 1
        self.epoch = 0
        """Raised by `clear`: KV of another epoch is of no use."""
        self.num_publications = 0
        """Changes whenever a look-up could find more than before."""

    def __len__(self) -> int:
        """Nodes in the tree."""
        return len(self._block_of)

    def look_up(self, root: Root, token_bytes: bytes, max_blocks: int) -> tuple[list[int], Parent]:
        """The longest cached prefix of a sequence, at most `max_blocks` blocks.

        Returns its blocks, in order, and the node of the last one (`root` if there is none).
        """
        size = self._block_bytes
        find = self._block_of.get
        node_of = self._node_of
        blocks: list[int] = []
        parent: Parent = root
        for start in range(0, max_blocks * size, size):
            block = find((parent, token_bytes[start : start + size]))
            if block is None:
                break
            blocks.append(block)
            parent = node_of[block]
        return blocks, parent

    def publish(self, parent: Parent, token_bytes: bytes, first: int, blocks: list[int]) -> list[int]:
        """Make blocks `first`, `first` + 1, ... of a sequence known, under the node of block `first` - 1.

        Returns their nodes; the last one is the parent for the next publication.
        """
        size = self._block_bytes
        key_of, node_of, setdefault = self._key_of, self._node_of, self._block_of.setdefault
        start = first * size
        nodes: list[int] = []
        for block in blocks:
            key = (parent, token_bytes[start : start + size])
            start += size
            resident = setdefault(key, block)
            if resident == block:
                node = self._next_node
                self._next_node = node + 1
            else:
                node = node_of[resident]
                self._duplicates.setdefault(node, []).append(block)
            key_of[block] = key
            node_of[block] = node
            nodes.append(node)
            parent = node
        self.num_publications += 1
        return nodes

    def evict(self, blocks: list[int]) -> None:
        """Take out blocks whose content is given up: `forget` for many, each in the tree."""
        key_of, node_of, block_of, duplicates = self._key_of, self._node_of, self._block_of, self._duplicates
        for block in blocks:
            if node_of[block] in duplicates:
                self.forget(block)
                continue
            key = key_of[block]
            assert key is not None
            del block_of[key]
            key_of[block] = None
            node_of[block] = 0

    def forget(self, block: int) -> bool:
        """Take one block out. True: no other block holds its content, so its node is gone too."""
        key, node = self._key_of[block], self._node_of[block]
        assert key is not None, f"block {block} is not in the prefix tree"
        self._key_of[block] = None
        self._node_of[block] = 0
        others = self._duplicates.get(node)
        if others is None:
            del self._block_of[key]
            return True
        if self._block_of[key] == block:
            self._block_of[key] = others.pop(0)
        else:
            others.remove(block)
        if not others:
            del self._duplicates[node]
        return False

    def clear(self) -> None:
        """Forget everything, and raise the epoch."""
        for block in self.blocks():
            self._key_of[block] = None
            self._node_of[block] = 0
        self._block_of.clear()
        self._duplicates.clear()
        self.epoch += 1
        self.num_publications += 1

    def node_of(self, block: int) -> int:
        """The node whose content a block holds, 0 if it is not in the tree."""
        return self._node_of[block]

    def parent_of(self, block: int) -> Parent | None:
        """The node that a cached block's content follows, None if the block is not in the tree."""
        key = self._key_of[block]
        return None if key is None else key[0]

    def blocks(self) -> list[int]:
        """All blocks in the tree."""
        return [*self._block_of.values(), *(block for others in self._duplicates.values() for block in others)]

    def unreachable_blocks(self) -> list[int]:
        """For checks: blocks that no look-up can find any more (a promise says: none)."""
        nodes = {self._node_of[block] for block in self._block_of.values()}
        return [block for block in self.blocks() if not self._is_reachable(block, nodes)]

    def _is_reachable(self, block: int, nodes: set[int]) -> bool:
        key = self._key_of[block]
        if key is None or self._node_of[block] == 0:
            return False
        resident = self._block_of.get(key)
        if resident is None or self._node_of[resident] != self._node_of[block]:
            return False
        return isinstance(key[0], Root) or key[0] in nodes


def keys_agree(
    cache: PrefixCache, blocks: Iterable[int], root: Root, token_bytes: npt.NDArray[np.uint8] | bytes
) -> bool:
    """For checks: whether the cached ones among a table's blocks are keyed by just the tokens they hold."""
    data = bytes(token_bytes)
    size = cache._block_bytes
    parent: Parent | None = root
    for index, block in enumerate(blocks):
        key = cache._key_of[block]
        if key is None:
            parent = None  # whatever follows has a parent that is not in this table
            continue
        if key[1] != data[index * size : (index + 1) * size] or (parent is not None and key[0] != parent):
            return False
        parent = cache._node_of[block]
    return True
