"""The limit "target-itl": steps keep a target time; step times, admissions, and bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pointsman.core import ConfigError, Reason, Request, RequestStatus, Scheduler, SchedulerConfig, StepResult
from pointsman.core.policy.gate import Limit
from pointsman.core.policy.policy import StepLoad
from pointsman.core.policy.step_times import StepTimes
from pointsman.sim.request import SimRequest
from pointsman.sim.simulator import simulate
from pointsman.sim.step_time import LinearStepTime
from pointsman.sim.stretches import Stretch
from tests.core.helpers import Host

TARGET = 0.05
BASE, PER_REQUEST, PER_CONTEXT, PER_TOKEN, PER_ATTENDED = 6e-3, 2e-5, 4e-8, 2e-5, 1e-9


def seconds_of(load: StepLoad) -> float:
    """The time of a step: a sum over its work."""
    return (
        BASE
        + PER_REQUEST * load.num_requests
        + PER_CONTEXT * load.num_context_tokens
        + PER_TOKEN * load.num_prefill_tokens
        + PER_ATTENDED * (load.num_attended_tokens - load.num_context_tokens)
    )


@dataclass
class Server:
    """Steps of a scheduler under a virtual clock: each takes `seconds_of` its load, times the noise."""

    limit: str = f"target-itl:seconds={TARGET}"
    noise: np.random.Generator | None = None
    scale: float = 1.0
    hidden: float = 0.0
    """Share of decoding that takes no time beside prompt tokens."""
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            "num_blocks": 40_000,
            "max_model_len": 65_536,
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "token_limits": (self.limit,),
        }
        self.scheduler = Scheduler(SchedulerConfig(**{**values, **self.settings}))
        self.now = 0.0
        self.loads: list[StepLoad] = []
        self.seconds: list[float] = []
        self.slowed: list[float] = []

    def add(self, name: str, num_prompt_tokens: int, max_tokens: int = 200, priority: int = 0) -> Request:
        prompt = [5] * num_prompt_tokens
        request = Request(name, prompt, arrival_time=self.now, max_tokens=max_tokens, priority=priority)
        self.scheduler.add(request, self.now)
        return request

    def step(self, outlier: float = 1.0) -> dict[str, int]:
        """Tokens of each request in the step."""
        output = self.scheduler.schedule(self.now)
        computed, tokens = output.num_computed_tokens, output.num_scheduled_tokens
        total, attended = int(tokens.sum()), int((tokens * computed + tokens * (tokens + 1) // 2).sum())
        context = int(computed.sum()) + total
        load = StepLoad(total, output.num_rows, context, total - output.num_rows, attended)
        seconds = seconds_of(load) * self.scale
        if load.num_prefill_tokens:
            seconds -= self.hidden * self.scale * (BASE + PER_REQUEST * output.num_rows + PER_CONTEXT * context)
        if self.noise is not None:
            seconds *= float(self.noise.lognormal(0.0, 0.05))
            outlier = 10.0 if self.noise.random() < 0.01 else outlier
        self.loads.append(load)
        self.seconds.append(seconds)
        self.slowed.append(outlier)
        self.now += seconds * outlier
        sampled = int(np.count_nonzero(output.samples))
        self.scheduler.update(output, StepResult(np.full(sampled, 7, dtype=np.int32)), self.now)
        return {request.request_id: int(count) for request, count in zip(output.requests, tokens, strict=True)}

    def warm(self, num_chats: int = 20) -> None:
        """Let chats decode, and run enough prompts to learn step times."""
        for index in range(num_chats):
            self.add(f"chat{index}", 300, max_tokens=100_000)
        for index in range(12):
            self.add(f"prompt{index}", 6000, max_tokens=20)
            for _ in range(6):
                self.step()
        while self.scheduler.num_running > num_chats:
            self.step()


# ---------------------------------------------------------------------- the rule


def test_prompt_tokens_fill_the_target_time_beside_decode() -> None:
    server = Server()
    server.warm()
    before = len(server.seconds)
    server.add("long", 40_000)
    while not any(load.num_prefill_tokens == 0 for load in server.loads[before:]):
        server.step()
    seconds, tokens = np.array(server.seconds[before:-2]), [load.num_prefill_tokens for load in server.loads[before:-2]]
    assert seconds.max() < 1.02 * TARGET
    assert np.median(seconds) > 0.95 * TARGET
    assert tokens[-1] < 0.6 * tokens[0], "beside more context a token costs more"


def test_the_first_steps_are_small_and_grow() -> None:
    server = Server()
    server.add("chat", 10)
    server.step()
    server.add("long", 10_000)
    tokens = [server.step()["long"] for _ in range(4)]
    assert tokens[0] == 256 and all(0 < after <= 2 * before + 1 for before, after in pairwise(tokens))
    assert max(server.seconds) < 1.02 * TARGET


def test_while_no_request_decodes_prompts_have_the_whole_budget() -> None:
    server = Server(settings={"max_num_batched_tokens": 8192})
    server.add("long", 20_000, max_tokens=30)
    server.add("second", 20_000, max_tokens=30)
    assert [sum(server.step().values()) for _ in range(2)] == [8192, 8192]
    assert server.step() == {"long": 3616, "second": 4576}
    assert server.step()["second"] == 257, "long decodes"
    server.scheduler.abort("long", server.now)
    assert server.step()["second"] == 8192, "nothing decodes any more"
    server.warm()
    before = len(server.seconds)
    server.add("third", 40_000)
    while not any(load.num_prefill_tokens == 0 for load in server.loads[before:]):
        server.step()
    assert max(server.seconds[before:]) < 1.05 * TARGET, "long steps do not mislead the predictions"


def test_the_configured_budget_is_the_upper_bound() -> None:
    server = Server(settings={"max_num_batched_tokens": 500})
    server.warm()
    server.add("long", 5000)
    assert sum(server.step().values()) == 500


def test_every_decoding_request_gets_its_token_behind_a_partial_prefill() -> None:
    limits = ("prefill-threshold:tokens=64", f"target-itl:seconds={TARGET}")
    server = Server(settings={"token_limits": limits}, scale=5.0)
    server.add("long", 4000)
    for index in range(30):
        server.add(f"chat{index}", 20)
        server.step()
    assert server.scheduler.num_running > 5
    decoding = {each.request_id for each in server.scheduler.running} - {"long"}
    for _ in range(20):
        tokens = server.step()
        assert decoding <= tokens.keys() and "long" in tokens


def test_a_prefill_leaves_each_request_a_token_of_the_budget() -> None:
    server = Server(f"target-itl:seconds={TARGET},least=8", settings={"max_num_batched_tokens": 40, "max_num_seqs": 40})
    for index in range(2):
        server.add(f"chat{index}", 10)
    server.step()
    prefill = server.add("long", 1500)
    num_steps = 0
    while not prefill.num_output_tokens:
        running = {each.request_id for each in server.scheduler.running}
        assert running <= server.step().keys()
        num_steps += len(running) == 3
    assert num_steps > 5


def test_prefill_first_steps_leave_no_tokens_for_decode() -> None:
    budget = {"max_num_batched_tokens": 40, "max_num_seqs": 40, "max_num_active_seqs": 40}
    server = Server(settings={"batching": "prefill-first", "shortage": "in-order", **budget})
    for index in range(36):
        server.add(f"chat{index}", 2)
    while server.scheduler.num_running < 36 or server.loads[-1].num_prefill_tokens:
        server.step()
    server.add("long", 240)
    assert [server.step() for _ in range(6)][1:] == [{"long": 40}] * 5, "after a step whose time is learned"


def crowded(**settings: Any) -> tuple[Server, Request, float]:
    """A slow server, on which decode takes about the target; a request that has waited for step time for 20 steps, and
    since when."""
    server, since, num_steps = Server(scale=4.0, settings=settings), 0.0, 0
    chats = [server.add(f"chat{index}", 6000, max_tokens=50_000) for index in range(40)]
    while num_steps < 20:
        began = server.now
        server.step()
        head = next(each for each in chats if each.status is RequestStatus.WAITING)
        if server.scheduler.explain(head.request_id).reason is not Reason.STEP_TIME:
            num_steps = 0
            continue
        since = since if num_steps else began
        num_steps += 1
    return server, head, since


def test_a_request_waits_for_step_time_when_decode_takes_too_long() -> None:
    server, waiting, since = crowded()
    num_running = server.scheduler.num_running
    while waiting.status is RequestStatus.WAITING:
        assert server.scheduler.num_running == num_running < 40
        began, tokens = server.now, server.step()
    assert server.seconds[-2] > 0.8 * TARGET
    assert 0 <= began - since - 10 < TARGET, "after `patience` the head starts anyway"
    assert tokens[waiting.request_id] == 64, "with `least` tokens"


def test_a_request_deferred_for_step_time_starts_when_others_finish() -> None:
    server, waiting, _ = crowded()
    for request in server.scheduler.running[:9]:
        server.scheduler.abort(request.request_id, server.now)
    server.step()
    assert waiting.status is RequestStatus.RUNNING


def test_a_short_prompt_does_not_wait_behind_a_long_one() -> None:
    server = Server()
    server.warm()
    server.add("long", 60_000)
    alone = server.step()["long"]
    server.add("short", 300)
    tokens = server.step()
    assert tokens["short"] == 300, "whole, in the step after it arrived"
    assert 0.4 * alone < tokens["long"] < 0.6 * alone, "the long one has half of the time"
    assert server.step()["long"] > 0.8 * alone, "no time is kept while the queue is empty"


def test_a_second_long_prompt_waits_and_costs_the_first_one_half_a_step() -> None:
    server = Server()
    server.warm()
    server.add("first", 60_000)
    server.step()
    server.add("second", 40_000)
    steps = [server.step() for _ in range(6)]
    assert not any("second" in step for step in steps)
    assert server.scheduler.explain("second").reason is Reason.BUDGET
    assert steps[0]["first"] < 0.6 * steps[1]["first"]
    assert all(after["first"] < before["first"] for before, after in pairwise(steps[1:])), (
        "it costs more only for its context"
    )


def test_many_short_prompts_do_not_count_as_long_contexts() -> None:
    """No other steps were observed. If their time were attributed to positions, no token would fit a step."""
    server = Server()
    for index in range(250):
        server.add(f"r{index}", 2, max_tokens=1000)
    for _ in range(8):
        server.step()
    assert server.scheduler.num_running == 250


@pytest.mark.parametrize("max_num_seqs", [24, 256])
def test_prompt_tokens_are_spread_while_the_queue_waits_for_slots(max_num_seqs: int) -> None:
    server = Server(settings={"max_num_seqs": max_num_seqs})
    server.warm()
    for index in range(4):
        server.add(f"chat-{index}", 300, max_tokens=100_000)
    while server.scheduler.num_queued:
        server.step()
    server.scheduler.abort("chat-0", server.now)
    before = server.add("before", 60_000, max_tokens=1)
    while not before.num_output_tokens:  # until prompt tokens are no longer spread
        server.step()
    server.add("long", 60_000)
    alone = server.step()["long"]
    for index in range(60):
        server.add(f"waiting{index}", 300, max_tokens=100_000)
    tokens = [server.step()["long"] for _ in range(10)]
    assert (max(tokens[1:]) < 0.3 * alone) == (max_num_seqs == 24)
    assert min(tokens) > 0.1 * alone, "a third of the time, or half of that while short ones wait"


@pytest.mark.parametrize("target", [0.025, 0.01])
def test_a_very_short_target_still_runs_several_requests(target: float) -> None:
    """The cost of one more request is unknown until two ran."""
    server = Server(f"target-itl:seconds={target}", scale=2.5)  # one takes 15 ms
    for index in range(12):
        server.add(f"r{index}", 100, max_tokens=1000)
        for _ in range(16):
            server.step()
    assert server.scheduler.num_running >= 11 and server.now < 10


def test_an_unusually_long_step_is_learned_before_the_next() -> None:
    server = Server(hidden=0.4)
    for index in range(32):
        server.add(f"chat{index}", 100, max_tokens=5000)
        for _ in range(4):
            server.step()
    before = len(server.seconds)
    server.add("long", 30_000)
    for _ in range(40):
        server.step()
    assert max(server.seconds[before:]) < 1.1 * TARGET


# ---------------------------------------------------------------------- noise


def test_steps_keep_the_target_at_p99_and_outliers_do_not_count() -> None:
    """Lognormal noise of 5 %; one of a hundred steps takes ten times as long."""
    server = Server(noise=np.random.default_rng(3), settings={"num_blocks": 100_000})
    server.warm()
    before = len(server.seconds)
    for index in range(60):
        server.add(f"long{index}", 9000, max_tokens=30)
        server.add(f"short{index}", 500, max_tokens=30)
    while server.scheduler.num_queued:
        server.step()
    seconds = np.array(server.seconds[before:])
    slowed = np.array(server.slowed[before:])
    assert np.count_nonzero(slowed > 1) >= 3
    assert np.percentile(seconds, 99) < 1.04 * TARGET, "without the outliers, which no budget prevents"
    assert np.median(seconds) > 0.85 * TARGET, "the noise takes a margin of 12 %"
    after = np.flatnonzero(slowed[:-1] > 1) + 1
    tokens = np.array([load.num_prefill_tokens for load in server.loads[before:]])
    assert tokens[after].mean() > 0.8 * tokens.mean(), "the step after an outlier is no smaller"


def test_one_slow_step_changes_the_budget_by_less_than_a_tenth() -> None:
    server, spared = Server(), Server()
    for each in (server, spared):
        each.warm()
        each.add("long", 30_000)
        each.step()
    server.step(outlier=30.0)
    spared.step()
    for _ in range(8):
        after, without = server.step()["long"], spared.step()["long"]
        assert after > 0.9 * without


def test_a_permanent_slowdown_is_learned() -> None:
    server = Server()
    server.warm()
    server.scale = 2.0
    for index in range(6):
        server.add(f"long{index}", 30_000, max_tokens=1)
    for _ in range(150):
        server.step()
    assert np.percentile(server.seconds[-60:], 90) < 1.02 * TARGET
    assert np.median(server.seconds[-60:]) > 0.85 * TARGET


def test_step_times_fits_the_coefficients_of_its_model() -> None:
    times, rng = StepTimes(TARGET), np.random.default_rng(1)
    for _ in range(300):
        requests, start = int(rng.integers(1, 100)), int(rng.integers(0, 30_000))
        tokens = int(rng.integers(0, 2)) * int(rng.integers(10, 2500))
        context = requests * 700 + start + tokens
        attended = context + tokens * start + tokens * (tokens + 1) // 2
        load = StepLoad(requests + tokens, requests, context, tokens, attended)
        times.observe(load, seconds_of(load))
        times.refit()
    assert times.decode_seconds(50, 50_000) == pytest.approx(BASE + 50 * PER_REQUEST + 50_000 * PER_CONTEXT, rel=0.05)
    assert times.prefill_seconds(1000, 9000) == pytest.approx(1000 * (PER_TOKEN + 9500 * PER_ATTENDED), rel=0.05)
    for seconds, start in ((0.01, 0), (0.03, 20_000)):
        fitting = times.fitting_tokens(seconds, start)
        assert times.prefill_seconds(fitting, start) <= seconds < times.prefill_seconds(fitting + 1, start)
    assert times.fitting_tokens(-1.0, 0) == 0


# ---------------------------------------------------------------------- bounds


@settings(max_examples=15, deadline=None)
@given(
    st.floats(1e-4, 0.01),
    st.integers(1, 200),
    st.floats(0.0, 2.0),
    st.lists(st.tuples(st.integers(1, 2000), st.integers(1, 60)), min_size=1, max_size=8),
)
# Two prefills fit a step, which together have more tokens than any that was seen; behind them a third request decodes.
@example(0.0004, 13, 0.0, [(564, 11), (188, 1), (29, 1), (3, 6)])
def test_waits_for_step_time_and_prefill_steps_are_bounded(
    target: float, least: int, patience: float, requests: list[tuple[int, int]]
) -> None:
    """Even if no step meets the target, the head starts after `patience`, and a prefill of n tokens takes at most n /
    `least` steps, rounded up."""
    server = Server(f"target-itl:seconds={target},least={least},patience={patience}")
    added = [server.add(f"r{index}", *each) for index, each in enumerate(requests)]
    steps_left: dict[str, int] = {}
    head_since = 0.0
    while server.scheduler.has_unfinished_requests():
        began, waiting = server.now, [each for each in added if each.status is RequestStatus.WAITING]
        running = {each.request_id for each in server.scheduler.running}
        prefilling = [each for each in server.scheduler.running if each.num_output_tokens == 0]
        server.step()
        for each in prefilling[:1]:
            left = steps_left.setdefault(each.request_id, -(-each.num_prompt_tokens // least))
            assert left > 0, "it should have had its first token"
            steps_left[each.request_id] = left - 1
        started = [each for each in waiting if each.status is not RequestStatus.WAITING]
        if started or not waiting or prefilling:
            head_since = server.now
        else:
            assert began - head_since <= patience + max(server.seconds[-2:]), "the head waits longer than `patience`"
        assert server.loads[-1].num_requests >= len(running)


def loads_heard(host: Host) -> list[StepLoad]:
    heard: list[StepLoad] = []

    class Hears(Limit):
        name = "hears"

        def on_step_time(self, load: StepLoad, seconds: float) -> None:
            heard.append(load)

    host.scheduler = Scheduler(host.config.replace(token_limits=(Hears(),)))
    return heard


def test_policies_get_the_load_of_each_step() -> None:
    host = Host(num_blocks=40, enable_prefix_caching=False)
    heard, expected = loads_heard(host), []
    host.add("a", 21, max_tokens=9)
    for number in range(12):
        if number == 5:
            host.add("b", 6, max_tokens=5)
        output = host.step()
        computed, tokens = output.num_computed_tokens, output.num_scheduled_tokens
        total, rows = int(tokens.sum()), len(tokens)
        attended = sum(sum(range(start + 1, start + new + 1)) for start, new in zip(computed, tokens, strict=True))
        if rows:
            expected.append(StepLoad(total, rows, int((computed + tokens).sum()), total - rows, attended))
    assert heard == expected
    assert any(load.num_prefill_tokens for load in expected) and any(not load.num_prefill_tokens for load in expected)


# ---------------------------------------------------------------------- fast-forward


def test_the_budget_is_kept_while_running_requests_stay_the_same() -> None:
    server = Server(settings={"max_num_seqs": 4})
    for index in range(5):
        server.add(f"r{index}", 100, max_tokens=50)
    while server.scheduler.num_running < 4 or server.loads[-1].num_prefill_tokens:
        server.step()
    server.step()
    assert server.scheduler.guaranteed_steps() > 5, "the queue waits for a sequence slot"
    server.scheduler.abort("r0", server.now)
    assert server.scheduler.guaranteed_steps() == 0, "the next step decides again"


@pytest.mark.parametrize("overrides", [{}, {"max_num_seqs": 5}, {"num_blocks": 90}])
def test_target_itl_decides_in_fast_forward_as_in_single_steps(overrides: dict[str, Any]) -> None:
    rng = np.random.default_rng(4)
    arrivals, now = [], 0.0
    for index in range(60):
        now += float(rng.exponential(0.02))
        length = 900 if index % 9 == 0 else int(rng.integers(5, 60))
        arrivals.append((now, SimRequest(f"r{index}", length, int(rng.integers(1, 80)))))
    config = SchedulerConfig(
        **{
            "num_blocks": 400,
            "max_model_len": 2048,
            "token_limits": ("target-itl:seconds=0.012,patience=0.5",),
            **overrides,
        }
    )
    step_time = LinearStepTime(per_step=6e-3, per_row=1e-4, per_token=4e-5, per_context_token=4e-7, per_attended=1e-9)
    fast = simulate(Stretch(tuple(arrivals), now), config, step_time)
    slow = simulate(Stretch(tuple(arrivals), now), config, step_time, is_stepping=True)
    assert fast.stats == slow.stats
    assert fast.timings.first_token == pytest.approx(slow.timings.first_token, rel=1e-9)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("target-itl:seconds=0", "seconds of limit 'target-itl' is '0'"),
        ("target-itl:least=0", "least of limit 'target-itl' is '0'"),
        ("target-itl:patience=-1", "patience of limit 'target-itl' is '-1'"),
        ("target-itl:ms=50", "no parameter 'ms'"),
    ],
)
def test_invalid_target_itl_parameters_are_refused(limit: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Host(token_limits=(limit,))


@pytest.mark.parametrize(
    "setting", [{"enable_chunked_prefill": False, "max_num_batched_tokens": 64}, {"first_chunk_only": True}]
)
def test_target_itl_needs_chunked_prefill(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="cuts prompts to the token budget"):
        Host(token_limits=("target-itl",), **setting)


def test_many_short_prompts_do_not_wait_for_step_time() -> None:
    """All prompts are shorter than the minimum chunk, so no step shows that more would fit."""
    server = Server("target-itl:seconds=0.05,least=64,patience=10")
    added = []
    for number in range(100):
        added.append(server.add(f"r{number}", 1 + number % 30, 4))
        server.step()
        server.step()
    waits = [each for each in added if each.status is RequestStatus.WAITING]
    assert len(waits) <= 2


def test_no_preemption_for_a_request_that_lacks_step_time() -> None:
    host = Host(order="priority", token_limits=("target-itl:seconds=0.5,patience=30",), max_num_seqs=2)
    for name, priority in (("urgent", 0), ("patient", 2)):
        host.add(name, 4, max_tokens=40, priority=priority)
        host.step()
    while host.scheduler.num_running < 2:  # the second one waits for `patience`
        host.step()
    host.add("between", 4, max_tokens=4, priority=1)
    for _ in range(5):
        assert not host.step().preempted, "urgent alone takes longer than the target, and continues"


@pytest.mark.parametrize("num_urgent", [0, 3])
def test_less_urgent_requests_are_preempted_in_steps_that_are_too_long(num_urgent: int) -> None:
    """The remaining requests and the urgent one together decode within the target."""
    server, _, _ = crowded(order="priority")
    num_running = server.scheduler.num_running
    assert num_running > 10
    server.scheduler.set_max_num_active_seqs(num_running, server.now)
    for request in server.scheduler.running[:num_urgent]:
        server.scheduler.set_priority(request.request_id, -2, server.now)
    urgent = server.add("urgent", 100, priority=-1)
    tokens = server.step()
    assert urgent.status is RequestStatus.RUNNING and len(tokens) == num_running, "one was preempted for its slot"
