"""Reads a server's metrics and open requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from _server_client import Address, get, send

MIB = 1024 * 1024
BY_LABEL = {"finished_reason", "stage"}


def run_async(main: Coroutine[Any, Any, Any]) -> Any:
    """`asyncio.run` on uvloop if it is installed, because the client's share of the processor should be small."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.run(main)
    return uvloop.run(main)


def is_running(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


async def read_metrics(address: Address) -> dict[str, float]:
    """Every sample of /metrics by name, added up over its labels; by name/value too for the labels in `BY_LABEL`."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = (await send(address, get("/metrics"))).answer()
    totals: dict[str, float] = {}
    for family in text_string_to_metric_families(answer.body.decode()):
        for sample in family.samples:
            totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
            for label in BY_LABEL & sample.labels.keys():
                totals[f"{sample.name}/{sample.labels[label]}"] = sample.value
    return totals


async def open_requests(address: Address) -> list[dict[str, Any]]:
    """The requests that /v1/requests lists."""
    listing = (await send(address, get("/v1/requests"))).answer().json()
    return list(listing["data"])


async def wait_until_idle(address: Address, seconds: float = 10.0) -> dict[str, float] | None:
    """The metrics as soon as no request is open and no block in use; None if that did not happen in time."""
    limit = time.monotonic() + seconds
    while True:
        metrics = await read_metrics(address)
        busy = metrics["vllm:num_requests_running"] or metrics["vllm:num_requests_waiting"]
        if not busy and metrics["vllm:kv_cache_usage_perc"] == 0 and not await open_requests(address):
            return metrics
        if time.monotonic() > limit:
            return None
        await asyncio.sleep(0.05)
