"""The limit "decode-share": decode has a share of the time after long steps with prompt tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Scheduler, SchedulerConfig
from pointsman.core.policy.decode_share import SHORT
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import Outcome, simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.stretches import Stretch
from tests.forms import short_or_long

from .test_target_itl import Server


def server(share: float, budget: int = 2048) -> Server:
    """A server on which chats have decoded for a while."""
    served = Server(f"decode-share:share={share}", settings={"max_num_batched_tokens": budget, "max_num_seqs": 64})
    for number in range(4):
        served.add(f"chat{number}", 100, max_tokens=100_000)
    for _ in range(8):
        served.step()
    return served


def prompt_tokens(served: Server) -> int:
    """Prompt tokens of the next step."""
    served.step()
    return served.loads[-1].num_prefill_tokens


def test_decode_has_its_share_of_the_time_between_prompt_steps() -> None:
    served = server(share=0.5)
    alone = served.seconds[-1]
    served.add("long", 60_000, max_tokens=1)
    before = len(served.seconds)
    while "long" in served.step() or served.scheduler.num_running > 4:
        pass
    seconds = np.array(served.seconds[before:])
    has_prompt = np.array([load.num_prefill_tokens > 0 for load in served.loads[before:]])
    assert not (has_prompt[1:] & has_prompt[:-1]).any(), "decode follows each step with prompt tokens"
    beyond = (seconds[has_prompt] - SHORT * alone)[:-1].sum()
    assert seconds[~has_prompt].sum() == pytest.approx(0.5 * beyond, rel=0.15)


def test_prompts_have_the_whole_budget_in_each_step_without_holding() -> None:
    served = server(share=0.25)
    served.add("long", 20_000, max_tokens=1)
    tokens = [prompt_tokens(served) for _ in range(30)]
    assert set(tokens[:20]) == {0, 2048 - 4 - 1}


def test_short_prompts_are_not_held_back() -> None:
    served = server(share=1.0)
    for number in range(20):
        served.add(f"short{number}", 50, max_tokens=1)
        assert prompt_tokens(served) == 49


@pytest.mark.parametrize("settings_", [{}, {"share": 0.0}])
def test_prompts_are_not_held_back_while_no_request_decodes(settings_: dict[str, float]) -> None:
    served = server(**{"share": 1.0, **settings_})
    if not settings_:
        for number in range(4):
            served.scheduler.abort(f"chat{number}", served.now)
    served.add("long", 20_000, max_tokens=1)
    assert all(prompt_tokens(served) for _ in range(8))


@settings(max_examples=short_or_long(15, 100), deadline=None)
@given(share=st.sampled_from([0.1, 0.5, 2.0]), seed=st.integers(0, 10_000))
def test_prompts_wait_at_most_the_share_of_the_step_before(share: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    served = server(share, budget=int(rng.integers(64, 4096)))
    waited = most = 0.0
    for number in range(200):
        if rng.random() < 0.2:
            served.add(f"r{number}", int(rng.integers(1, 3000)), max_tokens=int(rng.integers(1, 60)))
        waits = served.scheduler.num_queued > 0 or any(each.num_output_tokens == 0 for each in served.scheduler.running)
        served.step()
        seconds = served.seconds[-1]
        if served.loads[-1].num_prefill_tokens:
            waited, most = 0.0, share * seconds
        elif waits:
            waited += seconds
            assert waited <= most + seconds


def busy(limit: tuple[str, ...], budget: int) -> Outcome:
    """A backlog of prompts of 20,000 tokens with short outputs, on a device where a step with prompt tokens has a fixed
    cost of 15 ms."""
    rng = np.random.default_rng(3)
    times = np.cumsum(rng.exponential(1.0, 24)).tolist()
    arrivals = tuple((time, SimRequest(f"r{index}", 20_000, 32)) for index, time in enumerate(times))
    step_time = LinearStepTime(per_step=6e-3, per_prefill=15e-3, per_token=4e-5, per_context_token=2e-8)
    config = SchedulerConfig(
        num_blocks=40_000,
        max_model_len=32_768,
        max_num_seqs=128,
        max_num_batched_tokens=budget,
        token_limits=limit,
        enable_prefix_caching=False,
    )
    return simulate(Stretch(arrivals, times[-1]), config, step_time)


def test_the_mean_latency_is_lower_than_with_any_fixed_budget() -> None:
    def latency(outcome: Outcome) -> float:
        return float(np.mean(outcome.timings.last_token - outcome.timings.arrival))

    fixed = [latency(busy((), budget)) for budget in (512, 1024, 2048, 4096, 8192, 16_384)]
    assert latency(busy(("decode-share",), 16_384)) < 0.8 * min(fixed)


@pytest.mark.parametrize("overrides", [{}, {"max_num_batched_tokens": 256, "max_num_seqs": 40}, {"num_blocks": 90}])
def test_decode_share_decides_in_fast_forward_as_in_single_steps(overrides: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    arrivals, now = [], 0.0
    for index in range(60):
        now += float(rng.exponential(0.02))
        length = 900 if index % 9 == 0 else int(rng.integers(5, 60))
        arrivals.append((now, SimRequest(f"r{index}", length, int(rng.integers(1, 80)))))
    knobs: dict[str, Any] = {"num_blocks": 400, "max_model_len": 2048, "token_limits": ("decode-share:share=1",)}
    step_time = LinearStepTime(per_step=6e-3, per_row=1e-4, per_token=4e-4, per_context_token=4e-7, per_attended=1e-9)
    config = SchedulerConfig(**{**knobs, **overrides})
    fast = simulate(Stretch(tuple(arrivals), now), config, step_time)
    slow = simulate(Stretch(tuple(arrivals), now), config, step_time, is_stepping=True)
    assert fast.stats == slow.stats
    assert fast.timings.first_token == pytest.approx(slow.timings.first_token, rel=1e-9)
    without = simulate(Stretch(tuple(arrivals), now), config.replace(token_limits=()), step_time)
    assert fast.stats != without.stats


@pytest.mark.parametrize("limit", ["decode-share:share=-1", "decode-share:share=x"])
def test_an_invalid_share_of_decode_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match="share of limit 'decode-share'"):
        Scheduler(SchedulerConfig(num_blocks=20, max_model_len=64, token_limits=(limit,)))
