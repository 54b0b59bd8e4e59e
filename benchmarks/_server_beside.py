"""Disturbance of a steady stream and the API's event loop by attacks, crowds of clients and large bodies.

A process of its own reads the stream, so that the work of this process does not count as the server's. The API process
writes the times of its event loop; see `_server_beats.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets
from _server_attacks import ATTACKS, MAX_BYTES, Attack, plain
from _server_beats import SECONDS_BETWEEN_BEATS, Beats
from _server_client import HOST, Address, BrokenAnswer, Exchange, post, start
from _server_driver import stream_request
from _server_probe import MIB, run_async, wait_until_idle
from _server_process import ServerProcess, resident_bytes, start_server

MODEL = "demo"
LAUNCHER = Path(__file__).with_name("_server_beats.py")
STREAM_TOKENS = 16_000
"""Tokens of the steady stream; some must remain when the measurement is over."""
SETTLED_TOKENS, SECONDS_TO_SETTLE = 20, 0.3
MIN_SPAN = 1.0
"""Minimum seconds of an observation: a shorter one sees fewer of the stream's usual gaps."""
SECONDS_TO_ANSWER, SECONDS_TO_CALM = 60.0, 30.0
MAX_HELD, MAX_GAP_OVER, MAX_GAP_IN_CROWD = 0.15, 0.2, 1.0
"""Maximum seconds: of the event loop; of the stream's gap, beyond that beside a plain request; of the gap in a
crowd."""

STOPPED_TOKENS = 2000
LONG_NAME = "x" * (8 * MIB // STOPPED_TOKENS)
"""The model's second name. It is part of every event, and 8 MiB exceed the kernel's buffer for a reader."""
SECONDS_IN_CROWD = 3.0

UNFINISHED_BYTES = 3_990_000
"""Bytes sent of the body of `UNFINISHED_LENGTH`."""
UNFINISHED_LENGTH = 4_000_000
MAX_BODIES = 128 * MIB
"""Maximum memory of unfinished bodies in the API process, whatever their number: twice the 16 largest bodies."""
MAX_LEFT = 64 * MIB
SECONDS_TO_FREE = 10.0


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The effect of one event on others, in seconds."""

    held: float
    """The longest delay of the event loop."""
    held_cpu: float
    """Processor time of the API process meanwhile: much less if the machine had other work."""
    gap: float
    """The longest gap between two tokens of the stream."""


class WatchedServer:
    """A server whose event loop writes down when it is free. Made by `watched_server`."""

    def __init__(self, server: ServerProcess, folder: Path) -> None:
        self.server = server
        self._folder = folder
        self._loop = Beats(folder / "loop")
        self._num_streams = 0

    @property
    def address(self) -> Address:
        return HOST, self.server.port

    async def beside(
        self, event: Callable[[], Awaitable[Any]], *, waits_until_idle: bool = True
    ) -> tuple[Any, Disturbance]:
        """Run `event`; returns its result, and the gaps of a stream and the loop from its beginning to just after its
        end.

        `waits_until_idle`: return when the server has no request; not if other requests continue.

        Raises:
            RuntimeError: the stream did not begin or ended too early, or the loop never wrote.
        """
        async with self._reading() as stream:
            begin = monotonic()
            result = await event()
            await asyncio.sleep(max(SECONDS_TO_SETTLE, begin + MIN_SPAN - monotonic()))
            end = monotonic()
            gap = stream.longest_gap(begin, end)
        held = self._loop.longest_gap(begin, end)
        if not self._loop.count:
            raise RuntimeError("the server's event loop writes no times: the patched function may have been renamed")
        if waits_until_idle:
            await wait_until_idle(self.address, SECONDS_TO_CALM)
        late = max(0.0, held.seconds - SECONDS_BETWEEN_BEATS)
        return result, Disturbance(late, held.cpu_seconds, gap.seconds)

    @asynccontextmanager
    async def _reading(self) -> AsyncIterator[Beats]:
        """The times of a stream's tokens, once it is steady."""
        self._num_streams += 1
        path = self._folder / f"stream-{self._num_streams}"
        beats = Beats(path)
        command = [sys.executable, "-S", str(LAUNCHER), "read", str(path), str(self.server.port)]
        with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
            assert process.stdin is not None
            process.stdin.write(stream_request(MODEL, range(1, 25), STREAM_TOKENS))
            process.stdin.close()
            try:
                limit = monotonic() + SECONDS_TO_CALM
                while beats.count < SETTLED_TOKENS:
                    if monotonic() > limit or process.poll() is not None:
                        raise RuntimeError(f"the stream had only {beats.count} tokens within {SECONDS_TO_CALM:.0f} s")
                    await asyncio.sleep(0.02)
                yield beats
                if process.poll() is not None:
                    raise RuntimeError("the stream ended during the measurement; raise its number of output tokens")
            finally:
                process.kill()
                path.unlink()


@contextmanager
def watched_server(*options: str, before: tuple[str, ...] = ()) -> Iterator[WatchedServer]:
    """A server on the demo model at its full length; a prompt that is repeated is computed every time.

    Args:
        options: of `pointsman serve`.
        before: arguments of Python before the server's; the program must run Python again with those that follow.
    """
    sizes = ("--model", MODEL, "--num-blocks", "2304", "--no-enable-prefix-caching")
    with tempfile.TemporaryDirectory() as folder:
        program = (*before, str(LAUNCHER), "serve", f"{folder}/loop")
        with start_server(*sizes, *options, program=program) as server:
            watched = WatchedServer(server, Path(folder))
            run_async(_warm_up(watched.address))
            yield watched


async def _warm_up(address: Address) -> None:
    """One request of each kind: the first ones compile kernels, import modules and read files."""
    embedding = post("/v1/embeddings", {"input": "Hi"})
    text = post("/tokenize", {"prompt": "Hi"})
    chat = post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2})
    for request in (plain(1, 1), plain(600, 8, 4), chat, embedding, text):
        await _send(address, request)


# ---------------------------------------------------------------------------------------------------------- attacks


def attacks(num_rounds: int, targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Run each attack beside a stream, alternating with a plain request of the same number of tokens.

    Args:
        num_rounds: of each.
        targets: of the benchmark.
        is_quick: whether only the attacks of the short form run.

    Returns:
        Figures by attack: medians, in seconds.
    """
    figures = {}
    chosen = [attack for attack in ATTACKS if attack.is_quick or not is_quick]
    with watched_server() as server:
        for attack in chosen:
            found = figures[attack.name] = run_async(_attack(server, attack, num_rounds))
            targets.at_most(f"{attack.name}: seconds that the event loop is held", found["held"], MAX_HELD)
            targets.at_most(f"{attack.name}: seconds that a stream waits beyond plain", found["over"], MAX_GAP_OVER)
    if is_quick:
        targets.skip(f"the other {len(ATTACKS) - len(chosen)} attacks", "--quick")
    return figures


async def _attack(server: WatchedServer, attack: Attack, num_rounds: int) -> dict[str, Any]:
    request = attack.request()
    statuses, seconds, attacked, beside_plain = set(), [], [], []
    for _ in range(num_rounds):
        exchange, disturbance = await server.beside(lambda: _send(server.address, request))
        statuses.add(status_of(exchange))
        seconds.append((exchange.ended_at or monotonic()) - exchange.sent_at)
        attacked.append(disturbance)
        counterpart = plain_counterpart(exchange)
        beside_plain.append((await server.beside(lambda: _send(server.address, counterpart)))[1])  # noqa: B023
    return {
        "MB": round(len(request) / 1e6, 1),
        "status": " ".join(map(str, sorted(statuses))),
        "seconds": round(median(seconds), 3),
        "held": round(median(each.held for each in attacked), 3),
        "held cpu": round(median(each.held_cpu for each in attacked), 3),
        "gap": round(median(each.gap for each in attacked), 3),
        "plain held": round(median(each.held for each in beside_plain), 3),
        "plain gap": round(median(each.gap for each in beside_plain), 3),
        "over": round(median(a.gap - b.gap for a, b in zip(attacked, beside_plain, strict=True)), 3),
    }


async def _send(address: Address, request: bytes) -> Exchange:
    """Send, and wait for the end of the answer, at most a minute."""
    exchange = await start(address, request)
    if not await exchange.end(SECONDS_TO_ANSWER):
        exchange.hang_up()
    return exchange


def status_of(exchange: Exchange) -> int:
    """The status of the response; 0 without a complete response."""
    try:
        return exchange.answer().status
    except BrokenAnswer:
        return 0


def plain_counterpart(exchange: Exchange) -> bytes:
    """A plain request with the prompt tokens and samples of a response; the smallest request if nothing was run."""
    try:
        answer = exchange.answer()
        body = answer.json() if answer.status == 200 else {}
    except BrokenAnswer:
        body = {}
    if not isinstance(body, dict) or "usage" not in body:
        return plain(1, 1)
    usage, num_samples = body["usage"], len(body.get("choices", ())) or 1
    num_output_tokens = max(1, usage.get("completion_tokens", 0) // num_samples)
    return plain(usage["prompt_tokens"], num_output_tokens, num_samples)


# ----------------------------------------------------------------------------------------------------------- crowds


def crowds(num_rounds: int, num_clients: int, num_stopped: int, targets: Targets) -> dict[str, Any]:
    """Many clients at once, all with valid requests.

    Args:
        num_rounds: of each.
        num_clients: requests sent, or connections opened, at once.
        num_stopped: clients that do not read.
        targets: of the benchmark.

    Returns:
        Figures by crowd: medians, in seconds.
    """
    events: dict[str, tuple[int, Callable[[Address], Awaitable[str]]]] = {
        "requests at once": (num_clients, lambda address: _ask_at_once(address, num_clients)),
        "idle connections": (num_clients, lambda address: _connect(address, num_clients)),
        "stopped readers": (num_stopped, lambda address: _stop_reading(address, num_stopped)),
    }
    figures = {}
    with watched_server("--served-model-name", MODEL, "--served-model-name", LONG_NAME) as server:
        for name, (count, event) in events.items():
            found = figures[name] = {"clients": count, **run_async(_crowd(server, event, num_rounds))}
            targets.at_most(f"{name}: longest gap of a stream in seconds", found["gap"], MAX_GAP_IN_CROWD)
    return figures


async def _crowd(
    server: WatchedServer, event: Callable[[Address], Awaitable[str]], num_rounds: int
) -> dict[str, float | str]:
    found = [await server.beside(lambda: event(server.address)) for _ in range(num_rounds)]
    return {
        "answers": found[-1][0],
        "held": round(median(each.held for _, each in found), 3),
        "held cpu": round(median(each.held_cpu for _, each in found), 3),
        "gap": round(median(each.gap for _, each in found), 3),
    }


async def _ask_at_once(address: Address, count: int) -> str:
    """Send small requests, all before the first has its response; returns the number of each status."""
    request = plain(24, 8)
    exchanges = [await start(address, request) for _ in range(count)]
    for exchange in exchanges:
        if not await exchange.end(SECONDS_TO_ANSWER):
            exchange.hang_up()
    statuses = Counter(map(status_of, exchanges))
    return ", ".join(f"{number} x {status}" for status, number in sorted(statuses.items()))


async def _connect(address: Address, count: int) -> str:
    """Connections on which nothing is sent for a while."""
    loop = asyncio.get_running_loop()
    transports = [(await loop.create_connection(asyncio.Protocol, *address))[0] for _ in range(count)]
    await asyncio.sleep(SECONDS_IN_CROWD)
    for transport in transports:
        transport.abort()
    return "none"


async def _stop_reading(address: Address, count: int) -> str:
    """Open long streams and do not read them."""
    request = stream_request(LONG_NAME, range(1, 25), STOPPED_TOKENS)
    exchanges = []
    for _ in range(count):
        exchanges.append(await start(address, request, receive_buffer=4096))
        exchanges[-1].stop_reading()
    await asyncio.sleep(SECONDS_IN_CROWD)
    for exchange in exchanges:
        exchange.hang_up()
    return "none"


# ----------------------------------------------------------------------------------------------------- large bodies


def large_bodies(num_unfinished: int, targets: Targets) -> dict[str, Any]:
    """Bodies that are never finished, and bodies that are too large.

    Args:
        num_unfinished: connections that send most of a body and stop.
        targets: of the benchmark.
    """
    with watched_server() as server:
        figures = run_async(_large_bodies(server, num_unfinished))
    targets.at_most("unfinished bodies: MiB that they cost the API", figures["grown_mib"], MAX_BODIES // MIB)
    targets.at_most("unfinished bodies: MiB left once they are gone", figures["left_mib"], MAX_LEFT // MIB)
    targets.at_most("unfinished bodies: longest gap of a stream in seconds", figures["gap"], MAX_GAP_IN_CROWD)
    for name in ("announced", "chunked"):
        status, closed = figures[f"{name}_status"], figures[f"{name}_closed"]
        then = "closed" if closed else "open"
        targets.holds(
            f"a body that is too large, {name}: status {status}, then the connection is {then}; target: 413, closed",
            status == 413 and closed,
        )
    return figures


async def _large_bodies(server: WatchedServer, num_unfinished: int) -> dict[str, Any]:
    address, pid = server.address, server.server.pid
    await _send(address, plain(24, 8))
    before = resident_bytes(pid)
    (peak, num_open), disturbance = await server.beside(lambda: _send_unfinished(address, pid, num_unfinished))
    limit = monotonic() + SECONDS_TO_FREE
    while (after := resident_bytes(pid)) > before + MAX_LEFT and monotonic() < limit:
        await asyncio.sleep(0.1)
    figures = {
        "connections": num_unfinished,
        "still_open": num_open,
        "before_mib": round(before / MIB, 1),
        "peak_mib": round(peak / MIB, 1),
        "after_mib": round(after / MIB, 1),
        "grown_mib": round((peak - before) / MIB, 1),
        "left_mib": round((after - before) / MIB, 1),
        "held": round(disturbance.held, 3),
        "gap": round(disturbance.gap, 3),
    }
    for name, request in (("announced", too_large()), ("chunked", too_large_in_chunks())):
        exchange = await start(address, request)
        closed = await exchange.end(5.0)
        exchange.hang_up()
        figures |= {f"{name}_status": status_of(exchange), f"{name}_closed": closed}
    return figures


async def _send_unfinished(address: Address, pid: int, count: int) -> tuple[int, int]:
    """Send most of a body on many connections, wait, hang up: (maximum memory of the API meanwhile, connections that
    were
    open at the end)."""
    body = b'{"prompt":"' + b"a" * (UNFINISHED_BYTES - 11)
    whole = post("/v1/completions", body)
    request = whole.replace(b"Content-Length: %d" % len(body), b"Content-Length: %d" % UNFINISHED_LENGTH, 1)
    exchanges, peak = [], resident_bytes(pid)
    for _ in range(count):
        exchanges.append(await start(address, request))
        peak = max(peak, resident_bytes(pid))
    limit = monotonic() + SECONDS_IN_CROWD
    while monotonic() < limit:
        peak = max(peak, resident_bytes(pid))
        await asyncio.sleep(0.02)
    num_open = sum(exchange.ended_at is None for exchange in exchanges)
    for exchange in exchanges:
        exchange.hang_up()
    return peak, num_open


def too_large() -> bytes:
    """The beginning of a request with its length in the headers, on a reusable connection."""
    head = post("/v1/completions", b"").replace(b"Connection: close\r\n", b"")
    return head.replace(b"Content-Length: 0", b"Content-Length: %d" % (MAX_BYTES + 1)) + b"x" * 65536


def too_large_in_chunks() -> bytes:
    """A body that is too large and is sent in chunks without a length, so that the server must count its bytes."""
    head = post("/v1/completions", b"").replace(b"Connection: close\r\n", b"")
    chunk = b"%x\r\n" % 65536 + b" " * 65536 + b"\r\n"
    return head.replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + chunk * (MAX_BYTES // 65536 + 4)
