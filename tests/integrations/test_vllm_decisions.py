"""With the preset "vllm", our scheduler decides in vLLM as vLLM's own: step by step, on random workloads.

`POINTSMAN_SOAK=1` compares more of them. docs/vllm.md lists what is left out.
"""

from __future__ import annotations

import json

from tests.integrations.vllm_process import NEEDS_VLLM, run_in_vllm
from tests.soak import short_or_long

NUM_WORKLOADS = short_or_long(40, 1000)
MET_PER_100 = {
    "steps": 5_000,
    "preemptions": 150,
    "hits": 150,
    "chunks": 2_000,
    "stopped": 500,
    "aborts": 100,
    "asynchronous": 25,
    "with adapters": 10,
    "with drafts": 20,
    "drafts": 1_500,
    "with work": 500,
}
"""What so many workloads meet at least, so that they cannot pass by meeting nothing."""

pytestmark = NEEDS_VLLM


def test_every_decision_is_that_of_vllms_own_scheduler() -> None:
    found = run_in_vllm("vllm_decisions.py", 0, NUM_WORKLOADS, timeout=900)
    assert not found["differences"], json.dumps(found["differences"][0], indent=1)
    tally = found["tally"]
    for what, least in MET_PER_100.items():
        assert tally[what] >= least * NUM_WORKLOADS // 100, f"{what}: {tally[what]}"
    for what in ("resumed in chunks", "gave up drafts"):
        assert tally.get(what, 0) <= NUM_WORKLOADS // 10, "the comparison of these workloads ends there"
