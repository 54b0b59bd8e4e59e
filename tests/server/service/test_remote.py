"""Engines that connect over TCP, as from other machines: real engine processes, hosted by this test."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import re
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from _server_process import free_port

from pointsman.engine import SamplingParams
from pointsman.server.metrics.exposition import ServerMetrics
from pointsman.server.service import remote
from pointsman.server.service.engine_client import EngineClient, EngineStartError, start_process
from pointsman.server.service.fleet import EngineFleet, start_fleet
from pointsman.server.service.receiver import ClientStream
from pointsman.server.service.remote import EngineListener, HostLostError, Invitation, host_engine, recording_path
from pointsman.server.wire.messages import Delta, EngineRequest, Start
from pointsman.server.wire.questions import Stats
from tests.forked_engines import fork_server
from tests.server.engine_pool import cancel

pytestmark = pytest.mark.e2e

OPTIONS: dict[str, Any] = {"model": "demo", "num_blocks": 64, "block_size": 16, "max_num_seqs": 8, "num_threads": 1}
HOST = "127.0.0.1"


class Hosts:
    """Simulates the other machines: hosts an engine when a machine is free, and can lose it."""

    def __init__(self, num_free: int = 100, **options: Any) -> None:
        self.options = options
        self.free = asyncio.Semaphore(num_free)
        self.codes: list[int] = []
        self.lost: dict[asyncio.Task[Any] | None, asyncio.Event] = {}  # by the call that hosts
        self.invitations: list[Invitation] = []

    async def launch(self, invitation: Invitation) -> int:
        await self.free.acquire()
        self.invitations.append(invitation)
        lost = self.lost[asyncio.current_task()] = asyncio.Event()
        hosting = asyncio.ensure_future(host_engine(invitation, self.options))
        gone = asyncio.ensure_future(lost.wait())
        try:
            await asyncio.wait((hosting, gone), return_when=asyncio.FIRST_COMPLETED)
            if lost.is_set():  # the engine process survives without a host
                asyncio.get_running_loop().create_task(self.forget(hosting))
                raise HostLostError("the node is gone")
            self.codes.append(hosting.result())
            return hosting.result()
        except asyncio.CancelledError:
            hosting.cancel()
            self.codes.append(-signal.SIGKILL)
            raise
        finally:
            gone.cancel()

    async def forget(self, hosting: asyncio.Future[int]) -> None:
        self.codes.append(await hosting)


def with_listener(
    test: Callable[[EngineListener, Hosts], Awaitable[None]], hosts: Callable[[], Hosts] = Hosts, timeout: float = 30.0
) -> None:
    async def run() -> None:
        others = asyncio.all_tasks()
        there = hosts()
        listener = await EngineListener.open(HOST, there.launch, Start(OPTIONS, None, None, 0, False), timeout)
        try:
            async with asyncio.timeout(150):
                await test(listener, there)
        finally:
            await listener.close()
            await cancel(asyncio.all_tasks() - others)

    fork_server()  # which takes its time, before that of the test begins
    asyncio.run(run())


def stream_of(fleet: EngineFleet, name: str, max_tokens: int = 200) -> ClientStream:
    params = SamplingParams(temperature=0.9, seed=len(name), max_tokens=max_tokens, ignore_eos=True)
    return fleet.generate(EngineRequest(name, list(range(300, 320)), params))


async def read(stream: ClientStream) -> list[int]:
    whole = Delta()
    async for delta in stream:
        whole.merge(delta)
    return whole.token_ids


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.003)


def test_fleet_starts_with_first_engine_and_survives_lost_hosts() -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        fleet = await start_fleet(listener.start, 2, 100, wait_for_all=False)
        try:
            await run(fleet, hosts)
        finally:
            await fleet.shutdown()
        assert hosts.codes[-2:] == [0, 0]

    async def run(fleet: EngineFleet, hosts: Hosts) -> None:
        assert [engine.is_alive for engine in fleet.engines] == [True, False]
        expected = [await read(stream_of(fleet, name)) for name in ("a", "bb")]
        assert len(await fleet.ask_each(Stats())) == 1
        text = (await ServerMetrics(fleet, "demo").render())[0].decode()
        assert 'pointsman:engine_up{engine="1",model_name="demo"} 0.0' in text
        assert "pointsman:engine_process" not in text  # of another machine
        hosts.free.release()
        await until(lambda: fleet.num_alive == 2)
        assert fleet.num_restarts == [0, 0]
        for lose in (kill_engine, lose_host):
            streams = [stream_of(fleet, name) for name in ("a", "bb")]
            reading = asyncio.gather(*map(read, streams))
            await until(lambda: all(one.num_output_tokens > 20 for one in streams))  # noqa: B023 - awaited here
            assert {one.engine for one in streams} == {0, 1}
            doomed = fleet.engines[streams[0].engine]
            hosts.free.release()
            lose(doomed, hosts)
            assert await reading == expected
            await asyncio.wait_for(doomed.dead.wait(), 10)
            await until(lambda: fleet.num_alive == 2)
        await until(lambda: len(hosts.codes) == 2)
        assert hosts.codes == [-signal.SIGKILL, 0]  # the second one ended when its connection was closed
        assert sum(fleet.num_restarts) == 2

    with_listener(test, lambda: Hosts(num_free=1))


def test_hung_remote_engine_is_ended_and_its_requests_resumed() -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        fleet = await start_fleet(listener.start, 2, 100)
        try:
            expected = [await read(stream_of(fleet, name)) for name in ("a", "bb")]
            streams = [stream_of(fleet, name) for name in ("a", "bb")]
            reading = asyncio.gather(*map(read, streams))
            await until(lambda: all(one.num_output_tokens > 20 for one in streams))
            hung = fleet.engines[streams[0].engine]
            os.kill(hung.info.pid, signal.SIGSTOP)
            assert await reading == expected
            await until(lambda: fleet.num_alive == 2)
            assert sum(fleet.num_hangs) == 1 and hung.is_hung
            await until(lambda: not Path(f"/proc/{hung.info.pid}").exists())
        finally:
            await fleet.shutdown()

    with_listener(test, timeout=2.0)


def kill_engine(engine: EngineClient, hosts: Hosts) -> None:
    os.kill(engine.info.pid, signal.SIGKILL)


def lose_host(engine: EngineClient, hosts: Hosts) -> None:
    assert isinstance(engine._process, remote.RemoteProcess)
    hosts.lost[cast("asyncio.Task[int]", engine._process._hosting)].set()


def test_live_engines_get_lowest_numbers() -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        fleet = await start_fleet(listener.start, 4, 100, wait_for_all=False)
        metrics = ServerMetrics(fleet, "demo")
        fleet.num_wanted = 2
        try:
            await until(lambda: fleet.num_alive == 2)
            assert await ups(metrics) == {"0": 1.0, "1": 1.0}
            kill_engine(fleet.engines[0], hosts)
            await until(lambda: fleet.num_alive == 1)
            assert await ups(metrics) == {"0": 0.0, "1": 1.0}
            hosts.free.release()
            await until(lambda: fleet.num_alive == 2)
            assert await ups(metrics) == {"0": 1.0, "1": 1.0}
            fleet.num_wanted = 1
            kill_engine(fleet.engines[0], hosts)
            await until(lambda: fleet.num_alive == 1)
            assert await ups(metrics) == {"1": 1.0}
        finally:
            await fleet.shutdown()

    async def ups(metrics: ServerMetrics) -> dict[str, float]:
        text = (await metrics.render())[0].decode()
        for name in ("pointsman:engine_up", "pointsman:stats_age_seconds"):
            found = {one: float(value) for one, value in re.findall(rf'^{name}{{engine="(\d)".*}} (.*)$', text, re.M)}
            if name == "pointsman:engine_up":
                up = found
        assert up.keys() == found.keys()
        return up

    with_listener(test, lambda: Hosts(num_free=2))


def test_host_lost_before_engine_start_is_not_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        num_lost = 0

        async def launch(invitation: Invitation) -> int:
            nonlocal num_lost
            if num_lost < 2:
                num_lost += 1
                raise HostLostError("the replica is gone")
            return await hosts.launch(invitation)

        own = await EngineListener.open(HOST, launch, Start(OPTIONS, None, None, 0, False))
        try:
            fleet = await start_fleet(own.start, 1, 0)
            await fleet.shutdown()
        finally:
            await own.close()
        assert num_lost == 2
        assert not [one for one in caplog.records if one.levelno >= logging.WARNING]

    with_listener(test)


def test_failed_start_raises_and_leaves_no_process(tmp_path: Path) -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        with pytest.raises(ValueError, match="no model directory"):
            await start_fleet(listener.start, 2, 100, wait_for_all=False)
        await until(lambda: len(hosts.codes) == len(hosts.invitations))
        with pytest.raises(EngineStartError, match="no room"):
            await EngineListener.start(await opened(no_room), 0, 0)
        nowhere = Invitation(HOST, free_port(), b"")
        with pytest.raises(ConnectionError, match=r"cannot connect to the API process at 127\.0"):
            await host_engine(nowhere, {})
        with pytest.raises(EngineStartError, match="exit code 3"):
            await EngineListener.start(await opened(ends), 0, 0)

    async def no_room(invitation: Invitation) -> int:
        raise RuntimeError("no room")

    async def ends(invitation: Invitation) -> int:
        return 3

    async def opened(launch: remote.Launch) -> EngineListener:
        return await EngineListener.open(HOST, launch, Start(OPTIONS, None, None, 0, False))

    with_listener(test, lambda: Hosts(model=str(tmp_path / "nowhere")))


def test_a_start_that_is_cancelled_ends_its_host() -> None:
    async def test(listener: EngineListener, hosts: Hosts) -> None:
        starting = asyncio.ensure_future(listener.start(0, 0))
        await until(lambda: bool(hosts.invitations))
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        late = hosts.invitations[0]
        assert await answer_to(hello(late.token), late.port) == b""

    with_listener(test)


class Evil:
    """An object whose unpickling creates a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def hello(token: bytes, body: bytes = b"") -> bytes:
    return remote._HELLO.pack(token, time.monotonic(), len(body)) + body


async def answer_to(data: bytes, port: int) -> bytes:
    """The bytes that the listener sends until it closes the connection."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(data)
    try:
        return await reader.read()
    except ConnectionResetError:  # what was sent is not read
        return b""
    finally:
        writer.close()


def test_data_is_unpickled_only_after_a_token_that_is_valid_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evil = pickle.dumps(Evil(tmp_path / "made"))
    pickle.loads(pickle.dumps(Evil(tmp_path / "sanity")))
    assert (tmp_path / "sanity").exists()

    async def test(listener: EngineListener, hosts: Hosts) -> None:
        engine = await listener.start(0, 0)
        monkeypatch.setattr(remote, "SECONDS_FOR_HELLO", 0.2)  # the engine itself had time
        try:
            port, used = hosts.invitations[0].port, hosts.invitations[0].token
            for token in (b"x" * remote.TOKEN_BYTES, used):
                assert await answer_to(hello(token, evil), port) == b""
            assert await answer_to(b"GET / HTTP/1.1\r\n\r\n", port) == b""  # too short: it waits for the rest, not long
            assert not (tmp_path / "made").exists()
            assert (await engine.ask(Stats())).scheduler.num_running == 0
        finally:
            await engine.shutdown()

    with_listener(test)


def test_remote_engine_uses_the_api_process_clock() -> None:
    """The other machine's clock is 1000 s ahead."""

    async def launch(invitation: Invitation) -> int:
        with socket.create_connection((invitation.host, invitation.port)) as sock:
            body = pickle.dumps({})
            sock.sendall(remote._HELLO.pack(invitation.token, time.monotonic() + 1000, len(body)) + body)
            process = start_process(sock)
        return await asyncio.get_running_loop().run_in_executor(None, process.wait)

    async def run() -> None:
        listener = await EngineListener.open(HOST, launch, Start(OPTIONS, None, None, 0, False))
        engine = await listener.start(0, 0)
        try:
            # The engine process is in fact on this machine: its clock, set back, is 1000 s behind this one's.
            assert (await engine.ask(Stats())).time == pytest.approx(time.monotonic() - 1000, abs=5)
        finally:
            await engine.shutdown()
            await listener.close()

    asyncio.run(run())


def test_recordings_have_distinct_names() -> None:
    assert recording_path(None, 3, 1) is None
    names = {recording_path("run.jsonl", index, restarts) for index in (0, 1) for restarts in (0, 1)}
    assert names == {"run.jsonl", "run.jsonl.1", "run.jsonl.restart-1", "run.jsonl.1.restart-1"}
