"""Sending: sends requests to the engines, with a limit on requests not yet queued, tenants in turn.

The engine queues requests between two steps, in 0.1 to 0.2 ms each. A thousand together would delay the tokens and
the requests of all other clients. So at most `MAX_OUT` groups of requests are sent and not queued yet. One tenant has
at most three quarters of this number; if more groups wait, tenants are served in turn.

Requests with a grammar are queued when the grammar is compiled, which may take seconds. The stage `GRAMMARS`
limits them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from pointsman.engine.fair_queue import SHARE, FairQueue, QueuedItem
from pointsman.engine.params.sampling import SamplingParams

if TYPE_CHECKING:
    from pointsman.server.service.receiver import ClientStream
    from pointsman.server.stages import StageLimit

MAX_OUT = 64
"""Maximum number of groups that are sent to the engines and not queued yet."""
MAX_TOGETHER = 16
"""Maximum number of requests in a group; they are samples of one client's request."""
PATIENCE = 1.0
"""Seconds after which a group is sent in any case: a hung engine must not block requests to other engines."""


class Queue(Protocol):
    """The method that queues requests in an engine; `EngineFleet` implements it."""

    async def queue(self, streams: Sequence[ClientStream]) -> None:
        """Send the requests of streams, in order, and return when all are queued (and their grammars compiled)."""


class Sending:
    """Sends requests to the engines, and limits those that are sent and not queued yet. To be used in one event loop.

    Args:
        client: the engines.
        grammars: the limit on requests that wait for a grammar.
        is_shared: whether there may be several tenants.
    """

    def __init__(self, client: Queue, grammars: StageLimit, *, is_shared: bool) -> None:
        self._client = client
        self._grammars = grammars
        self._num_out = 0
        self._turns: FairQueue[_Group] = FairQueue(MAX_OUT * SHARE // (SHARE + 1) if is_shared else None)

    async def queue(self, tenant: str, streams: Sequence[ClientStream]) -> None:
        """Send the requests of streams, in order, and return when all are queued (and their grammars compiled).

        Raises:
            ApiError: 429, too many requests wait for a grammar.
            ValueError, EngineDeadError, EngineStalledError: as for `EngineFleet.queue`.
        """
        params = streams[0].request.params
        if isinstance(params, SamplingParams) and params.structured_outputs is not None:  # for all samples alike
            with self._grammars.hold(tenant, 1):
                await self._client.queue(streams)
            return
        for first in range(0, len(streams), MAX_TOGETHER):
            together = streams[first : first + MAX_TOGETHER]
            group = _Group()
            turn = self._turns.put(tenant, group, len(together))
            self._begin_next()
            try:
                if not group.is_out:
                    await self._wait(group)
                self._turns.remove(turn)  # no effect unless the group still waits after `PATIENCE`
                await self._client.queue(together)
            finally:
                self._end(group, turn)

    async def _wait(self, group: _Group) -> None:
        """Return when it is the group's turn, or after `PATIENCE`."""
        group.waiter = asyncio.get_running_loop().create_future()
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE):
                await group.waiter

    def _begin_next(self) -> None:
        while self._num_out < MAX_OUT and (turn := self._turns.take()) is not None:
            group = turn.item
            group.is_out = True
            self._num_out += 1
            if group.waiter is not None and not group.waiter.done():
                group.waiter.set_result(None)

    def _end(self, group: _Group, turn: QueuedItem[_Group]) -> None:
        if group.is_out:
            self._turns.end(turn)
            self._num_out -= 1
            self._begin_next()
        else:
            self._turns.remove(turn)


class _Group:
    """Requests that are sent together."""

    __slots__ = ("is_out", "waiter")

    def __init__(self) -> None:
        self.is_out = False
        """Whether the group's turn has come."""
        self.waiter: asyncio.Future[None] | None = None
        """Future that is set when the group's turn comes; None: the group does not wait."""
