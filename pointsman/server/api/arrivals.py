"""Arrivals: limits the number of requests that begin in one iteration of the event loop; tenants share this number.

Beginning a request (starting to read its body, finding its route, or refusing it) takes 0.3 ms of the event loop. A
tenant that sends two thousand requests together would stall all streams and requests for 0.6 s. So `NUM_PER_TURN`
requests begin in each iteration, and streams, connections and bodies continue in between. If more wait, tenants are
served in turn (`engine/fair_queue.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeAlias

from pointsman.engine.fair_queue import FairQueue
from pointsman.server.api.access import is_reserved
from pointsman.server.wire.errors import ApiError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

NUM_PER_TURN = 8
"""Number of requests that begin in one iteration of the event loop; they take 2 to 3 ms."""

_Waiter: TypeAlias = "asyncio.Future[None]"


class ArrivalMiddleware:
    """Lets a few requests begin in each iteration of the event loop, serving tenants in turn. Requests of health checks
    and operators do not wait.

    Args:
        app: the app behind this middleware.
        tenant_of: returns the tenant of a request with the given scope.
    """

    def __init__(self, app: ASGIApp, tenant_of: Callable[[Scope], str]) -> None:
        self._app = app
        self._tenant_of = tenant_of
        self._turns: FairQueue[_Waiter] = FairQueue()
        self._num_left = NUM_PER_TURN  # requests that may still begin in this iteration
        self._is_counting = False  # whether `_next_turn` is scheduled

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_reserved(scope["path"]):
            if self._num_left:  # no request waits
                self._begin_one()
            else:
                await self._wait(scope)
        await self._app(scope, receive, send)

    async def _wait(self, scope: Scope) -> None:
        tenant = ""
        with suppress(ApiError):  # a request with an invalid tenant is refused when it has begun
            tenant = self._tenant_of(scope)
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        turn = self._turns.put(tenant, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            self._turns.remove(turn)
            raise

    def _begin_one(self) -> None:
        self._num_left -= 1
        if not self._is_counting:
            self._is_counting = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Let waiting requests begin, in a new iteration of the event loop."""
        self._num_left, self._is_counting = NUM_PER_TURN, False
        while self._num_left and (turn := self._turns.take()) is not None:
            if turn.item.cancelled():  # its task runs in this iteration, and raises
                self._turns.drop(turn)
                continue
            self._turns.end(turn)
            turn.item.set_result(None)
            self._begin_one()
