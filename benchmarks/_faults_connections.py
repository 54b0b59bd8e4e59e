"""Connection faults: clients that send without end, and clients that connect and send nothing.

- **unbounded input**: 100 MB of trailers, of headers, of chunk extensions, sent fast and slowly. Measured are the
  memory of the API process, and the gaps of a steady stream beside them;
- **idle connections**: 2,000 connections to a server that may open 1,024 files, then the same number with a request
  that never ends. Meanwhile a health check, an operator and new clients, from the same address and from another one,
  are answered or refused.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from contextlib import ExitStack, suppress
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets
from _server_attacks import plain
from _server_beside import MAX_HELD, WatchedServer, watched_server
from _server_client import HOST, Address, BrokenAnswer, get, parse_answer
from _server_probe import MIB, read_metrics, run_async
from _server_process import resident_bytes

TOTAL_BYTES = 100_000_000
PIECE_BYTES = 16 * 1024
SECONDS_BETWEEN_PIECES = 0.002
"""Seconds between pieces of a client that sends slowly."""
MAX_GROWTH_MIB = 16
MAX_GAP = 1.0

NUM_FILES = 1024
NUM_IDLE, NUM_IDLE_QUICK = 2000, 1200
SECONDS_TO_SETTLE = 1.0
NUM_CHECKS, SECONDS_BETWEEN_CHECKS = 9, 0.1
MAX_SECONDS_TO_HEALTH = 0.2
OTHER_HOST = "127.0.0.2"
"""Another address of a client on this machine."""
WITH_FEW_FILES = (
    "-c",
    "import os, resource, sys; "
    f"resource.setrlimit(resource.RLIMIT_NOFILE, ({NUM_FILES}, {NUM_FILES})); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
)
"""Runs Python again with a lower soft and hard limit of open files."""

HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: {HOST}\r\nContent-Type: application/json\r\n".encode()
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LINE = b"X-Name: " + b"x" * 22 + b"\r\n"
ENDLESS = {
    "trailers": (CHUNKED + b"0\r\n", LINE),
    "headers": (HEAD, LINE),
    "chunk extensions": (CHUNKED, b"1;" + b"x" * 1017 + b"\r\n \r\n"),
}
"""The beginning of each request, and the bytes that follow repeatedly."""


def unbounded_input(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Requests that never end, beside a stream.

    Args:
        targets: of the benchmark.
        is_quick: whether the requests are only sent fast.

    Returns:
        Figures by kind of request.
    """
    figures = {}
    with watched_server() as server:
        for name in ENDLESS:
            for pace, seconds in (("fast", 0.0), ("slowly", SECONDS_BETWEEN_PIECES)):
                if is_quick and seconds:
                    continue
                what = f"{name}, {pace}"
                found = figures[what] = run_async(_beside_endless(server, name, seconds))
                targets.at_most(f"{what}: MiB that they cost the API", found["grown_mib"], MAX_GROWTH_MIB)
                targets.at_most(f"{what}: longest gap of a stream in seconds", found["gap"], MAX_GAP)
    if is_quick:
        targets.skip("endless requests that are sent slowly", "--quick")
    return figures


async def _beside_endless(server: WatchedServer, name: str, seconds: float) -> dict[str, Any]:
    (num_sent, took, grown), disturbance = await server.beside(lambda: _send_endless(server, name, seconds))
    return {
        "sent_mb": round(num_sent / 1e6, 1),
        "seconds": round(took, 2),
        "grown_mib": round(grown / MIB, 1),
        "held": round(disturbance.held, 3),
        "gap": round(disturbance.gap, 3),
    }


async def _send_endless(server: WatchedServer, name: str, seconds: float) -> tuple[int, float, int]:
    """Send until the server hangs up, or all is sent: bytes, seconds, and the growth of the API process."""
    begin, line = ENDLESS[name]
    piece, loop, pid = line * (PIECE_BYTES // len(line)), asyncio.get_running_loop(), server.server.pid
    before = peak = resident_bytes(pid)
    num_sent, started = 0, monotonic()
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, server.address)
        with suppress(OSError):  # the server has hung up
            await loop.sock_sendall(sock, begin)
            while num_sent < TOTAL_BYTES:
                await loop.sock_sendall(sock, piece)
                num_sent += len(piece)
                peak = max(peak, resident_bytes(pid))
                await asyncio.sleep(seconds)
        peak = max(peak, resident_bytes(pid))
    return num_sent, monotonic() - started, peak - before


# ------------------------------------------------------------------------------------------------ idle connections


def idle_connections(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Connections that are idle, and connections whose requests do not end, at a server with few files.

    Args:
        targets: of the benchmark.
        is_quick: whether there are fewer connections.

    Returns:
        Figures by kind of connection: the statuses of other clients, and after how many seconds.
    """
    count = NUM_IDLE_QUICK if is_quick else NUM_IDLE
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # both ends of all connections are on this machine
    unfinished = HEAD + b"Content-Length: 100\r\n\r\n{"
    with watched_server("--max-num-seqs", "8", before=WITH_FEW_FILES) as server:
        figures = {
            "idle": run_async(_crowd(server, count, b"")),
            "headers incomplete": run_async(_crowd(server, count, HEAD)),
            "bodies incomplete": run_async(_crowd(server, count, unfinished)),
        }
    for name, found in figures.items():
        targets.holds(f"{name}: /health gets {found['health']}; target: 200", found["health"] == 200)
        targets.at_most(f"{name}: seconds to /health", found["health_seconds"], MAX_SECONDS_TO_HEALTH)
        expected = 503 if name == "bodies incomplete" else 200
        for who in ("same", "other"):
            status = found[f"{who}_address"]
            targets.holds(
                f"{name}: a client of the {who} address gets {status}; target: {expected}", status == expected
            )
        targets.holds(f"{name}: an operator gets {found['operator']}; target: 200", found["operator"] == 200)
        targets.at_most(f"{name}: longest gap of a stream in seconds", found["gap"], MAX_GAP)
        targets.at_most(f"{name}: processor seconds for which the loop is held", found["held cpu"], MAX_HELD)
    return figures


async def _crowd(server: WatchedServer, count: int, sent: bytes) -> dict[str, Any]:
    found, disturbance = await server.beside(lambda: _ask_in_crowd(server.address, count, sent))
    waits = {"held": disturbance.held, "held cpu": disturbance.held_cpu, "gap": disturbance.gap}
    return {"connections": count, **found, **{name: round(seconds, 3) for name, seconds in waits.items()}}


async def _ask_in_crowd(address: Address, count: int, sent: bytes) -> dict[str, Any]:
    """The statuses of health checks, operators and new clients beside connections that send nothing more."""
    loop = asyncio.get_running_loop()
    with ExitStack() as stack:
        for _ in range(count):
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            with suppress(OSError):  # closed for a newer one
                await loop.sock_sendall(sock, sent)
        await asyncio.sleep(SECONDS_TO_SETTLE)
        checks = []
        for _ in range(NUM_CHECKS):
            checks.append(await _ask(address, get("/health"), HOST))
            await asyncio.sleep(SECONDS_BETWEEN_CHECKS)
        same, _ = await _ask(address, plain(24, 8), HOST)
        other, seconds = await _ask(address, plain(24, 8), OTHER_HOST)
        operator, _ = await _ask(address, get("/is_paused"), HOST)
        metrics = {}
        with suppress(OSError, BrokenAnswer):
            metrics = await read_metrics(address)
    return {
        "health": min(status for status, _ in checks),
        "health_seconds": round(median(seconds for _, seconds in checks), 3),
        "same_address": same,
        "other_address": other,
        "seconds": round(seconds, 3),
        "operator": operator,
        "open": int(metrics.get("pointsman:stage_held/connections", 0)),
    }


async def _ask(address: Address, request: bytes, source: str) -> tuple[int, float]:
    """The status of a response, and its seconds; 0: there was no response."""
    started, parts = monotonic(), []
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
            writer.write(request)
            while part := await reader.read(1 << 16):
                parts.append(part)
            writer.close()
        return parse_answer(b"".join(parts)).status, monotonic() - started
    except (OSError, BrokenAnswer, TimeoutError):
        return 0, monotonic() - started
