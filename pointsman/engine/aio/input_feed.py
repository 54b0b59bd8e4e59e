"""InputFeed: passes a prompt that arrives in parts from an asynchronous iterator to an engine's request.

    async def parts():
        yield "The import "
        yield "statement"

    async for output in engine.generate(parts(), params): ...

The first part queues the request, each further part is computed when it arrives, and nothing is generated before the
iterator is exhausted. The task that reads the iterator has no reference to the stream of outputs. So dropping the
stream ends both the request and the task.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from pointsman.core.errors import UnknownRequest

Prompt = str | Sequence[int]
Extend = Callable[[Prompt, bool], Awaitable[None]]
"""Function that adds a part to the request; its second argument is whether further parts follow."""


class InputFeed:
    """Feeds the parts of one prompt to its request.

    Args:
        parts: asynchronous iterator of the prompt's parts.
        extend: function that adds a part to the request.
        on_error: function that is called in the event loop when the iterator or the engine raises; the attribute
            `error` is then the exception.
    """

    def __init__(self, parts: AsyncIterator[Prompt], extend: Extend, on_error: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._parts = parts
        self._extend = extend
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._task: asyncio.Task[None] | None = None

    async def first_part(self) -> Prompt:
        """Read and return the first part that is not empty.

        Raises:
            ValueError: every part is empty, or there are no parts.
            The exceptions of the iterator.
        """
        async for part in self._parts:
            if len(part):
                return part
        raise ValueError("the prompt's iterator yielded no part with tokens or text; yield at least one")

    def start(self) -> None:
        """Start a task that feeds the remaining parts; the request has been queued with the first part."""
        self._task = self._loop.create_task(self._feed_parts())

    def stop(self) -> None:
        """Cancel the task that feeds parts, because the stream was closed. Safe in finalizers and in any thread."""
        if self._task is not None and not self._task.done() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _feed_parts(self) -> None:
        try:
            async for part in self._parts:
                if len(part):
                    await self._extend(part, True)
            await self._extend((), False)
        except UnknownRequest:
            return  # the request has finished, and its stream reports that
        except Exception as error:
            self.error = error
            self._on_error()
