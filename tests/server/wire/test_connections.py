"""Connections: which are kept, which are replaced by new ones, and which are closed after a time limit."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Iterator

import pytest

from pointsman.server.wire import connections
from pointsman.server.wire.connections import (
    Connections,
    Place,
    Wait,
    network_of,
    raise_file_limit,
    size_for,
)


class Peer:
    """A connection."""

    def __init__(self, *, has_input: bool = False, has_output: bool = False) -> None:
        self.place: Place | None = None
        self.is_dropped = False
        self._has_input = has_input
        self._has_output = has_output

    def has_input(self) -> bool:
        return self._has_input

    def has_output(self) -> bool:
        return self._has_output

    def drop(self) -> None:
        self.is_dropped = True


class Clock:
    """A clock that tests advance."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def in_loop(test: Callable[[], None]) -> None:
    """Run a test in an event loop, which the timers of connections need."""

    async def run() -> None:
        test()

    asyncio.run(run())


def opened(every: Connections, clock: Clock, *waits: Wait) -> list[Peer]:
    """Connections, each a second younger than the one before."""
    peers = []
    for wait in waits:
        peers.append(Peer())
        assert every.add(peers[-1], "192.0.2.1")
        every.wait(peers[-1], wait)
        clock.now += 1
    return peers


def dropped(peers: list[Peer]) -> list[int]:
    return [place for place, peer in enumerate(peers) if peer.is_dropped]


def test_the_connection_that_has_been_idle_longest_is_replaced_first() -> None:
    def test() -> None:
        clock = Clock()
        every = Connections(6, clock=clock)
        waits = [Wait.NOTHING, Wait.HEADERS, Wait.REQUEST, Wait.REQUEST, Wait.BODY, Wait.END]
        peers = opened(every, clock, *waits)
        clock.now += 10  # a body that has had its time may be replaced, too
        order = []
        for _ in range(5):
            (new,) = opened(every, clock, Wait.NOTHING)
            assert not new.is_dropped
            order.append(next(place for place in dropped(peers) if place not in order))
        assert order == [5, 2, 3, 1, 4]
        assert every.num_open == 6 and every.closed == {"replaced": 5, "late": 0, "refused": 0}

    in_loop(test)


def test_a_connection_that_was_used_again_is_replaced_later() -> None:
    def test() -> None:
        clock = Clock()
        every = Connections(2, clock=clock)
        peers = opened(every, clock, Wait.REQUEST, Wait.REQUEST)
        every.wait(peers[0], Wait.NOTHING)
        every.wait(peers[0], Wait.REQUEST)
        opened(every, clock, Wait.REQUEST)
        assert dropped(peers) == [1]

    in_loop(test)


def test_unsent_end_of_a_response_is_not_cut_off() -> None:
    def test() -> None:
        clock = Clock()
        every = Connections(2, clock=clock)
        reading, idle = Peer(has_output=True), Peer()
        assert every.add(reading, "a") and every.add(idle, "a")
        opened(every, clock, Wait.REQUEST)
        assert idle.is_dropped and not reading.is_dropped

    in_loop(test)


@pytest.mark.parametrize("wait", [Wait.REQUEST, Wait.HEADERS])
def test_connection_with_unread_input_is_not_replaced(wait: Wait) -> None:
    def test() -> None:
        clock = Clock()
        every = Connections(2, clock=clock)
        unread, idle = Peer(has_input=True), Peer()
        assert every.add(unread, "a") and every.add(idle, "a")
        every.wait(unread, wait)
        opened(every, clock, Wait.NOTHING)
        assert idle.is_dropped and not unread.is_dropped

    in_loop(test)


def test_operators_use_reserve_connections_when_all_others_are_busy() -> None:
    def test() -> None:
        clock = Clock()
        every = Connections(2, reserve=2, clock=clock)
        busy = opened(every, clock, Wait.NOTHING, Wait.NOTHING)
        first, second = opened(every, clock, Wait.REQUEST, Wait.NOTHING)
        assert [every.is_ordinary(one) for one in (*busy, first, second)] == [True, True, False, False]
        (third,) = opened(every, clock, Wait.NOTHING)
        assert first.is_dropped and not second.is_dropped, "an idle one of the reserve is replaced"
        assert not every.add(Peer(), "192.0.2.1"), "there is no place"
        assert every.num_open == 4 and every.closed == {"replaced": 1, "late": 0, "refused": 1}
        every.remove(busy[0])
        assert every.is_ordinary(third) and not every.is_ordinary(second), "one takes the place that is free again"
        assert every.num_open == 3

    in_loop(test)


@pytest.mark.parametrize(("wait", "seconds"), [*connections.SECONDS_TO_WAIT.items()])
def test_each_kind_of_waiting_has_its_own_time_limit(
    monkeypatch: pytest.MonkeyPatch, wait: Wait, seconds: float
) -> None:
    monkeypatch.setattr(connections, "SECONDS_BETWEEN_SWEEPS", 0.001)

    async def test() -> None:
        clock = Clock()
        every = Connections(1, clock=clock)
        (ordinary,) = opened(every, clock, Wait.NOTHING)
        (reserved,) = opened(every, clock, wait)
        every.wait(ordinary, wait)
        since = clock.now
        clock.now = since + 2.1  # the reserve is for requests that are sent at once
        await asyncio.sleep(0.02)
        assert (ordinary.is_dropped, reserved.is_dropped) == (False, True)
        clock.now = since + seconds - 0.1
        await asyncio.sleep(0.02)
        assert not ordinary.is_dropped
        clock.now = since + seconds
        await asyncio.sleep(0.02)
        assert ordinary.is_dropped and every.num_open == 0 and every.closed["late"] == 2

    asyncio.run(test())


def test_a_connection_with_a_running_request_does_not_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SECONDS_BETWEEN_SWEEPS", 0.001)

    async def test() -> None:
        clock = Clock()
        every = Connections(1, clock=clock)
        (busy,) = opened(every, clock, Wait.NOTHING)
        clock.now += 1e6
        await asyncio.sleep(0.02)
        assert not busy.is_dropped and every.num_open == 1

    asyncio.run(test())


def test_connections_of_one_address_are_limited() -> None:
    def test() -> None:
        every = Connections(10, per_address=2, clock=Clock())
        idle, busy, other = Peer(), Peer(), Peer()
        assert every.add(idle, "192.0.2.1") and every.add(busy, "192.0.2.1") and every.add(other, "192.0.2.2")
        every.wait(busy, Wait.NOTHING)
        newer = Peer()
        assert every.add(newer, "192.0.2.1") and idle.is_dropped and not other.is_dropped
        every.wait(newer, Wait.NOTHING)
        assert not every.add(Peer(), "192.0.2.1") and every.add(Peer(), "192.0.2.3")
        every.remove(busy)
        every.remove(busy)  # the loop reports the end of a connection that was closed here
        assert every.add(Peer(), "192.0.2.1")

    in_loop(test)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:2", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("", "unknown", False),
    ],
)
def test_ipv6_addresses_of_one_64_bit_network_count_as_one(one: str, other: str, is_same: bool) -> None:
    assert (network_of(one) == network_of(other)) is is_same


@pytest.fixture
def soft_limit() -> Iterator[Callable[[int], None]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda number: resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_file_limit_is_raised_to_the_system_maximum(soft_limit: Callable[[int], None]) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit(256)
    num_files = raise_file_limit()
    assert num_files == min(hard, connections.MAX_FILES) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert raise_file_limit() == num_files


def test_the_connection_limit_leaves_file_descriptors_for_the_server(caplog: pytest.LogCaptureFixture) -> None:
    assert size_for(None, 20_000) == connections.DEFAULT_CONNECTIONS
    assert size_for(10_000, 20_000) == 10_000
    assert not caplog.records
    assert size_for(None, 1024) == 864
    (record,) = caplog.records
    assert "1024 files" in record.getMessage() and "ulimit -n" in record.getMessage()


@pytest.mark.parametrize(("wanted", "num_files"), [(5000, 1024), (865, 1024), (None, 128), (None, 175)])
def test_more_connections_than_files_are_refused(wanted: int | None, num_files: int) -> None:
    with pytest.raises(
        ValueError, match=rf"may open {num_files} files.* (max_connections is|needs at least) .*\(ulimit -n\)$"
    ):
        size_for(wanted, num_files)
