"""Gap of running streams beside a prompt of 8,000 tokens, and the effect of a target for that gap on the prompt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

from _common import Targets
from _server_attacks import COMPLETIONS
from _server_beside import MODEL, SECONDS_TO_ANSWER, Disturbance, WatchedServer, watched_server
from _server_client import BrokenAnswer, Exchange, post, start
from _server_driver import stream_request
from _server_probe import run_async

PROMPT_TOKENS = 8000
NUM_STREAMS, STREAM_TOKENS = 4, 16_000
"""Number of running streams, the watched one included, and the tokens of each that remain after the prompt."""
LINE, LINE_TOKENS = "def f(x): return x\n", 8
ROUNDS, QUICK_ROUNDS = 3, 1
SIDES = {"by default": (), "without a target": ("--token-limit", "none")}
MAX_GAP = 0.2
"""Maximum seconds for a client, in the median round: the target of a step, and the transport to the client."""


def long_prompt_gap(targets: Targets, *, is_quick: bool) -> dict[str, Any]:
    """The longest gap of a running stream while a long prompt arrives, as text and as token ids; with the default of
    the server, and without a token limit.

    Returns:
        Figures by side and form, in seconds: median and maximum of the gap over the rounds, median of the first
        token.
    """
    figures = {}
    num_rounds = QUICK_ROUNDS if is_quick else ROUNDS
    for side, options in SIDES.items():
        with watched_server(*options) as server:
            for form in ("text", "ids"):
                found = figures[f"{form}, {side}"] = run_async(_rounds(server, form, num_rounds))
                if not options:
                    targets.at_most(f"longest gap in seconds beside a long prompt as {form}", found["gap"], MAX_GAP)
    return figures


async def _rounds(server: WatchedServer, form: str, num_rounds: int) -> dict[str, float]:
    gaps, first_tokens = [], []
    async with _streams(server):
        for number in range(num_rounds):
            request = _request(form, number)

            async def ask(request: bytes = request) -> Exchange:
                exchange = await start(server.address, request)
                await exchange.end(SECONDS_TO_ANSWER)
                return exchange

            exchange, disturbance = await server.beside(ask, waits_until_idle=False)
            gaps.append(_gap_of(exchange, disturbance))
            first_tokens.append(exchange.seconds)
    return {
        "gap": round(median(gaps), 3),
        "largest gap": round(max(gaps), 3),
        "first token": round(median(first_tokens), 2),
    }


def _gap_of(exchange: Exchange, disturbance: Disturbance) -> float:
    """The gap beside a computed prompt.

    Raises:
        BrokenAnswer: the prompt was not computed.
    """
    answer = exchange.answer()
    if answer.status != 200 or answer.json()["usage"]["prompt_tokens"] < PROMPT_TOKENS:
        raise BrokenAnswer(f"the long prompt was answered with {answer.status}: {answer.body[:200]!r}")
    return disturbance.gap


def _request(form: str, number: int) -> bytes:
    """A prompt of 8,000 tokens with an output of one token."""
    prompt: list[int] | str = [1 + (7 * index + number) % 2000 for index in range(PROMPT_TOKENS)]
    if form == "text":
        prompt = LINE * (PROMPT_TOKENS // LINE_TOKENS)
    return post(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "temperature": 0.0})


@asynccontextmanager
async def _streams(server: WatchedServer) -> AsyncIterator[None]:
    """The other streams, each read by this process."""
    exchanges = []
    for number in range(NUM_STREAMS - 1):
        request = stream_request(MODEL, range(30 * number + 30, 30 * number + 54), STREAM_TOKENS)
        exchanges.append(await start(server.address, request))
    try:
        for exchange in exchanges:
            await exchange.begin()
        yield
        if any(exchange.ended_at is not None for exchange in exchanges):
            raise RuntimeError("a stream ended during the measurement; raise its number of output tokens")
    finally:
        for exchange in exchanges:
            exchange.hang_up()
        await asyncio.sleep(0)
