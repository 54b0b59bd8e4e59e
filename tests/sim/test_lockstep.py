"""Data parallel engines in lockstep: equal to single steps, and to schedulers that are stepped by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pointsman.core import SchedulerConfig
from pointsman.sim.devices import device
from pointsman.sim.host_memory import HostMemory
from pointsman.sim.request import SimRequest
from pointsman.sim.shapes import model_shape
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime, RooflineStepTime, StepLoad, StepTime
from pointsman.sim.topology import Topology
from tests.forms import seeds
from tests.sim.by_hand import run_in_lockstep
from tests.sim.test_simulator import CONFIGS, STEP_TIME, WINDOWS, Listed, config, same, workload

RANKS = Topology(data_parallel_size=3, is_lockstep=True)
EXPERTS = RooflineStepTime(shape=model_shape("Qwen3-30B-A3B"), device=device("h100"), data_parallel=3)
SOME = ["default", "few blocks", "priority", "windows", "vllm"]


@pytest.mark.parametrize("step_time", [STEP_TIME, EXPERTS], ids=["linear", "experts"])
@pytest.mark.parametrize("name", SOME)
def test_decodes_in_one_run_and_single_steps_are_equal_in_lockstep(name: str, step_time: StepTime) -> None:
    settings = config(**CONFIGS[name])
    for seed in seeds(1, 20):
        fast = simulate(workload(seed, 90), settings, step_time, topology=RANKS)
        slow = simulate(workload(seed, 90), settings, step_time, topology=RANKS, is_stepping=True)
        same(fast, slow)
        assert [line.num_steps for line in fast.timelines] == [line.num_steps for line in slow.timelines]
        if settings.max_steps_in_flight == 1:
            assert sum(len(line.events) for line in fast.timelines) < sum(len(line.events) for line in slow.timelines)


def test_lockstep_with_host_memory_is_equal_to_single_steps() -> None:
    settings, memory = config(num_blocks=33, full_sequence_must_fit=False), HostMemory(100_000, 1000.0, 1e8)
    for seed in seeds(1, 10):
        fast, slow = (
            simulate(
                workload(seed, 120),
                settings,
                STEP_TIME,
                num_replicas=2,
                topology=RANKS,
                host_memory=memory,
                is_stepping=is_stepping,
            )
            for is_stepping in (False, True)
        )
        same(fast, slow)
        assert fast.copies == slow.copies and len(fast.copies) == 6
        assert fast.names == [f"replica {group}, rank {rank}" for group in range(2) for rank in range(3)]


@pytest.mark.parametrize("step_time", [STEP_TIME, EXPERTS], ids=["linear", "experts"])
@pytest.mark.parametrize(
    "overrides", [{}, {"num_blocks": 33}, {"max_steps_in_flight": 2}, {"num_blocks": 90, "kv_groups": WINDOWS}], ids=str
)
def test_lockstep_is_equal_to_schedulers_that_are_stepped_by_hand(
    overrides: dict[str, Any], step_time: StepTime
) -> None:
    settings = config(**overrides)
    for seed in seeds(1, 20):
        load = workload(seed, 80, with_followers=False)
        outcome = simulate(load, settings, step_time, topology=RANKS)
        arrivals = list(load.first_arrivals())
        ranks = outcome.timings.replica.tolist()
        assert set(ranks) == {0, 1, 2}
        check_times(outcome, run_in_lockstep(arrivals, ranks, settings, step_time, 3), arrivals)


def check_times(outcome: Outcome, found: Any, arrivals: list[tuple[float, SimRequest]]) -> None:
    """Compare an outcome with the times of `by_hand`."""
    timings, times = outcome.timings, [found[request.request_id] for _, request in arrivals]
    for name, values in (
        ("scheduled", [each.scheduled for each in times]),
        ("first_token", [each.tokens[0] for each in times]),
        ("last_token", [each.tokens[-1] for each in times]),
        ("max_gap", [max(np.diff(each.tokens), default=0.0) for each in times]),
    ):
        np.testing.assert_allclose(getattr(timings, name), values, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_array_equal(timings.num_output_tokens, [len(each.tokens) for each in times])
    np.testing.assert_array_equal(timings.num_preemptions, [each.num_preemptions for each in times])


def test_a_rank_waits_for_the_slowest_one_and_for_the_end_of_the_round() -> None:
    """The first rank prefills 100 tokens while the second decodes; a request for the third rank waits for a round."""
    arrivals = [(0.0, SimRequest("decodes", 1, 3, index=0)), (0.5, SimRequest("prefills", 100, 1, index=1))]
    arrivals.append((0.6, SimRequest("waits", 1, 1, index=2)))
    settings = SchedulerConfig(num_blocks=100, max_model_len=256)
    outcome = simulate(Listed(arrivals, {}), settings, LinearStepTime(per_step=1.0, per_token=0.01), topology=RANKS)
    timings = outcome.timings
    assert timings.replica.tolist() == [0, 1, 2]
    assert timings.first_token.tolist() == pytest.approx([1.01, 3.01, 3.01])
    assert timings.scheduled.tolist() == pytest.approx([0.0, 1.01, 1.01])
    assert timings.max_gap[0] == pytest.approx(2.0)
    assert outcome.names == ["rank 0", "rank 1", "rank 2"]


def test_ranks_of_a_dense_model_step_independently() -> None:
    arrivals = [(0.0, SimRequest("decodes", 1, 3, index=0)), (0.5, SimRequest("prefills", 100, 1, index=1))]
    settings = SchedulerConfig(num_blocks=100, max_model_len=256)
    step_time = LinearStepTime(per_step=1.0, per_token=0.01)
    outcome = simulate(Listed(arrivals, {}), settings, step_time, topology=Topology(data_parallel_size=2))
    assert outcome.timings.first_token.tolist() == pytest.approx([1.01, 2.5])
    assert outcome.timings.max_gap[0] == pytest.approx(1.01)


def test_a_round_of_experts_takes_longer_with_more_tokens_on_other_ranks() -> None:
    load = StepLoad.of_rows([(1000, 1)] * 8)
    alone, beside = EXPERTS.beside(0).of_step(load), EXPERTS.beside(64).of_step(load)
    assert beside > 1.2 * alone
    np.testing.assert_allclose(
        EXPERTS.beside(64).of_decodes(8, 8 * 1001, 3)[0], EXPERTS.beside(64).of_step(load), rtol=1e-12
    )
