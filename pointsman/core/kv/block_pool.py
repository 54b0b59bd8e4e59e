"""Block pool: allocates physical KV blocks, and evicts cached ones, least recently used first.

Layout, with B = num_blocks:

    num_references  int64 [B]   block-table entries with the block; 0: free
    is_cached       bool  [B]   whether a lookup in the prefix tree can find the block
    _segment_of     int64 [B]   for a cached free block, the number of its segment in the queue

    reserved | referenced            | blank (a stack)   | cached free (a queue, least recently used first)
    ids 0..r | num_references > 0    | content worthless | content can still be found

A free block is either blank or cached. Blank blocks are allocated first, then the least recently used cached blocks,
whose content is evicted. A table is released from its end, so that a prefix outlives its suffix.

Block ids are int64 in this module, because NumPy indexing with another integer type takes ten times as long.

The queue of cached free blocks consists of segments, one for each released table, so that a table is released or
evicted by a few array operations. A reused block is not removed from its segment: `_segment_of` of the block no longer
names the segment, and the stale entry is skipped when it reaches the front of the queue. When stale entries outnumber
the pool, the queue is compacted. The pool counts the entries at the front of the queue that are known to be valid, so
that allocating a few blocks takes one slice.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from pointsman.core.state.numbers import FALSE, ONE, TRUE, ZERO, set_writeable

Int64Array = npt.NDArray[np.int64]
NO_BLOCKS: Int64Array = np.zeros(0, dtype=np.int64)
set_writeable(NO_BLOCKS, False)


_SKIM = 1024  # number of queue entries tested for staleness at a time


class _Segment:
    """Entries of the queue of cached free blocks that were released together."""

    __slots__ = ("ids", "number")

    def __init__(self, number: int, ids: Int64Array) -> None:
        self.number = number
        self.ids = ids


class BlockPool:
    """A pool of `num_blocks` blocks. Ids 0 to `num_reserved_blocks` - 1 are never allocated."""

    def __init__(self, num_blocks: int, num_reserved_blocks: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_reserved_blocks = num_reserved_blocks
        self.num_usable = num_blocks - num_reserved_blocks
        self.num_references: Int64Array = np.zeros(num_blocks, dtype=np.int64)
        self.is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, dtype=np.bool_)
        # The top of the stack is the end: low ids are allocated first.
        self._blank: Int64Array = np.arange(num_blocks - 1, num_reserved_blocks - 1, -1, dtype=np.int64)
        self._num_blank = num_blocks - num_reserved_blocks
        self._segments: deque[_Segment] = deque()
        self._segment_of: npt.NDArray[np.int64] = np.zeros(num_blocks, dtype=np.int64)
        self._next_segment = 1
        self._num_entries = 0  # number of entries in all segments, stale entries included
        self._num_cached = 0
        self._num_valid = 0  # number of entries at the front of the first segment that are known to be valid

    @property
    def num_free(self) -> int:
        """Number of blocks that `allocate` can return."""
        return self._num_blank + self._num_cached

    @property
    def num_blank(self) -> int:
        """Number of free blocks without cached content, which are allocated before any cached block is evicted."""
        return self._num_blank

    @property
    def usage(self) -> float:
        """Share of the usable blocks that are referenced, 0 to 1."""
        return 1.0 - self.num_free / self.num_usable

    @property
    def num_cached_free(self) -> int:
        """Number of free blocks whose content is still cached."""
        return self._num_cached

    def allocate(self, count: int) -> tuple[Int64Array, Int64Array]:
        """Allocate `count` blocks, each with one reference.

        Returns the block ids (int64 [count]), and the ids of those blocks that were cached, least recently used first,
        which the prefix tree must remove. The caller has checked that `count <= num_free`.
        """
        num_blank = self._num_blank
        evicted = NO_BLOCKS
        if count <= num_blank:
            self._num_blank = num_blank - count
            blocks = self._blank[num_blank - count : num_blank][::-1].copy()
        else:
            evicted = blocks = self._pop_cached(count - num_blank)
            if num_blank:
                self._num_blank = 0
                blocks = np.concatenate([self._blank[:num_blank][::-1], evicted])
        self.num_references[blocks] = ONE
        return blocks, evicted

    def acquire(self, blocks: Int64Array) -> None:
        """Add one reference to each block; the blocks were found in the prefix tree, and their ids are distinct."""
        left = self.num_references[blocks]
        self._num_cached -= int(np.count_nonzero(left == ZERO))
        self._segment_of[blocks] = ZERO
        self._num_valid = 0
        self.num_references[blocks] = left + ONE

    def release(self, blocks: Int64Array) -> None:
        """Remove one reference from each block of a table; the ids are distinct, in table order."""
        if not len(blocks):
            return
        left = self.num_references[blocks] - ONE
        self.num_references[blocks] = left
        freed = blocks[::-1] if not np.count_nonzero(left) else blocks[left == ZERO][::-1]
        is_cached = self.is_cached[freed].tobytes()  # counting and searching in bytes is faster than in an array
        num_cached = is_cached.count(1)
        num_blank = len(freed) - num_cached
        # The published blocks of a table are its leading blocks.
        assert not num_cached or is_cached.find(1) == num_blank, "the cached blocks of a table have a gap"
        if num_blank:
            self._push_blank(freed[:num_blank])
        if num_cached:
            self._append_segment(freed[num_blank:])

    def release_unshared(self, blocks: Int64Array) -> None:
        """Release the blocks of a table that are in no other table and were never cached; faster than `release`."""
        self.num_references[blocks] = ZERO
        self._push_blank(blocks[::-1])

    def release_any(self, blocks: Int64Array, *, evict_first: bool = False) -> None:
        """Remove one reference for each entry of `blocks`, which are in eviction order. Any of the blocks may be
        cached, and a block may occur several times. `evict_first`: evict these blocks before all blocks that are cached
        now."""
        left = self.num_references[blocks] - ONE
        if np.count_nonzero(left):
            np.subtract.at(self.num_references, blocks, 1)
            last = blocks[self.num_references[blocks] == 0]
            freed = np.array(list(dict.fromkeys(last.tolist())), dtype=np.int64)
        else:  # no other table contains any of these blocks
            self.num_references[blocks] = left
            freed = blocks
        is_cached = self.is_cached[freed]
        num_cached = np.count_nonzero(is_cached)
        if num_cached < len(freed):
            self._push_blank(freed[~is_cached])
        if num_cached and evict_first:
            self._prepend_segment(freed[is_cached])
        elif num_cached:
            self._append_segment(freed[is_cached])

    def set_cached(self, blocks: Int64Array) -> None:
        """Record that these referenced blocks are now in the prefix tree."""
        self.is_cached[blocks] = TRUE

    def uncache(self, blocks: list[int]) -> None:
        """Record that the prefix tree removed these blocks. Free blocks among them become blank."""
        ids = np.array(blocks, dtype=np.int64)
        self.is_cached[ids] = FALSE
        free = ids[self.num_references[ids] == 0]
        self._segment_of[free] = 0  # the blocks' entries in the queue are now stale
        self._num_valid = 0
        self._num_cached -= len(free)
        self._push_blank(free)

    def uncache_all(self) -> None:
        """Record that the prefix tree removed every block."""
        self.uncache(self.cached_free_blocks())
        self.is_cached[:] = False

    def num_in_use(self, blocks: Int64Array) -> int:
        """Number of blocks in `blocks` that are referenced."""
        return int(np.count_nonzero(self.num_references[blocks])) if len(blocks) else 0

    def blank_blocks(self) -> list[int]:
        """For checks: the blank blocks, in unspecified order."""
        return [int(block) for block in self._blank[: self._num_blank]]

    def cached_free_blocks(self) -> list[int]:
        """The cached free blocks, least recently used first. O(segments)."""
        return [block for segment in self._segments for block in self._valid_ids(segment).tolist()]

    def _valid_ids(self, segment: _Segment) -> Int64Array:
        """The ids of a segment whose entries are valid: their blocks have not left the queue since."""
        is_valid: npt.NDArray[np.bool_] = self._segment_of[segment.ids] == segment.number
        return segment.ids[is_valid]

    def _push_blank(self, blocks: Int64Array) -> None:
        end = self._num_blank + len(blocks)
        self._blank[self._num_blank : end] = blocks
        self._num_blank = end

    def _append_segment(self, blocks: Int64Array) -> None:
        """Add blocks to the queue as one segment, at the most recently used end."""
        self._segments.append(self._new_segment(blocks))
        if self._num_entries > 2 * self.num_blocks:
            self._compact_queue()

    def _prepend_segment(self, blocks: Int64Array) -> None:
        """Add blocks to the queue as one segment, at the least recently used end."""
        self._segments.appendleft(self._new_segment(blocks))
        self._num_valid = 0
        if self._num_entries > 2 * self.num_blocks:
            self._compact_queue()

    def _new_segment(self, blocks: Int64Array) -> _Segment:
        number = self._next_segment
        self._next_segment = number + 1
        self._segment_of[blocks] = number
        self._num_cached += len(blocks)
        self._num_entries += len(blocks)
        return _Segment(number, blocks)

    def _compact_queue(self) -> None:
        """Rebuild the queue without its stale entries."""
        kept = [_Segment(segment.number, self._valid_ids(segment)) for segment in self._segments]
        self._segments = deque(segment for segment in kept if len(segment.ids))
        self._num_entries = self._num_cached
        self._num_valid = 0

    def _pop_cached(self, count: int) -> Int64Array:
        """Remove the `count` least recently used cached blocks from the queue; they are no longer cached."""
        blocks = self._pop_known_valid(count) if count <= self._num_valid else self._pop_from_segments(count)
        self.is_cached[blocks] = FALSE
        self._num_entries -= count
        self._num_cached -= count
        return blocks

    def _pop_from_segments(self, count: int) -> Int64Array:
        """Remove the first `count` valid entries from the queue, from one or several segments."""
        parts: list[Int64Array] = []
        while count:
            while self._num_valid == 0:
                self._drop_stale_front()
            taken = min(count, self._num_valid)
            parts.append(self._pop_known_valid(taken))
            count -= taken
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _pop_known_valid(self, count: int) -> Int64Array:
        """Remove the first `count` entries of the first segment, which are known to be valid."""
        first = self._segments[0]
        ids = first.ids
        self._num_valid -= count
        if count < len(ids):
            first.ids = ids[count:]
            return ids[:count]
        self._segments.popleft()
        return ids

    def _drop_stale_front(self) -> None:
        """Remove stale entries at the front of the queue, and set `_num_valid` to the number of entries then at the
        front that are known to be valid."""
        if self._num_entries == self._num_cached:  # no entry is stale
            self._num_valid = len(self._segments[0].ids)
            return
        first = self._segments[0]
        head, rest = first.ids[:_SKIM], first.ids[_SKIM:]
        is_valid = self._segment_of[head] == first.number
        self._num_valid = int(np.count_nonzero(is_valid))
        self._num_entries -= len(head) - self._num_valid
        if self._num_valid == len(head):
            return
        self._segments.popleft()
        if len(rest):
            self._segments.appendleft(_Segment(first.number, rest))
        if self._num_valid:
            self._segments.appendleft(_Segment(first.number, head[is_valid]))
