"""Grammar faults: the cost of one tenant's slow grammars, and of a hung grammar process, for the other tenants.

Each scenario has a server with two tenants and a steady stream (`_server_beside.py`).
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path
from time import monotonic
from typing import Any

from _common import Targets
from _server_beside import WatchedServer, status_of, watched_server
from _server_client import Exchange, post, send, start
from _server_probe import read_metrics, run_async

NUM_SLOW, NUM_QUICK = 20, 6
SECONDS_TO_BEGIN, SECONDS_OF_OWN = 0.5, 10.0
"""Maximum seconds until the output of a simple schema begins, beside slow grammars of another tenant, and its own."""
MAX_GAP = 0.5
"""Maximum seconds between two tokens of the steady stream."""
SECONDS_BETWEEN = 1.0
SECONDS_AFTER_HANG, SECONDS_FOR_GOOD = 15.0, 75.0
"""Maximum seconds to the next schemas' outputs if the grammar process hangs, and if the next one hangs as well."""


def slow_grammar(number: int) -> dict[str, Any]:
    """A grammar that takes minutes to compile: the time grows with the cube of its length."""
    return {"grammar": f'root ::= "{number}" ' + "[^ ]*" * 12_500}


def simple_schema(name: str) -> dict[str, Any]:
    """A schema of no other request, because compiled schemas are kept."""
    properties = {name: {"type": "string", "maxLength": 12}, "line": {"type": "integer"}}
    return {"json": {"type": "object", "properties": properties, "required": [name, "line"]}}


def completion(tenant: str, structured_outputs: dict[str, Any]) -> bytes:
    """A streamed request for a text in this form."""
    body = {"prompt": [1, 2, 3, 4], "max_tokens": 8, "stream": True, "structured_outputs": structured_outputs}
    return post("/v1/completions", {**body, "user": tenant})


# ---------------------------------------------------------------------------------------------------- slow grammars


def slow_grammars(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Slow grammars of one tenant at once, and then simple schemas: of the other tenant, and of the same.

    Args:
        targets: of the benchmark.
        is_quick: fewer simple schemas.
    """
    with watched_server("--tenant-from", "user") as server:
        figures, disturbance = run_async(server.beside(lambda: _slow(server, 2 if is_quick else NUM_QUICK)))
    figures |= {"held": round(disturbance.held, 3), "gap": round(disturbance.gap, 3)}
    targets.at_most("slow grammars: seconds until another tenant's answer begins", figures["other"], SECONDS_TO_BEGIN)
    targets.at_most("slow grammars: seconds until an own answer begins", figures["own"], SECONDS_OF_OWN)
    targets.at_most("slow grammars: longest gap of a stream in seconds", figures["gap"], MAX_GAP)
    return figures


async def _slow(server: WatchedServer, num_quick: int) -> dict[str, Any]:
    """Seconds until the outputs of simple schemas begin: the longest of each tenant."""
    address = server.address
    undisturbed = [await _begin(server, "bob", f"before_{number}") for number in range(2)]
    slow = [await start(address, completion("alice", slow_grammar(number))) for number in range(NUM_SLOW)]
    own = asyncio.create_task(_begin(server, "alice", "own"))
    others = []
    for number in range(num_quick):
        others.append(await _begin(server, "bob", f"other_{number}"))
        await asyncio.sleep(SECONDS_BETWEEN)
    figures = {
        "slow": NUM_SLOW,
        "alone": round(max(undisturbed), 3),
        "other": round(max(others), 3),
        "own": round(await own, 3),
    }
    figures["own, later"] = round(await _begin(server, "alice", "own_later"), 3)
    for exchange in slow:
        exchange.hang_up()
    return figures


async def _begin(server: WatchedServer, tenant: str, name: str) -> float:
    """Seconds until the output of a new, simple schema begins.

    Raises:
        RuntimeError: it does not begin.
    """
    exchange = await start(server.address, completion(tenant, simple_schema(name)))
    await exchange.end()
    seconds = exchange.seconds_to_first_event
    if seconds is None or status_of(exchange) != 200:
        raise RuntimeError(f"the request with the schema {name} got no answer; its status is {status_of(exchange)}")
    return seconds


# ----------------------------------------------------------------------------------------------------- hung process


def hung_grammars(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """The grammar process is stopped by a signal, with requests behind it; then it hangs every time.

    Args:
        targets: of the benchmark.
        is_quick: the first part only.
    """
    with watched_server("--tenant-from", "user") as server:
        figures, disturbance = run_async(server.beside(lambda: _hang(server, 4, is_quick)))
    figures |= {"held": round(disturbance.held, 3), "gap": round(disturbance.gap, 3)}
    targets.at_most("hung grammars: seconds until the next schemas are answered", figures["next"], SECONDS_AFTER_HANG)
    targets.holds(f"hung grammars: their statuses are {figures['statuses']}; target: 200", figures["statuses"] == "200")
    targets.at_most("hung grammars: seconds of a schema afterwards", figures["afterwards"], SECONDS_TO_BEGIN)
    targets.holds(f"hung grammars: {figures['restarts']} restarts; target: 1", figures["restarts"] == 1)
    targets.at_most("hung grammars: longest gap of a stream in seconds", figures["gap"], MAX_GAP)
    if is_quick:
        targets.skip("a grammar process that hangs every time", "--quick")
    else:
        targets.holds(
            f"hung for good: the statuses are {figures['hung_statuses']}; target: 503",
            figures["hung_statuses"] == "503",
        )
        targets.at_most("hung for good: seconds until all are answered", figures["hung"], SECONDS_FOR_GOOD)
    return figures


async def _hang(server: WatchedServer, count: int, is_quick: bool) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    await _begin(server, "bob", "before")
    os.kill(_grammar_pids(server)[0], signal.SIGSTOP)
    figures["next"], figures["statuses"], _ = await _ask_all(server, "hung", count)
    figures["afterwards"] = round(await _begin(server, "bob", "afterwards"), 3)
    metrics = await read_metrics(server.address)
    figures["restarts"] = metrics["pointsman:grammar_process_restarts_total"]
    if not is_quick:
        stopping = asyncio.create_task(_stop_each_grammar_process(server))
        figures["hung"], figures["hung_statuses"], answers = await _ask_all(server, "for_good", count)
        stopping.cancel()
        figures["retry-after"] = " ".join(sorted({one.answer().headers.get("retry-after", "-") for one in answers}))
        await asyncio.sleep(float(figures["retry-after"]))
        figures["recovered"] = round(await _begin(server, "bob", "recovered"), 3)
    return figures


async def _ask_all(server: WatchedServer, name: str, count: int) -> tuple[float, str, list[Exchange]]:
    """Send new schemas at once: seconds to the last output, all statuses, the outputs."""
    began = monotonic()
    requests = [completion("bob", simple_schema(f"{name}_{number}")) for number in range(count)]
    answers = await asyncio.gather(*(send(server.address, request) for request in requests))
    statuses = Counter(map(status_of, answers))
    return round(monotonic() - began, 3), " ".join(map(str, sorted(statuses))), list(answers)


async def _stop_each_grammar_process(server: WatchedServer) -> None:
    """Stop each grammar process as soon as it exists."""
    while True:
        for pid in _grammar_pids(server):
            os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(0.02)


def _grammar_pids(server: WatchedServer) -> list[int]:
    """The grammar processes of the server's engine, without their children."""
    engine = server.server.engine_pid
    found = []
    for path in Path(f"/proc/{engine}/task").glob("*/children"):
        found += [int(pid) for pid in path.read_text().split()]
    return [pid for pid in found if b"grammar/worker.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
