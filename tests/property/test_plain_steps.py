"""Plain steps, which are done in one go, leave what the parts of a step would: two schedulers with the same calls, of
which one knows no plain steps, give equal outputs, states and explanations over random workloads, configurations and
calls from outside; and planted faults are found."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointsman.core import Request, SchedulerOutput, StepResult
from pointsman.core.state.output import OutputFields
from pointsman.core.step.plain import PlainSteps
from tests.by_name import find
from tests.by_name import replace as replace_method
from tests.core.step.test_past_finishes import Pair
from tests.forms import short_or_long
from tests.property.test_openings import BASE, VARIANTS

FEW_BLOCKS = {"num_blocks": 40, "max_num_seqs": 30, "max_num_batched_tokens": 60, "enable_prefix_caching": False}
IN_FLIGHT: dict[str, dict[str, Any]] = {
    "two in flight": {"max_steps_in_flight": 2},
    "two in flight, few blocks": {"max_steps_in_flight": 2, "num_blocks": 60, "full_sequence_must_fit": False},
    "three in flight, few seats": {"max_steps_in_flight": 3, "max_num_seqs": 3},
    "few blocks and many seats": FEW_BLOCKS,
    "many rows": {"max_num_seqs": 70, "num_blocks": 900, "max_num_batched_tokens": 400},
}
MOST_STEPS = 5_000
Fault = Callable[[pytest.MonkeyPatch], None]


class Beside(Pair):
    """`stepping` knows no plain steps, `advancing` does."""

    def __init__(self, seed: int, **overrides: Any) -> None:
        super().__init__(seed, **overrides)
        self.stepping._parts = replace(self.stepping._parts, plain_steps=None)
        self.stepping._choose_parts()
        self.in_flight: deque[tuple[SchedulerOutput, SchedulerOutput]] = deque()

    def step(self) -> None:
        """The next step of both, and the end of the oldest one in flight, or of none."""
        if len(self.in_flight) < self.config.max_steps_in_flight:
            outputs = self.stepping.schedule(self.now), self.advancing.schedule(self.now)
            compare_outputs(*outputs)
            self.in_flight.append(outputs)
        if len(self.in_flight) == self.config.max_steps_in_flight or self.rng.random() < 0.5:
            self.end_oldest()
        self.now += 1

    def end_oldest(self) -> None:
        outputs = self.in_flight.popleft()
        tokens = [
            self.token(request, request.num_output_tokens + 1)
            for request, samples in zip(outputs[0].requests, outputs[0].samples, strict=True)
            if samples
        ]
        for scheduler, output in zip((self.stepping, self.advancing), outputs, strict=True):
            scheduler.update(output, StepResult(tokens), self.now + 1)

    def compare(self) -> None:
        if not self.in_flight:
            super().compare()
        one, other = self.stepping, self.advancing
        assert one.stats() == other.stats()
        for name in one._parts.table.requests:
            if one.get_request(name) is not None:
                assert one.explain(name) == other.explain(name)


def compare_outputs(one: SchedulerOutput, other: SchedulerOutput) -> None:
    """Every field is equal, with its type, and as read-only."""
    for field in fields(OutputFields):
        mine, others = getattr(one, field.name), getattr(other, field.name)
        assert type(mine) is type(others), field.name
        if isinstance(mine, np.ndarray):
            assert mine.dtype == others.dtype and np.array_equal(mine, others), field.name
            assert not others.flags.writeable or (mine.flags.writeable and not len(others)), field.name
        elif isinstance(mine, tuple) and mine and isinstance(mine[0], Request):
            assert [each.request_id for each in mine] == [each.request_id for each in others], field.name
        else:
            assert mine == others, field.name


def drive(seed: int, variant: dict[str, Any], num_rounds: int = 25) -> Beside:
    """A random run of both."""
    pair = Beside(seed, **{**BASE, **variant})
    rng = pair.rng
    for _ in range(num_rounds):
        for _ in range(int(rng.integers(4)) * (12 if pair.config.max_num_seqs > 64 else 1)):
            pair.add()
        for _ in range(int(rng.integers(1, 12))):
            pair.step()
        if rng.random() < 0.3:
            pair.disturb()
        pair.compare()
    pair.settle()
    for _ in range(MOST_STEPS):
        if not (pair.advancing.has_unfinished_requests() or pair.in_flight):
            break
        pair.step()
    assert not pair.advancing.has_unfinished_requests()
    pair.compare()
    return pair


@settings(max_examples=short_or_long(25, 300))
@given(seed=st.integers(0, 2**32 - 1), name=st.sampled_from(sorted(VARIANTS | IN_FLIGHT)))
def test_as_the_parts_of_a_step(seed: int, name: str) -> None:
    drive(seed, (VARIANTS | IN_FLIGHT)[name])


def count_plain(patch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step was plain, with a queue that waits."""
    found: list[bool] = []
    decide = PlainSteps.decide

    def counted(plain: PlainSteps, step: Any) -> bool:
        is_plain = decide(plain, step)
        if is_plain and len(plain._table.queue):
            found.append(True)
        return is_plain

    patch.setattr(PlainSteps, "decide", counted)
    return found


@pytest.mark.parametrize("variant", [FEW_BLOCKS, {"max_num_seqs": 3}], ids=["blocks", "seats"])
def test_steps_are_plain_while_the_queue_is_blocked(monkeypatch: pytest.MonkeyPatch, variant: dict[str, Any]) -> None:
    found = count_plain(monkeypatch)
    for seed in range(10):
        drive(seed, variant)
    assert len(found) > 20


@pytest.mark.parametrize(
    "variant",
    [{"batching": "static"}, {"num_draft_tokens": 2}, {"num_blocks": 60, "reserves": ("bypass:bound=3",)}],
    ids=["static", "drafts", "bypass"],
)
def test_no_plain_steps_where_a_step_has_further_parts(variant: dict[str, Any]) -> None:
    assert Beside(0, **variant).advancing._parts.plain_steps is None


def test_no_plain_steps_in_a_pause() -> None:
    pair = drive(2, {})
    for scheduler in (pair.stepping, pair.advancing):
        scheduler.add(Request("last", [1, 2], arrival_time=0.0, max_tokens=4), pair.now)
        output = scheduler.schedule(pair.now)
        scheduler.update(output, StepResult([7]), pair.now)
        scheduler.pause(pair.now)
        assert scheduler.schedule(pair.now).num_rows == 0


# ------------------------------------------------------------------ planted faults


def rows_run_ahead_of_their_last_token(patch: pytest.MonkeyPatch) -> None:
    init = find("PlainSteps.__init__")

    def without_look(plain: Any, *args: Any) -> None:
        init(plain, *args)
        plain._running = SimpleNamespace(may_run_ahead=True)

    replace_method(patch, "PlainSteps.__init__", without_look)


def blocks_to_be_taken_count_as_free(patch: pytest.MonkeyPatch) -> None:
    stays = find("Admission.stays_blocked")

    def with_taken(admission: Any, step: Any, num_tokens: int, num_free: int, num_taken: int = 0) -> bool:
        return bool(stays(admission, step, num_tokens, num_free + num_taken, num_taken))

    replace_method(patch, "Admission.stays_blocked", with_taken)


FAULTS: list[tuple[Fault, dict[str, Any]]] = [
    (rows_run_ahead_of_their_last_token, {"max_steps_in_flight": 2}),
    (blocks_to_be_taken_count_as_free, FEW_BLOCKS),
]


@pytest.mark.parametrize(("plant", "variant"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, plant: Fault, variant: dict[str, Any]) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(20):
            drive(seed, variant)
