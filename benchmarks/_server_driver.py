"""Driver of servers: sends streams of exact lengths with a low-overhead client, for benchmarks without vLLM's client
and
those that need the client's own cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, median
from time import monotonic, process_time
from typing import Any

import numpy as np
from _server_client import Address, BrokenAnswer, Exchange, percentile, post, start

SECONDS_TO_END = 600.0


@dataclass(frozen=True, slots=True)
class Driven:
    """The results of a run. Times are seconds."""

    seconds: float
    """Seconds from the first request to the end of the last response."""
    num_requests: int
    num_complete: int
    """Number of responses with all their tokens, one finish reason and [DONE]."""
    num_output_tokens: int
    """TTFT of the complete responses."""
    first_token: list[float]
    gaps: list[float]
    """Gaps between the pieces of a response; tokens that came together count once."""
    per_token: list[float]
    """For each response: seconds from its first token to its last, per token after the first."""
    client_seconds: float
    """The client's own processor time during the run."""

    @property
    def output_tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """The figures with the names of vLLM's client; latencies in milliseconds."""
        found: dict[str, Any] = {
            "completed": self.num_complete,
            "output_throughput": self.output_tokens_per_second,
            "duration": self.seconds,
        }
        for name, values in (("ttft", self.first_token), ("tpot", self.per_token), ("itl", self.gaps)):
            if values:
                found[f"mean_{name}_ms"] = mean(values) * 1e3
                found[f"median_{name}_ms"] = median(values) * 1e3
                found[f"p99_{name}_ms"] = percentile(values, 0.99) * 1e3
        return found


def stream_request(model: str, prompt: Sequence[int], num_tokens: int) -> bytes:
    """A streamed completion of an exact number of tokens."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post("/v1/completions", body)


async def drive(
    address: Address,
    model: str,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    *,
    rate: float = float("inf"),
    num_streams: int | None = None,
    seed: int = 0,
) -> Driven:
    """Stream every request to its end.

    Args:
        address: where the server listens.
        model: the server's name of its model.
        prompts: in tokens.
        outputs: tokens to request, one number per prompt.
        rate: requests a second, at the times of a Poisson process; infinity: all at once.
        num_streams: maximum number of open streams; None: no limit.
        seed: of the arrival times.
    """
    requests = [stream_request(model, *pair) for pair in zip(prompts, outputs, strict=True)]
    gate = asyncio.Semaphore(num_streams or len(requests))
    moments = np.zeros(len(requests))
    if rate != float("inf"):
        moments = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(requests)))
    cpu, begin = process_time(), monotonic()

    async def one(request: bytes, moment: float) -> Exchange:
        await asyncio.sleep(max(0.0, begin + moment - monotonic()) if moment else 0)
        async with gate:
            exchange = await start(address, request)
            if not await exchange.end(SECONDS_TO_END):
                exchange.hang_up()
            return exchange

    exchanges = await asyncio.gather(*(one(*pair) for pair in zip(requests, moments, strict=True)))
    seconds, client_seconds = monotonic() - begin, process_time() - cpu
    return _judge(exchanges, outputs, seconds, client_seconds)


def _judge(exchanges: Sequence[Exchange], outputs: Sequence[int], seconds: float, client_seconds: float) -> Driven:
    """Parse the completions, after the clock has stopped."""
    first, gaps, per_token, num_complete, num_tokens = [], [], [], 0, 0
    for exchange, wanted in zip(exchanges, outputs, strict=True):
        try:
            stream = exchange.answer().stream()
        except BrokenAnswer:
            continue
        told = stream.usage["completion_tokens"] if stream.usage else None
        if told != wanted or stream.finish_reason != "length" or not stream.is_done or stream.num_late:
            continue
        num_complete += 1
        num_tokens += wanted
        assert exchange.first_event_at is not None
        first.append(exchange.first_event_at - exchange.sent_at)
        after = [moment for moment in exchange.times if moment >= exchange.first_event_at]
        gaps += [b - a for a, b in pairwise(after)]
        if wanted > 1:
            per_token.append((after[-1] - after[0]) / (wanted - 1))
    return Driven(
        seconds=seconds,
        num_requests=len(exchanges),
        num_complete=num_complete,
        num_output_tokens=num_tokens,
        first_token=first,
        gaps=gaps,
        per_token=per_token,
        client_seconds=client_seconds,
    )
