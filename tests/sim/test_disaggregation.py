"""Prefill and decode apart: equal to single steps, and to schedulers and transfers that are run by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.disaggregation import KvTransfer, TransferTotals
from pointsman.sim.errors import SimulationError
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.request import SimRequest
from pointsman.sim.shapes import model_shape
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.topology import Topology
from tests.forms import seeds
from tests.sim.by_hand import run_disaggregated
from tests.sim.test_lockstep import check_times
from tests.sim.test_simulator import CONFIGS, STEP_TIME, WINDOWS, Listed, config, same, workload

TRANSFER = KvTransfer(bytes_per_token=1000.0, bandwidth=2e6, latency=0.003)  # 4 ms a block of 8 tokens
APART = Topology(prefill_replicas=2, decode_replicas=2, transfer=TRANSFER)
ROOMY = {"num_blocks": 100}
CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "roomy": ROOMY,
    "few sequence slots": {"max_num_seqs": 2, "num_blocks": 60},
    "windows": {"num_blocks": 160, "kv_groups": WINDOWS},
    "windows alone": {"num_blocks": 40, "kv_groups": WINDOWS[:1]},
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", [*CASES, "priority", "asynchronous"])
def test_decodes_in_one_run_and_single_steps_are_equal_with_transfers(name: str, ranks: int) -> None:
    settings = config(**{**CONFIGS, **CASES, "asynchronous": {"max_steps_in_flight": 2}}[name])
    topology = replace(APART, data_parallel_size=ranks, is_lockstep=ranks > 1)
    num_transfers = 0
    for seed in seeds(1, 20):
        fast = simulate(workload(seed), settings, STEP_TIME, topology=topology)
        slow = simulate(workload(seed), settings, STEP_TIME, topology=topology, is_stepping=True)
        same(fast, slow)
        (totals,) = fast.transfers
        assert totals.waiting == pytest.approx(slow.transfers[0].waiting, rel=1e-9, abs=1e-12)
        assert replace(totals, waiting=0, seconds=0) == replace(slow.transfers[0], waiting=0, seconds=0)
        num_transfers += totals.num_transfers
        assert len(fast.timelines) == len(fast.names) == 4 * ranks
        assert (fast.timings.replica >= 2 * ranks).all(), "decode engines come last"
        for stats in fast.stats:
            assert stats.num_free_blocks == settings.num_blocks, "every block is given back"
    assert num_transfers > 20


@pytest.mark.parametrize("name", CASES)
def test_transfers_are_equal_to_schedulers_and_links_run_by_hand(name: str) -> None:
    settings = config(**CASES[name])
    for seed in seeds(1, 20):
        load = workload(seed, 60, with_followers=False)
        arrivals = list(load.first_arrivals())
        outcome = simulate(load, settings, STEP_TIME, topology=APART)
        found = run_disaggregated(arrivals, settings, STEP_TIME, (2, 2), 8 * 1000.0 / 2e6, 0.003)
        check_times(outcome, found, arrivals)


def test_ttft_has_prefill_transfer_and_the_first_decode_step() -> None:
    """33 tokens: 4 blocks of 8 are transferred in 0.016 s, and the decode engine computes the last token again."""
    settings, step_time = config(**ROOMY), LinearStepTime(per_step=1.0, per_token=0.01)
    alone = Listed([(2.0, SimRequest("a", 33, 3))], {})
    outcome = simulate(alone, settings, step_time, topology=APART)
    timings = outcome.timings
    transfer = 4 * 0.004 + 0.003
    assert timings.scheduled[0] == 2.0
    assert timings.first_token[0] == pytest.approx(2.0 + 1.33 + transfer + 1.01)
    assert timings.last_token[0] == pytest.approx(timings.first_token[0] + 2 * 1.01)
    assert timings.num_output_tokens[0] == 3
    assert outcome.transfers == [TransferTotals(1, 4, pytest.approx(transfer))]
    assert outcome.names == ["prefill 0", "prefill 1", "decode 0", "decode 1"]
    assert [stats.num_scheduled_tokens for stats in outcome.stats] == [33, 0, 3, 0]


def test_transfers_of_an_engine_follow_one_another() -> None:
    """Two prompts end in the same step. The link carries one transfer at a time."""
    settings = config(**ROOMY, max_num_batched_tokens=256)
    arrivals = [(0.0, SimRequest("first", 8, 1, index=0))]
    arrivals += [(0.5, SimRequest(name, 81, 1, index=index)) for index, name in ((1, "second"), (2, "third"))]
    topology = replace(APART, prefill_replicas=1, decode_replicas=1)
    outcome = simulate(Listed(arrivals, {}), settings, LinearStepTime(per_step=1.0), topology=topology)
    (totals,) = outcome.transfers
    assert (totals.num_transfers, totals.num_blocks) == (2, 20), "the first has no full block before its last token"
    assert totals.waiting == pytest.approx(10 * 0.004)


def test_a_decode_engine_loads_only_blocks_that_it_lacks() -> None:
    prefix = {"block_hash_ids": (1, 2), "hash_block_size": 16}
    arrivals = [(float(time), SimRequest(f"r{time}", 41, 2, index=time, **prefix)) for time in (0, 10, 20)]
    topology = replace(APART, prefill_replicas=1, decode_replicas=1)
    outcome = simulate(Listed(arrivals, {}), config(**ROOMY), LinearStepTime(per_step=0.1), topology=topology)
    assert outcome.transfers[0].num_blocks == 5 + 1 + 1
    assert outcome.timings.num_cached_tokens.tolist() == [0, 32, 32], "of the prefill engine"


def test_a_prompt_that_cannot_be_held_is_computed_by_the_decode_engine() -> None:
    """Transfers may hold the pool less one request of full length: here nothing."""
    settings = config(num_blocks=32)
    arrivals = [(float(number), SimRequest(f"r{number}", 100, 5, index=number)) for number in range(3)]
    outcome = simulate(Listed(arrivals, {}), settings, STEP_TIME, topology=APART)
    (totals,) = outcome.transfers
    assert (totals.num_transfers, totals.num_untransferred) == (0, 3)
    assert sum(stats.num_scheduled_tokens for stats in outcome.stats[2:]) == 3 * (100 + 4)


def test_refused_requests_of_either_role_are_reported() -> None:
    arrivals = [(0.0, SimRequest("too long", 300, 5, index=0)), (0.0, SimRequest("fits", 20, 5, index=1))]
    follower = (0.1, SimRequest("next", 20, 5, index=2))
    outcome = simulate(Listed(arrivals, {"too long": follower}), config(), STEP_TIME, topology=APART)
    assert [name for name, _ in outcome.refused] == ["too long"]
    assert outcome.timings.num_output_tokens.tolist() == [0, 5, 5]


@pytest.mark.parametrize(
    ("topology", "overrides", "words"),
    [
        ({"prefill_replicas": 1}, {}, "prefill_replicas is 1 and decode_replicas is 0; give both"),
        ({"data_parallel_size": 0}, {}, "data_parallel_size is 0; it must be at least 1"),
        ({"prefill_replicas": 1, "decode_replicas": 1}, {}, "transfer is None; give both"),
        (APART, {"enable_prefix_caching": False}, "decode engines find transferred KV by their prefix cache"),
        (replace(APART, transfer=TRANSFER._replace(bandwidth=0.0)), {}, "kv_transfer_bandwidth is 0.0"),
        (replace(APART, transfer=TRANSFER._replace(latency=-1.0)), {}, "kv_transfer_latency is -1.0"),
    ],
    ids=str,
)
def test_impossible_topologies_are_refused(topology: Any, overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        made = Topology(**topology) if isinstance(topology, dict) else topology
        simulate(workload(1), config(**overrides), STEP_TIME, topology=made)


def test_host_memory_and_transfers_exclude_each_other() -> None:
    with pytest.raises(SimulationError, match="simulated without host memory"):
        simulate(workload(1), config(), STEP_TIME, topology=APART, host_memory=HostMemory(10**6, 1000.0, 1e8))


def test_links_follow_from_model_and_device() -> None:
    llama, h100 = model_shape("Llama-3.1-8B"), device("h100")
    links = KvTransfer.of(llama, h100, 2, latency=0.001)
    assert links == (131_072, 2 * 0.8 * h100.host_bandwidth, 0.001)
    assert KvTransfer.of(llama, h100, bandwidth=25e9, layers_per_block=8) == (131_072 / 4, 25e9, 0.0)


def test_prefill_engines_keep_the_gaps_of_decodes_short() -> None:
    """Chunks of prompts lengthen the gaps of an engine that does both, and not those of a decode engine."""
    arrivals = [(0.0, SimRequest("decodes", 8, 60, index=0))]
    arrivals += [(0.1 * number, SimRequest(f"r{number}", 200, 2, index=number)) for number in range(1, 12)]
    settings = SchedulerConfig(num_blocks=1000, max_model_len=256, block_size=8, max_num_batched_tokens=256)
    step_time = LinearStepTime(per_step=0.01, per_token=1e-3)
    both = simulate(Listed(arrivals, {}), settings, step_time)
    apart = simulate(Listed(arrivals, {}), settings, step_time, topology=replace(APART, decode_replicas=1))
    assert np.max(both.timings.max_gap) > 0.2
    assert np.max(apart.timings.max_gap) < 0.05
