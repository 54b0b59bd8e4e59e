"""Tenant faults: how long one tenant waits for another's long texts, requests and prompts of numbers.

- **tokenizing**: a tenant sends long texts that are slow to tokenize, to be completed and at /tokenize; short texts of
  another tenant and of the same are answered meanwhile;
- **fair-door**: a tenant sends thousands of requests at once; under `--order fair`, another one's first tokens come as
  early as when the first tenant only fills the batch;
- **long-prompts**: prompts of a million numbers are refused, and one of 8,000 is accepted, while a stream continues.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets
from _server_beside import WatchedServer, status_of, watched_server
from _server_client import HOST, Address, Exchange, percentile, post, start
from _server_probe import run_async
from _server_process import start_server

TENANT = "X-Tenant"
BY_HEADER = ("--tenant-from", f"header:{TENANT}")
SECONDS_TO_ANSWER = 240.0

EMOJI = "\U0001f600\U0001f680\U0001f9e0\U0001f40d\U0001f355"
TEXT_BYTES = 2_000_000
NUM_TEXTS = 24
SHORT = {"prompt": "The import statement", "max_tokens": 1}
SECONDS_BETWEEN_SHORT = 0.1
MAX_SECONDS_OF_SHORT = 0.5
MAX_GAP_BESIDE_TEXTS = 0.2

NUM_FLOOD, NUM_OTHERS, NUM_SEQS = 2000, 50, 32
NUM_TOKENS = 64
SECONDS_BETWEEN_OTHERS = 0.1
MAX_TTFT_RATIO = 2.0

NUM_NUMBERS = 1_300_000
NUM_TAKEN = 8000
MAX_GAP = 0.2


async def ask(address: Address, request: bytes) -> Exchange:
    """Send, and wait for the end of the response."""
    exchange = await start(address, request)
    if not await exchange.end(SECONDS_TO_ANSWER):
        exchange.hang_up()
    return exchange


def statuses(exchanges: list[Exchange]) -> str:
    """The number of each status, as text."""
    found = Counter(map(status_of, exchanges))
    return ", ".join(f"{number} x {status}" for status, number in sorted(found.items()))


# ------------------------------------------------------------------------------------------------------- tokenizing


def tokenizing(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Texts of 2 MB of emoji from one tenant, and short texts of two."""
    num_texts = NUM_TEXTS // 4 if is_quick else NUM_TEXTS
    text = (EMOJI * (TEXT_BYTES // len(EMOJI.encode()) + 1)).encode()[:TEXT_BYTES].decode()

    def request(path: str, **fields: Any) -> bytes:
        return post(path, json.dumps({"prompt": text, **fields}, ensure_ascii=False).encode(), {TENANT: "a"})

    long, names = request("/v1/completions", max_tokens=1), request("/tokenize", return_token_strs=True)
    figures = {}
    with watched_server(*BY_HEADER) as server:
        for name, request in (("completions", long), ("tokenize with names", names)):
            found = figures[name] = run_async(_tokenize(server, request, num_texts))
            for whose in ("another's", "its own"):
                what = f"tokenizing, {name}: longest time of {whose} short text in seconds"
                targets.at_most(what, found[whose], MAX_SECONDS_OF_SHORT)
            targets.at_most(f"tokenizing, {name}: longest gap of a stream", found["gap"], MAX_GAP_BESIDE_TEXTS)
    return figures


async def _tokenize(server: WatchedServer, request: bytes, count: int) -> dict[str, Any]:
    async def event() -> tuple[list[Exchange], dict[str, list[float]], float]:
        began = monotonic()
        pending = [asyncio.ensure_future(ask(server.address, request)) for _ in range(count)]
        seconds: dict[str, list[float]] = {"a": [], "b": []}
        while not all(task.done() for task in pending):
            for tenant, times in seconds.items():
                short = await ask(server.address, post("/v1/completions", SHORT, {TENANT: tenant}))
                times.append(short.seconds if status_of(short) == 200 else float("inf"))
            await asyncio.sleep(SECONDS_BETWEEN_SHORT)
        return [task.result() for task in pending], seconds, monotonic() - began

    (exchanges, seconds, lasted), disturbance = await server.beside(event)
    return {
        "answers": statuses(exchanges),
        "seconds": round(lasted, 2),
        "another's": round(max(seconds["b"]), 3),
        "its own": round(max(seconds["a"]), 3),
        "held": round(disturbance.held, 3),
        "held cpu": round(disturbance.held_cpu, 3),
        "gap": round(disturbance.gap, 3),
    }


# -------------------------------------------------------------------------------------------------------- fair door


def fair_door(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Thousands of requests of one tenant at once, and 50 of another."""
    num_flood = NUM_FLOOD // 4 if is_quick else NUM_FLOOD
    sizes = ("--max-num-seqs", str(NUM_SEQS), "--max-model-len", "2048", "--num-blocks", "2304")
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys")
        keys.write_text("".join(f"{tenant}:{_key(tenant)}\n" for tenant in "ab"))
        options = ("--model", "demo", *sizes, "--order", "fair", "--api-key-file", str(keys))
        with start_server(*options) as server:
            address = (HOST, server.port)
            full, flooded = run_async(_two_loads(address, num_flood))
    figures = {"batch full": full, f"{num_flood} at once": flooded}
    targets.holds(
        f"fair door: {flooded['served']} of {NUM_OTHERS} requests of another tenant are served; target: all",
        flooded["served"] == NUM_OTHERS,
    )
    targets.at_most(
        "fair door: p99 TTFT of another tenant, of that beside a full batch",
        flooded["p99 ttft"] / full["p99 ttft"],
        MAX_TTFT_RATIO,
    )
    return figures


def _key(tenant: str) -> str:
    return f"key-of-{tenant}-0123456789"


def _request(tenant: str, number: int, *, stream: bool = False) -> bytes:
    body: dict[str, Any] = {
        "prompt": f"{number} requests of {tenant}",
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
    }
    body["stream"] = stream
    return post("/v1/completions", body, {"Authorization": f"Bearer {_key(tenant)}"})


async def _two_loads(address: Address, num_flood: int) -> tuple[dict[str, Any], dict[str, Any]]:
    await asyncio.gather(*(ask(address, _request("b", number)) for number in range(NUM_SEQS)))  # warm
    is_over = asyncio.Event()

    async def keep_sending(number: int) -> Exchange:
        while True:
            exchange = await ask(address, _request("a", number))
            if is_over.is_set():
                return exchange

    filling = [asyncio.ensure_future(keep_sending(number)) for number in range(NUM_SEQS)]
    await asyncio.sleep(1.0)
    beside_full = await _others(address)
    is_over.set()
    full = _figures(beside_full, list(await asyncio.gather(*filling)))
    sending = asyncio.ensure_future(_send_at_once(address, num_flood))
    beside_flood = await _others(address)
    return full, _figures(beside_flood, await sending)


async def _send_at_once(address: Address, count: int) -> list[Exchange]:
    tasks = [asyncio.ensure_future(ask(address, _request("a", number))) for number in range(count)]
    return list(await asyncio.gather(*tasks))


async def _others(address: Address) -> list[Exchange]:
    tasks = []
    for number in range(NUM_OTHERS):
        tasks.append(asyncio.ensure_future(ask(address, _request("b", number, stream=True))))
        await asyncio.sleep(SECONDS_BETWEEN_OTHERS)
    return list(await asyncio.gather(*tasks))


def _figures(others: list[Exchange], first: list[Exchange]) -> dict[str, Any]:
    served = [exchange for exchange in others if status_of(exchange) == 200]
    times = [exchange.seconds_to_first_event or float("inf") for exchange in served]
    return {
        "first tenant": statuses(first),
        "served": len(served),
        "median ttft": round(percentile(times, 0.5), 3),
        "p99 ttft": round(percentile(times, 0.99), 3),
    }


# ----------------------------------------------------------------------------------------------------- long prompts


def long_prompts(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """Prompts of a million numbers, which are refused, and long ones that are accepted."""
    num_rounds = 1 if is_quick else 5
    numbers = json.dumps({"prompt": [7] * NUM_NUMBERS, "max_tokens": 1}, separators=(",", ":")).encode()
    ids = {"prompt": [1 + (7 * i) % 2000 for i in range(NUM_TAKEN)], "max_tokens": 1}
    text = {"prompt": "import sys\n" * (NUM_TAKEN // 4), "max_tokens": 1}
    requests = {
        f"{NUM_NUMBERS} numbers": (post("/v1/completions", numbers), 400),
        f"{NUM_NUMBERS} numbers, inputs": (post("/v1/embeddings", numbers.replace(b"prompt", b"input")), 400),
        f"{NUM_TAKEN} ids": (post("/v1/completions", ids), 200),
        f"text of {NUM_TAKEN} tokens": (post("/v1/completions", text), 200),
    }
    figures: dict[str, Any] = {}
    with watched_server() as server:
        for name, (request, status) in requests.items():
            found = figures[name] = run_async(_beside(server, lambda: ask(server.address, request), num_rounds))  # noqa: B023
            targets.holds(
                f"long prompts, {name}: status {found['status']}; target: {status}", found["status"] == status
            )
            targets.at_most(f"long prompts, {name}: seconds that the event loop is held", found["held"], MAX_GAP)
            if status != 200:  # an accepted prompt makes a step of the engine longer
                targets.at_most(f"long prompts, {name}: longest gap of a stream", found["gap"], MAX_GAP)
    return figures


async def _beside(
    server: WatchedServer, event: Callable[[], Awaitable[Exchange]], num_rounds: int
) -> dict[str, float | int]:
    found = [await server.beside(event) for _ in range(num_rounds)]
    return {
        "status": status_of(found[-1][0]),
        "held": round(median(each.held for _, each in found), 3),
        "held cpu": round(median(each.held_cpu for _, each in found), 3),
        "gap": round(median(each.gap for _, each in found), 3),
    }
