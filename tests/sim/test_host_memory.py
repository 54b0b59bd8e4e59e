"""Host memory in the simulator: steps done at once change nothing; the cost and the savings of copies."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import DEVICES, device
from pointsman.sim.errors import SimulationError
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.report.summary import figures
from pointsman.sim.request import SimRequest
from pointsman.sim.scenarios.workloads import backlog
from pointsman.sim.shapes import model_shape
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import Efficiencies, LinearStepTime, RooflineStepTime
from pointsman.sim.stretches import Stretch
from tests.forms import seeds, short_or_long
from tests.sim.test_simulator import STEP_TIME, WINDOWS, config, same, workload

TOKEN_BYTES = 1000.0
MEMORY = HostMemory(4_000_000, TOKEN_BYTES, 1e8)  # 500 blocks of 8 tokens, 80 microseconds each
LLAMA, RTX_4090 = model_shape("Llama-3.1-8B"), device("rtx4090")
SHORT = {"num_blocks": 33, "full_sequence_must_fit": False}


@pytest.mark.parametrize("mode", ["recompute", "swap", "cheaper"])
@pytest.mark.parametrize(
    "memory",
    [MEMORY, MEMORY._replace(num_bytes=100_000), MEMORY._replace(bandwidth=2e7)],
    ids=["ample", "little", "slow"],
)
def test_decodes_in_one_run_and_single_steps_have_equal_outcomes(mode: str, memory: HostMemory) -> None:
    """With ample memory, with little, and over a slow link, where neither choice is clearly cheaper."""
    settings = config(**SHORT, preemption_mode=mode)
    for seed in seeds(2, 10):
        fast = simulate(workload(seed), settings, STEP_TIME, host_memory=memory)
        slow = simulate(workload(seed), settings, STEP_TIME, host_memory=memory, is_stepping=True)
        same(fast, slow)
        assert fast.copies == slow.copies
        assert fast.copies[0].num_offloaded > 0
        assert len(fast.timelines[0].events) < len(slow.timelines[0].events)


@pytest.mark.parametrize("mode", ["recompute", "swap", "cheaper"])
@pytest.mark.parametrize("groups", [WINDOWS, WINDOWS[:1], [("full", 0), ("chunk", 48)]], ids=str)
def test_kv_in_groups_is_copied_alike_in_one_run_and_single_steps(mode: str, groups: list[tuple[str, int]]) -> None:
    settings = config(**SHORT | {"num_blocks": 24 if len(groups) == 1 else 75}, preemption_mode=mode, kv_groups=groups)
    restored = 0
    for seed in seeds(2, 10):
        fast = simulate(workload(seed), settings, STEP_TIME, host_memory=MEMORY)
        slow = simulate(workload(seed), settings, STEP_TIME, host_memory=MEMORY, is_stepping=True)
        same(fast, slow)
        assert fast.copies == slow.copies
        assert fast.copies[0].num_offloaded > 0
        restored += fast.copies[0].num_restored
    assert restored > 0


def with_prefixes(seed: int) -> Stretch:
    """60 requests that share prefixes, so that requests find the blocks of finished ones."""
    draw, time, arrivals = random.Random(seed), 0.0, []
    for index in range(60):
        time += draw.expovariate(4)
        family, length = draw.randrange(5), draw.randrange(20, 300)
        request = SimRequest(
            request_id=f"r{index}",
            index=index,
            num_prompt_tokens=length,
            num_output_tokens=draw.randrange(1, 150),
            block_hash_ids=tuple(family * 1000 + number for number in range(length // 16)),
            hash_block_size=16,
        )
        arrivals.append((time, request))
    return Stretch(tuple(arrivals), time)


def test_swapped_blocks_of_finished_requests_are_not_reused() -> None:
    """In single steps and in steps at once. The host learns of an end from the next output, and no steps are done at
    once before it."""
    step_time, memory = LinearStepTime(per_step=0.01, per_row=1e-4, per_token=1e-4), HostMemory(12_800, 4.0, 1e6)
    settings = SchedulerConfig(
        num_blocks=60, max_model_len=600, max_num_seqs=8, max_num_batched_tokens=256, preemption_mode="swap"
    )
    for seed in seeds(3, 10):
        fast = simulate(with_prefixes(4 + seed), settings, step_time, host_memory=memory)
        same(fast, simulate(with_prefixes(4 + seed), settings, step_time, host_memory=memory, is_stepping=True))


def test_copies_add_to_the_time_of_a_step() -> None:
    settings = config(**SHORT, preemption_mode="swap")
    found = []
    for bandwidth in (1e8, 1e6):
        memory = MEMORY._replace(bandwidth=bandwidth)
        outcome = simulate(workload(1), settings, LinearStepTime(per_step=1e-3), host_memory=memory, num_replicas=1)
        (copies,) = outcome.copies
        blocks = copies.num_offloaded + copies.num_restored
        assert copies.seconds == pytest.approx(blocks * 8 * TOKEN_BYTES / bandwidth)
        found.append(outcome)
    assert found[1].seconds > found[0].seconds + 0.5 * found[1].copies[0].seconds


def long_outputs(memory: HostMemory | None, mode: str = "recompute") -> tuple[Outcome, SchedulerConfig]:
    """As the scenario of benchmarks/policies.py: outputs that outgrow the pool, again and again."""
    settings = SchedulerConfig(
        num_blocks=900, max_model_len=16_384, max_num_seqs=64, max_num_batched_tokens=2048, preemption_mode=mode
    )
    count = short_or_long(60, 400)
    load = backlog(count, "lognormal:300,0.6", "mix:0.5*lognormal:150,0.6+0.5*lognormal:1500,0.3", 3)
    step_time = RooflineStepTime(shape=LLAMA, device=RTX_4090)
    return simulate(load, settings, step_time, host_memory=memory), settings


def test_swapping_long_outputs_recomputes_few_tokens() -> None:
    """At most 5 % of all tokens are recomputed. A hundredth of the bandwidth is like no host memory."""
    memory = HostMemory.of(64 * 2**30, LLAMA, RTX_4090)
    plain, swapped, slow = (
        figures(*long_outputs(given, mode), num_bootstrap=0)
        for given, mode in (
            (None, "recompute"),
            (memory, "cheaper"),
            (memory._replace(bandwidth=memory.bandwidth / 100), "cheaper"),
        )
    )
    shares = [each.recomputed_share.value or 0.0 for each in (plain, swapped, slow)]
    assert shares[0] > 0.2
    assert shares[1] < 0.05
    seconds = [each.seconds.value or 0.0 for each in (plain, swapped, slow)]
    assert seconds[1] < 0.98 * seconds[0]
    assert seconds[2] < 1.02 * seconds[0]
    assert slow.counts.preemption_decisions["recompute"] > 10 * slow.counts.preemption_decisions["swap"]
    assert swapped.counts.copied_blocks["restored"] > swapped.counts.copied_blocks["offloaded"] / 2


def test_kv_size_and_bandwidth_follow_from_model_and_device() -> None:
    memory = HostMemory.of(2**30, LLAMA, RTX_4090)
    assert memory.bytes_per_token == 2 * 32 * 8 * 128 * 2, "keys and values, layers, heads, elements, bytes"
    assert memory.bandwidth == 0.8 * 32e9
    two = HostMemory.of(2**30, LLAMA, device("h100"), 2, efficiencies=replace(Efficiencies(), host_link=0.5))
    assert (two.bytes_per_token, two.bandwidth) == (memory.bytes_per_token, 2 * 0.5 * 64e9), "each has a link"
    assert all(8e9 < each.host_bandwidth < 1e12 for each in DEVICES.values())


@pytest.mark.parametrize(
    ("memory", "overrides", "words"),
    [
        (None, {"preemption_mode": "swap"}, "there is no host memory to swap to; give kv_offload_bytes"),
        (MEMORY._replace(num_bytes=7999), {}, "7999, less than one block of 8000 bytes"),
        (MEMORY._replace(bandwidth=0.0), {}, "must be above 0"),
        (MEMORY, {"enable_prefix_caching": False}, "enable_prefix_caching is off; turn enable_prefix_caching on"),
    ],
)
def test_impossible_host_memory_settings_are_refused(
    memory: HostMemory | None, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(SimulationError, match=words):
        simulate(workload(1), config(**overrides), STEP_TIME, host_memory=memory)
