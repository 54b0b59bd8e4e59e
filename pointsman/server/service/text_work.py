"""Text work: threads that tokenize, render and decode. Tenants are served in turn, and short texts do not wait
for long ones.

    work = TextWork(limits.texts)
    with work.admit("alice", size=5000) as text:              # 429 if too many characters wait
        token_ids = await text.run(5000, partial(encode, tokenizer, prompt))

A tokenizer takes 0.3 to 3 microseconds per character, so a body of 2 MB takes up to 2 s. There is a thread for each
class of sizes (`LONGEST`), so that a text never waits for texts of a larger class. Within a thread the tenant that has
been served least is next (`engine/fair_queue.py`); among the tenant's requests, those whose work has begun are first.
Work of disconnected clients is removed from the queue.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from pointsman.engine.fair_queue import FairQueue, QueuedItem
from pointsman.server.stages import retry_seconds

if TYPE_CHECKING:
    from pointsman.server.stages import StageLimit

LONGEST = (16 * 1024, 256 * 1024, math.inf)
"""Maximum number of characters of a request's texts, for each thread."""
MIN = 256
"""Minimum cost of a text in characters: a text of one character also costs work."""
CHARACTERS_PER_SECOND = 500_000
"""Characters that a tokenizer processes per second in the slowest texts, for Retry-After."""

ResultT = TypeVar("ResultT")
_Turn: TypeAlias = "QueuedItem[asyncio.Future[_Turn] | None]"


class _TextThread:
    """One thread that processes texts, and the queue of functions to call in it. To be used in one event loop.

    Args:
        name: name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._turns: FairQueue[asyncio.Future[_Turn] | None] = FairQueue()
        self._is_busy = False

    async def run(self, tenant: str, cost: float, function: Callable[[], ResultT], *, has_begun: bool) -> ResultT:
        """Call a function in the thread when it is the tenant's turn. `has_begun`: whether work on the request's texts
        has begun; then the function precedes other functions of the tenant.
        """
        turn = await self._wait(tenant, cost, has_begun)
        try:
            job = self._thread.submit(function)
        except RuntimeError:  # the system cannot start the thread
            self._end(turn)
            raise
        try:
            return await asyncio.wrap_future(job)
        finally:
            if job.done():
                self._end(turn)
            else:  # the caller was cancelled, and the thread is still at work
                job.add_done_callback(self._end_later(turn))

    async def _wait(self, tenant: str, cost: float, has_begun: bool) -> _Turn:
        if not self._is_busy:
            self._is_busy = True
            self._turns.put(tenant, None, cost)
            turn = self._turns.take()
            assert turn is not None  # the queue is empty while the thread is idle
            return turn
        waiter: asyncio.Future[_Turn] = asyncio.get_running_loop().create_future()
        waiting = self._turns.put(tenant, waiter, cost, continues=has_begun)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                self._turns.remove(waiting)
            else:  # the turn has just begun
                self._turns.drop(waiter.result())
                self._begin_next()
            raise

    def _end(self, turn: _Turn) -> None:
        self._turns.end(turn)
        self._begin_next()

    def _begin_next(self) -> None:
        """Wake the task whose turn in the queue is next, skipping turns whose tasks were cancelled."""
        while (turn := self._turns.take()) is not None:
            assert turn.item is not None  # turns without a waiter begin in `_wait`
            if not turn.item.cancelled():
                turn.item.set_result(turn)
                return
            self._turns.drop(turn)  # the cancelled task raises in the next iteration of the loop
        self._is_busy = False

    def _end_later(self, turn: _Turn) -> Callable[[Future[ResultT]], None]:
        loop = asyncio.get_running_loop()

        def end(_: Future[ResultT]) -> None:
            with suppress(RuntimeError):  # the loop is closed, so the queue is empty
                loop.call_soon_threadsafe(self._end, turn)

        return end


class TextWork:
    """The threads that process texts, and the limit on the characters of waiting texts.

    Args:
        limit: the limit of the stage `TEXTS`.
    """

    def __init__(self, limit: StageLimit) -> None:
        self.limit = limit
        self._threads = [(longest, _TextThread(f"pointsman-text-{number}")) for number, longest in enumerate(LONGEST)]

    def admit(self, tenant: str, size: int) -> Text:
        """A context for the work on the texts of one request.

        Args:
            tenant: the request's tenant.
            size: number of characters of all texts of the request together.

        Raises:
            ApiError: 429, too many characters wait.
        """
        size = min(max(size, MIN), self.limit.size or size)  # so that the largest body is admitted if no text waits
        thread = next(thread for longest, thread in self._threads if size <= longest)
        self.limit.take(tenant, size, retry_after=lambda: self._retry_after(tenant))
        return Text(self.limit, thread, tenant, size)

    def _retry_after(self, tenant: str) -> int:
        held = self.limit.held_by(tenant) or self.limit.total
        return retry_seconds(held / CHARACTERS_PER_SECOND)


class Text:
    """The texts of one request. A context manager: its exit frees the characters of the texts."""

    __slots__ = ("_has_begun", "_limit", "_size", "_tenant", "_text_thread")

    def __init__(self, limit: StageLimit, thread: _TextThread, tenant: str, size: int) -> None:
        self._limit = limit
        self._text_thread = thread
        self._tenant = tenant
        self._size = size
        self._has_begun = False

    def __enter__(self) -> Text:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._limit.give_back(self._tenant, self._size)

    async def run(self, size: int, function: Callable[[], ResultT]) -> ResultT:
        """Call a function in the thread for texts of the request's size; returns the function's result.

        Args:
            size: number of characters that the function processes.
            function: function without arguments, which may raise any exception.
        """
        has_begun, self._has_begun = self._has_begun, True
        return await self._text_thread.run(self._tenant, max(size, MIN), function, has_begun=has_begun)
