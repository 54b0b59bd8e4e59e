"""Two servers behind `vllm-router`, each with one engine: the cost of the router, and of a server that ends.

The load is that of `scale.py`. A server is ended (SIGTERM) under load. No request may fail, neither one that is open
on it nor one that is sent before the router notices.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count
from statistics import median
from typing import Any

from _common import Targets, note, print_table
from _router_process import READINESS, RouterMissing, RouterProcess, find_router, start_router
from _scale_load import (
    BLOCK_SIZE,
    CLIENTS,
    MODEL,
    NUM_PREFIXES,
    POOL,
    TOKENS,
    first_requests,
    load,
    prefix,
    processor_seconds,
    request_of,
    server_options,
)
from _server_client import HOST, Address, BrokenAnswer, post, send
from _server_probe import read_metrics, run_async
from _server_process import ServerProcess, free_port, start_server

DRAIN_CLIENTS, DRAIN_PROMPT, DRAIN_TOKENS = 8, 200, 60
"""Clients while a server ends, and the tokens of their requests. With such prompts, some fail without the delay."""
NUM_BEFORE, NUM_AFTER = 20, 20
"""Number of requests before it is ended, and minimum number after it has ended."""
POLICIES = ("round_robin", "kv_aware", "cache_aware")
"""Policies of the router; a server is ended under the last one."""
DRAIN = ("--drain-delay", "5", "--drain-timeout", "100")
"""Further options of the servers. The delay is that of docs/guides/route_requests.md."""
MIN_HIT_RATE = 0.77
"""Minimum hit rate with the router's policy `cache_aware`, which spreads prefixes less evenly than ours: 0.79 to 0.83
in six runs."""
HIT_RATE, FAILED = "hit rate of two servers behind a router", "requests that failed when a server behind it ended"


class Routed:
    """Two servers, and the addresses of their KV events.

    Args:
        stack: ends them.
        start: starts one, as `start_server` does.
    """

    def __init__(self, stack: ExitStack, start: Callable[..., Any] = start_server) -> None:
        self.servers: list[ServerProcess] = []
        self.events: list[str] = []
        for _ in range(2):
            port = free_port()
            events = ("--kv-events-config", f'{{"endpoint": "tcp://*:{port}"}}')
            self.servers.append(stack.enter_context(start(*server_options(POOL), *events, *DRAIN)))
            self.events.append(f"{self.servers[-1].url}=tcp://{HOST}:{port}")

    @property
    def addresses(self) -> list[Address]:
        return [(HOST, server.port) for server in self.servers]

    def router(self, policy: str) -> RouterProcess:
        """Start a router in front of both servers."""
        options = ["--policy", policy, *READINESS]
        if policy == "kv_aware":
            options += ["--kv-event-model", MODEL, "--kv-event-block-size", str(BLOCK_SIZE)]
            for source in self.events:
                options += ["--kv-event-source", source]
        return start_router([server.url for server in self.servers], *options)

    async def forget(self) -> None:
        """Empty the prefix caches of both servers."""
        for address in self.addresses:
            answer = await send(address, post("/reset_prefix_cache", b"", {"User-Agent": "pointsman-benchmarks"}))
            assert answer.answer().status == 200, answer.answer()

    async def hits(self) -> tuple[float, float]:
        """Tokens found in the prefix caches, and tokens looked up."""
        read = [await read_metrics(address) for address in self.addresses]
        names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
        return sum(one[names[0]] for one in read), sum(one[names[1]] for one in read)


async def prefixes(routed: Routed, router: RouterProcess, num_requests: int) -> dict[str, float]:
    """A round of the load through a router, and single requests with and without it."""
    through = (HOST, router.port)
    generator = random.Random(1)
    await routed.forget()
    await load(through, first_requests())
    before, cpu = await routed.hits(), processor_seconds(router.pid)
    api = sum(processor_seconds(server.pid) for server in routed.servers)
    await load(through, [request_of(generator.randrange(NUM_PREFIXES), own) for own in range(num_requests)])
    router_cpu = processor_seconds(router.pid) - cpu
    api_cpu = sum(processor_seconds(server.pid) for server in routed.servers) - api
    after = await routed.hits()
    lone: list[list[float]] = [[], []]
    for number in range(16):
        for times, address in zip(lone, (through, routed.addresses[0]), strict=True):
            exchange = await send(address, request_of(0, num_requests + 2 * number + (times is lone[0])))
            assert exchange.seconds_to_first_event is not None
            times.append(exchange.seconds_to_first_event)
    return {
        "hit_rate": (after[0] - before[0]) / (after[1] - before[1]),
        "router_ms_per_request": 1e3 * router_cpu / num_requests,
        "api_ms_per_request": 1e3 * api_cpu / num_requests,
        "lone_ttft_ms": 1e3 * median(lone[0]),
        "lone_ttft_ms_without": 1e3 * median(lone[1]),
    }


async def drain(
    address: Address, ending: ServerProcess, num_clients: int = DRAIN_CLIENTS, num_prefixes: int = NUM_PREFIXES
) -> dict[str, Any]:
    """End one of the servers under load, which continues until it has ended; returns the results of the requests.

    Args:
        address: of the router.
        ending: the server to end.
        num_clients: each sends a request when its last one has ended, so a single client leaves it idle at its end.
        num_prefixes: number of prefixes, used cyclically by the requests.
    """
    fields = {"model": MODEL, "ignore_eos": True, "temperature": 0, "stream": True, "max_tokens": DRAIN_TOKENS}
    failures: list[str] = []
    numbers = count()
    ended: asyncio.Future[int] | None = None
    num_after = 0

    async def ask(number: int) -> None:
        request = post("/v1/completions", {"prompt": prefix(number % num_prefixes)[:DRAIN_PROMPT], **fields})
        try:
            answer = (await send(address, request)).answer()
            if answer.status != 200:
                failures.append(f"status {answer.status}: {answer.body[:200]!r}")
            elif (reasons := answer.stream().finish_reasons) != {0: ["length"]}:
                failures.append(f"it ended with {reasons}")
        except (BrokenAnswer, OSError) as error:
            failures.append(repr(error))

    async def client() -> None:
        nonlocal ended, num_after
        while num_after < NUM_AFTER:
            if (number := next(numbers)) == NUM_BEFORE:
                ending.signal(signal.SIGTERM)
                ended = asyncio.ensure_future(asyncio.to_thread(ending.wait, 120))
            num_after += ended is not None and ended.done()
            await ask(number)

    await asyncio.gather(*[client() for _ in range(num_clients)])
    assert ended is not None
    return {"requests": next(numbers), "failed": len(failures), "failures": failures, "exit_code": await ended}


def router_figures(num_requests: int, policies: Sequence[str] = POLICIES) -> dict[str, Any] | None:
    """All figures with a router, by its policy, and of a server that ends; None: the router is not installed."""
    try:
        find_router()
    except RouterMissing as missing:
        note(f"\nno router: {missing}")
        return None
    figures: dict[str, Any] = {}
    with ExitStack() as stack:
        routed = Routed(stack)
        for policy in policies:
            with routed.router(policy) as router:
                figures[policy] = run_async(prefixes(routed, router, num_requests))
                if policy == policies[-1]:
                    figures["drain"] = run_async(drain((HOST, router.port), routed.servers[0]))
    header = ("policy", "hit rate", "router ms/request", "API ms/request", "TTFT of one alone, ms", "without router")
    rows = [(policy, *figures[policy].values()) for policy in policies]
    print_table(f"Two servers behind vllm-router, {CLIENTS} clients, {TOKENS} tokens", header, rows)
    print_table("A server behind it is ended under load", tuple(figures["drain"]), [tuple(figures["drain"].values())])
    return figures


def check_router(targets: Targets, figures: dict[str, Any] | None, skipped: str | None = None) -> None:
    """Check the targets of these figures; without figures, give the reason."""
    if figures is None:
        why = skipped or "vllm-router is not installed: python benchmarks/router_env.py"
        targets.skip(HIT_RATE, why)
        targets.skip(FAILED, why)
        return
    targets.at_least(HIT_RATE, figures["cache_aware"]["hit_rate"], MIN_HIT_RATE)
    drained = figures["drain"]
    targets.at_most(FAILED, drained["failed"], 0)
    targets.holds(f"its exit code is {drained['exit_code']}; wanted: 0", drained["exit_code"] == 0)
