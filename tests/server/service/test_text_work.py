"""Text work: the order of tenants, and short texts that do not wait for longer ones."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from pointsman.server.service.text_work import LONGEST, MIN, TextWork
from pointsman.server.wire.errors import ApiError
from tests.server.limits import text_work

LONG = int(LONGEST[0]) + 1
LONGER = int(LONGEST[1]) + 1


def run_for(seconds: float) -> Callable[[], float]:
    def work() -> float:
        time.sleep(seconds)
        return time.monotonic()

    return work


async def one(work: TextWork, tenant: str, size: int, function: Callable[[], float]) -> float:
    with work.admit(tenant, size) as text:
        return await text.run(size, function)


def test_short_text_does_not_wait_for_longer_ones() -> None:
    async def run() -> None:
        work, began = text_work(), time.monotonic()
        longer = [asyncio.ensure_future(one(work, "", LONGER, run_for(0.3))) for _ in range(4)]
        long = asyncio.ensure_future(one(work, "", LONG, run_for(0.1)))
        await asyncio.sleep(0.01)
        assert await one(work, "", 5, run_for(0)) - began < 0.2
        assert await long - began < 0.3
        await asyncio.gather(*longer)
        assert time.monotonic() - began >= 1.2

    asyncio.run(run())


def test_tenants_are_served_in_turn() -> None:
    async def run() -> None:
        work, order = text_work(is_shared=True), list[str]()

        async def texts(tenant: str) -> None:
            await one(work, tenant, 500, run_for(0.01))
            order.append(tenant)

        backlog = [asyncio.ensure_future(texts("a")) for _ in range(20)]
        await asyncio.sleep(0.015)
        await asyncio.gather(texts("b"), texts("b"))
        assert order.count("a") <= 6
        await asyncio.gather(*backlog)

    asyncio.run(run())


def test_text_processed_in_pieces_precedes_later_texts_of_its_tenant() -> None:
    async def run() -> None:
        work, ends = text_work(), list[int]()

        async def pieces(number: int) -> None:
            with work.admit("", LONG) as text:
                for _ in range(8):
                    await text.run(LONG // 8, run_for(0.002))
            ends.append(number)

        tasks = [asyncio.ensure_future(pieces(number)) for number in range(6)]
        await tasks[0]
        assert sum(task.done() for task in tasks) <= 2
        await asyncio.gather(*tasks)
        assert all(abs(place - number) <= 1 for place, number in enumerate(ends))

    asyncio.run(run())


def test_work_of_disconnected_clients_is_dropped() -> None:
    async def run() -> None:
        work, called = text_work(), list[int]()
        busy = asyncio.ensure_future(one(work, "", 5, run_for(0.1)))
        await asyncio.sleep(0.01)

        def note() -> float:
            called.append(1)
            return 0.0

        waiting = [asyncio.ensure_future(one(work, "", 5, note)) for _ in range(10)]
        await asyncio.sleep(0.01)
        for task in waiting[:9]:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await busy
        assert called == [1] and work.limit.total == 0

    asyncio.run(run())


def test_repeated_disconnects_leave_no_work_in_the_queue() -> None:
    async def run() -> None:
        work = text_work(is_shared=True)
        busy = asyncio.ensure_future(one(work, "a", 5000, run_for(0.1)))
        await asyncio.sleep(0.01)
        for _ in range(50):
            left = asyncio.ensure_future(one(work, "b", 5000, run_for(0)))
            await asyncio.sleep(0)
            left.cancel()
            await asyncio.gather(left, return_exceptions=True)
        others = [asyncio.ensure_future(one(work, "a", 5000, run_for(0.01))) for _ in range(20)]
        await asyncio.sleep(0)
        await one(work, "b", 5000, run_for(0))
        assert busy.done() and sum(other.done() for other in others) <= 2
        await asyncio.gather(*others)

    asyncio.run(run())


def test_a_thread_that_cannot_be_started_is_started_for_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        work = text_work()

        def fail(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="new thread"):
            patch.setattr(threading.Thread, "start", fail)
            await one(work, "", 5, run_for(0))
        async with asyncio.timeout(5):
            await one(work, "", 5, run_for(0))

    asyncio.run(run())


def test_thread_of_a_disconnected_client_is_freed_after_the_text() -> None:
    """Otherwise a client could have several texts in one thread at once, by disconnecting repeatedly."""

    async def run() -> None:
        work, at_once, most = text_work(), 0, 0
        lock = threading.Lock()

        def slow() -> float:
            nonlocal at_once, most
            with lock:
                at_once += 1
                most = max(most, at_once)
            time.sleep(0.05)
            with lock:
                at_once -= 1
            return 0.0

        for _ in range(5):
            task = asyncio.ensure_future(one(work, "", 5, slow))
            await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await one(work, "", 5, slow)
        assert most == 1

    asyncio.run(run())


def test_error_in_text_work_frees_the_thread() -> None:
    async def run() -> None:
        work = text_work()

        def fail() -> float:
            raise ValueError("no")

        for _ in range(3):
            with pytest.raises(ValueError, match="no"):
                await one(work, "", 5, fail)
        await one(work, "", 5, run_for(0))
        assert work.limit.total == 0

    asyncio.run(run())


def test_one_tenants_characters_are_limited() -> None:
    work = text_work(100 * MIN, is_shared=True)
    with ExitStack() as stack, pytest.raises(ApiError, match="characters of this tenant wait") as caught:
        while True:
            stack.enter_context(work.admit("a", 1))
            taken = work.limit.held_by("a") // MIN
    assert taken == 75 and caught.value.status_code == 429 and caught.value.reason == "queue_characters"
    assert work.limit.total == 0


def test_text_larger_than_the_limit_is_admitted_if_no_other_waits() -> None:
    work = text_work(1000)
    with work.admit("", 5000):
        assert work.limit.total == 1000
    assert work.limit.total == 0
