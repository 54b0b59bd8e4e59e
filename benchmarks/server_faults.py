"""Server faults: the fate of requests when processes are killed, the server is stopped, or clients misbehave.

Each scenario has a server of its own, on the demo model:

- **engine killed** (SIGKILL, under load): every open request ends with an error, the server exits with a code other
  than 0, so that a supervisor starts it again;
- **drain** (SIGTERM, under load): all accepted requests are answered completely, waiting ones included; new requests
  get 503 meanwhile; exit code 0;
- **short drain** (SIGTERM, and too little time): requests that are not over by then end with the finish reason
  "abort"; exit code 0;
- **API killed** (SIGKILL): the engine process notices and ends by itself;
- **slow readers**: clients that ask for long streams and do not read cost neither memory nor others' speed, and get
  everything when they continue reading. The same load from clients that read is measured beside it;
- **attacks**: single requests made to block the server (`_server_attacks.py`), beside a steady stream. The event loop
  of the API process is never held for long, and the stream waits hardly longer than beside a plain request with the
  same number of tokens;
- **crowds**: thousands of requests or of idle connections at once, and readers that stop: the stream continues;
- **hung engine, hung single engine** (SIGSTOP, under load): the engine counts as dead after a limit; with a second one
  no request is lost, alone every client gets an error (`_faults_engines.py`);
- **long prompt gap**: streams run, and a prompt of 8,000 tokens arrives: the longest gap of a stream;
- **large bodies**: connections that send most of a body and stop cost bounded memory, which comes back; a body that is
  too large ends its connection;
- **slow grammars** and **hung grammars**: grammars of one tenant that take the whole time limit do not delay another
  tenant's schema; a grammar process that hangs is replaced, and its requests are answered;
- **unbounded input**: 100 MB of trailers, headers or chunk extensions, fast and slowly, cost 16 MiB at most;
- **idle connections**: 2,000 of them, with 1,024 files: health checks, operators and new clients are answered;
- **tokenizing**, **fair-door**, **long-prompts**: how long one tenant waits for another, see `_faults_tenants.py`;
- **disk full**: a recording on a disk that becomes full, beside a steady stream (`_faults_disk.py`).

    python benchmarks/server_faults.py --check
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from time import monotonic
from typing import Any

from _common import Targets, argument_parser, finish, note, print_table, run
from _faults_connections import idle_connections, unbounded_input
from _faults_disk import disk_full
from _faults_engines import hung_engine, hung_single_engine
from _faults_gap import long_prompt_gap
from _faults_grammars import hung_grammars, slow_grammars
from _faults_tenants import fair_door, long_prompts, tokenizing
from _server_beside import attacks, crowds, large_bodies
from _server_client import HOST, Address, BrokenAnswer, Exchange, Stream, get, post, send, start
from _server_probe import MIB, is_running, open_requests, run_async, wait_until_idle
from _server_process import ServerProcess, resident_bytes, start_server

MODEL = "demo"
MAX_NUM_SEQS = 32
PROMPT_TOKENS = 24
LONG = 1500
"""Output tokens of requests that run when the fault happens."""
SECONDS_TO_FAIL, SECONDS_TO_EXIT = 5.0, 10.0
DRAIN_SECONDS, SHORT_DRAIN_SECONDS = 120.0, 1.0
RECEIVE_BUFFER = 4096
"""Maximum memory that a client costs if it does not read."""
SLOW_BYTES = 8 * MIB
"""Tokens of an unread stream that is sent token by token: the kernel holds up to 4 MiB of it, and the rest would stay
in the server. The model has a long name, which is part of every event."""
MIN_MERGED = 2.0
"""Minimum tokens per event of a slow reader: more than one shows that the server waited for it."""
MAX_GROWTH_PER_READER = 192 * 1024
WARM_UP_ROUNDS = 2
"""Warm-up rounds of ordinary readers: after one, the memory of a server with few readers still grows a little."""
MIN_SPEED = 0.85
"""Minimum speed of readers beside slow ones, relative to the same readers beside ordinary ones."""

Scenario = Callable[["Sizes", Targets], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Sizes:
    """The amount of load; `quick` has less."""

    streams: int
    """Requests open at the fault: more than can run at once, so that some wait."""
    tokens: int
    """Output tokens of each."""
    slow_readers: int
    slow_tokens: int
    slow_rounds: int
    attack_rounds: int
    """Rounds of each attack and each crowd."""
    crowd: int
    """Requests, or connections, at once."""
    stopped_readers: int
    unfinished_bodies: int

    @property
    def long_name(self) -> str:
        """The model's name for slow readers."""
        return "x" * (SLOW_BYTES // self.slow_tokens)


FULL = Sizes(96, 200, 32, 1000, 2, attack_rounds=3, crowd=2000, stopped_readers=48, unfinished_bodies=120)
QUICK = Sizes(40, 60, 8, 300, 1, attack_rounds=1, crowd=300, stopped_readers=16, unfinished_bodies=40)


def completion(tokens: int, number: int, *, stream: bool = True, model: str = MODEL) -> bytes:
    """A request for an exact number of tokens; the prompt depends on the number."""
    prompt = [1 + (number * 131 + i * 7) % 2000 for i in range(PROMPT_TOKENS)]
    body: dict[str, Any] = {"model": model, "prompt": prompt, "max_tokens": tokens}
    body |= {"ignore_eos": True, "temperature": 0.0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return post("/v1/completions", body)


def serve(*options: str) -> ServerProcess:
    """A server with `MAX_NUM_SEQS` sequence slots."""
    sizes = ("--max-num-seqs", str(MAX_NUM_SEQS), "--max-model-len", "2048", "--num-blocks", "2304")
    return start_server("--model", MODEL, *sizes, *options)


def exit_code_of(server: ServerProcess) -> int | None:
    """The server's exit code; None if it does not end by itself."""
    try:
        return server.wait(SECONDS_TO_EXIT)
    except subprocess.TimeoutExpired:
        return None


async def under_way(address: Address, requests: Sequence[bytes]) -> list[Exchange]:
    """Send all; return when the maximum number of requests runs and the server knows of the others."""
    exchanges = [await start(address, request) for request in requests]
    limit = monotonic() + 30
    while monotonic() < limit:
        listed = await open_requests(address)
        answering = sum(exchange.first_event_at is not None for exchange in exchanges)
        if len(listed) + sum(exchange.ended_at is not None for exchange in exchanges) >= len(exchanges) and answering:
            return exchanges
        await asyncio.sleep(0.02)
    raise TimeoutError(f"the server did not accept {len(exchanges)} requests within 30 s")


def stream_of(exchange: Exchange) -> Stream | None:
    """The response as a stream; None if it is not a complete stream."""
    try:
        return exchange.answer().stream()
    except BrokenAnswer:
        return None


def is_complete(exchange: Exchange, tokens: int) -> bool:
    """Whether it has all its tokens, one finish reason and [DONE]."""
    stream = stream_of(exchange)
    if stream is None or stream.usage is None:
        return False
    ended = stream.is_done and stream.num_late == 0 and stream.finish_reasons == {0: ["length"]}
    return ended and bool(stream.usage["completion_tokens"] == tokens)


# -------------------------------------------------------------------------------------------------------- scenarios


def engine_killed(sizes: Sizes, targets: Targets) -> dict[str, Any]:
    """SIGKILL of the engine process under load."""
    server = serve()
    try:
        figures = run_async(_kill_engine(server, sizes))
        exit_code = exit_code_of(server)
    finally:
        server.stop()
    figures["exit_code"] = exit_code
    targets.holds(
        f"engine killed: {figures['with_error']} of {figures['requests']} requests got an error; target: all",
        figures["with_error"] == figures["requests"],
    )
    targets.at_most("engine killed: seconds until the last client knew", figures["seconds"], SECONDS_TO_FAIL)
    targets.holds(f"engine killed: exit code {exit_code}; target: another than 0", exit_code not in (0, None))
    return figures


async def _kill_engine(server: ServerProcess, sizes: Sizes) -> dict[str, Any]:
    address = (HOST, server.port)
    requests = [completion(LONG, i, stream=i % 4 != 0) for i in range(sizes.streams)]
    exchanges = await under_way(address, requests)
    killed_at = monotonic()
    os.kill(server.engine_pid, signal.SIGKILL)
    await asyncio.gather(*(exchange.end(2 * SECONDS_TO_FAIL) for exchange in exchanges))
    ends = [exchange.ended_at for exchange in exchanges]
    seconds = max((end - killed_at if end is not None else float("inf") for end in ends), default=0.0)
    for exchange in exchanges:
        exchange.hang_up()
    return {
        "requests": len(exchanges),
        "with_error": sum(has_error(exchange) for exchange in exchanges),
        "seconds": round(seconds, 3),
    }


def has_error(exchange: Exchange) -> bool:
    """Whether the client got an error, by a status or within the stream."""
    if exchange.hung_up:
        return False
    try:
        answer = exchange.answer()
        if answer.status != 200:
            return answer.status == 500 and bool(answer.json()["error"]["message"])
        return answer.stream().error is not None
    except BrokenAnswer:
        return False


def drain(sizes: Sizes, targets: Targets) -> dict[str, Any]:
    """SIGTERM under load, with enough time."""
    server = serve("--drain-timeout", str(DRAIN_SECONDS))
    try:
        figures = run_async(_drain(server, sizes, sizes.tokens))
        figures["exit_code"] = exit_code_of(server)
    finally:
        server.stop()
    targets.holds(
        f"drain: {figures['complete']} of {figures['requests']} accepted requests are complete; target: all",
        figures["complete"] == figures["requests"],
    )
    targets.holds(f"drain: new requests get {figures['new']}; target: 503", set(figures["new"]) == {503})
    targets.holds(f"drain: exit code {figures['exit_code']}; target: 0", figures["exit_code"] == 0)
    return figures


def short_drain(sizes: Sizes, targets: Targets) -> dict[str, Any]:
    """SIGTERM under load, with too little time."""
    server = serve("--drain-timeout", str(SHORT_DRAIN_SECONDS))
    try:
        figures = run_async(_drain(server, sizes, LONG))
        figures["exit_code"] = exit_code_of(server)
    finally:
        server.stop()
    told = figures["complete"] + figures["aborted"]
    targets.holds(
        f"short drain: {figures['aborted']} aborted and {figures['complete']} complete of {figures['requests']}; "
        "target: each one or the other, and some aborted",
        told == figures["requests"] and figures["aborted"] > 0,
    )
    targets.at_most(
        "short drain: seconds until the last client knew", figures["seconds"], SHORT_DRAIN_SECONDS + SECONDS_TO_FAIL
    )
    targets.holds(f"short drain: exit code {figures['exit_code']}; target: 0", figures["exit_code"] == 0)
    return figures


async def _drain(server: ServerProcess, sizes: Sizes, tokens: int) -> dict[str, Any]:
    address = (HOST, server.port)
    exchanges = await under_way(address, [completion(tokens, i) for i in range(sizes.streams)])
    told_at = monotonic()
    server.signal(signal.SIGTERM)
    await asyncio.sleep(0.2)
    new = [await status_of(address, completion(4, 10_000 + i, stream=i % 2 == 0)) for i in range(4)]
    ready = await status_of(address, get("/ready"))
    await asyncio.gather(*(exchange.end(2 * DRAIN_SECONDS) for exchange in exchanges))
    ends = [exchange.ended_at or float("inf") for exchange in exchanges]
    aborted = [stream for exchange in exchanges if (stream := stream_of(exchange)) and stream.finish_reason == "abort"]
    return {
        "requests": len(exchanges),
        "complete": sum(is_complete(exchange, tokens) for exchange in exchanges),
        "aborted": sum(stream.is_done for stream in aborted),
        "new": new,
        "ready": ready,
        "seconds": round(max(ends) - told_at, 3),
    }


async def status_of(address: Address, request: bytes) -> int:
    """The status of the answer; 0 if there was no connection."""
    try:
        return (await send(address, request)).answer().status
    except (OSError, BrokenAnswer):
        return 0


def api_killed(sizes: Sizes, targets: Targets) -> dict[str, Any]:
    """SIGKILL of the API process under load."""
    server = serve()
    try:
        seconds = run_async(_kill_api(server, sizes))
    finally:
        server.stop()
    ended = seconds is not None
    targets.holds(
        f"API killed: the engine process {'ended by itself' if ended else 'is still there'}; target: ended", ended
    )
    return {"seconds": None if seconds is None else round(seconds, 3)}


async def _kill_api(server: ServerProcess, sizes: Sizes) -> float | None:
    exchanges = await under_way((HOST, server.port), [completion(LONG, i) for i in range(sizes.streams)])
    engine_pid, killed_at = server.engine_pid, monotonic()
    server.signal(signal.SIGKILL)
    while is_running(engine_pid) and monotonic() < killed_at + SECONDS_TO_EXIT:
        await asyncio.sleep(0.01)
    seconds = monotonic() - killed_at
    for exchange in exchanges:
        exchange.hang_up()
    return None if is_running(engine_pid) else seconds


def slow_readers(sizes: Sizes, targets: Targets) -> dict[str, Any]:
    """Clients that read nothing, beside some that do."""
    server = serve("--max-num-seqs", str(sizes.slow_readers + 8), "--served-model-name", sizes.long_name)
    try:
        figures = run_async(_slow_readers(server, sizes))
    finally:
        server.stop()
    targets.holds(
        f"slow readers: {figures['complete']} of {sizes.slow_readers} are complete once they read on; target: all",
        figures["complete"] == sizes.slow_readers,
    )
    grown = figures["grown_mib"] * MIB / sizes.slow_readers
    targets.at_most("slow readers: KiB that one costs the API", grown / 1024, MAX_GROWTH_PER_READER / 1024)
    if sizes is FULL:  # one short round says little about speed
        targets.at_least("slow readers: speed of those beside them, of ordinary", figures["speed_ratio"], MIN_SPEED)
    else:
        targets.skip("slow readers: speed of those beside them, of ordinary", "--quick")
    targets.at_least("slow readers: tokens per event", figures["tokens_per_event"], MIN_MERGED)
    left = "nothing" if figures["blocks_returned"] else "blocks or requests"
    targets.holds(f"slow readers: {left} left over; target: nothing", figures["blocks_returned"])
    return figures


async def _slow_readers(server: ServerProcess, sizes: Sizes) -> dict[str, Any]:
    address = (HOST, server.port)
    for number in range(WARM_UP_ROUNDS):  # memory reaches what the load takes with everybody reading
        await readers_beside(address, sizes, number, slow=False)
    before, peak = resident_bytes(server.pid), 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, resident_bytes(server.pid))
            await asyncio.sleep(0.1)

    ordinary, beside = [], []
    for number in range(sizes.slow_rounds):
        ordinary.append(await readers_beside(address, sizes, WARM_UP_ROUNDS + 2 * number, slow=False))
        watching = asyncio.create_task(watch())
        beside.append(await readers_beside(address, sizes, WARM_UP_ROUNDS + 2 * number + 1, slow=True))
        watching.cancel()
    idle = await wait_until_idle(address)
    return {
        "readers": sizes.slow_readers,
        "rounds": sizes.slow_rounds,
        "ordinary_mib": round(median(each.num_bytes for each in ordinary) / MIB, 1),
        "received_mib": round(median(each.num_bytes for each in beside) / MIB, 1),
        "tokens_per_event": round(min(each.tokens_per_event for each in beside), 2),
        "grown_mib": round((peak - before) / MIB, 1),
        "token_ms": round(median(each.token_seconds for each in beside) * 1e3, 2),
        "ordinary_token_ms": round(median(each.token_seconds for each in ordinary) * 1e3, 2),
        "speed_ratio": round(
            median(a.token_seconds / b.token_seconds for a, b in zip(ordinary, beside, strict=True)), 3
        ),
        "complete": min(each.num_complete for each in beside),
        "blocks_returned": idle is not None,
    }


@dataclass(frozen=True, slots=True)
class Beside:
    """The results of long streams and of the four streams beside them."""

    token_seconds: float
    """Median seconds per token of the four streams."""
    num_complete: int
    """Exchanges of the long streams."""
    tokens_per_event: float
    num_bytes: int


async def readers_beside(address: Address, sizes: Sizes, number: int, *, slow: bool) -> Beside:
    """Long streams, four other streams beside them.

    Args:
        address: of the server.
        sizes: how many, how long.
        number: makes the prompts differ from other runs'.
        slow: whether the long streams are read only once the four are over and the engine has finished with all.
    """
    seed, name, buffer = 1000 * (number + 1), sizes.long_name, RECEIVE_BUFFER if slow else None
    requests = [completion(sizes.slow_tokens, seed + i, model=name) for i in range(sizes.slow_readers)]
    long = [await start(address, request, receive_buffer=buffer) for request in requests]
    if slow:
        for exchange in long:
            exchange.stop_reading()
    num_tokens = sizes.slow_tokens // 2
    others = [await start(address, completion(num_tokens, seed + 500 + i, model=name)) for i in range(4)]
    for exchange in others:
        await exchange.end()
    if slow:  # the engine does not wait for readers; after its end the API's memory is at its maximum
        limit = monotonic() + 120
        while await open_requests(address) and monotonic() < limit:
            await asyncio.sleep(0.1)
        for exchange in long:
            exchange.read_on()
    for exchange in long:
        await exchange.end()
    seconds = [
        exchange.ended_at - exchange.first_event_at
        for exchange in others
        if exchange.ended_at is not None and exchange.first_event_at is not None
    ]
    num_events = sum(stream.num_chunks for exchange in long if (stream := stream_of(exchange)))
    return Beside(
        token_seconds=median(seconds) / (num_tokens - 1),
        num_complete=sum(is_complete(exchange, sizes.slow_tokens) for exchange in long),
        tokens_per_event=sizes.slow_tokens * len(long) / max(1, num_events),
        num_bytes=sum(len(piece) for exchange in long for piece in exchange.pieces),
    )


# ----------------------------------------------------------------------------------------------------------- report

SCENARIOS: dict[str, Scenario] = {
    "engine-killed": engine_killed,
    "drain": drain,
    "short-drain": short_drain,
    "api-killed": api_killed,
    "slow-readers": slow_readers,
    "attacks": lambda sizes, targets: attacks(sizes.attack_rounds, targets, is_quick=sizes is QUICK),
    "crowds": lambda sizes, targets: crowds(sizes.attack_rounds, sizes.crowd, sizes.stopped_readers, targets),
    "long-prompt-gap": lambda sizes, targets: long_prompt_gap(targets, is_quick=sizes is QUICK),
    "large-bodies": lambda sizes, targets: large_bodies(sizes.unfinished_bodies, targets),
    "slow-grammars": lambda sizes, targets: slow_grammars(targets, is_quick=sizes is QUICK),
    "hung-grammars": lambda sizes, targets: hung_grammars(targets, is_quick=sizes is QUICK),
    "hung-engine": lambda sizes, targets: hung_engine(targets, is_quick=sizes is QUICK),
    "hung-single-engine": lambda sizes, targets: hung_single_engine(targets, is_quick=sizes is QUICK),
    "unbounded-input": lambda sizes, targets: unbounded_input(targets, is_quick=sizes is QUICK),
    "idle-connections": lambda sizes, targets: idle_connections(targets, is_quick=sizes is QUICK),
    "tokenizing": lambda sizes, targets: tokenizing(targets, is_quick=sizes is QUICK),
    "fair-door": lambda sizes, targets: fair_door(targets, is_quick=sizes is QUICK),
    "long-prompts": lambda sizes, targets: long_prompts(targets, is_quick=sizes is QUICK),
    "disk-full": lambda sizes, targets: disk_full(targets, is_quick=sizes is QUICK),
}
QUICK_SCENARIOS = ["engine-killed", "attacks"]


def print_figures(scenario: str, figures: dict[str, Any]) -> None:
    """Print one row a figure, or one a measurement if there are several of the same kind."""
    title = scenario.replace("-", " ")
    if all(isinstance(value, dict) for value in figures.values()):
        names = list(next(iter(figures.values())))
        print_table(title, ["", *names], [[what, *found.values()] for what, found in figures.items()])
    else:
        print_table(title, ["", ""], [[what, value] for what, value in figures.items()])


def scenario_names(text: str) -> list[str]:
    """The names in "drain,api-killed"."""
    names = text.split(",")
    unknown = sorted(set(names) - set(SCENARIOS))
    if unknown:
        there_are = ", ".join(SCENARIOS)
        raise argparse.ArgumentTypeError(f"no scenario is called {', '.join(unknown)}; choose from {there_are}")
    return names


def main() -> int:
    parser = argument_parser(__doc__ or "")
    parser.add_argument("--scenarios", type=scenario_names, help=f"some of {','.join(SCENARIOS)}")
    arguments = parser.parse_args()
    scenarios = arguments.scenarios or (QUICK_SCENARIOS if arguments.quick else list(SCENARIOS))
    sizes = QUICK if arguments.quick else FULL
    targets, figures = Targets(), {}
    for name in scenarios:
        figures[name] = SCENARIOS[name](sizes, targets)
        print_figures(name, figures[name])
    note("")
    for name in [name for name in SCENARIOS if name not in scenarios]:
        targets.skip(f"the scenario {name}", "not among --scenarios" if arguments.scenarios else "--quick")
    return finish("server_faults", {"quick": arguments.quick, **figures}, targets, arguments.check)


if __name__ == "__main__":
    run(main)
