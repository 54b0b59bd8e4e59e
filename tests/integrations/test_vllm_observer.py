"""Observer: every decision stays vLLM's, its recording is correct, and a capacity figure can be made from it.

Real vLLM is observed in test_vllm_tokens.py.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from _server_sides import Knobs, VllmSide
from server_throughput import bench

from pointsman.traces import read_measurements
from tests.forms import seeds
from tests.integrations.vllm_process import DEMO, NEEDS_VLLM, compared, run_in_vllm, vllm_folders
from tests.integrations.vllm_recorded import check_commands, last_json, pointsman

WORKLOADS = seeds(10, 100)
MET_PER_10 = {
    "steps": 500,
    "preemptions": 5,
    "hits": 10,
    "aborts": 3,
    "asynchronous": 2,
    "requests": 100,
    "with groups": 3,
    "accepted drafts": 50,
    "rejected drafts": 50,
    "with adapters": 20,
    "simulated": 5,
}
"""Minimum number of each event in these workloads, so that the test cannot pass without them."""
OBSERVER = ("--scheduler-cls", "pointsman.integrations.vllm.Observer")

pytestmark = NEEDS_VLLM


# ------------------------------------------------------------------ decisions and recordings


def test_observer_keeps_vllms_decisions_and_records_them(tmp_path: Path) -> None:
    tally = compared("vllm_observed.py", WORKLOADS, tmp_path)
    for what, least in MET_PER_10.items():
        assert tally[what] >= least * len(WORKLOADS) // 10, f"{what}: {tally[what]}"
    assert tally["with several runs"] > 0 and tally["shared blocks"] > 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_observer_failures_end_the_recording_and_not_vllm() -> None:
    """The failures are a full disk, a missing folder, and an error in our own code."""
    found = run_in_vllm("vllm_observed_faults.py")
    full, absent, mistaken = found["full disk"], found["no folder"], found["mistake"]
    assert "No space left" in full["warnings"][0]
    assert "No such file" in absent["warnings"][0]
    assert "because of an error" in mistaken["warnings"][0]
    for each in (full, absent, mistaken):
        assert len(each["warnings"]) == 1, each["warnings"]
        assert each["finished"] == found["own"]["finished"] == 20
        assert not each["recording"]
    assert "has no effect on Observer" in found["drop-in knob"]
    assert found["groups that are simulated"] == []
    assert found["blocks of two sizes"] == [
        "2 KV groups (FullAttentionSpec, SlidingWindowSpec) (as one group: --disable-hybrid-kv-cache-manager)"
    ]
    assert found["states"] == ["2 KV groups (FullAttentionSpec, MambaSpec)"]


# ------------------------------------------------------------------ a server


KNOBS = Knobs(DEMO, threads=1, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=512)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """A server with Observer under vLLM's load generator: the recording, and the generator's result.

    Its slots are not all in use: on a full server a queue magnifies what step times are off by.
    """
    folder = tmp_path_factory.mktemp("served")
    log = folder / "recording.jsonl"
    options = (*OBSERVER, "--additional-config", json.dumps({"pointsman": {"record": str(log)}}))
    side = VllmSide(KNOBS, eager=True, options=options, folders=vllm_folders())
    try:
        result = bench(side, DEMO, 6.0, 150, seed=1, folder=folder, detailed=True)
        assert result["completed"] == 150
        time.sleep(1)
    finally:
        side.stop()
    yield log, folder / "result.json"


@pytest.mark.long
def test_logs_of_observer_and_load_generator_can_be_simulated(served: tuple[Path, Path], tmp_path: Path) -> None:
    log, result = served
    check_commands(log, tmp_path)
    settings = ("--max-num-seqs", 16, "--max-num-batched-tokens", 512, "--block-size", 32, "--no-async-scheduling")
    check_commands(result, tmp_path, *settings, "--train", 60)
    recorded, sent = read_measurements(log)[-150:], read_measurements(result)
    # In any order: requests sent shortly after each other may reach the engine in reverse order.
    lengths = [sorted(each.request.num_output_tokens for each in requests) for requests in (recorded, sent)]
    assert lengths[0] == lengths[1]
    inside = sorted(each.e2e for each in recorded)[75]
    outside = sorted(each.e2e for each in sent)[75]
    assert 0 < inside <= outside, "the times of the client have the network and the API server in them"


@pytest.mark.long
def test_simulation_of_vllms_settings_is_close_to_the_run(served: tuple[Path, Path]) -> None:
    compared = last_json(pointsman("vllm", "compare", served[0], "--json", "--ttft-target", "500ms"))
    # Single requests differ by as much as the machine's speed varies; their totals do not.
    assert compared["check"]["e2e_mape"] < 0.25, compared["check"]
    assert abs(compared["check"]["e2e_bias"]) < 0.1, compared["check"]
    assert abs(compared["check"]["ttft_p50_error"]) < 0.25
    assert abs(compared["check"]["tpot_mean_error"]) < 0.1
    assert 0 < compared["rows"]["vLLM, simulated"]["goodput"] <= 1
