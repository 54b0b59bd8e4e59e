"""Places of connections: which connections get one, and which lose one."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pointsman.web.places import Places

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pairs() -> Iterator[list[Pair]]:
    """Connected sockets: the ends of the server, and the ends of its clients."""
    found = [socket.socketpair() for _ in range(4)]
    yield found
    for pair in found:
        for sock in pair:
            sock.close()


def lost(pairs: list[Pair]) -> list[int]:
    """The connections that the server has shut down."""
    found = []
    for number, (_, client) in enumerate(pairs):
        client.settimeout(0)
        try:
            assert client.recv(1) == b""
            found.append(number)
        except BlockingIOError:
            pass
    return found


def test_the_longest_idle_connection_loses_its_place(pairs: list[Pair]) -> None:
    a, b, c, d = (server for server, _ in pairs)
    places = Places(2)
    assert places.acquire(a) and places.acquire(b)
    places.mark_used(a)
    places.mark_idle(a)
    assert places.acquire(c) and lost(pairs) == [1]
    assert places.acquire(d) and lost(pairs) == [0, 1]


def test_a_connection_in_use_keeps_its_place(pairs: list[Pair]) -> None:
    a, b, c, d = (server for server, _ in pairs)
    places = Places(2)
    assert places.acquire(a) and places.acquire(b)
    places.mark_used(a)
    places.mark_used(b)
    assert not places.acquire(c) and lost(pairs) == []
    places.release(a)
    places.release(a)
    assert places.acquire(c)
    places.mark_used(c)
    assert not places.acquire(d)
