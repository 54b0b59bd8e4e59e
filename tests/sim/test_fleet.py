"""Routing among simulated replicas: prefix affinity is the server's rule, and has its hit rate; vLLM's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from _scale_load import IDEAL_HIT_RATE, POOL
from _scale_simulated import simulated_hit_rate

from pointsman.core import SchedulerConfig
from pointsman.routing import Router
from pointsman.sim.fleet import PrefixAffinity, Routed, VllmQueueRouting, VllmRouting
from pointsman.sim.request import SimRequest, Turn, filler_token
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.workload import Constant, ConstantArrivals, Sessions


class Noting(PrefixAffinity):
    """Prefix affinity that records its input at each request."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[SimRequest, list[int], int]] = []

    def choose(self, request: SimRequest, replicas: Sequence[Routed], now: float) -> int:
        loads = [replica.num_unfinished for replica in replicas]
        chosen = super().choose(request, replicas, now)
        self.noted.append((request, loads, chosen))
        return chosen


def test_prefix_affinity_chooses_the_same_replicas_as_the_server() -> None:
    """Conversations have a common system prompt, and their prompts contain earlier outputs. The server's rule gets
    tokens that are equal in the same places, made here without the simulator."""
    config = SchedulerConfig(num_blocks=60, block_size=16, max_model_len=2048, max_num_seqs=4)
    conversations = Sessions(
        arrivals=ConstantArrivals(rate=2.0),
        num_turns=Constant(4),
        first_prompt=Constant(70),
        new_text=Constant(33),
        output=Constant(21),
        think=Constant(0.3),
        system_prompt=50,
        num_sessions=12,
    )
    noting = Noting()
    step_time = LinearStepTime(per_step=0.02, per_token=1e-3)
    simulate(conversations, config, step_time, num_replicas=3, routing=noting)
    assert len(noting.noted) == 48

    def own(index: int, length: int) -> list[int]:
        return [1000 + index] * length

    rule = Router(3, config.block_size, config.num_blocks)
    for request, loads, chosen in noting.noted:
        tokens = [7] * 50
        for turn in request.turns:
            tokens += own(turn.index, turn.num_new_tokens) + [filler_token(turn.index)] * turn.num_output_tokens
        tokens += own(request.index, request.num_prompt_tokens - len(tokens))
        assert rule.choose(tokens, "", loads) == chosen
    chosen_by_session = {request.session: set[int]() for request, _, _ in noting.noted}
    for request, _, chosen in noting.noted:
        chosen_by_session[request.session].add(chosen)
    assert max(len(some) for some in chosen_by_session.values()) <= 2, "conversations stay on their replica"
    assert set().union(*chosen_by_session.values()) == {0, 1, 2}
    assert isinstance(noting.noted[-1][0].turns[0], Turn)


@pytest.mark.parametrize("per_step", [4e-4, 2e-3, 1e-2])
def test_two_simulated_replicas_have_the_hit_rate_of_two_engines(per_step: float) -> None:
    """Two real engines had 0.82 (docs/benchmarks.md), whatever a step takes. No cache exceeds `IDEAL_HIT_RATE`. A
    request that is routed away from its prefix costs twice, because the pools are tight."""
    rate = simulated_hit_rate(2, POOL, 96, step_time=LinearStepTime(per_step=per_step, per_token=5e-5))
    assert 0.80 <= rate <= IDEAL_HIT_RATE + 1e-9
    assert abs(rate - 0.825) <= 0.03


def test_round_robin_has_a_lower_hit_rate_than_one_large_pool() -> None:
    """A real router had 0.57 with each replica in turn."""
    assert abs(simulated_hit_rate(2, POOL, 96, "round-robin") - 0.57) <= 0.03
    assert simulated_hit_rate(1, 2 * POOL, 96) > 0.8


@dataclass
class Engine:
    """The reported numbers of an engine, set by hand."""

    num_waiting: int = 0
    num_running: int = 0
    kv_cache_usage: float = 0.0
    num_unfinished: int = 0
    config: SchedulerConfig = field(default_factory=lambda: SchedulerConfig(num_blocks=8, max_model_len=64))


REQUEST = SimRequest("any", 10, 1)


def test_vllm_balance_reads_published_reports_and_counts_its_own_requests() -> None:
    engines = [Engine(), Engine(), Engine()]
    rule = VllmRouting()
    assert [rule.choose(REQUEST, engines, 0.0) for _ in range(3)] == [0, 1, 2], "equal engines get a request in turn"
    engines[0] = Engine(num_running=9, num_unfinished=1)
    rule.observe(0, engines[0], 0.01)  # published at once: nothing was before
    engines[1] = Engine(num_running=1, num_unfinished=1)
    rule.observe(1, engines[1], 0.02)  # published at 0.11, with the later report of the third
    engines[2] = Engine(num_running=30, num_unfinished=0)
    assert [rule.choose(REQUEST, engines, 0.03) for _ in range(2)] == [2, 1], "0 and then 1, as the second has"
    rule.observe(2, engines[2], 0.1)
    assert rule.choose(REQUEST, engines, 0.109) == 2, "of equal engines the third, in turn"
    assert rule.choose(REQUEST, engines, 0.111) == 1, "30 are running on the third"
    engines[1].num_unfinished = 12
    assert rule.choose(REQUEST, engines, 0.112) == 0, "the client's own requests count at once"


def test_vllm_balance_avoids_a_queue_before_a_full_cache() -> None:
    engines = [Engine(2, 2, 0.9, 4), Engine(0, 8, 0.9, 8), Engine(4, 4, 0.5, 8)]
    rule = VllmRouting()
    for index, engine in enumerate(engines):
        rule.observe(index, engine, 0.0)
    chosen = [rule.choose(REQUEST, engines, 0.0) for _ in range(3)]
    assert chosen == [1, 2, 0], "scores 4 + 2 * 6 * 0.4, 8 and 8; then 9 + 6 * 0.4 and 9 for the last two"


def test_vllm_026_scores_waiting_requests_four_times() -> None:
    engines = [Engine(1, 2, 0.0, 3), Engine(0, 7, 0.0, 7), Engine(0, 7, 0.0, 7)]
    rule = VllmQueueRouting()
    for index, engine in enumerate(engines):
        rule.observe(index, engine, 0.0)
    assert [rule.choose(REQUEST, engines, 0.0) for _ in range(4)] == [0, 1, 2, 0]
