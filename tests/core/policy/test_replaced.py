"""Policies of an installed package that cannot be constructed, or always fail: the default of their kind replaces
them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pointsman.core import ConfigError, PolicyError, Recorder, RecordingError, Request, Scheduler, replay
from pointsman.core.policy.fcfs import FirstComeFirstServed
from pointsman.core.policy.order import PriorityOrder
from pointsman.core.policy.registry import KINDS
from pointsman.core.policy.victim import Latest
from tests import faulty_policies
from tests.core.helpers import Host, reference_output
from tests.faulty_policies import CONSTRUCTOR, OPTIONS, WHERE, WORDS, check_log, formatted, knob

TIGHT = {"num_blocks": 6, "max_model_len": 20, "watermark": 0.0}
BY = {"order": "fcfs", "victim": "latest", "reserve": "", "limit": "", "eviction": "lru"}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path) -> Iterator[None]:
    with faulty_policies.installed(tmp_path / "packages"):
        yield


def run(host: Host, max_failures: int = 3) -> list[Request]:
    """Run requests that preempt each other to their end, and check their tokens."""
    requests = [host.add(name, 4 + index, max_tokens=8) for index, name in enumerate("abcdef")]
    failures = 0
    while host.scheduler.has_unfinished_requests():
        try:
            host.step()
        except PolicyError:
            failures += 1
            assert failures <= max_failures
            host.scheduler.check_invariants()
    for request in requests:
        assert request.output_token_ids.tolist() == reference_output(request.prompt_token_ids, request.max_tokens)
    return requests


@pytest.mark.parametrize(("kind", "at"), WHERE)
def test_replacing_a_failing_policy_does_not_change_output_tokens(
    kind: str, at: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = Host(**TIGHT, **knob(kind, at))
    run(host)
    assert sum(record.exc_info is not None for record in caplog.records) <= 1
    stats, replaced = host.scheduler.stats(), host.scheduler.replaced_policies
    failures = stats.policy_failures[kind][f"faulty-{kind}:at={at}"]
    at_start = at in (CONSTRUCTOR, "attach")
    assert bool(replaced) == (at_start or failures == 3)
    if replaced:
        check_log(formatted(caplog.records), kind, at_start=at_start)
        (one,) = replaced
        assert one[:3] == (kind, f"faulty-{kind}:at={at}", BY[kind])
        assert one.error.endswith(f" raised ZeroDivisionError: {WORDS}") and (at in one.error or at == "key")
        assert stats.num_replaced_policies == {kind: 1} and failures == (0 if at_start else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_explanation_names_the_replacement_and_the_error(kind: str) -> None:
    host = Host(**knob(kind, CONSTRUCTOR))
    host.add("a", 4, max_tokens=2)
    words = (
        f" {BY[kind] or f'no {kind}'} decides in the place of {kind} 'faulty-{kind}:at=constructor', which failed: its "
        f"constructor raised ZeroDivisionError: {WORDS}."
    )
    for _ in range(2):
        explanation = host.explain("a")
        assert explanation.sentence.endswith(words) and explanation.policy_words == words
        assert explanation.replaced_policies == host.scheduler.replaced_policies
        host.step()


def test_invalid_policy_parameters_are_an_error_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, **_: Any) -> None:
        raise ConfigError("at and after do not go together")

    monkeypatch.setattr(faulty_policies.Victim, "__init__", refuse)
    with pytest.raises(ConfigError, match="do not go together"):
        Host(victim="faulty-victim")
    with pytest.raises(ConfigError, match="no parameter 'since'"):
        Host(victim="faulty-victim:since=3")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_mended", [False, True])
def test_a_run_with_a_policy_replaced_at_the_start_replays(
    kind: str, is_mended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mended(self: Any, **_: Any) -> None:
        """A constructor that works now. The policy itself would raise when it is called."""
        super(faulty_policies.Sound, self).__init__()
        self._at, self._num_left = self.methods[0], 0

    file = io.StringIO()
    host = Host(recorder=Recorder(file), **TIGHT, **knob(kind, CONSTRUCTOR))
    run(host, max_failures=0)
    lines = file.getvalue().splitlines()
    if is_mended:
        monkeypatch.setattr(faulty_policies.Sound, "__init__", mended)
        assert Host(**knob(kind, CONSTRUCTOR)).scheduler.replaced_policies == (), "it can be constructed now"
    assert replay(lines).num_steps > 10


def test_a_replay_needs_every_policy_that_decided() -> None:
    file = io.StringIO()
    run(Host(recorder=Recorder(file), **TIGHT, **knob("victim", "nothing")))
    text = file.getvalue().replace("faulty-victim:at=nothing", "faulty-victim:at=constructor")
    with pytest.raises(RecordingError, match="victim policy 'faulty-victim:at=constructor' of the recording cannot"):
        replay(text.splitlines())


@pytest.mark.parametrize("at", [CONSTRUCTOR, "choose"])
def test_a_recording_started_after_a_replacement_keeps_the_default(at: str, caplog: pytest.LogCaptureFixture) -> None:
    host = Host(**TIGHT, **knob("victim", at))
    run(host)
    before, num_lines = host.scheduler.replaced_policies, len(caplog.records)
    host.step()
    file = io.StringIO()
    host.scheduler.start_recording(Recorder(file))
    assert host.scheduler.replaced_policies == before
    run(host, max_failures=0)
    assert len(caplog.records) == num_lines, "nothing new is logged"
    lines = file.getvalue().splitlines()
    assert json.loads(lines[0])["start"]["replaced"] == [list(before[0])]
    assert replay(lines).num_steps > 10


def test_the_default_of_a_preemptive_order_is_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faulty_policies.Order, "is_preemptive", True)
    host = Host(max_num_seqs=1, **knob("order", CONSTRUCTOR))
    host.add("low", 3, max_tokens=8, priority=5)
    host.step()
    host.add("high", 3, max_tokens=2, priority=1)
    assert [request.request_id for request in host.step().preempted] == ["low"]
    assert isinstance(host.scheduler._parts.policies[0].policy, PriorityOrder)


def test_the_default_victim_depends_on_the_order() -> None:
    host = Host(order="priority", **knob("victim", CONSTRUCTOR))
    assert [each.by for each in host.scheduler.replaced_policies] == ["lowest-priority"]


@pytest.mark.parametrize(
    ("kind", "at"),
    [("order", "peek"), ("order", "guaranteed_steps"), ("limit", "guaranteed_steps"), ("reserve", "blocks")],
)
def test_guaranteed_steps_of_a_failing_policy_never_raises(kind: str, at: str) -> None:
    """The following step can fail, and the recording has its failure."""
    host = Host(max_num_seqs=1, **knob(kind, at, after=2))
    for name in "ab":
        host.add(name, 3, max_tokens=9)
    failures = 0
    while host.scheduler.has_unfinished_requests():
        assert 0 <= host.scheduler.guaranteed_steps(4) <= 4
        try:
            host.step()
        except PolicyError:
            failures += 1
    assert host.scheduler.stats().num_policy_failures == failures <= 3


def test_an_unhashable_result_of_a_policy_fails_the_step() -> None:
    class Lists(FirstComeFirstServed):
        name = "lists"

        def peek(self) -> Any:
            return [super().peek()]

    host = Host(order=Lists())
    host.add("a", 3, max_tokens=2)
    with pytest.raises(PolicyError, match=r"peek\(\) returned \[.*\], which is not in the queue"):
        host.step()
    assert host.scheduler.guaranteed_steps(3) == 0


def test_an_object_with_an_invalid_attribute_is_replaced_at_the_start() -> None:
    class Odd(Latest):
        name = "odd"

        def attach(self, view: Any) -> None:
            raise KeyError("view")

    host = Host(victim=Odd(), **TIGHT)
    assert [each[1:3] for each in host.scheduler.replaced_policies] == [("odd", "latest")]
    run(host, max_failures=0)


def test_schedule_again_repeats_a_step_after_a_policy_failure() -> None:
    host = Host(**TIGHT, **knob("order", "peek"))
    host.add("a", 3, max_tokens=2)
    scheduler: Scheduler = host.scheduler
    assert [request.request_id for request in scheduler.schedule_again(1.0).admitted] == ["a"]
    assert scheduler.stats().policy_failures == {"order": {"faulty-order:at=peek": 3}}


def test_each_policy_kind_has_a_config_field() -> None:
    assert set(OPTIONS) == set(KINDS)
