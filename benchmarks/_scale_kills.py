"""Kills of `scale.py`: kills one of several engines (SIGKILL) at random moments while streams run.

In float32 each stream must equal the undisturbed one. In bfloat16 the KV that another engine recomputes may differ in
its last bits, so a greedy stream may continue with an equally likely token. There, an undisturbed engine scores all
tokens of a stream, and each must be the most likely one, except for rounding.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import monotonic
from typing import Any

from _scale_load import MODEL, prefix
from _scale_sides import Side
from _server_client import BrokenAnswer, Exchange, Stream, post, send, start
from _server_probe import open_requests, read_metrics, wait_until_idle

KILLED_TOGETHER = 10
"""Number of streams that run when an engine is killed."""
PROMPT_TOKENS = 40
SECONDS_TO_RETURN = 120.0
SECONDS_TO_LIVE = 61.0
"""Seconds for which an engine lives before it is killed again: slightly more than `FORGIVEN_AFTER` in
`server/service/fleet.py`."""


def request_of(number: int, num_tokens: int, *, greedy: bool = False) -> bytes:
    """A stream that runs when an engine is killed."""
    fields: dict[str, Any] = {"max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    fields |= {"temperature": 0, "return_token_ids": True} if greedy else {"temperature": 0.8, "seed": number}
    body = {"model": MODEL, "prompt": prefix(number)[:PROMPT_TOKENS], **fields}
    return post("/v1/completions", body, {"X-Request-Id": f"scale-{number}-"})


def whole(exchange: Exchange) -> Stream | None:
    """The parsed stream, if it is complete; None otherwise."""
    try:
        stream = exchange.answer().stream()
    except BrokenAnswer:
        return None
    is_whole = stream.is_done and stream.error is None and stream.finish_reasons == {0: ["length"]}
    return stream if is_whole else None


def text_of(exchange: Exchange) -> str | None:
    """The text of a stream, if it is complete."""
    stream = whole(exchange)
    return None if stream is None else stream.text


def compared(exchanges: Sequence[Exchange], expected: Sequence[str | None]) -> tuple[int, int]:
    """The number of failed streams, and of complete streams that differ from the expected ones."""
    texts = [text_of(exchange) for exchange in exchanges]
    differing = sum(text is not None and text != wanted for text, wanted in zip(texts, expected, strict=True))
    return texts.count(None), differing


class Killing:
    """Kills under load, on one server.

    Args:
        side: a server with several engines.
        requests: the streams that run each time.
        seed: of the random moments.
    """

    def __init__(self, side: Side, requests: Sequence[bytes], seed: int) -> None:
        self._side = side
        self._requests = requests
        self._random = random.Random(seed)
        self._num_pieces = 0  # of all undisturbed streams
        self._first_pids = side.server.engine_pids
        self._born = dict.fromkeys(self._first_pids, monotonic())
        self.num_open = 0
        """Streams that were open when an engine was killed."""
        self.back: list[float] = []
        """Seconds until all engines lived again, for each kill."""
        self.gaps: list[float] = []
        """The longest gap in the streams of the surviving engines, for each kill at which both had streams."""
        self.gaps_of_resumed: list[float] = []
        """The longest gap in the streams of the killed engine."""

    async def undisturbed(self) -> list[Exchange]:
        """Run the streams undisturbed."""
        exchanges = await self._together()
        for exchange in exchanges:
            await exchange.end()
        self._num_pieces = sum(len(exchange.pieces) for exchange in exchanges)
        return exchanges

    async def killed(self) -> tuple[list[Exchange], list[int]]:
        """Run the streams, and kill one of their engines at a random moment. Returns the streams, and the number of
        pieces that each had by then, when all engines live again. An engine that was killed before has lived for a
        minute, because faster deaths delay its next start.

        Raises:
            TimeoutError: an engine does not live again.
        """
        pids = self._side.server.engine_pids
        victim = self._random.choice(pids)
        if victim not in self._first_pids:
            await asyncio.sleep(max(0.0, self._born[victim] + SECONDS_TO_LIVE - monotonic()))
        exchanges = await self._together()
        # A share of the pieces and not of the time, because a shared machine changes speed.
        wanted = self._random.uniform(0.05, 0.8) * self._num_pieces
        while sum(len(exchange.pieces) for exchange in exchanges) < wanted:
            await asyncio.sleep(0.002)
        listed = await open_requests(self._side.address)
        homes = {int(one["id"].split("scale-")[1].split("-")[0]): one["engine"] for one in listed}
        os.kill(victim, signal.SIGKILL)
        killed, had = monotonic(), [len(exchange.pieces) for exchange in exchanges]
        await asyncio.sleep(0.2)  # until the death is noticed
        for exchange in exchanges:
            await exchange.end()
        while (await read_metrics(self._side.address))["pointsman:engine_up"] < len(pids):
            if monotonic() - killed > SECONDS_TO_RETURN:
                raise TimeoutError(f"the engine was not restarted within {SECONDS_TO_RETURN:g} s")
            await asyncio.sleep(0.05)
        self.back.append(monotonic() - killed)
        self._born |= {pid: monotonic() for pid in self._side.server.engine_pids if pid not in self._born}
        self.num_open += len(homes)
        by_engine: dict[int, float] = {}
        for number, engine in homes.items():
            gap = longest_gap(exchanges[number], killed)
            by_engine[engine] = max(by_engine.get(engine, 0.0), gap)
        if len(by_engine) == len(pids):
            self.gaps.append(min(by_engine.values()))
            self.gaps_of_resumed.append(max(by_engine.values()))
        return exchanges, had

    async def counts(self, num_kills: int, num_failed: int) -> dict[str, Any]:
        """The figures of all kills, and whether the blocks were freed after the last."""
        return {
            "kills": num_kills,
            "requests": num_kills * len(self._requests),
            "open_at_a_kill": self.num_open,
            "failed": num_failed,
            "blocks_back": await wait_until_idle(self._side.address) is not None,
        }

    async def _together(self) -> list[Exchange]:
        return [await start(self._side.address, request) for request in self._requests]


def longest_gap(exchange: Exchange, since: float) -> float:
    """The longest gap between two pieces of a stream, the later of which came after `since`."""
    times = exchange.times
    return max((later - max(before, since) for before, later in pairwise(times) if later > since), default=0.0)


async def kills(side: Side, count: int, num_tokens: int) -> dict[str, Any]:
    """Kill one of the engines `count` times under load, in float32: every output must equal the undisturbed one."""
    killing = Killing(side, [request_of(number, num_tokens) for number in range(KILLED_TOGETHER)], seed=2)
    expected = [text_of(exchange) for exchange in await killing.undisturbed()]
    failed = differing = 0
    for _ in range(count):
        exchanges, _ = await killing.killed()
        lost, changed = compared(exchanges, expected)
        failed, differing = failed + lost, differing + changed
    return {
        **await killing.counts(count, failed),
        "differing": differing,
        "seconds_until_back": round(max(killing.back), 3),
        "median_seconds_until_back": round(median(killing.back), 3),
        "seconds_to_start": round(side.seconds_to_start, 3),
        "gap_of_the_other_engine": round(median(killing.gaps), 3) if killing.gaps else None,
        "longest_gap_of_the_other_engine": round(max(killing.gaps), 3) if killing.gaps else None,
        "gap_of_resumed_streams": round(median(killing.gaps_of_resumed), 3) if killing.gaps else None,
    }


# ------------------------------------------------------------------------------------------------------- bfloat16


def tokens_of(pieces: Sequence[bytes]) -> list[int]:
    """The token ids of a stream as far as its pieces go."""
    found: list[int] = []
    for line in b"".join(pieces).split(b"\n"):
        if line.startswith(b"data: {") and line.endswith(b"}"):
            for choice in json.loads(line[6:])["choices"]:
                found += choice["token_ids"]
    return found


async def max_logprob_shortfall(side: Side, number: int, tokens: Sequence[int]) -> float:
    """The maximum difference of log probability between a greedy stream's token and the most likely one, if the engine
    computes prompt and tokens at once.
    """
    prompt = prefix(number)[:PROMPT_TOKENS]
    fields = {"prompt": [*prompt, *tokens], "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    exchange = await send(side.address, post("/v1/completions", {"model": MODEL, **fields}))
    positions = exchange.answer().json()["choices"][0]["prompt_logprobs"][len(prompt) :]
    worst = 0.0
    for token, position in zip(tokens, positions, strict=True):
        most_likely = max(one["logprob"] for one in position.values())
        worst = max(worst, most_likely - position[str(token)]["logprob"])
    return worst


async def measure_kills_in_bfloat16(side: Side, count: int, num_tokens: int) -> dict[str, Any]:
    """The same in bfloat16, with greedy streams: each is equal up to the death, and continues as validly as the
    undisturbed one."""
    killing = Killing(side, [request_of(number, num_tokens, greedy=True) for number in range(KILLED_TOGETHER)], seed=3)
    undisturbed = [tokens_of(exchange.pieces) for exchange in await killing.undisturbed()]
    allowed = max([await max_logprob_shortfall(side, number, tokens) for number, tokens in enumerate(undisturbed)])
    failed = equal = equal_before = 0
    worst = 0.0
    for _ in range(count):
        exchanges, had = await killing.killed()
        for number, (exchange, num_pieces) in enumerate(zip(exchanges, had, strict=True)):
            tokens, expected = tokens_of(exchange.pieces), undisturbed[number]
            failed += whole(exchange) is None or len(tokens) != num_tokens
            before = tokens_of(exchange.pieces[:num_pieces])
            equal_before += before == expected[: len(before)]
            equal += tokens == expected
            worst = max(worst, await max_logprob_shortfall(side, number, tokens))
    return {
        **await killing.counts(count, failed),
        "equal_up_to_the_death": equal_before,
        "equal": equal,
        "worst_shortfall": round(worst, 4),
        "worst_shortfall_undisturbed": round(allowed, 4),
    }
