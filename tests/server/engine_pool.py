"""A pool of engine processes: a test reuses an engine of an earlier test with the same options.

Starting one takes seconds, nearly all of them imports. A test that ends its engine, or fails, leaves none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Any

from pointsman.server.service.engine_client import EngineClient
from pointsman.server.wire.questions import ExplainAll, ResetPrefixCache, Resume, SetMaxNumActiveSeqs

MAX_IDLE = 3
"""Maximum number of idle engines that are kept; idle engines take memory but no processor time."""
TIMEOUT = 100.0
"""Maximum seconds of a test."""


class EnginePool:
    """Idle engines by their options, and the event loop of their clients."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._idle: dict[str, EngineClient] = {}

    def run(self, test: Callable[[EngineClient], Awaitable[None]], **options: Any) -> None:
        """Run a test with an engine that has no requests, whose cache is empty, and which other tests may have used."""
        self._runner.run(self._run(test, options))

    def close(self) -> None:
        """End all engines."""
        for client in self._idle.values():
            self._runner.run(end(client))
        self._idle.clear()
        self._runner.close()

    async def _run(self, test: Callable[[EngineClient], Awaitable[None]], options: dict[str, Any]) -> None:
        key = repr(sorted(options.items()))
        client = self._idle.pop(key, None)
        if client is None or not client.is_alive:
            client = await EngineClient.start(options, log_stats_interval=None)
        others = asyncio.all_tasks()
        try:
            async with asyncio.timeout(TIMEOUT):
                await test(client)
                await cancel(asyncio.all_tasks() - others)
                if client.is_alive:
                    await tidy(client)
                    self._idle[key] = client
        finally:
            if key not in self._idle:
                await end(client)
        if len(self._idle) > MAX_IDLE:
            await end(self._idle.pop(next(iter(self._idle))))


@cache
def engine_pool() -> EnginePool:
    """The pool of this process; `conftest.py` closes it."""
    return EnginePool()


async def cancel(tasks: set[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that a test has left running."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def tidy(client: EngineClient) -> None:
    """Reset an engine to its initial state, except its counters."""
    client.receiver.on_steps = client.receiver.on_end = None
    await client.ask(Resume())
    await client.ask(SetMaxNumActiveSeqs(None))
    while await client.ask(ExplainAll()):
        await asyncio.sleep(0.01)
    await client.ask(ResetPrefixCache(preempt_running=False))


async def end(client: EngineClient) -> None:
    """End an engine, and check that its process has exited."""
    await client.shutdown()
    assert client._process.poll() is not None
