"""Waiter: only `wake` wakes a task, and a cancelled task leaves it unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from pointsman.engine.aio.mailbox import Waiter


def with_waiter(test: Callable[[Waiter], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test(Waiter(asyncio.get_running_loop()))

    asyncio.run(limited())


async def turns() -> None:
    """Let all other tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_a_waiting_task_is_woken_and_may_wait_again() -> None:
    async def test(waiter: Waiter) -> None:
        num_woken = 0

        async def work() -> None:
            nonlocal num_woken
            while num_woken < 3:
                await waiter.wait()
                num_woken += 1

        waiter.wake()  # no task waits: no effect
        task = asyncio.ensure_future(work())
        await turns()
        assert num_woken == 0
        for expected in (1, 2, 3):
            waiter.wake()
            waiter.wake()  # a second wake for the same event
            await turns()
            assert num_woken == expected
        await task

    with_waiter(test)


def test_after_a_cancelled_wait_another_task_may_wait() -> None:
    async def test(waiter: Waiter) -> None:
        first = asyncio.ensure_future(waiter.wait())
        await turns()
        first.cancel()
        waiter.wake()  # the cancellation has not arrived yet
        with pytest.raises(asyncio.CancelledError):
            await first
        second = asyncio.ensure_future(waiter.wait())
        await turns()
        assert not second.done()
        waiter.wake()
        await second

    with_waiter(test)


def test_waiting_in_another_event_loop_raises_an_error() -> None:
    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(RuntimeError, match="attached to a different loop"):
            asyncio.run(Waiter(loop).wait())
    finally:
        loop.close()
