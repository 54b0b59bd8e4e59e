"""Mailboxes between a thread and event loops: the newest snapshot always arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from pointsman.core import Request
from pointsman.engine.aio.mailbox import LoopMailbox, LoopPort
from pointsman.engine.outputs.request_output import RequestOutput, Transcript


class Writer:
    """A request with snapshots made by a test."""

    def __init__(self, port: LoopPort) -> None:
        self.mailbox = LoopMailbox(port)
        self._transcript = Transcript(Request("a", [1], arrival_time=0.0, max_tokens=10**6))

    def grow(self) -> None:
        tokens = self._transcript.token_ids
        tokens.append(len(tokens))
        self.mailbox.put(RequestOutput(self._transcript, 0, len(tokens), False))


def with_port(test: Callable[[LoopPort], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await test(LoopPort(asyncio.get_running_loop()))

    asyncio.run(limited())


def in_thread(work: Callable[[], object]) -> None:
    """Run a function in another thread while this thread and its loop are blocked."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_a_blocked_loop_finds_one_callback_and_the_newest_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(port: LoopPort) -> None:
        writers = [Writer(port) for _ in range(10)]
        reading = [asyncio.ensure_future(writer.mailbox.wait_newer_than(None)) for writer in writers]
        await asyncio.sleep(0)
        num_callbacks, schedule = 0, port.loop.call_soon_threadsafe

        def counted(*args: object) -> object:
            nonlocal num_callbacks
            num_callbacks += 1
            return schedule(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(port.loop, "call_soon_threadsafe", counted)

        def write() -> None:
            for _ in range(100):
                for writer in writers:
                    writer.grow()
                assert port.ring()

        in_thread(write)
        outputs = await asyncio.gather(*reading)
        assert num_callbacks == 1
        assert [output is not None and len(output.token_ids) for output in outputs] == [100] * 10

    with_port(test)


def test_a_concurrent_consumer_never_misses_the_last_snapshot() -> None:
    """Repeatedly, a last snapshot arrives at an arbitrary time of the read."""

    async def test(port: LoopPort) -> None:
        for _ in range(300):
            writer, num_tokens = Writer(port), 7

            def write(writer: Writer = writer, num_tokens: int = num_tokens) -> None:
                for _ in range(num_tokens):
                    writer.grow()
                    port.ring()

            thread = threading.Thread(target=write)
            thread.start()
            seen: RequestOutput | None = None
            while seen is None or len(seen.token_ids) < num_tokens:
                output = await writer.mailbox.wait_newer_than(seen)
                assert output is not None
                assert seen is None or len(output.token_ids) > len(seen.token_ids)
                seen = output
            thread.join()

    with_port(test)


def test_a_mailbox_reports_an_error_after_the_last_snapshot() -> None:
    async def test(port: LoopPort) -> None:
        writer = Writer(port)
        writer.grow()
        writer.mailbox.fail(ValueError("no more"))
        seen = await writer.mailbox.wait_newer_than(None)
        assert seen is not None
        with pytest.raises(ValueError, match="no more"):
            await writer.mailbox.wait_newer_than(seen)
        with pytest.raises(ValueError, match="no more"):
            await writer.mailbox.wait_accepted()

    with_port(test)


def test_wait_accepted_returns_for_an_already_accepted_request() -> None:
    async def test(port: LoopPort) -> None:
        mailbox = LoopMailbox(port)
        waiting = asyncio.ensure_future(mailbox.wait_accepted())
        await asyncio.sleep(0)

        def accept() -> None:
            mailbox.accept()
            port.ring()

        in_thread(accept)
        await waiting
        await mailbox.wait_accepted()

    with_port(test)


def test_closing_a_mailbox_wakes_its_waiting_task() -> None:
    async def test(port: LoopPort) -> None:
        for read in (LoopMailbox.wait_accepted, lambda mailbox: mailbox.wait_newer_than(None)):
            mailbox = LoopMailbox(port)
            waiting = asyncio.ensure_future(read(mailbox))
            await asyncio.sleep(0)
            mailbox.is_abandoned = True
            mailbox.wake()
            assert await waiting is None

    with_port(test)


def test_ringing_the_port_of_a_closed_loop_returns_false() -> None:
    loop = asyncio.new_event_loop()
    port = LoopPort(loop)
    writer = Writer(port)
    writer.grow()
    assert port.ring()
    loop.close()
    assert port.is_closed and not port.ring()
