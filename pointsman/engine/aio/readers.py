"""Readers: to which mailbox each output goes, and which ports are then rung. The way out of the engine's thread.

    follow     a request was added: its outputs go to this mailbox from now on
    deliver    an output goes to its request's mailbox (`Engine.on_output`)
    ring       after each step: every port with news wakes its reader, once

A request that waits for its grammar is followed at once and accepted when the grammar is there: until then it may
still be refused. What was for a port that is closed is forgotten, and its requests are aborted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from pointsman.engine.errors import GrammarError

if TYPE_CHECKING:
    from pointsman.core import Request
    from pointsman.engine.aio.mailbox import Mailbox, Port
    from pointsman.engine.outputs.request_output import RequestOutput


class Reader(NamedTuple):
    """A request of the engine, and where its outputs go."""

    request: Request
    mailbox: Mailbox


class Readers:
    """The readers of one engine's requests. Only the engine's thread uses it.

    Args:
        abort: aborts a request, by its id; its last output is delivered here, if it is followed.
    """

    def __init__(self, abort: Callable[[str], object]) -> None:
        self._abort = abort
        self._readers: dict[str, Reader] = {}  # of requests that have not finished
        self._parked: set[Mailbox] = set()  # of requests that are accepted once their grammars are there
        self._expected: dict[Mailbox, str] = {}  # request ids, by mailbox: two with one id may be on their way
        self._ports_to_ring: dict[Port[Any], None] = {}
        self._checked = 0.0

    def __bool__(self) -> bool:
        """Whether any request is expected or followed."""
        return bool(self._expected or self._readers)

    # ------------------------------------------------------------------ requests come

    @property
    def are_expected(self) -> bool:
        """Whether any request was announced and not added yet."""
        return bool(self._expected)

    def expect(self, request_id: str, mailbox: Mailbox) -> None:
        """A request is announced: its prompt is being tokenized."""
        self._expected[mailbox] = request_id

    def stop_expecting(self, mailbox: Mailbox) -> None:
        self._expected.pop(mailbox, None)

    def abort_expected(self, request_id: str) -> bool:
        """Announced requests of this id are to finish as soon as they are added; whether there are any."""
        expected = [mailbox for mailbox, name in self._expected.items() if name == request_id]
        for mailbox in expected:
            mailbox.is_aborted = True
        return bool(expected)

    @property
    def are_following(self) -> bool:
        """Whether any request is followed."""
        return bool(self._readers)

    def is_following(self, request_id: str) -> bool:
        return request_id in self._readers

    def follow(self, request: Request, mailbox: Mailbox) -> None:
        """A request was added."""
        self._readers[request.request_id] = Reader(request, mailbox)
        if request.status.is_parked:
            self._parked.add(mailbox)
        else:
            mailbox.accept()
        self._ports_to_ring[mailbox.port] = None

    def accept(self, request: Request) -> None:
        """A request that was parked has its grammar."""
        reader = self._readers.get(request.request_id)
        if reader is not None and reader.mailbox in self._parked:
            self._parked.discard(reader.mailbox)
            reader.mailbox.accept()
            self._ports_to_ring[reader.mailbox.port] = None

    def refuse(self, mailbox: Mailbox, error: BaseException) -> None:
        """There will be no output for this mailbox; its consumer gets the error."""
        mailbox.fail(error)
        self._ports_to_ring[mailbox.port] = None

    # ------------------------------------------------------------------ outputs go

    def deliver(self, output: RequestOutput) -> None:
        """Put an output into its request's mailbox; the port is rung with the next `ring`."""
        if output.finished:
            reader = self._readers.pop(output.request_id, None)
        else:
            reader = self._readers.get(output.request_id)
        if reader is None:
            return
        mailbox = reader.mailbox
        if self._parked and mailbox in self._parked:  # it has finished before it was accepted
            self._parked.discard(mailbox)
            self._ports_to_ring[mailbox.port] = None
            if output.finish_reason == "error":
                mailbox.fail(copy(output.error or GrammarError(output.finish_detail)))  # others may raise it, too
                return
            mailbox.accept()
        if mailbox.is_abandoned:
            return
        if output.finished or not mailbox.finished_only:
            mailbox.put(output)
            self._ports_to_ring[mailbox.port] = None

    def ring(self) -> None:
        """Wake the readers that have news; forget the requests of ports that are closed."""
        while self._ports_to_ring:
            port, _ = self._ports_to_ring.popitem()
            if not port.ring():
                self._forget(port)

    # ------------------------------------------------------------------ readers go

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """The consumer of this mailbox reads no more: its request is aborted."""
        self._expected.pop(mailbox, None)
        reader = self._readers.get(request_id)
        if reader is not None and reader.mailbox is mailbox:
            self._abort(request_id)

    def check_ports(self, interval: float = 0.0) -> None:
        """Forget the requests of closed ports, at most once in `interval` seconds: ports without news are not rung, so
        that one may have been closed unnoticed."""
        now = time.monotonic()
        if now - self._checked < interval:
            return
        self._checked = now
        ports = {reader.mailbox.port for reader in self._readers.values()} | {one.port for one in self._expected}
        for port in ports:
            if port.is_closed:
                self._forget(port)

    def _forget(self, port: Port[Any]) -> None:
        """Abort what was for a port that is closed."""
        for mailbox in [one for one in self._expected if one.port is port]:
            del self._expected[mailbox]
        self._parked = {mailbox for mailbox in self._parked if mailbox.port is not port}
        for request_id in [key for key, reader in self._readers.items() if reader.mailbox.port is port]:
            del self._readers[request_id]
            self._abort(request_id)

    def finished(self) -> list[Request]:
        """Requests that are followed and have finished."""
        return [one.request for one in self._readers.values() if one.request.is_finished]

    def request_ids(self) -> list[str]:
        """Of the requests that are followed."""
        return list(self._readers)

    def close(self, error: Callable[[], BaseException]) -> None:
        """No output will come any more: every consumer gets an error of its own."""
        for reader in self._readers.values():
            self.refuse(reader.mailbox, error())
        self._readers.clear()
        self._expected.clear()
