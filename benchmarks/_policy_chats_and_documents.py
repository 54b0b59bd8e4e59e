"""Chats beside a long document every ten seconds: a prompt of 30,000 tokens stalls the decodes beside it."""

from __future__ import annotations

from functools import lru_cache

from _policy_scenario import Scenario

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.scenarios.workloads import Stream, Streams
from pointsman.sim.shapes import model_shape
from pointsman.sim.step_time import RooflineStepTime
from pointsman.sim.workload import Arrival

NUM_REQUESTS = 6_000
SEED = 5


@lru_cache(maxsize=4)
def arrivals(speed: float) -> list[Arrival]:
    """`speed` chats a second; documents come every ten seconds at any speed."""
    num_documents = int(NUM_REQUESTS / speed / 10) + 1
    chats = Stream("chats", NUM_REQUESTS, "lognormal:300,0.8", "lognormal:200,0.6", f"poisson:{speed}")
    documents = Stream("documents", num_documents, "30000", "200", "constant:0.1", start=5.0)
    return list(Streams((chats, documents), SEED).first_arrivals())


CHATS_AND_DOCUMENTS = Scenario(
    name="chats-and-documents",
    about="chats beside one prompt of 30,000 tokens every 10 s, 28,048 blocks, Llama 3.1 8B on an H100; a speed is "
    "chats a second",
    arrivals=arrivals,
    config=SchedulerConfig(
        num_blocks=28_048,
        max_model_len=131_072,
        max_num_seqs=256,
        max_num_batched_tokens=8_192,
        enable_prefix_caching=False,
    ),
    step_time=RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("h100")),
    speeds={"below": 36.0, "at": 44.0, "above": 48.0},  # the queue grows above 45
)
