"""The connections to clients: how many there may be, how long each may wait, and which is closed for a newer one.

    ordinary   up to `size`. When there are as many, the next one replaces one that waits: by the order of `Wait`, and
               of these the one that has waited longest
    reserve    up to `reserve`, taken when all ordinary connections are in use. Requests of operators and of health
               checks are answered there, others are refused
    beyond     refused at once

A connection waits while its client has to do something (`Wait`), and each kind of waiting has a limit. A connection
whose request is being answered waits for nothing, and is never closed for another one.

A process that can open no further file closes every new connection, whoever it is from. So `size` leaves files for the
reserve and for the process itself. The event loop accepts one connection in each of its turns, and closes a connection
one turn after it was told to, so there are never more than a few files beyond the two sizes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import ip_address
from typing import Protocol

logger = logging.getLogger(__name__)

DEFAULT_CONNECTIONS = 4096
"""Ordinary connections, where the process may open as many files. One that is idle takes some 20 KiB."""
RESERVE = 32
"""Connections for operators and health checks."""
OWN_FILES = 128
"""Files for all but connections. A server with one engine has about 30."""
MIN_CONNECTIONS = 16
"""With fewer, no server is started."""
MAX_FILES = 1 << 20
"""Files that a process is allowed to open, where the system sets no limit."""
SECONDS_BETWEEN_SWEEPS = 1.0

KEEP_ALIVE = 30
"""Seconds that an idle connection is kept."""
SECONDS_TO_ANSWER_HEALTH = 2.0
"""What a connection of the reserve may wait in place of a longer time."""


class Wait(IntEnum):
    """What a connection waits for. Those with a smaller number are closed first."""

    END = 0
    """For the client's end of a connection, after a response that came before the end of its request."""
    REQUEST = 1
    """Idle: for a request's first byte."""
    HEADERS = 2
    """For the end of a request's headers."""
    BODY = 3
    """For the end of a request's body."""
    READER = 4
    """For the client to read what was written."""
    NOTHING = 5
    """A request is being answered."""


FOR_INPUT = frozenset({Wait.REQUEST, Wait.HEADERS, Wait.BODY})
"""For bytes of the client, which may have arrived and not been read yet."""
SECONDS_TO_WAIT = {Wait.END: 3.0, Wait.REQUEST: KEEP_ALIVE, Wait.HEADERS: 10.0, Wait.BODY: 60.0, Wait.READER: 300.0}
"""After which a connection is closed."""
SECONDS_UNTIL_REPLACED = {Wait.BODY: 10.0, Wait.READER: 30.0}
"""Before which a connection is not closed for a newer one: an honest client may need them."""

CLOSED = ("replaced", "late", "refused")
"""Why the server closed a connection: for a newer one; it waited too long; there was no place."""


class Connection(Protocol):
    """What is counted here."""

    place: Place | None
    """Set here."""

    def has_input(self) -> bool:
        """Whether something has arrived that was not read yet, be it the end."""

    def has_output(self) -> bool:
        """Whether something was written that is not sent yet."""

    def drop(self) -> None:
        """Close it at once."""


@dataclass(slots=True)
class Place:
    """Where a connection is counted, and what it waits for."""

    pool: Pool
    network: str
    wait: Wait = Wait.NOTHING


class Pool:
    """Connections that share a bound.

    Args:
        size: the bound.
        seconds: the limit of each kind of waiting.
        grace: how long a connection that waits is not replaced.
    """

    def __init__(self, size: int, seconds: dict[Wait, float], grace: dict[Wait, float]) -> None:
        self.size = size
        self.num_open = 0
        self._seconds, self._grace = seconds, grace
        self._waiting: dict[Wait, dict[Connection, float]] = {wait: {} for wait in seconds}
        """Since when each one waits, the oldest first."""

    def begin(self, connection: Connection, wait: Wait, now: float) -> None:
        """A connection begins to wait."""
        if wait is not Wait.NOTHING:
            self._waiting[wait][connection] = now

    def end(self, connection: Connection, wait: Wait) -> None:
        """It ends."""
        if wait is not Wait.NOTHING:
            self._waiting[wait].pop(connection, None)

    def replaceable(self, now: float) -> Connection | None:
        """The connection that a newer one replaces; None: none waits."""
        for wait, waiting in self._waiting.items():
            for connection, since in waiting.items():
                if now - since >= self._grace.get(wait, 0.0):
                    return connection
                break  # the others wait for a shorter time
        return None

    def late(self, now: float) -> list[Connection]:
        """Those that wait for too long."""
        found = []
        for wait, waiting in self._waiting.items():
            for connection, since in waiting.items():
                if now - since < self._seconds[wait]:
                    break
                found.append(connection)
        return found


class Connections:
    """All connections of a server. To be used in the event loop's thread.

    Args:
        size: ordinary connections.
        per_address: connections of one address, or of one network of IPv6 (64 bits); None: no bound.
        reserve: connections for health checks and operators.
        clock: seconds.

    Attributes:
        closed: the number of connections that the server has closed, by why; see `CLOSED`.
    """

    def __init__(
        self,
        size: int,
        *,
        per_address: int | None = None,
        reserve: int = RESERVE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ordinary = Pool(size, SECONDS_TO_WAIT, SECONDS_UNTIL_REPLACED)
        short = {wait: min(seconds, SECONDS_TO_ANSWER_HEALTH) for wait, seconds in SECONDS_TO_WAIT.items()}
        self._reserve = Pool(reserve, short, {})
        self._per_address = per_address
        self._clock = clock
        self._by_network: dict[str, dict[Connection, None]] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self.closed = dict.fromkeys(CLOSED, 0)

    @property
    def num_open(self) -> int:
        """Connections, those of the reserve among them."""
        return self._ordinary.num_open + self._reserve.num_open

    @property
    def size(self) -> int:
        """Ordinary connections that there may be."""
        return self._ordinary.size

    def add(self, connection: Connection, address: str) -> bool:
        """A connection is open, and idle; False: it must be closed, and is not counted.

        Args:
            connection: a new one.
            address: of its client.
        """
        network = "" if self._per_address is None else network_of(address)
        pool = self._room_for(network)
        if pool is None:
            self.closed["refused"] += 1
            return False
        pool.num_open += 1
        connection.place = Place(pool, network)
        if network:
            self._by_network.setdefault(network, {})[connection] = None
        self.wait(connection, Wait.REQUEST)
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(SECONDS_BETWEEN_SWEEPS, self._close_late)
        return True

    def remove(self, connection: Connection) -> None:
        """A connection is closed. A second call does nothing."""
        if (place := connection.place) is None:
            return
        connection.place = None
        place.pool.end(connection, place.wait)
        place.pool.num_open -= 1
        if place.network:
            same = self._by_network[place.network]
            del same[connection]
            if not same:
                del self._by_network[place.network]

    def wait(self, connection: Connection, wait: Wait) -> None:
        """What a connection waits for from now on. If it does already, its time goes on."""
        if (place := connection.place) is not None and wait is not place.wait:
            place.pool.end(connection, place.wait)
            place.wait = wait
            place.pool.begin(connection, wait, self._clock())

    def is_ordinary(self, connection: Connection) -> bool:
        """Whether a connection is none of the reserve, or need not be any more, because there is room again."""
        place = connection.place
        if place is not None and place.pool is self._reserve:
            if self._ordinary.num_open >= self._ordinary.size:
                return False
            self._reserve.end(connection, place.wait)
            self._reserve.num_open -= 1
            self._ordinary.num_open += 1
            place.pool = self._ordinary
            self._ordinary.begin(connection, place.wait, self._clock())
        return True

    def _room_for(self, network: str) -> Pool | None:
        """Where a new connection has its place, after another one was closed for it where necessary."""
        if self._per_address is not None and len(self._by_network.get(network, ())) >= self._per_address:
            idle = (one for one in self._by_network[network] if one.place and one.place.wait <= Wait.HEADERS)
            if (oldest := next(idle, None)) is None:
                logger.warning("an address has %d connections in use, and gets no further one", self._per_address)
                return None
            self._close(oldest, "replaced")
        if self._has_room(self._ordinary):
            return self._ordinary
        logger.warning(
            "all of %d connections are in use: only health checks and operators are answered on further ones", self.size
        )
        return self._reserve if self._has_room(self._reserve) else None

    def _has_room(self, pool: Pool) -> bool:
        if pool.num_open < pool.size:
            return True
        now = self._clock()
        while (replaced := pool.replaceable(now)) is not None:
            wait = Wait.NOTHING if replaced.place is None else replaced.place.wait
            if wait in FOR_INPUT and replaced.has_input():  # it was accepted in this turn of the loop: read in the next
                self.wait(replaced, Wait.NOTHING)
                continue
            if wait is Wait.REQUEST and replaced.has_output():
                self.wait(replaced, Wait.READER)  # the end of its last response has still to be read
                continue
            logger.warning("there are %d connections, as many as may be: those that wait are closed", self.num_open)
            self._close(replaced, "replaced")
            return True
        return False

    def _close_late(self) -> None:
        now = self._clock()
        for pool in (self._ordinary, self._reserve):
            for connection in pool.late(now):
                self._close(connection, "late")
        again = self.num_open > 0
        self._sweep = asyncio.get_running_loop().call_later(SECONDS_BETWEEN_SWEEPS, self._close_late) if again else None

    def _close(self, connection: Connection, why: str) -> None:
        self.closed[why] += 1
        self.remove(connection)
        connection.drop()


def network_of(address: str) -> str:
    """What counts as one address: for IPv6 the first 64 bits, as one client has all addresses with these."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])


def raise_file_limit() -> int:
    """Allow this process, and those that it starts, to open as many files as the system lets it; how many that is."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return most if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # the system has a further limit
        return soft
    return most


def size_for(max_connections: int | None, num_files: int) -> int:
    """The number of ordinary connections.

    Args:
        max_connections: as the operator wants it; None: `DEFAULT_CONNECTIONS`, or fewer where files are few.
        num_files: that the process may open.

    Raises:
        ValueError: the process may not open as many files.
    """
    room = num_files - OWN_FILES - RESERVE
    wanted = MIN_CONNECTIONS if max_connections is None else max_connections
    if room < wanted:
        raise ValueError(
            f"this process may open {num_files} files, which is enough for {max(0, room)} connections, and "
            f"max_connections is {'at least ' if max_connections is None else ''}{wanted}; raise the limit (ulimit -n)"
        )
    if max_connections is not None:
        return max_connections
    if room < DEFAULT_CONNECTIONS:
        logger.warning(
            "this process may open %d files, so it keeps %d connections; raise the limit (ulimit -n) for up to %d",
            num_files,
            room,
            DEFAULT_CONNECTIONS,
        )
    return min(DEFAULT_CONNECTIONS, room)
