"""Engines that hang: one of two, or the only one, is stopped (SIGSTOP) while clients stream.

A stopped process keeps its connection and sends nothing, like a process whose device call never returns. Beside it,
small requests keep coming; those that are sent to the hung engine wait until it counts as dead.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets
from _server_client import HOST, Address, BrokenAnswer, Exchange, post, start
from _server_probe import open_requests, read_metrics, run_async
from _server_process import ServerProcess, start_server

MODEL = "demo"
SIZES = ("--model", MODEL, "--max-num-seqs", "16", "--max-model-len", "2048", "--num-blocks", "1024", "--no-warm-up")
"""Without warming up: a restarted engine then takes the two cores from the others for less time."""
SECONDS_TO_START = 300.0
DEFAULT_LIMIT, SHORT_LIMIT = 30, 3
NUM_HANGS, NUM_QUICK_HANGS = 20, 2
"""Number of hangs with the short limit."""
SECONDS_TO_NOTICE = 5.0
"""Maximum seconds beyond the limit; after that no request may be sent to a hung engine."""
SECONDS_TO_RETURN, SECONDS_TO_END, SECONDS_FOR_ERROR = 150.0, 60.0, 60.0
MAX_GAP = 1.5
"""Maximum gap of the other engine's streams while a new one loads its model on a machine with two cores."""
NUM_STREAMS, STREAM_TOKENS, SMALL_TOKENS = 6, 1500, 4
SECONDS_BETWEEN_SMALL = 0.25
SECONDS_HELD = 2.0
"""A small request that waits longer for its first token, and until the hang is noticed, was sent to that engine."""
_HANG = re.compile(r"has given no sign of life .*\(the limit is ([0-9]+) s")
_PROCESS = re.compile(r"engine ([0-9]+) (?:is process|runs (?:again, )?as process) ([0-9]+)")


def completion(number: int, tokens: int) -> bytes:
    """A stream of an exact number of tokens; the prompt depends on the number."""
    body = {"model": MODEL, "prompt": [1 + (number * 131 + i * 7) % 2000 for i in range(24)], "max_tokens": tokens}
    body |= {"ignore_eos": True, "temperature": 0.0, "stream": True}
    return post("/v1/completions", body, {"X-Request-Id": f"hang-{number}-"})


def is_complete(exchange: Exchange) -> bool:
    """Whether the stream ended with all its tokens."""
    try:
        stream = exchange.answer().stream()
    except BrokenAnswer:
        return False
    return stream.is_done and stream.error is None and stream.finish_reasons == {0: ["length"]}


def error_of(exchange: Exchange) -> str:
    """The error that the client got, by a status or within the stream; "": no error."""
    try:
        answer = exchange.answer()
        error = answer.json()["error"] if answer.status != 200 else answer.stream().error
    except BrokenAnswer:
        return ""
    return str(error["message"]) if error else ""


def process_of(server: ServerProcess, engine: int) -> int:
    """The process id of a running engine, from the log."""
    return {int(number): int(pid) for number, pid in _PROCESS.findall(server.log())}[engine]


@dataclass(frozen=True, slots=True)
class Hang:
    """One hang of one of two engines; seconds since it was stopped."""

    with_output: int
    """Streams of the engine that had a token when it was stopped,"""
    without_output: int
    """and requests that were sent to it and had none."""
    lost_with_output: int
    lost_without_output: int
    last_sent: float
    """Seconds until the last request was sent to it."""
    noticed: float
    """Seconds until the engine counts as dead; no request is sent to it afterwards."""
    limit: float
    """The limit in seconds: the option, or on a slow machine ten times the longest silence in a step, if longer."""
    back: float
    """Seconds until the engine runs again."""
    gap: float
    """The longest gap in the streams of the other engine."""


async def _hang(server: ServerProcess, engine: int, numbers: Iterator[int]) -> Hang:
    """Stop an engine under load; returns when it runs again and all requests have ended.

    Raises:
        TimeoutError: it does not run again, or a request does not end.
    """
    address = (HOST, server.port)
    streams = {
        (number := next(numbers)): await start(address, completion(number, STREAM_TOKENS)) for _ in range(NUM_STREAMS)
    }
    for stream in streams.values():
        await stream.begin()
    homes = {int(one["id"].split("hang-")[1].split("-")[0]): one["engine"] for one in await open_requests(address)}
    num_restarts = (await read_metrics(address))["pointsman:engine_restarts_total"]
    os.kill(process_of(server, engine), signal.SIGSTOP)
    stopped = monotonic()
    small: list[Exchange] = []
    noticed = limit = back = 0.0
    num_before = len(_HANG.findall(server.log()))
    while not back:
        small.append(await start(address, completion(next(numbers), SMALL_TOKENS)))
        await asyncio.sleep(SECONDS_BETWEEN_SMALL)
        if not noticed and len(limits := _HANG.findall(server.log())) > num_before:
            noticed, limit = monotonic(), float(limits[-1])
        if noticed and len(small) % 4 == 0:
            asked = await read_metrics(address)
            if asked["pointsman:engine_restarts_total"] > num_restarts and asked["pointsman:engine_up"] == 2:
                back = monotonic() - stopped
        if monotonic() - stopped > SECONDS_TO_RETURN:
            raise TimeoutError(f"engine {engine} was not restarted within {SECONDS_TO_RETURN:g} s")
    for exchange in (*streams.values(), *small):
        if not await exchange.end(SECONDS_TO_END):
            raise TimeoutError(f"a request did not end within {SECONDS_TO_END:g} s")
    cut = [stream for number, stream in streams.items() if homes.get(number) == engine]
    held = [one for one in small if _waited_for_hung_engine(one, noticed)]
    return Hang(
        with_output=len(cut),
        without_output=len(held),
        lost_with_output=sum(not is_complete(stream) for stream in cut),
        lost_without_output=sum(not is_complete(one) for one in small),
        last_sent=max((one.sent_at - stopped for one in held), default=0.0),
        noticed=noticed - stopped,
        limit=limit,
        back=back,
        gap=max(
            (_longest_gap(one, stopped) for number, one in streams.items() if homes.get(number) == 1 - engine),
            default=0.0,
        ),
    )


def _waited_for_hung_engine(exchange: Exchange, noticed: float) -> bool:
    """Whether a request waited for its first token until a hang was noticed."""
    began = exchange.sent_at + SECONDS_TO_END if exchange.first_event_at is None else exchange.first_event_at
    return exchange.sent_at < noticed <= began + SECONDS_BETWEEN_SMALL and began - exchange.sent_at > SECONDS_HELD


def _longest_gap(exchange: Exchange, since: float) -> float:
    times = exchange.times
    return max((later - max(before, since) for before, later in pairwise(times) if later > since), default=0.0)


def hung_engine(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """One of two engines hangs, repeatedly with a short limit, and once with the default limit.

    Args:
        targets: of the benchmark.
        is_quick: fewer hangs, and none with the default limit.
    """
    plan = [(SHORT_LIMIT, NUM_QUICK_HANGS if is_quick else NUM_HANGS)]
    if is_quick:
        targets.skip("a hung engine with the default limit", "--quick")
    else:
        plan.append((DEFAULT_LIMIT, 1))
    figures = {}
    for limit, num_hangs in plan:
        options = ("--data-parallel-size", "2", "--engine-timeout", str(limit), "--max-engine-restarts", "1000")
        server = start_server(*SIZES, *options, timeout=SECONDS_TO_START)
        try:
            hangs = run_async(_hangs(server, num_hangs))
        finally:
            server.stop()
        figures[f"limit of {limit} s"] = found = _summary(hangs)
        name = f"hung engine, limit {limit} s"
        targets.at_most(f"{name}: seconds beyond the limit until none goes there", found["beyond"], SECONDS_TO_NOTICE)
        targets.holds(
            f"{name}: {found['lost_without_output']} requests without output are lost; target: 0",
            found["lost_without_output"] == 0,
        )
        targets.holds(
            f"{name}: {found['lost_with_output']} of {found['with_output']} streams with output are lost; target: 0",
            found["lost_with_output"] == 0,
        )
        targets.at_most(f"{name}: longest gap of the other engine's streams", found["longest_gap"], MAX_GAP)
    return figures


async def _hangs(server: ServerProcess, num_hangs: int) -> list[Hang]:
    numbers = count()
    return [await _hang(server, number % 2, numbers) for number in range(num_hangs)]


def _summary(hangs: Sequence[Hang]) -> dict[str, Any]:
    return {
        "hangs": len(hangs),
        "with_output": sum(hang.with_output for hang in hangs),
        "lost_with_output": sum(hang.lost_with_output for hang in hangs),
        "without_output": sum(hang.without_output for hang in hangs),
        "lost_without_output": sum(hang.lost_without_output for hang in hangs),
        "last_sent": round(max(hang.last_sent for hang in hangs), 2),
        "limits": f"{min(hang.limit for hang in hangs):g} to {max(hang.limit for hang in hangs):g}",
        "beyond": round(max(hang.noticed - hang.limit for hang in hangs), 2),
        "median_back": round(median(hang.back for hang in hangs), 1),
        "median_gap": round(median(hang.gap for hang in hangs), 3),
        "longest_gap": round(max(hang.gap for hang in hangs), 3),
    }


def hung_single_engine(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """The only engine hangs: every client gets an error, and the server ends.

    Args:
        targets: of the benchmark.
        is_quick: with the short limit, in place of the default one.
    """
    limit = SHORT_LIMIT if is_quick else DEFAULT_LIMIT
    server = start_server(*SIZES, "--engine-timeout", str(limit), timeout=SECONDS_TO_START)
    try:
        figures = run_async(_hang_alone((HOST, server.port), server.engine_pid))
        figures["exit_code"] = server.wait(SECONDS_TO_END)
    finally:
        server.stop()
    targets.holds(
        f"hung single engine: {figures['with_error']} of {figures['requests']} clients have an error that says so",
        figures["with_error"] == figures["requests"],
    )
    targets.at_most("hung single engine: seconds until the last client knew", figures["seconds"], SECONDS_FOR_ERROR)
    targets.holds(f"hung single engine: exit code {figures['exit_code']}; target: 1", figures["exit_code"] == 1)
    return figures


async def _hang_alone(address: Address, pid: int) -> dict[str, Any]:
    """Stop the engine; returns the running streams, and the requests that came meanwhile."""
    exchanges = [await start(address, completion(number, STREAM_TOKENS)) for number in range(NUM_STREAMS)]
    for exchange in exchanges:
        await exchange.begin()
    os.kill(pid, signal.SIGSTOP)
    stopped = monotonic()
    for number in range(NUM_STREAMS, 2 * NUM_STREAMS):
        exchanges.append(await start(address, completion(number, SMALL_TOKENS)))
        await asyncio.sleep(SECONDS_BETWEEN_SMALL)
    for exchange in exchanges:
        await exchange.end(SECONDS_FOR_ERROR)
    ends = [exchange.ended_at or float("inf") for exchange in exchanges]
    for exchange in exchanges:
        exchange.hang_up()
    return {
        "requests": len(exchanges),
        "with_error": sum("no sign of life" in error_of(exchange) for exchange in exchanges),
        "seconds": round(max(ends) - stopped, 2),
    }
