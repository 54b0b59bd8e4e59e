"""Engines that hang: real processes are stopped, or blocked in a step, and their requests are resumed."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from pointsman.engine import EngineDeadError, SamplingParams
from pointsman.engine.errors import EngineStalledError
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.service import engine_client
from pointsman.server.service.engine_client import EngineClient, is_traced
from pointsman.server.service.fleet import EngineFleet, start_fleet
from pointsman.server.service.heartbeat import INTERVAL
from pointsman.server.service.receiver import ClientStream
from pointsman.server.wire.messages import Delta, EngineRequest
from pointsman.server.wire.questions import (
    Explain,
    ExplainAll,
    Film,
    IsPaused,
    Pause,
    ResetPrefixCache,
    Resume,
    SetMaxNumActiveSeqs,
    SetPriority,
    Stats,
)
from tests.server.engine_pool import cancel
from tests.server.orders import HeldUp

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {"model": "demo", "num_blocks": 512, "block_size": 16, "max_num_seqs": 32, "num_threads": 1}
LIMIT = 2.0
GREEDY = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
Test = Callable[[EngineFleet], Awaitable[None]]


def with_fleet(
    test: Test, num_engines: int = 2, max_restarts: int = 100, max_resumes: int = 3, timeout: float = LIMIT, **more: Any
) -> None:
    """Run a test with engines that count as dead after `timeout` seconds without a sign of life."""

    def start(index: int, num_restarts: int, tokenizer: Any = None) -> Awaitable[EngineClient]:
        options = {**OPTIONS, **more}
        return EngineClient.start(
            options, log_stats_interval=None, tokenizer=tokenizer, timeout=timeout, name=f"engine {index}"
        )

    async def run() -> None:
        fleet = await start_fleet(start, num_engines, max_restarts, max_resumes)
        others = asyncio.all_tasks()
        try:
            async with asyncio.timeout(100):
                await test(fleet)
                await cancel(asyncio.all_tasks() - others)
        finally:
            for engine in fleet.engines:
                continue_process(engine)
            await fleet.shutdown()

    asyncio.run(run())


def stop(engine: EngineClient) -> None:
    os.kill(engine.info.pid, signal.SIGSTOP)


def continue_process(engine: EngineClient) -> None:
    if engine.is_alive and engine.info is not None:
        os.kill(engine.info.pid, signal.SIGCONT)


def stream_of(fleet: EngineFleet, name: str, params: SamplingParams = GREEDY) -> ClientStream:
    return fleet.generate(EngineRequest(name, [300 + len(name), *name.encode()], params))


async def read(stream: ClientStream) -> Delta:
    whole = Delta()
    async for delta in stream:
        whole.merge(delta)
    return whole


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def streams_in_both(fleet: EngineFleet, count: int = 8) -> dict[str, ClientStream]:
    """Running streams, half of them in each of two engines."""
    streams = {f"a-{number}": stream_of(fleet, f"a-{number}") for number in range(count)}
    await fleet.queue(list(streams.values()))
    assert [len(engine.receiver.streams) for engine in fleet.engines] == [count // 2, count // 2]
    return streams


async def texts_of(streams: dict[str, ClientStream]) -> dict[str, str]:
    found = await asyncio.gather(*map(read, streams.values()))
    return {name: delta.text for name, delta in zip(streams, found, strict=True)}


def test_hung_engine_is_restarted_and_its_requests_resumed(caplog: pytest.LogCaptureFixture) -> None:
    async def test(fleet: EngineFleet) -> None:
        expected = await texts_of(await streams_in_both(fleet))
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        await until(lambda: all(one.num_output_tokens for one in streams.values()))
        hung, pid = fleet.engines[1], fleet.engines[1].info.pid
        stop(hung)
        stopped = time.monotonic()
        late = {f"b-{number}": stream_of(fleet, f"b-{number}") for number in range(4)}
        for stream in late.values():  # some may have no output yet when their engine counts as dead
            stream._send()
        await hung.dead.wait()
        assert LIMIT < time.monotonic() - stopped < hung.heartbeat.limit + 3 * INTERVAL
        assert await reading == expected
        assert all(delta.finish_reason == "length" for delta in await asyncio.gather(*map(read, late.values())))
        assert fleet.num_hangs == [0, 1]
        await hung.wait_gone()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        await until(lambda: fleet.num_alive == 2)
        assert fleet.num_restarts == [0, 1] and not fleet.engines[1].is_hung
        await texts_of(await streams_in_both(fleet))  # it gets requests again
        text = (await ServerMetrics(fleet, "demo").render())[0].decode()
        assert 'pointsman:engine_hangs_total{engine="1",model_name="demo"} 1.0' in text

    with caplog.at_level(logging.INFO):
        with_fleet(test)
    critical = [one.getMessage() for one in caplog.records if one.levelno == logging.CRITICAL]
    assert len(critical) == 1 and "engine 1 (process" in critical[0] and "--engine-timeout" in critical[0]


def test_router_avoids_a_silent_engine_long_before_the_timeout() -> None:
    async def test(fleet: EngineFleet) -> None:
        await texts_of(await streams_in_both(fleet))
        stop(fleet.engines[0])
        await until(lambda: fleet.engines[0].is_slow)
        for number in range(12):
            stream = stream_of(fleet, f"c-{number}", SamplingParams(max_tokens=4))
            await read(stream)
            assert stream.engine == 1
        stop(fleet.engines[1])  # neither engine is better: requests wait in any of them
        await until(lambda: fleet.engines[1].is_slow)
        waiting = stream_of(fleet, "d", SamplingParams(max_tokens=4))
        waiting._send()
        for engine in fleet.engines:
            continue_process(engine)
        assert (await read(waiting)).token_ids
        await until(lambda: not any(engine.is_slow for engine in fleet.engines))
        assert fleet.num_hangs == [0, 0]

    with_fleet(test, timeout=30.0)


@pytest.mark.parametrize("max_restarts", [0, 5])
def test_hang_of_a_single_engine_fails_or_resumes_requests(max_restarts: int) -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = [stream_of(fleet, f"e-{number}") for number in range(4)]
        reading = [asyncio.ensure_future(read(stream)) for stream in streams]
        await until(lambda: all(one.num_output_tokens for one in streams))
        stop(fleet.engines[0])
        found = await asyncio.gather(*reading, return_exceptions=True)
        if max_restarts:
            assert all(isinstance(one, Delta) and len(one.token_ids) == GREEDY.max_tokens for one in found)
            return
        why = r"engine 0 \(process [0-9]+\) has given no sign of life for [0-9]+ s, since 20"
        for error in found:
            with pytest.raises(EngineDeadError, match=why):
                raise error  # type: ignore[misc]
        assert not fleet.is_alive and "no sign of life" in str(fleet.death)

    with_fleet(test, 1, max_restarts)


def test_engines_stopped_together_lose_no_request() -> None:
    async def test(fleet: EngineFleet) -> None:
        expected = await texts_of(await streams_in_both(fleet))
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        await until(lambda: all(one.num_output_tokens for one in streams.values()))
        for engine in fleet.engines:
            stop(engine)
        assert await reading == expected
        assert fleet.num_hangs == [1, 1]

    with_fleet(test)


def test_engine_that_continues_before_the_limit_survives() -> None:
    async def test(fleet: EngineFleet) -> None:
        expected = await texts_of(await streams_in_both(fleet))
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        await until(lambda: all(one.num_output_tokens for one in streams.values()))
        stop(fleet.engines[1])
        await until(lambda: fleet.engines[1].heartbeat.seconds_of_silence > LIMIT - 0.5)
        continue_process(fleet.engines[1])
        assert await reading == expected and not any(one.num_deaths for one in streams.values())
        await asyncio.sleep(2 * INTERVAL)
        assert fleet.num_hangs == [0, 0] and not fleet.engines[1].is_slow

    with_fleet(test)


def test_stopped_api_process_does_not_make_engines_late() -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        await until(lambda: all(one.num_output_tokens for one in streams.values()))
        for _ in range(3):
            time.sleep(2 * LIMIT)
            await asyncio.sleep(0.01)
        await reading
        assert fleet.num_hangs == [0, 0]

    with_fleet(test)


def test_engines_that_are_paused_or_idle_are_not_late() -> None:
    async def test(fleet: EngineFleet) -> None:
        await fleet.ask(Pause("keep", False))
        waiting = stream_of(fleet, "f", SamplingParams(max_tokens=4))
        await waiting.start()
        await asyncio.sleep(2 * LIMIT)
        assert await fleet.ask(IsPaused()) and fleet.num_alive == 2
        await fleet.ask(Resume())
        assert (await read(waiting)).token_ids
        await asyncio.sleep(2 * LIMIT)
        assert fleet.num_hangs == [0, 0] and not any(engine.is_slow for engine in fleet.engines)

    with_fleet(test)


def test_restarted_engine_keeps_the_pause_of_a_hung_engine() -> None:
    async def test(fleet: EngineFleet) -> None:
        await fleet.ask(Pause("keep", False))
        stop(fleet.engines[1])
        await until(lambda: fleet.num_hangs[1] == 1)
        await until(lambda: fleet.num_alive == 2)
        assert await fleet.engines[1].ask(IsPaused())

    with_fleet(test)


@pytest.mark.parametrize("kind", ["hang", "long", "announced"])
def test_long_step_is_distinguished_from_a_hang(kind: str) -> None:
    """A request that blocks its engine's thread is resumed in another engine, unless the thread gives signs of life."""

    async def test(fleet: EngineFleet) -> None:
        stream = stream_of(fleet, f"{kind}-1", SamplingParams(max_tokens=4))
        if kind != "hang":
            assert len((await read(stream)).token_ids) == 4 and fleet.num_hangs == [0, 0]
            return
        with pytest.raises(EngineDeadError, match="2 engines have died with this request, which is resumed 1 times"):
            await read(stream)
        assert sum(fleet.num_hangs) == 2

    with_fleet(test, order=HeldUp(), max_resumes=1)


class Unkillable:
    """A process that never exits, as in an uninterruptible system call."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.num_kills = 0

    def poll(self) -> int | None:
        return None

    def kill(self) -> None:
        self.num_kills += 1


def test_requests_are_resumed_before_the_hung_process_exits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_client, "SECONDS_TO_DIE", 1.5)

    async def test(fleet: EngineFleet) -> None:
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        hung = fleet.engines[1]
        process, hung._process = hung._process, Unkillable(hung._process)
        try:
            os.kill(hung.info.pid, signal.SIGSTOP)
            await until(lambda: hung.dead.is_set())
            assert not fleet.engines[1].is_alive and not hung._gone.is_set()
            await reading
            await until(lambda: fleet.num_alive == 2)
            assert hung._gone.is_set() and fleet.engines[1] is not hung and hung._process.num_kills == 2
        finally:
            process.kill()

    with_fleet(test)
    assert "was killed, but its process still runs" in caplog.text


def test_shutdown_completes_even_if_a_process_does_not_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "SECONDS_TO_DIE", 0.5)

    async def run() -> None:
        client = await EngineClient.start(OPTIONS, log_stats_interval=None)
        process, client._process = client._process, Unkillable(client._process)
        try:
            os.kill(client.info.pid, signal.SIGSTOP)
            async with asyncio.timeout(5):
                await client.shutdown()
        finally:
            process.kill()

    asyncio.run(run())


def test_questions_to_a_stalled_engine_fail_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pointsman.server.service.heartbeat.STALLED_AFTER", 1.0)

    async def test(fleet: EngineFleet) -> None:
        metrics = ServerMetrics(fleet, "demo")
        streams = await streams_in_both(fleet)
        stop(fleet.engines[1])
        await until(lambda: fleet.engines[1].heartbeat.is_stalled)
        begun = time.monotonic()
        questions: list[Awaitable[Any]] = [
            fleet.ask(ExplainAll()), fleet.ask(Explain(next(one for one in streams if streams[one].engine == 1))),
            fleet.ask(Pause("keep", False)), fleet.ask(Resume()), fleet.ask(IsPaused()), fleet.ask(Film(0), 1),
            fleet.ask(ResetPrefixCache(preempt_running=False)), fleet.ask(SetMaxNumActiveSeqs(4)),
            fleet.ask(SetPriority(("a-1",), 1)),
        ]  # fmt: skip
        for question in questions:
            with pytest.raises(EngineStalledError, match=r"engine 1 \(process .* no sign of life for [0-9]+ s, since"):
                await question
        assert len(await fleet.ask_each(Stats())) == 1
        assert b'pointsman:engine_up{engine="1",model_name="demo"} 1.0' in (await metrics.render())[0]
        assert time.monotonic() - begun < 5.0, "the limit of a hang is 30 s"
        assert not await fleet.engines[0].ask(IsPaused()), "a command that not all engines can follow is sent to none"
        continue_process(fleet.engines[1])
        await until(lambda: not fleet.engines[1].is_slow)
        await fleet.ask(ExplainAll())

    with_fleet(test, timeout=30.0)


def test_killed_silent_engine_is_restarted_only_once() -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = await streams_in_both(fleet)
        reading = asyncio.ensure_future(texts_of(streams))
        stop(fleet.engines[1])
        await until(lambda: fleet.engines[1].is_slow)
        os.kill(fleet.engines[1].info.pid, signal.SIGKILL)
        await reading
        await until(lambda: fleet.num_alive == 2)
        assert fleet.num_restarts == [0, 1] and fleet.num_hangs == [0, 0]
        assert max(one.num_deaths for one in streams.values()) == 1

    with_fleet(test, timeout=30.0)


def test_without_resumes_a_hang_is_an_error_for_its_requests_alone() -> None:
    async def test(fleet: EngineFleet) -> None:
        streams = await streams_in_both(fleet)
        reading = [asyncio.ensure_future(read(one)) for one in streams.values()]
        stop(fleet.engines[1])
        found = await asyncio.gather(*reading, return_exceptions=True)
        for stream, one in zip(streams.values(), found, strict=True):
            assert isinstance(one, EngineDeadError if stream.engine == 1 else Delta), one

    with_fleet(test, max_resumes=0)


def test_engine_hung_during_start_of_others_is_restarted() -> None:
    hung: list[EngineClient] = []  # the first engine may be ready after the second

    async def start(index: int, num_restarts: int, tokenizer: Any = None) -> EngineClient:
        client = await EngineClient.start(OPTIONS, log_stats_interval=None, timeout=LIMIT)
        if index == 0 and not num_restarts:
            stop(client)
            hung.append(client)
        elif not num_restarts:
            await until(lambda: bool(hung) and hung[0].dead.is_set())
        return client

    async def run() -> None:
        async with asyncio.timeout(60):
            fleet = await start_fleet(start, 2, 5)
            try:
                await until(lambda: fleet.num_alive == 2)
                assert fleet.num_hangs == [1, 0] and fleet.num_restarts == [1, 0]
            finally:
                await fleet.shutdown()

    asyncio.run(run())


def test_engine_hung_while_joining_is_restarted() -> None:
    """The engine has loaded its model and hangs while `EngineFleet` gives it the pause state."""
    num_started = 0

    async def start(index: int, num_restarts: int, tokenizer: Any = None) -> EngineClient:
        nonlocal num_started
        num_started += 1
        client = await EngineClient.start(OPTIONS, log_stats_interval=None, timeout=LIMIT)
        if num_started == 2:
            stop(client)
        return client

    async def run() -> None:
        async with asyncio.timeout(60):
            fleet = await start_fleet(start, 1, 5)
            try:
                os.kill(fleet.engines[0].info.pid, signal.SIGKILL)
                await until(lambda: fleet.num_alive == 1 and num_started == 3)
                assert (await read(stream_of(fleet, "g", SamplingParams(max_tokens=2)))).token_ids
            finally:
                await fleet.shutdown()

    asyncio.run(run())


def test_engine_in_a_debugger_is_not_killed(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(engine_client, "is_traced", lambda pid: True)

    async def test(fleet: EngineFleet) -> None:
        hung = fleet.engines[1]
        stop(hung)
        await until(lambda: hung.heartbeat.seconds_of_silence > LIMIT + 2 * INTERVAL)
        assert hung.is_alive
        stream = stream_of(fleet, "h", SamplingParams(max_tokens=4))
        await read(stream)
        assert stream.engine == 0
        monkeypatch.setattr(engine_client, "is_traced", lambda pid: False)
        await until(lambda: fleet.num_hangs[1] == 1)

    with_fleet(test)
    assert caplog.text.count("a debugger is attached to it") == 1


def test_attached_debugger_is_detected() -> None:
    assert not is_traced(os.getpid()) and not is_traced(2**30)
    if sys.platform != "linux":
        return
    traced = "import ctypes, sys; print(ctypes.CDLL(None).ptrace(0, 0, 0, 0), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", traced], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if process.stdout.readline().strip() != b"0":
            process.kill()
            pytest.skip("this machine allows no tracing")
        assert is_traced(process.pid)
        process.kill()
        ctypes.CDLL(None).ptrace(7, process.pid, 0, signal.SIGKILL)  # it may have stopped for its tracer
