"""The simulator: time passes by the step times, and decodes done at once change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pointsman.core import FinishReason, Request, SchedulerConfig
from pointsman.core.presets import SYSTEMS
from pointsman.sim.fleet import ROUTINGS, LeastLoaded
from pointsman.sim.outcome import REASONS, UNFINISHED, Timings
from pointsman.sim.replica import Replica
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import OpenLoop
from pointsman.traces import TraceRequest, read_trace
from tests.forms import seeds, short_or_long

AZURE_TRACE = Path(__file__).parents[3] / "shared" / "traces" / "azure_llm_2023_conversation.csv"
STEP_TIME = LinearStepTime(per_step=6e-3, per_row=2e-5, per_token=8e-5, per_context_token=4e-8, per_attended=1e-9)


class Listed:
    """A workload given as (time, request). A request may have a follower that arrives some time after its end."""

    def __init__(
        self, arrivals: list[tuple[float, SimRequest]], followers: dict[str, tuple[float, SimRequest]]
    ) -> None:
        self._arrivals, self._followers = arrivals, followers
        self.num_requests = len(arrivals) + len(followers)

    def first_arrivals(self) -> Iterator[tuple[float, SimRequest]]:
        return iter(self._arrivals)

    def on_finished(self, request: SimRequest, now: float) -> tuple[float, SimRequest] | None:
        follower = self._followers.get(request.request_id)
        return None if follower is None else (now + follower[0], follower[1])


def workload(seed: int, count: int = 60, *, with_followers: bool = True) -> Listed:
    """Requests of all sizes, in bursts, some with shared prefixes, some with a follower."""
    rng = np.random.default_rng(seed)
    arrivals, followers, now = [], {}, 0.0
    for index in range(count):
        now += float(rng.choice([0.0, 0.004, 0.1])) * rng.random()
        arrivals.append((now, _request(rng, f"r{index}", 2 * index)))
        if with_followers and rng.random() < 0.3:
            followers[f"r{index}"] = (float(rng.random() * 0.2), _request(rng, f"f{index}", 2 * index + 1))
    return Listed(arrivals, followers)


def _request(rng: np.random.Generator, name: str, index: int) -> SimRequest:
    length = int(rng.integers(1, 120))
    ids = tuple(int(i) for i in [rng.integers(3), 10 + rng.integers(3)]) if rng.random() < 0.5 else ()
    most = int(rng.integers(1, 60)) if rng.random() < 0.2 else None
    urgency = int(rng.integers(3))
    return SimRequest(
        name, length, int(rng.integers(1, 80)), ids, 16, most, urgency, index=index, tenant=f"tenant {index % 3}"
    )


def config(**overrides: Any) -> SchedulerConfig:
    values = {
        "num_blocks": 64,
        "max_model_len": 256,
        "block_size": 8,
        "max_num_seqs": 12,
        "max_num_batched_tokens": 64,
    }
    return SchedulerConfig(**{**values, **overrides})


def same(one: Outcome, other: Outcome) -> None:
    assert one.stats == other.stats
    assert one.refused == other.refused
    assert one.seconds == pytest.approx(other.seconds, rel=1e-9)
    for name in ("arrival", "scheduled", "first_token", "last_token", "max_gap"):
        np.testing.assert_allclose(getattr(one.timings, name), getattr(other.timings, name), rtol=1e-12, err_msg=name)
    for name in ("num_output_tokens", "num_cached_tokens", "num_preemptions", "reason"):
        np.testing.assert_array_equal(getattr(one.timings, name), getattr(other.timings, name), err_msg=name)
    assert _pooled(one) == pytest.approx(_pooled(other), rel=1e-9)


def _pooled(outcome: Outcome) -> list[float]:
    """Every gap between two tokens, sorted."""
    values, counts = outcome.timings.gaps()
    return sorted(values.repeat(counts).tolist())


WINDOWS = [("window", 20), ("window", 20), ("full", 0)]
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "no caching": {"enable_prefix_caching": False},
    "priority": {"order": "priority"},
    "shortest-prefill": {"order": "shortest-prefill", "num_blocks": 40},
    "longest-prefix": {"order": "longest-prefix", "num_blocks": 40},
    "earliest-ttft": {"order": "earliest-ttft:default=0.3,every=4", "num_blocks": 40},
    "fair": {"order": "fair:weights=tenant 1/3", "num_blocks": 40},
    "few blocks": {"num_blocks": 33, "full_sequence_must_fit": False},
    "watermark": {"num_blocks": 40, "watermark": 0.2, "decode_reserve": "mean"},
    "growth": {"num_blocks": 40, "reserves": ("growth",), "victim": "least-cost:max_preemptions=1"},
    "least cost": {"num_blocks": 33, "enable_prefix_caching": False, "victim": "least-cost"},
    "few sequence slots": {"max_num_seqs": 3},
    "static": {"batching": "static"},
    "windows": {"num_blocks": 90, "kv_groups": WINDOWS},
    "windows, few blocks": {"num_blocks": 75, "kv_groups": WINDOWS, "full_sequence_must_fit": False},
    "windows alone": {"num_blocks": 24, "kv_groups": WINDOWS[:1], "order": "shortest-prefill"},
    "chunks": {"num_blocks": 70, "kv_groups": [("full", 0), ("chunk", 48)], "victim": "least-cost"},
    "prefill interval": {"prefill_interval": 5, "num_blocks": 40},
    "prefill interval, priority": {"prefill_interval": 3, "order": "priority", "max_num_seqs": 6},
    **{name: {**SYSTEMS[name], "max_num_seqs": 12, "max_num_batched_tokens": 300} for name in SYSTEMS},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_decodes_in_one_run_and_single_steps_have_equal_outcomes(name: str) -> None:
    settings = config(**CONFIGS[name])
    for seed in seeds(2, 20):
        fast = simulate(workload(seed), settings, STEP_TIME)
        slow = simulate(workload(seed), settings, STEP_TIME, is_stepping=True)
        same(fast, slow)
        assert fast.timelines[0].num_steps == slow.timelines[0].num_steps
        assert len(fast.timelines[0].events) < len(slow.timelines[0].events)


@pytest.mark.parametrize("rule", ROUTINGS)
def test_decodes_in_one_run_and_single_steps_are_equal_in_a_fleet(rule: str) -> None:
    for seed in seeds(2, 14):
        fast = simulate(workload(seed), config(), STEP_TIME, num_replicas=3, routing=ROUTINGS[rule]())
        slow = simulate(workload(seed), config(), STEP_TIME, num_replicas=3, routing=ROUTINGS[rule](), is_stepping=True)
        same(fast, slow)


def test_every_request_finishes_once_with_its_tokens() -> None:
    load = workload(7)
    outcome = simulate(load, config(num_blocks=40), STEP_TIME)
    timings = outcome.timings
    assert timings.count == load.num_requests
    assert (timings.reason != UNFINISHED).all()
    assert {REASONS[code] for code in timings.reason} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert (timings.first_token > timings.arrival).all()
    assert (timings.last_token >= timings.first_token).all()
    _, counts = timings.gaps()
    assert counts.sum() == timings.num_output_tokens.sum() - timings.count
    assert outcome.stats[0].num_free_blocks == 40


def test_latency_of_one_request_is_the_time_of_its_steps() -> None:
    """A prompt of 100 tokens in two steps, then two steps of one token."""
    alone = Listed([(5.0, SimRequest("a", 100, 3))], {})
    outcome = simulate(alone, config(), LinearStepTime(per_step=1.0, per_token=0.01))
    timings = outcome.timings
    assert timings.scheduled[0] == 5.0
    assert timings.first_token[0] == pytest.approx(5.0 + 1.64 + 1.36)
    assert timings.last_token[0] == pytest.approx(8.0 + 2 * 1.01)
    assert timings.max_gap[0] == pytest.approx(1.01)


def test_time_outside_the_engine_is_part_of_each_latency() -> None:
    source = workload(0, with_followers=False)
    config = SchedulerConfig(num_blocks=4000, max_model_len=4096, max_num_batched_tokens=512, max_num_seqs=8)
    plain, longer = (simulate(source, config, STEP_TIME, request_overhead=seconds).timings for seconds in (0.0, 0.25))
    np.testing.assert_allclose(longer.arrival, plain.arrival - 0.25)
    np.testing.assert_array_equal(longer.first_token, plain.first_token)
    np.testing.assert_array_equal(longer.last_token, plain.last_token)


def test_async_scheduling_admits_arrivals_one_step_later() -> None:
    """The step that begins at 1.0 was scheduled at 0.0, so a request that arrives at 0.5 runs from 2.0 on."""
    two = Listed([(0.0, SimRequest("a", 4, 9)), (0.5, SimRequest("b", 4, 2))], {})
    second = LinearStepTime(per_step=1.0)
    assert simulate(two, config(), second).timings.first_token.tolist() == [1.0, 2.0]
    late = simulate(two, config(max_steps_in_flight=2), second)
    assert late.timings.first_token.tolist() == [1.0, 3.0]
    assert (late.timings.reason != UNFINISHED).all()


def test_impossible_requests_are_refused_and_reported() -> None:
    load = Listed(
        [(0.0, SimRequest("long", 300, 3)), (1.0, SimRequest("a", 10, 3))], {"long": (0.5, SimRequest("b", 5, 2))}
    )
    outcome = simulate(load, config(), STEP_TIME)
    ((name, why),) = outcome.refused
    assert name == "long"
    assert "300" in why
    assert [REASONS[code] for code in outcome.timings.reason] == [FinishReason.REFUSED, *[FinishReason.STOP] * 2]


def test_a_simulation_ends_at_a_given_time() -> None:
    outcome = simulate(workload(3), config(), STEP_TIME, until=0.2)
    assert (outcome.timings.arrival <= 0.2).all()
    assert (outcome.timings.reason == UNFINISHED).any()
    assert outcome.timelines[0].events[-1].end <= 0.2


def test_ctrl_c_returns_the_results_so_far() -> None:
    def interrupt(num_finished: int, now: float) -> None:
        raise KeyboardInterrupt

    outcome = simulate(workload(3, 200), config(), STEP_TIME, progress=interrupt, is_stepping=True)
    assert not outcome.is_complete
    assert outcome.seconds > 0
    assert (outcome.timings.reason == UNFINISHED).any()


def test_zero_replicas_are_refused() -> None:
    with pytest.raises(ValueError, match="num_replicas is 0"):
        simulate(workload(1), config(), STEP_TIME, num_replicas=0)


def test_replicas_of_a_fleet_share_the_load() -> None:
    burst = Listed([(0.0, SimRequest(f"r{index}", 20, 20)) for index in range(12)], {})
    outcome = simulate(burst, config(), STEP_TIME, num_replicas=3, routing=LeastLoaded())
    assert [stats.num_added for stats in outcome.stats] == [4, 4, 4]
    alone = simulate(burst, config(), STEP_TIME)
    assert outcome.seconds < alone.seconds


@pytest.mark.skipif(not AZURE_TRACE.exists(), reason=f"{AZURE_TRACE} is not there")
def test_decode_runs_and_single_steps_agree_on_a_published_trace() -> None:
    trace = read_trace(AZURE_TRACE, limit=short_or_long(150, 2000))
    arrivals = [
        (
            each.arrival_time,
            SimRequest(f"r{index}", each.num_prompt_tokens, max(1, each.num_output_tokens), index=index),
        )
        for index, each in enumerate(trace)
    ]
    settings = config(num_blocks=3000, max_model_len=8192, block_size=16, max_num_batched_tokens=512)
    fast = simulate(Listed(arrivals, {}), settings, STEP_TIME)
    same(fast, simulate(Listed(arrivals, {}), settings, STEP_TIME, is_stepping=True))
    assert len(fast.timelines[0].events) < fast.timelines[0].num_steps / 3


@pytest.mark.skipif("tenant" not in signature(Request.__new__).parameters, reason="requests have no tenant")
def test_a_policy_sees_the_tenant_and_the_ttft_target_of_a_request() -> None:
    replica = Replica(SchedulerConfig(num_blocks=100, max_model_len=1000), STEP_TIME, Timings())
    replica.add(0, SimRequest("of a", 10, 3, tenant="a", ttft_target=2.5, retention=8.0), 0.0)
    replica.add(1, SimRequest("of none", 10, 3, index=1), 0.0)
    found = [replica.scheduler.get_request(name) for name in ("of a", "of none")]
    said = [(each.tenant, each.ttft_target, each.retention) for each in found]  # type: ignore
    assert said == [("a", 2.5, 8.0), ("", None, None)]


def test_a_huge_prompt_is_refused_without_being_built() -> None:
    config = SchedulerConfig(num_blocks=8, max_model_len=64)
    trace = [TraceRequest(0.0, 2**31 - 1, 5), TraceRequest(0.0, 2**31 - 1, 5, (1, 2)), TraceRequest(0.1, 9, 5)]
    outcome = simulate(OpenLoop(trace), config, LinearStepTime(per_step=1e-3))
    assert [name for name, _ in outcome.refused] == ["request-0", "request-1"]
    assert "the prompt has 2147483647 tokens and max_model_len is 64" in outcome.refused[0][1]
