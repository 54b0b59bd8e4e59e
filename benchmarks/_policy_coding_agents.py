"""Sessions of a coding agent with their prefixes: each prompt is the last one, its output and the result of a tool.

The sessions of the trace are split into two halves, so that a policy is chosen on one half and judged on the other. A
session begins every `SESSION_INTERVAL` seconds at a speed of 1. Gaps of more than `MAX_GAP` seconds, in which the user
was away, are shortened to this length. Requests that are longer than the model are left out.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import count
from typing import Any

from _common import AZURE_TRACE
from _policy_scenario import Load, Scenario, scaled

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.request import SimRequest
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import Arrival

CODING_TRACE = AZURE_TRACE.with_name("agentic_coding_sessions.jsonl.gz")
SESSION_INTERVAL = 60.0
MAX_GAP = 300.0
RETENTION = 60.0
"""Seconds for which a request that ends with the call of a tool asks to retain its prefix. Nine of ten tools take
less."""
NUM_REQUESTS = 1_200
SHAPE = model_shape("Llama-3.1-8B")


@dataclass(frozen=True)
class _Call:
    """A request of a session: seconds since the session began, lengths, hash ids, and whether a tool is called."""

    time: float
    num_prompt_tokens: int
    num_output_tokens: int
    hash_ids: tuple[int, ...]
    calls_tool: bool


def _calls(requests: list[dict[str, Any]], start: float = 0.0) -> Iterator[_Call]:
    """The requests of a session or sub-agent, those of its own sub-agents included. Times of a sub-agent's requests are
    relative to its start."""
    for each in requests:
        time = start + each["t"]
        if each["type"] == "subagent":
            yield from _calls(each["requests"], time)
        elif each["in"] + each["out"] <= SHAPE.max_model_len:
            yield _Call(time, each["in"], max(1, each["out"]), tuple(each["hash_ids"]), each.get("stop") == "tool_use")


@cache
def _sessions(half: int) -> list[Arrival]:
    """The requests of every second session, from session `half` on, in order of time."""
    new_ids = count()
    found: list[tuple[float, _Call, tuple[int, ...], int]] = []
    with gzip.open(CODING_TRACE, "rt") as lines:
        for number, line in enumerate(list(lines)[half::2]):
            session = json.loads(line)
            block_size = session["block_size"]
            ids: dict[int, int] = {}  # ids of the trace mean something within one session only
            start, before, shift = number * SESSION_INTERVAL, 0.0, 0.0
            for call in sorted(_calls(session["requests"]), key=lambda call: call.time):
                shift += max(0.0, call.time - before - MAX_GAP)
                before = call.time
                hash_ids = tuple(ids.setdefault(each, next(new_ids)) for each in call.hash_ids)
                found.append((start + call.time - shift, call, hash_ids, block_size))
    found.sort(key=lambda each: each[0])
    return [
        (
            time,
            SimRequest(
                request_id=f"request-{index}",
                num_prompt_tokens=call.num_prompt_tokens,
                num_output_tokens=call.num_output_tokens,
                block_hash_ids=hash_ids,
                hash_block_size=block_size,
                tenant="agents",
                retention=RETENTION if call.calls_tool else None,
                index=index,
            ),
        )
        for index, (time, call, hash_ids, block_size) in enumerate(found[:NUM_REQUESTS])
    ]


def _scenario(name: str, about: str, arrivals: Callable[[float], list[Arrival]], speeds: dict[Load, float]) -> Scenario:
    return Scenario(
        name=name,
        about=f"{about}, 60,000 blocks, Llama 3.1 8B on an H200",
        arrivals=arrivals,
        config=SchedulerConfig(
            num_blocks=60_000, max_model_len=SHAPE.max_model_len, max_num_seqs=256, max_num_batched_tokens=8_192
        ),
        step_time=RooflineStepTime(shape=SHAPE, device=device("h200")),
        speeds=speeds,
    )


CODING_AGENTS = _scenario(
    "coding-agents",
    "35 sessions of a coding agent with their prefixes",
    lambda speed: scaled(_sessions(0), speed),
    {"below": 1.3, "at": 1.55, "above": 1.7},
)
CODING_AGENTS_OTHER = _scenario(
    "coding-agents-other",
    "35 other sessions of the same trace",
    lambda speed: scaled(_sessions(1), speed),
    {"below": 1.0, "at": 1.2, "above": 1.35},
)
