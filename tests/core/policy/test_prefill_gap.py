"""The limit "prefill-gap": prompts are cut to keep the gap of decoding requests, and no other decision changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pointsman.core import ConfigError, Reason, Request, RequestStatus, Scheduler, SchedulerConfig, StepResult
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.stretches import Stretch
from tests.core.helpers import Host
from tests.core.policy import test_target_itl
from tests.core.policy.test_target_itl import PER_TOKEN, Server

TARGET, MIN = 0.05, 32
LIMIT = f"prefill-gap:seconds={TARGET}"


def server(scale: float = 10.0, **settings: Any) -> Server:
    """A device on which a full budget takes ten times the target."""
    return Server(LIMIT, scale=scale, settings=settings)


def with_chats(served: Server, number: int, num_steps: int = 40) -> Server:
    """Add requests that decode."""
    for index in range(number):
        served.add(f"chat{index}", 24, max_tokens=100_000)
    for _ in range(num_steps):
        served.step()
    return served


def until_first_token(served: Server, *requests: Request) -> tuple[list[float], list[int]]:
    """The seconds and prompt tokens of the steps until all of these requests have a token."""
    before = len(served.seconds)
    while not all(each.num_output_tokens for each in requests):
        served.step()
    return served.seconds[before:], [load.num_prefill_tokens for load in served.loads[before:]]


# ---------------------------------------------------------------------- the rule


@pytest.mark.parametrize("num_chats", [1, 4])
def test_token_gaps_beside_a_long_prompt_keep_the_target(num_chats: int) -> None:
    served = with_chats(server(scale=4.0), num_chats)
    seconds, tokens = until_first_token(served, served.add("long", 8000))
    assert max(seconds) < 1.15 * TARGET
    assert sum(tokens) / sum(seconds) > 0.25 / (4 * PER_TOKEN), "a quarter of the speed without decode"


def test_without_decoding_requests_prompts_have_the_whole_budget() -> None:
    served = server()
    served.add("first", 20_000, max_tokens=1)
    served.add("second", 20_000, max_tokens=1)
    assert [sum(served.step().values()) for _ in range(4)] == [8192] * 4


def test_a_prompt_has_the_whole_budget_again_when_streams_have_ended() -> None:
    served = with_chats(server(), 1)
    served.add("long", 20_000)
    assert served.step()["long"] < 1000
    served.scheduler.abort("chat0", served.now)
    assert served.step()["long"] == 8192


def test_on_a_fast_device_prompts_have_the_whole_budget() -> None:
    """A step with the whole budget takes a fifth of the target."""
    sides = {limits: Server(scale=0.05, settings={"token_limits": limits}) for limits in ((LIMIT,), ())}
    for each in sides.values():
        each.add("warm", 20_000, max_tokens=1)
        with_chats(each, 20)
    for number in range(30):
        for each in sides.values():
            each.add(f"prompt{number}", 100 + 9000 * (number % 3), max_tokens=20)
        mine, others = (each.step() for each in sides.values())
        assert mine == others


def test_prompts_are_limited_when_a_fast_device_becomes_slow() -> None:
    served = with_chats(server(scale=0.02), 4)
    for number in range(30):
        until_first_token(served, served.add(f"prompt{number}", 9000, max_tokens=2))
    served.scale = 1.0
    seconds, _ = until_first_token(served, served.add("first", 60_000, max_tokens=1))
    assert sum(each > 1.15 * TARGET for each in seconds) == 2, "from the second on, it learns again"
    seconds, _ = until_first_token(served, served.add("second", 40_000, max_tokens=1))
    assert max(seconds) < 1.25 * TARGET


def test_a_stall_of_a_fast_device_does_not_limit_prompts() -> None:
    served = with_chats(server(scale=0.02), 4)
    for number in range(30):
        until_first_token(served, served.add(f"prompt{number}", 9000, max_tokens=2))
    served.scale = 20.0
    served.step()
    served.scale = 0.02
    served.add("long", 40_000)
    assert [sum(served.step().values()) for _ in range(4)] == [8192] * 4


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    served = with_chats(server(scale=2.0), 4)
    served.add("long", 30_000)
    for _ in range(20):
        served.step()
    served.add("short", 40)
    assert served.step()["short"] == 40


def test_steps_of_equal_time_do_not_distort_the_share_of_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention costs as much as on a CPU. Steps of equal time fit nearly any share of decode, and a wrong share would
    cut the next prompt too much."""
    costs = {"BASE": 3e-3, "PER_REQUEST": 1e-4, "PER_CONTEXT": 2e-7, "PER_TOKEN": 1e-4, "PER_ATTENDED": 1e-7}
    for name, seconds in costs.items():
        monkeypatch.setattr(test_target_itl, name, seconds)
    sizes = {"max_num_batched_tokens": 512, "num_blocks": 100_000}
    served = with_chats(Server("prefill-gap:seconds=0.12", settings=sizes), 200, num_steps=60)
    seconds, _ = until_first_token(served, *[served.add(f"long{number}", 8000, max_tokens=1) for number in range(4)])
    assert max(seconds) < 0.125


def test_several_long_prompts_are_computed_one_after_the_other() -> None:
    served = with_chats(server(scale=2.0), 16)
    seconds, _ = until_first_token(served, *[served.add(f"long{number}", 8000, max_tokens=1) for number in range(4)])
    assert max(seconds) < 1.1 * TARGET


# ---------------------------------------------------------------------- a target that cannot be kept


def test_prefill_gap_makes_no_request_wait_for_step_time() -> None:
    served = with_chats(server(scale=20.0), 10)
    added = [served.add(f"r{number}", 100, max_tokens=1000) for number in range(20)]
    assert served.seconds[-1] > 2 * TARGET, "decoding alone takes longer"
    reasons = set()
    while any(each.status is RequestStatus.WAITING for each in added):
        waiting = next(each for each in added if each.status is RequestStatus.WAITING)
        served.step()
        if waiting.status is RequestStatus.WAITING:
            reasons.add(served.scheduler.explain(waiting.request_id).reason)
    assert reasons <= {Reason.BUDGET}


def test_beside_slow_decode_a_step_has_the_minimum_of_prompt_tokens() -> None:
    served = with_chats(server(scale=200.0), 4)
    seconds, tokens = until_first_token(served, served.add("long", 2000))
    assert len(seconds) <= 2000 / MIN + 2
    assert min(tokens[1:-1]) >= MIN
    assert max(seconds[2:]) < 2.2 * 200 * 6.1e-3


def test_a_short_prompt_bypasses_a_long_one_at_the_minimum_budget() -> None:
    served = with_chats(server(scale=200.0), 4)
    long = served.add("long", 4000)
    for _ in range(4):
        served.step()
    short = served.add("short", 8)
    until_first_token(served, short)
    assert not long.num_output_tokens


def test_under_load_decode_time_is_not_attributed_to_prompts() -> None:
    """Requests arrive all the time and decode takes longer than the target, so every step would have prompt tokens. If
    the time of decode were attributed to them, fewer and fewer would fit."""
    served = Server(LIMIT, scale=3.0, settings={"max_num_seqs": 2048})
    for number in range(2000):
        served.add(f"r{number}", 24, max_tokens=100_000)
    for _ in range(120):
        served.step()
    assert served.scheduler.num_running == 2000
    assert served.seconds[-1] > TARGET


def test_each_doubling_of_load_runs_one_step_without_prompt_tokens() -> None:
    served = Server(LIMIT, scale=10.0, settings={"max_num_seqs": 512})
    for number in range(400):
        served.add(f"r{number}", 100, max_tokens=100_000)
        served.step()
    waits = [load.num_requests for load in served.loads if not load.num_prefill_tokens]
    bare = [before for before, after in pairwise(waits) if after >= 2 * before]
    assert len(waits) < 20 and len(bare) <= 9


def test_a_clock_that_stands_still_delays_no_request() -> None:
    config = SchedulerConfig(num_blocks=400, max_model_len=4096, max_num_batched_tokens=64, max_num_seqs=8)
    scheduler = Scheduler(config.replace(token_limits=("prefill-gap",)))
    scheduler.add(Request("chat", [1] * 4, arrival_time=0.0, max_tokens=500), 1.0)
    long = Request("long", [1] * 2000, arrival_time=0.0, max_tokens=1)
    for number in range(80):
        if number == 5:
            scheduler.add(long, 1.0)
        output = scheduler.schedule(1.0)
        scheduler.update(output, StepResult([7] * int(np.count_nonzero(output.samples))), 1.0)
    assert long.num_output_tokens == 1


@pytest.mark.parametrize("num_chats", [16, 20])
@pytest.mark.parametrize("limit", ["prefill-gap:seconds=0.001", "target-itl:seconds=0.001,least=32,patience=0"])
def test_drafts_leave_the_minimum_of_tokens_to_a_prompt(limit: str, num_chats: int) -> None:
    """With 7 drafts each, requests verify more tokens than a step may use for prompts."""
    config = SchedulerConfig(num_blocks=2000, max_model_len=4096, max_num_batched_tokens=512, num_draft_tokens=7)
    scheduler = Scheduler(config.replace(token_limits=(limit,)))
    for number in range(num_chats):
        scheduler.add(Request(f"chat{number}", [1] * 4, arrival_time=0.0, max_tokens=3000), 0.0)
    long, now, tokens = Request("long", [1] * 2000, arrival_time=0.0, max_tokens=1), 0.0, []
    for number in range(200):
        if number == 100:
            assert scheduler.num_running == num_chats
            scheduler.add(long, now)
        output = scheduler.schedule(now)
        named = [each.request_id for each in output.requests]
        tokens.append(dict(zip(named, output.num_scheduled_tokens.tolist(), strict=True)).get("long", 0))
        now += 0.5
        counts = (1 + output.num_draft_tokens) * output.samples
        scheduler.update(output, StepResult([7] * int(counts.sum()), counts), now)
        decoding = np.array([each is not long for each in output.requests]) * 7
        scheduler.propose(output, [7] * int(decoding.sum()), decoding, now)
    assert long.num_output_tokens, "a token a step would take 2,000"
    assert min([each for each in tokens if each][:-1]) >= MIN


# ---------------------------------------------------------------------- noise


def test_after_a_stall_steps_compute_more_than_the_minimum() -> None:
    served = with_chats(server(scale=2.0), 4)
    served.add("long", 20_000)
    for _ in range(10):
        served.step()
    usual = served.step()["long"]
    served.step(outlier=1000.0)
    assert min(served.step()["long"] for _ in range(10)) > 0.6 * usual


def test_noise_of_step_times_is_forgotten_when_it_has_ended() -> None:
    served = with_chats(server(scale=2.0), 4)
    rng = np.random.default_rng(7)
    long = [served.add(f"long{number}", 20_000, max_tokens=1) for number in range(4)]
    usual = max(served.step()["long0"] for _ in range(12))
    for _ in range(60):
        served.step(outlier=4.0 if rng.random() < 0.5 else 1.0)
    until_first_token(served, *long)
    for _ in range(120):
        served.step()
    served.add("again", 20_000, max_tokens=1)
    assert max(served.step().get("again", 0) for _ in range(12)) > 0.5 * usual


# ---------------------------------------------------------------------- fast-forward and parameters


def test_prefill_gap_decides_in_fast_forward_as_in_single_steps() -> None:
    rng = np.random.default_rng(4)
    arrivals, now = [], 0.0
    for index in range(60):
        now += float(rng.exponential(0.02))
        length = 900 if index % 9 == 0 else int(rng.integers(5, 60))
        arrivals.append((now, SimRequest(f"r{index}", length, int(rng.integers(1, 80)))))
    config = SchedulerConfig(num_blocks=400, max_model_len=2048, token_limits=("prefill-gap:seconds=0.012",))
    step_time = LinearStepTime(per_step=6e-3, per_row=1e-4, per_token=4e-5, per_context_token=4e-7, per_attended=1e-9)
    for each in (config, replace(config, max_num_seqs=5), replace(config, num_blocks=90)):
        fast = simulate(Stretch(tuple(arrivals), now), each, step_time)
        slow = simulate(Stretch(tuple(arrivals), now), each, step_time, is_stepping=True)
        assert fast.stats == slow.stats
        assert fast.timings.first_token == pytest.approx(slow.timings.first_token, rel=1e-9)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("prefill-gap:seconds=0", "seconds of limit 'prefill-gap' is '0'"),
        ("prefill-gap:least=0", "least of limit 'prefill-gap' is '0'"),
        ("prefill-gap:patience=1", "no parameter 'patience'"),
    ],
)
def test_invalid_prefill_gap_parameters_are_refused(limit: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(token_limits=(limit,))
