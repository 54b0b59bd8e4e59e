"""Ready-made situations of the sandbox: each shows one effect, and a change of settings that affects it.

The tests run each situation to its end, with and without the proposed change, and compare the situation's text with the
actions of the scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pointsman.core import SchedulerConfig
from pointsman.web.scene import Arrival, Scene


@dataclass(frozen=True, slots=True)
class Situation:
    """A scene to begin with, and a change of its settings to try."""

    name: str
    title: str
    about: str
    scene: Scene
    what_if: Mapping[str, Any]
    """The proposed change of settings, as an action for `Sandbox.do`."""
    what_if_text: str


def _config(**knobs: Any) -> SchedulerConfig:
    return SchedulerConfig(**{"num_blocks": 64, "max_model_len": 2048, "max_num_seqs": 8, **knobs})


def _static() -> Situation:
    arrivals = [
        Arrival(f"{'long' if index % 8 == 0 else 'short'}-{index}", 16, 100 if index % 8 == 0 else 10)
        for index in range(24)
    ]
    return Situation(
        "static",
        "Static against continuous batching",
        "Of every eight requests one generates 100 tokens and seven generate 10. A static batch waits for its longest "
        "request: run it, and see how few rows a step has.",
        Scene(_config(batching="static", max_num_batched_tokens=256), tuple(arrivals)),
        {"batching": "mixed"},
        "What if a waiting request takes each slot as soon as it is free? (batching: mixed)",
    )


def _long_prompt() -> Situation:
    chats = [Arrival(f"chat-{index}", 20, 60) for index in range(4)]
    return Situation(
        "chunks",
        "A long prompt beside chats",
        "Four chats decode, and at 0.1 s a prompt of 1,500 tokens arrives. One step computes it, and every chat "
        "waits that long for its next token: see the longest gap.",
        Scene(
            _config(num_blocks=128, max_num_batched_tokens=2048, enable_chunked_prefill=False),
            (*chats, Arrival("document", 1500, 10, at=0.1)),
        ),
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 128},
        "What if it is computed in chunks? (chunked prefill, a budget of 128)",
    )


def _short_pool() -> Situation:
    arrivals = [Arrival(f"request-{index}", 40, 60, at=0.02 * index) for index in range(6)]
    return Situation(
        "preemption",
        "A pool that is too short",
        "Six requests of 40 prompt tokens grow by 60 each, to 7 blocks; the pool has 24. Blocks run out, "
        "and the request that was admitted last is preempted: it keeps its tokens, and is the next to start.",
        Scene(_config(num_blocks=24, max_num_batched_tokens=256), tuple(arrivals)),
        {"num_blocks": 48},
        "What if the pool has 48 blocks?",
    )


def _thrash() -> Situation:
    arrivals = [Arrival(f"request-{index}", 256, 150, at=0.03 * index) for index in range(12)]
    return Situation(
        "thrash",
        "Thrash and the watermark",
        "A request is admitted as soon as its first tokens fit, so more are admitted than can grow. They preempt each "
        "other repeatedly, and without prefix cache each preemption recomputes all tokens of the request.",
        Scene(
            _config(max_num_batched_tokens=256, enable_prefix_caching=False, full_sequence_must_fit=False),
            tuple(arrivals),
        ),
        {"watermark": 0.1},
        "What if an admission must leave 10 % of the pool free? (watermark)",
    )


def _prefixes() -> Situation:
    first = Arrival("first", 320, 20)
    others = [
        Arrival(f"like-first-{index}", 340, 20, at=0.1 + 0.02 * index, starts_like="first", num_shared_tokens=320)
        for index in range(6)
    ]
    again = Arrival("next-turn", 360, 20, at=1.0, starts_like="first", num_shared_tokens=339)
    return Situation(
        "prefixes",
        "Requests that start alike",
        "Six requests start with the 320 tokens of the first, and the last one continues its conversation, output "
        "included. Without prefix cache each computes them again, into blocks of its own.",
        Scene(
            _config(num_blocks=192, max_num_batched_tokens=256, enable_prefix_caching=False),
            (first, *others, again),
        ),
        {"enable_prefix_caching": True},
        "What if full blocks are kept and shared? (prefix caching)",
    )


def _priority() -> Situation:
    arrivals = [Arrival(f"batch-{index}", 64, 80, priority=1) for index in range(8)]
    return Situation(
        "priority",
        "An urgent request",
        "Eight requests wait for four slots, and at 0.2 s an urgent one arrives (priority 0, theirs is 1; smaller is "
        "more urgent). First come, first served: it is the last to start.",
        Scene(_config(max_num_seqs=4, max_num_batched_tokens=128), (*arrivals, Arrival("urgent", 32, 20, at=0.2))),
        {"order": "priority"},
        "What if priority decides? It preempts a running request.",
    )


def _fairness() -> Situation:
    flood = [Arrival(f"flood-{index}", 48, 40, tenant="heavy") for index in range(16)]
    light = [Arrival(f"light-{index}", 24, 10, at=0.2 + 0.2 * index, tenant="light") for index in range(3)]
    return Situation(
        "fairness",
        "A tenant that floods",
        "One tenant sends sixteen requests at once, another one a short request now and then, which waits behind all "
        "of them.",
        Scene(_config(max_num_seqs=4, max_num_batched_tokens=128), (*flood, *light)),
        {"order": "fair"},
        "What if the tenant with the least service is next? (order: fair)",
    )


def _never() -> Situation:
    return Situation(
        "never",
        "A request that never fits",
        "The pool has 16 blocks of 16 tokens: a prompt of 300 tokens can never run, however long it waits. It is "
        "refused when it arrives, with the numbers; the others are served.",
        Scene(
            _config(num_blocks=16, max_num_batched_tokens=128),
            (Arrival("small", 40, 20), Arrival("too-long", 300, 20, at=0.05), Arrival("next", 60, 20, at=0.1)),
        ),
        {"num_blocks": 32},
        "What if the pool has 32 blocks?",
    )


SITUATIONS = (
    _static(),
    _long_prompt(),
    _short_pool(),
    _thrash(),
    _prefixes(),
    _priority(),
    _fairness(),
    _never(),
)
"""All situations, in the order in which the page offers them."""
