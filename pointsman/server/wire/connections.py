"""Connections: limits the number of client connections and their waiting times, and closes waiting ones for new ones.

    ordinary   up to `size`. At the limit, a new connection replaces a waiting one: of the lowest `Wait` value, and
               among those the one that has waited longest
    reserve    up to `reserve`, used when all ordinary connections are in use. Requests of operators and health checks
               are served there, other requests are refused
    beyond     refused immediately

A connection waits while its client has to act (`Wait`); each kind of waiting has a time limit. A connection whose
request is in progress waits for nothing, and is never closed for another one.

A process that can open no more files closes every new connection, even of operators. So `size` leaves files for
the reserve and for the process itself. The event loop accepts a few connections in each iteration, and closes a
connection one iteration after the call, so there are never more than a few files beyond the two sizes.
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
"""Default number of ordinary connections, if the process may open that many files. An idle one takes about 20 KiB."""
RESERVE = 32
"""Number of reserve connections, for operators and health checks."""
OWN_FILES = 128
"""Number of files kept for other uses than connections. A server with one engine needs about 30."""
MIN_CONNECTIONS = 16
"""Minimum number of ordinary connections for the server to start."""
MAX_FILES = 1 << 20
"""Maximum number of files of a process if the system sets no limit."""
SECONDS_BETWEEN_SWEEPS = 1.0

KEEP_ALIVE = 30
"""Seconds that an idle connection is kept."""
SECONDS_TO_ANSWER_HEALTH = 2.0
"""Maximum waiting time of reserve connections."""


class Wait(IntEnum):
    """The event that a connection waits for. Connections with a smaller value are closed first."""

    END = 0
    """Waits for the client to close, after a response that was sent before the end of the request."""
    REQUEST = 1
    """Idle: waits for the first byte of a request."""
    HEADERS = 2
    """Waits for the end of a request's headers."""
    BODY = 3
    """Waits for the end of a request's body."""
    READER = 4
    """Waits for the client to read written bytes."""
    NOTHING = 5
    """Does not wait: a request is in progress."""


FOR_INPUT = frozenset({Wait.REQUEST, Wait.HEADERS, Wait.BODY})
"""Kinds of waiting for bytes of the client, which may have arrived but not been read yet."""
SECONDS_TO_WAIT = {Wait.END: 3.0, Wait.REQUEST: KEEP_ALIVE, Wait.HEADERS: 10.0, Wait.BODY: 60.0, Wait.READER: 300.0}
"""Seconds of waiting after which a connection is closed."""
SECONDS_UNTIL_REPLACED = {Wait.BODY: 10.0, Wait.READER: 30.0}
"""Minimum seconds that a connection waits before a newer one may replace it, as a well-behaved client may need this
time."""

CLOSED = ("replaced", "late", "refused")
"""Reasons why the server closed a connection: a newer one replaced it; it waited too long; all were in use."""


class Connection(Protocol):
    """The interface of a connection that `Connections` counts."""

    place: Place | None
    """The pool that counts the connection, and the event that the connection waits for; set by `Connections`."""

    def has_input(self) -> bool:
        """Whether unread bytes, or the end of the input, have arrived."""

    def has_output(self) -> bool:
        """Whether written bytes are not sent yet."""

    def drop(self) -> None:
        """Close the connection immediately."""


@dataclass(slots=True)
class Place:
    """The pool that counts a connection, and the event that the connection waits for."""

    pool: Pool
    network: str
    wait: Wait = Wait.NOTHING


class Pool:
    """Connections that share a limit.

    Args:
        size: maximum number of connections.
        seconds: maximum waiting time of each kind of waiting.
        grace: minimum waiting time before a connection is replaced, of each kind of waiting.
    """

    def __init__(self, size: int, seconds: dict[Wait, float], grace: dict[Wait, float]) -> None:
        self.size = size
        self.num_open = 0
        self._seconds, self._grace = seconds, grace
        self._waiting: dict[Wait, dict[Connection, float]] = {wait: {} for wait in seconds}
        """For each kind of waiting, the connections and the time at which each began to wait, oldest first."""

    def begin(self, connection: Connection, wait: Wait, now: float) -> None:
        """Add a connection that begins to wait."""
        if wait is not Wait.NOTHING:
            self._waiting[wait][connection] = now

    def end(self, connection: Connection, wait: Wait) -> None:
        """Remove a connection that no longer waits."""
        if wait is not Wait.NOTHING:
            self._waiting[wait].pop(connection, None)

    def replaceable(self, now: float) -> Connection | None:
        """The connection that a newer one may replace; None: there is no such connection."""
        for wait, waiting in self._waiting.items():
            for connection, since in waiting.items():
                if now - since >= self._grace.get(wait, 0.0):
                    return connection
                break  # the other connections began to wait later
        return None

    def overdue(self, now: float) -> list[Connection]:
        """The connections that have waited too long."""
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
        size: maximum number of ordinary connections.
        per_address: maximum number of connections of one address, or of one IPv6 network (64 bits); None: no limit.
        reserve: number of connections for health checks and operators.
        clock: returns the time in seconds.

    Attributes:
        closed: the number of connections that the server has closed, by reason; see `CLOSED`.
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
        """The number of connections, including the reserve."""
        return self._ordinary.num_open + self._reserve.num_open

    @property
    def size(self) -> int:
        """Maximum number of ordinary connections."""
        return self._ordinary.size

    def add(self, connection: Connection, address: str) -> bool:
        """Count a new, idle connection. False: the connection is not counted, and must be closed.

        Args:
            connection: the new connection.
            address: the client's address.
        """
        network = "" if self._per_address is None else network_of(address)
        pool = self._pool_for(network)
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
        """Free the place of a closed connection. A second call does nothing."""
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
        """Set the event that a connection waits for. If `wait` is the same as before, the waiting time continues."""
        if (place := connection.place) is not None and wait is not place.wait:
            place.pool.end(connection, place.wait)
            place.wait = wait
            place.pool.begin(connection, wait, self._clock())

    def is_ordinary(self, connection: Connection) -> bool:
        """Whether a connection is ordinary. A reserve connection becomes ordinary when an ordinary one is free."""
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

    def _pool_for(self, network: str) -> Pool | None:
        """The pool for a new connection, after closing another one if necessary; None: no pool has a free place."""
        if self._per_address is not None and len(self._by_network.get(network, ())) >= self._per_address:
            idle = (one for one in self._by_network[network] if one.place and one.place.wait <= Wait.HEADERS)
            if (oldest := next(idle, None)) is None:
                logger.warning(
                    "an address has %d connections in use, the maximum for one address: its new connections are closed",
                    self._per_address,
                )
                return None
            self._close(oldest, "replaced")
        if self._has_free_place(self._ordinary):
            return self._ordinary
        logger.warning("all %d connections are in use: further ones serve only health checks and operators", self.size)
        return self._reserve if self._has_free_place(self._reserve) else None

    def _has_free_place(self, pool: Pool) -> bool:
        if pool.num_open < pool.size:
            return True
        now = self._clock()
        while (replaced := pool.replaceable(now)) is not None:
            wait = Wait.NOTHING if replaced.place is None else replaced.place.wait
            if wait in FOR_INPUT and replaced.has_input():  # accepted in this iteration of the loop, read in the next
                self.wait(replaced, Wait.NOTHING)
                continue
            if wait is Wait.REQUEST and replaced.has_output():
                self.wait(replaced, Wait.READER)  # the client has not read the end of its last response
                continue
            logger.warning(
                "all %d connections are in use: a new connection closes one that waits for its client", self.num_open
            )
            self._close(replaced, "replaced")
            return True
        return False

    def _close_late(self) -> None:
        now = self._clock()
        for pool in (self._ordinary, self._reserve):
            for connection in pool.overdue(now):
                self._close(connection, "late")
        again = self.num_open > 0
        self._sweep = asyncio.get_running_loop().call_later(SECONDS_BETWEEN_SWEEPS, self._close_late) if again else None

    def _close(self, connection: Connection, why: str) -> None:
        self.closed[why] += 1
        self.remove(connection)
        connection.drop()


def network_of(address: str) -> str:
    """The network that counts as one address: for IPv6 the first 64 bits of the address, as one client usually has all
    addresses that begin with them."""
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return str(parsed)
    return str(parsed.ipv4_mapped or parsed.exploded[:19])


def raise_file_limit() -> int:
    """Raise the limit of open files of this process and child processes to the system's maximum; returns the limit."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    maximum = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft == resource.RLIM_INFINITY or soft >= maximum:
        return maximum if soft == resource.RLIM_INFINITY else soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, hard))
    except (OSError, ValueError):  # the system has another, lower limit
        return soft
    return maximum


def size_for(max_connections: int | None, num_files: int) -> int:
    """The number of ordinary connections.

    Args:
        max_connections: the operator's setting; None: `DEFAULT_CONNECTIONS`, or fewer if the limit of files is lower.
        num_files: the number of files that the process may open.

    Raises:
        ValueError: the process may not open files for that many connections.
    """
    num_left = num_files - OWN_FILES - RESERVE
    wanted = MIN_CONNECTIONS if max_connections is None else max_connections
    if num_left < wanted:
        raise ValueError(
            f"this process may open {num_files} files, which is enough for {max(0, num_left)} connections, but "
            f"{'the server needs at least ' if max_connections is None else 'max_connections is '}{wanted}; raise the "
            "limit of open files (ulimit -n)"
        )
    if max_connections is not None:
        return max_connections
    if num_left < DEFAULT_CONNECTIONS:
        logger.warning(
            "this process may open %d files, so the server accepts %d connections; raise the limit of open files "
            "(ulimit -n) to allow up to %d",
            num_files,
            num_left,
            DEFAULT_CONNECTIONS,
        )
    return min(DEFAULT_CONNECTIONS, num_left)
