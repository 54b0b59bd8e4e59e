"""Chats beside long documents: a long prompt stalls the decodes beside it."""

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


@lru_cache(maxsize=4)
def arrivals(speed: float) -> list[Arrival]:
    """`speed` chats a second; documents come every ten seconds at any speed."""
    num_documents = int(NUM_REQUESTS / speed / 10) + 1
    chats = Stream("chats", NUM_REQUESTS, "lognormal:300,0.8", "lognormal:200,0.6", f"poisson:{speed}")
    documents = Stream("documents", num_documents, "30000", "200", "constant:0.1", start=5.0)
    return list(Streams((chats, documents), 5).first_arrivals())


@lru_cache(maxsize=4)
def other_arrivals(speed: float) -> list[Arrival]:
    """`speed` chats a second; documents come at random, one in four seconds."""
    num_documents = int(NUM_REQUESTS / speed / 4) + 1
    chats = Stream("chats", NUM_REQUESTS, "lognormal:500,0.7", "lognormal:120,0.7", f"poisson:{speed}")
    documents = Stream("documents", num_documents, "lognormal:12000,0.4", "80", "poisson:0.25", start=2.0)
    return list(Streams((chats, documents), 105).first_arrivals())


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
    speeds={"below": 23.5, "at": 27.5, "above": 29.5},  # the queue grows above 27.8
)
CHATS_AND_DOCUMENTS_OTHER = Scenario(
    name="chats-and-documents-other",
    about="chats beside prompts around 12,000 tokens that come at random, one in 4 s, 25,000 blocks, Llama 3.1 8B on "
    "an A100; a speed is chats a second",
    arrivals=other_arrivals,
    config=CHATS_AND_DOCUMENTS.config.replace(num_blocks=25_000),
    step_time=RooflineStepTime(shape=model_shape("Llama-3.1-8B"), device=device("a100")),
    speeds={"below": 7.8, "at": 9.2, "above": 9.8},  # the queue grows above 9.2
)
