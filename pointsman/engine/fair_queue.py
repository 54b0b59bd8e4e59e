"""Shares a stage before the scheduler, such as tokenizing, among tenants: limits each tenant's part of the stage's
capacity, and serves tenants fairly.

    capacity = SharedCapacity(1024)
    capacity.take("a", 3)              # raises CapacityError if it exceeds the tenant's share, and takes nothing
    capacity.give_back("a", 3)

    queue = FairQueue()
    waiting = queue.put("a", job, cost=5000)
    queue.remove(waiting)              # the item is no longer needed
    item = queue.take()                # an item of the tenant that has been served least
    ...
    queue.end(item)

Neither class is thread-safe; callers with several threads hold a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

SHARE = 3
"""Maximum capacity that one tenant may hold, as a multiple of the free capacity. A tenant that is alone may hold three
quarters of the whole capacity."""

_MIN_KEPT = 64
"""Number of tenants up to which idle tenants are not forgotten."""
_MAX_KEPT = 4096
"""Maximum number of idle tenants that are kept because they were served more than other tenants. If there are more such
tenants, clients probably make up tenant names."""


class CapacityError(Exception):
    """The amount that a tenant would take exceeds the free capacity or the tenant's share. The tenant gets none of it.

    Attributes:
        held: amount that the tenant holds.
        max_held: amount that the tenant may hold now.
        total: amount that all tenants hold.
        size: the whole capacity.
    """

    def __init__(self, held: int, max_held: int, total: int, size: int) -> None:
        super().__init__(f"{held} are held, at most {max_held} may be; all hold {total} of {size}")
        self.held, self.max_held, self.total, self.size = held, max_held, total, size


class SharedCapacity:
    """Counts the used capacity of a stage, in any unit, and limits the amount that each tenant holds.

    A tenant may hold up to `SHARE` times the free capacity: the dynamic threshold of Choudhury and Hahne, "Dynamic
    Queue Length Thresholds for Shared-Memory Packet Switches" (IEEE/ACM Transactions on Networking 6(2), 1998). So a
    single tenant may hold three quarters of the capacity, and a second tenant always finds free capacity; the more
    tenants are busy, the less each may hold.

    Args:
        size: the whole capacity.
        is_shared: whether there may be several tenants; False: there is only one, which may hold the whole capacity.
    """

    def __init__(self, size: int, *, is_shared: bool = True) -> None:
        self.size = size
        self.is_shared = is_shared
        self.total = 0
        """Amount that all tenants hold."""
        self.held: dict[str, int] = {}
        """Tenant -> amount that the tenant holds; tenants that hold nothing are left out."""

    def take(self, tenant: str, amount: int, held_for_item: int = 0) -> None:
        """Let a tenant hold a further amount. A tenant that holds nothing, or only earlier parts of the same item, may
        take the whole free capacity.

        Args:
            tenant: the tenant that takes the amount.
            amount: the amount to add.
            held_for_item: amount that the tenant already holds for earlier parts of the same item.

        Raises:
            CapacityError: the amount exceeds the free capacity or the tenant's share.
        """
        held, left = self.held.get(tenant, 0), self.size - self.total - amount
        max_held = self.size if not self.is_shared else min(self.size, SHARE * max(0, left))
        if left < 0 or (held > held_for_item and held + amount > max_held):
            raise CapacityError(held, max_held, self.total, self.size)
        self.held[tenant] = held + amount
        self.total += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Free an amount that a tenant holds."""
        self.total -= amount
        self.held[tenant] -= amount
        if not self.held[tenant]:
            del self.held[tenant]


@dataclass(slots=True, eq=False)
class QueuedItem(Generic[ItemT]):
    """An item that was put into a `FairQueue`, with its tenant and cost."""

    tenant: str
    item: ItemT
    cost: float
    number: int
    """Position of the item in the order of `put` calls."""


class _Tenant(Generic[ItemT]):
    """One tenant's waiting items, and its virtual time."""

    __slots__ = ("num_out", "queue", "start")

    def __init__(self) -> None:
        self.start = 0.0
        """Virtual start time of the tenant's first waiting item; with an empty queue, the earliest start time of its
        next item."""
        self.num_out = 0
        """Number of the tenant's items that were taken and have not ended."""
        self.queue: OrderedDict[QueuedItem[ItemT], None] = OrderedDict()


class FairQueue(Generic[ItemT]):
    """A fair queue of items of several tenants. The next item belongs to the tenant that has been served least; items
    of one tenant are served in order.

    This is start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996). An item's virtual start is the virtual end of
    its tenant's previous item, but not before the virtual start of the last taken item, so that idle tenants save up no
    credit. The item with the earliest virtual start is next. With n tenants, each method takes O(log n) on average.

    Args:
        max_out: maximum number of items of one tenant that are out (taken and not ended); None: any number. If it is
            less than the number of workers, no tenant occupies all of them.
    """

    def __init__(self, max_out: int | None = None) -> None:
        self._max_out = max_out
        self._tenants: dict[str, _Tenant[ItemT]] = {}
        self._now = 0.0  # virtual time
        self._number = count()
        self._len = self._num_out = 0
        self._prune_at = _MIN_KEPT
        # A heap of (start, number, tenant) of first items. Outdated entries stay in it.
        self._offers: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        """Number of waiting items of all tenants."""
        return self._len

    def put(self, tenant: str, item: ItemT, cost: float = 1.0, *, continues: bool = False) -> QueuedItem[ItemT]:
        """Add an item; return its entry, which `remove` needs and `take` will return.

        Args:
            tenant: the owner of the item.
            item: any object.
            cost: amount of work of the item, above 0, in any unit.
            continues: whether the item continues an earlier item, and so precedes the tenant's other waiting items.
        """
        state = self._tenants.get(tenant)
        if state is None:
            state = self._tenants[tenant] = _Tenant()
        entry = QueuedItem(tenant, item, cost, next(self._number))
        is_only = not state.queue
        state.queue[entry] = None
        self._len += 1
        if is_only:
            state.start = max(state.start, self._now)
        elif continues:
            state.queue.move_to_end(entry, last=False)
        if is_only or continues:
            self._push_heap_entry(state)
        return entry

    def remove(self, entry: QueuedItem[ItemT]) -> None:
        """Remove a waiting item; later items of its tenant move up. No effect if the item was already taken."""
        state = self._tenants.get(entry.tenant)
        if state is None or entry not in state.queue:
            return
        is_first = entry is next(iter(state.queue))
        del state.queue[entry]
        self._len -= 1
        if is_first:
            self._push_heap_entry(state)
        if not state.queue and not state.num_out and state.start <= self._now:
            del self._tenants[entry.tenant]

    def take(self) -> QueuedItem[ItemT] | None:
        """Take the next item; None: no item waits, or all tenants with waiting items have `max_out` items out."""
        while self._offers:
            offer = heappop(self._offers)
            start, _, tenant = offer
            state = self._tenants.get(tenant)
            if state is None or self._heap_entry(state) != offer:
                continue
            entry, _ = state.queue.popitem(last=False)
            self._now = max(self._now, start)
            state.start = start + entry.cost
            state.num_out += 1
            self._num_out += 1
            self._len -= 1
            self._push_heap_entry(state)
            return entry
        return None

    def drop(self, entry: QueuedItem[ItemT]) -> None:
        """End an item that was taken but is no longer needed; its cost is not charged to the tenant."""
        self._tenants[entry.tenant].start -= entry.cost
        self.end(entry)

    def end(self, entry: QueuedItem[ItemT]) -> None:
        """End the work on a taken item, so that it no longer counts towards its tenant's `max_out`."""
        state = self._tenants[entry.tenant]
        state.num_out -= 1
        self._num_out -= 1
        if not self._num_out and not self._len:  # no tenant is behind another
            self._tenants.clear()
            self._offers.clear()
            return
        self._push_heap_entry(state)
        if len(self._tenants) > self._prune_at:
            self._forget_idle_tenants()

    def _heap_entry(self, state: _Tenant[ItemT]) -> tuple[float, int, str] | None:
        """The heap entry of a tenant's first waiting item: (virtual start, number of the item, tenant). None: no item
        waits, or the tenant has `max_out` items out."""
        if not state.queue or (self._max_out is not None and state.num_out >= self._max_out):
            return None
        first = next(iter(state.queue))
        return state.start, first.number, first.tenant

    def _push_heap_entry(self, state: _Tenant[ItemT]) -> None:
        offer = self._heap_entry(state)
        if offer is None:
            return
        heappush(self._offers, offer)
        if len(self._offers) > 2 * len(self._tenants) + _MIN_KEPT:  # most entries are outdated
            self._offers = [offer for state in self._tenants.values() if (offer := self._heap_entry(state)) is not None]
            heapify(self._offers)

    def _forget_idle_tenants(self) -> None:
        """Forget idle tenants, except those that were served more than others; if very many idle tenants were served
        more, forget these too."""
        busy = {tenant: state for tenant, state in self._tenants.items() if state.queue or state.num_out}
        ahead = {tenant: state for tenant, state in self._tenants.items() if state.start > self._now}
        self._tenants = busy if len(ahead) > _MAX_KEPT else {**busy, **ahead}
        self._prune_at = max(_MIN_KEPT, 2 * len(self._tenants))
