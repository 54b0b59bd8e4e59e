"""Disk faults: the effect of a full disk on requests, a steady stream and the recording.

The disk is a file system in memory of one MiB (`mount -t tmpfs`), which takes root.
"""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

from _common import Targets
from _server_attacks import plain
from _server_beside import WatchedServer, watched_server
from _server_client import BrokenAnswer, Exchange, start
from _server_probe import read_metrics, run_async

from pointsman.core import PointsmanError, replay

SMALL, LARGE = "1m", "256m"
AT_ONCE, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 24, 48
SECONDS_TO_FILL, SECONDS_TO_WRITE = 90.0, 30.0
MAX_GAP = 0.5
"""Seconds between two tokens of a stream while the disk becomes full."""


def disk_full(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """A recording on a disk that fills up under load: one that stops, and one that waits for free space.

    Args:
        targets: of the benchmark.
        is_quick: whether the waiting recording is left out.
    """
    figures: dict[str, Any] = {}
    for when_full in ("stop", "wait"):
        if is_quick and when_full == "wait":
            targets.skip("disk full: a recording that waits for room", "--quick")
            continue
        with small_disk() as folder:
            if folder is None:
                targets.skip(f"disk full: --record-when-full {when_full}", "mount -t tmpfs needs root")
                continue
            figures[when_full] = _record(folder, when_full, targets)
    return figures or {"disk": "none that is small"}


@contextmanager
def small_disk() -> Iterator[Path | None]:
    """A folder that fills up soon; None: it cannot be made."""
    with tempfile.TemporaryDirectory() as name:
        command = ["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "pointsman", name]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            yield None
            return
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=True)


def _record(folder: Path, when_full: str, targets: Targets) -> dict[str, Any]:
    recording = folder / "run.jsonl"
    with watched_server("--record", str(recording), "--record-when-full", when_full) as server:
        figures = run_async(_load(server, folder, when_full))
        num_bytes = recording.stat().st_size
        log = server.server.log()
        figures["exit_code"] = server.server.stop()
        report = _replayed(recording)
    figures |= {"bytes": num_bytes, "steps": 0 if report is None else report.num_steps}
    name = f"disk full, {when_full}"
    targets.holds(
        f"{name}: {figures['complete']} of {figures['requests']} requests are complete; target: all",
        figures["complete"] == figures["requests"],
    )
    targets.at_most(f"{name}: seconds that a stream waits", figures["gap"], MAX_GAP)
    targets.holds(f"{name}: exit code {figures['exit_code']}; target: 0", figures["exit_code"] == 0)
    targets.holds(
        f"{name}: {figures['steps']} steps of the recording replay without a difference; target: all that it has",
        report is not None and not report.is_cut and report.num_steps > 0,
    )
    stopped = "is written no further" in log
    if when_full == "stop":
        met = figures["stopped"] == 1 and stopped
        targets.holds(f"{name}: the metric says {figures['stopped']:.0f}; target: 1, and a line in the log", met)
    else:
        met = figures["stopped"] == 0 and figures["waiting"] == 0 and not stopped
        targets.holds(
            f"{name}: stopped {figures['stopped']:.0f}, {figures['waiting']:.0f} bytes wait once there is room; "
            "target: 0 and 0",
            met,
        )
        recorded = 0 if report is None else report.num_requests
        targets.at_least(f"{name}: recorded requests, of those sent", recorded / figures["requests"], 1)
    return figures


def _replayed(recording: Path) -> Any:
    try:
        with recording.open() as lines:
            return replay(lines)
    except PointsmanError:
        return None


async def _load(server: WatchedServer, folder: Path, when_full: str) -> dict[str, Any]:
    """Send requests until the disk is full, and the same number again; then free space, if the recording waits."""

    async def fill() -> list[Exchange]:
        done: list[Exchange] = []
        limit = monotonic() + SECONDS_TO_FILL
        while not await _is_full(server) and monotonic() < limit:
            done += await _requests(server)
        done += await _requests(server)
        if when_full == "wait":
            command = ["mount", "-o", f"remount,size={LARGE}", str(folder)]
            await asyncio.to_thread(subprocess.run, command, check=True)
            done += await _requests(server)
        return done

    done, disturbance = await server.beside(fill)
    limit = monotonic() + SECONDS_TO_WRITE
    metrics = await read_metrics(server.address)
    while metrics["pointsman:recording_waiting_bytes"] and monotonic() < limit:
        await asyncio.sleep(0.1)
        metrics = await read_metrics(server.address)
    return {
        "requests": len(done),
        "complete": sum(map(_is_complete, done)),
        "gap": round(disturbance.gap, 3),
        "held": round(disturbance.held, 3),
        "stopped": metrics["pointsman:recording_stopped"],
        "waiting": metrics["pointsman:recording_waiting_bytes"],
    }


async def _is_full(server: WatchedServer) -> bool:
    """Whether the recording has stopped, or has waited for more than a moment."""
    metrics = await read_metrics(server.address)
    if metrics["pointsman:recording_stopped"]:
        return True
    if not metrics["pointsman:recording_waiting_bytes"]:
        return False
    await asyncio.sleep(1.0)
    return (await read_metrics(server.address))["pointsman:recording_waiting_bytes"] > 1 << 16


async def _requests(server: WatchedServer) -> list[Exchange]:
    exchanges = [await start(server.address, plain(PROMPT_TOKENS, OUTPUT_TOKENS)) for _ in range(AT_ONCE)]
    for exchange in exchanges:
        await exchange.end()
    return exchanges


def _is_complete(exchange: Exchange) -> bool:
    try:
        answer = exchange.answer()
        return answer.status == 200 and answer.json()["usage"]["completion_tokens"] == OUTPUT_TOKENS
    except (BrokenAnswer, KeyError, TypeError):
        return False
