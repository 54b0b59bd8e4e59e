"""Policies of other packages that raise, or break their contract: the step fails with the name, no request is lost."""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import pytest

from pointsman.core import (
    PolicyError,
    Recorder,
    RecordingError,
    ReplayDifference,
    Request,
    Scheduler,
    StepResult,
    replay,
)
from pointsman.core.policy import registry
from pointsman.core.policy.eviction import LRU
from pointsman.core.policy.limits import Limit
from pointsman.core.policy.order import FirstComeFirstServed, PriorityOrder
from pointsman.core.policy.policy import Policy
from pointsman.core.policy.reserve import Reserve
from pointsman.core.policy.victim import Latest
from tests.core.helpers import Host, names, reference_output, small_config


class Switch:
    """Makes a policy fail when a test chooses."""

    def __init__(self) -> None:
        self.fails = False
        self.answer: Any = None

    def __call__(self, sound: Callable[[], Any]) -> Any:
        if not self.fails:
            return sound()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


BOOM = ZeroDivisionError("boom")


def host_with(kind: str, policy: Any, **config: Any) -> Host:
    value = (policy,) if kind in ("reserves", "token_limits") else policy
    return Host(**{kind: value, **config})


def finish_all(host: Host, requests: list[Request]) -> None:
    """Run all requests to their end, and check their tokens."""
    host.run_to_end()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, request.max_tokens)


# ---------------------------------------------------------------------- orders


@pytest.mark.parametrize("method", ["peek", "pop"])
@pytest.mark.parametrize("answer", [BOOM, None, "another"], ids=["raises", "none", "not queued"])
def test_an_order_that_fails_while_a_step_admits_loses_no_request(method: str, answer: Any) -> None:
    switch = Switch()
    switch.answer = answer

    class Mine(FirstComeFirstServed):
        name = "mine"
        num_admitted = 0

        def peek(self) -> Any:
            return switch(super().peek) if method == "peek" else super().peek()

        def pop(self) -> Any:
            self.num_admitted += 1
            broken = method == "pop" and switch.fails and self.num_admitted == 2
            return switch(super().pop) if broken else super().pop()

    host = host_with("order", Mine())
    requests = [host.add(name, 3, max_tokens=4) for name in ("a", "b", "c")]
    switch.fails = True
    with pytest.raises(PolicyError, match=f"order 'mine': {method}"):
        host.schedule()
    host.scheduler.check_invariants()
    assert (host.scheduler.num_queued, host.scheduler.num_running) == (3, 0), (
        "also the request that was admitted before"
    )
    switch.fails = False
    output = host.step()
    assert names(output.admitted) == ["a", "b", "c"]
    finish_all(host, requests)


def test_an_order_that_loses_a_request_fails_and_the_request_runs() -> None:
    class Picky(FirstComeFirstServed):
        name = "picky"

        def push(self, request: Request) -> None:
            if request.request_id == "b":
                raise BOOM
            super().push(request)

    host = host_with("order", Picky())
    requests = [host.add(name, 3, max_tokens=4) for name in ("a", "b", "c")]
    with pytest.raises(PolicyError, match="order 'picky': push raised ZeroDivisionError: boom"):
        host.schedule()
    assert names(host.step().admitted) == ["a", "b", "c"], "requests queued at the failure are served by arrival"
    finish_all(host, requests)


@pytest.mark.parametrize("method", ["push", "pop", "remove", "put_back"])
def test_an_order_that_raises_after_changing_its_queue_blocks_no_request(method: str) -> None:
    class Late(FirstComeFirstServed):
        name = "late"
        is_due = True

        def _once(self, done: str) -> None:
            if done == method and self.is_due:
                self.is_due = False
                raise BOOM

        def push(self, request: Request) -> None:
            super().push(request)
            self._once("push")

        def pop(self) -> Request:
            head = super().pop()
            self._once("pop")
            return head

        def remove(self, request: Request) -> None:
            super().remove(request)
            self._once("remove")

        def put_back(self, requests: Any) -> None:
            super().put_back(requests)
            self._once("put_back")

    host = Host(order=Late(), max_loras=1)
    requests = [host.add(name, 3, max_tokens=4, adapter=("x" if name == "b" else "y", 1)) for name in "abcd"]
    host.abort("d")
    failures = 0
    for _ in range(40):
        try:
            host.step()
        except PolicyError:
            failures += 1
            host.scheduler.check_invariants()
    assert failures == 1
    assert [request.is_finished for request in requests] == [True] * 4
    for request in requests[:3]:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, 4)


def test_queue_positions_are_known_after_an_order_has_failed() -> None:
    class Once(FirstComeFirstServed):
        name = "once"
        is_due = True

        def pop(self) -> Request:
            head = super().pop()
            if self.is_due:
                self.is_due = False
                raise BOOM
            return head

    host = Host(order=Once(), max_num_seqs=1)
    for name in "abc":
        host.add(name, 3, max_tokens=4)
    with pytest.raises(PolicyError, match="order 'once': pop"):
        host.schedule()
    host.add("d", 3, max_tokens=4)
    assert [host.explain(name).position for name in "abcd"] == [0, 1, 2, 3]


def test_a_failed_step_leaves_no_unpublished_blocks_behind() -> None:
    """An order raises after one admission, whose request is aborted before its blocks are published."""

    class Second(FirstComeFirstServed):
        name = "second"
        num_asked = 0

        def peek(self) -> Request:
            self.num_asked += 1
            if self.num_asked == 3:  # `pop` of the guard peeks once more
                raise BOOM
            return super().peek()

    host = Host(order=Second(), share_within_step=False)
    host.add("a", 8, max_tokens=2)
    b = host.add("b", 8, max_tokens=2)
    with pytest.raises(PolicyError, match="order 'second': pop"):
        host.schedule()
    host.abort("a")
    host.run_to_end()
    assert b.is_finished


def test_a_reserve_that_lacks_num_changes_is_called_in_every_step() -> None:
    class Until(Reserve):
        name = "until"

        def blocks(self, request: Request, demand: Any, view: Any) -> int:
            return 100 if demand.others_run and view.now < 12.0 else 0

    host = host_with("reserves", Until())
    host.add("a", 3, max_tokens=30)
    host.step()
    b = host.add("b", 3, max_tokens=2)
    while host.now < 16.0:
        host.step()
    assert b.num_output_tokens > 0


def test_an_error_in_a_policy_s_event_method_fails_the_next_step() -> None:
    class Deaf(FirstComeFirstServed):
        name = "deaf"

        def on_finished(self, request: Request, now: float) -> None:
            raise BOOM

    host = host_with("order", Deaf())
    host.add("a", 3, max_tokens=1)
    host.step()
    b = host.add("b", 3, max_tokens=2)
    with pytest.raises(PolicyError, match="order 'deaf': on_finished raised ZeroDivisionError: boom"):
        host.schedule()
    host.step()
    host.step()
    assert b.is_finished


# ---------------------------------------------------------------------- victims


@pytest.mark.parametrize("shortage", ["replan", "in-order", "look-ahead"])
@pytest.mark.parametrize("answer", [BOOM, -1, 2, None, "a"], ids=["raises", "negative", "too large", "none", "text"])
def test_a_victim_policy_that_fails_preempts_no_request(answer: Any, shortage: str) -> None:
    switch = Switch()
    switch.answer = answer

    class Mine(Latest):
        name = "mine"

        def choose(self, view: Any, asking: int) -> Any:
            return switch(lambda: super(Mine, self).choose(view, asking))

    host = host_with("victim", Mine(), num_blocks=4, max_model_len=16, shortage=shortage)
    requests = [host.add(name, 8, max_tokens=6) for name in ("a", "b")]
    host.step()
    switch.fails = True
    for _ in range(2):
        with pytest.raises(PolicyError, match="victim 'mine': choose"):
            host.schedule()
        host.scheduler.check_invariants()
    assert host.scheduler.num_running == 2
    switch.fails = False
    finish_all(host, requests)


# ---------------------------------------------------------------------- reserves and limits


@pytest.mark.parametrize("answer", [BOOM, -1, None])
def test_a_reserve_that_fails_admits_no_request(answer: Any) -> None:
    switch = Switch()
    switch.answer = answer

    class Mine(Reserve):
        name = "mine"

        def blocks(self, request: Request, demand: Any, view: Any) -> Any:
            return switch(lambda: 0)

    host = host_with("reserves", Mine())
    requests = [host.add("a", 3, max_tokens=4)]
    host.step()
    requests.append(host.add("b", 3, max_tokens=4))
    switch.fails = True
    with pytest.raises(PolicyError, match="reserve 'mine': blocks"):
        host.schedule()
    assert (host.scheduler.num_running, host.scheduler.num_queued) == (1, 1)
    assert requests[0].num_computed_tokens == 3, "the running part of the step is undone"
    switch.fails = False
    finish_all(host, requests)


@pytest.mark.parametrize("method", ["check", "clip", "step_budget", "commit", "open_step"])
def test_a_limit_that_fails_loses_no_request(method: str) -> None:
    switch = Switch()
    switch.answer = BOOM

    class Mine(Limit):
        name = "mine"

        def step_budget(self, most: int, view: Any) -> int:
            return switch(lambda: most) if method == "step_budget" else most  # type: ignore[no-any-return]

        def check(self, request: Request, start: int, want: int, view: Any) -> int:
            return switch(lambda: want) if method == "check" else want  # type: ignore[no-any-return]

        def clip(self, batch: Any, rows: Any, want: Any) -> None:
            if method == "clip":
                switch(lambda: None)

        def commit(self, request: Request, start: int, num_tokens: int) -> None:
            if method == "commit":
                switch(lambda: None)

        def open_step(self, num_requests: int) -> None:
            if method == "open_step":
                switch(lambda: None)

    host = host_with("token_limits", Mine())
    requests = [host.add(name, 12, max_tokens=4) for name in ("a", "b", "c")]
    host.step()
    switch.fails = True
    failures = 0
    for _ in range(2):
        try:
            host.step()
        except PolicyError as error:
            failures += 1
            assert f"limit 'mine': {method} raised ZeroDivisionError: boom" in str(error)
        host.scheduler.check_invariants()
    assert failures >= 1
    switch.fails = False
    with contextlib.suppress(PolicyError):  # the failure of an earlier `commit`
        host.step()
    finish_all(host, requests)


@pytest.mark.parametrize("lacks_time", [False, True, BOOM])
def test_a_limit_can_forbid_priority_preemption(lacks_time: Any) -> None:
    switch = Switch()
    switch.answer = lacks_time
    asked = []

    class Mine(Limit):
        name = "mine"

        def step_budget(self, most: int, view: Any) -> int:
            return most

        def lacks_step_time(self, request: Request, num_running: int, num_tokens: int) -> bool:
            asked.append((request.request_id, num_running, num_tokens))
            return bool(switch(lambda: False))

    host = host_with("token_limits", Mine(), order="priority", max_num_seqs=2)
    requests = [host.add("stays", 3, max_tokens=6), host.add("lazy", 3, max_tokens=6, priority=5)]
    host.step()
    requests.append(host.add("urgent", 3, max_tokens=2, priority=1))
    switch.fails = True
    if lacks_time is BOOM:
        with pytest.raises(PolicyError, match="limit 'mine': lacks_step_time raised ZeroDivisionError: boom"):
            host.step()
        return
    assert len(host.step().preempted) == (not lacks_time)
    assert asked == [("urgent", 1, 4)], "beside the remaining request"
    switch.fails = False
    finish_all(host, requests)


def test_a_step_budget_below_the_running_requests_still_lets_each_decode() -> None:
    class Stingy(Limit):
        name = "stingy"

        def step_budget(self, most: int, view: Any) -> int:
            return 1

    host = host_with("token_limits", Stingy())
    requests = [host.add(name, 3, max_tokens=6) for name in ("a", "b")]
    for _ in range(12):
        host.step()
        assert host.scheduler.config.max_num_batched_tokens == 16
    finish_all(host, requests)


# ---------------------------------------------------------------------- random failures


@pytest.mark.parametrize("seed", range(12))
def test_policies_that_fail_at_random_lose_no_request(seed: int) -> None:
    chance = random.Random(seed)

    def perhaps() -> None:
        if chance.random() < 0.2:
            raise BOOM

    class MyOrder(FirstComeFirstServed):
        name = "my-order"

        def peek(self) -> Request:
            perhaps()
            return super().peek()

        def pop(self) -> Request:
            perhaps()
            return super().pop()

    class MyVictim(Latest):
        name = "my-victim"

        def choose(self, view: Any, asking: int) -> int:
            perhaps()
            return chance.randrange(len(view.rows))

    class MyReserve(Reserve):
        name = "my-reserve"

        def blocks(self, request: Request, demand: Any, view: Any) -> int:
            perhaps()
            return 0

    in_flight = 1 + seed % 2
    host = Host(
        order=MyOrder(),
        victim=MyVictim(),
        reserves=(MyReserve(),),
        num_blocks=10,
        max_model_len=40,
        max_steps_in_flight=in_flight,
        enable_prefix_caching=seed % 3 > 0,
        shortage=("replan", "in-order")[seed % 4 == 0],
    )
    requests = [host.add(f"r{index}", 2 + index % 7, max_tokens=8 + index % 5) for index in range(9)]
    outputs: list[Any] = []
    failures = 0
    for _ in range(3000):
        if not host.scheduler.has_unfinished_requests():
            break
        try:
            if len(outputs) < in_flight:
                outputs.append(host.schedule())
        except PolicyError:
            failures += 1
            host.scheduler.check_invariants()
        if outputs and (len(outputs) == in_flight or chance.random() < 0.5):
            host.update(outputs.pop(0))
    assert failures > 3
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, request.max_tokens)


def test_a_policy_without_a_required_method_is_refused_by_name() -> None:
    class Half(Policy):
        name = "half"

    for kind, missing in (("order", "is_preemptive, push"), ("victim", "choose"), ("reserves", "blocks")):
        with pytest.raises(ValueError, match=missing):
            host_with(kind, Half())


# ---------------------------------------------------------------------- guaranteed steps


def scheduler_with(order: Any, **config: Any) -> Scheduler:
    """Two requests run, and two wait for a sequence slot."""
    values = {"max_num_seqs": 2, "order": order, "num_blocks": 64, "max_model_len": 64}
    scheduler = Scheduler(small_config(**{**values, **config}), check_guaranteed_steps=True)
    for index, name in enumerate("abcd"):
        request = Request(name, [1000 + index] * 4, arrival_time=float(index), max_tokens=30)
        scheduler.add(request, float(index))
    for now in (4.0, 5.0):
        output = scheduler.schedule(now)
        scheduler.update(output, StepResult([7] * output.num_rows), now)
    return scheduler


def test_an_order_that_breaks_its_guaranteed_steps_is_detected() -> None:
    class Restless(FirstComeFirstServed):
        name = "restless"

        def attach(self, view: Any) -> None:
            self.view = view

        def peek(self) -> Request:
            waiting = sorted(self, key=lambda request: request.request_id)
            return waiting[int(self.view.now) // 4 % len(waiting)]

        def pop(self) -> Request:
            head = self.peek()
            self.remove(head)
            return head

    scheduler = scheduler_with(Restless())
    found = ""
    for step in range(8):
        assert scheduler.guaranteed_steps(2) == 2
        try:
            scheduler.advance([6.0 + 2 * step, 7.0 + 2 * step, 8.0 + 2 * step], [7, 7])
        except PolicyError as error:
            found = str(error)
            break
    assert "order 'restless': guaranteed_steps promised the same head for 2 steps, and it is" in found


def test_a_reserve_that_breaks_its_guaranteed_steps_is_detected() -> None:
    class Fading(Reserve):
        name = "fading"
        num_changes = 1  # claims that it never changes

        def blocks(self, request: Request, demand: Any, view: Any) -> int:
            return 100 if demand.others_run and view.now < 7.0 else 0

        def guaranteed_steps(self, num_steps: int) -> int:
            return num_steps

    scheduler = scheduler_with("fcfs", max_num_seqs=4, reserves=(Fading(),))
    assert scheduler.num_running == 1, "the others wait for blocks"
    assert scheduler.guaranteed_steps(4) == 4
    with pytest.raises(
        PolicyError, match="'fading': guaranteed_steps promised that request 'b' waits for 4 steps, and it may"
    ):
        scheduler.advance([6.0, 7.0, 8.0, 9.0, 10.0], [7])


def test_correct_guaranteed_steps_pass_the_check() -> None:
    for knobs in ({}, {"max_num_seqs": 4, "reserves": ("watermark:share=0.99",)}):
        scheduler = scheduler_with("fcfs", **knobs)
        assert scheduler.num_queued
        assert scheduler.guaranteed_steps(3) == 3
        scheduler.advance([6.0, 7.0, 8.0, 9.0], [7] * scheduler.num_running)
        scheduler.check_invariants()


# ---------------------------------------------------------------------- policies that fail repeatedly


class AlwaysOrder(FirstComeFirstServed):
    """Fails whenever a step calls it."""

    name = "always-order"

    def peek(self) -> Request:
        raise BOOM


class AlwaysVictim(Latest):
    name = "always-victim"

    def choose(self, view: Any, asking: int) -> int:
        raise BOOM


class AlwaysReserve(Reserve):
    name = "always-reserve"

    def blocks(self, request: Request, demand: Any, view: Any) -> int:
        raise BOOM


class AlwaysLimit(Limit):
    name = "always-limit"

    def check(self, request: Request, start: int, want: int, view: Any) -> int:
        raise BOOM

    def step_budget(self, most: int, view: Any) -> int:
        return most


class AlwaysEviction(LRU):
    name = "always-eviction"
    share = 0.5

    def retained(self, request: Request, num_blocks: int, now: float) -> tuple[int, float, int]:
        raise BOOM


ALWAYS = {
    "order": AlwaysOrder,
    "victim": AlwaysVictim,
    "reserves": AlwaysReserve,
    "token_limits": AlwaysLimit,
    "eviction": AlwaysEviction,
}


def schedule_on(host: Host) -> int:
    """Run to the end, as a host that repeats failed steps. Returns the number of failed steps."""
    failures = 0
    for _ in range(400):
        if not host.scheduler.has_unfinished_requests():
            return failures
        try:
            host.step()
        except PolicyError:
            failures += 1
            host.scheduler.check_invariants()
    raise AssertionError("it does not end")


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("kind", ALWAYS)
def test_a_policy_that_always_fails_is_replaced_by_the_default(
    kind: str, in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    tight = {"num_blocks": 6, "max_model_len": 20, "watermark": 0.0, "max_steps_in_flight": in_flight}
    host = host_with(kind, ALWAYS[kind](), **tight)
    requests = [host.add(name, 4 + index, max_tokens=8) for index, name in enumerate("abcdef")]
    assert schedule_on(host) == 3
    host.scheduler.check_invariants()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, request.max_tokens)
    stats = host.scheduler.stats()
    assert stats.num_replaced_policies == {kind.removeprefix("token_").removesuffix("s"): 1}
    assert stats.num_policy_failures == 3
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 3 and all("'always-" in line for line in told)
    assert [record.exc_info is not None for record in caplog.records] == [True, False, False]
    assert ["in its place from now on" in line for line in told] == [False, False, True]


def test_the_default_order_gets_the_whole_queue_of_a_replaced_order() -> None:
    class Reversed(FirstComeFirstServed):
        name = "reversed"
        fails = False

        def key(self, request: Request) -> tuple[Any, ...]:
            return (-request.arrival_time, request.sequence_number)

        def peek(self) -> Request:
            if self.fails:
                raise BOOM
            return super().peek()

    order = Reversed()
    host = host_with("order", order, max_num_seqs=1)
    for index in range(5):
        host.add(f"r{index}", 3, max_tokens=2)
    assert names(host.step().admitted) == ["r4"]
    order.fails = True
    host.abort("r1")
    finished: list[str] = []
    while host.scheduler.has_unfinished_requests():
        with contextlib.suppress(PolicyError):
            finished += names(host.step().admitted)
    assert finished == ["r0", "r2", "r3"]
    host.add("late", 3, max_tokens=2)
    host.run_to_end()


def test_a_preemptive_order_is_replaced_by_priority() -> None:
    class Mine(PriorityOrder):
        name = "mine"

        def peek(self) -> Request:
            raise BOOM

    host = host_with("order", Mine(), max_num_seqs=1)
    host.add("low", 3, max_tokens=8, priority=5)
    for _ in range(3):
        with pytest.raises(PolicyError):
            host.step()
    host.step()
    host.add("high", 3, max_tokens=2, priority=1)
    output = host.step()
    assert names(output.preempted) == ["low"] and names(output.admitted) == ["high"]
    host.run_to_end()


def test_with_an_order_that_always_fails_all_requests_run() -> None:
    def fail(*_: Any) -> Any:
        raise BOOM

    methods = ("push", "put_back", "pop", "peek", "remove", "position", "reason", "__len__", "__iter__")
    Deaf = type("Deaf", (FirstComeFirstServed,), {"name": "deaf", **dict.fromkeys(methods, fail)})
    host = host_with("order", Deaf())
    requests = [host.add(name, 3, max_tokens=4) for name in "abc"]
    host.abort("b")
    assert host.explain("c").position == 1
    assert 1 <= schedule_on(host) <= 3
    assert [request.is_finished for request in requests] == [True] * 3


def test_rare_failures_replace_no_policy() -> None:
    class Rare(FirstComeFirstServed):
        name = "rare"
        is_due = False

        def peek(self) -> Request:
            if self.is_due:
                self.is_due = False
                raise BOOM
            return super().peek()

    order = Rare()
    host = host_with("order", order, max_model_len=256, num_blocks=64)
    for number in range(6):
        host.add(f"r{number}", 3, max_tokens=101)
        order.is_due = True
        assert schedule_on(host) == 1
    assert host.scheduler.stats().num_replaced_policies == {}
    assert host.scheduler.stats().num_policy_failures == 6


def test_a_policy_that_fails_in_every_other_step_is_replaced() -> None:
    class Deaf(FirstComeFirstServed):
        name = "deaf"

        def on_step(self, step: Any) -> None:
            raise BOOM

    host = host_with("order", Deaf(), max_num_seqs=1)
    for name in "ab":
        host.add(name, 3, max_tokens=12)
    assert schedule_on(host) == 3
    assert host.scheduler.stats().num_replaced_policies == {"order": 1}


def test_max_policy_failures_sets_the_failures_before_a_replacement() -> None:
    host = host_with("order", AlwaysOrder(), max_policy_failures=7)
    host.add("a", 3, max_tokens=2)
    assert schedule_on(host) == 7
    with pytest.raises(ValueError, match="max_policy_failures"):
        Host(max_policy_failures=0)


def test_several_policies_that_always_fail_are_all_replaced() -> None:
    host = Host(
        order=AlwaysOrder(), victim=AlwaysVictim(), reserves=(AlwaysReserve(), AlwaysReserve()), num_blocks=6,
        max_model_len=20,
    )  # fmt: skip
    for name in "abcd":
        host.add(name, 4, max_tokens=8)
    assert schedule_on(host) <= 12
    assert host.scheduler.stats().num_replaced_policies == {"order": 1, "reserve": 2, "victim": 1}


def test_an_explanation_of_a_broken_order_fails_no_step() -> None:
    class Mute(FirstComeFirstServed):
        name = "mute"

        def position(self, request: Request) -> int:
            raise BOOM

        def reason(self, request: Request) -> str:
            raise BOOM

        def peek(self) -> Request:
            if self.is_observed:
                raise BOOM
            return super().peek()

        is_observed = False

    order = Mute()
    host = host_with("order", order, max_num_seqs=1)
    for name in "abc":
        host.add(name, 3, max_tokens=2)
    host.step()
    order.is_observed = True
    assert [host.explain(name).position for name in "bc"] == [0, 1]
    assert host.scheduler.stats().num_waiting == 2
    order.is_observed = False
    assert schedule_on(host) == 0


@pytest.mark.parametrize("kind", ALWAYS)
def test_a_run_with_a_replaced_policy_replays(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ALWAYS[kind]
    name_of_kind = kind.removeprefix("token_").removesuffix("s")
    monkeypatch.setitem(registry._BUILT_IN[name_of_kind], policy.name, policy)
    monkeypatch.setattr(policy, "version", 7)
    file = io.StringIO()
    value = (policy.name,) if kind in ("reserves", "token_limits") else policy.name
    host = Host(recorder=Recorder(file), num_blocks=6, max_model_len=20, watermark=0.0, **{kind: value})
    for index, name in enumerate("abcdef"):
        host.add(name, 4 + index, max_tokens=8)
    assert schedule_on(host) == 3
    lines = file.getvalue().splitlines()
    assert sum('"call":"schedule_failed"' in line for line in lines) == 3
    assert replay(lines).num_steps > 10
    for method in ("peek", "choose", "blocks", "check", "retained"):
        base = next(each for each in policy.__mro__[1:] if method in vars(each) or each is object)
        if method in vars(policy) and base is not object:
            monkeypatch.setattr(policy, method, vars(base)[method])
    with pytest.raises((ReplayDifference, RecordingError), match=r"error was .*boom.* and is now"):
        replay(lines)
