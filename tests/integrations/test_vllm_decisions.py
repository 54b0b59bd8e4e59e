"""With the preset "vllm", our scheduler decides in vLLM as vLLM's own: step by step, on random workloads.

`POINTSMAN_SOAK=1` compares ten times as many. docs/vllm.md lists what is left out.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from vllm_env import python_of

ROOT = Path(__file__).resolve().parents[2]
NUM_WORKLOADS = 1000 if os.environ.get("POINTSMAN_SOAK") else 100
MET_PER_100 = {
    "steps": 5_000,
    "preemptions": 150,
    "hits": 150,
    "chunks": 2_000,
    "stopped": 500,
    "aborts": 100,
    "asynchronous": 25,
    "with adapters": 10,
}
"""What so many workloads meet at least, so that they cannot pass by meeting nothing."""

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        not python_of().exists(), reason="vLLM is not installed in .venv-vllm; benchmarks/vllm_env.py makes it"
    ),
]


def test_every_decision_is_that_of_vllms_own_scheduler() -> None:
    command = [python_of(), ROOT / "tests" / "integrations" / "vllm_decisions.py", "0", str(NUM_WORKLOADS)]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "benchmarks")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["differences"], json.dumps(found["differences"][0], indent=1)
    tally = found["tally"]
    for what, least in MET_PER_100.items():
        assert tally[what] >= least * NUM_WORKLOADS // 100, f"{what}: {tally[what]}"
    assert tally.get("resumed in chunks", 0) <= NUM_WORKLOADS // 25, "the comparison of these workloads ends there"
