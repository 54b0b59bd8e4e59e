"""Two engines on a Ray cluster, beside two of one server (`--data-parallel-size 2`), on the load of `scale.py`.

- **prefixes**: hit rate, requests a second, and the processor time between client and engines, for a request: of the
  API process; on Ray also of Serve's proxy, which is a Python program or, if the cluster is started with
  RAY_SERVE_ENABLE_HA_PROXY=1, HAProxy. Ray's own processes, which also run without requests, are left out;
- **alone**: seconds until the first token of a request that is alone;
- **kill**: an engine process, and then a replica with its engine, are killed (SIGKILL) at a random moment under load.
  Every output must equal the undisturbed one.

    python benchmarks/scale_ray.py --check

The environment with Ray is `.venv-ray` (`ray_env.py`), which this makes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

import ray_env
from _common import Targets, argument_parser, finish, parse_positive_int, print_table, run
from _ray_cluster import SECONDS_TO_START, Cluster, application, cluster
from _scale_kills import SECONDS_TO_RETURN, compared, text_of
from _scale_kills import request_of as long_request
from _scale_load import NUM_PREFIXES, POOL, first_requests, load, processor_seconds, request_of, server_options
from _server_client import HOST, Address, send, start
from _server_probe import read_metrics, run_async
from _server_process import start_server
from scale import LONG, MIN_HIT_RATE

TOGETHER = 8
"""Number of streams that run at a kill."""
LONE_REQUESTS = 20
SIZES = (f"num_blocks={POOL}", "block_size=16", "max_model_len=1024", "log_stats_interval=0", "warm_up=no")
MAX_CPU, MAX_CPU_OF_HAPROXY = 12.0, 3.0
"""Maximum processor time between client and engines, in multiples of one server's API process: with Serve's own proxy,
which is most of it, and with HAProxy."""


@dataclass
class Side:
    """A way to reach two engines, and what was measured of it."""

    name: str
    port: int
    parts: Callable[[], dict[str, list[int]]]
    """Process ids between client and engines, by part."""
    engines: Callable[[], list[int]]
    rates: list[float] = field(default_factory=list)
    cpu: dict[str, float] = field(default_factory=dict)
    engine_cpu: float = 0.0
    requests: int = 0
    hits: float = 0.0
    queries: float = 0.0
    alone: list[float] = field(default_factory=list)

    @property
    def address(self) -> Address:
        return (HOST, self.port)

    def ms_per_request(self) -> float:
        """Processor time between client and engines."""
        return sum(self.cpu.values()) / self.requests * 1e3


def of_cluster(name: str, port: int, running: Cluster) -> Side:
    def parts() -> dict[str, list[int]]:
        return {
            "API": running.processes("ServeReplica:default:api"),
            "proxy": running.processes("ray::ProxyActor") + running.processes("haproxy"),
        }

    return Side(name, port, parts, lambda: running.engines)


async def measure(side: Side, requests: Sequence[bytes]) -> None:
    """A round of the load."""
    before, parts, engines = await read_metrics(side.address), side.parts(), side.engines()
    used = {name: sum(map(processor_seconds, pids)) for name, pids in parts.items()}
    by_engines, began = sum(map(processor_seconds, engines)), monotonic()
    await load(side.address, requests)
    side.rates.append(len(requests) / (monotonic() - began))
    for name, pids in parts.items():
        side.cpu[name] = side.cpu.get(name, 0.0) + sum(map(processor_seconds, pids)) - used[name]
    side.engine_cpu += sum(map(processor_seconds, engines)) - by_engines
    side.requests += len(requests)
    after = await read_metrics(side.address)
    side.hits += after["vllm:prefix_cache_hits_total"] - before["vllm:prefix_cache_hits_total"]
    side.queries += after["vllm:prefix_cache_queries_total"] - before["vllm:prefix_cache_queries_total"]


async def alone(side: Side, own: int) -> None:
    exchange = await send(side.address, request_of(own % NUM_PREFIXES, 10**6 + own))
    assert exchange.first_event_at is not None
    side.alone.append(exchange.first_event_at - exchange.sent_at)


async def compare(sides: Sequence[Side], rounds: int, num_requests: int) -> None:
    """Run the sides alternately; the prefixes are cached before the first round."""
    generator = random.Random(1)
    for side in sides:
        await load(side.address, first_requests())
    for turn in range(rounds):
        numbers = [(generator.randrange(NUM_PREFIXES), turn * num_requests + own) for own in range(num_requests)]
        for side in sides if turn % 2 == 0 else reversed(sides):
            await measure(side, [request_of(number, own) for number, own in numbers])
    for own in range(LONE_REQUESTS):
        for side in sides:
            await alone(side, own)


async def kill(side: Side, victims: Callable[[], list[int]], count: int) -> dict[str, Any]:
    """Kill one of the processes `count` times under load."""
    generator = random.Random(2)

    async def together() -> list[Any]:
        return [await start(side.address, long_request(number, LONG)) for number in range(TOGETHER)]

    undisturbed = await together()
    for exchange in undisturbed:
        await exchange.end()
    expected = [text_of(exchange) for exchange in undisturbed]
    seconds = max(exchange.seconds for exchange in undisturbed)
    failed = differing = 0
    back = []
    for _ in range(count):
        exchanges = await together()
        await asyncio.sleep(generator.uniform(0.05, 0.6) * seconds)
        os.kill(generator.choice(victims()), signal.SIGKILL)
        killed = monotonic()
        await asyncio.sleep(0.5)  # until the death is noticed
        for exchange in exchanges:
            await exchange.end()
        while (await read_metrics(side.address))["pointsman:engine_up"] < 2:
            if monotonic() - killed > 2 * SECONDS_TO_RETURN:
                raise TimeoutError(f"the engine was not restarted within {2 * SECONDS_TO_RETURN:g} s")
            await asyncio.sleep(0.1)
        back.append(monotonic() - killed)
        lost, changed = compared(exchanges, expected)
        failed, differing = failed + lost, differing + changed
    return {
        "kills": count,
        "requests": count * TOGETHER,
        "failed": failed,
        "differing": differing,
        "seconds_until_back": round(median(back), 1),
    }


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--rounds", type=parse_positive_int, help="rounds of the load [default: 5, quick: 2]")
    parser.add_argument("--kills", type=parse_positive_int, help="how often each is killed [default: 3, quick: 1]")
    arguments = parser.parse_args()
    if ray_env.make([]) != 0:
        return finish("scale_ray", {}, Targets(not_measured=["all (Ray cannot be installed)"]), arguments.check)
    python, targets = ray_env.python_of(), Targets()
    rounds, num_requests = arguments.rounds or (2 if arguments.quick else 5), 48 if arguments.quick else 120
    kills = arguments.kills or (1 if arguments.quick else 3)
    killed: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        options = (*server_options(2 * POOL), "--data-parallel-size", "2")
        two = stack.enter_context(start_server(*options, timeout=SECONDS_TO_START))
        sides = [Side("one server", two.port, lambda: {"API": [two.pid]}, lambda: two.engine_pids)]
        for name, variables in (("Ray", {}), ("Ray, HAProxy", {"RAY_SERVE_ENABLE_HA_PROXY": "1"})):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ray")))
            if variables:
                variables |= {"RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg")}
            running = stack.enter_context(cluster(python, folder, 1, num_cpus=2, **variables))
            port, _ = stack.enter_context(application(running, "model=demo", "num_replicas=2", *SIZES))
            run_async(until_two(port))
            sides.append(of_cluster(name, port, running))
            last = running
        run_async(compare(sides, rounds, num_requests))
        side = sides[-1]
        killed["engine"] = run_async(kill(side, lambda: last.engines, kills))
        killed["replica"] = run_async(kill(side, lambda: last.processes("ServeReplica:default:engines"), kills))
    print_table(
        f"{NUM_PREFIXES} shared prefixes, as in scale.py",
        ("", "hit rate", "requests/s", "API ms/request", "proxy ms/request", "engine ms/request", "TTFT alone ms"),
        [
            (
                s.name,
                s.hits / s.queries,
                median(s.rates),
                *(s.cpu.get(part, 0.0) / s.requests * 1e3 for part in ("API", "proxy")),
                s.engine_cpu / s.requests * 1e3,
                median(s.alone) * 1e3,
            )
            for s in sides
        ],
    )
    for what, found in killed.items():
        print_table(f"SIGKILL to {what}s under load", tuple(found), [tuple(found.values())])
        targets.at_most(
            f"requests that failed or differ when a {what} was killed", found["failed"] + found["differing"], 0
        )
    for side, most in zip(sides[1:], (MAX_CPU, MAX_CPU_OF_HAPROXY), strict=True):
        targets.at_least(f"hit rate on {side.name}", side.hits / side.queries, MIN_HIT_RATE)
        cpu = side.ms_per_request() / sides[0].ms_per_request()
        targets.at_most(f"processor time of API and proxy on {side.name}, to one server's API", cpu, most)
    figures = {
        "hit_rates": {s.name: s.hits / s.queries for s in sides},
        "requests_per_second": {s.name: median(s.rates) for s in sides},
        "ms_per_request": {s.name: {part: used / s.requests * 1e3 for part, used in s.cpu.items()} for s in sides},
        "engine_ms_per_request": {s.name: s.engine_cpu / s.requests * 1e3 for s in sides},
        "ttft_alone_ms": {s.name: median(s.alone) * 1e3 for s in sides},
        "kill": killed,
    }
    return finish("scale_ray", figures, targets, arguments.check)


async def until_two(port: int) -> None:
    """Return when both engines run."""
    while (await read_metrics((HOST, port)))["pointsman:engine_up"] < 2:
        await asyncio.sleep(0.5)


if __name__ == "__main__":
    run(main)
