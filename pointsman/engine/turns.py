"""How tenants share a stage before the scheduler, such as tokenizing: how much one may hold, and whose turn it is.

    room = Room(1024)
    room.take("a", 3)                  # raises RoomError where that is more than the tenant's share, and takes nothing
    room.give_back("a", 3)

    turns = Turns()
    waiting = turns.put("a", job, cost=5000)
    turns.remove(waiting)              # it is not wanted any more
    turn = turns.take()                # of the tenant that has been served least
    ...
    turns.end(turn)

Neither is safe against calls from several threads at once; who has threads holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

SHARE = 3
"""How many times what is free one tenant may hold: three quarters of a room if it is alone."""

_MIN_KEPT = 64
"""Tenants that are remembered, even if none of them has anything to do."""
_MAX_KEPT = 4096
"""Tenants that have nothing to do, and are remembered because they were served more than others. With more of them,
their names are made up."""


class RoomError(Exception):
    """There is no room for more; nothing was taken.

    Attributes:
        held: what the tenant holds.
        most: what it may hold now.
        total: what all hold.
        size: of the room.
    """

    def __init__(self, held: int, most: int, total: int, size: int) -> None:
        super().__init__(f"{held} are held, at most {most} may be; all hold {total} of {size}")
        self.held, self.most, self.total, self.size = held, most, total, size


class Room:
    """What a stage has room for, in any unit, and what each tenant holds of it.

    A tenant may hold up to `SHARE` times what is left free: the dynamic threshold of Choudhury and Hahne, "Dynamic
    Queue Length Thresholds for Shared-Memory Packet Switches" (IEEE/ACM Transactions on Networking 6(2), 1998). So one
    tenant alone gets three quarters, and a second one always finds room; the more are busy, the less each may hold.

    Args:
        size: of the whole.
        is_shared: False: there is one tenant, which may hold all.
    """

    def __init__(self, size: int, *, is_shared: bool = True) -> None:
        self.size = size
        self.is_shared = is_shared
        self.total = 0
        """Held by all."""
        self.held: dict[str, int] = {}
        """By each tenant that holds something."""

    def take(self, tenant: str, amount: int, own: int = 0) -> None:
        """Hold more. A tenant that holds nothing, or nothing but parts of this item, gets all that fits.

        Args:
            tenant: whose it is.
            amount: to hold.
            own: what the tenant holds of the same item already, where an item comes in parts.

        Raises:
            RoomError: it is more than there is room for, or than the tenant may hold.
        """
        held, left = self.held.get(tenant, 0), self.size - self.total - amount
        most = self.size if not self.is_shared else min(self.size, SHARE * max(0, left))
        if left < 0 or (held > own and held + amount > most):
            raise RoomError(held, most, self.total, self.size)
        self.held[tenant] = held + amount
        self.total += amount

    def give_back(self, tenant: str, amount: int) -> None:
        """Hold less."""
        self.total -= amount
        self.held[tenant] -= amount
        if not self.held[tenant]:
            del self.held[tenant]


@dataclass(slots=True, eq=False)
class Turn(Generic[ItemT]):
    """An item that waits for its turn, or whose turn it is."""

    tenant: str
    item: ItemT
    cost: float
    number: int
    """In the order of `put`."""


class _Tenant(Generic[ItemT]):
    """A tenant's queue."""

    __slots__ = ("num_out", "queue", "start")

    def __init__(self) -> None:
        self.start = 0.0
        """Virtual time at which the first item of the queue starts, or the next one does at the earliest."""
        self.num_out = 0
        """Items that were taken and have not ended."""
        self.queue: OrderedDict[Turn[ItemT], None] = OrderedDict()


class Turns(Generic[ItemT]):
    """Items that wait, of several tenants: next is one of the tenant that has been served least; of one tenant, first
    come, first served.

    That is start-time fair queuing (Goyal, Vin and Cheng, SIGCOMM 1996): an item starts at the virtual time at which
    the tenant's last one ends, but not before that of the item that was taken last, so that an idle tenant saves
    nothing up. The item that starts first is next. With n tenants, each method takes O(log n), on average.

    Args:
        most_out: items of one tenant that may be out (taken, and not ended) at once; None: any number. With less than
            there are workers, no tenant keeps them all.
    """

    def __init__(self, most_out: int | None = None) -> None:
        self._most_out = most_out
        self._tenants: dict[str, _Tenant[ItemT]] = {}
        self._now = 0.0  # virtual time
        self._number = count()
        self._len = self._num_out = 0
        self._prune_at = _MIN_KEPT
        # A heap of starts, numbers and tenants of first items. What was offered and is not true any more is left in it.
        self._offers: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        """Items that wait."""
        return self._len

    def put(self, tenant: str, item: ItemT, cost: float = 1.0, *, goes_on: bool = False) -> Turn[ItemT]:
        """An item waits; what `remove` knows it by, and `take` returns.

        Args:
            tenant: whose it is.
            item: anything.
            cost: how much work it is, above 0, in a unit of the caller's.
            goes_on: whether it goes on with what was taken before, and so comes before the tenant's other items.
        """
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = _Tenant()
        turn = Turn(tenant, item, cost, next(self._number))
        is_only = not own.queue
        own.queue[turn] = None
        self._len += 1
        if is_only:
            own.start = max(own.start, self._now)
        elif goes_on:
            own.queue.move_to_end(turn, last=False)
        if is_only or goes_on:
            self._offer(own)
        return turn

    def remove(self, turn: Turn[ItemT]) -> None:
        """An item does not wait any more; those behind it in the tenant's queue move up, as if it had never been put.
        Nothing happens if it was taken.
        """
        own = self._tenants.get(turn.tenant)
        if own is None or turn not in own.queue:
            return
        is_first = turn is next(iter(own.queue))
        del own.queue[turn]
        self._len -= 1
        if is_first:
            self._offer(own)
        if not own.queue and not own.num_out and own.start <= self._now:
            del self._tenants[turn.tenant]

    def take(self) -> Turn[ItemT] | None:
        """The next item; None: none waits, or the tenants of all that wait have as many out as they may."""
        while self._offers:
            offer = heappop(self._offers)
            start, _, tenant = offer
            own = self._tenants.get(tenant)
            if own is None or self._offer_of(own) != offer:
                continue
            turn, _ = own.queue.popitem(last=False)
            self._now = max(self._now, start)
            own.start = start + turn.cost
            own.num_out += 1
            self._num_out += 1
            self._len -= 1
            self._offer(own)
            return turn
        return None

    def drop(self, turn: Turn[ItemT]) -> None:
        """What was taken is not wanted any more: it is done, and costs the tenant nothing."""
        self._tenants[turn.tenant].start -= turn.cost
        self.end(turn)

    def end(self, turn: Turn[ItemT]) -> None:
        """What was taken is done."""
        own = self._tenants[turn.tenant]
        own.num_out -= 1
        self._num_out -= 1
        if not self._num_out and not self._len:  # nobody has anything to catch up with
            self._tenants.clear()
            self._offers.clear()
            return
        self._offer(own)
        if len(self._tenants) > self._prune_at:
            self._prune()

    def _offer_of(self, own: _Tenant[ItemT]) -> tuple[float, int, str] | None:
        """The first item of a tenant as it stands in the heap; None: none waits, or may be taken now."""
        if not own.queue or (self._most_out is not None and own.num_out >= self._most_out):
            return None
        first = next(iter(own.queue))
        return own.start, first.number, first.tenant

    def _offer(self, own: _Tenant[ItemT]) -> None:
        offer = self._offer_of(own)
        if offer is None:
            return
        heappush(self._offers, offer)
        if len(self._offers) > 2 * len(self._tenants) + _MIN_KEPT:  # most of them are not true any more
            self._offers = [offer for own in self._tenants.values() if (offer := self._offer_of(own)) is not None]
            heapify(self._offers)

    def _prune(self) -> None:
        """Forget idle tenants that have nothing to catch up with, or all idle ones where they are very many."""
        busy = {tenant: own for tenant, own in self._tenants.items() if own.queue or own.num_out}
        ahead = {tenant: own for tenant, own in self._tenants.items() if own.start > self._now}
        self._tenants = busy if len(ahead) > _MAX_KEPT else {**busy, **ahead}
        self._prune_at = max(_MIN_KEPT, 2 * len(self._tenants))
