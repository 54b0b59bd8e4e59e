"""The physical KV blocks: who holds each, and which are free.

Layout, with B = num_blocks:

    num_references  int32 [B]   block-table entries that name the block; 0: free
    is_cached       bool  [B]   the block's content can be found in the prefix tree

    reserved | referenced            | blank (a stack)   | cached free (least recently used first)
    ids 0..r | num_references > 0    | content worthless | content can still be found

A free block is in exactly one of the last two. Blank blocks are handed out first, then the least recently
used cached one, whose content is thereby lost. A table is released from its end, so that a prefix outlives its
suffix. `take` and `release` are O(blocks moved); nothing grows with the pool.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
_NONE: list[int] = []


class BlockPool:
    """`num_blocks` blocks, of which ids 0 to `num_reserved_blocks` - 1 are never handed out."""

    __slots__ = ("_blank", "_cached", "_num_blank", "is_cached", "num_blocks", "num_references", "num_reserved_blocks")

    def __init__(self, num_blocks: int, num_reserved_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_reserved_blocks = num_reserved_blocks
        self.num_references: Int32Array = np.zeros(num_blocks, dtype=np.int32)
        self.is_cached = np.zeros(num_blocks, dtype=np.bool_)
        # The top of the stack is the end: low ids are handed out first.
        self._blank: Int32Array = np.arange(num_blocks - 1, num_reserved_blocks - 1, -1, dtype=np.int32)
        self._num_blank = num_blocks - num_reserved_blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Blocks that `take` could hand out."""
        return self._num_blank + len(self._cached)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - self.num_reserved_blocks

    @property
    def num_cached_free(self) -> int:
        """Free blocks whose content can still be found."""
        return len(self._cached)

    def take(self, count: int) -> tuple[Int32Array, list[int]]:
        """Hand out `count` blocks, each with one reference.

        Returns the block ids (int32 [count]) and those among them that were cached, whose content the prefix
        tree must forget. The caller has checked that `count <= num_free`.
        """
        num_blank = self._num_blank
        if count <= num_blank:
            self._num_blank = num_blank - count
            blocks = self._blank[num_blank - count : num_blank][::-1].copy()
            evicted = _NONE
        else:
            pop = self._cached.popitem
            evicted = [pop(last=False)[0] for _ in range(count - num_blank)]
            self._num_blank = 0
            blocks = np.concatenate([self._blank[:num_blank][::-1], np.array(evicted, dtype=np.int32)])
        self.num_references[blocks] = 1
        return blocks, evicted

    def acquire(self, blocks: list[int]) -> None:
        """Add a reference to blocks found in the prefix tree (distinct ids)."""
        references = self.num_references
        ids = np.array(blocks, dtype=np.int64)
        for block in ids[references[ids] == 0].tolist():
            del self._cached[block]
        references[ids] += 1

    def release(self, blocks: Int32Array) -> None:
        """Drop one reference from each block of a table (distinct ids, in table order)."""
        references = self.num_references
        left = references[blocks] - 1
        references[blocks] = left
        freed = blocks[left == 0][::-1]
        cached = self.is_cached[freed]
        if cached.any():
            lru = self._cached
            for block in freed[cached].tolist():
                lru[block] = None
            freed = freed[~cached]
        end = self._num_blank + len(freed)
        self._blank[self._num_blank : end] = freed
        self._num_blank = end

    def set_cached(self, blocks: Int32Array) -> None:
        """The content of these referenced blocks can now be found."""
        self.is_cached[blocks] = True

    def uncache(self, block: int) -> None:
        """The prefix tree forgot the block: if it is free, it becomes blank."""
        self.is_cached[block] = False
        if block in self._cached:
            del self._cached[block]
            self._blank[self._num_blank] = block
            self._num_blank += 1

    def uncache_all(self) -> None:
        """The prefix tree forgot every block."""
        self.is_cached[:] = False
        freed = list(self._cached)
        self._cached.clear()
        self._blank[self._num_blank : self._num_blank + len(freed)] = freed
        self._num_blank += len(freed)

    def num_in_use(self, blocks: list[int]) -> int:
        """How many of these blocks somebody holds."""
        return int(np.count_nonzero(self.num_references[np.array(blocks, dtype=np.int64)])) if blocks else 0

    def blank_blocks(self) -> list[int]:
        """For checks: the blank blocks, in no promised order."""
        return [int(block) for block in self._blank[: self._num_blank]]

    def cached_free_blocks(self) -> list[int]:
        """For checks: the cached free blocks, least recently used first."""
        return list(self._cached)
