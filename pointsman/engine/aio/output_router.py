"""OutputRouter: puts each output of the engine's thread into its request's mailbox, and rings the ports.

    follow     a request was added: its outputs go to this mailbox from now on
    deliver    an output goes to its request's mailbox (`Engine.on_output`)
    ring       after each step: every port with new outputs is rung once

A request that waits for its grammar is followed when it is added, but accepted only when the grammar is ready: until
then the request may still be refused. When a port is closed, the requests of its mailboxes are aborted, and their
outputs are discarded.
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


class Route(NamedTuple):
    """A request of the engine, and the mailbox for the request's outputs."""

    request: Request
    mailbox: Mailbox


class OutputRouter:
    """Maps the requests of one engine to their mailboxes. Only the engine's thread uses this object.

    Args:
        abort: function that aborts the request with a given id. If the request is followed, the engine then calls
            `deliver` with the request's last output.
    """

    def __init__(self, abort: Callable[[str], object]) -> None:
        self._abort = abort
        self._routes: dict[str, Route] = {}  # of requests that have not finished
        self._parked: set[Mailbox] = set()  # of requests that wait for their grammars
        self._expected: dict[Mailbox, str] = {}  # mailbox -> request id: two announced requests may have one id
        self._ports_to_ring: dict[Port[Any], None] = {}
        self._checked = 0.0

    def __bool__(self) -> bool:
        """Whether any request is expected or followed."""
        return bool(self._expected or self._routes)

    # ------------------------------------------------------------------ requests are added

    @property
    def has_expected_requests(self) -> bool:
        """Whether any request was announced and not added yet."""
        return bool(self._expected)

    def expect(self, request_id: str, mailbox: Mailbox) -> None:
        """Keep the mailbox of an announced request, whose prompt is being tokenized."""
        self._expected[mailbox] = request_id

    def stop_expecting(self, mailbox: Mailbox) -> None:
        self._expected.pop(mailbox, None)

    def abort_expected(self, request_id: str) -> bool:
        """Mark the announced requests with this id, to be aborted as soon as they are added; return whether there are
        any."""
        expected = [mailbox for mailbox, name in self._expected.items() if name == request_id]
        for mailbox in expected:
            mailbox.is_aborted = True
        return bool(expected)

    @property
    def has_followed_requests(self) -> bool:
        """Whether any request is followed."""
        return bool(self._routes)

    def is_following(self, request_id: str) -> bool:
        return request_id in self._routes

    def follow(self, request: Request, mailbox: Mailbox) -> None:
        """Deliver the outputs of an added request to this mailbox from now on."""
        self._routes[request.request_id] = Route(request, mailbox)
        if request.status.is_parked:
            self._parked.add(mailbox)
        else:
            mailbox.accept()
        self._ports_to_ring[mailbox.port] = None

    def accept(self, request: Request) -> None:
        """Accept a request that was parked until its grammar was ready; its consumer is notified."""
        route = self._routes.get(request.request_id)
        if route is not None and route.mailbox in self._parked:
            self._parked.discard(route.mailbox)
            route.mailbox.accept()
            self._ports_to_ring[route.mailbox.port] = None

    def refuse(self, mailbox: Mailbox, error: BaseException) -> None:
        """Send the consumer of this mailbox an error instead of outputs."""
        mailbox.fail(error)
        self._ports_to_ring[mailbox.port] = None

    # ------------------------------------------------------------------ outputs are delivered

    def deliver(self, output: RequestOutput) -> None:
        """Put an output into its request's mailbox; the port is rung with the next `ring`."""
        if output.finished:
            route = self._routes.pop(output.request_id, None)
        else:
            route = self._routes.get(output.request_id)
        if route is None:
            return
        mailbox = route.mailbox
        if self._parked and mailbox in self._parked:  # the request finished before it was accepted
            self._parked.discard(mailbox)
            self._ports_to_ring[mailbox.port] = None
            if output.finish_reason == "error":
                mailbox.fail(copy(output.error or GrammarError(output.finish_detail)))  # others may raise the original
                return
            mailbox.accept()
        if mailbox.is_abandoned:
            return
        if output.finished or not mailbox.finished_only:
            mailbox.put(output)
            self._ports_to_ring[mailbox.port] = None

    def ring(self) -> None:
        """Ring the ports with new outputs; abort the requests of closed ports."""
        while self._ports_to_ring:
            port, _ = self._ports_to_ring.popitem()
            if not port.ring():
                self._abort_requests_of(port)

    # ------------------------------------------------------------------ consumers end

    def abandon(self, request_id: str, mailbox: Mailbox) -> None:
        """Abort the request of a mailbox whose consumer no longer reads it."""
        self._expected.pop(mailbox, None)
        route = self._routes.get(request_id)
        if route is not None and route.mailbox is mailbox:
            self._abort(request_id)

    def check_ports(self, interval: float = 0.0) -> None:
        """Abort the requests of closed ports, at most once in `interval` seconds. This finds closed ports without new
        outputs, which `ring` does not notice."""
        now = time.monotonic()
        if now - self._checked < interval:
            return
        self._checked = now
        ports = {route.mailbox.port for route in self._routes.values()} | {one.port for one in self._expected}
        for port in ports:
            if port.is_closed:
                self._abort_requests_of(port)

    def _abort_requests_of(self, port: Port[Any]) -> None:
        """Abort the requests whose mailboxes belong to a closed port."""
        for mailbox in [one for one in self._expected if one.port is port]:
            del self._expected[mailbox]
        self._parked = {mailbox for mailbox in self._parked if mailbox.port is not port}
        for request_id in [key for key, route in self._routes.items() if route.mailbox.port is port]:
            del self._routes[request_id]
            self._abort(request_id)

    def finished(self) -> list[Request]:
        """The followed requests that have finished."""
        return [one.request for one in self._routes.values() if one.request.is_finished]

    def request_ids(self) -> list[str]:
        """The ids of the followed requests."""
        return list(self._routes)

    def close(self, error: Callable[[], BaseException]) -> None:
        """Send the consumer of every followed request a new error from `error()`; no output will follow."""
        for route in self._routes.values():
            self.refuse(route.mailbox, error())
        self._routes.clear()
        self._expected.clear()
