"""Load of `scale.py`, the same for every arrangement of engines: prompts begin with one of 24 shared prefixes.

A sixth of each prompt is its own, so no cache can have a hit rate above `IDEAL_HIT_RATE`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

from _server_client import Address, BrokenAnswer, post, send

MODEL = "demo"
NUM_PREFIXES, PREFIX_TOKENS, OWN_TOKENS = 24, 320, 64
CLIENTS, TOKENS = 4, 16
BLOCK_SIZE = 16
POOL = 400
"""Blocks of one engine: they hold 20 of the 24 prefixes."""
IDEAL_HIT_RATE = PREFIX_TOKENS / (PREFIX_TOKENS + OWN_TOKENS)


def server_options(num_blocks: int) -> tuple[str, ...]:
    """Options of `pointsman serve`, in all arrangements, with this number of blocks for all its engines together."""
    sizes = ("--num-blocks", str(num_blocks), "--block-size", str(BLOCK_SIZE), "--max-model-len", "1024")
    return ("--model", MODEL, *sizes, "--log-stats-interval", "0", "--no-warm-up")


def prefix(number: int) -> list[int]:
    """The tokens of a shared prefix."""
    return random.Random(number).choices(range(300, 2000), k=PREFIX_TOKENS)


def request_of(number: int, own: int) -> bytes:
    """A stream behind prefix `number`."""
    prompt = prefix(number) + random.Random(f"own {own}").choices(range(300, 2000), k=OWN_TOKENS)
    fields = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    return post("/v1/completions", {"model": MODEL, **fields})


def first_requests() -> list[bytes]:
    """One request behind each prefix; afterwards all prefixes that fit are cached."""
    return [request_of(number, -1 - number) for number in range(NUM_PREFIXES)]


async def load(address: Address, requests: Sequence[bytes]) -> None:
    """Send all requests, one after the other for each client; nothing is recorded."""
    left = list(reversed(requests))

    async def client() -> None:
        while left:
            exchange = await send(address, left.pop())
            if not exchange.answer().stream().is_done:
                raise BrokenAnswer("a stream ended without its last event")

    await asyncio.gather(*[client() for _ in range(CLIENTS)])


def processor_seconds(pid: int) -> float:
    """Processor time that a process has used, all threads, to the nanosecond: `/proc/PID/stat` counts in 10 ms."""
    paths = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in paths) / 1e9
