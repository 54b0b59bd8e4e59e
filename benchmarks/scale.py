"""Two engines behind one API process (`--data-parallel-size 2`), beside one engine with the same cores and memory.

- **prefixes**: 24 prefixes that many prompts share, 4 clients, streams of 16 tokens. One engine's pool holds some of
  the prefixes, the pools of two hold all of them, so the hit rate says whether requests are sent where their prefix
  is; a sixth of the prompts' tokens are their own, so it cannot be above 0.83. The processor time of the API process
  for a request, and requests a second, are compared with those of one engine that has both cores and all the memory,
  with the number of threads that it chooses for this model (one), and with two;
- **kill**: one of two engines is killed (SIGKILL) at a random moment under load, again and again. Every answer is the
  one that it is without that;
- **router**: two servers behind `vllm-router` instead, and one of them is ended (SIGTERM) under load;
- **simulated**: the simulator's hit rates for the same fleets.

    python benchmarks/scale.py --check
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets, argument_parser, at_least_one, finish, paired_ratio, print_table, run
from _scale_load import (
    BLOCK_SIZE,
    CLIENTS,
    MODEL,
    NUM_PREFIXES,
    OWN_TOKENS,
    POOL,
    PREFIX_TOKENS,
    TOKENS,
    first_requests,
    load,
    prefix,
    processor_seconds,
    request_of,
)
from _scale_router import check_router, router_figures
from _scale_simulated import Measured, simulated_figures
from _server_client import HOST, Address, BrokenAnswer, Exchange, post, start
from _server_probe import open_requests, read_metrics, run_async, wait_until_idle
from _server_process import ServerProcess, start_server

TWO_THREADS = "one engine, two threads"
LONG = 300
"""Tokens of a stream that runs when an engine is killed."""
KILLED_TOGETHER = 10
"""Streams that run then."""
SECONDS_TO_RETURN = 60.0
LEAST_HIT_RATE, MOST_API_CPU, LEAST_THROUGHPUT = 0.80, 1.2, 1.0
MOST_EXTRA_SECONDS = 2.0
MOST_GAP = 0.3


@dataclass
class Side:
    """One server and what was measured of it."""

    name: str
    server: ServerProcess
    seconds_to_start: float
    rates: list[float] = field(default_factory=list)
    """Requests a second, of each round."""
    api_cpu: float = 0.0
    engine_cpu: float = 0.0
    requests: int = 0
    hits: float = 0.0
    queries: float = 0.0

    @property
    def address(self) -> Address:
        return (HOST, self.server.port)


def serve(name: str, num_blocks: int, *options: str) -> Side:
    began = monotonic()
    sizes = ("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--max-model-len", "1024")
    server = start_server("--model", MODEL, *sizes, "--log-stats-interval", "0", "--no-warm-up", *options)
    return Side(name, server, monotonic() - began)


async def measure(side: Side, requests: Sequence[bytes]) -> None:
    """A round of the load."""
    before, pids = await read_metrics(side.address), side.server.engine_pids
    api, engines, began = processor_seconds(side.server.pid), sum(map(processor_seconds, pids)), monotonic()
    await load(side.address, requests)
    side.rates.append(len(requests) / (monotonic() - began))
    side.api_cpu += processor_seconds(side.server.pid) - api
    side.engine_cpu += sum(map(processor_seconds, pids)) - engines
    side.requests += len(requests)
    after = await read_metrics(side.address)
    side.hits += after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    side.queries += after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"]


async def prefixes(sides: Sequence[Side], rounds: int, num_requests: int) -> None:
    """The sides take turns; the prefixes are there before the first round."""
    generator = random.Random(1)
    for side in sides:
        await load(side.address, first_requests())
    own = 0
    for turn in range(rounds):
        requests = [request_of(generator.randrange(NUM_PREFIXES), own + one) for one in range(num_requests)]
        own += num_requests
        for side in sides if turn % 2 == 0 else reversed(sides):
            await measure(side, requests)


# ------------------------------------------------------------------------------------------------------------- kills


def long_request(number: int) -> bytes:
    fields = {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.8, "seed": number, "stream": True}
    prompt = prefix(number)[:40]
    return post("/v1/completions", {"model": MODEL, "prompt": prompt, **fields}, {"X-Request-Id": f"scale-{number}-"})


def text_of(exchange: Exchange) -> str | None:
    """What a stream said, if it is a whole one."""
    try:
        stream = exchange.answer().stream()
    except BrokenAnswer:
        return None
    is_whole = stream.is_done and stream.error is None and stream.finish_reasons == {0: ["length"]}
    return stream.text if is_whole else None


async def kills(side: Side, count: int) -> dict[str, Any]:
    """Kill one of the engines `count` times under load."""
    generator = random.Random(2)
    requests = [long_request(number) for number in range(KILLED_TOGETHER)]

    async def together() -> list[Exchange]:
        return [await start(side.address, request) for request in requests]

    undisturbed = await together()
    for exchange in undisturbed:
        await exchange.end()
    expected = [text_of(exchange) for exchange in undisturbed]
    seconds = max(exchange.seconds for exchange in undisturbed)
    failed = differing = resumed = 0
    back, gaps, own_gaps = [], [], []
    for _ in range(count):
        exchanges = await together()
        await asyncio.sleep(generator.uniform(0.05, 0.6) * seconds)
        listed = await open_requests(side.address)
        homes = {int(one["id"].split("scale-")[1].split("-")[0]): one["engine"] for one in listed}
        pids = side.server.engine_pids
        os.kill(generator.choice(pids), signal.SIGKILL)
        killed = monotonic()
        await asyncio.sleep(0.2)  # until the death is noticed
        for exchange in exchanges:
            await exchange.end()
        while await up(side) < len(pids):
            if monotonic() - killed > SECONDS_TO_RETURN:
                raise TimeoutError(f"the engine is not back within {SECONDS_TO_RETURN:g} s")
            await asyncio.sleep(0.05)
        back.append(monotonic() - killed)
        texts = [text_of(exchange) for exchange in exchanges]
        failed += sum(text is None for text in texts)
        differing += sum(text is not None and text != wanted for text, wanted in zip(texts, expected, strict=True))
        resumed += len(homes)
        by_engine: dict[int, float] = {}
        for number, engine in homes.items():
            gap = longest_gap(exchanges[number], killed)
            by_engine[engine] = max(by_engine.get(engine, 0.0), gap)
        if len(by_engine) == len(pids):
            gaps.append(min(by_engine.values()))
            own_gaps.append(max(by_engine.values()))
    idle = await wait_until_idle(side.address)
    return {
        "kills": count,
        "requests": count * len(requests),
        "open_at_a_kill": resumed,
        "failed": failed,
        "differing": differing,
        "blocks_back": idle is not None,
        "seconds_until_back": round(max(back), 3),
        "seconds_to_start": round(side.seconds_to_start, 3),
        "gap_of_the_other_engine": round(median(gaps), 3) if gaps else None,
        "gap_of_resumed_streams": round(median(own_gaps), 3) if own_gaps else None,
    }


def longest_gap(exchange: Exchange, since: float) -> float:
    """Seconds between two pieces of a stream, of which the later came after `since`."""
    times = exchange.times
    return max((later - max(before, since) for before, later in pairwise(times) if later > since), default=0.0)


async def up(side: Side) -> float:
    return (await read_metrics(side.address))["pointsman:engine_up"]


# ------------------------------------------------------------------------------------------------------------ figures


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=at_least_one, help="rounds of the load [default: 7, quick: 2]")
    parser.add_argument("--kills", type=at_least_one, help="how often an engine is killed [default: 20, quick: 1]")
    arguments = parser.parse_args()
    rounds, num_requests = arguments.rounds or (2 if arguments.quick else 7), 48 if arguments.quick else 240
    targets = Targets()
    sides: list[Side] = []
    try:
        one = serve("one engine", 2 * POOL)
        sides.append(one)
        if not arguments.quick:
            sides.append(serve("one engine, half the pool", POOL))
            sides.append(serve(TWO_THREADS, 2 * POOL, "--threads", "2"))
        two = serve("two engines", 2 * POOL, "--data-parallel-size", "2")
        sides.append(two)
        run_async(prefixes(sides, rounds, num_requests))
        for side in sides[:-1]:
            side.server.stop()
        killed = run_async(kills(two, arguments.kills or (1 if arguments.quick else 20)))
    finally:
        for side in sides:
            side.server.__exit__()
    routed = None if arguments.quick else router_figures(num_requests)
    rates = {side.name: side.hits / side.queries for side in sides}
    cpu = {side.name: side.api_cpu / side.requests * 1e3 for side in sides}
    engine_cpu = {side.name: side.engine_cpu / side.requests * 1e3 for side in sides}
    ratios = {side.name: paired_ratio(two.rates, side.rates) for side in sides[:-1]}
    print_table(
        f"{NUM_PREFIXES} prefixes of {PREFIX_TOKENS} tokens, {OWN_TOKENS} own ones, {CLIENTS} clients, {TOKENS} tokens",
        ("", "hit rate", "requests/s", "API ms/request", "engine ms/request"),
        [(s.name, rates[s.name], median(s.rates), cpu[s.name], engine_cpu[s.name]) for s in sides],
    )
    print_table("An engine is killed under load", tuple(killed), [tuple(killed.values())])
    targets.at_least("hit rate of two engines", rates[two.name], LEAST_HIT_RATE)
    targets.at_most("API processor time of two engines, to one", cpu[two.name] / cpu[one.name], MOST_API_CPU)
    name = "throughput of two engines, to one with two threads"
    if TWO_THREADS in ratios:
        targets.at_least(name, ratios[TWO_THREADS], LEAST_THROUGHPUT)
    else:
        targets.skip(name, "--quick")
    targets.at_most("requests that failed when an engine was killed", killed["failed"], 0)
    targets.at_most("requests that differ then", killed["differing"], 0)
    targets.holds(f"blocks are free afterwards: {killed['blocks_back']}", killed["blocks_back"])
    extra = killed["seconds_until_back"] - killed["seconds_to_start"]
    targets.at_most("seconds until an engine is back, beyond a start", extra, MOST_EXTRA_SECONDS)
    if (os.cpu_count() or 1) > 2 and killed["gap_of_the_other_engine"] is not None:
        targets.at_most("gap of the other engine's streams", killed["gap_of_the_other_engine"], MOST_GAP)
    else:
        targets.skip("gap of the other engine's streams", "the API process and this one need cores of their own")
    check_router(targets, routed, "--quick" if arguments.quick else None)
    fleets = {
        one.name: Measured(rates[one.name], one.requests, 1, 2 * POOL),
        two.name: Measured(rates[two.name], two.requests, 2, POOL),
    }
    if routed:  # the simulator has this rule of the router, and no other
        rate = routed["round_robin"]["hit_rate"]
        fleets["two servers, round_robin"] = Measured(rate, num_requests, 2, POOL, "round-robin")
    figures = {
        "router": routed,
        "simulated": simulated_figures(targets, fleets),
        "hit_rates": rates,
        "api_ms_per_request": cpu,
        "engine_ms_per_request": engine_cpu,
        "requests_per_second": {side.name: median(side.rates) for side in sides},
        "throughput_ratios": ratios,
        "kill": killed,
    }
    return finish("scale", figures, targets, arguments.check)


if __name__ == "__main__":
    run(main)
