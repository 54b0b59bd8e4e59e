"""Connections of a server that has a thread for each: a bound, and which of them is closed for a newer one.

    places = Places(16)
    if places.take(sock): ...      in the thread that accepts; else close the connection
    places.use(sock)               a request of it is being answered
    places.wait(sock)              it is idle again: it waits for its client
    places.give_back(sock)         its thread ends

A client that is idle cannot keep others out: the connection that has been idle longest is shut down for a newer one,
which ends what its thread waits for. One whose request is being answered is never shut down.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Places:
    """Safe against calls from several threads.

    Args:
        size: the bound.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """The one that has been idle longest comes first."""
        self._used: set[socket.socket] = set()

    def take(self, sock: socket.socket) -> bool:
        """A new connection gets a place, and is idle; False: all others are in use."""
        with self._lock:
            if len(self._idle) + len(self._used) >= self.size:
                oldest = next(iter(self._idle), None)
                if oldest is None:
                    return False
                del self._idle[oldest]
                with suppress(OSError):  # the client is gone
                    oldest.shutdown(socket.SHUT_RDWR)
            self._idle[sock] = None
            return True

    def use(self, sock: socket.socket) -> None:
        """A request of it is being answered; nothing happens if its place was taken."""
        with self._lock:
            if sock in self._idle:
                del self._idle[sock]
                self._used.add(sock)

    def wait(self, sock: socket.socket) -> None:
        """It is idle again."""
        with self._lock:
            if sock in self._used:
                self._used.remove(sock)
                self._idle[sock] = None

    def give_back(self, sock: socket.socket) -> None:
        """Its place is free; a second call does nothing."""
        with self._lock:
            self._idle.pop(sock, None)
            self._used.discard(sock)
