"""Retained blocks: a block pool with a second queue of free blocks, which are evicted only if no other block is free.

Layout beside that of `BlockPool`, with B = num_blocks:

    _until   float64 [B]   time until which the block is retained, on the clock of `now`; -inf: not retained
    _owner   int64   [B]   of a marked block: number of the tenant that asked for it; SHARED: several tenants did
    labels   int64   [B]   the policy's label of the block when it was last released; 0: none

    blank | cached free: least recently used first | retained: earliest expiry first
                         ^ a retained block moves here when it expires, or its tenant has too many

The first blocks of a table are marked with a time and an owner. A mark outlasts references: a block that is reused and
released again is retained again until its time.

Children are evicted before their parents (`prefix_tree.py`), because along every released table

    a block's time is at least the time of each block behind it        (`order_marks` raises it)
    a block is SHARED if a block behind it has another owner

and blocks leave the queue of all owners, or the queue of one owner, by (time, order of release). So no child of a block
that leaves is retained for longer. Expired blocks leave before other blocks are released, so that a block released
after its time is not evicted before its children.

With groups of layers this order concerns only the table of the anchor, the group of full attention whose blocks the
prefix tree needs in this order. Blocks of other groups may leave in any order, because a lookup tests each of them;
they keep their time and owner. Only blocks that a lookup of the retained prefix needs are marked: in a group with a
window, the last blocks of the prefix. Without an anchor no order is needed.

At most `capacity` blocks of the pool are retained. A block that several tenants asked for is SHARED and counts for none
of them. At most half of `capacity` is SHARED: a request that would exceed this bound retains only its blocks before
that point. (This is decided when the request finishes, because a SHARED block cannot leave before the blocks behind it,
which belong to other tenants.) One tenant has at most

    max(1, (capacity - number of SHARED blocks) / number of tenants with retained blocks)

retained blocks: with n tenants at least capacity / 2n, however many blocks other tenants share. A tenant's blocks
beyond this maximum expire immediately. With more tenants than blocks, the blocks with the earliest expiry leave.

Equal content that was computed twice is in two blocks. Each of the two blocks is retained if a tenant asked for it.
"""

from __future__ import annotations

import math
from heapq import heapify, heappop, heappush, heapreplace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from pointsman.core.kv.block_pool import BlockPool, Int64Array, _Segment

SHARED = 1
"""The owner of a block that several tenants asked for."""
FloatArray: TypeAlias = npt.NDArray[np.float64]
_NEVER = -math.inf
_SKIM = 1024  # number of queue entries tested for staleness at a time
_Queue: TypeAlias = list[tuple[float, int, _Segment]]  # a heap: (until, number of the segment, segment)


class RetainingPool(BlockPool):
    """A block pool that retains free cached blocks, at most `share` of the usable blocks."""

    def __init__(self, num_blocks: int, num_reserved_blocks: int, share: float) -> None:
        super().__init__(num_blocks, num_reserved_blocks)
        self.capacity = int(share * self.num_usable)
        """Maximum number of retained blocks."""
        self.max_shared = self.capacity // 2
        """Maximum number of retained blocks that several tenants asked for."""
        self.labels: Int64Array = np.zeros(num_blocks, dtype=np.int64)
        self._until = np.full(num_blocks, _NEVER)
        self._owner: Int64Array = np.zeros(num_blocks, dtype=np.int64)
        self._owners: dict[str | None, int] = {}  # owner number of each tenant, from SHARED + 1
        self._next_owner = SHARED + 1
        self._queue: _Queue = []
        self._queue_of: dict[int, _Queue] = {}  # the segments of `_queue`, in one queue per owner
        self._num_of: dict[int, int] = {}  # number of retained blocks of each owner, above 0
        self._largest: list[tuple[int, int]] = []  # a heap of (-n, owner), n at least the owner's element of `_num_of`
        self._num_retained = 0
        self._num_shared = 0  # number of SHARED marks, on referenced blocks too
        self._num_pushed = 0  # number of entries added since the queues were rebuilt
        self._clock = _NEVER

    @property
    def num_free(self) -> int:
        return self._num_blank + self._num_cached + self._num_retained

    @property
    def num_cached_free(self) -> int:
        return self._num_cached + self._num_retained

    @property
    def num_retained(self) -> int:
        """Number of free blocks that are retained."""
        return self._num_retained

    def max_retained_of(self, tenant: str | None = None) -> int:
        """Maximum number of retained blocks that each tenant may have now. `tenant` is counted as a tenant with
        retained blocks."""
        is_new = tenant is not None and self._owners.get(tenant, 0) not in self._num_of
        num_tenants = len(self._num_of) - (SHARED in self._num_of) + is_new
        part = (self.capacity - self._num_of.get(SHARED, 0)) // max(1, num_tenants)
        return min(max(1, part), self.capacity)

    def num_retained_of(self, tenant: str) -> int:
        """Number of retained blocks that only this tenant asked for."""
        return self._num_of.get(self._owners.get(tenant, 0), 0)

    def expire(self, now: float) -> None:
        """Advance the clock to `now`: expired blocks become ordinary cached free blocks, most recently used."""
        self._clock = max(self._clock, now)
        if self._queue and self._queue[0][0] <= self._clock:
            self._end_retention(self._queue, self._num_retained, self._clock)

    def retain(self, blocks: Int64Array, until: float, tenant: str | None) -> int:
        """Mark referenced blocks of a table as retained until `until` (on the clock of `expire`, may be inf) for a
        tenant; None: all requests are one tenant. A block with a later time keeps it. Only the leading cached blocks
        are marked, up to the first block that would exceed the maximum of SHARED blocks.

        Returns the number of marked blocks.
        """
        blocks = blocks[: np.count_nonzero(self.is_cached[blocks])]
        if until <= self._clock or not len(blocks):
            return 0
        owner = self._tenant_number(tenant)
        before, owners = self._until[blocks], self._owner[blocks]
        of_others = ((before > self._clock) & (owners != owner)).nonzero()[0]
        if len(of_others):
            num_granted = self._num_shareable(before, owners, of_others)
            if num_granted < len(of_others):
                end = of_others.item(num_granted - 1) + 1 if num_granted else 0
                blocks, before, of_others = blocks[:end], before[:end], of_others[:num_granted]
        self._num_shared -= self._num_marked_shared(blocks)
        self._owner[blocks] = owner
        self._owner[blocks[of_others]] = SHARED
        self._num_shared += len(of_others)
        self._until[blocks] = np.maximum(before, until)
        return len(blocks)

    def set_label(self, blocks: Int64Array, label: int) -> None:
        """Set the label of each of the blocks to `label`."""
        self.labels[blocks] = label

    def allocate(self, count: int) -> tuple[Int64Array, Int64Array]:
        missing = count - self._num_blank - self._num_cached
        if missing > 0:
            self._end_retention(self._queue, missing)
        blocks, evicted = super().allocate(count)
        if len(evicted):
            self.labels[evicted] = 0
        return blocks, evicted

    def acquire(self, blocks: Int64Array) -> None:
        if self._num_retained:
            self._remove_retained(blocks)
        super().acquire(blocks)

    def release(self, blocks: Int64Array) -> None:
        self.order_marks(blocks)
        num_before = self._num_retained
        super().release(blocks)
        if self._num_retained > num_before:
            self._enforce_limits()

    def release_any(self, blocks: Int64Array, *, evict_first: bool = False) -> None:
        num_before = self._num_retained
        super().release_any(blocks, evict_first=evict_first)
        if self._num_retained > num_before:
            self._enforce_limits()

    def uncache(self, blocks: list[int]) -> None:
        ids = np.array(blocks, dtype=np.int64)
        self._remove_retained(ids)
        super().uncache(blocks)
        self._num_shared -= self._num_marked_shared(ids)
        self._until[ids] = _NEVER
        self.labels[ids] = 0

    def uncache_all(self) -> None:
        super().uncache_all()
        self._until[:] = _NEVER  # times of referenced blocks too
        self._num_shared = 0
        self.labels[:] = 0

    def cached_free_blocks(self) -> list[int]:
        return super().cached_free_blocks() + [block for block, _ in self.retained_blocks()]

    def retained_blocks(self) -> list[tuple[int, float]]:
        """For checks: (block, time until which it is retained) for each retained block, in the order in which they
        expire."""
        retained = [block for _, _, segment in sorted(self._queue) for block in self._valid_ids(segment).tolist()]
        return list(zip(retained, self._until[retained].tolist(), strict=True))

    # ------------------------------------------------------------------ entering

    def _num_shareable(self, until: FloatArray, owners: Int64Array, places_of_others: Int64Array) -> int:
        """Number of leading elements of `places_of_others` whose blocks may become SHARED. `places_of_others`: the
        places of a table at which another tenant retains the block. All blocks before a SHARED block then become
        SHARED, too (`order_marks`)."""
        num_left = self.max_shared - self._num_shared
        if len(until) <= num_left:
            return len(places_of_others)
        new = np.cumsum((owners != SHARED) | (until == _NEVER))[places_of_others]
        return int(np.searchsorted(new, max(0, num_left), side="right"))

    def _num_marked_shared(self, blocks: Int64Array) -> int:
        """Number of these blocks that are marked as SHARED."""
        if not self._num_shared:
            return 0
        return int(np.count_nonzero((self._owner[blocks] == SHARED) & (self._until[blocks] > _NEVER)))

    def order_marks(self, blocks: Int64Array) -> None:
        """Adjust the times and owners of a table's blocks so that no block is retained for longer than the blocks
        before it; called before the blocks are released."""
        until = self._until[blocks]
        if not np.count_nonzero(until > _NEVER):
            return
        self._num_shared -= self._num_marked_shared(blocks)
        raised = np.maximum.accumulate(until[::-1])[::-1]
        self._until[blocks] = raised
        num_live = int(np.count_nonzero(raised > self._clock))
        owners = self._owner[blocks]
        if num_live:
            first = owners[:num_live]
            last = first[-1]
            first[until[:num_live] <= self._clock] = last
            others = (first != last).nonzero()[0]
            if len(others):
                first[: others[-1] + 1] = SHARED
            self._owner[blocks] = owners
        self._num_shared += int(np.count_nonzero((owners == SHARED) & (raised > _NEVER)))

    def _append_segment(self, blocks: Int64Array) -> None:
        is_over = self._until[blocks] <= self._clock
        if np.count_nonzero(is_over):
            super()._append_segment(self._clear_expired_marks(blocks[is_over]))
        self._push_retained(blocks[~is_over])

    def _prepend_segment(self, blocks: Int64Array) -> None:
        is_over = self._until[blocks] <= self._clock
        if np.count_nonzero(is_over):
            super()._prepend_segment(self._clear_expired_marks(blocks[is_over]))
        self._push_retained(blocks[~is_over])

    def _clear_expired_marks(self, blocks: Int64Array) -> Int64Array:
        """Clear the marks of blocks whose retention has expired. Returns the blocks."""
        self._num_shared -= self._num_marked_shared(blocks)
        self._until[blocks] = _NEVER
        return blocks

    def _push_retained(self, blocks: Int64Array) -> None:
        """Add blocks that became free and have not expired to the queues of retained blocks, children first."""
        if not len(blocks):
            return
        until, owners = self._until[blocks], self._owner[blocks]
        starts = [0, *(((until[1:] != until[:-1]) | (owners[1:] != owners[:-1])).nonzero()[0] + 1).tolist()]
        for start, end in zip(starts, [*starts[1:], len(blocks)], strict=True):
            self._push_to_queues(blocks[start:end], until.item(start), owners.item(start))

    def _push_to_queues(self, blocks: Int64Array, until: float, owner: int) -> None:
        segment = _Segment(self._next_segment, blocks)
        self._next_segment += 1
        self._segment_of[blocks] = segment.number
        entry = (until, segment.number, segment)
        heappush(self._queue, entry)
        heappush(self._queue_of.setdefault(owner, []), entry)
        count = len(blocks)
        self._num_of[owner] = num_now = self._num_of.get(owner, 0) + count
        if owner != SHARED:
            heappush(self._largest, (-num_now, owner))
        self._num_retained += count
        self._num_pushed += count + 1
        if self._num_pushed > 2 * self.num_blocks:
            self._rebuild_queues()

    def _enforce_limits(self) -> None:
        # SHARED blocks exceed the bound only if content was computed twice and one table has blocks of several tenants.
        while (excess := self._num_of.get(SHARED, 0) - self.max_shared) > 0:
            self._end_retention(self._queue, excess)
        limit = self.max_retained_of()
        while self._largest and (count := -self._largest[0][0]) > limit:
            owner = self._largest[0][1]
            num_now = self._num_of.get(owner, 0)
            if count == num_now:
                self._end_retention(self._queue_of[owner], count - limit)
            elif num_now:
                heapreplace(self._largest, (-num_now, owner))
            else:
                heappop(self._largest)
        if self._num_retained > self.capacity:
            self._end_retention(self._queue, self._num_retained - self.capacity)

    # ------------------------------------------------------------------ leaving

    def _end_retention(self, queue: _Queue, count: int, until: float = math.inf) -> None:
        """End the retention of the first `count` blocks of a queue whose time is at most `until`: they become ordinary
        cached free blocks, most recently used."""
        while count and queue and queue[0][0] <= until:
            segment = queue[0][2]
            head = segment.ids[:_SKIM]
            places = (self._segment_of[head] == segment.number).nonzero()[0]
            if len(places) > count:
                places = places[:count]
                segment.ids = segment.ids[places.item(count - 1) + 1 :]
            else:
                segment.ids = segment.ids[len(head) :]
            taken = head[places]
            if len(taken):
                owner = int(self._owner[taken[0]])
                self._subtract_retained(owner, len(taken))
                if owner == SHARED:
                    self._num_shared -= len(taken)
                self._until[taken] = _NEVER
                super()._append_segment(taken)
                count -= len(taken)
                self._drop_empty_segments(self._queue_of[owner])
            self._drop_empty_segments(queue)

    def _drop_empty_segments(self, queue: _Queue) -> None:
        while queue and not len(queue[0][2].ids):
            heappop(queue)

    def _remove_retained(self, blocks: Int64Array) -> None:
        """Remove `blocks` from the retained blocks, if they are retained. They then count as cached free blocks, until
        the caller removes them."""
        leaving = blocks[(self.num_references[blocks] == 0) & (self._until[blocks] > _NEVER)]
        if not len(leaving):
            return
        owners, counts = np.unique(self._owner[leaving], return_counts=True)
        for owner, count in zip(owners.tolist(), counts.tolist(), strict=True):
            self._subtract_retained(owner, count)
        self._num_cached += len(leaving)

    def _subtract_retained(self, owner: int, count: int) -> None:
        self._num_retained -= count
        left = self._num_of[owner] - count
        if left:
            self._num_of[owner] = left
        else:
            del self._num_of[owner]

    # ------------------------------------------------------------------ tenants

    def _tenant_number(self, tenant: str | None) -> int:
        number = self._owners.get(tenant)
        if number is None:
            if len(self._owners) >= 2 * self.num_blocks:  # most of these tenants have no block of their own
                self._rebuild_queues()
            number = self._owners[tenant] = self._next_owner
            self._next_owner += 1
        return number

    def _rebuild_queues(self) -> None:
        """Rebuild the queues without stale entries, and drop tenants without a marked block."""
        entries = [(until, number, segment) for until, number, segment in self._queue]
        self._queue, self._queue_of = [], {}
        for entry in entries:
            segment = entry[2]
            segment.ids = self._valid_ids(segment)
            if len(segment.ids):
                self._queue.append(entry)
                self._queue_of.setdefault(int(self._owner[segment.ids[0]]), []).append(entry)
        heapify(self._queue)
        for queue in self._queue_of.values():
            heapify(queue)
        marked = set(np.unique(self._owner[self._until > _NEVER]).tolist())
        self._owners = {tenant: owner for tenant, owner in self._owners.items() if owner in marked}
        self._largest = [(-count, owner) for owner, count in self._num_of.items() if owner != SHARED]
        heapify(self._largest)
        self._num_pushed = self._num_retained
