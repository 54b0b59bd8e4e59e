"""Bounds the number of connections of a server that has a thread for each connection, and closes idle connections in
favour of newer ones.

    places = Places(16)
    if places.acquire(sock): ...   in the thread that accepts; otherwise close the connection
    places.mark_used(sock)         its request is being processed
    places.mark_idle(sock)         it is idle again: it waits for its client
    places.release(sock)           its thread ends

Idle clients cannot block others: the connection that has been idle longest is shut down for a newer one, which ends the
blocking read of that connection's thread. A connection whose request is being processed is never shut down.
"""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Places:
    """The places of one server's connections. Thread-safe.

    Args:
        size: maximum number of connections.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock = threading.Lock()
        self._idle: dict[socket.socket, None] = {}
        """Idle connections; the first has been idle longest."""
        self._used: set[socket.socket] = set()

    def acquire(self, sock: socket.socket) -> bool:
        """Give a place to a new, idle connection; False: all places are in use."""
        with self._lock:
            if len(self._idle) + len(self._used) >= self.size:
                oldest = next(iter(self._idle), None)
                if oldest is None:
                    return False
                del self._idle[oldest]
                with suppress(OSError):  # the client has disconnected
                    oldest.shutdown(socket.SHUT_RDWR)
            self._idle[sock] = None
            return True

    def mark_used(self, sock: socket.socket) -> None:
        """Mark this connection as used, because a request on it is being processed; no effect if a newer connection has
        its place."""
        with self._lock:
            if sock in self._idle:
                del self._idle[sock]
                self._used.add(sock)

    def mark_idle(self, sock: socket.socket) -> None:
        """Mark this connection as idle again."""
        with self._lock:
            if sock in self._used:
                self._used.remove(sock)
                self._idle[sock] = None

    def release(self, sock: socket.socket) -> None:
        """Free the place of this connection; a second call does nothing."""
        with self._lock:
            self._idle.pop(sock, None)
            self._used.discard(sock)
